"""The parts of a step that work on one row or one matrix: exponentials, norms, activations, bytes, products."""

# All addresses and strides are in bytes.

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from plume.generate.cpu import lanes, tiles
from plume.generate.cpu.compiling import compiled
from plume.generate.cpu.lanes import SIGNED_DOT
from plume.generate.cpu.layout import FIXED, GELU, GELU_TANH, GROUP, HEADER, PANEL

fixed_rows, scaled_rows, int8_rows = (
    tiles.panel_times_rows(kind) for kind in (tiles.fixed_tile, tiles.scaled_tile, tiles.int8_tile)
)
WORTH_UNPACKING = 2 * tiles.TOGETHER[0]  # up to so many rows, reading a panel's bits again costs less
fixed_1x4, int8_1x4 = tiles.tile(tiles.fixed_tile(1, 4)), tiles.tile(tiles.int8_tile(1, 4))
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
E0, E1, E2, E3, E4, E5 = (
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
ONE, HALF = np.float32(1), np.float32(0.5)
LOWEST, HIGHEST = np.float32(-88.0), np.float32(88.0)  # the lowest gives exactly 0, so that no product is denormal
TANH_A, TANH_B = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
ROOT_HALF = np.float32(math.sqrt(0.5))


@compiled
def exp(x: Any) -> Any:
    """e to the x within two units of the last place, written so that loops over it become vector code."""
    x = min(max(x, LOWEST), HIGHEST)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    return (p * r * r + r + ONE) * lanes.float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@compiled
def activate(x: Any, kind: int) -> None:
    if kind == GELU_TANH:
        for i in range(x.size):
            u = TANH_A * (x[i] + TANH_B * x[i] * x[i] * x[i])
            x[i] = x[i] - x[i] / (exp(u) + ONE)  # x (1 + tanh(u / 2)) / 2
    elif kind == GELU:
        for i in range(x.size):
            x[i] = HALF * x[i] * (ONE + np.float32(math.erf(x[i] * ROOT_HALF)))
    else:
        for i in range(x.size):
            x[i] = max(x[i], np.float32(0))


@compiled
def normalise(source: int, out: int, width: int, norm: int) -> None:
    """Layer norm of one row; `norm` is the address of gain, shift and epsilon, 0 for a plain copy."""
    x, y = carray(lanes.floats_at(source), (width,)), carray(lanes.floats_at(out), (width,))
    if norm == 0:
        for i in range(width):
            y[i] = x[i]
        return
    weights = carray(lanes.floats_at(norm), (2 * width + 1,))
    total = np.float32(0)
    for i in range(width):
        total += x[i]
    mean = total / np.float32(width)
    spread = np.float32(0)
    for i in range(width):
        spread += (x[i] - mean) * (x[i] - mean)
    scale = ONE / np.sqrt(spread / np.float32(width) + weights[2 * width])
    for i in range(width):
        y[i] = (x[i] - mean) * scale * weights[i] + weights[width + i]


@compiled
def quantise(source: int, width: int, row: int, depth: int, first: int, last: int) -> None:
    """The groups first..last of one row of floats as bytes, scales and starting sums (see tiles.int8_tile)."""
    groups = depth // GROUP
    scales = carray(lanes.floats_at(row + depth), (groups,))
    starts = carray(lanes.ints_at(row + depth + 4 * groups), (groups,))
    for g in range(first, last):
        x, codes = (
            carray(lanes.floats_at(source + g * GROUP * 4), (GROUP,)),
            carray(lanes.bytes_at(row + g * GROUP), (GROUP,)),
        )
        filled = min(GROUP, width - g * GROUP)
        largest = np.float32(1e-30)
        for i in range(filled):
            largest = lanes.larger(largest, abs(x[i]))
        scale = largest / np.float32(127)
        inverse = ONE / scale
        total = np.int32(0)
        for i in range(filled):
            code = np.int32(np.floor(x[i] * inverse + HALF))
            codes[i] = code
            total += code
        for i in range(filled, GROUP):
            codes[i] = 0
        scales[g] = scale
        starts[g] = np.int32(0) if SIGNED_DOT else np.int32(-128) * total


@compiled
def padded(n: int) -> int:
    return (n + GROUP - 1) // GROUP * GROUP


@compiled
def share(rows: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's panels of a matrix; always whole pairs, so that it can also finish whole int8 groups."""
    pairs = padded(rows) // (2 * PANEL)
    return 2 * (pairs * thread // threads), 2 * (pairs * (thread + 1) // threads)


@compiled
def multiply(
    int8: int, weights: int, depth: int, panels: int, until: int, values: int, stride: int, rows: int, bias: int,
    out: int, out_stride: int, memory: int,
) -> None:  # fmt: skip
    """Weight panels panels..until times all rows, each panel read from memory once."""
    size = depth // GROUP * (2 * PANEL + GROUP * PANEL) if int8 else HEADER + depth * FIXED
    p = panels
    while p < until:
        at, to, start = weights + p * size, out + p * PANEL * 4, 0 if bias == 0 else bias + p * PANEL * 4
        if rows == 1 and p + 4 <= until:
            if int8:
                int8_1x4(at, size, values, stride, start, to, out_stride, depth // GROUP)
            else:
                fixed_1x4(at, size, values, stride, start, to, out_stride, depth)
            p += 4
            continue
        if int8:
            int8_rows(at, values, stride, start, to, out_stride, depth // GROUP, rows)
        elif rows <= WORTH_UNPACKING:
            fixed_rows(at, values, stride, start, to, out_stride, depth, rows)
        else:
            tiles.unpack(at, depth, memory)
            scaled_rows(memory, values, stride, start, to, out_stride, depth, rows)
        p += 1
