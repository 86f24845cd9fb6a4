"""The last pass of prepare: leave out duplicates, split, put separators in, and move everything to its place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import DataConfig, UserError
from plume.data.shards import (
    FORMAT,
    MANIFEST,
    Manifest,
    Shard,
    ShardWriter,
    Split,
    mapped,
    token_dtype,
    write_manifest,
)
from plume.data.sources import Piece
from plume.files import write_json
from plume.text import Tokenizer

FEW_DOCUMENTS = 1000  # below this a split by hash would be too uneven
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Entry:
    """A document, a part of a long one, or a pair, on its way to its split."""

    sides: list[npt.NDArray[Any]]  # one run of tokens, or two for a pair
    hash: int
    begins: bool  # a document begins with it
    ends: bool  # and ends with it


class Work:
    """What the workers left behind for one source, in order, without the duplicates."""

    def __init__(self, folder: Path, pieces: list[Piece], kept: list[Mask], dtype: str, pairs: bool) -> None:
        self.folder, self.pieces, self.kept, self.dtype = folder, pieces, kept, dtype
        self.sides = 2 if pairs else 1

    def column(self, piece: Piece, kind: str, dtype: str) -> npt.NDArray[Any]:
        return mapped(self.folder / f"{piece.number:05}.{kind}", dtype)

    def edges(self, piece: Piece, tokens: int) -> npt.NDArray[np.int64]:
        return np.append(self.column(piece, "starts", "<i8"), tokens)

    def documents(self) -> int:
        parts = [keep & ~self.column(p, "goes_on", "|b1") for p, keep in zip(self.pieces, self.kept, strict=True)]
        return sum(int(part.sum()) for part in parts)

    def tokens(self) -> int:
        total = 0
        for piece, keep in zip(self.pieces, self.kept, strict=True):
            lengths = np.diff(self.edges(piece, len(self.column(piece, "tokens", self.dtype))))
            total += int(lengths[np.repeat(keep, self.sides)].sum())
        return total

    def entries(self) -> Iterator[tuple[Piece, Entry]]:
        """All that stays; a part of a long document has the hash of its first part."""
        going_on = [self.column(p, "goes_on", "|b1") for p in self.pieces]
        going_on = [goes_on & keep for goes_on, keep in zip(going_on, self.kept, strict=True)]
        following = [*(g[:1] for g in going_on[1:]), np.zeros(1, "|b1")]
        owner, whole = 0, False
        for piece, keep, goes_on, after in zip(self.pieces, self.kept, going_on, following, strict=True):
            tokens, hashes = self.column(piece, "tokens", self.dtype), self.column(piece, "hashes", "<u8")
            edges = self.edges(piece, len(tokens))
            next_goes_on = np.append(goes_on[1:], after if len(after) else False)
            for i in range(len(keep)):
                begins = not (goes_on[i] and whole)
                whole = bool(keep[i])
                if not whole:
                    continue
                owner = int(hashes[i]) if begins else owner
                spans = range(i * self.sides, (i + 1) * self.sides)
                yield piece, Entry([tokens[edges[j] : edges[j + 1]] for j in spans], owner, begins, not next_goes_on[i])


def finish(
    config: DataConfig, work: Path, pieces: list[Piece], dropped: Mask, tokenizer: Tokenizer, fingerprint: str
) -> Manifest:
    """Copy what stays into `done`, and describe it."""
    pairs = bool(config.targets) or config.target_field is not None
    separator = tokenizer.end if tokenizer.end is not None else tokenizer.separator
    dtype = token_dtype(tokenizer.vocab_size)
    shutil.rmtree(work / "done", ignore_errors=True)
    (work / "done").mkdir()
    works = works_of(work, pieces, dropped, dtype, pairs)
    by_hash = config.split == "hash"
    if config.split is None:
        by_hash = sum(w.documents() for w in works) >= FEW_DOCUMENTS
    shards: dict[Split, list[Shard]] = {"train": [], "validation": []}
    for part in works:
        chosen = (
            split_by_hash(part, config.validation_share) if by_hash else split_by_place(part, config.validation_share)
        )
        for split, shard in copy(chosen, work / "done", dtype, separator):
            shards[split].append(shard)
    check_something_left(config, shards["train"])
    return Manifest(
        format=FORMAT,
        tokenizer=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        separator=separator,
        pairs=pairs,
        fingerprint=fingerprint,
        sources=config.paths,
        weights=config.weights,
        train=tuple(shards["train"]),
        validation=tuple(shards["validation"]),
    )


def works_of(folder: Path, pieces: list[Piece], dropped: Mask, dtype: str, pairs: bool) -> list[Work]:
    """What there is of each source, in their order."""
    sizes = [mapped(folder / f"{p.number:05}.goes_on", "|b1").size for p in pieces]
    kept = np.split(~dropped, np.cumsum(sizes)[:-1])
    works = []
    for source in sorted({p.source for p in pieces}):
        mine = [(p, k) for p, k in zip(pieces, kept, strict=True) if p.source == source]
        works.append(Work(folder, [p for p, _ in mine], [k for _, k in mine], dtype, pairs))
    return works


def check_something_left(config: DataConfig, train: list[Shard]) -> None:
    if not train:
        raise UserError(
            f"validation_share={config.validation_share} leaves nothing to train on; a smaller one, such as 0.01, would"
        )
    for source, weight in enumerate(config.weights):
        if weight > 0 and not any(s.source == source for s in train):
            lost = f"{config.paths[source]} has weight {weight} but no document is left of it"
            raise UserError(f"{lost}; a weight of 0 would leave it out")


def split_by_hash(work: Work, validation: float) -> Iterator[tuple[Piece, Split, Entry]]:
    """A document's side depends on its text alone, so a duplicate can never be on the other."""
    limit = int(validation * 2**32)
    for piece, entry in work.entries():
        yield piece, "validation" if entry.hash & 0xFFFFFFFF < limit else "train", entry


