"""Small labelled tasks made from the real data: rows to train on, to choose a learning rate on, and to test on.

No test row is text that plume-en was trained on: passages of LAMBADA are of other novels than its hundred.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
VALIDATION, TEST = 200, 500  # rows at most
WORDS = 16  # of a passage whose case and punctuation is restored
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”']?\s+")
INSIDE = re.compile(r"[^\w]*([\w]+(?:['’][\w]+)*)[^\w]*$")


@dataclass(frozen=True)
class Rows:
    """Rows of one task; training rows are a pool that every seed draws its own from."""

    train: list[Row]
    validation: list[Row]
    test: list[Row]


@dataclass(frozen=True)
class TransferTask:
    """How a task is read and measured."""

    name: str
    what: str
    kind: str
    metric: str
    length: int  # tokens of a row at most
    make: Callable[[Path], Rows]


CHINESE = ("hotels",)


def split(pool: list[Row], test: list[Row] | None = None) -> Rows:
    """Shuffled, always in the same way; the test rows are cut from the pool where the task has none of its own."""
    pool = list(pool)
    random.Random(0).shuffle(pool)
    if test is None:
        test, pool = pool[:TEST], pool[TEST:]
    else:
        random.Random(0).shuffle(test)
    return Rows(pool[VALIDATION:], pool[:VALIDATION], test[:TEST])


def tsv(file: Path) -> list[list[str]]:
    return [line.split("\t") for line in file.read_text(encoding="utf-8").splitlines()]


def sentiment(data: Path) -> Rows:
    """SST-2: phrases of film reviews; the test sentences are GLUE's validation set."""

    def rows(name: str) -> list[Row]:
        return [{"text": text.strip(), "label": label} for text, label in tsv(data / "sst2" / name)[1:]]

    return split(rows("train.tsv"), rows("dev.tsv"))


def similarity(data: Path) -> Rows:
    """STS-B: how alike two sentences are, 0 to 5."""

    def rows(name: str) -> list[Row]:
        lines = [line for line in tsv(data / "stsb" / name)[1:] if len(line) == 10]
        return [{"text": line[7], "pair": line[8], "label": float(line[9])} for line in lines]

    return split(rows("train.tsv"), rows("dev.tsv"))


def acceptable(data: Path) -> Rows:
    """CoLA: whether a linguist calls a sentence grammatical."""

    def rows(name: str) -> list[Row]:
        return [{"text": line[3], "label": "good" if line[1] == "1" else "bad"} for line in tsv(data / "cola" / name)]

    return split(rows("train.tsv"), rows("dev.tsv"))


