"""Guessing ahead: tokens verified together in one step. A right guess saves steps, a wrong one changes nothing.

Every token is still the target model's own draw at its position (the noise depends on seed, sample, position and token
alone), and a guess is kept only when it is that token: the text is the same as without guessing, whatever the guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

from plume.config import SamplingConfig, UserError
from plume.generate import sampling
from plume.generate.engine import Engine
from plume.generate.runner import Runner

LONGEST_NGRAM = 4


def look_up(tokens: Sequence[int], most: int) -> list[int]:
    """What followed when the last few tokens were there before: the longest match, the latest of its places."""
    text = list(tokens)
    for n in range(min(LONGEST_NGRAM, len(text) - 1), 0, -1):
        tail = text[-n:]
        for start in range(len(text) - n - 1, -1, -1):
            if text[start] == tail[0] and text[start : start + n] == tail:
                return text[start + n : start + n + most]
    return []


class Draft:
    """A smaller model that writes ahead with the target's own noise, so that the two often draw the same token."""

    def __init__(self, runner: Runner, config: SamplingConfig, *, seed: int, sample: int, prompt_length: int) -> None:
        self.runner, self.config = runner, config
        self.seed, self.sample, self.prompt_length = seed, sample, prompt_length

    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        text = list(tokens)
        while len(text) - len(tokens) < most and len(text) < self.runner.engine.capacity:
            scores = sampling.penalised(self.runner.look(text)[-1], self.config, text, self.prompt_length, ())
            ids, logprobs = sampling.candidates(scores, self.config)
            position = len(text) - self.prompt_length
            text.append(sampling.draw(ids, logprobs, self.seed, self.sample, position))
        return text[len(tokens) :]


def check_draft(target: Engine, draft: Engine) -> None:
    if target.config.vocab_size != draft.config.vocab_size:
        raise UserError(
            f"the draft model has a vocabulary of {draft.config.vocab_size}, the model one of "
            f"{target.config.vocab_size}; both need the same tokenizer"
        )
