"""What a line of a task becomes: candidates to choose from, a last word, a passage, a question, a blank, a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plume.config import UserError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Candidates, one of them right. Each is scored as its continuation after its context."""

    where: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    names: tuple[str, ...]  # the candidates themselves: their lengths normalise
    gold: int
    neutral: str | None = None  # a text that gives the candidates' probability without the question

    @property
    def solved(self) -> str:
        return self.contexts[self.gold] + self.continuations[self.gold]

    @property
    def text(self) -> str:
        return self.solved


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """A text whose end is to be predicted exactly."""

    where: str
    context: str
    word: str  # with the blank before it
    opening: str = ""  # stands before everything, also before examples
    gap: str = ""  # between the two where the item is an example

    @property
    def solved(self) -> str:
        return self.context + self.gap + self.word

    @property
    def text(self) -> str:
        return self.solved


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A long text and the counts of the original that its likelihood is divided by."""

    where: str
    text: str
    words: int
    characters: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt that the model goes on from, and the answers that count as right."""

    where: str
    prompt: str
    answers: tuple[str, ...]
    stop: tuple[str, ...] = ("\n",)
    tokens: int  # at most, of the model's answer
    top_k: int = 1  # 1 is greedy
    beams: int = 1  # more than one searches for the likeliest answer
    source: str = ""  # what an encoder-decoder translates
    opening: str = ""  # stands before everything, also before examples
    gap: str = " "  # before the answer where the item is an example
    same: Literal["squad", "but-marks", "but-articles"] = "squad"  # which answers are the same
    sentences: int | None = None  # of the answer that count

    @property
    def solved(self) -> str:
        return self.prompt + self.gap + self.answers[0]

    @property
    def text(self) -> str:
        return self.solved


@dataclass(frozen=True, kw_only=True)
class Blank:
    """A text with a gap that a masked model fills."""

    where: str
    before: str
    after: str
    answer: str

    @property
    def text(self) -> str:
        return self.before + self.answer + self.after


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A text that is good or not, told by its mean log-probability after a context."""

    where: str
    context: str
    statement: str
    good: bool

    @property
    def text(self) -> str:
        return f"{self.context}{self.statement}"


Item = Choice | LastWord | Passage | Question | Blank | Judgement
SOLVABLE = (Choice, LastWord, Question)  # kinds that can stand as examples before another item


class Row(dict[str, Any]):
    """A row that knows where it stands, so that what is wrong with it can be found."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise UserError(f"{self.where}: the field {name!r} is missing; there are {', '.join(map(repr, self))}")

    def text(self, name: str) -> str:
        value = self[name]
        if not isinstance(value, str):
            raise UserError(f"{self.where}: the field {name!r} should be a text, not {value!r}")
        return value

    def texts(self, name: str, least: int = 1) -> list[str]:
        value = self[name]
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise UserError(f"{self.where}: the field {name!r} should be a list of texts, not {value!r}")
        if len(value) < least:
            raise UserError(f"{self.where}: the field {name!r} has {len(value)} entries; at least {least} are needed")
        return list(value)

    def index(self, name: str, count: int, *, first: int = 0) -> int:
        """A field that names one of `count` candidates by number, counted from `first`, as an index."""
        value = self[name]
        try:
            number = int(value) - first
        except (TypeError, ValueError):
            raise UserError(f"{self.where}: the field {name!r} should be a number, not {value!r}") from None
        if not 0 <= number < count:
            raise UserError(
                f"{self.where}: {name}={value!r} is out of range; the {count} candidates have the numbers "
                f"{first} to {first + count - 1}"
            )
        return number

    def one_of(self, name: str, known: Sequence[str]) -> int:
        """A field that must be one of some words."""
        value = str(self[name])
        if value not in known:
            raise UserError(f"{self.where}: {name}={value!r} is not one of {', '.join(map(repr, known))}")
        return list(known).index(value)


def choice(
    row: Row, context: str, options: Sequence[str], gold: int, *, between: str = " ", neutral: str | None = None
) -> Choice:
    """Candidates after one context."""
    if empty := [n for n, option in enumerate(options) if not option]:
        raise UserError(f"{row.where}: candidate {empty[0]} is empty, so nothing of it can be scored")
    return Choice(
        where=row.where,
        contexts=(context,) * len(options),
        continuations=tuple(between + option for option in options),
        names=tuple(options),
        gold=gold,
        neutral=neutral,
    )
