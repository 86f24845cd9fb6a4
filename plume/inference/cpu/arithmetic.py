"""The parts of a step that work on one row or one matrix: exponentials, norms, activations, bytes, products."""

# All addresses and strides are in bytes.

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from plume.inference.cpu import lanes, tiles
from plume.inference.cpu import panels as forms
from plume.inference.cpu.byte_products import codes_of, largest_of_group
from plume.inference.cpu.lanes import PAIRED_DOT, SIGNED_DOT, compiled, entry, linked
from plume.inference.cpu.pack import GELU, GELU_TANH
from plume.inference.cpu.panels import GROUP, PANEL, SMALL_GROUP

fixed_rows, scaled_rows = (tiles.panel_times_rows(kind) for kind in (tiles.fixed_tile, tiles.scaled_tile))
int8_rows, level_rows = (tiles.panel_times_rows(kind, GROUP // 4) for kind in (tiles.int8_tile, tiles.level_tile))
int4_rows = tiles.panel_times_rows(tiles.int4_tile, GROUP // 4, tiles.PACKED)
WORTH_UNPACKING = 2 * tiles.TOGETHER[0]  # up to so many rows, reading a panel's bits again costs less
# panels that one row meets together; where nothing is fetched early, one stream is read fastest
ABREAST = 4 if lanes.EARLY else 1
fixed_1, scaled_1, int8_1, int4_1 = (
    tiles.tile(kind(1, ABREAST)) for kind in (tiles.fixed_tile, tiles.scaled_tile, tiles.int8_tile, tiles.int4_tile)
)
bytes_of_panel = compiled(forms.panel_bytes)
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
E0, E1, E2, E3, E4, E5 = (
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
ONE, HALF, HALF_RANGE = np.float32(1), np.float32(0.5), np.float32(2.0**112)
HALF_LARGEST = np.float32(65504)
LOWEST, HIGHEST = np.float32(-88.0), np.float32(88.0)  # the lowest gives exactly 0, so that no product is denormal
TANH_A, TANH_B = np.float32(2 * math.sqrt(2 / math.pi)), np.float32(0.044715)
ROOT_HALF = np.float32(math.sqrt(0.5))
# erf(x) is x times a quotient of polynomials in x squared, fitted to it up to ERF_END within 2e-8; behind it is 1
ERF_END = np.float32(3.9)
P0, P1, P2, P3, P4, P5 = (
    np.float32(c) for c in (1.12837899, 0.191928923, 0.0529653728, 3.83637124e-3, 2.87447794e-4, 2.0505031e-6)
)
Q1, Q2, Q3, Q4, Q5 = (np.float32(c) for c in (0.503424346, 0.114753254, 0.0151081942, 1.18161552e-3, 3.82314538e-5))
# of the noise of a draw
GOLDEN, FIRST, SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
S12, S27, S30, S31, S40 = (np.uint64(n) for n in (12, 27, 30, 31, 40))
UNIT = 2.0**-52
SLACK = np.float32(1.0001)  # more than the rounding of the bound
BIAS, STEPS = np.float32(127), np.float32(2.0**23)


@compiled
def exp(x: Any) -> Any:
    """e to the x within two units of the last place, written so that loops over it become vector code."""
    x = min(max(x, LOWEST), HIGHEST)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    return (p * r * r + r + ONE) * lanes.float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@compiled
def mixed(x: Any) -> Any:
    """64 bits to 64 bits, each output bit depending on all input bits (splitmix64's finaliser)."""
    x = x + GOLDEN
    x = (x ^ (x >> S30)) * FIRST
    x = (x ^ (x >> S27)) * SECOND
    return x ^ (x >> S31)


@compiled
def gumbel(key: Any, token: int) -> float:
    """The noise of one token, as sampler.noise defines it."""
    bits = mixed(key ^ mixed(np.uint64(token)))
    return -math.log(-math.log((np.float64(bits >> S12) + 0.5) * UNIT))


@compiled
def exp_bound(x: Any) -> Any:
    """At least e to the x, at most 6 % more, for few instructions: between powers of two it is a line."""
    steps = min(max(x * LOG2_E + BIAS, np.float32(0)), np.float32(254))
    return lanes.float_of_bits(np.int32(steps * STEPS)) * SLACK


@compiled
def erf(x: Any) -> Any:
    """The error function within 4e-7, written so that loops over it become vector code."""
    x = min(max(x, -ERF_END), ERF_END)
    u = x * x
    above = ((((P5 * u + P4) * u + P3) * u + P2) * u + P1) * u + P0
    below = ((((Q5 * u + Q4) * u + Q3) * u + Q2) * u + Q1) * u + ONE
    return x * above / below


@entry
def activate(x: Any, kind: int) -> None:
    if kind == GELU_TANH:
        for i in range(x.size):
            u = TANH_A * (x[i] + TANH_B * x[i] * x[i] * x[i])
            x[i] /= ONE + exp(-u)  # x (1 + tanh(u / 2)) / 2
    elif kind == GELU:
        for i in range(x.size):
            x[i] = HALF * x[i] * (ONE + erf(x[i] * ROOT_HALF))
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
    total = spread = np.float64(0)
    for i in range(width):
        total += np.float64(x[i])
    mean = np.float32(total / width)
    for i in range(width):
        spread += np.float64((x[i] - mean) * (x[i] - mean))
    scale = np.float32(1 / np.sqrt(spread / width + weights[2 * width]))
    for i in range(width):
        y[i] = (x[i] - mean) * scale * weights[i] + weights[width + i]


@entry
def quantise(source: int, width: int, row: int, depth: int, first: int, last: int) -> None:
    """The groups first..last of one row of floats as bytes, scales and starting sums (see tiles.py)."""
    groups = depth // GROUP
    scales = carray(lanes.floats_at(row + depth), (groups,))
    starts = carray(lanes.ints_at(row + depth + 4 * groups), (groups,))
    small_starts = carray(lanes.ints_at(row + depth + 8 * groups), (2 * groups,))
    for g in range(first, last):
        at, to, filled = source + g * GROUP * 4, row + g * GROUP, min(GROUP, width - g * GROUP)
        if filled == GROUP:
            scale = largest_of_group(at) / np.float32(127)
            inverse = ONE / scale
            low, high = codes_of(at, inverse, to), codes_of(at + SMALL_GROUP * 4, inverse, to + SMALL_GROUP)
        else:
            scale, low, high = quantise_part(at, filled, to)
        scales[g] = scale
        small_starts[2 * g] = np.int32(0) if SIGNED_DOT else np.int32(-128) * low
        small_starts[2 * g + 1] = np.int32(0) if SIGNED_DOT else np.int32(-128) * high
        starts[g] = small_starts[2 * g] + small_starts[2 * g + 1]


@compiled
def quantise_part(source: int, filled: int, out: int) -> Any:
    """The same of a group that is not full: its scale, and the sums of the codes of its halves."""
    x, codes = carray(lanes.floats_at(source), (GROUP,)), carray(lanes.bytes_at(out), (GROUP,))
    largest, low, high = np.float32(1e-30), np.int32(0), np.int32(0)
    for i in range(filled):
        largest = lanes.larger(largest, abs(x[i]))
    if PAIRED_DOT:
        for i in range(filled // 2):
            largest = lanes.larger(largest, abs(x[2 * i] + x[2 * i + 1]))
    scale = largest / np.float32(127)
    inverse = ONE / scale
    for i in range(GROUP):
        codes[i] = 0
    for i in range(filled):
        code = np.int32(np.floor(x[i] * inverse + HALF))
        codes[i] = code
        low, high = (low + code, high) if i < SMALL_GROUP else (low, high + code)
    return scale, low, high


@compiled
def padded(n: int) -> int:
    return (n + GROUP - 1) // GROUP * GROUP


@compiled
def share(rows: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's panels of a matrix; always whole pairs, so that it can also finish whole int8 groups."""
    pairs = padded(rows) // (2 * PANEL)
    return 2 * (pairs * thread // threads), 2 * (pairs * (thread + 1) // threads)


@entry
def gather(kind: int, at: int, width: int, token: int, out: int) -> None:
    """One row out of panels."""
    x, lane = carray(lanes.floats_at(out), (width,)), token % PANEL
    at += token // PANEL * bytes_of_panel(kind, width)
    if kind == forms.FLOAT32:
        for i in range(width):
            x[i] = carray(lanes.floats_at(at + forms.HEADER + i * forms.FULL), (PANEL,))[lane]
    elif kind == forms.FLOAT24:
        scale = carray(lanes.floats_at(at), (PANEL,))[lane]
        for i in range(width):
            column = at + forms.HEADER + i * forms.FIXED
            high = carray(lanes.shorts_at(column), (PANEL,))[lane]
            low = carray(lanes.unsigned_bytes_at(column + 2 * PANEL), (PANEL,))[lane]
            x[i] = np.float32(np.int32(high) * np.int32(256) + np.int32(low)) * scale
    else:
        group, code_bytes = (GROUP, GROUP * PANEL) if kind == forms.INT8 else (SMALL_GROUP, SMALL_GROUP * PANEL // 2)
        for i in range(width):
            begin, j = at + i // group * (2 * PANEL + code_bytes), i % group
            bits = carray(lanes.halves_at(begin), (PANEL,))[lane]
            codes = carray(lanes.unsigned_bytes_at(begin + 2 * PANEL), (code_bytes,))
            if kind == forms.INT8:
                scale = lanes.float_of_bits(np.int32(np.uint32(bits) << np.uint32(16)))
                x[i] = (np.float32(codes[j // 4 * 4 * PANEL + lane * 4 + j % 4]) - np.float32(128)) * scale
            else:
                both = np.int64(codes[j % 16 // 4 * 4 * PANEL + lane * 4 + j % 4])
                x[i] = np.float32(forms.LEVELS[both >> 4 if j >= 16 else both & 15]) * half_float(bits)


@compiled
def half_float(bits: Any) -> Any:
    """A number of half precision from its bits."""
    magnitude = lanes.float_of_bits(np.int32(np.uint32(bits & np.uint16(0x7FFF)) << np.uint32(13))) * HALF_RANGE
    return -magnitude if bits & np.uint16(0x8000) else magnitude


@compiled
def bits_of_half(x: Any) -> Any:
    """The bits of the nearest number of half precision; what is too large for it becomes its largest."""
    magnitude = np.uint32(lanes.bits_of_float(min(abs(x), HALF_LARGEST) / HALF_RANGE))
    rounded = (magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    return np.uint16(rounded | np.uint32(0x8000)) if x < 0 else np.uint16(rounded)


@entry
def multiply(
    kind: int, weights: int, depth: int, panels: int, until: int, values: int, stride: int, rows: int, bias: int,
    out: int, out_stride: int, memory: int,
) -> None:  # fmt: skip
    """Weight panels panels..until times all rows, each panel read from memory once."""
    size = bytes_of_panel(kind, depth)
    p = panels
    while p < until:
        at, to, start = weights + p * size, out + p * PANEL * 4, 0 if bias == 0 else bias + p * PANEL * 4
        if ABREAST > 1 and rows == 1 and p + ABREAST <= until:
            panels_abreast(kind, at, size, depth, values, stride, start, to, out_stride)
            p += ABREAST
        else:
            one_panel(kind, at, depth, values, stride, rows, start, to, out_stride, memory)
            p += 1


multiply_panels = linked(multiply, 12)


@compiled
def panels_abreast(
    kind: int, at: int, size: int, depth: int, values: int, stride: int, start: int, to: int, out_stride: int
) -> None:
    """ABREAST panels times one row."""
    if kind == forms.INT8:
        int8_1(at, size, values, stride, start, to, out_stride, depth // GROUP)
    elif kind == forms.FLOAT32:
        scaled_1(at, size, values, stride, start, to, out_stride, depth)
    elif kind == forms.FLOAT24:
        fixed_1(at, size, values, stride, start, to, out_stride, depth)
    else:
        int4_1(at, size, values, stride, start, to, out_stride, depth // GROUP)


@compiled
def one_panel(
    kind: int, at: int, depth: int, values: int, stride: int, rows: int, start: int, to: int, out_stride: int,
    memory: int,
) -> None:  # fmt: skip
    """One panel times all rows; for many of them it is unpacked into `memory` first."""
    few, size = rows <= WORTH_UNPACKING, bytes_of_panel(kind, depth)
    following = at + size
    if kind == forms.INT8:
        int8_rows(at, values, stride, start, to, out_stride, depth // GROUP, rows, following, size)
    elif kind == forms.FLOAT32:
        scaled_rows(at, values, stride, start, to, out_stride, depth, rows, following, size)
    elif kind == forms.FLOAT24 and few:
        fixed_rows(at, values, stride, start, to, out_stride, depth, rows, following, size)
    elif kind == forms.FLOAT24:
        tiles.unpack(at, depth, memory)
        scaled_rows(memory, values, stride, start, to, out_stride, depth, rows, following, size)
    elif few:
        int4_rows(at, values, stride, start, to, out_stride, depth // GROUP, rows, following, size)
    else:
        tiles.unpack_levels(at, depth // GROUP, memory)
        level_rows(memory, values, stride, start, to, out_stride, depth // GROUP, rows, following, size)
