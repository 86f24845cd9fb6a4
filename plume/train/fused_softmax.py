"""The softmax of a training step on the CPU, compiled: logits become their gradient in one pass over memory."""

# C rows, V tokens that each is compared with

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from plume.inference.cpu.arithmetic import ONE, exp
from plume.inference.cpu.lanes import atomic_add, larger, longs_at
from plume.model.loss import softmax_slope
from plume.train.threaded_code import (
    ARGUMENTS,
    ThreadedCode,
    inline,
    memory_of_threads,
    read_numbers,
    row_at,
    thread_memory,
    write_numbers,
)

ROWS = 8  # that a thread takes at a time


@inline
def slope_of_row(x: Any, target: int, smoothing: Any) -> Any:
    """Logits become the gradient of the loss, which is returned."""
    top, mean = x[0], np.float32(0)
    for i in range(x.size):
        top = larger(top, x[i])
        mean += x[i]
    mean /= np.float32(x.size)
    own, total = x[target], np.float32(0)
    for i in range(x.size):
        x[i] = exp(x[i] - top)
        total += x[i]
    scale, less = ONE / total, smoothing / np.float32(x.size)
    for i in range(x.size):
        x[i] = x[i] * scale - less
    x[target] -= ONE - smoothing
    return top + np.log(total) - (ONE - smoothing) * own - smoothing * mean


@ThreadedCode
def softmax_job(at: int) -> None:
    """Logits (C, V) become their gradient; targets (C,), what their own logits are raised by (C,), losses (C,)."""
    given = carray(longs_at(at), (ARGUMENTS,))
    rows, width, rough, logits, targets, raised, losses = given[2:9]
    smoothing = row_at(given[9], 0, 1)[0]
    row = row_at(thread_memory(at, given[10], width), 0, width)
    while True:
        part = atomic_add(at, 1)
        if part >= given[1]:
            return
        for n in range(part * ROWS, min(rows, (part + 1) * ROWS)):
            read_numbers(row, logits, n * width, rough)
            target = carray(longs_at(targets), (rows,))[n]
            if raised:
                row[target] += row_at(raised, 0, rows)[n]
            row_at(losses, 0, rows)[n] = slope_of_row(row, target, smoothing)
            write_numbers(logits, n * width, row, rough)


def compiled_softmax(logits: Tensor, y: Tensor, raised: Tensor | None, smoothing: float) -> tuple[Tensor, Tensor]:
    """As plume.model.loss.softmax_slope; the memory of the logits is that of the gradient."""
    if logits.device.type != "cpu" or logits.dtype not in (torch.float32, torch.bfloat16):
        return softmax_slope(logits, y, raised, smoothing)
    rows, width = logits.shape
    logits, y = logits.contiguous(), y.contiguous()
    own = 0 if raised is None else raised.float().contiguous()
    losses, share = torch.empty(rows), torch.tensor(smoothing, dtype=torch.float32)
    numbers = (rows, width, int(logits.dtype is torch.bfloat16))
    softmax_job(-(-rows // ROWS), *numbers, logits, y, own, losses, share, memory_of_threads(width))
    return losses, logits
