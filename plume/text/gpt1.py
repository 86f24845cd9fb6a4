"""GPT-1's way from text to words: mended Unicode, plain dashes and quotes, spaced marks, spaCy's English rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plume.config import UserError

if TYPE_CHECKING:
    import tokenizers
    from spacy.tokenizer import Tokenizer as SpacyTokenizer

PLAIN = str.maketrans({"—": "-", "–": "-", "―": "-", "…": "...", "´": "'"})
MARKS = re.compile(r"([-~!\";?+,)(/*\[\]}{|_])\1*")  # a run of one mark becomes a word of its own
LINE_BREAK = re.compile(r"\s*\n\s*")
MOST_KNOWN = 1 << 19  # words remembered before starting anew
BLANKS = re.compile(r"[^\S\n]+")


def spacy_installed() -> bool:
    """Whether the words can be cut as the original cut them."""
    return find_spec("spacy") is not None and find_spec("ftfy") is not None


@cache
def _english() -> SpacyTokenizer:
    if not spacy_installed():
        raise UserError(
            "this tokenizer cuts words as GPT-1 did, with ftfy and spaCy, which are not installed; "
            "install the extra: pip install 'plume-lm[gpt1]'"
        )
    from spacy.lang.en import English

    return English().tokenizer


def standardize(text: str) -> str:
    """The text with mended Unicode, plain dashes and quotes, and space around marks and line breaks."""
    from ftfy import fix_text

    text = MARKS.sub(r" \g<0> ", fix_text(text).translate(PLAIN))
    return BLANKS.sub(" ", LINE_BREAK.sub(" \n ", text)).strip()


def words(text: str) -> Iterator[str]:
    """The words of a text in lower case; a line break is a word."""
    english = _english()
    for token in english(standardize(text)):
        if word := token.text.lower().strip(" "):
            yield word


class Gpt1:
    """Words by spaCy, pieces by the library's merges; a word's ids are remembered."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        _english()  # a missing extra is told at once, not at the first text
        self.model = backend.model
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if len(self.known) > MOST_KNOWN:  # a new table: another thread may still read the old one
            self.known = {}
        known = self.known
        ids: list[int] = []
        for word in words(text):
            if word not in known:
                known[word] = [token.id for token in self.model.tokenize(word)]
            ids += known[word]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]
