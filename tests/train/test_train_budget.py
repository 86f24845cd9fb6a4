"""Sizes for a training time: what grows with it, what the text bounds, and a run that is resumed as it began."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plume.config import PretrainConfig, UserError, build, read_recipe
from plume.config.recipes import RECIPES
from plume.model.heads import Model
from plume.train import budget
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

    def seconds(model, batch, config):  # type: ignore[no-untyped-def]
        return batch * model.context * training_flops_per_token(model) / 1e11

    monkeypatch.setattr(budget, "step_seconds", seconds)
    monkeypatch.setattr(budget, "text_bytes", lambda data: 80_000_000)
    monkeypatch.setattr(budget, "wide_letters", lambda data: 0)


def recipe(name: str, **given: object) -> PretrainConfig:
    return replace(build(PretrainConfig, read_recipe(RECIPES / f"{name}.toml")), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIZED)
def test_more_time_trains_a_larger_model_that_reads_enough(name: str, speed: None) -> None:
    blocks = []
    for minutes in (0.5, 2.0, 20.0, 150.0):
        chosen, said = budget.sized(recipe(name, minutes=minutes))
        model, train = chosen.model, chosen.train
        weights = 12 * model.layers * model.width**2
        assert weights == sum(p.numel() for n, p in Model(model).named_parameters() if ".blocks." in n and p.ndim == 2)
        assert chosen.minutes is None and f"{train.steps:,} steps" in said
        assert train.steps * train.batch * model.context >= budget.TOKENS_PER_WEIGHT * weights * 0.95 or not blocks
        spent = train.steps * budget.step_seconds(model, train.batch, chosen) / 60  # type: ignore[no-untyped-call]
        assert spent == pytest.approx(minutes, rel=0.3 if minutes < 1 else 0.02)
        assert chosen.data.tokenizer.vocab_size == model.vocab_size and train.optimizer == "muon"
        blocks.append(weights)
    assert blocks == sorted(blocks) and len(set(blocks)) >= 3


def test_a_small_text_bounds_vocabulary_and_passes(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "step_seconds", lambda model, batch, config: 1e-3)
    config = recipe("auto", minutes=20.0)
    chosen, _ = budget.sized(replace(config, data=replace(config.data, paths=(str(text),))))
    read = chosen.train.steps * chosen.train.batch * chosen.model.context
    assert chosen.model.vocab_size == 768 == text.stat().st_size // 600 // 256 * 256
    assert chosen.objective.sampled_softmax is not None  # or a large vocabulary would cost time
    assert read == pytest.approx(budget.PASSES * text.stat().st_size / budget.BYTES_PER_TOKEN, rel=0.05)


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
    assert kept.minutes is None and kept.train.steps == result.outcome.step
    again, _ = budget.sized(replace(config, resume=True, minutes=5.0))
    assert replace(again, resume=False) == kept


def test_a_hub_dataset_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "step_seconds", lambda model, batch, config: 1e-3)
    monkeypatch.setattr(budget, "wide_letters", lambda data: 0)
    config = recipe("auto", minutes=20.0)
    hub, _ = budget.sized(replace(config, data=replace(config.data, paths=("hub:some/set",))))
    assert hub.train.steps == 20 * 60 * 1000 and hub.model.vocab_size > 512


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
