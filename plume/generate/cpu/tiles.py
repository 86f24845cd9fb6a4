"""Products of activations with weights, written as the vector instructions that a compiler does not find by itself."""

# A tile is the product of a few tokens' activations with a few panels of weights, summed over k in one order whatever
# its shape, so a token's result never depends on what it is computed together with.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from plume.generate.cpu.lanes import (
    F32,
    FEATURES,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    SIGNED_DOT,
    WIDE,
    intrinsic,
    load,
    multiply_add,
    pointer_to,
    splat,
    times,
    whole,
)  # fmt: skip
from plume.generate.cpu.layout import FIXED, GROUP, HEADER, LANES, PANEL

NEAR, FAR = 2048, 8192  # bytes that weights are fetched before they are needed: to the core, and out of memory
# tokens in a tile: as many sums as the registers hold, then the rest
TOGETHER = (12, 8, 4, 2, 1) if WIDE else (3, 2, 1)

Emit = Callable[[Any, Any], None]  # writes a tile's code: the builder, and the tile's eight arguments


def first_reader(tokens: int) -> bool:
    """Whether a tile mostly meets panels that no tile before it has brought near: full ones are many to a panel."""
    return tokens < TOGETHER[0]


def _fetch(
    builder: Any, panels: list[Any], offset: Any, size: int, end: Any, hop: Any, *, from_memory: bool = True
) -> None:
    """Ask for the bytes that these panels will need soon after this offset. Behind a panel's end its neighbour begins,
    which is being read already, so from there on those are meant that a hop further on are next."""
    pointer = ir.PointerType()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    fetch = builder.module.declare_intrinsic("llvm.prefetch.p0", [], kind)
    for ahead, closeness in ((NEAR, 3), (FAR, 1)) if from_memory else ((NEAR, 3),):
        place = builder.add(offset, whole(ahead))
        past = builder.icmp_signed(">=", place, end)
        place = builder.add(place, builder.select(past, hop, whole(0)))
        for panel in panels:
            for line in range(0, size, 64):
                at = builder.inttoptr(builder.add(panel, builder.add(place, whole(line))), pointer)
                builder.call(fetch, [at, *(ir.Constant(I32, n) for n in (0, closeness, 1))])


