"""What every engine can do: keep sequences in numbered slots, read tokens into any of them, and say what comes next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from plume.config import ModelConfig

Logits = np.ndarray[Any, np.dtype[np.float32]]  # (wanted, vocabulary)


@dataclass(frozen=True)
class Feed:
    """Tokens that one slot reads in a step; logits come for the last `wanted` of them."""

    slot: int
    tokens: Sequence[int]
    wanted: int = 1


class Engine(Protocol):
    """Slots are sequences of their own lengths. One step reads any number of tokens into any of them at once.

    What a slot computes never depends on what the other slots do in the same step.
    """

    name: str  # shown to the user
    config: ModelConfig
    slots: int
    capacity: int  # tokens that a slot can hold

    def length(self, slot: int) -> int:
        """Tokens that the slot has read."""

    def step(self, feeds: Sequence[Feed]) -> Logits:
        """Read; return the logits of all feeds' wanted tokens, feed after feed, valid until the next step."""

    def rewind(self, slot: int, length: int) -> None:
        """Forget what the slot read after its first `length` tokens; 0 frees it."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Let the target have read what the source's first `length` tokens were."""

    def close(self) -> None:
        """Give back threads and memory."""


@runtime_checkable
class SamplingEngine(Protocol):
    """An engine whose threads also draw tokens."""

    def sample(self, requests: np.ndarray[Any, Any]) -> None:
        """Answer requests (see cpu/sampling.py) in their place."""


class EncoderEngine(Protocol):
    """What gives the last hidden states of a model that does not continue text."""

    config: ModelConfig

    def encode(
        self,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None = None,
        *,
        between: Callable[[], None] = lambda: None,
    ) -> list[Logits]:
        """The hidden states (tokens, width) of each sequence, which depend on no other; `between` is called before
        each part of the work."""

    def close(self) -> None:
        """Give back threads and memory."""
