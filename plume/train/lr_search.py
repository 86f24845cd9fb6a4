"""A search for the learning rate: short trainings at rates over three decades, and the middle of the best ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from plume.tasks.metrics import as_loss
from plume.util.console import tell
from plume.util.files import new_figure, read_json, save_figure, write_json

LOWEST, HIGHEST = 1e-5, 1e-2  # rates at the ends of the search
LONGEST = 200  # steps of one short training


@dataclass(frozen=True)
class RateScore:
    """A rate and the validation score after a short training; lower is better, infinite where it diverged."""

    lr: float
    loss: float

    def shown(self, metric: str) -> str:
        """The value of the metric."""
        return f"{as_loss(metric, self.loss):.4f}" if math.isfinite(self.loss) else "diverged"


def search(
    count: int, attempt: Callable[[float], float], folder: Path, *, metric: str, resume: bool, main: bool = True
) -> list[RateScore]:
    """The score of each of `count` rates, kept in search.json."""
    file = folder / "search.json"
    if resume and file.is_file():
        return [
            RateScore(row["lr"], math.inf if row["loss"] is None else row["loss"]) for row in read_json(file)["rates"]
        ]
    found = []
    for number, lr in enumerate(np.geomspace(LOWEST, HIGHEST, count).tolist(), 1):
        found.append(RateScore(lr, attempt(lr)))
        if main:
            tell(f"search {number}/{count}: learning rate {lr:.2g}, {metric} {found[-1].shown(metric)}")
    if main:
        rows = [{**asdict(one), "loss": one.loss if math.isfinite(one.loss) else None} for one in found]
        write_json(file, {"rates": rows})
    return found


def best_rate(scores: Sequence[RateScore]) -> float:
    """The rate with the best mean over itself and its neighbours; of equal ones the middle.

    One score is noisy, and a rate beside ones that diverge is too near to diverging.
    """
    losses = np.array([one.loss for one in scores])
    finite = np.isfinite(losses)
    if not finite.any():
        return min(one.lr for one in scores)
    spread = max(float(np.ptp(losses[finite])), 1e-3)
    losses = np.where(finite, losses, losses[finite].max() + spread)
    padded = np.pad(losses, 1, mode="edge")
    smooth = padded[:-2] / 4 + padded[1:-1] / 2 + padded[2:] / 4
    best = np.flatnonzero(smooth <= smooth.min() + 1e-9)
    return scores[int(best[len(best) // 2])].lr


def plot_search(scores: Sequence[RateScore], metric: str, chosen: float, file: Path) -> None:
    """Score by rate, with the chosen one marked."""
    points = [(one.lr, as_loss(metric, one.loss)) for one in scores if math.isfinite(one.loss)]
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    axes.semilogx([lr for lr, _ in points], [score for _, score in points], "o-")
    axes.axvline(chosen, linestyle="--", color="grey", label=f"chosen: {chosen:.2g}")
    axes.set_xlabel("learning rate")
    axes.set_ylabel(f"validation {metric} after a short training")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, file)
