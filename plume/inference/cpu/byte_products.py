"""Four products of bytes at a time, and bytes looked up among 16: the instructions that each machine has for them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from plume.inference.cpu.lanes import (
    ARM,
    F32,
    FEATURES,
    FLOATS,
    I8,
    I16,
    I32,
    INTS,
    PAIRED_DOT,
    SIGNED_DOT,
    VNNI,
    intrinsic,
    load,
    multiply_add,
    pointer_to,
    splat,
)  # fmt: skip
from plume.inference.cpu.panels import GROUP, LANES, LEVELS, SMALL_GROUP


def dot4(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    """Add to each lane the product of its four weight bytes, where 128 is zero, with four signed activation bytes."""
    if SIGNED_DOT:
        signed = builder.xor(weights, ir.Constant(INTS, [-0x7F7F7F80] * LANES))
        return signed_dot4(builder, total, signed, values)
    if VNNI:
        kind = ir.FunctionType(INTS, [INTS, INTS, INTS])
        add = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", [], kind)
        return builder.call(add, [total, weights, values])
    if PAIRED_DOT:
        return _avx2_dot4(builder, total, weights, values)
    for byte in range(4):  # any machine
        up, eight = ir.Constant(INTS, [24 - 8 * byte] * LANES), ir.Constant(INTS, [8 * byte] * LANES)
        value = builder.ashr(builder.shl(values, up), ir.Constant(INTS, [24] * LANES))
        weight = builder.and_(builder.lshr(weights, eight), ir.Constant(INTS, [255] * LANES))
        total = builder.add(total, builder.mul(weight, value))
    return total


def _avx2_dot4(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    """Exact as long as neighbouring values of one sign are 128 or less together: 255 x 128 fits into 16 bits."""
    bytes32, shorts, ints = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)

    def call(name: str, result: Any, given: Any, *args: Any) -> Any:
        kind = ir.FunctionType(result, [given] * 2)
        return builder.call(builder.module.declare_intrinsic(f"llvm.x86.avx2.{name}", [], kind), args)

    parts = []
    for start in (0, 8):
        w, a = (builder.bitcast(_part(builder, vector, start, 8), bytes32) for vector in (weights, values))
        pairs = call("pmadd.ub.sw", shorts, bytes32, w, a)
        parts.append(call("pmadd.wd", ints, shorts, pairs, ir.Constant(shorts, [1] * 16)))
    return builder.add(total, builder.shuffle_vector(*parts, ir.Constant(INTS, list(range(LANES)))))


def signed_dot4(builder: Any, total: Any, weights: Any, values: Any) -> Any:
    """The same with signed weight bytes."""
    quarter, bytes16 = ir.VectorType(I32, 4), ir.VectorType(I8, 16)
    sdot = builder.module.declare_intrinsic(
        "llvm.aarch64.neon.sdot.v4i32.v16i8", [], ir.FunctionType(quarter, [quarter, bytes16, bytes16])
    )
    parts = []
    for start in range(0, LANES, 4):
        t, w, a = (_part(builder, vector, start, 4) for vector in (total, weights, values))
        parts.append(builder.call(sdot, [t, builder.bitcast(w, bytes16), builder.bitcast(a, bytes16)]))
    eight = ir.Constant(ir.VectorType(I32, 8), list(range(8)))
    halves = [builder.shuffle_vector(parts[i], parts[i + 1], eight) for i in (0, 2)]
    return builder.shuffle_vector(halves[0], halves[1], ir.Constant(INTS, list(range(LANES))))


def levels_of(builder: Any, codes: Any) -> Any:
    """The int4 level of each byte's code: signed, or with 128 for zero, as the products of this machine want it."""
    table = [int(level) if SIGNED_DOT else int(level) + 128 for level in LEVELS]
    if VNNI:
        return _shuffled(builder, "llvm.x86.avx512.pshuf.b.512", table * 4, [codes])
    if ARM:
        quarters = [_part(builder, codes, start, 4) for start in range(0, LANES, 4)]
        return _shuffled(builder, "llvm.aarch64.neon.tbl1.v16i8", table, quarters)
    if FEATURES.get("avx2"):
        return _shuffled(builder, "llvm.x86.avx2.pshuf.b", table * 2, [_part(builder, codes, n, 8) for n in (0, 8)])
    kind = ir.VectorType(I8, 4 * LANES)  # any machine
    given, found = builder.bitcast(codes, kind), ir.Constant(kind, [table[0]] * 4 * LANES)
    for code in range(1, 16):
        same = builder.icmp_signed("==", given, ir.Constant(kind, [code] * 4 * LANES))
        found = builder.select(same, ir.Constant(kind, [table[code]] * 4 * LANES), found)
    return builder.bitcast(found, INTS)


