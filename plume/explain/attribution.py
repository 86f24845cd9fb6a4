"""Attribution: how much each token of a text counts for a logit, by integrated gradients or gradient times input."""

# B rows, T tokens, D model width

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plume.config import UserError
from plume.explain.forward_pass import ForwardPass, Site, Target, as_floats, hooked
from plume.explain.results import Attribution

Method = Literal["integrated_gradients", "gradient_x_input"]
TOLERANCE = 0.005  # of the logit difference: where the number of steps is enough
MOST_STEPS = 512
ROWS_AT_ONCE = 16


def attribute(
    seen: ForwardPass, target: Target, method: Method = "integrated_gradients", baseline: int | None = None
) -> Attribution:
    """A number per token. Integrated gradients from a baseline text to this one sum to the difference of their logits.

    The inputs are the embeddings (token, position and segment rows together). The baseline has the token `baseline` at
    every position, or, unset, the mean of the token table. Gradient times input takes the gradient at the text alone.
    """
    if baseline is not None and not 0 <= baseline < seen.model.config.vocab_size:
        raise UserError(f"baseline={baseline} is not in the vocabulary")
    names = [f"{name}.embedding" for name in seen.stacks]
    seen.record(names)
    ends = [seen.record([])[name] for name in names]
    if method == "gradient_x_input":
        logit, gradients = slopes(seen, target, names, [end[None] for end in ends])
        parts = [(g[0] * end).sum(-1) for g, end in zip(gradients, ends, strict=True)]
        return result(seen, method, parts, float(logit[0]), 0.0, 1)
    starts = baseline_embeddings(seen, names, baseline)
    with torch.no_grad():
        logits = [float(value(seen, target, names, [x[None] for x in inputs])[0]) for inputs in (ends, starts)]
    steps = 16
    while True:
        parts = integrate(seen, target, names, starts, ends, steps)
        missing = abs(float(sum(p.sum() for p in parts)) - (logits[0] - logits[1]))
        if missing <= TOLERANCE * max(abs(logits[0] - logits[1]), 1e-3) or steps >= MOST_STEPS:
            return result(seen, method, parts, logits[0], logits[1], steps)
        steps *= 2


def result(
    seen: ForwardPass, method: Method, parts: list[Tensor], logit: float, baseline: float, steps: int
) -> Attribution:
    """The reading stack's tokens, and the source's where there is one."""
    return Attribution(
        method=method,
        scores=as_floats(parts[-1]),
        source_scores=None if seen.source is None else as_floats(parts[0]),
        total=float(sum(p.double().sum() for p in parts)),
        logit=logit,
        baseline=baseline,
        steps=steps,
    )


def value(seen: ForwardPass, target: Target, names: list[str], inputs: list[Tensor]) -> Tensor:
    """The target's logit (B,) when the embeddings are these, (B, T, D) for each stack."""
    given = [(name, lambda _, x=x: x.to(seen.model.table.dtype)) for name, x in zip(names, inputs, strict=True)]
    return seen.target_logit(seen.run(len(inputs[0]), given), target)


def slopes(
    seen: ForwardPass, target: Target, names: list[str], inputs: list[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        logits = value(seen, target, names, leaves)
        return logits.detach(), torch.autograd.grad(logits.sum(), leaves)


def integrate(
    seen: ForwardPass, target: Target, names: list[str], starts: list[Tensor], ends: list[Tensor], steps: int
) -> list[Tensor]:
    """Gauss-Legendre over the straight way from starts to ends, (T,) for each stack."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    sums = [torch.zeros_like(x) for x in ends]
    for first in range(0, steps, ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        alpha = torch.tensor((nodes[part] + 1) / 2, dtype=torch.float32, device=seen.device)[:, None, None]
        weight = torch.tensor(weights[part] / 2, dtype=torch.float32, device=seen.device)[:, None, None]
        inputs = [start + alpha * (end - start) for start, end in zip(starts, ends, strict=True)]
        _, gradients = slopes(seen, target, names, inputs)
        sums = [total + (weight * g).sum(0) for total, g in zip(sums, gradients, strict=True)]
    return [(g * (end - start)).sum(-1) for g, start, end in zip(sums, starts, ends, strict=True)]


@torch.no_grad()
def baseline_embeddings(seen: ForwardPass, names: list[str], baseline: int | None) -> list[Tensor]:
    """What the embeddings give with the baseline's row for every token."""
    table = seen.model.body.embed.tokens.weight[: seen.model.config.vocab_size]
    row = table.mean(0) if baseline is None else table[baseline]
    kept = list[Tensor]()

    def keep(x: Tensor) -> None:
        kept.append(x[0].float())

    inside = [(Site(stack.embed.tokens, "output"), lambda x: row.expand_as(x)) for stack in seen.stacks.values()]
    unique = list({id(site.module): (site, change) for site, change in inside}.values())  # two stacks share one table
    with hooked([*unique, *((seen.sites[name], keep) for name in names)]):
        seen.run()
    return kept
