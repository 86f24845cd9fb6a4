"""Whole evaluations: reports, resuming after a kill, comparison, contamination, metrics, the command line, sweeps."""

import importlib.util
import itertools
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cluster import as_ray_would
from stories import story, write_rows

import plume.evaluate
from plume.cli.main import main
from plume.config import EvaluateConfig, UserError
from plume.evaluate import evaluate
from plume.evaluate import requests as reliability
from plume.evaluate.compare import compare, contributions, mcnemar, sign_flips
from plume.evaluate.evaluation import found_in, runs_of
from plume.evaluate.report import picture, published, read_report, scores
from plume.evaluate.size_sweep import Size, draw, fits
from plume.tasks import metrics


def run(folder, out, *tasks, **more):
    return evaluate(EvaluateConfig(model=str(folder), tasks=tasks, out=out, **more))


def test_the_report_says_what_its_numbers_depend_on(trained_folder, made, tmp_path):
    from plume.hf import model_hash

    out = tmp_path / "report"
    report = run(trained_folder, out, "lambada", "hellaswag", "wikitext-2", data=made)
    text = (out / "report.md").read_text()
    for task in report.tasks:
        first = task.first
        for part in (model_hash(trained_folder), first.data_hash, "harness", "boundary='joint'", f"{first.tokens:,}"):
            assert part in text
        assert first.score.stderr is not None and first.seconds > 0
        assert first.scored > 0
    assert "41, 1 with context cut on the left" in text
    for name in ("scores.png", "loss_by_position.png", "calibration.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG") and name in text
    assert [t.first for t in read_report(out).tasks] == [t.first for t in report.tasks]
    again = run(trained_folder, out, "lambada", data=made, plots=False)["lambada"].first
    assert again.scored == 0 and again.reused == 41
    assert report["lambada"].first.scored + report["lambada"].first.reused == 41  # some made passages are the same
    assert again.metrics == report["lambada"].first.metrics
    assert "Earlier runs (acc)" in (out / "report.md").read_text()


def test_the_package_is_a_door(trained_folder, made):
    report = plume.evaluate(model=str(trained_folder), tasks=["lambada"], data=made, limit=3)
    assert report["lambada"].first.items == 3
    with pytest.raises(UserError, match="did you mean limit"):
        plume.evaluate(model=str(trained_folder), tasks=["lambada"], limits=3)


def test_published_numbers_stand_beside_a_model_of_known_name(random_folder, made, tmp_path):
    named = tmp_path / "gpt2"
    named.symlink_to(random_folder)
    run(named, tmp_path / "out", "lambada", data=made, limit=3, plots=False)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "GPT-2 paper, table 3" in text and "0.4599" in text and "35.13" in text
    assert published("openai-community/gpt2-xl", "winograd")[0].value == 0.707
    assert not published(str(random_folder), "lambada")


KILLED = """
import os, signal, sys, torch
from plume.cli.main import main
from plume.evaluate.subject import ScoreStore

torch.set_num_threads(1)
plain, end = ScoreStore.put, int(sys.argv[1])

def put(store, *given):
    plain(store, *given)
    if store.file.execute("SELECT count(*) FROM scores").fetchone()[0] == end:
        os.kill(os.getpid(), signal.SIGKILL)

ScoreStore.put = put
main(sys.argv[2:])
"""


