"""One step of a model on the CPU, compiled by numba: every thread runs `forward` on its share, meeting at barriers."""

# M rows in this step (tokens of any sequences), D model width, K head width. All addresses and strides are in bytes.

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import carray, types

from plume.inference.cpu import arithmetic, lanes, pack, tiles
from plume.inference.cpu.arithmetic import activate, gather, multiply_panels, normalise, padded, quantise, share
from plume.inference.cpu.lanes import compiled, entry, linked
from plume.inference.cpu.pack import DOWN, DOWN_BIAS, OUT, OUT_BIAS, QKV, QKV_BIAS, UP, UP_BIAS, Shape
from plume.inference.cpu.panels import GROUP, LANES, PANEL
from plume.inference.cpu.sampling import Work, answer_all

FEW, MANY = (4, 12) if lanes.WIDE else (2, 6)  # neighbouring queries that attend together
OWN_ROWS = 64 if lanes.WIDE else 1 << 40  # with so many for each thread, a thread takes rows and not panels
NEAR_ROWS = 96  # rows whose activations stay in a core's own cache beside a panel
BESIDE = 2 if lanes.WIDE else 1  # blocks that many meet together: their sums fill the registers
mix_1, mix_1x4, mix_few, mix_few_2, mix_many, mix_many_beside = (
    tiles.tile_of_cache(q, p) for q, p in ((1, 1), (1, 4), (FEW, 1), (FEW, 2), (MANY, 1), (MANY, BESIDE))
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
    lanes.atomic_add(job + 8 * pack.JOB_BARRIER, 1)
    wait_for(job + 8 * pack.JOB_BARRIER, meetings * threads)
    return meetings


@compiled
def keep_floats(x: Any, at: int, step: int) -> None:
    """Write up to LANES floats side by side, or LANES apart: steps that are constants need no arithmetic."""
    floats = carray(lanes.floats_at(at), (LANES * LANES,))
    if step == 1:
        for d in range(x.size):
            floats[d] = x[d]
    else:
        for d in range(x.size):
            floats[d * LANES] = x[d]


@compiled
def keep(x: Any, item: int, at: int, start: int, jump: int, step: int, scale: int) -> None:
    """Write numbers into the cache: LANES of them a step apart, the next a jump further on; bytes share a scale."""
    end = start + x.size * max(jump, step)
    if item == 4:
        for first in range(0, x.size, LANES):
            keep_floats(x[first : first + LANES], at + (start + first // LANES * jump) * 4, step)
    elif item == 2:
        halves = carray(lanes.halves_at(at), (end,))
        for d in range(x.size):
            halves[start + d // LANES * jump + d % LANES * step] = arithmetic.bits_of_half(x[d])
    else:
        codes, largest = carray(lanes.bytes_at(at), (end,)), np.float32(1e-30)
        for d in range(x.size):
            largest = lanes.larger(largest, abs(x[d]))
        inverse = np.float32(127) / largest
        for d in range(x.size):
            codes[start + d // LANES * jump + d % LANES * step] = np.int32(np.floor(x[d] * inverse + arithmetic.HALF))
        carray(lanes.floats_at(scale), (1,))[0] = largest / np.float32(127)


@compiled
def remember(shape: Shape, m: int, head: int, position: int, keys: int, values: int) -> None:
    """Write a row's key (16 positions side by side) and value (16 numbers side by side) of one head."""
    size, capacity, item = shape.head_width, shape.capacity, shape.cache_item
    row = shape.qkv + m * shape.qkv_stride + head * size * 4
    key = carray(lanes.floats_at(row + shape.width * 4), (size,))
    value = carray(lanes.floats_at(row + 2 * shape.width * 4), (size,))
    start, scale = position // LANES * size * LANES + position % LANES, (position - capacity) * 4
    keep(key, item, keys, start, LANES * LANES, LANES, keys + shape.key_bytes + scale)
    keep(value, item, values, position * LANES, capacity * LANES, 1, values + shape.value_bytes + scale)


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
    largest, total = np.float32(-3e38), np.float64(0)
    for i in range(count):
        largest = lanes.larger(largest, x[i])
    for i in range(count):
        x[i] = arithmetic.exp((x[i] - largest) * scale)
        total += np.float64(x[i])
    return np.float32(total)


@compiled
def multiply_by(numbers: int, scales: int, count: int) -> None:
    x, factors = carray(lanes.floats_at(numbers), (count,)), carray(lanes.floats_at(scales), (count,))
    for i in range(count):
        x[i] *= factors[i]


@entry
def mix(
    item: int, queries: int, at: int, block_stride: int, blocks: int, values: int, stride: int, out: int,
    out_stride: int, depth: int, summed: int,
) -> None:  # fmt: skip
    """So many queries times blocks of 16 keys, or weights times blocks of 16 columns of values, `summed` in one go."""
    b = 0
    while b < blocks:
        a, o, taken = at + b * block_stride, out + b * LANES * 4, 1
        if queries == 1 and b + 4 <= blocks:
            mix_1x4(item, a, block_stride, values, stride, summed, o, out_stride, depth)
            taken = 4
        elif queries == 1:
            mix_1(item, a, 0, values, stride, summed, o, out_stride, depth)
        elif queries == MANY and b + BESIDE <= blocks:
            mix_many_beside(item, a, block_stride, values, stride, summed, o, out_stride, depth)
            taken = BESIDE
        elif queries == MANY:
            mix_many(item, a, 0, values, stride, summed, o, out_stride, depth)
        elif b + 2 <= blocks:
            mix_few_2(item, a, block_stride, values, stride, summed, o, out_stride, depth)
            taken = 2
        else:
            mix_few(item, a, 0, values, stride, summed, o, out_stride, depth)
        b += taken


mix_all = linked(mix, 11)


@compiled
def attend(
    shape: Shape, layer: int, head: int, keys: int, values: int, position: int, until: int, m: int, queries: int,
    memory: int,
) -> None:  # fmt: skip
    """Attention of one head for 1, FEW or MANY neighbouring rows of one sequence, the first at this position, to the
    keys before `until`; where it is causal, each row sees none behind its own."""
    size, capacity, item, stride = shape.head_width, shape.capacity, shape.cache_item, shape.scores_stride
    blocks = (size + LANES - 1) // LANES
    band = shape.band if layer % 2 else 0
    low_block = max(0, position - band + 1) // tiles.SUMMED * (tiles.SUMMED // LANES) if band else 0
    first, key_blocks = low_block * LANES, (until + LANES - 1) // LANES - low_block
    query = shape.qkv + m * shape.qkv_stride + head * size * 4
    scores, out, out_stride = memory, memory + MANY * stride, blocks * LANES * 4
    at, block = keys + low_block * size * LANES * item, size * LANES * item
    mix_all(item, queries, at, block, key_blocks, query, shape.qkv_stride, scores, stride, size, LANES)
    scale = arithmetic.ONE / np.sqrt(np.float32(size))
    totals = carray(lanes.floats_at(out + MANY * blocks * LANES * 4), (MANY,))
    for q in range(queries):
        low = max(0, position + q - band + 1) if band else 0
        high = position + q + 1 if shape.causal else until
        row = scores + q * stride
        if item == 1:
            multiply_by(row + (low - first) * 4, keys + shape.key_bytes + (low - capacity) * 4, high - low)
        totals[q] = soften(row, low - first, high - low, until - high, scale)
        if item == 1:
            multiply_by(row + (low - first) * 4, values + shape.value_bytes + (low - capacity) * 4, high - low)
    at, block = values + first * LANES * item, capacity * LANES * item
    mix_all(item, queries, at, block, blocks, scores, stride, out, out_stride, until - first, tiles.SUMMED)
    for q in range(queries):
        source = carray(lanes.floats_at(out + q * out_stride), (size,))
        target = carray(lanes.floats_at(shape.mixed + (m + q) * shape.width_stride + head * size * 4), (size,))
        share = arithmetic.ONE / totals[q]
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
def whole_attention(shape: Shape, layer: int, thread: int, slots: Any, rows: int, memory: int) -> None:
    """This thread's share of the heads of all sequences, each of which is read as a whole: its keys and values are
    needed no longer than its own attention takes, and stay near the core."""
    keys, values = shape.keys + thread * shape.key_bytes, shape.values + thread * shape.value_bytes
    items = (slots[rows - 1] + 1) * shape.heads
    low, high = items * thread // shape.threads, items * (thread + 1) // shape.threads
    first = 0
    while first < rows:
        length = 1
        while first + length < rows and slots[first + length] == slots[first]:
            length += 1
        item = slots[first] * shape.heads
        for head in range(max(0, low - item), min(shape.heads, high - item)):
            for i in range(length):
                remember(shape, first + i, head, i, keys, values)
            i = 0
            while i < length:
                queries = MANY if length - i >= MANY else FEW if length - i >= FEW else 1
                until = i + queries if shape.causal else length
                attend(shape, layer, head, keys, values, i, until, first + i, queries, memory)
                i += queries
        first += length


@compiled
def attention(shape: Shape, layer: int, thread: int, slots: Any, positions: Any, rows: int, memory: int) -> None:
    """This thread's heads, for all rows, to what their slots have read and are reading."""
    if not shape.cached:
        whole_attention(shape, layer, thread, slots, rows, memory)
        return
    for head in range(shape.heads * thread // shape.threads, shape.heads * (thread + 1) // shape.threads):
        for m in range(rows):
            owner = (slots[m] * shape.layers + layer) * shape.heads + head
            keys, values = shape.keys + owner * shape.key_bytes, shape.values + owner * shape.value_bytes
            remember(shape, m, head, positions[m], keys, values)
        m = 0
        while m < rows:
            queries, position = neighbours(slots, positions, m, rows), positions[m]
            owner = (slots[m] * shape.layers + layer) * shape.heads + head
            keys, values = shape.keys + owner * shape.key_bytes, shape.values + owner * shape.value_bytes
            attend(shape, layer, head, keys, values, position, position + queries, m, queries, memory)
            m += queries


@compiled
def embed(shape: Shape, table: Any, token: int, position: int, out: int) -> None:
    """Token row, gathered out of panels (the output head's own where they are tied), plus position row."""
    width = shape.width
    x = carray(lanes.floats_at(out), (width,))
    at = table[shape.layers * pack.PER_LAYER :]
    gather(shape.table_kind, at[pack.TOKENS], width, token, out)
    places = carray(lanes.floats_at(at[pack.POSITIONS]), (1 + (position + 1) * width,))
    factor, row = places[0], 1 + position * width
    for i in range(width):
        x[i] = x[i] * factor + places[row + i]


@compiled
def prepare(shape: Shape, norm: int, act: int, codes: int, low: int, high: int) -> None:
    """Rows low..high of the stream as a product wants them: normalised, and as bytes if the weights are."""
    depth = padded(shape.width)
    for m in range(low, high):
        normalise(shape.x + m * shape.width_stride, act + m * shape.width_stride, shape.width, norm)
        if shape.int8:
            row = codes + m * shape.codes_stride
            quantise(act + m * shape.width_stride, shape.width, row, depth, 0, depth // GROUP)


@compiled
def quantise_mixed(shape: Shape, codes: int, low: int, high: int) -> None:
    """What attention gave to rows low..high, as bytes."""
    depth = padded(shape.width)
    for m in range(low, high):
        row = shape.mixed + m * shape.width_stride
        quantise(row, shape.width, codes + m * shape.codes_stride, depth, 0, depth // GROUP)


@compiled
def project(
    shape: Shape, weights: int, bias: int, values: int, stride: int, out: int, out_stride: int, low: int, high: int,
    begin: int, end: int, panel: int,
) -> None:  # fmt: skip
    """Rows low..high, as wide as the model, times the panels begin..end."""
    depth = padded(shape.width) if shape.int8 else shape.width
    values, out = values + low * stride, out + low * out_stride
    multiply_panels(shape.kind, weights, depth, begin, end, values, stride, high - low, bias, out, out_stride, panel)


@compiled
def activate_middle(shape: Shape, low: int, high: int, begin: int, end: int) -> None:
    """The activation of the columns of these panels, for rows low..high, as bytes if the weights are."""
    for m in range(low, high):
        row = shape.middle + m * shape.middle_stride
        activate(carray(lanes.floats_at(row + begin * PANEL * 4), ((end - begin) * PANEL,)), shape.activation)
        if shape.int8:
            depth, out = padded(shape.hidden), shape.middle_codes + m * shape.middle_codes_stride
            quantise(row, depth, out, depth, begin // 2, end // 2)


@compiled
def return_to_stream(
    shape: Shape, weights: int, bias: int, depth: int, values: int, stride: int, base: int, low: int, high: int,
    begin: int, end: int, panel: int,
) -> None:  # fmt: skip
    """The columns of these panels of x = base + product, for rows low..high. The product goes where queries were:
    nobody needs them any more."""
    out, out_stride, values = shape.qkv + low * shape.qkv_stride, shape.qkv_stride, values + low * stride
    multiply_panels(shape.kind, weights, depth, begin, end, values, stride, high - low, bias, out, out_stride, panel)
    count = min(end * PANEL, shape.width) - begin * PANEL
    for m in range(low, high):
        at, product = m * shape.width_stride + begin * PANEL * 4, shape.qkv + m * out_stride + begin * PANEL * 4
        x = carray(lanes.floats_at(shape.x + at), (count,))
        old, new = carray(lanes.floats_at(base + at), (count,)), carray(lanes.floats_at(product), (count,))
        for i in range(count):
            x[i] = old[i] + new[i]


@compiled
def forward(
    shape: Shape, table: Any, job: int, thread: int, tokens: Any, slots: Any, positions: Any, wanted: Any,
    rows: int, heads_wanted: int, meetings: int,
) -> int:  # fmt: skip
    """This thread's share of one step; returns how many meetings there have been. Results only for `wanted` rows."""
    threads = shape.threads
    for m in range(rows * thread // threads, rows * (thread + 1) // threads):
        embed(shape, table, tokens[m], positions[m], shape.x + m * shape.width_stride)
    meetings = meet(job, threads, meetings)
    if rows >= threads * OWN_ROWS:
        meetings = layers_by_rows(shape, table, job, thread, slots, positions, rows, meetings)
    else:
        meetings = layers_by_panels(shape, table, job, thread, slots, positions, rows, meetings)
    return head(shape, table, job, thread, wanted, heads_wanted, meetings)


@compiled
def layers_by_rows(
    shape: Shape, table: Any, job: int, thread: int, slots: Any, positions: Any, rows: int, meetings: int
) -> int:
    """All layers where rows are many: a thread takes its rows through all products between two attentions, so few at
    a time that what it computes stays in its own cache."""
    threads, int8 = shape.threads, shape.int8
    own = shape.private + thread * shape.private_bytes
    memory, panel = own + 2 * (shape.width_stride + shape.codes_stride), shape.panels + thread * shape.panel_bytes
    values, stride = (shape.codes, shape.codes_stride) if int8 else (shape.act, shape.width_stride)
    mixed, mixed_stride = (shape.codes, shape.codes_stride) if int8 else (shape.mixed, shape.width_stride)
    middle = shape.middle_codes if int8 else shape.middle
    middle_stride = shape.middle_codes_stride if int8 else shape.middle_stride
    depth, hidden_depth = (padded(shape.width), padded(shape.hidden)) if int8 else (shape.width, shape.hidden)
    first, last = rows * thread // threads, rows * (thread + 1) // threads
    base = shape.act if shape.post_norm else shape.x
    wide, narrow, hidden = padded(3 * shape.width) // PANEL, padded(shape.width) // PANEL, padded(shape.hidden) // PANEL
    for layer in range(shape.layers):
        at = table[layer * pack.PER_LAYER : (layer + 1) * pack.PER_LAYER]
        for low in range(first, last, NEAR_ROWS):
            high = min(low + NEAR_ROWS, last)
            prepare(shape, at[pack.ATTN_NORM], shape.act, shape.codes, low, high)
            project(
                shape, at[QKV], at[QKV_BIAS], values, stride, shape.qkv, shape.qkv_stride, low, high, 0, wide, panel
            )
        meetings = meet(job, threads, meetings)
        attention(shape, layer, thread, slots, positions, rows, memory)
        meetings = meet(job, threads, meetings)
        for low in range(first, last, NEAR_ROWS):
            high = min(low + NEAR_ROWS, last)
            if int8:
                quantise_mixed(shape, shape.codes, low, high)
            return_to_stream(
                shape, at[OUT], at[OUT_BIAS], depth, mixed, mixed_stride, base, low, high, 0, narrow, panel
            )
            prepare(shape, at[pack.MLP_NORM], shape.act, shape.codes, low, high)
            skipped = low - first  # the first rows' memory is near already, and is written again
            project(
                shape, at[UP], at[UP_BIAS], values, stride, shape.middle - skipped * shape.middle_stride,
                shape.middle_stride, low, high, 0, hidden, panel,
            )  # fmt: skip
            activate_middle(shape, first, high - skipped, 0, hidden)
            return_to_stream(
                shape, at[DOWN], at[DOWN_BIAS], hidden_depth, middle - skipped * middle_stride, middle_stride, base,
                low, high, 0, narrow, panel,
            )  # fmt: skip
    return meet(job, threads, meetings)


@compiled
def layers_by_panels(
    shape: Shape, table: Any, job: int, thread: int, slots: Any, positions: Any, rows: int, meetings: int
) -> int:
    """All layers where rows are few: every thread takes its panels of each matrix for all rows."""
    threads, int8 = shape.threads, shape.int8
    depth, hidden_depth = (padded(shape.width), padded(shape.hidden)) if int8 else (shape.width, shape.hidden)
    alone = rows <= 2  # then each thread prepares all rows for itself, which is cheaper than meeting
    own = shape.private + thread * shape.private_bytes
    memory = own + 2 * (shape.width_stride + shape.codes_stride)
    panel = shape.panels + thread * shape.panel_bytes
    act = own if alone else shape.act
    codes = own + 2 * shape.width_stride if alone else shape.codes
    low, high = (0, rows) if alone else (rows * thread // threads, rows * (thread + 1) // threads)
    values, stride = (codes, shape.codes_stride) if int8 else (act, shape.width_stride)
    mixed, mixed_stride = (codes, shape.codes_stride) if int8 else (shape.mixed, shape.width_stride)
    middle = shape.middle_codes if int8 else shape.middle
    middle_stride = shape.middle_codes_stride if int8 else shape.middle_stride
    base = act if shape.post_norm else shape.x
    narrow_begin, narrow_end = share(shape.width, thread, threads)
    for layer in range(shape.layers):
        at = table[layer * pack.PER_LAYER : (layer + 1) * pack.PER_LAYER]
        prepare(shape, at[pack.ATTN_NORM], act, codes, low, high)
        if not alone:
            meetings = meet(job, threads, meetings)
        begin, end = share(3 * shape.width, thread, threads)
        project(shape, at[QKV], at[QKV_BIAS], values, stride, shape.qkv, shape.qkv_stride, 0, rows, begin, end, panel)
        meetings = meet(job, threads, meetings)
        attention(shape, layer, thread, slots, positions, rows, memory)
        meetings = meet(job, threads, meetings)
        if int8:
            quantise_mixed(shape, codes, low, high)
            if not alone:
                meetings = meet(job, threads, meetings)
        return_to_stream(
            shape, at[OUT], at[OUT_BIAS], depth, mixed, mixed_stride, base, 0, rows, narrow_begin, narrow_end, panel
        )
        meetings = meet(job, threads, meetings)
        prepare(shape, at[pack.MLP_NORM], act, codes, low, high)
        if not alone:
            meetings = meet(job, threads, meetings)
        begin, end = share(shape.hidden, thread, threads)
        project(
            shape, at[UP], at[UP_BIAS], values, stride, shape.middle, shape.middle_stride, 0, rows, begin, end, panel
        )
        activate_middle(shape, 0, rows, begin, end)
        meetings = meet(job, threads, meetings)
        return_to_stream(
            shape, at[DOWN], at[DOWN_BIAS], hidden_depth, middle, middle_stride, base, 0, rows, narrow_begin,
            narrow_end, panel,
        )  # fmt: skip
        meetings = meet(job, threads, meetings)
    return meetings


@compiled
def head(shape: Shape, table: Any, job: int, thread: int, wanted: Any, rows: int, meetings: int) -> int:
    """Final norm of the wanted rows, and the logits of a model that continues text."""
    threads, at = shape.threads, table[shape.layers * pack.PER_LAYER :]
    act, norm = shape.act if shape.cached else shape.logits, at[pack.FINAL_NORM]
    depth = padded(shape.width) if shape.int8 else shape.width
    for m in range(rows * thread // threads, rows * (thread + 1) // threads):
        normalise(shape.x + wanted[m] * shape.width_stride, act + m * shape.width_stride, shape.width, norm)
        if shape.cached and shape.int8:
            row = shape.codes + m * shape.codes_stride
            quantise(act + m * shape.width_stride, shape.width, row, depth, 0, depth // GROUP)
    meetings = meet(job, threads, meetings)
    if not shape.cached:
        return meetings
    values, stride = (shape.codes, shape.codes_stride) if shape.int8 else (act, shape.width_stride)
    begin, end = share(shape.vocab, thread, threads)
    panel, kind = shape.panels + thread * shape.panel_bytes, shape.table_kind
    multiply_panels(
        kind, at[pack.HEAD], depth, begin, end, values, stride, rows, 0, shape.logits, shape.logits_stride, panel
    )
    return meet(job, threads, meetings)


@entry
def work_on(
    shape: Shape, table: Any, job: Any, address: int, thread: int, number: int, done: int, tokens: Any, slots: Any,
    positions: Any, wanted: Any, requests: Any, work: Work, meetings: int, patience: int,
) -> tuple[int, int]:  # fmt: skip
    """What every thread does. Thread 0, the caller's, announces the job `number` and takes the first share; others take
    theirs of every job until none has come for a while, or the job is negative. It is one function, so that all
    threads run the same machine code. Returns the last job and how many meetings there have been."""
    if thread == 0:
        # a leader leaves a job after everybody's last meeting, so the counter is right, even where Ctrl-C came between
        meetings = lanes.atomic_load(address + 8 * pack.JOB_BARRIER) // shape.threads
        lanes.atomic_store(address + 8 * pack.JOB_NUMBER, number)
    idle = 0
    while idle < patience:
        number = lanes.atomic_load(address + 8 * pack.JOB_NUMBER)
        if number < 0:
            return done, meetings
        if number == done:
            lanes.pause()
            idle += 1
            continue
        if job[pack.JOB_KIND] == pack.SAMPLING:
            answer_all(requests, job[pack.JOB_ROWS], address + 8 * pack.JOB_TAKEN, work)
            meetings = meet(address, shape.threads, meetings)
        else:
            rows, heads_wanted = job[pack.JOB_ROWS], job[pack.JOB_WANTED]
            meetings = forward(
                shape, table, address, thread, tokens, slots, positions, wanted, rows, heads_wanted, meetings
            )
        done, idle = number, 0 if thread else patience
    return done, meetings
