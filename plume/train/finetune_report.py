"""What a fine-tuning reports: the data before training, results by seed afterwards, predictions and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plume.tasks.error_analysis import calibration, calibration_error, label_scores, worst_mistakes
from plume.tasks.metrics import ClassificationMetric, TaskMetric
from plume.tasks.schema import Example, Prediction
from plume.util.console import plural
from plume.util.files import new_figure, save_figure, write_rows

if TYPE_CHECKING:
    from plume.train.finetune import FinetuneResult
    from plume.train.finetune_plan import FinetunePlan

MOST_LABELS = 12  # shown by name


def describe_data(plan: FinetunePlan) -> str:
    """Columns, class balance, lengths, and how long rows are treated, as a few lines of markdown."""
    data, truncation = plan.data, plan.truncation
    columns = ", ".join(
        f"{field} = {column!r}{' (guessed)' if field in data.guessed else ''}" for field, column in data.columns.items()
    )
    what = data.kind + (", a number" if data.target == "number" else ", labels" if data.labels else "")
    low, middle, high, top = (int(q) for q in np.quantile(plan.train.lengths, [0, 0.5, 0.95, 1]))
    lines = [
        f"- task: {what}; columns: {columns}",
        f"- rows: {len(data.train):,} training, {len(data.validation):,} validation, {len(data.test):,} test",
        *skipped_rows(plan),
        *balance(plan),
        f"- tokens: shortest {low}, median {middle}, 95 % below {high}, longest {top}",
    ]
    if truncation.rows:
        lines.append(
            f"- longer than task.length={plan.kind.settings.length}: {plural(truncation.rows, 'row')} "
            f"(up to {truncation.longest:,} tokens), {plan.kind.overflow}"
        )
    return "\n".join(lines)


def describe_rate(plan: FinetunePlan) -> str:
    rate, epochs = f"learning rate {plan.lr:.3g} ({plan.lr_source})", plural(plan.config.epochs, "epoch")
    if plan.config.contrastive is not None:
        epochs = f"{plural(plan.config.contrastive, 'step')} on pairs of rows, then logistic regression"
    return f"- {rate}, {epochs}, batch size {plan.config.batch}"


def skipped_rows(plan: FinetunePlan) -> list[str]:
    skipped = plan.data.skipped
    return [
        f"- skipped: {plural(count, 'row')}, {reason} (first: {skipped.first[reason]})"
        for reason, count in skipped.counts.most_common()
    ]


def balance(plan: FinetunePlan) -> list[str]:
    """The frequency of each label, or the range of the numbers."""
    data = plan.data
    if data.target == "number" and data.labels:
        numbers = np.array([e.label for e in data.train])
        return [f"- targets: mean {numbers.mean():.3g}, from {numbers.min():.3g} to {numbers.max():.3g}"]
    counts = Counter(label for e in data.train for label in plan.kind.labels_of(e))
    if not counts:
        return []
    total = sum(counts.values())
    shown = [f"{label} {count / total:.1%}" for label, count in counts.most_common(MOST_LABELS)]
    more = f" and {len(counts) - MOST_LABELS} more" if len(counts) > MOST_LABELS else ""
    return [f"- labels: {', '.join(shown)}{more}"]


def describe_scores(result: FinetuneResult) -> str:
    """The validation metric of all seeds in one sentence, for the console and the report."""
    about, count = result.summary, len(result.seeds)
    failed = sum(seed.failed for seed in result.seeds)
    if count == 1:
        return f"validation {result.metric}: {about['median']:.4f} (1 seed{', failed' * failed})"
    spread = f"{about['lowest']:.4f} to {about['highest']:.4f}, standard deviation {about['deviation']:.4f}"
    said = f"; {plural(failed, 'seed')} failed" if failed else ""
    return f"validation {result.metric}: median {about['median']:.4f} over {count} seeds ({spread}){said}"


def describe_run(
    plan: FinetunePlan, result: FinetuneResult, metric: TaskMetric, predictions: Mapping[int, Prediction]
) -> str:
    """The report of a finished run, in markdown."""
    config, names = plan.config, list(result.best.metrics)
    rows = [
        f"| {s.seed}{' (kept)' if s.seed == result.best.seed else ''} | "
        + " | ".join(f"{s.metrics[name]:.4f}" for name in names)
        + f" | {s.best_step} of {s.steps} | {s.seconds:.0f} s | {'FAILED' if s.failed else ''} |"
        for s in result.seeds
    ]
    scores = describe_scores(result)
    lines = [
        f"# Fine-tuning {config.model} on {config.task.name or Path(config.task.train).name}",
        "",
        describe_data(plan),
        describe_rate(plan),
        "",
        f"{scores[0].upper()}{scores[1:]}. Predictions that ignore the input reach {result.baseline:.4f}.",
        "",
        "| seed | " + " | ".join(names) + " | best step | time | |",
        "|" + "---|" * (len(names) + 4),
        *rows,
        "",
        *describe_assessment(result),
        *notes(plan, result),
        *(describe_labels(metric, plan, predictions) if isinstance(metric, ClassificationMetric) else []),
        *describe_mistakes(plan, predictions),
    ]
    if plan.rates:
        tried = [[f"{one.lr:.2g}", one.shown(plan.selected_by)] for one in plan.rates]
        lines += ["## Search for the learning rate", "", *table(["learning rate", plan.selected_by], tried)]
    pictures = ["search.png", "curve.png", "confusion.png"]
    lines += [f"![{name}]({name})" for name in pictures if (config.folder / name).is_file()]
    return "\n".join(lines) + "\n"


def describe_assessment(result: FinetuneResult) -> list[str]:
    """The verdict, what is wrong, the next step, and the trivial models' metrics."""
    if result.assessment is None:
        return []
    names = list(result.best.metrics)
    rows = {"this model": result.best.metrics, **result.assessment.baselines}
    return [
        *(f"- {line}" for line in result.assessment.lines()),
        "",
        *table(["model", *names], [[name, *(f"{found[n]:.4f}" for n in names)] for name, found in rows.items()]),
    ]


