"""The ranks of a run, and how a model is spread over them: tensor parallel, checkpointing, compile, DDP or FSDP."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from plume.config import TrainConfig, TrainPrecision, UserError
from plume.model.transformer import Attention, Block
from plume.util.devices import Precision, choose_precision, need_compiler, pick_device

CPU = torch.device("cpu")
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
LOST_CONNECTION = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket")
BYTES_PER_WEIGHT = 16  # weight, gradient and Adam's two moments in float32
MAX_DEVICE_SHARE = 0.6  # a copy that needs more than this of a device is sharded


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks of a run."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def many(self) -> bool:
        return self.size > 1

    def barrier(self) -> None:
        if self.many:
            dist.barrier()

    def wait_long(self) -> None:
        """A barrier for work of hours, such as preparing data on the main rank."""
        if self.many:
            dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(days=2)))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.many:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in order, on every rank."""
        if not self.many:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, number: int) -> int:
        """The main rank's number, on every rank."""
        if not self.many:
            return number
        shared = torch.tensor([number], device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())


def shared_precision(ranks: Ranks, wanted: TrainPrecision) -> Precision:
    """The precision of all ranks: where it is measured, by the main rank."""
    mine = choose_precision(ranks.device, wanted)
    low = bool(ranks.agree(int(mine.name == "bfloat16")))
    return replace(mine, name="bfloat16" if low else "float32")


@contextmanager
def join(wanted: str) -> Iterator[Ranks]:
    """Join the process group, if torchrun started this process, and leave it at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = pick_device(wanted)
    if size == 1:
        yield Ranks(device=device)
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    mine = not dist.is_initialized()
    if mine:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield Ranks(rank, size, device)
    finally:
        if mine:
            dist.destroy_process_group()


# ---- a rank that died ------------------------------------------------------------------------------------------------


class RankFailedError(UserError):
    """Another rank ended in the middle of a step."""


def is_lost_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in LOST_CONNECTION)


def silent_ranks(ranks: Ranks, seconds: float = 4.0) -> list[int]:
    """Ranks that do not answer any more, asked through the store of the process group, which outlives them."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"plume/alive/{ranks.rank}", "1")
    waiting, deadline = set(range(ranks.size)) - {ranks.rank}, time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(0.1)
        waiting = {rank for rank in waiting if not store.check([f"plume/alive/{rank}"])}
    return sorted(waiting)


def report_failed_rank(ranks: Ranks, error: BaseException, step: int, checkpoint: int | None) -> NoReturn:
    """End this rank after another one died; the first of those that are left says which, and how to resume."""
    silent = silent_ranks(ranks)
    if ranks.rank > min(set(range(ranks.size)) - set(silent)):
        raise SystemExit(1)
    who = f"rank {', '.join(map(str, silent))} died" if silent else "the connection between ranks was lost"
    last = "there is no checkpoint yet" if checkpoint is None else f"the last checkpoint is of step {checkpoint}"
    raise RankFailedError(f"{who} during step {step}; {last}. Resume with: {resume_command()}") from error


def resume_command() -> str:
    """This command again, with --resume."""
    words = [word for word in sys.argv[1:] if word not in ("--overwrite", "--resume")]
    program = ["-m", "plume"] if Path(sys.argv[0]).parent.name in ("plume", "bin") else [sys.argv[0]]
    launch = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
    return shlex.join([*launch, *program, *words, "--resume"])


