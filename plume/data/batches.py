"""Batches as pure functions of (seed, number): the shape they have, and windows of packed text for language models."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import UserError
from plume.data.shards import Shards, TokenStream
from plume.text import Tokenizer
from plume.util.hashing import mixed

Numbers = npt.NDArray[np.int64]
ROUNDS = 6
SLOTS = 4096  # length of a mixture's cycle: shares are kept to one part in this


def generator(seed: int, purpose: str, *index: int) -> np.random.Generator:
    """A stream of random numbers of its own for every seed, purpose and (up to three) numbers."""
    key = np.array([seed % (1 << 64), zlib.crc32(purpose.encode())], np.uint64)
    counter = np.array([0, *index, *[0] * (3 - len(index))], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Permutation:
    """A random order of range(size) that is computed one place at a time: a Feistel network, walked until it fits."""

    def __init__(self, size: int, seed: int, purpose: str, *index: int) -> None:
        self.size = size
        self.half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))  # bits of each half of a number
        self.mask = np.uint64((1 << int(self.half)) - 1)
        self.keys = generator(seed, purpose, *index).integers(0, 1 << 64, ROUNDS, dtype=np.uint64)

    def __call__(self, places: Numbers) -> Numbers:
        values = self._shuffle(places.astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._shuffle(values[outside])
        return values.astype(np.int64)

    def _shuffle(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self.half, values & self.mask
        for key in self.keys:
            left, right = right, left ^ (mixed(right + key) & self.mask)
        return (left << self.half) | right


class Order:
    """Where sample number n comes from: which source, which pass over it, which item.

    Sources take turns by weight in a fixed cycle; within a source each pass visits every item once.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        self.sizes = np.array(sizes, np.int64)
        self.seed, self.shuffle = seed, shuffle
        self.turns = turns(weights)  # samples of each source in one cycle
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in self.turns])  # spread evenly over the cycle
        cycle = np.argsort(places, kind="stable")
        self.source = np.repeat(np.arange(len(sizes)), self.turns)[cycle]
        self.rank = np.concatenate([np.arange(n) for n in self.turns])[cycle]
        self.permutation = lru_cache(maxsize=64)(self._permutation)

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """(source, pass, item) of each sample number."""
        cycle, slot = np.divmod(samples, len(self.source))
        source = self.source[slot]
        passes, place = np.divmod(cycle * self.turns[source] + self.rank[slot], self.sizes[source])
        if not self.shuffle:
            return source, passes, place
        item = np.empty_like(place)
        for s, p in {*zip(source.tolist(), passes.tolist(), strict=True)}:
            here = (source == s) & (passes == p)
            item[here] = self.permutation(s, p)(place[here])
        return source, passes, item

    def _permutation(self, source: int, passes: int) -> Permutation:
        return Permutation(int(self.sizes[source]), self.seed, "order", source, passes)

    def epochs(self, samples: int) -> list[float]:
        """How often each source has been passed over after so many samples."""
        return [float(samples * t / len(self.source) / n) for t, n in zip(self.turns, self.sizes, strict=True)]


def turns(weights: Sequence[float]) -> Numbers:
    """Whole turns per cycle in proportion to the weights, at least one each, by largest remainder."""
    if len(weights) == 1:
        return np.ones(1, np.int64)
    exact = np.array(weights) / sum(weights) * SLOTS
    whole = np.maximum(1, np.floor(exact)).astype(np.int64)
    for source in np.argsort(whole - exact, kind="stable")[: max(0, SLOTS - int(whole.sum()))]:
        whole[source] += 1
    return whole


# B rows, T tokens of a row, S tokens of a source, N positions to predict


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
        edges = np.cumsum([0, *self.sizes])
        for first in range(size * rank, len(self), size * world):
            samples = np.arange(first, min(first + size, len(self)))
            source = np.searchsorted(edges, samples, side="right") - 1
            yield self.read(source, np.zeros_like(samples), samples - edges[source])

    def epochs(self, samples: int) -> dict[str, float]:
        """Passes over each source after so many samples."""
        return dict(zip([s.name for s in self.streams], self.order.epochs(samples), strict=True))

    def numbers(self, samples: Numbers) -> Numbers:
        """Which sample has each position in the order; a subclass may group samples of like length."""
        return samples

    @abstractmethod
    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        """The rows at these places."""


class PackedWindows(Dataset):
    """Windows of the running text, separators included, each predicting the token after: GPT's way.

    With `document_mask`, documents in a window do not see each other, and nothing is predicted over their border.
    """

    def __init__(
        self, shards: Shards, length: int, *, seed: int = 0, shuffle: bool = True, document_mask: bool = False
    ) -> None:
        self.length, self.document_mask = length, document_mask
        for stream in shards.streams:
            check_size(stream, length + 1, shards)
        super().__init__(shards, [self.windows(s, shuffle) for s in shards.streams], seed=seed, shuffle=shuffle)

    def windows(self, stream: TokenStream, shuffle: bool) -> int:
        whole = (len(stream) - 1) // self.length
        return max(1, whole - 1) if shuffle else whole  # one fewer leaves slack to shift them

    def shift(self, source: int, passes: int) -> int:
        """Every pass begins elsewhere, so that the same tokens fall into other windows."""
        if not self.shuffle:
            return 0
        slack = len(self.streams[source]) - 1 - self.sizes[source] * self.length
        return int(generator(self.seed, "shift", source, passes).integers(0, min(slack + 1, self.length)))

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        text = np.empty((len(item), self.length + 1), np.int64)  # (B, T + 1)
        documents = np.empty_like(text) if self.document_mask else None
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
        """(number of samples, dataset) in order; the last has no end."""
        self.parts = list(parts)

    def over(self, samples: int) -> list[int]:
        """The numbers of samples of the phases that end within the first so many."""
        ends = accumulate(count for count, _ in self.parts[:-1])
        return [count for (count, _), end in zip(self.parts, ends, strict=False) if end <= samples]

    def keep(self, over: Sequence[int]) -> None:
        """Let the first phases have as many samples as they had: what was read later is not read again."""
        self.parts[: len(over)] = [(count, part) for count, (_, part) in zip(over, self.parts, strict=False)]

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


