"""Reads plain text of any encoding in blocks that begin and end between characters, whatever the line structure."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol, cast

from plume.data.tables import MARKED, seek_forward

Unit = str  # of documents: file, paragraph or line, as DataConfig has it
SEARCH = 1 << 20  # bytes searched for a good place to split a long text
LOOKBACK = 64  # bytes before a split that decide whether it is a good place
MARGIN = 8  # bytes after a search that decide whether its last byte ends a character
BLOCK = 1 << 20  # bytes converted to UTF-8 at a time
# Where a text may be split without changing its tokens, best first: after a line with text on both sides; before the
# last newline of blank lines; before a single space or return; after a full-width mark. The match ends at the split.
SAFE_SPLITS = [r"\S\r?\n(?=\S)", r"[^\S\r](?=\r?\n\S)", r"\S(?=[ \r]\S)", r"[。，、！？；](?=[\u4e00-\u9fff])"]
SPLITS: dict[Unit, list[re.Pattern[str]]] = {
    "file": [re.compile(pattern) for pattern in SAFE_SPLITS],
    "paragraph": [re.compile(r"\n\s*\n(?=\S)", re.ASCII), *map(re.compile, SAFE_SPLITS)],
    "line": [re.compile(r"\n"), *map(re.compile, SAFE_SPLITS[2:])],
}
# The same in bytes of encodings in which a newline is never a part of another character.
BYTE_SPLITS: dict[Unit, re.Pattern[bytes]] = {
    "file": re.compile(rb"\S\r?\n(?=\S)|[^\S\r](?=\r?\n\S)"),
    "paragraph": re.compile(rb"\n\s*\n(?=\S)"),
    "line": re.compile(rb"\n"),
}
BOMS = {  # the longer ones first: UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
WIDE = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}  # without a byte order mark
DOUBLE_BYTE = {
    "gb18030", "gbk", "gb2312", "big5", "big5hkscs", "cp950", "shift_jis", "shift_jis_2004", "shift_jisx0213",
    "cp932", "euc_jp", "euc_jis_2004", "euc_jisx0213", "euc_kr", "cp949", "johab",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A stretch of UTF-8 text between two characters."""

    data: bytes
    start: int
    continues: bool  # what it begins with belongs to the document that the block before ended with


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def detect_encoding(head: bytes, configured: str) -> tuple[str, int]:
    """(encoding, bytes of the byte order mark) of a file; a mark decides against what is configured."""
    for bom, name in BOMS.items():
        if head.startswith(bom):
            return name, len(bom)
    name = codecs.lookup(configured).name.removesuffix("-sig")
    return WIDE.get(name, name), 0


def can_split(encoding: str, unit: Unit) -> bool:
    """Whether parts of a file in this encoding can be read on their own, from a newline on."""
    if encoding.startswith(("utf-16", "utf-32")):
        return unit != "paragraph"
    if encoding == "utf-8" or encoding in DOUBLE_BYTE:
        return True
    every = bytes(range(256))
    return len(every.decode(encoding, "replace")) == 256 and b"\n".decode(encoding) == "\n"  # one byte per character


