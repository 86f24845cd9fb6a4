"""A report for people and programs: report.md, report.json, plots, and what earlier runs in the folder found."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plume.config import UserError
from plume.evaluate.contamination import Seen
from plume.evaluate.metrics import Metric, higher_is_better
from plume.evaluate.published import published
from plume.evaluate.run import Result
from plume.files import new_figure, save_figure, write_json, write_text

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1
HISTORY = "history.jsonl"


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """One task, once per seed."""

    results: list[Result]
    seen: Seen | None = None

    @property
    def first(self) -> Result:
        return self.results[0]

    def score(self, name: str | None = None) -> Metric:
        """One seed's metric with its standard error, or the mean over seeds with the deviation between them."""
        name = self.first.headline if name is None else name
        if len(self.results) == 1:
            return self.first.metrics[name]
        values = [result.metrics[name].value for result in self.results]
        return Metric(float(np.mean(values)), float(np.std(values, ddof=1)))


@dataclass(frozen=True, kw_only=True)
class Report:
    tasks: list[TaskReport]
    earlier: list[dict[str, Any]] = field(default_factory=list)  # of the same folder

    def __getitem__(self, task: str) -> TaskReport:
        for report in self.tasks:
            if report.first.task == task:
                return report
        raise KeyError(task)

    def plain(self) -> dict[str, Any]:
        tasks = [
            {"results": [r.plain() for r in t.results], "contamination": None if t.seen is None else t.seen.plain()}
            for t in self.tasks
        ]
        return {"format": FORMAT, "tasks": tasks}


def read_report(folder: Path) -> Report:
    path = folder / "report.json" if folder.is_dir() else folder
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        tasks = [
            TaskReport(
                results=[Result.of(r) for r in task["results"]],
                seen=None if task["contamination"] is None else Seen.of(task["contamination"]),
            )
            for task in plain["tasks"]
        ]
    except FileNotFoundError:
        raise UserError(
            f"there is no report {path}; plume evaluate MODEL --tasks ... --out {folder} makes one"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged or not a report: {error!r}") from None
    return Report(tasks=tasks)


def write_report(report: Report, out: Path, *, plots: bool) -> None:
    earlier = read_history(out)
    names = draw_report(report, out) if plots else []
    write_text(out / "report.md", markdown(report, earlier, names))
    write_json(out / "report.json", report.plain())
    with (out / HISTORY).open("a", encoding="utf-8") as stream:
        for row in history_rows(report):
            stream.write(json.dumps(row) + "\n")


def summary(report: Report) -> Table:
    """The headline of each task, for the console."""
    from rich.table import Table

    shown = Table("task", "metric", "score", "shots", "items", "protocol")
    for task in report.tasks:
        shown.add_row(*map(str, headline_row(task)), task.first.protocol["name"])
    return shown


# ---- earlier runs ------------------------------------------------------------------------------------------------


def history_rows(report: Report) -> Iterable[dict[str, Any]]:
    for task in report.tasks:
        first, score = task.first, task.score()
        yield {
            "when": time.strftime("%Y-%m-%d %H:%M:%S"),
            **{name: getattr(first, name) for name in ("task", "model", "model_hash", "data_hash", "shots", "items")},
            "protocol": first.protocol,
            "metric": first.headline,
            "value": score.value,
            "stderr": score.stderr,
        }


def read_history(out: Path) -> list[dict[str, Any]]:
    path = out / HISTORY
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:  # a line that a crash has torn
            continue
    return rows


def comparable(row: dict[str, Any], result: Result) -> bool:
    same = ("task", "data_hash", "shots", "items")
    return (
        all(row.get(name) == getattr(result, name) for name in same)
        and row.get("protocol") == result.protocol
        and row.get("metric") == result.headline
    )


# ---- markdown ----------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def markdown(report: Report, earlier: Sequence[dict[str, Any]], plots: Sequence[str]) -> str:
    first = report.tasks[0].first
    parts = [
        f"# Evaluation of {first.model}",
        f"{first.parameters:,} parameters, model hash `{first.model_hash}`.",
        table(["task", "metric", "score", "shots", "items"], map(headline_row, report.tasks)),
    ]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in plots]
    for task in report.tasks:
        parts += task_section(task, earlier)
    return "\n\n".join(parts) + "\n"


