"""Labelled tasks: their files found and read, checked, and split into training and validation rows."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from plume.config import TaskConfig, UserError, did_you_mean
from plume.data.examples import LABEL_OF, Example, Kind, Target, examples_from, guess_columns, guess_kind
from plume.data.rows import Row, Tally, open_bytes, read_rows, suffix_of

COLUMN_FILES = (".conll", ".bio", ".iob", ".iob2", ".conllu")


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
        return list(examples_from(read, kind, columns, str(path), tally, labelled=labelled))

    train = examples(train_path, config.targets)
    if not train:
        raise UserError(f"{train_path} holds no usable row")
    validation = examples(validation_path, config.validation_targets)
    test = examples(None if config.test is None else Path(config.test), config.test_targets, labelled=False)
    target = _target(config, kind, train)
    if target == "number":
        parts = ([_numbered(example, tally) for example in part] for part in (train, validation, test))
        train, validation, test = ([e for e in part if e is not None] for part in parts)
    labels = _labels(config, kind, target, train, columns)
    if not validation:
        train, validation = split(train, config.validation_share, seed)
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
        for number, row in read_rows(path, columns=header, tally=tally, encoding=config.encoding):
            yield f"{path} line {number}", row

    first = [row for _, (_, row) in zip(range(100), table(path, None), strict=False)]
    if not first:
        raise UserError(f"{path} holds no rows")
    kind = config.kind if config.kind is not None else guess_kind(first, config.columns)
    columns = guess_columns(kind, first, config.columns, str(path))
    _check_label_column(kind, columns, first, path)
    return kind, columns, tuple(name for name in columns if name not in config.columns), table


def _check_label_column(kind: Kind, columns: Mapping[str, str], rows: Sequence[Row], path: Path) -> None:
    """There is one, and its name is a name: where it is a label itself, the file has no header."""
    label, there = LABEL_OF.get(kind, "label"), list(rows[0])
    column = columns.get(label)
    if column is None and kind != "embed":
        raise UserError(
            f"{path}: no column found for the {label} of a {kind} task; it has {', '.join(map(repr, there))}; "
            f"name it, for example --task.columns.{label} {there[-1]!r}"
        )
    if column is not None and any(row.get(column) == column for row in rows):
        names = [next((f for f, c in columns.items() if c == name), f"column{i}") for i, name in enumerate(there, 1)]
        raise UserError(
            f"{path}: the first line should name the columns, but {column!r} stands among the labels too; "
            f"where there are no names, give them: --task.header {' '.join(names)}"
        )


def _refuse_kind(config: TaskConfig, kind: Kind, path: Path) -> None:
    if config.kind not in (None, kind):
        raise UserError(f"task.kind={config.kind!r} does not fit {path}, which is read as {kind!r}")


def conll_rows(path: Path, tally: Tally | None = None) -> Iterator[tuple[str, Row]]:
    """Sentences of a file with a word per line, its tag in the last column, and a blank line between sentences."""
    words, tags, begun = list[str](), list[str](), 1
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8") as lines:
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
    with open_bytes(path) as stream:
        head = stream.read(4096).decode("utf-8", errors="replace")
    return head.lstrip().startswith("{") and ('"paragraphs"' in head or '"data"' in head)


def squad_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Questions of a SQuAD file, 1.1 or 2.0."""
    try:
        with open_bytes(path) as stream:
            articles = json.load(stream)["data"]
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
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a SQuAD file: {type(error).__name__}: {error}") from None


def aligned_rows(path: Path, targets: str | None) -> Iterator[tuple[str, Row]]:
    """Line n of one file with line n of another."""
    if targets is None:
        raise UserError(f"{path} needs the file of its translations: set task.validation_targets or task.test_targets")
    with path.open(encoding="utf-8") as left, Path(targets).open(encoding="utf-8") as right:
        try:
            for number, (source, target) in enumerate(zip(left, right, strict=True), 1):
                yield f"{path} line {number}", {"source": source.rstrip("\r\n"), "target": target.rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise UserError(f"{path} or {targets} is not UTF-8 text: {error}") from None
        except ValueError:
            raise UserError(f"{path} and {targets} do not have the same number of lines") from None


# ---- labels and split --------------------------------------------------------------------------------------------


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


def _numbered(example: Example, tally: Tally | None) -> Example | None:
    if example.label is None:
        return example
    number = _as_number(example.label)
    if number is None:
        reason = f"the target {example.label!r} is not a number"
        if tally is None:
            raise UserError(f"{example.where}: {reason}; mend it, or leave such rows out with --task.skip_bad_rows")
        tally.add(reason, example.where)
        return None
    return Example(example.fields, number, example.where)


def _labels(
    config: TaskConfig, kind: Kind, target: Target, train: list[Example], columns: Mapping[str, str]
) -> tuple[str, ...]:
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
            f"a second label is needed, or another column than {columns[LABEL_OF.get(kind, 'label')]!r}: "
            "--task.columns.label NAME"
        )
    if absent := [label for label in labels if label not in seen]:
        raise UserError(f"task.labels names {', '.join(map(repr, absent))}, which no training row has")
    return labels


def _natural(label: str) -> tuple[int, float, str]:
    number = _as_number(label)
    return (1, 0.0, label) if number is None else (0, number, label)


def _count_from_zero(train: list[Example]) -> None:
    top = [e for e in train if e.label == len(e.fields["choices"])]
    if top and not any(e.label == 0 for e in train):
        raise UserError(
            f"{top[0].where}: labels seem to count from 1 here, the label {top[0].label} being the last choice; "
            f"count from 0, or give the text of the right choice"
        )


def _check_label(example: Example, kind: Kind, target: Target, labels: tuple[str, ...]) -> None:
    if kind == "choose" and example.label == len(example.fields["choices"]):
        raise UserError(f"{example.where}: the label {example.label} is outside its choices; places count from 0")
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
        texts = len({digest for digest, _ in everyone})
        raise UserError(
            f"{len(examples)} rows with {texts} different texts are too few to hold some out; add rows, or give a file "
            "with --task.validation"
        )
    return train, validation