# B rows, T tokens of a target, S tokens of a source


POOL = 64  # groups that are sorted by length together


def decoder_start(tokenizer: Tokenizer) -> int:
    """The token that a decoder reads first."""
    for token in (tokenizer.start, tokenizer.classify, tokenizer.end, tokenizer.separator):
        if token is not None:
            return token
    raise UserError(f"{tokenizer!r} has no special token to begin and end a target with; a byte-bpe tokenizer has")


class SequencePairs(Dataset):
    """Pairs from two aligned files or two fields. Both sides close with the separator; longer ones are cut."""

    def __init__(
        self, shards: Shards, tokenizer: Tokenizer, length: int, *, seed: int = 0, shuffle: bool = True, group: int = 64
    ) -> None:
        if not shards.manifest.pairs:
            raise UserError(f"{shards.folder} holds no pairs; prepare it with targets, or with target_field")
        self.length, self.group = length, group  # pairs of like length are grouped
        self.start = decoder_start(tokenizer)
        self.padding = tokenizer.pad if tokenizer.pad is not None else 0
        self.pool = lru_cache(maxsize=4)(self._pool)
        super().__init__(shards, [s.documents // 2 for s in shards.streams], seed=seed, shuffle=shuffle)

    def numbers(self, samples: Numbers) -> Numbers:
        if not self.shuffle:
            return samples
        pools, places = np.divmod(samples, self.group * POOL)
        return np.array([self.pool(p)[i] for p, i in zip(pools.tolist(), places.tolist(), strict=True)], np.int64)

    def _pool(self, pool: int) -> Numbers:
        """The samples of a pool sorted by length, then its groups in random order."""
        size = self.group * POOL
        samples = np.arange(pool * size, (pool + 1) * size)
        source, _, item = self.order.locate(samples)
        lengths = [self.size_of(s, i) for s, i in zip(source.tolist(), item.tolist(), strict=True)]
        groups = samples[np.argsort(lengths, kind="stable")].reshape(POOL, self.group)
        return groups[generator(self.seed, "groups", pool).permutation(POOL)].reshape(-1)

    def size_of(self, source: int, item: int) -> int:
        stream = self.streams[source]
        return stream.start_of(2 * item + 2) - stream.start_of(2 * item)

    def side(self, source: int, document: int) -> Array:
        """One side of a pair; a long one is cut but keeps its close."""
        tokens = self.streams[source].document(document)
        return tokens if len(tokens) <= self.length else np.append(tokens[: self.length - 1], tokens[-1])

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        places = list(zip(source.tolist(), item.tolist(), strict=True))
        sources = [self.side(s, 2 * i) for s, i in places]
        targets = [self.side(s, 2 * i + 1) for s, i in places]
        lengths, source_lengths = (np.array([len(row) for row in side]) for side in (targets, sources))
        width = int(lengths.max())
        return Batch(
            tokens=padded([[self.start, *target[:-1]] for target in targets], width, self.padding),
            targets=padded(targets, width, IGNORE),
            lengths=lengths,
            source=padded(sources, int(source_lengths.max()), self.padding),
            source_lengths=source_lengths,
        )


class JoinedPairs(SequencePairs):
    """Pairs for a decoder alone: source, separator and target as one sequence, with the loss on the target.

    Where both do not fit, the source loses its beginning; a target longer than a sequence is cut.
    """

    def __init__(
        self, shards: Shards, tokenizer: Tokenizer, length: int, *, seed: int = 0, shuffle: bool = True, group: int = 64
    ) -> None:
        if shards.manifest.separator is None:
            raise UserError(f"{tokenizer!r} has no special token between source and target; a byte-bpe tokenizer has")
        super().__init__(shards, tokenizer, length, seed=seed, shuffle=shuffle, group=group)

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        rows, targets = list[Array](), list[Array]()
        for stream, pair in zip(source.tolist(), item.tolist(), strict=True):
            target = self.side(stream, 2 * pair + 1)
            prompt = self.streams[stream].document(2 * pair)
            prompt = prompt[max(0, len(prompt) - max(1, self.length + 1 - len(target))) :]
            row = np.concatenate([prompt, target])[: self.length + 1]
            rows.append(row[:-1])
            targets.append(np.where(np.arange(1, len(row)) < len(prompt), IGNORE, row[1:]))
        lengths = np.array([len(row) for row in rows])
        width = int(lengths.max())
        return Batch(tokens=padded(rows, width, self.padding), targets=padded(targets, width, IGNORE), lengths=lengths)
