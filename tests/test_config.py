"""Configuration: presets, recipes, overrides, and messages that help."""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from plume.config import (
    PRESETS,
    DataConfig,
    DecodeBenchConfig,
    DemoConfig,
    EmbedConfig,
    FinetuneConfig,
    ModelConfig,
    PlanConfig,
    PretrainConfig,
    RunsConfig,
    SamplingConfig,
    TokenizerConfig,
    TrainConfig,
    UserError,
    build,
    describe,
    parse_options,
    preset,
    read_recipe,
    with_overrides,
)
from plume.config.fields import option
from plume.config.recipes import from_fields, with_paths
from plume.train.pretrain import pretrain


@dataclass(frozen=True, kw_only=True)
class Inner:
    lr: float = option(1e-3, "peak learning rate")
    names: tuple[str, ...] = ()
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    model: ModelConfig
    train: Inner = Inner()
    steps: int = 10
    resume: bool = False


def test_a_recipe_with_overrides(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text('steps = 5\n[model]\npreset = "gpt2"\nlayers = 4\n[train]\nlr = 1e-4\n')
    words = ["--train.lr", "3e-4", "--model.width=96", "--train.names", '["a", "b"]', "--train.folder", "some/where"]
    config = build(Outer, with_overrides(read_recipe(recipe), parse_options(Outer, words)[1]))
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
        ({"mlp_width": 0}, "mlp_width=0 must be at least 1, or unset for 3072"),
    ],
)
def test_impossible_models_are_refused_with_a_value_that_works(change, message):
    with pytest.raises(UserError, match=message):
        build(ModelConfig, {"preset": "gpt2", **change})


