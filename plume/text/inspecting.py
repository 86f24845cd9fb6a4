"""A text as a tokenizer sees it, as a table: pieces, ids, bytes, places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plume.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.table import Table

VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"})


def visible(text: str) -> str:
    """White space and control characters as marks that can be seen."""
    shown = text.translate(VISIBLE)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def inspect_table(tokenizer: Tokenizer, text: str) -> Table:
    """One row per piece of the text; the caption says whether the ids give the text back."""
    from rich.table import Table
    from rich.text import Text

    pieces = tokenizer.pieces(text)
    decoded = tokenizer.decode([piece.id for piece in pieces])
    back = "the ids give the text back" if decoded == text else f"the ids give back: {visible(decoded)}"
    cut_by = "" if tokenizer.words is None else f", words by {'spaCy' if tokenizer.words == 'spacy' else 'plain rules'}"
    table = Table(
        title=f"{tokenizer.kind}, {tokenizer.vocab_size} tokens{cut_by}",
        caption=Text(f"{len(text)} characters, {len(pieces)} tokens; {back}"),
    )
    for name in ("", "piece", "id", "bytes", "characters"):
        table.add_column(name, justify="left" if name in ("piece", "bytes") else "right")
    for number, piece in enumerate(pieces):
        place = f"{piece.start}-{piece.end}"
        table.add_row(str(number), Text(visible(piece.text)), str(piece.id), piece.bytes.hex(" "), place)
    return table
