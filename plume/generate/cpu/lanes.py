"""What compiled code needs and Python has no words for: vectors, addresses, counters that threads share."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

from plume.generate.cpu.layout import LANES

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

FEATURES = llvm.get_host_cpu_features()
ARM = platform.machine().lower() in ("arm64", "aarch64")
SIGNED_DOT = ARM and bool(FEATURES.get("dotprod"))  # weights are brought back to signed bytes before the product
WIDE = bool(FEATURES.get("avx512f"))


def intrinsic(function: Callable[..., Any]) -> Any:
    """What compiled code can call and Python cannot."""
    return numba_intrinsic(function)


def whole(number: int) -> Any:
    """A number that addresses and sizes are counted in."""
    return ir.Constant(I64, number)


def pointer_to(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """The address, moved by a number of bytes, as a pointer."""
    if not isinstance(offset, int) or offset:
        address = builder.add(address, whole(offset) if isinstance(offset, int) else offset)
    return builder.inttoptr(address, kind.as_pointer())


def splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def load(builder: Any, address: Any, offset: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(pointer_to(builder, address, offset, kind), align=align)


def times(builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """A loop of `count` rounds (at least one) that hands the carried values from round to round."""
    before = builder.block
    inside, after = builder.append_basic_block("round"), builder.append_basic_block("done")
    builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(I64)
    index.add_incoming(whole(0), before)
    phis = [builder.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(index, phis)
    following = builder.add(index, whole(1))
    index.add_incoming(following, builder.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return results


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fmuladd.v{LANES}f32", [], kind), [a, b, c])


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
        return builder.atomic_rmw("add", pointer_to(builder, args[0], 0, I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer_to(builder, args[0], 0, I64), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typing: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer_to(builder, args[0], 0, I64), "seq_cst", 8)
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
