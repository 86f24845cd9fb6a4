"""Direct contributions to a logit: what the embedding, every head and every MLP add along its direction."""

# T tokens, L layers, H heads, K head width, D model width, V vocabulary

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from plume.explain.forward_pass import PER_POSITION, ForwardPass, as_floats, body_of
from plume.explain.results import Contributions


class Added(NamedTuple):
    """What one sublayer adds at each position, and the share of each of its heads."""

    update: Tensor  # (T,)
    heads: Tensor  # (H, T)


@torch.no_grad()
def contributions(seen: ForwardPass, index: int | None = None) -> Contributions:
    """What each part adds to the logit of `index` at every position; unset means the position's largest logit.

    The direction is the gradient of the logit (minus the mean logit, where there are several) with respect to the last
    hidden state, carried back through each norm with its divisor held fixed.
    """
    body = body_of(seen)
    seen.record(wanted_sites(seen))
    answer, total, direction = slope(seen, index)
    hidden_part = (direction * seen.hidden).sum(-1)
    bias, added = torch.zeros_like(total), dict[str, list[Added]]()
    if body.norm is not None:  # pre-norm: one norm stands between the residual stream and the head
        last = seen.record([])[f"{seen.stack}.{seen.layers - 1}.mlp.output"]
        direction, bias = through_norm(body.norm, last, direction, bias)
    for i in reversed(range(seen.layers)):
        block: Any = body.blocks[i]
        for kind, part in (("mlp", block.mlp), ("cross", block.cross), ("attention", block.attn)):
            if part is None:
                continue
            name = f"{seen.stack}.{i}.{kind}"
            if not part.pre:
                direction, bias = through_norm(part.norm, seen.value(f"{kind}.sum", i), direction, bias)
            update = (direction * seen.record([])[f"{name}.update"]).sum(-1)
            shares = (
                update.new_zeros(0, len(update)) if kind == "mlp" else by_head(seen, f"{name}.heads", part, direction)
            )
            added.setdefault(kind, []).insert(0, Added(update, shares))
    embedding = (direction * seen.record([])[f"{seen.stack}.embedding"]).sum(-1)
    return gather(seen, answer, total, total - hidden_part, embedding, bias, added)


def wanted_sites(seen: ForwardPass) -> list[str]:
    kinds = {
        "attention": ("update", "heads", "sum"),
        "cross": ("update", "heads", "sum"),
        "mlp": ("update", "sum", "output"),
    }
    names = [f"{seen.stack}.{i}.{kind}.{part}" for i in range(seen.layers) for kind in kinds for part in kinds[kind]]
    return [f"{seen.stack}.embedding", *(name for name in names if name in seen.sites)]


def slope(seen: ForwardPass, index: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The explained index (T,), its logit (T,), and the gradient of that at the last hidden state (T, D)."""
    hidden = seen.hidden.clone().requires_grad_()
    with torch.enable_grad():
        logits = seen.model.read(hidden[None].to(seen.model.table.dtype))[0].float()
        target = seen.target(index) if index is not None or seen.model.kind not in PER_POSITION else None
        if seen.model.kind in PER_POSITION:
            answer = logits.argmax(-1) if target is None else torch.full_like(logits.argmax(-1), target.index)
            total = logits.gather(1, answer[:, None])[:, 0]
            total = total if seen.model.kind == "span" else total - logits.mean(1)
        else:
            assert target is not None
            total = torch.zeros(len(hidden), device=hidden.device)
            total = total.index_put((torch.tensor(summary_position(seen)),), seen.target_logit(hidden[None], target)[0])
            answer = torch.full_like(total, target.index, dtype=torch.long)
        (gradient,) = torch.autograd.grad(total.sum(), hidden)
    return answer, total.detach(), gradient


def summary_position(seen: ForwardPass) -> int:
    """The position whose hidden state a head for whole texts reads."""
    return len(seen.tokens) - 1 if seen.model.config.summary == "last" else 0


def through_norm(norm: Any, x: Tensor, direction: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The direction on the other side of a norm of x with its divisor held fixed, and the norm's bias along it."""
    bias = bias + (direction * norm.bias.float()).sum(-1)
    scaled = direction * norm.weight.float()
    divisor = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    return (scaled - scaled.mean(-1, keepdim=True)) / divisor, bias


def by_head(seen: ForwardPass, site: str, part: Any, direction: Tensor) -> Tensor:
    """Each head's part of the update along the direction, (H, T); the projection's bias belongs to no head."""
    carried = direction @ part.inner.out.weight.float()  # (T, D): the direction before the output projection
    split = carried.view(len(carried), seen.heads, -1).transpose(0, 1)  # (H, T, K)
    return (split * seen.split(site)).sum(-1)


def gather(
    seen: ForwardPass,
    answer: Tensor,
    total: Tensor,
    rest: Tensor,
    embedding: Tensor,
    bias: Tensor,
    added: dict[str, list[Added]],
) -> Contributions:
    """The columns as arrays, by layer."""
    none = total.new_zeros(0, len(total))
    cross = added.get("cross", [])
    return Contributions(
        answer=answer.cpu().numpy(),
        names=tuple(answer_name(seen, int(i)) for i in answer),
        embedding=as_floats(embedding),
        attention=as_floats(torch.stack([a.update for a in added["attention"]])),
        heads=as_floats(torch.stack([a.heads for a in added["attention"]])),
        cross=as_floats(torch.stack([a.update for a in cross]) if cross else none),
        cross_heads=as_floats(torch.stack([a.heads for a in cross]) if cross else none[:, None]),
        mlp=as_floats(torch.stack([a.update for a in added["mlp"]])),
        bias=as_floats(bias),
        head=as_floats(rest),
        total=as_floats(total),
    )


def answer_name(seen: ForwardPass, index: int) -> str:
    """What an index of the logits stands for: a token, a label, an end of the answer, or the score."""
    if seen.model.kind == "span":
        return ("start", "end")[index]
    if seen.model.kind in PER_POSITION and seen.model.kind != "tag":
        return seen.spell(index)
    return seen.model.labels[index] if index < len(seen.model.labels) else "score"
