"""One answer under way: what it has read, what it may write next, when it ends, and the text that can be shown."""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from plume.config import SamplingConfig, UserError
from plume.inference import sampler
from plume.inference.sampler import Ids
from plume.inference.speculation import Guesser, StepCost
from plume.model.likelihood import Floats
from plume.text import Tokenizer
from plume.util import drawings
from plume.util.console import plural

SHOWN_CHARACTERS = 60  # of a text in its short form
EMPTY_PROMPT = "the prompt is empty; None, or --unconditional at the command line, samples from the start token"


@dataclass(frozen=True)
class TokenChoice:
    """A token that was written, with what the model itself thought of it and of others (before any sampling rule)."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, repr=False)
class Generation:
    """A finished text; `print` shows it."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str  # "stop": the end token or a stop came; "length": the limit or the context's end
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None  # (id, log-probability) of the likeliest, by token
    prompt_tokens: int
    seed: int
    samples: tuple[Generation, ...] = ()  # all n answers when more than one was asked for, this one first

    @property
    def mean_logprob(self) -> float:
        return float(np.mean(self.logprobs)) if self.logprobs else float("-inf")

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN_CHARACTERS else f"{self.text[:SHOWN_CHARACTERS]} ..."
        more = f", samples={len(self.samples)}" if self.samples else ""
        return f"Generation({text!r}, tokens={len(self.tokens)}, finish_reason={self.finish_reason!r}{more})"

    def _repr_html_(self) -> str:
        """The text of each sample with its facts."""
        return "".join(
            f"<figure style='display:inline-block;vertical-align:top;max-width:34em;margin:.5em 1.5em .5em 0'>"
            f"<div style='white-space:pre-wrap'>{drawings.plain(one.text)}</div>"
            f"<figcaption>{len(one.tokens)} tokens, {one.finish_reason}, seed {one.seed}</figcaption>"
            "</figure>"
            for one in (self.samples if self.samples else (self,))
        )


def fresh_seed(config: SamplingConfig) -> int:
    return secrets.randbits(32) if config.seed is None else config.seed


def check_ids(tokens: Sequence[int], vocab_size: int, where: str = "") -> None:
    if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise UserError(f"token id {wrong}{where} is outside the vocabulary (0 to {vocab_size - 1})")


def token_ids(tokenizer: Tokenizer, text: str | Sequence[int]) -> list[int]:
    """The ids of a text, or those that are given."""
    if isinstance(text, str):
        return tokenizer.encode(text)
    try:
        if not isinstance(text, bytes | bytearray):  # whose items are numbers too
            return [int(i) for i in text]
    except (TypeError, ValueError):
        pass
    raise UserError(f"expected a text or a list of token ids, not {text!r}")


class ContextLengthError(UserError):
    """A prompt that is longer than the context."""


def check_prompt(prompt: Sequence[int], vocab_size: int, context: int | None = None) -> None:
    """Refuse a prompt that cannot be read, or not as a whole where a context is given."""
    if len(prompt) == 0:
        raise UserError(EMPTY_PROMPT)
    check_ids(prompt, vocab_size)
    if context is not None and len(prompt) > context:
        raise ContextLengthError(f"the prompt has {plural(len(prompt), 'token')}, the context holds {context}")


