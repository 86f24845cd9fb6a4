"""The ranks of a run: one process, or many started by torchrun. All that they tell each other goes through here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from plume.config import UserError

CPU = torch.device("cpu")
PATIENCE = timedelta(minutes=10)  # how long a collective waits for the slowest rank


@dataclass(frozen=True)
class Ranks:
    """Who this process is among its equals."""

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

    def agree(self, number: int) -> int:
        """What the main rank says."""
        if not self.many:
            return number
        told = torch.tensor([number], device=self.device)
        dist.broadcast(told, src=0)
        return int(told.item())


def pick_device(wanted: str) -> torch.device:
    """The device asked for, or the fastest one there is. Nothing of CUDA is touched unless it is used."""
    if wanted != "auto":
        try:
            device = torch.device(wanted)
        except RuntimeError:
            raise UserError(f"device={wanted!r} is not a device; auto, cpu, cuda, cuda:1 and mps are") from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device={wanted!r}: there is no CUDA here; device='cpu' would do")
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise UserError(f"device={wanted!r}: there is no MPS here; device='cpu' would do")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")


@contextmanager
def join(wanted: str) -> Iterator[Ranks]:
    """Meet the other ranks, if torchrun started this process, and part from them at the end."""
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
        dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield Ranks(rank, size, device)
    finally:
        if mine:
            dist.destroy_process_group()
