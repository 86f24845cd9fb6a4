"""Log-probabilities, ranks and entropies of tokens under rows of logits, in numpy alone."""

# A scored positions, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Score:
    """For every scored token: its log-probability, that of the likeliest token, and whether it was that one."""

    logprobs: Floats  # (A,)
    best: Floats  # (A,)
    hits: Bools  # (A,)
    ranks: Ints | None = None  # (A,) tokens that were likelier
    entropies: Floats | None = None  # (A,) of the whole distribution, in nats

    @property
    def columns(self) -> tuple[Any, ...]:
        return self.logprobs, self.best, self.hits, self.ranks, self.entropies

    @property
    def total(self) -> float:
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def greedy(self) -> bool:
        return bool(self.hits.all())

    def cut(self, lengths: Iterable[int]) -> Iterator[Score]:
        """One request's part after the other."""
        at = 0
        for n in lengths:
            part: tuple[Any, ...] = tuple(None if c is None else c[at : at + n] for c in self.columns)
            yield Score(*part)
            at += n


def joined(parts: Sequence[Score]) -> Score:
    """Scores one after another as one."""
    columns: Iterator[tuple[Any, ...]] = zip(*(part.columns for part in parts), strict=True)
    whole: tuple[Any, ...] = tuple(None if column[0] is None else np.concatenate(column) for column in columns)
    return Score(*whole)


def log_softmax(scores: Floats) -> Floats:
    """Of one row, summed in double precision."""
    shifted: Floats = scores - scores.max()
    shifted -= np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    return shifted


def score_rows(logits: Floats, targets: Sequence[int]) -> Score:
    """Rows of logits (A, V) against one token each."""
    found: list[tuple[float, float, bool, int, float]] = []
    for row, target in zip(logits, targets, strict=True):
        logprobs = log_softmax(row)
        entropy = -float(np.sum(np.exp(logprobs) * np.maximum(logprobs, -1e30)))
        best, own = int(np.argmax(logprobs)), logprobs[target]
        found.append((own, logprobs[best], best == target, int(np.sum(logprobs > own)), entropy))
    columns = list(zip(*found, strict=True)) if found else [()] * 5
    kinds = (np.float32, np.float32, np.bool_, np.int64, np.float32)
    return Score(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))
