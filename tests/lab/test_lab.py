"""`plume reproduce`: verdicts that chance does not pass, jobs that run once, every experiment from end to end."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, random_model
from scipy import stats

from plume.cli.main import main
from plume.config import ReproduceConfig, TokenizerConfig, UserError
from plume.hf import load_model, save_model
from plume.lab import jobs, lab_report, runner
from plume.lab.experiment import KINDS_OF_MODEL, SCORES, Claim, Experiment, Lab, LabJob, jobs_of
from plume.lab.papers import EXPERIMENTS
from plume.lab.verdicts import paired_test, verdict
from plume.text import train_tokenizer

TINY = {"scale": 0.02, "seeds": 1}


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_paired_test_is_scipys(n):
    a, b = np.random.default_rng(n).normal(size=(2, n))
    ours, theirs = paired_test(a.tolist(), b.tolist()), stats.ttest_rel(a, b)
    interval = theirs.confidence_interval(0.95)
    assert (ours.p, ours.low, ours.high) == pytest.approx((theirs.pvalue, interval.low, interval.high), rel=1e-6)


def test_verdicts():
    assert verdict(paired_test([3.0, 3.1, 3.2], [1.0, 1.1, 1.1])) == "reproduced"
    assert verdict(paired_test([1.0, 1.1, 1.1], [3.0, 3.1, 3.2])) == "contrary"
    assert verdict(paired_test([3.0, 1.1, 1.2], [1.0, 1.1, 3.1])) == "open"
    assert verdict(paired_test([3.0, 3.1], [1.0, 1.1])) == "open", "two seeds say nothing"
    assert verdict(paired_test([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])) == "open"


# ---- a job that trains something in a millisecond -----------------------------------------------------------------


def probe(settings, work, needs):
    """Ridge regression on a new sample of two classes: the accuracy on other rows, of noisy labels where asked."""
    rng = np.random.default_rng(settings["seed"])
    x, weights = rng.normal(size=(260, 10)), np.ones(10) / 3
    y = np.sign(x @ weights + rng.normal(size=260))
    train = y[:60] * np.where(rng.random(60) < settings["noise"], -1, 1)
    fitted = np.linalg.solve(x[:60].T @ x[:60] + np.eye(10), x[:60].T @ train)
    return {"accuracy": float(np.mean(np.sign(x[60:] @ fitted) == y[60:]))}


def probing(noise, first=0):
    def variant(offset, level):
        def measured(lab, seed):
            return {"accuracy": (LabJob("probe", {"seed": first + 1000 * offset + seed, "noise": level}), "accuracy")}

        return measured

    return Experiment(
        name="probe", paper="none", question="?", published={"a": "1.0"}, published_as="made up",
        variants={"a": variant(1, 0.0), "b": variant(2, noise)}, claims=(Claim("a is better", "a", "b"),),
    )  # fmt: skip


@pytest.fixture
def probes(monkeypatch):
    calls = []

    def counted(settings, work, needs):
        calls.append(settings)
        return probe(settings, work, needs)

    monkeypatch.setitem(jobs.KINDS, "probe", counted)
    return calls


def outcomes(noise, folder):
    """The verdicts of 100 experiments that differ in their seeds alone."""
    found = []
    for number in range(100):
        lab = Lab(ReproduceConfig(folder=folder), 1.0, "")
        cells = probing(noise, first=10_000 * number).cells(lab)
        results = {job.key: probe(job.settings, None, ()) for job in jobs_of(cells)}
        table = {cell: {c: results[job.key][name] for c, (job, name) in m.items()} for cell, m in cells.items()}
        found.append(verdict(lab_report.tested(probing(noise).claims[0], table)))
    return found


def test_identical_variants_are_open_and_a_planted_effect_is_reproduced(tmp_path):
    assert outcomes(0.0, tmp_path).count("open") >= 95
    assert outcomes(1.0, tmp_path).count("reproduced") >= 95


def test_an_experiment_is_written_and_repeats_nothing(probes, tmp_path):
    experiment, config = probing(1.0), ReproduceConfig(folder=tmp_path / "a", scale=1.0, seeds=3)
    runner.run_experiment(experiment, config)
    assert len(probes) == 6
    first = (tmp_path / "a" / "probe" / "results.json").read_bytes()
    runner.run_experiment(experiment, config)
    assert len(probes) == 6
    assert (tmp_path / "a" / "probe" / "results.json").read_bytes() == first
    text = (tmp_path / "a" / "probe" / "report.md").read_text()
    assert "| a |" in text and "made up" in text and "Scale 1, 3 seeds" in text
    assert (tmp_path / "a" / "probe" / "plot.png").stat().st_size > 1000
    assert all("processor_seconds" in json.loads(f.read_text()) for f in (tmp_path / "a").glob("jobs/*/result.json"))
    assert json.loads(first)["claims"][0]["verdict"] in ("reproduced", "open")
    other = replace(experiment, name="other")
    runner.run_experiment(other, config)
    whole = (tmp_path / "a" / "results.md").read_text()
    assert "2 experiments, 2 claims" in whole and whole.count("| a is better | 3 |") == 2
    assert whole.index("\n## other\n") < whole.index("\n## probe\n") and (tmp_path / "a/results/other.png").is_file()


def test_models_that_have_learned_nothing_are_named(monkeypatch, tmp_path):
    def trained(settings, work, needs):
        return {**probe(settings, work, needs), "loss": 5.0 + settings["noise"], "unigram": 5.99}

    monkeypatch.setitem(jobs.KINDS, "probe", trained)
    config = ReproduceConfig(folder=tmp_path, scale=1.0, seeds=3)
    assert "no better than token" not in runner.run_experiment(probing(0.0), config)
    text = runner.run_experiment(replace(probing(1.0), name="other"), config)
    assert "3 of 6 pretrained models are no better than token frequencies alone" in text


def test_an_interrupted_experiment_continues_with_the_same_bytes(probes, tmp_path, monkeypatch):
    experiment = probing(1.0)
    runner.run_experiment(experiment, ReproduceConfig(folder=tmp_path / "whole", scale=1.0, seeds=3))
    probes.clear()
    whole = jobs.KINDS["probe"]

    def stopped(settings, work, needs):
        if len(probes) == 4:
            raise KeyboardInterrupt
        return whole(settings, work, needs)

    monkeypatch.setitem(jobs.KINDS, "probe", stopped)
    config = ReproduceConfig(folder=tmp_path / "cut", scale=1.0, seeds=3)
    with pytest.raises(KeyboardInterrupt):
        runner.run_experiment(experiment, config)
    monkeypatch.setitem(jobs.KINDS, "probe", whole)
    runner.run_experiment(experiment, config)
    assert len(probes) == 6
    results = [(tmp_path / name / "probe" / "results.json").read_bytes() for name in ("whole", "cut")]
    assert results[0] == results[1]


def test_jobs_are_named_by_what_they_read(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one")
    config = ReproduceConfig(folder=tmp_path, data=(str(text),))
    before = runner.data_digest(config)
    text.write_text("two")
    assert runner.data_digest(config) != before
    lab = Lab(config, 1.0, before)
    assert lab.corpus().key != replace(lab, digest="other").corpus().key
    assert lab.pretrained("gpt", 0).key == lab.pretrained("gpt", 0).key != lab.pretrained("gpt", 1).key


def test_other_tasks_need_no_new_pretraining(tmp_path):
    table = tmp_path / "my.csv"
    table.write_text("text,label\na,b\n")
    plain = ReproduceConfig(folder=tmp_path, data=(str(table),))
    before = runner.lab_for(EXPERIMENTS["distil"], replace(plain, tasks=(str(table),), scale=1.0))
    table.write_text("text,label\nc,d\n")
    after = runner.lab_for(EXPERIMENTS["distil"], replace(plain, tasks=(str(table),), scale=1.0, data=()))
    after = replace(after, config=before.config, digest=before.digest)
    model = before.pretrained("gpt", 0)
    assert model.key == after.pretrained("gpt", 0).key
    assert before.finetuned(model, 0)["my"][0].key != after.finetuned(model, 0)["my"][0].key


def test_two_tasks_of_one_name_are_refused(tmp_path):
    """Their scores would share a column."""
    config = ReproduceConfig(folder=tmp_path, tasks=("one/train.csv", "other/train.csv"), scale=1.0)
    with pytest.raises(UserError, match="two tasks would be called 'train'"):
        runner.lab_for(EXPERIMENTS["gpt1-ablations"], config)


def test_texts_among_zero_shot_tasks_are_better_when_lower(tmp_path):
    text, questions = tmp_path / "news.txt", tmp_path / "quiz.jsonl"
    text.write_text("Some text.")
    questions.write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n')
    tasks = (str(text), str(questions), f"wikitext-2={text}")
    lab = Lab(ReproduceConfig(folder=tmp_path, tasks=tasks), 1.0, "")
    columns = list(lab.evaluated(lab.pretrained("gpt2", 0)))
    made = ["missing-word", "swapped-words", "repeated-word"]
    assert columns == [*made, "bits per byte of news", "quiz", "bits per byte of wikitext-2"]
    assert Claim("?", "a", "b", (SCORES,)).chosen(columns) == [*made, "quiz"]
    assert Claim("?", "a", "b", ("quiz",)).chosen(columns) == ["quiz"]


def test_tasks_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "news.jsonl").write_text('{"text": "Some text."}\n')
    config = ReproduceConfig(folder=tmp_path, tasks=("~/news.jsonl",))
    lab = Lab(config, 1.0, "")
    assert "bits per byte of news" in lab.evaluated(lab.pretrained("gpt2", 0))
    before = runner.task_digest(config)
    (tmp_path / "news.jsonl").write_text('{"text": "Another text."}\n')
    assert runner.task_digest(config) != before


def test_aligned_data_in_folders_globs_and_compressed_files(tmp_path):
    (tmp_path / "work").mkdir()
    for side, text in (("data", "a b\r\nc d\n"), ("targets", "b a\nd c\n")):
        (tmp_path / side).mkdir()
        (tmp_path / side / "1.txt").write_text(text, newline="")
        (tmp_path / side / "2.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("{}", "{}/*"):
        sides = {key: [str(tmp_path / name.format(side))] for key, side in (("paths", "data"), ("targets", "targets"))}
        assert jobs.pairs_job({**sides, "rows": 100}, tmp_path / "work", []) == {"pairs": 4.0}
        rows = [json.loads(line) for line in (tmp_path / "work" / "test.jsonl").read_text().splitlines()]
        assert {(row["text"], row["target"]) for row in rows} == {("a b", "b a"), ("c d", "d c")}
    (tmp_path / "targets" / "2.txt.gz").unlink()
    with pytest.raises(UserError, match="2 and 1 files; they must be aligned"):
        jobs.pairs_job({**sides, "rows": 100}, tmp_path / "work", [])


@pytest.mark.parametrize("points", [4, 5])
def test_a_planted_law_is_found_and_few_points_are_warned_of(points):
    places = {f"v{i}": 10.0**i for i in range(points)}
    cells = {(name, seed): {"loss": (5 + seed) * x**-0.3} for seed in range(3) for name, x in places.items()}
    experiment = replace(probing(0.0), variants=dict.fromkeys(places), curves={"parameters": places}, fits="loss")
    law = lab_report.fitted(experiment, cells)["parameters"]
    assert law["power"] == pytest.approx(0.3) and law["interval"] == pytest.approx([0.3, 0.3])
    text = lab_report.law_text(experiment, "parameters", law)
    assert "parameters ^ -0.3000" in text and ("do not extrapolate" in text) == (points < 5)


def test_what_a_clock_measured_is_shown_but_is_no_result(probes, tmp_path):
    def timed(lab, seed):
        job = LabJob("probe", {"seed": seed, "noise": 0.0})
        return {"accuracy": (job, "accuracy"), "speed, rows/s": (job, "accuracy")}

    experiment = replace(probing(0.0), variants={"a": timed, "b": timed})
    experiment = replace(experiment, claims=(replace(experiment.claims[0], columns=("accuracy",)),))
    runner.run_experiment(experiment, ReproduceConfig(folder=tmp_path, scale=1.0))
    assert "speed, rows/s" in (tmp_path / "probe" / "report.md").read_text()
    assert "speed" not in (tmp_path / "probe" / "results.json").read_text()


def test_a_cut_model_gives_the_hidden_states_of_its_layer(tmp_path):
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=61), ["abc " * 9])
    config = replace(FAMILIES["bert"], vocab_size=tokenizer.vocab_size)
    save_model(random_model(config, "masked-token"), tmp_path / "whole", tokenizer=tokenizer)
    jobs.KINDS["cut"]({"layers": 2}, tmp_path / "cut", [tmp_path / "whole"])
    tokens, seen = torch.arange(7)[None], []
    whole, cut = (load_model(tmp_path / name).eval() for name in ("whole", "cut"))
    assert len(cut.body.blocks) == 2
    whole.body.blocks[1].register_forward_hook(lambda *args: seen.append(args[-1]))
    with torch.no_grad():
        whole.body(tokens)
        torch.testing.assert_close(cut.body(tokens), seen[0])


def test_every_experiment_is_well_formed(tmp_path):
    """Claims name variants that share a column, and a budget of minutes is met by the estimate."""
    lab = Lab(ReproduceConfig(folder=tmp_path, seeds=3), 1.0, "")
    claims = 0
    for experiment in EXPERIMENTS.values():
        cells = experiment.cells(lab)
        numbers = {cell: dict.fromkeys(measures, 1.0) for cell, measures in cells.items()}
        for claim in experiment.claims:
            assert lab_report.tested(claim, numbers).pairs == 3
            claims += 1
        assert set(experiment.published) <= set(experiment.variants)
        assert all(set(places) <= set(experiment.variants) for places in experiment.curves.values())
    assert len(EXPERIMENTS) == 14 and claims >= 12


def test_models_of_every_kind_read_equally_many_tokens_at_rates_for_their_norms(tmp_path):
    lab = Lab(ReproduceConfig(folder=tmp_path), 1.0, "")
    found = {kind: lab.pretrained(kind, 0).settings for kind in KINDS_OF_MODEL}
    tokens = {kind: s["train"]["batch"] * s["train"]["steps"] * s["model"]["context"] for kind, s in found.items()}
    assert len(set(tokens.values())) == 1, tokens
    after = {kind for kind, s in found.items() if s["train"]["muon_lr"] < 0.06 and s["train"]["lr"] < 0.02}
    assert after == {"gpt", "bert", "transformer"}, "norms behind the blocks"


def test_the_full_design_takes_ten_to_twenty_minutes_of_the_reference_machine(tmp_path):
    lab = Lab(ReproduceConfig(folder=tmp_path), 1.0, "")
    minutes = {name: runner.seconds_of(jobs_of(e.cells(lab))) / 60 for name, e in EXPERIMENTS.items()}
    assert max(minutes.values()) < 22 and sum(minutes.values()) < 130, minutes


def test_a_fine_tuning_costs_what_its_model_and_its_rows_cost(tmp_path):
    """Steps and operations, against a count that is written out here; longer pretraining makes no task dearer."""
    lab = Lab(ReproduceConfig(folder=tmp_path), 1.0, "")
    short, long = (lab.pretrained("bert", 0, steps=count) for count in (10, 500))
    one, other = (lab.finetuned(model, 0, ("word-order",))["word-order"][0] for model in (short, long))
    assert (one.flops, one.steps) == (other.flops, other.steps) and one.steps == 2 * 3 * 25, "two rates, three epochs"
    matrices = 3 * 12 * 64**2 + 1024 * 64
    assert one.flops == pytest.approx(one.steps * 16 * 32 * 6 * matrices, rel=0.1)  # attention is the rest
    cut = lab.features(long, 0, 1, ("word-order",))["word-order"][0]
    assert cut.flops / cut.steps < 0.8 * one.flops / one.steps and cut.needs[0].seconds < 2


@pytest.mark.slow
def test_minutes_decide_the_scale(tmp_path):
    (tmp_path / "speed.json").write_text('{"slower": 2.0}')
    experiment = EXPERIMENTS["optimisers"]
    for minutes in (5, 30):
        lab = runner.lab_for(experiment, ReproduceConfig(folder=tmp_path, minutes=minutes))
        seconds = 2.0 * runner.seconds_of(jobs_of(experiment.cells(lab)))
        assert 0.4 * minutes < seconds / 60 < 1.1 * minutes


def test_the_list_the_plan_and_mistakes(capsys, tmp_path):
    (tmp_path / "speed.json").write_text('{"slower": 1.0}')
    assert main(["reproduce", "--folder", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "gpt1-ablations" in listed and "minutes" in listed
    assert main(["reproduce", "--folder", str(tmp_path / "new")]) == 0 and not (tmp_path / "new").exists()
    capsys.readouterr()
    assert main(["reproduce", "distil", "--dry-run", "--folder", str(tmp_path)]) == 0
    assert "distill" in capsys.readouterr().out
    assert main(["reproduce", "gpt1-ablation", "--folder", str(tmp_path)]) == 2
    assert "did you mean 'gpt1-ablations'?" in capsys.readouterr().err
    with pytest.raises(UserError, match="leave one of them out"):
        ReproduceConfig(minutes=3, scale=1)
    few = tmp_path / "few.txt"
    few.write_text("Too little text.")
    words = ["reproduce", "optimisers", "--data", str(few), "--scale", "0.02", "--folder", str(tmp_path / "r")]
    assert main(words) == 2
    assert "too few" in capsys.readouterr().err


def test_the_page_of_results_agrees_with_itself():
    """Verdicts follow from intervals, claims from experiments, counts from rows; each has its picture."""
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "results.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[([\w-]+)\]\(#\1\) \| (.+?) \| (\d+) \| \S+ \| (\S+) to (\S+) \| (\w+) \|$", page, re.MULTILINE
    )
    names, words = {row[0] for row in rows}, [row[-1] for row in rows]
    assert names and names <= set(EXPERIMENTS)
    for name, text, seeds, low, high, word in rows:
        assert text in [claim.text for claim in EXPERIMENTS[name].claims] and int(seeds) >= 3
        assert float(low) > 0 if word == "reproduced" else float(high) < 0 if word == "contrary" else word == "open"
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("reproduced", "open", "contrary"))
    assert f"{len(names)} experiments, {len(rows)} claims: {counts}." in page
    assert all(0 < (docs / "results" / f"{name}.png").stat().st_size < 150_000 for name in names)
    assert {file.stem for file in (docs / "results").iterdir()} == names


# ---- the real ones ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_at_a_tiny_budget(name, lab_folder):
    runner.run_experiment(EXPERIMENTS[name], ReproduceConfig(folder=lab_folder, **TINY))
    found = json.loads((lab_folder / name / "results.json").read_text())
    assert set(found["table"]) == set(EXPERIMENTS[name].variants)
    assert [claim["verdict"] for claim in found["claims"]] == ["open"] * len(EXPERIMENTS[name].claims)
    assert (lab_folder / name / "plot.png").is_file()


@pytest.mark.slow
def test_a_csv_and_a_text_give_the_table_of_gpt1_for_them(tmp_path):
    words = ["red", "green", "blue", "old", "new", "big", "small", "warm", "cold"]
    rng = np.random.default_rng(0)
    lines = [
        f"the {rng.choice(words)} cat saw a {rng.choice(words)} dog in the {rng.choice(words)} house ."
        for _ in range(4000)
    ]
    (tmp_path / "my.txt").write_text("\n".join(lines))
    rows = [f"{line},{'warm' if 'warm' in line else 'other'}" for line in lines[:150]]
    (tmp_path / "my.csv").write_text("text,label\n" + "\n".join(rows))
    command = ["reproduce", "gpt1-ablations", "--data", str(tmp_path / "my.txt"), "--tasks", str(tmp_path / "my.csv")]
    assert main([*command, "--folder", str(tmp_path / "r"), "--scale", "0.02", "--seeds", "1"]) == 0
    found = json.loads((tmp_path / "r" / "gpt1-ablations" / "results.json").read_text())
    assert list(found["table"]) == ["full", "no auxiliary loss", "no pretraining", "LSTM", "LSTM, fewer units"]
    assert all(list(row) == ["my"] for row in found["table"].values())


@pytest.mark.slow
def test_a_killed_run_continues_and_two_runs_give_the_same_bytes(tmp_path):
    words = ["reproduce", "optimisers", "--scale", "0.02", "--seeds", "1"]
    command = [sys.executable, "-m", "plume", *words, "--folder", str(tmp_path / "a")]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while len(done := sorted((tmp_path / "a").glob("jobs/*/result.json"))) < 3:
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    written = {path: path.stat().st_mtime_ns for path in done}
    assert main([*words, "--folder", str(tmp_path / "a")]) == 0
    assert {path: path.stat().st_mtime_ns for path in done} == written
    assert main([*words, "--folder", str(tmp_path / "b"), "--workers", "2"]) == 0
    one, other = ((tmp_path / name / "optimisers" / "results.json").read_bytes() for name in "ab")
    assert one == other


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_on_ray(tmp_path):
    """A job and one that needs it, in processes that are not this one."""
    ray = pytest.importorskip("ray", reason="needs the extra `cluster`")

    def tokens(lab, seed):
        patterns = LabJob("patterns", {"documents": 50, "items": 3, "seed": seed})
        return {"tokens": (lab.prepared("gpt2", patterns, data={"tokenizer": {"kind": "bytes"}}), "tokens")}

    experiment = replace(probing(0.0), variants={"a": tokens, "b": tokens})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        runner.run_experiment(experiment, ReproduceConfig(folder=tmp_path / "ray", backend="ray", scale=1.0))
    finally:
        ray.shutdown()
    runner.run_experiment(experiment, ReproduceConfig(folder=tmp_path / "here", scale=1.0))
    one, other = ((tmp_path / name / "probe" / "results.json").read_bytes() for name in ("ray", "here"))
    assert one == other
