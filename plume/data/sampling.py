"""Random order and random draws as pure functions of (seed, number): seeking is free and nothing is remembered."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plume.data.words import mixed

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
