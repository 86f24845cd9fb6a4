"""Lines for a person: on a terminal lines end between words; in a file or a pipe they stay whole."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

FOLDED = 8  # cells of a column whose words may be divided, at least

# control characters as pictures: a model may write any of them, and a terminal would obey
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def terminal(stream: TextIO | None = None) -> Console:
    """A console that prints names as they are: a bracket in one is no style."""
    from rich.console import Console

    return Console(file=stream, markup=False, emoji=False, highlight=False)


def show(*things: Any) -> None:
    """Tables, groups of them and texts, on the standard output."""
    from rich.console import Group
    from rich.table import Table

    console = terminal()
    for thing in things:
        for part in thing.renderables if isinstance(thing, Group) else (thing,):
            console.print(fitting(part, console.width) if isinstance(part, Table) else part)


def fitting(table: Table, width: int) -> Table | str:
    """The table; where it would lose letters or digits, a line for each cell."""
    if 1 + sum(narrowest(column) + 3 for column in table.columns) <= width:
        return table
    rows = zip(*(column.cells for column in table.columns), strict=True)
    names = [str(column.header) for column in table.columns]
    parts = ["\n".join(f"{name}: {cell}" for name, cell in zip(names, row, strict=True) if cell) for row in rows]
    return "\n\n".join([str(table.title), *parts] if table.title else parts)


def narrowest(column: Column) -> int:
    """The width from which on a column shows all of its words."""
    from rich.cells import cell_len

    texts = [str(cell) for cell in (column.header, *column.cells)]
    longest = max(cell_len(word) for text in texts for word in ([text] if column.no_wrap else text.split() or [""]))
    return min(longest, FOLDED) if column.overflow == "fold" else longest


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print at once; to the standard output by default."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        print(text, file=stream, flush=True)
        return
    terminal(stream).print(harmless(text))


def leave_terminal() -> None:
    """Print no more to a terminal that was closed: every write to it would fail. Files and pipes stay."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or no file at all
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def plural(count: float, noun: str) -> str:
    """A number of things: `1 step`, `1,200 steps`."""
    return f"{count:,.15g} {noun}{'' if count == 1 else 's'}"


def harmless(text: str) -> str:
    """What a model wrote, so that a terminal shows it and does nothing else."""
    return text.translate(PICTURES)


def shown(text: str, stream: TextIO) -> str:
    """The text for a stream: as it is, unless the stream is a terminal."""
    return harmless(text) if stream.isatty() else text
