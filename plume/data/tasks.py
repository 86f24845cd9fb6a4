"""Labelled rows of any task: read from files, columns guessed where not named, checked, split and described."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from plume.config import TaskConfig, UserError, did_you_mean
from plume.data.rows import Row, Tally, read_rows, suffix_of

Kind = Literal["classify", "pair", "similarity", "choose", "tag", "span", "embed", "translate"]
Target = Literal["label", "number"]
COLUMN_FILES = (".conll", ".bio", ".iob", ".iob2", ".conllu")


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled item: its texts by field, what it should be answered with, and where it stood."""

    fields: Mapping[str, Any]  # str; a list of str for words and choices
    label: Any  # str or float; place of the right choice; list of tags; list of (start, text); None: not given
    where: str


@dataclass(frozen=True, kw_only=True)
class Glue:
    """How one of GLUE's tasks is stored, and what it is measured by."""

    kind: Kind
    columns: Mapping[str, str]
    metric: str = "accuracy"
    header: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    validation: str = "dev"
    target: Target = "label"


def _pair(first: str, second: str, label: str = "label") -> dict[str, str]:
    return {"text": first, "pair": second, "label": label}


_ENTAIL = ("entailment", "not_entailment")
_MNLI = ("entailment", "neutral", "contradiction")
GLUE: dict[str, Glue] = {
    "cola": Glue(
        kind="classify",
        columns={"text": "sentence", "label": "label"},
        metric="matthews",
        header=("source", "label", "star", "sentence"),
        labels=("0", "1"),
    ),
    "sst2": Glue(kind="classify", columns={"text": "sentence", "label": "label"}, labels=("0", "1")),
    "mrpc": Glue(kind="similarity", columns=_pair("#1 String", "#2 String", "Quality"), metric="f1", labels=("0", "1")),
    "qqp": Glue(
        kind="similarity", columns=_pair("question1", "question2", "is_duplicate"), metric="f1", labels=("0", "1")
    ),
    "stsb": Glue(
        kind="similarity", columns=_pair("sentence1", "sentence2", "score"), metric="pearson", target="number"
    ),
    "mnli": Glue(
        kind="pair",
        columns=_pair("sentence1", "sentence2", "gold_label"),
        labels=_MNLI,
        validation="dev_matched",
    ),
    "snli": Glue(kind="pair", columns=_pair("sentence1", "sentence2", "gold_label"), labels=_MNLI),
    "qnli": Glue(kind="pair", columns=_pair("question", "sentence"), labels=_ENTAIL),
    "rte": Glue(kind="pair", columns=_pair("sentence1", "sentence2"), labels=_ENTAIL),
    "wnli": Glue(kind="pair", columns=_pair("sentence1", "sentence2"), labels=("0", "1")),
}

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
LABEL_OF: dict[Kind, str] = {"tag": "tags", "span": "answers", "translate": "target"}  # others: label
NUMBERED = re.compile(r"(choice|ending|option|answer|sol|RandomFifthSentenceQuiz)_?(\d+|[A-E])$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A whole task, read and checked."""

    kind: Kind
    target: Target
    train: list[Example]
    validation: list[Example]
    test: list[Example]
    labels: tuple[str, ...]  # of a classifier or tagger; one name for a number
    columns: dict[str, str]  # our field: their column
    guessed: tuple[str, ...]  # fields whose column was not named
    metric: str | None  # what the task is known by
    left_out: Tally = field(default_factory=Tally)


def load_task(config: TaskConfig, *, seed: int = 0) -> TaskData:
    """Read every file of a task. Mistakes in it are one UserError that names the file, the line and the remedy."""
    config, metric = _known(config)
    train_path, validation_path = _files(config)
    tally = Tally() if config.skip_bad_rows else None
    kind, columns, guessed, rows = _opened(train_path, config, tally)

    def examples(path: Path | None, targets: str | None, *, labelled: bool = True) -> list[Example]:
        if path is None:
            return []
        read = rows(path, targets)
        return list(_examples(read, kind, columns, str(path), tally, labelled=labelled))

    train = examples(train_path, config.targets)
    if not train:
        raise UserError(f"{train_path} holds no usable row")
    validation = examples(validation_path, config.validation_targets)
    test = examples(None if config.test is None else Path(config.test), config.test_targets, labelled=False)
    target = _target(config, kind, train)
    if target == "number":
        train, validation, test = ([_numbered(e, tally) for e in part] for part in (train, validation, test))
        train, validation = ([e for e in part if e.label is not None] for part in (train, validation))
    if not validation:
        train, validation = split(train, config.validation_share, seed)
    labels = _labels(config, kind, target, train)
    for example in (*train, *validation, *test):
        _check_label(example, kind, target, labels)
    return TaskData(
        kind=kind,
        target=target,
        train=train,
        validation=validation,
        test=test,
        labels=labels,
        columns=columns,
        guessed=guessed,
        metric=metric,
        left_out=Tally() if tally is None else tally,
    )


# ---- files -------------------------------------------------------------------------------------------------------


def _known(config: TaskConfig) -> tuple[TaskConfig, str | None]:
    """The config with what is known of a named GLUE task filled in where the user said nothing."""
    from dataclasses import replace

    if config.name is None:
        return config, None
    name = config.name.lower().replace("-", "").replace("_", "")
    if name not in GLUE:
        raise UserError(f"task.name={config.name!r} is not known{did_you_mean(name, GLUE)}; all: {', '.join(GLUE)}")
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
    for path in (train, validation, config.test):
        if path is not None and not Path(path).is_file():
            raise UserError(f"there is no file {path}")
    return Path(train), None if validation is None else Path(validation)


RowReader = Callable[[Path, str | None], Iterator[tuple[str, Row]]]


def _opened(
    path: Path, config: TaskConfig, tally: Tally | None
) -> tuple[Kind, dict[str, str], tuple[str, ...], RowReader]:
    """The kind of the task, the columns of its fields, which of them were guessed, and what reads a file of it."""
    if suffix_of(path) in COLUMN_FILES or (config.kind == "tag" and suffix_of(path) in ("", ".txt")):
        _refuse_kind(config, "tag", path)
        return "tag", {"words": "words", "tags": "tags"}, (), lambda p, _: conll_rows(p, tally)
    if config.targets is not None:
        _refuse_kind(config, "translate", path)
        return "translate", {"source": "source", "target": "target"}, (), aligned_rows
    if suffix_of(path) == ".json" and config.kind in (None, "span") and _is_squad(path):
        names = {name: name for name in ("question", "context", "answers")}
        return "span", names, (), lambda p, _: squad_rows(p)

    def table(path: Path, targets: str | None) -> Iterator[tuple[str, Row]]:
        header = config.header if config.header else None
        for number, row in read_rows(path, columns=header, tally=tally):
            yield f"{path} line {number}", row

    first = [row for _, (_, row) in zip(range(100), table(path, None), strict=False)]
    if not first:
        raise UserError(f"{path} holds no rows")
    kind = config.kind if config.kind is not None else guess_kind(first, config.columns)
    columns = guess_columns(kind, first, config.columns, str(path))
    return kind, columns, tuple(name for name in columns if name not in config.columns), table


def _refuse_kind(config: TaskConfig, kind: Kind, path: Path) -> None:
    if config.kind not in (None, kind):
        raise UserError(f"task.kind={config.kind!r} does not fit {path}, which is read as {kind!r}")


def conll_rows(path: Path, tally: Tally | None = None) -> Iterator[tuple[str, Row]]:
    """Sentences of a file with a word per line, its tag in the last column, and a blank line between sentences."""
    words, tags, begun = list[str](), list[str](), 1
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            cells = line.split()
            if not cells or cells[0] == "-DOCSTART-":
                if words:
                    yield f"{path} line {begun}", {"words": words, "tags": tags}
                words, tags, begun = [], [], number + 1
            elif len(cells) == 1:
                where = f"{path} line {number}"
                if tally is None:
                    raise UserError(
                        f"{where}: a word without a tag: {line.strip()!r}; skip_bad_rows=true leaves it out"
                    )
                tally.add("a word without a tag", where)
            else:
                words.append(cells[0])
                tags.append(cells[-1])
    if words:
        yield f"{path} line {begun}", {"words": words, "tags": tags}


def _is_squad(path: Path) -> bool:
    with path.open(encoding="utf-8") as stream:
        head = stream.read(4096)
    return head.lstrip().startswith("{") and ('"paragraphs"' in head or '"data"' in head)


def squad_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Questions of a SQuAD file, 1.1 or 2.0."""
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for item in paragraph["qas"]:
                    answers = [(int(a["answer_start"]), str(a["text"])) for a in item.get("answers", [])]
                    impossible = bool(item.get("is_impossible", False))
                    yield (
                        f"{path} question {item['id']}",
                        {
                            "id": str(item["id"]),
                            "question": item["question"],
                            "context": paragraph["context"],
                            "answers": [] if impossible else answers,
                        },
                    )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a SQuAD file: {type(error).__name__}: {error}") from None


def aligned_rows(path: Path, targets: str | None) -> Iterator[tuple[str, Row]]:
    """Line n of one file with line n of another."""
    if targets is None:
        raise UserError(f"{path} needs the file of its translations: set task.validation_targets or task.test_targets")
    with path.open(encoding="utf-8") as left, Path(targets).open(encoding="utf-8") as right:
        try:
            for number, (source, target) in enumerate(zip(left, right, strict=True), 1):
                yield f"{path} line {number}", {"source": source.rstrip("\r\n"), "target": target.rstrip("\r\n")}
        except ValueError:
            raise UserError(f"{path} and {targets} do not have the same number of lines") from None


# ---- columns -----------------------------------------------------------------------------------------------------


def guess_kind(rows: Sequence[Row], named: Mapping[str, str]) -> Kind:
    """What the columns look like. Lists of words make a tagger, numbered endings a choice, and so on."""
    columns = set(rows[0])

    def there(name: str) -> bool:
        return name in named or any(column in columns for column in NAMES[name])

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
    return next((column for column in NAMES[name] if column in columns), "")


def _choice_columns(columns: Iterable[str]) -> list[str]:
    found = [column for column in columns if NUMBERED.match(column)]
    return sorted(found) if len(found) > 1 else []


def guess_columns(kind: Kind, rows: Sequence[Row], named: Mapping[str, str], path: str) -> dict[str, str]:
    """The column of every field that the kind needs: as named, else by its usual names, else by what it holds."""
    there = list(rows[0])
    label = LABEL_OF.get(kind, "label")
    fields = ("text", "pair", "negative", "context", "question", "choices", "words", "source", label)
    if wrong := [f"columns.{name}" for name in named if name not in fields]:
        raise UserError(f"there is no {', '.join(wrong)}; fields are {', '.join(fields)}")
    if absent := [f"columns.{name}={column!r}" for name, column in named.items() if column not in _with_joined(there)]:
        raise UserError(f"{path} has no column for {', '.join(absent)}; it has {', '.join(map(repr, there))}")
    columns = dict(named)
    wanted = (*NEEDS[kind], *(("question",) if kind == "choose" else ()), label)
    if kind == "embed":
        wanted = (*wanted, "negative")
    for name in wanted:
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


def _with_joined(columns: Sequence[str]) -> set[str]:
    return {*columns, "+".join(_choice_columns(columns))}


def _by_content(name: str, columns: Sequence[str], rows: Sequence[Row]) -> str | None:
    """The column with the longest texts for a text, the one with the fewest different values for a label."""
    if not columns:
        return None
    if name == "text":
        return max(columns, key=lambda c: sum(len(str(row[c])) for row in rows))
    varied = {column: len({str(row[column]) for row in rows}) for column in columns}
    best = min(columns, key=varied.__getitem__)
    return best if varied[best] <= max(2, len(rows) // 2) else None


# ---- rows to examples --------------------------------------------------------------------------------------------


def _examples(
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
        value = [row[c] for c in column.split("+")] if "+" in column else row[column]
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
    if str(value) in letters:
        return letters.index(str(value))
    try:
        place = int(value)
    except (TypeError, ValueError):
        raise UserError(f"the label {value!r} is neither a place, a letter nor the text of a choice") from None
    if not 0 <= place <= len(choices):
        raise UserError(f"the label {value!r} is outside the {len(choices)} choices; places count from 0")
    return place


def _spans(value: Any, context: str) -> list[tuple[int, str]]:
    if isinstance(value, Mapping):  # as the hub's files hold them
        value = list(zip(value.get("answer_start", []), value.get("text", []), strict=True))
    if isinstance(value, str):
        value = [(context.find(value), value)]
    spans = [(int(start), str(text)) for start, text in value]
    for start, text in spans:
        if start < 0 or context[start : start + len(text)] != text:
            raise UserError(f"the answer {text!r} does not stand at place {start} of its context")
    return spans


def _target(config: TaskConfig, kind: Kind, train: Sequence[Example]) -> Target:
    if kind in ("choose", "tag", "span", "translate"):
        return "label"
    if config.target is not None:
        return config.target
    if kind == "embed":
        return "number"
    numbers = [_as_number(e.label) for e in train[:1000]]
    return "number" if any(n is not None and not n.is_integer() for n in numbers) and None not in numbers else "label"


def _as_number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _numbered(example: Example, tally: Tally | None) -> Example:
    if example.label is None:
        return example
    number = _as_number(example.label)
    if number is None:
        reason = f"the target {example.label!r} is not a number"
        if tally is None:
            raise UserError(f"{example.where}: {reason}; mend it, or leave such rows out with --task.skip_bad_rows")
        tally.add(reason, example.where)
    return Example(example.fields, number, example.where)


# ---- labels and split --------------------------------------------------------------------------------------------


def _labels(config: TaskConfig, kind: Kind, target: Target, train: list[Example]) -> tuple[str, ...]:
    if kind == "choose":
        _count_from_zero(train)
    if kind in ("choose", "span", "embed", "translate"):
        return ()
    if target == "number":
        return ("score",)
    seen = Counter(tag for e in train for tag in (e.label if kind == "tag" else [e.label]))
    labels = config.labels if config.labels else tuple(sorted(seen, key=_natural))
    if len(seen) < 2:
        raise UserError(
            f"every training row has the label {next(iter(seen))!r}; there is nothing to learn from one class only: "
            f"a second label is needed"
        )
    if absent := [label for label in labels if label not in seen]:
        raise UserError(f"task.labels names {', '.join(map(repr, absent))}, which no training row has")
    return labels


def _natural(label: str) -> tuple[int, float, str]:
    number = _as_number(label)
    return (1, 0.0, label) if number is None else (0, number, label)


def _count_from_zero(train: list[Example]) -> None:
    top = [e for e in train if e.label == len(e.fields["choices"])]
    if top and any(e.label == 0 for e in train):
        raise UserError(f"{top[0].where}: the label {top[0].label} is outside its choices; places count from 0")
    if top:
        raise UserError(
            f"{top[0].where}: labels seem to count from 1 here, the label {top[0].label} being the last choice; "
            f"count from 0, or give the text of the right choice"
        )


def _check_label(example: Example, kind: Kind, target: Target, labels: tuple[str, ...]) -> None:
    if not labels or target == "number" or example.label is None:
        return
    for label in example.label if kind == "tag" else [example.label]:
        if label not in labels:
            raise UserError(
                f"{example.where}: the label {label!r} was never seen in training; known: {', '.join(labels[:20])}"
            )


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(training, validation), the same on every machine: by a hash of the texts, so that copies stay together.

    Every label gives its share, if it is a label.
    """
    groups: dict[Any, list[tuple[bytes, Example]]] = {}
    for example in examples:
        said = json.dumps([seed, example.fields], ensure_ascii=False, sort_keys=True).encode()
        group = example.label if isinstance(example.label, str) and "text" in example.fields else None
        groups.setdefault(group, []).append((hashlib.blake2b(said, digest_size=8).digest(), example))
    held_out: set[bytes] = set()
    for members in groups.values():
        hashes = sorted({digest for digest, _ in members})
        held_out |= {*hashes[: max(1, round(share * len(hashes)))]} if len(hashes) > 1 else set()
    everyone = [member for members in groups.values() for member in members]
    by_place = {id(example): digest in held_out for digest, example in everyone}
    train = [e for e in examples if not by_place[id(e)]]
    validation = [e for e in examples if by_place[id(e)]]
    if not validation or not train:
        raise UserError(f"{len(examples)} rows are too few to hold some out; give a validation file")
    return train, validation