class TextWindow:
    """A stretch of a stream in memory, addressed by the offsets of the stream."""

    def __init__(self, stream: Readable, base: int) -> None:
        self.stream, self.base, self.data = stream, base, b""
        self.end: int | None = None  # of the stream, once it is reached

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start to stop; fewer at the end of the stream."""
        missing = stop - self.base - len(self.data)
        if missing > 0 and self.end is None:
            fresh = self.stream.read(missing)
            self.data += fresh
            if len(fresh) < missing:
                self.end = self.base + len(self.data)
        return self.data[start - self.base : stop - self.base]

    def forget(self, before: int) -> None:
        if before > self.base:
            self.data, self.base = self.data[before - self.base :], before

    def clip(self, place: int) -> int:
        return place if self.end is None else min(place, self.end)


class Utf8:
    """Chunks in another encoding as a stream of UTF-8; what the encoding cannot decode becomes invalid UTF-8."""

    def __init__(self, chunks: Iterator[bytes], encoding: str) -> None:
        self.chunks, self.buffer = chunks, b""
        self.decoder = codecs.getincrementaldecoder(encoding)(MARKED)

    def read(self, size: int, /) -> bytes:
        parts, held = [self.buffer], len(self.buffer)
        while held < size:
            raw = next(self.chunks, b"")
            parts.append(self.decoder.decode(raw, not raw).encode("utf-8", "surrogatepass"))
            held += len(parts[-1])
            if not raw:
                break
        whole = b"".join(parts)
        self.buffer = whole[size:]
        return whole[:size]


def text_blocks(
    stream: BinaryIO, start: int, stop: int | None, *, encoding: str, unit: Unit, size: int
) -> Iterator[TextBlock]:
    """The text from about start to about stop in blocks of about `size`; the parts of a file make the whole."""
    encoding, bom = detect_encoding(cast(io.BufferedReader, stream).peek(4)[:4], encoding)
    base = max(0, start - LOOKBACK) // 4 * 4
    seek_forward(stream, base)
    window = TextWindow(stream, base)
    begin, continues = bom, False
    if encoding != "utf-8":
        chunks = byte_range(window, start, stop, bom, "\n".encode(encoding), unit)
        window, begin, continues = TextWindow(Utf8(chunks, encoding), 0), 0, start > 0 and unit == "file"
        start, stop = 0, None
    elif start:
        begin, whole = utf8_split(window, start, unit)
        continues = not whole and begin > bom
    place = start
    while stop is None or place < stop:
        place = place + size if stop is None else min(place + size, stop)
        end, whole = utf8_split(window, place, unit)
        if end > begin:
            yield TextBlock(window.read(begin, end), begin, continues)
            begin, continues = end, not whole
        if end == window.end:
            return
        window.forget(min(begin, place - LOOKBACK))


def utf8_split(window: TextWindow, place: int, unit: Unit) -> tuple[int, bool]:
    """(the best place to split soon after `place`, whether documents end there); the end of the stream is one."""
    low = max(window.base, place - LOOKBACK)
    raw = window.read(low, place + SEARCH + MARGIN)
    skip = next((i for i, byte in enumerate(raw[:4]) if byte & 0xC0 != 0x80), 0) if low else 0
    text = raw[skip:].decode("utf-8", "surrogateescape")
    for number, pattern in enumerate(SPLITS[unit]):
        for match in pattern.finditer(text):
            at = low + skip + len(text[: match.end()].encode("utf-8", "surrogateescape"))
            if at > place + SEARCH:
                break
            if at >= place:
                return at, number == 0 and unit != "file"
        if unit != "file" and window.end is not None:  # nothing but the end of the last document
            return window.end, True
    at = min(place + SEARCH - low, len(raw))
    while 0 < at < len(raw) and (raw[at] & 0xC0 == 0x80 or raw[at - 1 : at + 1] == b"\r\n"):
        at += 1
    return window.clip(low + at), False


def byte_range(
    window: TextWindow, start: int, stop: int | None, bom: int, newline: bytes, unit: Unit
) -> Iterator[bytes]:
    """The bytes from the first split after start to the first after stop, in an encoding other than UTF-8."""
    place = bom
    if start:
        place = start
        while (found := byte_split(window, place, newline, unit)) is None:
            place += SEARCH
            window.forget(place - LOOKBACK)
        place = found
        if stop is not None and place >= stop:  # the first split after stop is the same one
            return
    while stop is None or place < stop:
        chunk = window.read(place, place + BLOCK if stop is None else min(place + BLOCK, stop))
        if not chunk:
            return
        yield chunk
        place += len(chunk)
        window.forget(place - LOOKBACK)
    while (found := byte_split(window, stop, newline, unit)) is None:
        stop += SEARCH
        yield window.read(place, stop)
        place = stop
        window.forget(place - LOOKBACK)
    yield window.read(place, found)


def byte_split(window: TextWindow, place: int, newline: bytes, unit: Unit) -> int | None:
    """The first split from place on; None if it is further than a search away, the end if there is none."""
    width = len(newline)
    place += -place % width
    low = max(0, place - LOOKBACK)
    raw = window.read(low, place + SEARCH + MARGIN)
    if width == 1:
        ends = (match.end() for match in BYTE_SPLITS[unit].finditer(raw))
    else:
        ends = (m.end() for m in re.finditer(re.escape(newline), raw) if m.end() % width == 0)
    for end in ends:
        if place <= low + end < place + SEARCH:
            return low + end
    return window.end if window.end is not None and window.end <= place + SEARCH else None
