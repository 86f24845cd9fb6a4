"""A tag for every word of a sentence, as in named-entity recognition."""

# R rows, T tokens, L labels

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from plume.config import TaskConfig, UserError
from plume.data.tables import Row, Tally
from plume.model.heads import Model
from plume.tasks import metrics
from plume.tasks.baselines import Baseline, most_frequent_tags
from plume.tasks.classify import check_known, known_labels
from plume.tasks.readers import conll_rows, is_conll
from plume.tasks.schema import Columns, Example, Prediction, Target, TaskSettings, text_list
from plume.tasks.task_kind import RowReader, TaskKind, TaskOptions, hidden_states
from plume.tasks.token_rows import NO_LABEL, IntArray, LabelledBatch, LabelledRows, TokenRow, Truncation
from plume.text import Tokenizer
from plume.util.hashing import space_between


@dataclass(frozen=True)
class TaggedWord:
    word: str
    tag: str


class TagTask(TaskKind):
    """A tag for every word, predicted at its first token."""

    name = "tag"
    head = "tag"
    call = 'tag(["..."])'
    fields = ("words",)
    uses = ("labels",)
    label_field = "tags"
    overflow = "split between words into several rows"
    truncates = False

    def __init__(
        self, settings: TaskSettings, tokenizer: Tokenizer, *, causal: bool, options: TaskOptions | None = None
    ) -> None:
        super().__init__(settings, tokenizer, causal=causal, options=options)
        self.words = WordRows(tokenizer, length=settings.length)
        self.truncation = self.words.truncation

    # -- data

    @classmethod
    def matches(cls, table: Columns) -> bool:
        return table.holds_lists("words") and table.has("tags")

    @classmethod
    def reader(cls, path: Path, config: TaskConfig, skipped: Tally) -> RowReader | None:
        if not is_conll(path, config.encoding, named=config.kind == cls.name):
            return None
        return lambda p, _: conll_rows(p, config.encoding, skipped if config.skip_bad_rows else None)

    @classmethod
    def field_value(cls, field: str, row: Row, column: str) -> Any:
        value = row[column].split() if isinstance(row[column], str) else row[column]
        if not isinstance(value, list) or not value:
            raise UserError(f"{column} holds no words")
        return text_list(value, column)

    @classmethod
    def fields_from(cls, text: str, pair: str | None) -> dict[str, Any]:
        return {"words": text.split()}

    @classmethod
    def label_value(cls, value: Any, fields: Mapping[str, Any], column: str) -> list[str]:
        if not isinstance(value, str | list):
            raise UserError(f"{column} is {value!r}; it should hold a tag for each word")
        tags = value.split() if isinstance(value, str) else [str(tag) for tag in value]
        if len(tags) != len(fields["words"]):
            raise UserError(f"{len(tags)} tags for {len(fields['words'])} words")
        return tags

    @classmethod
    def label_names(
        cls, config: TaskConfig, target: Target, train: Sequence[Example], columns: Mapping[str, str]
    ) -> tuple[str, ...]:
        return known_labels(config, Counter(tag for e in train for tag in e.label), columns[cls.label_field])

    @classmethod
    def check(cls, example: Example, labels: Sequence[str]) -> None:
        check_known(example, cls.labels_of(example), labels)

    @classmethod
    def labels_of(cls, example: Example) -> list[str]:
        return list(example.label or ())

    def encode(self, examples: Sequence[Example]) -> LabelledRows:
        place = {label: i for i, label in enumerate(self.settings.labels)}
        items, tags, about = [], [], list[tuple[int, int]]()  # about: a row's sentence and its first word
        for number, parts in enumerate(self.words.rows([e.fields["words"] for e in examples])):
            for part in parts:
                marks = np.full(len(part.row.tokens), NO_LABEL, dtype=np.int64)
                words = range(part.first_word, part.first_word + len(part.places))
                given = examples[number].label
                marks[part.places] = [0 if given is None else place[given[word]] for word in words]
                items.append([part.row])
                tags.append(marks)
                about.append((number, part.first_word))
        return LabelledRows(items, tags=tags, about=about)

    # -- learning

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        first_pieces = batch.targets != NO_LABEL
        logits = model.read(hidden)[first_pieces].float()  # (words, L)
        return F.cross_entropy(logits, batch.targets[first_pieces], reduction="none")

    def count(self, batch: LabelledBatch) -> float:
        return float((batch.targets != NO_LABEL).sum())

    # -- predicting

    def predictions(
        self, model: Model, data: LabelledRows, examples: Sequence[Example], batches: Iterator[LabelledBatch]
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

    def row_error(self, example: Example, prediction: Prediction) -> float:
        return float(sum(a != b for a, b in zip(example.label, prediction.value, strict=True)))

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        return [most_frequent_tags(train, examples)]

    def metric(self) -> metrics.EntityMetric:
        return metrics.EntityMetric()

    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add(example.label, prediction.value)


@dataclass(frozen=True)
class TagRow:
    """A stretch of a sentence whose words' first pieces carry the tags."""

    row: TokenRow
    places: IntArray  # where the first piece of each word stands
    first_word: int


class WordRows:
    """Words to pieces. A sentence that is too long is cut between words into several rows, so no word is lost."""

    def __init__(self, tokenizer: Tokenizer, *, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.around = len(tokenizer.add_special_tokens([])[0])
        self.before = next(i for i, (part, _) in enumerate(tokenizer.definition.single) if part == "A")
        self.pieces: dict[str, list[int]] = {}
        self.truncation = Truncation()

    def rows(self, sentences: Sequence[Sequence[str]]) -> list[list[TagRow]]:
        """The rows of each sentence; most need one."""
        spelled = [
            [f" {word}" if before and space_between(before, word) else word for before, word in pairwise(["", *words])]
            for words in sentences
        ]
        new = sorted({word for words in spelled for word in words} - self.pieces.keys())
        unknown = [] if self.tokenizer.unknown is None else [self.tokenizer.unknown]
        for word, ids in zip(new, self.tokenizer.encode_batch(new), strict=True):
            self.pieces[word] = [int(i) for i in ids] or unknown
        return [list(self._split(words)) for words in spelled]

    def _split(self, words: Sequence[str]) -> Iterator[TagRow]:
        limit = self.length - self.around
        ids, places, first = list[int](), list[int](), 0
        self.truncation.add(sum(len(self.pieces[word]) for word in words), limit)
        for number, word in enumerate(words):
            pieces = self.pieces[word][:limit]
            if ids and len(ids) + len(pieces) > limit:
                yield self._row(ids, places, first)
                ids, places, first = [], [], number
            places.append(self.before + len(ids))
            ids += pieces
        yield self._row(ids, places, first)

    def _row(self, ids: list[int], places: list[int], first: int) -> TagRow:
        tokens, segments = self.tokenizer.add_special_tokens(ids)
        row = TokenRow(np.array(tokens, dtype=np.int32), np.array(segments, dtype=np.int32))
        return TagRow(row, np.array(places, dtype=np.int32), first)
