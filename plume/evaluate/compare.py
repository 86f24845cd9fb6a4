"""Two reports side by side: the same items, their differences, and whether chance would do as much."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import UserError
from plume.evaluate.report import TaskReport, read_report, table
from plume.evaluate.task_run import TaskResult
from plume.tasks.metrics import Metric, higher_is_better

DRAWS = 10_000
LIKELY = 0.05


@dataclass(frozen=True)
class Difference:
    """One task in two reports. The test is on what each item contributes, paired where the items are the same."""

    task: str
    metric: str
    first: Metric
    second: Metric
    items: int
    test: str
    probability: float | None  # of a difference at least this large when there is none
    better: str  # A, B or neither

    def cells(self) -> list[object]:
        p = "" if self.probability is None else f"{self.probability:.4f}"
        change = f"{self.second.value - self.first.value:+.4g}"
        return [self.task, self.metric, self.first, self.second, change, self.items, self.test, p, self.better]


def compare(first: Path, second: Path) -> list[Difference]:
    a, b = read_report(first), read_report(second)
    shared = [t.first.task for t in a.tasks if t.first.task in {u.first.task for u in b.tasks}]
    if not shared:
        raise UserError(f"{first} and {second} have no task in common")
    return [difference(a[task], b[task], records(first, a[task]), records(second, b[task])) for task in shared]


def records(folder: Path, task: TaskReport) -> list[dict[str, Any]]:
    """What was kept of each item, once for every seed."""
    base = folder if folder.is_dir() else folder.parent
    rows: list[dict[str, Any]] = []
    for result in task.results:
        path = base / result.items_file
        if path.is_file():
            with path.open(encoding="utf-8") as stream:
                rows += [json.loads(line) for line in stream]
    return rows


def difference(a: TaskReport, b: TaskReport, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Difference:
    metric = a.first.headline
    if metric not in b.first.metrics:
        raise UserError(f"{a.first.task}: the second report has no {metric}; it has {', '.join(b.first.metrics)}")
    if other := incomparable(a.first, b.first, metric):
        return verdict(a, b, metric, 0, f"not comparable: other {other}", None)
    windows = sizes(ours) == sizes(theirs)  # two tokenizers cut a long text into other windows
    if not windows and metric == "token_perplexity":  # and their tokens are not the same either
        metric = "bits_per_byte"
    left, right = contributions(ours, metric, windows=windows), contributions(theirs, metric, windows=windows)
    shared = sorted(left.keys() & right.keys())
    if not shared:
        return verdict(a, b, metric, 0, "no items kept", None)
    x, y = (np.array([side[key] for key in shared]) for side in (left, right))
    gain = float((y - x).mean())
    if set(np.unique(np.concatenate([x, y])).tolist()) <= {0.0, 1.0}:
        return verdict(a, b, metric, len(x), "McNemar, exact", mcnemar(x, y), gain)
    return verdict(a, b, metric, len(x), "sign flips", sign_flips(x - y), gain)


def incomparable(a: TaskResult, b: TaskResult, metric: str) -> str:
    """What two results do not share that their comparison depends on; likelihoods of two kinds may still choose."""
    if a.data_hash != b.data_hash:
        return "data"
    aside = ("likelihood",) if higher_is_better(metric) else ()
    first, second = ({name: value for name, value in r.protocol.items() if name not in aside} for r in (a, b))
    if first != second:
        return "protocol"
    return "examples" if a.shots != b.shots else "items" if a.items != b.items else ""


def sizes(rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [[size for _, size in row.get("windows", ())] for row in rows]


def contributions(rows: Sequence[dict[str, Any]], metric: str, *, windows: bool) -> dict[tuple[int, int], float]:
    """How good each item, or each window of a long text, is; the mean over seeds, which are no items of their own."""
    found = defaultdict[tuple[int, int], list[float]](list)
    for row in rows:
        item = row["item"]
        if windows and "windows" in row:
            for n, (total, _) in enumerate(row["windows"]):
                found[item, n].append(total)
        elif isinstance(row.get(metric), int | float):
            found[item, 0].append(float(row[metric]) if higher_is_better(metric) else -float(row[metric]))
        elif metric in ("acc", "mcc"):
            found[item, 0].append(float(row["prediction"] == row.get("good", row.get("gold"))))
        elif "loglikelihood" in row:
            found[item, 0].append(float(row["loglikelihood"]))
    return {key: sum(values) / len(values) for key, values in found.items()}


def mcnemar(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    """How likely so uneven a split of the items on which two differ is, tossing a coin for each."""
    only_first, only_second = int(((x == 1) & (y == 0)).sum()), int(((x == 0) & (y == 1)).sum())
    n, k = only_first + only_second, min(only_first, only_second)
    if n == 0:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2) for i in range(k + 1)]
    return min(1.0, 2 * sum(map(math.exp, logs)))


def sign_flips(differences: npt.NDArray[np.float64]) -> float:
    """How often a mean this far from zero comes up when each difference's sign is drawn at random."""
    observed = abs(differences.mean())
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(DRAWS // 100):
        signs = random.integers(0, 2, size=(100, len(differences)), dtype=np.int8) * 2 - 1
        hits += int((np.abs((signs * differences).mean(axis=1)) >= observed - 1e-12).sum())
    return (hits + 1) / (DRAWS + 1)


def verdict(
    a: TaskReport, b: TaskReport, metric: str, items: int, test: str, p: float | None, gain: float = 0.0
) -> Difference:
    first, second = a.score(metric), b.score(metric)
    better = "neither" if p is None or p >= LIKELY else "B" if gain > 0 else "A"
    return Difference(a.first.task, metric, first, second, items, test, p, better)


def comparison_table(differences: Sequence[Difference]) -> str:
    header = ["task", "metric", "A", "B", "B - A", "pairs", "test", "p", f"better (p < {LIKELY})"]
    return table(header, [d.cells() for d in differences])
