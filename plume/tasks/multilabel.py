"""Any number of labels for a text, each with a probability and a threshold of its own."""

# B items, L labels

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from plume.config import TaskConfig, UserError
from plume.model.heads import Model
from plume.tasks import baselines
from plume.tasks.baselines import Baseline
from plume.tasks.classify import ClassifyTask, Label, check_known, known_labels
from plume.tasks.metrics import best_threshold
from plume.tasks.schema import Columns, Example, Prediction, Target, TaskSettings
from plume.tasks.task_kind import hidden_states
from plume.tasks.token_rows import LabelledBatch, LabelledRows

SEPARATOR = ";"
USUAL = 0.5  # threshold


class MultiLabelMetric:
    """F1 over all decisions (micro), the mean F1 of the labels (macro), and the share of rows with no mistake."""

    main = "f1_micro"

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.counts = np.zeros((3, len(labels)))  # correct, predicted, gold
        self.exact = self.total = 0
        self.sets = Counter[bytes]()  # gold ones

    def add(self, gold: Sequence[str], predicted: Sequence[str]) -> None:
        wanted, found = (np.array([label in given for label in self.labels]) for given in (gold, predicted))
        self.counts += [wanted & found, found, wanted]
        self.exact += bool((wanted == found).all())
        self.sets[wanted.tobytes()] += 1
        self.total += 1

    def results(self) -> dict[str, float]:
        correct, sizes = self.counts[0], self.counts[1] + self.counts[2]
        each = np.divide(2 * correct, sizes, out=np.zeros_like(correct), where=sizes > 0)
        micro = 2 * correct.sum() / max(sizes.sum(), 1)
        exact = self.exact / max(self.total, 1)
        return {"f1_micro": float(micro), "f1_macro": float(each.mean()), "exact_match": exact}

    def baseline(self, name: str) -> float:
        """The best that one set of labels for all rows reaches: the most frequent set, or the most frequent labels."""
        if name == "exact_match":
            return max(self.sets.values(), default=0) / max(self.total, 1)
        gold = self.counts[2]
        if name == "f1_macro":  # of every label
            return float((2 * gold / np.maximum(gold + self.total, 1)).mean())
        kept, count = np.sort(gold)[::-1].cumsum(), np.arange(1, len(gold) + 1)  # of the first so many labels
        return float((2 * kept / np.maximum(self.total * count + gold.sum(), 1)).max())


class MultiLabelTask(ClassifyTask):
    """Any number of labels for a text: `a;b`, `;` for none, or a list. A sigmoid per label instead of a softmax."""

    name = "multilabel"
    call = "predict([{'text': '...'}])"
    uses = ("tune_threshold", "template", "labels")
    one_label = False

    @classmethod
    def matches(cls, table: Columns) -> bool:
        column = table.of("label")
        given = [row.get(column) for row in table.rows] if column else []
        lists = any(isinstance(value, list) for value in given)
        parts = Counter(part for v in given if isinstance(v, str) for part in split_labels(v))
        joined = any(isinstance(v, str) and len(split_labels(v)) > 1 for v in given) and max(parts.values()) > 1
        return table.has("text", "label") and (lists or joined)

    @classmethod
    def label_value(cls, value: Any, fields: Mapping[str, Any], column: str) -> Any:
        given = [str(v).strip() for v in value] if isinstance(value, list) else split_labels(str(value))
        return sorted(set(given))

    @classmethod
    def target(cls, config: TaskConfig, train: Sequence[Example]) -> Target:
        return "label"

    @classmethod
    def label_names(
        cls, config: TaskConfig, target: Target, train: Sequence[Example], columns: Mapping[str, str]
    ) -> tuple[str, ...]:
        return known_labels(config, Counter(label for e in train for label in e.label), columns[cls.label_field])

    @classmethod
    def check(cls, example: Example, labels: Sequence[str]) -> None:
        check_known(example, cls.labels_of(example), labels)

    @classmethod
    def labels_of(cls, example: Example) -> list[str]:
        return list(example.label or ())

    def encode(self, examples: Sequence[Example]) -> LabelledRows:
        return LabelledRows(self.template.rows(examples), self.indicators(examples).astype(np.float32))

    def indicators(self, examples: Sequence[Example]) -> baselines.Floats:
        """(N, L) 1 where a row has a label."""
        return np.array([[float(label in (e.label or ())) for label in self.settings.labels] for e in examples])

    # -- learning

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        logits = self.logits(model, hidden, batch)
        return F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="none").mean(dim=1)

    def weights(self, batch: LabelledBatch) -> Tensor | None:
        return None

    def constant_loss(self, train: Sequence[Example]) -> float | None:
        shares = self.indicators(train).mean(axis=0).clip(1e-9, 1 - 1e-9)
        return float(-(shares * np.log(shares) + (1 - shares) * np.log(1 - shares)).mean())

    # -- predicting

    def predictions(
        self, model: Model, data: LabelledRows, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        for batch in batches:
            rows = self.logits(model, hidden_states(model, batch), batch).cpu().sigmoid().tolist()  # (B, L)
            for number, row in zip(batch.numbers.tolist(), rows, strict=True):
                scores = dict(zip(self.settings.labels, row, strict=True))
                yield number, Prediction(self.above(scores), scores)

    def above(self, scores: Mapping[str, float]) -> list[str]:
        """The labels whose probability reaches their threshold."""
        limits = self.settings.thresholds if self.settings.thresholds else [USUAL] * len(self.settings.labels)
        return [label for label, limit in zip(self.settings.labels, limits, strict=True) if scores[label] >= limit]

    def metric(self) -> Any:
        return MultiLabelMetric(self.settings.labels)

    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add(example.label, prediction.value)

    def row_error(self, example: Example, prediction: Prediction) -> float:
        return float(len({*example.label} ^ {*prediction.value}))

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        usual = Counter(tuple(e.label) for e in train).most_common(1)[0][0]
        constant = baselines.each("most frequent labels", examples, lambda e: list(usual))
        labels, marks = self.settings.labels, self.indicators(train)
        return [constant, *baselines.tfidf_label_sets(train, examples, self.fields, labels, marks)]

    def answers(self, predictions: Sequence[Prediction]) -> list[Label] | list[float]:
        raise UserError(f"this model predicts any number of labels; use lm.{self.call}, or POST /v1/predict")

    def tuned(
        self, examples: Sequence[Example], predict: Callable[[], Mapping[int, Prediction]], metric: str
    ) -> TaskSettings:
        """With the threshold of each label that gives its highest F1, if that option is on."""
        if not self.options.tune_threshold:
            return self.settings
        given, marks = predict(), self.indicators(examples)
        limits = [
            best_threshold([given[n].scores[label] for n in range(len(examples))], marks[:, place] > 0, "f1")
            for place, label in enumerate(self.settings.labels)
        ]
        return replace(self.settings, thresholds=tuple(limits))


def split_labels(text: str) -> list[str]:
    return [part.strip() for part in text.split(SEPARATOR) if part.strip()]
