"""The stages of prepare that read documents: find what is kept, count words for a tokenizer, make token shards."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import DataConfig
from plume.data.clean import Cleaner, HeldOut, signature, sorted_keys
from plume.data.documents import Document, read_piece
from plume.data.pool import Result, Task
from plume.data.shards import ShardWriter, mapped, token_dtype
from plume.data.sources import WorkUnit
from plume.data.tables import Tally
from plume.text import Tokenizer
from plume.text.encoders import grouped
from plume.text.tokenizer_training import count_words, sampled, word_counter, write_run
from plume.util.files import aside, stream_aside, write_json

BATCH_CHARACTERS = 1 << 20  # documents are handed to the tokenizer in groups of about this size
HELD_OUT = "held_out"
Columns = dict[str, tuple[Any, str]]


class Survey:
    """Writes what the search for duplicates needs of the documents of a piece that cleaning keeps."""

    def __init__(self, config: DataConfig, work: Path) -> None:
        self.config, self.work = config, work
        self.near = config.clean.duplicates == "near"
        self.cleaner = Cleaner(config.clean, read_held_out(work) if config.clean.decontaminate else None)

    def __call__(self, task: Task) -> Result:
        piece, tally = WorkUnit.from_dict(task["piece"]), Tally()
        keys, signatures = list[int](), list[npt.NDArray[np.uint32]]()
        for document in self.kept(piece, tally, Counter()):
            keys.append(text_hash(*document.sides))
            if self.near:
                signatures.append(signature(*document.sides))
        self.write_keys(f"{piece.number:05}", keys, signatures)
        return self.finish(piece, {"entries": len(keys), "dropped": tally.to_dict()})

    def kept(self, piece: WorkUnit, tally: Tally, counts: Counter[str]) -> Iterator[Document]:
        for document in read_piece(piece, self.config, tally):
            counts["read"] += not document.continues  # a continuation is no document of its own
            counts["characters"] += len(document.text)
            if (reason := self.cleaner.reason(document)) is not None:
                tally.drop(reason, document.where, document.size)
            else:
                yield document

    def write_keys(self, name: str, keys: list[int], signatures: list[npt.NDArray[np.uint32]]) -> None:
        columns: Columns = {"signatures": (signatures, "<u4")} if self.near else {}
        if self.config.clean.duplicates != "keep":
            ordered, order = sorted_keys(keys, signatures)
            columns |= {"keys": (ordered, "<u8"), "order": (order, "<u4")}
        self.write_columns(name, columns)

    def write_columns(self, name: str, columns: Columns) -> None:
        for kind, (values, dtype) in columns.items():
            with stream_aside(self.work / f"{name}.{kind}") as stream:
                stream.write(np.asarray(values, dtype).tobytes())

    def finish(self, piece: WorkUnit, result: Result) -> Result:
        result |= {"number": piece.number, "size": piece.size}
        write_json(self.work / f"{piece.number:05}.json", result)
        return result


class WordCounter(Survey):
    """Counts the words of a sample of the documents of a piece that are kept, for training a tokenizer."""

    def __init__(self, config: DataConfig, work: Path, share: float, workers: int) -> None:
        super().__init__(config, work)
        self.share, self.count = share, word_counter(config.tokenizer)
        self.max_memory_mb = max(1, config.tokenizer.max_memory_mb // workers)
        self.dropped = mapped(work / "dropped", "|b1") if config.clean.duplicates != "keep" else None

    def __call__(self, task: Task) -> Result:
        piece, tally = WorkUnit.from_dict(task["piece"]), Tally()
        run = self.work / f"{piece.number:05}.words"
        texts = self.sample(piece, tally, task["first"])
        write_run(run, count_words(texts, self.count, max_memory_mb=self.max_memory_mb))
        return {"size": piece.size, "run": str(run), "dropped": tally.to_dict()}

    def sample(self, piece: WorkUnit, tally: Tally, first: int) -> Iterator[str]:
        """A share of the texts of documents that are no duplicates."""
        kept = enumerate(self.kept(piece, tally, Counter()), first)
        documents = (document for number, document in kept if self.dropped is None or not self.dropped[number])
        texts = (side for document in documents for side in (document.text, document.target) if side is not None)
        return sampled(texts, self.share, f"{self.config.tokenizer.seed} {piece.number}")


class ShardMaker(Survey):
    """Makes the shard of a piece, without separators yet. Every worker has one, on this machine or another."""

    def __init__(self, config: DataConfig, work: Path, tokenizer: Tokenizer) -> None:
        super().__init__(config, work)
        self.tokenizer = tokenizer
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def __call__(self, task: Task) -> Result:
        piece, tally = WorkUnit.from_dict(task["piece"]), Tally()
        name = f"{piece.number:05}"
        counts: Counter[str] = Counter()
        hashes, keys, sizes, continues = list[int](), list[int](), list[int](), list[bool]()
        signatures = list[npt.NDArray[np.uint32]]()
        with ShardWriter(self.work, name, self.dtype) as writer:
            for group in grouped(self.kept(piece, tally, counts), BATCH_CHARACTERS, lambda one: len(one.text)):
                for document, *sides in zip(group, *self.encode(group), strict=True):
                    if not all(map(len, sides)):
                        tally.drop("no tokens", document.where, document.size)
                        continue
                    for ids in sides:
                        writer.write(ids)
                    hashes.append(text_hash(document.text))  # pairs of one source are held out together
                    keys.append(text_hash(*document.sides))
                    sizes.append(document.size)
                    continues.append(document.continues)
                    if self.near:
                        signatures.append(signature(*document.sides))
        self.write_keys(name, keys, signatures)
        self.write_columns(name, {"hashes": (hashes, "<u8"), "sizes": (sizes, "<i8"), "continues": (continues, "|b1")})
        result = {
            "entries": len(hashes),
            "continued": sum(continues),
            "kept_bytes": sum(sizes),
            "gap": tally.gap,
            "tokens": writer.count,
            **counts,
            "dropped": tally.to_dict(),
        }
        return self.finish(piece, result)

    def encode(self, group: list[Document]) -> list[list[npt.NDArray[np.int32]]]:
        sides = [[d.text for d in group]]
        if group[0].target is not None:
            sides.append([d.target for d in group if d.target is not None])
        return [self.tokenizer.encode_batch(texts) for texts in sides]


def write_held_out(work: Path, index: HeldOut) -> None:
    with aside(work / HELD_OUT) as folder:
        folder.mkdir()
        for length, hashes in index.items():
            np.save(folder / f"{length}.npy", hashes)


def read_held_out(work: Path) -> HeldOut:
    return {int(file.stem): np.load(file, mmap_mode="r") for file in sorted((work / HELD_OUT).iterdir())}


def text_hash(*sides: str) -> int:
    """64 bits of what a text, or a pair, says: the same for those that differ in white space and case alone."""
    plain = "\0".join(" ".join(side.casefold().split()) for side in sides)
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "little")
