"""One reader for each format of labelled files: tables, CoNLL and CoNLL-U, SQuAD, CoQA, aligned files, GLUE."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from plume.config import TaskConfig, UserError
from plume.data.documents import line_texts
from plume.data.plaintext import detect_encoding
from plume.data.tables import TABLES, UNDECODED, Row, Tally, open_bytes, read_rows, suffix_of, wrong_encoding
from plume.tasks.schema import Target

COLUMN_FILES = (".conll", ".bio", ".iob", ".iob2", ".conllu")
SNIFFED = 1 << 16  # bytes of a file that its format is recognised by
CONLLU_ID = re.compile(r"\d+([-.]\d+)?$")
LocatedRow = tuple[str, Row]  # where it stands, and the row


def table_rows(path: Path, config: TaskConfig, skipped: Tally) -> Iterator[LocatedRow]:
    """Rows of .csv, .tsv, .jsonl, .json or .parquet."""
    header = config.header if config.header else None
    tally = skipped if config.skip_bad_rows else None
    if suffix_of(path) not in TABLES:
        known = ", ".join((*TABLES, *COLUMN_FILES))
        raise UserError(f"{path}: the format of this file is not recognised; {known} are")
    for number, row in read_rows(path, columns=header, tally=tally, encoding=config.encoding):
        yield f"{path} line {number}", row


def numbered_lines(path: Path, encoding: str) -> Iterator[tuple[str, str]]:
    """(place, line without its end) of a plain text in an encoding."""
    with open_bytes(path) as stream:
        for number, (line, _) in enumerate(line_texts(stream, 0, encoding), 1):
            where = f"{path} line {number}"
            if UNDECODED.search(line) is not None:
                raise UserError(f"{where}: {wrong_encoding(encoding)}")
            yield where, line


# ---- CoNLL -------------------------------------------------------------------------------------------------------


def is_conll(path: Path, encoding: str, *, named: bool = False) -> bool:
    """Whether a file has a word per line: by its suffix, by its content, or because the user named a tag task."""
    suffix = suffix_of(path)
    if suffix in COLUMN_FILES or suffix in TABLES:
        return suffix in COLUMN_FILES
    return (named and suffix in ("", ".txt")) or _looks_like_conll(_sniffed(path, encoding))


def _sniffed(path: Path, encoding: str) -> list[str]:
    with open_bytes(path) as stream:
        head = stream.read(SNIFFED)
    encoding, mark = detect_encoding(head[:4], encoding)
    text = head[mark:].decode(encoding, errors="replace")
    return text.split("\n")[:-1] if len(text) > 1 else []


def _looks_like_conll(lines: list[str]) -> bool:
    """Blank lines between groups of lines with equally many columns, whose last column repeats."""
    words = _word_cells(lines)
    if len(words) < 4 or all(line.strip() for line in lines):
        return False
    ((columns, count),) = Counter(map(len, words)).most_common(1)
    tags = {cells[-1] for cells in words}
    return columns > 1 and count >= 0.95 * len(words) and len(tags) <= len(words) / 2


def _word_cells(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if line.strip() and not line.startswith(("#", "-DOCSTART-"))]


def is_conllu(lines: list[str]) -> bool:
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "")
    cells = first.split("\t")
    return len(cells) == 10 and CONLLU_ID.match(cells[0]) is not None


def conll_rows(path: Path, encoding: str, skipped: Tally | None = None) -> Iterator[LocatedRow]:
    """Sentences of a file with a word per line and a blank line between sentences.

    CoNLL has the tag in the last column. CoNLL-U has the universal part of speech, or else the language's own.
    """
    first_lines = _sniffed(path, encoding)
    read = _conllu_word if is_conllu(first_lines) else _conll_word
    known = {(len(cells), cells[-1]) for cells in _word_cells(first_lines)}  # number of columns and tag
    words, tags, begun = list[str](), list[str](), ""
    for where, line in numbered_lines(path, encoding):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield begun, {"words": words, "tags": tags}
            words, tags = [], []
            continue
        if not words and line.startswith("# ") and (len(cells := line.split()), cells[-1]) not in known:
            continue  # a comment: "# id 12"; a word # has a tag that other words have too
        word, tag = read(line)
        if word is None:
            continue
        if tag is not None:
            begun = begun if words else where
            words.append(word)
            tags.append(tag)
        elif skipped is None:
            raise UserError(f"{where}: a word without a tag: {line.strip()!r}; skip_bad_rows=true skips it")
        else:
            skipped.add("a word without a tag", where)
    if words:
        yield begun, {"words": words, "tags": tags}


def _conll_word(line: str) -> tuple[str | None, str | None]:
    cells = line.split()
    return cells[0], cells[-1] if len(cells) > 1 else None


def _conllu_word(line: str) -> tuple[str | None, str | None]:
    """The word and tag of a line; no word for comments, multiword tokens and empty nodes."""
    cells = line.rstrip("\r\n").split("\t")
    if line.startswith("#") or not cells[0].isdigit():
        return None, None
    found = next((tag for tag in cells[3:5] if tag != "_"), None)
    return (cells[1] if len(cells) > 1 else cells[0]), found


# ---- SQuAD, CoQA, aligned files ----------------------------------------------------------------------------------


def is_squad(path: Path) -> bool:
    if suffix_of(path) != ".json":
        return False
    with open_bytes(path) as stream:
        head = stream.read(4096).decode("utf-8", errors="replace")
    return head.lstrip().startswith("{") and ('"paragraphs"' in head or '"data"' in head)


def _json_data(path: Path, format_name: str) -> list[Any]:
    try:
        with open_bytes(path) as stream:
            found = json.load(stream)["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a {format_name} file: {type(error).__name__}: {error}") from None
    if not isinstance(found, list):
        raise UserError(f"{path} is not a {format_name} file: its data is not a list")
    return found


def squad_rows(path: Path) -> Iterator[LocatedRow]:
    """Questions of a SQuAD file, 1.1 or 2.0, with the title of their article."""
    data = _json_data(path, "SQuAD")
    try:
        for article in data:
            for paragraph in article["paragraphs"]:
                for item in paragraph["qas"]:
                    given = {"answers": list(item["answers"])} if "answers" in item else {}  # of test rows nothing
                    yield (
                        f"{path} question {item['id']}",
                        {
                            "id": str(item["id"]),
                            "title": article.get("title", ""),
                            "question": item["question"],
                            "context": paragraph["context"],
                            **({"answers": []} if item.get("is_impossible") else given),
                        },
                    )
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a SQuAD file: {type(error).__name__}: {error}") from None


def coqa_rows(path: Path) -> Iterator[LocatedRow]:
    """Conversations of a CoQA file."""
    for number, conversation in enumerate(_json_data(path, "CoQA"), 1):
        if not isinstance(conversation, Mapping):
            raise UserError(f"{path} is not a CoQA file: conversation {number} is not an object")
        yield f"{path} conversation {conversation.get('id', number)}", dict(conversation)


def aligned_rows(path: Path, targets: str | None, encoding: str = "utf-8") -> Iterator[LocatedRow]:
    """Line n of one file with line n of another."""
    if targets is None:
        raise UserError(f"{path} needs the file of its targets: set task.validation_targets or task.test_targets")
    sources = numbered_lines(path, encoding)
    for left, right in zip_longest(sources, numbered_lines(Path(targets), encoding)):
        if left is None or right is None:
            raise UserError(f"{path} and {targets} do not have the same number of lines")
        yield left[0], {"source": left[1], "target": right[1]}


# ---- GLUE --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Glue:
    """How one of GLUE's tasks is stored, and what it is measured by."""

    kind: str
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
        kind="pair", columns=_pair("sentence1", "sentence2", "gold_label"), labels=_MNLI, validation="dev_matched"
    ),
    "snli": Glue(kind="pair", columns=_pair("sentence1", "sentence2", "gold_label"), labels=_MNLI),
    "qnli": Glue(kind="pair", columns=_pair("question", "sentence"), labels=_ENTAIL),
    "rte": Glue(kind="pair", columns=_pair("sentence1", "sentence2"), labels=_ENTAIL),
    "wnli": Glue(kind="pair", columns=_pair("sentence1", "sentence2"), labels=("0", "1")),
}