def test_a_missing_or_broken_recipe(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*none\.toml"):
        read_recipe(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(UserError, match=r"broken\.toml is not TOML"):
        read_recipe(broken)
    broken.write_text("steps = " + "[" * 5000)
    with pytest.raises(UserError, match=r"broken\.toml is not TOML"):
        read_recipe(broken)
    with pytest.raises(UserError, match="lr"):
        build(TrainConfig, with_overrides({"steps": 1, "batch": 1}, {"lr": "[" * 5000}))
    broken.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 5\r\n")  # as editors of Windows write it, which is whole
    assert read_recipe(broken) == {"train": {"steps": 5}}


def test_a_field_takes_one_word_and_a_list_takes_several():
    words = ["first", "--train.lr", "-3", "second", "--resume", "third", "--train.folder=d=e", "--names", "x", "y"]
    positional, found = parse_options(Outer, words)
    assert positional == ["first", "second", "third"]
    assert found == {"train.lr": "-3", "resume": "true", "train.folder": "d=e", "train.names": ["x", "y"]}
    with pytest.raises(UserError, match="--steps needs a value"):
        parse_options(Outer, ["--steps"])
    with pytest.raises(UserError, match=r"--train\.lr was given 2 times"):
        parse_options(Outer, ["--lr", "1", "--train.lr", "2"])


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


def test_a_table_written_with_an_equals_sign_is_refused_with_the_form_that_works():
    with pytest.raises(UserError, match=r"task\.columns has a value for each name: --task\.columns\.label sentence$"):
        build(FinetuneConfig, {"model": "m", "folder": "f", "task": {"train": "a", "columns": "label=sentence"}})


def test_none_takes_a_default_away():
    """Neither TOML nor the command line has a word of its own for it."""
    from plume.config import SamplingConfig

    assert build(SamplingConfig, with_overrides({}, {"top_k": "none", "max-new-tokens": "none"})) == SamplingConfig(
        top_k=None, max_new_tokens=None
    )
    with pytest.raises(UserError, match=r"temperature: .*not 'none'"):
        build(SamplingConfig, {"temperature": "none"})


def test_help_shows_the_metadata_of_the_fields():
    rows = {row.name: row for row in describe(Outer)}
    assert (rows["train.lr"].default, rows["train.lr"].help) == ("0.001", "peak learning rate")
    assert rows["model.norm"].choices == ("pre", "post")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_by_name(name):
    assert build(PlanConfig, {"model": {"preset": name}}).model == PRESETS[name]


def test_a_word_that_a_field_does_not_take_is_refused_in_a_config_too(tmp_path):
    """Python itself does not check Literals."""
    train = TrainConfig(steps=1, precision="fp32")
    data = DataConfig(paths=("a.txt",), folder=tmp_path / "data")
    config = PretrainConfig(folder=tmp_path / "run", data=data, model=PRESETS["gpt2-char"], train=train)
    with pytest.raises(UserError, match=r"train.precision='fp32' is none of auto, float32, bfloat16"):
        pretrain(config)
    assert not (tmp_path / "run").exists()


def test_a_preset_or_a_config_with_fields_of_its_own(tmp_path):
    for given in ({"model": "gpt2-laptop", "layers": 2}, {"layers": 2, "model": PRESETS["gpt2-laptop"]}):
        model = from_fields(PretrainConfig, {**given, "folder": tmp_path, "steps": 5}).model
        assert model == replace(PRESETS["gpt2-laptop"], layers=2)
    (tmp_path / "short.toml").write_text('folder = "x"\nmodel = "gpt2-laptop"\n[train]\nsteps = 5\n')
    table = read_recipe(tmp_path / "short.toml")
    for words in (["--model.layers", "2"], ["--model.layers", "2", "--model", "gpt2-laptop"]):
        changed = with_overrides(table, parse_options(PretrainConfig, words)[1])
        assert build(PretrainConfig, changed).model == replace(PRESETS["gpt2-laptop"], layers=2)
    assert table["model"] == "gpt2-laptop"


def test_a_list_needs_a_value_too():
    with pytest.raises(UserError, match="--paths needs a value"):
        parse_options(DataConfig, ["--paths", "--folder", "x"])


def test_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for config in (
        build(DataConfig, {"paths": "a", "folder": "~/data", "tokenizer": {"folder": "~/tok"}}),
        with_paths(DataConfig(paths=("a",), folder=Path("~/data"), tokenizer=TokenizerConfig(folder=Path("~/tok")))),
    ):
        assert (config.folder, config.tokenizer.folder) == (tmp_path / "data", tmp_path / "tok")
    assert build(RunsConfig, {"folders": ["~/runs", "b"]}).folders == (tmp_path / "runs", Path("b"))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (TrainConfig, {"steps": 5, "weight_decay": -0.1}, "weight_decay=-0.1 cannot be negative; 0 means none"),
        (TrainConfig, {"steps": 5, "muon_weight_decay": math.nan}, "muon_weight_decay=nan cannot be negative"),
        (TrainConfig, {"steps": 5, "seed": 1 << 70}, "has more than 64 bits; 1 would do"),
        (DemoConfig, {"seed": -(1 << 70)}, "has more than 64 bits"),
        (DataConfig, {"paths": ["a", "b"], "folder": "x", "weights": [1, math.inf]}, "none infinite"),
        (DataConfig, {"paths": "a", "folder": "x", "token_budget": 0}, "token_budget=0 must be at least 1, or unset"),
        (DataConfig, {"paths": "a", "folder": "x", "encoding": "undefined"}, "encoding='undefined' is not known"),
        (DataConfig, {"paths": "a", "folder": "x", "encoding": "idna"}, "encoding='idna' is not known"),
        (
            PlanConfig,
            {"model": "gpt2", "ranks": 0, "tflops": 0},
            "ranks=0 must be at least 1; tflops=0.0 must be above",
        ),
        (EmbedConfig, {"model": "m", "texts": "t", "out": "o", "batch": 0}, "batch=0 must be at least 1"),
        (DecodeBenchConfig, {"rounds": 0}, "rounds=0 must be at least 1"),
        (SamplingConfig, {"repetition_penalty": math.nan}, "repetition_penalty=nan must be above 0"),
        (SamplingConfig, {"presence_penalty": math.inf}, "presence_penalty=inf must be a finite number"),
    ],
)
def test_numbers_that_cannot_work(kind, given, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build(kind, given)
