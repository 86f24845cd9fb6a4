"""A checkpoint of a run as a model folder: verified by its hashes, written once beside its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import UserError
from plume.hf.config_json import read_config, to_hf_config
from plume.util.checkpoint_files import (
    MANIFEST,
    CheckpointManifest,
    CorruptCheckpointError,
    TensorReader,
    file_hash,
    read_manifest,
    saved_steps,
    step_folder,
)
from plume.util.files import aside, read_json, write_json
from plume.util.places import user_cache
from plume.util.run_folder import ABOUT, BYTES_PER_TOKEN, CHECKPOINTS, MODEL

if TYPE_CHECKING:
    from plume.model.heads import Model
    from plume.text import Tokenizer

ORIGIN = "checkpoint.json"  # hashes of the manifest it was made from, and of its own weights
PREFIXES = ("model/", "model/student.")  # of the weights in a checkpoint; the second in distillation


def save_run_config(run: Path, model: Model, tokenizer: Tokenizer, bytes_per_token: float | None) -> None:
    """What checkpoints need to be opened before the run has ended, and its losses to be compared with other runs'."""
    with aside(run / CHECKPOINTS / MODEL) as new:
        write_json(new / "config.json", to_hf_config(model, tokenizer))
        about = {"head": model.kind, "tokenizer_hash": tokenizer.hash, BYTES_PER_TOKEN: bytes_per_token}
        write_json(new / ABOUT, about)
        tokenizer.save(new)


def openable_steps(run: Path) -> list[int]:
    """Steps of a run that can be opened as a model."""
    return saved_steps(run / CHECKPOINTS) if config_folder(run) is not None else []


def config_folder(run: Path) -> Path | None:
    folders = (run / CHECKPOINTS / MODEL, run / MODEL)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def checkpoint_model(run: Path, step: int) -> Path:
    """The model folder of the checkpoint of a step."""
    folder, like = step_folder(run / CHECKPOINTS, step), config_folder(run)
    if not folder.is_dir() or like is None:
        steps = ", ".join(map(str, openable_steps(run))) if run.is_dir() else "none"
        raise UserError(f"{run} has no checkpoint of step {step} to open; checkpoints: {steps if steps else 'none'}")
    try:
        manifest = read_manifest(folder, verify=False)
        digest = file_hash(folder / MANIFEST)
        places = (folder / MODEL, user_cache() / "checkpoints" / digest[:16])
        for place in places:
            if unchanged(place, digest):
                return place
        read_manifest(folder)  # every byte
        writable = os.access(folder, os.W_OK)
        return write_checkpoint_model(places[0 if writable else 1], like, folder, manifest, digest)
    except CorruptCheckpointError as error:
        raise UserError(f"{run}@{step} is corrupt: {error}; other checkpoints of the run may be intact") from None


def unchanged(place: Path, digest: str) -> bool:
    """Whether a model folder was made from this manifest and is as it was written."""
    if not (place / ORIGIN).is_file():
        return False
    origin = read_json(place / ORIGIN)
    files: dict[str, Any] = origin.get("files", {})
    intact = all((place / name).is_file() and file_hash(place / name) == known for name, known in files.items())
    return bool(origin.get("manifest") == digest and files and intact)


def write_checkpoint_model(place: Path, like: Path, folder: Path, manifest: CheckpointManifest, digest: str) -> Path:
    import torch

    from plume.hf.model_folder import save_model
    from plume.model.unfilled import unfilled
    from plume.text import load_tokenizer

    config = read_config(like)
    model = unfilled(config.model, config.head, config.labels)
    reader, weights = TensorReader(folder, manifest), {}
    for name, parameter in model.named_parameters():
        stored = next((p + name for p in PREFIXES if p + name in manifest.tensors), PREFIXES[0] + name)
        weights[name] = torch.empty(parameter.shape)
        reader.fill(stored, weights[name], (0,) * parameter.ndim, tuple(parameter.shape))
    model.load_state_dict(weights, strict=False, assign=True)
    if config.model.decoder_layers:
        model.body.tie()  # type: ignore[operator]
    with aside(place) as new:
        save_model(model.eval(), new, tokenizer=load_tokenizer(like), info={"step": manifest.state["step"]})
        files = {file.name: file_hash(file) for file in (*sorted(new.glob("*.safetensors")), new / "config.json")}
        write_json(new / ORIGIN, {"manifest": digest, "files": files})
    return place
