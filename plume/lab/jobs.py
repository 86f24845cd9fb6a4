"""The kinds of job that experiments are made of, each a call of Plume's own functions.

A job is a function of plain settings, its own folder and the folders of the jobs it needs; it returns numbers by name.
Run again in the same folder after an interruption, it continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plume.config import (
    RECIPE,
    DataConfig,
    DistillConfig,
    EvaluateConfig,
    FinetuneConfig,
    PretrainConfig,
    UserError,
    build,
)
from plume.lab import text_tasks
from plume.util.files import write_rows
from plume.util.run_folder import bits_per_byte, read_run

Settings = Mapping[str, Any]
Numbers = dict[str, float]
TESTED = 40  # pairs that are translated
CHUNK = 3000  # characters of a document where the text has only a few


def corpus_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """A sample of the texts, one document in five kept apart for tasks."""
    from plume.data import read_documents

    paths = settings["paths"] or ["python:stdlib"]
    read = read_documents(build(DataConfig, {"paths": paths, "folder": str(work)}))
    texts, held = [], 0
    for document in read:
        texts.append(document.text)
        held += len(document.text)
        if held > 20 * settings["limit"]:
            break
    chunk = settings.get("document", CHUNK)
    if len(texts) < 100 or chunk != CHUNK:
        texts = [text[at : at + chunk] for text in texts for at in range(0, len(text), chunk)]
    chosen: dict[str, list[dict[str, str]]] = {"pretrain": [], "tasks": []}
    size = 0
    for place in text_tasks.shuffled(len(texts), 0):
        if size > settings["limit"]:
            break
        text = texts[place][: min(10 * CHUNK, settings["limit"] // 60)]
        size += len(text)
        chosen["tasks" if len(chosen["pretrain"]) >= 4 * (len(chosen["tasks"]) + 1) else "pretrain"].append(
            {"text": text}
        )
    if len(chosen["tasks"]) < 8:
        raise UserError(f"{', '.join(paths)}: {held:,} characters are too few for an experiment; give 100,000 or more")
    for name, rows in chosen.items():
        write_rows(work / f"{name}.jsonl", rows)
    return {"documents": float(len(chosen["pretrain"])), "characters": float(size)}


def tasks_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """Labelled rows made from the texts that are kept apart."""
    text_tasks.write_tasks(
        read_texts(needs[0] / "tasks.jsonl"), settings["names"], work, settings["rows"], settings["seed"]
    )
    return {}


def pairs_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """Sources and targets: the user's, or sentences behind themselves with their words in reverse order."""
    if settings["targets"]:
        pairs = aligned_pairs(settings["paths"], settings["targets"])
    else:
        found = [s for text in read_texts(needs[0] / "pretrain.jsonl") for s in text_tasks.sentences(text)]
        pairs = [(" ".join(reversed(sentence.split())), sentence) for sentence in found]
    pairs = [pairs[i] for i in text_tasks.shuffled(len(pairs), 0)[: settings["rows"]]]
    for name, part in {"test": pairs[:TESTED], "pairs": pairs[TESTED:]}.items():
        write_rows(work / f"{name}.jsonl", ({"text": source, "target": target} for source, target in part))
    return {"pairs": float(len(pairs))}


def aligned_pairs(data: Sequence[str], targets: Sequence[str]) -> list[tuple[str, str]]:
    """The lines of files with those of others: file by file, of paths as `plume prepare` takes them."""
    from plume.data.sources import find_files
    from plume.tasks.readers import aligned_rows

    sides = [[file for path in side for file in find_files(path)] for side in (data, targets)]
    if len(sides[0]) != len(sides[1]):
        raise UserError(f"data and targets have {len(sides[0]):,} and {len(sides[1]):,} files; they must be aligned")
    rows = [row for file, target in zip(*sides, strict=True) for _, row in aligned_rows(file, str(target))]
    return [(row["source"], row["target"]) for row in rows]


def leak_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """Training text with half of the test texts in it, and both halves of the test texts."""
    training, test = read_texts(needs[0] / "pretrain.jsonl"), read_texts(needs[0] / "tasks.jsonl")[:40]
    leaked, clean = test[0::2], test[1::2]
    for name, texts in {"leaked": leaked, "clean": clean, "with-leak": training + leaked, "without": training}.items():
        write_rows(work / f"{name}.jsonl", ({"text": text} for text in texts))
    return {}


def patterns_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """Documents that each hold examples of one rule, and a task for each rule with new examples."""
    text_tasks.write_patterns(work, settings["documents"], settings["items"], settings["seed"])
    return {}


def read_texts(file: Path) -> list[str]:
    from plume.data.tables import read_rows

    return [str(row["text"]) for _, row in read_rows(file)]


def prepare_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """Token shards and a tokenizer; with a second need, the tokenizer of that one."""
    from plume.data import prepare

    table = {**settings["data"], "paths": [str(needs[0] / settings["file"])], "folder": str(work), "workers": 1}
    if len(needs) > 1:
        table["tokenizer"] = {"folder": str(needs[1] / "tokenizer")}
    report = prepare(build(DataConfig, table)).report
    return {"tokens": float(report["tokens"])}


def pretrain_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """A pretrained model: its loss on held-out text, per token and, unless it is a masked one, in bits per byte."""
    from plume.train.pretrain import pretrain

    result = pretrain(build(PretrainConfig, {**settings, **run_fields(work), "prepared": str(needs[0])}))
    outcome = result.outcome
    return held_out(outcome, outcome.validation, work) | {"unigram": result.unigram} | size_of(work)


