"""Progress of a long task: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

EVERY = 10.0  # seconds between lines


class Advance(Protocol):
    """Called with the items done since the last call, and with what to show beside the bar."""

    def __call__(self, more: float, status: str = "") -> None: ...


class Progress:
    """Several tasks, each with a bar. With lines=False nothing is printed where there is no terminal.

    With remaining=False the bar shows no time left, for tasks whose status has a better estimate.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        lines: bool = True,
        unit: Literal["items", "bytes"] = "items",
        remaining: bool = True,
    ) -> None:
        self.quiet, self.lines, self.unit, self.remaining = quiet, lines and not quiet, unit, remaining
        self.bar: Bar | None = None

    def __enter__(self) -> Progress:
        from rich.console import Console

        console = Console(stderr=True)
        if not self.quiet and console.is_terminal:
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                ProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import Progress as Bar
            from rich.table import Column

            counted = DownloadColumn if self.unit == "bytes" else MofNCompleteColumn
            count = counted(table_column=Column(no_wrap=True))  # whole figures; the bar gives way
            status = TextColumn("{task.fields[status]}", markup=False)
            bar = [BarColumn()] if console.width >= 80 else []  # a narrow terminal has room for the figures alone
            columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), *bar, count, status]
            columns += [TimeRemainingColumn()] if self.remaining else []
            self.bar = Bar(*columns, console=console, refresh_per_second=4)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def print(self, text: str) -> bool:
        """Print above the bars; False where there are none."""
        if self.bar is None:
            return False
        self.bar.console.print(text, highlight=False, markup=False, emoji=False)
        return True

    @contextmanager
    def task(self, name: str, total: int, *, completed: int = 0) -> Iterator[Advance]:
        if self.bar is not None:
            number, bar = self.bar.add_task(name, total=total, completed=completed, status=""), self.bar
            yield lambda more, status="": bar.update(number, advance=more, status=status)
            return
        began, show = time.monotonic(), self._line(name, total, completed)
        yield show
        if self.lines and self.unit == "items":
            items, seconds = "item" if total == 1 else "items", time.monotonic() - began
            print(f"{name}: {total} {items} in {seconds:.1f} s", file=sys.stderr, flush=True)

    def _line(self, name: str, total: int, completed: int) -> Callable[..., None]:
        began = printed = time.monotonic()
        done = 0.0

        def advance(more: float, status: str = "") -> None:
            nonlocal done, printed
            done += more
            now = time.monotonic()
            if self.lines and now - printed >= EVERY:
                printed = now
                left = (now - began) * (total - completed - done) / max(done, 1e-9)
                scale, unit = (1e6, "MB") if self.unit == "bytes" else (1, "items")
                of = f"{(completed + done) / scale:.0f} of {total / scale:.0f} {unit}"
                more_text = f", {status}" if status else ""
                print(f"{name}: {of}{more_text}, {left:.0f} s left", file=sys.stderr, flush=True)

        return advance
