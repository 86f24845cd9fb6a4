"""Reads documents out of files of every kind, one after the other, and counts what cannot be read."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from plume.config import DataConfig, UserError
from plume.data.rows import (
    LONGEST_LINE,
    Row,
    Tally,
    csv_rows,
    foreign,
    json_rows,
    open_bytes,
    parquet_rows,
    parse_line,
    skip_to,
    suffix_of,
)
from plume.data.sources import Part, Piece, plan_pieces
from plume.data.web import ARCHIVES, PAGES, Document, archive, hub_rows, page

SEARCH = 1 << 20  # bytes to look through for a good place to cut a long text
LOOKBACK = 64  # bytes before a cut that decide whether it is a good place
# A cut between lines that hold something never changes tokens: no tokenizer joins characters over such a newline.
CUTS = {"file": re.compile(rb"\S\r?\n(?=\S)"), "paragraph": re.compile(rb"\n\s*\n(?=\S)")}


def read_documents(config: DataConfig, tally: Tally | None = None) -> Iterator[Document]:
    """Every document of every source in order; what cannot be read is counted in the tally."""
    tally = Tally() if tally is None else tally
    for piece in plan_pieces(config):
        yield from read_piece(piece, config, tally)


def read_piece(piece: Piece, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """The documents of one piece that have something in them; a damaged file is counted and the next one read."""
    for part in piece.parts:
        try:
            for document in read_part(part, config, tally):
                if (fault := unusable(document)) is not None:
                    tally.add(fault, document.where)
                else:
                    yield document
        except (EOFError, zlib.error, zstd_error()):
            tally.add("damaged compression", part.path)
        except OSError as error:
            if error.errno is not None:  # the machine's trouble; without a number it is gzip that complains
                raise UserError(f"{part.path} cannot be read: {error.strerror}") from None
            tally.add("damaged compression", part.path)


def unusable(document: Document) -> str | None:
    for text in (document.text, "-" if document.target is None else document.target):
        if not text.strip():
            return "empty"
        if not text.isascii() and not encodable(text):
            return "half characters (lone surrogates)"
    return None


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def zstd_error() -> type[Exception]:
    import zstandard

    return zstandard.ZstdError


def read_part(part: Part, config: DataConfig, tally: Tally) -> Iterator[Document]:
    if part.path.startswith("hub:"):
        assert part.stop is not None
        yield from from_rows(hub_rows(part.path, part.start, part.stop), part.path, config, tally)
        return
    path = Path(part.path)
    kind = suffix_of(path)
    if kind == ".parquet":
        groups = None if part.stop is None else range(part.start, part.stop)
        try:
            yield from from_rows(parquet_rows(path, groups), part.path, config, tally)
        except UserError:
            tally.add("not a parquet file", part.path)
        return
    if kind in ARCHIVES:
        yield from archive(path, tally)
        return
    with open_bytes(path) as stream:
        if part.target is not None:
            yield from aligned(stream, part, config, tally)
        elif kind in (".jsonl", ".ndjson"):
            yield from from_rows(jsonl(stream, part, tally), part.path, config, tally)
        elif kind == ".json":
            yield from from_rows(json_rows(stream, path, tally), part.path, config, tally)
        elif kind in (".csv", ".tsv"):
            rows = csv_rows(stream, path, tab=kind == ".tsv", columns=None, tally=tally, encoding=config.encoding)
            yield from from_rows((row for _, row in rows), part.path, config, tally)
        elif kind in PAGES:
            yield from page(stream.read(), part.path, None, tally)
        else:
            yield from texts(stream, part, config, tally)


def from_rows(rows: Iterable[Row], path: str, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """Documents from the configured fields of rows."""
    for number, row in enumerate(rows, 1):
        where = f"{path} row {number}"
        text = row.get(config.field)
        target = None if config.target_field is None else row.get(config.target_field)
        if not isinstance(text, str):
            tally.add(f"no text in the field {config.field!r}", f"{where}, which has {', '.join(map(repr, row))}")
        elif config.target_field is not None and not isinstance(target, str):
            tally.add(
                f"no text in the field {config.target_field!r}", f"{where}, which has {', '.join(map(repr, row))}"
            )
        else:
            url, score = row.get(config.url_field), number_or_none(row.get(config.score_field))
            yield Document(text, where, url if isinstance(url, str) else None, score, target)


def number_or_none(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def lines_between(stream: BinaryIO, part: Part) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of the lines that begin inside the part."""
    place = part.start
    if part.start > 0:
        skip_to(stream, part.start - 1)
        place += len(stream.readline()) - 1  # the line that this ends belongs to the part before
    while part.stop is None or place < part.stop:
        line = stream.readline(LONGEST_LINE)
        if not line:
            return
        yield place, line
        place += len(line)


