"""Rows of a labelled table to examples: which column is which field, and what each kind of task asks of a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plume.config import UserError
from plume.data.rows import Row, Tally

Kind = Literal["classify", "pair", "similarity", "choose", "tag", "span", "embed", "translate"]
Target = Literal["label", "number"]


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled item: its texts by field, what it should be answered with, and where it stood."""

    fields: Mapping[str, Any]  # str; a list of str for words and choices
    label: Any  # str or float; place of the right choice; list of tags; list of (start, text); None: not given
    where: str


# what people call the column of each field; the first that is there is taken
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
NEEDS: dict[Kind, tuple[str, ...]] = {
    "classify": ("text",),
    "pair": ("text", "pair"),
    "similarity": ("text", "pair"),
    "embed": ("text", "pair"),
    "choose": ("context", "choices"),
    "tag": ("words",),
    "span": ("question", "context"),
    "translate": ("source",),
}
MAY_HAVE: dict[Kind, tuple[str, ...]] = {"choose": ("question",), "embed": ("negative",)}
LABEL_OF: dict[Kind, str] = {"tag": "tags", "span": "answers", "translate": "target"}  # others: label
NUMBERED = re.compile(r"(choice|ending|option|answer|sol|RandomFifthSentenceQuiz)_?(\d+|[A-E])$", re.IGNORECASE)


# ---- columns -----------------------------------------------------------------------------------------------------


def guess_kind(rows: Sequence[Row], named: Mapping[str, str]) -> Kind:
    """What the columns look like. Lists of words make a tagger, numbered endings a choice, and so on."""
    columns = set(rows[0])

    def there(name: str) -> bool:
        return name in named or bool(_first(name, columns))

    if isinstance(rows[0].get(named.get("words", _first("words", columns))), list) and there("tags"):
        return "tag"
    if there("context") and there("question") and there("answers") and not _choice_columns(columns):
        return "span"
    if there("context") and (_choice_columns(columns) or isinstance(rows[0].get(_first("choices", columns)), list)):
        return "choose"
    if there("text") and there("pair"):
        return "pair" if there("label") else "embed"
    if there("text") and there("label"):
        return "classify"
    if there("source") and there("target"):
        return "translate"
    return "classify"


def _first(name: str, columns: Iterable[str]) -> str:
    """The first column with a usual name, whether it is written in capitals or not."""
    plain = {column.strip().lower(): column for column in columns}
    return next((plain[usual.lower()] for usual in NAMES[name] if usual.lower() in plain), "")


def _choice_columns(columns: Iterable[str]) -> list[str]:
    found = [column for column in columns if NUMBERED.match(column)]
    return sorted(found) if len(found) > 1 else []


def guess_columns(kind: Kind, rows: Sequence[Row], named: Mapping[str, str], path: str) -> dict[str, str]:
    """The column of every field that the kind needs: as named, else by its usual names, else by what it holds."""
    there = list(rows[0])
    label = LABEL_OF.get(kind, "label")
    _check_named(named, label, there, path)
    columns = dict(named)
    for name in (*NEEDS[kind], *MAY_HAVE.get(kind, ()), label):
        free = [column for column in there if column not in columns.values()]
        if name in columns:
            continue
        if name == "choices" and (numbered := _choice_columns(there)):
            columns[name] = "+".join(numbered)
        elif found := _first(name, free):
            columns[name] = found
        elif (name in ("text", "label") and kind == "classify") and (guess := _by_content(name, free, rows)):
            columns[name] = guess
    missing = [name for name in NEEDS[kind] if name not in columns]
    if missing:
        raise UserError(
            f"{path}: no column found for {', '.join(missing)} of a {kind} task; it has {', '.join(map(repr, there))}; "
            f"name it, for example --task.columns.{missing[0]} {there[0]!r}"
        )
    return columns


def _check_named(named: Mapping[str, str], label: str, there: Sequence[str], path: str) -> None:
    """That every field the user names is one, and every column is there."""
    fields = ("text", "pair", "negative", "context", "question", "choices", "words", "source", label)
    if wrong := [f"columns.{name}" for name in named if name not in fields]:
        raise UserError(f"there is no {', '.join(wrong)}; fields are {', '.join(fields)}")
    known = {*there, "+".join(_choice_columns(there))}
    if absent := [f"columns.{name}={column!r}" for name, column in named.items() if column not in known]:
        raise UserError(f"{path} has no column for {', '.join(absent)}; it has {', '.join(map(repr, there))}")


