"""What is wrong with the rows of a task before any training: copies across splits, constants, imbalance, few rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plume.tasks.schema import Example
from plume.tasks.task_data import TaskData
from plume.tasks.task_kind import TaskKind
from plume.util.console import plural

COPIES = 0.01  # share of rows from which copies are reported
DOMINANT = 0.8  # share of the rows from which one label is too frequent
RARE = 10  # training rows of a label below which it is hardly learned
FEW_TRAINING, FEW_VALIDATION = 200, 100
TRUNCATED = 0.1  # share of rows
UNKNOWN, SAMPLED = 0.5, 1000  # share of unknown tokens from which it is reported, and training rows it is measured on
NO_LABELS = {"nan", "na", "n/a", "#n/a", "<na>", "null"}  # what other tools write into cells without a value


@dataclass(frozen=True)
class Finding:
    """A problem of the data or the run: its name, what was measured, and the option that changes it."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def content(example: Example) -> str:
    """The texts of a row without case and spacing; its id does not count."""
    fields = {name: value if isinstance(value, list) else [value] for name, value in example.fields.items()}
    texts = [[name, *(" ".join(str(v).casefold().split()) for v in fields[name])] for name in sorted(fields)]
    return json.dumps([part for part in texts if part[0] != "id"], ensure_ascii=False)


def check_data(data: TaskData, kind: TaskKind) -> list[Finding]:
    """Everything that is wrong with the rows."""
    texts = {
        name: [content(e) for e in part]
        for name, part in (("training", data.train), ("validation", data.validation), ("test", data.test))
    }
    return [
        *overlap(texts),
        *duplicates(data.train, texts["training"]),
        *constant_fields(data),
        *missing_labels(data, kind),
        *imbalance(data, kind),
        *few_rows(data),
        *unknown_tokens(data, kind),
        *truncation(data, kind),
    ]


def overlap(texts: dict[str, list[str]]) -> Iterator[Finding]:
    """Rows of one split that are in another, by content."""
    for held_out, other in (("validation", "training"), ("test", "training"), ("test", "validation")):
        known = set(texts[other])
        shared = sum(text in known for text in texts[held_out])
        if shared:
            total = len(texts[held_out])
            option = "--task.test" if held_out == "test" else "--task.validation"
            yield Finding(
                "overlap",
                f"{shared:,} of {total:,} {held_out} rows ({shared / total:.1%}) are also {other} rows, so the "
                f"{held_out} scores are too high; remove them from the {other} file, or name another with {option}",
            )


def duplicates(train: Sequence[Example], texts: Sequence[str]) -> Iterator[Finding]:
    """Copies among the training rows, and copies with different labels."""
    counts = Counter(texts)
    copies = len(texts) - len(counts)
    if copies >= max(1, COPIES * len(texts)):
        yield Finding(
            "duplicates",
            f"{copies:,} of {len(texts):,} training rows ({copies / len(texts):.1%}) are copies of other rows; "
            "copies count more than once: remove them from --task.train",
        )
    labels: dict[str, set[str]] = {}
    for example, text in zip(train, texts, strict=True):
        if counts[text] > 1:
            labels.setdefault(text, set()).add(repr(example.label))
    different = sum(len(found) > 1 for found in labels.values())
    if different >= max(1, COPIES * len(texts)):
        yield Finding("contradictions", f"{plural(different, 'training text')} with different labels in --task.train")


def constant_fields(data: TaskData) -> Iterator[Finding]:
    """Columns that hold the same value in every training row."""
    for name in data.train[0].fields:
        if name != "id" and len({str(e.fields.get(name)) for e in data.train}) == 1:
            column = data.columns.get(name, name)
            yield Finding(
                "constant column",
                f"column {column!r} ({name}) holds {str(data.train[0].fields[name])[:40]!r} in every training row; "
                f"name another with --task.columns.{name} NAME",
            )
    if data.target == "number" and len({e.label for e in data.train}) == 1 and data.train[0].label is not None:
        yield Finding("constant column", "the target is the same number in every training row; name another column")


def missing_labels(data: TaskData, kind: TaskKind) -> Iterator[Finding]:
    """Labels that are other tools' words for no label."""
    counts = Counter(label for e in data.train for label in kind.labels_of(e) if label.lower() in NO_LABELS)
    if counts:
        yield Finding(
            "missing labels",
            f"{plural(counts.total(), 'training row')} with the label {' or '.join(map(repr, counts))}, which is "
            "learned like any other; if it means that there is none, leave these cells of --task.train empty",
        )


def imbalance(data: TaskData, kind: TaskKind) -> Iterator[Finding]:
    counts = Counter(label for e in data.train for label in kind.labels_of(e))
    if len(counts) < 2 or kind.label_field != "label":
        return
    (label, most), total = counts.most_common(1)[0], sum(counts.values())
    if most / total >= DOMINANT:
        yield Finding(
            "class imbalance",
            f"{most / total:.1%} of the training rows have the label {label!r}; accuracy hides the others: "
            "--metric f1_macro --class-weights balanced",
        )
    rare = [name for name, count in counts.items() if count < RARE]
    if rare:
        shown = ", ".join(map(repr, rare[:5])) + (" and more" if len(rare) > 5 else "")
        yield Finding("rare labels", f"{plural(len(rare), 'label')} below {RARE} training rows ({shown}): add rows")


def few_rows(data: TaskData) -> Iterator[Finding]:
    if len(data.train) < FEW_TRAINING:
        yield Finding("few training rows", f"{len(data.train):,}; results vary with the seed: add rows, or --seeds 5")
    if len(data.validation) < FEW_VALIDATION:
        score, width = ("a correlation near 0", 1.96) if data.target == "number" else ("an accuracy", 0.98)
        error = min(1.0, width / len(data.validation) ** 0.5)
        yield Finding(
            "few validation rows",
            f"{len(data.validation):,}; {score} is uncertain by up to {error:.2f} either way: "
            "--task.validation FILE or --task.validation_fraction 0.3",
        )


def unknown_tokens(data: TaskData, kind: TaskKind) -> Iterator[Finding]:
    """Texts in a language or script that the tokenizer does not have."""
    values = [v for e in data.train[:SAMPLED] for name, v in e.fields.items() if name != "id"]
    texts = [str(text) for value in values for text in (value if isinstance(value, list) else [value])]
    ids = np.concatenate(kind.tokenizer.encode_batch(texts))
    share = float(np.mean(ids == kind.tokenizer.unknown)) if len(ids) and kind.tokenizer.unknown is not None else 0.0
    if share >= UNKNOWN:
        yield Finding(
            "unknown tokens",
            f"{share:.1%} of the tokens of the training rows are unknown to the model's tokenizer, so the model cannot "
            "read these texts; begin with a model that was pretrained on their language",
        )


def truncation(data: TaskData, kind: TaskKind) -> Iterator[Finding]:
    share = kind.truncation.rows / max(1, kind.truncation.total)
    if kind.truncates and share >= TRUNCATED:
        yield Finding(
            "truncation",
            f"{share:.1%} of the rows are longer than task.length={kind.settings.length} and are {kind.overflow}; "
            "--task.length up to the model's context, or a model with a longer context",
        )
