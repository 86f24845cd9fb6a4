"""Pretraining end to end: every recipe builds, laptop recipes learn and open in transformers, mistakes are told."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import open_in_transformers

from plume.cli import main
from plume.config import PretrainConfig, UserError, build, read_recipe, with_overrides
from plume.heads import Model
from plume.train.pretrain import entropy, pretrain
from plume.train.runs import differences_of, find_runs, plot_runs, read_metrics, read_run, to_toml, write_recipe
from plume.weights import load_model

RECIPES = Path(__file__).parents[2] / "recipes"
WORDS = ["red", "green", "blue", "seven", "eight", "apple", "pear", "house", "river", "stone", "bird", "fish"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts(folder: Path) -> tuple[Path, Path]:
    """Sentences in which each word follows from the one before, and the same sentences in capitals."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(1500):
        start, length = int(random.integers(12)), int(random.integers(4, 9))
        lines.append(" ".join(WORDS[(start + i) % 12] for i in range(length)) + ".")
    plain, capitals = folder / "plain.txt", folder / "capitals.txt"
    if plain.is_file():
        return plain, capitals
    plain.write_text("\n".join(lines) + "\n")
    capitals.write_text("\n".join(line.upper() for line in lines) + "\n")
    return plain, capitals


def small(recipe: str, place: Path, **more: str) -> PretrainConfig:
    """A laptop recipe on the small text: smaller and shorter, otherwise as it is."""
    plain, capitals = texts(place)
    overrides = {
        "folder": str(place / "run"),
        "data.paths": json.dumps([str(plain)]),
        "data.folder": str(place / "data"),
        "data.workers": "1",
        "data.documents": "line",
        "data.validation_share": "0.1",
        "data.tokenizer.vocab_size": "300",
        "model.layers": "2",
        "model.width": "64",
        "model.context": "32",
        "train.steps": "100",
        "train.batch": "16",
        "train.validation_rows": "16",
        "train.validate_every": "50",
        "train.sample_tokens": "8",
        "train.device": "cpu",
        "train.precision": "float32",
    }
    if recipe == "transformer-laptop":
        overrides |= {"data.targets": json.dumps([str(capitals)]), "model.decoder_layers": "2"}
    if recipe == "gpt-laptop":
        overrides |= {"data.tokenizer.words": "basic"}
    return build(PretrainConfig, with_overrides(read_recipe(RECIPES / f"{recipe}.toml"), {**overrides, **more}))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_builds(path: Path) -> None:
    table = read_recipe(path)
    if "train" in table and "model" in table:
        config = build(PretrainConfig, table, origin=str(path))
        with torch.device("meta"):
            Model(config.model)
        assert config.data.tokenizer.vocab_size == config.model.vocab_size or config.data.tokenizer.kind == "characters"


LAPTOP = ["gpt2-laptop", "gpt-laptop", "bert-laptop", "roberta-laptop", "transformer-laptop", "gpt2-char"]


@pytest.mark.parametrize("recipe", LAPTOP)
def test_a_laptop_recipe_learns_and_opens_in_transformers(recipe: str, tmp_path: Path) -> None:
    result = pretrain(small(recipe, tmp_path))
    rows = read_metrics(result.folder)
    tokens = "validation_masked" if recipe == "bert-laptop" else "validation_loss"
    assert [row[tokens] for row in rows if tokens in row][-1] < result.unigram < result.uniform
    theirs, ours = open_in_transformers(result.model), load_model(result.model)
    ids = torch.randint(4, 20, (2, 9))
    with torch.no_grad():
        if recipe == "transformer-laptop":
            expected = theirs(input_ids=ids, decoder_input_ids=ids).logits
            mine = ours(ids, ids)
        else:
            out = theirs(ids)
            expected, mine = getattr(out, "prediction_logits", getattr(out, "logits", None)), ours(ids)
    torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    for name in ("recipe.toml", "metrics.jsonl", "loss.png", "samples.txt", "model/tokenizer.json", "model/plume.json"):
        assert (result.folder / name).stat().st_size > 0
    assert build(PretrainConfig, read_recipe(result.folder / "recipe.toml")).train.steps == 100


