"""Answers of a model to a whole labelled set: predicted, measured, thresholds chosen, written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plume.data.examples import Example
from plume.files import write_rows
from plume.heads import Model
from plume.train import metrics
from plume.train.jobs import Job, Prediction

JUDGED = 64  # items at a time


@torch.no_grad()
def predict(
    job: Job, model: Model, data: Any, examples: Sequence[Example], *, size: int = JUDGED
) -> dict[int, Prediction]:
    """The answer to every example. Logits live for one batch only."""
    device = next(model.parameters()).device
    batches = (batch.to(device) for batch in data.sweep(size))
    return dict(job.predictions(model, data, examples, batches))


def measure(job: Job, model: Model, data: Any, examples: Sequence[Example]) -> Any:
    """The task's metric over a labelled set, taken in as the answers come."""
    metric = job.metric()
    device = next(model.parameters()).device
    batches = (batch.to(device) for batch in data.sweep(JUDGED))
    with torch.no_grad():
        for number, prediction in job.predictions(model, data, examples, batches):
            job.judge(metric, examples[number], prediction)
    return metric


def sign(metric: str) -> float:
    """Makes lower better, as the loop wants it."""
    return 1.0 if metric in metrics.LOWER_IS_BETTER else -1.0


def best_null(examples: Sequence[Example], given: dict[int, Prediction]) -> float:
    """The advantage of no answer from which none is given, so that F1 is highest."""
    order = sorted((p.scores["no_answer"] - p.scores["score"], i) for i, p in given.items())
    gains = []
    for _, i in order:
        truths = [text for _, text in examples[i].label] or [""]
        start, end = int(given[i].scores["start"]), int(given[i].scores["end"])
        said = examples[i].fields["context"][start:end].strip()
        gains.append(max(metrics.word_f1(t, said) for t in truths) - max(metrics.word_f1(t, "") for t in truths))
    totals = np.concatenate([[0.0], np.cumsum(gains)])  # answer the first so many, refuse the rest
    cut = int(np.argmax(totals))
    values = [d for d, _ in order]
    if cut == 0:
        return values[0] - 1.0
    return values[-1] + 1.0 if cut == len(values) else (values[cut - 1] + values[cut]) / 2


def write_predictions(path: Path, examples: Sequence[Example], answers: dict[int, Prediction]) -> None:
    rows = list[dict[str, Any]]()
    for number, example in enumerate(examples):
        answer = answers[number]
        row = {"where": example.where, "label": example.label, "prediction": answer.value, "scores": answer.scores}
        rows.append(row | ({"id": example.fields["id"]} if "id" in example.fields else {}))
    write_rows(path, rows)
