"""Input transformations: how a structured example becomes one or more token sequences, declared as data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import UserError, did_you_mean
from plume.data.examples import Example, Kind
from plume.text import Tokenizer

IntArray = npt.NDArray[np.int32]
NO_LABEL = -100  # a token without a tag

# Every pass is a traversal of the example: fields in braces, plain words as they are, and a bar where the second
# text begins. What stands around the texts is the family's: see `ready`.
PASSES: dict[Kind, tuple[str, ...]] = {
    "classify": ("{text}",),
    "pair": ("{text} | {pair}",),
    "similarity": ("{text} | {pair}", "{pair} | {text}"),
    "choose": ("{context} {question} | {choice}",),
    "embed": ("{text}",),
    "translate": ("{source}",),
}
SEES_BOTH: dict[Kind, tuple[str, ...]] = {"similarity": ("{text} | {pair}",)}  # where one order is enough
FRESH = {"start": "_start_", "delimiter": "_delimiter_", "extract": "_classify_"}  # GPT-1's, in its order


def ready(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with something around every text: its own, or else GPT-1's three new tokens as last rows.

    [start; text; extract] and [start; text; delimiter; text; extract] are then what it wraps a text or two in,
    here and wherever its folder is opened.
    """
    if any(isinstance(part, int) for part, _ in tokenizer.definition.single):
        return tokenizer
    names = [name for name in FRESH.values() if name not in tokenizer.special_ids]
    grown = tokenizer.add_specials(names) if names else tokenizer
    start, delimiter, extract = (grown.special_ids[name] for name in FRESH.values())
    d = grown.definition
    if d.library is not None:
        raise UserError("this tokenizer runs in the tokenizers library alone, so nothing can be put around its texts")
    roles = dict(d.roles)
    roles.setdefault(
        "pad", roles.get("end", start)
    )  # lengths say what is real; this is for other readers of the folder
    return Tokenizer(
        replace(
            d,
            roles=roles,
            single=((start, 0), ("A", 0), (extract, 0)),
            pair=((start, 0), ("A", 0), (delimiter, 0), ("B", 0), (extract, 0)),
        )
    )


@dataclass(frozen=True)
class Part:
    """A piece of a pass: a field, or words of the template itself."""

    field: str | None
    words: str = ""


@dataclass(frozen=True)
class Pass:
    first: tuple[Part, ...]
    second: tuple[Part, ...] | None

    @property
    def fields(self) -> set[str]:
        return {part.field for part in (*self.first, *(self.second or ())) if part.field is not None}


def parse(template: str) -> Pass:
    """`{context} {question} | {choice}` taken apart."""
    sides = template.split("|")
    if len(sides) > 2 or not all(side.strip() for side in sides):
        raise UserError(f"template {template!r}: one text, or two with a bar between, such as {PASSES['pair'][0]!r}")
    parts = []
    for side in sides:
        found = re.findall(r"\{(\w+)\}|([^{}]+)", side.strip())
        if re.sub(r"\{\w+\}|[^{}]+", "", side):
            raise UserError(f"template {template!r}: braces hold one field name each, such as {{text}}")
        parts.append(tuple(Part(name or None, words.strip()) for name, words in found if name or words.strip()))
    return Pass(parts[0], parts[1] if len(parts) > 1 else None)


@dataclass(frozen=True)
class Row:
    """One token sequence with the segment of each token."""

    tokens: IntArray
    segments: IntArray


@dataclass
class Cut:
    """How many rows were longer than they may be."""

    rows: int = 0
    longest: int = 0

    def note(self, wanted: int, kept: int) -> None:
        self.longest = max(self.longest, wanted)
        self.rows += wanted > kept


