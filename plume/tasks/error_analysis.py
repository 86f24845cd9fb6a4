"""Where a model is wrong: precision, recall and F1 of each label, calibration, and its worst mistakes."""

# L labels

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plume.tasks.metrics import ClassificationMetric
from plume.tasks.schema import Example, Prediction
from plume.tasks.task_kind import TaskKind

BINS = 10  # of confidence, equally wide


@dataclass(frozen=True)
class LabelScores:
    """The scores of one label against all others."""

    label: str
    precision: float
    recall: float
    f1: float
    rows: int  # that have the label


@dataclass(frozen=True)
class CalibrationBin:
    """Predictions of similar confidence: how many, how confident, how many of them are right."""

    rows: int
    confidence: float
    accuracy: float


def label_scores(metric: ClassificationMetric) -> list[LabelScores]:
    """Of every label, from the confusion matrix (L, L)."""
    counts = metric.confusion
    found = []
    for place, label in enumerate(metric.labels):
        hits, gold, predicted = (int(n) for n in (counts[place, place], counts[place].sum(), counts[:, place].sum()))
        precision, recall = hits / max(1, predicted), hits / max(1, gold)
        found.append(LabelScores(label, precision, recall, 2 * hits / max(1, gold + predicted), gold))
    return found


def calibration(examples: Sequence[Example], predictions: Mapping[int, Prediction]) -> list[CalibrationBin]:
    """Bins of predictions by the probability of the predicted label; empty bins are left out."""
    given = {n: examples[n].label for n in predictions if examples[n].label is not None}
    rows = [(predictions[n].scores[predictions[n].value], predictions[n].value == label) for n, label in given.items()]
    confidence, right = np.array([c for c, _ in rows]), np.array([r for _, r in rows], dtype=np.float64)
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    members = [m for m in (place == n for n in range(BINS)) if m.any()]
    return [CalibrationBin(int(m.sum()), float(confidence[m].mean()), float(right[m].mean())) for m in members]


def calibration_error(bins: Sequence[CalibrationBin]) -> float:
    """The expected calibration error: the mean gap between confidence and accuracy, weighted by rows."""
    total = sum(b.rows for b in bins)
    return sum(b.rows * abs(b.confidence - b.accuracy) for b in bins) / max(1, total)


def worst_mistakes(
    kind: TaskKind, examples: Sequence[Example], predictions: Mapping[int, Prediction], count: int = 20
) -> list[int]:
    """The numbers of the rows with the largest errors, the largest first; rows without an error are left out."""
    labelled = [n for n in predictions if kind.measurable(examples[n])]
    errors = {n: kind.row_error(examples[n], predictions[n]) for n in labelled}
    return sorted((n for n in labelled if errors[n] > 0), key=lambda n: (-errors[n], n))[:count]
