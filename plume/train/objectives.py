"""What is learned in pretraining: next tokens, masked tokens, next sentences, target texts."""

# B batch, T tokens, N positions with a target, D model width

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from plume.config import ModelConfig, ObjectiveKind
from plume.data.batches import IGNORE
from plume.model.heads import Model, Pretraining
from plume.model.loss import SampledSoftmax, TensorBatch, token_features, token_loss
from plume.model.transformer import EncoderDecoder
from plume.train.fused_softmax import compiled_softmax
from plume.train.split_vocabulary import split_token_loss
from plume.util.devices import best_seconds


class Tokens:
    """The loss of predicted tokens: the next one, the masked ones, or those of a translation."""

    def __init__(self, smoothing: float = 0.0, sampled: SampledSoftmax | None = None) -> None:
        self.parts: Mapping[str, float] = {"loss": 1.0}
        self.smoothing, self.sampled = smoothing, sampled

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
        if self.sampled is not None and model.training:
            return self.sampled.loss(features, model.table, targets, bias, compiled_softmax)
        smoothing = self.smoothing if model.training else 0.0  # what is measured is the plain loss
        loss = split_token_loss if isinstance(model.table, DTensor) else partial(token_loss, softmax=compiled_softmax)
        return loss(features, model.table, targets, vocab_size=model.config.vocab_size, bias=bias, smoothing=smoothing)


class TokensAndNextSentence(Tokens):
    """BERT's: the mean over masked tokens plus the mean over pairs."""

    def __init__(self, smoothing: float = 0.0, sampled: SampledSoftmax | None = None) -> None:
        super().__init__(smoothing, sampled)
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


HEAD_OF: dict[ObjectiveKind, str] = {
    "language-model": "next-token",
    "masked": "masked-token",
    "masked-next-sentence": "pretraining",
    "sequence-to-sequence": "next-token",
}


def objective_called(kind: ObjectiveKind, smoothing: float = 0.0, sampled: SampledSoftmax | None = None) -> Tokens:
    made = TokensAndNextSentence if kind == "masked-next-sentence" else Tokens
    return made(smoothing, sampled)


def measure_step(model: ModelConfig, batch: int) -> float:
    """Seconds that one update takes here: forward, backward, and the optimiser's share on top."""
    trial = Model(model)
    tokens = torch.zeros(batch, model.context, dtype=torch.long)

    def step() -> None:
        hidden = trial.body(tokens)
        token_loss(hidden, trial.table, tokens, vocab_size=model.vocab_size).backward()  # type: ignore[no-untyped-call]

    return 1.15 * best_seconds(step, 0.0, rounds=4)
