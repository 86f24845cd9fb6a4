"""Attention and MLP of a training step on the CPU: matrix products by torch, everything between them compiled."""

# B batch, T tokens, H heads, K head width, D model width, F feed-forward width, N = B * T positions

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor, nn

from plume.inference.cpu.arithmetic import HALF, ONE, TANH_A, TANH_B, exp
from plume.inference.cpu.lanes import atomic_add, longs_at
from plume.model.transformer import MLP, Attention, LayerCache, Mask, Memory
from plume.train.fused_attention import FusedAttention, product_dtype
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

LONGEST = 1024  # tokens: above, what a head works with leaves the core's cache
PART_ROWS = 64  # rows that a thread takes at a time
ERF_P, ERF_1, ERF_2, ERF_3, ERF_4, ERF_5 = (  # Abramowitz and Stegun 7.1.26, within 1.5e-7, for x / sqrt(2)
    np.float32(c) for c in (0.23164189, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)
NORMAL, TANH_C = np.float32(1 / math.sqrt(2 * math.pi)), np.float32(3 * 0.044715)
ZERO = np.float32(0)


# ---- compiled --------------------------------------------------------------------------------------------------------


@inline
def gelu_row(x: Any, bias: Any, tanh: int) -> None:
    """x becomes GELU(x + bias)."""
    if tanh:
        for i in range(x.size):
            z = x[i] + bias[i]
            x[i] = z - z / (exp(TANH_A * (z + TANH_B * z * z * z)) + ONE)
    else:
        for i in range(x.size):
            z = x[i] + bias[i]
            x[i] = z * normal_below(z, exp(-HALF * z * z))


@inline
def slope_row(x: Any, bias: Any, gradient: Any, tanh: int) -> None:
    """gradient is multiplied by the derivative of GELU at x + bias."""
    if tanh:
        for i in range(x.size):
            z = x[i] + bias[i]
            low = ONE / (exp(TANH_A * (z + TANH_B * z * z * z)) + ONE)  # (1 - tanh(...)) / 2
            gradient[i] *= (ONE - low) * (ONE + z * low * TANH_A * (ONE + TANH_C * z * z))
    else:
        for i in range(x.size):
            z = x[i] + bias[i]
            bell = exp(-HALF * z * z)
            gradient[i] *= normal_below(z, bell) + z * bell * NORMAL


@inline
def normal_below(z: Any, bell: Any) -> Any:
    """The share of a normal distribution below z; `bell` is exp(-z * z / 2)."""
    t = ONE / (ONE + ERF_P * abs(z))
    tail = HALF * bell * t * (ERF_1 + t * (ERF_2 + t * (ERF_3 + t * (ERF_4 + t * ERF_5))))
    return tail if z < ZERO else ONE - tail


@ThreadedCode
def gelu_job(at: int) -> None:
    """x (N, F), bias (F,), y (N, F)"""
    given = carray(longs_at(at), (ARGUMENTS,))
    rows, width, tanh, rough, x, bias, y = given[2], given[3], given[4], given[5], given[6], given[7], given[8]
    row = row_at(thread_memory(at, given[9], width), 0, width)
    while True:
        part = atomic_add(at, 1)
        if part >= given[1]:
            return
        for n in range(part * PART_ROWS, min(rows, (part + 1) * PART_ROWS)):
            read_numbers(row, x, n * width, rough)
            gelu_row(row, row_at(bias, 0, width), tanh)
            write_numbers(y, n * width, row, rough)


@ThreadedCode
def slope_job(at: int) -> None:
    """The gradient (N, F) times the derivative at x (N, F), in place; and its sum over the rows of each part."""
    given = carray(longs_at(at), (ARGUMENTS,))
    rows, width, tanh, rough, x, bias, gradient, sums = (
        given[2], given[3], given[4], given[5], given[6], given[7], given[8], given[9]
    )  # fmt: skip
    own = thread_memory(at, given[10], 2 * width)
    row, g = row_at(own, 0, width), row_at(own, 1, width)
    while True:
        part = atomic_add(at, 1)
        if part >= given[1]:
            return
        total = row_at(sums, part, width)
        for n in range(part * PART_ROWS, min(rows, (part + 1) * PART_ROWS)):
            read_numbers(row, x, n * width, rough)
            read_numbers(g, gradient, n * width, rough)
            slope_row(row, row_at(bias, 0, width), g, tanh)
            write_numbers(gradient, n * width, g, rough)
            for i in range(width):
                total[i] += g[i]


# ---- with gradients --------------------------------------------------------------------------------------------------


class FusedMLP(torch.autograd.Function):
    """down(GELU(up(x))); what GELU is of is kept, and its derivative found in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, tanh: bool
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(product_dtype())  # (N, D)
        before = flat @ up.T.to(flat.dtype)  # (N, F)
        active = torch.empty_like(before)
        rows, width = before.shape
        ctx.numbers = (rows, width, int(tanh), int(flat.dtype is torch.bfloat16))
        gelu_job(parts_of(rows), *ctx.numbers, before, up_bias, active, memory_of_threads(width))
        ctx.save_for_backward(flat, up, up_bias, down, active, before)
        return F.linear(active, down.to(flat.dtype), down_bias.to(flat.dtype)).float().view(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        flat, up, bias, down, active, before = ctx.saved_tensors
        whole = upstream[0].reshape(flat.shape)  # (N, D)
        gradient = whole.to(flat.dtype)
        inner = gradient @ down.to(flat.dtype)  # (N, F)
        sums = whole.new_zeros(parts_of(len(flat)), inner.shape[1])
        slope_job(len(sums), *ctx.numbers, before, bias, inner, sums, memory_of_threads(2 * inner.shape[1]))
        return (
            (inner @ up.to(flat.dtype)).float().view(upstream[0].shape),
            (inner.T @ flat).float(),
            sums.sum(dim=0),
            (gradient.T @ active).float(),
            whole.sum(dim=0),
            None,
        )


def parts_of(rows: int) -> int:
    return -(-rows // PART_ROWS)


# ---- in place of the plain forward ----------------------------------------------------------------------------------


def fuse(module: nn.Module) -> None:
    """Let the attention and MLP of every block train through the compiled code wherever it computes the same."""
    for part in module.modules():
        if isinstance(part, MLP):
            part.forward = functools.partial(mlp_forward, part)  # type: ignore[method-assign]
        elif isinstance(part, Attention):
            part.forward = functools.partial(attention_forward, part)  # type: ignore[method-assign]


def plain(part: nn.Module, x: Tensor, *matrices: nn.Module) -> bool:
    """Whether these are ordinary float32 matrices on the CPU, in training; products may be in bfloat16."""
    return (
        part.training
        and torch.is_grad_enabled()
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and (not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is torch.bfloat16)
        and all(type(m) is nn.Linear and type(m.weight) is nn.Parameter and not m._forward_hooks for m in matrices)
    )


def mlp_forward(part: MLP, x: Tensor) -> Tensor:
    if part.activation.kind == "relu" or not plain(part, x, part.up, part.down):
        return MLP.forward(part, x)
    weights = (part.up.weight, part.up.bias, part.down.weight, part.down.bias)
    y: Tensor = FusedMLP.apply(x, *weights, part.activation.kind == "gelu_tanh")  # type: ignore[no-untyped-call]
    return y


def attention_forward(
    part: Attention, x: Tensor, mask: Mask = None, cache: LayerCache | None = None, memory: Memory = None
) -> Tensor:
    of_keys = isinstance(mask, Tensor) and mask.shape[1:3] == (1, 1)
    if (
        not (mask is None or of_keys)
        or cache is not None
        or memory is not None
        or part.dropout > 0
        or x.shape[1] > LONGEST
        or not plain(part, x, part.q, part.k, part.v, part.out)
    ):
        return Attention.forward(part, x, mask, cache, memory)
    three = (part.q, part.k, part.v)
    bias = x.new_zeros(3 * x.shape[-1]) if part.q.bias is None else torch.cat([m.bias for m in three])
    real = mask.expand(len(x), 1, 1, x.shape[1]).contiguous() if isinstance(mask, Tensor) else None
    weights = [*(m.weight for m in three), bias, part.out.weight, part.out.bias]
    y: Tensor = FusedAttention.apply(x, *weights, part.heads, part.causal and mask is None, real)  # type: ignore[no-untyped-call]
    return y
