"""One step of a GPT on the CPU, compiled by numba: every thread runs `forward` on its share, meeting at barriers."""

# M rows in this step (tokens of any sequences), D model width, K head width. All addresses and strides are in bytes.

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import carray, types

from plume.generate.cpu import lanes
from plume.generate.cpu.arithmetic import activate, multiply, normalise, padded, quantise, share
from plume.generate.cpu.attention import attention
from plume.generate.cpu.compiling import compiled
from plume.generate.cpu.layout import (
    ATTN_NORM,
    DOWN,
    DOWN_BIAS,
    FINAL_NORM,
    FIXED,
    GROUP,
    HEAD,
    HEADER,
    JOB_BARRIER,
    JOB_NUMBER,
    JOB_ROWS,
    JOB_WANTED,
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
    wanted: Any, rows: int, heads_wanted: int,
) -> None:  # fmt: skip
    """What the calling thread does: announce the job and take the first share. It leaves a job after everybody's last
    meeting, so the counter says how many there have been, even where Ctrl-C came in between."""
    meetings = lanes.atomic_load(address + 8 * JOB_BARRIER) // shape.threads
    job[JOB_ROWS], job[JOB_WANTED] = rows, heads_wanted
    lanes.atomic_store(address + 8 * JOB_NUMBER, number)
    forward(shape, table, address, 0, tokens, slots, positions, wanted, rows, heads_wanted, meetings)


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
