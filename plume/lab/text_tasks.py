"""Labelled tasks made from any text, and patterns made from none, so that an experiment needs no labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from plume.config import UserError
from plume.data.batches import generator
from plume.util.files import write_rows

FEWEST_WORDS, MOST_WORDS = 5, 14
LETTERS, SIZE = "abcdefghij", 3  # of a pattern
VALIDATION_ROWS = 400  # so that the noise of a score is not that of its rows
LONG_WORD = 4  # letters of a word that a later sentence may name again
Rows = list[dict[str, object]]
Passages = Sequence[Sequence[str]]  # the sentences of each document


def shuffled(count: int, seed: int) -> list[int]:
    return [int(i) for i in generator(seed, "order").permutation(count)]


def write_tasks(documents: Sequence[str], names: Sequence[str], folder: Path, rows: int, seed: int) -> None:
    """Rows for training and, of other documents, for validation; choices also as a task of `plume evaluate`."""
    passages = [found for document in documents if len(found := sentences(document)) >= 2]
    if len(passages) < 4:
        raise UserError(f"tasks need 4 documents with two sentences or more; the text has {len(passages)}")
    cut = max(2, len(passages) // 3)
    for name in names:
        for split, part, count in (
            ("train", passages[cut:], rows),
            ("validation", passages[:cut], max(VALIDATION_ROWS, rows)),
        ):
            made = MAKERS[name](part, count, generator(seed, f"{name} {split}"))
            if not made:
                raise UserError(f"no row of the task {name} can be made from this text; give more or other text")
            write_rows(folder / name / f"{split}.jsonl", made)
            if "choices" in made[0] and split == "validation":
                write_rows(folder / f"{name}.jsonl", ({**row, "answer": row["label"]} for row in made))


def sentences(text: str) -> list[str]:
    """Sentences of moderate length; lines of source code count as sentences too."""
    parts = re.split(r"(?<=[.!?。！？])\s+|\n+", text)
    found = [part.strip() for part in parts]
    return [s for s in found if FEWEST_WORDS <= len(s.split()) <= MOST_WORDS and len(s) < 12 * MOST_WORDS]


def word_order(passages: Passages, rows: int, rng: np.random.Generator) -> Rows:
    """Is this a sentence, or were its words shuffled?"""
    found: Rows = []
    for sentence in drawn(passages, rows, rng):
        words, intact = sentence.split(), bool(rng.integers(2))
        if not intact:
            words = [words[i] for i in rng.permutation(len(words))]
        found.append({"text": " ".join(words), "label": "intact" if intact else "shuffled"})
    return found


def next_passage(passages: Passages, rows: int, rng: np.random.Generator) -> Rows:
    """Does the second sentence follow the first?"""
    found: Rows = []
    for _ in range(rows):
        here, other = (passages[int(rng.integers(len(passages)))] for _ in range(2))
        i, follows = int(rng.integers(len(here) - 1)), bool(rng.integers(2))
        second = here[i + 1] if follows else other[int(rng.integers(len(other)))]
        found.append({"text": here[i], "pair": second, "label": "next" if follows else "random"})
    return found


def missing_word(passages: Passages, rows: int, rng: np.random.Generator) -> Rows:
    """Which of four words stood at the end of the sentence?"""
    found: Rows = []
    pool = sorted({s.split()[-1] for p in passages for s in p})
    for sentence in drawn(passages, rows, rng):
        *words, last = sentence.split()
        others = [word for word in rng.choice(pool, 24).tolist() if word != last]
        others.sort(key=lambda word: abs(len(word) - len(last)))  # a short word is likelier than a long one
        choices = [last, *dict.fromkeys(others)][:4]
        if len(choices) == 4:
            found.append(choice_row(words, choices, rng))
    return found


def swapped_words(passages: Passages, rows: int, rng: np.random.Generator) -> Rows:
    """Minimal pairs: which end of the sentence has two words in their own order?"""
    found: Rows = []
    for sentence in drawn(passages, rows, rng):
        words = sentence.split()
        at = 2 + int(rng.integers(len(words) - 3))
        swapped = [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
        if words[at] != words[at + 1]:
            found.append(choice_row(words[:at], [" ".join(part[at:]) for part in (words, swapped)], rng))
    return found


def repeated_word(passages: Passages, rows: int, rng: np.random.Generator) -> Rows:
    """Which of two words of the sentence before is meant here?"""
    found: Rows = []
    every = [pair for passage in passages for pair in pairwise(passage)]
    for place in rng.permutation(len(every)).tolist():
        before, words = every[place][0].split(), every[place][1].split()
        named = [word for word in dict.fromkeys(before) if len(word) >= LONG_WORD]
        at = next((i for i, word in enumerate(words) if i and word in named), None)
        others = [word for word in named if at is not None and word not in words]
        if at is None or not others:
            continue
        other = min(others, key=lambda word: abs(len(word) - len(words[at])))
        ends = [" ".join([word, *words[at + 1 :]]) for word in (words[at], other)]
        found.append(choice_row([*before, *words[:at]], ends, rng))
        if len(found) == rows:
            break
    return found


def choice_row(context: Sequence[str], choices: Sequence[str], rng: np.random.Generator) -> dict[str, object]:
    """The right choice is the first; its place is drawn."""
    order = rng.permutation(len(choices)).tolist()
    return {"context": " ".join(context), "choices": [choices[i] for i in order], "label": order.index(0)}


def drawn(passages: Passages, rows: int, rng: np.random.Generator) -> list[str]:
    every = [s for passage in passages for s in passage]
    return [every[int(i)] for i in rng.permutation(len(every))[:rows]]


MAKERS: dict[str, Callable[[Passages, int, np.random.Generator], Rows]] = {
    "word-order": word_order,
    "next-passage": next_passage,
    "missing-word": missing_word,
    "swapped-words": swapped_words,
    "repeated-word": repeated_word,
}


# ---- patterns ----------------------------------------------------------------------------------------------------


Rules = dict[str, Callable[[str], str]]
LETTER_RULES: Rules = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "capitals": str.upper,
    "successor": lambda word: "".join(chr(ord(letter) + 1) for letter in word),
}
NUMBER_RULES: Rules = {  # of two digits
    "sum": lambda word: str(sum(digits(word))),
    "difference": lambda word: str(abs(digits(word)[0] - digits(word)[1])),
    "larger": lambda word: str(max(digits(word))),
    "smaller": lambda word: str(min(digits(word))),
}


def write_patterns(folder: Path, documents: int, items: int, seed: int) -> None:
    """Which rule holds is only seen from the examples before: without any, all answers are equally likely."""
    rng = generator(seed, "patterns")
    families = (LETTER_RULES, NUMBER_RULES)
    texts = []
    for _ in range(documents):
        rules = families[int(rng.integers(2))]
        rule = list(rules.values())[int(rng.integers(len(rules)))]
        texts.append("\n\n".join(f"{word} > {rule(word)}" for word in questions(rules, rng, 6)))
    write_rows(folder / "pretrain.jsonl", ({"text": text} for text in texts))
    for rules in families:
        for name, rule in rules.items():
            rows: Rows = []
            for word in questions(rules, rng, items):
                choices = [other(word) for other in rules.values()]
                rows.append({"context": f"{word} >", "choices": choices, "answer": choices.index(rule(word))})
            write_rows(folder / f"{name}.jsonl", rows)


def questions(rules: Rules, rng: np.random.Generator, count: int) -> list[str]:
    """Three letters or two digits, to which every rule gives another answer."""
    found: list[str] = []
    while len(found) < count:
        letters, numbers = "".join(rng.choice(list(LETTERS), SIZE)), " ".join(map(str, rng.integers(10, size=2)))
        word = letters if rules is LETTER_RULES else numbers
        if len({rule(word) for rule in rules.values()}) == len(rules):
            found.append(word)
    return found


def digits(word: str) -> list[int]:
    return [int(digit) for digit in word.split()]
