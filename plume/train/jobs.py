"""What each kind of task asks of a model: its rows, its loss, and how its answers are read and measured."""

# B items, R rows, T tokens, L labels, C choices, D model width

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plume.config import UserError
from plume.data.examples import Example, Kind, Target
from plume.data.transform import NO_LABEL, Cut, TagTransform, Transform
from plume.heads import Classify, Model, mean_pool
from plume.text import Tokenizer
from plume.train import metrics
from plume.train.labelled import Labelled, LabelledBatch

IMPOSSIBLE = float("-inf")


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """All that is kept beside the weights, so that answers can be given again."""

    kind: Kind
    target: Target = "label"
    labels: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    length: int
    stride: int | None = None
    question_length: int = 64
    answer_length: int = 30
    threshold: float | None = None  # probability from which the second of two labels is given
    null_threshold: float | None = None  # how much better no answer must be than the best one; unset: always answer


def settings_from(table: dict[str, Any]) -> JobSettings:
    return JobSettings(**{**table, "labels": tuple(table["labels"]), "template": tuple(table["template"])})


@dataclass(frozen=True)
class Prediction:
    """The answer to one item: a label, number, place, list of tags or text, with what the model gave each option."""

    value: Any
    scores: Mapping[str, float]


def hidden_states(model: Model, batch: LabelledBatch) -> Tensor:
    segments = batch.segments if model.config.segments > 1 else None
    return model.body(batch.tokens, segments=segments, lengths=batch.lengths)  # (R, T, D)


class Job(ABC):
    """One kind of task on one model's tokenizer."""

    head: str
    cut: Cut
    judged = True  # whether the metric picks the best weights during training; if not, the loss does

    def __init__(self, settings: JobSettings, tokenizer: Tokenizer, *, causal: bool) -> None:
        self.settings, self.tokenizer, self.causal = settings, tokenizer, causal

    @abstractmethod
    def encode(self, examples: Sequence[Example]) -> Any:
        """The examples as rows that can be batched."""

    @abstractmethod
    def predictions(
        self, model: Model, data: Any, examples: Sequence[Example], batches: Iterator[Any]
    ) -> Iterator[tuple[int, Prediction]]:
        """(number of the example, answer), in any order, as the batches come."""

    @abstractmethod
    def metric(self) -> Any: ...

    @abstractmethod
    def judge(self, metric: Any, example: Example, prediction: Prediction) -> None: ...


class RowJob(Job):
    """A task whose loss is read off the hidden states of labelled rows."""

    @abstractmethod
    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        """The loss of each thing that is to be answered; weights are laid on already."""

    def counts(self, batch: LabelledBatch) -> float:
        """What the summed losses are divided by."""
        return float(len(batch))


