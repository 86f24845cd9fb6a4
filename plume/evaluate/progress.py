"""How far a task is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

EVERY = 10.0  # seconds between lines


class Progress:
    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        if not self.quiet and console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=console)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Callable[[float], None]]:
        """A function to call with the items done since the last call."""
        if self.bar is not None:
            number = self.bar.add_task(name, total=total)
            yield lambda more: self.bar.advance(number, more) if self.bar is not None else None
            self.bar.update(number, completed=total)
            return
        began = said = time.monotonic()
        done = 0.0

        def advance(more: float) -> None:
            nonlocal done, said
            done += more
            now = time.monotonic()
            if not self.quiet and now - said >= EVERY:
                said = now
                left = (now - began) * (total - done) / max(done, 1e-9)
                print(f"{name}: {done:.0f} of {total} items, {left:.0f} s left", file=sys.stderr, flush=True)

        yield advance
        if not self.quiet:
            print(f"{name}: {total} items in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
