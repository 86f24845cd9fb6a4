"""The loss of fine-tuning: the task's own, and beside it the language model's on the task's text."""

# R rows, T tokens

from __future__ import annotations

import torch
from torch import Tensor

from plume.heads import Model
from plume.train.jobs import RowJob, hidden_states
from plume.train.labelled import LabelledBatch
from plume.train.objectives import token_loss


class TaskObjective:
    """The task's loss, and beside it the language model's on the same rows: L3 = L2 + auxiliary * L1.

    L1 of a row is the mean over its tokens, and an item's rows count equally, so that long texts weigh no more.
    """

    def __init__(self, job: RowJob, auxiliary: float = 0.0, *, frozen_body: bool = False) -> None:
        self.job, self.auxiliary, self.frozen_body = job, auxiliary, frozen_body
        self.parts = {"task": 1.0, "language_model": auxiliary} if auxiliary else {"task": 1.0}

    def counts(self, batch: LabelledBatch) -> Tensor:
        counts = [self.job.counts(batch), float(len(batch))]
        return torch.tensor(counts[: len(self.parts)], dtype=torch.float32)

    def totals(self, model: Model, batch: LabelledBatch) -> Tensor:
        if self.frozen_body:
            model.body.eval()  # features must not change from one visit to the next
            with torch.no_grad():
                hidden = hidden_states(model, batch)
        else:
            hidden = hidden_states(model, batch)
        totals = [self.job.losses(model, hidden, batch).sum()]
        if self.auxiliary:
            totals.append(language_model_total(model, hidden, batch))
        return torch.stack(totals)


def language_model_total(model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
    """The sum over items of the mean over rows of the mean over tokens of the next-token loss."""
    following = torch.arange(1, batch.tokens.shape[1], device=hidden.device) < batch.lengths[:, None]  # (R, T - 1)
    rows_of_item = torch.bincount(batch.items, minlength=len(batch))[batch.items]  # (R,)
    share = 1.0 / ((batch.lengths - 1).clamp(min=1) * rows_of_item)  # (R,)
    weights = share[:, None].expand_as(following)[following]
    return token_loss(
        hidden[:, :-1][following],
        model.table,
        batch.tokens[:, 1:][following],
        vocab_size=model.config.vocab_size,
        weights=weights.to(hidden.dtype),
    )
