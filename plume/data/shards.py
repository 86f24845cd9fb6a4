"""Token shards: files of token ids and document starts, mapped and checked where they are read, and their manifest."""

from __future__ import annotations

import hashlib
import mmap
import threading
import zlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from plume.config import UserError, build, did_you_mean
from plume.util.files import read_json, stream_aside, write_json

Ids = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint32]
Split = Literal["train", "validation"]
MANIFEST = "data.json"
WORK = ".work"  # folders of unfinished work begin with it
FORMAT = 2
CHUNK = 1 << 16  # bytes that share a hash; each is checked when it is first read
MAX_OPEN = 64  # files mapped at a time, far below what a process may open
TokenType = Literal["uint16", "uint32"]  # of one token id on disk


@dataclass(frozen=True, kw_only=True)
class Shard:
    """NAME.tokens; NAME.starts: offsets of the documents' first tokens; NAME.sums: a CRC-32 of each chunk of both."""

    name: str
    source: int
    tokens: int
    documents: int
    hash: str = ""  # sha256 of NAME.sums


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of shards holds."""

    format: int
    tokenizer: str  # hash
    vocab_size: int
    dtype: TokenType
    separator: int | None  # the token after every document, if the tokenizer has one
    pairs: bool  # documents 0, 2, 4, ... are sources and the ones after them their targets
    fingerprint: str  # of the texts and the settings
    settings: str  # of the settings and the names of the texts alone
    sources: tuple[str, ...]
    weights: tuple[float, ...]
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]


def token_dtype(vocab_size: int) -> TokenType:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes the tokens of one piece aside as they come, and the starts at the end."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype
        self.count = 0
        self.starts = array("q")
        self._file = stream_aside(folder / f"{name}.tokens")
        self._stream = self._file.__enter__()

    def write(self, tokens: npt.NDArray[Any]) -> None:
        """The tokens of one document."""
        self.starts.append(self.count)
        self._stream.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.count += len(tokens)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
        if kind is None:
            with stream_aside(self.folder / f"{self.name}.starts") as stream:
                stream.write(self.starts.tobytes())


def chunk_sums(path: Path) -> Sums:
    with path.open("rb") as stream:
        return np.array([zlib.crc32(chunk) for chunk in iter(lambda: stream.read(CHUNK), b"")], "<u4")


def mapped(path: Path, dtype: str) -> npt.NDArray[Any]:
    """A file as a read-only array; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    array = np.memmap(path, dtype=dtype, mode="r")
    advise(array, "MADV_RANDOM")
    return array


def advise(array: npt.NDArray[Any], what: str, start: int = 0, length: int | None = None) -> None:
    """Tell the system how a mapped file is read: windows anywhere, of which a chunk comes in one piece."""
    advice, file = getattr(mmap, what, None), getattr(array, "_mmap", None)
    if advice is not None and file is not None:
        file.madvise(advice, start, len(file) - start if length is None else min(length, len(file) - start))


class OpenFiles:
    """Files mapped when they are read, a bounded number at a time."""

    def __init__(self) -> None:
        self.files: OrderedDict[Path, npt.NDArray[Any]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, path: Path, dtype: str) -> npt.NDArray[Any]:
        with self.lock:
            if path not in self.files:
                self.files[path] = mapped(path, dtype)
                if len(self.files) > MAX_OPEN:
                    self.files.popitem(last=False)
            self.files.move_to_end(path)
            return self.files[path]


