"""Labelled token rows in flat arrays, and their batches: like lengths together, fixed by (seed, step)."""

# N items, B items of a batch, R rows of a batch (an item has one or more), T tokens

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plume.data.sampling import generator
from plume.data.transform import NO_LABEL, Row

Numbers = npt.NDArray[np.int64]
POOL = 64  # batches that are cut from one pool of rows sorted by length: more waste less padding, but mix less


@dataclass(frozen=True, kw_only=True)
class LabelledBatch:
    """Items of a task; rows are padded at the right, and `lengths` says how much of each is real."""

    tokens: Tensor  # (R, T)
    lengths: Tensor  # (R,)
    segments: Tensor  # (R, T)
    items: Tensor  # (R,) which item of the batch a row belongs to
    targets: Tensor  # (B,) labels, numbers or places of choices; (B, 2) spans; (R, T) tags
    numbers: Tensor  # (B,) which items of the whole set these are
    step: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def to(self, device: torch.device) -> LabelledBatch:
        if device.type == "cpu":
            return self
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {n: t.to(device, non_blocking=True) for n, t in given.items() if isinstance(t, Tensor)}
        return replace(self, **moved)


class Labelled:
    """Every item of a set, tokenised."""

    def __init__(
        self,
        items: Sequence[Sequence[Row]],
        targets: npt.NDArray[np.int64] | npt.NDArray[np.float32] | None = None,
        tags: Sequence[npt.NDArray[np.int64]] | None = None,
        about: Sequence[tuple[int, Any]] | None = None,
    ) -> None:
        """`tags` holds a label per token of each row; `about` the example that an item was cut from, and what else."""
        rows = [row for item in items for row in item]
        sizes = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        self.tokens = _joined([row.tokens for row in rows])
        self.segments = _joined([row.segments for row in rows])
        self.tags = None if tags is None else _joined(tags)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])  # (rows + 1,)
        self.firsts = np.concatenate([[0], np.cumsum([len(item) for item in items])]).astype(np.int64)  # (N + 1,)
        self.targets = np.zeros(len(items), dtype=np.int64) if targets is None else targets
        self.lengths = np.array([max(len(row.tokens) for row in item) for item in items], dtype=np.int64)  # (N,)
        self.real_tokens = int(sizes.sum())
        self.about = [] if about is None else list(about)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, numbers: Numbers, step: int = 0) -> LabelledBatch:
        counts = self.firsts[numbers + 1] - self.firsts[numbers]  # rows of each item
        items = np.repeat(np.arange(len(numbers)), counts)
        rows = np.concatenate([np.arange(self.firsts[n], self.firsts[n + 1]) for n in numbers])
        lengths = self.starts[rows + 1] - self.starts[rows]
        width = int(lengths.max())
        real = np.arange(width) < lengths[:, None]  # (R, T)
        places = (self.starts[rows][:, None] + np.arange(width))[real]

        def padded(flat: Numbers, value: int) -> Tensor:
            whole = np.full(real.shape, value, dtype=np.int64)
            whole[real] = flat[places]
            return torch.from_numpy(whole)

        targets = torch.from_numpy(self.targets[numbers]) if self.tags is None else padded(self.tags, NO_LABEL)
        return LabelledBatch(
            tokens=padded(self.tokens, 0),
            lengths=torch.from_numpy(lengths),
            segments=padded(self.segments, 0),
            items=torch.from_numpy(items),
            targets=targets,
            numbers=torch.from_numpy(numbers),
            step=step,
        )

    def sweep(self, size: int) -> Iterator[LabelledBatch]:
        """Every item once, shortest first, for measuring; a batch holds fewer items the longer they are."""
        order = np.argsort(self.lengths, kind="stable")
        first = 0
        while first < len(order):
            longest = self.lengths[order[min(first + size, len(order)) - 1]]
            count = max(1, min(size, 16384 // int(longest)))
            yield self.batch(order[first : first + count])
            first += count


def _joined(parts: Sequence[npt.NDArray[np.generic]]) -> Numbers:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)


class Rows(Protocol):
    """What batches are grouped from."""

    lengths: Numbers  # (N,)
    firsts: Numbers  # (N + 1,) first row of each item
    real_tokens: int

    def __len__(self) -> int: ...

    def batch(self, numbers: Numbers, step: int = 0) -> Any: ...


class Grouped:
    """Batches for training: each epoch visits every item once, in an order that only (seed, epoch) decide."""

    def __init__(self, data: Rows, size: int, *, seed: int) -> None:
        self.data, self.size, self.seed = data, min(size, len(data)), seed
        self.steps = -(-len(data) // self.size)  # in one epoch
        self.plan = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[Numbers]:
        """Items shuffled, then sorted by length within pools, then cut into batches, whose order is shuffled."""
        draw = generator(self.seed, "labelled order", epoch)
        order = draw.permutation(len(self.data))
        pool = self.size * POOL
        batches: list[Numbers] = []
        for first in range(0, len(order), pool):
            items = order[first : first + pool]
            items = items[np.argsort(-self.data.lengths[items], kind="stable")]
            batches += np.array_split(items, -(-len(items) // self.size))  # of like size: no row stands alone
        return [batches[i] for i in draw.permutation(len(batches))]

    def numbers(self, step: int) -> Numbers:
        epoch, place = divmod(step, self.steps)
        return self.plan(epoch)[place]

    def rows(self, step: int) -> int:
        return len(self.numbers(step))

    def part(self, step: int, first: int, rows: int) -> Any:
        return self.data.batch(self.numbers(step)[first : first + rows], step)

    def padding(self, epochs: int = 1) -> float:
        """Share of the computed tokens that are padding."""
        padded = 0
        rows = np.diff(self.data.firsts)
        for epoch in range(epochs):
            padded += sum(int(self.data.lengths[b].max() * rows[b].sum()) for b in self.plan(epoch))
        return 1 - epochs * self.data.real_tokens / padded
