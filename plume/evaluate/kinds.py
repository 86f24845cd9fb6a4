"""What is asked for each kind of item, what is kept of the answers, and how many of them become one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from plume.evaluate import metrics
from plume.evaluate.items import Blank, Choice, Item, Judgement, LastWord, Passage, Question
from plume.evaluate.metrics import Calibration, Metric
from plume.evaluate.protocols import Protocol, pair, request
from plume.evaluate.reading import Score
from plume.evaluate.scoring import Request, Scorer, windows
from plume.evaluate.tasks import Task

Record = dict[str, Any]  # what items.jsonl keeps of one item


@dataclass(frozen=True)
class Asked:
    """An item as requests, and whether its context had to be cut."""

    item: Item
    requests: tuple[Request, ...]
    cut: bool = False
    number: int = 0  # its place among the task's items


def of_task(protocol: Protocol, task: Task, *, shots: int) -> Protocol:
    """The protocol as it is for one task and so many examples."""
    delimiter = task.delimiters.get(protocol.name, protocol.delimiter)
    return replace(protocol, delimiter=delimiter, cloze=protocol.cloze and shots > 0)


class Asker:
    """Turns items into requests, by the rules of one protocol."""

    def __init__(self, task: Task, protocol: Protocol, scorer: Scorer, *, cut: bool) -> None:
        self.task, self.protocol, self.scorer, self.cut = task, protocol, scorer, cut
        self.pair = lru_cache(maxsize=64)(lambda a, b: pair(a, b, scorer.tokenizer, protocol.border))

    def ask(self, item: Item) -> Asked:
        """Raises TooLong when the item does not fit and may not be cut."""
        match item:
            case Choice():
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
                return Asked(item, tuple(windows(tokens, self.scorer, self.protocol.stride)))
            case _:
                raise AssertionError(f"{type(item).__name__} is not scored")
        return Asked(item, tuple(r for r, _ in made), any(cut for _, cut in made))

    def _last_word(self, item: LastWord) -> tuple[Request, bool]:
        context, target = self.pair(item.opening + item.context, item.word)
        if self.task.last_token:
            context, target = [*context, *target[:-1]], target[-1:]
        return self._request(context, target, self.task.filters and self.protocol.stop_words)

    def _request(self, context: Sequence[int], target: Sequence[int], filtered: bool = False) -> tuple[Request, bool]:
        return request(context, target, self.scorer, filtered=filtered, cut=self.cut)


# ---- what is kept of one item ------------------------------------------------------------------------------------


def choice_record(item: Choice, scores: Sequence[Score], calibration: Calibration) -> Record:
    count = len(item.names)
    totals = np.array([s.total for s in scores[:count]])
    ways: dict[str, Any] = {
        "acc": totals,
        "acc_norm": totals / [max(1, len(name)) for name in item.names],
        "acc_bytes": totals / [max(1, len(name.encode())) for name in item.names],
        "acc_tokens": totals / [len(s.logprobs) for s in scores[:count]],
    }
    if len(scores) > count:
        ways["acc_unconditional"] = totals - [s.total for s in scores[count:]]
    record: Record = {name: float(int(way.argmax()) == item.gold) for name, way in ways.items()}
    likely = np.exp(totals - totals.max())
    likely /= likely.sum()
    said = int(totals.argmax())
    calibration.add(likely[said : said + 1], np.array([said == item.gold]))
    return record | {"gold": item.gold, "said": said, "loglikelihood": float(totals[item.gold])}


def word_record(item: LastWord, scores: Sequence[Score], calibration: Calibration) -> Record:
    (score,) = scores
    calibration.add(np.exp(score.best.astype(np.float64)), score.hits)
    return {"acc": float(score.greedy), "loglikelihood": score.total}


def judgement_record(item: Judgement, scores: Sequence[Score], calibration: Calibration) -> Record:
    (score,) = scores
    return {"loglikelihood": score.total, "mean": score.total / len(score.logprobs), "good": item.good}


def passage_record(item: Passage, scores: Sequence[Score], calibration: Calibration) -> Record:
    for score in scores:
        calibration.add(np.exp(score.best.astype(np.float64)), score.hits)
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


def choice_metrics(task: Task, records: Sequence[Record]) -> dict[str, Metric]:
    names = [name for name in records[0] if name.startswith("acc")]
    found = {name: metrics.mean([r[name] for r in records]) for name in names}
    if task.metric == "mcc":
        found["mcc"] = metrics.matthews([r["gold"] == 1 for r in records], [r["said"] == 1 for r in records])
    return found


def word_metrics(task: Task, records: Sequence[Record]) -> dict[str, Metric]:
    totals = [r["loglikelihood"] for r in records]
    return {"acc": metrics.mean([r["acc"] for r in records]), "perplexity": metrics.perplexity(totals)}


def judgement_metrics(task: Task, records: Sequence[Record]) -> dict[str, Metric]:
    good = [bool(r["good"]) for r in records]
    said = [bool(r["said"]) for r in records]
    right = metrics.mean([float(a == b) for a, b in zip(good, said, strict=True)])
    return {"acc": right, "mcc": metrics.matthews(good, said)}


def text_metrics(task: Task, records: Sequence[Record]) -> dict[str, Metric]:
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


def said_metrics(task: Task, records: Sequence[Record]) -> dict[str, Metric]:
    """Generated and filled-in texts: measures of each text, and those that only a whole set of texts has."""
    said, answers = [r["said"] for r in records], [r["answers"] for r in records]
    whole = {"bleu": metrics.bleu, "chrf": metrics.chrf}
    return {
        name: whole[name](said, answers) if name in whole else metrics.mean([r[name] for r in records])
        for name in task.measures
    }


METRICS: dict[str, Callable[[Task, Sequence[Record]], dict[str, Metric]]] = {
    "choice": choice_metrics,
    "word": word_metrics,
    "judgement": judgement_metrics,
    "text": text_metrics,
    "question": said_metrics,
    "blank": said_metrics,
}


def said_record(task: Task, item: Question | Blank, said: str) -> Record:
    """What was said, cut to what counts of it, and how it measures up to each answer."""
    if isinstance(item, Question):
        answers, normal = list(item.answers), metrics.NORMAL[item.same]
        said = metrics.sentences(said, item.sentences)
    else:
        answers, normal, said = [item.answer], metrics.normal, said.strip()
    said = said.split("\n")[0] if task.people else said
    measures: Mapping[str, Callable[[str, Sequence[str]], float]] = {
        "exact_match": partial(metrics.exact_match, normal=normal),
        "f1": metrics.f1,
    }
    record: Record = {"said": said, "answers": answers}
    for name in task.measures:
        if name in measures:
            measure = partial(metrics.among, measures[name]) if task.people else measures[name]
            record[name] = measure(said, answers)
    return record | (metrics.rouge(said, answers) if "rouge1" in task.measures else {})


def headline(task: Task, protocol: Protocol, found: Mapping[str, Metric]) -> str:
    """The number that stands for the task under a protocol."""
    if task.kind == "choice" and protocol.name != "harness" and task.metric.startswith("acc"):
        return "acc_unconditional" if "acc_unconditional" in found else protocol.choice
    return task.paper_metric if task.paper_metric is not None and protocol.name == "gpt2-paper" else task.metric


def with_shots(item: Item, prefix: str) -> Item:
    """The item after solved examples."""
    match item:
        case Choice():
            return replace(item, contexts=tuple(prefix + context for context in item.contexts))
        case LastWord():
            return replace(item, context=prefix + item.context)
        case Question():
            return replace(item, prompt=prefix + item.prompt)
        case _:
            raise AssertionError("checked before")