def _part(builder: Any, vector: Any, start: int, count: int) -> Any:
    pick = ir.Constant(ir.VectorType(I32, count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, ir.Constant(INTS, ir.Undefined), pick)


def _shuffled(builder: Any, name: str, table: list[int], parts: list[Any]) -> Any:
    """Parts of a vector looked up in a table, and put together again."""
    kind = ir.VectorType(I8, len(table))
    look = builder.module.declare_intrinsic(name, [], ir.FunctionType(kind, [kind, kind]))
    found = [builder.call(look, [ir.Constant(kind, table), builder.bitcast(part, kind)]) for part in parts]
    found = [builder.bitcast(part, ir.VectorType(I32, len(table) // 4)) for part in found]
    while len(found) > 1:
        size = ir.Constant(ir.VectorType(I32, 2 * found[0].type.count), list(range(2 * found[0].type.count)))
        found = [builder.shuffle_vector(*found[i : i + 2], size) for i in range(0, len(found), 2)]
    return found[0]


def half_floats(builder: Any, address: Any, offset: Any) -> Any:
    """A vector of numbers of half precision."""
    bits = load(builder, address, offset, ir.VectorType(I16, LANES), align=32)
    if ARM or FEATURES.get("avx2"):
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    wide, up = builder.zext(bits, INTS), ir.Constant(INTS, [13] * LANES)
    magnitude = builder.shl(builder.and_(wide, ir.Constant(INTS, [0x7FFF] * LANES)), up)
    sign = builder.shl(builder.and_(wide, ir.Constant(INTS, [0x8000] * LANES)), ir.Constant(INTS, [16] * LANES))
    number = builder.bitcast(builder.or_(magnitude, sign), FLOATS)
    return builder.fmul(number, ir.Constant(FLOATS, [2.0**112] * LANES))


@intrinsic
def largest_of_group(typing: Any, source: Any) -> Any:
    """The largest magnitude of GROUP floats, and of sums of neighbours where products are added in pairs."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one, two = ir.FunctionType(FLOATS, [FLOATS]), ir.FunctionType(FLOATS, [FLOATS] * 2)
        magnitude = builder.module.declare_intrinsic(f"llvm.fabs.v{LANES}f32", [], one)
        larger = builder.module.declare_intrinsic(f"llvm.maxnum.v{LANES}f32", [], two)
        found = ir.Constant(FLOATS, [1e-30] * LANES)
        for start in range(0, GROUP, LANES):
            x = load(builder, args[0], start * 4, FLOATS)
            candidates = [x]
            if PAIRED_DOT:
                swapped = ir.Constant(INTS, [lane ^ 1 for lane in range(LANES)])
                candidates.append(builder.fadd(x, builder.shuffle_vector(x, x, swapped)))
            for vector in candidates:
                found = builder.call(larger, [found, builder.call(magnitude, [vector])], fastmath=("nnan", "nsz"))
        kind = ir.FunctionType(F32, [FLOATS])
        most = builder.module.declare_intrinsic(f"llvm.vector.reduce.fmax.v{LANES}f32", [], kind)
        return builder.call(most, [found], fastmath=("nnan", "nsz"))

    return types.float32(types.int64), codegen


@intrinsic
def codes_of(typing: Any, source: Any, inverse: Any, out: Any) -> Any:
    """SMALL_GROUP floats times a number, rounded to bytes; returns the sum of these."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, inverse, out = args
        floor = builder.module.declare_intrinsic(f"llvm.floor.v{LANES}f32", [], ir.FunctionType(FLOATS, [FLOATS]))
        half, total = ir.Constant(FLOATS, [0.5] * LANES), ir.Constant(INTS, [0] * LANES)
        inverse, kind = splat(builder, inverse), ir.VectorType(I8, LANES)
        for start in range(0, SMALL_GROUP, LANES):
            scaled = multiply_add(builder, load(builder, source, start * 4, FLOATS), inverse, half)
            codes = builder.fptosi(builder.call(floor, [scaled]), INTS)
            builder.store(builder.trunc(codes, kind), pointer_to(builder, out, start, kind), align=4)
            total = builder.add(total, codes)
        add = builder.module.declare_intrinsic(f"llvm.vector.reduce.add.v{LANES}i32", [], ir.FunctionType(I32, [INTS]))
        return builder.call(add, [total])

    return types.int32(types.int64, types.float32, types.int64), codegen
