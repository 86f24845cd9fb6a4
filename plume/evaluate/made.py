"""Tasks that are made, not collected: GPT-3's arithmetic and its scrambled words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random

from plume.evaluate.items import LastWord, Row
from plume.evaluate.protocols import Protocol

ITEMS = 2000  # of each, as in the paper
SEED = 3
SIGNS = {"plus": "+", "minus": "-", "times": "*"}


def sums(name: str) -> Iterator[Row]:
    """Rows of one kind: 2d-plus to 5d-plus, 2d-minus to 5d-minus, 2d-times, 1d-composite."""
    random, (digits, kind) = Random(f"{SEED} {name}"), name.split("-")
    top = 10 ** int(digits[0])
    for number in range(1, ITEMS + 1):
        a, b, c = (random.randrange(top) for _ in range(3))
        if kind == "composite":
            first, second = random.choices(("+", "-", "*"), k=2)
            question, answer = f"{a}{first}({b}{second}{c})", calculate(a, first, calculate(b, second, c))
        else:
            question, answer = f"{a} {kind} {b}", calculate(a, SIGNS[kind], b)
        yield Row({"question": question, "answer": str(answer)}, f"{name} item {number}")


def calculate(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def arithmetic(row: Row, protocol: Protocol) -> Iterator[LastWord]:
    question = f"What is {row.text('question')}?"
    asked = f"Question: {question}\nAnswer:" if protocol.name == "harness" else f"Q: {question}\n\nA:"
    yield LastWord(where=row.where, context=asked, word=" " + row.text("answer"))


@cache
def words() -> tuple[str, ...]:
    """Frequent English words: those of the manual that comes with Python, so that no file is needed."""
    from pydoc_data.topics import topics

    found = Counter(re.findall(r"\b[a-z]{5,14}\b", "\n".join(topics.values())))
    return tuple(sorted(found, key=lambda w: (-found[w], w))[:ITEMS])


def scrambles(name: str) -> Iterator[Row]:
    """Rows of one kind: cycle, anagrams-1, anagrams-2, insertion, reversed."""
    random = Random(f"{SEED} {name}")
    for number, word in enumerate(words(), 1):
        yield Row({"scrambled": scramble(word, name, random), "word": word}, f"{name} item {number}")


def scramble(word: str, kind: str, random: Random) -> str:
    if kind == "reversed":
        return word[::-1]
    if kind == "cycle":
        at = random.randrange(1, len(word))
        return word[at:] + word[:at]
    if kind == "insertion":
        return "".join(letter + random.choice(" .!/-") for letter in word[:-1]) + word[-1]
    kept = int(kind[-1])  # letters that stay in their places at either end
    inner = list(word[kept : len(word) - kept])
    random.shuffle(inner)
    return word[:kept] + "".join(inner) + word[len(word) - kept :]


def unscramble(row: Row, protocol: Protocol) -> Iterator[LastWord]:
    asked = f"Please unscramble the letters into a word, and write that word:\n{row.text('scrambled')} ="
    yield LastWord(where=row.where, context=asked, word=" " + row.text("word"))
