"""Continuous batching: sequences join and leave between steps, and reuse prefixes that any slot has already read."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

from plume.inference.engine import Engine, Feed, Logits, SamplingEngine
from plume.inference.sampler import Picked, Row, choose_rows
from plume.inference.sequences import SequenceState
from plume.inference.speculation import StepCost

WORTH_COPYING = 16  # fewer shared tokens than this are read again


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class FairLock:
    """A lock that waiting threads get in the order in which they asked, so that none of them starves."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting
            with self._guard:
                waiting = turn in self._queue
                if waiting:
                    self._queue.remove(turn)
            if not waiting:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._queue:
                self._queue.popleft().release()  # still held, by the next one
            else:
                self._held = False


class Batcher:
    """Drives one engine for any number of threads: whoever holds the lock advances the sequences of all."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.read: list[list[int]] = [[] for _ in range(engine.slots)]  # tokens in each slot, kept for later prefixes
        self.active: dict[int, SequenceState] = {}  # by slot
        self.waiting: deque[SequenceState] = deque()
        self.reused_tokens = 0  # tokens that did not have to be read again
        self.used = [0] * engine.slots  # when each slot was last used
        self.clock = 0
        self.cost = StepCost()
        self.prompt_tokens_per_step: int | None = None  # bounds how long a long prompt delays the other sequences
        self._lock = FairLock()

    def add(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)

    @property
    def busy(self) -> bool:
        return bool(self.active or self.waiting)

    def drop(self, sequence: SequenceState) -> None:
        """Cancel a sequence."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.active = {slot: s for slot, s in self.active.items() if s is not sequence}

    def step(self) -> list[SequenceState]:
        """One step of all sequences; returns those that have new tokens."""
        self._admit()
        plans = self._plans()
        if not plans:
            return []
        rows, began = sum(len(feed.tokens) for feed, _ in plans.values()), time.perf_counter()
        logits = self.engine.step([feed for feed, _ in plans.values()])
        for slot, (feed, _) in plans.items():
            self.read[slot] += feed.tokens
        plans = {slot: plan for slot, plan in plans.items() if plan[0].wanted}  # of others more prompt is to come
        chosen, moved = self._pick(logits, plans), []
        if rows == sum(feed.wanted for feed, _ in plans.values()):  # no prompt was read
            self.cost.note(rows, time.perf_counter() - began)
        for (slot, (_, guesses)), picked in zip(plans.items(), chosen, strict=True):
            sequence = self.active[slot]
            before = len(sequence.window)
            self._keep(slot, before + sequence.accept(picked, guesses) - 1)
            moved.append(sequence)
            if sequence.finish_reason is not None:
                del self.active[slot]
        return moved

    def _pick(self, logits: Logits, plans: Mapping[int, tuple[Feed, list[int]]]) -> list[list[Picked]]:
        """What each sequence draws from its rows, all of them together."""
        first, rows = 0, list[list[Row]]()
        for slot, (feed, guesses) in plans.items():
            rows.append(self.active[slot].rows(logits[first : first + feed.wanted], guesses))
            first += feed.wanted
        run = self.engine.sample if isinstance(self.engine, SamplingEngine) else None
        picked = iter(choose_rows([row for own in rows for row in own], run))
        return [list(islice(picked, len(own))) for own in rows]

    def run(self, sequences: Sequence[SequenceState]) -> Iterator[SequenceState]:
        """Run these to their ends, yielding each whenever it has new tokens; those of other threads advance too."""
        with self._lock:
            for sequence in sequences:
                self.add(sequence)
        try:
            while True:
                with self._lock:
                    if all(s.finish_reason is not None for s in sequences):
                        return
                    moved = self.step()
                yield from (one for one in moved if any(one is mine for mine in sequences))
        finally:
            with self._lock:
                for sequence in sequences:
                    self.drop(sequence)

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        """The engine with all slots empty, for a search of its own; interrupted sequences read their text again."""
        with self._lock:
            self._clear()
            try:
                yield self.engine
            finally:
                self._clear()

    def clear(self) -> None:
        """Forget all prefixes that could be reused."""
        with self._lock:
            self._clear()

    def logits_for(self, tokens: Sequence[int], wanted: int = 1) -> Logits:
        """The logits of the last `wanted` of these tokens, reusing what a slot has read before them."""
        with self._lock:
            if len(self.active) == self.engine.slots:
                self._preempt([min(self.active, key=lambda slot: self.used[slot])])
            source, shared = self._best_source(tokens)
            slot = self._prepare(source, min(shared, len(tokens) - wanted))
            new = list(tokens[len(self.read[slot]) :])
            logits = self.engine.step([Feed(slot, new, wanted)]).copy()  # the engine's memory is the next step's
            self.read[slot] += new
            return logits

    def _preempt(self, slots: Sequence[int]) -> None:
        """Let these sequences wait for a slot again, before all others."""
        self.waiting.extendleft(self.active.pop(slot) for slot in reversed(slots))

    def _clear(self) -> None:
        self._preempt(list(self.active))
        for slot in range(self.engine.slots):
            self.engine.rewind(slot, 0)
            self.read[slot] = []

    def _plans(self) -> dict[int, tuple[Feed, list[int]]]:
        """What each slot reads in this step: the newest token, or a part of a prompt."""
        plans, left = dict[int, tuple[Feed, list[int]]](), self.prompt_tokens_per_step
        for slot, sequence in self.active.items():
            feed, guesses = self._plan(slot, sequence)
            prompt = len(feed.tokens) - feed.wanted
            if left is not None and prompt > 0:
                if left == 0:
                    continue
                if prompt > left:
                    feed, guesses = Feed(slot, feed.tokens[:left], 0), []
                left -= min(prompt, left)
            plans[slot] = feed, guesses
        return plans

    def _plan(self, slot: int, sequence: SequenceState) -> tuple[Feed, list[int]]:
        if sequence.full:
            sequence.slide()
            self._keep(slot, 0)
        self._keep(slot, len(self.read[slot]))  # a step that was interrupted may have read more
        window = sequence.window
        room = self.engine.capacity - len(window) - 1  # the token behind the guesses is written too, and not beyond
        guesses = sequence.guesses(room, self.cost, len(self.active))
        new = window[len(self.read[slot]) :] + guesses
        return Feed(slot, new, 1 + len(guesses)), guesses

    def _keep(self, slot: int, length: int) -> None:
        if length < self.engine.length(slot):
            self.engine.rewind(slot, length)
        del self.read[slot][length:]

    def _admit(self) -> None:
        """Give free slots to waiting sequences. One whose prefix another newcomer is about to read waits a step."""
        newcomers = list[SequenceState]()
        stay = deque[SequenceState]()
        while self.waiting and len(self.active) < self.engine.slots:
            sequence = self.waiting.popleft()
            window = sequence.window
            best, shared = self._best_source(window)
            coming = max((common(window, s.window) for s in newcomers), default=0)
            if coming > max(shared, WORTH_COPYING):
                stay.append(sequence)
                continue
            self.active[self._prepare(best, shared)] = sequence
            newcomers.append(sequence)
        self.waiting.extendleft(reversed(stay))

    def _best_source(self, window: Sequence[int]) -> tuple[int, int]:
        """The slot with the longest common prefix, and how much of it can be used; the last token is read anew."""
        shared = [min(common(window, read), len(window) - 1) for read in self.read]
        best = max(range(len(shared)), key=lambda slot: (shared[slot], slot not in self.active))
        return best, shared[best]

    def _prepare(self, source: int, shared: int) -> int:
        """A free slot that has read exactly the first `shared` tokens of the source, or nothing when they are few."""
        free = [slot for slot in range(self.engine.slots) if slot not in self.active]
        assert free, "all slots are taken"
        shared = shared if shared >= WORTH_COPYING else 0
        if source in free and shared:
            slot = source
        else:
            slot = min(free, key=lambda s: self.used[s])  # the least recently used
            self._keep(slot, 0)
            if shared:
                self.engine.copy(source, slot, shared)
                self.read[slot] = self.read[source][:shared]
        self._keep(slot, shared)
        self.clock += 1
        self.used[slot] = self.clock
        self.reused_tokens += shared
        return slot
