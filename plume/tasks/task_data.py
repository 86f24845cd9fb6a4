"""A labelled task from its files: read, checked, and split into training and validation examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plume.config import TaskConfig, UserError, at_home, did_you_mean
from plume.data.tables import TABLES, Row, Tally, suffix_of
from plume.tasks import KINDS, kind_named
from plume.tasks.classify import ClassifyTask, as_number
from plume.tasks.readers import GLUE, table_rows
from plume.tasks.schema import Columns, Example, Target, TaskSettings, assign_columns, examples_from
from plume.tasks.task_kind import RowReader, TaskKind
from plume.util.console import plural

SHOWN_ROWS = 100  # by which columns and kind are guessed
PATHS = ("train", "validation", "test", "targets", "validation_targets", "test_targets")


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A whole task, read and checked."""

    kind: str
    target: Target
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    labels: tuple[str, ...]  # of a classifier or tagger; one name for a number
    columns: dict[str, str]  # our field: their column
    guessed: tuple[str, ...]  # fields whose column was not named
    header: tuple[str, ...]  # of files without one
    metric: str | None  # that the task is known by
    skipped: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class TaskFile:
    """How the files of a task are read."""

    kind: type[TaskKind]
    columns: dict[str, str]
    guessed: tuple[str, ...]
    rows: RowReader


def load_task(config: TaskConfig, *, seed: int = 0) -> TaskData:
    """Read every file of a task. Mistakes in it are one UserError that names the file, the line and the remedy."""
    config, metric = _with_glue(_with_home(config))
    train_path, validation_path = _files(config)
    skipped = Tally()
    file = open_file(train_path, config, skipped)
    train = read_examples(file, train_path, config, skipped, targets=config.targets)
    if not train:
        raise UserError(f"{train_path} holds no usable row{_reasons(skipped)}")
    test_path, targets = None if config.test is None else Path(config.test), config.validation_targets
    validation = read_examples(file, validation_path, config, skipped, targets=targets)
    if validation_path is not None and not validation:
        raise UserError(f"{validation_path} holds no usable row{_reasons(skipped)}")
    test = read_examples(file, test_path, config, skipped, targets=config.test_targets, labelled=False)
    target = file.kind.target(config, train)
    if target == "number":
        train, validation, test = (_numbered(part, config, skipped) for part in (train, validation, test))
    labels = file.kind.label_names(config, target, train, file.columns)
    if not validation:
        train, validation = split(train, config.validation_fraction, seed)
    for example in (*train, *validation, *test):
        file.kind.check(example, labels)
    return TaskData(
        kind=file.kind.name,
        target=target,
        train=train,
        validation=validation,
        test=test,
        labels=labels,
        columns=file.columns,
        guessed=file.guessed,
        header=config.header,
        metric=metric,
        skipped=skipped,
    )


def open_file(path: Path, config: TaskConfig, skipped: Tally) -> TaskFile:
    """The kind of a file, the columns of its fields, which of them were guessed, and what reads such files."""
    wanted = None if config.kind is None else kind_named(config.kind)
    for kind in KINDS:
        if (reader := kind.reader(path, config, skipped)) is not None:
            if wanted not in (None, kind):
                raise UserError(f"task.kind={config.kind!r} does not fit {path}, which is read as {kind.name!r}")
            return TaskFile(kind, {name: name for name in (*kind.fields, kind.label_field)}, (), reader)

    def rows(path: Path, targets: str | None) -> Iterator[tuple[str, Row]]:
        return table_rows(path, config, skipped)

    first = [row for _, (_, row) in zip(range(SHOWN_ROWS), table_rows(path, config, Tally()), strict=False)]
    if not first:
        raise UserError(f"{path} holds no rows")
    table = Columns(first, config.columns)
    kind = next((k for k in KINDS if k.matches(table)), ClassifyTask) if wanted is None else wanted
    columns = assign_columns(kind, table, str(path))
    return TaskFile(kind, columns, tuple(name for name in columns if name not in config.columns), rows)


def read_examples(
    file: TaskFile,
    path: Path | None,
    config: TaskConfig,
    skipped: Tally,
    *,
    targets: str | None = None,
    labelled: bool = True,
) -> list[Example]:
    if path is None:
        return []
    rows, bad = file.rows(path, targets), config.skip_bad_rows
    return list(examples_from(rows, file.kind, file.columns, skipped, labelled=labelled, skip_bad_rows=bad))


def read_labelled(path: Path, settings: TaskSettings) -> list[Example]:
    """The labelled examples of one file, read as the training rows of a fine-tuned model were, and checked.

    Where the file lacks a column that they had, the field's column is guessed.
    """
    skipped = Tally()
    config = TaskConfig(train=str(path), kind=settings.kind, target=settings.target, encoding=settings.encoding)
    config = replace(config, header=settings.header)
    there = next((row for _, row in table_rows(path, config, Tally())), {}) if suffix_of(path) in TABLES else {}
    config = replace(config, columns={field: c for field, c in settings.columns.items() if c in there})
    file = open_file(path, config, skipped)
    examples = read_examples(file, path, config, skipped)
    if settings.target == "number":
        examples = _numbered(examples, config, skipped)
    for example in examples:
        file.kind.check(example, settings.labels)
    if not examples:
        raise UserError(f"{path} holds no labelled row{_reasons(skipped)}")
    return examples


