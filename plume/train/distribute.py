"""Many ranks, applied from outside in one fixed order: split matrices, checkpointing, compilation, copies or shards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from plume.config import TrainConfig, UserError
from plume.model import Attention, Block
from plume.train.devices import Precision
from plume.train.ranks import Ranks

BYTES_PER_WEIGHT = 16  # weight, gradient and Adam's two moments in float32
SHARE_OF_DEVICE = 0.6  # a copy that needs more than this of a device is sharded


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


def distribute(
    module: nn.Module, config: TrainConfig, ranks: Ranks, precision: Precision, *, some_rest: bool = False
) -> Distributed:
    """`some_rest`: there may be steps in which not every parameter gets a gradient."""
    if ranks.size % config.tensor_parallel:
        raise UserError(f"tensor_parallel={config.tensor_parallel} does not divide {ranks.size} ranks")
    if config.tensor_parallel > 1 and config.strategy == "ddp":
        raise UserError("strategy='ddp' cannot copy matrices that ranks share; strategy='fsdp' or 'auto' can")
    replicas = ranks.size // config.tensor_parallel
    mesh = None
    if ranks.many:
        mesh = init_device_mesh(
            ranks.device.type, (replicas, config.tensor_parallel), mesh_dim_names=("data", "tensor")
        )
    if config.tensor_parallel > 1 and mesh is not None:
        split_matrices(module, mesh["tensor"])
    if config.activation_checkpointing:
        for block in blocks(module):
            forget_activations(block)
    if config.compile:
        for block in blocks(module):
            block.compile()
    if mesh is None:
        return Distributed(module)
    sharded = should_shard(module, config, ranks)
    if sharded:
        shard(module, mesh["data"], precision)
    elif config.tensor_parallel == 1:
        device_ids = [ranks.device] if ranks.device.type == "cuda" else None
        module = nn.parallel.DistributedDataParallel(
            module, device_ids=device_ids, gradient_as_bucket_view=True, find_unused_parameters=some_rest
        )
    replica = ranks.rank // config.tensor_parallel
    return Distributed(module, replicas, replica, sharded or config.tensor_parallel > 1)


def blocks(module: nn.Module) -> Iterator[Block]:
    for part in module.modules():
        if isinstance(part, Block):
            yield part


def forget_activations(block: Block) -> None:
    """Keep a block's input only, and compute the rest again when the backward needs it."""
    from torch.utils.checkpoint import checkpoint

    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def split_matrices(module: nn.Module, mesh: DeviceMesh) -> None:
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
    return needed > SHARE_OF_DEVICE * torch.cuda.get_device_properties(ranks.device).total_memory


def shard(module: nn.Module, mesh: DeviceMesh, precision: Precision) -> None:
    """FSDP2: each block's weights are gathered when they are needed, and gradients scattered."""
    low = torch.bfloat16 if precision.name == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for block in blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
