"""Products of activations with weights, written as the vector instructions that a compiler does not find by itself."""

# A tile is the product of a few tokens' activations with a few panels of weights, summed over k in one order whatever
# its shape, so a token's result never depends on what it is computed together with.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from plume.inference.cpu.byte_products import dot4, half_floats, levels_of, signed_dot4
from plume.inference.cpu.lanes import (
    F32,
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
from plume.inference.cpu.panels import FIXED, FULL, GROUP, HEADER, LANES, PANEL, SMALL_GROUP

NEAR, FAR = 2048, 8192  # bytes that weights are fetched before they are needed: to the core, and out of memory
# tokens in a tile: as many sums as the registers hold, then the rest
TOGETHER = (12, 8, 4, 2, 1) if WIDE else (3, 2, 1)
SUMMED = 128  # float products that are added up before their sum is added to the others

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


def float_tile(tokens: int, panels: int) -> Emit:
    """Plain floats: out[t, p, :] = start + sum over k of values[t, k] * weights[p, k, :], panels one vector wide.

    Addresses and strides are in bytes; a start of 0 begins at zero.
    """
    return _sum_of_products(tokens, panels, LANES * 4, 0, lambda builder, row: [load(builder, row, 0, FLOATS)])


def scaled_tile(tokens: int, panels: int) -> Emit:
    """The same with panels of PANEL rows, packed or unpacked: scales, and then floats to be multiplied by them."""

    def read(builder: Any, row: Any) -> list[Any]:
        return [load(builder, row, v * LANES * 4, FLOATS, align=64) for v in range(PANEL // LANES)]

    return _sum_of_products(tokens, panels, FULL, HEADER, read)


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

        def body(k: Any, sums: list[Any], before: Any) -> list[Any]:
            sums, k = list(sums), builder.add(k, before)
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
            sums = _in_blocks(builder, depth, tokens * panels * vectors, body)
            scales = [load(builder, at, v * LANES * 4, FLOATS, align=32) for at in panel_at for v in range(vectors)]
            sums = [
                multiply_add(builder, total, scales[i % len(scales)], first[i % len(first)])
                for i, total in enumerate(sums)
            ]
        else:
            sums = times(builder, depth, first * tokens, lambda k, sums: body(k, sums, whole(0)))
        _store(builder, sums, out, out_stride, panels * vectors)

    return emit


def _in_blocks(builder: Any, depth: Any, count: int, body: Callable[[Any, list[Any], Any], list[Any]]) -> list[Any]:
    """So many sums over all columns, added up block by block: a long sum in one go would lose more digits."""
    zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * count

    def block(b: Any, totals: list[Any]) -> list[Any]:
        before = builder.mul(b, whole(SUMMED))
        left = builder.sub(depth, before)
        few = builder.icmp_signed("<", left, whole(SUMMED))
        columns = builder.select(few, left, whole(SUMMED))
        sums = times(builder, columns, zeros, lambda k, carried: body(k, carried, before))
        return [builder.fadd(total, part) for total, part in zip(totals, sums, strict=True)]

    blocks = builder.sdiv(builder.add(depth, whole(SUMMED - 1)), whole(SUMMED))
    return times(builder, blocks, zeros, block)


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
                            totals[place] = dot4(builder, totals[place], w[i], value)
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


def int4_tile(tokens: int, panels: int) -> Emit:
    """The same with int4 groups as they were packed: scales of half precision, then codes, those of columns 16 apart
    in one byte. Tokens are as for int8, with what the sum of each small group starts from behind."""

    def read(builder: Any, row: Any) -> tuple[Any, Any]:
        return _unpacked(builder, load(builder, row, 0, INTS, align=64))

    return _levels_times_bytes(tokens, panels, SMALL_GROUP * PANEL // 2, read, from_memory=first_reader(tokens))


def level_tile(tokens: int, panels: int) -> Emit:
    """The same with panels that were unpacked."""

    def read(builder: Any, row: Any) -> tuple[Any, Any]:
        return load(builder, row, 0, INTS, align=64), load(builder, row, SMALL_GROUP * PANEL // 2, INTS, align=64)

    return _levels_times_bytes(tokens, panels, SMALL_GROUP * PANEL, read, from_memory=False)


def _unpacked(builder: Any, both: Any) -> tuple[Any, Any]:
    low = builder.and_(both, ir.Constant(INTS, [0x0F0F0F0F] * LANES))
    high = builder.and_(builder.lshr(both, ir.Constant(INTS, [4] * LANES)), ir.Constant(INTS, [0x0F0F0F0F] * LANES))
    return levels_of(builder, low), levels_of(builder, high)


def _levels_times_bytes(
    tokens: int, panels: int, size: int, read: Callable[[Any, Any], tuple[Any, Any]], *, from_memory: bool
) -> Emit:
    """A tile over small groups of so many bytes behind their scales; `read` makes two vectors of columns 16 apart."""
    vectors, group_bytes = PANEL // LANES, 2 * PANEL + size
    add = signed_dot4 if SIGNED_DOT else dot4

    def emit(builder: Any, args: Any) -> None:
        weights, panel_stride, values, token_stride, start, out, out_stride, groups = args
        panel_at = [builder.add(weights, builder.mul(panel_stride, whole(p))) for p in range(panels)]
        token_at = [builder.add(values, builder.mul(token_stride, whole(t))) for t in range(tokens)]
        scale_offset = builder.mul(groups, whole(GROUP))
        start_offset = builder.mul(groups, whole(GROUP + 8))
        count = builder.mul(groups, whole(2))
        end, hop = builder.mul(count, whole(group_bytes)), builder.mul(panel_stride, whole(panels - 1))

        def group(g: Any, sums: list[Any]) -> list[Any]:
            group_at = builder.mul(g, whole(group_bytes))
            _fetch(builder, panel_at, group_at, group_bytes, end, hop, from_memory=from_memory)
            bytes_at = [builder.add(at, builder.mul(g, whole(SMALL_GROUP))) for at in token_at]

            def steps(j: Any, totals: list[Any]) -> list[Any]:
                totals = list(totals)
                row = builder.add(group_at, builder.mul(j, whole(4 * PANEL)))
                w = [
                    read(builder, builder.add(at, builder.add(row, whole(2 * PANEL + v * 4 * LANES))))
                    for at in panel_at
                    for v in range(vectors)
                ]
                for t in range(tokens):
                    for side in (0, 1):
                        quad = builder.add(builder.mul(j, whole(4)), whole(side * SMALL_GROUP // 2))
                        value = splat(builder, load(builder, bytes_at[t], quad, I32))
                        for i in range(panels * vectors):
                            place = t * panels * vectors + i
                            totals[place] = add(builder, totals[place], w[i][side], value)
                return totals

            nothing = ir.Constant(INTS, [0] * LANES)
            at = builder.add(start_offset, builder.mul(g, whole(4)))
            begins = [nothing if SIGNED_DOT else splat(builder, load(builder, one, at, I32)) for one in token_at]
            first = [begins[t] for t in range(tokens) for _ in range(panels * vectors)]
            totals = times(builder, whole(SMALL_GROUP // 8), first, steps)
            at = builder.add(scale_offset, builder.mul(builder.lshr(g, whole(1)), whole(4)))
            scale = [splat(builder, load(builder, one, at, F32)) for one in token_at]
            result = list(sums)
            for i in range(panels * vectors):
                place = builder.add(panel_at[i // vectors], group_at)
                weight_scale = half_floats(builder, place, i % vectors * 2 * LANES)
                for t in range(tokens):
                    n, both = t * panels * vectors + i, builder.fmul(weight_scale, scale[t])
                    result[n] = multiply_add(builder, builder.sitofp(totals[n], FLOATS), both, sums[n])
            return result

        first = _starts(builder, start, panels * vectors) * tokens
        _store(builder, times(builder, count, first, group), out, out_stride, panels * vectors)

    return emit


@intrinsic
def unpack_levels(typing: Any, panel: Any, groups: Any, out: Any) -> Any:
    """An int4 panel as it was packed becomes one with a byte for each level, which many rows then share."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        panel, groups, out = args
        half = SMALL_GROUP * PANEL // 2

        def group(g: Any, _: list[Any]) -> list[Any]:
            at = builder.add(panel, builder.mul(g, whole(2 * PANEL + half)))
            to = builder.add(out, builder.mul(g, whole(2 * PANEL + 2 * half)))
            _fetch(builder, [at], whole(0), 2 * PANEL + half, whole(FAR), whole(0))
            scales = load(builder, at, 0, INTS, align=64)
            builder.store(scales, pointer_to(builder, to, 0, INTS), align=64)
            for place in range(2 * PANEL, 2 * PANEL + half, 4 * LANES):
                for side, levels in enumerate(_unpacked(builder, load(builder, at, place, INTS, align=64))):
                    builder.store(levels, pointer_to(builder, to, place + side * half, INTS), align=64)
            return []

        times(builder, builder.mul(groups, whole(2)), [], group)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


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
