"""Makes the shard of one piece: read, clean, tokenize, write. Runs the same in a worker here or on another machine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import DataConfig
from plume.data.clean import Cleaner
from plume.data.duplicates import signature
from plume.data.readers import read_piece
from plume.data.rows import Tally
from plume.data.shards import ShardWriter, mapped, token_dtype
from plume.data.sources import Piece
from plume.data.web import Document
from plume.files import stream_aside, write_json
from plume.text import load_tokenizer

BATCH_CHARACTERS = 1 << 20  # documents are handed to the tokenizer in groups of about this size


class ShardMaker:
    """Makes the shard of a piece, without separators yet. Every worker has one, on this machine or another."""

    def __init__(self, config: DataConfig, work: Path) -> None:
        self.config, self.work = config, work
        self.tokenizer = load_tokenizer(work / "tokenizer")
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        held_out = mapped(work / "held_out", "<u8") if config.clean.held_out else None
        self.cleaner = Cleaner(config.clean, held_out)

    def __call__(self, plain: dict[str, Any]) -> dict[str, Any]:
        piece, tally = Piece.of(plain), Tally()
        name = f"{piece.number:05}"
        near = self.config.clean.duplicates == "near"
        counts: Counter[str] = Counter()
        hashes, goes_on, signatures = list[int](), list[bool](), list[npt.NDArray[np.uint32]]()
        with ShardWriter(self.work, name, self.dtype) as writer:
            for group in self.groups(piece, tally, counts):
                for document, *sides in zip(group, *self.encode(group), strict=True):
                    if not all(map(len, sides)):
                        tally.add("no tokens", document.where)
                        continue
                    for ids in sides:
                        writer.begin()
                        writer.write(ids)
                    hashes.append(text_hash(document.text))
                    goes_on.append(document.goes_on)
                    if near:
                        signatures.append(signature(document.text))
        arrays = {"hashes": np.array(hashes, "<u8"), "goes_on": np.array(goes_on, "|b1")}
        if near:
            arrays["signatures"] = np.array(signatures, "<u4")
        for kind, values in arrays.items():
            with stream_aside(self.work / f"{name}.{kind}") as stream:
                stream.write(values.tobytes())
        result = {
            "number": piece.number,
            "size": piece.size,
            "entries": len(hashes),
            "going_on": sum(goes_on),
            "tokens": writer.count,
            **counts,
            "left_out": tally.plain(),
        }
        write_json(self.work / f"{name}.json", result)
        return result

    def groups(self, piece: Piece, tally: Tally, counts: Counter[str]) -> Iterator[list[Document]]:
        """Documents that stay, in groups that are worth a call of the tokenizer."""
        group, size = list[Document](), 0
        for document in read_piece(piece, self.config, tally):
            counts["read"] += not document.goes_on  # what goes on is no document of its own
            counts["characters"] += len(document.text)
            if (reason := self.cleaner.reason(document)) is not None:
                tally.add(reason, document.where)
                continue
            group.append(document)
            size += len(document.text)
            if size >= BATCH_CHARACTERS:
                yield group
                group, size = [], 0
        if group:
            yield group

    def encode(self, group: list[Document]) -> list[list[npt.NDArray[np.int32]]]:
        sides = [[d.text for d in group]]
        if group[0].target is not None:
            sides.append([d.target for d in group if d.target is not None])
        return [self.tokenizer.encode_batch(texts) for texts in sides]


def text_hash(text: str) -> int:
    """64 bits of what a text says: the same for texts that differ in white space and case alone."""
    plain = " ".join(text.casefold().split())
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "little")
