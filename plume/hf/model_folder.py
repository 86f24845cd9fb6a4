"""A model folder on the disk, in the package or on the hub: found, opened, written whole, hashed."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import UserError, at_home, did_you_mean
from plume.hf.checkpoint_model import checkpoint_model, openable_steps
from plume.hf.config_json import (
    CHAT_TEMPLATE,
    PROBLEM_TYPES,
    FolderConfig,
    problem_type,
    read_chat_template,
    read_config,
    read_embedding,
    to_hf_config,
    write_embedding,
)
from plume.hf.families import Family, family_of
from plume.hf.weights import Gather, folder_tensors, from_hf, is_tied, read_tensors, some, weight_files, write_tensors
from plume.text import tokenizer_of_model
from plume.util.console import tell
from plume.util.files import aside, read_json, write_json, write_text
from plume.util.hub import bundled, hub_is_offline
from plume.util.run_folder import RECIPE, split_reference

if TYPE_CHECKING:  # torch takes a second to import, and a config can be read without it
    import torch

    from plume.model.heads import Model
    from plume.text import Tokenizer

MAX_SHARD_BYTES = 5_000_000_000
# what belongs to a model and is replaced with it; other files of its folder are somebody's
MODEL_FILES = re.compile(
    r"(config|generation_config|plume|modules|.*sentence.*|.*_tokens.*|tokenizer.*|vocab|checkpoint)\.json|README\.md|"
    r"vocab\.txt|merges\.txt|(pytorch_)?model.*\.(bin|safetensors|json|gguf|onnx|data)|(tf|flax|rust)_model.*|\d_[A-Z]\w+|\.plume"
)


def resolve(name: str | Path) -> Path:
    """The model folder of a path, a run folder, RUN@STEP, a bundled model or a hub name."""
    path, step = split_reference(name)
    if step is not None:
        return checkpoint_model(path, step)
    for folder in (path, path / "model", path / "0_Transformer"):  # the last: an older sentence-transformers folder
        if (folder / "config.json").is_file():
            return folder
    if (path / RECIPE).is_file():
        steps = openable_steps(path)
        hint = f"{path}@{steps[-1]} opens its last checkpoint, " if steps else ""
        raise UserError(f"{path} is an unfinished run without a model folder; {hint}--resume continues it")
    if path.exists():
        raise UserError(f"{path} has no config.json, so it is not a model folder")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)):
        raise UserError(f"there is no folder {path}")
    return found if (found := bundled(str(name))) is not None else download(str(name))


def download(name: str) -> Path:
    """A model of the hub, from huggingface_hub's cache or the network, with its progress bar and offline mode."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    offline = hub_is_offline()
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any(folder.rglob("model*.safetensors")):  # most repositories have the weights in both formats
            snapshot_download(name, allow_patterns="pytorch_model*.bin")
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = "it is unreachable or HF_HUB_OFFLINE is set, and its cache has no copy" if offline else reason
        why = reason + did_you_mean(name, [str(folder) for folder in Path(name).parent.glob("*") if folder.is_dir()])
        raise UserError(f"there is no folder {name}, and it cannot be downloaded from the hub: {why}") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} has no config.json on the hub, so it is not a model folder")
    return folder


def load_model(
    folder: str | Path,
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    architecture: str | None = None,
) -> Model:
    """The model of a folder, ready to compute."""
    import torch

    model = stored_model(resolve(folder), head=head, labels=labels, architecture=architecture)
    return model.to(device=device, dtype=torch.float32 if dtype is None else dtype).eval()


def stored_model(
    place: Path, *, head: str | None = None, labels: Sequence[str] | None = None, architecture: str | None = None
) -> Model:
    """A model whose weights are the files of its folder, read when they are used.

    With another `head` than the folder's, the stack and a pooler they share are taken.
    """
    from plume.model.heads import Model

    config = read_config(place, architecture)
    kind = config.head if head is None else head
    fresh = kind != config.head or (labels is not None and tuple(labels) != config.labels)
    model = read_model(place, config)
    if fresh:
        pretrained, model = model, Model(model.config, kind, () if labels is None else labels)
        model.body = pretrained.body
        keep_pooler(config.family, pretrained, model)
        keep_token_head(pretrained, model)
    return model


def load_tokenizer_of(folder: Path, architecture: str | None = None) -> Tokenizer:
    """The tokenizer of a model folder, which ends generations with the tokens that the model's config names."""
    config = read_config(folder, architecture)
    return tokenizer_of_model(folder, config.model.vocab_size, config.end_ids)


