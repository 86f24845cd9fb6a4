"""First weights of a model that is built on the meta device, drawn or read: each rank keeps its part."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plume.config import PretrainConfig, UserError
from plume.hf import openable_steps, read_config, resolve, stored_model
from plume.model.heads import Model
from plume.text import Tokenizer, load_tokenizer
from plume.train.objectives import HEAD_OF
from plume.train.shared_matrices import inside, local_offset, local_part
from plume.util.console import tell
from plume.util.places import user_cache
from plume.util.run_folder import CHECKPOINTS, MODEL

aten = torch.ops.aten
FILLS = {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar}
FACTORIES = {aten.zeros.default: 0.0, aten.ones.default: 1.0}


class RecordedFills(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what fills tensors on the meta device, in order: the random numbers that building a real one would draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fills: list[tuple[Tensor, Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_meta:
            if func in FILLS:
                self.fills.append((args[0], func, tuple(args[1:])))
            elif func in FACTORIES:
                self.fills.append((out, aten.fill_.Scalar, (FACTORIES[func],)))
        return out


class FirstWeights(Protocol):
    """The weights that a model begins with, once it is spread over ranks."""

    def fill(self, module: nn.Module, model: nn.Module, device: torch.device) -> None:
        """Give every parameter of a model, inside of the module that is trained, its memory and its first values."""


class DrawnWeights:
    """Random ones."""

    def __init__(self, fills: Sequence[tuple[Tensor, Any, tuple[Any, ...]]], model: nn.Module, seed: int) -> None:
        names = {storage_of(p): name for name, p in model.named_parameters()}
        self.seed = seed
        self.steps = [(names.get(storage_of(t)), t.shape, t.dtype, func, args) for t, func, args in fills]
        missing = set(names.values()) - {name for name, *_ in self.steps}
        assert not missing, f"nothing fills {sorted(missing)}"

    def fill(self, module: nn.Module, model: nn.Module, device: torch.device) -> None:
        allocate(module, device)
        parameters = dict(model.named_parameters())
        torch.manual_seed(self.seed)
        for name, shape, dtype, func, args in self.steps:
            drawn = func(torch.empty(shape, dtype=dtype), *args)  # also where it is not kept: the next numbers follow
            if name is not None:
                keep_part(parameters[name], drawn)


class StoredWeights:
    """Those of a model whose tensors are files: a rank keeps its part of each."""

    def __init__(self, stored: nn.Module) -> None:
        self.stored = stored

    def fill(self, module: nn.Module, model: nn.Module, device: torch.device) -> None:
        allocate(module, device)
        stored = dict(self.stored.named_parameters())
        for name, parameter in model.named_parameters():
            keep_part(parameter, stored[name].detach())


def allocate(module: nn.Module, device: torch.device) -> None:
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]


def keep_part(parameter: Tensor, values: Tensor) -> None:
    """Copy what this rank holds of a parameter out of the whole values."""
    local = local_part(parameter.detach())
    local.copy_(values[inside((local_offset(parameter), tuple(local.shape)))])


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def deferred(make: Callable[[], Model], seed: int) -> tuple[Model, DrawnWeights]:
    """A model on the meta device, and the weights that `make` would have drawn after this seed."""
    with RecordedFills() as recorded, torch.device("meta"):
        model = make()
    return model, DrawnWeights(recorded.fills, model, seed)


# ---- a model to continue from ------------------------------------------------------------------------------------


def continued(config: PretrainConfig, name: str) -> tuple[PretrainConfig, Model | None]:
    """The config with the sizes and the tokenizer of a model, and this model; dropout stays the recipe's.

    A run that is resumed has all of it in its own folder.
    """
    if config.resume and openable_steps(config.folder):
        return with_model(config, config.folder / CHECKPOINTS / MODEL), None
    with resolving():
        place = resolve(name)
    if place.resolve().is_relative_to(config.folder.resolve()):
        raise UserError(
            f"init_from={name} is the run's own folder; --folder names another one, --resume without init_from "
            "continues the run"
        )
    config = with_model(config, place)
    torch.manual_seed(config.train.seed)  # of a head that the folder does not have
    stored, head = stored_model(place, head=HEAD_OF[config.objective.kind]), read_config(place).head
    c = stored.config
    if load_tokenizer(place).vocab_size > c.vocab_size:
        raise UserError(f"{place}: its tokenizer has more tokens than the model, which cannot read all of them")
    fresh = "" if head == stored.kind else f"; of the {stored.kind} head, what its {head} head lacks is random"
    if int(os.environ.get("RANK", "0")) == 0:
        sizes = f"{c.layers} layers of width {c.width}, context {c.context}, vocabulary {c.vocab_size:,}"
        tell(f"continues from {name}: {sizes}, its tokenizer{fresh}", sys.stderr)
    return replace(config, model=replace(c, dropout=config.model.dropout)), stored


@contextmanager
def resolving() -> Iterator[None]:
    """One rank after another: opening a checkpoint as a model writes its folder."""
    folder = user_cache()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "resolve.lock"):
        yield


def with_model(config: PretrainConfig, place: Path) -> PretrainConfig:
    """With the sizes and the tokenizer of a model folder; an objective that does not fit them is an error."""
    data = replace(config.data, tokenizer=replace(config.data.tokenizer, folder=place))
    return replace(config, model=replace(read_config(place).model, dropout=config.model.dropout), data=data)


def check_tokenizer(config: PretrainConfig, tokenizer: Tokenizer) -> None:
    """Data that was prepared elsewhere must be of the model's tokenizer."""
    if config.init_from is None or config.prepared is None:
        return
    folder = config.data.tokenizer.folder
    if folder is not None and tokenizer.hash != load_tokenizer(folder).hash:
        raise UserError(
            f"{config.prepared} was not prepared with the tokenizer of {config.init_from}; leave prepared out, or "
            f"prepare it again with --tokenizer.folder {folder}"
        )
