"""What kind of head each one is: previous token, first token, duplicate token or induction, scored and named."""

# T tokens, S keys, H heads

from __future__ import annotations

import torch
from torch import Tensor

from plume.explain.forward_pass import AttentionKind, ForwardPass, Stack, as_floats
from plume.explain.results import HeadKinds, HeadScores
from plume.model.heads import Model
from plume.model.transformer import EncoderDecoder

KINDS = ("previous", "first", "duplicate", "induction")
NAMED_FROM = 0.4  # mean attention weight from which a head is named by its kind
PROBE = 32  # random tokens that are repeated once


def head_scores(seen: ForwardPass, stack: Stack | None = None, kind: AttentionKind = "attention") -> HeadScores:
    """Mean attention weight of each head on the previous, first, same and induced token of this text, (L, H)."""
    name = seen.stack if stack is None else stack
    seen.check(f"{kind}.weights", 0, None, name)
    blocks = range(len(seen.stacks[name].blocks))
    seen.record([f"{name}.{i}.{kind}.{part}" for i in blocks for part in "qk"])
    columns = [scores_of(seen, seen.value(f"{kind}.weights", i, None, name), name, kind) for i in blocks]
    return HeadScores(*(as_floats(torch.stack(column)) for column in zip(*columns, strict=True)))


def scores_of(seen: ForwardPass, w: Tensor, stack: str, kind: str) -> tuple[Tensor, ...]:
    """previous, first, duplicate, induction and distance of one layer's weights (H, T, S), each (H,)."""
    queries, keys = w.shape[1:]
    rows, columns = torch.arange(queries, device=w.device), torch.arange(keys, device=w.device)
    distance = (rows[:, None] - columns).float()
    nothing = w.new_zeros(len(w))
    if kind == "cross":
        return nothing, w[:, :, 0].mean(1), nothing, nothing, (w * distance.abs()).sum(2).mean(1)
    ids = torch.tensor(seen.source if stack == "encoder" and seen.source is not None else seen.tokens, device=w.device)
    causal = seen.stacks[stack].causal
    same = (ids[:, None] == ids) & ((distance > 0) if causal else (distance != 0))  # (T, S)
    after = torch.zeros_like(same)
    after[:, 1:] = same[:, :-1]  # the token behind an earlier copy of this one
    after &= (distance > 0) if causal else (distance != 0)
    return (
        w.diagonal(offset=-1, dim1=1, dim2=2).mean(1) if queries > 1 else nothing,
        w[:, 1:, 0].mean(1) if queries > 1 else nothing,
        mean_where(w, same, nothing),
        mean_where(w, after, nothing),
        (w * distance.abs()).sum(2).mean(1),
    )


def mean_where(w: Tensor, chosen: Tensor, nothing: Tensor) -> Tensor:
    """Mean weight on the chosen keys, over the queries that have any."""
    return (w * chosen).sum(2)[:, chosen.any(1)].mean(1) if chosen.any() else nothing


def head_kinds(model: Model, *, seed: int = 0) -> HeadKinds:
    """The kind of each head, measured on random tokens that stand there twice: what a head does whatever the text."""
    generator = torch.Generator().manual_seed(seed)
    count = max(2, min(PROBE, model.config.context // 2, model.config.vocab_size // 2))
    half = torch.randperm(model.config.vocab_size, generator=generator)[:count].tolist()
    source = [*half, *half] if isinstance(model.body, EncoderDecoder) else None
    scores = head_scores(ForwardPass(model, [*half, *half], source=source))
    names = []
    for layer in zip(*(getattr(scores, kind) for kind in KINDS), strict=True):
        best = [max(range(len(KINDS)), key=lambda k: values[k]) for values in zip(*layer, strict=True)]
        names.append(tuple(KINDS[k] if layer[k][h] >= NAMED_FROM else "" for h, k in enumerate(best)))
    return HeadKinds(names=tuple(names), scores=scores)
