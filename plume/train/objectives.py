"""What is learned: next tokens, masked tokens, next sentences, translations; and the loss that saves memory."""

# B batch, T tokens, N positions with a target, D model width, V vocabulary, C positions in a chunk

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plume.data.batches import IGNORE, Batch
from plume.heads import MaskedToken, Model, Pretraining
from plume.model import EncoderDecoder

CHUNK_NUMBERS = 7_000_000  # logits held at a time: just less than what malloc would map and clear anew each time


class ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of `features @ table.T + bias`, whose gradient is found in the forward, chunk by chunk.

    Logits of the whole batch never exist together: each chunk's are turned into its gradient and dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,  # (N, D)
        table: Tensor,  # (rows, D); rows from V on are padding
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,), IGNORE where there is none
        vocab_size: int,
        smoothing: float,
        rows: int,
        weights: Tensor | None,  # (N,), of each target's loss; None means 1
    ) -> Tensor:
        wants = [ctx.needs_input_grad[i] for i in range(3)]
        words = table[:vocab_size].to(features.dtype)  # (V, D)
        total = torch.zeros((), device=features.device)
        grad_features = torch.empty_like(features) if wants[0] else None
        grad_table = torch.zeros_like(table) if wants[1] else None
        grad_bias = torch.zeros_like(bias) if wants[2] and bias is not None else None
        for start in range(0, len(features), rows):
            x, y = features[start : start + rows], targets[start : start + rows]  # (C, D), (C,)
            logits = F.linear(x, words, None if bias is None else bias.to(x.dtype)).float()  # (C, V)
            share = (y != IGNORE).to(logits.dtype)  # (C,), 0 where there is no target
            if weights is not None:
                share = share * weights[start : start + rows]
            y = y.clamp(min=0)[:, None]
            logp = logits.log_softmax(dim=1)  # (C, V)
            total += smoothed(logp, y, smoothing) @ share
            if not any(wants):
                continue
            gradient = slope(logp, y, smoothing)
            if grad_bias is not None:
                grad_bias += share @ gradient
            gradient = gradient.to(x.dtype)
            share = share.to(x.dtype)[:, None]  # applied below, where rows are D long and not V
            if grad_features is not None:
                grad_features[start : start + rows] = (gradient @ words) * share
            if grad_table is not None:
                grad_table[:vocab_size].addmm_(gradient.T.to(table.dtype), (x * share).to(table.dtype))
        ctx.gradients = (grad_features, grad_table, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g.mul_(upstream[0]) for g in ctx.gradients]
        ctx.gradients = None
        return (*scaled, None, None, None, None, None)


