"""What is said to a person: on a terminal lines end between words; in a file or a pipe they stay whole."""

from __future__ import annotations

import sys
from typing import TextIO


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print at once; the standard output unless said."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        print(text, file=stream, flush=True)
        return
    from rich.console import Console

    Console(file=stream).print(text, highlight=False, markup=False, emoji=False)
