"""Continuous batching: continuations join and leave between steps, and reuse what any slot has already read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from plume.generate.continuation import Continuation
from plume.generate.engine import Engine, Feed, Logits

WORTH_COPYING = 16  # fewer shared tokens than this are read again


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class Runner:
    """Drives one engine. Not for several threads at once: a server gives it a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.read: list[list[int]] = [[] for _ in range(engine.slots)]  # tokens in each slot, kept after an answer ends
        self.active: dict[int, Continuation] = {}  # by slot
        self.waiting: deque[Continuation] = deque()
        self.reused_tokens = 0  # tokens that did not have to be read again
        self.used = [0] * engine.slots  # when each slot was last used
        self.clock = 0
        self.prompt_room: int | None = None  # most prompt tokens that one step reads, so that nobody waits long for it

    def add(self, continuation: Continuation) -> None:
        self.waiting.append(continuation)

    @property
    def busy(self) -> bool:
        return bool(self.active or self.waiting)

    def drop(self, continuation: Continuation) -> None:
        """Give up an answer nobody waits for any more."""
        if continuation in self.waiting:
            self.waiting.remove(continuation)
        self.active = {slot: c for slot, c in self.active.items() if c is not continuation}

    def step(self) -> list[Continuation]:
        """One step of everything under way; returns the continuations that have moved."""
        self._admit()
        plans = self._plans()
        if not plans:
            return []
        logits = self.engine.step([feed for feed, _ in plans.values()])
        row, moved = 0, []
        for slot, (feed, guesses) in plans.items():
            continuation = self.active[slot]
            before = len(continuation.window)
            self.read[slot] += feed.tokens
            if feed.wanted == 0:  # more of its prompt is to come
                continue
            written = continuation.accept(logits[row : row + feed.wanted], guesses)
            self._keep(slot, before + written - 1)
            row += feed.wanted
            moved.append(continuation)
            if continuation.finish_reason is not None:
                del self.active[slot]
        return moved

    def run(self, continuations: Sequence[Continuation]) -> Iterator[Continuation]:
        """Run these to their ends, yielding each whenever it has moved; others under way move along."""
        for continuation in continuations:
            self.add(continuation)
        try:
            while any(c.finish_reason is None for c in continuations):
                yield from (moved for moved in self.step() if any(moved is one for one in continuations))
        finally:
            for continuation in continuations:
                self.drop(continuation)

    def forget(self) -> None:
        """Empty all slots, for somebody who uses the engine directly."""
        assert not self.active, "answers are under way"
        for slot in range(self.engine.slots):
            self.engine.rewind(slot, 0)
            self.read[slot] = []

    def look(self, tokens: Sequence[int], wanted: int = 1) -> Logits:
        """Read tokens and return the logits of the last `wanted` of them, reusing what a slot has read before them."""
        source, shared = self._best_source(tokens)
        slot = self._prepare(source, min(shared, len(tokens) - wanted))
        new = list(tokens[len(self.read[slot]) :])
        logits = self.engine.step([Feed(slot, new, wanted)])
        self.read[slot] += new
        return logits

    def _plans(self) -> dict[int, tuple[Feed, list[int]]]:
        """What each slot reads in this step. Who writes goes on; prompts share the room that a step has for them."""
        plans, room = dict[int, tuple[Feed, list[int]]](), self.prompt_room
        for slot, continuation in self.active.items():
            feed, guesses = self._plan(slot, continuation)
            prompt = len(feed.tokens) - feed.wanted
            if room is not None and prompt > 0:
                if room == 0:
                    continue
                if prompt > room:
                    feed, guesses = Feed(slot, feed.tokens[:room], 0), []
                room -= min(prompt, room)
            plans[slot] = feed, guesses
        return plans

    def _plan(self, slot: int, continuation: Continuation) -> tuple[Feed, list[int]]:
        if continuation.full:
            continuation.slide()
            self._keep(slot, 0)
        window = continuation.window
        guesses = continuation.guesses(self.engine.capacity - len(window))
        new = window[len(self.read[slot]) :] + guesses
        return Feed(slot, new, 1 + len(guesses)), guesses

    def _keep(self, slot: int, length: int) -> None:
        if length < self.engine.length(slot):  # more than is noted here, where a step was interrupted
            self.engine.rewind(slot, length)
        del self.read[slot][length:]

    def _admit(self) -> None:
        """Seat those who wait. One whose beginning another newcomer is about to read waits a step and copies it."""
        newcomers = list[Continuation]()
        stay = deque[Continuation]()
        while self.waiting and len(self.active) < self.engine.slots:
            continuation = self.waiting.popleft()
            window = continuation.window
            best, shared = self._best_source(window)
            coming = max((common(window, c.window) for c in newcomers), default=0)
            if coming > max(shared, WORTH_COPYING):
                stay.append(continuation)
                continue
            self.active[self._prepare(best, shared)] = continuation
            newcomers.append(continuation)
        self.waiting.extendleft(reversed(stay))

    def _best_source(self, window: Sequence[int]) -> tuple[int, int]:
        """The slot that begins most like this, and how much of it can be used; the last token is always read anew."""
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
            slot = min(free, key=lambda s: self.used[s])  # forget what was used longest ago
            self._keep(slot, 0)
            if shared:
                self.engine.copy(source, slot, shared)
                self.read[slot] = self.read[source][:shared]
        self._keep(slot, shared)
        self.clock += 1
        self.used[slot] = self.clock
        self.reused_tokens += shared
        return slot
