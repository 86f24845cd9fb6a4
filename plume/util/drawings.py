"""Drawings for a notebook's cell, as HTML: bars, strips of vectors, matrices, tokens on coloured ground."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from plume.util.console import harmless

Array = np.ndarray[Any, Any]
STRIP = 128  # numbers in one line of a strip
CELLS = 262_144  # of a drawn array; a larger one is described
PAPER, BLUE, ORANGE, INK = ((250, 249, 246), (42, 95, 168), (179, 87, 26), (34, 58, 94))
RANKS = {1: "#e1ecf7", 10: "#fdf0c4", 100: "#fcd08c", 1000: "#f5a56b"}  # below these ranks, as in the Explorer
UNRANKED = "#e57c63"


def visible(piece: str) -> str:
    """A token's text with its white space shown, safe within HTML."""
    return plain(piece.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥"))


def plain(text: str) -> str:
    """A text within HTML: nothing of it is markup or control."""
    return html.escape(harmless(text), quote=True)


def table(rows: Iterable[Iterable[str]], head: Sequence[str] = ()) -> str:
    """Rows of cells that are HTML already."""
    top = f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>" if head else ""
    body = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{top}{''.join(f'<tr>{cells}</tr>' for cells in body)}</table>"


def bar(share: float) -> str:
    return f"<div style='width:16em'><div style='background:#4a7fb5;height:.8em;width:{100 * share:.1f}%'></div></div>"


def chances(rows: Iterable[tuple[str, float]]) -> str:
    """Tokens with their probabilities as bars."""
    return table([f"<code>{visible(piece)}</code>", bar(p), f"{p:.2%}"] for piece, p in rows)


def ranked(rows: Iterable[tuple[str, int, str]]) -> str:
    """Tokens on a ground that says their rank, each with what the pointer shows."""
    spans = (
        f"<span style='background:{next((c for most, c in RANKS.items() if rank < most), UNRANKED)};color:#1d1c1a' "
        f"title='{plain(about)}'>{plain(piece)}</span>"
        for piece, rank, about in rows
    )
    return f"<div style='white-space:pre-wrap'>{''.join(spans)}</div>"


def picture(values: Array, *, size: int = 0, label: str = "") -> str:
    """A vector as a strip, a matrix as a grid: one pixel a number. Orange is negative, blue is positive."""
    matrix = np.atleast_2d(np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0))
    if values.ndim == 1 and values.size > STRIP:
        matrix = np.pad(matrix[0], (0, -values.size % STRIP)).reshape(-1, STRIP)
    share = matrix / max(float(np.abs(matrix).max()), 1e-9)
    ends = np.where(share[..., None] < 0, np.array(ORANGE), np.array(BLUE if (matrix < 0).any() else INK))
    mixed = np.array(PAPER) + np.abs(share)[..., None] * (ends - np.array(PAPER))  # (rows, columns, 3)
    rows, columns = matrix.shape
    cell = size if size else max(1, min(14, 640 // columns))
    about = html.escape(
        f"{label} {' × '.join(map(str, values.shape))}: {np.nanmin(values):.4g} … {np.nanmax(values):.4g}"
    )
    place = f"width:{columns * cell}px;height:{rows * cell}px;image-rendering:pixelated"
    return f"<img style='{place}' alt='{about}' title='{about}' src='{png(np.rint(mixed).astype(np.uint8))}'>"


def png(pixels: Array) -> str:
    """(rows, columns, 3) bytes as the address of a picture."""
    rows, columns, _ = pixels.shape
    lines = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0))
    whole = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(whole).decode('ascii')}"


def drawn(value: Any) -> str:
    """Whatever a result holds: arrays of one or two dimensions as pictures, others in words."""
    if isinstance(value, np.ndarray) and value.ndim in (1, 2) and 1 < value.size <= CELLS and value.dtype.kind == "f":
        return f"{picture(value)} <small>{np.nanmin(value):.4g} … {np.nanmax(value):.4g}</small>"
    if isinstance(value, np.ndarray) and value.size > 8:
        return html.escape(f"array {value.shape}, {np.nanmin(value):.4g} to {np.nanmax(value):.4g}")
    return plain(str(value)[:400])


def attention(matrix: Array, pieces: Sequence[str], size: int = 12) -> str:
    """Weights between tokens; hovering a cell names its query and key."""
    cells = "".join(
        f"<rect x='{j * size}' y='{i * size}' width='{size}' height='{size}' fill='#4a7fb5' "
        f"fill-opacity='{w:.3f}'><title>{visible(pieces[i])} → {visible(pieces[j])} {w:.3f}</title></rect>"
        for i, row in enumerate(matrix[:64])
        for j, w in enumerate(row[:64])
        if w > 0.001
    )
    side = size * min(len(matrix), 64)
    return f"<svg xmlns='http://www.w3.org/2000/svg' width='{side}' height='{side}' class='matrix'>{cells}</svg>"
