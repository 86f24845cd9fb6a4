"""The report of an evaluation: report.md, report.json, plots, published numbers, and earlier runs of the folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plume.config import UserError
from plume.evaluate.task_run import TaskResult
from plume.tasks.metrics import Metric, higher_is_better
from plume.util.console import plural
from plume.util.files import new_figure, save_figure, write_json, write_text

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1
HISTORY = "history.jsonl"


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """Items by whether any run of words in them stands in the training data."""

    ngram: int
    training_data: list[str]
    dirty: int
    clean: int
    short: int  # with fewer words than a run has: nothing can be said of them, and they count as clean
    overlap: float  # mean share of an item's runs that were found
    metric: str
    all_items: Metric
    clean_items: Metric | None
    dirty_items: Metric | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Contamination:
        numbers = {name: None if values[name] is None else Metric(**values[name]) for name in SUBSETS}
        return cls(**values | numbers)


SUBSETS = ("all_items", "clean_items", "dirty_items")


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """One task, once per seed."""

    results: list[TaskResult]
    seen: Contamination | None = None

    @property
    def first(self) -> TaskResult:
        return self.results[0]

    def score(self, name: str | None = None) -> Metric:
        """One seed's metric with its standard error, or the mean over seeds with the deviation between them."""
        name = self.first.headline if name is None else name
        if len(self.results) == 1:
            return self.first.metrics[name]
        values = [result.metrics[name].value for result in self.results]
        return Metric(float(np.mean(values)), float(np.std(values, ddof=1)))


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    tasks: list[TaskReport]
    earlier: list[dict[str, Any]] = field(default_factory=list)  # of the same folder

    def __getitem__(self, task: str) -> TaskReport:
        for report in self.tasks:
            if report.first.task == task:
                return report
        raise KeyError(task)

    def as_dict(self) -> dict[str, Any]:
        tasks = [
            {"results": [r.as_dict() for r in t.results], "contamination": None if t.seen is None else t.seen.as_dict()}
            for t in self.tasks
        ]
        return {"format": FORMAT, "tasks": tasks}


def read_report(folder: Path) -> EvaluationReport:
    path = folder / "report.json" if folder.is_dir() else folder
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        tasks = [
            TaskReport(
                results=[TaskResult.of(r) for r in task["results"]],
                seen=None if task["contamination"] is None else Contamination.of(task["contamination"]),
            )
            for task in plain["tasks"]
        ]
    except FileNotFoundError:
        raise UserError(
            f"there is no report {path}; plume evaluate MODEL --tasks ... --out {folder} makes one"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is corrupt or not a report: {error!r}") from None
    return EvaluationReport(tasks=tasks)


def write_report(report: EvaluationReport, out: Path, *, plots: bool) -> None:
    earlier = read_history(out)
    names = draw_report(report, out) if plots else []
    write_text(out / "report.md", markdown(report, earlier, names))
    write_json(out / "report.json", report.as_dict())
    with (out / HISTORY).open("a", encoding="utf-8") as stream:
        for row in history_rows(report):
            stream.write(json.dumps(row) + "\n")


def write_curve(steps: Sequence[int], reports: Sequence[EvaluationReport], out: Path, *, plots: bool) -> None:
    """The headline of each task over the checkpoints of a run: curve.json, curve.md and curve.png."""
    names = [task.first.task for task in reports[0].tasks]
    curves = {name: [report[name].first for report in reports] for name in names}
    points = {n: [{"step": s, "score": r.score.value, "interval": r.interval} for s, r in zip(steps, c, strict=True)]
              for n, c in curves.items()}  # fmt: skip
    write_json(out / "curve.json", points)
    rows = [
        [step, *(headline_score(report[name]) for name in names)] for step, report in zip(steps, reports, strict=True)
    ]
    write_text(out / "curve.md", table(["step", *(f"{n} ({curves[n][0].headline})" for n in names)], rows) + "\n")

    def draw(axes: Any) -> bool:
        for name, results in curves.items():
            axes.plot(steps, [r.score.value for r in results], "o-", label=f"{name} ({results[0].headline})")
            if results[0].chance is not None:
                axes.axhline(results[0].chance, linestyle=":", color="grey")
        axes.set_xlabel("step")
        axes.legend()
        axes.grid(alpha=0.3)
        return True

    if plots:
        picture(out / "curve.png", draw)


def summary(report: EvaluationReport) -> Table:
    """The headline of each task, for the console."""
    from rich.table import Table

    shown = Table("task", "metric", "score [95 %]", "chance", "shots", "items", "protocol")
    for task in report.tasks:
        shown.add_row(*map(str, headline_row(task)), task.first.protocol["name"])
    return shown


# ---- earlier runs ------------------------------------------------------------------------------------------------


def history_rows(report: EvaluationReport) -> Iterable[dict[str, Any]]:
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


def comparable(row: dict[str, Any], result: TaskResult) -> bool:
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


def markdown(report: EvaluationReport, earlier: Sequence[dict[str, Any]], plots: Sequence[str]) -> str:
    first = report.tasks[0].first
    parts = [
        f"# Evaluation of {first.model}",
        f"{first.parameters:,} parameters, model hash `{first.model_hash}`.",
        table(["task", "metric", "score [95 %]", "chance", "shots", "items"], map(headline_row, report.tasks)),
    ]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in plots]
    for task in report.tasks:
        parts += task_section(task, earlier)
    return "\n\n".join(parts) + "\n"


