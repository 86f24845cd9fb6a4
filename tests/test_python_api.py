"""The Python surface: what `dir(plume)` lists, keywords and configs, help texts of every field."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

import plume
from plume import config
from plume.config.fields import help_of

CONFIGS = [value for name in config.__all__ if is_dataclass(value := getattr(config, name)) and name.endswith("Config")]
BANNED = """
numbers that stand for|how slowly|largest norm|whose mean|do not see each other|\\bapart\\b|\\bjoined\\b|for programs|
as asked|goes on|go on|is told|are told|looked? at|\\bsaid\\b|\\btold\\b|\\broom\\b|\\bdoor\\b|somebody|
two stacks|is damaged|passed over|company in a batch|made of|\\bjudge|noting|everywhere|\\bshare of|\\bhouse\\b
""".replace("\n", "")


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_field_has_a_short_help_text_in_plain_terms(kind):
    for field in fields(kind):
        text = help_of(field)
        assert 0 < len(text) < 90, (field.name, text)
        assert not re.search(BANNED, text), (field.name, text)
        assert not text.endswith(".") or text.endswith("..."), (field.name, text)


def test_the_surface_is_listed_and_exists():
    assert set(plume.__all__) <= set(dir(plume))
    for name in plume.__all__:
        assert callable(getattr(plume, name)), name
    for name in (
        "load",
        "prepare",
        "pretrain",
        "finetune",
        "distill",
        "evaluate",
        "sweep",
        "plan",
        "LM",
        "TrainConfig",
    ):
        assert name in plume.__all__
    with pytest.raises(AttributeError, match="did you mean 'pretrain'"):
        getattr(plume, "pretran")  # noqa: B009


def test_importing_plume_is_light():
    code = (
        "import plume, sys; dir(plume); plume.PretrainConfig; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prepare", config.DataConfig),
        ("pretrain", config.PretrainConfig),
        ("finetune", config.FinetuneConfig),
        ("distill", config.DistillConfig),
        ("evaluate", config.EvaluateConfig),
        ("sweep", config.SweepConfig),
        ("plan", config.PlanConfig),
    ],
)
def test_a_verb_takes_its_config_or_its_fields(name, kind):
    function = getattr(plume, name)
    known = inspect.signature(getattr(function, name) if inspect.ismodule(function) else function).parameters
    assert list(known) == ["config", *(f.name for f in fields(kind))]
    with pytest.raises(plume.UserError, match="there is no no_such_thing"):
        function(no_such_thing=3)
    with pytest.raises(plume.UserError, match=f"expected {kind.__name__} or keywords, not str"):
        function("something")


def test_a_field_that_one_section_has_needs_no_section(tmp_path):
    same = config.takes_fields(config.FinetuneConfig)(lambda given: given)
    short = same(model="runs/bert", train="reviews.csv", folder=tmp_path)
    assert short == same(model="runs/bert", task={"train": "reviews.csv"}, folder=tmp_path)
    assert short == same(model="runs/bert", task=config.TaskConfig(train="reviews.csv"), folder=tmp_path)
    assert short == same(short) and short.task.train == "reviews.csv"


def test_texts_where_paths_are_meant():
    same = config.takes_fields(config.PretrainConfig)(lambda given: given)
    table = {"model": {"preset": "gpt2-laptop"}, "train": {"steps": 1, "batch": 1}, "folder": "runs/a"}
    given = config.build(config.PretrainConfig, table)
    data = replace(given.data, folder="data/a")
    found = same(replace(given, folder="runs/a", prepared="data/b", data=data, init_from="plume-en"))
    assert (found.folder, found.prepared, found.data.folder) == (Path("runs/a"), Path("data/b"), Path("data/a"))
    assert found.init_from == "plume-en" and found.data.paths == given.data.paths
    assert same(given) is given


def test_plan_by_keywords():
    assert (
        plume.plan(model="gpt2", tokens=10).parameters
        == plume.plan(plume.PlanConfig(model=config.preset("gpt2"))).parameters
    )


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_api_page_runs(tmp_path, monkeypatch):
    """Every public call with keywords, one block after another, on a tiny model."""
    page = Path(__file__).resolve().parents[1] / "docs" / "api.md"
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), scope)
    text = page.read_text(encoding="utf-8")
    calls = {name for name in plume.__all__ if name.islower()} - {"sweep"}
    assert all(f"plume.{name}(" in text for name in calls)


def test_paths_where_texts_are_meant(tmp_path):
    """A path names a model, rows or texts as well as its text does."""
    from plume.config import DataConfig, FinetuneConfig, build

    config = build(FinetuneConfig, {"model": tmp_path, "task": {"train": tmp_path / "a.csv"}, "folder": str(tmp_path)})
    assert (config.model, config.task.train, config.folder) == (str(tmp_path), str(tmp_path / "a.csv"), tmp_path)
    assert build(DataConfig, {"paths": [tmp_path], "folder": tmp_path}).paths == (str(tmp_path),)


def test_a_wrong_value_is_not_missing_too():
    with pytest.raises(plume.UserError) as caught:
        plume.finetune(model=5, train="a.csv", folder="run")
    assert "model: input should be a valid string" in str(caught.value) and "missing" not in str(caught.value)
