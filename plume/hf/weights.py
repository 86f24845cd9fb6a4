"""Weight files: which tensors they hold, and tensors under our names and theirs, by the rules of the family."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plume.config import ModelConfig, UserError
from plume.hf.families import Family, Rule, family_of
from plume.util.files import read_json, write_json
from plume.util.tensor_files import write_tensor_file

if TYPE_CHECKING:  # torch takes a second to import, and a config can be read without it
    import torch
    from torch import Tensor

    from plume.model.heads import Model

POOLER = "head.summary.dense."  # optional in a folder without a task head, as in transformers

# ---- files -------------------------------------------------------------------------------------------------------


def weight_files(folder: Path) -> list[Path]:
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return indexed_files(index)
    raise UserError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def indexed_files(index: Path) -> list[Path]:
    """The shards that an index names, all of them in the index's own folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} has no weight_map from tensor names to file names")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise UserError(f"{index} names files outside its folder: {some(outside)}")
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        raise UserError(f"{index.parent} is incomplete: {some(absent)} named in {index.name} is not there")
    return [index.parent / name for name in names]


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor; safetensors are mapped, not read."""
    found = read_tensors(folder)
    return {name: tuple(tensor.shape) for name, tensor in found.items() if hasattr(tensor, "shape")}


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
            refuse_pointer(file)
            raise UserError(f"{file} is corrupt or truncated: {str(error).splitlines()[0]}") from None
        except Exception as error:  # unpickling raises anything
            refuse_pointer(file)
            raise UserError(f"{file} holds more than tensors, so it is not opened: {type(error).__name__}") from None
    return tensors


def refuse_pointer(file: Path) -> None:
    """A clone without Git LFS has small texts in place of large files."""
    if os.access(file, os.R_OK):
        with file.open("rb") as stream:
            if stream.read(40).startswith(b"version https://git-lfs"):
                raise UserError(f"{file} is a pointer of Git LFS; `git lfs pull` downloads the weights")


def write_tensors(tensors: Mapping[str, FolderTensor], folder: Path, max_shard_bytes: int, gather: Gather) -> None:
    """Tensor by tensor: no more than one of them is put together at a time."""
    shards: list[dict[str, FolderTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout = {name: (tensor.dtype, tensor.shape) for name, tensor in shard.items()}
        write_tensor_file(folder / file, layout, lambda name, s=shard: s[name].make(gather), {"format": "pt"})  # type: ignore[misc]
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)


# ---- names -------------------------------------------------------------------------------------------------------


def rules_for(family: Family, config: ModelConfig, head: str, prefix: str) -> Iterator[Rule]:
    """One rule per tensor. Names are built from the config, never parsed out of a file."""
    from plume.model.heads import TOKEN_HEADS

    for rule in family.body:
        layers = config.decoder_layers if rule.ours.startswith("decoder.") else config.layers
        for i in range(layers if "{}" in rule.ours else 1):
            yield Rule(
                f"body.{rule.ours}".replace("{}", str(i)), prefix + rule.theirs.replace("{}", str(i)), rule.transposed
            )
    before = prefix if head == "bare" else ""
    for rule in family.heads[head][1]:
        yield Rule(f"head.{rule.ours}", before + rule.theirs, rule.transposed)
    if head in TOKEN_HEADS and not config.tie_embeddings:
        place = "head.token.output.weight" if head == "pretraining" else "head.output.weight"
        yield Rule(place, family.output)


def implied(family: Family, config: ModelConfig, prefix: str) -> dict[str, Tensor]:
    """Tensors that their format wants and our config already determines; zeros take no memory."""
    import torch

    from plume.model.transformer import sinusoids

    tensors: dict[str, Tensor] = {}
    if not config.attention_bias:
        for rule in rules_for(family, config, "next-token", prefix):
            if re.search(r"(attn|cross)\.inner\.(q|k|v|out)\.bias$", rule.ours):
                tensors[rule.theirs] = torch.zeros(1).expand(config.width)
    if family.sinusoids is not None and config.positions == "sinusoidal":
        tensors[prefix + family.sinusoids] = sinusoids(config.context, config.width)
    for name in family.zero_biases:
        tensors[name] = torch.zeros(1).expand(1, config.vocab_size)
    return tensors


Gather = Callable[["Tensor"], "Tensor"]  # the whole of a tensor that ranks may share


@dataclass(frozen=True)
class FolderTensor:
    """A tensor of theirs as it is made from ours."""

    parts: tuple[Tensor, ...]
    transposed: bool = False
    rows: int | None = None  # without those that only pad the vocabulary

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(part.shape[0] for part in self.parts) if self.rows is None else self.rows
        shape = (rows, *self.parts[0].shape[1:])
        return shape[::-1] if self.transposed else shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def make(self, gather: Gather) -> Tensor:
        import torch

        tensor = torch.cat([gather(part) for part in self.parts]) if len(self.parts) > 1 else gather(self.parts[0])
        tensor = tensor if self.rows is None else tensor[: self.rows]
        return (tensor.T if self.transposed else tensor).contiguous()


def folder_tensors(model: Model) -> dict[str, FolderTensor]:
    """Their tensors, wide dtypes first; rows that only pad the vocabulary are left out."""
    family, config = family_of(model.config), model.config
    prefix = "" if model.kind == "bare" else family.prefix
    left = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    left.pop("body.decoder.embed.tokens.weight", None)  # the encoder's, once more
    theirs = {name: FolderTensor((tensor,)) for name, tensor in implied(family, config, prefix).items()}
    for rule in rules_for(family, config, model.kind, prefix):
        if rule.theirs in theirs or (rule.ours.startswith(POOLER) and rule.ours not in left):
            continue
        padded = rule.ours.endswith(("embed.tokens.weight", "output.weight"))
        parts = tuple(left.pop(name) for name in rule.parts())
        theirs[rule.theirs] = FolderTensor(parts, rule.transposed, config.vocab_size if padded else None)
    assert not left, f"no rule for {list(left)}"
    if not config.tie_embeddings:  # then the class has a bias of its own beside the output table too
        twins = {second: theirs[first] for second, first in family.ties.items() if first in theirs}
        twins.pop(family.output, None)  # a stack without a token head has none
        theirs = twins | theirs
    return dict(sorted(theirs.items(), key=lambda item: -item[1].dtype.itemsize))


def from_hf(
    theirs: Mapping[str, Tensor], family: Family, config: ModelConfig, head: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Their tensors under our names, and the names that are left over. What is missing or wrong is one error."""
    left = without_ties(theirs, family, config)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in left) else ""
    known = implied(family, config, prefix)
    ours: dict[str, Tensor] = {}
    missing, wrong = list[str](), list[str]()
    for name in [name for name in known if name in left]:
        if not alike(left.pop(name), known[name]):
            wrong.append(f"{name} should be what the config implies, but is not")
    for rule in rules_for(family, config, head, prefix):
        if rule.theirs in known:
            continue
        if (tensor := left.pop(rule.theirs, None)) is None:
            if not (head == "bare" and rule.ours.startswith(POOLER)):
                missing.append(rule.theirs)
            continue
        if problem := unusable(tensor):
            wrong.append(f"{rule.theirs} {problem}")
            continue
        tensor = tensor.T if rule.transposed else tensor
        ours |= zip(rule.parts(), tensor.chunk(len(rule.parts())), strict=True)
    others = {rule.theirs for kind in family.heads for rule in rules_for(family, config, kind, prefix)}
    foreign = [name for name in left if name not in others and name not in {prefix + n for n in others}]
    if missing:
        raise UserError(
            f"not a {config.layers}-layer {family.model_type} checkpoint with a {head} head"
            f"\n  it lacks: {some(missing)}\n  it also has: {some(foreign)}"
            + "".join(f"\n  {sentence}" for sentence in wrong[:5])
        )
    if wrong:
        raise UserError(f"the weights cannot be used\n  {some(wrong)}")
    return ours, foreign