@pytest.mark.parametrize("before", [1, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_without_scoring_anything_twice(trained_folder, tmp_path, before):
    """A real process, killed in the middle; what it had stored is reused, the rest is scored once."""
    rows = [{"context": story(n, 2), "choices": [f"{w} {n}" for w in ("milk", "hay", "bones")], "answer": 0}
            for n in range(1500)]  # fmt: skip
    file, out = write_rows(tmp_path / "mine.jsonl", rows), tmp_path / "out"
    words = ["evaluate", str(trained_folder), "--tasks", str(file), "--out", str(out), "--plots", "false"]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(before), *words], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert stored(out / "scores.sqlite") == before and not (out / "report.md").exists()
    result = run(trained_folder, out, str(file), plots=False)["mine"].first
    assert result.reused == before and result.scored == 4500 - before
    assert stored(out / "scores.sqlite") == 4500
    fresh = evaluate(EvaluateConfig(model=str(trained_folder), tasks=(str(file),)))["mine"].first
    assert fresh.metrics == result.metrics and fresh.reused == 0


def stored(path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        return file.execute("SELECT count(*) FROM scores").fetchone()[0]


# ---- comparing ---------------------------------------------------------------------------------------------------


def test_two_reports_side_by_side(trained_folder, random_folder, made, tmp_path, capsys):
    for name, folder in (("a", random_folder), ("b", trained_folder)):
        run(folder, tmp_path / name, "lambada", "wikitext-2", data=made, plots=False)
    found = {d.task: d for d in compare(tmp_path / "a", tmp_path / "b")}
    assert found["lambada"].test == "McNemar, exact" and found["lambada"].items == 41
    assert found["wikitext-2"].better == "B" and found["wikitext-2"].probability < 0.001
    assert {d.better for d in compare(tmp_path / "a", tmp_path / "a")} == {"neither"}
    assert main(["evaluate", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "wikitext-2" in capsys.readouterr().out
    assert main(["evaluate", "--compare", str(tmp_path / "a"), str(tmp_path / "nowhere")]) == 2
    assert "there is no report" in capsys.readouterr().err


def test_only_like_is_compared(trained_folder, random_folder, made, tmp_path):
    base = {"data": made, "plots": False}
    run(random_folder, tmp_path / "a", "lambada", **base)
    for name, settings, other in (
        ("limit", {"limit": 5}, "items"),
        ("shots", {"shots": 1}, "examples"),
        ("words", {"protocol": "gpt2-paper", "stop_word_filter": False}, "protocol"),
    ):
        run(trained_folder, tmp_path / name, "lambada", **base, **settings)
        (found,) = compare(tmp_path / "a", tmp_path / name)
        assert (found.test, found.better) == (f"not comparable: other {other}", "neither")


def test_a_text_that_a_limit_cuts_is_another_one(random_folder, tmp_path):
    """It is one item like the whole text, but its perplexity stands for its first lines alone."""
    file = tmp_path / "news.txt"
    file.write_text("\n".join(story(n, 2) for n in range(9)))
    run(random_folder, tmp_path / "a", str(file), limit=2, plots=False)
    whole = run(random_folder, tmp_path / "a", str(file), plots=False)["news"].first
    assert "Earlier runs" not in (tmp_path / "a" / "report.md").read_text()
    run(random_folder, tmp_path / "b", str(file), limit=2, plots=False)
    (found,) = compare(tmp_path / "a", tmp_path / "b")
    assert (found.test, found.better) == ("not comparable: other data", "neither")
    enough = run(random_folder, tmp_path / "a", str(file), limit=9, plots=False)["news"].first
    assert enough.data_hash == whole.data_hash and "Earlier runs" in (tmp_path / "a" / "report.md").read_text()


def test_tasks_with_names_in_any_script_keep_their_items(random_folder, tmp_path):
    names = ("新闻", "体育")
    files = [write_rows(tmp_path / f"{name}.jsonl", [{"context": name, "target": "end"}]) for name in names]
    report = run(random_folder, tmp_path / "out", *map(str, files), plots=False)
    for name in names:
        (row,) = (tmp_path / "out" / report[name].first.items_file).read_text(encoding="utf-8").splitlines()
        assert json.loads(row)["prompt"] == name
    row = {"context": "a", "target": "b"}
    files = [write_rows(tmp_path / f"{name}.jsonl", [row]) for name in ("my rows", "my_rows")]
    with pytest.raises(UserError, match="two tasks would be called 'my_rows'"):
        run(random_folder, tmp_path / "out", *map(str, files), plots=False)


def test_seeds_are_no_items_of_their_own(tmp_path):
    rows = [{"item": item, "acc": float(item % 3 == seed % 2)} for seed in range(5) for item in range(6)]
    found = contributions(rows, "acc", windows=True)
    assert len(found) == 6 and found[0, 0] == pytest.approx(0.6)
    worse = contributions([{"item": 0, "token_perplexity": 9.0}], "token_perplexity", windows=False)
    assert worse == {(0, 0): -9.0}


def test_significance_of_pairs():
    from scipy.stats import binomtest

    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 2, 60).astype(float), draw.integers(0, 2, 60).astype(float)
    split = int(((x == 1) & (y == 0)).sum()), int(((x == 0) & (y == 1)).sum())
    assert mcnemar(x, y) == pytest.approx(binomtest(split[0], sum(split)).pvalue)
    assert mcnemar(x, x) == 1.0
    d = draw.normal(0.4, 1, 10)
    exact = np.mean([abs(np.dot(s, d)) >= abs(d.sum()) - 1e-12 for s in itertools.product((1, -1), repeat=10)])
    assert sign_flips(d) == pytest.approx(exact, abs=0.02)


# ---- contamination -----------------------------------------------------------------------------------------------


def test_items_seen_in_training_are_found(trained_folder, tmp_path):
    texts = [f"{story(100 + n, 2)} number {n}" for n in range(6)]
    file = write_rows(tmp_path / "mine.jsonl", [{"context": t, "target": "end"} for t in [*texts, "too short"]])
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text("Other words. " + texts[2].upper().replace(",", " ;") + " and so on.")
    (tmp_path / "train" / "b.txt").write_text(" ".join(texts[4].split()[:14]) + " something else")
    report = run(trained_folder, tmp_path / "out", str(file), training_data=(str(tmp_path / "train"),), plots=False)
    task = report["mine"]
    rows = [json.loads(line) for line in (tmp_path / "out" / task.first.items_file).read_text().splitlines()]
    words = [set(itertools.pairwise(t.lower().replace(",", "").replace(".", "").split())) for t in texts]
    assert len(words) == 6
    assert rows[2]["overlap"] == pytest.approx(1.0, abs=0.1) and 0 < rows[4]["overlap"] < 0.5
    assert [bool(r["overlap"]) for r in rows].count(True) == task.seen.dirty
    assert task.seen.short == 1 and task.seen.clean + task.seen.dirty == 7
    assert task.seen.clean_items is not None and "Contamination: " in (tmp_path / "out" / "report.md").read_text()


def test_training_data_without_a_text_that_is_read_is_refused(trained_folder, tmp_path):
    """Nothing of it would be searched, and every item would be called clean."""
    file = write_rows(tmp_path / "mine.jsonl", [{"context": story(1, 3), "target": "end"}])
    other = write_rows(tmp_path / "train.jsonl", [{"content": story(1, 3)}])
    with pytest.raises(UserError, match=r"no text is found in .*no text in the field 'text'.*--text-field"):
        run(trained_folder, tmp_path / "out", str(file), training_data=(str(other),), plots=False)


def test_runs_are_found_exactly():
    """Against sets of word tuples."""
    items, train = [story(n, 4) for n in range(5)], [story(n, 6) for n in range(3, 40)]
    split = lambda t: t.lower().replace(",", "").replace(".", "").split()  # noqa: E731
    grams = lambda t, n: {tuple(split(t)[i : i + n]) for i in range(len(split(t)) - n + 1)}  # noqa: E731
    for n in (8, 13):
        known = set().union(*(grams(t, n) for t in train))
        wanted = np.unique(np.concatenate([runs_of(t, n) for t in items]))
        found = found_in(wanted, iter(train), n)
        assert len(found) == len(set().union(*(grams(t, n) for t in items)) & known)


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_numbers_against_other_libraries():
    from sklearn.metrics import matthews_corrcoef

    draw = np.random.default_rng(1)
    gold, prediction = draw.integers(0, 2, 80).astype(bool), draw.integers(0, 2, 80).astype(bool)
    assert metrics.matthews_metric(gold, prediction).value == pytest.approx(matthews_corrcoef(gold, prediction))


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("The cat, sat.", ["cat sat"], 1.0, 1.0),  # articles, case and punctuation do not count
        ("a b c", ["b c d"], 0.0, 0.8),  # two of two words, two of three
        ("", ["x"], 0.0, 0.0),
        ("one two", ["three", "Two"], 0.0, 2 / 3),  # the answer that fits best
    ],
)
def test_written_answers_are_compared_as_in_squad(prediction, answers, exact, f1):
    assert metrics.exact_match(prediction, answers) == exact
    assert metrics.answer_f1(prediction, answers) == pytest.approx(f1)


def test_errors_against_the_bootstrap():
    draw = np.random.default_rng(2)
    sizes = draw.integers(20, 60, 200)
    totals = -draw.gamma(3.0, 1.0, 200) * sizes
    rate, error = metrics.per_unit(list(totals), list(sizes), int(sizes.sum()))
    assert rate == pytest.approx(-totals.sum() / sizes.sum())
    picks = draw.integers(0, 200, (4000, 200))
    boot = -totals[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    assert error == pytest.approx(boot.std(), rel=0.1)
    assert metrics.mean([1.0, 0.0, 1.0]).stderr == pytest.approx(np.std([1, 0, 1], ddof=1) / np.sqrt(3))


def test_the_threshold_is_the_best_one():
    draw = np.random.default_rng(3)
    for _ in range(20):
        scores, good = draw.normal(size=15), draw.integers(0, 2, 15).astype(bool)
        cut = metrics.best_threshold(list(scores), list(good), bounds=(-np.inf, np.inf), near=None)
        right = lambda at: int(((scores > at) == good).sum())  # noqa: B023, E731
        assert right(cut) == max(map(right, [-np.inf, *scores]))


def test_calibration_and_positions():
    bins = reliability.Calibration()
    bins.add(np.array([0.95, 0.95, 0.15]), np.array([True, False, False]))
    assert bins.plain()["error"] == pytest.approx((2 * 0.45 + 0.15) / 3)
    places = reliability.ByPosition()
    places.add(1, np.array([-1.0, -3.0, -5.0], dtype=np.float32))
    assert places.plain() == {"from": [1, 3], "loss": [2.0, 5.0], "tokens": [2, 1]}


# ---- the command line --------------------------------------------------------------------------------------------


def test_evaluate_at_the_command_line(trained_folder, made, tmp_path, capsys):
    words = ["evaluate", str(trained_folder), "--tasks", "lambada,hellaswag", "--data", str(made), "--limit", "4"]
    assert main([*words, "--out", str(tmp_path / "out"), "--protocol", "gpt2-paper"]) == 0
    assert "hellaswag" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.md").exists()
    assert main([*words, "--protocol", "gpt4"]) == 2
    assert main([*words, "--sots", "4"]) == 2
    assert "did you mean shots" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "none"), "--tasks", "lambada"]) == 2
    assert main(["evaluate", str(trained_folder)]) == 2
    assert "tasks is missing (built-in names, NAME=FILE, your own files, harness:NAME)" in capsys.readouterr().err