def _reasons(skipped: Tally) -> str:
    found = [f"{plural(count, 'row')}: {reason}" for reason, count in skipped.counts.most_common()]
    return f" ({'; '.join(found)})" if found else ""


# ---- files -------------------------------------------------------------------------------------------------------


def _with_home(config: TaskConfig) -> TaskConfig:
    """The config with the home folder for `~` in its paths."""
    given = {name: value for name in PATHS if (value := getattr(config, name)) is not None}
    changed: dict[str, Any] = {name: str(at_home(value)) for name, value in given.items()}
    return replace(config, **changed)


def _with_glue(config: TaskConfig) -> tuple[TaskConfig, str | None]:
    """The config with the files, columns and metric of a named GLUE task, where they are unset."""
    if config.name is None:
        return config, None
    name = config.name.lower().replace("-", "").replace("_", "")
    if name not in GLUE:
        raise UserError(f"task.name={config.name!r} is not known; all: {', '.join(GLUE)}{did_you_mean(name, GLUE)}")
    glue = GLUE[name]
    filled = replace(
        config,
        kind=glue.kind if config.kind is None else config.kind,
        target=glue.target if config.target is None else config.target,
        columns={**glue.columns, **config.columns},
        header=config.header if config.header else glue.header,
        labels=config.labels if config.labels or glue.target == "number" else glue.labels,
        validation=_found(Path(config.train), (glue.validation,)) if config.validation is None else config.validation,
    )
    return filled, glue.metric


def _found(folder: Path, stems: Sequence[str]) -> str | None:
    if folder.is_dir():
        for stem in stems:
            for path in sorted(folder.glob(f"{stem}.*")):
                return str(path)
    return None


def _files(config: TaskConfig) -> tuple[Path, Path | None]:
    train, validation = config.train, config.validation
    if Path(train).is_dir():
        found = _found(Path(train), ("train", "training", "msr_paraphrase_train"))
        if found is None:
            raise UserError(f"{train} has no train file such as train.tsv, train.csv or train.jsonl")
        if validation is None:
            validation = _found(Path(train), ("dev", "validation", "valid", "val", "dev_matched"))
        train = found
    for path in (train, validation, *(getattr(config, name) for name in PATHS[2:])):
        if path is not None and not Path(path).is_file():
            raise UserError(f"there is no file {path}")
    return Path(train), None if validation is None else Path(validation)


# ---- numbers and split -------------------------------------------------------------------------------------------


def _numbered(examples: Sequence[Example], config: TaskConfig, skipped: Tally) -> list[Example]:
    """The examples with numbers as labels."""
    found = []
    for example in examples:
        number = as_number(example.label)
        if number is not None or example.label is None:
            found.append(Example(example.fields, number, example.where))
            continue
        reason = f"the target {example.label!r} is not a number"
        if not config.skip_bad_rows:
            raise UserError(f"{example.where}: {reason}; correct it, or skip such rows with --task.skip_bad_rows")
        skipped.add(reason, example.where)
    return found


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, validation), the same on every machine: by a hash of the texts, so that copies are on one side.

    Every label gives its share, if it is a label. Rows with one context stay together if there are enough contexts.
    """
    groups: dict[Any, list[tuple[bytes, Example]]] = {}
    contexts = {example.fields.get("context") for example in examples}
    apart = None not in contexts and share * len(contexts) >= 1
    for example in examples:  # copies may have other ids
        content = {n: value for n, value in example.fields.items() if (n == "context" if apart else n != "id")}
        key = json.dumps([seed, content], ensure_ascii=False, sort_keys=True).encode()
        group = example.label if isinstance(example.label, str) and "text" in example.fields else None
        groups.setdefault(group, []).append((hashlib.blake2b(key, digest_size=8).digest(), example))
    held_out: set[bytes] = set()
    for members in groups.values():
        hashes = sorted({digest for digest, _ in members})
        held_out |= {*hashes[: max(1, round(share * len(hashes)))]} if len(hashes) > 1 else set()
    everyone = [member for members in groups.values() for member in members]
    by_place = {id(example): digest in held_out for digest, example in everyone}
    train = [e for e in examples if not by_place[id(e)]]
    validation = [e for e in examples if by_place[id(e)]]
    if not validation or not train:
        texts = len({digest for digest, _ in everyone})
        raise UserError(
            f"{plural(len(examples), 'row')} with {plural(texts, 'different text')}: too few to hold some out; add "
            "rows, or give a file with --task.validation"
        )
    return train, validation
