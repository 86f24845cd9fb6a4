"""Reads documents out of files of every kind, one after the other, and counts what cannot be read."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from plume.config import DataConfig, UserError
from plume.data.plaintext import TextBlock, text_blocks
from plume.data.sources import ARCHIVES, PAGES, FilePart, WorkUnit, hub_rows, optional, plan_pieces
from plume.data.tables import (
    LONGEST_LINE,
    UNDECODED,
    CorruptFileError,
    Row,
    Tally,
    csv_rows,
    drained,
    json_rows,
    open_bytes,
    parquet_rows,
    parse_line,
    seek_forward,
    suffix_of,
    wrong_encoding,
)
from plume.util.files import encodable

MAX_PAGE = 8 << 20  # bytes of one web page; the parser needs many times that in memory
BINARY_SHARE = 0.1  # of NUL characters from which a text is taken for binary data
BROKEN_SHARE = 0.1  # of bytes in lines that cannot be decoded from which the whole block is dropped
BLANK_LINES = re.compile(r"\r?\n[ \t\r]*\n\s*", re.ASCII)
LINES = re.compile(r"[^\n]*\n|[^\n]+")
NOT_TEXT = {  # by their first bytes
    b"%PDF-": "a PDF; pdftotext makes a text of it",
    b"PK\x03\x04": "an archive (.docx, .xlsx, .epub, .zip); export or unpack its text",
}
NO_FIELD = "no text in the field"
TOO_LONG = f"longer than {LONGEST_LINE >> 20} MB"


@dataclass(frozen=True, slots=True)
class Document:
    """One text and what is known of it."""

    text: str
    where: str
    url: str | None = None
    score: float | None = None
    target: str | None = None  # the other side of a pair
    continues: bool = False  # the next part of the document before it, which was too long for one block
    size: int = 0  # bytes of UTF-8 input that it takes

    @property
    def sides(self) -> tuple[str, ...]:
        return (self.text,) if self.target is None else (self.text, self.target)


def read_documents(config: DataConfig, tally: Tally | None = None) -> Iterator[Document]:
    """Every document of every source in order; what cannot be read is counted in the tally."""
    tally = Tally() if tally is None else tally
    for piece in plan_pieces(config):
        yield from read_piece(piece, config, tally)


def read_piece(piece: WorkUnit, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """The documents of one piece that have something in them; a damaged file is counted and the next one read."""
    for part in piece.parts:
        try:
            for document in read_part(part, config, tally):
                clean = without_nuls(replace(document, continues=False) if tally.gap else document, tally)
                tally.gap = (fault := reject_reason(clean)) is not None
                if fault is not None:
                    tally.add(fault, clean.where, clean.size)
                else:
                    tally.text += clean.size
                    yield clean
        except (CorruptFileError, EOFError, zlib.error):
            tally.add("damaged compression", part.path)
        except OSError as error:
            if error.errno is not None:  # the machine's trouble; without a number it is gzip that complains
                raise UserError(f"{part.path} cannot be read: {error.strerror}") from None
            tally.add("damaged compression", part.path)
        tally.count_markup()


def without_nuls(document: Document, tally: Tally) -> Document:
    """The document without its NUL characters, which are counted; binary data is left for `reject_reason`."""
    sides = [document.text] if document.target is None else [document.text, document.target]
    count = sum(side.count("\0") for side in sides)
    if count == 0 or is_binary(document):
        return document
    tally.add("NUL characters", document.where, count, count=0)
    text, *target = (side.replace("\0", "") for side in sides)
    return replace(document, text=text, target=target[0] if target else None, size=document.size - count)


def is_binary(document: Document) -> bool:
    return document.text.count("\0") > BINARY_SHARE * len(document.text)


def reject_reason(document: Document) -> str | None:
    if is_binary(document):
        return "binary data (NUL characters)"
    for text in (document.text, "-" if document.target is None else document.target):
        if not text.strip() and not document.continues:  # in the middle of a text white space is text
            return "empty"
        if not text.isascii() and not encodable(text):
            return "half characters (lone surrogates)"
    return None


def read_part(part: FilePart, config: DataConfig, tally: Tally) -> Iterator[Document]:
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
            tally.read += drained(stream)
        elif kind in (".csv", ".tsv"):
            rows = csv_rows(stream, path, tab=kind == ".tsv", columns=None, tally=tally, encoding=config.encoding)
            yield from from_rows((row for _, row in rows), part.path, config, tally)
            tally.read += drained(stream)
        elif kind in PAGES:
            yield from page(read_page(stream, part.path, tally), part.path, None, tally)
        elif (fault := not_text(path)) is not None:
            tally.read += part.size
            tally.add(fault, part.path, part.size)
        else:
            yield from texts(stream, part, config, tally)


def not_text(path: Path) -> str | None:
    """What a file is that only begins like text: its bytes would be read as text, or an encoding be blamed."""
    with open_bytes(path) as stream:
        head = stream.read(8)
    return next((fault for mark, fault in NOT_TEXT.items() if head.startswith(mark)), None)


def from_rows(rows: Iterable[Row], path: str, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """Documents from the configured fields of rows."""
    for number, row in enumerate(rows, 1):
        where = f"{path} row {number}"
        text = row.get(config.text_field)
        target = None if config.target_field is None else row.get(config.target_field)
        fields = {config.text_field: text} | ({} if config.target_field is None else {config.target_field: target})
        if lacking := [name for name, value in fields.items() if not isinstance(value, str)]:
            held = sum(utf8_size(value) for value in row.values() if isinstance(value, str))
            tally.add(f"{NO_FIELD} {lacking[0]!r}", f"{where}, which has {', '.join(map(repr, row))}", held)
        else:
            url, score = row.get(config.url_field), number_or_none(row.get(config.score_field))
            size = sum(utf8_size(side) for side in fields.values())
            yield Document(str(text), where, url if isinstance(url, str) else None, score, target, size=size)


def utf8_size(text: Any) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def number_or_none(value: Any) -> float | None:
    try:
        return None if math.isnan(number := float(value)) else number
    except (TypeError, ValueError, OverflowError):
        return None


def lines_between(stream: BinaryIO, part: FilePart) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of the lines that begin inside the part."""
    place = part.start
    if part.start > 0:
        seek_forward(stream, part.start - 1)
        place += len(stream.readline()) - 1  # the line that this ends belongs to the part before
    while part.stop is None or place < part.stop:
        line = stream.readline(LONGEST_LINE)
        if not line:
            return
        yield place, line
        place += len(line)


