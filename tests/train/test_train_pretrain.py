"""Pretraining end to end: every recipe builds, laptop recipes learn and open in transformers, mistakes are told."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import open_in_transformers

from plume.cli.main import main
from plume.config import DataConfig, PretrainConfig, TokenizerConfig, UserError, build, read_recipe, with_overrides
from plume.data import IGNORE, open_shards, prepare
from plume.hf import load_model
from plume.model.heads import Model
from plume.text import load_tokenizer
from plume.train.pretrain import entropy, pretrain, text_shares, validation_batches
from plume.util.run_folder import differences_of, find_runs, plot_runs, read_metrics, read_run, to_toml, write_recipe

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
        "data.validation_fraction": "0.1",
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
        overrides |= {"data.tokenizer.pretokenizer": "basic"}
    return build(PretrainConfig, with_overrides(read_recipe(RECIPES / f"{recipe}.toml"), {**overrides, **more}))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_builds(path: Path) -> None:
    table = read_recipe(path)
    if "train" in table and "model" in table:
        config = build(PretrainConfig, table, origin=str(path))
        with torch.device("meta"):
            Model(config.model)
        assert config.data.tokenizer.vocab_size == config.model.vocab_size or config.data.tokenizer.kind == "characters"


LONGER = (pytest.param(f"{name}-laptop", marks=pytest.mark.slow) for name in ("bert", "roberta", "transformer"))
LAPTOP = ["gpt2-laptop", "gpt-laptop", "gpt2-char", *LONGER]


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
    with pytest.raises(UserError, match="already contains a run; --resume continues it, --overwrite replaces it"):
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
    other = replace(config, overwrite=True, data=replace(config.data, validation_fraction=0.3))
    with pytest.raises(UserError, match="nowhere"):
        pretrain(replace(other, data=replace(other.data, paths=(str(tmp_path / "nowhere.txt"),))))
    assert (kept.read_bytes(), (config.folder / "recipe.toml").read_bytes()) == before
    pretrain(other)
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
        ({"train.average_checkpoints": "3"}, "average_checkpoints=3 needs keep_last=3"),
    ],
)
def test_wrong_recipes_are_told(tmp_path: Path, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        small("gpt2-char", tmp_path, **overrides)


def test_average_of_checkpoints(tmp_path: Path) -> None:
    """Against the mean of the model folders of runs that ended at those steps."""
    settings = {"train.steps": "6", "train.checkpoint_every": "2", "train.keep_best": "false", "train.keep_last": "3"}
    settings |= {"train.schedule": "constant", "train.sample_every": "100"}
    averaged = load_model(
        pretrain(small("gpt2-char", tmp_path, **settings, **{"train.average_checkpoints": "3"})).model
    )
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


def measured_run(folder: Path, head: str, tokenizer: str, *, sum_of: dict[str, float], bits: float | None) -> None:
    """A run as pretraining leaves it: a loss of these parts, and which tokenizer it is measured with."""
    fake_run(folder, 5, 2.0)
    loss, several = sum(sum_of.values()), len(sum_of) > 1
    row = {"step": 1, "loss": loss} | (sum_of if several else {})
    checked = {"step": 1, "validation_loss": loss + 0.5}
    checked |= {f"validation_{name}": value + 0.25 for name, value in sum_of.items()} if several else {}
    checked |= {} if bits is None else {"validation_bits_per_byte": bits}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(checked) + "\n")
    (folder / "checkpoints" / "model").mkdir(parents=True)
    about = {"head": head, "tokenizer_hash": tokenizer}
    (folder / "checkpoints" / "model" / "plume.json").write_text(json.dumps(about))


def shown_runs(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["runs", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("how", [(), ("--compare",)])
def test_losses_of_other_tokenizers_are_not_put_side_by_side_without_a_word(
    how: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    measured_run(tmp_path / "letters", "next-token", "a", sum_of={"loss": 1.5}, bits=2.1875)
    measured_run(tmp_path / "words", "next-token", "b", sum_of={"loss": 4.5}, bits=1.8125)
    shown = shown_runs(capsys, str(tmp_path), *how)
    assert "bits per byte" in shown and "2.1875" in shown and "1.8125" in shown
    assert "different tokenizers: a token is not the same amount of text" in shown and "nats per token" in shown
    measured_run(tmp_path / "bert", "pretraining", "b", sum_of={"masked": 3.5, "next_sentence": 0.625}, bits=None)
    shown = shown_runs(capsys, str(tmp_path), *how)
    assert "3.5000" in shown and "3.7500" in shown and "4.1250" not in shown and "4.6250" not in shown
    assert "bert: the loss of masked tokens" in shown and "no bits per byte" in shown
    same = shown_runs(capsys, str(tmp_path / "words"), str(tmp_path / "bert"), *how)
    assert "different tokenizers" not in same and "bert: the loss of masked tokens" in same
    fake_run(tmp_path / "old", 5, 2.0)  # says nothing of its tokenizer
    assert "comparable" not in shown_runs(capsys, str(tmp_path / "words"), str(tmp_path / "old"), *how)
    assert "comparable" not in shown_runs(capsys, str(tmp_path / "bert"), *how)


def test_bits_per_byte_are_plotted_where_tokenizers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("plume.util.run_folder.save_figure", lambda figure, file: drawn.append(figure))
    measured_run(tmp_path / "letters", "next-token", "a", sum_of={"loss": 1.5}, bits=2.1875)
    measured_run(tmp_path / "bert", "pretraining", "b", sum_of={"masked": 3.5, "next_sentence": 0.625}, bits=None)
    plot_runs([tmp_path / "letters", tmp_path / "bert"], tmp_path / "both.png")
    bits, losses = drawn[0].axes
    assert "bits per byte" in bits.get_ylabel() and [line.get_ydata().tolist() for line in bits.lines] == [[2.1875]]
    assert sorted(line.get_ydata()[0] for line in losses.lines) == [1.5, 2.0, 3.5, 3.75]
    assert "not comparable" in losses.get_title()
    plot_runs([tmp_path / "bert"], tmp_path / "one.png")
    assert len(drawn[1].axes) == 1 and drawn[1].axes[0].get_title() == ""


@pytest.mark.parametrize("recipe", ["gpt2-laptop", "gpt2-char", "transformer-laptop", "bert-laptop"])
def test_a_run_keeps_and_logs_bits_per_byte(recipe: str, tmp_path: Path) -> None:
    """Against the bytes of the text of the validation rows; what a masked model predicts adds up to no text."""
    settings = {"train.steps": "2", "train.validate_every": "1", "train.validation_rows": "8"}
    config = small(recipe, tmp_path, **settings)
    run, tokenizer = read_run(pretrain(config).folder), load_tokenizer(config.folder / "model")
    (data,) = (path.parent for path in (tmp_path / "data").rglob("data.json"))
    validation = validation_batches(config, tokenizer, data)
    rows = [row for row in read_metrics(config.folder) if "validation_loss" in row]
    assert len(rows) == 2 and validation is not None and run.tokenizer == tokenizer.hash
    if recipe == "bert-laptop":
        assert run.masked and run.bits_per_byte is None is run.bytes_per_token
        assert not any("validation_bits_per_byte" in row for row in rows)
        assert run.validation == min(row["validation_masked"] for row in rows) < rows[-1]["validation_loss"]
        return
    targets = validation.part(0, 0, 8).targets
    predicted = targets[targets != IGNORE].tolist()
    text = tokenizer.decode(predicted, skip_special=True)
    for row in rows:
        bits = row["validation_loss"] * len(predicted) / math.log(2) / len(text.encode())
        assert row["validation_bits_per_byte"] == pytest.approx(bits)
    assert run.bits_per_byte == min(row["validation_bits_per_byte"] for row in rows) and not run.masked
    shutil.rmtree(config.folder / "checkpoints")  # the model folder says it too
    assert (
        read_run(config.folder).bytes_per_token
        == run.bytes_per_token
        == pytest.approx(len(text.encode()) / len(predicted))
    )


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
    monkeypatch.setattr("plume.util.run_folder.save_figure", lambda figure, file: drawn.append(figure))
    fake_run(tmp_path / "short", 1, 2.0)
    (tmp_path / "short" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    plot_runs([tmp_path / "short"], tmp_path / "short.png")
    (axes,) = drawn[0].axes
    assert all(line.get_marker() == "o" for line in axes.lines)
    assert all(float(place).is_integer() for place in axes.get_xticks())


def test_differences_are_told_in_words() -> None:
    old, new = {"train": {"lr": 0.1}}, {"train": {"lr": 0.2, "grad_clip": math.inf}}
    assert list(differences_of(old, new).values()) == [
        "train.grad_clip was 'unset' and is now inf",
        "train.lr was 0.1 and is now 0.2",
    ]


def resumed(config: PretrainConfig, **more: str) -> PretrainConfig:
    return build(PretrainConfig, with_overrides(json.loads(json.dumps(_table(config))), {"resume": "true", **more}))


@pytest.mark.parametrize(("setting", "value"), [("batch", "8"), ("seed", "7"), ("batch_start", "4")])
def test_a_run_is_not_resumed_with_other_rows(setting: str, value: str, tmp_path: Path) -> None:
    settings = {"train.steps": "2", "train.batch_ramp_steps": "4", "train.keep_best": "false"}
    config = small("gpt2-char", tmp_path, **settings)
    pretrain(config)
    other = resumed(config, **{f"train.{setting}": value, "train.steps": "4"})
    with pytest.raises(UserError, match=rf"train.{setting} was .*\n--allow-changes continues .* next unread row"):
        pretrain(other)
    assert pretrain(replace(other, allow_changes=True)).outcome.step == 4


def test_another_batch_continues_after_the_rows_that_were_read(tmp_path: Path) -> None:
    """Two steps of 16 rows, then steps of 8: rows 32 to 39 come next, not 16 to 23; also after one more resume."""
    from plume.train.pretrain import TrainBatches

    config = small("gpt2-char", tmp_path, **{"train.steps": "2", "train.keep_best": "false"})
    pretrain(config)
    taken: list[tuple[int, int]] = []
    plain = TrainBatches.part

    def part(self: TrainBatches, step: int, first: int, rows: int) -> Any:
        taken.append((self.position(step) + first, rows))
        return plain(self, step, first, rows)

    changed = resumed(config, **{"train.batch": "8", "train.steps": "3", "allow_changes": "true"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainBatches, "part", part)
        pretrain(changed)
        assert taken[-1] == (32, 8)
        pretrain(build(PretrainConfig, with_overrides(_table(changed), {"train.steps": "4", "allow_changes": "false"})))
        assert taken[-1] == (40, 8)


def test_more_steps_continue_after_the_rows_of_each_length(tmp_path: Path) -> None:
    """Half of the steps have short sequences; of twice the steps, the first long ones were already behind them."""
    from plume.data import PackedWindows

    short = {"objective.short_lengths": "8", "objective.short_fraction": "0.5", "train.keep_best": "false"}
    config = small("gpt2-char", tmp_path, **{"train.steps": "4", "train.batch": "8", **short})
    taken: list[tuple[int, int, int]] = []
    plain = PackedWindows.take

    def take(self: PackedWindows, first: int, count: int, **more: int) -> Any:
        taken.append((self.length, first, count))
        return plain(self, first, count, **more)

    pretrain(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedWindows, "take", take)
        pretrain(resumed(config, **{"train.steps": "8"}))
    batches = [(length, first) for length, first, count in taken if count == config.train.batch]
    assert batches == [(config.model.context, first) for first in (16, 24, 32, 40)]


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    config = small("gpt2-char", tmp_path, **{"train.steps": "2"})
    pretrain(config)
    (tmp_path / "plain.txt").write_text("red green blue. seven eight apple pear house river stone bird fish.\n" * 999)
    other = resumed(config, **{"data.folder": str(tmp_path / "data2"), "train.steps": "3"})
    with pytest.raises(UserError, match=r"data\.folder was"):
        pretrain(other)
    prepared = resumed(config, **{"prepared": str(tmp_path / "data2"), "train.steps": "3"})
    from plume.data import prepare

    prepare(other.data)
    with pytest.raises(UserError, match=r"was trained on other data .*--allow-changes to continue"):
        pretrain(prepared)
    assert pretrain(replace(prepared, allow_changes=True)).outcome.step == 3


def test_where_a_softmax_cannot_be_sampled(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sampled_softmax=0 must be above 0"):
        small("gpt2-laptop", tmp_path, **{"objective.sampled_softmax": "0"})
    for other in ({"train.label_smoothing": "0.1"}, {"train.tensor_parallel": "2"}):
        with pytest.raises(UserError, match=r"needs train.label_smoothing=0 and train.tensor_parallel=1"):
            small("gpt2-laptop", tmp_path, **{"objective.sampled_softmax": "8"}, **other)


def test_a_sampled_softmax_learns_as_the_whole_one(tmp_path: Path) -> None:
    """The loss it reports is near the one that is measured with all tokens, and the same when it is run again."""
    few = {"objective.sampled_softmax": "16", "data.tokenizer.vocab_size": "600"}
    results = [
        pretrain(small("gpt2-laptop", tmp_path, **given, folder=str(tmp_path / name)))
        for name, given in {"whole": {"data.tokenizer.vocab_size": "600"}, "few": few, "again": few}.items()
    ]
    whole, sampled, again = (result.outcome for result in results)
    assert sampled.loss == again.loss and sampled.validation == again.validation
    assert whole.validation and sampled.validation and sampled.validation < whole.validation + 0.1
    assert abs(sampled.loss - sampled.validation) < 0.3


def test_frequencies_of_masked_targets_are_those_of_the_text(tmp_path: Path) -> None:
    """Of two sources in the proportion in which they are read; counted here word for word."""
    few, many = tmp_path / "few.txt", tmp_path / "many.txt"
    few.write_text("aa bb\n" * 30, encoding="utf-8")
    many.write_text("bb cc cc cc\n" * 300, encoding="utf-8")
    data = DataConfig(
        paths=(str(few), str(many)),
        weights=(3.0, 1.0),
        folder=tmp_path / "data",
        documents="line",
        workers=1,
        validation_fraction=0.0,
        tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=100),
    )
    prepare(data)
    folder = data.folder
    tokenizer = load_tokenizer(folder / "tokenizer")
    shares = text_shares(open_shards(folder), tokenizer, with_special=False)
    by_word = {word: float(shares[tokenizer.encode(word)[0]]) for word in ("aa", "bb", "cc")}
    assert by_word == pytest.approx({"aa": 0.75 / 2, "bb": 0.75 / 2 + 0.25 / 4, "cc": 0.25 * 3 / 4})
    assert shares.sum() == pytest.approx(1)


def test_the_masked_loss_stands_beside_the_unigram_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BERT's total has the next-sentence loss in it, which no token frequency knows."""
    result = pretrain(small("bert-laptop", tmp_path, **{"train.steps": "4", "train.validate_every": "2"}))
    best = [row for row in read_metrics(result.folder) if row.get("step") == result.outcome.best_step][-1]
    masked, pairs = best["validation_masked"], best["validation_next_sentence"]
    assert result.outcome.validation == pytest.approx(masked + pairs)
    assert f"of masked tokens {masked:.4f} (token frequencies alone {result.unigram:.4f}" in result.summary()
    assert f"next sentence {pairs:.4f}" in result.summary()
    assert f"validation loss {masked + pairs:.4f}, masked {masked:.4f}" in capsys.readouterr().err
