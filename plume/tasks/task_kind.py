"""What every kind of task has: its columns, rows, losses, predictions and metric."""

# B items, R rows, T tokens, D model width

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from plume.config import TaskConfig
from plume.data.tables import Row, Tally
from plume.model.heads import Model
from plume.model.ragged import LengthGroups
from plume.model.transformer import Transformer
from plume.tasks import metrics
from plume.tasks.baselines import Baseline
from plume.tasks.schema import Columns, Example, Prediction, Target, TaskSettings, text_value
from plume.tasks.token_rows import LabelledBatch, TaskRows, Truncation
from plume.text import Tokenizer

PREDICTED = 64  # items at a time
RowReader = Callable[[Path, str | None], Iterator[tuple[str, Row]]]


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of fine-tuning that kinds of task read; predicting needs none of them."""

    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    temperature: float = 0.05
    beams: int = 4
    tune_threshold: bool = False
    contrastive: bool = False  # the loss is that of pairs of rows, and the head is fitted afterwards


class TaskKind(ABC):
    """One kind of task with one model's tokenizer. Class attributes and class methods describe its data."""

    name: ClassVar[str]
    head: ClassVar[str]  # of the model, see plume.model.heads
    call: ClassVar[str]  # of LM, to predict with a fine-tuned model
    fields: ClassVar[tuple[str, ...]]
    optional_fields: ClassVar[tuple[str, ...]] = ()
    label_field: ClassVar[str] = "label"
    needs_label: ClassVar[bool] = True
    fields_by_content: ClassVar[tuple[str, ...]] = ()  # found by what a column holds where no name is usual
    encoder_decoder: ClassVar[bool] = False  # for such models,
    decoder_only: ClassVar[bool] = False  # and for a GPT, which then writes instead of having a new head
    auxiliary_weight: ClassVar[float] = 0.0  # of a GPT's language-model loss beside the task's
    allows_auxiliary: ClassVar[bool] = True
    uses: ClassVar[tuple[str, ...]] = ()  # options that not every kind has, see KIND_OPTIONS of plume.train
    selects_by_metric: ClassVar[bool] = True  # the best checkpoint; otherwise the validation loss does
    overflow: ClassVar[str] = "truncated at the end of their longest text"
    truncates: ClassVar[bool] = True  # whether text of a long row is lost
    truncation: Truncation

    def __init__(
        self, settings: TaskSettings, tokenizer: Tokenizer, *, causal: bool, options: TaskOptions | None = None
    ) -> None:
        self.settings, self.tokenizer, self.causal = settings, tokenizer, causal
        self.options = TaskOptions() if options is None else options

    # -- data

    @classmethod
    def matches(cls, table: Columns) -> bool:
        """Whether a table looks like this kind."""
        return False

    @classmethod
    def reader(cls, path: Path, config: TaskConfig, skipped: Tally) -> RowReader | None:
        """What reads a file of a format that only this kind has; None: it is no such file."""
        return None

    @classmethod
    def joined_columns(cls, field: str, columns: Sequence[str]) -> str:
        """Columns that make one field together, joined by +."""
        return ""

    @classmethod
    def field_value(cls, field: str, row: Row, column: str) -> Any:
        return text_value(row[column], column)

    @classmethod
    def label_value(cls, value: Any, fields: Mapping[str, Any], column: str) -> Any:
        """The label of a row in the form of this kind; what is wrong with it is a UserError."""
        return str(value).strip()

    @classmethod
    def target(cls, config: TaskConfig, train: Sequence[Example]) -> Target:
        return "label"

    @classmethod
    def label_names(
        cls, config: TaskConfig, target: Target, train: Sequence[Example], columns: Mapping[str, str]
    ) -> tuple[str, ...]:
        return ()

    @classmethod
    def fields_from(cls, text: str, pair: str | None) -> dict[str, Any]:
        """The fields of a row that is given as one text or two."""
        return dict(zip(cls.fields, (text, pair), strict=False))

    @classmethod
    def check(cls, example: Example, labels: Sequence[str]) -> None:
        """Refuse an example that cannot be used with these labels."""
        return

    @classmethod
    def labels_of(cls, example: Example) -> list[str]:
        """The labels whose balance a report shows."""
        return []

    @classmethod
    def settings_for(cls, settings: TaskSettings, examples: Sequence[Example]) -> TaskSettings:
        """The settings with what follows from the examples."""
        return settings

    # -- learning

    @abstractmethod
    def encode(self, examples: Sequence[Example]) -> Any:
        """The examples as rows that can be batched."""

    def hidden(self, model: Model, batch: Any) -> Tensor:
        return hidden_states(model, batch)  # (R, T, D)

    @abstractmethod
    def losses(self, model: Model, hidden: Tensor, batch: Any) -> Tensor:
        """The losses of the batch, weights applied; they are summed."""

    def count(self, batch: Any) -> float:
        """What the summed losses are divided by."""
        return float(len(batch))

    # -- predicting

    @abstractmethod
    def predictions(
        self, model: Model, data: Any, examples: Sequence[Example], batches: Iterator[Any]
    ) -> Iterator[tuple[int, Prediction]]:
        """(index of the example, prediction), in any order, as the batches come."""

    @abstractmethod
    def metric(self) -> Any:
        """A plume.tasks.metrics.TaskMetric without any prediction yet."""

    @abstractmethod
    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        """Add one prediction to the metric."""

    def measurable(self, example: Example) -> bool:
        return example.label is not None

    def row_error(self, example: Example, prediction: Prediction) -> float:
        """How wrong one prediction is; 0: correct."""
        return 0.0 if prediction.value == example.label else prediction.scores.get(str(prediction.value), 1.0)

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        """Predictions of models that need no training steps, constants first."""
        return []

    def constant_loss(self, train: Sequence[Example]) -> float | None:
        """The mean loss of the best predictions that ignore the input; None: not defined."""
        counts = np.array([*Counter(label for e in train for label in self.labels_of(e)).values()], dtype=np.float64)
        if not len(counts):
            return None
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def tuned(
        self, examples: Sequence[Example], predict: Callable[[], Mapping[int, Prediction]], metric: str
    ) -> TaskSettings:
        """The settings with thresholds chosen on labelled examples."""
        return self.settings


def hidden_states(model: Model, batch: LabelledBatch) -> Tensor:
    """(R, T, D); those of padding mean nothing."""
    segments = batch.segments if model.config.segments > 1 else None
    assert isinstance(model.body, Transformer)
    rows = LengthGroups(batch.tokens, batch.lengths, segments, causal=model.config.causal)
    return model.body.read_ragged(rows)


# ---- predictions and metrics of a set ----------------------------------------------------------------------------


@torch.no_grad()
def predict(kind: TaskKind, model: Model, data: TaskRows, examples: Sequence[Example]) -> dict[int, Prediction]:
    """The prediction for every example. Logits exist for one batch only."""
    device = next(model.parameters()).device
    batches = (batch.to(device) for batch in data.sweep(PREDICTED))
    return dict(kind.predictions(model, data, examples, batches))


def evaluate(kind: TaskKind, examples: Sequence[Example], predictions: Mapping[int, Prediction]) -> metrics.TaskMetric:
    """The metric of predictions, over the examples that have a label."""
    metric: metrics.TaskMetric = kind.metric()
    for number, prediction in predictions.items():
        if kind.measurable(examples[number]):
            kind.update(metric, examples[number], prediction)
    return metric