def headline_row(task: TaskReport) -> list[object]:
    first = task.first
    better = "↑" if higher_is_better(first.headline) else "↓"
    chance = "" if first.chance is None else f"{first.chance:.4g}"
    return [first.task, f"{first.headline} {better}", headline_score(task), chance, first.shots, first.items]


def headline_score(task: TaskReport) -> str:
    """The headline with its 95 % interval; over several seeds, with the deviation between them."""
    between = task.first.interval
    if len(task.results) > 1 or between is None:
        return str(task.score())
    return f"{task.score().value:.4g} [{between[0]:.3g}, {between[1]:.3g}]"


def task_section(task: TaskReport, earlier: Sequence[dict[str, Any]]) -> list[str]:
    first = task.first
    error = "standard error" if len(task.results) == 1 else f"deviation over {len(task.results)} seeds"
    parts = [
        f"## {first.task}",
        table(["metric", f"value ± {error}"], [[name, task.score(name)] for name in first.metrics]),
        table(["", ""], facts(task)),
    ]
    parts += [f"- {note}" for note in first.notes]
    if first.groups:
        rows = [[group, f"{value:.4g}", int(count)] for group, (value, count) in first.groups.items()]
        parts.append(table(["group", first.headline, "items"], rows))
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
        ["items", f"{first.items}, {first.cut} with context cut on the left, {first.skipped} left out as too long"],
        ["tokens", f"{first.tokens:,}"],
        ["requests", f"{first.scored} computed, {first.reused} from the stored scores"],
        ["time", f"{sum(r.seconds for r in task.results):.1f} s"],
    ]


def contamination_section(seen: Contamination) -> list[str]:
    rows = [
        ["all", seen.dirty + seen.clean, seen.all_items],
        ["clean", seen.clean, "" if seen.clean_items is None else seen.clean_items],
        ["dirty", seen.dirty, "" if seen.dirty_items is None else seen.dirty_items],
    ]
    dirty = f"{plural(seen.dirty, 'item')} {'shares' if seen.dirty == 1 else 'share'}"
    short = f"{plural(seen.short, 'item')} {'is' if seen.short == 1 else 'are'}"
    text = (
        f"Contamination: {dirty} a run of {plural(seen.ngram, 'word')} with the training data; on average "
        f"{seen.overlap:.1%} of an item's runs were found. {short} shorter than that and clean."
    )
    return [text, table(["items", "count", seen.metric], rows)]


# ---- plots -------------------------------------------------------------------------------------------------------


def draw_report(report: EvaluationReport, out: Path) -> list[str]:
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


def scores(report: EvaluationReport, axes: Any) -> bool:
    """Accuracies as bars with their errors; other units do not fit beside them."""
    shown = [t for t in report.tasks if t.first.headline.startswith(("acc", "exact", "f1", "mcc", "rouge"))]
    if not shown:
        return False
    values = [t.score() for t in shown]
    errors = [0.0 if v.stderr is None else 1.96 * v.stderr for v in values]
    names = [f"{t.first.task} ({t.first.headline})" for t in shown]
    axes.barh(names, [v.value for v in values], xerr=errors)
    axes.plot([v.value for v in values], names, "o", color="black", markersize=3, clip_on=False)  # 0 shows too
    axes.invert_yaxis()
    axes.set_xlim(min([0.0, *(v.value for v in values)]), 1.0)
    axes.set_xlabel("score, with its 95 % interval")
    axes.grid(axis="x", alpha=0.3)
    return True


def positions(report: EvaluationReport, axes: Any) -> bool:
    shown = [t.first for t in report.tasks if len(t.first.by_position.get("from", ())) > 1]
    for result in shown:
        places = [place + 1 for place in result.by_position["from"]]
        axes.plot(places, result.by_position["loss"], "o-", label=result.task)
    if shown:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("position in the text (tokens, from 1)")
        axes.set_ylabel("loss (nats per token)")
        axes.legend()
        axes.grid(alpha=0.3)
    return bool(shown)


