"""Rows of a labelled table to examples: which column holds which field, and what is wrong with a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plume.config import TaskTarget, UserError
from plume.data.tables import Row, Tally

if TYPE_CHECKING:
    from plume.tasks.task_kind import TaskKind

Target = TaskTarget
SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled item: its fields, its label in the form of its kind, and its place in the file."""

    fields: Mapping[str, Any]  # str; a list of str for words and choices
    label: Any  # None: not given
    where: str


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What is saved beside the weights, so that predictions can be made again."""

    kind: str
    target: Target = "label"
    labels: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    length: int
    stride: int | None = None
    question_length: int = 64
    answer_length: int = 30
    threshold: float | None = None  # probability from which the second of two labels is predicted
    thresholds: tuple[float, ...] = ()  # of each label, where a text has any number of them; unset: 0.5
    null_threshold: float | None = None  # margin of no answer over the best one; unset: always answer
    columns: Mapping[str, str] = field(default_factory=dict)  # of the training rows, by field
    header: tuple[str, ...] = ()  # of their file, if it has none
    encoding: str = "utf-8"

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> TaskSettings:
        lists = ("labels", "template", "thresholds", "header")
        given: dict[str, Any] = {name: tuple(v) if name in lists else v for name, v in table.items()}
        return cls(**given)


@dataclass(frozen=True)
class Prediction:
    """A predicted label, number, index, list of tags or text, with the score of each option."""

    value: Any
    scores: Mapping[str, float]


# usual names of the column of each field; the first that exists is taken
NAMES: dict[str, tuple[str, ...]] = {
    "text": (
        *("text", "sentence", "sentence1", "premise", "text1", "question1", "#1 String", "anchor", "query"),
        *("review", "content", "document", "comment", "message", "body", "tweet", "title"),
    ),
    "pair": (*("pair", "sentence2", "hypothesis", "text2", "question2", "#2 String", "positive", "text_pair"),),
    "negative": ("negative", "hard_negative"),
    "label": (
        *("label", "labels", "gold_label", "class", "category", "target", "score", "rating", "is_duplicate"),
        *("Quality", "similarity", "sentiment", "stars", "intent", "answer", "AnswerRightEnding"),
    ),
    "context": ("context", "passage", "article", "sent1", "ctx", "story", "startphrase"),
    "question": ("question", "query", "sent2"),
    "choices": ("choices", "options", "endings", "candidates", "answers"),
    "words": ("words", "tokens", "text"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels", "ner"),
    "answers": ("answers", "answer"),
    "source": ("source", "document", "article", "text", "input", "src", "en"),
    "target": ("target", "summary", "highlights", "output", "tgt", "translation", "de", "fr"),
}


# ---- columns -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """The columns of a table, its first rows, and the columns that the user named."""

    rows: Sequence[Row]
    named: Mapping[str, str]

    def of(self, field: str, among: Iterable[str] | None = None) -> str:
        """The column of a field: as named, else the first with a usual name in any case; empty: none."""
        if field in self.named and among is None:
            return self.named[field]
        plain = {column.strip().lower(): column for column in (self.rows[0] if among is None else among)}
        usual = NAMES.get(field, (field,))
        return next((plain[name.lower()] for name in usual if name.lower() in plain), "")

    def has(self, *fields: str) -> bool:
        return all(self.of(field) for field in fields)

    def holds_lists(self, field: str) -> bool:
        return isinstance(self.rows[0].get(self.of(field)), list)


def assign_columns(kind: type[TaskKind], table: Columns, path: str) -> dict[str, str]:
    """The column of every field of the kind: as named, else by usual names, else by content."""
    there = list(table.rows[0])
    _check_named(kind, table, path)
    columns = dict(table.named)
    for name in (*kind.fields, *kind.optional_fields, kind.label_field):
        free = [column for column in there if column not in columns.values()]
        if name in columns:
            continue
        found = kind.joined_columns(name, there) or table.of(name, among=free)
        if not found and name in kind.fields_by_content:
            found = _by_content(name, free, table.rows)
        if found:
            columns[name] = found
    missing = [name for name in kind.fields if name not in columns]
    if missing:
        raise UserError(
            f"{path}: no column found for {', '.join(missing)} of a {kind.name} task; it has "
            f"{', '.join(map(repr, there))}; name it, for example --task.columns.{missing[0]} {there[0]!r}"
        )
    _check_label_column(kind, columns, table.rows, path)
    return columns


def _check_named(kind: type[TaskKind], table: Columns, path: str) -> None:
    """Every field that the user names exists, and so does its column."""
    there, fields = list(table.rows[0]), (*kind.fields, *kind.optional_fields, kind.label_field)
    if wrong := [f"columns.{name}" for name in table.named if name not in (*NAMES, *fields)]:
        raise UserError(f"there is no {', '.join(wrong)}; fields are {', '.join(fields)}")
    known = {*there, *(kind.joined_columns(field, there) for field in kind.fields)}
    if absent := [f"columns.{name}={column!r}" for name, column in table.named.items() if column not in known]:
        raise UserError(f"{path} has no column for {', '.join(absent)}; it has {', '.join(map(repr, there))}")


def _by_content(field: str, columns: Sequence[str], rows: Sequence[Row]) -> str:
    """The column with the longest texts for a text; for a label the one with the fewest values, at least two."""
    if not columns:
        return ""
    if field != "label":
        return max(columns, key=lambda c: sum(len(str(row.get(c))) for row in rows))
    distinct = {column: len({str(row.get(column)) for row in rows} - {"", "None"}) for column in columns}
    best = min(columns, key=lambda c: (distinct[c] < 2, distinct[c]))
    return best if distinct[best] <= max(2, len(rows) // 2) else ""


def _check_label_column(kind: type[TaskKind], columns: Mapping[str, str], rows: Sequence[Row], path: str) -> None:
    """There is one, and its name is a name: where it is a label itself, the file has no header."""
    label, there = kind.label_field, list(rows[0])
    column = columns.get(label)
    if column is None and kind.needs_label:
        free = [name for name in there if name not in columns.values()]
        advice = f"name it, for example --task.columns.{label} {free[-1]!r}" if free else "add one"
        raise UserError(
            f"{path}: no column found for the {label} of a {kind.name} task; "
            f"it has {', '.join(map(repr, there))}; {advice}"
        )
    if column is not None and any(row.get(column) == column for row in rows):
        names = [next((f for f, c in columns.items() if c == name), f"column{i}") for i, name in enumerate(there, 1)]
        raise UserError(
            f"{path}: the first line should name the columns, but {column!r} is a label in later rows too; "
            f"if the file has no header, name the columns: --task.header {' '.join(names)}"
        )


# ---- rows to examples --------------------------------------------------------------------------------------------


def examples_from(
    rows: Iterator[tuple[str, Row]],
    kind: type[TaskKind],
    columns: Mapping[str, str],
    skipped: Tally,
    *,
    labelled: bool,
    skip_bad_rows: bool = False,
) -> Iterator[Example]:
    """Examples of rows. Rows without a label are skipped and counted where one is needed."""
    for where, row in rows:
        try:
            example = _example(kind, where, row, columns)
        except UserError as error:
            if not skip_bad_rows:
                raise UserError(f"{where}: {error}; correct it, or skip such rows with --task.skip_bad_rows") from None
            skipped.add(str(error), where)
            continue
        if example.label is None and labelled and (kind.label_field in columns or kind.needs_label):
            skipped.add(f"no {kind.label_field}", where)
        else:
            yield example


def _example(kind: type[TaskKind], where: str, row: Row, columns: Mapping[str, str]) -> Example:
    label = kind.label_field
    lacking = [c for name, c in columns.items() if c not in row and "+" not in c and name != label]
    if lacking:
        raise UserError(f"there is no column {lacking[0]!r}")
    fields = {name: kind.field_value(name, row, column) for name, column in columns.items() if name != label}
    column = columns.get(label)
    value = None if column is None else row.get(column)
    unlabelled = is_missing(value) or (column == "gold_label" and value == "-")  # SNLI: no agreement
    gold = None if unlabelled else kind.label_value(value, fields, str(column))
    if "id" in row:
        fields["id"] = str(row["id"])
    return Example(fields, gold, where)


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: null, white space, or NaN, which pandas writes for it."""
    return value is None or (isinstance(value, str) and not value.strip()) or value != value


def text_value(value: Any, column: str) -> str:
    """The text of a cell; a list of texts is joined."""
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        value = " ".join(value)
    if is_missing(value):
        raise UserError(f"the text in {column!r} is empty")
    if not isinstance(value, str | int | float):
        raise UserError(f"{column!r} holds {str(value)[:SHOWN]}, which is no text")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise UserError(f"the text in {column!r} has half of a character, which no encoding has") from None
    return str(value)


def text_list(value: Any, column: str) -> list[str]:
    return [text_value(one, column) for one in value]
