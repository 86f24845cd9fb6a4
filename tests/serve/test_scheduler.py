"""The scheduler: turns, limits, cancellation, time-outs, failures, and nobody's text in another's answer."""

import queue
import threading
import time

import numpy as np
import pytest

from plume.config import PRESETS, SamplingConfig
from plume.generate.engine import Feed
from plume.generate.runner import Runner
from plume.serve.scheduler import DEADLINE, Busy, Closed, Insulated, ScheduledRunner, Scheduler, Ticket, TimedOut
from plume.text import load_tokenizer


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
        self.gate.wait(10)
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
    made = Scheduler(Runner(engine), queue=6)
    yield made
    engine.gate.set()
    made.close()


def ticket(tokenizer, first=1, *, client="a", tokens=5, seconds=30.0):
    moves = queue.Queue()
    config = SamplingConfig(max_new_tokens=tokens, temperature=0, ignore_end=True)
    continuation = Insulated([first], config, tokenizer=tokenizer, context=64, vocab_size=100, seed=0)
    made = Ticket(continuation, client, time.monotonic() + seconds, moves.put)
    return made, moves


def wait_for(check):
    until = time.monotonic() + 10
    while not check():
        assert time.monotonic() < until
        time.sleep(0.002)


def written(moves):
    ids = []
    while True:
        move = moves.get(timeout=10)
        if move.error is not None:
            raise move.error
        ids += [choice.id for choice in move.choices]
        if move.finish_reason is not None:
            return ids


def test_everybody_gets_exactly_their_own(scheduler, tokenizer):
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
    long, long_moves = ticket(tokenizer, first=1, tokens=40)
    scheduler.submit([long])
    long_moves.get(timeout=10)
    late, late_moves = ticket(tokenizer, first=50, tokens=2, client="b")
    scheduler.submit([late])
    assert written(late_moves) == [51, 52]
    assert len(written(long_moves)) < 40  # it was still going on, and had some left


def test_clients_take_turns(scheduler, engine, tokenizer):
    """A client with many sequences does not hold up another with one."""
    engine.gate.clear()
    many = [ticket(tokenizer, first=i, tokens=3, client="many") for i in range(1, 7)]
    scheduler.submit([t for t, _ in many])
    wait_for(lambda: scheduler.active == 3)
    one, moves = ticket(tokenizer, first=60, tokens=3, client="one")
    scheduler.submit([one])
    engine.gate.set()
    written(moves)
    for _, other in many:
        written(other)
    order = sorted([*(t for t, _ in many), one], key=lambda t: t.seated)
    assert order.index(one) <= 4


def test_a_full_queue_says_when_to_come_again(scheduler, engine, tokenizer):
    engine.gate.clear()
    scheduler.submit([ticket(tokenizer, first=i)[0] for i in range(6)])
    wait_for(lambda: scheduler.active == 3)
    scheduler.submit([ticket(tokenizer)[0] for _ in range(3)])
    with pytest.raises(Busy) as refused:
        scheduler.submit([ticket(tokenizer)[0]])
    assert refused.value.retry_after >= 1
    assert scheduler.waiting == 6


def test_a_cancelled_sequence_leaves_at_once(scheduler, engine, tokenizer):
    first, moves = ticket(tokenizer, tokens=10_000)
    first.continuation.config = SamplingConfig(max_new_tokens=10_000, temperature=0, ignore_end=True, overflow="slide")
    scheduler.submit([first])
    moves.get(timeout=10)
    engine.gate.clear()  # without it this engine writes all it may before the cancel arrives
    scheduler.cancel([first])
    engine.gate.set()
    wait_for(lambda: scheduler.active == 0)
    assert scheduler.counters.cancelled == 1
    second, after = ticket(tokenizer, first=30)
    scheduler.submit([second])
    assert written(after) == [31, 32, 33, 34, 35]


def test_a_waiting_sequence_can_be_cancelled(scheduler, engine, tokenizer):
    engine.gate.clear()
    made = [ticket(tokenizer, first=i, tokens=2)[0] for i in range(6)]
    scheduler.submit(made)
    wait_for(lambda: scheduler.active == 3)
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
    assert scheduler.counters.timed_out == 1 and scheduler.active == 0


def test_a_broken_step_is_told_and_the_next_request_works(scheduler, engine, tokenizer):
    engine.fail = True
    broken, moves = ticket(tokenizer)
    scheduler.submit([broken])
    with pytest.raises(RuntimeError, match="broke"):
        written(moves)
    fine, after = ticket(tokenizer, first=20)
    scheduler.submit([fine])
    assert written(after) == [21, 22, 23, 24, 25]