def passages(data: Path) -> list[str]:
    lines = (data / "lambada" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()
    return [" ".join(json.loads(line)["text"].split()) for line in lines]


def errors(data: Path) -> Rows:
    """Sentences of LAMBADA in which one word was replaced by a word of another sentence: where it stands."""
    draw = random.Random(2)
    found = [[w for s in SENTENCE_END.split(p)[:-1] if 8 <= len(w := s.split()) <= 16][:1] for p in passages(data)]
    sentences = [[word.lower() for word in words] for fitting in found for words in fitting]
    rows = []
    for words in sentences:
        place, other = draw.randrange(1, len(words)), draw.choice(draw.choice(sentences))
        tags = ["wrong" if number == place and other != words[place] else "O" for number in range(len(words))]
        rows.append({"words": [*words[:place], other, *words[place + 1 :]], "tags": tags})
    return split(rows)


def asking(data: Path) -> Rows:
    """Sentences of LAMBADA without case and punctuation: a question or not; as many of each."""
    found: dict[str, list[Row]] = {"?": [], ".": []}
    for passage in passages(data):
        for sentence in SENTENCE_END.split(passage)[:-1]:
            words = [match[1].lower() for piece in sentence.split() if (match := INSIDE.match(piece))]
            ending = sentence.strip("\"”“' ")[-1:]
            if ending in found and 3 <= len(words) <= 16:
                found[ending].append({"text": " ".join(words), "label": "question" if ending == "?" else "statement"})
    fewest = min(len(rows) for rows in found.values())
    return split([row for rows in found.values() for row in random.Random(4).sample(rows, fewest)])


def halves(data: Path) -> Rows:
    """Two halves of sentences of LAMBADA: of one sentence, or the second of another one."""
    draw, cut = random.Random(3), list[tuple[str, str]]()
    for passage in passages(data):
        for words in [w for s in SENTENCE_END.split(passage)[:-1] if 8 <= len(w := s.split()) <= 16][:1]:
            cut.append((" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])))
    rows = []
    for first, second in cut:
        own = draw.random() < 0.5
        rows.append({"text": first, "pair": second if own else draw.choice(cut)[1], "label": "one" if own else "two"})
    return split(rows)


def tagged(passage: str) -> Row | None:
    """Words without case and punctuation; a tag says what stands before a word, or that it begins with a capital."""
    words, tags, before = list[str](), list[str](), "stop"
    for piece in passage.split():
        found = INSIDE.match(piece)
        if found is None:
            continue
        word = found[1]
        words.append(word.lower())
        tags.append(before if before != "O" else "capital" if word[0].isupper() else "O")
        tail = piece[found.end(1) :]
        before = "stop" if re.search(r"[.!?]", tail) else "comma" if re.search(r"[,;:]", tail) else "O"
    return {"words": words[:WORDS], "tags": tags[:WORDS]} if len(words) >= WORDS else None


def restoring(data: Path) -> Rows:
    """LAMBADA's passages: case and punctuation of a text that has lost both."""
    return split([row for passage in passages(data) if (row := tagged(passage)) is not None])


def last_words(data: Path) -> Rows:
    """The last word of LAMBADA's passages, among those of three others; nine words stand before it."""
    draw, rows = random.Random(1), list[Row]()
    ends = [(" ".join(words[-10:-1]), words[-1]) for passage in passages(data) if len(words := passage.split()) >= 10]
    for context, word in ends:
        place, choices = draw.randrange(4), [other for _, other in draw.sample(ends, 3)]
        choices.insert(place, word)
        rows.append({"context": context, "choices": choices, "label": place})
    return split(rows)


def reviews(data: Path) -> list[Row]:
    """ChnSentiCorp: Chinese reviews of hotels, as many good ones as bad; the first are for tests alone."""
    with (data / "chnsenticorp" / "ChnSentiCorp_htl_all.csv").open(encoding="utf-8", newline="") as stream:
        rows = [{"text": row["review"].strip(), "label": row["label"]} for row in csv.DictReader(stream)]
    bad = [row for row in rows if row["label"] == "0"]
    both = bad + random.Random(0).sample([row for row in rows if row["label"] == "1"], len(bad))
    random.Random(0).shuffle(both)
    return both


def hotels(data: Path) -> Rows:
    """Whether a review is good."""
    return split(reviews(data)[TEST:], reviews(data)[:TEST])


TASKS = {
    task.name: task
    for task in (
        TransferTask("sentiment", "SST-2, good or bad", "classify", "accuracy", 32, sentiment),
        TransferTask("asking", "LAMBADA, a question or not", "classify", "accuracy", 32, asking),
        TransferTask("halves", "LAMBADA, halves of one sentence or two", "pair", "accuracy", 32, halves),
        TransferTask("pairs", "STS-B, how alike", "similarity", "pearson", 40, similarity),
        TransferTask("cola", "CoLA, grammatical or not", "classify", "matthews", 32, acceptable),
        TransferTask("errors", "LAMBADA, which word is wrong", "tag", "f1", 32, errors),
        TransferTask("restoring", "LAMBADA, case and punctuation", "tag", "f1", 32, restoring),
        TransferTask("choosing", "LAMBADA, the last word of 4", "choose", "accuracy", 32, last_words),
        TransferTask("hotels", "ChnSentiCorp, good or bad", "classify", "accuracy", 48, hotels),
    )
}
