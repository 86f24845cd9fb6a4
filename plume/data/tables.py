"""Rows of any table as dictionaries with line numbers: .jsonl, .json, .csv, .tsv, .parquet, plain, .gz or .zst."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from plume.config import UserError

Row = dict[str, Any]
LONGEST_LINE = 64 << 20  # bytes; a longer record is skipped, so that memory stays bounded
COMPRESSED = (".gz", ".zst")
COMPRESSED_BYTES = 1 << 12  # read at a time: they may become thousands of times as many
LARGEST_WINDOW = 1 << 31  # of zstd --long=31, as archives of forums are compressed
UNDECODED = re.compile("[\udc80-\udcff]")  # bytes that surrogateescape kept apart
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
MARKED = "plume-mark"  # how an encoding other than UTF-8 is decoded
# Python refuses whole numbers of thousands of digits
JSON = json.JSONDecoder(parse_int=lambda digits: int(digits) if len(digits) < 1000 else float(digits))


def mark(error: UnicodeError) -> tuple[str, int]:
    """Half a character in place of what an encoding cannot decode."""
    assert isinstance(error, UnicodeDecodeError)
    return "\udc80", error.end


codecs.register_error(MARKED, mark)


@dataclass
class Tally:
    """What was dropped for which reason: how many, how many bytes, and where the first was. Bytes are of UTF-8."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    bytes: Counter[str] = field(default_factory=Counter)
    read: int = 0  # bytes of input
    text: int = 0  # bytes of the documents that were found in it and not dropped
    gap: bool = False  # what was read last was dropped, so that nothing can continue it
    markup: int = 0  # bytes that are not text: field names and other fields of tables, tags of web pages

    def add(self, reason: str, where: str, size: int = 0, *, count: int = 1) -> None:
        self.counts[reason] += count
        self.bytes[reason] += size
        self.first.setdefault(reason, where)

    def drop(self, reason: str, where: str, size: int) -> None:
        """Count a document as dropped that was counted as found."""
        self.add(reason, where, size)
        self.text, self.gap = self.text - size, True

    def count_markup(self) -> None:
        """What was read and is neither text nor dropped; where the input has no size of its own, the text has."""
        rest = self.read - self.text - self.markup - self.bytes.total()
        self.markup += max(0, rest)
        self.read += max(0, -rest)

    def merge(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.bytes.update(other.bytes)
        self.read, self.text, self.markup = self.read + other.read, self.text + other.text, self.markup + other.markup
        for reason, where in other.first.items():
            self.first.setdefault(reason, where)

    def reasons(self) -> str:
        """How often something was dropped for each reason, and where first."""
        return "".join(f"; {self.counts[reason]} x {reason}, first at {where}" for reason, where in self.first.items())

    def to_dict(self) -> dict[str, Any]:
        reasons = {
            reason: {"count": count, "bytes": self.bytes[reason], "first": self.first[reason]}
            for reason, count in self.counts.most_common()
        }
        return {"read": self.read, "text": self.text, "markup": self.markup, "reasons": reasons}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Tally:
        reasons = plain["reasons"]
        counts, first, sizes = ({r: v[key] for r, v in reasons.items()} for key in ("count", "first", "bytes"))
        return cls(Counter(counts), first, Counter(sizes), plain["read"], plain["text"], markup=plain["markup"])


def suffix_of(path: Path) -> str:
    """The suffix that says how to read it, below any compression: `.jsonl` for `a.jsonl.gz`."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed on the way."""
    if path.suffix.lower() not in COMPRESSED:
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(Decompressed(path)))


class CorruptFileError(UserError):
    """A compressed file that ends too early, or is none."""