class LabelJob(RowJob):
    """A label or a number for a text or two. Passes of one item are summed before the head scores them."""

    def __init__(
        self,
        settings: JobSettings,
        tokenizer: Tokenizer,
        *,
        causal: bool,
        class_weights: Sequence[float] | None = None,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(settings, tokenizer, causal=causal)
        self.transform = Transform(
            tokenizer, settings.kind, length=settings.length, causal=causal, template=settings.template
        )
        self.cut = self.transform.cut
        self.head = "similarity" if settings.kind == "similarity" else "classify"
        self.class_weights = None if class_weights is None else torch.tensor(class_weights)
        self.smoothing = smoothing

    def encode(self, examples: Sequence[Example]) -> Labelled:
        rows = self.transform.rows(examples)
        if self.settings.target == "number":
            return Labelled(rows, np.array([_number(e.label) for e in examples], dtype=np.float32))
        place = {label: i for i, label in enumerate(self.settings.labels)}
        return Labelled(rows, np.array([place.get(e.label, 0) for e in examples], dtype=np.int64))

    def logits(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        assert isinstance(model.head, Classify)
        summaries = model.head.summary(hidden, batch.lengths)  # (R, D)
        if len(batch.tokens) > len(batch):
            empty = summaries.new_zeros(len(batch), summaries.shape[1])
            summaries = empty.index_add(0, batch.items, summaries)  # (B, D)
        return model.head.score(summaries).float()  # (B, L)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        logits = self.logits(model, hidden, batch)
        if self.settings.target == "number":
            return (logits[:, 0] - batch.targets).square()
        plain = F.cross_entropy(logits, batch.targets, reduction="none", label_smoothing=self.smoothing)
        weights = self.weights(batch)
        return plain if weights is None else plain * weights.to(plain.device)

    def weights(self, batch: LabelledBatch) -> Tensor | None:
        return None if self.class_weights is None else self.class_weights.to(batch.targets.device)[batch.targets]

    def counts(self, batch: LabelledBatch) -> float:
        weights = self.weights(batch)
        return float(len(batch)) if weights is None else float(weights.sum())

    def predictions(
        self, model: Model, data: Labelled, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        for batch in batches:
            logits = self.logits(model, hidden_states(model, batch), batch).cpu()
            if self.settings.target == "number":
                for number, value in zip(batch.numbers.tolist(), logits[:, 0].tolist(), strict=True):
                    yield number, Prediction(value, {"score": value})
                continue
            for number, chances in zip(batch.numbers.tolist(), logits.softmax(dim=1).tolist(), strict=True):
                scores = dict(zip(self.settings.labels, chances, strict=True))
                yield number, Prediction(self.settings.labels[self.pick(chances)], scores)

    def pick(self, chances: Sequence[float]) -> int:
        if self.settings.threshold is not None and len(chances) == 2:
            return int(chances[1] >= self.settings.threshold)
        return int(np.argmax(chances))

    def metric(self) -> metrics.Labels | metrics.Numbers:
        return metrics.Numbers() if self.settings.target == "number" else metrics.Labels(self.settings.labels)

    def judge(self, metric: Any, example: Example, prediction: Prediction) -> None:
        if self.settings.target == "number":
            metric.add(float(example.label), prediction.value)
        else:
            labels = self.settings.labels
            metric.add(labels.index(example.label), labels.index(prediction.value))


def _number(value: Any) -> float:
    return 0.0 if value is None else float(value)


class ChooseJob(RowJob):
    """One of several candidates: each is read in a row of its own, and a softmax goes over them."""

    head = "choose"

    def __init__(self, settings: JobSettings, tokenizer: Tokenizer, *, causal: bool) -> None:
        super().__init__(settings, tokenizer, causal=causal)
        self.transform = Transform(
            tokenizer, "choose", length=settings.length, causal=causal, template=settings.template
        )
        self.cut = self.transform.cut
        if len(self.transform.passes) != 1:
            raise UserError("a choose task has one pass: its template is one line")

    def encode(self, examples: Sequence[Example]) -> Labelled:
        targets = np.array([0 if e.label is None else e.label for e in examples], dtype=np.int64)
        return Labelled(self.transform.rows(examples), targets)

    def logits(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        scores = model.read(hidden, batch.lengths).float()  # (R,)
        counts = torch.bincount(batch.items, minlength=len(batch))  # candidates of each item; they need not be equal
        first = counts.cumsum(0) - counts
        place = torch.arange(len(scores), device=scores.device) - first[batch.items]
        table = scores.new_full((len(batch), int(counts.max())), IMPOSSIBLE)
        return table.index_put((batch.items, place), scores)  # (B, C)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        return F.cross_entropy(self.logits(model, hidden, batch), batch.targets, reduction="none")

    def predictions(
        self, model: Model, data: Labelled, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        for batch in batches:
            chances = self.logits(model, hidden_states(model, batch), batch).cpu().softmax(dim=1)
            for number, row in zip(batch.numbers.tolist(), chances.tolist(), strict=True):
                real = row[: len(examples[number].fields["choices"])]
                yield number, Prediction(int(np.argmax(real)), {str(i): p for i, p in enumerate(real)})

    def metric(self) -> metrics.Choices:
        return metrics.Choices()

    def judge(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add(example.label, prediction.value, len(example.fields["choices"]))


class TagJob(RowJob):
    """A tag for every word, read off its first piece."""

    head = "tag"

    def __init__(self, settings: JobSettings, tokenizer: Tokenizer, *, causal: bool) -> None:
        super().__init__(settings, tokenizer, causal=causal)
        self.transform = TagTransform(tokenizer, length=settings.length)
        self.cut = self.transform.cut

    def encode(self, examples: Sequence[Example]) -> Labelled:
        place = {label: i for i, label in enumerate(self.settings.labels)}
        items, tags, about = [], [], list[tuple[int, int]]()  # about: a row's sentence and its first word
        for number, cuts in enumerate(self.transform.rows([e.fields["words"] for e in examples])):
            for cut in cuts:
                marks = np.full(len(cut.row.tokens), NO_LABEL, dtype=np.int64)
                words = range(cut.first_word, cut.first_word + len(cut.places))
                given = examples[number].label
                marks[cut.places] = [0 if given is None else place[given[word]] for word in words]
                items.append([cut.row])
                tags.append(marks)
                about.append((number, cut.first_word))
        return Labelled(items, tags=tags, about=about)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        first_pieces = batch.targets != NO_LABEL
        logits = model.read(hidden)[first_pieces].float()  # (words, L)
        return F.cross_entropy(logits, batch.targets[first_pieces], reduction="none")

    def counts(self, batch: LabelledBatch) -> float:
        return float((batch.targets != NO_LABEL).sum())

    def predictions(
        self, model: Model, data: Labelled, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        pending: dict[int, list[str | None]] = {}
        for batch in batches:
            best = model.read(hidden_states(model, batch)).argmax(dim=2).cpu()  # (R, T)
            marked = (batch.targets != NO_LABEL).cpu()
            for row, item in enumerate(batch.numbers.tolist()):
                number, first = data.about[item]
                words = len(examples[number].fields["words"])
                tags = pending.setdefault(number, [None] * words)
                for offset, label in enumerate(best[row][marked[row]].tolist()):
                    tags[first + offset] = self.settings.labels[label]
                if None not in tags:
                    yield number, Prediction(pending.pop(number), {})

    def metric(self) -> metrics.Entities:
        return metrics.Entities()

    def judge(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add(example.label, prediction.value)


class EmbedJob(RowJob):
    """A vector for a text: the mean over its tokens. Texts that belong together are to be near each other.

    With a number for each pair its cosine is fitted; without, every other text of the batch is a wrong answer.
    """

    head = "bare"

    def __init__(self, settings: JobSettings, tokenizer: Tokenizer, *, causal: bool, temperature: float = 0.05) -> None:
        super().__init__(settings, tokenizer, causal=causal)
        self.transform = Transform(tokenizer, "embed", length=settings.length, causal=causal)
        self.cut = self.transform.cut
        self.temperature = temperature
        self.scored: bool | None = None  # whether pairs come with numbers, as the first set read says,
        self.top = 1.0  # and the largest of them, where that is above 1: cosines end there

    def encode(self, examples: Sequence[Example]) -> Labelled:
        sides = [name for name in ("text", "pair", "negative") if name in examples[0].fields]
        texts = [Example({"text": e.fields[name]}, None, e.where) for e in examples for name in sides]
        rows = iter(self.transform.rows(texts))
        items = [[next(rows)[0] for _ in sides] for _ in examples]
        if self.scored is None:
            self.scored = all(e.label is not None for e in examples) and "negative" not in sides
            self.top = max(1.0, *(_number(e.label) for e in examples)) if self.scored else 1.0
        numbers = np.array([_number(e.label) for e in examples], dtype=np.float32)
        return Labelled(items, numbers / np.float32(self.top))

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        vectors = F.normalize(mean_pool(hidden, batch.lengths), dim=1)  # (R, D)
        sides = len(batch.tokens) // len(batch)
        texts = vectors.view(len(batch), sides, -1)
        if self.scored:
            return ((texts[:, 0] * texts[:, 1]).sum(dim=1) - batch.targets).square()
        others = texts[:, 1:].transpose(0, 1).flatten(0, 1)  # (B * (sides - 1), D), the right ones first
        scores = texts[:, 0] @ others.T / self.temperature
        return F.cross_entropy(scores, torch.arange(len(batch), device=scores.device), reduction="none")

    def predictions(
        self, model: Model, data: Labelled, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        for batch in batches:
            vectors = F.normalize(mean_pool(hidden_states(model, batch), batch.lengths), dim=1)
            texts = vectors.view(len(batch), -1, vectors.shape[1])
            cosines = texts[:, 0] @ texts[:, 1:].transpose(0, 1).flatten(0, 1).T  # (B, B * (sides - 1))
            nearest = cosines.argmax(dim=1)
            for row, number in enumerate(batch.numbers.tolist()):
                value = float(cosines[row, row])
                others = {"nearest": float(nearest[row] == row), "of": float(cosines.shape[1])}
                yield number, Prediction(value, {"score": value, **others})

    def metric(self) -> metrics.Numbers | metrics.Choices:
        return metrics.Numbers() if self.scored else metrics.Choices()

    def judge(self, metric: Any, example: Example, prediction: Prediction) -> None:
        if self.scored:
            metric.add(float(example.label) / self.top, prediction.value)
        else:
            metric.add(1, int(prediction.scores["nearest"]), int(prediction.scores["of"]))
