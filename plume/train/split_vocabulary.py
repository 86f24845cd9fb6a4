"""The token table split by rows over a tensor-parallel group: the loss of tokens when no rank holds all logits."""

# N positions with a target, D model width, V vocabulary, C positions in a chunk, P rows of the table on this rank

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from plume.data.batches import IGNORE
from plume.model.loss import CHUNK_NUMBERS, ChunkedLoss
from plume.model.transformer import Embedding
from plume.train.distribute import Ranks
from plume.train.shared_matrices import local_offset
from plume.util.console import tell


def split_tables(module: nn.Module, mesh: DeviceMesh, ranks: Ranks) -> None:
    """Each rank keeps some rows of the token table, and of the output table where it is another one."""
    tables = {id(part.tokens): part.tokens for part in module.modules() if isinstance(part, Embedding)}
    outputs = [output for part in module.modules() if isinstance(output := getattr(part, "output", None), nn.Linear)]
    counts = [table.num_embeddings for table in tables.values()] + [output.out_features for output in outputs]
    uneven = [rows for rows in counts if rows % ranks.size]
    if uneven:
        if ranks.main:
            tell(
                f"every tensor-parallel rank holds the whole token table: {ranks.size} ranks cannot share its "
                f"{uneven[0]:,} rows equally; a new run with --model.vocab-multiple {ranks.size * 8} pads them",
                sys.stderr,
            )
        return
    for table in tables.values():
        parallelize_module(table, mesh, RowwiseParallel(input_layouts=Replicate()))
    for output in outputs:
        parallelize_module(output, mesh, ColwiseParallel())  # never called: its weight is read by the loss


class SplitLoss(torch.autograd.Function):
    """Summed cross-entropy as plume.model.loss computes it, where this rank has the logits of some tokens only."""

    backward = staticmethod(ChunkedLoss.backward)

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,  # (N, D), the same on every rank of the group
        table: Tensor,  # (P, D), rows `first` to `first + P`
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,), IGNORE where there is none
        first: int,
        vocab_size: int,
        smoothing: float,
        group: Any,
    ) -> Tensor:
        words = table[: max(0, vocab_size - first)].to(features.dtype)  # (P, D)
        mine = slice(first, first + len(words))
        total = torch.zeros((), device=features.device)
        grad_features, grad_table = torch.zeros_like(features), torch.zeros_like(table)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        rows = max(1, CHUNK_NUMBERS // len(table))  # the same on every rank, also where some of the rows are padding
        for start in range(0, len(features), rows):
            x, y = features[start : start + rows], targets[start : start + rows]  # (C, D), (C,)
            logits = F.linear(x, words, None if bias is None else bias[mine].to(x.dtype)).float()  # (C, P)
            losses, gradient = split_losses(logits, y, first, vocab_size, smoothing, group)
            share = (y != IGNORE).to(logits.dtype)  # (C,)
            total += (losses * share).sum()  # a product would be rounded by autocast
            gradient *= share[:, None]
            if grad_bias is not None:
                grad_bias[mine] += gradient.sum(dim=0)
            gradient = gradient.to(x.dtype)
            grad_features[start : start + rows] = gradient @ words
            grad_table[: len(words)].addmm_(gradient.T.to(table.dtype), x.to(table.dtype))
        dist.all_reduce(grad_features, group=group)  # each rank had the part that comes from its own tokens
        if grad_bias is not None:
            dist.all_reduce(grad_bias, group=group)
        ctx.gradients = (grad_features, grad_table, grad_bias)
        return total


def split_losses(
    logits: Tensor, y: Tensor, first: int, vocab_size: int, smoothing: float, group: Any
) -> tuple[Tensor, Tensor]:
    """(C,) losses over the whole vocabulary, and their gradient by this rank's logits, (C, P)."""
    top = logits.amax(dim=1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)  # (C,)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    inside = ((y >= first) & (y < first + logits.shape[1])).nonzero()[:, 0]
    found = torch.zeros_like(top)
    found[inside] = logits[inside, y[inside] - first]
    sums = torch.stack([(logits - top[:, None]).exp_().sum(dim=1), found, logits.sum(dim=1)])  # (3, C)
    dist.all_reduce(sums, group=group)
    scale = top + sums[0].log()
    losses = scale - (1 - smoothing) * sums[1] - smoothing / vocab_size * sums[2]
    gradient = (logits - scale[:, None]).exp_().sub_(smoothing / vocab_size)
    gradient[inside, y[inside] - first] -= 1 - smoothing
    return losses, gradient


def split_token_loss(
    features: Tensor, table: Tensor, targets: Tensor, *, vocab_size: int, bias: Tensor | None, smoothing: float
) -> Tensor:
    """The summed cross-entropy of (N, D) features against (N,) targets, with a token table that ranks share."""
    assert isinstance(table, DTensor)
    total: Tensor = SplitLoss.apply(  # type: ignore[no-untyped-call]
        features,
        table.to_local(),
        bias,
        targets,
        local_offset(table)[0],
        vocab_size,
        smoothing,
        table.device_mesh.get_group(),
    )
    return total
