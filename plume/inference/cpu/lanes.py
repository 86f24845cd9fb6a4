"""What compiled code is made with: machine code kept on disk, vectors, addresses, counters that threads share."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding as llvm
from filelock import FileLock, Timeout
from llvmlite import ir
from numba import njit, types
from numba.core.event import Event, Listener, install_listener
from numba.extending import intrinsic as numba_intrinsic

from plume.inference.cpu.panels import LANES
from plume.util.places import user_cache

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

FEATURES = llvm.get_host_cpu_features()
ARM = platform.machine().lower() in ("arm64", "aarch64")
VNNI = bool(FEATURES.get("avx512vnni"))
SIGNED_DOT = ARM and bool(FEATURES.get("dotprod"))  # weights are brought back to signed bytes before the product
# two products of neighbouring bytes are summed in 16 bits, so activations are rounded such that the sum fits
PAIRED_DOT = bool(FEATURES.get("avx2")) and not VNNI
WIDE = bool(FEATURES.get("avx512f"))
# whether weights for few rows come faster when code asks for them early; AMD's own prefetcher is faster alone
EARLY = WIDE and not llvm.get_host_cpu_name().startswith("znver")


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
    # numba optimises what was compiled once more in whatever calls it; by then the address may be a pointer made of a
    # part of the sum, which is 0 in a first round, and whatever is written through a null pointer would be left out
    set.add(builder.function.attributes, "null_pointer_is_valid")  # llvmlite knows no such attribute
    return builder.inttoptr(address, kind.as_pointer())


def splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def load(builder: Any, address: Any, offset: Any, kind: Any, align: int = 4) -> Any:
    return builder.load(pointer_to(builder, address, offset, kind), align=align)


def times(
    builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]], *,
    maybe_none: bool = False,
) -> list[Any]:  # fmt: skip
    """A loop of `count` rounds (at least one, unless there may be none) that hands the carried values on."""
    before = builder.block
    inside, after = builder.append_basic_block("round"), builder.append_basic_block("done")
    if maybe_none:
        builder.cbranch(builder.icmp_signed(">", count, whole(0)), inside, after)
    else:
        builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(I64)
    index.add_incoming(whole(0), before)
    phis = [builder.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(index, phis)
    following, end = builder.add(index, whole(1)), builder.block
    index.add_incoming(following, end)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, end)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    if not maybe_none:
        return results
    found = [builder.phi(value.type) for value in carried]
    for phi, none, value in zip(found, carried, results, strict=True):
        phi.add_incoming(none, before)
        phi.add_incoming(value, end)
    return found


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
            return pointer_to(builder, args[0], 0, kind)

        return types.CPointer(numba_type)(types.int64), codegen

    return pointer


# pointers from addresses, for numba.carray
floats_at = _pointer(F32, types.float32)
bytes_at = _pointer(I8, types.int8)
unsigned_bytes_at = _pointer(I8, types.uint8)
halves_at = _pointer(I16, types.uint16)
shorts_at = _pointer(I16, types.int16)
ints_at = _pointer(I32, types.int32)
longs_at = _pointer(I64, types.int64)
doubles_at = _pointer(ir.DoubleType(), types.float64)


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), codegen


@intrinsic
def bits_of_float(typing: Any, number: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), codegen


# ---- machine code on disk -------------------------------------------------------------------------------------------

Code = TypeVar("Code", bound=Callable[..., Any])


def sources(folder: Path = Path(__file__).parent) -> str:
    """What all compiled code is made of, as a hash."""
    parts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


SOURCES = sources()
COMPILE_SECONDS = 600  # after which a process compiles for itself
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}


def compiled(function: Code, *, from_python: bool = False) -> Code:
    """Machine code, kept on disk. Sums may be reordered for vectors, but infinities and NaNs keep their meaning."""
    wrappers = {"no_cpython_wrapper": not from_python, "no_cfunc_wrapper": not from_python}
    code: Any = njit(nogil=True, cache=True, error_model="numpy", fastmath=FASTMATH, **wrappers)(function)
    # numba asks only whether the function's own file has changed, but what it calls is part of its machine code
    code._cache._cache_file._source_stamp = SOURCES
    template = code.get_call_template
    # a constant argument would be compiled for by itself, and the first value of a loop's variable for nothing
    code.get_call_template = lambda args, names: template([types.unliteral(arg) for arg in args], names)
    result: Code = code
    return result


def entry(function: Code) -> Code:
    """The same of a function that Python calls too."""
    return compiled(function, from_python=True)


LINKED: dict[str, tuple[Any, Any]] = {}  # symbols, with their code and its type


def linked(code: Callable[..., None], arguments: int) -> Any:
    """What compiled code calls a function of so many addresses and sizes by: a symbol, which `link` defines.

    numba takes what a function calls into its own code and optimises it again with each caller, and each caller of
    those, which takes long where it is large.
    """
    name, kind = f"plume_{code.__name__}", types.void(*[types.int64] * arguments)
    LINKED[name] = code, kind
    return types.ExternalFunction(name, kind)


def link() -> None:
    """Compile or load the functions that are called by name, before code that calls them is."""
    for name, (code, kind) in LINKED.items():
        code.compile(kind.args)
        made = code.overloads[kind.args]
        llvm.add_symbol(name, made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name))


class Announcer(Listener):  # type: ignore[misc]
    """Says once that numba has begun to compile; loading what was compiled before is quick and not announced."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: Event) -> None:
        if not self.said:
            print("compiling the CPU engine for this machine; next time it is ready ...", file=sys.stderr, flush=True)
        self.said = True

    def on_end(self, event: Event) -> None:
        pass


ANNOUNCER = Announcer()
READY: set[str] = set()  # code that this process has


@cache
def compile_lock() -> FileLock | None:
    """Held while code is compiled, and taken again by the thread that has it; None where no file can be locked."""
    path = user_cache() / f"compile-{SOURCES[:16]}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return None
    return FileLock(path, timeout=COMPILE_SECONDS)


@contextmanager
def announced_compilation(what: str) -> Iterator[None]:
    """Compile, or wait until another process has: code of which each compiled a part would not round alike.

    What this process has compiled or loaded before needs no waiting, whatever others compile meanwhile.
    """
    if what in READY:
        yield
        return
    with ExitStack() as held:
        lock = compile_lock()
        if lock is not None:
            with suppress(Timeout, OSError):
                held.enter_context(lock)
        held.enter_context(install_listener("numba:compile", ANNOUNCER))
        yield
    READY.add(what)
