"""One thread per model shares out its compute: sequences in batches, readings in slices, clients in turn."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from plume.inference.batcher import Batcher, common
from plume.inference.engine import Logits
from plume.inference.sequences import FaultIsolatedSequence, TokenChoice

T = TypeVar("T")
READ_TOKENS = 256  # most prompt tokens that one step or slice reads
SLICE_SECONDS = 0.02  # compute of a reading before another request may have the turn
GENERATION_SHARE = 2 / 3  # of the time, while there is work of both kinds
MOST_LEAD = 0.5  # seconds, weighted by the shares, that generation or reading may be ahead of the other
CHUNK = 4096  # items of a long list between two pauses
SLOT_SECONDS = 0.25  # compute of a reading before another may take its cache slot


class Busy(Exception):
    """The queue is full; retry after so many seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; retry in {retry_after} s")
        self.retry_after = retry_after


class TimedOut(Exception):
    """The deadline of a request has passed."""

    def __init__(self) -> None:
        super().__init__("the request took longer than the server's timeout")


class Closed(Exception):
    """The model is being closed."""

    def __init__(self) -> None:
        super().__init__("this model is being closed; retry")


class Cancelled(Exception):
    """The client has disconnected."""


@dataclass(frozen=True)
class Update:
    """What is new of one sequence after a step."""

    text: str
    choices: tuple[TokenChoice, ...]
    finish_reason: str | None
    error: Exception | None = None


@dataclass(eq=False)
class ScheduledSequence:
    """One sequence in the scheduler, waiting or running."""

    sequence: FaultIsolatedSequence
    client: str
    deadline: float
    on_update: Callable[[Update], None]  # called in the scheduler's thread; must not block
    arrived: float = field(default_factory=time.monotonic)
    reported: int = 0  # tokens passed to on_update so far
    started: float | None = None
    first_token: float | None = None

    def update(self) -> Update:
        new = tuple(self.sequence.choices[self.reported :])
        self.reported += len(new)
        if new and self.first_token is None:
            self.first_token = time.monotonic()
        return Update(self.sequence.news(), new, self.sequence.finish_reason, self.sequence.error)


class Reading:
    """A request that generates nothing, in a thread of its own, which computes only while it has the turn."""

    def __init__(self, scheduler: Scheduler, client: str, deadline: float) -> None:
        self.scheduler, self.client, self.deadline = scheduler, client, deadline
        self.used = 0.0  # seconds of compute
        self.wants_slot = False
        self.slot_until = math.inf  # compute after which another reading may take the slot
        self.cancelled: type[Exception] | None = None
        self.started = False
        self.granted = threading.Event()
        self.since = 0.0  # when it got the turn

    def run(self, work: Callable[[], T]) -> T:
        """Do the work in this thread; `pause` inside it takes the turn and passes it on."""
        self.started = True
        token = CURRENT.set(self)
        try:
            self.check()
            return work()
        finally:
            CURRENT.reset(token)
            self.scheduler.end_reading(self)

    def check(self) -> None:
        """Raise when nobody waits for the result any more."""
        if self.cancelled is not None:
            raise self.cancelled
        if time.monotonic() > self.deadline:
            raise TimedOut

    def cancel(self, reason: type[Exception] = Cancelled) -> None:
        with self.scheduler.changed:
            if self.scheduler.is_reading(self):
                self.scheduler.counters.cancelled += 1
            self.cancelled = reason
            self.granted.set()
            if not self.started:
                self.scheduler.end_reading(self)

    def pause(self) -> None:
        """Called between two parts of the work: wait for the turn, or pass it on after a slice."""
        self.check()
        if self.scheduler.holder is not self or time.monotonic() - self.since > SLICE_SECONDS:
            self._take_turn()

    @contextmanager
    def alone(self, lock: threading.Lock) -> Iterator[None]:
        """Hold a lock across pauses. Turn and slot are passed on before: who has the lock may need them."""
        with self.scheduler.changed:
            self.scheduler.end_turn(self)
            if self.scheduler.slot_owner is self:
                self.scheduler.slot_owner = None
            self.scheduler.changed.notify_all()
        while not lock.acquire(timeout=0.05):
            self.check()
        try:
            yield
        finally:
            lock.release()

    def _take_turn(self) -> None:
        scheduler = self.scheduler
        with scheduler.changed:
            scheduler.end_turn(self)
            self.granted.clear()
            self.check()
            scheduler.ready.append(self)
            scheduler.changed.notify_all()
        self.granted.wait(max(0.0, self.deadline - time.monotonic()))
        with scheduler.changed:
            if self in scheduler.ready:
                scheduler.ready.remove(self)
            self.check()
        self.since = time.monotonic()

    def logits(self, tokens: Sequence[int], wanted: int) -> Logits:
        """The logits of the last tokens, read in parts into the slot that readings share."""
        batcher = self.scheduler.batcher
        assert batcher is not None
        self._take_slot()
        known = max(common(tokens, read) for read in batcher.read)
        for end in range(known + READ_TOKENS, len(tokens) - wanted, READ_TOKENS):
            self._read(batcher, tokens[:end], 1)
            self._take_slot()
        return self._read(batcher, tokens, wanted)

    def _take_slot(self) -> None:
        self.wants_slot = True
        if self.scheduler.slot_owner is self:
            self.pause()
        else:
            self._take_turn()
        if self.scheduler.slot_owner is not self:
            self.scheduler.slot_owner, self.slot_until = self, self.used + SLOT_SECONDS

    def _read(self, batcher: Batcher, tokens: Sequence[int], wanted: int) -> Logits:
        token = CURRENT.set(None)  # a step of the engine is one part
        try:
            return batcher.logits_for(tokens, wanted)
        finally:
            CURRENT.reset(token)


