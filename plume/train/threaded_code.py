"""Compiled code on torch's own threads: they take the next part of the work until none is left."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types
from numba.core.ccallback import CFunc
from torch import Tensor

from plume.inference.cpu.lanes import (
    FASTMATH,
    SOURCES,
    atomic_add,
    bits_of_float,
    float_of_bits,
    floats_at,
    halves_at,
    sources,
)

ARGUMENTS = 16  # whole numbers that a job reads, at most; those that are not given are 0


class ThreadedCode:
    """Compiled code that torch's own threads run together, each taking the next part of the work until none is left."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.function = function

    @functools.cached_property
    def code(self) -> Any:
        options = {"nopython": True, "fastmath": FASTMATH, "error_model": "numpy"}
        code: Any = CFunc(self.function, ((types.int64,), types.void), locals={}, options=options)
        code.enable_caching()
        # numba asks only whether this file has changed, but the engine's parts are compiled into it
        code._cache._cache_file._source_stamp = SOURCES + sources(Path(__file__).parent)
        code.compile()
        return code

    def __call__(self, parts: int, *numbers: int | Tensor) -> None:
        """Numbers and the addresses of contiguous tensors, after the counter of parts begun and that of all parts."""
        given = [n.data_ptr() if isinstance(n, Tensor) else n for n in numbers]
        words = (ctypes.c_int64 * ARGUMENTS)(0, parts, *given)
        threads = min(torch.get_num_threads(), parts)
        if threads > 1 and openmp() is not None:
            openmp()(ctypes.c_void_p(self.code.address), ctypes.byref(words), threads, 0)
        else:
            self.code.ctypes(ctypes.addressof(words))


@functools.cache
def openmp() -> Any:
    """What starts the threads that torch computes with; others would compete with them for the cores."""
    try:
        return ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None


def inline(function: Callable[..., Any]) -> Any:
    """Compiled as a part of the job that calls it."""
    return numba.njit(fastmath=FASTMATH, error_model="numpy")(function)


def memory_of_threads(numbers: int) -> Tensor:
    """So many numbers for each thread, which takes its part with `thread_memory`."""
    return torch.empty(torch.get_num_threads(), numbers)


@inline
def thread_memory(at: int, memory: int, numbers: int) -> int:
    """The address of what this thread works with. The last word of a job counts the threads that have asked."""
    return memory + atomic_add(at + 8 * (ARGUMENTS - 1), 1) * 4 * numbers


@inline
def read_numbers(to: Any, source: int, first: int, rough: int) -> None:
    """Numbers from the first on, float32 ones or bfloat16 ones, as float32."""
    if rough:
        halves = carray(halves_at(source + 2 * first), (to.size,))
        for i in range(to.size):
            to[i] = float_of_bits(np.int32(halves[i]) << np.int32(16))
    else:
        floats = carray(floats_at(source + 4 * first), (to.size,))
        for i in range(to.size):
            to[i] = floats[i]


@inline
def write_numbers(to: int, first: int, source: Any, rough: int) -> None:
    """The other way; to bfloat16 the nearest, of two as near the even one."""
    if rough:
        halves = carray(halves_at(to + 2 * first), (source.size,))
        for i in range(source.size):
            bits = bits_of_float(source[i])
            halves[i] = np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))
    else:
        floats = carray(floats_at(to + 4 * first), (source.size,))
        for i in range(source.size):
            floats[i] = source[i]


@inline
def row_at(address: int, row: int, width: int) -> Any:
    return carray(floats_at(address + 4 * row * width), (width,))
