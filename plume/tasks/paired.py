"""Two models' predictions for the same rows: the difference of a metric with its interval, and a verdict in words."""

# N rows

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.data.batches import generator
from plume.tasks import metrics
from plume.tasks.schema import Example, Prediction
from plume.tasks.task_kind import TaskKind, evaluate
from plume.util.console import plural

UPDATES = 200_000  # predictions added over all resamples: a second or two
FEWEST, MOST = 100, 1000  # resamples
LARGEST = 5000  # rows of one resample; the error is scaled to all rows
FEWEST_APART = 6  # rows on which two models differ: by fewer, chance gives one of them all with p > 0.05
TEXTS = (30, 100)  # resamples and rows where metrics compare texts, which takes a hundred times as long


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a model compares with the best trivial model on the same rows."""

    metric: str
    against: str
    score: float
    baseline: float
    low: float  # 95 % interval of score - baseline
    high: float
    rows: int

    @property
    def outcome(self) -> str:
        """worse, level or better, by whether the interval holds 0."""
        if self.low <= 0.0 <= self.high:
            return "level"
        return "better" if (self.low > 0) == metrics.higher_is_better(self.metric) else "worse"

    def __str__(self) -> str:
        words = {"worse": "worse than", "level": "level with", "better": "better than"}[self.outcome]
        return (
            f"{words} {self.against}: {self.metric} {self.score:.3f} against {self.baseline:.3f} on "
            f"{plural(self.rows, 'row')} (difference {self.score - self.baseline:+.3f}, "
            f"95 % interval {self.low:+.3f} to {self.high:+.3f})"
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome, "text": str(self)}


def compare(
    kind: TaskKind,
    examples: Sequence[Example],
    ours: Mapping[int, Prediction],
    theirs: Mapping[int, Prediction],
    metric: str,
    against: str,
) -> Verdict:
    """The verdict on our predictions, by a paired bootstrap over the labelled rows.

    Resamples of a few rows are too much alike: where predictions differ on too few, the interval reaches to 0.
    """
    rows = np.array([n for n, e in enumerate(examples) if kind.measurable(e)])
    both = [evaluate(kind, examples, given).results()[metric] for given in (ours, theirs)]
    margin = metrics.NORMAL_95 * difference_error(kind, examples, ours, theirs, metric, rows)
    gap, (lowest, highest) = both[0] - both[1], metrics.possible(metric)
    low, high = max(lowest - highest, gap - margin), min(highest - lowest, gap + margin)
    if sum(ours[n].value != theirs[n].value for n in rows.tolist()) < FEWEST_APART:
        low, high = min(low, 0.0), max(high, 0.0)
    return Verdict(metric=metric, against=against, score=both[0], baseline=both[1], low=low, high=high, rows=len(rows))


def difference_error(
    kind: TaskKind,
    examples: Sequence[Example],
    ours: Mapping[int, Prediction],
    theirs: Mapping[int, Prediction],
    metric: str,
    rows: npt.NDArray[np.int64],
) -> float:
    """The standard error of the difference: rows are drawn with replacement, the same for both."""
    size = min(len(rows), LARGEST)
    count = min(MOST, max(FEWEST, UPDATES // max(1, size)))
    if not kind.selects_by_metric:
        count, size = TEXTS[0], min(size, TEXTS[1])
    draw, gaps = generator(0, "paired bootstrap"), []
    for _ in range(count):
        chosen = rows[draw.integers(0, len(rows), size)].tolist()
        values = []
        for given in (ours, theirs):
            total = kind.metric()
            for number in chosen:
                kind.update(total, examples[number], given[number])
            values.append(total.results()[metric])
        gaps.append(values[0] - values[1])
    return float(np.std(gaps, ddof=1)) * math.sqrt(size / len(rows))
