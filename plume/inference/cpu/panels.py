"""Weight matrices as the kernels read them: panels of rows side by side, in one form for each precision."""

# N weight rows (outputs), K weight columns (inputs); see tiles.py for how panels and groups are read

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from plume.config import CachePrecision

Array = np.ndarray[Any, Any]
Precision = Literal["float32", "float24", "int8", "int4"]
PrecisionOrAuto = Precision | Literal["auto"]
# what compiled code knows a precision by
KINDS: dict[Precision, int] = {"float32": 0, "float24": 1, "int8": 2, "int4": 3}
FLOAT32, FLOAT24, INT8, INT4 = KINDS.values()
CACHE_BYTES: dict[CachePrecision, int] = {"float32": 4, "float16": 2, "int8": 1}  # of a number of a key or value

LANES = 16  # numbers in one vector; the compiler cuts it into what the machine has
PANEL = 32  # weight rows standing side by side in memory
GROUP = 64  # int8 values that share one scale
SMALL_GROUP = 32  # int4 values that do
HEADER = 4 * PANEL  # bytes in front of a float panel: one scale for each of its rows
FULL = 4 * PANEL  # bytes of a float32 panel for one column
FIXED = 3 * PANEL  # the same of a float24 panel: 16 high bits of each row's weight, then 8 low bits of each
BITS = 23  # of a float24 weight, beside its sign
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)  # of int4
CLOSE = 2.0**-20  # `auto` takes float24 where no weight changes by more than this part of its row's median magnitude


def padded(n: int) -> int:
    """Rows, and int8 columns, come in whole groups."""
    return -(-n // GROUP) * GROUP


def panel_bytes(kind: int, columns: int) -> int:
    """The size of a panel; also compiled, see arithmetic.py."""
    if kind == FLOAT32:
        return HEADER + columns * FULL
    if kind == FLOAT24:
        return HEADER + columns * FIXED
    groups = (columns + GROUP - 1) // GROUP
    if kind == INT8:
        return groups * (2 * PANEL + GROUP * PANEL)
    return 2 * groups * (2 * PANEL + SMALL_GROUP * PANEL // 2)


def panels(weight: Array, precision: Precision) -> Array:
    """(N, K) to bytes."""
    if precision == "int4":
        from plume.inference.cpu.four_bits import int4_panels  # compiled, and these lines are not

        return int4_panels(weight)
    return {"float32": float32_panels, "float24": float24_panels, "int8": int8_panels}[precision](weight)


def _padded_rows(weight: Array) -> Array:
    rows = np.zeros((padded(len(weight)), weight.shape[1]), np.float32)
    rows[: len(weight)] = weight
    return rows


def float32_panels(weight: Array) -> Array:
    """Panels of PANEL rows side by side, k by k, every weight as it is; their scales are 1."""
    rows = _padded_rows(weight)
    n, k = rows.shape
    out = np.ones((n // PANEL, 1 + k, PANEL), np.float32)
    out[:, 1:] = rows.reshape(n // PANEL, PANEL, k).swapaxes(1, 2)
    return out.view(np.uint8).reshape(-1)


def fixed_point(rows: Array) -> tuple[Array, Array]:
    """Weights as whole numbers of 24 bits, and each row's exponent. No weight changes by more than 2^-23 of its row's
    largest."""
    exponents = np.frexp(np.maximum(np.abs(rows).max(axis=1), np.float32(1e-30)))[1] - BITS
    codes = np.rint(np.ldexp(rows, -exponents[:, None]))
    return np.clip(codes, -(2**BITS), 2**BITS - 1).astype(np.int32), exponents


def float24_holds(weight: Array) -> bool:
    """Whether float24 keeps these weights so well that float32 sums lose more."""
    codes, exponents = fixed_point(weight)
    change = np.abs(np.ldexp(codes.astype(np.float32), exponents[:, None]) - weight).max(axis=1)
    return bool((change <= CLOSE * np.median(np.abs(weight), axis=1)).all())


def float24_panels(weight: Array) -> Array:
    """The same as whole numbers of 24 bits times a power of two, for three quarters of the bytes."""
    codes, exponents = fixed_point(_padded_rows(weight))
    n, k = codes.shape
    columns = codes.reshape(n // PANEL, PANEL, k).swapaxes(1, 2)
    out = np.empty((n // PANEL, HEADER + k * FIXED), np.uint8)
    out[:, :HEADER] = np.ldexp(np.float32(1), exponents).reshape(-1, PANEL).view(np.uint8)
    body = out[:, HEADER:].reshape(n // PANEL, k, FIXED)
    body[..., : 2 * PANEL] = np.ascontiguousarray((columns >> 8).astype(np.int16)).view(np.uint8)
    body[..., 2 * PANEL :] = columns & 255
    return out.reshape(-1)


def int8_panels(weight: Array) -> Array:
    """Per panel and group of columns the scales as bfloat16, then unsigned codes with 128 for zero."""
    n, k = padded(len(weight)), padded(weight.shape[1])
    rows = np.zeros((n, k), np.float32)
    rows[: len(weight), : weight.shape[1]] = weight
    groups = rows.reshape(n // PANEL, PANEL, k // GROUP, GROUP)
    largest = np.maximum(np.abs(groups).max(axis=3), 1e-30) / np.float32(127)
    bits = (largest.astype(np.float32).view(np.uint32) + 0xFFFF) >> 16  # rounded up, so that no code passes 127
    scales = (bits << 16).astype(np.uint32).view(np.float32)
    codes = (np.rint(groups / scales[..., None]) + 128).astype(np.uint8)
    quads = codes.reshape(n // PANEL, PANEL, k // GROUP, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
    out = np.empty((n // PANEL, k // GROUP, 2 * PANEL + GROUP * PANEL), np.uint8)
    out[..., : 2 * PANEL] = np.ascontiguousarray(bits.astype(np.uint16).transpose(0, 2, 1)).view(np.uint8)
    out[..., 2 * PANEL :] = quads.reshape(n // PANEL, k // GROUP, GROUP * PANEL)
    return out.reshape(-1)
