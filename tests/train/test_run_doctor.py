"""`plume doctor RUN`: broken runs get their cause named, healthy ones no alarm."""

import hashlib
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from plume.config import PRESETS, DataConfig, PretrainConfig, TokenizerConfig, TrainConfig, UserError, build
from plume.data import prepare
from plume.data.shards import chunk_sums, read_manifest, write_manifest
from plume.train import run_doctor
from plume.train.loop import Outcome
from plume.train.optim import rate
from plume.train.pretrain import RunResult, plain, pretrain
from plume.train.run_doctor import batch_faults, examine_run
from plume.util.run_folder import write_recipe

WORDS = """robot house river garden letter teacher window market doctor forest engine picture
sees finds paints leaves builds opens follows remembers
old green quiet large broken little bright"""
NOUNS, VERBS, ADJECTIVES = (line.split() for line in WORDS.splitlines())
TRAIN = TrainConfig(steps=60, batch=8, lr=3e-3, warmup_steps=5, log_every=5, precision="float32", device="cpu")


def sentences(count: int, seed: int) -> list[str]:
    """Sentences with an order to be learned, no two stretches alike."""
    dice = random.Random(seed)
    phrase = lambda: f"the {dice.choice(ADJECTIVES)} {dice.choice(NOUNS)}"  # noqa: E731
    return [f"{phrase()} {dice.choice(VERBS)} {phrase()} and {dice.choice(VERBS)} {phrase()}." for _ in range(count)]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A finished run on some text."""

    def make(text: str, *, kind: str = "byte-bpe", before=None, **changes) -> PretrainConfig:
        place = tmp_path_factory.mktemp("run")
        (place / "text.txt").write_text(text)
        data = DataConfig(
            paths=(str(place / "text.txt"),),
            folder=place / "data",
            tokenizer=TokenizerConfig(kind=kind, vocab_size=400),
        )
        prepare(data)
        if before is not None:
            before(data.folder)
        model = replace(PRESETS["gpt2-char"], layers=2, heads=2, width=32, context=32, dropout=0.0)
        config = PretrainConfig(
            folder=place / "run", data=data, prepared=data.folder, model=model, train=replace(TRAIN, **changes)
        )
        pretrain(config)
        return config

    return make


TEXT = "\n\n".join(" ".join(sentences(12, seed)) for seed in range(300))
SMALL = "\n\n".join(" ".join(sentences(12, seed)) for seed in range(6))


def rewrite(change):
    """Tokens of the training shards changed, and their hashes with them, as a foreign tool would write them."""

    def before(folder):
        manifest, shards = read_manifest(folder), []
        for shard in manifest.train:
            tokens, starts, sums = (folder / f"{shard.name}.{kind}" for kind in ("tokens", "starts", "sums"))
            change(np.fromfile(tokens, manifest.dtype)).astype(manifest.dtype).tofile(tokens)
            sums.write_bytes(np.concatenate([chunk_sums(tokens), chunk_sums(starts)]).tobytes())
            shards.append(replace(shard, hash=hashlib.sha256(sums.read_bytes()).hexdigest()))
        write_manifest(folder, replace(manifest, train=tuple(shards)))

    return before


def causes(config: PretrainConfig, **options) -> list[str]:
    return [fault.cause for fault in examine_run(config.folder, **options).faults]


def test_it_reads_run_folders_alone(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        examine_run(tmp_path)


def test_an_interrupt_ends_all_short_trainings(tmp_path, monkeypatch):
    stopped = Outcome(1, False, 2.0, None, {}, None, 1, 1.0)
    monkeypatch.setattr(run_doctor, "pretrain", lambda config: RunResult(config.folder, stopped, 1.0, 1.0))
    config = PretrainConfig(folder=tmp_path, model=PRESETS["gpt2-char"], train=TRAIN)
    with pytest.raises(KeyboardInterrupt):
        run_doctor.probe_loss(config, tmp_path, 1.0, 20)


def test_a_run_that_stopped_before_its_first_log_line_shows_no_loss(tmp_path):
    stopped = RunResult(tmp_path, Outcome(4, False, math.nan, None, {}, None, 8192, 18.0), 6.0, 4.8)
    assert "0:18: loss not logged yet (token frequencies alone 4.8000" in stopped.summary()


def test_data_that_is_gone_is_named(tmp_path):
    config = PretrainConfig(folder=tmp_path, model=PRESETS["gpt2-char"], train=TRAIN, prepared=tmp_path / "gone")
    write_recipe(tmp_path, plain(config))
    with pytest.raises(UserError, match=r"gone holds no prepared data \(data.json is missing\)"):
        examine_run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_healthy_run_gets_no_alarm(make, seed):
    kinds = ("byte-bpe", "characters", "bytes")
    optimizer = {"optimizer": "muon", "lr": 6e-3, "muon_lr": 0.03} if seed % 2 else {"lr": 1e-2}
    config = make(TEXT, kind=kinds[seed % 3], seed=seed, batch=(8, 16)[seed // 5], **optimizer)
    found = examine_run(config.folder)
    assert found.faults == [], found.probes


@pytest.mark.slow
def test_a_rate_too_high_is_named(make):
    assert causes(make(TEXT, lr=0.5, grad_clip=float("inf"))) == ["rate too high"]


@pytest.mark.slow
def test_a_rate_too_low_is_named(make):
    assert causes(make(TEXT, lr=2e-5)) == ["rate too low"]


def test_repeated_data_is_named(make):
    assert "data repeated" in causes(make("\n\n".join([SMALL] * 40)), probe=False)


@pytest.mark.slow
def test_too_little_data_is_named(make):
    assert "too little data" in causes(make(SMALL, steps=300), probe=False)


@pytest.mark.slow
def test_a_batch_changed_without_the_rate_is_named(make):
    config = make(TEXT)
    longer = replace(config.train, steps=120, batch=32)
    pretrain(replace(config, train=longer, resume=True, allow_changes=True))
    assert causes(config, probe=False) == ["batch changed without the rate"]
    scaled = make(TEXT)
    longer = replace(scaled.train, steps=120, batch=32, lr=2 * scaled.train.lr)
    pretrain(replace(scaled, train=longer, resume=True, allow_changes=True))
    assert causes(scaled, probe=False) == []


def test_targets_that_do_not_follow_are_named(make):
    shuffled = rewrite(lambda ids: np.random.default_rng(0).permutation(ids))
    assert causes(make(TEXT, kind="characters", before=shuffled), probe=False) == ["targets do not follow from inputs"]


def test_a_tokenizer_that_does_not_fit_is_named(make):
    other = rewrite(
        lambda ids: np.random.default_rng(0).permutation(ids.max() + 1)[ids]
    )  # the same vocabulary in another order
    assert "tokenizer mismatched" in causes(make(TEXT, before=other), probe=False)


def test_steps_at_a_rate_of_zero_say_nothing_of_the_batch():
    train = {"steps": 30, "decay_steps": 10, "final_lr_ratio": 0.0, "schedule": "linear"}
    config = build(PretrainConfig, {"folder": "run", "model": "gpt2-laptop", "train": train})
    rows = [{"step": n, "lr": config.train.lr * rate(n - 1, config.train), "tokens": 100 * n} for n in range(1, 31)]
    assert list(batch_faults(rows, config)) == []
