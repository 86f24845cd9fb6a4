"""Minimal pairs (BLiMP, ZhoBLiMP), and what a report says of chance, intervals, prompts and limits."""

import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from stories import harness_task, sentence, story, write_rows

from plume.cli.main import main
from plume.config import PRESETS, EvaluateConfig, UserError
from plume.evaluate import evaluate
from plume.evaluate.eval_tasks import TASKS, find_rows, pairs_file
from plume.evaluate.items import PROTOCOLS, TaskRow
from plume.evaluate.task_run import interval
from plume.hf import load_model, save_model
from plume.model.heads import Model
from plume.tasks import metrics
from plume.text import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def pair_rows(count: int = 24) -> list[dict]:
    import random

    draw = random.Random(3)
    rows = []
    for n in range(count):
        good = sentence(draw)
        words = good.split()
        draw.shuffle(words)
        term = "order" if n % 3 else "food"
        pair = {"sentence_good": good, "sentence_bad": " ".join(words)}
        rows.append(pair | {"linguistics_term": term, "UID": f"u{n % 4}"})
    return rows


@pytest.fixture
def pairs(tmp_path) -> Path:
    rows = pair_rows()
    (tmp_path / "data" / "blimp").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "data" / "blimp" / "BLiMP.zip", "w") as archive:
        for part, name in enumerate(("one", "two")):
            archive.writestr(f"data/{name}.jsonl", "".join(json.dumps(r) + "\n" for r in rows[part::2]))
        archive.writestr("__MACOSX/data/._one.jsonl", b"\x00")
    return tmp_path / "data"


def run(folder, task, **more):
    return evaluate(EvaluateConfig(model=str(folder), tasks=(task,), plots=False, **more))


def items(out: Path, result) -> list[dict]:
    return [json.loads(line) for line in (out / result.items_file).read_text().splitlines()]


