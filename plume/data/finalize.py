"""The last stage of prepare: drop duplicates, split, add separators, write shards in parts, publish the folder."""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import DataConfig, UserError
from plume.data.pool import Result, Setup, Task, run_stage
from plume.data.shards import (
    CHUNK,
    FORMAT,
    MANIFEST,
    WORK,
    Manifest,
    Shard,
    Split,
    chunk_sums,
    mapped,
    token_dtype,
    write_manifest,
)
from plume.data.sources import WorkUnit
from plume.text import Tokenizer
from plume.util.devices import cores
from plume.util.files import remove, room_on_disk, stream_aside, write_json

FEW_DOCUMENTS = 1000  # below this a split by hash would be too uneven
SHARD_BYTES = 1 << 29  # of tokens in one shard: a terabyte is two thousand shards
PART_BYTES = 1 << 25  # of tokens written by one task; whole chunks
SPLITS: dict[Split, bool] = {"train": False, "validation": True}  # whether it is held out
SHARD_FILE = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.(tokens|starts|sums)")
TRASH = ".trash"
Names = dict[str, str]  # fingerprints
Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """What a piece must know of the others of its source to be split on its own."""

    piece: int
    first: int = 0  # number of its first entry among all
    joined: bool = False  # its first entry may continue the last one before it
    owner: int = 0  # hash of the document that was begun last before it
    followed: bool = False  # its last entry is continued by the next piece
    seen: int = 0  # tokens of the source that are kept before it
    tokens: int = 0  # tokens of its own that are kept
    open: bool = False  # its last entry may be continued
    owner_after: int = 0  # hash of the document that was begun last in it
    documents: int = 0


@dataclass(frozen=True)
class Entries:
    """What is in a piece: documents, parts of long ones, or pairs."""

    keep: Mask
    joined: Mask  # continues the entry before
    begins: Mask  # a document begins with it
    ends: Mask  # and ends with it
    owner: npt.NDArray[np.uint64]  # hash of the document's first entry
    edges: Ids  # of their tokens; of a pair, of both sides


def read_entries(work: Path, place: Place, dropped: Mask, dtype: str) -> Entries:
    def column(kind: str, dtype: str) -> npt.NDArray[Any]:
        return mapped(work / f"{place.piece:05}.{kind}", dtype)

    hashes, continues = column("hashes", "<u8"), column("continues", "|b1")
    keep = ~dropped[place.first : place.first + len(hashes)]
    joined = continues & keep & np.append(place.joined, keep[:-1])[: len(keep)]
    begins = keep & ~joined
    ends = keep & ~np.append(joined[1:], place.followed)[: len(keep)]
    last = np.maximum.accumulate(np.where(begins, np.arange(len(keep)), -1))
    owner = np.where(last >= 0, hashes[last], np.uint64(place.owner)) if len(keep) else hashes
    return Entries(keep, joined, begins, ends, owner, np.append(column("starts", "<i8"), len(column("tokens", dtype))))


