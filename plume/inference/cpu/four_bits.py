"""Weights in four bits: groups of 32 with a scale of half precision and one of 16 levels for each, GGUF's IQ4_NL."""

# G groups of SMALL_GROUP weights

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from plume.config import UserError
from plume.inference.cpu.lanes import compiled, entry
from plume.inference.cpu.panels import LEVELS, PANEL, SMALL_GROUP, Array, padded

CELLS = 512  # half steps from -128 on: the point between two levels is never inside one
NEAREST = np.abs((np.arange(CELLS) - 256 + 0.5)[:, None] / 2 - LEVELS).argmin(axis=1).astype(np.uint8)
FINE = LEVELS.astype(np.float32)
TRIES = 9  # on each side of the scale at which the largest weight falls on the outermost level
FITTED_TOGETHER = 1 << 16  # groups that one thread takes at a time
ZERO, ONE = np.float32(0), np.float32(1)


@compiled
def nearest(value: Any) -> Any:
    """Which level is nearest."""
    cell = np.int32(np.floor(value * np.float32(2))) + np.int32(CELLS // 2)
    return NEAREST[min(max(cell, np.int32(0)), np.int32(CELLS - 1))]


@entry
def fit(groups: Any, scales: Any) -> None:
    """The scale of each group with the smallest sum of squared errors."""
    for g in range(groups.shape[0]):
        largest = ZERO
        for i in range(SMALL_GROUP):
            largest = groups[g, i] if abs(groups[g, i]) > abs(largest) else largest
        best, scales[g] = ZERO, ZERO
        if abs(largest) < np.float32(1e-30):
            continue
        for t in range(2 * (2 * TRIES + 1)):
            outermost = FINE[0] if t % 2 else FINE[15]
            inverse = (outermost + np.float32(t // 2 - TRIES)) / largest
            both, square = ZERO, ZERO
            for i in range(SMALL_GROUP):
                x = groups[g, i]
                level = FINE[nearest(x * inverse)]
                both += x * level
                square += level * level
            if both * both > best * square:
                scales[g], best = both / square, both * both / square


@entry
def assign(groups: Any, scales: Any, codes: Any) -> None:
    """The nearest level of each weight."""
    for g in range(groups.shape[0]):
        inverse = ONE / scales[g] if scales[g] != ZERO else ZERO
        for i in range(SMALL_GROUP):
            codes[g, i] = nearest(groups[g, i] * inverse)


def quantised(weight: Array) -> tuple[Array, Array]:
    """(N, K), where K is a multiple of SMALL_GROUP, as codes (G, SMALL_GROUP) and scales (G,) of half precision."""
    groups = np.ascontiguousarray(weight, np.float32).reshape(-1, SMALL_GROUP)
    scales, codes = np.empty(len(groups), np.float32), np.empty(groups.shape, np.uint8)
    with ThreadPoolExecutor() as pool:  # compiled code releases the interpreter's lock
        parts = range(0, len(groups), FITTED_TOGETHER)
        list(pool.map(lambda at: fit(groups[at : at + FITTED_TOGETHER], scales[at : at + FITTED_TOGETHER]), parts))
    halves = scales.astype(np.float16)
    if not np.isfinite(halves).all():
        raise UserError("precision=int4 cannot hold weights above 8 million; use int8 or float32")
    assign(groups, halves.astype(np.float32), codes)
    return codes, halves


def int4_panels(weight: Array) -> Array:
    """(N, K) to bytes: per panel and group the scales, then codes; a byte has those of columns 16 apart."""
    n, k = padded(len(weight)), padded(weight.shape[1])
    rows = np.zeros((n, k), np.float32)
    rows[: len(weight), : weight.shape[1]] = weight
    codes, scales = quantised(rows)
    shape = (n // PANEL, PANEL, k // SMALL_GROUP)
    sides = codes.reshape(*shape, 2, SMALL_GROUP // 8, 4).transpose(3, 0, 2, 4, 1, 5)
    low, high = sides  # each by panel, group, four columns, row
    out = np.empty((n // PANEL, k // SMALL_GROUP, 2 * PANEL + SMALL_GROUP * PANEL // 2), np.uint8)
    out[..., : 2 * PANEL] = np.ascontiguousarray(scales.reshape(shape).swapaxes(1, 2)).view(np.uint8)
    out[..., 2 * PANEL :] = (low | high << 4).reshape(*out.shape[:2], -1)
    return out.reshape(-1)


def iq4_blocks(weight: Array) -> Array:
    """(N, K) to GGUF's IQ4_NL, the same scales and codes as in the engine: (N, bytes of K)."""
    codes, scales = quantised(weight)
    low, high = codes[:, : SMALL_GROUP // 2], codes[:, SMALL_GROUP // 2 :]
    return np.hstack([scales[:, None].view(np.uint8), low | high << 4]).reshape(len(weight), -1)