def test_pairs_as_the_harness(trained_folder, pairs, tmp_path):
    """The harness's own task description over the same rows, with transformers."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate as run_harness
    from lm_eval.models.huggingface import HFLM

    file = write_rows(tmp_path / "rows.jsonl", pair_rows())
    task = {"task": "pairs", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "", "doc_to_target": 0,
            "doc_to_choice": "{{[sentence_good, sentence_bad]}}", "metric_list": [{"metric": "acc"}]}  # fmt: skip
    made = ConfigurableTask(config=task | {"num_fewshot": 0})
    model = HFLM(pretrained=str(trained_folder), device="cpu", batch_size=4, dtype="float32")
    theirs = run_harness(lm=model, task_dict={"pairs": made}, bootstrap_iters=0)["results"]["pairs"]["acc,none"]
    result = run(trained_folder, "blimp", data=pairs, out=tmp_path / "out")["blimp"].first
    assert result.items == 24 and result.chance == 0.5
    assert abs(result.metrics["acc"].value - theirs) < 0.001
    assert set(result.groups) == {"food", "order"} and sum(count for _, count in result.groups.values()) == 24
    assert "| order |" in (tmp_path / "out" / "report.md").read_text()


def test_a_pair_reads_as_in_the_harness(tmp_path):
    row = pair_rows()[0]
    for name, file in (("blimp", "blimp/adjunct_island"), ("zhoblimp", "zhoblimp/BA_deletion")):
        try:
            task = harness_task(tmp_path, file, row)
        except FileNotFoundError:
            pytest.skip(f"this lm-eval has no {file}")
        (item,) = TASKS[name].build(TaskRow(row, "row 1"), PROTOCOLS["harness"])
        assert list(zip(item.contexts, item.continuations, strict=True)) == [i.args for i in task.instances]


def test_a_line_separator_in_a_pair_ends_no_line(tmp_path):
    row = {"sentence_good": "a\u2028b", "sentence_bad": "b\x85a"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row, ensure_ascii=False) + "\n") * 2, encoding="utf-8")
    assert [dict(found) for found in pairs_file(tmp_path)] == [{"UID": "rows", **row}] * 2


@pytest.mark.parametrize("line", ["{not json", "[1, 2]", "[" * 100_000])
def test_a_line_that_is_no_pair_is_named(line, tmp_path):
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'sentence_good': 'a', 'sentence_bad': 'b'})}\n{line}\n")
    with pytest.raises(UserError, match=r"rows\.jsonl line 2: not a JSON object"):
        list(pairs_file(tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_a_named_pipe_among_pairs_is_left_out(pairs, tmp_path):
    with zipfile.ZipFile(pairs / "blimp" / "BLiMP.zip") as archive:
        archive.extractall(tmp_path)
    here = replace(TASKS["blimp"], path=tmp_path)
    rows = list(find_rows(here, "test", None).rows())
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert list(find_rows(here, "test", None).rows()) == rows != []


def test_a_limit_takes_pairs_from_every_paradigm(trained_folder, tmp_path):
    (tmp_path / "blimp").mkdir()
    for name in "abcdef":
        rows = [row | {"linguistics_term": name} for row in pair_rows(10)]
        write_rows(tmp_path / "blimp" / f"{name}.jsonl", rows)
    result = run(trained_folder, f"blimp={tmp_path / 'blimp'}", limit=12)["blimp"].first
    assert {name: count for name, (_, count) in result.groups.items()} == dict.fromkeys("abcdef", 2)
    assert run(trained_folder, f"blimp={tmp_path / 'blimp'}", limit=1000)["blimp"].first.items == 60


@pytest.mark.parametrize("head", ["classify", "tag", "span", "choose", "similarity", "bare"])
def test_a_fine_tuned_model_is_refused_before_its_rows_are_read(head, trained_folder, tmp_path):
    causal = head != "bare"
    preset, size = PRESETS["gpt2" if causal else "bert-tiny"], {"context": 48, "layers": 1, "heads": 2, "width": 16}
    tokenizer = load_tokenizer(trained_folder)
    labels = ("no", "yes") if head in ("classify", "tag", "similarity") else ()
    model = Model(replace(preset, vocab_size=tokenizer.vocab_size, **size), head, labels)
    save_model(model, tmp_path / "tuned", tokenizer=tokenizer)
    file = write_rows(tmp_path / "rows.jsonl", [{"sentence": "a cat", "label": "yes"}])
    with pytest.raises(UserError, match=rf"tuned has a {head} head.*--task\.test FILE of plume finetune; use it"):
        run(tmp_path / "tuned", str(file))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_a_constant_model_scores_chance(masked, trained_folder, masked_folder, pairs, tmp_path):
    folder = masked_folder if masked else trained_folder
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    save_model(model, tmp_path / "constant", tokenizer=tokenizer)
    (tmp_path / "blimp").mkdir()
    same = [{"sentence_good": "a cat ate", "sentence_bad": "a ate cat", "UID": "x"} for _ in range(9)]
    file = write_rows(tmp_path / "blimp" / "rows.jsonl", same)
    assert run(tmp_path / "constant", f"blimp={file}")["blimp"].score().value == 0.5


def test_a_masked_model_is_scored_on_pairs(masked_folder, pairs):
    result = run(masked_folder, "blimp", data=pairs)["blimp"].first
    assert result.items == 24 and 0 <= result.metrics["acc"].value <= 1


def test_the_real_archives_are_read(shared):
    data = shared / "data"
    counts = {name: sum(1 for _ in find_rows(TASKS[name], "test", data).rows()) for name in ("blimp", "zhoblimp")}
    assert counts["blimp"] == 67_000 and counts["zhoblimp"] > 30_000


def test_a_folder_of_pairs_is_read_too(pairs, tmp_path, trained_folder):
    with zipfile.ZipFile(pairs / "blimp" / "BLiMP.zip") as archive:
        archive.extractall(tmp_path / "flat")
    for hidden in (tmp_path / "flat" / "__MACOSX").rglob("._*"):
        hidden.unlink()
    whole = run(trained_folder, "blimp", data=pairs)["blimp"].first
    again = run(trained_folder, f"blimp={tmp_path / 'flat'}")["blimp"].first
    assert again.metrics == whole.metrics and again.items == 24


# ---- winograd ----------------------------------------------------------------------------------------------------

WINOGRAD = [
    ("The men scared the boys because they were loud.", "they"),
    ("Ann asked Eve whether she, too, had slept.", "she"),
    ("The cup fell on the plate and broke. Its owner wept.", "Its"),
    ("Bob gave Tom his hat.", "his"),
]


@pytest.mark.parametrize("case", WINOGRAD, ids=lambda case: case[1])
def test_winograd_reads_as_in_the_harness(case, tmp_path):
    """The blank after the pronoun is there, and the harness adds one of its own."""
    text, pronoun = case
    row = {
        "text": text,
        "pronoun": pronoun,
        "pronoun_loc": text.index(pronoun),
        "options": ["The men", "Ann"],
        "label": 0,
    }
    task = harness_task(tmp_path, "wsc273/default", row)
    (item,) = TASKS["winograd"].build(TaskRow(row, "row 1"), PROTOCOLS["harness"])
    assert list(zip(item.contexts, item.continuations, strict=True)) == [i.args for i in task.instances]
    (paper,) = TASKS["winograd"].build(TaskRow(row, "row 1"), PROTOCOLS["gpt2-paper"])
    assert paper.continuations == (text[text.index(pronoun) + len(pronoun) :],) * 2


# ---- what a report says ------------------------------------------------------------------------------------------


def test_items_keep_their_prompts(trained_folder, made, tmp_path):
    result = run(trained_folder, "hellaswag", data=made, out=tmp_path, limit=3, shots=1)["hellaswag"].first
    rows = items(tmp_path, result)
    assert all(row["prompt"].count("\n\n") == 1 and len(row["continuations"]) == 4 for row in rows)
    result = run(trained_folder, "lambada", data=made, out=tmp_path, limit=3)["lambada"].first
    passages = [json.loads(line)["text"] for line in (made / "lambada" / "lambada_test.jsonl").read_text().splitlines()]
    assert [row["prompt"] + row["target"] for row in items(tmp_path, result)] == passages[:3]


def test_two_right_answers_are_no_certainty(trained_folder, tmp_path):
    """Wilson's interval, by statsmodels' formula written out, and the chance level; never 1 ± 0."""
    row = {"context": "The cat went to the house and it ate", "choices": ["milk", "zqx"], "answer": 0}
    file = write_rows(tmp_path / "two.jsonl", [row, row])
    result = run(trained_folder, str(file), out=tmp_path / "out")["two"].first
    assert result.metrics["acc"].value == 1 and result.chance == 0.5
    low, high = result.interval
    assert high == pytest.approx(1) and low == pytest.approx(1 / (1 + 1.96**2 / 2), abs=1e-9)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "1 [0.342, 1]" in text and "| chance |" in text.replace("| chance | shots", "| chance |")


def test_an_interval_lies_where_the_metric_can():
    """A perplexity is the exponential of a mean: its interval is that of scipy's normal distribution for the mean."""
    nats = np.array([9.0, 2.0, 5.0])
    found = metrics.perplexity((-nats).tolist())
    ends = np.exp(scipy.stats.norm.interval(0.95, nats.mean(), scipy.stats.sem(nats)))
    assert interval([{}], "perplexity", found) == pytest.approx(ends, rel=1e-3)
    assert found.value - 1.96 * found.stderr < 0
    assert interval([{}], "token_perplexity", metrics.Metric(1.2, 0.4))[0] == 1
    assert interval([{}], "f1", metrics.Metric(0.9, 0.2)) == (pytest.approx(0.508), 1.0)
    assert interval([{}], "mcc", metrics.Metric(-0.9, 0.2)) == (-1.0, pytest.approx(-0.508))
    assert interval([{}], "bleu", metrics.Metric(40.0, 2.0)) == pytest.approx((36.08, 43.92))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_interval_of_right_answers_lies_between_0_and_1(share):
    found = [interval([{"acc": share}] * n, "acc", SimpleNamespace(value=share, stderr=None)) for n in range(1, 60)]
    assert all(0 <= low < high <= 1 for low, high in found)


@pytest.mark.parametrize("protocol", ["harness", "gpt2-paper"])
def test_a_limit_bounds_long_texts(protocol, trained_folder, tmp_path):
    (tmp_path / "text8").mkdir()
    (tmp_path / "text8" / "text8").write_text(story(1, 400))
    result = run(trained_folder, "text8", data=tmp_path, limit=2, protocol=protocol)["text8"].first
    assert result.tokens < 1500
    (tmp_path / "wikitext-2").mkdir()
    pages = "".join(f" \n = Page {n} = \n \n {story(n, 20)} \n" for n in range(30))
    (tmp_path / "wikitext-2" / "wiki.test.raw").write_text(pages)
    result = run(trained_folder, "wikitext-2", data=tmp_path, limit=2, protocol=protocol)["wikitext-2"].first
    assert result.tokens < 2500


def test_zero_shots_means_none_in_the_harness(trained_folder, monkeypatch):
    import lm_eval

    seen = []

    def answer(**options):
        seen.append(options["num_fewshot"])
        return {"results": {"t": {"acc,none": 0.5}}, "samples": {"t": [{"doc_hash": "a"}]}}

    monkeypatch.setattr(lm_eval, "simple_evaluate", answer)
    run(trained_folder, "harness:t")
    assert seen == [0]