class Decompressed(io.RawIOBase):
    """What is in the frames of a .gz or .zst file; a last frame that is not whole is an error, not the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("rb")
        self.new_frame, self.fault = frame_reader(path.suffix.lower())
        self.frame: Any = None  # the one that is being read
        self.begun = False
        self.data, self.given = memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.given

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, out: Any) -> int:
        rest = b" "
        while not self.data and rest:
            rest = self.file.read(COMPRESSED_BYTES)
            try:
                self.data = memoryview(b"".join(self.decompressed(rest)))
            except self.fault as error:
                raise self.corrupt(f"has no {self.path.suffix[1:]} data where it should ({error})") from None
        if not self.data and self.frame is not None:
            raise self.corrupt("ends too early")
        count = min(len(out), len(self.data))
        out[:count], self.data = self.data[:count], self.data[count:]
        self.given += count
        return count

    def decompressed(self, rest: bytes) -> Iterator[bytes]:
        while rest:
            if self.frame is None:
                rest = rest.lstrip(b"\0") if self.begun else rest  # a tape or a disk fills up with them
                self.frame, self.begun = self.new_frame() if rest else None, True
            if not rest:
                return
            yield self.frame.decompress(rest)
            rest = self.frame.unused_data if self.frame.eof else b""
            self.frame = None if self.frame.eof else self.frame

    def corrupt(self, reason: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path} {reason}; copy or compress it again")


def frame_reader(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    """What decompresses one frame, and the error that it raises."""
    if suffix == ".gz":
        import zlib

        return partial(zlib.decompressobj, 16 + zlib.MAX_WBITS), zlib.error
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj, zstandard.ZstdError


def seek_forward(stream: BinaryIO, place: int) -> None:
    """Continue from a byte of a stream that nothing was read from yet; a compressed one is read up to there."""
    if isinstance(getattr(stream, "raw", None), io.FileIO):
        stream.seek(place)
        return
    while place > 0 and (block := stream.read(min(place, 1 << 20))):
        place -= len(block)


def drained(stream: BinaryIO) -> int:
    """Bytes of a whole stream, after reading what is left of it."""
    while stream.read(1 << 20):
        pass
    return stream.tell()


def read_rows(
    path: Path | str, *, columns: Sequence[str] | None = None, tally: Tally | None = None, encoding: str = "utf-8"
) -> Iterator[tuple[int, Row]]:
    """(line or row number from 1, row) of a table, kind by suffix; `columns` names them where no header does.

    Only .csv and .tsv come in other encodings. With a tally a broken row is counted and left out; without one it is a
    UserError.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    kind = suffix_of(path)
    if kind == ".parquet":
        yield from enumerate(parquet_rows(path), 1)
        return
    with open_bytes(path) as stream:
        if kind in (".jsonl", ".ndjson"):
            lines = ((number, line, f"{path} line {number}") for number, line in enumerate(stream, 1))
            for number, line, where in lines:
                if (row := parse_line(line, where, tally)) is not None:
                    yield number, row
        elif kind == ".json":
            yield from enumerate(json_rows(stream, path, tally), 1)
        elif kind in (".csv", ".tsv"):
            yield from csv_rows(stream, path, tab=kind == ".tsv", columns=columns, tally=tally, encoding=encoding)
        else:
            raise UserError(
                f"{path}: no rows can be read from {kind or 'a file without a suffix'}; {', '.join(TABLES)} work"
            )


def reject(reason: str, where: str, tally: Tally | None, size: int = 0) -> None:
    if tally is None:
        raise UserError(f"{where}: {reason}")
    tally.add(reason, where, size)


