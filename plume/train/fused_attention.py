"""Attention of a training step on the CPU: one job per row and head, whose matrices stay in the core's cache."""

# B batch, T tokens, H heads, K head width; K and T padded to whole vectors are P and S; sizes of memory in floats

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from plume.inference.cpu.arithmetic import ONE, exp
from plume.inference.cpu.lanes import (
    FLOATS,
    atomic_add,
    bytes_at,
    floats_at,
    intrinsic,
    larger,
    load,
    longs_at,
    multiply_add,
    pointer_to,
    splat,
    times,
)
from plume.inference.cpu.panels import LANES
from plume.train.threaded_code import ARGUMENTS, ThreadedCode, inline, row_at

BLOCK = 64  # queries whose weights exist together
TOGETHER = 4  # rows of a tile: with one vector of columns its sums fill the registers
THREADS = ARGUMENTS - 1  # the word that counts the threads that have taken their working memory
ZERO, HIDDEN = np.float32(0), np.float32(-1e30)


def tile(rows: int) -> Any:
    """out[r, :16] (+)= the sum over `count` rows of x of factor[r, i] * x[i, :16]; all strides in bytes."""

    @intrinsic
    def tiled(
        typing: Any, out: Any, out_row: Any, factor: Any, factor_row: Any, factor_step: Any, x: Any, x_row: Any,
        count: Any, add: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, out_row, factor, factor_row, factor_step, x, x_row, count, add = args
            kept = builder.icmp_signed("!=", add, ir.Constant(add.type, 0))
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            places = [builder.mul(out_row, ir.Constant(out_row.type, r)) for r in range(rows)]
            sums = [builder.select(kept, load(builder, out, place, FLOATS), zero) for place in places]
            steps = [builder.mul(factor_row, ir.Constant(out_row.type, r)) for r in range(rows)]

            def body(index: Any, sums: list[Any]) -> list[Any]:
                vector = load(builder, x, builder.mul(index, x_row), FLOATS)
                at = builder.add(factor, builder.mul(index, factor_step))
                factors = [splat(builder, load(builder, at, step, ir.FloatType())) for step in steps]
                return [multiply_add(builder, f, vector, total) for f, total in zip(factors, sums, strict=True)]

            for place, total in zip(places, times(builder, count, sums, body), strict=True):
                builder.store(total, pointer_to(builder, out, place, FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tiled


tile_rows, tile_row = tile(TOGETHER), tile(1)


@inline
def product(
    out: int, out_row: int, rows: int, columns: int, factor: int, factor_row: int, factor_step: int, x: int, x_row: int,
    count: int, add: int,
) -> None:  # fmt: skip
    """out (rows, columns) (+)= factor (rows, count) @ x (count, columns), columns up to whole vectors."""
    for column in range(0, 4 * columns, 4 * LANES):
        row = 0
        while row + TOGETHER <= rows:
            place, given = out + row * out_row + column, factor + row * factor_row
            tile_rows(place, out_row, given, factor_row, factor_step, x + column, x_row, count, add)
            row += TOGETHER
        while row < rows:
            place, given = out + row * out_row + column, factor + row * factor_row
            tile_row(place, out_row, given, factor_row, factor_step, x + column, x_row, count, add)
            row += 1


@inline
def padded(size: int) -> int:
    return (size + LANES - 1) // LANES * LANES


@inline
def memory(tokens: int, size: int) -> int:
    """Numbers that a thread works with: six matrices (T, P), two (P, S) and two of a block of queries."""
    wide, row = (size + LANES - 1) // LANES * LANES, (tokens + LANES - 1) // LANES * LANES
    return 6 * tokens * wide + 2 * row * wide + 2 * BLOCK * row


@inline
def gather(to: int, source: int, stride: int, bias: int, tokens: int, size: int, scale: Any) -> None:
    """(T, K) strided rows, plus a bias unless that is 0, to (T, P)."""
    wide = padded(size)
    for t in range(tokens):
        x, y = row_at(source + t * stride, 0, size), row_at(to, t, wide)
        y[size:] = ZERO
        if bias:
            shift = row_at(bias, 0, size)
            for i in range(x.size):
                y[i] = (x[i] + shift[i]) * scale
        else:
            for i in range(x.size):
                y[i] = x[i] * scale


@inline
def scatter(to: int, stride: int, source: int, tokens: int, size: int, scale: Any) -> None:
    wide = padded(size)
    for t in range(tokens):
        x, y = row_at(source, t, wide), row_at(to + t * stride, 0, size)
        for i in range(y.size):
            y[i] = x[i] * scale


@inline
def transpose(to: int, source: int, tokens: int, wide: int) -> None:
    """(T, P) to (P, S)."""
    row = padded(tokens)
    x, y = carray(floats_at(source), (tokens, wide)), carray(floats_at(to), (wide, row))
    for i in range(wide):
        for t in range(tokens):
            y[i, t] = x[t, i]
        y[i, tokens:] = ZERO


@inline
def hide(x: Any, seen: int, known: int) -> None:
    """Scores of tokens behind the last one that is seen, and of padding, so low that their weight is 0."""
    x[seen:] = HIDDEN
    if known:
        real = carray(bytes_at(known), (seen,))
        for i in range(seen):
            x[i] = x[i] if real[i] else HIDDEN


@inline
def scores(s: int, q: int, keys: int, first: int, last: int, tokens: int, wide: int, causal: int, known: int) -> int:
    """Of the queries first to last, (last - first, S); returns how many columns they have."""
    row = padded(tokens)
    columns = padded(last) if causal else row
    product(s, 4 * row, last - first, columns, q + 4 * first * wide, 4 * wide, 4, keys, 4 * row, wide, 0)
    for t in range(first, last):
        hide(row_at(s, t - first, row)[:columns], t + 1 if causal else tokens, known)
    return columns


@inline
def softmax_row(x: Any) -> Any:
    """Scores to weights, in place; returns the logarithm of the sum of their exponentials."""
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
    return top + np.log(total)


@ThreadedCode
def attend_job(at: int) -> None:
    """(B, T, 3, H, K) and bias (3, H, K) to what heads read, (B, T, H, K), and log-sums of scores, (B, H, T)."""
    given = carray(longs_at(at), (ARGUMENTS,))
    tokens, heads, size, causal, joined, bias = given[2], given[3], given[4], given[5], given[6], given[7]
    out, sums, known = given[8], given[9], given[10]
    wide, row, part = padded(size), padded(tokens), 4 * heads * size
    q = given[11] + atomic_add(at + 8 * THREADS, 1) * 4 * memory(tokens, size)
    v, keys, s = q + 4 * tokens * wide, q + 8 * tokens * wide, q + 4 * (2 * tokens + row) * wide
    while True:
        number = atomic_add(at, 1)
        if number >= given[1]:
            return
        b, shift = number // heads, 4 * (number % heads) * size
        source, real = joined + b * tokens * 3 * part + shift, known + b * tokens if known else 0
        gather(q, source + part, 3 * part, bias + part + shift, tokens, size, ONE)
        transpose(keys, q, tokens, wide)
        gather(q, source, 3 * part, bias + shift, tokens, size, ONE / np.sqrt(np.float32(size)))
        gather(v, source + 2 * part, 3 * part, bias + 2 * part + shift, tokens, size, ONE)
        for first in range(0, tokens, BLOCK):
            last = min(tokens, first + BLOCK)
            columns = scores(s, q, keys, first, last, tokens, wide, causal, real)
            for t in range(first, last):
                row_at(sums, number * tokens + t, 1)[0] = softmax_row(row_at(s, t - first, row)[:columns])
            seen = last if causal else tokens
            product(q + 4 * first * wide, 4 * wide, last - first, wide, s, 4 * row, 4, v, 4 * wide, seen, 0)
        scatter(out + b * tokens * part + shift, part, q, tokens, size, ONE)


@inline
def slope_rows(s: int, gradient: int, sums: int, first: int, last: int, columns: int, row: int) -> None:
    """Scores to weights, and the gradient of the weights to that of the scores, both in place."""
    for t in range(first, last):
        p, g, shift = (
            row_at(s, t - first, row)[:columns],
            row_at(gradient, t - first, row)[:columns],
            row_at(sums, t, 1)[0],
        )
        mean = ZERO
        for i in range(p.size):
            p[i] = exp(p[i] - shift)
            mean += p[i] * g[i]
        for i in range(p.size):
            g[i] = p[i] * (g[i] - mean)


@ThreadedCode
def attend_back_job(at: int) -> None:
    """The gradient of what heads read to that of (B, T, 3, H, K); weights are found anew from the log-sums."""
    given = carray(longs_at(at), (ARGUMENTS,))
    tokens, heads, size, causal, joined, bias = given[2], given[3], given[4], given[5], given[6], given[7]
    upstream, sums, known, to = given[8], given[9], given[10], given[12]
    wide, row, part, scale = padded(size), padded(tokens), 4 * heads * size, ONE / np.sqrt(np.float32(size))
    q = given[11] + atomic_add(at + 8 * THREADS, 1) * 4 * memory(tokens, size)
    one, across = 4 * tokens * wide, 4 * row * wide
    k, read, dq, dk, dv = q + one, q + 2 * one, q + 3 * one, q + 4 * one, q + 5 * one
    keys, values, s, g = (
        q + 6 * one,
        q + 6 * one + across,
        q + 6 * one + 2 * across,
        q + 6 * one + 2 * across + 4 * BLOCK * row,
    )
    while True:
        number = atomic_add(at, 1)
        if number >= given[1]:
            return
        b, shift = number // heads, 4 * (number % heads) * size
        source, real = joined + b * tokens * 3 * part + shift, known + b * tokens if known else 0
        gather(q, source + 2 * part, 3 * part, bias + 2 * part + shift, tokens, size, ONE)
        transpose(values, q, tokens, wide)
        gather(k, source + part, 3 * part, bias + part + shift, tokens, size, ONE)
        transpose(keys, k, tokens, wide)
        gather(q, source, 3 * part, bias + shift, tokens, size, scale)
        gather(read, upstream + b * tokens * part + shift, part, 0, tokens, size, ONE)
        for first in range(0, tokens, BLOCK):
            last = min(tokens, first + BLOCK)
            rows, begin, seen = last - first, 4 * first * wide, last if causal else tokens
            columns = scores(s, q, keys, first, last, tokens, wide, causal, real)
            product(g, 4 * row, rows, columns, read + begin, 4 * wide, 4, values, 4 * row, wide, 0)
            slope_rows(s, g, sums + 4 * number * tokens, first, last, columns, row)
            product(dq + begin, 4 * wide, rows, wide, g, 4 * row, 4, k, 4 * wide, seen, 0)
            before = first if causal else tokens * min(first, 1)  # rows of dk and dv that earlier queries have added to
            product(dk, 4 * wide, before, wide, g, 4, 4 * row, q + begin, 4 * wide, rows, 1)
            product(dv, 4 * wide, before, wide, s, 4, 4 * row, read + begin, 4 * wide, rows, 1)
            new, skip = seen - before, before * 4
            product(dk + skip * wide, 4 * wide, new, wide, g + skip, 4, 4 * row, q + begin, 4 * wide, rows, 0)
            product(dv + skip * wide, 4 * wide, new, wide, s + skip, 4, 4 * row, read + begin, 4 * wide, rows, 0)
        target = to + b * tokens * 3 * part + shift
        scatter(target, 3 * part, dq, tokens, size, scale)
        scatter(target + part, 3 * part, dk, tokens, size, ONE)
        scatter(target + 2 * part, 3 * part, dv, tokens, size, ONE)


class FusedAttention(torch.autograd.Function):
    """What the heads read of x, before the output projection: q, k and v as one product, no weights kept.

    The matrix of the product is joined again in the backward: kept, it would be a quarter of all weights on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor, heads: int, causal: bool, real: Any
    ) -> Tensor:
        matrix = torch.cat([wq, wk, wv])  # (3 D, D)
        batch, tokens, width = x.shape
        flat = x.reshape(-1, width)
        joined, read = flat @ matrix.T, torch.empty_like(x)  # (N, 3 D), (B, T, D)
        sums, scratch = x.new_empty(batch, heads, tokens), working_memory(tokens, width // heads)
        known = 0 if real is None else real
        ctx.numbers = (tokens, heads, width // heads, int(causal))
        attend_job(batch * heads, *ctx.numbers, joined, bias, read, sums, known, scratch)
        ctx.real = real
        ctx.save_for_backward(flat, joined, sums, bias, wq, wk, wv)
        return read

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        flat, joined, sums, bias, *matrices = ctx.saved_tensors
        matrix, gradient = torch.cat(matrices), torch.empty_like(joined)
        tokens, heads, size, _ = ctx.numbers
        known, scratch = 0 if ctx.real is None else ctx.real, working_memory(tokens, size)
        read = upstream[0].contiguous()
        attend_back_job(len(read) * heads, *ctx.numbers, joined, bias, read, sums, known, scratch, gradient)
        before = (gradient @ matrix).view(read.shape)
        return before, *(gradient.T @ flat).chunk(3), gradient.sum(dim=0), None, None, None


def working_memory(tokens: int, size: int) -> Tensor:
    return torch.empty(torch.get_num_threads(), memory.py_func(tokens, size))