def read_model(place: Path, config: FolderConfig) -> Model:
    """The model as the folder holds it, every tensor checked against config.json."""
    from plume.model.unfilled import unfilled

    tensors, stack = read_tensors(place), config.model
    if stack.tie_embeddings and not is_tied(tensors, config.family):
        stack = replace(stack, tie_embeddings=False)
    try:
        state, foreign = from_hf(tensors, config.family, stack, config.head)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    if foreign:
        tell(f"{place}: ignoring tensors that the model does not use: {some(foreign)}", sys.stderr)
    model = unfilled(stack, config.head, config.labels)
    if config.head == "bare" and "head.summary.dense.weight" not in state:
        model.head.summary = None  # type: ignore[assignment]
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [
        f"{name} is {tuple(tensor.shape)} in the file, {tuple(shapes[name])} by config.json"
        for name, tensor in state.items()
        if tensor.shape != shapes[name]
    ]
    if wrong:
        raise UserError(f"{place}: the weights do not fit config.json\n  " + "\n  ".join(wrong[:5]))
    model.load_state_dict(state, strict=False, assign=True)
    if stack.decoder_layers:
        model.body.tie()  # type: ignore[operator]
    return model


def keep_pooler(family: Family, pretrained: Model, model: Model) -> None:
    """Take the pretrained dense layer of the summary where the new head has the same tensor, as transformers does."""

    def poolers(head: str) -> dict[str, str]:  # their name: ours
        prefix = family.prefix if head == "bare" else ""
        return {prefix + r.theirs: r.ours for r in family.heads[head][1] if r.ours.startswith("summary.")}

    old, new = pretrained.head.state_dict(), model.head.state_dict()
    before = poolers(pretrained.kind)
    for theirs, ours in poolers(model.kind).items():
        if theirs in before and before[theirs] in old:
            new[ours].copy_(old[before[theirs]])


def keep_token_head(pretrained: Model, model: Model) -> None:
    """Take the head of masked tokens, which stands alone or beside that of the next sentence."""
    heads = {"masked-token": lambda m: m.head, "pretraining": lambda m: m.head.token}
    if pretrained.kind != model.kind and {pretrained.kind, model.kind} <= heads.keys():
        heads[model.kind](model).load_state_dict(heads[pretrained.kind](pretrained).state_dict())


def save_model(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    info: Mapping[str, Any] | None = None,
    settings_of: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    gather: Gather = lambda tensor: tensor,
) -> Path:
    """Write a whole model folder aside, then put it in place: never half a folder, never a mix of two.

    Files in a folder that is written over stay if they are none of a model's. `settings_of` is a folder whose chat
    template and settings of sentence-transformers are written too. `gather` gives the whole of a tensor that ranks
    share; the others join in with `gather_tensors`.
    """
    place = at_home(folder)
    if place.exists() and not (place.is_dir() and (is_model_folder(place) or not any(place.iterdir()))):
        raise UserError(f"{place} is not empty and not a model folder; name another folder")
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only vocab_size={model.config.vocab_size}"
        )
    target = place.resolve() if place.is_symlink() else place  # a link stays one
    with aside(target, keep=lambda name: MODEL_FILES.fullmatch(name) is None) as new:
        task = None if info is None else info.get("task")
        write_json(new / "config.json", to_hf_config(model, tokenizer) | problem_type(model.kind, task))
        write_tensors(folder_tensors(model), new, max_shard_bytes, gather)
        if tokenizer is not None:
            tokenizer.save(new)
        if settings_of is not None and (embedding := read_embedding(settings_of)) is not None:
            write_embedding(embedding, new, model.config.width)
        if (template := read_chat_template(settings_of)) is not None:
            write_text(new / CHAT_TEMPLATE, template)
        own = {"head": model.kind, "tokenizer_hash": None if tokenizer is None else tokenizer.hash}
        about = {**own, **({} if info is None else info), **own}
        write_json(new / "plume.json", about)
        write_text(new / "README.md", model_card(model, about))
    return place


def is_model_folder(place: Path) -> bool:
    try:
        return not {"model_type", "architectures"}.isdisjoint(read_json(place / "config.json"))
    except UserError:
        return False


def folder_info(folder: Path | None) -> dict[str, Any]:
    """What Plume wrote beside a model: its recipe, its task, its results; where others wrote it, a task they name."""
    if folder is None:
        return {}
    if (file := folder / "plume.json").is_file():
        return read_json(file)
    config = folder / "config.json"
    if not config.is_file() or read_json(config).get("problem_type") != PROBLEM_TYPES["multilabel"]:
        return {}
    found = read_config(folder)
    return {"task": {"kind": "multilabel", "labels": found.labels, "length": found.model.context}}


def gather_tensors(model: Model, gather: Gather) -> None:
    """What ranks do that do not write, while another one writes the model folder."""
    for tensor in folder_tensors(model).values():
        for part in tensor.parts:
            gather(part)


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