def _by_content(name: str, columns: Sequence[str], rows: Sequence[Row]) -> str | None:
    """The column with the longest texts for a text, the one with the fewest different values for a label."""
    if not columns:
        return None
    if name == "text":
        return max(columns, key=lambda c: sum(len(str(row.get(c))) for row in rows))
    varied = {column: len({str(row.get(column)) for row in rows}) for column in columns}
    best = min(columns, key=varied.__getitem__)
    return best if varied[best] <= max(2, len(rows) // 2) else None


# ---- rows to examples --------------------------------------------------------------------------------------------


def examples_from(
    rows: Iterator[tuple[str, Row]],
    kind: Kind,
    columns: Mapping[str, str],
    path: str,
    tally: Tally | None,
    *,
    labelled: bool,
) -> Iterator[Example]:
    label = LABEL_OF.get(kind, "label")
    for where, row in rows:
        try:
            lacking = [c for name, c in columns.items() if c not in row and "+" not in c and name != label]
            if lacking:
                raise UserError(f"there is no column {lacking[0]!r}")
            fields = {name: _value(name, row, column) for name, column in columns.items() if name != label}
            answer = _answer(kind, row, columns.get(label), fields)
            if answer is None and labelled and (label in columns or kind not in ("embed",)):
                raise UserError(f"no {label}")
            if "id" in row:
                fields["id"] = str(row["id"])
            yield Example(fields, answer, where)
        except UserError as error:
            if tally is None:
                raise UserError(
                    f"{where}: {error}; mend it, or leave such rows out with --task.skip_bad_rows"
                ) from None
            tally.add(str(error), where)


def _value(name: str, row: Row, column: str) -> Any:
    if name == "choices":
        value = [row.get(c) for c in column.split("+")] if "+" in column else row[column]
        if isinstance(value, Mapping):  # as the hub's files hold them: {"text": [...], "label": [...]}
            value = value.get("text")
        if not isinstance(value, list) or len(value) < 2:
            raise UserError(f"{column} should hold at least two candidates, not {value!r}")
        return [_text(one, column) for one in value]
    if name == "words":
        value = row[column].split() if isinstance(row[column], str) else row[column]
        if not isinstance(value, list) or not value:
            raise UserError(f"{column} holds no words")
        return [_text(one, column) for one in value]
    return _text(row[column], column)


def _text(value: Any, column: str) -> str:
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        value = " ".join(value)
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise UserError(f"the text in {column!r} is empty")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise UserError(f"the text in {column!r} has half of a character, which no encoding has") from None
    return str(value)


def _answer(kind: Kind, row: Row, column: str | None, fields: Mapping[str, Any]) -> Any:
    """What the row should be answered with, in the form of its kind; None where it is not given."""
    value = None if column is None else row.get(column)
    if value is None or value == "":
        return None
    if kind == "choose":
        return _place(value, fields["choices"])
    if kind == "tag":
        tags = value.split() if isinstance(value, str) else [str(tag) for tag in value]
        if len(tags) != len(fields["words"]):
            raise UserError(f"{len(tags)} tags for {len(fields['words'])} words")
        return tags
    if kind == "span":
        return _spans(value, fields["context"])
    if kind == "translate":
        return _text(value, str(column))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _place(value: Any, choices: Sequence[str]) -> int:
    """The place of the right choice from its number, its letter or its text; numbers count from 0."""
    if str(value) in choices:
        return choices.index(str(value))
    letters = "ABCDEFGHIJ"[: len(choices)]
    if str(value) in tuple(letters):
        return letters.index(str(value))
    try:
        place = int(value)
    except (TypeError, ValueError):
        raise UserError(f"the label {value!r} is neither a place, a letter nor the text of a choice") from None
    if not 0 <= place <= len(choices):
        raise UserError(f"the label {value!r} is outside the {len(choices)} choices; places count from 0")
    return place


def _span(value: Any, context: str) -> tuple[int, str]:
    """Where an answer begins, and its text: said as SQuAD does, as a pair, or as the text alone."""
    if isinstance(value, str):
        return context.find(value), value
    try:
        start, text = (value["answer_start"], value["text"]) if isinstance(value, Mapping) else value
        return int(start), str(text)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"the answer {value!r} is neither a text nor a place with its text") from None


def _spans(value: Any, context: str) -> list[tuple[int, str]]:
    if isinstance(value, Mapping):  # as the hub's files hold them
        value = list(zip(value.get("answer_start", []), value.get("text", []), strict=True))
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise UserError(f"the answers {value!r} are neither texts nor places with texts")
    spans = [_span(one, context) for one in value]
    for start, text in spans:
        if start < 0 or context[start : start + len(text)] != text:
            raise UserError(f"the answer {text!r} does not stand at place {start} of its context")
    return spans
