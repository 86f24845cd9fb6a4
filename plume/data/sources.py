"""Finds the files behind a path, glob, folder, package or hub dataset, and cuts them into pieces of equal work."""

from __future__ import annotations

import codecs
import glob
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from plume.config import DataConfig, UserError, did_you_mean
from plume.data.rows import COMPRESSED, TABLES, open_bytes, suffix_of
from plume.data.web import ARCHIVES, PAGES, hub_shards

TEXTS = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts", ".raw")
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
# encodings and pydoc_data are tables, not code
STRIPS = 8  # parts that one compressed file is read in when there are few: each decompresses from the start
EXPANSION = 4  # compressed text grows about this much; only the balance of the work depends on it


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one file: bytes, lines (of a pair) or row groups, as its kind has it; all of it from 0 to None."""

    path: str
    start: int = 0
    stop: int | None = None
    target: str | None = None  # the file that is aligned with it line by line
    size: int = 0  # bytes, for the progress bar


@dataclass(frozen=True, slots=True)
class Piece:
    """Work for one worker that ends as one shard."""

    number: int
    source: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(p.size for p in self.parts)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Piece:
        return cls(plain["number"], plain["source"], tuple(Part(**p) for p in plain["parts"]))


def find_files(spec: str) -> list[Path]:
    """The files behind a path, folder, glob, `python:stdlib` or `python:PACKAGE`, in a fixed order."""
    if spec.startswith("python:"):
        return package_files(spec.removeprefix("python:"))
    path = Path(spec).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and readable_kind(p) and not hidden(p, path)]
        if not found:
            raise UserError(
                f"the folder {path} holds no file that can be read ({', '.join((*TABLES, '.txt', '.md'))}, ...)"
            )
        return found
    if glob.has_magic(spec):
        found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
        if not found:
            raise UserError(f"no file matches {spec!r}")
        return found
    neighbours = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"there is no file or folder {spec!r}{did_you_mean(path.name, neighbours)}")


def readable_kind(path: Path) -> bool:
    return suffix_of(path) in (*TABLES, *PAGES, *ARCHIVES, *TEXTS)


def hidden(path: Path, base: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in path.relative_to(base).parts)


def package_files(name: str) -> list[Path]:
    """The Python source of an installed package, or of the standard library, without its tests."""
    if name == "stdlib":
        base = Path(sysconfig.get_path("stdlib"))
    else:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise UserError(f"python:{name}: no such package is installed; python:stdlib is always there")
        base = Path(spec.origin).parent
        if spec.submodule_search_locations is None:
            return [Path(spec.origin)]
    inside = (p for p in sorted(base.rglob("*.py")) if not NOT_SOURCE & set(p.relative_to(base).parts))
    return [p for p in inside if p.is_file() and p.stat().st_size > 0]


def plan_pieces(config: DataConfig) -> list[Piece]:
    """All work in a fixed order: big files cut, small ones together, each piece about `shard_mb` of input."""
    size = config.shard_mb << 20
    pieces: list[Piece] = []
    for source, spec in enumerate(config.paths):
        if config.weights and config.weights[source] == 0:
            continue
        waiting: list[Part] = []
        for part in plan_parts(config, source, spec, size):
            if waiting and sum(p.size for p in waiting) + part.size > size:
                pieces.append(Piece(len(pieces), source, tuple(waiting)))
                waiting = []
            waiting.append(part)
        pieces.append(Piece(len(pieces), source, tuple(waiting)))
    return pieces


def plan_parts(config: DataConfig, source: int, spec: str, size: int) -> Iterator[Part]:
    if spec.startswith("hub:"):
        shards = hub_shards(spec)
        yield from (Part(spec, i, shards, size=size) for i in range(shards))  # their true sizes are not known
        return
    files = find_files(spec)
    if config.targets:
        yield from pair_parts(files, find_files(config.targets[source]), size)
        return
    compressed = sum(p.suffix.lower() in COMPRESSED for p in files)
    for path in files:
        yield from cut_file(path, config, size, strips=-(-STRIPS // compressed) if compressed else 1)


def cut_file(path: Path, config: DataConfig, size: int, *, strips: int) -> Iterator[Part]:
    total, kind = path.stat().st_size, suffix_of(path)
    if kind == ".parquet" and total > size:
        yield from row_groups(path, size)
        return
    if path.suffix.lower() in COMPRESSED:
        grown = total * EXPANSION
        size, count = max(size, -(-grown // strips)), min(strips, -(-grown // size))
    else:
        count = -(-total // size)
    whole = count <= 1 or kind in (".json", ".csv", ".tsv", ".parquet", *PAGES, *ARCHIVES)
    if whole or not cuttable(path, config.encoding):
        yield Part(str(path), size=total)
        return
    for i in range(count):
        yield Part(str(path), i * size, (i + 1) * size if i + 1 < count else None, size=total // count)


def cuttable(path: Path, encoding: str) -> bool:
    """Whether a newline is one byte there: not in UTF-16, which a file's first two bytes may say as well."""
    with open_bytes(path) as stream:
        marked = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return not marked and "\n".encode(encoding) == b"\n"


def row_groups(path: Path, size: int) -> Iterator[Part]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    except (pyarrow.ArrowException, OSError):
        yield Part(str(path), size=path.stat().st_size)  # whoever reads it will count it as damaged
        return
    start, held = 0, 0
    for group, grown in enumerate(sizes):
        held += grown
        if held >= size or group + 1 == len(sizes):
            yield Part(str(path), start, group + 1, size=held)
            start, held = group + 1, 0


def pair_parts(files: list[Path], targets: list[Path], size: int) -> Iterator[Part]:
    """Stretches of lines of two aligned files."""
    if len(files) != len(targets):
        raise UserError(
            f"{len(files)} files are to be aligned with {len(targets)}: {files[0]}, ... and {targets[0]}, ..."
        )
    for path, target in zip(files, targets, strict=True):
        lines, others = count_lines(path), count_lines(target)
        if lines != others:
            raise UserError(f"{path} has {lines} lines and {target} has {others}; aligned files need the same number")
        total = path.stat().st_size
        count = max(1, total // size)
        edges = [lines * i // count for i in range(count + 1)]
        for start, stop in pairwise(edges):
            yield Part(str(path), start, stop, target=str(target), size=total // count)


def count_lines(path: Path) -> int:
    newlines, last = 0, b"\n"
    with open_bytes(path) as stream:
        while block := stream.read(1 << 20):
            newlines += block.count(b"\n")
            last = block[-1:]
    return newlines + (last != b"\n")