def sweep_recipe(folder: Path, name: str, steps: int, sizes: str) -> Path:
    for n in range(30):
        (folder / f"{n}.txt").write_text(story(n, 30))
    recipe = folder / f"{name}.toml"
    recipe.write_text(
        f"""
        folder = "{folder}/{name}"
        sizes = {sizes}
        head_width = 16
        [model]
        preset = "gpt2-laptop"
        context = 32
        [train]
        steps = {steps}
        batch = 4
        log_every = 2
        checkpoint_every = 10
        precision = "float32"
        device = "cpu"
        [data]
        paths = ["{folder}/*.txt"]
        folder = "{folder}/{name}-shards"
        validation_fraction = 0.2
        workers = 1
        tokenizer = {{ vocab_size = 300 }}
        """
    )
    return recipe


KILLED_SWEEP = """
import os, signal, sys, torch
from plume.cli.main import main
from plume.train.loop import Trainer

torch.set_num_threads(1)
plain = Trainer.update

def update(trainer):
    if trainer.folder.name == "2x32" and trainer.step == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(trainer)

Trainer.update = update
main(["sweep", sys.argv[1]])
"""


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was(tmp_path):
    """A real process, killed while it trains the second size; the losses are those of a sweep that was left alone."""
    sizes = '["1x16", "2x32", "2x48"]'
    assert main(["sweep", str(sweep_recipe(tmp_path, "whole", 40, sizes))]) == 0
    recipe = sweep_recipe(tmp_path, "killed", 40, sizes)
    killed = subprocess.run([sys.executable, "-c", KILLED_SWEEP, str(recipe)], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    weights = tmp_path / "killed" / "1x16" / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert not (tmp_path / "killed" / "2x48").exists() and not (tmp_path / "killed" / "report.json").exists()
    assert main(["sweep", str(recipe)]) == 0
    assert weights.stat().st_mtime_ns == written  # what was finished is not trained again
    whole, killed = (json.loads((tmp_path / n / "report.json").read_text())["sizes"] for n in ("whole", "killed"))
    for one, other in zip(whole, killed, strict=True):
        assert (one["name"], one["tokens"]) == (other["name"], other["tokens"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["validation"] == pytest.approx(other["validation"], rel=1e-4)


def test_tasks_on_a_cluster_score_as_here(trained_folder, made, tmp_path, monkeypatch):
    here = run(trained_folder, tmp_path / "here", "lambada", "hellaswag", data=made, plots=False)
    monkeypatch.setattr("plume.evaluate.evaluation.run_on_ray", as_ray_would)
    there = run(trained_folder, tmp_path / "there", "lambada", "hellaswag", data=made, plots=False, backend="ray")
    assert [t.first.task for t in there.tasks] == ["lambada", "hellaswag"]
    assert [t.first.metrics for t in there.tasks] == [t.first.metrics for t in here.tasks]
    files = [{file.name: file.read_bytes() for file in (tmp_path / n).glob("items/*.jsonl")} for n in ("here", "there")]
    assert files[0] and files[0] == files[1]


@pytest.mark.slow
def test_sizes_on_a_cluster_are_those_trained_here(tmp_path, monkeypatch):
    assert main(["sweep", str(sweep_recipe(tmp_path, "here", 6, '["1x16", "2x16"]'))]) == 0
    monkeypatch.setattr("plume.evaluate.size_sweep.run_on_ray", as_ray_would)
    assert main(["sweep", str(sweep_recipe(tmp_path, "there", 6, '["1x16", "2x16"]')), "--backend", "ray"]) == 0
    for size in ("1x16", "2x16"):
        files = [tmp_path / name / size / "model" / "model.safetensors" for name in ("here", "there")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_tasks_of_the_harness_need_the_harness(trained_folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    with pytest.raises(UserError, match=r"needs lm-evaluation-harness: pip install 'plume-lm\[eval\]'"):
        evaluate(EvaluateConfig(model=str(trained_folder), tasks=("harness:piqa",)))


@pytest.mark.slow
def test_a_stopped_sweep_says_so_and_goes_on(tmp_path, capsys, monkeypatch):
    """Ctrl-C saves the size that is being trained; the exit code is that of a training that was stopped."""
    from plume.train.loop import Trainer

    recipe, validate = sweep_recipe(tmp_path, "stopped", 40, '["1x16", "2x16"]'), Trainer.validate

    def press(self, *given):
        os.kill(os.getpid(), signal.SIGINT)
        return validate(self, *given)

    monkeypatch.setattr(Trainer, "validate", press)
    assert main(["sweep", str(recipe)]) == 130
    assert "interrupted while training 1x16; the same command continues" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(["sweep", str(recipe)]) == 0


def drawn_by(monkeypatch, module, draw):
    """The axes of what would be saved."""
    figures = []
    monkeypatch.setattr(f"plume.evaluate.{module}", lambda figure, file: figures.append(figure))
    draw()
    return [figure.axes[0] for figure in figures]


def test_losses_of_a_sweep_are_plain_numbers(tmp_path, monkeypatch):
    """They differ by little, so powers of ten would all be the same."""
    sizes = [
        Size(name=f"{n}x32", parameters=n * 40_000, tokens=100, compute=n * 1e9, loss=6.0 - n / 5, validation=None,
             seconds=1.0, curve=[])
        for n in (1, 2)
    ]  # fmt: skip
    for axes in drawn_by(monkeypatch, "report.save_figure", lambda: draw(sizes, tmp_path)):
        axes.figure.canvas.draw()
        labels = [label.get_text() for label in axes.get_yticklabels(which="both")]
        assert labels and all(re.fullmatch(r"[\d.]*", label) for label in labels), labels


def test_a_power_law_is_fitted_to_three_sizes():
    sizes = [
        Size(name=str(n), parameters=n, tokens=1, compute=n * n, loss=9.0, validation=3 * n**-0.1, seconds=1, curve=[])
        for n in (1000, 3000, 50_000)
    ]
    found = fits(sizes)
    assert found["parameters"] == pytest.approx({"scale": 3, "power": 0.1})
    assert found["compute"] == pytest.approx({"scale": 3, "power": 0.05}) and fits(sizes[:2]) == {}


def test_a_score_of_zero_can_be_seen(monkeypatch, tmp_path):
    value = SimpleNamespace(value=0.0, stderr=0.0)
    task = SimpleNamespace(first=SimpleNamespace(task="mine", headline="acc"), score=lambda: value)
    report = SimpleNamespace(tasks=[task])
    (axes,) = drawn_by(
        monkeypatch, "report.save_figure", lambda: picture(tmp_path / "scores.png", partial(scores, report))
    )
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"] == [0.0]


def test_a_sweep_trains_each_size_once(tmp_path, capsys):
    recipe = sweep_recipe(tmp_path, "sweep", 6, '["1x16", "2x32"]')
    assert main(["sweep", str(recipe)]) == 0
    report = json.loads((tmp_path / "sweep" / "report.json").read_text())
    first, second = report["sizes"]
    assert first["name"] == "1x16" and first["parameters"] < second["parameters"]
    assert first["tokens"] == second["tokens"] == 6 * 4 * 32
    assert second["compute"] > 6 * second["tokens"] * 2 * 12 * 32 * 32
    assert report["fits"] == {}  # any two points lie on a line
    assert "fitted to 3 sizes or more" in (tmp_path / "sweep" / "report.md").read_text()
    shown = capsys.readouterr().out
    assert f"validation loss {first['validation']:.4f}" in shown and f"{first['loss']:.4f}" not in shown
    for name in ("loss_by_parameters.png", "loss_by_compute.png"):
        assert (tmp_path / "sweep" / name).read_bytes().startswith(b"\x89PNG")
    weights = tmp_path / "sweep" / "2x32" / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    (tmp_path / "sweep" / "report.md").unlink()
    assert main(["sweep", str(recipe)]) == 0
    assert weights.stat().st_mtime_ns == written and (tmp_path / "sweep" / "report.md").exists()
    assert main(["sweep", str(recipe), "--sizes", '["4", "2x32"]']) == 2
    assert "'4' is not LAYERSxWIDTH" in capsys.readouterr().err