def headline_row(task: TaskReport) -> list[object]:
    first = task.first
    better = "↑" if higher_is_better(first.headline) else "↓"
    return [first.task, f"{first.headline} {better}", task.score(), first.shots, first.items]


def task_section(task: TaskReport, earlier: Sequence[dict[str, Any]]) -> list[str]:
    first = task.first
    error = "standard error" if len(task.results) == 1 else f"deviation over {len(task.results)} seeds"
    parts = [
        f"## {first.task}",
        table(["metric", f"value ± {error}"], [[name, task.score(name)] for name in first.metrics]),
        table(["", ""], facts(task)),
    ]
    parts += [f"- {note}" for note in first.notes]
    known = published(first.model, first.task)
    if known:
        rows = [[row.metric, f"{row.value:g}", row.shots, row.source, row.note] for row in known]
        parts += ["Published:", table(["metric", "value", "shots", "source", "note"], rows)]
    before = [row for row in earlier if comparable(row, first)]
    if before:
        rows = [
            [row["when"], row["model"], f"`{row['model_hash']}`", f"{row['value']:.4g}",
             f"{task.score().value - row['value']:+.4g}"]
            for row in before[-10:]
        ]  # fmt: skip
        parts += [f"Earlier runs ({first.headline}):", table(["when", "model", "hash", "value", "now"], rows)]
    if task.seen is not None:
        parts += contamination_section(task.seen)
    return parts


def facts(task: TaskReport) -> list[list[object]]:
    """Everything that the numbers depend on."""
    first = task.first
    spoken = {name: value for name, value in first.protocol.items() if name != "name"}
    return [
        ["protocol", f"{first.protocol['name']} ({', '.join(f'{k}={v!r}' for k, v in spoken.items())})"],
        ["data", f"{Path(first.data).name}, hash `{first.data_hash}`"],
        ["model hash", f"`{first.model_hash}`"],
        ["shots", f"{first.shots}, seeds {', '.join(str(r.seed) for r in task.results)}"],
        [
            "items",
            f"{first.items}, {first.cut} with their context cut on the left, {first.skipped} left out as too long",
        ],
        ["tokens", f"{first.tokens:,}"],
        ["requests", f"{first.scored} computed, {first.reused} known from before"],
        ["time", f"{sum(r.seconds for r in task.results):.1f} s"],
    ]


def contamination_section(seen: Seen) -> list[str]:
    rows = [
        ["all", seen.dirty + seen.clean, seen.all_items],
        ["clean", seen.clean, "" if seen.clean_items is None else seen.clean_items],
        ["dirty", seen.dirty, "" if seen.dirty_items is None else seen.dirty_items],
    ]
    said = (
        f"Contamination: {seen.dirty} items share a run of {seen.ngram} words with the training data; on average "
        f"{seen.overlap:.1%} of an item's runs were found. {seen.short} items are shorter than that and count as clean."
    )
    return [said, table(["items", "count", seen.metric], rows)]


# ---- plots -------------------------------------------------------------------------------------------------------


def draw_report(report: Report, out: Path) -> list[str]:
    """Draw what there is to draw; returns the files' names."""
    drawn = {"scores.png": scores, "loss_by_position.png": positions, "calibration.png": calibration}
    return [name for name, draw in drawn.items() if picture(out / name, partial(draw, report))]


def picture(file: Path, draw: Callable[[Any], bool]) -> bool:
    """One pair of axes in a file, unless there is nothing to draw."""
    figure = new_figure(8, 5)
    drawn = draw(figure.add_subplot())
    if drawn:
        save_figure(figure, file)
    return drawn


def scores(report: Report, axes: Any) -> bool:
    """Accuracies as bars with their errors; other units do not fit beside them."""
    shown = [t for t in report.tasks if t.first.headline.startswith(("acc", "exact", "f1", "mcc", "rouge"))]
    if not shown:
        return False
    values = [t.score() for t in shown]
    errors = [0.0 if v.stderr is None else 1.96 * v.stderr for v in values]
    names = [f"{t.first.task} ({t.first.headline})" for t in shown]
    axes.barh(names, [v.value for v in values], xerr=errors)
    axes.plot(
        [v.value for v in values], names, "o", color="black", markersize=3, clip_on=False
    )  # a score of 0 shows too
    axes.invert_yaxis()
    axes.set_xlim(min([0.0, *(v.value for v in values)]), 1.0)
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