class Splitter:
    """Writes a part of a shard, the tokens from `low` to `high`, at its place in the file, and hashes its chunks."""

    def __init__(
        self, work: Path, entries: int, dtype: str, sides: int, separator: int | None, validation: float
    ) -> None:
        self.work, self.dtype, self.sides = work, dtype, sides
        self.itemsize = np.dtype(dtype).itemsize
        self.dropped = open_mask(work, entries)
        self.separator = b"" if separator is None else np.array([separator], dtype).tobytes()
        self.validation = validation

    def __call__(self, task: Task) -> Result:
        parts, starts = list[Any](), list[Ids]()
        for plain, first in task["places"]:
            tokens, begins = self.stretch(Place(**plain), first, task)
            parts.append(tokens)
            starts.append(begins)
        data = memoryview(b"".join(parts))
        file = self.work / "done" / f"{task['name']}.tokens"
        with room_on_disk(file), file.open("r+b") as stream:
            stream.seek(task["low"] * self.itemsize)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        starts_file = self.work / f"{task['name']}-{task['low']}.npy"
        np.save(starts_file, np.concatenate(starts))
        sums = np.array([zlib.crc32(data[low : low + CHUNK]) for low in range(0, len(data), CHUNK)], "<u4").tobytes()
        return {key: task[key] for key in ("size", "name", "low")} | {"starts": str(starts_file), "sums": sums}

    def stretch(self, place: Place, first: int, task: Task) -> tuple[memoryview, Ids]:
        """(what a piece adds to a part, with separators; where documents begin); `first` is the piece's first token."""
        runs, lengths = self.runs(place, task["border"])[task["split"]]
        begin = first + np.cumsum(lengths) - lengths
        inside = (begin + lengths > task["low"]) & (begin < task["high"])
        runs, begin = runs[inside], begin[inside]
        size = self.itemsize
        raw: Any = mapped(self.work / f"{place.piece:05}.tokens", self.dtype).view(np.uint8)
        data, parts = memoryview(raw), list[Any]()
        for start, stop, ends in zip(runs.start.tolist(), runs.stop.tolist(), runs.ends.tolist(), strict=True):
            parts.append(data[start * size : stop * size])
            if ends:
                parts.append(self.separator)
        at = int(begin[0]) if len(begin) else task["low"]
        low, high = max(0, task["low"] - at), task["high"] - at
        return memoryview(b"".join(parts))[low * size : high * size], begin[runs.begins & (begin >= task["low"])]

    def sizes(self, place: Place, border: int | None) -> dict[Split, int]:
        """Tokens that a piece adds to each split, with separators."""
        return {split: int(lengths.sum()) for split, (_, lengths) in self.runs(place, border).items()}

    def runs(self, place: Place, border: int | None) -> dict[Split, tuple[Any, Ids]]:
        """For each split the runs of tokens that a piece adds to it, and their lengths with separators."""
        e = read_entries(self.work, place, self.dropped, self.dtype)
        runs: Any = np.rec.fromarrays(  # type: ignore[call-overload]  # one row per side of an entry
            [e.edges[:-1], e.edges[1:], *(np.repeat(c, self.sides) for c in (e.keep, e.begins, e.ends, e.owner))],
            names="start,stop,keep,begins,ends,owner",
        )
        runs, held = self.held_by_hash(runs) if border is None else self.held_by_place(runs, place.seen, border)
        found = dict[Split, tuple[Any, Ids]]()
        for split, wanted in SPLITS.items():
            mine = runs[runs.keep & (held == wanted)]
            found[split] = mine, mine.stop - mine.start + mine.ends * (len(self.separator) // self.itemsize)
        return found

    def held_by_hash(self, runs: Any) -> tuple[Any, Mask]:
        """A document's side depends on its text alone, so a duplicate can never be on the other."""
        return runs, (runs.owner & np.uint64(0xFFFFFFFF)) < int(self.validation * 2**32)

    def held_by_place(self, runs: Any, seen: int, border: int) -> tuple[Any, Mask]:
        """The first tokens are for training, the last held out, cut inside a document if need be; never a pair."""
        lengths = (runs.stop - runs.start) * runs.keep
        stops = seen + np.cumsum(lengths)
        starts = stops - lengths
        if self.sides > 1:
            return runs, np.repeat(starts[:: self.sides] >= border, self.sides)
        across = np.flatnonzero((starts < border) & (stops > border))
        if len(across):
            (i,) = across
            runs = np.insert(runs, i + 1, runs[i]).view(np.recarray)
            runs.stop[i] = runs.start[i + 1] = runs.start[i] + border - starts[i]
            runs.ends[i], runs.begins[i + 1] = False, True
            starts = np.insert(starts, i + 1, border)
        return runs, starts >= border


class ShardJoiner:
    """Joins the starts and the hashes of the parts of a shard."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def __call__(self, task: Task) -> Result:
        name, documents = task["name"], 0
        file = self.work / "done" / f"{name}.starts"
        with stream_aside(file) as stream:
            for part in task["starts"]:
                starts = np.load(part)
                stream.write(starts.astype("<i8").tobytes())
                documents += len(starts)
        sums = task["sums"] + chunk_sums(file).tobytes()
        with stream_aside(file.with_suffix(".sums")) as stream:
            stream.write(sums)
        counts = {"tokens": task["tokens"], "documents": documents}
        shard = Shard(name=name, source=task["source"], **counts, hash=hashlib.sha256(sums).hexdigest())
        return {"size": task["size"], "split": task["split"], "shard": asdict(shard)}


def open_mask(work: Path, entries: int) -> Mask:
    """Which entries are duplicates, on disk; none where duplicates were not searched for."""
    file = work / "dropped"
    return mapped(file, "|b1") if file.is_file() else np.broadcast_to(np.False_, (entries,))


def find_places(work: Path, pieces: list[WorkUnit], results: list[Result], dtype: str, sides: int) -> list[Place]:
    """One pass over the columns of all pieces in order: what each must know of those before and after it."""
    dropped = open_mask(work, sum(r["entries"] for r in results))
    places, first = list[Place](), 0
    for piece, before, result in zip(pieces, [None, *pieces[:-1]], results, strict=True):
        same = before is not None and before.source == piece.source
        last = places[-1] if same else Place(piece=-1)
        place = Place(
            piece=piece.number, first=first, joined=last.open, owner=last.owner_after, seen=last.seen + last.tokens
        )
        e = read_entries(work, place, dropped, dtype)
        kept = int((np.diff(e.edges[::sides]) * e.keep).sum()) if len(e.keep) else 0
        if same:
            places[-1] = replace(places[-1], followed=bool(e.joined[:1].any()))
        places.append(
            replace(
                place,
                tokens=kept,
                open=bool(e.keep[-1:].any()) and not result["gap"],
                owner_after=int(e.owner[-1]) if len(e.owner) else place.owner,
                documents=int((e.keep & ~mapped(work / f"{piece.number:05}.continues", "|b1")).sum()),
            )
        )
        first += result["entries"]
    return places


def finish(
    config: DataConfig, work: Path, pieces: list[WorkUnit], results: list[Result], tokenizer: Tokenizer, names: Names
) -> Manifest:
    """Copy what stays into `done`, and describe it."""
    sides = 2 if config.targets or config.target_field is not None else 1
    separator = tokenizer.end if tokenizer.end is not None else tokenizer.separator
    dtype = token_dtype(tokenizer.vocab_size)
    remove(work / "done")
    (work / "done").mkdir()
    places = find_places(work, pieces, results, dtype, sides)
    setup = (work, sum(r["entries"] for r in results), dtype, sides, separator, config.validation_fraction)
    made = write_shards(config, work, list(shard_pieces(config, pieces, places, np.dtype(dtype).itemsize)), setup)
    shards = {split: [Shard(**r["shard"]) for r in made if r["split"] == split] for split in SPLITS}
    check_something_left(config, shards["train"])
    return Manifest(
        format=FORMAT,
        tokenizer=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        separator=separator,
        pairs=sides == 2,
        **names,
        sources=config.paths,
        weights=config.weights,
        train=tuple(shards["train"]),
        validation=tuple(shards["validation"]),
    )


def shard_pieces(config: DataConfig, pieces: list[WorkUnit], places: list[Place], itemsize: int) -> Iterator[Task]:
    """Pieces of one source together, as many as fill a shard."""
    number = 0
    for source, mine in groupby(zip(pieces, places, strict=True), key=lambda pair: pair[0].source):
        own = [place for _, place in mine]
        border = validation_border(config, own)
        group, held = list[Place](), 0
        for place in own:
            if group and held + place.tokens * itemsize > SHARD_BYTES:
                yield {"number": number, "source": source, "border": border, "places": group}
                number, group, held = number + 1, [], 0
            group.append(place)
            held += place.tokens * itemsize
        yield {"number": number, "source": source, "border": border, "places": group}
        number += 1


def validation_border(config: DataConfig, own: list[Place]) -> int | None:
    """The first held-out token of a source; None where documents are held out by their hash.

    Each source has its own: a hundred novels beside many sentences would otherwise have none held out.
    """
    many = sum(place.documents for place in own) >= FEW_DOCUMENTS
    if config.split == "hash" or (config.split is None and many):
        return None
    return int(sum(place.tokens for place in own) * (1 - config.validation_fraction))


def write_shards(config: DataConfig, work: Path, groups: list[Task], setup: Setup) -> list[Result]:
    """Write shards in parts, several at a time, and then what each is made of, in order."""
    splitter, shards, tasks = Splitter(*setup), list[Task](), list[Task]()
    for group in groups:
        sizes = [splitter.sizes(place, group["border"]) for place in group["places"]]
        for split in SPLITS:
            edges = np.cumsum([0, *(size[split] for size in sizes)]).tolist()
            if edges[-1]:
                name = f"{split}-{group['number']:05}"
                shards.append({"name": name, "split": split, "source": group["source"], "tokens": edges[-1]})
                tasks += part_tasks(name, split, group, edges, splitter.itemsize)
                with (work / "done" / f"{name}.tokens").open("wb") as stream:
                    stream.truncate(edges[-1] * splitter.itemsize)
    parts = defaultdict[str, list[Result]](list)
    for part in sorted(run_stage(Splitter, setup, tasks, config, title="split"), key=itemgetter("low")):
        parts[part["name"]].append(part)
    for shard in shards:
        shard["starts"] = [part["starts"] for part in parts[shard["name"]]]
        shard["sums"] = b"".join(part["sums"] for part in parts[shard["name"]])
        shard["size"] = sum(os.path.getsize(file) for file in shard["starts"])
    joined = run_stage(ShardJoiner, (work,), shards, config, title="hash")
    order = {shard["name"]: number for number, shard in enumerate(shards)}
    return sorted(joined, key=lambda result: order[result["shard"]["name"]])


def part_tasks(name: str, split: Split, group: Task, edges: list[int], itemsize: int) -> Iterator[Task]:
    """The parts of a shard; `edges` are the first tokens of its pieces, and its end."""
    for low in range(0, edges[-1], PART_BYTES // itemsize):
        high = min(low + PART_BYTES // itemsize, edges[-1])
        places = [
            (asdict(place), first)
            for place, first, stop in zip(group["places"], edges, edges[1:], strict=False)
            if first < high and stop > low
        ]
        yield {
            "name": name,
            "split": split,
            "border": group["border"],
            "low": low,
            "high": high,
            "places": places,
            "size": (high - low) * itemsize,
        }


def check_something_left(config: DataConfig, train: list[Shard]) -> None:
    if not train:
        raise UserError(
            f"validation_fraction={config.validation_fraction} leaves nothing to train on; a smaller one would, "
            "such as 0.01"
        )
    for source, weight in enumerate(config.weights):
        if weight > 0 and not any(s.source == source for s in train):
            lost = f"{config.paths[source]} has weight {weight} but no document is left of it"
            raise UserError(f"{lost}; a weight of 0 would leave it out")


def publish(folder: Path, work: Path, manifest: Manifest, report: dict[str, Any]) -> None:
    """Move everything to its place, the manifest last; until then the folder counts as unfinished."""
    old = [file for file in folder.iterdir() if SHARD_FILE.fullmatch(file.name)]
    keep_tokenizer = same_files(work / "tokenizer", place := folder / "tokenizer")
    if place.exists() and not keep_tokenizer and not old and not (folder / MANIFEST).is_file():
        raise UserError(
            f"{place} was there before and is not the tokenizer of this data, so it is not replaced; rename it and run "
            "the same command again to continue, or name another --folder"
        )
    (folder / MANIFEST).unlink(missing_ok=True)
    for file in old:
        file.unlink()
    for new in sorted((work / "done").iterdir()):
        new.rename(folder / new.name)
    if not keep_tokenizer:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(work / "tokenizer", place)
    write_json(folder / "report.json", report)
    write_manifest(folder, manifest)
    discard(work)


def same_files(new: Path, place: Path) -> bool:
    """Whether every file of a folder is in another one too."""
    names = [file.name for file in new.iterdir()]
    return filecmp.cmpfiles(new, place, names, shallow=False)[0] == names


def discard(work: Path) -> None:
    """Remove a folder of work under another name: what is left of it is never taken for a whole one."""
    doomed = work.with_name(f"{TRASH}{work.name}-{os.getpid()}")
    with suppress(FileNotFoundError):
        work.rename(doomed)
    for old in work.parent.glob(f"{TRASH}{WORK}*"):
        with suppress(OSError), ThreadPoolExecutor(cores()) as pool:  # one thread takes a second per gigabyte
            list(pool.map(remove, old.iterdir()))
        shutil.rmtree(old, ignore_errors=True)
