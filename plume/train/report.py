"""What is told of a task before and after training: balance and lengths, results by seed, plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plume.data.tasks import TaskData
from plume.files import new_figure, save_figure

if TYPE_CHECKING:
    from plume.train.finetune import FinetuneResult
    from plume.train.task_plan import Plan

MOST_LABELS = 12  # shown by name
RULES = {
    "tag": "cut between words into several rows",
    "span": "read in overlapping windows",
    "translate": "cut at their end",
}


def describe_data(plan: Plan) -> str:
    """Columns, class balance, lengths, and what will happen to long rows, as a few lines of markdown."""
    data, cut = plan.data, plan.job.cut
    columns = ", ".join(
        f"{field} = {column!r}{' (guessed)' if field in data.guessed else ''}" for field, column in data.columns.items()
    )
    what = f"{data.kind}, {'a number' if data.target == 'number' else 'labels'}"
    lines = [
        f"- task: {what}; columns: {columns}",
        f"- rows: {len(data.train):,} training, {len(data.validation):,} validation, {len(data.test):,} test",
        *balance(data),
    ]
    low, middle, high, top = (int(q) for q in np.quantile(plan.train.lengths, [0, 0.5, 0.95, 1]))
    lines.append(f"- tokens: shortest {low}, median {middle}, 95 % below {high}, longest {top}")
    if cut.rows:
        rule = RULES.get(data.kind, "cut at the end of their longest text")
        lines.append(f"- {cut.rows:,} rows are longer than fits (up to {cut.longest:,} tokens): they are {rule}")
    lines.append(
        f"- learning rate {plan.lr:.3g} ({plan.why_lr}), {plan.config.epochs:g} epochs, batches of {plan.config.batch}"
    )
    lines += [
        f"- left out: {count:,} rows, {reason} (first: {data.left_out.first[reason]})"
        for reason, count in data.left_out.counts.most_common()
    ]
    return "\n".join(lines)


def balance(data: TaskData) -> list[str]:
    if data.target == "number" and data.kind != "embed":
        numbers = np.array([e.label for e in data.train])
        return [f"- targets: mean {numbers.mean():.3g}, from {numbers.min():.3g} to {numbers.max():.3g}"]
    if not data.labels:
        return []
    counts = Counter(tag for e in data.train for tag in (e.label if data.kind == "tag" else [e.label]))
    total = sum(counts.values())
    shown = [f"{label} {count / total:.1%}" for label, count in counts.most_common(MOST_LABELS)]
    more = f" and {len(counts) - MOST_LABELS} more" if len(counts) > MOST_LABELS else ""
    return [f"- labels: {', '.join(shown)}{more}"]


def describe_run(plan: Plan, result: FinetuneResult) -> str:
    """The report of a finished run, in markdown."""
    config, metric = plan.config, result.metric
    names = list(result.best.metrics)
    rows = [
        f"| {s.seed}{' (kept)' if s.seed == result.best.seed else ''} | "
        + " | ".join(f"{s.metrics[name]:.4f}" for name in names)
        + f" | {s.best_step} of {s.steps} | {s.seconds:.0f} s | {'FAILED' if s.failed else 'fine'} |"
        for s in result.seeds
    ]
    about = result.summary
    lines = [
        f"# Fine-tuning {config.model} on {config.task.name or Path(config.task.train).name}",
        "",
        describe_data(plan),
        "",
        f"Validation {metric}: median {about['median']:.4f}, from {about['lowest']:.4f} to {about['highest']:.4f} "
        f"over {len(result.seeds)} seed{'s' * (len(result.seeds) > 1)} (deviation {about['deviation']:.4f}). "
        f"Answers that ignore the input: {result.baseline:.4f}.",
        "",
        "| seed | " + " | ".join(names) + " | best step | time | |",
        "|" + "---|" * (len(names) + 4),
        *rows,
        "",
        *notes(plan, result),
    ]
    pictures = ["curve.png", *(["confusion.png"] if plan.data.labels and plan.data.target == "label" else [])]
    lines += [f"![{name}]({name})" for name in pictures if (config.folder / name).is_file()]
    return "\n".join(lines) + "\n"


def notes(plan: Plan, result: FinetuneResult) -> list[str]:
    """Seeds that failed, thresholds that were chosen, and the test, where there are any."""
    lines, settings = list[str](), plan.job.settings
    failed = [s.seed for s in result.seeds if s.failed]
    if failed:
        lines += [
            f"Failed runs (no better than ignoring the input): seeds {', '.join(map(str, failed))}. "
            "A lower learning rate, a longer warm-up or more epochs may help.",
            "",
        ]
    if settings.threshold is not None:
        lines += [f"Threshold of the second label, chosen on the validation rows: {settings.threshold:.4f}.", ""]
    if settings.null_threshold is not None:
        lines += [f"Threshold of no answer, chosen on the validation rows: {settings.null_threshold:.4f}.", ""]
    if result.test is not None:
        lines += ["Test: " + ", ".join(f"{name} {value:.4f}" for name, value in result.test.items()) + ".", ""]
    return lines


def plot_confusion(confusion: Any, labels: Sequence[str], file: Path) -> None:
    """Right labels downwards, given ones to the right, each row as shares."""
    side = max(3.5, 0.5 * len(labels) + 2)
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(labels) <= 20:
        for row in range(len(labels)):
            for column in range(len(labels)):
                ink = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(confusion[row, column]), ha="center", va="center", color=ink)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("given")
    axes.set_ylabel("right")
    save_figure(figure, file)


def plot_curves(curves: Mapping[str, Sequence[Mapping[str, float]]], metric: str, file: Path) -> None:
    """The validation metric by step, a line for each seed."""
    if not any(curves.values()):
        return
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot([p["step"] for p in points], [p[metric] for p in points], "o-", markersize=3, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(f"validation {metric}")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, file)
