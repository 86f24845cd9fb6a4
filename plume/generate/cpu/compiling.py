"""Python functions as machine code that is kept on disk, and a word to the user while it is first made."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core.event import Event, Listener, install_listener

Code = TypeVar("Code", bound=Callable[..., Any])


def sources(folder: Path = Path(__file__).parent) -> str:
    """What all compiled code is made of, as a hash."""
    parts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


SOURCES = sources()


def compiled(function: Code) -> Code:
    """Machine code, kept on disk. Sums may be reordered for vectors, but infinities and NaNs keep their meaning."""
    fastmath = {"contract", "reassoc", "nsz", "arcp"}
    code: Any = njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath)(function)
    # numba asks only whether the function's own file has changed, but what it calls is part of its machine code
    code._cache._cache_file._source_stamp = SOURCES
    result: Code = code
    return result


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


@contextmanager
def announced_compilation() -> Iterator[None]:
    with install_listener("numba:compile", Announcer()):
        yield
