"""A model folder on the disk or the hub: found, opened, written whole, hashed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import UserError
from plume.config.tables import RECIPE
from plume.families import family_of
from plume.files import aside, read_json, write_json, write_text
from plume.weights.folder_config import read_config, to_hf_config
from plume.weights.names import from_hf, some, to_hf

if TYPE_CHECKING:  # torch takes a second to import, and a config can be read without it
    import torch
    from torch import Tensor

    from plume.heads import Model
    from plume.text import Tokenizer

MAX_SHARD_BYTES = 5_000_000_000


def resolve(name: str | Path) -> Path:
    """The model folder that a path, a run folder or a hub name stands for."""
    path = Path(name).expanduser()
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder
    if (path / RECIPE).is_file():
        raise UserError(f"{path} is a run that has not ended, so it has no model yet; --resume goes on with it")
    if path.exists():
        raise UserError(f"{path} has no config.json, so it is not a model folder")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
        raise UserError(f"there is no folder {path}")
    return download(str(name))


def download(name: str) -> Path:
    """A model of the hub, from huggingface_hub's cache or the network, with its progress bar and offline mode."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from plume.data.web import hub_is_far

    wanted = ["*.json", "*.safetensors", "*.txt", "pytorch_model*.bin"]
    far = hub_is_far()
    try:
        folder = Path(snapshot_download(name, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = "it is out of reach, and no earlier download is in its cache" if far else reason
        raise UserError(f"there is no folder {name}, and the hub cannot give it: {reason}") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json on the hub, so it is not a model folder")
    return folder


def weight_files(folder: Path) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            files = sorted({folder / name for name in read_json(index)["weight_map"].values()})
            absent = [file.name for file in files if not file.is_file()]
            if absent:
                raise UserError(f"{folder} is incomplete: {some(absent)} named in {index.name} is not there")
            return files
    raise UserError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, RuntimeError, ValueError, EOFError, OSError) as error:
            raise UserError(f"{file} is damaged or truncated: {str(error).splitlines()[0]}") from None
        except Exception as error:  # unpickling raises anything
            raise UserError(f"{file} holds more than tensors, so it is not opened: {type(error).__name__}") from None
    return tensors


def load_model(
    folder: str | Path,
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Model:
    """The model of a folder. With another `head` than the folder's, only the stack is taken and the head is fresh."""
    import torch

    from plume.heads import Model

    place = resolve(folder)
    said = read_config(place)
    kind = said.head if head is None else head
    fresh = kind != said.head or (labels is not None and tuple(labels) != said.labels)
    with torch.device("meta"):
        model = Model(said.model, said.head, said.labels)
    try:
        state = from_hf(read_tensors(place), said.family, said.model, said.head)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [
        f"{name} is {tuple(tensor.shape)} in the file, {tuple(shapes[name])} by config.json"
        for name, tensor in state.items()
        if tensor.shape != shapes[name]
    ]
    if wrong:
        raise UserError(f"{place}: the weights do not fit config.json\n  " + "\n  ".join(wrong[:5]))
    model.load_state_dict(state, strict=False, assign=True)
    if said.model.decoder_layers:
        model.body.tie()  # type: ignore[operator]
    if fresh:
        body, model = model.body, Model(said.model, kind, () if labels is None else labels)
        model.body = body
    return model.to(device=device, dtype=torch.float32 if dtype is None else dtype).eval()


def save_model(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    info: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a whole model folder aside, then put it in place: never half a folder, never a mix of two."""
    place = Path(folder).expanduser()
    if place.exists() and not (place / "config.json").is_file() and any(place.iterdir()):
        raise UserError(f"{place} is not empty and not a model folder, so it is left alone; name another folder")
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only vocab_size={model.config.vocab_size}"
        )
    with aside(place) as new:
        write_json(new / "config.json", to_hf_config(model, tokenizer))
        write_tensors(to_hf(model), new, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(new)
        about = {"head": model.kind, "tokenizer_hash": None if tokenizer is None else tokenizer.hash, **(info or {})}
        write_json(new / "plume.json", about)
        write_text(new / "README.md", model_card(model, about))
    return place


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> None:
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.cpu()
        size += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def model_card(model: Model, about: Mapping[str, Any]) -> str:
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    rows = [f"| {name} | {value} |" for name, value in about.items() if isinstance(value, str | int | float)]
    return "\n".join(
        [
            "---\nlibrary_name: transformers\ntags: [plume]\n---",
            f"# A {family_of(config).model_type} model with a {model.kind} head",
            f"{parameters:,} parameters: {config.layers} layers, width {config.width}, {config.heads} heads, "
            f"context {config.context}, vocabulary {config.vocab_size}. Trained with Plume.",
            "Text that it writes is synthetic: label it so where people will read it.",
            "| | |\n|---|---|\n" + "\n".join(rows),
            f"```python\nimport plume\nlm = plume.load({'this-folder'!r})\n```\n",
        ]
    ).replace("\n#", "\n\n#")


def model_hash(folder: str | Path) -> str:
    """One short name for what a folder computes: its config and its weights."""
    place, digest = resolve(folder), hashlib.sha256()
    for file in [place / "config.json", *weight_files(place)]:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]
