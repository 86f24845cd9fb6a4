"""A vector for a text, the mean over its tokens: texts that belong together get similar vectors."""

# B items, R rows, A anchors, D model width

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plume.config import TaskConfig
from plume.model.heads import Model, mean_pool
from plume.tasks import metrics
from plume.tasks.baselines import Baseline, fitted, sampled, texts_of, tfidf_cosine
from plume.tasks.classify import number_or_zero
from plume.tasks.schema import Columns, Example, Prediction, Target, TaskSettings
from plume.tasks.task_kind import PREDICTED, TaskKind, TaskOptions, hidden_states
from plume.tasks.token_rows import IMPOSSIBLE, ContrastRows, LabelledBatch, LabelledRows, Template
from plume.text import Tokenizer


class EmbedTask(TaskKind):
    """With a number for each pair its cosine is fitted; without, every other text of the batch is a negative."""

    name = "embed"
    head = "bare"
    call = 'embed(["..."])'
    fields = ("text", "pair")
    uses = ("temperature",)
    optional_fields = ("negative",)
    needs_label = False
    allows_auxiliary = False

    def __init__(
        self, settings: TaskSettings, tokenizer: Tokenizer, *, causal: bool, options: TaskOptions | None = None
    ) -> None:
        super().__init__(settings, tokenizer, causal=causal, options=options)
        self.template = Template(tokenizer, ("{text}",), length=settings.length)
        self.truncation = self.template.truncation
        self.scored: bool | None = None  # whether pairs have numbers, by the first set that is encoded,
        self.top = 1.0  # and the largest of them, where that is above 1: cosines are at most 1

    # -- data

    @classmethod
    def matches(cls, table: Columns) -> bool:
        return table.has("text", "pair") and not table.has("label")

    @classmethod
    def target(cls, config: TaskConfig, train: Sequence[Example]) -> Target:
        return "number"

    def encode(self, examples: Sequence[Example]) -> LabelledRows:
        sides = [name for name in ("text", "pair", "negative") if name in examples[0].fields]
        texts = [Example({"text": e.fields[name]}, None, e.where) for e in examples for name in sides]
        rows = iter(self.template.rows(texts))
        items = [[next(rows)[0] for _ in sides] for _ in examples]
        if self.scored is None:
            self.scored = all(e.label is not None for e in examples) and "negative" not in sides
            self.top = max(1.0, *(number_or_zero(e.label) for e in examples)) if self.scored else 1.0
        numbers = np.array([number_or_zero(e.label) for e in examples], dtype=np.float32)
        return (LabelledRows if self.scored else ContrastRows)(items, numbers / np.float32(self.top))

    # -- learning

    def vectors(self, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        vectors = F.normalize(mean_pool(hidden, batch.lengths), dim=1)  # (R, D)
        return vectors.view(len(batch), len(batch.tokens) // len(batch), -1)  # (B, sides, D)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        texts = self.vectors(hidden, batch)
        if self.scored:
            return ((texts[:, 0] * texts[:, 1]).sum(dim=1) - batch.targets).square()
        others = texts[:, 1:].transpose(0, 1).flatten(0, 1)  # (B * (sides - 1), D), the positives first
        anchors = torch.arange(len(batch), device=texts.device) if batch.anchors is None else batch.anchors
        scores = texts[anchors, 0] @ others.T / self.options.temperature  # (A, B * (sides - 1))
        if batch.groups is not None:
            apart = batch.groups[anchors][:, None] != batch.groups  # (A, B)
            scores = scores.masked_fill(apart.repeat(1, texts.shape[1] - 1), IMPOSSIBLE)
        return F.cross_entropy(scores, anchors, reduction="none")

    def count(self, batch: LabelledBatch) -> float:
        return float(len(batch) if batch.anchors is None else len(batch.anchors))

    # -- predicting

    def predictions(
        self, model: Model, data: LabelledRows, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        for batch in batches:
            texts = self.vectors(hidden_states(model, batch), batch)
            cosines = texts[:, 0] @ texts[:, 1:].transpose(0, 1).flatten(0, 1).T  # (B, B * (sides - 1))
            nearest = cosines.argmax(dim=1)
            for row, number in enumerate(batch.numbers.tolist()):
                value = float(cosines[row, row])
                others = {"nearest": float(nearest[row] == row), "of": float(cosines.shape[1])}
                yield number, Prediction(value, {"score": value, **others})

    def row_error(self, example: Example, prediction: Prediction) -> float:
        if self.scored:
            return abs(float(example.label) / self.top - float(prediction.value))
        return 1.0 - prediction.scores["nearest"]

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        if self.scored:
            return tfidf_cosine(train, examples, self.fields)
        found = fitted(sampled(train), self.fields)
        return [] if found is None else [Baseline("TF-IDF cosine", self.nearest(found[0], examples))]

    def nearest(self, vectors: Any, examples: Sequence[Example]) -> dict[int, Prediction]:
        """Whether a text is nearest to its own pair by TF-IDF, among the texts that the model has in its batch."""
        sides = [name for name in ("text", "pair", "negative") if name in examples[0].fields]
        columns = [vectors.transform(column) for column in texts_of(examples, sides)]
        found = {}
        for batch in self.encode(examples).sweep(PREDICTED):
            numbers = batch.numbers.numpy()
            scores = np.hstack([(columns[0][numbers] @ c[numbers].T).toarray() for c in columns[1:]])
            for row, number in enumerate(numbers.tolist()):
                best, value = int(scores[row].argmax() == row), float(scores[row, row])
                found[number] = Prediction(value, {"score": value, "nearest": best, "of": scores.shape[1]})
        return found

    def metric(self) -> metrics.RegressionMetric | metrics.ChoiceMetric:
        return metrics.RegressionMetric() if self.scored else metrics.ChoiceMetric()

    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        if self.scored:
            metric.add(float(example.label) / self.top, prediction.value)
        else:
            metric.add(1, int(prediction.scores["nearest"]), int(prediction.scores["of"]))

    def measurable(self, example: Example) -> bool:
        return example.label is not None or not self.scored
