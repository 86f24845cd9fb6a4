"""The few vector instructions a compiler does not find by itself, as numba intrinsics that work on plain addresses."""

# A tile is the product of a few tokens' activations with a few panels of weights, summed over k in one order whatever
# its shape, so a token's result never depends on what it is computed together with.

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

from plume.generate.layout import FIXED, GROUP, HEADER, LANES, PANEL

NEAR, FAR = 2048, 8192  # bytes that weights are fetched before they are needed: to the core, and out of memory

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

FEATURES = llvm.get_host_cpu_features()
ARM = platform.machine().lower() in ("arm64", "aarch64")
SIGNED_DOT = ARM and bool(FEATURES.get("dotprod"))  # weights are brought back to signed bytes before the product
WIDE = bool(FEATURES.get("avx512f"))
TOGETHER = (
    (12, 8, 4, 2, 1) if WIDE else (3, 2, 1)
)  # tokens in a tile: as many sums as the registers hold, then the rest


def first_reader(tokens: int) -> bool:
    """Whether a tile mostly meets panels that no tile before it has brought near: full ones are many to a panel."""
    return tokens < TOGETHER[0]


Emit = Callable[[Any, Any], None]  # writes a tile's code: the builder, and the tile's eight arguments


def intrinsic(function: Callable[..., Any]) -> Any:
    """What compiled code can call and Python cannot."""
    return numba_intrinsic(function)