def test_the_adapter_takes_an_empty_context(trained_folder):
    from lm_eval.models.huggingface import HFLM

    from plume.evaluate.harness import PlumeLM

    asked = [SimpleNamespace(args=("", text)) for text in ("The cat went", " milk", "a")]
    theirs = HFLM(pretrained=str(trained_folder), device="cpu", batch_size=1, dtype="float32")
    expected = theirs.loglikelihood([SimpleNamespace(args=a.args, arguments=a.args) for a in asked])
    found = PlumeLM(str(trained_folder)).loglikelihood(asked)
    assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=1e-4)


def test_two_evaluations_cannot_share_a_folder(trained_folder, made, tmp_path):
    from filelock import FileLock

    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(UserError, match="is in use"):
        run(trained_folder, "lambada", data=made, out=tmp_path / "out", limit=2)


def test_scores_over_the_checkpoints_of_a_run(tmp_path):
    """A short real run: a report for each checkpoint, one curve, and RUN@STEP gives the same number."""
    for n in range(30):
        (tmp_path / f"{n}.txt").write_text(story(n, 20))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
        folder = "{tmp_path}/run"
        [model]
        preset = "gpt2-laptop"
        layers = 1
        width = 32
        heads = 2
        context = 64
        [train]
        steps = 8
        batch = 4
        log_every = 2
        checkpoint_every = 4
        precision = "float32"
        device = "cpu"
        [data]
        paths = ["{tmp_path}/*.txt"]
        folder = "{tmp_path}/shards"
        [data.tokenizer]
        kind = "bytes"
        """
    )
    assert main(["pretrain", str(recipe)]) == 0
    rows = [{"context": "The cat went to the house and it ate", "choices": ["milk", "hay"], "answer": 0}] * 2
    file = write_rows(tmp_path / "mine.jsonl", rows)
    words = ["evaluate", str(tmp_path / "run"), "--tasks", str(file), "--out", str(tmp_path / "out")]
    assert main([*words, "--checkpoints", "all"]) == 0
    curve = json.loads((tmp_path / "out" / "curve.json").read_text())["mine"]
    assert len(curve) > 1 and curve[-1]["step"] == 8 and (tmp_path / "out" / "curve.png").is_file()
    for point in curve:
        assert run(f"{tmp_path / 'run'}@{point['step']}", str(file))["mine"].score().value == point["score"]
