"""Checkpoints that survive a crash: written aside, hashed, synced, renamed; a damaged one is passed over."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from plume.config import UserError
from plume.train.ranks import Ranks

MANIFEST = "manifest.json"
FOLDER = re.compile(r"step-(\d{8,})")


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says how."""


class Checkpoints:
    """The checkpoints of one run, each a folder `step-N` with tensors of every rank and one manifest.

    Tensors sharded over ranks are stored with their place in the whole, so that any number of ranks can load them.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, keep_last: int, say: Callable[[str], None]) -> None:
        self.folder, self.ranks, self.keep_last, self.say = folder, ranks, keep_last, say
        if ranks.main:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".*"):  # of a run that was killed while it wrote or deleted
                shutil.rmtree(left, ignore_errors=True)
        ranks.barrier()

    def steps(self) -> list[int]:
        """Steps with a checkpoint, damaged ones too, in order."""
        found = (FOLDER.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, best: int | None) -> None:
        """Write one checkpoint; then drop the old ones, but never the best."""
        aside = self.folder / f".step-{step:08d}.writing"
        try:
            if self.ranks.main:
                shutil.rmtree(aside, ignore_errors=True)
            self.ranks.barrier()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                writer = FileSystemWriter(aside, sync_files=True)
                save_tensors(dict(tensors), storage_writer=writer, no_dist=not self.ranks.many)
            if self.ranks.main:
                write_manifest(aside, {"step": step, **state})
                place = self.path(step)
                shutil.rmtree(place, ignore_errors=True)
                aside.rename(place)
                sync(self.folder)
                self.prune(best)
        except (OSError, CheckpointException) as error:
            shutil.rmtree(aside, ignore_errors=True)
            size, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(self.folder).free
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {first_line(error)} "
                f"(it takes {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free there); "
                f"the ones before are whole: make room, then go on with --resume"
            ) from error
        self.ranks.barrier()

    def prune(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep_last]:
            if step != best:
                hidden = self.folder / f".step-{step:08d}.old"
                self.path(step).rename(hidden)
                shutil.rmtree(hidden, ignore_errors=True)

    def whole(self, step: int) -> bool:
        """Whether a checkpoint is there as it was written."""
        sound = 0
        if self.ranks.main:
            try:
                read_manifest(self.path(step))
                sound = 1
            except Damaged:
                pass
        return bool(self.ranks.agree(sound))

    def latest(self) -> int | None:
        """The newest whole checkpoint; what is damaged is named, and left where it is."""
        found = -1
        if self.ranks.main:
            for step in reversed(self.steps()):
                try:
                    read_manifest(self.path(step))
                except Damaged as error:
                    self.say(f"checkpoint {self.path(step).name} is damaged ({error}) and passed over")
                    continue
                found = step
                break
        found = self.ranks.agree(found)
        return None if found < 0 else found

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill the tensors with those of a checkpoint and return the state saved with them."""
        state = read_manifest(self.path(step), verify=False)
        into = dict(tensors)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                load_tensors(into, storage_reader=FileSystemReader(self.path(step)), no_dist=not self.ranks.many)
            except CheckpointException as error:
                raise UserError(
                    f"{self.path(step)} does not fit this recipe: {first_line(error)}; use the recipe of the run"
                ) from error
        return state

    def drop_after(self, step: int) -> None:
        """Forget checkpoints newer than the one that the run goes on from: they are damaged."""
        if self.ranks.main:
            for later in self.steps():
                if later > step:
                    shutil.rmtree(self.path(later), ignore_errors=True)
        self.ranks.barrier()


def write_manifest(folder: Path, state: Mapping[str, Any]) -> None:
    """Name, size and hash of every file, the state, and a hash of all that."""
    names = sorted(path.name for path in folder.iterdir())
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(lambda name: digest(folder / name), names))
    body = {
        "state": dict(state),
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": sha}
            for name, sha in zip(names, hashes, strict=True)
        },
    }
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({**body, "sha256": self_hash(body)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for name in names:
        sync(folder / name)
    sync(folder)


def read_manifest(folder: Path, *, verify: bool = True) -> dict[str, Any]:
    """The state of a checkpoint after checking that every byte is what was written."""
    try:
        whole = json.loads((folder / MANIFEST).read_bytes())
        body = {"state": whole["state"], "files": whole["files"]}
        if whole["sha256"] != self_hash(body):
            raise Damaged(f"{MANIFEST} is not as it was written")
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged(f"{MANIFEST} cannot be read") from None
    if verify:
        for name, said in body["files"].items():
            check_file(folder / name, said)
    state: dict[str, Any] = body["state"]
    return state


def check_file(path: Path, said: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    if path.stat().st_size != said["bytes"]:
        raise Damaged(f"{path.name} has {path.stat().st_size} bytes instead of {said['bytes']}")
    if digest(path) != said["sha256"]:
        raise Damaged(f"{path.name} has other bytes than were written")


def self_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def digest(path: Path) -> str:
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


def first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # which wraps what went wrong on each rank
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