def parse_line(line: bytes, where: str, tally: Tally | None) -> Row | None:
    """One line of JSON as a row; a bare string becomes the field `text`; blank lines are nothing."""
    if not line.strip():
        return None
    try:
        value = JSON.decode(line.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError:
        reject("not UTF-8", where, tally)
        return None
    except (json.JSONDecodeError, RecursionError) as error:
        reject("nested too deeply" if isinstance(error, RecursionError) else "not JSON", where, tally)
        return None
    return as_row(value, where, tally)


def as_row(value: Any, where: str, tally: Tally | None, size: int = 0) -> Row | None:
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        reject("neither an object nor a string", where, tally, size)
        return None
    return value


@contextmanager
def as_text(stream: BinaryIO, newline: str | None = None, encoding: str = "utf-8") -> Iterator[io.TextIOWrapper]:
    """Characters instead of bytes; what does not fit the encoding becomes half a character for `decodable` to find."""
    head = cast(io.BufferedReader, stream).peek(3)[:3]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif head.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    errors = "surrogateescape" if encoding.startswith("utf-8") else MARKED  # the first keeps bytes, but not all of them
    text = io.TextIOWrapper(stream, encoding=encoding, errors=errors, newline=newline)
    try:
        yield text
    finally:
        text.detach()  # the bytes are closed by whoever opened them


def json_rows(stream: BinaryIO, path: Path, tally: Tally | None) -> Iterator[Row]:
    """Elements of one JSON list, or objects one after the other, without holding the whole file."""
    with as_text(stream) as text:
        for number, (value, source) in enumerate(json_values(text), 1):
            where, size = f"{path} element {number}", len(source.encode("utf-8", "surrogateescape"))
            if isinstance(value, Exception):
                while more := text.read(1 << 20):
                    size += len(more.encode("utf-8", "surrogateescape"))
                deep = isinstance(value, RecursionError)
                reject(f"{'nested too deeply' if deep else 'not JSON'} from here on", where, tally, size)
                return
            if (row := as_row(value, where, tally, size)) and decodable(row.values(), where, tally, size=size):
                yield row


def json_values(text: io.TextIOWrapper) -> Iterator[tuple[Any, str]]:
    """(value, its JSON) between commas or brackets; (error, rest so far) as the last if it is not JSON."""
    buffer, place, more = "", 0, True
    while True:
        while place < len(buffer) and buffer[place] in "[], \t\r\n":
            place += 1
        try:
            value, end = JSON.raw_decode(buffer, place)
            yield value, buffer[place:end]
            place = end
        except (json.JSONDecodeError, RecursionError) as error:
            if not more or len(buffer) - place > LONGEST_LINE or isinstance(error, RecursionError):
                if buffer[place:].strip():
                    yield error, buffer[place:]
                return
            chunk = text.read(max(1 << 20, len(buffer) - place))  # doubling keeps a giant element linear
            buffer, place, more = buffer[place:] + chunk, 0, bool(chunk)


def decodable(cells: Iterable[Any], where: str, tally: Tally | None, reason: str = "not UTF-8", size: int = 0) -> bool:
    """Whether no cell holds bytes outside its encoding (surrogateescape keeps them apart from real text)."""
    for cell in cells:
        if isinstance(cell, str) and not cell.isascii() and UNDECODED.search(cell) is not None:
            reject(reason, where, tally, size)
            return False
    return True


class CsvLines:
    """Lines for a CSV reader, kept until the record they make is accepted, so that reading can begin anew after one."""

    def __init__(self, lines: Iterator[str], number: int = 0) -> None:
        self.lines, self.number = lines, number  # and how many came before
        self.record: list[str] = []
        self.again: list[str] = []  # to be read once more, the next one last
        self.size = 0
        self.open = False  # the record was not closed when the lines ended, or it grew too long

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.again.pop() if self.again else next(self.lines, None)
        if line is None or self.size > LONGEST_LINE:
            self.open = bool(self.record)
            raise StopIteration
        self.record.append(line)
        self.size += len(line)
        return line

    def accept(self) -> None:
        self.number += len(self.record)
        self.record, self.size, self.open = [], 0, False

    def drop_line(self) -> str:
        """Give the first line of the record away; the others are read again."""
        first, *others = self.record
        self.again += reversed(others)
        self.record = [first]
        self.accept()
        return first


def csv_rows(
    stream: BinaryIO,
    path: Path,
    *,
    tab: bool,
    columns: Sequence[str] | None,
    tally: Tally | None,
    encoding: str = "utf-8",
) -> Iterator[tuple[int, Row]]:
    """(line number, row); tabs separate cells without quoting; commas, semicolons or bars may be quoted.

    Of a record over several lines that is not a row, the first line is dropped and reading begins anew after it.
    """
    csv.field_size_limit(LONGEST_LINE)
    with as_text(stream, "", encoding) as text:
        lines = iter(partial(text.readline, LONGEST_LINE), "")
        blank, head = next(((n, line) for n, line in enumerate(lines) if line.strip()), (0, ""))
        records = CsvLines(chain([head], lines), blank)
        quoting: Any = csv.QUOTE_NONE if tab else csv.QUOTE_MINIMAL
        separator = "\t" if tab else delimiter(head)
        names = None if columns is None else list(columns)
        reader = csv.reader(records, delimiter=separator, quoting=quoting)
        while True:
            cells, fault = next_record(reader, records, names, wrong_encoding(encoding))
            if cells is None:
                return
            if fault is not None:
                where, several = f"{path} line {records.number + 1}", len(records.record) > 1
                dropped = records.drop_line() if several else "".join(records.record)
                reject(fault, where, tally, len(dropped.encode("utf-8", "surrogateescape")))
                reader = csv.reader(records, delimiter=separator, quoting=quoting)
            elif names is None:
                names = distinct(cells)
            elif cells:
                yield records.number + len(records.record), dict(zip(names, cells, strict=True))
            records.accept()


def distinct(names: Sequence[str]) -> list[str]:
    """Column names; the second `text` is `text.1`, as in pandas."""
    seen: Counter[str] = Counter()
    found = list[str]()
    for name in names:
        found.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def next_record(
    reader: Iterator[list[str]], records: CsvLines, names: list[str] | None, undecoded: str
) -> tuple[list[str] | None, str | None]:
    """(cells, what is wrong with them); None instead of cells at the end."""
    try:
        cells = next(reader, None)
    except csv.Error as error:
        return [], f"not CSV ({error})"
    if cells is None:
        return None, None
    if records.open:
        return cells, "quote that is not closed"
    if cells and names is not None and len(cells) != len(names):
        return cells, f"not the {len(names)} columns of the header"
    if any(not cell.isascii() and UNDECODED.search(cell) for cell in cells):
        return cells, undecoded
    return cells, None


def wrong_encoding(encoding: str) -> str:
    """Why a text cannot be read, and what can be done about it."""
    return f"not {encoding} text; encoding=cp1252 (Windows), gb18030, ... names another"


def delimiter(line: str) -> str:
    """What parts the cells of a .csv by its first line: spreadsheets of many countries write semicolons."""
    outside = re.sub(r'"[^"]*"', "", line)
    return max(",;\t|", key=outside.count)  # ties go to the comma, which is first


def parquet_rows(path: Path, groups: Sequence[int] | None = None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256, row_groups=groups):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
