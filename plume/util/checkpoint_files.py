"""The files of a checkpoint: safetensors by rank, and a JSON manifest with their hashes and the place of every piece.

No pickle is ever read: a folder that holds anything else than these files is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import UserError
from plume.util.tensor_files import write_tensor_file

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
MODEL = "model"  # the checkpoint as a model folder, written when it is first opened as one
RANK_FILE = re.compile(r"rank-\d{5,}\.safetensors")
# beside them: of a model that is being written, of file managers and of network file systems
IGNORED = re.compile(r"\.(model\.|DS_Store$|_|nfs|fuse_hidden)|Thumbs\.db$|desktop\.ini$")
STEP_FOLDER = re.compile(r"step-(\d{8,})")


class CorruptCheckpointError(UserError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class StoredPiece:
    """A block of a tensor in the file of one rank, under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint holds: the state of the run, files with sizes and hashes, tensors with their pieces."""

    state: dict[str, Any]
    files: dict[str, dict[str, Any]]
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @classmethod
    def from_plain(cls, table: Mapping[str, Any]) -> CheckpointManifest:
        tensors = {
            name: StoredTensor(
                tuple(tensor["shape"]),
                tensor["dtype"],
                tuple(StoredPiece(p["file"], tuple(p["offset"]), tuple(p["shape"])) for p in tensor["pieces"]),
            )
            for name, tensor in table["tensors"].items()
        }
        return cls(dict(table["state"]), dict(table["files"]), tensors)


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps with a checkpoint, corrupt ones too, in order."""
    if not checkpoints.is_dir():
        return []
    found = (STEP_FOLDER.fullmatch(path.name) for path in checkpoints.iterdir())
    return sorted(int(match[1]) for match in found if match)


# ---- writing -----------------------------------------------------------------------------------------------------


def write_rank_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """One rank's pieces, synced to disk; its size and hash."""
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    written = write_tensor_file(path, layout, tensors.__getitem__)
    sync(path)
    return written


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    plain = manifest.plain()
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({**plain, "sha256": table_hash(plain)}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    sync(folder)


# ---- reading -----------------------------------------------------------------------------------------------------


def read_manifest(folder: Path, *, verify: bool = True) -> CheckpointManifest:
    """The manifest, after checking its own hash and by default that of every file."""
    try:
        table = json.loads((folder / MANIFEST).read_bytes())
        if table.pop("sha256") != table_hash(table):
            raise CorruptCheckpointError(f"{MANIFEST} does not match its own hash")
        manifest = CheckpointManifest.from_plain(table)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{MANIFEST} is missing{foreign_note(folder)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"{MANIFEST} cannot be read") from None
    refuse_foreign_files(folder, manifest)
    if verify:
        verify_files(folder, manifest, manifest.files)
    return manifest


def foreign_note(folder: Path) -> str:
    pickle = (folder / ".metadata").exists()
    return " (.metadata of torch.distributed.checkpoint is a pickle, which is never read)" if pickle else ""


def refuse_foreign_files(folder: Path, manifest: CheckpointManifest) -> None:
    if wrong := [name for name in manifest.files if not RANK_FILE.fullmatch(name)]:
        raise CorruptCheckpointError(f"{MANIFEST} names {wrong[0]!r}, which is no file of a checkpoint")
    used = {piece.file for tensor in manifest.tensors.values() for piece in tensor.pieces}
    if missing := used - manifest.files.keys():
        raise CorruptCheckpointError(f"{MANIFEST} gives no hash of {min(missing)}")
    known = {MANIFEST, MODEL, *manifest.files}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in known and not IGNORED.match(path.name))
    if foreign:
        raise CorruptCheckpointError(
            f"{foreign[0]} does not belong to a checkpoint; pickles and other foreign files are never read"
        )


def verify_files(folder: Path, manifest: CheckpointManifest, names: Iterable[str]) -> None:
    """Compare files with the sizes and hashes in the manifest."""
    for name in names:
        path, expected = folder / name, manifest.files[name]
        if not path.is_file():
            raise CorruptCheckpointError(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CorruptCheckpointError(f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}")
        if file_hash(path) != expected["sha256"]:
            raise CorruptCheckpointError(f"{name} does not match its hash")


class TensorReader:
    """Blocks of the tensors of one checkpoint, put together from the pieces of any number of ranks."""

    def __init__(self, folder: Path, manifest: CheckpointManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[str, Any] = {}

    def fill(self, name: str, out: Tensor, offset: Sequence[int], shape: Sequence[int]) -> None:
        """Copy the block at `offset` of the stored tensor, whose whole shape is `shape`, into `out`."""
        stored = self.manifest.tensors.get(name)
        if stored is None:
            raise UserError(f"the checkpoint has no {name}")
        if stored.shape != tuple(shape):
            raise UserError(f"{name} is {stored.shape} in the checkpoint and {tuple(shape)} in this model")
        filled = 0
        for piece in stored.pieces:
            source, target, count = overlap(piece, offset, tuple(out.shape))
            if count:
                block = self._slice(piece.file, name, source)
                out[target].copy_(block)
                filled += count
        if filled != out.numel():
            raise UserError(f"the checkpoint has {filled} of {out.numel()} values of {name}")

    def _slice(self, file: str, name: str, part: tuple[slice, ...]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, framework="pt")
        try:
            found: Tensor = self._open[file].get_slice(name)[part] if part else self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise CorruptCheckpointError(f"{file} has no {name} as {MANIFEST} gives it: {error}") from None
        return found


def overlap(
    piece: StoredPiece, offset: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...], int]:
    """Where a piece and a wanted block meet: slices of the piece, slices of the block, and how many values."""
    source, target, count = list[slice](), list[slice](), 1
    for piece_start, piece_size, start, size in zip(piece.offset, piece.shape, offset, shape, strict=True):
        first, last = max(piece_start, start), min(piece_start + piece_size, start + size)
        count *= max(0, last - first)
        source.append(slice(first - piece_start, last - piece_start))
        target.append(slice(first - start, last - start))
    return tuple(source), tuple(target), count


def table_hash(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
