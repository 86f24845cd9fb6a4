"""Products of activations with weights, written as the vector instructions that a compiler does not find by itself."""

# A tile is the product of a few tokens' activations with a few panels of weights, summed over k in one order whatever
# its shape, so a token's result never depends on what it is computed together with.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from plume.inference.cpu import lanes
from plume.inference.cpu.byte_products import dot4, half_floats, levels_of, signed_dot4
from plume.inference.cpu.lanes import FLOATS, INTS, intrinsic, load, multiply_add, pointer_to, splat, times, whole
from plume.inference.cpu.panels import CACHE_BYTES, FIXED, FULL, GROUP, HEADER, LANES, PANEL, SMALL_GROUP

NEAR, FAR = 2048, 8192  # bytes that weights are fetched before they are needed: to the core, and out of memory
# tokens in a tile: as many sums as the registers hold, then the rest
TOGETHER = (12, 8, 4, 2, 1) if lanes.WIDE else (3, 2, 1)
PACKED = (6, 4, 2, 1) if lanes.WIDE else TOGETHER  # of int4, whose codes and short groups take more registers
# with so many, a panel is taken in two halves: as many sums, and half as many weights to hold beside them
HALVED = () if lanes.WIDE else (6,)
WHOLE, HALVES = range(PANEL // LANES), [range(v, v + 1) for v in range(PANEL // LANES)]  # vectors of a panel
STEP = 4  # columns, or quads of bytes, for which the lines of the next panel are fetched together
FETCHERS = 96  # rows whose full tiles fetch the next panel: a line of 64 bytes with each step
SUMMED = 64  # float products that are added up before their sum is added to the others

# writes a tile's code: the builder, and the tile's eight arguments; three more are where the panel after this one is to
# be fetched from, how many bytes of it with each step, and half of that
Emit = Callable[[Any, Any], None]


def _ahead(tokens: int, full: int = TOGETHER[0], bound: int = 4) -> list[tuple[int, int]]:
    """How many bytes ahead a tile fetches weights, and how near. A full one mostly meets panels that others brought
    near. Up to `bound` tokens a tile waits for memory alone, and some machines' own prefetcher is faster by itself."""
    if not (lanes.WIDE if tokens > bound else lanes.EARLY):
        return []
    return [(NEAR, 3)] if tokens == full else [(NEAR, 3), (FAR, 1)]


def _fetch(
    builder: Any, panels: list[Any], offset: Any, size: int, end: Any, hop: Any, distances: list[tuple[int, int]]
) -> None:
    """Ask for the bytes that these panels will need soon after this offset. Behind a panel's end its neighbour begins,
    which is being read already, so from there on those are meant that a hop further on are next."""
    for ahead, closeness in distances:
        place = builder.add(offset, whole(ahead))
        past = builder.icmp_signed(">=", place, end)
        place = builder.add(place, builder.select(past, hop, whole(0)))
        for panel in panels:
            for line in range(0, size, 64):
                _fetch_line(builder, builder.add(panel, builder.add(place, whole(line))), closeness)


def _fetch_line(builder: Any, address: Any, closeness: int, *, write: bool = False) -> None:
    pointer = ir.PointerType()
    kind = ir.FunctionType(ir.VoidType(), [pointer, lanes.I32, lanes.I32, lanes.I32])
    fetch = builder.module.declare_intrinsic("llvm.prefetch.p0", [], kind)
    how = [ir.Constant(lanes.I32, n) for n in (int(write), closeness, 1)]
    builder.call(fetch, [builder.inttoptr(address, pointer), *how])


def _part_of_following(
    builder: Any, tokens: int, panel: Any, size: Any, row: Any, rows: Any, columns: Any
) -> list[Any]:  # fmt: skip
    """Where the full tile at this row begins to fetch the next panel, how many bytes it moves on with each step, and
    half of that. The tiles of the first FETCHERS rows do it all, others ask for what is near already."""
    few = builder.icmp_signed("<", rows, whole(FETCHERS))
    fetchers = builder.select(few, rows, whole(FETCHERS))
    steps = builder.udiv(builder.add(columns, whole(STEP - 1)), whole(STEP))
    each = builder.udiv(builder.mul(size, whole(tokens)), builder.mul(fetchers, steps))
    before = builder.udiv(builder.mul(size, row), fetchers)
    each = builder.select(builder.icmp_signed("<", row, fetchers), builder.add(each, whole(1)), whole(0))
    return [builder.add(panel, before), each, builder.udiv(each, whole(2))]


def _fetch_out(builder: Any, out: Any, out_stride: Any, tokens: int) -> None:
    """Ask for the lines that a tile will write."""
    for token in range(tokens):
        row = builder.add(out, builder.mul(out_stride, whole(token)))
        for line in range(0, 4 * PANEL, 64):
            _fetch_line(builder, builder.add(row, whole(line)), 3, write=True)


def _fetch_following(builder: Any, following: list[Any], step: Any) -> None:
    """Ask for the next panel's two lines of this step. Full tiles do, each for its part of the panel: the first of them
    to meet it would wait otherwise, and wait longer than the others compute."""
    if following:
        at, each, half = following
        at = builder.add(at, builder.mul(step, each))
        _fetch_line(builder, at, 2)
        _fetch_line(builder, builder.add(at, half), 2)


def cache_tile(tokens: int, panels: int, item: int) -> Emit:
    """Keys or values, numbers of 4, 2 or 1 bytes: out[t, p, :] = sum over k of values[t, k] * weights[p, k, :], panels
    one vector wide. In place of a start it is given how many products are added up before their sum is.

    Addresses and strides are in bytes.
    """

    def read(builder: Any, row: Any) -> list[Any]:
        if item == 1:
            codes = load(builder, row, 0, ir.VectorType(lanes.I8, LANES), align=LANES)
            return [builder.sitofp(builder.sext(codes, INTS), FLOATS)]
        return [load(builder, row, 0, FLOATS) if item == 4 else half_floats(builder, row, 0)]

    return _sum_of_products(tokens, panels, LANES * item, 0, read)


def scaled_tile(tokens: int, panels: int, part: range = WHOLE) -> Emit:
    """The same with panels of PANEL rows, packed or unpacked: scales, and then floats to be multiplied by them. Of a
    panel's vectors those of the part."""

    def read(builder: Any, row: Any) -> list[Any]:
        return [load(builder, row, v * LANES * 4, FLOATS, align=64) for v in part]

    return _sum_of_products(tokens, panels, FULL, HEADER, read, part)


def fixed_tile(tokens: int, panels: int, part: range = WHOLE) -> Emit:
    """The same with panels as they were packed: scales, and then whole numbers of 24 bits."""
    return _sum_of_products(tokens, panels, FIXED, HEADER, partial(_fixed, part=part), part)


def _fixed(builder: Any, row: Any, part: range = WHOLE) -> list[Any]:
    found = []
    for v in part:
        high = load(builder, row, v * LANES * 2, ir.VectorType(lanes.I16, LANES), align=32)
        low = load(builder, row, PANEL * 2 + v * LANES, ir.VectorType(lanes.I8, LANES), align=16)
        high = builder.shl(builder.sext(high, INTS), ir.Constant(INTS, [8] * LANES))
        found.append(builder.sitofp(builder.or_(high, builder.zext(low, INTS)), FLOATS))
    return found


def _sum_of_products(
    tokens: int, panels: int, step: int, header: int, read: Callable[[Any, Any], list[Any]], part: range = HALVES[0]
) -> Emit:
    """A tile over columns of so many bytes, which `read` makes vectors; behind a header the sums are scaled by it."""
    vectors = len(part)

    def emit(builder: Any, args: Any) -> None:
        weights, panel_stride, values, token_stride, start, out, out_stride, depth, *following = args
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
                _fetch(builder, panel_at, offset, step, end, hop, _ahead(tokens))
            for t in range(tokens):
                value = splat(builder, load(builder, token_at[t], four, lanes.F32))
                for i in range(panels * vectors):
                    place = t * panels * vectors + i
                    sums[place] = multiply_add(builder, value, w[i], sums[place])
            return sums

        sums = _in_blocks(
            builder, depth, whole(SUMMED) if header else start, tokens * panels * vectors, body, following
        )
        if header:
            first = _starts(builder, start, panels * vectors, part.start)
            scales = [load(builder, at, v * LANES * 4, FLOATS, align=32) for at in panel_at for v in part]
            sums = [
                multiply_add(builder, total, scales[i % len(scales)], first[i % len(first)])
                for i, total in enumerate(sums)
            ]
        _store(builder, sums, out, out_stride, panels * vectors, part.start)

    return emit


def _in_blocks(
    builder: Any, depth: Any, size: Any, count: int, body: Callable[[Any, list[Any], Any], list[Any]],
    following: list[Any],
) -> list[Any]:  # fmt: skip
    """So many sums over all columns, added up in blocks of this size: a long sum in one go would lose more digits."""
    zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * count

    def block(b: Any, totals: list[Any]) -> list[Any]:
        before = builder.mul(b, size)
        left = builder.sub(depth, before)
        few = builder.icmp_signed("<", left, size)
        columns = builder.select(few, left, size)

        def step(s: Any, sums: list[Any]) -> list[Any]:
            first = builder.add(builder.mul(s, whole(STEP)), before)
            _fetch_following(builder, following, builder.add(s, builder.mul(b, whole(SUMMED // STEP))))
            for k in range(STEP):
                sums = body(whole(k), sums, first)
            return sums

        sums, done = zeros, whole(0)
        if following:
            sums = times(builder, builder.udiv(columns, whole(STEP)), sums, step, maybe_none=True)
            done = builder.and_(columns, whole(-STEP))
        rest, first = builder.sub(columns, done), builder.add(before, done)
        sums = times(builder, rest, sums, lambda k, given: body(k, given, first), maybe_none=bool(following))
        return [builder.fadd(total, part) for total, part in zip(totals, sums, strict=True)]

    blocks = builder.sdiv(builder.add(depth, builder.sub(size, whole(1))), size)
    return times(builder, blocks, zeros, block)


def int8_tile(tokens: int, panels: int, part: range = WHOLE) -> Emit:
    """The same with int8 groups. A panel's group is its scales (bfloat16) and then its bytes, four of k at a time;
    a token is its bytes, then one scale per group, then what each group's sum starts from."""

    def scales(builder: Any, group: Any, v: int) -> Any:
        half = load(builder, group, v * 2 * LANES, ir.VectorType(lanes.I16, LANES), align=32)
        return builder.bitcast(builder.shl(builder.zext(half, INTS), ir.Constant(INTS, [16] * LANES)), FLOATS)

    return _bytes_times_bytes(tokens, panels, part, (GROUP, 2 * PANEL, 4), scales, dot4)


def level_tile(tokens: int, panels: int, part: range = WHOLE) -> Emit:
    """The same with int4 panels that were unpacked: in small groups, float scales and then a byte for each level. What
    their sums start from is behind that of the large groups."""

    def scales(builder: Any, group: Any, v: int) -> Any:
        return load(builder, group, v * 4 * LANES, FLOATS, align=64)

    add = signed_dot4 if lanes.SIGNED_DOT else dot4
    return _bytes_times_bytes(tokens, panels, part, (SMALL_GROUP, 4 * PANEL, 8), scales, add, fetched=False)


def int4_tile(tokens: int, panels: int, part: range = WHOLE) -> Emit:
    """The same with int4 groups as they were packed: scales of half precision, then codes, those of columns 16 apart
    in one byte. Tokens are as for int8, with what the sum of each small group starts from behind."""

    def scales(builder: Any, group: Any, v: int) -> Any:
        return half_floats(builder, group, v * 2 * LANES)

    add = signed_dot4 if lanes.SIGNED_DOT else dot4
    return _bytes_times_bytes(tokens, panels, part, (SMALL_GROUP, 2 * PANEL, 8), scales, add, packed=2)


def _bytes_times_bytes(
    tokens: int, panels: int, part: range, sizes: tuple[int, int, int], scales: Any, add: Any, *, packed: int = 1,
    fetched: bool = True,
) -> Emit:  # fmt: skip
    """A tile over groups of bytes, each of which holds one weight or two. Sizes are those of a group, of the scales
    before its bytes, and of what is in a token between its bytes and its starts, for each large group. An unpacked
    panel is near already and not fetched."""
    size, header, between = sizes
    vectors, group_bytes = len(part), header + size * PANEL // packed
    together = 4 // packed  # loads of a round, 16 columns or twice 8

    def emit(builder: Any, args: Any) -> None:
        weights, panel_stride, values, token_stride, start, out, out_stride, groups, *following = args
        panel_at = [builder.add(weights, builder.mul(panel_stride, whole(p))) for p in range(panels)]
        token_at = [builder.add(values, builder.mul(token_stride, whole(t))) for t in range(tokens)]
        scale_offset, start_offset = (builder.mul(groups, whole(n)) for n in (GROUP, GROUP + between))
        count = builder.mul(groups, whole(GROUP // size))
        end, hop = builder.mul(count, whole(group_bytes)), builder.mul(panel_stride, whole(panels - 1))

        def group(g: Any, sums: list[Any]) -> list[Any]:
            at, nothing = builder.add(start_offset, builder.mul(g, whole(4))), ir.Constant(INTS, [0] * LANES)
            begins = [
                nothing if lanes.SIGNED_DOT else splat(builder, load(builder, one, at, lanes.I32)) for one in token_at
            ]
            group_at = builder.mul(g, whole(group_bytes))
            if packed == 2:
                _fetch(builder, panel_at, group_at, group_bytes, end, hop, _ahead(tokens, PACKED[0], 2))
            bases = [builder.add(at, group_at) for at in panel_at]
            bytes_at = [builder.add(at, builder.mul(g, whole(size))) for at in token_at]

            def steps(j: Any, totals: list[Any]) -> list[Any]:
                totals = list(totals)
                _fetch_following(builder, following, builder.add(builder.mul(g, whole(size // 16)), j))
                for u in range(together):
                    quad = builder.add(builder.mul(j, whole(4 * together)), whole(4 * u))
                    row = builder.mul(quad, whole(PANEL))
                    places = [builder.add(row, whole(header + v * 4 * LANES)) for v in part]
                    w = [load(builder, base, at, INTS, align=64) for base in bases for at in places]
                    if fetched and packed == 1:
                        at = builder.add(group_at, row)
                        _fetch(builder, panel_at, at, vectors * LANES * 4, end, hop, _ahead(tokens))
                    sides = [w] if packed == 1 else list(zip(*(_unpacked(builder, both) for both in w), strict=True))
                    for t in range(tokens):
                        for side, levels in enumerate(sides):
                            at = builder.add(quad, whole(side * size // 2))
                            value = splat(builder, load(builder, bytes_at[t], at, lanes.I32))
                            for place, level in enumerate(levels, t * panels * vectors):
                                totals[place] = add(builder, totals[place], level, value)
                return totals

            first = [begins[t] for t in range(tokens) for _ in range(panels * vectors)]
            totals = times(builder, whole(size // 16), first, steps)
            at = builder.add(scale_offset, builder.mul(builder.udiv(g, whole(GROUP // size)), whole(4)))
            scale = [splat(builder, load(builder, token, at, lanes.F32)) for token in token_at]
            return _scaled(builder, totals, sums, [scales(builder, base, v) for base in bases for v in part], scale)

        first = _starts(builder, start, panels * vectors, part.start) * tokens
        _store(builder, times(builder, count, first, group), out, out_stride, panels * vectors, part.start)

    return emit


def _scaled(builder: Any, totals: list[Any], sums: list[Any], weights: list[Any], tokens: list[Any]) -> list[Any]:
    """Sums of a group's whole numbers, times the scales of weights and tokens, added to those of the groups before."""
    result = list(sums)
    for i, weight in enumerate(weights):
        for t, token in enumerate(tokens):
            n, both = t * len(weights) + i, builder.fmul(weight, token)
            result[n] = multiply_add(builder, builder.sitofp(totals[n], FLOATS), both, sums[n])
    return result


def _unpacked(builder: Any, both: Any) -> tuple[Any, Any]:
    low = builder.and_(both, ir.Constant(INTS, [0x0F0F0F0F] * LANES))
    high = builder.and_(builder.lshr(both, ir.Constant(INTS, [4] * LANES)), ir.Constant(INTS, [0x0F0F0F0F] * LANES))
    return levels_of(builder, low), levels_of(builder, high)


@intrinsic
def unpack_levels(typing: Any, panel: Any, groups: Any, out: Any) -> Any:
    """An int4 panel as it was packed becomes one for level_tile, which many rows then share."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        panel, groups, out = args
        half = SMALL_GROUP * PANEL // 2

        def group(g: Any, _: list[Any]) -> list[Any]:
            at = builder.add(panel, builder.mul(g, whole(2 * PANEL + half)))
            to = builder.add(out, builder.mul(g, whole(4 * PANEL + 2 * half)))
            _fetch(builder, [at], whole(0), 2 * PANEL + half, whole(FAR), whole(0), _ahead(1))
            for v in WHOLE:
                scales = half_floats(builder, at, v * 2 * LANES)
                builder.store(scales, pointer_to(builder, to, v * 4 * LANES, FLOATS), align=64)
            for place in range(0, half, 4 * LANES):
                both = load(builder, at, 2 * PANEL + place, INTS, align=64)
                for side, levels in enumerate(_unpacked(builder, both)):
                    builder.store(levels, pointer_to(builder, to, 4 * PANEL + place + side * half, INTS), align=64)
            return []

        times(builder, builder.mul(groups, whole(2)), [], group)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


def _starts(builder: Any, start: Any, count: int, skipped: int) -> list[Any]:
    """What the sums begin with: the bias behind so many vectors, or zero when there is none."""
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    before, given, after = builder.block, builder.append_basic_block("bias"), builder.append_basic_block("go")
    builder.cbranch(builder.icmp_signed("!=", start, whole(0)), given, after)
    builder.position_at_end(given)
    loaded = [load(builder, start, (skipped + i) * LANES * 4, FLOATS) for i in range(count)]
    builder.branch(after)
    builder.position_at_end(after)
    phis = [builder.phi(FLOATS) for _ in range(count)]
    for phi, value in zip(phis, loaded, strict=True):
        phi.add_incoming(zero, before)
        phi.add_incoming(value, given)
    return phis


def _store(builder: Any, sums: list[Any], out: Any, out_stride: Any, per_token: int, skipped: int) -> None:
    for i, value in enumerate(sums):
        token, place = divmod(i, per_token)
        row = builder.add(out, builder.mul(out_stride, whole(token)))
        builder.store(value, pointer_to(builder, row, (skipped + place) * LANES * 4, FLOATS), align=4)


def tile(emit: Emit) -> Any:
    """A tile as a function: weights, panel stride, values, token stride, start, out, out stride, depth."""

    @intrinsic
    def call(typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(builder, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return call


def tile_of_cache(tokens: int, panels: int) -> Any:
    """The same for keys or values, whose bytes per number come first."""
    emits = {item: cache_tile(tokens, panels, item) for item in CACHE_BYTES.values()}

    @intrinsic
    def call(typing: Any, item: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for size, emit in emits.items():
                with builder.if_then(builder.icmp_signed("==", args[0], whole(size))):
                    emit(builder, args[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return call


def panel_times_rows(kind: Callable[..., Emit], unit: int = 1, together: tuple[int, ...] = TOGETHER) -> Any:
    """One panel times all rows, by the largest tile that still fits: panel, values, stride, start, out, out stride,
    depth (in units of so many float or a quarter as many columns), rows, where the next panel begins, and its bytes."""
    tiles = [(tokens, [kind(tokens, 1, half) for half in HALVES]) for tokens in HALVED]
    tiles += [(tokens, [kind(tokens, 1)]) for tokens in together]

    @intrinsic
    def call(
        typing: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel, values, stride, start, out, out_stride, depth, rows, following_panel, size = args
            columns = builder.mul(depth, whole(unit))
            with builder.goto_entry_block():
                done = builder.alloca(lanes.I64)
            builder.store(whole(0), done)
            for tokens, emits in tiles:
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
                given = [panel, whole(0), values_at, stride, start, out_at, out_stride, depth]
                if lanes.WIDE and tokens == together[0]:
                    given += _part_of_following(builder, tokens, following_panel, size, row, rows, columns)
                    _fetch_out(builder, out_at, out_stride, tokens)
                for emit in emits:
                    emit(builder, given)
                builder.store(following, done)
                builder.branch(ask)
                builder.position_at_end(after)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return call


@intrinsic
def unpack(typing: Any, panel: Any, depth: Any, out: Any) -> Any:
    """A float panel as it was packed becomes one with its whole numbers as floats, which many rows then share."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        panel, depth, out = args

        def column(k: Any, _: list[Any]) -> list[Any]:
            offset = builder.add(builder.mul(k, whole(FIXED)), whole(HEADER))
            to = builder.add(out, builder.add(builder.mul(k, whole(PANEL * 4)), whole(HEADER)))
            _fetch(builder, [panel], offset, FIXED, offset, whole(0), _ahead(1))
            for v, vector in enumerate(_fixed(builder, builder.add(panel, offset))):
                builder.store(vector, pointer_to(builder, to, v * LANES * 4, FLOATS), align=64)
            return []

        for v in range(PANEL // LANES):
            scales = load(builder, panel, v * LANES * 4, FLOATS, align=32)
            builder.store(scales, pointer_to(builder, out, v * LANES * 4, FLOATS), align=64)
        times(builder, depth, [], column)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
