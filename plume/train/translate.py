"""Translation and summarisation: source and target rows for an encoder-decoder, and its texts measured."""

# B pairs, T tokens of a target, S tokens of a source

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import UserError
from plume.data.batches import IGNORE, Batch, padded
from plume.data.examples import Example
from plume.data.pairs import decoder_start
from plume.data.transform import Cut
from plume.heads import Model
from plume.text import Tokenizer
from plume.train import metrics
from plume.train.jobs import Job, JobSettings, Prediction
from plume.train.objectives import TensorBatch

Writer = Callable[[Model, Tokenizer, Sequence[str], int], list[str]]  # texts for sources, by so many beams
Numbers = npt.NDArray[np.int64]


class Pairs:
    """Every pair of a set, tokenised; both sides close with the end token, and longer ones are cut before it."""

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, *, length: int, cut: Cut) -> None:
        end = closing(tokenizer)
        self.start = decoder_start(tokenizer)
        self.padding = 0 if tokenizer.pad is None else tokenizer.pad
        self.cut = cut
        self.sources = self._closed(tokenizer, [e.fields["source"] for e in examples], end, length)
        self.targets = self._closed(tokenizer, [e.label or "" for e in examples], end, length)
        sizes = [len(a) + len(b) for a, b in zip(self.sources, self.targets, strict=True)]
        self.lengths = np.array(sizes, dtype=np.int64)
        self.firsts = np.arange(len(examples) + 1)
        self.real_tokens = int(self.lengths.sum())

    def _closed(self, tokenizer: Tokenizer, texts: Sequence[str], end: int, length: int) -> list[list[int]]:
        rows = []
        for ids in tokenizer.encode_batch(texts):
            self.cut.note(len(ids), length - 1)
            rows.append([*(int(i) for i in ids[: length - 1]), end])
        return rows

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, numbers: Numbers, step: int = 0) -> TensorBatch:
        sources, targets = ([side[i] for i in numbers] for side in (self.sources, self.targets))
        lengths, source_lengths = (np.array([len(row) for row in side]) for side in (targets, sources))
        width = int(lengths.max())
        return TensorBatch.of(
            Batch(
                tokens=padded([[self.start, *row[:-1]] for row in targets], width, self.padding),
                targets=padded(targets, width, IGNORE),
                lengths=lengths,
                source=padded(sources, int(source_lengths.max()), self.padding),
                source_lengths=source_lengths,
            )
        )

    def sweep(self, size: int) -> Iterator[Any]:
        order = np.argsort(self.lengths, kind="stable")
        for first in range(0, len(order), size):
            yield self.batch(order[first : first + size])


def closing(tokenizer: Tokenizer) -> int:
    end = tokenizer.separator if tokenizer.end is None else tokenizer.end
    if end is None:
        raise UserError("translate needs a tokenizer with an end token, so that a translation can end")
    return end


class TranslateJob(Job):
    """A text for a text. Beam search takes long, so the loss picks the best weights; texts are measured at the end."""

    head = "next-token"
    judged = False

    def __init__(self, settings: JobSettings, tokenizer: Tokenizer, writer: Writer, beams: int) -> None:
        super().__init__(settings, tokenizer, causal=False)
        self.writer, self.beams, self.cut = writer, beams, Cut()

    def encode(self, examples: Sequence[Example]) -> Pairs:
        return Pairs(examples, self.tokenizer, length=self.settings.length, cut=self.cut)

    def predictions(
        self, model: Model, data: Any, examples: Sequence[Example], batches: Iterator[Any]
    ) -> Iterator[tuple[int, Prediction]]:
        texts = self.writer(model, self.tokenizer, [e.fields["source"] for e in examples], self.beams)
        for number, text in enumerate(texts):
            yield number, Prediction(text, {})

    def metric(self) -> metrics.Texts:
        return metrics.Texts()

    def judge(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add(example.label, prediction.value)