def split_by_place(work: Work, validation: float) -> Iterator[tuple[Piece, Split, Entry]]:
    """The first tokens are for training and the last held out, cut inside a document if it falls so; never a pair."""
    border, seen = int(work.tokens() * (1 - validation)), 0
    for piece, entry in work.entries():
        start, seen = seen, seen + sum(len(side) for side in entry.sides)
        if seen <= border or (len(entry.sides) > 1 and start < border):
            yield piece, "train", entry
        elif start >= border:
            yield piece, "validation", entry
        else:
            (tokens,) = entry.sides
            yield piece, "train", Entry([tokens[: border - start]], entry.hash, entry.begins, ends=False)
            yield piece, "validation", Entry([tokens[border - start :]], entry.hash, begins=True, ends=entry.ends)


def copy(
    chosen: Iterator[tuple[Piece, Split, Entry]], folder: Path, dtype: str, separator: int | None
) -> Iterator[tuple[Split, Shard]]:
    """Write each entry to the shard of its piece and split; give out the shards that are complete."""
    mark = np.empty(0, dtype) if separator is None else np.array([separator], dtype)
    for piece, group in groupby(chosen, key=lambda choice: choice[0]):
        writers: dict[Split, ShardWriter] = {}
        with ExitStack() as stack:
            for _, split, entry in group:
                if split not in writers:
                    writers[split] = stack.enter_context(ShardWriter(folder, f"{split}-{piece.number:05}", dtype))
                for tokens in entry.sides:
                    if entry.begins:
                        writers[split].begin()
                    writers[split].write(np.concatenate([tokens, mark]) if entry.ends else tokens)
        for split, writer in writers.items():
            yield split, writer.shard(piece.source)


def publish(folder: Path, work: Path, manifest: Manifest, report: dict[str, Any]) -> None:
    """Move everything to its place, the manifest last; until then the folder counts as unfinished."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for old in [*folder.glob("*.tokens"), *folder.glob("*.starts")]:
        old.unlink()
    for new in sorted((work / "done").iterdir()):
        new.rename(folder / new.name)
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)
    shutil.copytree(work / "tokenizer", folder / "tokenizer")
    write_json(folder / "report.json", report)
    write_manifest(folder, manifest)
    shutil.rmtree(work)