def distill_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """A student of a pretrained teacher: its loss on held-out text."""
    from plume.train.distill import distill

    table = {**settings, **run_fields(work), "teacher": str(needs[0]), "prepared": str(needs[1])}
    result = distill(build(DistillConfig, table))
    return held_out(result.outcome, result.student_loss, work) | size_of(work)


def run_fields(work: Path) -> dict[str, Any]:
    return {"folder": str(work), "resume": (work / RECIPE).is_file()}


def held_out(outcome: Any, validation: float | None, work: Path) -> Numbers:
    if not outcome.finished:
        raise KeyboardInterrupt
    loss = float(outcome.loss if validation is None else outcome.parts.get("masked", validation))
    per_token = read_run(work).bytes_per_token
    return {"loss": loss} | ({} if per_token is None else {"bits_per_byte": bits_per_byte(loss, per_token)})


def size_of(work: Path) -> Numbers:
    from plume.hf.weights import tensor_shapes

    return {"parameters": float(sum(math.prod(shape) for shape in tensor_shapes(work / "model").values()))}


def finetune_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """A pretrained model fine-tuned on one task with one seed at each rate: the best metric on the validation rows.

    The plots, predictions and baselines of `plume finetune` would take longer than the training of a small model.
    """
    from plume.train.distribute import shared_precision
    from plume.train.finetune import best_seed, run_seed
    from plume.train.finetune_plan import make_plan
    from plume.train.pretrain import open_run

    given = settings["task"]
    task = given if len(needs) < 2 else {name: str(needs[1] / file) for name, file in given.items()}
    table = {**settings["recipe"], "task": {**task, "length": settings["length"]}, "model": str(needs[0]), "seeds": 1}
    config = build(FinetuneConfig, {**table, **run_fields(work)})
    with open_run(config, config.device) as run:
        with run.starting():
            plan = make_plan(config)
        precision = shared_precision(run.ranks, config.precision)
        runs = [
            run_seed(replace(plan, lr=rate), config.seed, work / f"rate-{rate:g}", run.ranks, precision)
            for rate in settings["rates"]
        ]
        return {"score": best_seed(runs, plan.metric).score}


def evaluate_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """Zero-shot or few-shot scores of a model or of one of its checkpoints, task by task."""
    from plume.evaluate import evaluate
    from plume.hf import openable_steps

    recipe = dict(settings["recipe"])
    step = recipe.pop("quarter", None)
    model = str(needs[0]) if step is None else f"{needs[0]}@{openable_steps(needs[0])[step]}"
    files = [str(needs[1] / name) if (needs[1] / name).is_file() else name for name in settings["tasks"]]
    report = evaluate(
        build(EvaluateConfig, {**recipe, "tasks": files, "model": model, "out": str(work), "plots": False})
    )
    found = [task.first.metrics for task in report.tasks]
    values = [
        m["bits_per_byte"] if "bits_per_byte" in m else t.score() for m, t in zip(found, report.tasks, strict=True)
    ]
    return {name: float(metric.value) for name, metric in zip(settings["tasks"], values, strict=True)}


def cut_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """A model without its last layers: its output is the hidden states of the layer that is then the last."""
    from plume.lm import load

    lm = load(needs[0])
    body: Any = lm.model.body
    lm.model.config = body.config = replace(lm.model.config, layers=settings["layers"])
    del body.blocks[settings["layers"] :]
    lm.save(work)
    lm.close()
    return {}


def speed_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """Tokens per second of a forward pass over eight sequences, the fastest of many."""
    import time

    import torch

    from plume.lm import load

    lm = load(needs[0])
    model, tokens, best = lm.model, torch.zeros(8, 64, dtype=torch.long), math.inf
    with torch.inference_mode(), model.eval_mode():
        for _ in range(settings["rounds"]):
            start = time.perf_counter()
            model.body(tokens)
            best = min(best, time.perf_counter() - start)
    lm.close()
    return {"tokens_per_second": tokens.numel() / best}


def translate_job(settings: Settings, work: Path, needs: Sequence[Path]) -> Numbers:
    """BLEU of greedy translations of the pairs that are kept apart."""
    from plume.data.tables import read_rows
    from plume.lm import load
    from plume.tasks.metrics import GenerationMetric

    lm, metric = load(needs[0]), GenerationMetric()
    rows = [row for _, row in read_rows(needs[1] / "test.jsonl")][: settings["rows"]]
    found = lm.translate([str(row["text"]) for row in rows], beams=1, max_new_tokens=40)
    for row, translation in zip(rows, found, strict=True):
        metric.add(str(row["target"]), translation.text)
    lm.close()
    return {"bleu": float(metric.results()["bleu"])}


KINDS: dict[str, Callable[[Settings, Path, Sequence[Path]], Numbers]] = {
    "corpus": corpus_job,
    "tasks": tasks_job,
    "pairs": pairs_job,
    "leak": leak_job,
    "patterns": patterns_job,
    "prepare": prepare_job,
    "pretrain": pretrain_job,
    "distill": distill_job,
    "finetune": finetune_job,
    "evaluate": evaluate_job,
    "cut": cut_job,
    "speed": speed_job,
    "translate": translate_job,
}
