"""A label or a number for a text (classify), for two texts (pair), or for two in either order (similarity)."""

# B items, R rows, L labels, D model width

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plume.config import TaskConfig, UserError
from plume.model.heads import Classify, Model
from plume.tasks import baselines, few_shot, metrics
from plume.tasks.baselines import Baseline
from plume.tasks.schema import Columns, Example, Prediction, Target, TaskSettings
from plume.tasks.task_kind import PREDICTED, TaskKind, TaskOptions, hidden_states
from plume.tasks.token_rows import ContrastRows, LabelledBatch, LabelledRows, Template
from plume.text import Tokenizer

FEW_LABELLED = 20  # rows below which many labels are no mistake


@dataclass(frozen=True)
class Label:
    """The label of a text, its probability, and those of all labels."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


class ClassifyTask(TaskKind):
    """A label for a text. The rows of one item are summed before the head scores them."""

    name = "classify"
    head = "classify"
    call = 'classify(["..."])'
    fields: ClassVar[tuple[str, ...]] = ("text",)
    fields_by_content: ClassVar[tuple[str, ...]] = ("text", "label")
    auxiliary_weight = 0.5
    uses: ClassVar[tuple[str, ...]] = (
        *("class_weights", "label_smoothing", "tune_threshold"),
        *("template", "labels", "target"),
    )
    one_label: ClassVar[bool] = True  # of a row
    passes: ClassVar[tuple[str, ...]] = ("{text}",)
    bidirectional_passes: ClassVar[tuple[str, ...] | None] = None  # where a model that is not causal needs fewer

    def __init__(
        self, settings: TaskSettings, tokenizer: Tokenizer, *, causal: bool, options: TaskOptions | None = None
    ) -> None:
        super().__init__(settings, tokenizer, causal=causal, options=options)
        own = self.passes if causal or self.bidirectional_passes is None else self.bidirectional_passes
        self.template = Template(tokenizer, settings.template if settings.template else own, length=settings.length)
        self.truncation = self.template.truncation
        weights = self.options.class_weights
        self.class_weights = None if weights is None else torch.tensor(weights)

    # -- data

    @classmethod
    def matches(cls, table: Columns) -> bool:
        return table.has("text", "label")

    @classmethod
    def label_value(cls, value: Any, fields: Mapping[str, Any], column: str) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()

    @classmethod
    def target(cls, config: TaskConfig, train: Sequence[Example]) -> Target:
        if config.target is not None:
            return config.target
        numbers = [as_number(e.label) for e in train]
        fractions = any(n is not None and not n.is_integer() for n in numbers)
        return "number" if fractions and None not in numbers else "label"

    @classmethod
    def label_names(
        cls, config: TaskConfig, target: Target, train: Sequence[Example], columns: Mapping[str, str]
    ) -> tuple[str, ...]:
        if target == "number":
            return ("score",)
        return known_labels(config, Counter(e.label for e in train), columns[cls.label_field])

    @classmethod
    def check(cls, example: Example, labels: Sequence[str]) -> None:
        if isinstance(example.label, str):
            check_known(example, [example.label], labels)

    @classmethod
    def labels_of(cls, example: Example) -> list[str]:
        return [example.label] if isinstance(example.label, str) else []

    def encode(self, examples: Sequence[Example]) -> LabelledRows:
        rows = self.template.rows(examples)
        if self.settings.target == "number":
            return LabelledRows(rows, np.array([number_or_zero(e.label) for e in examples], dtype=np.float32))
        place = {label: i for i, label in enumerate(self.settings.labels)}
        targets = np.array([place.get(e.label, 0) for e in examples], dtype=np.int64)
        return (ContrastRows if self.options.contrastive else LabelledRows)(rows, targets)

    # -- learning

    def summaries(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        """What the head reads of each item, (B, D)."""
        assert isinstance(model.head, Classify)
        rows: Tensor = model.head.summary(hidden, batch.lengths)  # (R, D)
        if len(batch.tokens) == len(batch):
            return rows
        return rows.new_zeros(len(batch), rows.shape[1]).index_add(0, batch.items, rows)

    def logits(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        assert isinstance(model.head, Classify)
        return model.head.score(self.summaries(model, hidden, batch)).float()  # (B, L)

    @torch.no_grad()
    def fit_head(self, model: Model, rows: LabelledRows) -> None:
        """Replace the head's weights by those of a logistic regression on the rows."""
        assert isinstance(model.head, Classify)
        with model.eval_mode():
            batches = [batch.to(model.table.device) for batch in rows.sweep(PREDICTED)]
            found = [(self.summaries(model, hidden_states(model, b), b), b.targets) for b in batches]
        out = model.head.out
        weight, bias = few_shot.logistic_regression(
            torch.cat([x for x, _ in found]),
            torch.cat([y for _, y in found]),
            out.out_features,
            intercept=out.bias is not None,
        )
        out.weight.copy_(weight)
        if out.bias is not None:
            out.bias.copy_(bias)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        if self.options.contrastive:
            return few_shot.pair_losses(self.summaries(model, hidden, batch), batch)
        logits = self.logits(model, hidden, batch)
        if self.settings.target == "number":
            return (logits[:, 0] - batch.targets).square()
        smoothing = self.options.label_smoothing
        plain = F.cross_entropy(logits, batch.targets, reduction="none", label_smoothing=smoothing)
        weights = self.weights(batch)
        return plain if weights is None else plain * weights.to(plain.device)

    def weights(self, batch: LabelledBatch) -> Tensor | None:
        return None if self.class_weights is None else self.class_weights.to(batch.targets.device)[batch.targets]

    def count(self, batch: LabelledBatch) -> float:
        if self.options.contrastive:
            return float(len(batch) if batch.anchors is None else len(batch.anchors))
        weights = self.weights(batch)
        return float(len(batch)) if weights is None else float(weights.sum())

    # -- predicting

    def predictions(
        self, model: Model, data: LabelledRows, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        for batch in batches:
            logits = self.logits(model, hidden_states(model, batch), batch).cpu()
            if self.settings.target == "number":
                for number, value in zip(batch.numbers.tolist(), logits[:, 0].tolist(), strict=True):
                    yield number, Prediction(value, {"score": value})
                continue
            for number, probabilities in zip(batch.numbers.tolist(), logits.softmax(dim=1).tolist(), strict=True):
                scores = dict(zip(self.settings.labels, probabilities, strict=True))
                yield number, Prediction(self.settings.labels[self.chosen(probabilities)], scores)

    def chosen(self, probabilities: Sequence[float]) -> int:
        if self.settings.threshold is not None and len(probabilities) == 2:
            return int(probabilities[1] >= self.settings.threshold)
        return int(np.argmax(probabilities))

    def metric(self) -> metrics.ClassificationMetric | metrics.RegressionMetric:
        if self.settings.target == "number":
            return metrics.RegressionMetric()
        return metrics.ClassificationMetric(self.settings.labels)

    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        if self.settings.target == "number":
            metric.add(float(example.label), prediction.value)
        else:
            labels = self.settings.labels
            metric.add(labels.index(example.label), labels.index(prediction.value))

    def row_error(self, example: Example, prediction: Prediction) -> float:
        if self.settings.target == "number":
            return abs(float(example.label) - float(prediction.value))
        return super().row_error(example, prediction)

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        if self.settings.target == "number":
            return [baselines.mean_target(train, examples), *baselines.tfidf_numbers(train, examples, self.fields)]
        first = baselines.most_frequent_label(train, examples)
        return [first, *baselines.tfidf_labels(train, examples, self.fields, self.settings.labels)]

    def constant_loss(self, train: Sequence[Example]) -> float | None:
        if self.options.contrastive:
            return None  # the training loss is that of pairs
        if self.settings.target == "number":
            return float(np.var([e.label for e in train]))
        return super().constant_loss(train)

    def tuned(
        self, examples: Sequence[Example], predict: Callable[[], Mapping[int, Prediction]], metric: str
    ) -> TaskSettings:
        """With the probability from which the second of two labels is predicted, if that option is on."""
        if not self.options.tune_threshold or len(self.settings.labels) != 2:
            return self.settings
        second, given = self.settings.labels[1], predict()
        scores = [given[i].scores[second] for i in range(len(examples))]
        chosen = metrics.best_threshold(scores, [e.label == second for e in examples], metric)
        return replace(self.settings, threshold=chosen)

    def answers(self, predictions: Sequence[Prediction]) -> list[Label] | list[float]:
        """Predictions as `lm.classify` returns them."""
        if self.settings.target == "number":
            return [float(p.value) for p in predictions]
        return [Label(p.value, p.scores[p.value], p.scores) for p in predictions]


class PairTask(ClassifyTask):
    """A label for two texts that are read in one row."""

    name = "pair"
    call = 'classify(["..."], ["..."])'
    fields = ("text", "pair")
    fields_by_content = ()
    passes: ClassVar[tuple[str, ...]] = ("{text} | {pair}",)

    @classmethod
    def matches(cls, table: Columns) -> bool:
        return table.has("text", "pair", "label")


class SimilarityTask(PairTask):
    """A label or number for two texts whose order does not matter: a causal model reads both orders."""

    name = "similarity"
    head = "similarity"
    call = 'similarity(["..."], ["..."])'
    passes = ("{text} | {pair}", "{pair} | {text}")
    bidirectional_passes = ("{text} | {pair}",)

    @classmethod
    def matches(cls, table: Columns) -> bool:
        return False  # columns do not distinguish it from a pair


def as_number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def number_or_zero(value: Any) -> float:
    return 0.0 if value is None else float(value)


def known_labels(config: TaskConfig, seen: Counter[str], column: str) -> tuple[str, ...]:
    """The labels in their order: as configured, else numbers by size and then texts."""
    labels = config.labels if config.labels else tuple(sorted(seen, key=natural_order))
    if len(seen) < 2:
        what = f"every training row has the label {next(iter(seen))!r}" if seen else "no training row has a label"
        raise UserError(
            f"{what}; a classifier needs at least two labels: add rows, or name another column than {column!r}: "
            "--task.columns.label NAME"
        )
    if sum(seen.values()) >= FEW_LABELLED and 2 * len(seen) > sum(seen.values()):
        raise UserError(
            f"column {column!r} has {len(seen):,} different labels in {sum(seen.values()):,} training rows, like an "
            "id or a number; name another column: --task.columns.label NAME, or predict numbers: --task.target number"
        )
    if absent := [label for label in labels if label not in seen]:
        raise UserError(f"task.labels names {', '.join(map(repr, absent))}, which no training row has")
    return labels


def natural_order(label: str) -> tuple[int, float, str]:
    number = as_number(label)
    return (1, 0.0, label) if number is None else (0, number, label)


def check_known(example: Example, given: Sequence[str], labels: Sequence[str]) -> None:
    for label in given:
        if label not in labels:
            raise UserError(
                f"{example.where}: the label {label!r} is in no training row; known: {', '.join(labels[:20])}"
            )
