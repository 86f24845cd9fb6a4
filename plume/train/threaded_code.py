"""Compiled code on torch's own threads: they take the next part of the work until none is left."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from numba import carray, types
from numba.core.ccallback import CFunc
from torch import Tensor

from plume.inference.cpu.lanes import FASTMATH, SOURCES, floats_at, sources

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


@inline
def row_at(address: int, row: int, width: int) -> Any:
    return carray(floats_at(address + 4 * row * width), (width,))
