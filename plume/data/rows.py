"""Rows of any table as dictionaries with line numbers: .jsonl, .json, .csv, .tsv, .parquet, plain, .gz or .zst."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from plume.config import UserError

Row = dict[str, Any]
LONGEST_LINE = 64 << 20  # bytes; a longer record is skipped, so that memory stays bounded
COMPRESSED = (".gz", ".zst")
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


@dataclass
class Tally:
    """What was left out: how many for each reason, and where the first of them stood."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    def merge(self, other: Tally) -> None:
        self.counts += other.counts
        for reason, where in other.first.items():
            self.first.setdefault(reason, where)

    def plain(self) -> dict[str, dict[str, Any]]:
        return {reason: {"count": n, "first": self.first[reason]} for reason, n in self.counts.most_common()}

    @classmethod
    def of(cls, plain: dict[str, dict[str, Any]]) -> Tally:
        return cls(Counter({r: v["count"] for r, v in plain.items()}), {r: v["first"] for r, v in plain.items()})


def suffix_of(path: Path) -> str:
    """The suffix that says how to read it, below any compression: `.jsonl` for `a.jsonl.gz`."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return inner.suffix.lower()


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed on the way."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        import gzip

        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".zst":
        import zstandard

        raw = path.open("rb")
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=True))
    return path.open("rb")


def skip_to(stream: BinaryIO, place: int) -> None:
    """Go on from a byte of a stream that nothing was read from yet; a compressed one is read up to there."""
    if isinstance(getattr(stream, "raw", None), io.FileIO):
        stream.seek(place)
        return
    while place > 0 and (block := stream.read(min(place, 1 << 20))):
        place -= len(block)


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


def reject(reason: str, where: str, tally: Tally | None) -> None:
    if tally is None:
        raise UserError(f"{where}: {reason}")
    tally.add(reason, where)


def parse_line(line: bytes, where: str, tally: Tally | None) -> Row | None:
    """One line of JSON as a row; a bare string becomes the field `text`; blank lines are nothing."""
    if not line.strip():
        return None
    try:
        value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError:
        reject("not UTF-8", where, tally)
        return None
    except (json.JSONDecodeError, RecursionError):
        reject("not JSON", where, tally)
        return None
    return as_row(value, where, tally)


def as_row(value: Any, where: str, tally: Tally | None) -> Row | None:
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        reject("neither an object nor a string", where, tally)
        return None
    return value


@contextmanager
def as_text(stream: BinaryIO, newline: str | None = None, encoding: str = "utf-8") -> Iterator[io.TextIOWrapper]:
    """Characters instead of bytes; a byte that does not fit the encoding is kept apart for `readable` to find."""
    head = cast(io.BufferedReader, stream).peek(3)[:3]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif head.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    text = io.TextIOWrapper(stream, encoding=encoding, errors="surrogateescape", newline=newline)
    try:
        yield text
    finally:
        text.detach()  # the bytes are closed by whoever opened them


def json_rows(stream: BinaryIO, path: Path, tally: Tally | None) -> Iterator[Row]:
    """Elements of one JSON list, or objects one after the other, without holding the whole file."""
    with as_text(stream) as text:
        for number, value in enumerate(json_values(text), 1):
            where = f"{path} element {number}"
            if isinstance(value, json.JSONDecodeError):
                reject("not JSON from here on", where, tally)
            elif (row := as_row(value, where, tally)) is not None and readable(row.values(), where, tally):
                yield row


def json_values(text: io.TextIOWrapper) -> Iterator[Any]:
    """Values between commas or brackets; the error, as the last one, if the rest cannot be understood."""
    decoder = json.JSONDecoder()
    buffer, place, more = "", 0, True
    while True:
        while place < len(buffer) and buffer[place] in "[], \t\r\n":
            place += 1
        try:
            value, place = decoder.raw_decode(buffer, place)
            yield value
        except json.JSONDecodeError as error:
            if not more or len(buffer) - place > LONGEST_LINE:
                if buffer[place:].strip():
                    yield error
                return
            chunk = text.read(max(1 << 20, len(buffer) - place))  # doubling keeps a giant element linear
            buffer, place, more = buffer[place:] + chunk, 0, bool(chunk)


def readable(cells: Iterable[Any], where: str, tally: Tally | None, reason: str = "not UTF-8") -> bool:
    """Whether no cell holds bytes outside its encoding (surrogateescape keeps them apart from real text)."""
    for cell in cells:
        if isinstance(cell, str) and not cell.isascii() and any("\udc80" <= c <= "\udcff" for c in cell):
            reject(reason, where, tally)
            return False
    return True


def csv_rows(
    stream: BinaryIO,
    path: Path,
    *,
    tab: bool,
    columns: Sequence[str] | None,
    tally: Tally | None,
    encoding: str = "utf-8",
) -> Iterator[tuple[int, Row]]:
    """(line number, row); tabs part cells as they stand, commas (or what stands for them) may stand in quotes."""
    csv.field_size_limit(LONGEST_LINE)
    quoting: Any = csv.QUOTE_NONE if tab else csv.QUOTE_MINIMAL
    with as_text(stream, "", encoding) as text:
        first = text.readline()
        reader = csv.reader(chain([first], text), delimiter="\t" if tab else delimiter(first), quoting=quoting)
        try:
            names = list(columns) if columns is not None else next(reader, [])
            for cells in reader:
                where = f"{path} line {reader.line_num}"
                if cells and len(cells) != len(names):
                    reject(f"not the {len(names)} columns of the header", where, tally)
                elif cells and readable(cells, where, tally, foreign(encoding)):
                    yield reader.line_num, dict(zip(names, cells, strict=True))
        except csv.Error as error:
            reject(f"not CSV ({error})", f"{path} line {reader.line_num}", tally)


def foreign(encoding: str) -> str:
    """Why a text cannot be read, and what can be done about it."""
    return f"not {encoding} text; encoding=gb18030, latin-1, ... names another"


def delimiter(line: str) -> str:
    """What parts the cells of a .csv by its first line: spreadsheets of many countries write semicolons."""
    outside = re.sub(r'"[^"]*"', "", line)
    return max(",;\t|", key=outside.count)  # of equals the comma, which stands first


def parquet_rows(path: Path, groups: Sequence[int] | None = None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256, row_groups=groups):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
