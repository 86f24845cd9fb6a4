"""One thread that drives one engine for everybody: requests join and leave between tokens, clients take turns."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from plume.generate.continuation import Choice, Continuation
from plume.generate.engine import Logits
from plume.generate.runner import Runner

PROMPT_ROOM = 256  # prompt tokens read in one step, which everybody who writes waits for
LOOKS_PER_STEP = 2  # questions about a text that are answered between two steps of those who write


class Busy(Exception):
    """The queue is full; come again after so many seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is busy; try again in {retry_after} s")
        self.retry_after = retry_after


class TimedOut(Exception):
    """The request took longer than the server allows."""

    def __init__(self) -> None:
        super().__init__("the request took longer than the server allows")


class Closed(Exception):
    """Nobody drives this engine any more."""

    def __init__(self) -> None:
        super().__init__("this model is being closed; try again")


DEADLINE = ContextVar("DEADLINE", default=math.inf)  # until when whoever asks from this thread may go on looking


@dataclass(frozen=True)
class Move:
    """What is new of one sequence after a step."""

    text: str
    choices: tuple[Choice, ...]
    finish_reason: str | None
    error: Exception | None = None


class Insulated(Continuation):
    """A continuation whose own failure ends it alone, not the step that others share with it."""

    error: Exception | None = None

    def accept(self, logits: Logits, guesses: Sequence[int]) -> int:
        try:
            return super().accept(logits, guesses)
        except Exception as error:
            self.error, self.finish_reason = error, "error"
            return 0


@dataclass(eq=False)
class Ticket:
    """One sequence on its way through the scheduler."""

    continuation: Insulated
    client: str
    deadline: float
    on_move: Callable[[Move], None]  # called in the scheduler's thread; must not block
    arrived: float = field(default_factory=time.monotonic)
    told: int = 0  # choices handed out so far
    seated: float | None = None  # when it got a slot
    first_token: float | None = None

    def move(self) -> Move:
        new = tuple(self.continuation.choices[self.told :])
        self.told += len(new)
        if new and self.first_token is None:
            self.first_token = time.monotonic()
        return Move(self.continuation.news(), new, self.continuation.finish_reason, self.continuation.error)


@dataclass(frozen=True)
class Look:
    tokens: Sequence[int]
    wanted: int
    answer: Future[Logits]


@dataclass
class Counters:
    """Plain totals; the metrics page reads them."""

    steps: int = 0
    tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    timed_out: int = 0
    failed: int = 0


