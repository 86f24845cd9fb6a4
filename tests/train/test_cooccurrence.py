"""First token embeddings from counts of neighbours: the counts, the factors, and what training gains by them."""

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES

from plume.config import PRESETS, DataConfig, ObjectiveConfig, PretrainConfig, TokenizerConfig, TrainConfig, UserError
from plume.data import open_shards, prepare
from plume.model.heads import Model
from plume.train import cooccurrence
from plume.train.cooccurrence import CountedEmbeddings, associations, embeddings, singular
from plume.train.first_weights import deferred
from plume.train.pretrain import pretrain


def chain() -> str:
    """Words whose letters tell much of the next one."""
    draw, at, letters = random.Random(0), 0, list[str]()
    for number in range(16_000):
        at = draw.choice([(5 * at + 1) % 26, (7 * at + 3) % 26, draw.randrange(26)])
        letters.append(" " if number % 6 == 5 else chr(97 + at))
    return "".join(letters)


def settings(folder: Path, **fields: Any) -> PretrainConfig:
    if folder.is_dir():
        (folder / "text.txt").write_text(chain())
    data = DataConfig(
        paths=(str(folder / "text.txt"),),
        folder=folder / "data",
        tokenizer=TokenizerConfig(kind="characters"),
        validation_fraction=0.1,
    )
    train = TrainConfig(steps=12, batch=8, lr=3e-3, device="cpu")
    return replace(PretrainConfig(folder=folder / "run", model=FAMILIES["gpt2"], train=train, data=data), **fields)


PAIRS = {"model": PRESETS["transformer-laptop"], "objective": ObjectiveConfig(kind="sequence-to-sequence")}


def test_associations_are_positive_pointwise_mutual_information() -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 400)
    pairs = Counter[tuple[int, int]]()
    for distance, weight in cooccurrence.WEIGHTS.items():
        for a, b in zip(tokens[:-distance].tolist(), tokens[distance:].tolist(), strict=True):
            pairs[a, b] += weight  # type: ignore[assignment]
    total = sum(pairs.values())
    first, then = Counter[int](), Counter[int]()
    for (a, b), count in pairs.items():
        first[a] += count
        then[b] += count
    expected = torch.zeros(9, 9)
    for (a, b), count in pairs.items():
        expected[a, b] = max(0.0, math.log(count * total / (first[a] * then[b])))
    torch.testing.assert_close(associations([tokens], 9).to_dense(), expected)


def test_factors_are_those_of_a_dense_decomposition() -> None:
    tokens = np.random.default_rng(1).integers(0, 60, 3000) ** 2 // 60
    matrix = associations([tokens], 60)
    left, values, right = singular(matrix, 12)
    exact = torch.linalg.svdvals(matrix.to_dense())
    torch.testing.assert_close(values[:6], exact[:6], rtol=2e-2, atol=0)
    best = (left * values) @ right.T - matrix.to_dense()
    assert float(best.square().sum()) < 1.05 * float(exact[12:].square().sum())


def test_more_columns_than_there_are_directions() -> None:
    tables = embeddings([np.array([0, 1, 2, 0, 1, 2, 1])], 3, 8)
    assert all(table.shape == (3, 8) and bool(table.isfinite().all()) for table in (tables.both, *tables.apart))


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_that_draw_their_part_begin_as_one_process(tied: bool, tmp_path: Path) -> None:
    config = settings(tmp_path)
    shards = open_shards(prepare(config.data).folder)
    made = replace(config.model, vocab_size=shards.manifest.vocab_size, tie_embeddings=tied)
    torch.manual_seed(0)
    whole = Model(made)
    CountedEmbeddings(None, shards).fill(whole, whole, torch.device("cpu"))
    model, drawn = deferred(lambda: Model(made), 0)
    CountedEmbeddings(drawn, shards).fill(model, model, torch.device("cpu"))
    for (name, expected), found in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, found), name
    tables = embeddings(cooccurrence.counted_tokens(shards), made.vocab_size, made.width)
    first = tables.both if tied else tables.apart[0]
    assert torch.equal(whole.body.embed.tokens.weight[: len(first)], first)  # type: ignore[union-attr]
    assert (whole.table is whole.body.embed.tokens.weight) == tied  # type: ignore[union-attr]


def test_a_model_begins_with_what_pairs_tell(tmp_path: Path) -> None:
    losses = []
    for kind in ("random", "cooccurrence"):
        model = replace(FAMILIES["gpt2"], tie_embeddings=False)
        (tmp_path / kind).mkdir()
        config = settings(tmp_path / kind, model=model, embedding_init=kind)
        outcome = pretrain(config).outcome
        assert outcome.validation is not None
        losses.append(outcome.validation)
    assert losses[1] < losses[0] - 0.05, losses


def test_a_masked_model_too(tmp_path: Path) -> None:
    text = settings(tmp_path)
    data = replace(text.data, tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=60))
    masked = replace(
        text, model=FAMILIES["bert"], objective=ObjectiveConfig(kind="masked"), data=data, embedding_init="cooccurrence"
    )
    assert pretrain(masked).outcome.finished


def test_what_has_its_own_weights_is_refused() -> None:
    for fields in ({"init_from": "plume-en"}, PAIRS):
        with pytest.raises(UserError, match="embedding_init=cooccurrence is for a fresh model"):
            settings(Path("/nowhere"), embedding_init="cooccurrence", **fields)


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    config = settings(tmp_path, embedding_init="cooccurrence")
    first, second = (replace(config, folder=tmp_path / name) for name in ("a", "b"))
    pretrain(first)
    pretrain(replace(second, train=replace(second.train, steps=6, decay_steps=12)))
    pretrain(replace(second, resume=True))
    a, b = ((folder / "model" / "model.safetensors").read_bytes() for folder in (tmp_path / "a", tmp_path / "b"))
    assert a == b