def fit_prompt(prompt: Sequence[int], config: SamplingConfig, context: int, vocab_size: int) -> list[int]:
    """The prompt, checked, and cut from the left when it is too long and the policy allows that."""
    check_prompt(prompt, vocab_size)
    named = (*config.logit_bias, *config.stop_tokens)
    if not all(isinstance(token, int) for token in named):
        raise UserError("logit_bias and stop_tokens take token ids as whole numbers, such as logit_bias={50256: -5.0}")
    check_ids(named, vocab_size, " in logit_bias or stop_tokens")
    if len(prompt) < context:
        return list(prompt)
    new = 1 if config.max_new_tokens is None else config.max_new_tokens
    cut = max(1, context - new if new < context else context // 2)
    if config.overflow == "refuse":
        raise ContextLengthError(
            f"the prompt has {plural(len(prompt), 'token')}, but the context holds {context} with at least one new "
            f"one; overflow=truncate keeps the last {cut}, overflow=slide moves the window on"
        )
    return list(prompt[-(cut if config.overflow == "truncate" else max(1, context // 2)) :])


class Healing:
    """Token healing: the prompt's last tokens are taken back, and what is written must begin with their bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        table = tokenizer.piece_table
        special = set(tokenizer.special_ids.values())
        self.pieces = table
        self.sorted = sorted((piece, i) for i, piece in enumerate(table) if piece and i not in special)

    def starting_with(self, prefix: bytes) -> list[int]:
        """Tokens whose bytes begin with these, or are a beginning of them."""
        low = bisect_left(self.sorted, (prefix, -1))
        found = []
        while low < len(self.sorted) and self.sorted[low][0].startswith(prefix):
            found.append(self.sorted[low][1])
            low += 1
        for size in range(1, len(prefix)):
            at = bisect_left(self.sorted, (prefix[:size], -1))
            while at < len(self.sorted) and self.sorted[at][0] == prefix[:size]:
                found.append(self.sorted[at][1])
                at += 1
        return found

    def take_back(self, prompt: list[int], start: int | None, most: int = 4) -> tuple[list[int], bytes]:
        """The prompt without the longest tail that a longer token begins with, and that tail.

        When nothing of the prompt is left, the start token stands in for it.
        """
        stand_in = [] if start is None else [start]
        for count in range(min(most, len(prompt) - 1 + len(stand_in)), 0, -1):
            tail = b"".join(self.pieces[i] for i in prompt[-count:])
            try:
                tail.decode()
            except UnicodeDecodeError:
                continue  # the tail starts inside a character
            longer = any(len(self.pieces[i]) > len(tail) for i in self.starting_with(tail))
            if tail and longer:
                return prompt[:-count] or stand_in, tail
        return prompt, b""


@lru_cache(maxsize=4)
def healing(tokenizer: Tokenizer) -> Healing:
    return Healing(tokenizer)


class SequenceState:
    """One sequence under way. A batcher gives it logits; it never touches an engine."""

    def __init__(
        self,
        prompt: Sequence[int],
        config: SamplingConfig,
        *,
        tokenizer: Tokenizer,
        context: int,
        vocab_size: int,
        seed: int,
        sample: int = 0,
        guess: Guesser | None = None,
    ) -> None:
        vocab_size = min(vocab_size, tokenizer.vocab_size)  # rows that only pad the table are never written
        self.config, self.tokenizer, self.context, self.vocab_size = config, tokenizer, context, vocab_size
        self.seed, self.sample, self.guess = seed, sample, guess
        tokens = fit_prompt(prompt, config, context, vocab_size)
        self.prompt_tokens = len(tokens)
        self.owed = b""  # what healing has taken back and the new tokens must begin with
        if config.token_healing:
            tokens, self.owed = healing(tokenizer).take_back(tokens, tokenizer.start)
        self.skip = len(self.owed.decode())  # characters of the prompt that come again
        self.tokens = tokens  # prompt and answer
        self._history = array(sampler.WORDS, tokens)  # the same for compiled code
        self.prompt_length = len(tokens)
        self.base = 0  # where the window starts; moves when it slides
        self.ends = frozenset((*(() if config.ignore_eos else tokenizer.ends), *config.stop_tokens))
        self.choices: list[TokenChoice] = []
        self.finish_reason: str | None = None
        self.text = ""  # what may be shown for good
        self._held = ""  # text that may be the beginning of a stop
        self._given = 0
        self._streamer = tokenizer.streamer()
        for token in tokens[-8:]:  # so that a space between two words belongs to the answer
            self._streamer.push(token)

    # -- what the batcher asks for

    @property
    def window(self) -> list[int]:
        return self.tokens[self.base :]

    @property
    def written(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def guesses(self, room: int, cost: StepCost, sequences: int) -> list[int]:
        """Tokens to verify together with the next one, in a step with the next ones of so many sequences."""
        if self.guess is None or self.owed:
            return []
        left = room if self.config.max_new_tokens is None else self.config.max_new_tokens - len(self.choices) - 1
        most = min(self.config.speculate_tokens, room, left)
        return self.guess(self.tokens, most, cost, sequences) if most > 0 else []

    def rows(self, logits: Floats, guesses: Sequence[int]) -> list[sampler.Row]:
        """What is to be chosen from rows of logits, one more than there were guesses; each row is that behind one more
        guess."""
        return [self._row(logits[i, : self.vocab_size], guesses[:i]) for i in range(len(logits))]

    def accept(self, picked: Sequence[sampler.Picked], guesses: Sequence[int]) -> int:
        """Take what was chosen from these rows; returns how many tokens were written."""
        for i, choice in enumerate(picked):
            self._write(TokenChoice(*choice))
            if self.finish_reason is not None or i == len(guesses) or choice[0] != guesses[i]:
                if self.guess is not None and guesses:
                    self.guess.note(len(guesses), i)
                return i + 1
        raise AssertionError("there is one row more than there are guesses")

    def slide(self) -> None:
        """Move the window on: forget the older half."""
        self.base = len(self.tokens) - max(1, self.context // 2)

    @property
    def full(self) -> bool:
        return len(self.window) >= self.context

    # -- choosing

    def _row(self, logits: Floats, guessed: Sequence[int]) -> sampler.Row:
        tokens = self._history + array(sampler.WORDS, guessed) if guessed else self._history
        position = len(self.choices) + len(guessed)
        row = sampler.Row(logits, self.config, self.seed, self.sample, position, tokens, self.prompt_length, self.ends)
        return replace(row, scores=self._healed(row)) if self.owed else row

    def _healed(self, row: sampler.Row) -> Floats:
        """Scores of the tokens alone that continue what is owed; a ban of all of them cannot hold."""
        allowed: Ids = np.array(healing(self.tokenizer).starting_with(self.owed))
        given = row.penalised if np.isfinite(row.penalised[allowed]).any() else row.logits
        scores = np.full_like(given, -np.inf)
        scores[allowed] = given[allowed]
        return scores

    def _write(self, choice: TokenChoice) -> None:
        self.choices.append(choice)
        if self.owed:
            piece = self.tokenizer.piece_bytes(choice.id)
            self.owed = self.owed[len(piece) :]
        if choice.id in self.ends and len(self.choices) > self.config.min_new_tokens:
            self._finish("stop")
            return
        self.tokens.append(choice.id)
        self._history.append(choice.id)
        self._show(self._streamer.push(choice.id))
        window_over = self.full and self.config.overflow != "slide"
        if self.finish_reason is None and (window_over or len(self.choices) == self.config.max_new_tokens):
            self._finish("length")

    # -- text

    def _show(self, piece: str) -> None:
        if self.skip:
            self.skip, piece = max(0, self.skip - len(piece)), piece[self.skip :]
        held = self._held + piece
        if len(self.choices) >= self.config.min_new_tokens:
            found = [at for at in (held.find(stop) for stop in self.config.stop) if at >= 0]
            if found:
                self.text += held[: min(found)]
                self._held = ""
                self.finish_reason = "stop"
                return
        keep = max((_overlap(held, stop) for stop in self.config.stop), default=0)
        self.text += held[: len(held) - keep]
        self._held = held[len(held) - keep :]

    def _finish(self, reason: str) -> None:
        self._show(self._streamer.flush())
        if self.finish_reason is None:
            self.text += self._held
            self.finish_reason = reason

    def stop(self) -> None:
        """End here, as if the limit had been reached."""
        if self.finish_reason is None:
            self._finish("length")

    def news(self) -> str:
        """Text that has come since the last call."""
        new = self.text[self._given :]
        self._given = len(self.text)
        return new

    def result(self) -> Generation:
        assert self.finish_reason is not None
        with_logprobs = self.choices and self.choices[0].logprob is not None
        return Generation(
            text=self.text,
            tokens=tuple(choice.id for choice in self.choices),
            finish_reason=self.finish_reason,
            logprobs=tuple(c.logprob for c in self.choices if c.logprob is not None) if with_logprobs else None,
            top_logprobs=tuple(c.top for c in self.choices) if self.config.logprobs else None,
            prompt_tokens=self.prompt_tokens,
            seed=self.seed,
        )


class FaultIsolatedSequence(SequenceState):
    """A sequence whose own failure ends it alone, not the batch it is in."""

    error: Exception | None = None

    def rows(self, logits: Floats, guesses: Sequence[int]) -> list[sampler.Row]:
        try:
            return super().rows(logits, guesses)
        except Exception as error:
            self.error = error
            return []

    def accept(self, picked: Sequence[sampler.Picked], guesses: Sequence[int]) -> int:
        try:
            if self.error is None:
                return super().accept(picked, guesses)
        except Exception as error:
            self.error = error
        self.finish_reason = "error"
        return 0


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that the stop begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
