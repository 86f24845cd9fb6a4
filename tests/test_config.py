"""Configuration: presets, recipes, overrides, and messages that help."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from plume.config import (
    PRESETS,
    ModelConfig,
    PlanConfig,
    UserError,
    build,
    describe,
    parse_overrides,
    preset,
    read_recipe,
    with_overrides,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    lr: float = 1e-3  # how far a step goes
    names: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    model: ModelConfig
    train: Inner = Inner()
    steps: int = 10


def test_a_recipe_with_overrides(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text('steps = 5\n[model]\npreset = "gpt2"\nlayers = 4\n[train]\nlr = 1e-4\n')
    words = ["--train.lr", "3e-4", "--model.width=96", "--train.names", '["a", "b"]', "--train.folder", "some/where"]
    config = build(Outer, with_overrides(read_recipe(recipe), parse_overrides(words)))
    assert (config.steps, config.train.lr, config.train.names) == (5, 3e-4, ("a", "b"))
    assert config.train.folder == Path("some/where")
    assert (config.model.layers, config.model.width, config.model.vocab_size) == (4, 96, 50_257)


def test_all_problems_come_together_with_the_nearest_names():
    table = {"model": {"preset": "gpt2", "layrs": 3, "norm": "both"}, "trian": {}, "lr": 3, "steps": "many"}
    with pytest.raises(UserError) as caught:
        build(Outer, table, origin="my.toml")
    message = str(caught.value)
    assert message.startswith("my.toml:")
    for part in (
        "there is no model.layrs; did you mean model.layers?",
        "model.norm: input should be 'pre' or 'post', not 'both'",
        "there is no trian; did you mean train?",
        "there is no lr; did you mean train.lr?",
        "steps: input should be a valid integer",
    ):
        assert part in message


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="there is no preset 'gpt2-mediun'; did you mean 'gpt2-medium'"):
        preset("gpt2-mediun")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 7}, "heads=7 does not divide width=768; heads=6 would"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"dropout": 1.0}, r"dropout=1\.0 must be at least 0 and below 1, for example 0\.1"),
        ({"hidden": 0}, "hidden=0 must be at least 1, or unset for 3072"),
    ],
)
def test_impossible_models_are_refused_with_a_value_that_works(change, message):
    with pytest.raises(UserError, match=message):
        build(ModelConfig, {"preset": "gpt2", **change})


def test_a_missing_or_broken_recipe(tmp_path):
    with pytest.raises(UserError, match="there is no recipe"):
        read_recipe(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(UserError, match=r"broken\.toml is not TOML"):
        read_recipe(broken)


def test_words_that_are_no_options_are_refused():
    with pytest.raises(UserError, match="'lr' stands alone"):
        parse_overrides(["lr", "3"])
    words = ["--a.b", "-3", "--flag", "--c=d=e", "--many", "x", "y"]
    assert parse_overrides(words) == {"a.b": "-3", "flag": "true", "c": "d=e", "many": ["x", "y"]}


def test_one_word_for_a_list_is_a_list_of_one():
    table = {"model": {"preset": "gpt2"}}
    assert build(Outer, with_overrides(table, {"train.names": "a"})).train.names == ("a",)
    assert build(Outer, with_overrides(table, {"train.names": ["a", "b"]})).train.names == ("a", "b")


def test_words_stay_words_where_a_text_is_wanted():
    """Numbers and dates are what their field makes of them."""
    from plume.config import TaskConfig

    words = {"labels": ["0", "1"], "train": "2024-01-01"}
    found = build(TaskConfig, with_overrides({}, words))
    assert found.labels == ("0", "1") and str(found.train) == "2024-01-01"


def test_none_takes_a_default_away():
    """Neither TOML nor the command line has a word of its own for it."""
    from plume.config import SamplingConfig

    assert build(SamplingConfig, with_overrides({}, {"top_k": "none", "max-new-tokens": "none"})) == SamplingConfig(
        top_k=None, max_new_tokens=None
    )
    with pytest.raises(UserError, match=r"temperature: .*not 'none'"):
        build(SamplingConfig, {"temperature": "none"})


def test_help_shows_the_comments_behind_the_fields():
    rows = {name: (default, comment) for name, _, default, comment in describe(Outer)}
    assert rows["train.lr"] == ("0.001", "how far a step goes")
    assert rows["model.context"][1] == "longest sequence the position table covers"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_by_name(name):
    assert build(PlanConfig, {"model": {"preset": name}}).model == PRESETS[name]
