"""What a rank computes in each step: its share of the batch, in micro-batches that fit into memory."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from plume.config import TrainConfig, UserError
from plume.train.distribute import Distributed
from plume.train.ranks import Ranks

Parts = list[tuple[int, Any]]  # first row and batch of each micro-batch
MICRO_TOKENS = 16_384  # computed at a time unless the recipe says otherwise
CPU_MICRO_TOKENS = 2048  # more of them only need more memory there


class Batches(Protocol):
    def rows(self, step: int) -> int: ...

    def part(self, step: int, first: int, rows: int) -> Any: ...


class Feed:
    """Reads the batches of a run for one rank; those of the next step while a device computes this one."""

    def __init__(self, batches: Batches, config: TrainConfig, ranks: Ranks, distributed: Distributed) -> None:
        self.batches, self.steps, self.ranks, self.distributed = batches, config.steps, ranks, distributed
        self.micro_batch = config.micro_batch
        self.reader = None if ranks.device.type == "cpu" else ThreadPoolExecutor(1)  # a CPU has better to do
        self.ahead: tuple[tuple[int, int], Future[Parts]] | None = None  # (step, micro-batch), what is being read

    def load(self, step: int) -> Parts:
        """This rank's micro-batches of the step."""
        if self.micro_batch is None:
            width = self.batches.part(step, 0, 1).tokens.numel()
            fitting = CPU_MICRO_TOKENS if self.ranks.device.type == "cpu" else MICRO_TOKENS
            self.micro_batch = max(1, fitting // width)
        key = (step, self.micro_batch)
        parts = self.ahead[1].result() if self.ahead is not None and self.ahead[0] == key else self.read(step)
        if self.reader is not None and step + 1 < self.steps:
            self.ahead = ((step + 1, self.micro_batch), self.reader.submit(self.read, step + 1))
        return parts

    def read(self, step: int) -> Parts:
        return [(first, self.batches.part(step, first, rows)) for first, rows in self.share(self.batches.rows(step))]

    def share(self, rows: int) -> list[tuple[int, int]]:
        """(first row, rows) of each micro-batch of this rank; every rank has equally many."""
        replicas, mine = self.distributed.replicas, self.distributed.replica
        if rows < replicas:
            raise UserError(f"a batch of {rows} sequences cannot be shared by {replicas} ranks; batch={replicas} can")
        together = rows if self.micro_batch is None else self.micro_batch
        pieces = replicas * min(-(-rows // (replicas * together)), rows // replicas)
        edges = [rows * i // pieces for i in range(pieces + 1)]
        return [(edges[i], edges[i + 1] - edges[i]) for i in range(mine, pieces, replicas)]

    def shrink(self, step: int, reason: str) -> int:
        """Out of memory: half as many sequences at a time from now on; how many."""
        assert self.micro_batch is not None
        if self.ranks.many:  # the others wait in the middle of the step: it cannot be taken again
            raise UserError(
                f"rank {self.ranks.rank} ran out of memory at step {step} with micro_batch={self.micro_batch} "
                f"({reason}); resume with micro_batch={max(1, self.micro_batch // 2)}, "
                "which is --train.micro-batch of a pretraining"
            )
        if self.micro_batch == 1:
            raise UserError(
                f"out of memory at step {step} with one sequence at a time ({reason}); "
                "train.activation_checkpointing=true needs less, so does a smaller model or context"
            )
        self.micro_batch //= 2
        return self.micro_batch
