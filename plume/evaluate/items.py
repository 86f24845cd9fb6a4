"""What a row of a task becomes (items), and the protocol by which an item becomes tokens to score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from plume.config import Boundary, ProtocolName, UserError, did_you_mean
from plume.inference.scoring import Request, Scorer


@dataclass(frozen=True, kw_only=True)
class MultipleChoice:
    """Candidates, one of them right. Each is scored as its continuation after its context."""

    where: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    names: tuple[str, ...]  # the candidates themselves: their lengths normalise
    gold: int
    neutral: str | None = None  # a text that gives the candidates' probability without the question
    ties: bool = False  # equal likelihoods count one half
    group: str = ""  # for a table of its own, such as BLiMP's phenomena

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
    """A prompt that the model continues, and the answers that count as right."""

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
    """A text that is good or not, decided by its mean log-probability after a context."""

    where: str
    context: str
    statement: str
    good: bool

    @property
    def text(self) -> str:
        return f"{self.context}{self.statement}"


Item = MultipleChoice | LastWord | Passage | Question | Blank | Judgement
SOLVABLE = (MultipleChoice, LastWord, Question)  # kinds that can stand as examples before another item


class TaskRow(dict[str, Any]):
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

    def words(self, name: str) -> str:
        if not (value := self.text(name)).strip():
            raise UserError(f"{self.where}: the field {name!r} is empty")
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
            whole = not isinstance(value, float) or value.is_integer()
        except (TypeError, ValueError, OverflowError):
            number, whole = 0, False
        if not whole:
            raise UserError(f"{self.where}: the field {name!r} should be a whole number, not {value!r}")
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
    row: TaskRow, context: str, options: Sequence[str], gold: int, *, between: str = " ", neutral: str | None = None
) -> MultipleChoice:
    """Candidates after one context."""
    if empty := [n for n, option in enumerate(options) if not option]:
        raise UserError(f"{row.where}: candidate {empty[0]} is empty, so nothing of it can be scored")
    return MultipleChoice(
        where=row.where,
        contexts=(context,) * len(options),
        continuations=tuple(between + option for option in options),
        names=tuple(options),
        gold=gold,
        neutral=neutral,
    )


@dataclass(frozen=True, kw_only=True)
class ScoringProtocol:
    """How texts become tokens and numbers, apart from the task itself."""

    name: ProtocolName
    boundary: Boundary  # joint: encoded together and cut; separate: context and continuation encoded each for itself
    documents: bool  # long texts document by document, or the whole file as one stream
    detokenizer: Literal["original", "mended"]  # with the regular expression that never matches, or with it mended
    choice: str  # the metric that picks a candidate
    stop_word_filter: bool  # LAMBADA: stop words cannot be the predicted last word
    cloze: bool  # LAMBADA with examples: fill in the blank
    unconditional: bool  # candidates of some tasks are divided by their probability after a neutral text
    delimiter: str  # between few-shot examples
    stride: int | None = None  # tokens scored per window of a long text; unset means windows do not overlap

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


PROTOCOLS: dict[str, ScoringProtocol] = {
    # what lm-evaluation-harness does
    "harness": ScoringProtocol(
        name="harness",
        boundary="joint",
        documents=True,
        detokenizer="original",
        choice="acc",
        stop_word_filter=False,
        cloze=False,
        unconditional=False,
        delimiter="\n\n",
    ),
    # Language Models are Unsupervised Multitask Learners
    "gpt2-paper": ScoringProtocol(
        name="gpt2-paper",
        boundary="separate",
        documents=False,
        detokenizer="mended",
        choice="acc",
        stop_word_filter=True,
        cloze=False,
        unconditional=False,
        delimiter="\n\n",
    ),
    # Language Models are Few-Shot Learners
    "gpt3-paper": ScoringProtocol(
        name="gpt3-paper",
        boundary="separate",
        documents=False,
        detokenizer="mended",
        choice="acc_tokens",
        stop_word_filter=False,
        cloze=True,
        unconditional=True,
        delimiter="\n\n",
    ),
}


def find_protocol(
    name: str, *, boundary: Boundary | None = None, stride: int | None = None, stop_word_filter: bool | None = None
) -> ScoringProtocol:
    """A protocol by name; what is given besides is changed in it and so in what the results say."""
    if name not in PROTOCOLS:
        raise UserError(f"there is no protocol {name!r}; all: {', '.join(PROTOCOLS)}{did_you_mean(name, PROTOCOLS)}")
    chosen = replace(PROTOCOLS[name], stride=stride)
    chosen = chosen if boundary is None else replace(chosen, boundary=boundary)
    return chosen if stop_word_filter is None else replace(chosen, stop_word_filter=stop_word_filter)


class TooLong(Exception):
    """An item that does not fit."""

    def __init__(self, tokens: int, room: int) -> None:
        super().__init__(f"{tokens} tokens do not fit into the {room} that the model can see")


def request(
    context: Sequence[int], target: Sequence[int], scorer: Scorer, *, filtered: bool = False, cut: bool = True
) -> tuple[Request, bool]:
    """A request that fits, and whether the context's beginning was cut off for it.

    After nothing, a target stands after the start token; without one its first token becomes the context.
    """
    before, scored = tuple(context), tuple(target)
    if not before and scorer.causal:
        before = scorer.start
        if not before or (len(scored) > 1 and scored[:1] == before):
            before, scored = scored[:1], scored[1:]
    if not scored:
        raise UserError("a candidate has no token that could be scored")
    total, least = len(before) + len(scored), 1 if scorer.causal else 0
    if total <= scorer.room:
        return Request(before, scored, filtered), False
    if len(scored) + least > scorer.room or not cut:
        raise TooLong(total, scorer.room)
    return Request(before[total - scorer.room :], scored, filtered), True
