"""Speculative decoding: tokens proposed by prompt lookup or a draft model, as many as pay on this text."""

# Every token is still the target model's own draw at its position (the noise depends on seed, sample, position and
# token alone), and a guess is kept only when it is that token: the text is the same, whatever the guesses.

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plume.config import SamplingConfig, UserError
from plume.inference import sampler

if TYPE_CHECKING:
    from plume.inference.batcher import Batcher
    from plume.inference.engine import Engine

Propose = Callable[[Sequence[int], int], list[int]]  # the text so far, how many at most -> tokens that may follow
LONGEST_NGRAM = 4
STEPS_KEPT, GUESSES_KEPT = 0.97, 0.9  # what remains of older observations with each new one
UNKNOWN_ROW = 0.3  # what another row is taken to cost before there are steps of different sizes, in plain steps
PAUSE = 16  # tokens until the next try where guessing does not pay; twice as many after each that fails


@dataclass
class StepCost:
    """Seconds of a step, as a fixed part and one for each row, fitted to the latest steps of an engine."""

    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def note(self, rows: int, seconds: float) -> None:
        new = (1.0, rows, rows * rows, seconds, rows * seconds)
        self._sums = [STEPS_KEPT * old + one for old, one in zip(self._sums, new, strict=True)]

    def of_guess(self, sequences: int, seconds: float) -> float:
        """One more row, and so many seconds before it, in tokens that could be written meanwhile without guessing."""
        count, rows, squares, total, mixed = self._sums
        spread = count * squares - rows * rows
        if spread <= 1e-6 * count * count:
            return UNKNOWN_ROW
        per_row = max(0.0, (count * mixed - rows * total) / spread)
        plain = max((total - per_row * rows) / count, 0.0) + per_row * sequences
        return (per_row + seconds) * sequences / plain


@dataclass
class Guesser:
    """Guesses of one sequence: as many as pay by what they cost and how many of the latest were right."""

    propose: Propose
    longest_pause: int = 64  # a draft reads all that was written in a pause
    right: float = 1.0  # of those tried, older ones counting less
    tried: float = 1.0
    seconds: float = 0.0  # of the proposal of one token, once several have been made in a row
    waited: int = PAUSE
    pause: int = PAUSE

    def __call__(self, tokens: Sequence[int], most: int, cost: StepCost, sequences: int) -> list[int]:
        each, rate = cost.of_guess(sequences, self.seconds), self.right / self.tried
        count = next((n for n in range(most) if rate ** (n + 1) <= each), most)
        steady = self.waited == 0
        if count == 0:
            self.waited += 1
            if self.waited <= self.pause or each >= 1:
                return []
            count, self.pause = 1, min(2 * self.pause, self.longest_pause)
        self.waited, began = 0, time.perf_counter()
        found = self.propose(tokens, count)
        if steady and found:  # otherwise a draft has first read what was written without it
            each = (time.perf_counter() - began) / len(found)
            self.seconds = GUESSES_KEPT * self.seconds + (1 - GUESSES_KEPT) * each if self.seconds else each
        return found

    def note(self, guesses: int, right: int) -> None:
        """So many of the guesses were what the model wrote."""
        self.right = GUESSES_KEPT * self.right + right
        self.tried = GUESSES_KEPT * self.tried + min(right + 1, guesses)
        self.pause = PAUSE if right else self.pause


def look_up(tokens: Sequence[int], most: int) -> list[int]:
    """What followed when the last few tokens were there before: the longest match, the latest of its places."""
    text = array(sampler.WORDS, tokens)
    data, word = text.tobytes(), text.itemsize
    for n in range(min(LONGEST_NGRAM, len(text) - 1), 0, -1):
        tail = data[-n * word :]
        at = data.rfind(tail, 0, len(data) - word)
        while at % word and at >= 0:  # not at a token's first byte
            at = data.rfind(tail, 0, at + len(tail) - 1)
        if at >= 0:
            return text[at // word + n : at // word + n + most].tolist()
    return []


class Draft:
    """A smaller model that writes ahead with the target's own noise, so that the two often draw the same token."""

    def __init__(self, batcher: Batcher, config: SamplingConfig, *, seed: int, sample: int, prompt_length: int) -> None:
        self.batcher, self.config = batcher, config
        self.seed, self.sample, self.prompt_length = seed, sample, prompt_length

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        text = list(tokens)
        while len(text) - len(tokens) < most and len(text) < self.batcher.engine.capacity:
            scores = sampler.penalised(self.batcher.logits_for(text)[-1], self.config, text, self.prompt_length, ())
            position = len(text) - self.prompt_length
            text.append(sampler.choose(scores, self.config, self.seed, self.sample, position))
        return text[len(tokens) :]


def guesser(config: SamplingConfig, draft: Callable[[], Batcher], seed: int, sample: int, start: int) -> Guesser | None:
    if config.speculate == "draft":
        return Guesser(Draft(draft(), config, seed=seed, sample=sample, prompt_length=start), 512)
    return Guesser(look_up) if config.speculate == "lookup" else None


def check_draft(target: Engine, draft: Engine) -> None:
    if (wanted := target.config.vocab_size) != (found := draft.config.vocab_size):
        sizes = f"the draft model has a vocabulary of {found}, the model one of {wanted}"
        raise UserError(f"{sizes}; both need the same tokenizer")