CURRENT: ContextVar[Reading | None] = ContextVar("CURRENT", default=None)


def pause(*_: Any) -> None:
    """Between two parts of a reading, such as the layers of a model; nothing in any other thread."""
    if (reading := CURRENT.get()) is not None:
        reading.pause()


def check() -> None:
    """Raise in a reading for which nobody waits any more."""
    if (reading := CURRENT.get()) is not None:
        reading.check()


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """A long list in parts, with a pause between two of them."""
    for at in range(0, len(items), CHUNK):
        if at:
            pause()
        yield items[at : at + CHUNK]


def unhurried(items: Sequence[T]) -> Iterator[T]:
    """The items of a list that may be long, with pauses."""
    return itertools.chain.from_iterable(chunks(items))


@dataclass
class Counters:
    """Totals for /metrics."""

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    timed_out: int = 0
    failed: int = 0


class Scheduler:
    """Owns the batcher of one model, or none where the model does not generate.

    While there is work of both kinds, generation gets GENERATION_SHARE of the time. Clients take turns for the free
    slots, and one that has two more than a client that waits gives one back; the next slice of reading goes to the
    client that has used the least, and of its readings to the one that has. One slot of the engine is kept for
    readings.
    """

    def __init__(self, batcher: Batcher | None, *, queue: int, name: str = "model") -> None:
        self.batcher, self.queue = batcher, queue
        self.slots = 0
        if batcher is not None:
            batcher.prompt_tokens_per_step = READ_TOKENS
            self.slots = max(1, batcher.engine.slots - 1)
        self.counters = Counters()
        self.changed = threading.Condition()
        self.ready: list[Reading] = []  # that wait for the turn
        self.holder: Reading | None = None  # that has the turn
        self.slot_owner: Reading | None = None
        self._readings: set[Reading] = set()
        self._spent: dict[str, float] = {}  # seconds of compute of readings, by client
        self._waiting: OrderedDict[str, deque[ScheduledSequence]] = OrderedDict()  # by client; the first is next
        self._running: dict[int, ScheduledSequence] = {}  # by id of the sequence
        self._inbox: deque[ScheduledSequence] = deque()
        self._leaving: deque[ScheduledSequence] = deque()
        self._closed = False
        self._lead = 0.0  # weighted seconds that readings had more than their share
        self._seconds = 1.0  # that a sequence takes, a running mean
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"plume-scheduler-{name}")
        self._thread.start()

    # -- called from any thread

    @property
    def waiting(self) -> int:
        with self.changed:
            return len(self._inbox) + sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def reading(self) -> int:
        return len(self._readings)

    def is_reading(self, reading: Reading) -> bool:
        return reading in self._readings

    @property
    def idle(self) -> bool:
        return not (self.waiting or self._running or self._readings)

    @property
    def capacity(self) -> int:
        """Sequences that it takes when it is idle."""
        return self.queue + self.slots

    def submit(self, requests: Sequence[ScheduledSequence]) -> None:
        """Queue the sequences of one request, all or none."""
        with self.changed:
            if self._closed:
                raise Closed
            queued = Counter(r.client for r in self._inbox) + Counter({c: len(q) for c, q in self._waiting.items()})
            free = max(0, self.slots - self.running)
            wait = max(1, math.ceil((queued.total() + 1) / max(1, self.slots) * self._seconds))
            self._admit(queued, requests[0].client, len(requests), free, wait)
            self._inbox.extend(requests)
            self.changed.notify_all()

    def start_reading(self, client: str, deadline: float) -> Reading:
        with self.changed:
            if self._closed:
                raise Closed
            self._admit(Counter(r.client for r in self._readings), client, 1, 0, 2)
            reading = Reading(self, client, deadline)
            self._readings.add(reading)
            self._spent.setdefault(client, min(self._spent.values(), default=0.0))
            return reading

    def _admit(self, queued: Counter[str], client: str, count: int, free: int, retry_after: int) -> None:
        """A full queue refuses, but a client that has nothing in it may add to it up to twice its length."""
        limit = self.queue if queued[client] else 2 * self.queue
        if queued.total() + count > limit + free:
            raise Busy(retry_after)

    def cancel(self, requests: Sequence[ScheduledSequence]) -> None:
        """Remove sequences whose client has gone."""
        with self.changed:
            self._leaving.extend(requests)
            self.changed.notify_all()

    def close(self) -> None:
        """Stop after the current step or slice and wait for readings; requests that are left fail with `Closed`."""
        with self.changed:
            self._closed = True
            for reading in list(self._readings):
                reading.cancel(Closed)
            self.changed.notify_all()
        self._thread.join()
        with self.changed:
            self.changed.wait_for(lambda: not self._readings, timeout=30)

    # -- called from the threads of readings

    def end_turn(self, reading: Reading) -> None:
        """Take the turn back and account for it. Holds the lock."""
        if self.holder is not reading:
            return
        seconds = time.monotonic() - reading.since
        reading.used += seconds
        self._spent[reading.client] = self._spent.get(reading.client, 0.0) + seconds
        if self.slot_owner is reading and reading.used > reading.slot_until:
            self.slot_owner = None
        self.holder = None

    def end_reading(self, reading: Reading) -> None:
        with self.changed:
            self.end_turn(reading)
            if self.slot_owner is reading:
                self.slot_owner = None
            self._readings.discard(reading)
            if not any(other.client == reading.client for other in self._readings):
                self._spent.pop(reading.client, None)
            self.changed.notify_all()

    # -- the scheduler's own thread

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    break
                while self._inbox:
                    request = self._inbox.popleft()
                    self._waiting.setdefault(request.client, deque()).append(request)
                leaving = list(self._leaving)
                self._leaving.clear()
            for request in leaving:
                self.counters.cancelled += self._remove(request)
            self._expire()
            self._fill_slots()
            self._next_part()
        self._fail_all(Closed())

    def _has_work(self) -> bool:
        return bool(self._inbox or self._leaving or self._waiting or self._running or self.ready)

    def _next_part(self) -> None:
        """One step of the batch or one slice of a reading, whichever kind had less time."""
        if not self._running or not self.ready:
            self._lead = 0.0
        if self._running and (not self.ready or self._lead >= 0):
            began = time.monotonic()
            self._step()
            self._lead = max(-MOST_LEAD, self._lead - (1 - GENERATION_SHARE) * (time.monotonic() - began))
        elif self.ready:
            self._slice()

    def _slice(self) -> None:
        """Give the turn to one reading and wait until it comes back."""
        with self.changed:
            owner = self.slot_owner
            able = [r for r in self.ready if not (r.wants_slot and owner is not None and owner is not r)]
            if not able:
                return
            self.holder = chosen = min(able, key=lambda r: (self._spent.get(r.client, 0.0), r.used))
            self.ready.remove(chosen)
            chosen.since = time.monotonic()
            chosen.granted.set()
            began = chosen.since
            self.changed.wait_for(lambda: self.holder is not chosen)
        seconds = time.monotonic() - began  # with the time that the threads take to wake up
        self._lead = min(MOST_LEAD, self._lead + GENERATION_SHARE * seconds)

    def _fill_slots(self) -> None:
        """Start waiting sequences, one of each client in turn."""
        while self._waiting and (len(self._running) < self.slots or self._free_slot()):
            with self.changed:
                client, line = next(iter(self._waiting.items()))
                request = line.popleft()
                self._waiting.move_to_end(client)
                if not line:
                    del self._waiting[client]
            request.started = time.monotonic()
            self._running[id(request.sequence)] = request
            assert self.batcher is not None
            self.batcher.add(request.sequence)

    def _free_slot(self) -> bool:
        """Where a client has two slots more than one that waits, its latest sequence waits again and reads anew."""
        assert self.batcher is not None
        running = Counter(request.client for request in self._running.values())
        fewest = min(self._waiting, key=lambda client: running[client])
        most, slots = running.most_common(1)[0]
        if slots < running[fewest] + 2:
            return False
        latest = [request for request in self._running.values() if request.client == most][-1]
        del self._running[id(latest.sequence)]
        self.batcher.drop(latest.sequence)
        with self.changed:
            self._waiting.setdefault(most, deque()).appendleft(latest)
            self._waiting.move_to_end(fewest, last=False)
        return True

    def _step(self) -> None:
        assert self.batcher is not None
        try:
            moved = self.batcher.step()
        except Exception as error:  # a defect of one step must not end the server
            self._fail_all(error)
            return
        self.counters.steps += 1
        for sequence in moved:
            request = self._running.get(id(sequence))
            if request is None:
                continue
            update = request.update()
            self.counters.tokens += len(update.choices)
            if update.finish_reason is not None:
                del self._running[id(sequence)]
                self.counters.finished += update.error is None
                self.counters.failed += update.error is not None
                self._seconds += 0.1 * (time.monotonic() - request.arrived - self._seconds)
            request.on_update(update)

    def _expire(self) -> None:
        now = time.monotonic()
        for request in self._everything():
            if request.deadline < now:
                self._remove(request)
                self.counters.timed_out += 1
                request.on_update(Update("", (), None, TimedOut()))

    def _everything(self) -> list[ScheduledSequence]:
        with self.changed:
            return [*self._running.values(), *(r for line in self._waiting.values() for r in line)]

    def _remove(self, request: ScheduledSequence) -> bool:
        """Whether it was still here."""
        with self.changed:
            line = self._waiting.get(request.client)
            if line is not None and request in line:
                line.remove(request)
                if not line:
                    del self._waiting[request.client]
                return True
        if self._running.pop(id(request.sequence), None) is None:
            return False
        assert self.batcher is not None
        self.batcher.drop(request.sequence)
        return True

    def _fail_all(self, error: Exception) -> None:
        """Report an error to every sequence and empty the cache: after a failed step it may be anything."""
        with self.changed:
            requests = [*self._everything(), *self._inbox]
            self._inbox.clear()
        for request in requests:
            self._remove(request)
            self.counters.failed += 1
            request.on_update(Update("", (), None, error))
        if self.batcher is not None:
            for slot, read in enumerate(self.batcher.read):
                self.batcher.engine.rewind(slot, 0)
                read.clear()
