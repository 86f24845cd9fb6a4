"""A torch model whose stack is computed by an engine: heads, tasks and scoring use it like any other model."""

# N tokens of a batch, R rows, T tokens of the longest, A wanted positions, D model width

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plume.inference.engine import Logits
from plume.model.heads import Model
from plume.model.ragged import LengthGroups, Ragged
from plume.model.transformer import Transformer

Encode = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]] | None], list[Logits]]


class EngineStack(Transformer):
    """The stack of a model, whose hidden states an engine computes wherever no gradient is wanted."""

    reads_in_any_thread = False  # an engine has one cache and threads of its own

    def __init__(self, stack: Transformer, encode: Encode) -> None:
        self.__dict__.update(stack.__dict__)  # the same parameters
        self.encode = encode

    def read_ragged(self, batch: Ragged | LengthGroups) -> Tensor:
        sequences, segments = batch.sequences()
        if sequences is None or torch.is_grad_enabled():
            return super().read_ragged(batch)
        states = self.encode(sequences, segments)
        weight = self.embed.tokens.weight
        return batch.gathered([torch.from_numpy(s) for s in states]).to(device=weight.device, dtype=weight.dtype)


def with_engine(model: Model, encode: Encode) -> Model:
    """The model with its stack computed by an engine; parameters and head are the same objects."""
    assert isinstance(model.body, Transformer)
    other = copy.copy(model)
    other.__dict__["_modules"] = {**model._modules, "body": EngineStack(model.body, encode)}
    return other