def test_a_run_is_not_overwritten_unless_asked_and_goes_on_when_asked(tmp_path: Path) -> None:
    config = small("gpt2-char", tmp_path, **{"train.steps": "4", "train.checkpoint_every": "2"})
    pretrain(config)
    with pytest.raises(UserError, match="holds a run already; --resume goes on with it, --overwrite replaces it"):
        pretrain(config)
    table = json.loads(json.dumps(_table(config)))
    longer = build(PretrainConfig, with_overrides(table, {"train.steps": "6", "resume": "true"}))
    assert pretrain(longer).outcome.step == 6
    other = build(PretrainConfig, with_overrides(table, {"model.layers": "1", "resume": "true"}))
    with pytest.raises(UserError, match=r"other settings than it began with:\n  model.layers was 2 and is now 1"):
        pretrain(other)
    again = build(PretrainConfig, with_overrides(table, {"train.steps": "2", "overwrite": "true"}))
    assert pretrain(again).outcome.step == 2


def test_any_text_comes_back_from_a_recipe() -> None:
    import tomllib

    texts = ["\U0001f600 \U00020000", 'tab\tquote" back\\slash', "del\x7f null\x00 \u2028", "plain"]
    assert tomllib.loads(to_toml({"a": {"texts": texts, "text": texts[0]}}))["a"] == {"texts": texts, "text": texts[0]}


def test_a_run_is_replaced_only_when_its_successor_can_begin(tmp_path: Path) -> None:
    config = small("gpt2-char", tmp_path, **{"train.steps": "2"})
    kept = pretrain(config).model / "model.safetensors"
    before = kept.read_bytes(), (config.folder / "recipe.toml").read_bytes()
    other = replace(config, overwrite=True, data=replace(config.data, validation_share=0.3))
    with pytest.raises(UserError, match=r"holds data prepared from other texts.*--data\.overwrite of a run"):
        pretrain(other)
    assert (kept.read_bytes(), (config.folder / "recipe.toml").read_bytes()) == before
    pretrain(replace(other, data=replace(other.data, overwrite=True)))
    assert kept.read_bytes() != before[0]


def _table(config: PretrainConfig) -> dict[str, Any]:
    import tomllib
    from dataclasses import asdict

    return tomllib.loads(to_toml(asdict(config)))


def test_prepared_shards_are_taken_as_they_are(tmp_path: Path) -> None:
    config = small("gpt2-char", tmp_path, **{"train.steps": "2"})
    pretrain(config)
    (tmp_path / "plain.txt").unlink()  # the texts are not needed any more
    more = {"prepared": str(tmp_path / "data"), "folder": str(tmp_path / "other")}
    again = build(PretrainConfig, with_overrides(_table(config), more))
    assert pretrain(again).outcome.step == 2


def test_too_little_text_is_told(tmp_path: Path) -> None:
    config = small("gpt2-char", tmp_path)
    (tmp_path / "plain.txt").write_text("too short")
    with pytest.raises(UserError, match="tokens, and one window needs 33"):
        pretrain(config)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    config = small("gpt2-char", tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not a run folder, so it is left alone"):
        pretrain(config)
    assert (tmp_path / "run" / "thesis.txt").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"objective.kind": "masked"}, "objective.kind='masked' does not fit this model; 'language-model' does"),
        ({"objective.length": "999"}, "objective.length=999 is longer than model.context=32"),
        ({"train.step": "3"}, "there is no train.step; did you mean train.steps?"),
        ({"train.lr": "-1"}, "lr=-1.0 must be above 0"),
        ({"train.average": "3"}, "average=3 needs keep_last=3"),
    ],
)
def test_wrong_recipes_are_told(tmp_path: Path, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        small("gpt2-char", tmp_path, **overrides)


def test_average_of_checkpoints(tmp_path: Path) -> None:
    """Against the mean of the model folders of runs that ended at those steps."""
    settings = {"train.steps": "6", "train.checkpoint_every": "2", "train.keep_best": "false", "train.keep_last": "3"}
    settings |= {"train.schedule": "constant", "train.sample_every": "100"}
    averaged = load_model(pretrain(small("gpt2-char", tmp_path, **settings, **{"train.average": "3"})).model)
    expected = {name: torch.zeros_like(p) for name, p in averaged.named_parameters()}
    for steps in (2, 4, 6):
        more = {**settings, "train.steps": str(steps), "folder": str(tmp_path / f"run{steps}")}
        for name, p in load_model(pretrain(small("gpt2-char", tmp_path, **more)).model).named_parameters():
            expected[name] += p.detach() / 3
    for name, p in averaged.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], atol=1e-6, rtol=1e-5)


