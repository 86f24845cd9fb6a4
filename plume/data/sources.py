"""Finds the files behind a path, glob, folder, package or hub dataset, and cuts them into pieces of equal work."""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import DataConfig, UserError, at_home, did_you_mean
from plume.data.plaintext import can_split, detect_encoding, text_blocks
from plume.data.tables import COMPRESSED, TABLES, CorruptFileError, Row, open_bytes, suffix_of
from plume.util.hub import hub_is_offline

PAGES = (".html", ".htm")
ARCHIVES = (".warc", ".wet")
TEXTS = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".log", ".raw"),
    *(".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts"),
)
READABLE = {*TABLES, *PAGES, *ARCHIVES, *TEXTS}
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
# encodings and pydoc_data are tables, not code
STRIPS = 8  # parts that one compressed file is read in when there are few: each decompresses from the start
MANY_PARTS, LAST_PARTS = 8, 8  # parts from which on the last two of a file are cut finer, and into how many
EXPANSION = 4  # compressed text grows about this much; only the balance of the work depends on it


@dataclass(frozen=True, slots=True)
class FilePart:
    """A stretch of one file, in bytes or row groups; all of it from 0 to None."""

    path: str
    start: int = 0
    stop: int | None = None
    target: str | None = None  # the file that is aligned with it line by line
    size: int = 0  # bytes, for the progress bar
    target_start: int = 0  # of an aligned file, in bytes
    first_line: int = 0  # of aligned files
    lines: int | None = None  # of aligned files; all that are left if None


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Work for one worker that ends as one shard."""

    number: int
    source: int
    parts: tuple[FilePart, ...]

    @property
    def size(self) -> int:
        return sum(p.size for p in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> WorkUnit:
        return cls(plain["number"], plain["source"], tuple(FilePart(**p) for p in plain["parts"]))


def with_absolute_paths(piece: WorkUnit) -> WorkUnit:
    """The piece with paths that do not depend on the folder a worker starts in."""
    parts = [p if p.path.startswith("hub:") else replace(p, path=os.path.abspath(p.path)) for p in piece.parts]
    aligned = [p if p.target is None else replace(p, target=os.path.abspath(p.target)) for p in parts]
    return replace(piece, parts=tuple(aligned))


def find_files(spec: str) -> list[Path]:
    """The files behind a path, folder, glob, `python:stdlib` or `python:PACKAGE`, in a fixed order."""
    return [Path(name) for name in file_names(spec)]


def file_names(spec: str) -> list[str]:
    """The same as texts: of many files, to make a Path of each takes as long as to find them."""
    if spec.startswith("python:"):
        return [str(path) for path in package_files(spec.removeprefix("python:"))]
    path = at_home(spec)
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        names = sorted(names_below(path), key=lambda name: name.split(os.sep))
        found = names if str(path) == "." else [os.path.join(str(path), name) for name in names]
        if not found:
            raise UserError(
                f"the folder {path} holds no file that can be read ({', '.join((*TABLES, '.txt', '.md'))}, ...)"
            )
        return found
    if glob.has_magic(spec):
        found = [p for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
        if not found:
            raise UserError(f"no file matches {spec!r}")
        return found
    if is_special(path):
        raise UserError(f"{spec!r} is a pipe, a socket or a device, which cannot be read twice; copy it into a file")
    neighbours = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"there is no file or folder {spec!r}{did_you_mean(path.name, neighbours)}")


def unread_files(spec: str) -> list[Path]:
    """The files in a folder that are left out: of other endings, or pipes, sockets and devices."""
    path = at_home(spec)
    return [path / name for name in sorted(names_below(path, readable=False))] if path.is_dir() else []


def names_below(base: Path, *, readable: bool = True) -> Iterator[str]:
    """The files in a folder whose endings are known, or the others and those that are special; hidden ones left out.

    Links to folders are followed, each folder is read once, and none that the base lies in.
    """
    real = base.resolve()
    seen = {folder_id(folder) for folder in (real, *real.parents)}
    for folder, inner, files in os.walk(base, onerror=refuse_folder, followlinks=True):
        shown = [os.path.join(folder, name) for name in inner if not name.startswith((".", "__pycache__"))]
        unseen = list[str]()
        for path in sorted(shown, key=lambda path: (os.path.islink(path), path)):
            if (own := folder_id(path)) not in seen:
                seen.add(own)
                unseen.append(os.path.basename(path))
        inner[:] = unseen
        below = os.path.relpath(folder, base)
        for name in files:
            if name.startswith((".", "__pycache__")):
                continue
            if (readable_kind(name) and not is_special(os.path.join(folder, name))) == readable:
                yield name if below == "." else os.path.join(below, name)


def is_special(path: str | Path) -> bool:
    """Whether it is a pipe, a socket or a device, whose opening or reading may never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:  # such as a link to nothing: whoever reads it says so
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def folder_id(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def refuse_folder(error: OSError) -> None:
    raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None


def readable_kind(name: str) -> bool:
    inner, last = os.path.splitext(name.lower())
    suffix = os.path.splitext(inner)[1] if last in COMPRESSED else last
    return suffix in READABLE


def package_files(name: str) -> list[Path]:
    """The Python source of an installed package, or of the standard library, without its tests."""
    base = Path(sysconfig.get_path("stdlib"))
    if name != "stdlib":
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # of the package around it; of a module without a spec
            spec = None
        found = Path("") if spec is None or spec.origin is None else Path(spec.origin)
        if found.suffix != ".py":  # such as frozen, built-in or a library
            raise UserError(f"python:{name}: no such package is installed, or not as source; python:stdlib always is")
        if spec is not None and spec.submodule_search_locations is None:
            return [found]
        base = found.parent
    inside = (p for p in sorted(base.rglob("*.py")) if not NOT_SOURCE & set(p.relative_to(base).parts))
    return [p for p in inside if p.is_file() and p.stat().st_size > 0]


def plan_pieces(config: DataConfig) -> list[WorkUnit]:
    """All work in a fixed order: big files cut, small ones together, each piece about `shard_mb` of input."""
    size = config.shard_mb << 20
    pieces: list[WorkUnit] = []
    for source, spec in enumerate(config.paths):
        if config.weights and config.weights[source] == 0:
            continue
        waiting, held = list[FilePart](), 0
        for part in plan_parts(config, source, spec, size):
            if waiting and (held + part.size > size or waiting[-1].path == part.path):
                pieces.append(WorkUnit(len(pieces), source, tuple(waiting)))
                waiting, held = [], 0
            waiting.append(part)
            held += part.size
        pieces.append(WorkUnit(len(pieces), source, tuple(waiting)))
    return pieces


def plan_parts(config: DataConfig, source: int, spec: str, size: int) -> Iterator[FilePart]:
    if spec.startswith("hub:"):
        shards = hub_shards(spec)
        yield from (FilePart(spec, i, shards, size=size) for i in range(shards))  # their true sizes are not known
        return
    if config.targets:
        yield from pair_parts(find_files(spec), find_files(config.targets[source]), config, size)
        return
    names = file_names(spec)
    compressed = sum(name.lower().endswith(COMPRESSED) for name in names)
    for name in names:
        try:
            total = os.stat(name).st_size
        except OSError as error:  # such as a link to nothing
            raise UserError(f"{name} cannot be read: {error.strerror}") from None
        if total * EXPANSION <= size:  # small, whatever it is
            yield FilePart(name, size=total)
        else:
            strips = -(-STRIPS // compressed) if compressed else 1
            yield from cut_file(Path(name), config, size, strips=strips)


def cut_file(path: Path, config: DataConfig, size: int, *, strips: int) -> Iterator[FilePart]:
    total = path.stat().st_size
    kind = suffix_of(path)
    if kind == ".parquet" and total > size:
        yield from row_groups(path, size)
        return
    if compressed := path.suffix.lower() in COMPRESSED:
        grown = total * EXPANSION
        size, count = max(size, -(-grown // strips)), min(strips, -(-grown // size))
    else:
        count = -(-total // size)
    whole = count <= 1 or kind in (".json", ".csv", ".tsv", ".parquet", *PAGES, *ARCHIVES)
    if whole or not cuttable(path, config):
        yield FilePart(str(path), size=total)
        return
    edges = [i * size for i in range(count + 1)] if compressed else part_edges(total, count)
    for start, stop in pairwise(edges):
        share = total * (stop - start) // edges[-1]
        yield FilePart(str(path), start, stop if stop < edges[-1] else None, size=share)


def part_edges(total: int, count: int) -> list[int]:
    """The borders of so many equal parts; of many, the last two are cut finer, so that workers end together."""
    edges = [total * i // count for i in range(count + 1)]
    if count >= MANY_PARTS:
        begin = edges[-3]
        edges[-2:-1] = [begin + (total - begin) * i // LAST_PARTS for i in range(1, LAST_PARTS)]
    return sorted({*edges})


def cuttable(path: Path, config: DataConfig) -> bool:
    """Whether parts of a file can be read on their own: its first bytes may name another encoding."""
    if suffix_of(path) in TABLES:
        return True
    try:
        with open_bytes(path) as stream:
            encoding, _ = detect_encoding(stream.read(4), config.encoding)
    except CorruptFileError:  # whoever reads it will count it
        return False
    return can_split(encoding, config.documents)


def row_groups(path: Path, size: int) -> Iterator[FilePart]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    except (pyarrow.ArrowException, OSError):
        yield FilePart(str(path), size=path.stat().st_size)  # whoever reads it will count it as damaged
        return
    start, held = 0, 0
    for group, grown in enumerate(sizes):
        held += grown
        if held >= size or group + 1 == len(sizes):
            yield FilePart(str(path), start, group + 1, size=held)
            start, held = group + 1, 0


def pair_parts(files: list[Path], targets: list[Path], config: DataConfig, size: int) -> Iterator[FilePart]:
    """Stretches of lines of two aligned files, with where they begin in both."""
    if len(files) != len(targets):
        raise UserError(
            f"{len(files)} files are to be aligned with {len(targets)}: {files[0]}, ... and {targets[0]}, ..."
        )
    for path, target in zip(files, targets, strict=True):
        lines, others = count_lines(path, config.encoding), count_lines(target, config.encoding)
        if lines != others:
            raise UserError(f"{path} has {lines} lines and {target} has {others}; aligned files need the same number")
        total = path.stat().st_size
        count = max(1, total // size) if single_newlines(path, config) and single_newlines(target, config) else 1
        if {path.suffix.lower(), target.suffix.lower()} & {*COMPRESSED}:
            count = min(count, STRIPS)  # each is decompressed from the start
        edges = [lines * i // count for i in range(count + 1)]
        starts, target_starts = (line_starts(side, edges[:-1]) for side in (path, target))
        for (first, last), start, other in zip(pairwise(edges), starts, target_starts, strict=True):
            yield FilePart(
                str(path), start, target=str(target), size=total // count,
                target_start=other, first_line=first, lines=last - first,
            )  # fmt: skip


def single_newlines(path: Path, config: DataConfig) -> bool:
    """Whether every byte 10 of a file is a newline."""
    with open_bytes(path) as stream:
        encoding, _ = detect_encoding(stream.read(4), config.encoding)
    return can_split(encoding, "line") and "\n".encode(encoding) == b"\n"


def count_lines(path: Path, encoding: str) -> int:
    newlines, last = 0, b"\n"
    with open_bytes(path) as stream:
        for block in text_blocks(stream, 0, None, encoding=encoding, unit="line", size=1 << 20):
            newlines += block.data.count(b"\n")
            last = block.data[-1:]
    return newlines + (last != b"\n")


def line_starts(path: Path, numbers: list[int]) -> list[int]:
    """The byte offsets at which lines of these numbers begin, from one pass; the first number is 0."""
    starts, place, seen = [0], 0, 0
    with open_bytes(path) as stream:
        while len(starts) < len(numbers) and (block := stream.read(1 << 20)):
            count = block.count(b"\n")
            while len(starts) < len(numbers) and numbers[len(starts)] <= seen + count:
                ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
                starts.append(place + int(ends[numbers[len(starts)] - seen - 1]) + 1)
            seen, place = seen + count, place + len(block)
    return starts


def optional(module: str, purpose: str, extra: str = "web") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{purpose} need the package {module}: pip install 'plume-lm[{extra}]'") from None


def hub_name(spec: str) -> tuple[str, str | None, str]:
    """`hub:NAME[:CONFIG[:SPLIT]]` taken apart; without one the split is train."""
    name, configuration, split = [*spec.removeprefix("hub:").split(":"), "", ""][:3]
    return name, configuration if configuration else None, split if split else "train"


def hub_shards(spec: str) -> int:
    """How many parts of its own a hub dataset has."""
    return int(getattr(load_hub(spec), "num_shards", 1))


def load_hub(spec: str) -> Any:
    """A hub dataset, streamed unless the hub is off limits; then what the cache holds."""
    offline = hub_is_offline()
    datasets = optional("datasets", "hub datasets", "hub")
    name, configuration, split = hub_name(spec)
    try:
        return datasets.load_dataset(name, configuration, split=split, streaming=not offline)
    except Exception as error:  # the library has many ways to fail; the user needs its last sentence
        state = "offline" if offline else "online"
        reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[-1:]])
        raise UserError(f"{spec} ({state}): {reason}") from error


def hub_rows(spec: str, shard: int, shards: int) -> Iterator[Row]:
    dataset = load_hub(spec)
    yield from dataset.shard(num_shards=shards, index=shard) if shards > 1 else dataset
