"""One step of a GPT on the CPU, compiled by numba: every thread runs `forward` on its share, meeting at barriers."""

# M rows in this step (tokens of any sequences), D model width, K head width. All addresses and strides are in bytes.

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import carray, njit, types

from plume.generate import lanes
from plume.generate.lanes import SIGNED_DOT
from plume.generate.layout import (
    ATTN_NORM,
    DOWN,
    DOWN_BIAS,
    FINAL_NORM,
    FIXED,
    GELU,
    GELU_TANH,
    GROUP,
    HEAD,
    HEADER,
    JOB_BARRIER,
    JOB_NUMBER,
    JOB_ROWS,
    JOB_WANTED,
    LANES,
    MLP_NORM,
    OUT,
    OUT_BIAS,
    PANEL,
    PER_LAYER,
    POSITIONS,
    QKV,
    QKV_BIAS,
    UP,
    UP_BIAS,
    Shape,
)  # fmt: skip

Code = TypeVar("Code", bound=Callable[..., Any])


def compiled(function: Code) -> Code:
    """Machine code, kept on disk. Sums may be reordered for vectors, but infinities and NaNs keep their meaning."""
    fastmath = {"contract", "reassoc", "nsz", "arcp"}
    code: Code = njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)(function)
    return code


fixed_rows, scaled_rows, int8_rows = (
    lanes.panel_times_rows(kind) for kind in (lanes.fixed_tile, lanes.scaled_tile, lanes.int8_tile)
)
fixed_1x4, int8_1x4 = lanes.tile(lanes.fixed_tile(1, 4)), lanes.tile(lanes.int8_tile(1, 4))
FEW, MANY = 4, lanes.TOGETHER[0]  # neighbouring queries that attend together
mix_1, mix_1x4, mix_few, mix_few_2, mix_many, mix_many_2 = (
    lanes.tile(lanes.float_tile(q, p)) for q, p in ((1, 1), (1, 4), (FEW, 1), (FEW, 2), (MANY, 1), (MANY, 2))
)

if sys.platform == "win32":

    @compiled
    def give_way() -> None:
        lanes.pause()
else:
    give_way = types.ExternalFunction("sched_yield", types.int32())


@compiled
def wait_for(address: int, target: int) -> None:
    """Wait until a shared counter has come this far; after a while let others use the core."""
    spins = 0
    while lanes.atomic_load(address) < target:
        lanes.pause()
        spins += 1
        if spins > 4000:
            give_way()


@compiled
def meet(job: int, threads: int, meetings: int) -> int:
    """The barrier: nobody goes on before all have come. Counts only ever grow, so nothing needs resetting."""
    meetings += 1
    lanes.atomic_add(job + 8 * JOB_BARRIER, 1)
    wait_for(job + 8 * JOB_BARRIER, meetings * threads)
    return meetings


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
    """The groups first..last of one row of floats as bytes, scales and starting sums (see lanes.int8_tile)."""
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
        elif rows <= 2 * MANY:  # then reading the numbers anew for each tile costs less than writing them down
            fixed_rows(at, values, stride, start, to, out_stride, depth, rows)
        else:
            lanes.unpack(at, depth, memory)
            scaled_rows(memory, values, stride, start, to, out_stride, depth, rows)
        p += 1


@compiled
def padded(n: int) -> int:
    return (n + GROUP - 1) // GROUP * GROUP


