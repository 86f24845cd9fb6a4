"""Attention of a training step on the CPU: one job per row and head, whose matrices stay in the core's cache."""

# B batch, T tokens, H heads, K head width; K and T padded to whole vectors are P and S; sizes of memory in floats

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from plume.inference.cpu.arithmetic import ONE, exp
from plume.inference.cpu.lanes import (
    FLOATS,
    WIDE,
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
    whole,
)
from plume.inference.cpu.panels import LANES
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

BLOCK = 64  # queries whose weights exist together
# rows and vectors of columns of a tile, whose sums fill the registers
TOGETHER, VECTORS = (8, 2) if WIDE else (4, 1)
ZERO, HIDDEN = np.float32(0), np.float32(-1e30)


def tile(rows: int, vectors: int) -> Any:
    """out[r, :16 * vectors] (+)= the sum over `count` rows of x of factor[r, i] * x[i, ...]; all strides in bytes."""

    @intrinsic
    def tiled(
        typing: Any, out: Any, out_row: Any, factor: Any, factor_row: Any, factor_step: Any, x: Any, x_row: Any,
        count: Any, add: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            out, out_row, factor, factor_row, factor_step, x, x_row, count, add = args
            kept = builder.icmp_signed("!=", add, ir.Constant(add.type, 0))
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            places = [
                builder.add(builder.mul(out_row, whole(r)), whole(4 * LANES * v))
                for r in range(rows)
                for v in range(vectors)
            ]
            sums = [builder.select(kept, load(builder, out, place, FLOATS), zero) for place in places]
            steps = [builder.mul(factor_row, whole(r)) for r in range(rows)]

            def body(index: Any, sums: list[Any]) -> list[Any]:
                start = builder.mul(index, x_row)
                loaded = [load(builder, x, builder.add(start, whole(4 * LANES * v)), FLOATS) for v in range(vectors)]
                at = builder.add(factor, builder.mul(index, factor_step))
                factors = [splat(builder, load(builder, at, step, ir.FloatType())) for step in steps]
                pairs = [(f, vector) for f in factors for vector in loaded]
                return [multiply_add(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]

            for place, total in zip(places, times(builder, count, sums, body), strict=True):
                builder.store(total, pointer_to(builder, out, place, FLOATS), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tiled


tile_large, tile_rows, tile_row = tile(TOGETHER, VECTORS), tile(TOGETHER, 1), tile(1, 1)


@inline
def product(
    out: int, out_row: int, rows: int, columns: int, factor: int, factor_row: int, factor_step: int, x: int, x_row: int,
    count: int, add: int,
) -> None:  # fmt: skip
    """out (rows, columns) (+)= factor (rows, count) @ x (count, columns), columns up to whole vectors."""
    column, end = 0, 4 * columns
    while column < end:
        wide = column + 4 * LANES * VECTORS <= end
        row = 0
        while row + TOGETHER <= rows:
            place, given = out + row * out_row + column, factor + row * factor_row
            if wide:
                tile_large(place, out_row, given, factor_row, factor_step, x + column, x_row, count, add)
            else:
                tile_rows(place, out_row, given, factor_row, factor_step, x + column, x_row, count, add)
            row += TOGETHER
        while row < rows:
            place, given = out + row * out_row + column, factor + row * factor_row
            for further in range(0, 4 * LANES * VECTORS if wide else 4 * LANES, 4 * LANES):
                tile_row(
                    place + further, out_row, given, factor_row, factor_step, x + column + further, x_row, count, add
                )
            row += 1
        column += 4 * LANES * VECTORS if wide else 4 * LANES


@inline
def padded(size: int) -> int:
    return (size + LANES - 1) // LANES * LANES


@inline
def memory(tokens: int, size: int) -> int:
    """Numbers that a thread works with: six matrices (T, P), two (P, S) and two of a block of queries."""
    wide, row = (size + LANES - 1) // LANES * LANES, (tokens + LANES - 1) // LANES * LANES
    return 6 * tokens * wide + 2 * row * wide + 2 * BLOCK * row


@inline
def gather(
    to: int, source: int, first: int, stride: int, bias: int, tokens: int, size: int, scale: Any, rough: int
) -> None:
    """(T, K) rows, a stride of numbers apart from the first, plus a bias unless that is 0, to (T, P)."""
    wide = padded(size)
    for t in range(tokens):
        y = row_at(to, t, wide)
        read_numbers(y[:size], source, first + t * stride, rough)
        y[size:] = ZERO
        if bias:
            shift = row_at(bias, 0, size)
            for i in range(size):
                y[i] += shift[i]
        for i in range(size):
            y[i] *= scale


@inline
def scatter(to: int, first: int, stride: int, source: int, tokens: int, size: int, scale: Any, rough: int) -> None:
    wide = padded(size)
    for t in range(tokens):
        x = row_at(source, t, wide)[:size]
        for i in range(size):
            x[i] *= scale
        write_numbers(to, first + t * stride, x, rough)


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
    tokens, heads, size, causal, rough, joined, bias = given[2:9]
    out, sums, known = given[9], given[10], given[11]
    wide, row, part = padded(size), padded(tokens), heads * size
    q = thread_memory(at, given[12], memory(tokens, size))
    v, keys, s = q + 4 * tokens * wide, q + 8 * tokens * wide, q + 4 * (2 * tokens + row) * wide
    while True:
        number = atomic_add(at, 1)
        if number >= given[1]:
            return
        b, shift = number // heads, number % heads * size
        first, real, begin = b * tokens * 3 * part + shift, known + b * tokens if known else 0, bias + 4 * shift
        gather(q, joined, first + part, 3 * part, begin + 4 * part, tokens, size, ONE, rough)
        transpose(keys, q, tokens, wide)
        gather(q, joined, first, 3 * part, begin, tokens, size, ONE / np.sqrt(np.float32(size)), rough)
        gather(v, joined, first + 2 * part, 3 * part, begin + 8 * part, tokens, size, ONE, rough)
        for first in range(0, tokens, BLOCK):
            last = min(tokens, first + BLOCK)
            columns = scores(s, q, keys, first, last, tokens, wide, causal, real)
            for t in range(first, last):
                row_at(sums, number * tokens + t, 1)[0] = softmax_row(row_at(s, t - first, row)[:columns])
            seen = last if causal else tokens
            product(q + 4 * first * wide, 4 * wide, last - first, wide, s, 4 * row, 4, v, 4 * wide, seen, 0)
        scatter(out, b * tokens * part + shift, part, q, tokens, size, ONE, rough)


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
    tokens, heads, size, causal, rough, joined, bias = given[2:9]
    upstream, sums, known, to = given[9], given[10], given[11], given[13]
    wide, row, part, scale = padded(size), padded(tokens), heads * size, ONE / np.sqrt(np.float32(size))
    q = thread_memory(at, given[12], memory(tokens, size))
    one, across = 4 * tokens * wide, 4 * row * wide
    k, read, dq, dk, dv = q + one, q + 2 * one, q + 3 * one, q + 4 * one, q + 5 * one
    keys, values, s = q + 6 * one, q + 6 * one + across, q + 6 * one + 2 * across
    g = s + 4 * BLOCK * row
    while True:
        number = atomic_add(at, 1)
        if number >= given[1]:
            return
        b, shift = number // heads, number % heads * size
        source, real, begin = b * tokens * 3 * part + shift, known + b * tokens if known else 0, bias + 4 * shift
        gather(q, joined, source + 2 * part, 3 * part, begin + 8 * part, tokens, size, ONE, rough)
        transpose(values, q, tokens, wide)
        gather(k, joined, source + part, 3 * part, begin + 4 * part, tokens, size, ONE, rough)
        transpose(keys, k, tokens, wide)
        gather(q, joined, source, 3 * part, begin, tokens, size, scale, rough)
        gather(read, upstream, b * tokens * part + shift, part, 0, tokens, size, ONE, rough)
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
        scatter(to, source, 3 * part, dq, tokens, size, scale, rough)
        scatter(to, source + part, 3 * part, dk, tokens, size, ONE, rough)
        scatter(to, source + 2 * part, 3 * part, dv, tokens, size, ONE, rough)


def product_dtype() -> torch.dtype:
    """What matrix products are in; sums, and what jobs compute between two products, are in float32."""
    return torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32


class FusedAttention(torch.autograd.Function):
    """Attention with its projections: q, k and v as one product, no weights of attention kept.

    The matrix of the product is joined again in the backward: kept, it would be a quarter of all weights on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor, out: Tensor, out_bias: Tensor | None,
        heads: int, causal: bool, real: Tensor | None,
    ) -> Tensor:  # fmt: skip
        matrix = torch.cat([wq, wk, wv])  # (3 D, D)
        batch, tokens, width = x.shape
        flat = x.reshape(-1, width).to(product_dtype())
        joined = flat @ matrix.T.to(flat.dtype)  # (N, 3 D)
        read, sums = torch.empty_like(flat), x.new_empty(batch, heads, tokens)
        size = width // heads
        ctx.numbers = (tokens, heads, size, int(causal), int(flat.dtype is torch.bfloat16))
        known = 0 if real is None else real
        scratch = memory_of_threads(memory.py_func(tokens, size))
        attend_job(batch * heads, *ctx.numbers, joined, bias, read, sums, known, scratch)
        ctx.real, ctx.out_bias = real, out_bias is not None
        ctx.save_for_backward(flat, joined, sums, bias, read, out, wq, wk, wv)
        shift = None if out_bias is None else out_bias.to(flat.dtype)
        return F.linear(read, out.to(flat.dtype), shift).float().view(x.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        flat, joined, sums, bias, read, out, *matrices = ctx.saved_tensors
        matrix, gradient = torch.cat(matrices), torch.empty_like(joined)
        whole = upstream[0].reshape(flat.shape)  # (N, D)
        outer = whole.to(flat.dtype)
        inner = outer @ out.to(flat.dtype)  # (N, D)
        tokens, heads, size = ctx.numbers[:3]
        known, scratch = 0 if ctx.real is None else ctx.real, memory_of_threads(memory.py_func(tokens, size))
        attend_back_job(sums.shape[0] * heads, *ctx.numbers, joined, bias, inner, sums, known, scratch, gradient)
        return (
            (gradient @ matrix.to(flat.dtype)).float().view(upstream[0].shape),
            *(gradient.T @ flat).float().chunk(3),
            gradient.float().sum(dim=0),
            (outer.T @ read).float(),
            whole.sum(dim=0) if ctx.out_bias else None,
            *(None,) * 3,
        )