def jsonl(stream: BinaryIO, part: Part, tally: Tally) -> Iterator[Row]:
    torn = False
    for place, line in lines_between(stream, part):
        whole = len(line) < LONGEST_LINE or line.endswith(b"\n")
        if torn or not whole:
            if not torn:
                tally.add(f"longer than {LONGEST_LINE >> 20} MB", f"{part.path} byte {place}")
            torn = not whole
            continue
        try:
            row = parse_line(line, part.path, None)
        except UserError as error:  # the place is put into words only when it is needed
            tally.add(str(error).rpartition(": ")[2], f"{part.path} byte {place}")
            continue
        if row is not None:
            yield row


def aligned(stream: BinaryIO, part: Part, config: DataConfig, tally: Tally) -> Iterator[Document]:
    assert part.target is not None
    with open_bytes(Path(part.target)) as other:
        pairs = islice(zip(stream, other, strict=True), part.start, part.stop)
        for number, (line, translation) in enumerate(pairs, part.start + 1):
            where = f"{part.path} line {number}"
            text, target = (decoded(side.rstrip(b"\r\n"), config.encoding) for side in (line, translation))
            if text is None or target is None:
                tally.add(foreign(config.encoding), where)
            else:
                yield Document(text, where, target=target)


def decoded(data: bytes, encoding: str) -> str | None:
    """The text with plain newlines, or None; a byte order mark has the last word on the encoding."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif data.startswith(b"\xef\xbb\xbf"):
        encoding = "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


def texts(stream: BinaryIO, part: Part, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """Documents of a plain text: all of it, its paragraphs or its lines."""
    if config.documents == "line":
        for place, line in lines_between(stream, part):
            yield from spelled(line.rstrip(b"\r\n"), f"{part.path} byte {place}", config, tally)
        return
    for block, place in blocks(stream, part, CUTS[config.documents], config.shard_mb << 20):
        if config.documents == "file":
            yield from spelled(block, part.path, config, tally, goes_on=place > 0)
        else:
            for paragraph in re.split(rb"\r?\n[ \t\r]*\n\s*", block):
                if paragraph:
                    yield from spelled(paragraph, f"{part.path} near byte {place}", config, tally)


def spelled(data: bytes, where: str, config: DataConfig, tally: Tally, *, goes_on: bool = False) -> Iterator[Document]:
    text = decoded(data, config.encoding)
    if text is None:
        tally.add(foreign(config.encoding), where)
    else:
        yield Document(text, where, goes_on=goes_on)


def blocks(stream: BinaryIO, part: Part, pattern: re.Pattern[bytes], size: int) -> Iterator[tuple[bytes, int]]:
    """(block, its first byte's offset): the part in stretches of about `size`, each cut at a good place."""
    base = max(0, part.start - LOOKBACK)
    skip_to(stream, base)
    data, start = b"", part.start
    while part.stop is None or start < part.stop:
        stop = start + size if part.stop is None else part.stop
        wanted = stop + SEARCH - base - len(data)
        fresh = stream.read(wanted)
        data += fresh
        first = cut(data, start - base, pattern) if start else 0
        last = cut(data, stop - base, pattern)
        if first < last:
            yield data[first:last], base + first
        if len(fresh) < wanted and last == len(data):
            return
        keep = max(0, stop - base - LOOKBACK)
        data, base, start = data[keep:], base + keep, stop


def cut(data: bytes, place: int, pattern: re.Pattern[bytes]) -> int:
    """The first good cut at or after `place`; failing that, any whole character a search further; or the end."""
    for match in pattern.finditer(data, max(0, place - LOOKBACK), place + SEARCH):
        if match.end() >= place:
            return match.end()
    end = min(len(data), place + SEARCH)
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end += 1
    return end
