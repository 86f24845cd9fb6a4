"""Long texts: cutting files into documents, undoing the tokenisation of old data sets, counting what was there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from plume.evaluate.items import Passage, Row
from plume.evaluate.protocols import Protocol

HEADING = re.compile(r"^ = [^=\n]*[^= \n][^=\n]* = ?$", re.MULTILINE)
SPACED = (" : ", " ; ", " . ", " ! ", " ? ", " , ")
BRACKETS = ((r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ('"', '"'), ("'", "'"))


def plain_wikitext(text: str, *, mended: bool) -> str:
    """WikiText as it was written. Its usual code has one expression that never matches: mended, it does."""
    text = text.replace("s '", "s'")
    if mended:
        text = re.sub(r"' ([0-9])", r"'\1", text)
    for symbol in "-,.":
        text = text.replace(f" @{symbol}@ ", symbol)
    for mark in SPACED:
        text = text.replace(mark, mark[1:])
    for left, right in BRACKETS:
        inside = rf"{left}\s*([^{right}]*?)\s*{right}"
        text = re.sub(inside, lambda m: m[0][0] + m[1] + m[0][-1], text)
    for equals in ("= = = =", "= = =", "= ="):
        text = text.replace(equals, equals.replace(" ", ""))
    text = text.replace(" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")
    return text.replace(" \n", "\n").replace("\n ", "\n").replace(" N ", " 1 ").replace(" 's", "'s")


def plain_penn(text: str, *, mended: bool) -> str:
    """Penn Treebank with its contractions and numbers closed up. Its usual code loses the blank before a number."""
    number = " 1 " if mended else "1 "
    for spaced, close in ((" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", number)):
        text = text.replace(spaced, close)
    return text.replace("$ 1", "$1").replace("# 1", "#1")


def plain_book(text: str) -> str:
    """Treebank quotes, brackets and punctuation as in print."""
    for old, new in (("-LRB-", "("), ("-RRB-", ")"), ("-LCB-", "{"), ("-RCB-", "}"), ("-LSB-", "["), ("-RSB-", "]")):
        text = text.replace(old, new)
    text = re.sub(r"``\s*", '"', text)
    text = re.sub(r"\s*''", '"', text)
    text = re.sub(r"`\s*", "'", text)
    text = re.sub(r"([(\[{])\s+", r"\1", text)
    text = re.sub(r"\s+([)\]},.;:!?])", r"\1", text)
    return re.sub(r"\s+('s|'re|'ve|'ll|'d|'m|n't)\b", r"\1", text)


def wikitext(row: Row, protocol: Protocol) -> Iterator[Passage]:
    pages = split_pages(row.text("text")) if protocol.documents else [row.text("text")]
    for page in pages:
        yield passage(row, plain_wikitext(page, mended=protocol.detokenizer == "mended"), page)


def split_pages(text: str) -> list[str]:
    """One text per article; the line before a heading belongs to it."""
    starts = [m.start() for m in HEADING.finditer(text)]
    starts = [start - 2 if text[max(0, start - 2) : start] == " \n" else start for start in starts]
    pages = [text[a:b] for a, b in pairwise(sorted({0, *starts, len(text)}))]
    return [page for page in pages if page.strip()]


def penn(row: Row, protocol: Protocol) -> Iterator[Passage]:
    text = row.text("text")
    yield passage(row, plain_penn(text, mended=protocol.detokenizer == "mended"), text)


def as_it_is(row: Row, protocol: Protocol) -> Iterator[Passage]:
    text = row.text("text")
    yield passage(row, text, text)


def passage(row: Row, text: str, original: str) -> Passage:
    """What is divided by is always counted in the original."""
    words = len(re.split(r"\s+", original))
    return Passage(
        where=row.where, text=text, words=words, characters=len(original), bytes=len(original.encode("utf-8"))
    )
