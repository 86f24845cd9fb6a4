"""The last stage of prepare: drop duplicates, split, add separators, write large shards, and publish the folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import DataConfig, UserError
from plume.data.pool import Result, Task, run_stage
from plume.data.shards import FORMAT, MANIFEST, Manifest, Shard, ShardWriter, Split, mapped, token_dtype, write_manifest
from plume.data.sources import WorkUnit
from plume.text import Tokenizer
from plume.util.files import remove, write_json

FEW_DOCUMENTS = 1000  # below this a split by hash would be too uneven
SHARD_BYTES = 1 << 29  # of tokens in one shard: a terabyte is two thousand shards
RUNS_AT_ONCE = 1 << 15
SPLITS: dict[Split, bool] = {"train": False, "validation": True}  # whether it is held out
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
    """Writes the training and the validation shard of some pieces."""

    def __init__(
        self, work: Path, entries: int, dtype: str, sides: int, separator: int | None, validation: float, by_hash: bool
    ) -> None:
        self.work, self.dtype, self.sides = work, dtype, sides
        self.dropped = open_mask(work, entries)
        self.separator = b"" if separator is None else np.array([separator], dtype).tobytes()
        self.validation, self.by_hash = validation, by_hash

    def __call__(self, task: Task) -> Result:
        writers: dict[Split, ShardWriter] = {}
        with ExitStack() as stack:
            for plain in task["places"]:
                for split, tokens, starts in self.blocks(Place(**plain), task["border"]):
                    if split not in writers:
                        name = f"{split}-{task['number']:05}"
                        writers[split] = stack.enter_context(ShardWriter(self.work / "done", name, self.dtype))
                    writers[split].write_many(tokens, starts)
        shards = {split: asdict(writer.shard(task["source"])) for split, writer in writers.items()}
        return {"number": task["number"], "size": task["size"], "shards": shards}

    def blocks(self, place: Place, border: int) -> Iterator[tuple[Split, bytes, Ids]]:
        """(split, tokens with separators, where documents begin in them), many entries at a time."""
        e = read_entries(self.work, place, self.dropped, self.dtype)
        if not len(e.keep):
            return
        runs: Any = np.rec.fromarrays(  # type: ignore[call-overload]  # one row per side of an entry
            [e.edges[:-1], e.edges[1:], *(np.repeat(c, self.sides) for c in (e.keep, e.begins, e.ends, e.owner))],
            names="start,stop,keep,begins,ends,owner",
        )
        runs, held = self.held_by_hash(runs) if self.by_hash else self.held_by_place(runs, place.seen, border)
        size = np.dtype(self.dtype).itemsize
        raw: Any = mapped(self.work / f"{place.piece:05}.tokens", self.dtype).view(np.uint8)
        data = memoryview(raw)
        for split, wanted in SPLITS.items():
            mine = runs[runs.keep & (held == wanted)]
            for low in range(0, len(mine), RUNS_AT_ONCE):
                some = mine[low : low + RUNS_AT_ONCE]
                parts = list[Any]()
                for start, stop, ends in zip(some.start.tolist(), some.stop.tolist(), some.ends.tolist(), strict=True):
                    parts.append(data[start * size : stop * size])
                    if ends:
                        parts.append(self.separator)
                lengths = some.stop - some.start + some.ends * (len(self.separator) // size)
                yield split, b"".join(parts), (np.cumsum(lengths) - lengths)[some.begins]

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
    many = config.split is None and sum(p.documents for p in places) >= FEW_DOCUMENTS
    by_hash = config.split == "hash" or many
    setup = (work, sum(r["entries"] for r in results), dtype, sides, separator, config.validation_fraction, by_hash)
    tasks = list(split_tasks(config, pieces, places, np.dtype(dtype).itemsize))
    made = sorted(run_stage(Splitter, setup, tasks, config, title="split"), key=lambda result: result["number"])
    shards = {split: [Shard(**r["shards"][split]) for r in made if split in r["shards"]] for split in SPLITS}
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


def split_tasks(config: DataConfig, pieces: list[WorkUnit], places: list[Place], itemsize: int) -> Iterator[Task]:
    """Pieces of one source together, as many as fill a shard."""
    number = 0
    for source, mine in groupby(zip(pieces, places, strict=True), key=lambda pair: pair[0].source):
        own = [place for _, place in mine]
        border = int(sum(p.tokens for p in own) * (1 - config.validation_fraction))
        group, held = list[Place](), 0
        for place in own:
            if group and held + place.tokens * itemsize > SHARD_BYTES:
                yield split_task(number, source, border, group, held)
                number, group, held = number + 1, [], 0
            group.append(place)
            held += place.tokens * itemsize
        yield split_task(number, source, border, group, held)
        number += 1


def split_task(number: int, source: int, border: int, places: list[Place], size: int) -> Task:
    plain = [asdict(place) for place in places]
    return {"number": number, "source": source, "border": border, "places": plain, "size": size}


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
    (folder / MANIFEST).unlink(missing_ok=True)
    for suffix in ("tokens", "starts", "sums"):
        for old in folder.glob(f"*.{suffix}"):
            old.unlink()
    for new in sorted((work / "done").iterdir()):
        new.rename(folder / new.name)
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    shutil.copytree(work / "tokenizer", folder / "tokenizer")
    write_json(folder / "report.json", report)
    write_manifest(folder, manifest)
    discard(work)


def discard(work: Path) -> None:
    """Remove a folder of work under another name: what is left of it is never taken for a whole one."""
    doomed = work.with_name(f"{TRASH}{work.name}-{os.getpid()}")
    with suppress(FileNotFoundError):
        work.rename(doomed)
    for old in work.parent.glob(f"{TRASH}*"):
        shutil.rmtree(old, ignore_errors=True)
