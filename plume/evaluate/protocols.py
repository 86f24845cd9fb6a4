"""The choices that published numbers leave unsaid, each under a name: borders, windows, denominators, normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from plume.config import UserError, did_you_mean
from plume.evaluate.scoring import Request, Scorer
from plume.text import Tokenizer

Border = Literal["joined", "apart"]
Style = Literal["harness", "gpt2-paper", "gpt3-paper"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How texts become tokens and numbers, apart from the task itself."""

    name: Style
    border: Border  # joined: encoded together and cut; apart: context and continuation encoded each for itself
    documents: bool  # long texts document by document, or the whole file as one stream
    detokenizer: Literal["original", "mended"]  # with the regular expression that never matches, or with it mended
    choice: str  # the metric that picks a candidate
    stop_words: bool  # LAMBADA: stop words cannot be the predicted last word
    cloze: bool  # LAMBADA with examples: fill in the blank
    unconditional: bool  # candidates of some tasks are divided by their probability after a neutral text
    delimiter: str  # between few-shot examples
    stride: int | None = None  # tokens scored per window of a long text; unset means windows do not overlap

    def said(self) -> dict[str, Any]:
        return asdict(self)


PROTOCOLS: dict[str, Protocol] = {
    # what lm-evaluation-harness does
    "harness": Protocol(
        name="harness",
        border="joined",
        documents=True,
        detokenizer="original",
        choice="acc",
        stop_words=False,
        cloze=False,
        unconditional=False,
        delimiter="\n\n",
    ),
    # Language Models are Unsupervised Multitask Learners
    "gpt2-paper": Protocol(
        name="gpt2-paper",
        border="apart",
        documents=False,
        detokenizer="mended",
        choice="acc",
        stop_words=True,
        cloze=False,
        unconditional=False,
        delimiter="\n\n",
    ),
    # Language Models are Few-Shot Learners
    "gpt3-paper": Protocol(
        name="gpt3-paper",
        border="apart",
        documents=False,
        detokenizer="mended",
        choice="acc_tokens",
        stop_words=False,
        cloze=True,
        unconditional=True,
        delimiter="\n\n",
    ),
}


def protocol_called(
    name: str, *, border: Border | None = None, stride: int | None = None, stop_words: bool | None = None
) -> Protocol:
    """A protocol by name; what is given besides is changed in it and so in what the results say."""
    if name not in PROTOCOLS:
        raise UserError(f"there is no protocol {name!r}{did_you_mean(name, PROTOCOLS)}; all: {', '.join(PROTOCOLS)}")
    chosen = replace(PROTOCOLS[name], stride=stride)
    chosen = chosen if border is None else replace(chosen, border=border)
    return chosen if stop_words is None else replace(chosen, stop_words=stop_words)


def pair(context: str, continuation: str, tokenizer: Tokenizer, border: Border) -> tuple[list[int], list[int]]:
    """Two texts as tokens, cut where the protocol cuts. Blanks at the context's end belong to the continuation."""
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if border == "apart" or not bare:
        return tokenizer.encode(bare), tokenizer.encode(continuation)
    before = tokenizer.encode(bare)
    after = tokenizer.encode(bare + continuation)[len(before) :]
    return before, after if after else tokenizer.encode(continuation)  # merged into the context without a trace


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
