"""Few-shot classification: a contrastive loss over pairs of rows by their labels, then logistic regression as head."""

# B items, A anchors, N rows, L labels, D model width

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plume.tasks.token_rows import LabelledBatch

PENALTY = 1.0  # of the squared weights, as in scikit-learn's LogisticRegression
MOST_STEPS = 500


def pair_losses(summaries: Tensor, batch: LabelledBatch) -> Tensor:
    """How far the cosines of an anchor with the others are from 1, same label, and from 0, another label, (A,).

    The mean over rows of the same label and the mean over the others count one half each, whatever their numbers.
    """
    vectors = F.normalize(summaries.float(), dim=1)  # (B, D)
    anchors = torch.arange(len(batch), device=vectors.device) if batch.anchors is None else batch.anchors
    cosines = vectors[anchors] @ vectors.T  # (A, B)
    others = anchors[:, None] != torch.arange(len(batch), device=vectors.device)
    if batch.groups is not None:
        others = others & (batch.groups[anchors][:, None] == batch.groups)
    same = batch.targets[anchors][:, None] == batch.targets
    return _mean((cosines - 1).square(), same & others) / 2 + _mean(cosines.square(), ~same & others) / 2


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen values of each row; 0 where there are none."""
    return (values * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)


@torch.enable_grad()
def logistic_regression(features: Tensor, targets: Tensor, labels: int, *, intercept: bool) -> tuple[Tensor, Tensor]:
    """Weights (L, D) and biases (L,) with the smallest sum of log-losses and half of the squared weights."""
    x = features.detach().double().cpu()  # (N, D)
    weight = torch.zeros(labels, x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(labels, dtype=torch.float64, requires_grad=intercept)
    parameters = [weight, bias] if intercept else [weight]
    search = torch.optim.LBFGS(
        parameters, max_iter=MOST_STEPS, tolerance_grad=1e-8, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        search.zero_grad()
        fit = F.cross_entropy(x @ weight.T + bias, targets.cpu(), reduction="sum")
        total = fit + PENALTY / 2 * weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
