"""Batches as pure functions of (seed, number): the shape they have, and windows of packed text for language models."""

# B rows, T tokens of a row, S tokens of a source, N positions to predict

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import UserError
from plume.data.sampling import Numbers, Order, generator
from plume.data.shards import Shards, TokenStream

IGNORE = -100  # the target of a place that is not predicted
Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one training step reads; int64 throughout, and None where a kind of batch has no such thing."""

    tokens: Array  # (B, T) what the model reads; a decoder's input when there is a source
    targets: Array  # (B, T) what it should say, IGNORE where nothing; (N,) when there are positions
    positions: Array | None = None  # (N,) places in the flattened (B * T) tokens that are predicted
    lengths: Array | None = None  # (B,) real tokens of each row; the rest is padding
    segments: Array | None = None  # (B, T) 0 for the first text, 1 for the second
    documents: Array | None = None  # (B, T) number of the packed document; attention and positions stay inside it
    next_sentence: Array | None = None  # (B,) 0 when the second text follows the first, 1 when it is a random one
    source: Array | None = None  # (B, S) what an encoder reads
    source_lengths: Array | None = None  # (B,)

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, start: int, stop: int) -> Batch:
        """Some of the rows, as a micro-batch."""
        values: dict[str, Array] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and not (self.positions is not None and f.name in ("targets", "positions")):
                values[f.name] = value[start:stop]
        if self.positions is not None:
            width = self.tokens.shape[1]
            inside = (self.positions >= start * width) & (self.positions < stop * width)
            values["positions"] = self.positions[inside] - start * width
            values["targets"] = self.targets[inside]
        return Batch(**values)


class Dataset(ABC):
    """Samples in a random order that is fixed by the seed. Sample number n is the same on any rank at any time."""

    def __init__(self, shards: Shards, sizes: Sequence[int], *, seed: int, shuffle: bool) -> None:
        self.shards, self.streams = shards, shards.streams
        self.sizes = list(sizes)  # samples in one pass over each source
        self.seed, self.shuffle = seed, shuffle
        self.order = Order(sizes, [s.weight for s in self.streams], seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Samples in one pass over everything."""
        return sum(self.sizes)

    def batch(self, step: int, size: int, *, rank: int = 0, world: int = 1) -> Batch:
        """Batch number `step` when all batches have the same size; a rank gets its share of the rows."""
        return self.take(step * size, size, rank=rank, world=world)

    def take(self, first: int, count: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rank's share of samples first, first + 1, ...; shares in order make the whole."""
        start, stop = count * rank // world, count * (rank + 1) // world
        return self.read(*self.order.locate(self.numbers(np.arange(first + start, first + stop))))

    def sweep(self, size: int, *, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every sample once, in the order of the text, for measuring; the last batch may be smaller."""
        source = np.repeat(np.arange(len(self.sizes)), self.sizes)
        item = np.concatenate([np.arange(n) for n in self.sizes])
        for first in range(size * rank, len(item), size * world):
            rows = slice(first, first + size)
            yield self.read(source[rows], np.zeros_like(item[rows]), item[rows])

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over each source after so many samples."""
        return dict(zip([s.name for s in self.streams], self.order.epochs(samples), strict=True))

    def numbers(self, samples: Numbers) -> Numbers:
        """Which sample stands at each place of the order; a kind may group like with like."""
        return samples

    @abstractmethod
    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        """The rows at these places."""


class PackedWindows(Dataset):
    """Windows of the running text, separators included, each predicting the token after: GPT's way.

    With `isolate`, documents in a window do not see each other, and nothing is predicted over their border.
    """

    def __init__(
        self, shards: Shards, length: int, *, seed: int = 0, shuffle: bool = True, isolate: bool = False
    ) -> None:
        self.length, self.isolate = length, isolate
        for stream in shards.streams:
            check_size(stream, length + 1, shards)
        super().__init__(shards, [self.windows(s, shuffle) for s in shards.streams], seed=seed, shuffle=shuffle)

    def windows(self, stream: TokenStream, shuffle: bool) -> int:
        whole = (len(stream) - 1) // self.length
        return max(1, whole - 1) if shuffle else whole  # one fewer leaves room to shift them

    def shift(self, source: int, passes: int) -> int:
        """Every pass begins elsewhere, so that the same tokens fall into other windows."""
        if not self.shuffle:
            return 0
        room = len(self.streams[source]) - 1 - self.sizes[source] * self.length
        return int(generator(self.seed, "shift", source, passes).integers(0, min(room + 1, self.length)))

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        text = np.empty((len(item), self.length + 1), np.int64)  # (B, T + 1)
        documents = np.empty_like(text) if self.isolate else None
        shifts: dict[tuple[int, int], int] = {}
        for row, (s, p, i) in enumerate(zip(source.tolist(), passes.tolist(), item.tolist(), strict=True)):
            if (s, p) not in shifts:
                shifts[s, p] = self.shift(s, p)
            start = shifts[s, p] + i * self.length
            text[row] = self.streams[s].read(start, start + self.length + 1)
            if documents is not None:
                documents[row] = self.streams[s].documents_between(start, start + self.length + 1)
        tokens, targets = text[:, :-1].copy(), text[:, 1:].copy()
        if documents is None:
            return Batch(tokens=tokens, targets=targets)
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
        return Batch(tokens=tokens, targets=targets, documents=documents[:, :-1] - documents[:, :1])


class Phases:
    """One dataset after the other: BERT's short sequences first, then the long ones."""

    def __init__(self, parts: Sequence[tuple[int, Dataset]]) -> None:
        """(number of samples, dataset) in order; the last goes on for ever."""
        self.parts = list(parts)

    def batch(self, step: int, size: int, *, rank: int = 0, world: int = 1) -> Batch:
        return self.take(step * size, size, rank=rank, world=world)

    def take(self, first: int, count: int, *, rank: int = 0, world: int = 1) -> Batch:
        """Samples of the phase that `first` falls into; a batch is never mixed from two."""
        for samples, dataset in self.parts[:-1]:
            if first < samples:
                return dataset.take(first, count, rank=rank, world=world)
            first -= samples
        return self.parts[-1][1].take(first, count, rank=rank, world=world)


def check_size(stream: TokenStream, needed: int, shards: Shards) -> None:
    if len(stream) < needed:
        name = "" if stream.name == "all" else f" of {stream.name}"
        more = "more text" if shards.split == "train" else "a larger validation share"
        raise UserError(
            f"the {shards.split} text{name} in {shards.folder} has {len(stream)} tokens, and one window "
            f"needs {needed}; use a context below {len(stream)}, or {more}"
        )


def padded(rows: Sequence[npt.NDArray[Any] | Sequence[int]], width: int, value: int) -> Array:
    """Rows of any length as one array, filled up at the right."""
    table = np.full((len(rows), width), value, np.int64)
    for row, values in enumerate(rows):
        table[row, : len(values)] = values
    return table
