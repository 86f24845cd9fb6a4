"""Attention over what a sequence has read: keys and values are written to its slot, then all heads look."""

# All addresses and strides are in bytes.

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from plume.generate.cpu import lanes, tiles
from plume.generate.cpu.arithmetic import ONE, exp
from plume.generate.cpu.compiling import compiled
from plume.generate.cpu.layout import LANES, Shape

FEW, MANY = (4 if lanes.WIDE else 2), tiles.TOGETHER[0]  # neighbouring queries that attend together
mix_1, mix_1x4, mix_few, mix_few_2, mix_many, mix_many_2 = (
    tiles.tile(tiles.float_tile(q, p)) for q, p in ((1, 1), (1, 4), (FEW, 1), (FEW, 2), (MANY, 1), (MANY, 2))
)


@compiled
def remember(shape: Shape, layer: int, head: int, slots: Any, positions: Any, rows: int) -> None:
    """Write the new keys (16 positions side by side) and values (16 numbers side by side) of one head."""
    size, capacity = shape.head_width, shape.capacity
    blocks = (size + LANES - 1) // LANES
    for m in range(rows):
        row = shape.qkv + m * shape.qkv_stride + head * size * 4
        new_key = carray(lanes.floats_at(row + shape.width * 4), (size,))
        new_value = carray(lanes.floats_at(row + 2 * shape.width * 4), (size,))
        owner, position = (slots[m] * shape.layers + layer) * shape.heads + head, positions[m]
        keys = carray(lanes.floats_at(shape.keys + owner * capacity * size * 4), (capacity * size,))
        values = carray(
            lanes.floats_at(shape.values + owner * capacity * blocks * LANES * 4), (capacity * blocks * LANES,)
        )
        base = (position // LANES) * size * LANES + position % LANES
        for d in range(size):
            keys[base + d * LANES] = new_key[d]
            values[((d // LANES) * capacity + position) * LANES + d % LANES] = new_value[d]


@compiled
def clear(address: int, count: int) -> None:
    x = carray(lanes.floats_at(address), (count,))
    for i in range(count):
        x[i] = np.float32(0)


@compiled
def soften(scores: int, before: int, count: int, after: int, scale: Any) -> Any:
    """So many scores become their softmax times the number that is returned; those around them, which tiles have
    computed too, become zeros."""
    clear(scores, before)
    clear(scores + (before + count) * 4, after)
    x = carray(lanes.floats_at(scores + before * 4), (count,))
    largest, total = np.float32(-3e38), np.float32(0)
    for i in range(count):
        largest = lanes.larger(largest, x[i])
    for i in range(count):
        x[i] = exp((x[i] - largest) * scale)
        total += x[i]
    return total


@compiled
def mix(
    queries: int, at: int, block_stride: int, blocks: int, values: int, stride: int, out: int, out_stride: int,
    depth: int,
) -> None:  # fmt: skip
    """So many queries times blocks of 16 keys, or their weights times blocks of 16 columns of the values."""
    b = 0
    while b < blocks:
        a, o, taken = at + b * block_stride, out + b * LANES * 4, 1
        if queries == 1 and b + 4 <= blocks:
            mix_1x4(a, block_stride, values, stride, 0, o, out_stride, depth)
            taken = 4
        elif queries == 1:
            mix_1(a, 0, values, stride, 0, o, out_stride, depth)
        elif queries == MANY and b + 2 <= blocks:
            mix_many_2(a, block_stride, values, stride, 0, o, out_stride, depth)
            taken = 2
        elif queries == MANY:
            mix_many(a, 0, values, stride, 0, o, out_stride, depth)
        elif b + 2 <= blocks:
            mix_few_2(a, block_stride, values, stride, 0, o, out_stride, depth)
            taken = 2
        else:
            mix_few(a, 0, values, stride, 0, o, out_stride, depth)
        b += taken


@compiled
def attend(shape: Shape, layer: int, head: int, slot: int, position: int, m: int, queries: int, memory: int) -> None:
    """Attention of one head for 1, FEW or MANY neighbouring rows of one sequence, the first at this position."""
    size, capacity = shape.head_width, shape.capacity
    blocks = (size + LANES - 1) // LANES
    owner = (slot * shape.layers + layer) * shape.heads + head
    keys = shape.keys + owner * capacity * size * 4
    values = shape.values + owner * capacity * blocks * LANES * 4
    band = shape.band if layer % 2 else 0
    low_block = max(0, position - band + 1) // LANES if band else 0
    until = position + queries
    first, key_blocks = low_block * LANES, (until + LANES - 1) // LANES - low_block
    query = shape.qkv + m * shape.qkv_stride + head * size * 4
    scores, out = memory, memory + MANY * shape.scores_stride
    at, block = keys + low_block * size * LANES * 4, size * LANES * 4
    mix(queries, at, block, key_blocks, query, shape.qkv_stride, scores, shape.scores_stride, size)
    scale = ONE / np.sqrt(np.float32(size))
    totals = carray(lanes.floats_at(out + MANY * blocks * LANES * 4), (MANY,))
    for q in range(queries):
        low, high = max(0, position + q - band + 1) if band else 0, position + q + 1
        totals[q] = soften(scores + q * shape.scores_stride, low - first, high - low, until - high, scale)
    at, block = values + first * LANES * 4, capacity * LANES * 4
    mix(queries, at, block, blocks, scores, shape.scores_stride, out, blocks * LANES * 4, until - first)
    for q in range(queries):
        source = carray(lanes.floats_at(out + q * blocks * LANES * 4), (size,))
        target = carray(lanes.floats_at(shape.mixed + (m + q) * shape.width_stride + head * size * 4), (size,))
        share = ONE / totals[q]
        for d in range(size):
            target[d] = source[d] * share


@compiled
def neighbours(slots: Any, positions: Any, m: int, rows: int) -> int:
    """How many rows from this one on are one sequence's next tokens, told as MANY, FEW or 1."""
    n = 1
    while n < MANY and m + n < rows and slots[m + n] == slots[m] and positions[m + n] == positions[m] + n:
        n += 1
    return MANY if n == MANY else FEW if n >= FEW else 1


@compiled
def attention(shape: Shape, layer: int, thread: int, slots: Any, positions: Any, rows: int, memory: int) -> None:
    """This thread's heads, for all rows."""
    for head in range(shape.heads * thread // shape.threads, shape.heads * (thread + 1) // shape.threads):
        remember(shape, layer, head, slots, positions, rows)
        m = 0
        while m < rows:
            queries = neighbours(slots, positions, m, rows)
            attend(shape, layer, head, slots[m], positions[m], m, queries, memory)
            m += queries
