"""Saving and loading checkpoints over ranks: written aside, hashed, synced, renamed; a corrupt one is skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from plume.config import UserError
from plume.train.distribute import Ranks
from plume.train.shared_matrices import local_offset, local_part
from plume.util.checkpoint_files import (
    CheckpointManifest,
    CorruptCheckpointError,
    StoredPiece,
    StoredTensor,
    TensorReader,
    read_manifest,
    saved_steps,
    step_folder,
    sync,
    verify_files,
    write_manifest,
    write_rank_file,
)

Place = tuple[str, tuple[int, ...], tuple[int, ...]]  # tensor, offset and shape of a block of it


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written: by this rank, until `written` has its file's size and hash."""

    manifest: CheckpointManifest  # without files
    aside: Path
    best: int | None
    written: Future[dict[str, Any]]

    @property
    def step(self) -> int:
        return int(self.manifest.state["step"])


class Checkpoints:
    """The checkpoints of one run, each a folder `step-N` with a file per rank and one manifest.

    Tensors sharded over ranks are stored with their place in the whole, so that any number of ranks can load them.
    With `background`, a copy of the tensors is written while training continues; `commit` makes it valid.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, *, keep_last: int, print: Callable[[str], None], background: bool = False
    ) -> None:
        self.folder, self.ranks, self.keep_last, self.print = folder, ranks, keep_last, print
        self.background = background
        self.saving: Saving | None = None
        self._layout: tuple[set[Place], dict[str, StoredTensor]] | None = None
        self._copies: dict[str, Tensor] = {}
        self._removing: list[Future[None]] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        if ranks.main:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".*"):  # by a run that was killed while writing or deleting
                shutil.rmtree(left, ignore_errors=True)
        ranks.barrier()

    def steps(self) -> list[int]:
        """Steps with a checkpoint, corrupt ones too, in order."""
        return saved_steps(self.folder)

    def path(self, step: int) -> Path:
        return step_folder(self.folder, step)

    # -- saving

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, best: int | None) -> None:
        """Begin a checkpoint; in the foreground, also finish it. Old ones are then removed, but never the best."""
        self.commit()
        mine, stored = self.layout(tensors)
        aside = self.folder / f".step-{step:08d}.writing"
        if self.ranks.main:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
        self.ranks.barrier()
        blocks = {name: local for name, local, place in local_blocks(tensors) if place in mine}
        if self.background:
            blocks = self.copied(blocks)
        file = aside / rank_file(self.ranks.rank)
        written: Future[dict[str, Any]] = Future()
        if self.background:
            written = self._writer.submit(write_rank_file, file, blocks)
        else:
            try:
                written.set_result(write_rank_file(file, {name: block.cpu() for name, block in blocks.items()}))
            except (OSError, SafetensorError) as error:
                written.set_exception(error)
        self.saving = Saving(CheckpointManifest({"step": step, **state}, {}, stored), aside, best, written)
        if not self.background:
            self.commit()

    def copied(self, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is written while training continues; its memory is kept, since new pages cost as much as the copy."""
        if self._copies.keys() != blocks.keys():
            self._copies = {name: torch.empty_like(block, device="cpu") for name, block in blocks.items()}
        for name, block in blocks.items():
            self._copies[name].copy_(block)
        return self._copies

    @property
    def written(self) -> bool:
        """Whether this rank has written its part of the checkpoint under way."""
        return self.saving is not None and self.saving.written.done()

    def commit(self) -> None:
        """Wait for the checkpoint under way, if there is one, and make it valid; every rank must call this."""
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        error = saving.written.exception()
        result = {"error": first_line(error)} if error is not None else saving.written.result()
        results = self.ranks.gather(result)
        failed = [(rank, found["error"]) for rank, found in enumerate(results) if "error" in found]
        if not failed and self.ranks.main:
            files = {rank_file(rank): found for rank, found in enumerate(results)}
            try:
                write_manifest(saving.aside, replace(saving.manifest, files=files))
                place = self.path(saving.step)
                shutil.rmtree(place, ignore_errors=True)
                saving.aside.rename(place)
                sync(self.folder)
                self.prune(saving.best)
            except OSError as error:
                failed = [(0, first_line(error))]
        failed = self.ranks.gather(failed)[0]
        if failed:
            self.abandon(saving, *failed[0])

    def finish(self) -> None:
        """Commit, and wait until old checkpoints are gone."""
        self.commit()
        while self._removing:
            self._removing.pop().result()

    def abandon(self, saving: Saving, rank: int, reason: str) -> None:
        size = sum(file.stat().st_size for file in saving.aside.glob("*")) if saving.aside.is_dir() else 0
        free = shutil.disk_usage(self.folder).free
        self.ranks.barrier()
        if self.ranks.main:
            shutil.rmtree(saving.aside, ignore_errors=True)
        where = f" (rank {rank})" if self.ranks.many else ""
        raise UserError(
            f"the checkpoint of step {saving.step} could not be written to {self.folder}{where}: {reason} "
            f"({size / 1e6:,.0f} MB were written, {free / 1e6:,.0f} MB are free there); "
            "earlier checkpoints are intact: free some space, then continue with --resume"
        )

    def layout(self, tensors: Mapping[str, Tensor]) -> tuple[set[Place], dict[str, StoredTensor]]:
        """The blocks that this rank writes, and where every block is: each by one of the ranks that hold it."""
        if self._layout is None:
            mine = [place for _, _, place in local_blocks(tensors)]
            owners: dict[Place, int] = {}
            load = [0] * self.ranks.size
            holders: dict[Place, list[int]] = {}
            for rank, places in enumerate(self.ranks.gather(mine)):
                for place in places:
                    holders.setdefault(place, []).append(rank)
            for place, ranks in holders.items():
                owners[place] = min(ranks, key=lambda rank: load[rank])
                load[owners[place]] += 1 + torch.Size(place[2]).numel()
            pieces: dict[str, list[StoredPiece]] = {}
            for (name, offset, shape), rank in owners.items():
                pieces.setdefault(name, []).append(StoredPiece(rank_file(rank), offset, shape))
            stored = {
                name: StoredTensor(tuple(t.shape), str(t.dtype).removeprefix("torch."), tuple(pieces[name]))
                for name, t in tensors.items()
            }
            self._layout = {place for place, rank in owners.items() if rank == self.ranks.rank}, stored
        return self._layout

    def prune(self, best: int | None) -> None:
        for step in self.steps()[: -self.keep_last]:
            if step != best:
                hidden = self.folder / f".step-{step:08d}.old"
                self.path(step).rename(hidden)
                if self.background:  # freeing large files takes as long as copying them
                    left = [each for each in self._removing if not each.done()]
                    self._removing = [*left, self._writer.submit(shutil.rmtree, hidden, ignore_errors=True)]
                else:
                    shutil.rmtree(hidden, ignore_errors=True)

    # -- loading

    def problem(self, step: int) -> str | None:
        """What is wrong with a checkpoint; each rank checks its share of the files."""
        found = ""
        try:
            manifest = read_manifest(self.path(step), verify=False)
            verify_files(self.path(step), manifest, sorted(manifest.files)[self.ranks.rank :: self.ranks.size])
        except CorruptCheckpointError as error:
            found = str(error)
        return next((each for each in self.ranks.gather(found) if each), None)

    def latest(self) -> int | None:
        """The newest valid checkpoint; corrupt ones are named, and left where they are."""
        self.commit()
        for step in reversed(self.ranks.gather(self.steps())[0]):
            if (problem := self.problem(step)) is None:
                return int(step)
            self.print(f"skipping corrupt checkpoint {self.path(step).name}: {problem}")
        return None

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill the tensors with those of a checkpoint and return the state saved with them."""
        self.commit()
        manifest = read_manifest(self.path(step), verify=False)
        reader = TensorReader(self.path(step), manifest)
        try:
            for name, local, (_, offset, _) in local_blocks(tensors):
                reader.fill(name, local, offset, tuple(tensors[name].shape))
        except UserError as error:
            raise UserError(f"{self.path(step)} does not fit this recipe: {error}; use the recipe of the run") from None
        self.ranks.barrier()
        return manifest.state

    def drop_after(self, step: int) -> None:
        """Remove checkpoints newer than the one that the run resumes from: they are corrupt."""
        if self.ranks.main:
            for later in self.steps():
                if later > step:
                    shutil.rmtree(self.path(later), ignore_errors=True)
        self.ranks.barrier()


def local_blocks(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Place]]:
    """This rank's part of each tensor and its place in the whole; tensors of which it has nothing are left out."""
    blocks = []
    for name, tensor in tensors.items():
        local = local_part(tensor)
        if local.numel():
            blocks.append((name, local, (name, local_offset(tensor), tuple(local.shape))))
    return blocks


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