def smoothed(logp: Tensor, y: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of each row with its smoothed target, (C,)."""
    losses = (smoothing - 1) * logp.gather(1, y)[:, 0]
    return losses - smoothing * logp.mean(dim=1) if smoothing else losses


def slope(logp: Tensor, y: Tensor, smoothing: float) -> Tensor:
    """Its gradient by the logits, (C, V), in the memory of the log-probabilities."""
    gradient = logp.exp_()
    if smoothing:
        gradient.sub_(smoothing / logp.shape[1])
    return gradient.scatter_add_(1, y, torch.full_like(y, smoothing - 1, dtype=gradient.dtype))


def token_loss(
    features: Tensor,
    table: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> Tensor:
    """The summed cross-entropy of (..., D) features against (...) targets, never holding all logits at once.

    `weights` (...) are laid on each target's loss.
    """
    rows = max(1, chunk_numbers // vocab_size)
    flat = features.reshape(-1, features.shape[-1])
    shares = None if weights is None else weights.reshape(-1)
    total: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        flat, table, bias, targets.reshape(-1), vocab_size, smoothing, rows, shares
    )
    return total


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A batch of plume.data as tensors, field by field."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    lengths: Tensor | None = None
    segments: Tensor | None = None
    documents: Tensor | None = None
    next_sentence: Tensor | None = None
    source: Tensor | None = None
    source_lengths: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> TensorBatch:
        given = {f.name: getattr(batch, f.name) for f in fields(batch)}
        return cls(**{name: torch.from_numpy(array) for name, array in given.items() if array is not None})

    def to(self, device: torch.device) -> TensorBatch:
        if device.type == "cpu":
            return self
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return TensorBatch(**{n: t.to(device, non_blocking=True) for n, t in given.items() if t is not None})


def token_features(model: Model, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the token table is multiplied with, and the bias that is added."""
    head = model.head.token if isinstance(model.head, Pretraining) else model.head
    if isinstance(head, MaskedToken):
        return head.norm(head.activation(head.dense(hidden))), head.bias
    return hidden, None


class Tokens:
    """The loss of predicted tokens: the next one, the masked ones, or those of a translation."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self.parts: Mapping[str, float] = {"loss": 1.0}
        self.smoothing = smoothing

    def counts(self, batch: TensorBatch) -> Tensor:
        return torch.tensor([float((batch.targets != IGNORE).sum())])

    def totals(self, model: Model, batch: TensorBatch) -> Tensor:
        return torch.stack([self.token_total(model, self.hidden(model, batch), batch)])  # (1,)

    def hidden(self, model: Model, batch: TensorBatch) -> Tensor:
        if isinstance(model.body, EncoderDecoder):
            assert batch.source is not None, "an encoder-decoder reads a source"
            return model.body(batch.source, batch.tokens, source_lengths=batch.source_lengths, lengths=batch.lengths)
        return model.body(
            batch.tokens, segments=batch.segments, lengths=batch.lengths, documents=batch.documents
        )  # (B, T, D)

    def token_total(self, model: Model, hidden: Tensor, batch: TensorBatch) -> Tensor:
        flat, targets = hidden.flatten(0, 1), batch.targets.flatten()  # (B * T, D), (B * T,)
        if batch.positions is not None:
            flat = flat[batch.positions]  # (N, D): only what is predicted meets the vocabulary
        elif batch.lengths is not None:
            real = (targets != IGNORE).nonzero()[:, 0]
            flat, targets = flat[real], targets[real]
        features, bias = token_features(model, flat)
        smoothing = self.smoothing if model.training else 0.0  # what is measured is the plain loss
        return token_loss(
            features, model.table, targets, vocab_size=model.config.vocab_size, bias=bias, smoothing=smoothing
        )


class TokensAndNextSentence(Tokens):
    """BERT's: the mean over masked tokens plus the mean over pairs."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__(smoothing)
        self.parts = {"masked": 1.0, "next_sentence": 1.0, "next_sentence_accuracy": 0.0}

    def counts(self, batch: TensorBatch) -> Tensor:
        pairs = float(len(batch.tokens))
        return torch.cat([super().counts(batch), torch.tensor([pairs, pairs])])

    def totals(self, model: Model, batch: TensorBatch) -> Tensor:
        assert isinstance(model.head, Pretraining) and batch.next_sentence is not None
        hidden = self.hidden(model, batch)
        follows = model.head.follows(hidden, batch.lengths).float()  # (B, 2)
        pairs = F.cross_entropy(follows, batch.next_sentence, reduction="sum")
        right = (follows.detach().argmax(dim=1) == batch.next_sentence).sum().float()
        return torch.stack([self.token_total(model, hidden, batch), pairs, right])


ObjectiveKind = Literal["language-model", "masked", "masked-next-sentence", "sequence-to-sequence"]
HEAD_OF: dict[ObjectiveKind, str] = {
    "language-model": "next-token",
    "masked": "masked-token",
    "masked-next-sentence": "pretraining",
    "sequence-to-sequence": "next-token",
}


def objective_called(kind: ObjectiveKind, smoothing: float = 0.0) -> Tokens:
    return TokensAndNextSentence(smoothing) if kind == "masked-next-sentence" else Tokens(smoothing)
