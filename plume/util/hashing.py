"""Hashes of words and of runs of words, over a whole text at once."""

# B bytes of the text, W words in it, R runs of words

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
RUN_BASE = np.uint64(0xC2B2AE3D27D4EB4F)
LONGEST = 1 << 20  # bytes hashed at a time
# scripts written without spaces: Thai, Lao, Burmese, Khmer, kana, ideographs; and the punctuation between the last two
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
WIDE_MARKS = re.compile("[\u3000-\u3003\u3008-\u3020\u3030\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]")


def space_between(before: str, after: str) -> bool:
    """Whether a space stands between two words of a text: not beside a script without spaces, nor beside its marks."""
    return not any(kind.match(side) for kind in (UNSPACED, WIDE_MARKS) for side in (before[-1:], after[:1]))


def powers(base: int, count: int) -> Hashes:
    """1, base, base^2, ... modulo 2**64."""
    table = np.full(count, base, np.uint64)
    table[:1] = 1
    return np.multiply.accumulate(table)


FORWARD, BACKWARD = powers(BASE, LONGEST), powers(pow(BASE, -1, 1 << 64), LONGEST)
IS_WORD = np.array([chr(b).isalnum() or b >= 0x80 for b in range(256)])  # bytes of other scripts all count as letters


def mixed(values: Hashes) -> Hashes:
    """Every bit of the input in every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def separated(text: str) -> str:
    """The text with blanks around every character of a script without spaces: each counts as a word."""
    return text if text.isascii() else UNSPACED.sub(r" \g<0> ", WIDE_MARKS.sub(" ", text))


def word_hashes(text: str) -> Hashes:
    """One hash per word, (W,); case and what stands between words do not count."""
    data = np.frombuffer(separated(text.lower()).encode(errors="replace"), np.uint8)  # (B,)
    parts: list[Hashes] = []
    start = 0
    while start < len(data):
        stop = start + LONGEST
        block = data[start:stop]
        inside = IS_WORD[block]
        if stop < len(data) and inside[-1] and not inside.all():
            block = block[: len(block) - int(np.argmin(inside[::-1]))]  # the word at the edge goes to the next block
            inside = inside[: len(block)]
        parts.append(block_hashes(block, inside))
        start += len(block)
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def block_hashes(block: npt.NDArray[np.uint8], inside: npt.NDArray[np.bool_]) -> Hashes:
    """Polynomial hashes of all words from one running sum: (sum at end - sum at start) / base^start."""
    flags = np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8))
    starts, ends = np.flatnonzero(flags == 1), np.flatnonzero(flags == -1)  # (W,)
    letters = block.astype(np.uint64) + np.uint64(1)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(letters * FORWARD[: len(block)], dtype=np.uint64)])
    return mixed((sums[ends] - sums[starts]) * BACKWARD[starts])


def run_hashes(text: str, length: int) -> Hashes:
    """One hash per run of `length` words, (R,); a shorter text is one run."""
    return ngram_hashes(word_hashes(text), length)


def ngram_hashes(words: Hashes, length: int) -> Hashes:
    """One hash per run of `length` words from the hashes of the words."""
    if not len(words):
        return words
    length = min(length, len(words))
    runs = np.zeros(len(words) - length + 1, np.uint64)
    for i in range(length):
        runs = runs * RUN_BASE + words[i : len(words) - length + 1 + i]
    return mixed(runs)
