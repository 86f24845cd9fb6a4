"""The scheduler: turns, limits, cancellation, time-outs, failures, and nobody's text in another's answer."""

import queue
import threading
import time
from concurrent.futures import Future
from itertools import groupby, pairwise

import numpy as np
import pytest

from plume.config import PRESETS, SamplingConfig
from plume.inference.batcher import Batcher
from plume.inference.engine import Feed
from plume.inference.sequences import FaultIsolatedSequence
from plume.serve.scheduler import (
    Busy,
    Cancelled,
    Closed,
    ScheduledSequence,
    Scheduler,
    TimedOut,
    pause,
    unhurried,
)
from plume.serve.served_models import ScheduledBatcher
from plume.text import load_tokenizer

PATIENCE = 60.0  # seconds that anything may take on a busy machine; nothing here is measured in seconds


class Clock:
    """Stands for the module `time` in the scheduler: time passes only where work is done."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("plume.serve.scheduler.time", made)
    return made


class Recorder:
    """An engine whose next token is always one more than the last; it notes who was in each step."""

    name, slots, capacity = "recorder", 4, 64
    config = PRESETS["gpt2-char"]

    def __init__(self) -> None:
        self.reads: list[list[int]] = [[] for _ in range(self.slots)]
        self.steps: list[set[int]] = []
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail = False

    def length(self, slot):
        return len(self.reads[slot])

    def step(self, feeds: list[Feed]):
        self.gate.wait(PATIENCE)
        if self.fail:
            self.fail = False
            raise RuntimeError("the engine broke")
        rows = []
        for feed in feeds:
            self.reads[feed.slot] += feed.tokens
            for token in list(feed.tokens)[len(feed.tokens) - feed.wanted :]:
                row = np.full(100, -50, np.float32)
                row[(token + 1) % 90] = 50
                rows.append(row)
        self.steps.append({feed.tokens[0] for feed in feeds})
        self.sizes.append(sum(len(feed.tokens) for feed in feeds))
        return np.stack(rows) if rows else np.zeros((0, 100), np.float32)

    def rewind(self, slot, length):
        del self.reads[slot][length:]

    def copy(self, source, target, length):
        self.reads[target] = self.reads[source][:length]

    def close(self):
        pass


@pytest.fixture(scope="module")
def tokenizer(models):
    return load_tokenizer(models["gpt"])


@pytest.fixture
def engine():
    return Recorder()


@pytest.fixture
def scheduler(engine):
    made = Scheduler(Batcher(engine), queue=6)
    yield made
    engine.gate.set()
    made.close()


def ticket(tokenizer, first=1, *, client="a", tokens=5, seconds=PATIENCE):
    moves = queue.Queue()
    config = SamplingConfig(max_new_tokens=tokens, temperature=0, ignore_eos=True)
    continuation = FaultIsolatedSequence([first], config, tokenizer=tokenizer, context=64, vocab_size=100, seed=0)
    made = ScheduledSequence(continuation, client, time.monotonic() + seconds, moves.put)
    return made, moves


class Read:
    """A reading in a thread of its own, as the server runs one."""

    def __init__(self, scheduler, work, *, client="a", seconds=PATIENCE):
        self.reading = scheduler.start_reading(client, time.monotonic() + seconds)
        self.found: Future = Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work):
        try:
            self.found.set_result(self.reading.run(work))
        except BaseException as error:
            self.found.set_exception(error)

    def result(self):
        return self.found.result(PATIENCE)


def look(scheduler, tokens, wanted=1):
    return Read(scheduler, lambda: ScheduledBatcher(None).logits_for(tokens, wanted)).result()


def slices(count, log=None, name=None, work_for=time.sleep):
    """Work of so many parts, 10 ms each."""

    def work():
        for _ in range(count):
            pause()
            if log is not None:
                log.append(name)
            work_for(0.01)
        return count

    return work


def wait_for(check):
    until = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < until
        time.sleep(0.002)


def written(moves):
    ids = []
    while True:
        move = moves.get(timeout=PATIENCE)
        if move.error is not None:
            raise move.error
        ids += [choice.id for choice in move.choices]
        if move.finish_reason is not None:
            return ids


def test_each_request_gets_exactly_its_own(scheduler, tokenizer):
    made = [ticket(tokenizer, first=10 * i) for i in range(6)]
    scheduler.submit([t for t, _ in made])
    for i, (_, moves) in enumerate(made):
        assert written(moves) == [10 * i + k for k in range(1, 6)]


def test_they_are_written_together_not_one_after_the_other(scheduler, engine, tokenizer):
    engine.gate.clear()
    made = [ticket(tokenizer, first=10 * i) for i in range(3)]
    scheduler.submit([t for t, _ in made])
    engine.gate.set()
    for _, moves in made:
        written(moves)
    assert len(engine.steps) <= 6
    assert max(len(step) for step in engine.steps) == 3


def test_a_late_request_joins_between_tokens(scheduler, engine, tokenizer):
    engine.gate.clear()
    long, long_moves = ticket(tokenizer, first=1, tokens=40)
    scheduler.submit([long])
    wait_for(lambda: scheduler.running == 1)
    late, late_moves = ticket(tokenizer, first=50, tokens=2, client="b")
    scheduler.submit([late])
    engine.gate.set()
    assert written(late_moves) == [51, 52]
    assert len(written(long_moves)) == 40
    assert [len(step) for step in engine.steps[:4]] == [1, 2, 2, 1]


def test_clients_take_turns(scheduler, engine, tokenizer):
    """A client with many sequences does not hold up another with one."""
    engine.gate.clear()
    many = [ticket(tokenizer, first=i, tokens=3, client="many") for i in range(1, 7)]
    scheduler.submit([t for t, _ in many])
    wait_for(lambda: scheduler.running == 3)
    one, moves = ticket(tokenizer, first=60, tokens=3, client="one")
    scheduler.submit([one])
    engine.gate.set()
    written(moves)
    for _, other in many:
        written(other)
    order = sorted([*(t for t, _ in many), one], key=lambda t: t.started)
    assert order.index(one) <= 4


def test_two_requests_do_not_hold_all_slots_while_another_client_waits(scheduler, engine, tokenizer):
    """The other is through long before any of theirs, which go on where they were."""
    engine.gate.clear()
    long = [ticket(tokenizer, first=10 * i, tokens=50, client="long") for i in range(1, 4)]
    with scheduler.changed:  # before the first step
        scheduler.submit([long[0][0]])
        scheduler.submit([t for t, _ in long[1:]])
    wait_for(lambda: scheduler.running == 3)
    short = [ticket(tokenizer, first=85 + i, tokens=3, client="short") for i in range(2)]
    scheduler.submit([t for t, _ in short])
    engine.gate.set()
    for i, (_, moves) in enumerate(short):
        assert written(moves) == [86 + i, 87 + i, 88 + i]
    for i, (_, moves) in enumerate(long, start=1):
        assert written(moves) == [(10 * i + k) % 90 for k in range(1, 51)]
    others = [number for number, step in enumerate(engine.steps) if max(step) >= 85]
    assert len(others) == 6 and max(others) < 10


def test_slots_are_not_taken_back_for_the_same_share(scheduler, engine, tokenizer):
    """With as many clients as slots each keeps its own: nothing is read twice."""
    engine.gate.clear()
    made = [ticket(tokenizer, first=10 * i, tokens=20, client=str(i % 4)) for i in range(6)]
    with scheduler.changed:
        for one, _ in made:
            scheduler.submit([one])
    wait_for(lambda: scheduler.running == 3)
    engine.gate.set()
    for i, (_, moves) in enumerate(made):
        assert written(moves) == [(10 * i + k) % 90 for k in range(1, 21)]
    assert sum(engine.sizes) == 6 * 20


def test_a_full_queue_says_when_to_come_again(scheduler, engine, tokenizer):
    engine.gate.clear()
    scheduler.submit([ticket(tokenizer, first=i)[0] for i in range(6)])
    wait_for(lambda: scheduler.running == 3)
    scheduler.submit([ticket(tokenizer)[0] for _ in range(3)])
    with pytest.raises(Busy) as refused:
        scheduler.submit([ticket(tokenizer)[0]])
    assert refused.value.retry_after >= 1
    assert scheduler.waiting == 6


def test_a_cancelled_sequence_leaves_at_once(scheduler, engine, tokenizer):
    first, moves = ticket(tokenizer, tokens=10_000)
    engine.gate.clear()  # without it this engine writes all it may before the cancel arrives
    scheduler.submit([first])
    wait_for(lambda: scheduler.running == 1)
    scheduler.cancel([first])
    engine.gate.set()
    wait_for(lambda: scheduler.counters.cancelled == 1)
    assert scheduler.running == 0 and moves.qsize() == 1 and len(engine.steps) == 1
    second, after = ticket(tokenizer, first=30)
    scheduler.submit([second])
    assert written(after) == [31, 32, 33, 34, 35]


def test_a_waiting_sequence_can_be_cancelled(scheduler, engine, tokenizer):
    engine.gate.clear()
    made = [ticket(tokenizer, first=i, tokens=2)[0] for i in range(6)]
    scheduler.submit(made)
    wait_for(lambda: scheduler.running == 3)
    scheduler.cancel(made[3:])
    engine.gate.set()
    wait_for(lambda: scheduler.counters.cancelled == 3)
    assert scheduler.counters.finished <= 3


def test_time_runs_out_for_those_who_wait_and_those_who_write(scheduler, engine, tokenizer):
    slow, moves = ticket(tokenizer, tokens=60, seconds=0.05)
    engine.gate.clear()
    scheduler.submit([slow])
    time.sleep(0.1)
    engine.gate.set()
    with pytest.raises(TimedOut):
        written(moves)
    assert scheduler.counters.timed_out == 1 and scheduler.running == 0


def test_a_broken_step_is_told_and_the_next_request_works(scheduler, engine, tokenizer):
    engine.fail = True
    broken, moves = ticket(tokenizer)
    scheduler.submit([broken])
    with pytest.raises(RuntimeError, match="broke"):
        written(moves)
    fine, after = ticket(tokenizer, first=20)
    scheduler.submit([fine])
    assert written(after) == [21, 22, 23, 24, 25]


@pytest.mark.parametrize("where", ["_row", "_write"])
def test_one_that_fails_does_not_take_the_others_with_it(scheduler, tokenizer, where):
    bad, bad_moves = ticket(tokenizer, first=1)
    setattr(bad.sequence, where, lambda *_: 1 // 0)
    fine, moves = ticket(tokenizer, first=40)
    scheduler.submit([bad, fine])
    with pytest.raises(ZeroDivisionError):
        written(bad_moves)
    assert written(moves) == [41, 42, 43, 44, 45]
    assert scheduler.counters.failed == 1 and scheduler.counters.finished == 1


def test_logits_are_read_while_all_slots_are_taken(scheduler, engine, tokenizer):
    made = [ticket(tokenizer, first=10 * i, tokens=40) for i in range(1, 4)]
    scheduler.submit([t for t, _ in made])
    rows = [look(scheduler, [7, 8, 9], 2) for _ in range(3)]
    assert all(row.argmax(1).tolist() == [9, 10] for row in rows)
    for i, (_, moves) in enumerate(made, start=1):
        assert written(moves)[:3] == [10 * i + 1, 10 * i + 2, 10 * i + 3]


def test_long_prompts_are_read_in_parts_beside_those_who_write(scheduler, engine, tokenizer):
    scheduler.batcher.prompt_tokens_per_step = 8
    writer, moves = ticket(tokenizer, first=1, tokens=40)
    scheduler.submit([writer])
    moves.get(timeout=PATIENCE)
    config = SamplingConfig(max_new_tokens=3, temperature=0, ignore_eos=True)
    prompts = [list(range(20 * i, 20 * i + 20)) for i in (1, 2)]
    found = []
    for prompt in prompts:
        long = FaultIsolatedSequence(prompt, config, tokenizer=tokenizer, context=64, vocab_size=100, seed=0)
        news = queue.Queue()
        scheduler.submit([ScheduledSequence(long, "b", time.monotonic() + PATIENCE, news.put)])
        found.append(news)
    for prompt, news in zip(prompts, found, strict=True):
        assert written(news) == [prompt[-1] + 1, prompt[-1] + 2, prompt[-1] + 3]
    assert len(written(moves)) == 39
    assert max(engine.sizes) <= 8 + 3


def test_a_shared_beginning_is_read_once(scheduler, engine, tokenizer):
    prompt = list(range(1, 41))
    look(scheduler, prompt)
    config = SamplingConfig(max_new_tokens=2, temperature=0, ignore_eos=True)
    moves = queue.Queue()
    again = FaultIsolatedSequence([*prompt, 70], config, tokenizer=tokenizer, context=64, vocab_size=100, seed=0)
    before = scheduler.batcher.reused_tokens
    scheduler.submit([ScheduledSequence(again, "a", time.monotonic() + PATIENCE, moves.put)])
    assert written(moves) == [71, 72]
    assert scheduler.batcher.reused_tokens - before == 40


def test_closing_tells_those_who_wait(engine, tokenizer):
    scheduler = Scheduler(Batcher(engine), queue=6)
    engine.gate.clear()
    made = [ticket(tokenizer, first=i, tokens=50) for i in range(6)]
    scheduler.submit([t for t, _ in made])
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    wait_for(lambda: scheduler._closed)
    engine.gate.set()
    closing.join(PATIENCE)
    with pytest.raises(Closed):
        written(made[-1][1])
    for refused in (lambda: scheduler.submit([made[0][0]]), lambda: scheduler.start_reading("a", 0.0)):
        with pytest.raises(Closed):
            refused()


# ---- readings


def test_a_reading_ends_at_its_deadline_between_two_parts(scheduler):
    with pytest.raises(TimedOut):
        Read(scheduler, slices(1000), seconds=0.1).result()
    with pytest.raises(TimedOut):
        Read(scheduler, lambda: ScheduledBatcher(None).logits_for([1, 2]), seconds=-1).result()
    assert scheduler.idle


def test_a_cancelled_reading_stops_at_its_next_part(scheduler):
    log = []
    long = Read(scheduler, slices(10_000, log=log))
    wait_for(lambda: log)
    long.reading.cancel()
    with pytest.raises(Cancelled):
        long.result()
    assert scheduler.idle and scheduler.counters.cancelled == 1


def test_a_reading_that_never_started_is_forgotten(scheduler):
    reading = scheduler.start_reading("a", time.monotonic() + PATIENCE)
    assert not scheduler.idle
    reading.cancel()
    assert scheduler.idle
    with pytest.raises(Cancelled):
        reading.run(lambda: None)


def test_a_short_reading_passes_ten_long_ones(scheduler, monkeypatch):
    """Of those that wait for the turn, it has used the least, so it is the next."""
    monkeypatch.setattr("plume.serve.scheduler.SLICE_SECONDS", 0.0)
    scheduler.queue = 20
    log, running = [], threading.Event()
    running.set()

    def hold(_):
        assert running.wait(PATIENCE)

    long = [Read(scheduler, slices(1_000_000, log, i, hold)) for i in range(10)]
    wait_for(lambda: len(set(log)) == 10)
    running.clear()
    before = len(log)
    short = Read(scheduler, slices(1, log, "short"))
    wait_for(lambda: len(scheduler.ready) == 10)  # one has the turn, or the short one has had it
    running.set()
    assert short.result() == 1
    assert log.index("short") < before + 3  # one may have been between hold and its line, one has the turn
    for one in long:
        one.reading.cancel()
    wait_for(lambda: scheduler.idle)


def test_clients_share_the_time_of_readings_whatever_their_number(scheduler, clock):
    scheduler.queue = 20
    log, begin = [], threading.Barrier(9)

    def work(name):
        begin.wait(PATIENCE)
        return slices(1_000_000, log, name, clock.work)()

    readings = [Read(scheduler, lambda n=n: work(n), client=n, seconds=1e6) for n in ["many"] * 8 + ["one"]]
    wait_for(lambda: "one" in log and len(set(scheduler._spent)) == 2)
    begun = len(log)
    wait_for(lambda: len(log) > begun + 600)
    part = log[begun : begun + 600]
    for one in readings:
        one.reading.cancel()
    assert 0.45 < part.count("one") / len(part) < 0.55


def test_generation_has_two_thirds_of_the_time_beside_readings(scheduler, engine, tokenizer, clock):
    """A step and a part of a reading take the same time."""
    scheduler.queue = 20
    log, step = [], engine.step
    engine.step = lambda feeds: (clock.work(0.01), log.append("step"), step(feeds))[2]
    long = [Read(scheduler, slices(1_000_000, log, "part", clock.work), client=str(i), seconds=1e6) for i in range(10)]
    wait_for(lambda: log)
    writer, _ = ticket(tokenizer, seconds=1e6)
    writer.sequence.config = SamplingConfig(max_new_tokens=100_000, temperature=0, ignore_eos=True, overflow="slide")
    scheduler.submit([writer])
    wait_for(lambda: "step" in log)
    begun = log.index("step") + 100
    wait_for(lambda: len(log) > begun + 600)
    steps = log[begun : begun + 600].count("step")
    scheduler.cancel([writer])
    for one in long:
        one.reading.cancel()
    assert 0.6 < steps / 600 < 0.73


def test_one_long_part_does_not_keep_readings_waiting_for_long(scheduler, engine, tokenizer, clock):
    """A part of 100 seconds cannot be interrupted; generation then has at most 1.5 s more than its share."""
    log, step = [], engine.step
    engine.step = lambda feeds: (clock.work(0.01), log.append("step"), step(feeds))[2]
    writer, _ = ticket(tokenizer, seconds=1e6)
    writer.sequence.config = SamplingConfig(max_new_tokens=100_000, temperature=0, ignore_eos=True, overflow="slide")
    scheduler.submit([writer])
    wait_for(lambda: log)

    def work():
        for seconds in (100.0, 0.01, 0.01):
            pause()
            log.append("part")
            clock.work(seconds)

    Read(scheduler, work, seconds=1e6).result()
    scheduler.cancel([writer])
    first, second = [number for number, what in enumerate(log) if what == "part"][:2]
    assert 100 < second - first <= 160


def test_readings_share_the_slot_of_the_cache(scheduler, engine, clock):
    """Each may keep it for 0.25 s of its own compute: none waits until another has read everything."""
    log, step, begin = [], engine.step, threading.Barrier(2)
    engine.step = lambda feeds: (clock.work(0.01), log.append(feeds[0].tokens[-1]), step(feeds))[2]

    def work(first):
        begin.wait(PATIENCE)
        for _ in range(200):
            ScheduledBatcher(None).logits_for([first, first + 1])

    for one in [Read(scheduler, lambda first=first: work(first), client=str(first), seconds=1e6) for first in (1, 50)]:
        one.result()
    runs = [len(list(own)) for _, own in groupby(log)]
    assert sum(runs) == 400 and len(runs) > 8 and sorted(runs)[-2] <= 30  # the last one may be alone


def test_long_lists_are_worked_on_in_turn(scheduler, monkeypatch):
    """Two readings that each go through a long list: neither is through before the other has begun."""
    monkeypatch.setattr("plume.serve.scheduler.CHUNK", 10)
    monkeypatch.setattr("plume.serve.scheduler.SLICE_SECONDS", 0.0)
    log, both_begun = [], threading.Barrier(2)

    def work(name):
        both_begun.wait(PATIENCE)
        pause()
        for item in unhurried(range(200)):
            log.append((name, item))
            time.sleep(5e-4)  # long enough altogether for the other one to come back from its pause

    scheduler.queue = 20
    both = [Read(scheduler, lambda name=name: work(name)) for name in "ab"]
    for one in both:
        one.result()
    for name in "ab":
        assert [item for who, item in log if who == name] == list(range(200))
    changes = sum(a[0] != b[0] for a, b in pairwise(log))
    assert changes > 1  # how often depends on how long the machine makes each slice


def test_a_full_queue_of_readings_still_takes_another_client(scheduler):
    readings = [scheduler.start_reading("a", time.monotonic() + PATIENCE) for _ in range(6)]
    with pytest.raises(Busy):
        scheduler.start_reading("a", time.monotonic() + PATIENCE)
    other = scheduler.start_reading("b", time.monotonic() + PATIENCE)
    for reading in (*readings, other):
        reading.cancel()
    assert scheduler.idle


def test_readings_in_turn_do_not_disturb_each_others_logits(scheduler, engine):
    """Long prompts in the one slot that readings share, beside each other and beside generation."""
    found = [Read(scheduler, lambda i=i: ScheduledBatcher(None).logits_for(range(i, i + 40), 3)) for i in range(6)]
    for i, one in enumerate(found):
        assert one.result().argmax(1).tolist() == [i + 38, i + 39, i + 40]


def test_a_broken_step_leaves_readings_alone(scheduler, engine, tokenizer):
    engine.gate.clear()
    writer, updates = ticket(tokenizer)
    scheduler.submit([writer])
    wait_for(lambda: scheduler.running == 1)
    gone, stays = (Read(scheduler, lambda: ScheduledBatcher(None).logits_for([1, 2])) for _ in range(2))
    gone.reading.cancel()
    engine.fail = True
    engine.gate.set()
    with pytest.raises(RuntimeError, match="broke"):
        written(updates)
    assert stays.result().shape == (1, 100)
    fine, after = ticket(tokenizer, first=20)
    scheduler.submit([fine])
    assert written(after) == [21, 22, 23, 24, 25]


def test_counts_are_read_while_the_queue_changes(scheduler, engine, tokenizer):
    """What /metrics does from another thread."""
    stop, errors = threading.Event(), []

    def count():
        while not stop.is_set():
            try:
                assert scheduler.waiting >= 0 and scheduler.running >= 0
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    for i in range(200):
        made, updates = ticket(tokenizer, tokens=1, client=str(i))
        scheduler.submit([made])
        written(updates)
    stop.set()
    thread.join()
    assert not errors