def test_entropy_of_frequencies() -> None:
    assert entropy(np.full(8, 1 / 8)) == pytest.approx(math.log(8))
    assert entropy(np.array([0.5, 0.5, 0.0])) == pytest.approx(math.log(2))
    smoothed = np.array([0.9 * 0.5 + 0.1 / 3, 0.9 * 0.5 + 0.1 / 3, 0.1 / 3])
    assert entropy(np.array([0.5, 0.5, 0.0]), 0.1) == pytest.approx(-(smoothed * np.log(smoothed)).sum())


def fake_run(folder: Path, steps: int, loss: float) -> None:
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml({"train": {"steps": steps, "lr": 0.1}, "model": {"layers": steps}}))
    rows = [{"step": s, "loss": loss + 1 / s, "tokens": 10 * s, "seconds": s / 2} for s in range(1, 4)]
    lines = [json.dumps(row) for row in [*rows, {"step": 3, "validation_loss": loss}]]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')  # torn by a crash


def test_runs_are_listed_compared_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path / "runs" / "a", 5, 1.0)
    fake_run(tmp_path / "runs" / "b", 7, 2.0)
    a, b = find_runs([tmp_path / "runs"])
    assert (a.name, a.step, a.steps, a.validation, a.tokens) == ("a", 3, 5, 1.0, 30)
    assert b.loss == pytest.approx(2 + 1 / 3)
    assert main(["runs", str(tmp_path / "runs"), "--compare"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers" in shown and "train.lr" not in shown  # only what differs
    assert main(["runs", str(tmp_path / "runs"), "--plot", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out.split("\n", 1)[1])] == ["a", "b"]
    with pytest.raises(UserError, match="is not a run folder"):
        read_run(tmp_path)
    assert plot_runs([tmp_path], tmp_path / "none.png") is None


def test_runs_of_other_kinds_are_compared_with_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of settings stay whole on a narrow terminal; what only a fine-tuning has is no difference."""
    monkeypatch.setenv("COLUMNS", "60")
    recipes: dict[str, dict[str, Any]] = {
        "a": {"train": {"steps": 5, "muon_weight_decay": 0.1}},
        "b": {"train": {"steps": 5}},
        "tuned": {"task": {"train": "rows.csv"}, "epochs": 3.0},
    }
    for name, recipe in recipes.items():
        fake_run(tmp_path / name, 5, 2.0)
        write_recipe(tmp_path / name, recipe)
    assert main(["runs", str(tmp_path), "--compare"]) == 0
    shown = capsys.readouterr().out
    assert "train.muon_weight_decay" in shown and not any(word in shown for word in ("epochs", "task.train", "…"))
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "None" not in shown and "…" not in shown


def test_a_run_with_one_line_is_a_dot_at_a_whole_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("plume.train.runs.save_figure", lambda figure, file: drawn.append(figure))
    fake_run(tmp_path / "short", 1, 2.0)
    (tmp_path / "short" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    plot_runs([tmp_path / "short"], tmp_path / "short.png")
    (axes,) = drawn[0].axes
    assert all(line.get_marker() == "o" for line in axes.lines)
    assert all(float(place).is_integer() for place in axes.get_xticks())


def test_differences_are_told_in_words() -> None:
    old, new = {"train": {"lr": 0.1}}, {"train": {"lr": 0.2, "clip": math.inf}}
    assert list(differences_of(old, new).values()) == [
        "train.clip was 'unset' and is now inf",
        "train.lr was 0.1 and is now 0.2",
    ]