def _at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """The address, moved by a number of bytes, as a pointer."""
    if not isinstance(offset, int) or offset:
        address = builder.add(address, ir.Constant(I64, offset) if isinstance(offset, int) else offset)
    return builder.inttoptr(address, kind.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def _load(builder: Any, address: Any, offset: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(_at(builder, address, offset, kind), align=align)


def _fetch(
    builder: Any, panels: list[Any], offset: Any, size: int, end: Any, hop: Any, *, from_memory: bool = True
) -> None:
    """Ask for the bytes that these panels will need soon after this offset. Behind a panel's end its neighbour begins,
    which is being read already, so from there on those are meant that a hop further on are next."""
    pointer = ir.PointerType()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    fetch = builder.module.declare_intrinsic("llvm.prefetch.p0", [], kind)
    for ahead, closeness in ((NEAR, 3), (FAR, 1)) if from_memory else ((NEAR, 3),):
        place = builder.add(offset, ir.Constant(I64, ahead))
        past = builder.icmp_signed(">=", place, end)
        place = builder.add(place, builder.select(past, hop, ir.Constant(I64, 0)))
        for panel in panels:
            for line in range(0, size, 64):
                at = builder.inttoptr(builder.add(panel, builder.add(place, ir.Constant(I64, line))), pointer)
                builder.call(fetch, [at, *(ir.Constant(I32, n) for n in (0, closeness, 1))])


def _times(builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """A loop of `count` rounds (at least one) that hands the carried values from round to round."""
    before = builder.block
    inside, after = builder.append_basic_block("round"), builder.append_basic_block("done")
    builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    phis = [builder.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(index, phis)
    following = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, builder.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return results


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fmuladd.v{LANES}f32", [], kind), [a, b, c])


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
    return _sum_of_products(tokens, panels, LANES * 4, 0, lambda builder, row: [_load(builder, row, 0, FLOATS)])


def scaled_tile(tokens: int, panels: int) -> Emit:
    """The same with panels of PANEL rows that were unpacked: scales, and then floats to be multiplied by them."""

    def read(builder: Any, row: Any) -> list[Any]:
        return [_load(builder, row, v * LANES * 4, FLOATS, align=64) for v in range(PANEL // LANES)]

    return _sum_of_products(tokens, panels, PANEL * 4, HEADER, read)


def fixed_tile(tokens: int, panels: int) -> Emit:
    """The same with panels as they were packed: scales, and then whole numbers of 24 bits."""
    return _sum_of_products(tokens, panels, FIXED, HEADER, _fixed)


def _fixed(builder: Any, row: Any) -> list[Any]:
    found = []
    for v in range(PANEL // LANES):
        high = _load(builder, row, v * LANES * 2, ir.VectorType(I16, LANES), align=32)
        low = _load(builder, row, PANEL * 2 + v * LANES, ir.VectorType(I8, LANES), align=16)
        high = builder.shl(builder.sext(high, INTS), ir.Constant(INTS, [8] * LANES))
        found.append(builder.sitofp(builder.or_(high, builder.zext(low, INTS)), FLOATS))
    return found


def _sum_of_products(tokens: int, panels: int, step: int, header: int, read: Callable[[Any, Any], list[Any]]) -> Emit:
    """A tile over columns of so many bytes, which `read` makes vectors; behind a header the sums are scaled by it."""
    vectors = PANEL // LANES if header else 1

    def emit(builder: Any, args: Any) -> None:
        weights, panel_stride, values, token_stride, start, out, out_stride, depth = args
        panel_at = [builder.add(weights, builder.mul(panel_stride, ir.Constant(I64, p))) for p in range(panels)]
        token_at = [builder.add(values, builder.mul(token_stride, ir.Constant(I64, t))) for t in range(tokens)]
        end = builder.add(builder.mul(depth, ir.Constant(I64, step)), ir.Constant(I64, header))
        hop = builder.mul(panel_stride, ir.Constant(I64, panels - 1))

        def body(k: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            offset = builder.add(builder.mul(k, ir.Constant(I64, step)), ir.Constant(I64, header))
            four = builder.mul(k, ir.Constant(I64, 4))
            w = [vector for at in panel_at for vector in read(builder, builder.add(at, offset))]
            if header:  # weights come from memory, keys and values are in the cache
                _fetch(builder, panel_at, offset, step, end, hop, from_memory=first_reader(tokens))
            for t in range(tokens):
                value = _splat(builder, _load(builder, token_at[t], four, F32))
                for i in range(panels * vectors):
                    place = t * panels * vectors + i
                    sums[place] = _multiply_add(builder, value, w[i], sums[place])
            return sums

        first = _starts(builder, start, panels * vectors)
        if header:
            zero = ir.Constant(FLOATS, [0.0] * LANES)
            sums = _times(builder, depth, [zero] * tokens * panels * vectors, body)
            scales = [_load(builder, at, v * LANES * 4, FLOATS, align=32) for at in panel_at for v in range(vectors)]
            sums = [
                _multiply_add(builder, total, scales[i % len(scales)], first[i % len(first)])
                for i, total in enumerate(sums)
            ]
        else:
            sums = _times(builder, depth, first * tokens, body)
        _store(builder, sums, out, out_stride, panels * vectors)

    return emit


def int8_tile(tokens: int, panels: int) -> Emit:
    """The same with int8 groups. A panel's group is its scales (bfloat16) and then its bytes, four of k at a time;
    a token is its bytes, then one scale per group, then what each group's sum starts from."""

    def emit(builder: Any, args: Any) -> None:
        weights, panel_stride, values, token_stride, start, out, out_stride, groups = args
        panel_at = [builder.add(weights, builder.mul(panel_stride, ir.Constant(I64, p))) for p in range(panels)]
        token_at = [builder.add(values, builder.mul(token_stride, ir.Constant(I64, t))) for t in range(tokens)]
        vectors = PANEL // LANES
        group_bytes = 2 * PANEL + GROUP * PANEL
        scale_offset = builder.mul(groups, ir.Constant(I64, GROUP))
        start_offset = builder.add(scale_offset, builder.mul(groups, ir.Constant(I64, 4)))
        end = builder.mul(groups, ir.Constant(I64, group_bytes))
        hop = builder.mul(panel_stride, ir.Constant(I64, panels - 1))

        def group(g: Any, sums: list[Any]) -> list[Any]:
            four = builder.mul(g, ir.Constant(I64, 4))
            begins = [_splat(builder, _load(builder, at, builder.add(start_offset, four), I32)) for at in token_at]
            group_at = builder.mul(g, ir.Constant(I64, group_bytes))
            bases = [builder.add(at, group_at) for at in panel_at]
            bytes_at = [builder.add(at, builder.mul(g, ir.Constant(I64, GROUP))) for at in token_at]

            def steps(j: Any, totals: list[Any]) -> list[Any]:
                totals = list(totals)
                for u in range(4):
                    quad = builder.add(builder.mul(j, ir.Constant(I64, 16)), ir.Constant(I64, 4 * u))
                    row = builder.mul(quad, ir.Constant(I64, PANEL))
                    w = [
                        _load(
                            builder, base, builder.add(row, ir.Constant(I64, 2 * PANEL + v * 4 * LANES)), INTS, align=64
                        )
                        for base in bases
                        for v in range(vectors)
                    ]
                    at = builder.add(group_at, row)
                    _fetch(builder, panel_at, at, vectors * LANES * 4, end, hop, from_memory=first_reader(tokens))
                    for t in range(tokens):
                        value = _splat(builder, _load(builder, bytes_at[t], quad, I32))
                        for i in range(panels * vectors):
                            place = t * panels * vectors + i
                            totals[place] = _dot4(builder, totals[place], w[i], value)
                return totals

            first = [begins[t] for t in range(tokens) for _ in range(panels * vectors)]
            totals = _times(builder, ir.Constant(I64, GROUP // 16), first, steps)
            scale = [_splat(builder, _load(builder, at, builder.add(scale_offset, four), F32)) for at in token_at]
            result = list(sums)
            for p in range(panels):
                for v in range(vectors):
                    half = _load(builder, bases[p], v * 2 * LANES, ir.VectorType(I16, LANES), align=32)
                    bits = builder.shl(builder.zext(half, INTS), ir.Constant(INTS, [16] * LANES))
                    weight_scale = builder.bitcast(bits, FLOATS)
                    for t in range(tokens):
                        i = (t * panels + p) * vectors + v
                        both = builder.fmul(weight_scale, scale[t])
                        result[i] = _multiply_add(builder, builder.sitofp(totals[i], FLOATS), both, sums[i])
            return result

        first = _starts(builder, start, panels * vectors) * tokens
        _store(builder, _times(builder, groups, first, group), out, out_stride, panels * vectors)

    return emit


def _starts(builder: Any, start: Any, count: int) -> list[Any]:
    """What the sums begin with: the bias, or zero when there is none."""
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    before, given, after = builder.block, builder.append_basic_block("bias"), builder.append_basic_block("go")
    builder.cbranch(builder.icmp_signed("!=", start, ir.Constant(I64, 0)), given, after)
    builder.position_at_end(given)
    loaded = [_load(builder, start, i * LANES * 4, FLOATS) for i in range(count)]
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
        row = builder.add(out, builder.mul(out_stride, ir.Constant(I64, token)))
        builder.store(value, _at(builder, row, place * LANES * 4, FLOATS), align=4)


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
            builder.store(ir.Constant(I64, 0), done)
            for tokens, emit in tiles:
                ask, inside, after = (builder.append_basic_block(name) for name in ("ask", "tile", "fewer"))
                builder.branch(ask)
                builder.position_at_end(ask)
                row = builder.load(done)
                following = builder.add(row, ir.Constant(I64, tokens))
                builder.cbranch(builder.icmp_signed("<=", following, rows), inside, after)
                builder.position_at_end(inside)
                values_at, out_at = (
                    builder.add(at, builder.mul(row, step)) for at, step in ((values, stride), (out, out_stride))
                )
                emit(builder, (panel, ir.Constant(I64, 0), values_at, stride, start, out_at, out_stride, depth))
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
            offset = builder.add(builder.mul(k, ir.Constant(I64, FIXED)), ir.Constant(I64, HEADER))
            to = builder.add(out, builder.add(builder.mul(k, ir.Constant(I64, PANEL * 4)), ir.Constant(I64, HEADER)))
            _fetch(builder, [panel], offset, FIXED, offset, ir.Constant(I64, 0))
            for v, vector in enumerate(_fixed(builder, builder.add(panel, offset))):
                builder.store(vector, _at(builder, to, v * LANES * 4, FLOATS), align=64)
            return []

        for v in range(PANEL // LANES):
            scales = _load(builder, panel, v * LANES * 4, FLOATS, align=32)
            builder.store(scales, _at(builder, out, v * LANES * 4, FLOATS), align=64)
        _times(builder, depth, [], column)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger of two numbers, neither a NaN: unlike max(), this lets a loop over it become vector code."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.maxnum.f32", [], ir.FunctionType(F32, [F32, F32]))
        return builder.call(function, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), codegen


@intrinsic
def atomic_add(typing: Any, address: Any, amount: Any) -> Any:
    """Add to a shared counter; returns what it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _at(builder, args[0], 0, I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_at(builder, args[0], 0, I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typing: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _at(builder, args[0], 0, I64), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if ARM:
            hint = builder.module.declare_intrinsic("llvm.aarch64.hint", [], ir.FunctionType(ir.VoidType(), [I32]))
            builder.call(hint, [ir.Constant(I32, 1)])
        else:
            wait = builder.module.declare_intrinsic("llvm.x86.sse2.pause", [], ir.FunctionType(ir.VoidType(), []))
            builder.call(wait, [])
        return context.get_dummy_value()

    return types.void(), codegen


def _pointer(kind: Any, numba_type: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], kind.as_pointer())

        return types.CPointer(numba_type)(types.int64), codegen

    return pointer


# pointers from addresses, for numba.carray
floats_at = _pointer(F32, types.float32)
bytes_at = _pointer(I8, types.int8)
unsigned_bytes_at = _pointer(I8, types.uint8)
halves_at = _pointer(I16, types.uint16)
shorts_at = _pointer(I16, types.int16)
ints_at = _pointer(I32, types.int32)


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen
