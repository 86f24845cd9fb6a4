"""The CPU engine: compiled kernels, a few threads that wait for work, and memory laid out for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from plume.config import CachePrecision, UserError
from plume.inference.cpu import forward, pack
from plume.inference.cpu.forward import MANY
from plume.inference.cpu.lanes import announced_compilation, link
from plume.inference.cpu.pack import Packed, Shape, aligned, reserved
from plume.inference.cpu.panels import CACHE_BYTES, HEADER, KINDS, LANES, PANEL, Array, padded
from plume.inference.cpu.sampling import Request, Workspace
from plume.inference.engine import Feed, Logits
from plume.util.console import plural
from plume.util.devices import default_threads

PATIENCE = 200_000  # rounds that a helper waits for the next step before it sleeps: a few milliseconds
TURN, SOON = 0.03, 0.001  # seconds that an engine keeps its turn while another waits; and without a step in between
ODD = 16 * 4  # bytes by which rows are longer, so that they do not fall on the same cache lines


class Turns:
    """One engine computes at a time in a process, and only its threads are awake: models never compete for cores.

    To wake threads takes a part of a step's time, so an engine whose next step comes soon keeps its turn for a while.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue = deque[object]()  # those that wait, in the order in which they asked
        self._last: CpuEngine | None = None
        self._computes = False
        self._began = self._left = 0.0  # of the turn and of its latest step's end

    @contextmanager
    def of(self, engine: CpuEngine) -> Iterator[None]:
        asked = object()
        with self._changed:
            self._queue.append(asked)
            try:
                while not self._may(engine, asked):
                    self._changed.wait(SOON)
            finally:
                self._queue.remove(asked)
            if self._last is not engine:
                if self._last is not None:
                    self._last.rest()
                self._last, self._began = engine, time.monotonic()
            self._computes = True
        try:
            yield
        finally:
            with self._changed:
                self._computes, self._left = False, time.monotonic()
                if self._queue and self._left - self._began > TURN:  # others look by themselves before
                    self._changed.notify_all()

    def _may(self, engine: CpuEngine, asked: object) -> bool:
        now = time.monotonic()
        if self._computes:
            return False
        if now - self._began > TURN or self._last is None:
            return self._queue[0] is asked
        return self._last is engine or (now - self._left > SOON and self._queue[0] is asked)

    def leave(self, engine: CpuEngine) -> None:
        with self._changed:
            self._last = None if self._last is engine else self._last


TURNS = Turns()