def test_one_that_fails_does_not_take_the_others_with_it(scheduler, tokenizer):
    bad, bad_moves = ticket(tokenizer, first=1)
    bad.continuation._pick = lambda row: 1 // 0
    fine, moves = ticket(tokenizer, first=40)
    scheduler.submit([bad, fine])
    with pytest.raises(ZeroDivisionError):
        written(bad_moves)
    assert written(moves) == [41, 42, 43, 44, 45]
    assert scheduler.counters.failed == 1 and scheduler.counters.finished == 1


def test_looks_are_answered_while_all_seats_are_taken(scheduler, engine, tokenizer):
    made = [ticket(tokenizer, first=10 * i, tokens=40) for i in range(1, 4)]
    scheduler.submit([t for t, _ in made])
    rows = [scheduler.look([7, 8, 9], 2).result(10) for _ in range(3)]
    assert all(row.argmax(1).tolist() == [9, 10] for row in rows)
    for i, (_, moves) in enumerate(made, start=1):
        assert written(moves)[:3] == [10 * i + 1, 10 * i + 2, 10 * i + 3]


def test_long_prompts_are_read_in_parts_beside_those_who_write(scheduler, engine, tokenizer):
    scheduler.runner.prompt_room = 8
    writer, moves = ticket(tokenizer, first=1, tokens=40)
    scheduler.submit([writer])
    moves.get(timeout=10)
    config = SamplingConfig(max_new_tokens=3, temperature=0, ignore_end=True)
    prompts = [list(range(20 * i, 20 * i + 20)) for i in (1, 2)]
    found = []
    for prompt in prompts:
        long = Insulated(prompt, config, tokenizer=tokenizer, context=64, vocab_size=100, seed=0)
        news = queue.Queue()
        scheduler.submit([Ticket(long, "b", time.monotonic() + 10, news.put)])
        found.append(news)
    for prompt, news in zip(prompts, found, strict=True):
        assert written(news) == [prompt[-1] + 1, prompt[-1] + 2, prompt[-1] + 3]
    assert len(written(moves)) == 39
    assert max(engine.sizes) <= 8 + 3


def test_a_shared_beginning_is_read_once(scheduler, engine, tokenizer):
    prompt = list(range(1, 41))
    scheduler.look(prompt).result(10)
    config = SamplingConfig(max_new_tokens=2, temperature=0, ignore_end=True)
    moves = queue.Queue()
    again = Insulated([*prompt, 70], config, tokenizer=tokenizer, context=64, vocab_size=100, seed=0)
    before = scheduler.runner.reused_tokens
    scheduler.submit([Ticket(again, "a", time.monotonic() + 10, moves.put)])
    assert written(moves) == [71, 72]
    assert scheduler.runner.reused_tokens - before == 40


def test_closing_tells_those_who_wait(engine, tokenizer):
    scheduler = Scheduler(Runner(engine), queue=6)
    engine.gate.clear()
    made = [ticket(tokenizer, first=i, tokens=50) for i in range(6)]
    scheduler.submit([t for t, _ in made])
    threading.Timer(0.05, engine.gate.set).start()
    scheduler.close()
    with pytest.raises(Closed):
        written(made[-1][1])
    for door in (lambda: scheduler.submit([made[0][0]]), lambda: scheduler.look([1])):
        with pytest.raises(Closed):
            door()


def test_a_broken_step_passes_over_looks_that_nobody_waits_for(scheduler, engine, tokenizer):
    engine.gate.clear()
    writer, moves = ticket(tokenizer)
    scheduler.submit([writer])
    while scheduler.active == 0:
        time.sleep(0.001)
    gone = [scheduler.look([1]) for _ in range(3)]
    assert gone[-1].cancel()
    engine.fail = True
    engine.gate.set()
    with pytest.raises(RuntimeError, match="broke"):
        written(moves)
    fine, after = ticket(tokenizer, first=20)
    scheduler.submit([fine])
    assert written(after) == [21, 22, 23, 24, 25]


def test_a_long_look_ends_at_its_deadline(scheduler):
    runner = ScheduledRunner(scheduler)
    assert runner.look([1, 2]).shape == (1, 100)
    before = DEADLINE.set(time.monotonic() - 1)
    try:
        with pytest.raises(TimedOut):
            runner.look([1, 2])
    finally:
        DEADLINE.reset(before)