class Transform:
    """From examples to token rows. A row that is too long loses tokens from the end of its longest text."""

    def __init__(
        self, tokenizer: Tokenizer, kind: Kind, *, length: int, causal: bool, template: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.kind, self.length = tokenizer, kind, length
        own = PASSES[kind] if causal else SEES_BOTH.get(kind, PASSES[kind])
        self.passes = [parse(text) for text in (template if template else own)]
        if kind == "choose" and not all("choice" in p.fields for p in self.passes):
            raise UserError("the template of a choose task must hold {choice}")
        self.cut = Cut()
        around = len(tokenizer.wrap([], [])[0]) if any(p.second for p in self.passes) else len(tokenizer.wrap([])[0])
        if length <= around:
            raise UserError(f"length={length} leaves no room for text beside {around} special tokens")

    def rows(self, examples: Sequence[Example]) -> list[list[Row]]:
        """The rows of each example: one for each pass, or for each choice of each pass."""
        plans = [list(self._filled(example)) for example in examples]
        texts = [text for plan in plans for _, sides in plan for side in sides for text in side]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [
            [self._wrapped(p, [[next(encoded) for _ in side] for side in sides]) for p, sides in plan] for plan in plans
        ]

    def _filled(self, example: Example) -> Iterator[tuple[Pass, list[list[str]]]]:
        """Each pass with its texts in place."""
        choices = example.fields.get("choices", [None])
        for choice in choices:
            values = {**example.fields, **({} if choice is None else {"choice": choice})}
            for p in self.passes:
                yield p, [_texts(side, values) for side in (p.first, p.second) if side is not None]

    def _wrapped(self, p: Pass, sides: list[list[Any]]) -> Row:
        limit = self.length - len(self.tokenizer.wrap([], None if p.second is None else [])[0])
        parts = [part for side in sides for part in side]
        self.cut.note(sum(len(part) for part in parts), limit)
        keep = iter(shares([len(part) for part in parts], limit))
        kept = [np.concatenate([part[: next(keep)] for part in side]).tolist() for side in sides]
        tokens, segments = self.tokenizer.wrap(kept[0], kept[1] if p.second is not None else None)
        return Row(np.array(tokens, dtype=np.int32), np.array(segments, dtype=np.int32))


def _texts(side: tuple[Part, ...], values: Mapping[str, Any]) -> list[str]:
    """The texts of one side; each but the first begins with the blank that stood before it."""
    texts: list[str] = []
    for part in side:
        if part.field is not None and part.field not in values:
            if part.field == "question":  # a story has none
                continue
            raise UserError(
                f"the template wants {{{part.field}}}{did_you_mean(part.field, values)}; there is {', '.join(values)}"
            )
        text = part.words if part.field is None else str(values[part.field])
        texts.append(f" {text}" if texts else text)
    return texts


def shares(lengths: Sequence[int], limit: int) -> list[int]:
    """How much of each part is kept so that all fit: the longest loses tokens first, down to the next longest."""
    if sum(lengths) <= limit:
        return list(lengths)
    cap, left, waiting = 0, limit, sorted(lengths)
    for place, size in enumerate(waiting):
        cap = left // (len(waiting) - place)
        if size > cap:
            break
        left -= size
    kept = [min(size, cap) for size in lengths]
    spare = limit - sum(kept)
    for place, size in enumerate(lengths):
        if spare and size > kept[place]:
            kept[place] += 1
            spare -= 1
    return kept


# ---- tags --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TagRow:
    """A stretch of a sentence whose words' first pieces carry the tags."""

    row: Row
    places: IntArray  # where the first piece of each word stands
    first_word: int


class TagTransform:
    """Words to pieces. A sentence that is too long is cut between words into several rows, so no word is lost."""

    def __init__(self, tokenizer: Tokenizer, *, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.around = len(tokenizer.wrap([])[0])
        self.before = next(i for i, (part, _) in enumerate(tokenizer.definition.single) if part == "A")
        self.pieces: dict[str, list[int]] = {}
        self.cut = Cut()

    def rows(self, sentences: Sequence[Sequence[str]]) -> list[list[TagRow]]:
        """The rows of each sentence; most need one."""
        spelled = [[word if place == 0 else f" {word}" for place, word in enumerate(words)] for words in sentences]
        new = sorted({word for words in spelled for word in words} - self.pieces.keys())
        unknown = [] if self.tokenizer.unknown is None else [self.tokenizer.unknown]
        for word, ids in zip(new, self.tokenizer.encode_batch(new), strict=True):
            self.pieces[word] = [int(i) for i in ids] or unknown
        return [list(self._cut(words)) for words in spelled]

    def _cut(self, words: Sequence[str]) -> Iterator[TagRow]:
        room = self.length - self.around
        ids, places, first = list[int](), list[int](), 0
        self.cut.note(sum(len(self.pieces[word]) for word in words), room)
        for number, word in enumerate(words):
            pieces = self.pieces[word][:room]
            if ids and len(ids) + len(pieces) > room:
                yield self._row(ids, places, first)
                ids, places, first = [], [], number
            places.append(self.before + len(ids))
            ids += pieces
        yield self._row(ids, places, first)

    def _row(self, ids: list[int], places: list[int], first: int) -> TagRow:
        tokens, segments = self.tokenizer.wrap(ids)
        row = Row(np.array(tokens, dtype=np.int32), np.array(segments, dtype=np.int32))
        return TagRow(row, np.array(places, dtype=np.int32), first)


# ---- spans -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A question with a stretch of its context."""

    row: Row
    first: int  # place of the context's first token in the row
    starts: IntArray  # character where each of the context's tokens begins, and ends
    ends: IntArray
    best: npt.NDArray[np.bool_]  # whether this window, of all, shows most on both sides of the token

    def target(self, answer: tuple[int, str] | None) -> tuple[int, int]:
        """Places of the answer's first and last token; the very first token where the window does not hold it."""
        if answer is None:
            return 0, 0
        begin, stop = answer[0], answer[0] + len(answer[1])
        inside = np.flatnonzero((self.ends > begin) & (self.starts < stop))
        if not len(inside) or self.starts[0] > begin or self.ends[-1] < stop:
            return 0, 0
        return self.first + int(inside[0]), self.first + int(inside[-1])


class SpanTransform:
    """Question and context to windows that step through a long context, so that every word is in some window."""

    def __init__(self, tokenizer: Tokenizer, *, length: int, stride: int | None, question_length: int) -> None:
        self.tokenizer, self.length, self.question_length = tokenizer, length, question_length
        self.around = len(tokenizer.wrap([], [])[0])
        self.stride = min(128, max(1, length // 3)) if stride is None else stride
        self.cut = Cut()
        if length - self.around - min(question_length, length // 2) < 2:
            raise UserError(f"length={length} leaves no room for a context beside the question")

    def windows(self, question: str, context: str) -> list[Window]:
        asked = self.tokenizer.encode(question)[: min(self.question_length, self.length // 2)]
        pieces = self.tokenizer.pieces(context)
        room = self.length - self.around - len(asked)
        step = min(self.stride, room)
        self.cut.note(len(pieces), room)
        cuts, start = [], 0
        while True:
            cuts.append((start, min(start + room, len(pieces))))
            if start + room >= len(pieces):
                break
            start += step
        best = _best_windows(len(pieces), cuts)
        first = len(self.tokenizer.wrap(asked, [])[0]) - self._behind()
        found = []
        for number, (start, stop) in enumerate(cuts):
            part = pieces[start:stop]
            tokens, segments = self.tokenizer.wrap(asked, [p.id for p in part])
            found.append(
                Window(
                    Row(np.array(tokens, dtype=np.int32), np.array(segments, dtype=np.int32)),
                    first,
                    np.array([p.start for p in part], dtype=np.int32),
                    np.array([p.end for p in part], dtype=np.int32),
                    best[start:stop] == number,
                )
            )
        return found

    def _behind(self) -> int:
        pair = self.tokenizer.definition.pair
        return len(pair) - 1 - next(i for i, (part, _) in enumerate(pair) if part == "B")


def _best_windows(tokens: int, cuts: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """For every token the window in which the nearer edge is farthest; BERT's tie-break favours longer windows."""
    scores = np.full((len(cuts), tokens), -1.0)
    for number, (start, stop) in enumerate(cuts):
        places = np.arange(start, stop)
        scores[number, start:stop] = np.minimum(places - start, stop - 1 - places) + 0.01 * (stop - start)
    return scores.argmax(axis=0)
