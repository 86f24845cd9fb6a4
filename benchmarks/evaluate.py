"""Items per second against lm-evaluation-harness with transformers: same folder, same items, same cores, turn by turn.

python -m benchmarks.evaluate [--preset gpt2] [--rounds 3] [--threads 2] [--data FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.results import Row, real, report
from plume.config import PRESETS, EvaluateConfig, TokenizerConfig
from plume.evaluate.eval_tasks import find_task
from plume.evaluate.formats import split_pages
from plume.evaluate.items import find_protocol
from plume.evaluate.subject import ScoreStore, Subject
from plume.evaluate.task_run import TaskRun
from plume.hf import save_model
from plume.model.heads import Model
from plume.text import Tokenizer, load_tokenizer, train_tokenizer
from plume.util.progress import Progress


def texts(data: Path | None) -> tuple[list[str], list[str], Path | None]:
    """Passages, pages and a tokenizer folder: real ones where they are, else Python's manual."""
    if data is not None and (data / "lambada").is_dir():
        lines = (data / "lambada/lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
        pages = split_pages((data / "wikitext-2/wiki.test.raw").read_text(encoding="utf-8"))
        return [json.loads(line)["text"] for line in lines], pages, data.parent / "tokenizers" / "gpt2"
    from pydoc_data.topics import topics

    paragraphs = [" ".join(p.split()) for topic in topics.values() for p in topic.split("\n\n")]
    return [p for p in paragraphs if 200 < len(p) < 600], list(topics.values()), None


def make_data(folder: Path, passages: list[str], pages: list[str], items: int) -> None:
    draw = random.Random(0)
    for name in ("lambada", "wikitext-2"):
        (folder / name).mkdir()
    chosen = draw.sample(passages, items)
    write(folder / "lambada/test.jsonl", [{"text": text} for text in chosen])
    rows = []
    for text in draw.sample(passages, items // 3):
        words = text.split(" ")
        ends = [" ".join(draw.choice(passages).split(" ")[-12:]) for _ in range(3)]
        rows.append({"context": " ".join(words[:-12]), "choices": [" ".join(words[-12:]), *ends], "answer": 0})
    write(folder / "choices.jsonl", rows)
    page = next(p for p in pages if len(p) > 6000)[:9000]
    (folder / "wikitext-2/wiki.test.raw").write_text(page, encoding="utf-8")
    write(folder / "page.jsonl", [{"page": page}])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def their_task(name: str, file: Path) -> dict[str, Any]:
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    kinds: dict[str, dict[str, Any]] = {
        "lambada": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "choices": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_target": "answer",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "wikitext-2": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": wikitext_detokenizer,
            "process_results": process_results,
            "metric_list": [{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
    }
    files = {"data_files": {"test": str(file)}}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **kinds[name]}


def harness_seconds(model: Any, task: dict[str, Any]) -> tuple[float, float]:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate as run

    made = ConfigurableTask(config=task)
    began = time.perf_counter()
    found = run(lm=model, task_dict={task["task"]: made}, bootstrap_iters=0)
    seconds = time.perf_counter() - began
    values = found["results"][task["task"]]
    return seconds, next(v for k, v in values.items() if k.startswith(("acc,", "word_perplexity,")))


def our_seconds(subject: Subject, task: str, data: Path) -> tuple[float, float]:
    known = find_task(str(data / "choices.jsonl") if task == "choices" else task)
    with ScoreStore(None, subject.hash) as store:
        run = TaskRun(known, find_protocol("harness"), subject, store, subject.config, 1234)
        began = time.perf_counter()
        result = run.result(Progress(quiet=True), None)
        seconds = time.perf_counter() - began
    return seconds, result.metrics["word_perplexity" if task == "wikitext-2" else "acc"].value


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--preset", default="gpt2")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--items", type=int, default=24)
    words.add_argument("--threads", type=int, default=2)
    words.add_argument("--data", type=Path, default=real("data"))
    given = words.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # read when the harness is imported
    warnings.simplefilter("ignore")
    torch.set_num_threads(given.threads)
    passages, pages, vocabulary = texts(given.data)
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        data.mkdir()
        make_data(data, passages, pages, given.items)
        folder = make_model(Path(place) / "model", given.preset, passages, vocabulary)
        compare(folder, data, given.rounds)


def make_model(folder: Path, preset: str, passages: list[str], vocabulary: Path | None) -> Path:
    tokenizer: Tokenizer
    if vocabulary is None:
        tokenizer = train_tokenizer(TokenizerConfig(vocab_size=8192), passages)
    else:
        tokenizer = load_tokenizer(vocabulary)
    torch.manual_seed(0)
    model = Model(replace(PRESETS[preset], vocab_size=tokenizer.vocab_size))
    return save_model(model, folder, tokenizer=tokenizer)


def compare(folder: Path, data: Path, rounds: int) -> None:
    from lm_eval.models.huggingface import HFLM

    subject = Subject(EvaluateConfig(model=str(folder), tasks=("-",), data=data))
    assert subject.scorer.causal  # opened before the clock runs, as the harness's model is
    models = {n: HFLM(pretrained=str(folder), device="cpu", batch_size=n, dtype="float32") for n in (1, 8)}
    files = {"lambada": "lambada/test.jsonl", "choices": "choices.jsonl", "wikitext-2": "page.jsonl"}
    total: dict[str, list[float]] = {"plume": [], **{f"batch {n}": [] for n in models}}
    for task, file in files.items():
        count = sum(1 for _ in (data / file).open(encoding="utf-8"))
        taken: dict[str, list[float]] = {name: [] for name in total}
        values = set[str]()
        for _ in range(rounds):
            found = {"plume": our_seconds(subject, task, data)}
            for n, model in models.items():
                found[f"batch {n}"] = harness_seconds(model, their_task(task, data / file))
            for name, (seconds, value) in found.items():
                taken[name].append(seconds)
                values.add(f"{value:.4g}")
        for name, seconds in taken.items():
            total[name].append(median(seconds))
        say(task, count, taken, values)
    say("all three", 1, {name: [sum(seconds)] for name, seconds in total.items()}, set())


def say(task: str, count: int, taken: dict[str, list[float]], values: set[str]) -> None:
    """Ratios round by round, their median: against the harness's default batch of 1, and against 8."""
    ours = taken.pop("plume")
    ratios = {name: median(b / a for a, b in zip(ours, theirs, strict=True)) for name, theirs in taken.items()}
    said = f"; both say {', '.join(sorted(values))}" if values else ""
    report(
        *(
            Row(
                key=f"{task}, {name}",
                what=f"{task}: items/s against lm-evaluation-harness with transformers, {name}",
                figure=ratio,
                at_least=2.0,
                detail=f"{count / median(ours):.2f} and {count / median(taken[name]):.2f} items/s{said}",
            )
            for name, ratio in ratios.items()
        )
    )


if __name__ == "__main__":
    main()
