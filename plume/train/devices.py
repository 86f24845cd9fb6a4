"""What a device is good at, found by measuring: its precision, its peak, and what a failed allocation looks like."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from plume.config import ModelConfig, UserError

SIDE = 1024  # of the matrices that are timed
WORTH_IT = 1.2  # bfloat16 must be this much faster to be chosen: it has fewer digits
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


@dataclass(frozen=True)
class Precision:
    """What matrices are multiplied in. Weights, optimiser states and sums stay in float32."""

    name: Literal["float32", "bfloat16"]
    device: torch.device
    peak: float  # measured multiply-and-add operations per second, each counted as two

    def context(self) -> AbstractContextManager[object]:
        if self.name == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


def choose_precision(device: torch.device, wanted: Literal["auto", "float32", "bfloat16"]) -> Precision:
    """The precision asked for, or the one the device multiplies fastest in."""
    if wanted == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("precision='bfloat16' is not supported by this GPU; precision='float32' is")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    exact = matmul_speed(device, torch.float32)
    if wanted == "float32":
        return Precision("float32", device, exact)
    rough = matmul_speed(device, torch.bfloat16)
    if wanted == "auto" and rough < WORTH_IT * exact:
        return Precision("float32", device, exact)
    return Precision("bfloat16", device, rough)


@cache
def matmul_speed(device: torch.device, dtype: torch.dtype, seconds: float = 0.1) -> float:
    """Operations per second of a large matrix product, the best of a few tries."""
    try:
        a, b = (torch.ones(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
        best, began = float("inf"), time.perf_counter()
        while time.perf_counter() - began < seconds or best == float("inf"):
            start = time.perf_counter()
            (a @ b)[0, 0].item()  # reading one number waits for the device
            best = min(best, time.perf_counter() - start)
    except RuntimeError:  # this device cannot do it at all
        return 0.0
    return 2 * SIDE**3 / best


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY)


def flops_per_token(config: ModelConfig, parameters: int) -> float:
    """Operations of forward and backward for one token: six per weight, and attention's by the context."""
    looked_up = config.context * config.width * (config.positions == "learned")
    layers = config.layers + 2 * config.decoder_layers  # a decoder layer attends twice
    return 6 * (parameters - looked_up) + 12 * layers * config.width * config.context