def _dot4(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    """Add to each lane the product of its four unsigned weight bytes with four signed activation bytes."""
    call = builder.module.declare_intrinsic
    if FEATURES.get("avx512vnni"):
        kind = ir.FunctionType(INTS, [INTS, INTS, INTS])
        return builder.call(call("llvm.x86.avx512.vpdpbusd.512", [], kind), [total, weights, values])
    if SIGNED_DOT:
        return _arm_dot4(builder, total, weights, values)
    if FEATURES.get("avx2"):
        return _pair_dot4(builder, total, weights, values)
    for byte in range(4):  # any machine
        up, eight = ir.Constant(INTS, [24 - 8 * byte] * LANES), ir.Constant(INTS, [8 * byte] * LANES)
        value = builder.ashr(builder.shl(values, up), ir.Constant(INTS, [24] * LANES))
        weight = builder.and_(builder.lshr(weights, eight), ir.Constant(INTS, [255] * LANES))
        total = builder.add(total, builder.mul(weight, value))
    return total


def _pair_dot4(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    """Even and odd bytes apart as 16-bit numbers, multiplied and added in pairs: exact, nothing saturates."""
    shorts = ir.VectorType(I16, 2 * LANES)
    half, pairs = ir.VectorType(I16, LANES), ir.VectorType(I32, LANES // 2)
    eight = ir.Constant(shorts, [8] * 2 * LANES)
    w, a = builder.bitcast(weights, shorts), builder.bitcast(values, shorts)
    even = builder.and_(w, ir.Constant(shorts, [255] * 2 * LANES)), builder.ashr(builder.shl(a, eight), eight)
    odd = builder.lshr(w, eight), builder.ashr(a, eight)
    add_pairs = builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", [], ir.FunctionType(pairs, [half, half]))
    nothing = ir.Constant(shorts, ir.Undefined)
    whole = ir.Constant(INTS, list(range(LANES)))
    for left, right in (even, odd):
        halves = []
        for start in (0, LANES):
            pick = ir.Constant(INTS, list(range(start, start + LANES)))
            cut = [builder.shuffle_vector(side, nothing, pick) for side in (left, right)]
            halves.append(builder.call(add_pairs, cut))
        total = builder.add(total, builder.shuffle_vector(halves[0], halves[1], whole))
    return total


def _arm_dot4(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    quarter, bytes16 = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
    sdot = builder.module.declare_intrinsic(
        "llvm.aarch64.neon.sdot.v4i32.v16i8", [], ir.FunctionType(quarter, [quarter, bytes16, bytes16])
    )
    signed = builder.xor(weights, ir.Constant(INTS, [-0x7F7F7F80] * LANES))
    nothing, parts = ir.Constant(INTS, ir.Undefined), []
    for start in range(0, LANES, 4):
        pick = ir.Constant(ir.VectorType(I32, 4), list(range(start, start + 4)))
        t, w, a = (builder.shuffle_vector(v, nothing, pick) for v in (total, signed, values))
        parts.append(builder.call(sdot, [t, builder.bitcast(w, bytes16), builder.bitcast(a, bytes16)]))
    eight = ir.Constant(ir.VectorType(I32, 8), list(range(8)))
    halves = [builder.shuffle_vector(parts[i], parts[i + 1], eight) for i in (0, 2)]
    return builder.shuffle_vector(halves[0], halves[1], ir.Constant(INTS, list(range(LANES))))


def float_tile(tokens: int, panels: int) -> Emit:
    """Plain floats: out[t, p, :] = start + sum over k of values[t, k] * weights[p, k, :], panels one vector wide.

    Addresses and strides are in bytes; a start of 0 begins at zero.
    """
    return _sum_of_products(tokens, panels, LANES * 4, 0, lambda builder, row: [load(builder, row, 0, FLOATS)])


def scaled_tile(tokens: int, panels: int) -> Emit:
    """The same with panels of PANEL rows that were unpacked: scales, and then floats to be multiplied by them."""

    def read(builder: Any, row: Any) -> list[Any]:
        return [load(builder, row, v * LANES * 4, FLOATS, align=64) for v in range(PANEL // LANES)]

    return _sum_of_products(tokens, panels, PANEL * 4, HEADER, read)


def fixed_tile(tokens: int, panels: int) -> Emit:
    """The same with panels as they were packed: scales, and then whole numbers of 24 bits."""
    return _sum_of_products(tokens, panels, FIXED, HEADER, _fixed)


def _fixed(builder: Any, row: Any) -> list[Any]:
    found = []
    for v in range(PANEL // LANES):
        high = load(builder, row, v * LANES * 2, ir.VectorType(I16, LANES), align=32)
        low = load(builder, row, PANEL * 2 + v * LANES, ir.VectorType(I8, LANES), align=16)
        high = builder.shl(builder.sext(high, INTS), ir.Constant(INTS, [8] * LANES))
        found.append(builder.sitofp(builder.or_(high, builder.zext(low, INTS)), FLOATS))
    return found


def _sum_of_products(tokens: int, panels: int, step: int, header: int, read: Callable[[Any, Any], list[Any]]) -> Emit:
    """A tile over columns of so many bytes, which `read` makes vectors; behind a header the sums are scaled by it."""
    vectors = PANEL // LANES if header else 1

    def emit(builder: Any, args: Any) -> None:
        weights, panel_stride, values, token_stride, start, out, out_stride, depth = args
        panel_at = [builder.add(weights, builder.mul(panel_stride, whole(p))) for p in range(panels)]
        token_at = [builder.add(values, builder.mul(token_stride, whole(t))) for t in range(tokens)]
        end = builder.add(builder.mul(depth, whole(step)), whole(header))
        hop = builder.mul(panel_stride, whole(panels - 1))

        def body(k: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            offset = builder.add(builder.mul(k, whole(step)), whole(header))
            four = builder.mul(k, whole(4))
            w = [vector for at in panel_at for vector in read(builder, builder.add(at, offset))]
            if header:  # weights come from memory, keys and values are in the cache
                _fetch(builder, panel_at, offset, step, end, hop, from_memory=first_reader(tokens))
            for t in range(tokens):
                value = splat(builder, load(builder, token_at[t], four, F32))
                for i in range(panels * vectors):
                    place = t * panels * vectors + i
                    sums[place] = multiply_add(builder, value, w[i], sums[place])
            return sums

        first = _starts(builder, start, panels * vectors)
        if header:
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            sums = times(builder, depth, [zero] * tokens * panels * vectors, body)
            scales = [load(builder, at, v * LANES * 4, FLOATS, align=32) for at in panel_at for v in range(vectors)]
            sums = [
                multiply_add(builder, total, scales[i % len(scales)], first[i % len(first)])
                for i, total in enumerate(sums)
            ]
        else:
            sums = times(builder, depth, first * tokens, body)
        _store(builder, sums, out, out_stride, panels * vectors)

    return emit


def int8_tile(tokens: int, panels: int) -> Emit:
    """The same with int8 groups. A panel's group is its scales (bfloat16) and then its bytes, four of k at a time;
    a token is its bytes, then one scale per group, then what each group's sum starts from."""

    def emit(builder: Any, args: Any) -> None:
        weights, panel_stride, values, token_stride, start, out, out_stride, groups = args
        panel_at = [builder.add(weights, builder.mul(panel_stride, whole(p))) for p in range(panels)]
        token_at = [builder.add(values, builder.mul(token_stride, whole(t))) for t in range(tokens)]
        vectors = PANEL // LANES
        group_bytes = 2 * PANEL + GROUP * PANEL
        scale_offset = builder.mul(groups, whole(GROUP))
        start_offset = builder.add(scale_offset, builder.mul(groups, whole(4)))
        end = builder.mul(groups, whole(group_bytes))
        hop = builder.mul(panel_stride, whole(panels - 1))

        def group(g: Any, sums: list[Any]) -> list[Any]:
            four = builder.mul(g, whole(4))
            begins = [splat(builder, load(builder, at, builder.add(start_offset, four), I32)) for at in token_at]
            group_at = builder.mul(g, whole(group_bytes))
            bases = [builder.add(at, group_at) for at in panel_at]
            bytes_at = [builder.add(at, builder.mul(g, whole(GROUP))) for at in token_at]

            def steps(j: Any, totals: list[Any]) -> list[Any]:
                totals = list(totals)
                for u in range(4):
                    quad = builder.add(builder.mul(j, whole(16)), whole(4 * u))
                    row = builder.mul(quad, whole(PANEL))
                    w = [
                        load(builder, base, builder.add(row, whole(2 * PANEL + v * 4 * LANES)), INTS, align=64)
                        for base in bases
                        for v in range(vectors)
                    ]
                    at = builder.add(group_at, row)
                    _fetch(builder, panel_at, at, vectors * LANES * 4, end, hop, from_memory=first_reader(tokens))
                    for t in range(tokens):
                        value = splat(builder, load(builder, bytes_at[t], quad, I32))
                        for i in range(panels * vectors):
                            place = t * panels * vectors + i
                            totals[place] = _dot4(builder, totals[place], w[i], value)
                return totals

            first = [begins[t] for t in range(tokens) for _ in range(panels * vectors)]
            totals = times(builder, whole(GROUP // 16), first, steps)
            scale = [splat(builder, load(builder, at, builder.add(scale_offset, four), F32)) for at in token_at]
            result = list(sums)
            for p in range(panels):
                for v in range(vectors):
                    half = load(builder, bases[p], v * 2 * LANES, ir.VectorType(I16, LANES), align=32)
                    bits = builder.shl(builder.zext(half, INTS), ir.Constant(INTS, [16] * LANES))
                    weight_scale = builder.bitcast(bits, FLOATS)
                    for t in range(tokens):
                        i = (t * panels + p) * vectors + v
                        both = builder.fmul(weight_scale, scale[t])
                        result[i] = multiply_add(builder, builder.sitofp(totals[i], FLOATS), both, sums[i])
            return result

        first = _starts(builder, start, panels * vectors) * tokens
        _store(builder, times(builder, groups, first, group), out, out_stride, panels * vectors)

    return emit


def _starts(builder: Any, start: Any, count: int) -> list[Any]:
    """What the sums begin with: the bias, or zero when there is none."""
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    before, given, after = builder.block, builder.append_basic_block("bias"), builder.append_basic_block("go")
    builder.cbranch(builder.icmp_signed("!=", start, whole(0)), given, after)
    builder.position_at_end(given)
    loaded = [load(builder, start, i * LANES * 4, FLOATS) for i in range(count)]
    builder.branch(after)
    builder.position_at_end(after)
    phis = [builder.phi(FLOATS) for _ in range(count)]
    for phi, value in zip(phis, loaded, strict=True):
        phi.add_incoming(zero, before)
        phi.add_incoming(value, given)
    return phis


def _store(builder: Any, sums: list[Any], out: Any, out_stride: Any, per_token: int) -> None:
    for i, value in enumerate(sums):
        token, place = divmod(i, per_token)
        row = builder.add(out, builder.mul(out_stride, whole(token)))
        builder.store(value, pointer_to(builder, row, place * LANES * 4, FLOATS), align=4)


def tile(emit: Emit) -> Any:
    """A tile as a function: weights, panel stride, values, token stride, start, out, out stride, depth."""

    @intrinsic
    def call(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(builder, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return call


def panel_times_rows(kind: Callable[[int, int], Emit]) -> Any:
    """One panel times all rows, by the largest tile that still fits: panel, values, stride, start, out, out stride,
    depth, rows."""
    tiles = [(tokens, kind(tokens, 1)) for tokens in TOGETHER]

    @intrinsic
    def call(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel, values, stride, start, out, out_stride, depth, rows = args
            with builder.goto_entry_block():
                done = builder.alloca(I64)
            builder.store(whole(0), done)
            for tokens, emit in tiles:
                ask, inside, after = (builder.append_basic_block(name) for name in ("ask", "tile", "fewer"))
                builder.branch(ask)
                builder.position_at_end(ask)
                row = builder.load(done)
                following = builder.add(row, whole(tokens))
                builder.cbranch(builder.icmp_signed("<=", following, rows), inside, after)
                builder.position_at_end(inside)
                values_at, out_at = (
                    builder.add(at, builder.mul(row, step)) for at, step in ((values, stride), (out, out_stride))
                )
                emit(builder, (panel, whole(0), values_at, stride, start, out_at, out_stride, depth))
                builder.store(following, done)
                builder.branch(ask)
                builder.position_at_end(after)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return call


@intrinsic
def unpack(typing: Any, panel: Any, depth: Any, out: Any) -> Any:
    """A float panel as it was packed becomes one with its whole numbers as floats, which many rows then share."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        panel, depth, out = args

        def column(k: Any, _: list[Any]) -> list[Any]:
            offset = builder.add(builder.mul(k, whole(FIXED)), whole(HEADER))
            to = builder.add(out, builder.add(builder.mul(k, whole(PANEL * 4)), whole(HEADER)))
            _fetch(builder, [panel], offset, FIXED, offset, whole(0))
            for v, vector in enumerate(_fixed(builder, builder.add(panel, offset))):
                builder.store(vector, pointer_to(builder, to, v * LANES * 4, FLOATS), align=64)
            return []

        for v in range(PANEL // LANES):
            scales = load(builder, panel, v * LANES * 4, FLOATS, align=32)
            builder.store(scales, pointer_to(builder, out, v * LANES * 4, FLOATS), align=64)
        times(builder, depth, [], column)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
