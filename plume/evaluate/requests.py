"""What is asked for each kind of item, what is kept of the answers, and how many of them become one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.evaluate.eval_tasks import EvalTask
from plume.evaluate.items import (
    Blank,
    Item,
    Judgement,
    LastWord,
    MultipleChoice,
    Passage,
    Question,
    ScoringProtocol,
    request,
)
from plume.inference.scoring import Request, Score, Scorer, pair, windows
from plume.tasks import metrics
from plume.tasks.metrics import Metric

BINS = 10
COUNTED_TOGETHER = 1024  # items whose scores are counted at a time
SHOWN = 400  # characters of a long text that are kept with its record
Record = dict[str, Any]  # what items.jsonl keeps of one item


@dataclass(frozen=True)
class ItemRequests:
    """An item as requests, and whether its context had to be cut."""

    item: Item
    requests: tuple[Request, ...]
    cut: bool = False
    number: int = 0  # its place among the task's items


def protocol_for(protocol: ScoringProtocol, task: EvalTask, *, shots: int) -> ScoringProtocol:
    """The protocol as it is for one task and so many examples."""
    delimiter = task.delimiters.get(protocol.name, protocol.delimiter)
    return replace(protocol, delimiter=delimiter, cloze=protocol.cloze and shots > 0)


class RequestBuilder:
    """Turns items into requests, by the rules of one protocol."""

    def __init__(self, task: EvalTask, protocol: ScoringProtocol, scorer: Scorer, *, cut: bool) -> None:
        self.task, self.protocol, self.scorer, self.cut = task, protocol, scorer, cut
        self.pair = lru_cache(maxsize=64)(lambda a, b: pair(a, b, scorer.tokenizer, protocol.boundary))

    def ask(self, item: Item) -> ItemRequests:
        """Raises TooLong when the item does not fit and may not be cut."""
        match item:
            case MultipleChoice():
                texts = list(zip(item.contexts, item.continuations, strict=True))
                if item.neutral is not None:
                    texts += [(item.neutral, continuation) for continuation in item.continuations]
                made = [self._request(*self.pair(*text)) for text in texts]
            case LastWord():
                made = [self._last_word(item)]
            case Judgement():
                made = [self._request(*self.pair(item.context, item.statement))]
            case Passage():
                tokens = self.scorer.tokenizer.encode(item.text)
                return ItemRequests(item, tuple(windows(tokens, self.scorer, self.protocol.stride)))
            case _:
                raise AssertionError(f"{type(item).__name__} is not scored")
        return ItemRequests(item, tuple(r for r, _ in made), any(cut for _, cut in made))

    def _last_word(self, item: LastWord) -> tuple[Request, bool]:
        context, target = self.pair(item.opening + item.context, item.word)
        if self.task.last_token:
            context, target = [*context, *target[:-1]], target[-1:]
        return self._request(context, target, self.task.filters and self.protocol.stop_word_filter)

    def _request(self, context: Sequence[int], target: Sequence[int], filtered: bool = False) -> tuple[Request, bool]:
        return request(context, target, self.scorer, filtered=filtered, cut=self.cut)


# ---- what is kept of one item ------------------------------------------------------------------------------------


def choice_record(item: MultipleChoice, scores: Sequence[Score], calibration: Calibration) -> Record:
    count = len(item.names)
    totals = [s.total for s in scores[:count]]
    sizes = {
        "acc_norm": [len(name) for name in item.names],
        "acc_bytes": [len(name.encode()) for name in item.names],
        "acc_tokens": [len(s.logprobs) for s in scores[:count]],
    }
    ways = {"acc": totals}
    ways |= {name: [t / max(1, n) for t, n in zip(totals, by, strict=True)] for name, by in sizes.items()}
    if len(scores) > count:
        ways["acc_unconditional"] = [t - s.total for t, s in zip(totals, scores[count:], strict=True)]
    record: Record = {name: correct(way, item) for name, way in ways.items()}
    top = max(totals)
    prediction = totals.index(top)
    calibration.add([1 / sum(math.exp(total - top) for total in totals)], [prediction == item.gold])
    record |= {"chance": 1 / count} | ({"group": item.group} if item.group else {})
    return record | {"gold": item.gold, "prediction": prediction, "loglikelihood": totals[item.gold]}


def correct(likely: Sequence[float], item: MultipleChoice) -> float:
    """Whether the likeliest candidate is the right one; among equals the first counts, or each its share."""
    top = max(likely)
    if not item.ties:
        return float(likely.index(top) == item.gold)
    return float(likely[item.gold] == top) / likely.count(top)


def prompt_of(item: Item) -> Record:
    """The text that a model is given for an item, and the candidates or the target."""
    match item:
        case MultipleChoice():
            shared = len(set(item.contexts)) == 1
            prompt = item.contexts[0] if shared else list(item.contexts)
            return {"prompt": prompt, "continuations": list(item.continuations)}
        case LastWord():
            return {"prompt": item.opening + item.context, "target": item.word}
        case Judgement():
            return {"prompt": item.context, "target": item.statement}
        case Question():
            return {"prompt": item.opening + item.prompt}
        case Blank():
            return {"prompt": f"{item.before}[MASK]{item.after}"}
        case Passage():
            return {"prompt": "", "text": item.text[:SHOWN]}


def word_record(item: LastWord, scores: Sequence[Score], calibration: Calibration) -> Record:
    (score,) = scores
    calibration.add(np.exp(score.best.astype(np.float64)).tolist(), score.hits.tolist())
    return {"acc": float(score.greedy), "loglikelihood": score.total}


def judgement_record(item: Judgement, scores: Sequence[Score], calibration: Calibration) -> Record:
    (score,) = scores
    return {"loglikelihood": score.total, "mean": score.total / len(score.logprobs), "good": item.good}


def passage_record(item: Passage, scores: Sequence[Score], calibration: Calibration) -> Record:
    for score in scores:
        calibration.add(np.exp(score.best.astype(np.float64)).tolist(), score.hits.tolist())
    return {
        "loglikelihood": sum(s.total for s in scores),
        "windows": [[s.total, len(s.logprobs)] for s in scores],
        "words": item.words,
        "characters": item.characters,
        "bytes": item.bytes,
    }


RECORDS: dict[str, Callable[..., Record]] = {
    "choice": choice_record,
    "word": word_record,
    "judgement": judgement_record,
    "text": passage_record,
}


# ---- numbers of a whole task -------------------------------------------------------------------------------------


def choice_metrics(task: EvalTask, records: Sequence[Record]) -> dict[str, Metric]:
    names = [name for name in records[0] if name.startswith("acc")]
    found = {name: metrics.mean([r[name] for r in records]) for name in names}
    if task.metric == "mcc":
        found["mcc"] = metrics.matthews_metric(
            [r["gold"] == 1 for r in records], [r["prediction"] == 1 for r in records]
        )
    return found


def word_metrics(task: EvalTask, records: Sequence[Record]) -> dict[str, Metric]:
    totals = [r["loglikelihood"] for r in records]
    return {"acc": metrics.mean([r["acc"] for r in records]), "perplexity": metrics.perplexity(totals)}


def judgement_metrics(task: EvalTask, records: Sequence[Record]) -> dict[str, Metric]:
    good = [bool(r["good"]) for r in records]
    prediction = [bool(r["prediction"]) for r in records]
    right = metrics.mean([float(a == b) for a, b in zip(good, prediction, strict=True)])
    return {"acc": right, "mcc": metrics.matthews_metric(good, prediction)}


def text_metrics(task: EvalTask, records: Sequence[Record]) -> dict[str, Metric]:
    pieces = [piece for r in records for piece in r["windows"]]
    totals, sizes = [p[0] for p in pieces], [p[1] for p in pieces]

    def per(units: int) -> tuple[float, float | None]:
        return metrics.per_unit(totals, sizes, units)

    words, characters, size = (sum(r[name] for r in records) for name in ("words", "characters", "bytes"))
    return {
        "token_perplexity": metrics.exp_metric(per(sum(sizes))),
        "word_perplexity": metrics.exp_metric(per(words)),
        "byte_perplexity": metrics.exp_metric(per(size)),
        "bits_per_byte": metrics.bits_metric(per(size)),
        "bits_per_character": metrics.bits_metric(per(characters)),
    }


def generated_metrics(task: EvalTask, records: Sequence[Record]) -> dict[str, Metric]:
    """Generated and filled-in texts: measures of each text, and those that only a whole set of texts has."""
    prediction, answers = [r["prediction"] for r in records], [r["answers"] for r in records]
    whole = {"bleu": metrics.bleu, "chrf": metrics.chrf}
    return {
        name: whole[name](prediction, answers) if name in whole else metrics.mean([r[name] for r in records])
        for name in task.measures
    }


METRICS: dict[str, Callable[[EvalTask, Sequence[Record]], dict[str, Metric]]] = {
    "choice": choice_metrics,
    "word": word_metrics,
    "judgement": judgement_metrics,
    "text": text_metrics,
    "question": generated_metrics,
    "blank": generated_metrics,
}


def generated_record(task: EvalTask, item: Question | Blank, prediction: str) -> Record:
    """The prediction, cut to what counts of it, and its measures against the answers."""
    if isinstance(item, Question):
        answers, normal = list(item.answers), metrics.NORMAL_FORMS[item.same]
        prediction = metrics.first_sentences(prediction, item.sentences)
    else:
        answers, normal, prediction = [item.answer], metrics.squad_text, prediction.strip()
    prediction = prediction.split("\n")[0] if task.people else prediction
    measures: Mapping[str, Callable[[str, Sequence[str]], float]] = {
        "exact_match": partial(metrics.exact_match, normal=normal),
        "f1": metrics.answer_f1,
    }
    record: Record = {"prediction": prediction, "answers": answers}
    for name in task.measures:
        if name in measures:
            measure = partial(metrics.leave_one_out, measures[name]) if task.people else measures[name]
            record[name] = measure(prediction, answers)
    return record | (metrics.rouge(prediction, answers) if "rouge1" in task.measures else {})


def headline(task: EvalTask, protocol: ScoringProtocol, found: Mapping[str, Metric]) -> str:
    """The number that stands for the task under a protocol."""
    if task.kind == "choice" and protocol.name != "harness" and task.metric.startswith("acc"):
        return "acc_unconditional" if "acc_unconditional" in found else protocol.choice
    return task.paper_metric if task.paper_metric is not None and protocol.name == "gpt2-paper" else task.metric


def with_examples(item: Item, prefix: str) -> Item:
    """The item after solved examples."""
    match item:
        case MultipleChoice():
            return replace(item, contexts=tuple(prefix + context for context in item.contexts))
        case LastWord():
            return replace(item, context=prefix + item.context)
        case Question():
            return replace(item, prompt=prefix + item.prompt)
        case _:
            raise AssertionError("checked before")


# ---- calibration and loss by position ----------------------------------------------------------------------------


class Calibration:
    """How often the likeliest was right, by how sure the model was."""

    def __init__(self) -> None:
        self.count = np.zeros(BINS, dtype=np.int64)
        self.hits = np.zeros(BINS, dtype=np.int64)
        self.sure = np.zeros(BINS)
        self._waiting: tuple[list[float], list[bool]] = ([], [])  # for the next counting: one by one takes long

    def add(self, confidence: Iterable[float], hits: Iterable[bool]) -> None:
        self._waiting[0].extend(confidence)
        self._waiting[1].extend(hits)
        if len(self._waiting[0]) >= COUNTED_TOGETHER:
            self.add_up()

    def add_up(self) -> None:
        confidence, hits = np.array(self._waiting[0], dtype=np.float64), np.array(self._waiting[1], dtype=np.bool_)
        bins = np.clip((confidence * BINS).astype(np.int64), 0, BINS - 1)
        self.count += np.bincount(bins, minlength=BINS)
        self.hits += np.bincount(bins[hits], minlength=BINS)
        self.sure += np.bincount(bins, weights=confidence, minlength=BINS)
        self._waiting = ([], [])

    def plain(self) -> dict[str, list[float] | float]:
        self.add_up()
        known = self.count > 0
        sure = np.divide(self.sure, self.count, where=known, out=np.zeros(BINS))
        right = np.divide(self.hits, self.count, where=known, out=np.zeros(BINS))
        total = max(1, int(self.count.sum()))
        error = float((np.abs(sure - right) * self.count).sum() / total)
        return {"count": self.count.tolist(), "confidence": sure.tolist(), "right": right.tolist(), "error": error}


class ByPosition:
    """Mean loss by how many tokens stood before, in ranges that double."""

    def __init__(self) -> None:
        self.total = np.zeros(32)
        self.count = np.zeros(32, dtype=np.int64)
        self._places: list[npt.NDArray[np.int64]] = []  # for the next counting
        self._logprobs: list[npt.NDArray[np.float32]] = []

    def add(self, before: int, logprobs: npt.NDArray[np.float32]) -> None:
        self._places.append(np.arange(before + 1, before + 1 + len(logprobs)))
        self._logprobs.append(logprobs)
        if len(self._places) >= COUNTED_TOGETHER:
            self.add_up()

    def add_up(self) -> None:
        if not self._places:
            return
        places = np.log2(np.concatenate(self._places)).astype(np.int64)
        self.total += np.bincount(places, weights=-np.concatenate(self._logprobs).astype(np.float64), minlength=32)
        self.count += np.bincount(places, minlength=32)
        self._places, self._logprobs = [], []

    def plain(self) -> dict[str, list[float]]:
        self.add_up()
        used = np.flatnonzero(self.count)
        return {
            "from": (2**used - 1).tolist(),
            "loss": (self.total[used] / self.count[used]).tolist(),
            "tokens": self.count[used].tolist(),
        }
