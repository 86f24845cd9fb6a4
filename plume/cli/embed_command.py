"""`plume embed`: the texts of a file to a .npy file of vectors, with their ids beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import EmbedConfig, EngineConfig, UserError, did_you_mean
from plume.data.tables import TABLES, Row, open_bytes, read_rows, suffix_of
from plume.lm import LM, open_lm
from plume.tasks.schema import Columns
from plume.util.files import aside, lines_of, write_rows
from plume.util.progress import Progress

PART = 1024  # texts between two advances of the progress bar


def embed(config: EmbedConfig) -> str:
    """Write the vectors and the ids; what was written in one sentence."""
    if config.out.suffix != ".npy":
        raise UserError(f"out={config.out} must end in .npy")
    rows = list(texts_of(config))
    if not rows:
        raise UserError(f"{config.texts} holds no texts")
    lm = open_lm(config.model, EngineConfig(device=config.device))
    parts = []
    with Progress(lines=False) as progress, progress.task("texts", len(rows)) as advance:
        for first in range(0, len(rows), PART):
            part = [text for _, text in rows[first : first + PART]]
            parts.append(vectors(lm, part, config))
            advance(len(part))
    found = np.concatenate(parts)
    ids = config.out.with_suffix(".ids.jsonl")
    with aside(config.out) as hidden, hidden.open("wb") as stream:
        np.save(stream, found)
    write_rows(ids, ({"row": number, "id": name, "text": text} for number, (name, text) in enumerate(rows)))
    return f"wrote {config.out}: {len(found):,} vectors of {found.shape[1]} numbers; ids and texts: {ids}"


def vectors(lm: LM, texts: list[str], config: EmbedConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(N, D) in the order of the texts; batches hold texts of like length, so that little is padding."""
    order = np.argsort([len(text) for text in texts], kind="stable")
    layers = config.layers if config.layers else None
    found = lm.embed([texts[i] for i in order], pool=config.pool, layers=layers, batch=config.batch)
    found = found[np.argsort(order)]
    if config.normalize:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found


def texts_of(config: EmbedConfig) -> Iterator[tuple[Any, str]]:
    """The id and the text of every row; a line is numbered from 1, and blank lines are no texts."""
    path = config.texts
    if suffix_of(path) in TABLES:
        yield from table_texts(config)
        return
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        with open_bytes(path) as stream:
            lines = lines_of(stream.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from None
    yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def table_texts(config: EmbedConfig) -> Iterator[tuple[Any, str]]:
    column = config.column
    for number, row in read_rows(config.texts):
        if column is None:
            column = Columns([row], {}).of("text")
        text = cell(row, column if column else "text", config.texts, number, "column")
        name = cell(row, config.id, config.texts, number, "id") if config.id is not None else row.get("id", number)
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{config.texts} line {number}: column {column!r} holds no text")
        yield name, text


def cell(row: Row, column: str, path: Path, number: int, option: str) -> Any:
    if column not in row:
        raise UserError(
            f"{path} line {number} has no column {column!r}; its columns are {', '.join(row)}: --{option} NAME"
            f"{did_you_mean(column, row)}"
        )
    return row[column]
