"""Lines for a person: on a terminal lines end between words; in a file or a pipe they stay whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# control characters as pictures: a model may write any of them, and a terminal would obey
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def terminal(stream: TextIO | None = None) -> Console:
    """A console that prints names as they are: a bracket in one is no style."""
    from rich.console import Console

    return Console(file=stream, markup=False, emoji=False, highlight=False)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print at once; to the standard output by default."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        print(text, file=stream, flush=True)
        return
    terminal(stream).print(harmless(text))


def plural(count: float, noun: str) -> str:
    """A number of things: `1 step`, `1,200 steps`."""
    return f"{count:,.15g} {noun}{'' if count == 1 else 's'}"


def harmless(text: str) -> str:
    """What a model wrote, so that a terminal shows it and does nothing else."""
    return text.translate(PICTURES)


def shown(text: str, stream: TextIO) -> str:
    """The text for a stream: as it is, unless the stream is a terminal."""
    return harmless(text) if stream.isatty() else text
