"""The task of finding an answer in a context: windows, their loss, and the best stretch over all of them."""

# R rows, T tokens, D model width

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from plume.data.examples import Example
from plume.data.transform import SpanTransform, Window
from plume.heads import Model
from plume.text import Tokenizer
from plume.train import metrics
from plume.train.jobs import IMPOSSIBLE, JobSettings, Prediction, RowJob, hidden_states
from plume.train.labelled import Labelled, LabelledBatch


@dataclass(frozen=True)
class Span:
    """A candidate answer and its score; the empty text stands for none."""

    text: str
    start: int
    end: int
    score: float


class SpanJob(RowJob):
    """Where in a context the answer stands; the very first token stands for no answer."""

    head = "span"

    def __init__(self, settings: JobSettings, tokenizer: Tokenizer, *, causal: bool) -> None:
        super().__init__(settings, tokenizer, causal=causal)
        self.transform = SpanTransform(
            tokenizer,
            length=settings.length,
            stride=settings.stride,
            question_length=settings.question_length,
        )
        self.cut = self.transform.cut

    def encode(self, examples: Sequence[Example]) -> Labelled:
        about, targets = list[tuple[int, Window]](), list[tuple[int, int]]()
        for number, example in enumerate(examples):
            answer = example.label[0] if example.label else None
            for window in self.transform.windows(example.fields["question"], example.fields["context"]):
                about.append((number, window))
                targets.append(window.target(answer))
        rows = [[window.row] for _, window in about]
        return Labelled(rows, np.array(targets, dtype=np.int64).reshape(-1, 2), about=about)

    def logits(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        logits = model.read(hidden).float()  # (R, T, 2)
        real = torch.arange(logits.shape[1], device=logits.device) < batch.lengths[:, None]
        return logits.masked_fill(~real[:, :, None], IMPOSSIBLE)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        logits = self.logits(model, hidden, batch)
        ends = [F.cross_entropy(logits[:, :, i], batch.targets[:, i], reduction="none") for i in (0, 1)]
        return (ends[0] + ends[1]) / 2

    def predictions(
        self, model: Model, data: Labelled, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        left = np.bincount([owner for owner, _ in data.about], minlength=len(examples))
        best: dict[int, Span] = {}
        null: dict[int, float] = {}
        for batch in batches:
            logits = self.logits(model, hidden_states(model, batch), batch).cpu().numpy()
            for row, item in enumerate(batch.numbers.tolist()):
                owner, window = data.about[item]
                context = examples[owner].fields["context"]
                found = best_span(logits[row], window, context, self.settings.answer_length)
                if owner not in best or found.score > best[owner].score:
                    best[owner] = found
                null[owner] = min(null.get(owner, float("inf")), float(logits[row, 0].sum()))
                left[owner] -= 1
                if left[owner] == 0:
                    yield owner, self.answer(best.pop(owner), null.pop(owner))

    def answer(self, span: Span, null: float) -> Prediction:
        scores = {"start": span.start, "end": span.end, "score": span.score, "no_answer": null}
        refused = self.settings.null_threshold is not None and null - span.score > self.settings.null_threshold
        return Prediction("" if refused else span.text, scores)

    def metric(self) -> metrics.Answers:
        return metrics.Answers()

    def judge(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add([text for _, text in example.label], prediction.value)


def best_span(logits: Any, window: Window, context: str, longest: int) -> Span:
    """The best (start, end) inside the context that is not too long, its start judged only where it is seen best."""
    size = len(window.starts)
    if size == 0:  # a context of characters that the tokenizer drops
        return Span("", 0, 0, IMPOSSIBLE)
    inside = slice(window.first, window.first + size)
    starts, ends = logits[inside, 0].copy(), logits[inside, 1]
    starts[~window.best] = IMPOSSIBLE
    best, place = IMPOSSIBLE, (0, 0)
    for width in range(min(longest, size)):
        sums = starts[: size - width] + ends[width:]
        at = int(np.argmax(sums))
        if sums[at] > best:
            best, place = float(sums[at]), (at, at + width)
    begin, stop = int(window.starts[place[0]]), int(window.ends[place[1]])
    return Span(context[begin:stop].strip() if best > IMPOSSIBLE else "", begin, stop, best)