def calibration(report: EvaluationReport, axes: Any) -> bool:
    shown = [t.first for t in report.tasks if sum(t.first.calibration.get("count", ())) > 0]
    axes.plot([0, 1], [0, 1], ":", color="grey")
    for result in shown:
        bins = result.calibration
        known = [i for i, count in enumerate(bins["count"]) if count]
        label = f"{result.task} (error {bins['error']:.3f})"
        axes.plot([bins["confidence"][i] for i in known], [bins["right"][i] for i in known], "o-", label=label)
    if shown:
        axes.set_xlabel("confidence")
        axes.set_ylabel("accuracy")
        axes.legend()
        axes.grid(alpha=0.3)
    return bool(shown)


# ---- published numbers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    task: str
    metric: str
    value: float  # accuracies between 0 and 1
    shots: str  # zero, few, ...
    source: str
    note: str = ""


def _gpt2(ppl: float, acc: float, cn: float, ne: float, w2: float, ptb: float, e8: float, t8: float, w103: float,
          one: float) -> list[Published]:  # fmt: skip
    rows = [
        ("lambada", "perplexity", ppl),
        ("lambada", "acc", acc / 100),
        ("cbt-cn", "acc", cn / 100),
        ("cbt-ne", "acc", ne / 100),
        ("wikitext-2", "token_perplexity", w2),
        ("ptb", "word_perplexity", ptb),
        ("enwik8", "bits_per_byte", e8),
        ("text8", "bits_per_character", t8),
        ("wikitext-103", "word_perplexity", w103),
        ("1bw", "word_perplexity", one),
    ]
    return [Published(task, metric, value, "zero", "GPT-2 paper, table 3") for task, metric, value in rows]


def _rerun(task: str, metric: str, value: float, source: str, note: str = "") -> Published:
    return Published(task, metric, value, "zero", source, note)


HARNESS = "lm-evaluation-harness"
NUMBERS: dict[str, list[Published]] = {
    "gpt2": [
        *_gpt2(35.13, 45.99, 87.65, 83.4, 29.41, 65.85, 1.16, 1.17, 37.50, 75.20),
        _rerun("lambada", "acc", 0.3256, HARNESS, "the whole last word, no filter"),
        _rerun("lambada", "perplexity", 40.06, HARNESS, "the whole last word"),
        _rerun("lambada-token", "acc", 0.4689, "re-runs", "only the last token"),
        _rerun("wikitext-2", "word_perplexity", 37.37, HARNESS),
        _rerun("hellaswag", "acc", 0.2892, HARNESS),
        _rerun("hellaswag", "acc_norm", 0.3114, HARNESS),
    ],
    "gpt2-medium": _gpt2(15.60, 55.48, 92.35, 87.1, 22.76, 47.33, 1.01, 1.06, 26.37, 55.72),
    "gpt2-large": [
        *_gpt2(10.87, 60.12, 93.45, 88.0, 19.93, 40.31, 0.97, 1.02, 22.05, 44.575),
        _rerun("wikitext-2", "token_perplexity", 19.44, "transformers' documentation", "windows do not overlap"),
        _rerun("wikitext-2", "token_perplexity", 16.44, "transformers' documentation", "stride 512"),
    ],
    "gpt2-xl": [
        *_gpt2(8.63, 63.24, 93.30, 89.05, 18.34, 35.76, 0.93, 0.98, 17.48, 42.16),
        _rerun("lambada", "acc", 0.5266, "GPT-2 paper", "without the stop-word filter"),
        _rerun("lambada", "perplexity", 10.63, HARNESS),
        _rerun("winograd", "acc", 0.7070, "GPT-2 paper"),
        _rerun("coqa", "f1", 0.55, "GPT-2 paper"),
        _rerun("nq", "exact_match", 0.041, "GPT-2 paper"),
        _rerun("wmt14-fr-en", "bleu", 11.5, "GPT-2 paper"),
        _rerun("cnn-dailymail", "rouge1", 0.2934, "GPT-2 paper"),
        _rerun("cnn-dailymail", "rouge2", 0.0827, "GPT-2 paper"),
        _rerun("cnn-dailymail", "rougeL", 0.2658, "GPT-2 paper"),
        _rerun("hellaswag", "acc", 0.4004, HARNESS),
        _rerun("hellaswag", "acc_norm", 0.5089, HARNESS),
    ],
    "gpt3-175b": [
        Published(task, metric, value, shots, "GPT-3 paper")
        for task, metric, zero, one, few in (
            ("lambada", "acc", 0.762, 0.725, 0.864),
            ("lambada", "perplexity", 3.00, 3.35, 1.92),
            ("storycloze", "acc", 0.832, 0.847, 0.877),
            ("hellaswag", "acc", 0.789, 0.781, 0.793),
        )
        for shots, value in (("zero", zero), ("one", one), ("few", few))
    ],
}


def published(model: str, task: str) -> list[Published]:
    """What is known of a model by its name: `gpt2`, `openai-community/gpt2`, `models/gpt2-xl`."""
    return [row for row in NUMBERS.get(Path(model).name.lower(), ()) if row.task == task]