def describe_labels(
    metric: ClassificationMetric, plan: FinetunePlan, predictions: Mapping[int, Prediction]
) -> list[str]:
    """Precision, recall and F1 of each label, the confusion matrix, and the calibration of probabilities."""
    found = label_scores(metric)
    scores = [[s.label, f"{s.precision:.3f}", f"{s.recall:.3f}", f"{s.f1:.3f}", str(s.rows)] for s in found]
    lines = ["## Labels", "", *table(["label", "precision", "recall", "F1", "rows"], scores)]
    if len(metric.labels) <= MOST_LABELS:
        pairs = zip(metric.labels, metric.confusion.tolist(), strict=True)
        counts = [[label, *map(str, row)] for label, row in pairs]
        lines += ["Rows are gold labels, columns predicted ones.", "", *table(["", *metric.labels], counts)]
    bins = calibration(plan.data.validation, predictions)
    shown = [[str(b.rows), f"{b.confidence:.3f}", f"{b.accuracy:.3f}"] for b in bins]
    text = f"Expected calibration error {calibration_error(bins):.3f}: the mean gap between probability and accuracy."
    return [*lines, text, "", *table(["rows", "mean probability", "accuracy"], shown)]


def describe_mistakes(plan: FinetunePlan, predictions: Mapping[int, Prediction]) -> list[str]:
    """The worst mistakes with their texts."""
    examples, rows = plan.data.validation, list[list[str]]()
    for number in worst_mistakes(plan.kind, examples, predictions):
        example, found = examples[number], predictions[number]
        text = " / ".join(str(value) for name, value in example.fields.items() if name != "id")
        score = found.scores.get(str(found.value))
        value = str(found.value) if score is None else f"{found.value} ({score:.2f})"
        rows.append([Path(example.where).name, short(str(example.label)), short(value), short(text, 300)])
    if not rows:
        return []
    title = "## The worst mistake" if len(rows) == 1 else f"## The {len(rows)} worst mistakes"
    return [title, "", *table(["row", "label", "prediction", "text"], rows)]


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table and an empty line."""
    lines = [names, ["---"] * len(names), *rows]
    return [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in line)} |" for line in lines] + [""]


def short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def notes(plan: FinetunePlan, result: FinetuneResult) -> list[str]:
    """Failed seeds, chosen thresholds and the test metrics, where there are any."""
    lines, settings = list[str](), plan.kind.settings
    failed = [s.seed for s in result.seeds if s.failed]
    if failed:
        runs, seeds = ("run", "seed") if len(failed) == 1 else ("runs", "seeds")
        shown = ", ".join(map(str, failed))
        lines += [f"Failed {runs} (no better than ignoring the input): {seeds} {shown}.", ""]
    if settings.threshold is not None:
        lines += [f"Threshold of the second label, chosen on the validation rows: {settings.threshold:.4f}.", ""]
    if settings.null_threshold is not None:
        lines += [f"Threshold of no answer, chosen on the validation rows: {settings.null_threshold:.4f}.", ""]
    if result.test is not None:
        lines += ["Test: " + ", ".join(f"{name} {value:.4f}" for name, value in result.test.items()) + ".", ""]
    return lines


def write_predictions(path: Path, examples: Sequence[Example], predictions: Mapping[int, Prediction]) -> None:
    rows = list[dict[str, Any]]()
    for number, example in enumerate(examples):
        found = predictions[number]
        row = {"label": example.label, "prediction": found.value, "scores": found.scores}
        rows.append({"where": example.where, **example.fields, **row})
    write_rows(path, rows)


def plot_confusion(confusion: Any, labels: Sequence[str], file: Path) -> None:
    """Rows are gold labels, columns predicted ones; each row is coloured by shares."""
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
    axes.set_xlabel("predicted")
    axes.set_ylabel("gold")
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
