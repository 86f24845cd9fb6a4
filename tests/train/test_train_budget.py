"""Sizes for a training time: what grows with it, what the text bounds, and a run that is resumed as it began."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.size_law import fit, known
from plume.config import PretrainConfig, UserError, build, read_recipe
from plume.config.recipes import RECIPES
from plume.data import prepare
from plume.model.heads import Model
from plume.train import budget, size_law
from plume.train.held_out import held_out_bits
from plume.train.optim import short_rows
from plume.train.pretrain import pretrain
from plume.util.devices import training_flops_per_token

SIZED = ("auto", "english-20", "english-night", "chinese-20", "bert-20", "bert-night")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(
        "".join(f"The robot number {i} is {i % 7} years old because it was made so.\n" for i in range(9000))
    )
    return file


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 100 GFLOP/s, whatever the size."""

    def speed(model, config):  # type: ignore[no-untyped-def]
        return training_flops_per_token(model) / 1e11, 0.0

    monkeypatch.setattr(budget, "speed", speed)
    monkeypatch.setattr(budget, "text_bytes", lambda data: 80_000_000)
    monkeypatch.setattr(budget, "wide_letters", lambda data: 0)


def recipe(name: str, **given: object) -> PretrainConfig:
    return replace(build(PretrainConfig, read_recipe(RECIPES / f"{name}.toml")), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIZED)
def test_more_time_trains_a_larger_model_that_reads_enough(name: str, speed: None) -> None:
    blocks = []
    for minutes in (0.5, 2.0, 20.0, 150.0):
        chosen, said, _ = budget.sized(recipe(name, minutes=minutes))
        model, train = chosen.model, chosen.train
        weights = 12 * model.layers * model.width**2
        assert weights == sum(p.numel() for n, p in Model(model).named_parameters() if ".blocks." in n and p.ndim == 2)
        assert chosen.minutes is None and f"{train.steps:,} steps" in said
        per_token, _ = budget.speed(model, chosen)  # type: ignore[no-untyped-call]
        spent = tokens_read(chosen) * per_token * budget.OVERHEAD / 60
        assert spent == pytest.approx(minutes, rel=0.3 if minutes < 1 else 0.02)
        assert chosen.data.tokenizer.vocab_size == model.vocab_size and train.optimizer == "muon"
        blocks.append(weights)
    assert blocks == sorted(blocks) and len(set(blocks)) >= 3


def tokens_read(config: PretrainConfig) -> float:
    return config.train.steps * config.train.batch * budget.mean_length(config.objective, config.model.context)


def test_long_runs_read_short_sequences_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "speed", lambda model, config: (1e-5, 0.0))
    monkeypatch.setattr(budget, "text_bytes", lambda data: 10**9)
    short, long = (budget.sized(recipe("auto", minutes=minutes)).config for minutes in (1.0, 60.0))
    assert short.model.context == 64 and short.objective.short_lengths == ()
    assert long.model.context == 256 and long.objective.short_lengths == (64, 128)
    assert tokens_read(long) == pytest.approx(3600 / 1e-5 / budget.OVERHEAD, rel=0.01)
    lengths = [n for rows, n in short_rows(long.objective, long.train) for _ in range(rows)]
    rest = long.train.steps * long.train.batch - len(lengths)
    assert sum(lengths) + 256 * rest == pytest.approx(tokens_read(long), rel=0.01)
    given = replace(long.objective, short_lengths=(32,), short_fraction=0.5)
    chosen = budget.sized(replace(recipe("auto", minutes=60.0), objective=given)).config
    assert chosen.objective.short_lengths == (32,) and chosen.objective.short_fraction == 0.5


def test_a_small_text_bounds_vocabulary_and_passes(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "speed", lambda model, config: (1e-6, 0.0))
    config = recipe("auto", minutes=20.0)
    chosen = budget.sized(replace(config, data=replace(config.data, paths=(str(text),)))).config
    read = tokens_read(chosen)
    assert chosen.model.vocab_size == 768 == text.stat().st_size // 600 // 256 * 256
    assert chosen.objective.sampled_softmax is not None  # or a large vocabulary would cost time
    assert read == pytest.approx(budget.PASSES * text.stat().st_size / budget.BYTES_PER_TOKEN, rel=0.05)


def test_the_fewest_steps_over_a_small_text_fit_into_the_time(speed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "text_bytes", lambda data: 2000)
    chosen, said, _ = budget.sized(recipe("auto", minutes=0.2))
    per_token, _ = budget.speed(chosen.model, chosen)  # type: ignore[no-untyped-call]
    assert tokens_read(chosen) * per_token * budget.OVERHEAD <= 12.0 and chosen.train.steps == 20
    assert "expected bits" not in said  # the law was fitted to runs of more tokens


def test_what_a_recipe_says_of_the_softmax_holds(speed: None) -> None:
    config = recipe("auto", minutes=2.0)
    given = replace(config, objective=replace(config.objective, sampled_softmax=7))
    assert budget.sized(given)[0].objective.sampled_softmax == 7
    smoothed = replace(config, train=replace(config.train, label_smoothing=0.1))
    assert budget.sized(smoothed)[0].objective.sampled_softmax is None
    assert budget.sized(recipe("bert-20"))[0].objective.sampled_softmax is None