def jsonl(stream: BinaryIO, part: FilePart, tally: Tally) -> Iterator[Row]:
    torn = False
    for place, line in lines_between(stream, part):
        tally.read += len(line)
        whole = len(line) < LONGEST_LINE or line.endswith(b"\n")
        if torn or not whole:
            tally.add(TOO_LONG, f"{part.path} byte {place}", len(line), count=not torn)
            torn = not whole
            continue
        try:
            row = parse_line(line, part.path, None)
        except UserError as error:  # its place is formatted only when it is needed
            tally.add(str(error).rpartition(": ")[2], f"{part.path} byte {place}", len(line))
            continue
        if row is not None:
            yield row


def aligned(stream: BinaryIO, part: FilePart, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """Pairs of lines; both files are read from where the part begins in them."""
    assert part.target is not None
    with open_bytes(Path(part.target)) as other:
        sources = line_texts(stream, part.start, config.encoding)
        targets = line_texts(other, part.target_start, config.encoding)
        pairs = islice(zip(sources, targets, strict=True), part.lines)
        for number, ((text, size), (target, target_size)) in enumerate(pairs, part.first_line + 1):
            where = f"{part.path} line {number}"
            tally.read += size + target_size
            if max(size, target_size) > LONGEST_LINE:
                tally.add(TOO_LONG, where, size + target_size)
            elif UNDECODED.search(text + target) is not None:
                tally.add(wrong_encoding(config.encoding), where, size + target_size)
            else:
                yield Document(text, where, target=target, size=size + target_size)


def line_texts(stream: BinaryIO, start: int, encoding: str) -> Iterator[tuple[str, int]]:
    """(line without its end, its bytes) from a byte on; a line longer than any may be is cut."""
    parts, size = list[str](), 0
    for block in text_blocks(stream, start, None, encoding=encoding, unit="line", size=1 << 20):
        for line in LINES.findall(block.data.decode("utf-8", "surrogateescape")):
            size += utf8_size(line)
            if size <= LONGEST_LINE:
                parts.append(line)
            if line.endswith("\n"):
                yield "".join(parts).rstrip("\r\n"), size
                parts, size = [], 0
    if size:
        yield "".join(parts), size


def texts(stream: BinaryIO, part: FilePart, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """Documents of a plain text: all of it, its paragraphs or its lines."""
    blocks = text_blocks(
        stream, part.start, part.stop, encoding=config.encoding, unit=config.documents, size=config.shard_mb << 20
    )
    begun, leading = False, b""  # white space that a text begins with is not a document of its own
    for block in blocks:
        tally.read += len(block.data)
        if config.documents != "file":
            yield from short_texts(block, part.path, config, tally)
            continue
        begun |= block.continues and not leading
        data = leading + block.data
        if not begun and data.isspace() and len(data) < LONGEST_LINE:
            leading = data
            continue
        text, size = decode_lines(data, part.path, config.encoding, tally)
        if size:
            yield Document(text, part.path, continues=begun, size=size)
        begun, leading = True, b""
    if leading:
        yield Document(leading.decode().replace("\r\n", "\n"), part.path, size=len(leading))


def decode_lines(data: bytes, where: str, encoding: str, tally: Tally) -> tuple[str, int]:
    """(text with plain newlines, bytes it was made from); lines that cannot be decoded are dropped and counted."""
    try:
        return data.decode().replace("\r\n", "\n"), len(data)
    except UnicodeDecodeError:
        lines = data.decode("utf-8", "surrogateescape").split("\n")
    kept = [line for line in lines if UNDECODED.search(line) is None]
    text = "\n".join(kept)
    lost = len(data) - utf8_size(text)
    if lost > BROKEN_SHARE * len(data):
        tally.add(wrong_encoding(encoding), where, len(data))
        tally.gap = True
        return "", 0
    tally.add(wrong_encoding(encoding), where, lost, count=len(lines) - len(kept))
    return text.replace("\r\n", "\n"), len(data) - lost


def short_texts(block: TextBlock, path: str, config: DataConfig, tally: Tally) -> Iterator[Document]:
    """The paragraphs or lines of a block; one that is longer than a block continues in the next."""
    whole = block.data.decode("utf-8", "surrogateescape")
    place, continues = block.start, block.continues
    for piece, text in lines_of(whole) if config.documents == "line" else paragraphs_of(whole):
        size = len(piece) if piece.isascii() else len(piece.encode("utf-8", "surrogateescape"))
        where = f"{path} byte {place}"
        if not piece.isascii() and UNDECODED.search(piece) is not None:
            tally.add(wrong_encoding(config.encoding), where, size)
        else:
            yield Document(text.replace("\r\n", "\n"), where, continues=continues, size=size)
        place, continues = place + size, False


def lines_of(text: str) -> Iterator[tuple[str, str]]:
    """Each line with its end and without."""
    return ((line, line.rstrip("\r\n")) for line in LINES.findall(text))


def paragraphs_of(text: str) -> Iterator[tuple[str, str]]:
    """Each paragraph with the blank lines after it and without."""
    start = 0
    for blank in BLANK_LINES.finditer(text):
        yield text[start : blank.end()], text[start : blank.start()]
        start = blank.end()
    if start < len(text):
        yield text[start:], text[start:]


def read_page(stream: Any, where: str, tally: Tally) -> bytes | None:
    """A page, unless it is longer than a page may be."""
    html: bytes = stream.read(MAX_PAGE + 1)
    size = len(html)
    if size > MAX_PAGE:
        while more := len(stream.read(1 << 20)):
            size += more
        tally.add(f"page longer than {MAX_PAGE >> 20} MB", where, size)
    tally.read += size
    return None if size > MAX_PAGE else html


def page(html: bytes | None, where: str, url: str | None, tally: Tally) -> Iterator[Document]:
    """The article of a web page without its menus and footers."""
    trafilatura = optional("trafilatura", "HTML pages")
    if html is None:
        return
    text = trafilatura.extract(html, url=url, include_comments=False)
    if text is None:
        tally.add("no article found in the page", where, len(html))
    else:
        yield Document(text, where, url=url, size=utf8_size(text))


def archive(path: Path, tally: Tally) -> Iterator[Document]:
    """Pages of a WARC file (responses), or the texts of a WET file (conversions)."""
    optional("warcio", "WARC files")
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    with path.open("rb") if path.suffix == ".gz" else open_bytes(path) as stream:
        try:
            for record in ArchiveIterator(stream):
                url = record.rec_headers.get_header("WARC-Target-URI")
                where = f"{path} {url}"
                if record.rec_type == "conversion":
                    if (data := read_page(record.content_stream(), where, tally)) is not None:
                        yield Document(data.decode("utf-8", errors="replace"), where, url=url, size=len(data))
                elif record.rec_type == "response":
                    kind = record.http_headers.get_header("Content-Type", "") if record.http_headers else ""
                    if "html" in kind:
                        yield from page(read_page(record.content_stream(), where, tally), where, url, tally)
                    else:
                        tally.add("not an HTML page", where)
        except ArchiveLoadFailed:
            tally.add("damaged WARC record", str(path))