def unusable(tensor: Tensor) -> str | None:
    """Why a tensor cannot be weights."""
    if not tensor.is_floating_point():
        return f"holds {str(tensor.dtype).removeprefix('torch.')}, not floating-point numbers"
    return None if tensor.isfinite().all() else "holds NaN or infinity"


def alike(a: Tensor, b: Tensor) -> bool:
    import torch

    return a.shape == b.shape and torch.allclose(a.float(), b, atol=1e-5)


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def renewed(theirs: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Without the buffers of old files, and old names made new."""
    return {
        re.sub(r"\bgamma$", "weight", re.sub(r"\bbeta$", "bias", name)): tensor
        for name, tensor in theirs.items()
        if not re.search(family.buffers, name)
    }


def without_ties(theirs: Mapping[str, Tensor], family: Family, config: ModelConfig) -> dict[str, Tensor]:
    """Each tied tensor under its one name; of a bias the output's counts, as in transformers."""
    import torch

    left = renewed(theirs, family)
    for second, first in family.ties.items():
        if second not in left or (second == family.output and not config.tie_embeddings):
            continue
        name, tensor = full_name(first, left, family), left.pop(second)
        if name in left and not second.endswith(".bias") and not torch.equal(left[name], tensor):
            raise UserError(f"{second} differs from {name}: token tables that are not shared are not supported")
        left[name] = tensor
    return left


def is_tied(theirs: Mapping[str, Tensor], family: Family) -> bool:
    """Whether the output is the token table: by the tensors, as transformers decides where both are there."""
    import torch

    left = renewed(theirs, family)
    table = left.get(full_name(family.ties[family.output], left, family))
    output = left.get(family.output)
    return output is None or table is None or (output.shape == table.shape and torch.equal(output, table))


def full_name(name: str, names: Mapping[str, Tensor], family: Family) -> str:
    prefixed = any(other.startswith(family.prefix) for other in names)
    return name if name.startswith(("cls.", "lm_head.")) or not prefixed else family.prefix + name
