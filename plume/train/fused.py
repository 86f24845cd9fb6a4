"""Attention and MLP of a training step on the CPU: matrix products by torch, everything between them compiled."""

# B batch, T tokens, H heads, K head width, D model width, F feed-forward width, N = B * T positions

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numba import carray, types
from numba.core.ccallback import CFunc
from torch import Tensor, nn

from plume.inference.cpu.arithmetic import HALF, ONE, TANH_A, TANH_B, exp
from plume.inference.cpu.lanes import FASTMATH, SOURCES, atomic_add, bytes_at, floats_at, larger, longs_at, sources
from plume.model.transformer import MLP, Attention, LayerCache, Mask, Memory

LONGEST = 512  # tokens: above, a matrix of attention weights per head is slower than computing them in blocks
PART_ROWS = 64  # rows that a thread takes at a time
ARGUMENTS = 12  # whole numbers that a job reads, at most
ERF_P, ERF_1, ERF_2, ERF_3, ERF_4, ERF_5 = (  # Abramowitz and Stegun 7.1.26, within 1.5e-7, for x / sqrt(2)
    np.float32(c) for c in (0.23164189, 0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
)
NORMAL, TANH_C = np.float32(1 / math.sqrt(2 * math.pi)), np.float32(3 * 0.044715)
ZERO, HIDDEN = np.float32(0), np.float32(-1e30)


class ThreadedCode:
    """Compiled code that torch's own threads run together, each taking the next part of the work until none is left."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.function = function

    @functools.cached_property
    def code(self) -> Any:
        options = {"nopython": True, "fastmath": FASTMATH, "error_model": "numpy"}
        code: Any = CFunc(self.function, ((types.int64,), types.void), locals={}, options=options)
        code.enable_caching()
        # numba asks only whether this file has changed, but the engine's parts are compiled into it
        code._cache._cache_file._source_stamp = SOURCES + sources(Path(__file__).parent)
        code.compile()
        return code

    def __call__(self, parts: int, *numbers: int | Tensor) -> None:
        """Numbers and the addresses of contiguous tensors, after the counter of parts begun and that of all parts."""
        given = [n.data_ptr() if isinstance(n, Tensor) else n for n in numbers]
        words = (ctypes.c_int64 * ARGUMENTS)(0, parts, *given)
        threads = min(torch.get_num_threads(), parts)
        if threads > 1 and openmp() is not None:
            openmp()(ctypes.c_void_p(self.code.address), ctypes.byref(words), threads, 0)
        else:
            self.code.ctypes(ctypes.addressof(words))


@functools.cache
def openmp() -> Any:
    """What starts the threads that torch computes with; others would compete with them for the cores."""
    try:
        return ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None


# ---- compiled --------------------------------------------------------------------------------------------------------


def inline(function: Callable[..., Any]) -> Any:
    """Compiled as a part of the job that calls it."""
    return numba.njit(fastmath=FASTMATH, error_model="numpy")(function)


@inline
def row_at(address: int, row: int, width: int) -> Any:
    return carray(floats_at(address + 4 * row * width), (width,))


@inline
def gelu_row(x: Any, bias: Any, y: Any, tanh: int) -> None:
    """y becomes GELU(x + bias), x its derivative."""
    if tanh:
        for i in range(x.size):
            z = x[i] + bias[i]
            low = ONE / (exp(TANH_A * (z + TANH_B * z * z * z)) + ONE)  # (1 - tanh(...)) / 2
            y[i] = z - z * low
            x[i] = (ONE - low) * (ONE + z * low * TANH_A * (ONE + TANH_C * z * z))
    else:
        for i in range(x.size):
            z = x[i] + bias[i]
            t = ONE / (ONE + ERF_P * abs(z))
            bell = exp(-HALF * z * z)
            tail = HALF * bell * t * (ERF_1 + t * (ERF_2 + t * (ERF_3 + t * (ERF_4 + t * ERF_5))))
            below = tail if z < ZERO else ONE - tail
            y[i] = z * below
            x[i] = below + z * bell * NORMAL


@ThreadedCode
def gelu_job(at: int) -> None:
    """x (N, F), bias (F,), y (N, F)"""
    given = carray(longs_at(at), (ARGUMENTS,))
    rows, width, tanh, x, bias, y = given[2], given[3], given[4], given[5], given[6], given[7]
    while True:
        part = atomic_add(at, 1)
        if part >= given[1]:
            return
        for row in range(part * PART_ROWS, min(rows, (part + 1) * PART_ROWS)):
            gelu_row(row_at(x, row, width), row_at(bias, 0, width), row_at(y, row, width), tanh)


@ThreadedCode
def slope_job(at: int) -> None:
    """The gradient (N, F) times the derivative (N, F), in place; and its sum over the rows of each part."""
    given = carray(longs_at(at), (ARGUMENTS,))
    rows, width, gradient, derivative, sums = given[2], given[3], given[4], given[5], given[6]
    while True:
        part = atomic_add(at, 1)
        if part >= given[1]:
            return
        total = row_at(sums, part, width)
        for row in range(part * PART_ROWS, min(rows, (part + 1) * PART_ROWS)):
            g, d = row_at(gradient, row, width), row_at(derivative, row, width)
            for i in range(width):
                g[i] *= d[i]
                total[i] += g[i]


@ThreadedCode
def heads_job(at: int) -> None:
    """(B, T, 3 D) plus bias (3 D,) to q / sqrt(K), k and v, (3, B, H, T, K).

    Or the way back for gradients, where what was the bias becomes their sum over the tokens of each row, (B, 3 D).
    """
    given = carray(longs_at(at), (ARGUMENTS,))
    batch, tokens, heads, size, back = given[1], given[2], given[3], given[4], given[5]
    together, apart, bias = given[6], given[7], given[8]
    while True:
        b = atomic_add(at, 1)
        if b >= batch:
            return
        for t in range(tokens):
            for part in range(3 * heads):
                x = row_at(together, (b * tokens + t) * 3 * heads + part, size)
                y = row_at(apart, ((part // heads * batch + b) * heads + part % heads) * tokens + t, size)
                shift = row_at(bias, b * 3 * heads + part if back else part, size)
                scale = ONE / np.sqrt(np.float32(size)) if part < heads else ONE
                if back:
                    for i in range(x.size):
                        x[i] = y[i] * scale
                        shift[i] += x[i]
                else:
                    for i in range(x.size):
                        y[i] = (x[i] + shift[i]) * scale


@inline
def softmax_row(x: Any) -> None:
    top = x[0]
    for i in range(x.size):
        top = larger(top, x[i])
    total = ZERO
    for i in range(x.size):
        x[i] = exp(x[i] - top)
        total += x[i]
    scale = ONE / total
    for i in range(x.size):
        x[i] *= scale


@inline
def softmax_slope_row(p: Any, g: Any) -> None:
    mean = ZERO
    for i in range(p.size):
        mean += p[i] * g[i]
    for i in range(p.size):
        g[i] = p[i] * (g[i] - mean)


@ThreadedCode
def softmax_job(at: int) -> None:
    """Attention scores (B * H, T, T) to weights, in place. `real` says which tokens of a row (B, T) are no padding."""
    given = carray(longs_at(at), (ARGUMENTS,))
    tokens, heads, causal, scores, real = given[2], given[3], given[4], given[5], given[6]
    while True:
        part = atomic_add(at, 1)
        if part >= given[1]:
            return
        for t in range(tokens):
            start, seen = scores + 4 * tokens * (part * tokens + t), t + 1 if causal else tokens
            if real:
                x, known = row_at(start, 0, tokens), carray(bytes_at(real + part // heads * tokens), (tokens,))
                for i in range(x.size):
                    x[i] = x[i] if known[i] else HIDDEN
            softmax_row(row_at(start, 0, seen))
            row_at(start + 4 * seen, 0, tokens - seen)[:] = ZERO


@ThreadedCode
def softmax_slope_job(at: int) -> None:
    """The gradient of the weights (B * H, T, T) to that of the scores, in place."""
    given = carray(longs_at(at), (ARGUMENTS,))
    tokens, causal, weights, gradient = given[2], given[3], given[4], given[5]
    while True:
        part = atomic_add(at, 1)
        if part >= given[1]:
            return
        for t in range(tokens):
            start, seen = 4 * tokens * (part * tokens + t), t + 1 if causal else tokens
            softmax_slope_row(row_at(weights + start, 0, seen), row_at(gradient + start, 0, seen))
            row_at(gradient + start + 4 * seen, 0, tokens - seen)[:] = ZERO


# ---- with gradients --------------------------------------------------------------------------------------------------


class FusedMLP(torch.autograd.Function):
    """down(GELU(up(x))); the forward also finds the derivative of GELU, in the memory of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, tanh: bool
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # (N, D)
        derivative = flat @ up.T  # (N, F), until the job has run what GELU is of
        active = torch.empty_like(derivative)
        rows, width = active.shape
        gelu_job(parts_of(rows), rows, width, int(tanh), derivative, up_bias, active)
        ctx.save_for_backward(flat, up, down, active, derivative)
        return F.linear(active, down, down_bias).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        flat, up, down, active, derivative = ctx.saved_tensors
        gradient = upstream[0].reshape(flat.shape)  # (N, D)
        inner = gradient @ down  # (N, F)
        rows, width = inner.shape
        sums = inner.new_zeros(parts_of(rows), width)
        slope_job(len(sums), rows, width, inner, derivative, sums)
        return (
            (inner @ up).view(upstream[0].shape),
            inner.T @ flat,
            sums.sum(dim=0),
            gradient.T @ active,
            gradient.sum(dim=0),
            None,
        )


class FusedAttention(torch.autograd.Function):
    """What the heads read of x, before the output projection: q, k and v as one product, attention's weights kept.

    The matrix of the product is joined again in the backward: kept, it would be a quarter of all weights on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor, heads: int, causal: bool, real: Any
    ) -> Tensor:
        matrix = torch.cat([wq, wk, wv])  # (3 D, D)
        batch, tokens, width = x.shape
        flat, size = x.reshape(-1, width), width // heads
        q, k, v = parts = x.new_empty(3, batch * heads, tokens, size)
        heads_job(batch, tokens, heads, size, 0, flat @ matrix.T, parts, bias)
        weights = torch.bmm(q, k.mT)  # (B * H, T, T), scores until the job has run
        softmax_job(len(weights), tokens, heads, int(causal), weights, 0 if real is None else real)
        ctx.save_for_backward(flat, parts, weights, wq, wk, wv)
        ctx.heads, ctx.causal = heads, causal
        return torch.bmm(weights, v).view(batch, heads, tokens, size).transpose(1, 2).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        flat, parts, weights, *matrices = ctx.saved_tensors
        matrix = torch.cat(matrices)
        (q, k, v), heads = parts, ctx.heads
        batch, tokens, _ = upstream[0].shape
        read = upstream[0].view(batch, tokens, heads, -1).transpose(1, 2).reshape(q.shape)  # (B * H, T, K)
        scores = torch.bmm(read, v.mT)  # (B * H, T, T), the gradient of the weights until the job has run
        softmax_slope_job(len(weights), tokens, int(ctx.causal), weights, scores)
        gradients = torch.empty_like(parts)
        torch.bmm(scores, k, out=gradients[0])
        torch.bmm(scores.mT, q, out=gradients[1])
        torch.bmm(weights.mT, read, out=gradients[2])
        joined, sums = flat.new_empty(len(flat), len(matrix)), flat.new_zeros(batch, len(matrix))
        heads_job(batch, tokens, heads, q.shape[-1], 1, joined, gradients, sums)
        before = (joined @ matrix).view(upstream[0].shape)
        return before, *(joined.T @ flat).chunk(3), sums.sum(dim=0), None, None, None


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
    """Whether these are ordinary float32 matrices on the CPU, in training."""
    return (
        part.training
        and torch.is_grad_enabled()
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
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
        or not plain(part, x, part.q, part.k, part.v)
    ):
        return Attention.forward(part, x, mask, cache, memory)
    three = (part.q, part.k, part.v)
    bias = x.new_zeros(3 * x.shape[-1]) if part.q.bias is None else torch.cat([m.bias for m in three])
    real = mask.expand(len(x), 1, 1, x.shape[1]).contiguous() if isinstance(mask, Tensor) else None
    causal = part.causal and mask is None
    weights = [m.weight for m in three]
    read: Tensor = FusedAttention.apply(x, *weights, bias, part.heads, causal, real)  # type: ignore[no-untyped-call]
    return part.out(read)