class CpuEngine:
    """See engine.Engine, and engine.EncoderEngine for a model that does not continue text.

    Weights are in one of the forms of panels.py; keys and values that outlast a step in one of CACHE_BYTES. In bytes,
    those of one position and head share a scale.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        slots: int = 1,
        capacity: int | None = None,
        threads: int | None = None,
        rows: int = 512,
        cache: CachePrecision = "float32",
    ) -> None:
        config = packed.config
        if threads is not None and threads < 1:
            raise UserError(f"threads={threads} must be at least 1; unset it is {default_threads()} here")
        self.capacity = config.context if capacity is None else min(capacity, config.context)
        rows = rows if packed.generates else max(rows, self.capacity)  # an encoder reads a sequence in one step
        self.config, self.packed, self.slots, self.rows = config, packed, slots, rows
        self.threads = default_threads() if threads is None else threads
        self.lengths = np.zeros(slots, np.int64)
        self._allocate(CACHE_BYTES[cache if packed.generates else "float32"])
        size = f", {cache} cache of {self.slot_bytes / 1e6:.1f} MB per slot" if packed.generates else ""
        self.name = f"CPU engine, {packed.precision} weights, {plural(self.threads, 'thread')}{size}"
        self._table = np.where(packed.offsets < 0, 0, packed.offsets + packed.block.ctypes.data)
        self._job = aligned(pack.JOB_SIZE, np.int64)
        self._tokens, self._slots, self._positions, self._wanted = (np.zeros(rows, np.int64) for _ in range(4))
        self._requests = np.zeros(rows, Request)
        self._workspace = Workspace(config.vocab_size if packed.generates else 1, self.threads)
        self._jobs, self._encoding = 0, threading.Lock()
        self._wake, self._sleeping, self._closed = threading.Condition(), 0, False
        self._helpers = [
            threading.Thread(target=self._help, args=(i,), daemon=True, name=f"plume-cpu-{i}")
            for i in range(1, self.threads)
        ]
        self._start()

    def _start(self) -> None:
        """Compile what is not compiled yet, wake the helpers and take a first step."""
        with announced_compilation("decoder" if self.packed.generates else "encoder"):
            link()
            self._work(1 % self.threads, 0, 0, 0, patience=0)
            for helper in self._helpers:
                helper.start()
            if self.packed.generates:
                self.step([Feed(0, [0])])
                self.rewind(0, 0)
            else:
                self.encode([[0]])

    def _allocate(self, item: int) -> None:
        """All working memory, and the shape that tells the kernels where it is."""
        c, rows, capacity = self.config, self.rows, -(-self.capacity // LANES) * LANES
        head_blocks, strides = -(-c.head_width // LANES), self._strides(capacity, item)
        private = 2 * (strides["width_stride"] + strides["codes_stride"])
        private += MANY * (strides["scores_stride"] + (head_blocks * LANES + 1) * 4)
        private_bytes = -(-private // 4096) * 4096 + 192
        panel_bytes = HEADER + max(c.width, c.ffn_width) * PANEL * 4
        owners = self.slots * c.layers * c.heads if self.packed.generates else self.threads
        sizes = {
            **dict.fromkeys(("x", "act", "mixed"), rows * strides["width_stride"]),
            **{name: rows * strides[f"{name}_stride"] for name in ("codes", "qkv", "middle", "middle_codes", "logits")},
            "private": self.threads * private_bytes,
            "panels": self.threads * panel_bytes,
        }
        self._memory = {name: aligned(size) for name, size in sizes.items()}
        self._memory["keys"] = reserved(owners * strides["key_bytes"])
        self._memory["values"] = reserved(owners * strides["value_bytes"])
        self.shape = Shape(
            layers=c.layers,
            width=c.width,
            heads=c.heads,
            head_width=c.head_width,
            hidden=c.ffn_width,
            vocab=c.vocab_size,
            band=c.band if c.causal else 0,
            causal=int(c.causal),
            cached=int(self.packed.generates),
            post_norm=int(c.norm == "post"),
            activation={"gelu_tanh": pack.GELU_TANH, "gelu": pack.GELU, "relu": pack.RELU}[c.activation],
            kind=KINDS[self.packed.precision],
            table_kind=KINDS[pack.table_precision(c, self.packed.precision, self.packed.generates)],
            int8=int(self.packed.precision in ("int8", "int4")),
            capacity=capacity,
            threads=self.threads,
            private_bytes=private_bytes,
            panel_bytes=panel_bytes,
            **strides,
            **{name: block.ctypes.data for name, block in self._memory.items()},
        )

    @property
    def slot_bytes(self) -> int:
        """What the keys and values of a slot take when it is full; memory is taken as tokens come, page by page."""
        return (self._memory["keys"].nbytes + self._memory["values"].nbytes) // self.slots

    def _strides(self, capacity: int, item: int) -> dict[str, int]:
        """Bytes from one row of the working memory to the next, and those of the cache, by their names in the shape."""
        c, each = self.config, 4 if item == 1 else 0
        return {
            "cache_item": item,
            "key_bytes": capacity * (c.head_width * item + each),
            "value_bytes": capacity * (-(-c.head_width // LANES) * LANES * item + each),
            "width_stride": padded(c.width) * 4 + ODD,
            "qkv_stride": padded(3 * c.width) * 4 + ODD,
            "middle_stride": padded(c.ffn_width) * 4 + ODD,
            "codes_stride": padded(c.width) * 5 // 4 + 64,
            "middle_codes_stride": padded(c.ffn_width) * 5 // 4 + 64,
            "logits_stride": padded(c.vocab_size) * 4 if self.packed.generates else padded(c.width) * 4 + ODD,
            "scores_stride": (capacity + 4 * LANES) * 4,
        }

    def _help(self, thread: int) -> None:
        """A helper's life: share in the steps while they come quickly, sleep when they do not."""
        done, meetings = 0, 0
        while True:
            done, meetings = self._work(thread, 0, done, meetings, PATIENCE)
            with self._wake:
                self._sleeping += 1
                self._wake.wait_for(lambda done=done: self._closed or self._jobs != done)  # type: ignore[misc]
                self._sleeping -= 1
            if self._closed:
                return

    def _work(self, thread: int, number: int, done: int, meetings: int, patience: int) -> tuple[int, int]:
        return forward.work_on(
            self.shape, self._table, self._job, self._job.ctypes.data, thread, number, done, self._tokens, self._slots,
            self._positions, self._wanted, self._requests, self._workspace.works[thread], meetings, patience,
        )  # fmt: skip

    def _run(self, kind: int, rows: int, wanted: int) -> None:
        with TURNS.of(self):
            self._job[[pack.JOB_KIND, pack.JOB_ROWS, pack.JOB_WANTED, pack.JOB_TAKEN]] = kind, rows, wanted, 0
            with self._wake:
                self._jobs += 1
                if self._sleeping:
                    self._wake.notify_all()
            self._work(0, self._jobs, self._jobs - 1, 0, patience=1)

    def rest(self) -> None:
        """Let the helpers sleep at once, until this engine's next step."""
        self._job[pack.JOB_NUMBER] = -1

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
        self._run(pack.FORWARD, row, wanted)
        stride = self.shape.logits_stride
        flat = self._memory["logits"][: wanted * stride].view(np.float32)
        logits = flat.reshape(wanted, stride // 4)[:, : self.config.vocab_size]
        return logits.copy() if row == self.rows else logits  # a full part may be followed by another

    def sample(self, requests: Array) -> None:
        """Answer requests for tokens (see sampling.py), all threads together."""
        for start in range(0, len(requests), self.rows):
            part = requests[start : start + self.rows]
            self._requests[: len(part)] = part
            self._run(pack.SAMPLING, len(part), 0)
            part[:] = self._requests[: len(part)]

    def encode(
        self,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None = None,
        *,
        between: Callable[[], None] = lambda: None,
    ) -> list[Logits]:
        found = list[Logits]()
        while len(found) < len(sequences):
            begin, end, rows = len(found), len(found), 0
            while end < len(sequences) and rows + len(sequences[end]) <= self.rows:
                rows, end = rows + len(sequences[end]), end + 1
            assert end > begin, f"{len(sequences[begin])} tokens do not fit into a context of {self.capacity}"
            between()
            found += self._encode_part(sequences[begin:end], None if segments is None else segments[begin:end])
        return found

    def _encode_part(
        self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None
    ) -> list[Logits]:
        """Whole sequences that fit into the working memory together."""
        c, stride = self.config, self.shape.logits_stride // 4
        lengths = [len(tokens) for tokens in sequences]
        assert min(lengths) > 0 and max(lengths) <= self.capacity, "sequences fit into the context"
        rows = sum(lengths)
        with self._encoding:
            self._tokens[:rows] = np.concatenate(sequences)
            tokens = self._tokens[:rows]
            assert tokens.min() >= 0 and tokens.max() < c.vocab_size, "a token is in the vocabulary"
            self._slots[:rows] = np.repeat(np.arange(len(lengths)), lengths)
            self._positions[:rows] = np.concatenate([np.arange(n) for n in lengths])
            if segments is not None:
                numbers = np.concatenate(segments)
                assert numbers.min() >= 0 and numbers.max() < max(1, c.segments), "a segment is in the table"
                self._positions[:rows] += c.context * numbers  # a segment has position rows of its own
            self._wanted[:rows] = np.arange(rows)
            self._run(pack.FORWARD, rows, rows)
            hidden = self._memory["logits"].view(np.float32)[: rows * stride].reshape(rows, stride)[:, : c.width].copy()
        return np.split(hidden, np.cumsum(lengths)[:-1])

    def rewind(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.lengths[slot]
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= self.lengths[source]
        c, shape, lane = self.config, self.shape, LANES * self.shape.cache_item
        keys, values = (self._memory[name].reshape(self.slots, c.layers, c.heads, -1) for name in ("keys", "values"))
        parts = [(keys, 0, -(-length // LANES) * c.head_width * lane)]
        parts += [(values, n * shape.capacity * lane, length * lane) for n in range(-(-c.head_width // LANES))]
        if shape.cache_item == 1:
            parts += [(array, array.shape[3] - 4 * shape.capacity, 4 * length) for array in (keys, values)]
        for array, start, size in parts:
            array[target, ..., start : start + size] = array[source, ..., start : start + size]
        self.lengths[target] = length

    def close(self) -> None:
        if self._closed:
            return
        TURNS.leave(self)
        with self._wake:
            self._closed = True
            self._job[pack.JOB_NUMBER] = -1
            self._wake.notify_all()
        for helper in self._helpers:
            helper.join()
