"""The stretch of a context that answers a question: windows, their loss, and the best span over all of them."""

# R rows, T tokens, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from plume.config import TaskConfig, UserError
from plume.data.tables import Tally
from plume.model.heads import Model
from plume.tasks import metrics
from plume.tasks.baselines import Baseline, each, nearest_sentence
from plume.tasks.readers import is_squad, squad_rows
from plume.tasks.schema import Columns, Example, Prediction, TaskSettings
from plume.tasks.task_kind import RowReader, TaskKind, TaskOptions, hidden_states
from plume.tasks.token_rows import IMPOSSIBLE, IntArray, LabelledBatch, LabelledRows, TokenRow, Truncation
from plume.text import Tokenizer


@dataclass(frozen=True)
class Answer:
    """A stretch of the context, or the empty text where the model predicts no answer."""

    text: str
    start: int
    end: int
    score: float  # of the span, minus that of no answer; of a candidate, the span's alone


class SpanTask(TaskKind):
    """The span of a context that answers a question; the first token of a row is no answer."""

    name = "span"
    head = "span"
    call = 'answer(question="...", context="...")'
    fields = ("question", "context")
    uses = ("answer_length", "stride", "question_length")
    label_field = "answers"
    overflow = "read in overlapping windows"
    truncates = False

    def __init__(
        self, settings: TaskSettings, tokenizer: Tokenizer, *, causal: bool, options: TaskOptions | None = None
    ) -> None:
        super().__init__(settings, tokenizer, causal=causal, options=options)
        self.windows = SpanWindows(
            tokenizer, length=settings.length, stride=settings.stride, question_length=settings.question_length
        )
        self.truncation = self.windows.truncation

    # -- data

    @classmethod
    def matches(cls, table: Columns) -> bool:
        return table.has("context", "question", "answers")

    @classmethod
    def reader(cls, path: Path, config: TaskConfig, skipped: Tally) -> RowReader | None:
        return (lambda p, _: squad_rows(p)) if is_squad(path) else None

    @classmethod
    def label_value(cls, value: Any, fields: Mapping[str, Any], column: str) -> list[tuple[int, str]]:
        """Every answer as (start, text), from SQuAD's and the hub's forms, pairs, or texts; empty ones are none."""
        context = fields["context"]
        if isinstance(value, Mapping):
            starts, texts = value.get("answer_start"), value.get("text")
            if not isinstance(starts, list) or not isinstance(texts, list) or len(starts) != len(texts):
                raise UserError(f"the answers {value!r} need lists answer_start and text of equal length")
            value = list(zip(starts, texts, strict=True))
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise UserError(f"the answers {value!r} are neither texts nor starts with texts")
        spans = [(start, text) for start, text in (_span(one, context) for one in value) if text.strip()]
        for start, text in spans:
            if start < 0 or context[start : start + len(text)] != text:
                place = "in its context" if start < 0 else f"at character {start} of its context"
                raise UserError(f"the answer {text!r} is not {place}")
        return spans

    @classmethod
    def settings_for(cls, settings: TaskSettings, examples: Sequence[Example]) -> TaskSettings:
        """Where some questions have no answer, a threshold decides when none is given."""
        return replace(settings, null_threshold=0.0) if any(not e.label for e in examples) else settings

    def encode(self, examples: Sequence[Example]) -> LabelledRows:
        about, targets = list[tuple[int, Window]](), list[tuple[int, int]]()
        for number, example in enumerate(examples):
            answer = example.label[0] if example.label else None
            for window in self.windows.of(example.fields["question"], example.fields["context"]):
                about.append((number, window))
                targets.append(window.target(answer))
        rows = [[window.row] for _, window in about]
        return LabelledRows(rows, np.array(targets, dtype=np.int64).reshape(-1, 2), about=about)

    # -- learning

    def logits(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        logits = model.read(hidden).float()  # (R, T, 2)
        real = torch.arange(logits.shape[1], device=logits.device) < batch.lengths[:, None]
        return logits.masked_fill(~real[:, :, None], IMPOSSIBLE)

    def losses(self, model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
        logits = self.logits(model, hidden, batch)
        ends = [F.cross_entropy(logits[:, :, i], batch.targets[:, i], reduction="none") for i in (0, 1)]
        return (ends[0] + ends[1]) / 2

    # -- predicting

    def predictions(
        self, model: Model, data: LabelledRows, examples: Sequence[Example], batches: Iterator[LabelledBatch]
    ) -> Iterator[tuple[int, Prediction]]:
        left = np.bincount([owner for owner, _ in data.about], minlength=len(examples))
        best: dict[int, Answer] = {}
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
                    yield owner, self.prediction(best.pop(owner), null.pop(owner))

    def prediction(self, span: Answer, null: float) -> Prediction:
        scores = {"start": span.start, "end": span.end, "score": span.score, "no_answer": null}
        refused = self.settings.null_threshold is not None and null - span.score > self.settings.null_threshold
        return Prediction("" if refused else span.text, scores)

    def row_error(self, example: Example, prediction: Prediction) -> float:
        return 1.0 - metrics.answer_f1(prediction.value, [text for _, text in example.label] or [""])

    def baselines(self, train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
        nothing = [each("no answer", examples, lambda e: "")] if self.settings.null_threshold is not None else []
        return [*nothing, nearest_sentence(examples)]

    def metric(self) -> metrics.AnswerMetric:
        return metrics.AnswerMetric()

    def update(self, metric: Any, example: Example, prediction: Prediction) -> None:
        metric.add([text for _, text in example.label], prediction.value)

    def tuned(
        self, examples: Sequence[Example], predict: Callable[[], Mapping[int, Prediction]], metric: str
    ) -> TaskSettings:
        """With the margin of no answer that gives the highest F1, where some questions have none."""
        if self.settings.null_threshold is None:
            return self.settings
        return replace(self.settings, null_threshold=best_null_threshold(examples, predict()))

    def answer(self, prediction: Prediction) -> Answer:
        """A prediction as `lm.answer` returns it."""
        start, end = (int(prediction.scores[name]) if prediction.value else 0 for name in ("start", "end"))
        return Answer(prediction.value, start, end, prediction.scores["score"] - prediction.scores["no_answer"])


def _span(value: Any, context: str) -> tuple[int, str]:
    if isinstance(value, str):
        return context.find(value), value
    try:
        start, text = (value["answer_start"], value["text"]) if isinstance(value, Mapping) else value
        return int(start), str(text)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"the answer {value!r} is neither a text nor a start with its text") from None


def best_span(logits: Any, window: Window, context: str, longest: int) -> Answer:
    """The best (start, end) that is not too long; a start counts only in the window that shows it best."""
    size = len(window.starts)
    if size == 0:  # a context of characters that the tokenizer drops
        return Answer("", 0, 0, IMPOSSIBLE)
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
    return Answer(context[begin:stop].strip() if best > IMPOSSIBLE else "", begin, stop, best)


def best_null_threshold(examples: Sequence[Example], given: Mapping[int, Prediction]) -> float:
    """The margin of no answer from which none is given, so that F1 is highest."""
    order = sorted((p.scores["no_answer"] - p.scores["score"], i) for i, p in given.items())
    gains = []
    for _, i in order:
        answers = [text for _, text in examples[i].label] or [""]
        start, end = int(given[i].scores["start"]), int(given[i].scores["end"])
        text = examples[i].fields["context"][start:end].strip()
        gains.append(metrics.answer_f1(text, answers) - metrics.answer_f1("", answers))
    totals = np.concatenate([[0.0], np.cumsum(gains)])  # answering the first so many only
    cut = int(np.argmax(totals))
    values = [d for d, _ in order]
    if cut == 0:
        return values[0] - 1.0
    return values[-1] + 1.0 if cut == len(values) else (values[cut - 1] + values[cut]) / 2


# ---- windows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A question with a stretch of its context."""

    row: TokenRow
    first: int  # place of the context's first token in the row
    starts: IntArray  # character where each of the context's tokens begins, and ends
    ends: IntArray
    best: npt.NDArray[np.bool_]  # whether this window, of all, shows most on both sides of the token

    def target(self, answer: tuple[int, str] | None) -> tuple[int, int]:
        """Places of the answer's first and last token; the very first token where the window does not hold it."""
        if answer is None:
            return 0, 0
        begin, stop = answer[0], answer[0] + len(answer[1])
        inside = np.flatnonzero((self.ends > begin) & (self.starts < stop))
        if not len(inside) or self.starts[0] > begin or self.ends[-1] < stop:
            return 0, 0
        return self.first + int(inside[0]), self.first + int(inside[-1])


class SpanWindows:
    """Question and context to windows that step through a long context, so that every word is in some window."""

    def __init__(self, tokenizer: Tokenizer, *, length: int, stride: int | None, question_length: int) -> None:
        self.tokenizer, self.length, self.question_length = tokenizer, length, question_length
        self.around = len(tokenizer.add_special_tokens([], [])[0])
        self.stride = min(128, max(1, length // 3)) if stride is None else stride
        self.truncation = Truncation()
        if length - self.around - min(question_length, length // 2) < 2:
            raise UserError(f"length={length} leaves no tokens for a context beside the question")

    def of(self, question: str, context: str) -> list[Window]:
        asked = self.tokenizer.encode(question)[: min(self.question_length, self.length // 2)]
        pieces = self.tokenizer.pieces(context)
        limit = self.length - self.around - len(asked)
        step = min(self.stride, limit)
        self.truncation.add(len(pieces), limit)
        cuts, start = [], 0
        while True:
            cuts.append((start, min(start + limit, len(pieces))))
            if start + limit >= len(pieces):
                break
            start += step
        best = _best_windows(len(pieces), cuts)
        first = len(self.tokenizer.add_special_tokens(asked, [])[0]) - self._behind()
        found = []
        for number, (start, stop) in enumerate(cuts):
            part = pieces[start:stop]
            tokens, segments = self.tokenizer.add_special_tokens(asked, [p.id for p in part])
            found.append(
                Window(
                    TokenRow(np.array(tokens, dtype=np.int32), np.array(segments, dtype=np.int32)),
                    first,
                    np.array([p.start for p in part], dtype=np.int32),
                    np.array([p.end for p in part], dtype=np.int32),
                    best[start:stop] == number,
                )
            )
        return found

    def _behind(self) -> int:
        pair = self.tokenizer.definition.pair
        return len(pair) - 1 - next(i for i, (part, _) in enumerate(pair) if part == "B")


def _best_windows(tokens: int, cuts: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """For every token the window in which the nearer edge is farthest; BERT's tie-break favours longer windows."""
    scores = np.full((len(cuts), tokens), -1.0)
    for number, (start, stop) in enumerate(cuts):
        places = np.arange(start, stop)
        scores[number, start:stop] = np.minimum(places - start, stop - 1 - places) + 0.01 * (stop - start)
    return scores.argmax(axis=0)
