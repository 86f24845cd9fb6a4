"""The micro-batches of each step: this rank's share of the batch, cut so that it fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from plume.config import TrainConfig, UserError
from plume.train.distribute import Distributed, Ranks

Limit = tuple[int | None, int]  # rows of a micro-batch, or its tokens
Parts = list[tuple[int, Any]]  # first row and batch of each micro-batch
MICRO_TOKENS = 16_384  # computed at a time unless the recipe says otherwise
CPU_MICRO_TOKENS = 2048  # more of them only need more memory there


class Batches(Protocol):
    def rows(self, step: int) -> int: ...

    def part(self, step: int, first: int, rows: int) -> Any: ...


@runtime_checkable
class Seekable(Protocol):
    """Batches that count the rows used, so that other sizes and numbers of batches continue after them."""

    def position(self, step: int) -> int: ...

    def over(self, step: int) -> list[int]:
        """Rows of each phase of shorter sequences that is over."""

    def seek(self, step: int, rows: int, over: Sequence[int]) -> None: ...


class Microbatches:
    """Reads the micro-batches of one rank; those of the next step while the device computes this one.

    Unless `micro_batch` is set, a micro-batch has as many rows as fit into a number of padded tokens, source and
    target, at the longest row of the step's batch: a pure function of the step.
    """

    def __init__(self, batches: Batches, config: TrainConfig, ranks: Ranks, distributed: Distributed) -> None:
        self.batches, self.steps, self.ranks, self.distributed = batches, config.steps, ranks, distributed
        self.micro_batch = config.micro_batch
        self.tokens = CPU_MICRO_TOKENS if ranks.device.type == "cpu" else MICRO_TOKENS
        self.reader = None if ranks.device.type == "cpu" else ThreadPoolExecutor(1)  # a CPU is busy computing
        self.ahead: tuple[tuple[int, Limit], Future[Parts]] | None = None  # what is read ahead, and under which limit

    @property
    def limit(self) -> Limit:
        return self.micro_batch, self.tokens

    def load(self, step: int) -> Parts:
        """This rank's micro-batches of the step."""
        key = (step, self.limit)
        parts = self.ahead[1].result() if self.ahead is not None and self.ahead[0] == key else self.read(step)
        if self.reader is not None and step + 1 < self.steps:
            self.ahead = ((step + 1, self.limit), self.reader.submit(self.read, step + 1))
        return parts

    def read(self, step: int) -> Parts:
        shares = self.share(self.batches.rows(step), self.rows(step))
        return [(first, self.batches.part(step, first, rows)) for first, rows in shares]

    def rows(self, step: int, batches: Batches | None = None) -> int:
        """Rows of a micro-batch of this step, the same on every rank."""
        if self.micro_batch is not None:
            return self.micro_batch
        batches = self.batches if batches is None else batches
        row = batches.part(step, 0, 1)
        if unpadded(row):  # so parts are as wide as their longest row
            row = batches.part(step, 0, batches.rows(step))
        return max(1, self.tokens // row_tokens(row))

    def share(self, rows: int, together: int) -> list[tuple[int, int]]:
        """(first row, rows) of each micro-batch of this rank, `together` at a time; every rank has equally many."""
        replicas, mine = self.distributed.replicas, self.distributed.replica
        if rows < replicas:
            raise UserError(f"a batch of {rows} sequences cannot be shared by {replicas} ranks; batch={replicas} can")
        pieces = replicas * min(-(-rows // (replicas * together)), rows // replicas)
        edges = [rows * i // pieces for i in range(pieces + 1)]
        return [(edges[i], edges[i + 1] - edges[i]) for i in range(mine, pieces, replicas)]

    def shrink(self, step: int, reason: str) -> int:
        """Out of memory: half as many sequences at a time from now on; how many at this step."""
        rows = min(self.rows(step), -(-self.batches.rows(step) // self.distributed.replicas))
        happened = f"rank {self.ranks.rank} ran out of memory" if self.ranks.many else "out of memory"
        if rows == 1:
            raise UserError(
                f"{happened} at step {step} with one sequence at a time ({reason}); "
                "train.activation_checkpointing=true needs less, so does a smaller model or context"
            )
        if self.ranks.many:  # the others wait in the middle of the step: it cannot be repeated
            raise UserError(
                f"{happened} at step {step} with micro_batch={rows} ({reason}); resume with micro_batch={rows // 2}, "
                "which is --train.micro-batch of a pretraining"
            )
        if self.micro_batch is None:
            self.tokens = self.tokens // self.rows(step) * (rows // 2)
        else:
            self.micro_batch = rows // 2
        return rows // 2


def unpadded(row: Any) -> bool:
    """Whether a row that was read alone is as long as its own text."""
    lengths = getattr(row, "lengths", None)
    return lengths is not None and int(lengths.max()) == row.tokens.shape[-1]


def row_tokens(batch: Any) -> int:
    """Padded tokens of a row: of the source too."""
    tokens: int = batch.tokens.numel() // len(batch.tokens)
    source = getattr(batch, "source", None)
    return tokens if source is None else tokens + int(source.shape[1])