class Scheduler:
    """Owns a runner. Everything else talks to it through `submit`, `cancel` and `look`.

    One slot of the engine is never given to a writer, so that a look always finds room.
    """

    def __init__(self, runner: Runner, *, queue: int, name: str = "model") -> None:
        self.runner, self.queue = runner, queue
        runner.prompt_room = PROMPT_ROOM
        self.seats = max(1, runner.engine.slots - 1)
        self.counters = Counters()
        self._waiting: OrderedDict[str, deque[Ticket]] = OrderedDict()  # by client; the first one's turn is next
        self._seated: dict[int, Ticket] = {}  # by id of the continuation
        self._inbox: deque[Ticket] = deque()
        self._leaving: deque[Ticket] = deque()
        self._looks: deque[Look] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._seconds = 1.0  # how long an answer takes, a running mean
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"plume-scheduler-{name}")
        self._thread.start()

    # -- what others call, from any thread

    @property
    def waiting(self) -> int:
        return len(self._inbox) + sum(len(line) for line in self._waiting.values())

    @property
    def room(self) -> int:
        """Sequences that it takes when it has nothing to do."""
        return self.queue + self.seats

    @property
    def active(self) -> int:
        return len(self._seated)

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Put the sequences of one request in line, all or none."""
        with self._news:
            if self._closed:
                raise Closed
            line = self.waiting
            if line + len(tickets) > self.queue + max(0, self.seats - self.active):
                raise Busy(max(1, math.ceil((line + 1) / self.seats * self._seconds)))
            self._inbox.extend(tickets)
            self._news.notify()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these any more."""
        with self._news:
            self._leaving.extend(tickets)
            self._news.notify()

    def look(self, tokens: Sequence[int], wanted: int = 1) -> Future[Logits]:
        """The logits of the last `wanted` tokens, between two steps of those who write."""
        answer: Future[Logits] = Future()
        with self._news:
            if self._closed:
                raise Closed
            if len(self._looks) >= self.queue:
                raise Busy(1)
            self._looks.append(Look(tokens, wanted, answer))
            self._news.notify()
        return answer

    def close(self) -> None:
        """Stop after the step under way; whoever still waits is told."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    break
                while self._inbox:
                    ticket = self._inbox.popleft()
                    self._waiting.setdefault(ticket.client, deque()).append(ticket)
                leaving = list(self._leaving)
                self._leaving.clear()
                looks = [self._looks.popleft() for _ in range(min(LOOKS_PER_STEP, len(self._looks)))]
            for ticket in leaving:
                self.counters.cancelled += self._remove(ticket)
            self._expire()
            for look in looks:
                self._answer(look)
            self._seat()
            self._step()
        self._give_up(Closed())

    def _has_work(self) -> bool:
        return bool(self._inbox or self._leaving or self._looks or self._waiting or self._seated)

    def _seat(self) -> None:
        """Fill the free seats, one sequence of each client in turn."""
        while self._waiting and len(self._seated) < self.seats:
            with self._news:
                client, line = next(iter(self._waiting.items()))
                ticket = line.popleft()
                self._waiting.move_to_end(client)
                if not line:
                    del self._waiting[client]
            ticket.seated = time.monotonic()
            self._seated[id(ticket.continuation)] = ticket
            self.runner.add(ticket.continuation)

    def _step(self) -> None:
        if not self._seated:
            return
        try:
            moved = self.runner.step()
        except Exception as error:  # a defect of one step must not take the server down
            self._give_up(error)
            return
        self.counters.steps += 1
        for continuation in moved:
            ticket = self._seated.get(id(continuation))
            if ticket is None:
                continue
            move = ticket.move()
            self.counters.tokens += len(move.choices)
            if move.finish_reason is not None:
                del self._seated[id(continuation)]
                self.counters.finished += move.error is None
                self.counters.failed += move.error is not None
                self._seconds += 0.1 * (time.monotonic() - ticket.arrived - self._seconds)
            ticket.on_move(move)

    def _answer(self, look: Look) -> None:
        if not look.answer.set_running_or_notify_cancel():
            return
        try:
            look.answer.set_result(self.runner.look(look.tokens, look.wanted).copy())
        except Exception as error:
            look.answer.set_exception(error)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [
            t
            for t in [*self._seated.values(), *(t for line in self._waiting.values() for t in line)]
            if t.deadline < now
        ]
        for ticket in late:
            self._remove(ticket)
            self.counters.timed_out += 1
            ticket.on_move(Move("", (), None, TimedOut()))

    def _remove(self, ticket: Ticket) -> bool:
        """Whether it was still here."""
        with self._news:
            line = self._waiting.get(ticket.client)
            if line is not None and ticket in line:
                line.remove(ticket)
                if not line:
                    del self._waiting[ticket.client]
                return True
        if self._seated.pop(id(ticket.continuation), None) is None:
            return False
        self.runner.drop(ticket.continuation)
        return True

    def _give_up(self, error: Exception) -> None:
        """Tell everybody, and forget what the engine had read: after a failed step it may be anything."""
        with self._news:
            tickets = [*self._seated.values(), *(t for line in self._waiting.values() for t in line), *self._inbox]
            looks = list(self._looks)
            for line in (self._waiting, self._inbox, self._looks):
                line.clear()
        for ticket in tickets:
            self._remove(ticket)
            self.counters.failed += 1
            ticket.on_move(Move("", (), None, error))
        for look in looks:
            if look.answer.set_running_or_notify_cancel():
                look.answer.set_exception(error)
        for slot, read in enumerate(self.runner.read):
            self.runner.engine.rewind(slot, 0)
            read.clear()


class ScheduledRunner:
    """Looks like a runner to an LM in another thread; every look waits for its turn in the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def look(self, tokens: Sequence[int], wanted: int = 1) -> Logits:
        if time.monotonic() > DEADLINE.get():
            raise TimedOut
        return self.scheduler.look(tokens, wanted).result()

    def run(self, continuations: Sequence[Any]) -> Any:
        raise AssertionError("sequences are submitted to the scheduler")