class ShardArray:
    """The tokens or the starts of a shard: opened when they are read, checked chunk by chunk when first read."""

    def __init__(self, folder: Path, shard: Shard, kind: str, dtype: str, files: OpenFiles) -> None:
        self.path, self.dtype, self.files = folder / f"{shard.name}.{kind}", dtype, files
        self.sums_path, self.hash = folder / f"{shard.name}.sums", shard.hash
        self.itemsize = np.dtype(dtype).itemsize
        self.length = shard.tokens if kind == "tokens" else shard.documents
        self.chunks = -(-self.length * self.itemsize // CHUNK)
        self.first = kind == "tokens"  # their hashes are the first in the file, those of the starts the last
        self.sums: Sums | None = None
        self.checked: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> npt.NDArray[Any]: ...
    def __getitem__(self, key: int | slice) -> int | npt.NDArray[Any]:
        array = self.files.get(self.path, self.dtype)
        start, stop, _ = key.indices(self.length) if isinstance(key, slice) else (key, key + 1, 1)
        if start < stop:
            self.check(array, start * self.itemsize // CHUNK, -(-stop * self.itemsize // CHUNK))
        return array[start:stop] if isinstance(key, slice) else int(array[key])

    def check(self, array: npt.NDArray[Any], first: int, last: int) -> None:
        """Compare chunks with their hashes, once in a run."""
        if self.sums is None:
            self.sums = self.read_sums()
            self.checked = np.zeros(self.chunks, np.bool_)
        if self.checked[first:last].all():
            return
        data: Any = array.view(np.uint8)
        advise(array, "MADV_WILLNEED", first * CHUNK, (last - first) * CHUNK)
        for chunk in range(first, last):
            if not self.checked[chunk] and zlib.crc32(data[chunk * CHUNK : (chunk + 1) * CHUNK]) != self.sums[chunk]:
                raise UserError(
                    f"{self.path} is corrupt at byte {chunk * CHUNK}: {self.sums_path.name} has another hash; "
                    "copy or prepare the data again"
                )
            self.checked[chunk] = True

    def read_sums(self) -> Sums:
        try:
            raw = self.sums_path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{self.sums_path} is missing; copy or prepare the data again") from None
        if hashlib.sha256(raw).hexdigest() != self.hash:
            raise UserError(f"{self.sums_path} is corrupt: {MANIFEST} has another hash; copy or prepare the data again")
        sums = np.frombuffer(raw, "<u4")
        return sums[: self.chunks] if self.first else sums[len(sums) - self.chunks :]


class TokenStream:
    """Shards one after the other as a single run of tokens cut into documents."""

    def __init__(self, name: str, weight: float, tokens: Sequence[ShardArray], starts: Sequence[ShardArray]) -> None:
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
        inside = bisect_right(self._starts[shard], position - int(self._token_edges[shard]))
        return int(self._document_edges[shard]) + inside - 1

    def start_of(self, document: int) -> int:
        """Position of a document's first token; past the last document it is the end."""
        if document < 0:
            return 0
        if document >= self.documents:
            return len(self)
        shard = int(np.searchsorted(self._document_edges, document, side="right")) - 1
        local = document - int(self._document_edges[shard])
        return int(self._token_edges[shard]) + self._starts[shard][local]

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
        if any(folder.glob(f"{WORK}*")):
            raise UserError(f"{folder} holds unfinished data; run the same prepare again to continue")
        neighbours = [p.parent.name for p in folder.parent.glob(f"*/{MANIFEST}")]
        raise UserError(
            f"{folder} holds no prepared data ({MANIFEST} is missing){did_you_mean(folder.name, neighbours)}"
        )
    try:
        plain = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; prepare the data again") from None
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
    files = OpenFiles()
    streams = [
        TokenStream(name, weight, *zip(*(open_shard(folder, s, manifest.dtype, files) for s in group), strict=True))
        for name, weight, group in zip(names, weights, groups, strict=True)
        if group
    ]
    return Shards(folder, split, manifest, tuple(streams))


def open_shard(folder: Path, shard: Shard, dtype: str, files: OpenFiles) -> tuple[ShardArray, ShardArray]:
    """The tokens and starts of a shard, whose files must have their sizes."""
    arrays = ShardArray(folder, shard, "tokens", dtype, files), ShardArray(folder, shard, "starts", "<i8", files)
    for side in arrays:
        size, there = len(side) * side.itemsize, side.path.stat().st_size if side.path.is_file() else None
        if there != size:
            found = "is missing" if there is None else f"holds {there} bytes"
            raise UserError(f"{side.path} {found}, but {MANIFEST} says {size} bytes; copy or prepare the data again")
    return arrays


def verify_shards(folder: Path | str) -> int:
    """Check every byte of a prepared folder against its hashes; the number of bytes. Damage is a UserError."""
    folder, total = Path(folder), 0
    manifest = read_manifest(folder)
    for shard in (*manifest.train, *manifest.validation):
        for side in open_shard(folder, shard, manifest.dtype, OpenFiles()):
            total += sum(side[start : start + (1 << 24)].nbytes for start in range(0, len(side), 1 << 24))
    return total


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, asdict(manifest))
