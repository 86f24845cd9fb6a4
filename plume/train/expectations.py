"""What a run can be expected to do: the time it still needs, and the loss that comparable runs had."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from plume.config import TrainConfig
from plume.train.optim import rows_before

RECENT = 50  # updates whose median is the speed: other programs come and go
WARMING_UP = 3  # updates in which kernels are compiled and memory is allocated
FORWARD = 1 / 3  # of the time of an update: validation has no backward pass

# Fitted to runs on two cores (docs/experiments.md): loss / unigram entropy = RATIO * (tokens / 1e6) ** -EXPONENT.
RATIO, EXPONENT = 0.71, 0.068
LOWEST, HIGHEST = 0.70, 1.20  # of the fitted loss: all of those runs are between, on words, letters, prose and code
TOKENS = (60_000, 20_000_000)
BLOCK_WEIGHTS = (50_000, 5_000_000)


class TimeLeft:
    """Seconds until the last step: the work to come at the measured speed, and the pauses for validation."""

    def __init__(self, config: TrainConfig, validation_rows: int = 0) -> None:
        self.config, self.validation_rows = config, validation_rows
        self.short: Sequence[tuple[int, float]] = ()  # of the first sequences: how many have which share of the length
        self.often = max(1, config.steps // 10) if config.validate_every is None else config.validate_every
        self.per_row = deque[float](maxlen=RECENT)
        self.pauses = deque[float](maxlen=5)
        self.paused_seconds = 0.0  # all of them together
        self.updates = 0

    def updated(self, step: int, seconds: float) -> None:
        self.updates += 1
        if self.updates == WARMING_UP + 1:
            self.per_row.clear()
        self.per_row.append(seconds / (self.rows_before(step) - self.rows_before(step - 1)))

    def paused(self, step: int, seconds: float) -> None:
        """What came after the update of a step: validation, samples, a checkpoint."""
        self.paused_seconds += seconds
        if step % self.often == 0:
            self.pauses.append(seconds)

    def rows_before(self, step: int) -> float:
        """Sequences of all steps before this one, shorter ones counted by their length."""
        rows = rows_before(step, self.config)
        whole, first = float(rows), 0
        for count, share in self.short:
            whole -= (1 - share) * min(max(0, rows - first), count)
            first += count
        return whole

    def seconds(self, step: int) -> float:
        if not self.per_row:
            return math.nan
        per_row = statistics.median(self.per_row)
        rows = self.rows_before(self.config.steps) - self.rows_before(step)
        pause = statistics.median(self.pauses) if self.pauses else FORWARD * per_row * self.validation_rows
        to_come = math.ceil(self.config.steps / self.often) - (step - 1) // self.often  # this step's is still to come
        return rows * per_row + max(0, to_come) * pause


def usual_loss(unigram: float, tokens: int, block_weights: int) -> tuple[float, float] | None:
    """The range of the training loss of comparable runs of a GPT after so many tokens; None where there were none.

    Relative to the entropy of the token frequencies, texts and tokenizers differ less than the range is wide. Between
    the sizes that were run, the size made no difference that would stand out from it.
    """
    if not (TOKENS[0] <= tokens <= TOKENS[1] and BLOCK_WEIGHTS[0] <= block_weights <= BLOCK_WEIGHTS[1]):
        return None
    fitted = unigram * RATIO * (tokens / 1e6) ** -EXPONENT
    return LOWEST * fitted, HIGHEST * fitted