# ---- the model over ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distributed:
    """A module that computes on its share of a batch, and whether gradients meet after the backward."""

    module: nn.Module
    replicas: int = 1  # groups of ranks that each take their own rows
    replica: int = 0  # this rank's group
    sharded: bool = False  # no rank holds whole weights

    def sync(self, last: bool) -> AbstractContextManager[Any]:
        """Around each micro-batch: gradients are exchanged after the last one only."""
        if isinstance(self.module, nn.parallel.DistributedDataParallel) and not last:
            return self.module.no_sync()
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def reshard(self) -> None:
        """Free the whole weights that a forward without a backward left behind."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def distribute(
    module: nn.Module,
    config: TrainConfig,
    ranks: Ranks,
    precision: Precision,
    *,
    find_unused_parameters: bool = False,
    fill: Callable[[nn.Module], None] | None = None,
) -> Distributed:
    """`find_unused_parameters`: there may be steps in which some parameters get no gradient.

    `fill` gives a module that was built on the meta device its weights, once each rank knows its part.
    """
    if ranks.size % config.tensor_parallel:
        raise UserError(f"tensor_parallel={config.tensor_parallel} does not divide {ranks.size} ranks")
    if config.tensor_parallel > 1 and config.strategy == "ddp":
        raise UserError("strategy='ddp' cannot copy matrices that ranks share; strategy='fsdp' or 'auto' can")
    refuse_recurrent(module, config)
    replicas = ranks.size // config.tensor_parallel
    mesh = None
    if ranks.many:
        mesh = init_device_mesh(
            ranks.device.type, (replicas, config.tensor_parallel), mesh_dim_names=("data", "tensor")
        )
    change_blocks(module, config, ranks, mesh)
    sharded = mesh is not None and should_shard(module, config, ranks)
    if mesh is not None and sharded:
        shard(module, mesh["data"], precision)
    if fill is not None:
        fill(module)
    if mesh is None:
        return Distributed(module)
    if not sharded:
        device_ids = [ranks.device] if ranks.device.type == "cuda" else None
        module = nn.parallel.DistributedDataParallel(
            module, device_ids=device_ids, gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
        )
    return Distributed(module, replicas, ranks.rank // config.tensor_parallel, sharded)


def change_blocks(module: nn.Module, config: TrainConfig, ranks: Ranks, mesh: DeviceMesh | None) -> None:
    """What changes inside a rank: split matrices, compiled code, activation checkpoints."""
    if config.tensor_parallel > 1 and mesh is not None:
        from plume.train.split_vocabulary import split_tables  # which reads this module

        tensor_parallelize(module, mesh["tensor"])
        split_tables(module, mesh["tensor"], ranks)
    if ranks.device.type == "cpu" and config.tensor_parallel == 1 and not config.compile:
        from plume.train.fused import fuse  # numba and its machine code are of no use elsewhere

        fuse(module)
    if config.activation_checkpointing:
        for block in blocks(module):
            checkpoint_activations(block)
    if config.compile:
        need_compiler()
        for block in blocks(module):
            block.compile()


def refuse_recurrent(module: nn.Module, config: TrainConfig) -> None:
    """What is done block by block, of a stack that has no Transformer blocks."""
    wanted = {
        "tensor_parallel": config.tensor_parallel > 1,
        "strategy=fsdp": config.strategy == "fsdp",
        "activation_checkpointing": config.activation_checkpointing,
        "compile": config.compile,
    }
    if any(wanted.values()) and not any(True for _ in blocks(module)):
        names = ", ".join(name for name, is_wanted in wanted.items() if is_wanted)
        raise UserError(f"{names}: a recurrent model is trained without; strategy=ddp has many ranks")


def blocks(module: nn.Module) -> Iterator[Block]:
    for part in module.modules():
        if isinstance(part, Block):
            yield part


def checkpoint_activations(block: Block) -> None:
    """Keep a block's input only, and compute the rest again when the backward needs it."""
    from torch.utils.checkpoint import checkpoint

    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def tensor_parallelize(module: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank keeps some heads and some of the MLP's hidden units; sums meet once per sub-block."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in blocks(module):
        plan: dict[str, Any] = {"mlp.inner.up": ColwiseParallel(), "mlp.inner.down": RowwiseParallel()}
        for name, part in block.named_modules():
            if isinstance(part, Attention):
                if part.heads % mesh.size():
                    raise UserError(f"tensor_parallel={mesh.size()} does not divide heads={part.heads}")
                part.heads //= mesh.size()
                plan |= {f"{name}.{matrix}": ColwiseParallel() for matrix in "qkv"}
                plan |= {f"{name}.out": RowwiseParallel()}
        parallelize_module(block, mesh, plan)


def should_shard(module: nn.Module, config: TrainConfig, ranks: Ranks) -> bool:
    if config.strategy != "auto":
        return config.strategy == "fsdp"
    if config.tensor_parallel > 1:
        return True  # copies of split matrices are shards too
    if ranks.device.type != "cuda":
        return False
    needed = BYTES_PER_WEIGHT * sum(p.numel() for p in module.parameters())
    return needed > MAX_DEVICE_SHARE * torch.cuda.get_device_properties(ranks.device).total_memory


def shard(module: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
    """FSDP2: each block's weights are gathered when they are needed, and gradients scattered."""
    low = torch.bfloat16 if precision.name == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for block in blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh)  # the token table in float32: its gradient is a long sum
