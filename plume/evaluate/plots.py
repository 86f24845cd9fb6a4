"""Pictures of a report: score by task, loss by position, calibration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plume.evaluate.report import Report


def plot_report(report: Report, out: Path) -> list[str]:
    """Write what there is to draw; returns the files' names."""
    drawn = {"scores.png": scores, "loss_by_position.png": positions, "calibration.png": calibration}
    return [name for name, draw in drawn.items() if picture(out / name, partial(draw, report))]


def picture(file: Path, draw: Callable[[Any], bool]) -> bool:
    """One figure, whole or not at all; nothing when there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if not draw(axes):
        return False
    aside = file.with_name(f".{file.name}")
    figure.savefig(aside, format="png", dpi=120)
    aside.replace(file)
    return True


def scores(report: Report, axes: Any) -> bool:
    """Accuracies as bars with their errors; other units do not fit beside them."""
    shown = [t for t in report.tasks if t.first.headline.startswith(("acc", "exact", "f1", "mcc", "rouge"))]
    if not shown:
        return False
    values = [t.score() for t in shown]
    errors = [0.0 if v.stderr is None else 1.96 * v.stderr for v in values]
    axes.barh([f"{t.first.task} ({t.first.headline})" for t in shown], [v.value for v in values], xerr=errors)
    axes.invert_yaxis()
    axes.set_xlim(min(0.0, *(v.value for v in values)) if len(values) > 1 else 0.0, 1.0)
    axes.set_xlabel("score, with its 95 % interval")
    axes.grid(axis="x", alpha=0.3)
    return True


def positions(report: Report, axes: Any) -> bool:
    shown = [t.first for t in report.tasks if len(t.first.by_position.get("from", ())) > 1]
    for result in shown:
        places = [place + 1 for place in result.by_position["from"]]
        axes.plot(places, result.by_position["loss"], "o-", label=result.task)
    if shown:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens before, and one")
        axes.set_ylabel("loss (nats per token)")
        axes.legend()
        axes.grid(alpha=0.3)
    return bool(shown)


def calibration(report: Report, axes: Any) -> bool:
    shown = [t.first for t in report.tasks if sum(t.first.calibration.get("count", ())) > 0]
    axes.plot([0, 1], [0, 1], ":", color="grey")
    for result in shown:
        bins = result.calibration
        known = [i for i, count in enumerate(bins["count"]) if count]
        label = f"{result.task} (error {bins['error']:.3f})"
        axes.plot([bins["confidence"][i] for i in known], [bins["right"][i] for i in known], "o-", label=label)
    if shown:
        axes.set_xlabel("how sure the model was")
        axes.set_ylabel("how often it was right")
        axes.legend()
        axes.grid(alpha=0.3)
    return bool(shown)
