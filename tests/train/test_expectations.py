"""Time left and the usual loss, with clocks and figures that the tests make up."""

import random
from types import SimpleNamespace

import pytest

from plume.config import TrainConfig
from plume.train.distribute import Ranks
from plume.train.expectations import BLOCK_WEIGHTS, TOKENS, TimeLeft, usual_loss
from plume.train.optim import batch_rows
from plume.train.training_log import TrainingLog
from plume.util.run_folder import read_metrics

BATCH = 16


def simulated(config: TrainConfig, per_row: float, first: float, validation: int, seed: int) -> tuple[float, float]:
    """A run whose updates vary by a tenth: what is said to be left at step 20, and what is."""
    dice, left = random.Random(seed), TimeLeft(config, validation)
    durations, pauses = [], []
    for step in range(1, config.steps + 1):
        update = per_row * batch_rows(step - 1, config) * dice.uniform(0.9, 1.1) + (first if step == 1 else 0)
        durations.append(update)
        pauses.append(per_row * validation * dice.uniform(0.28, 0.38) if step % left.often == 0 else 0.001)
    for step in range(1, 21):
        left.updated(step, durations[step - 1])
        if step < 20:  # a log line comes before the validation of its step
            left.paused(step, pauses[step - 1])
    return left.seconds(20), sum(durations[20:]) + sum(pauses[19:])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"validate_every": 10},  # it has been seen
        {"validate_every": 100},  # it is still to come
        {"batch_start": 2, "batch_ramp_steps": 200},  # steps get longer
    ],
)
def test_time_left_is_right_after_20_steps(fields, seed):
    config = TrainConfig(steps=300, batch=BATCH, **fields)
    said, true = simulated(config, per_row=0.05, first=40.0, validation=200, seed=seed)
    assert said == pytest.approx(true, rel=0.15)


def test_time_left_counts_sequences_by_their_length():
    """Shorter ones come first: the rest of the run takes longer than the first steps say."""
    left = TimeLeft(TrainConfig(steps=100, batch=4))
    left.short = [(4 * 30, 0.25), (4 * 30, 0.5)]
    for step in range(1, 21):
        left.updated(step, 1.0)
    assert left.seconds(20) == pytest.approx(10 * 1 + 30 * 2 + 40 * 4)


def test_a_slow_first_step_does_not_count():
    left = TimeLeft(TrainConfig(steps=100, batch=1))
    for step in range(1, 21):
        left.updated(step, 60.0 if step == 1 else 1.0)
    assert left.seconds(20) == pytest.approx(80, abs=1)


def test_the_speed_is_that_of_training_alone(tmp_path):
    """Validation between two log lines does not slow it down."""
    log = TrainingLog(tmp_path, TrainConfig(steps=10, batch=BATCH, validate_every=2), Ranks(), ["tokens"])
    log.log(step=1, loss=1.0, parts=[1.0], rate=1.0, tokens=100, seconds=1.0)
    log.time_left.paused(2, 50.0)
    log.log(step=3, loss=1.0, parts=[1.0], rate=1.0, tokens=300, seconds=53.0)
    assert [row.get("tokens_per_second") for row in read_metrics(tmp_path)] == [None, 100.0]


@pytest.mark.parametrize(("tokens", "shown"), [(600, True), (1600, False)])
def test_more_than_the_peak_is_not_shown(tmp_path, capsys, tokens, shown):
    """A peak that was measured while the machine was busy: 60 tokens of 1 operation per second are 60 % of 100."""
    log = TrainingLog(tmp_path, TrainConfig(steps=100, batch=BATCH), Ranks(), ["tokens"])
    log.measure_against(1.0, 100.0)
    for step in (0, 1):
        log.log(step=step, loss=1.0, parts=[1.0], rate=1.0, tokens=step * tokens, seconds=10.0 * step)
    said = capsys.readouterr().err
    assert ("60% of peak" in said) == ("of peak" in said) == shown
    assert read_metrics(tmp_path)[-1]["fraction_of_peak"] == tokens / 1000


RUNS = [  # tokens, loss, unigram entropy of runs in docs/experiments.md
    (757_760, 3.596, 5.964),
    (552_960, 4.27, 5.945),
    (2_252_800, 4.393, 6.644),
    (8_200_000, 4.134, 6.834),
    (6_100_000, 4.618, 6.834),
    (345_600, 1.865, 3.31),
]


@pytest.mark.parametrize(("tokens", "loss", "unigram"), RUNS)
def test_healthy_runs_are_within_the_range(tokens, loss, unigram):
    low, high = usual_loss(unigram, tokens, 500_000)
    assert low <= loss <= high


def test_nothing_is_said_of_sizes_that_were_not_run():
    assert usual_loss(6.0, TOKENS[0] - 1, 500_000) is None and usual_loss(6.0, TOKENS[1] + 1, 500_000) is None
    assert usual_loss(6.0, 10**6, BLOCK_WEIGHTS[0] - 1) is None and usual_loss(6.0, 10**6, BLOCK_WEIGHTS[1] + 1) is None


@pytest.mark.parametrize(("loss", "words"), [(4.2, "comparable runs had"), (5.8, "warning: ")])
def test_the_log_compares_once(tmp_path, capsys, loss, words):
    log = TrainingLog(tmp_path, TrainConfig(steps=100), SimpleNamespace(main=True), ["loss"])
    log.comparable = 6.0, 500_000
    log.log(step=10, loss=7.0, parts=[7.0], rate=1.0, tokens=100_000, seconds=1.0)
    log.check_sanity(10, 6.0, by=50)
    log.log(step=60, loss=loss, parts=[loss], rate=1.0, tokens=1_000_000, seconds=2.0)
    log.check_sanity(60, 6.0, by=50)
    log.check_sanity(70, 6.0, by=50)
    said = capsys.readouterr().err
    assert said.count("comparable runs had") == 1 and words in said
    assert ("plume doctor" in said) == words.startswith("warning")
