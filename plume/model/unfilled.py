"""A model on the meta device: shapes without memory or first values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from plume.config import ModelConfig
from plume.model.heads import Model

FILLS = ("normal_", "uniform_", "zero_", "fill_", "constant_", "kaiming_uniform_")  # of tensors and of torch.nn.init


class WithoutFilling(TorchFunctionMode):
    """Nothing is drawn or set: on the meta device that would do nothing but import torch's compiler, for seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else kwargs
        if getattr(func, "__name__", "") in FILLS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def unfilled(config: ModelConfig, head: str = "next-token", labels: Sequence[str] = ()) -> Model:
    """The model with parameters that have a shape and no values."""
    with torch.device("meta"), WithoutFilling():
        return Model(config, head, labels)