@compiled
def share(rows: int, thread: int, threads: int) -> tuple[int, int]:
    """This thread's panels of a matrix; always whole pairs, so that it can also finish whole int8 groups."""
    pairs = padded(rows) // (2 * PANEL)
    return 2 * (pairs * thread // threads), 2 * (pairs * (thread + 1) // threads)


@compiled
def embed(shape: Shape, table: Any, token: int, position: int, out: int) -> None:
    """Token row (gathered out of the output head's panels: there is one copy) plus position row."""
    width = shape.width
    x = carray(lanes.floats_at(out), (width,))
    at = table[shape.layers * PER_LAYER + HEAD]
    places = carray(lanes.floats_at(table[shape.layers * PER_LAYER + POSITIONS]), (1 + (position + 1) * width,))
    factor, row = places[0], 1 + position * width
    panel, lane = token // PANEL, token % PANEL
    if not shape.int8:
        at += panel * (HEADER + width * FIXED)
        scale = carray(lanes.floats_at(at), (PANEL,))[lane] * factor
        for i in range(width):
            column = at + HEADER + i * FIXED
            high = carray(lanes.shorts_at(column), (PANEL,))[lane]
            low = carray(lanes.unsigned_bytes_at(column + 2 * PANEL), (PANEL,))[lane]
            x[i] = np.float32(np.int32(high) * np.int32(256) + np.int32(low)) * scale + places[row + i]
        return
    group_bytes = 2 * PANEL + GROUP * PANEL
    at += panel * (padded(width) // GROUP) * group_bytes
    for g in range(padded(width) // GROUP):
        halves = carray(lanes.halves_at(at + g * group_bytes), (PANEL,))
        scale = lanes.float_of_bits(np.int32(np.uint32(halves[lane]) << np.uint32(16))) * factor
        codes = carray(lanes.bytes_at(at + g * group_bytes + 2 * PANEL), (GROUP * PANEL,))
        for i in range(g * GROUP, min((g + 1) * GROUP, width)):
            j = i - g * GROUP
            code = codes[(j // 4) * 4 * PANEL + lane * 4 + j % 4] ^ np.int8(-128)
            x[i] = np.float32(np.int8(code)) * scale + places[row + i]


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


@compiled
def prepare(shape: Shape, norm: int, act: int, codes: int, depth: int, low: int, high: int) -> None:
    """Rows low..high of the stream as a product wants them: normalised, and as bytes if the weights are."""
    for m in range(low, high):
        normalise(shape.x + m * shape.width_stride, act + m * shape.width_stride, shape.width, norm)
        if shape.int8:
            row = codes + m * shape.codes_stride
            quantise(act + m * shape.width_stride, shape.width, row, depth, 0, depth // GROUP)


@compiled
def return_to_stream(
    shape: Shape, weights: int, bias: int, depth: int, values: int, stride: int, base: int, rows: int, thread: int
) -> None:
    """This thread's columns of x = base + product. The product goes where queries were: nobody needs them any more."""
    begin, end = share(shape.width, thread, shape.threads)
    panel, out, out_stride = shape.panels + thread * shape.panel_bytes, shape.qkv, shape.width_stride
    multiply(shape.int8, weights, depth, begin, end, values, stride, rows, bias, out, out_stride, panel)
    count = min(end * PANEL, shape.width) - begin * PANEL
    for m in range(rows):
        at = m * shape.width_stride + begin * PANEL * 4
        x = carray(lanes.floats_at(shape.x + at), (count,))
        old, new = carray(lanes.floats_at(base + at), (count,)), carray(lanes.floats_at(out + at), (count,))
        for i in range(count):
            x[i] = old[i] + new[i]


@compiled
def forward(
    shape: Shape, table: Any, job: int, thread: int, tokens: Any, slots: Any, positions: Any, wanted: Any,
    rows: int, heads_wanted: int, meetings: int,
) -> int:  # fmt: skip
    """This thread's share of one step; returns how many meetings there have been. Logits only for `wanted` rows."""
    threads, width, int8 = shape.threads, shape.width, shape.int8
    depth, hidden_depth = (padded(width), padded(shape.hidden)) if int8 else (width, shape.hidden)
    alone = rows <= 2  # then each thread prepares all rows for itself, which is cheaper than meeting
    own = shape.private + thread * shape.private_bytes
    memory = own + 2 * (shape.width_stride + shape.codes_stride)
    panel = shape.panels + thread * shape.panel_bytes
    act = own if alone else shape.act
    codes = own + 2 * shape.width_stride if alone else shape.codes
    low, high = (0, rows) if alone else (rows * thread // threads, rows * (thread + 1) // threads)
    values, stride = (codes, shape.codes_stride) if int8 else (act, shape.width_stride)
    for m in range(rows * thread // threads, rows * (thread + 1) // threads):
        embed(shape, table, tokens[m], positions[m], shape.x + m * shape.width_stride)
    meetings = meet(job, threads, meetings)
    for layer in range(shape.layers):
        at = table[layer * PER_LAYER : (layer + 1) * PER_LAYER]
        prepare(shape, at[ATTN_NORM], act, codes, depth, low, high)
        if not alone:
            meetings = meet(job, threads, meetings)
        begin, end = share(3 * width, thread, threads)
        multiply(
            int8, at[QKV], depth, begin, end, values, stride, rows, at[QKV_BIAS], shape.qkv, shape.qkv_stride, panel
        )
        meetings = meet(job, threads, meetings)
        attention(shape, layer, thread, slots, positions, rows, memory)
        meetings = meet(job, threads, meetings)
        mixed, mixed_stride = shape.mixed, shape.width_stride
        if int8:
            for m in range(low, high):
                quantise(mixed + m * mixed_stride, width, codes + m * shape.codes_stride, depth, 0, depth // GROUP)
            if not alone:
                meetings = meet(job, threads, meetings)
            mixed, mixed_stride = codes, shape.codes_stride
        base = act if shape.post_norm else shape.x
        return_to_stream(shape, at[OUT], at[OUT_BIAS], depth, mixed, mixed_stride, base, rows, thread)
        meetings = meet(job, threads, meetings)
        prepare(shape, at[MLP_NORM], act, codes, depth, low, high)
        if not alone:
            meetings = meet(job, threads, meetings)
        begin, end = share(shape.hidden, thread, threads)
        multiply(
            int8, at[UP], depth, begin, end, values, stride, rows, at[UP_BIAS], shape.middle, shape.middle_stride, panel
        )
        for m in range(rows):
            row = shape.middle + m * shape.middle_stride
            activate(carray(lanes.floats_at(row + begin * PANEL * 4), ((end - begin) * PANEL,)), shape.activation)
            if int8:
                out = shape.middle_codes + m * shape.middle_codes_stride
                quantise(row, padded(shape.hidden), out, hidden_depth, begin // 2, end // 2)
        meetings = meet(job, threads, meetings)
        middle, middle_stride = shape.middle, shape.middle_stride
        if int8:
            middle, middle_stride = shape.middle_codes, shape.middle_codes_stride
        return_to_stream(shape, at[DOWN], at[DOWN_BIAS], hidden_depth, middle, middle_stride, base, rows, thread)
        meetings = meet(job, threads, meetings)
    return head(shape, table, job, thread, wanted, heads_wanted, depth, meetings)


@compiled
def head(shape: Shape, table: Any, job: int, thread: int, wanted: Any, rows: int, depth: int, meetings: int) -> int:
    """Final norm and output head of the wanted rows."""
    threads, at = shape.threads, table[shape.layers * PER_LAYER :]
    for m in range(rows * thread // threads, rows * (thread + 1) // threads):
        normalise(
            shape.x + wanted[m] * shape.width_stride, shape.act + m * shape.width_stride, shape.width, at[FINAL_NORM]
        )
        if shape.int8:
            row = shape.codes + m * shape.codes_stride
            quantise(shape.act + m * shape.width_stride, shape.width, row, depth, 0, depth // GROUP)
    meetings = meet(job, threads, meetings)
    values, stride = (shape.codes, shape.codes_stride) if shape.int8 else (shape.act, shape.width_stride)
    begin, end = share(shape.vocab, thread, threads)
    panel = shape.panels + thread * shape.panel_bytes
    multiply(shape.int8, at[HEAD], depth, begin, end, values, stride, rows, 0, shape.logits, shape.logits_stride, panel)
    return meet(job, threads, meetings)


@compiled
def lead(
    shape: Shape, table: Any, job: Any, address: int, number: int, tokens: Any, slots: Any, positions: Any,
    wanted: Any, rows: int, heads_wanted: int, meetings: int,
) -> int:  # fmt: skip
    """What the calling thread does: announce the job and take the first share."""
    job[JOB_ROWS], job[JOB_WANTED] = rows, heads_wanted
    lanes.atomic_store(address + 8 * JOB_NUMBER, number)
    return forward(shape, table, address, 0, tokens, slots, positions, wanted, rows, heads_wanted, meetings)


@compiled
def follow(
    shape: Shape, table: Any, job: Any, address: int, thread: int, done: int, tokens: Any, slots: Any,
    positions: Any, wanted: Any, meetings: int, patience: int,
) -> tuple[int, int]:  # fmt: skip
    """What a helper does: take its share of every job until none has come for a while. A negative job is the end."""
    idle = 0
    while idle < patience:
        number = lanes.atomic_load(address + 8 * JOB_NUMBER)
        if number < 0:
            return number, meetings
        if number == done:
            lanes.pause()
            idle += 1
            continue
        rows, heads_wanted = job[JOB_ROWS], job[JOB_WANTED]
        meetings = forward(
            shape, table, address, thread, tokens, slots, positions, wanted, rows, heads_wanted, meetings
        )
        done, idle = number, 0
    return done, meetings