def test_a_run_for_a_time_is_kept_as_it_was_sized_and_resumed_so(text: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = recipe("auto", minutes=0.01, folder=tmp_path / "run")
    config = replace(config, data=replace(config.data, paths=(str(text),), folder=tmp_path / "data"))
    result = pretrain(config)
    assert result.outcome.finished
    kept = build(PretrainConfig, read_recipe(tmp_path / "run" / "recipe.toml"))
    assert kept.model.width == 64  # the smallest, when not even that has the time for 20 steps
    assert kept.minutes is None and kept.train.steps == result.outcome.step
    again = budget.sized(replace(config, resume=True, minutes=5.0)).config
    assert replace(again, resume=False) == kept


def test_a_hub_dataset_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "speed", lambda model, config: (1e-6, 0.0))
    monkeypatch.setattr(budget, "wide_letters", lambda data: 0)
    config = recipe("auto", minutes=20.0)
    hub = budget.sized(replace(config, data=replace(config.data, paths=("hub:some/set",)))).config
    read = tokens_read(hub)
    assert read == pytest.approx(20 * 60 * 1e6 / budget.OVERHEAD, rel=0.01) and hub.model.vocab_size > 512


def test_the_law_is_the_fit_of_the_runs_that_are_kept() -> None:
    law, others, furthest = fit(known())
    assert law == pytest.approx(size_law.LAW, rel=1e-3)
    assert others["python"] == pytest.approx(size_law.CODE, abs=1e-3)
    assert others["chinese"] == pytest.approx(1.0, abs=0.01) and furthest <= size_law.SPREAD
    within = [row for row in known() if size_law.fitted(12 * row["layers"] * row["width"] ** 2, row["millions"] * 1e6)]
    assert len(within) == len(known()) >= 30


def test_a_sized_run_ends_with_what_came_and_what_was_expected(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "TOKENS", (1.0, 8e6))  # a run of seconds reads fewer than the law was fitted to
    config = recipe("auto", folder=tmp_path / "run", minutes=0.02)
    pretrain(replace(config, data=replace(config.data, paths=(str(text),), folder=tmp_path / "data")))
    printed = "".join(capfd.readouterr())
    assert re.search(r"expected bits per byte: 0\.\d\d of a bigram model's|[1-9]\.\d\d of a bigram", printed), printed
    said = re.search(
        r"held-out text: ([\d.]+) bits per byte, a bigram model ([\d.]+); expected .*: ([\d.]+) to", printed
    )
    assert said is not None, printed
    bits = held_out_bits(tmp_path / "run" / "model", tmp_path / "data", compressor=False)
    assert [f"{bits[name]:.2f}" for name in ("this model", "bigram")] == [said[1], said[2]]


def test_bits_per_byte_are_expected_of_texts_alone(text: Path, tmp_path: Path, speed: None) -> None:
    code = recipe("auto")
    prose = replace(code, data=replace(code.data, paths=(str(text),), folder=tmp_path / "prose"))
    pairs = replace(prose, data=replace(prose.data, targets=(str(text),), folder=tmp_path / "pairs"))
    for given, factor in ((code, size_law.CODE), (prose, 1.0)):
        plain = budget.sized(replace(given, data=replace(given.data, paths=("anything",)))).ratio
        found = budget.sized(given).ratio
        assert plain is not None and found == pytest.approx(factor * plain)
    assert budget.sized(pairs).ratio is None and "expected" not in budget.sized(pairs).said
    for given, law in ((prose, True), (pairs, False)):
        small = replace(given.data, tokenizer=replace(given.data.tokenizer, vocab_size=300))
        chosen = budget.sized(replace(code, prepared=prepare(small).folder))
        assert (chosen.ratio is not None) is law
        if law:
            other = budget.sized(replace(prose, prepared=small.folder))  # its own paths are ignored
            assert chosen.ratio == other.ratio


def test_what_cannot_be_sized_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere holds no prepared data \(data.json is missing\)"):
        budget.sized(recipe("auto", prepared=tmp_path / "nowhere"))
    with pytest.raises(UserError, match="one stack"):
        recipe("transformer-laptop", minutes=2.0)
    with pytest.raises(UserError, match="minutes=-1"):
        recipe("auto", minutes=-1.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process"):
        budget.sized(recipe("auto"))


@pytest.mark.parametrize(
    ("unique", "small", "large"),
    [(2.19e6, 9.05e6, 3.80e6), (0.85e6, 5.75e6, 3.10e6)],
    ids=["Python: 1.53 and 1.43 bits per byte", "English: 1.70 and 1.68"],
)
def test_reading_a_text_again_and_again_is_worth_less_than_a_larger_model(unique, small, large):
    """Runs of two minutes: tokens that 3x96 and 4x128 read of the same text; the larger one was better in both."""
    read = [size_law.new_tokens(tokens, unique) for tokens in (small, large)]
    assert size_law.LAW.ratio(786_432, read[1]) < size_law.LAW.ratio(331_776, read[0])
