"""The CPU engine: compiled kernels, a few threads that wait for work, and memory laid out for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from plume.config import UserError
from plume.generate.cpu import forward
from plume.generate.cpu.attention import MANY
from plume.generate.cpu.compiling import announced_compilation
from plume.generate.cpu.layout import (
    GELU,
    GELU_TANH,
    HEADER,
    JOB_NUMBER,
    JOB_SIZE,
    LANES,
    PANEL,
    RELU,
    Shape,
    padded,
)
from plume.generate.cpu.pack import Packed, aligned
from plume.generate.engine import Feed, Logits

PATIENCE = 200_000  # rounds that a helper waits for the next step before it sleeps: a few milliseconds
ODD = 16 * 4  # bytes by which rows are longer, so that they do not fall on the same cache lines


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CpuEngine:
    """See engine.Engine. Weights are float32 or int8; keys and values are float32."""

    def __init__(
        self,
        packed: Packed,
        *,
        slots: int = 1,
        capacity: int | None = None,
        threads: int | None = None,
        rows: int = 512,
    ) -> None:
        config = packed.config
        if threads is not None and threads < 1:
            raise UserError(f"threads={threads} must be at least 1; this machine would use {cores()}")
        self.config, self.packed, self.slots, self.rows = config, packed, slots, rows
        self.capacity = config.context if capacity is None else min(capacity, config.context)
        self.threads = cores() if threads is None else threads
        self.name = f"CPU engine, {packed.precision} weights, {self.threads} threads"
        self.lengths = np.zeros(slots, np.int64)
        self._allocate()
        self._table = np.where(packed.offsets < 0, 0, packed.offsets + packed.block.ctypes.data)
        self._job = aligned(JOB_SIZE, np.int64)
        self._tokens, self._slots, self._positions, self._wanted = (np.zeros(rows, np.int64) for _ in range(4))
        self._jobs = 0
        self._wake, self._sleeping, self._closed = threading.Condition(), 0, False
        self._helpers = [
            threading.Thread(target=self._help, args=(i,), daemon=True, name=f"plume-cpu-{i}")
            for i in range(1, self.threads)
        ]
        with announced_compilation():
            self._follow(1, 0, 0, patience=0)
            for helper in self._helpers:
                helper.start()
            self.step([Feed(0, [0])])
        self.rewind(0, 0)

    def _allocate(self) -> None:
        """All working memory, and the shape that tells the kernels where it is."""
        c, rows = self.config, self.rows
        capacity = -(-self.capacity // LANES) * LANES
        head_blocks = -(-c.head_width // LANES)
        strides = self._strides(capacity)
        private = 2 * (strides["width_stride"] + strides["codes_stride"])
        private += MANY * (strides["scores_stride"] + (head_blocks * LANES + 1) * 4)
        private_bytes = -(-private // 4096) * 4096 + 192
        panel_bytes = HEADER + max(c.width, c.mlp_width) * PANEL * 4
        owners = self.slots * c.layers * c.heads
        sizes = {
            **dict.fromkeys(("x", "act", "mixed"), rows * strides["width_stride"]),
            **{name: rows * strides[f"{name}_stride"] for name in ("codes", "qkv", "middle", "middle_codes", "logits")},
            "private": self.threads * private_bytes,
            "panels": self.threads * panel_bytes,
            "keys": owners * capacity * c.head_width * 4,
            "values": owners * capacity * head_blocks * LANES * 4,
        }
        self._memory = {name: aligned(size) for name, size in sizes.items()}
        self.shape = Shape(
            layers=c.layers,
            width=c.width,
            heads=c.heads,
            head_width=c.head_width,
            hidden=c.mlp_width,
            vocab=c.vocab_size,
            band=c.band,
            post_norm=int(c.norm == "post"),
            activation={"gelu_tanh": GELU_TANH, "gelu": GELU, "relu": RELU}[c.activation],
            int8=int(self.packed.precision == "int8"),
            capacity=capacity,
            threads=self.threads,
            private_bytes=private_bytes,
            panel_bytes=panel_bytes,
            **strides,
            **{name: block.ctypes.data for name, block in self._memory.items()},
        )

    def _strides(self, capacity: int) -> dict[str, int]:
        """Bytes from one row of the working memory to the next, by its name in the shape."""
        c = self.config
        return {
            "width_stride": padded(c.width) * 4 + ODD,
            "qkv_stride": padded(3 * c.width) * 4 + ODD,
            "middle_stride": padded(c.mlp_width) * 4 + ODD,
            "codes_stride": padded(c.width) * 9 // 8 + 64,
            "middle_codes_stride": padded(c.mlp_width) * 9 // 8 + 64,
            "logits_stride": padded(c.vocab_size) * 4,
            "scores_stride": (capacity + 4 * LANES) * 4,
        }

    def _help(self, thread: int) -> None:
        """A helper's life: share in the steps while they come quickly, sleep when they do not."""
        done, meetings = 0, 0
        while True:
            done, meetings = self._follow(thread, done, meetings, PATIENCE)
            with self._wake:
                self._sleeping += 1
                self._wake.wait_for(lambda done=done: self._closed or self._jobs != done)  # type: ignore[misc]
                self._sleeping -= 1
            if self._closed:
                return

    def _follow(self, thread: int, done: int, meetings: int, patience: int) -> tuple[int, int]:
        return forward.follow(
            self.shape, self._table, self._job, self._job.ctypes.data, thread, done, self._tokens, self._slots,
            self._positions, self._wanted, meetings, patience,
        )  # fmt: skip

    def _run(self, rows: int, wanted: int) -> None:
        with self._wake:
            self._jobs += 1
            if self._sleeping:
                self._wake.notify_all()
        forward.lead(
            self.shape, self._table, self._job, self._job.ctypes.data, self._jobs, self._tokens, self._slots,
            self._positions, self._wanted, rows, wanted,
        )  # fmt: skip

    def length(self, slot: int) -> int:
        return int(self.lengths[slot])

    def step(self, feeds: Sequence[Feed]) -> Logits:
        total = sum(len(feed.tokens) for feed in feeds)
        parts = [self._part(part) for part in self._parts(feeds, total)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(self, feeds: Sequence[Feed], total: int) -> list[list[Feed]]:
        """The feeds cut so that each part fits into the working memory."""
        if total <= self.rows:
            return [list(feeds)]
        parts, room = [list[Feed]()], self.rows
        for feed in feeds:
            start = 0
            while start < len(feed.tokens):
                taken = min(room, len(feed.tokens) - start)
                after = len(feed.tokens) - start - taken
                wanted = max(0, min(taken, feed.wanted - after))
                parts[-1].append(Feed(feed.slot, feed.tokens[start : start + taken], wanted))
                start, room = start + taken, room - taken
                if room == 0:
                    parts, room = [*parts, []], self.rows
        return [part for part in parts if part]

    def _part(self, feeds: Sequence[Feed]) -> Logits:
        row = wanted = 0
        for feed in feeds:
            new, length = len(feed.tokens), self.length(feed.slot)
            assert length + new <= self.capacity, f"{length + new} tokens do not fit into a slot of {self.capacity}"
            assert 0 <= feed.wanted <= new, "logits come from tokens of this step"
            assert min(feed.tokens) >= 0 and max(feed.tokens) < self.config.vocab_size, "a token is in the vocabulary"
            self._tokens[row : row + new] = feed.tokens
            self._slots[row : row + new] = feed.slot
            self._positions[row : row + new] = range(length, length + new)
            self._wanted[wanted : wanted + feed.wanted] = range(row + new - feed.wanted, row + new)
            self.lengths[feed.slot] += new
            row, wanted = row + new, wanted + feed.wanted
        self._run(row, wanted)
        stride = self.shape.logits_stride
        flat = self._memory["logits"][: wanted * stride].view(np.float32)
        logits = flat.reshape(wanted, stride // 4)[:, : self.config.vocab_size]
        return logits.copy() if row == self.rows else logits  # a full part may be followed by another

    def rewind(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.lengths[slot]
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= self.lengths[source]
        c, blocks = self.config, -(-length // LANES)
        keys = self._memory["keys"].view(np.float32).reshape(self.slots, c.layers, c.heads, -1, c.head_width * LANES)
        values = (
            self._memory["values"]
            .view(np.float32)
            .reshape(self.slots, c.layers, c.heads, -1, self.shape.capacity, LANES)
        )
        keys[target, :, :, :blocks] = keys[source, :, :, :blocks]
        values[target, :, :, :, :length] = values[source, :, :, :, :length]
        self.lengths[target] = length

    def close(self) -> None:
        if self._closed:
            return
        with self._wake:
            self._closed = True
            self._job[JOB_NUMBER] = -1
            self._wake.notify_all()
        for helper in self._helpers:
            helper.join()
