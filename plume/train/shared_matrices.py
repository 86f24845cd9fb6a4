"""Matrices cut over ranks: which block each rank holds, and work on whole ones that is shared out over the ranks."""

# W ranks, G matrices of one shape, R rows, C columns

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from plume.train.distribute import Ranks

Block = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the whole tensor, and shape
AT_ONCE = 1 << 24  # numbers that a rank works on together


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing into it writes into the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_offset(tensor: Tensor) -> tuple[int, ...]:
    """Where that begins in the whole tensor."""
    if not isinstance(tensor, DTensor) or not tensor.to_local().numel():
        return (0,) * tensor.ndim
    return tuple(tensor.__create_chunk_list__()[0].offsets)  # type: ignore[no-untyped-call]


class SharedWork:
    """Work on whole matrices: each is put together on one rank, worked on there, and its blocks are sent back."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.blocks: dict[Tensor, list[Block]] = {}  # of each matrix, by rank
        self.next = 0  # rank that gets the next matrix

    def locate(self, matrices: Sequence[Tensor]) -> None:
        """Learn once which block of each matrix every rank holds."""
        if all(matrix in self.blocks for matrix in matrices):
            return
        mine = [(local_offset(matrix), tuple(local_part(matrix).shape)) for matrix in matrices]
        by_rank = self.ranks.gather(mine)
        self.blocks |= {matrix: [blocks[i] for blocks in by_rank] for i, matrix in enumerate(matrices)}

    def run(
        self, work: Callable[[Tensor], Tensor], matrices: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        """This rank's blocks of work((G, R, C)), where it holds the blocks `values` of matrices like these."""
        self.locate(matrices)
        together = self.ranks.size * max(1, AT_ONCE // matrices[0].numel())
        results: list[Tensor] = []
        for start in range(0, len(matrices), together):
            results += self.round(work, matrices[start : start + together], values[start : start + together])
        return results

    def round(
        self, work: Callable[[Tensor], Tensor], matrices: Sequence[Tensor], values: Sequence[Tensor]
    ) -> list[Tensor]:
        size, me, shape = self.ranks.size, self.ranks.rank, tuple(matrices[0].shape)
        blocks = [self.blocks[matrix] for matrix in matrices]
        owned = [[i for i in range(len(matrices)) if (self.next + i) % size == rank] for rank in range(size)]
        self.next = (self.next + len(matrices)) % size
        # an owner that holds a matrix whole needs nothing of it
        wanted = [[i for i in owned[rank] if blocks[i][rank][1] != shape] for rank in range(size)]
        received = exchange(
            [[values[i] for i in wanted[rank]] for rank in range(size)],
            [[blocks[i][rank][1] for i in wanted[me]] for rank in range(size)],
            values[0],
        )
        whole = {i: values[i] if i not in wanted[me] else values[i].new_empty(shape) for i in owned[me]}
        for rank, pieces in enumerate(received):
            for i, piece in zip(wanted[me], pieces, strict=True):
                whole[i][inside(blocks[i][rank])] = piece
        done = dict(zip(owned[me], work(torch.stack(list(whole.values()))), strict=True)) if whole else {}
        returned = exchange(
            [[done[i][inside(blocks[i][rank])] for i in owned[me]] for rank in range(size)],
            [[blocks[i][me][1] for i in owned[rank]] for rank in range(size)],
            values[0],
        )
        mine = {i: piece for rank, pieces in enumerate(returned) for i, piece in zip(owned[rank], pieces, strict=True)}
        return [mine[i] for i in range(len(matrices))]


def inside(block: Block) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*block, strict=True))


def exchange(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], like: Tensor
) -> list[list[Tensor]]:
    """Tensors for every rank, and those from every rank, whose shapes are known."""
    flat = [torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)]) for tensors in sent]
    lengths = [[torch.Size(shape).numel() for shape in given] for given in shapes]
    out = like.new_empty(sum(map(sum, lengths)))
    sizes_out, sizes_in = [sum(given) for given in lengths], [len(tensors) for tensors in flat]
    dist.all_to_all_single(out, torch.cat(flat), sizes_out, sizes_in)
    parts: Any = torch.split(out, sizes_out)
    return [
        [piece.view(shape) for piece, shape in zip(torch.split(part, given), of_rank, strict=True)]
        for part, given, of_rank in zip(parts, lengths, shapes, strict=True)
    ]
