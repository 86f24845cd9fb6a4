"""Token shards: files of token ids and document starts that are memory-mapped, and the manifest that describes them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from plume.config import UserError, build, did_you_mean
from plume.files import stream_aside, write_json

Ids = npt.NDArray[np.int64]
Split = Literal["train", "validation"]
MANIFEST = "data.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of tokens, NAME.tokens, with NAME.starts: the offset of every document's first token in it."""

    name: str
    source: int
    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of shards holds."""

    format: int
    tokenizer: str  # hash
    vocab_size: int
    dtype: Literal["uint16", "uint32"]
    separator: int | None  # the token after every document, if the tokenizer has one
    pairs: bool  # documents 0, 2, 4, ... are sources and the ones after them their targets
    fingerprint: str  # of the texts and the settings
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes one shard aside: tokens as they come, starts at the end."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.count = 0
        self.starts = array("q")
        self._file = stream_aside(folder / f"{name}.tokens")
        self._stream = self._file.__enter__()

    def begin(self) -> None:
        """What comes next opens a document."""
        self.starts.append(self.count)

    def write(self, tokens: npt.NDArray[Any]) -> None:
        self._stream.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.count += len(tokens)

    def shard(self, source: int) -> Shard:
        return Shard(name=self.name, source=source, tokens=self.count, documents=len(self.starts))

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
        if kind is None:
            with stream_aside(self.folder / f"{self.name}.starts") as stream:
                stream.write(self.starts.tobytes())


def mapped(path: Path, dtype: str) -> npt.NDArray[Any]:
    """A file as a read-only array; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


class TokenStream:
    """Shards one after the other as a single run of tokens cut into documents."""

    def __init__(self, name: str, weight: float, tokens: Sequence[npt.NDArray[Any]], starts: Sequence[Ids]) -> None:
        self.name, self.weight = name, weight
        self._tokens, self._starts = list(tokens), list(starts)
        self._token_edges = np.cumsum([0, *(len(t) for t in tokens)])
        self._document_edges = np.cumsum([0, *(len(s) for s in starts)])

    def __len__(self) -> int:
        return int(self._token_edges[-1])

    @property
    def documents(self) -> int:
        return int(self._document_edges[-1])

    def read(self, start: int, stop: int) -> Ids:
        """Tokens start to stop, over any edge between shards."""
        first = int(np.searchsorted(self._token_edges, start, side="right")) - 1
        parts: list[npt.NDArray[Any]] = []
        for shard in range(first, len(self._tokens)):
            base = int(self._token_edges[shard])
            if base >= stop:
                break
            parts.append(self._tokens[shard][max(0, start - base) : stop - base])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def document_of(self, position: int) -> int:
        """Which document holds the token at a position; -1 for the end of one that began in another split."""
        shard = int(np.searchsorted(self._token_edges, position, side="right")) - 1
        inside = int(np.searchsorted(self._starts[shard], position - int(self._token_edges[shard]), side="right"))
        return int(self._document_edges[shard]) + inside - 1

    def start_of(self, document: int) -> int:
        """Position of a document's first token; past the last document it is the end."""
        if document < 0:
            return 0
        if document >= self.documents:
            return len(self)
        shard = int(np.searchsorted(self._document_edges, document, side="right")) - 1
        local = document - int(self._document_edges[shard])
        return int(self._token_edges[shard]) + int(self._starts[shard][local])

    def document(self, document: int) -> Ids:
        """All tokens of one document, its separator included."""
        return self.read(self.start_of(document), self.start_of(document + 1))

    def documents_between(self, start: int, stop: int) -> Ids:
        """The number of the document that each token from start to stop belongs to."""
        first, last = self.document_of(start), self.document_of(stop - 1)
        edges = np.array([self.start_of(d) for d in range(first + 1, last + 1)], dtype=np.int64)
        return first + np.searchsorted(edges, np.arange(start, stop), side="right")


@dataclass(frozen=True)
class Shards:
    """One split of a prepared folder."""

    folder: Path
    split: Split
    manifest: Manifest
    streams: tuple[TokenStream, ...]  # one per weighted source, or one for all

    @cached_property
    def tokens(self) -> int:
        return sum(len(s) for s in self.streams)

    @cached_property
    def documents(self) -> int:
        return sum(s.documents for s in self.streams)


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        if (folder / ".work").is_dir():
            raise UserError(f"{folder} holds unfinished data; run the same prepare again and it goes on where it was")
        neighbours = [p.parent.name for p in folder.parent.glob(f"*/{MANIFEST}")]
        raise UserError(
            f"{folder} holds no prepared data ({MANIFEST} is missing){did_you_mean(folder.name, neighbours)}"
        )
    try:
        plain = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f"{path} is damaged: it is not JSON; prepare the data again") from None
    if plain.get("format") != FORMAT:
        raise UserError(f"{path} has format {plain.get('format')}, not {FORMAT}; prepare the data again")
    return build(Manifest, plain, origin=str(path))


def open_shards(folder: Path | str, split: Split = "train", *, tokenizer_hash: str | None = None) -> Shards:
    """The tokens of a prepared folder, mapped, not read. If a hash is given, it must be its tokenizer's."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    if tokenizer_hash is not None and tokenizer_hash != manifest.tokenizer:
        raise UserError(
            f"{folder} was prepared with another tokenizer ({manifest.tokenizer[:12]}) than this one "
            f"({tokenizer_hash[:12]}); use {folder / 'tokenizer'}, or prepare the texts again with this one"
        )
    shards = manifest.train if split == "train" else manifest.validation
    if not shards:
        raise UserError(
            f"{folder} has no {split} tokens; prepare it again with a larger validation share, such as 0.05"
        )
    sources = range(len(manifest.sources))
    groups = [[s for s in shards if s.source == i] for i in sources] if manifest.weights else [list(shards)]
    names = manifest.sources if manifest.weights else ("all",)
    weights = manifest.weights if manifest.weights else (1.0,)
    streams = [
        TokenStream(name, weight, *zip(*(open_shard(folder, shard, manifest.dtype) for shard in group), strict=True))
        for name, weight, group in zip(names, weights, groups, strict=True)
        if group
    ]
    return Shards(folder, split, manifest, tuple(streams))


def open_shard(folder: Path, shard: Shard, dtype: str) -> tuple[npt.NDArray[Any], Ids]:
    wanted = {".tokens": shard.tokens * np.dtype(dtype).itemsize, ".starts": shard.documents * 8}
    for suffix, size in wanted.items():
        path = folder / f"{shard.name}{suffix}"
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            found = "is missing" if there is None else f"holds {there} bytes"
            raise UserError(f"{path} {found}, but {MANIFEST} says {size} bytes; copy or prepare the data again")
    return mapped(folder / f"{shard.name}.tokens", dtype), mapped(folder / f"{shard.name}.starts", "<i8")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, asdict(manifest))
