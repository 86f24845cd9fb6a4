"""One of several candidates: each is read in a row of its own, with a softmax over them."""

# B items, R rows, C choices

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plume.config import TaskConfig, UserError
from plume.data.tables import Row
from plume.model.heads import Model
from plume.tasks import baselines, metrics
from plume.tasks.baselines import Baseline
from plume.tasks.classify import as_number
from plume.tasks.schema import Columns, Example, Prediction, Target, TaskSettings, text_list
from plume.tasks.task_kind import TaskKind, TaskOptions, hidden_states
from plume.tasks.token_rows import IMPOSSIBLE, LabelledBatch, LabelledRows, Template
from plume.text import Tokenizer

NUMBERED = re.compile(r"(choice|ending|option|answer|sol|RandomFifthSentenceQuiz)_?(\d+|[A-E])$", re.IGNORECASE)
LETTERS = "ABCDEFGHIJ"


@dataclass(frozen=True)
class Choice:
    """The index and text of the chosen candidate, and the probability of each."""

    index: int
    text: str
    probabilities: tuple[float, ...]


class ChooseTask(TaskKind):
    """One of several candidates."""

    name = "choose"
    head = "choose"
    call = 'choose("...", ["...", "..."])'
    fields = ("context", "choices")
    uses = ("template",)
    optional_fields = ("question",)
    auxiliary_weight = 0.5

    def __init__(
        self, settings: TaskSettings, tokenizer: Tokenizer, *, causal: bool, options: TaskOptions | None = None
    ) -> None:
        super().__init__(settings, tokenizer, causal=causal, options=options)
        passes = settings.template if settings.template else ("{context} {question} | {choice}",)
        self.template = Template(tokenizer, passes, length=settings.length)
        self.truncation = self.template.truncation
        if len(self.template.passes) != 1 or "choice" not in self.template.passes[0].fields:
            raise UserError("the template of a choose task is one line with {choice} in it")

    # -- data

    @classmethod
    def matches(cls, table: Columns) -> bool:
        numbered = bool(cls.joined_columns("choices", list(table.rows[0])))
        return table.has("context") and (numbered or table.holds_lists("choices"))

    @classmethod
    def joined_columns(cls, field: str, columns: Sequence[str]) -> str:
        matches = [found for column in columns if (found := NUMBERED.match(column))] if field == "choices" else []
        matches.sort(key=lambda m: (m[1], len(m[2]), m[2]))  # 2 before 10
        return "+".join(m.string for m in matches) if len(matches) > 1 else ""

    @classmethod
    def field_value(cls, field: str, row: Row, column: str) -> Any:
        if field != "choices":
            return super().field_value(field, row, column)
        value = [row.get(c) for c in column.split("+")] if "+" in column else row[column]
        if isinstance(value, Mapping):  # the hub's form: {"text": [...], "label": [...]}
            value = value.get("text")
        if not isinstance(value, list) or len(value) < 2:
            raise UserError(f"{column} should hold at least two candidates, not {value!r}")
        return text_list(value, column)

    @classmethod
    def fields_from(cls, text: str, pair: str | None) -> dict[str, Any]:
        """The second text holds a choice in each line."""
        return {"context": text, "choices": [line for line in (pair or "").splitlines() if line.strip()]}

    @classmethod
    def label_value(cls, value: Any, fields: Mapping[str, Any], column: str) -> int:
        """The index of the correct choice from an integer (from 0), a letter, or its text."""
        choices = fields["choices"]
        index = _index(value)
        if isinstance(value, str) and value in choices:
            found = choices.index(value)
            if index is not None and index != found and 0 <= index < len(choices):
                raise UserError(
                    f"the label {value!r} is the text of choice {found} and the index of another; give the label as "
                    "a number in JSON for an index, or as a letter from A on"
                )
            return int(found)
        letters = LETTERS[: len(choices)]
        if str(value) in tuple(letters):
            return letters.index(str(value))
        if index is None:
            raise UserError(f"the label {value!r} is neither an index, a letter nor the text of a choice")
        if not 0 <= index <= len(choices):
            raise UserError(f"the label {value!r} is outside the {len(choices)} choices; indices start at 0")
        return index

    @classmethod
    def label_names(
        cls, config: TaskConfig, target: Target, train: Sequence[Example], columns: Mapping[str, str]
    ) -> tuple[str, ...]:
        """None; but labels that seem to start at 1 are refused."""
        top = [e for e in train if e.label == len(e.fields["choices"])]
        if top and not any(e.label == 0 for e in train):
            raise UserError(
                f"{top[0].where}: labels seem to start at 1, the label {top[0].label} being the last choice; "
                "start at 0, or give the text of the correct choice"
            )
        return ()

    @classmethod
    def check(cls, example: Example, labels: Sequence[str]) -> None:
        if example.label == len(example.fields["choices"]):
            raise UserError(f"{example.where}: the label {example.label} is outside its choices; indices start at 0")

    def encode(self, examples: Sequence[Example]) -> LabelledRows:
        targets = np.array([0 if e.label is None else e.label for e in examples], dtype=np.int64)
        return LabelledRows(self.template.rows(examples), targets)

    # -- learning

    def logits(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        scores = model.read(hidden, batch.lengths).float()  # (R,)
        counts = torch.bincount(batch.items, minlength=len(batch))  # candidates of each item, which may differ
        first = counts.cumsum(0) - counts
        place = torch.arange(len(scores), device=scores.device) - first[batch.items]
        table = scores.new_full((len(batch), int(counts.max())), IMPOSSIBLE)
        return table.index_put((batch.items, place), scores)  # (B, C)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        return F.cross_entropy(self.logits(model, hidden, batch), batch.targets, reduction="none")

    # -- predicting

    def predictions(
        self, model: Model, data: LabelledRows, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        for batch in batches:
            probabilities = self.logits(model, hidden_states(model, batch), batch).cpu().softmax(dim=1)
            for number, row in zip(batch.numbers.tolist(), probabilities.tolist(), strict=True):
                real = row[: len(examples[number].fields["choices"])]
                yield number, Prediction(int(np.argmax(real)), {str(i): p for i, p in enumerate(real)})

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        return [baselines.most_frequent_index(train, examples), *baselines.tfidf_choice(train, examples)]

    def constant_loss(self, train: Sequence[Example]) -> float | None:
        return float(np.mean([np.log(len(e.fields["choices"])) for e in train]))

    def metric(self) -> metrics.ChoiceMetric:
        return metrics.ChoiceMetric()

    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add(example.label, prediction.value, len(example.fields["choices"]))


def _index(value: Any) -> int | None:
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() else None
