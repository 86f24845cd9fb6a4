"""Interventions: a head, an MLP or the residual stream set to zero, to its mean, or to its value in another text."""

# B rows, T tokens, H heads, K head width, D model width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from plume.config import UserError
from plume.explain.forward_pass import Change, ForwardPass, Stack, Target, as_floats
from plume.explain.results import Effects

EditPart = Literal["head", "cross_head", "attention", "cross", "mlp", "residual"]
Replacement = Literal["zero", "mean", "patch"]
ROWS_AT_ONCE = 32  # edited copies of the text in one forward pass


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One intervention. The residual stream of layer l is what enters block l; that of the last leaves the stack."""

    part: EditPart
    layer: int
    head: int | None = None  # for head and cross_head
    positions: tuple[int, ...] | None = None  # unset: all
    value: Replacement = "zero"
    stack: Stack | None = None


def site_of(seen: ForwardPass, edit: Edit) -> str:
    stack = seen.stack if edit.stack is None else edit.stack
    by_head = edit.part in ("head", "cross_head")
    if by_head != (edit.head is not None):
        raise UserError(f"head={edit.head}: {edit.part} {'needs a head' if by_head else 'has no heads'}")
    kind = {"head": "attention.heads", "cross_head": "cross.heads"}.get(edit.part, f"{edit.part}.update")
    if edit.part != "residual":
        seen.check(kind, edit.layer, edit.head, stack)
        return f"{stack}.{edit.layer}.{kind}"
    seen.check("embedding", None, None, stack)
    count = len(seen.stacks[stack].blocks)
    if not 0 <= edit.layer <= count:
        raise UserError(f"layer={edit.layer}: the residual stream has layers 0 (embedding) to {count}")
    return f"{stack}.embedding" if edit.layer == 0 else f"{stack}.{edit.layer - 1}.mlp.output"


def replacement(seen: ForwardPass, site: str, value: Replacement, other: ForwardPass | None) -> Tensor:
    """What stands at a site instead, (T, D): zeros, the mean over the text's positions, or another text's values."""
    own = seen.record([site])[site]
    if value == "zero":
        return torch.zeros_like(own)
    if value == "mean":
        return own.mean(0, keepdim=True).expand_as(own)
    if other is None:
        raise UserError("value='patch' needs the other text's explanation")
    return other.record([site])[site]


def change_of(seen: ForwardPass, edit: Edit, other: ForwardPass | None = None) -> tuple[str, Change]:
    """The edit as a change at a site, for ForwardPass.run."""
    site = site_of(seen, edit)
    new = replacement(seen, site, edit.value, other)
    length = len(seen.record([site])[site])
    positions = list(range(length)) if edit.positions is None else list(edit.positions)
    if wrong := [p for p in positions if not 0 <= p < min(length, len(new))]:
        limit = f"this text has {length} tokens" + (f", the other {len(new)}" if edit.value == "patch" else "")
        raise UserError(f"position {wrong[0]} cannot be edited: {limit}; name positions that both have")
    columns = columns_of(seen, edit.head)

    def change(value: Tensor) -> Tensor:
        edited = value.clone()
        edited[:, positions, columns] = new[positions, columns].to(value.dtype)
        return edited

    return site, change


def columns_of(seen: ForwardPass, head: int | None) -> slice:
    size = seen.model.config.head_width
    return slice(None) if head is None else slice(head * size, (head + 1) * size)


@torch.no_grad()
def effects(
    seen: ForwardPass,
    target: Target,
    part: EditPart = "head",
    value: Replacement = "zero",
    other: ForwardPass | None = None,
    stack: Stack | None = None,
) -> Effects:
    """How the target's logit changes when each head (or each position of another part) is edited alone."""
    name = seen.stack if stack is None else stack
    by_head = part in ("head", "cross_head")
    seen.record([f"{seen.stack}.{i}.attention.input" for i in range(seen.layers)])  # in one forward pass
    layers = len(seen.stacks[name].blocks) + (part == "residual") if name in seen.stacks else 1
    before = float(seen.target_logit(seen.hidden[None], target)[0])
    rows = list[Tensor]()
    for layer in range(layers):
        site = site_of(seen, Edit(part=part, layer=layer, head=0 if by_head else None, value=value, stack=name))
        new, own = replacement(seen, site, value, other), seen.record([site])[site]
        if len(new) != len(own):
            raise UserError(f"the texts have {len(own)} and {len(new)} tokens; a map of patches needs equal lengths")
        count = seen.heads if by_head else len(own)
        first = max(0, layer - 1) if part == "residual" else layer
        first = first if name == seen.stack else 0
        rows.append(torch.cat([sweep(seen, target, site, new, c, by_head, first) for c in chunks(count)]) - before)
    return Effects(part=part, value=value, effect=as_floats(torch.stack(rows)), before=before)


def chunks(count: int) -> list[range]:
    return [range(first, min(first + ROWS_AT_ONCE, count)) for first in range(0, count, ROWS_AT_ONCE)]


def sweep(
    seen: ForwardPass, target: Target, site: str, new: Tensor, items: Sequence[int], by_head: bool, first: int
) -> Tensor:
    """The target's logit with item i (a head, or a position) replaced in row i, (B,); edits begin at block `first`."""

    def change(value: Tensor) -> Tensor:
        edited = value.clone()
        for row, item in enumerate(items):
            where = (slice(None), columns_of(seen, item)) if by_head else (item, slice(None))
            edited[(row, *where)] = new[where].to(value.dtype)
        return edited

    return seen.target_logit(seen.run_from(first, len(items), [(site, change)]), target)
