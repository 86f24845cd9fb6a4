"""What this machine can do: cores, memory, measured speed, precision; and what a model costs per token."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from plume.config import ModelConfig, TrainPrecision, UserError

if TYPE_CHECKING:  # torch takes a second to import, and the number of cores can be had without it
    import torch

SIDE = 1024  # of the matrices that are timed
MIN_SPEEDUP = 1.2  # bfloat16 must be this much faster to be chosen: it has fewer digits
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_threads() -> int:
    """OMP_NUM_THREADS where it is a number (or begins with one, as OpenMP allows), else all cores."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(given) if given.isdecimal() and int(given) > 0 else cores()


def memory_bytes(device: torch.device) -> int:
    """All memory of a device; of the machine for a CPU."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


@dataclass(frozen=True)
class Precision:
    """The dtype of matrix products. Weights, optimizer states and sums stay in float32."""

    name: Literal["float32", "bfloat16"]
    device: torch.device
    peak: float  # measured FLOP/s, a multiply-add counted as two

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.name == "float32" else torch.bfloat16

    def context(self) -> AbstractContextManager[object]:
        import torch

        if self.name == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def pick_device(wanted: str) -> torch.device:
    """The device asked for, or the fastest one there is. Nothing of CUDA is touched unless it is used."""
    import torch

    if wanted != "auto":
        try:
            device = torch.device(wanted)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda", "mps"):
            raise UserError(f"device={wanted!r} is not a device; auto, cpu, cuda, cuda:1 and mps are")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device={wanted!r}: CUDA is not available; device='cpu' works")
        if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
            raise UserError(f"device={wanted!r}: this machine has {torch.cuda.device_count()} GPUs, from cuda:0 on")
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise UserError(f"device={wanted!r}: MPS is not available; device='cpu' works")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")


def need_compiler() -> None:
    """torch.compile writes C++ at the first step and calls the compiler that torch names here."""
    name = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))
    if shutil.which(name) is None:
        raise UserError(f"compile: torch.compile needs a C++ compiler, and {name} is not installed; leave compile out")


def choose_precision(device: torch.device, wanted: TrainPrecision) -> Precision:
    """The precision asked for, or the one the device multiplies fastest in."""
    import torch

    if wanted == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("precision='bfloat16' is not supported by this GPU; precision='float32' is")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    exact = matmul_speed(device, torch.float32)
    if wanted == "float32":
        return Precision("float32", device, exact)
    rough = matmul_speed(device, torch.bfloat16)
    if wanted == "auto" and rough < MIN_SPEEDUP * exact:
        return Precision("float32", device, exact)
    return Precision("bfloat16", device, rough)


def best_seconds(work: Callable[[], object], seconds: float, *, rounds: int = 1) -> float:
    """The shortest time that the work takes, over this many seconds and at least this many rounds."""
    best, done, began = float("inf"), 0, time.perf_counter()
    while time.perf_counter() - began < seconds or done < rounds:
        start = time.perf_counter()
        work()
        best, done = min(best, time.perf_counter() - start), done + 1
    return best


@cache
def matmul_speed(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """FLOP/s of a large matrix product, the best of a few."""
    import torch

    try:
        a, b = (torch.ones(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
        best = best_seconds(lambda: (a @ b)[0, 0].item(), seconds)  # reading one number waits for the device
    except RuntimeError:  # this device cannot do it at all
        return 0.0
    return 2 * SIDE**3 / best


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


# ---- what a model costs ------------------------------------------------------------------------------------------


def forward_flops_per_token(config: ModelConfig, length: int | None = None) -> int:
    """Two FLOPs per weight of each matrix a token meets, and the products of attention, at a sequence length.

    An encoder-decoder's token is one of the target, with a source as long; a causal token sees half of the others.
    """
    length, width = config.context if length is None else length, config.width
    projections, mlp = 4 * width * width, 2 * width * config.ffn_width
    if config.recurrent:
        return 2 * (8 * config.layers * width * width + config.table_rows * width)
    matrices = (config.layers + config.decoder_layers) * (projections + mlp) + config.decoder_layers * projections
    matrices += config.table_rows * width  # the token table is also the output matrix
    attended = 0.0
    for layer in range(config.layers):
        seen = length / 2 if config.causal else length
        attended += min(seen, config.band_of(layer)) if config.band_of(layer) else seen
    attended += config.decoder_layers * (length / 2 + length)  # the target so far, and the whole source
    return int(2 * matrices + 4 * width * attended)


def training_flops_per_token(config: ModelConfig, length: int | None = None) -> int:
    """Forward, and twice as much for the backward."""
    return 3 * forward_flops_per_token(config, length)
