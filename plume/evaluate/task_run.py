"""One task on one model: items to requests, answers to records, records to a result that says how it was made."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from plume.config import EvaluateConfig, UserError
from plume.evaluate.eval_tasks import EvalTask, RowSource, find_rows
from plume.evaluate.items import SOLVABLE, Blank, Item, Judgement, Question, ScoringProtocol, TaskRow, TooLong
from plume.evaluate.requests import (
    METRICS,
    RECORDS,
    ByPosition,
    Calibration,
    ItemRequests,
    Record,
    RequestBuilder,
    generated_record,
    headline,
    prompt_of,
    protocol_for,
    with_examples,
)
from plume.evaluate.subject import BLOCK, AnswerGenerator, ScoreStore, Subject
from plume.inference.scoring import Score
from plume.tasks.metrics import NORMAL_95, Metric, best_threshold, possible, safe_exp
from plume.util.console import plural
from plume.util.files import write_rows
from plume.util.progress import Progress

T = TypeVar("T")
GENERATED_TOGETHER = 32  # answers that are generated, and then kept, at a time
LINE = 1000  # characters of a line at most, where a limit cuts a long text
THRESHOLD_ITEMS = 500  # training items that a threshold is chosen on


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A task's numbers and everything that they depend on."""

    task: str
    model: str
    model_hash: str
    parameters: int
    data: str
    data_hash: str
    protocol: dict[str, Any]
    shots: int
    seed: int
    headline: str
    metrics: dict[str, Metric]
    items: int
    tokens: int  # scored, or generated
    cut: int  # items whose context lost its beginning
    skipped: int  # items that did not fit at all
    scored: int  # requests that this run computed
    reused: int  # requests whose scores were stored by an earlier run
    seconds: float
    by_position: dict[str, list[float]]
    calibration: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    chance: float | None = None  # the headline of random guessing
    interval: tuple[float, float] | None = None  # of the headline, 95 %
    groups: dict[str, list[float]] = field(default_factory=dict)  # the headline and the items of each group

    @property
    def score(self) -> Metric:
        return self.metrics[self.headline]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def items_file(self) -> str:
        return items_name(self.task, self.protocol["name"], self.shots, self.seed)

    @classmethod
    def of(cls, values: dict[str, Any]) -> TaskResult:
        between = values.get("interval")
        found = {name: Metric(**m) for name, m in values["metrics"].items()}
        return cls(**values | {"metrics": found, "interval": None if between is None else tuple(between)})


def items_name(task: str, protocol: str, shots: int, seed: int) -> str:
    """Where a report keeps what it found for each item."""
    return f"items/{file_name(task)}.{protocol}.{shots}shot.seed{seed}.jsonl"


def file_name(task: str) -> str:
    """The name of a task with letters of any script, and without what a path may not hold."""
    return re.sub(r"[^\w.-]", "_", task)


class TaskRun:
    """One task, one protocol, one seed."""

    def __init__(
        self,
        task: EvalTask,
        protocol: ScoringProtocol,
        subject: Subject,
        store: ScoreStore,
        config: EvaluateConfig,
        seed: int,
    ) -> None:
        self.task, self.protocol = task, protocol_for(protocol, task, shots=config.shots)
        self.subject, self.store = subject, store
        self.config, self.seed = config, seed
        self.positions, self.calibration = ByPosition(), Calibration()
        self.tokens = self.cut = self.skipped = 0
        self.shortened = False  # a limit has cut a long text
        self.notes: list[str] = []
        self.kept: list[Record] = []  # one of each item that was scored

    def result(self, progress: Progress, records_file: Path | None) -> TaskResult:
        began, scored, reused = time.monotonic(), self.store.fresh, self.store.reused
        self.check()
        items = self.limited_items(source := self.source)
        if not items:
            raise UserError(f"{source.name} holds no items")
        records = self.kept = list(self.records(self.after_examples(items, source), len(items), progress))
        if not records:
            why = "fits the model's context" if self.skipped else "has a token that could be scored"
            raise UserError(f"none of the {len(items)} items of {self.task.name} {why}")
        self.choose_threshold(records)
        if records_file is not None:
            write_rows(records_file, records)
        name = headline(self.task, self.protocol, found := METRICS[self.task.kind](self.task, records))
        return TaskResult(
            task=self.task.name,
            model=self.subject.name,
            model_hash=self.subject.hash,
            parameters=self.subject.parameters,
            data=source.name,
            data_hash=f"{source.hash}:{self.config.limit}" if self.shortened else source.hash,
            protocol=self.protocol.as_dict() | {"too_long": self.config.too_long, "likelihood": self.likelihood},
            shots=self.config.shots,
            seed=self.seed,
            headline=name,
            metrics=found,
            items=len(records),
            tokens=self.tokens,
            cut=self.cut,
            skipped=self.skipped,
            scored=self.store.fresh - scored,
            reused=self.store.reused - reused,
            seconds=round(time.monotonic() - began, 3),
            by_position=self.positions.plain(),
            calibration=self.calibration.plain(),
            notes=self.notes,
            chance=chance_level(records, name),
            interval=interval(records, name, found[name]),
            groups=by_group(records, name),
        )

    @cached_property
    def source(self) -> RowSource:
        source = find_rows(self.task, "test", self.config.data)
        assert source is not None
        return source

    @property
    def likelihood(self) -> str:
        return "pseudo, one mask at a time" if self.subject.masked else "left to right"

    def check(self) -> None:
        """Refuse what cannot be done at all: a model of another kind, examples where there are none, no rows."""
        task = self.task
        if task.causal_only and self.subject.masked:
            raise UserError(
                f"{task.name} generates text, and {self.subject.name} is a masked model, which does not; tasks that "
                "score texts work, such as lambada, wikitext-2 and hellaswag"
            )
        if task.kind == "blank" and not self.subject.masked:
            raise UserError(f"{task.name} needs a masked model, and {self.subject.name} is none; lambada works")
        if self.config.shots and task.kind not in ("choice", "word", "question"):
            raise UserError(f"shots={self.config.shots}: {task.name} has no examples before its items; shots=0 works")
        next(iter(self.items(self.source)), None)

    def limited_items(self, source: RowSource) -> list[Item]:
        """The first items up to the limit; evenly spaced ones where items have groups, which follow one another."""
        limit, items = self.config.limit, self.items(source)
        first = list(islice(items, limit))
        if limit is None or not first or not getattr(first[0], "group", ""):
            return first
        every = [*first, *items]
        return [every[i * len(every) // limit] for i in range(limit)] if len(every) > limit else every

    def items(self, source: RowSource) -> Iterator[Item]:
        where = source.name
        try:
            for row in source.rows():
                where = row.where
                yield from self.task.build(self.limited(row), self.protocol)
        except (LookupError, TypeError, ValueError, AttributeError, SyntaxError) as error:
            if isinstance(error, UserError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{where}: row does not match the format of task {self.task.name} ({what})") from error

    def limited(self, row: TaskRow) -> TaskRow:
        """With a limit, a long text that is scored as one stream is cut to as many lines of at most LINE characters."""
        limit = self.config.limit
        if limit is None or self.task.kind != "text" or (self.protocol.documents and self.task.pages):
            return row
        whole = row.text("text")
        text = "".join(islice(whole.splitlines(keepends=True), limit))[: limit * LINE]
        self.shortened |= text != whole  # another text: its numbers are not comparable
        return TaskRow({**row, "text": text}, row.where)

    # -- few-shot

    def after_examples(self, items: Sequence[Item], source: RowSource) -> Iterable[Item]:
        """Each item after K solved ones, drawn by seed in the items' order."""
        count = self.config.shots
        if not count:
            return items
        training = find_rows(self.task, "train", self.config.data)
        pool = list(self.items(source if training is None else training))
        own = training is None  # then an item must not be its own example
        if own:
            self.notes.append("the examples come from the scored file itself, as there is no training split")
        if len(pool) < count + own:
            raise UserError(f"shots={count}: {self.task.name} has only {plural(len(pool), 'item')} to draw from")
        return self._after(items, pool, own)

    def _after(self, items: Sequence[Item], pool: Sequence[Item], own: bool) -> Iterator[Item]:
        random, count = Random(self.seed), self.config.shots
        for item in items:
            drawn = random.sample(range(len(pool)), count + own)
            examples = [example for n in drawn if (example := pool[n]) != item][:count]
            texts = [example.solved for example in examples if isinstance(example, SOLVABLE)]
            yield self.fitted(item, texts)

    def fitted(self, item: Item, examples: list[str]) -> Item:
        """The item after as many examples as fit; the harness instead cuts the beginning of the text."""
        while True:
            longer = with_examples(item, "".join(example + self.protocol.delimiter for example in examples))
            if self.protocol.name == "harness" or not examples or self.fits(longer):
                return longer
            examples = examples[1:]

    def fits(self, item: Item) -> bool:
        if isinstance(item, Question):
            return not self.subject.overflows(item)
        try:
            RequestBuilder(self.task, self.protocol, self.subject.scorer, cut=False).ask(item)
        except TooLong:
            return False
        return True

    # -- asking

    def records(self, items: Iterable[Item], count: int, progress: Progress) -> Iterator[Record]:
        label = self.task.name if self.config.seeds == 1 else f"{self.task.name} seed {self.seed}"
        with progress.task(label, count) as advance:
            if self.task.kind in ("question", "blank"):
                for record in self.written(items):
                    yield record
                    advance(1)
                return
            builder = RequestBuilder(
                self.task, self.protocol, self.subject.scorer, cut=self.config.too_long == "truncate"
            )
            for block in blocks(self.asked(builder, items)):
                requests = [request for asked in block for request in asked.requests]
                found: list[Score | None] = [None] * len(requests)
                share = len(block) / max(1, len(requests))
                for number, score in self.store.scores(self.subject.scorer, requests):
                    found[number] = score
                    advance(share)
                yield from self.finished(block, [score for score in found if score is not None])

    def asked(self, builder: RequestBuilder, items: Iterable[Item]) -> Iterator[ItemRequests]:
        for number, item in enumerate(items):
            try:
                asked = replace(builder.ask(item), number=number)
            except TooLong as error:
                if self.config.too_long == "refuse":
                    raise UserError(f"{item.where}: {error}; too_long=truncate or skip continues") from None
                self.skipped += 1
                continue
            except UserError as error:
                raise UserError(f"{item.where}: {error}") from None
            self.cut += asked.cut
            if asked.requests:
                yield asked

    def finished(self, block: Sequence[ItemRequests], scores: Sequence[Score]) -> Iterator[Record]:
        at = 0
        for asked in block:
            mine = scores[at : at + len(asked.requests)]
            at += len(asked.requests)
            self.tokens += sum(len(score.logprobs) for score in mine)
            for request, score in zip(asked.requests, mine, strict=True):
                self.positions.add(len(request.context), score.logprobs)
            record = RECORDS[self.task.kind](asked.item, mine, self.calibration)
            about = {"item": asked.number, "where": asked.item.where, **prompt_of(asked.item)}
            yield {**about, **record, "cut": asked.cut}

    # -- writing

    def written(self, items: Iterable[Item]) -> Iterator[Record]:
        """Answers in the model's own words, several at a time. What is asked twice is written once."""
        writer = AnswerGenerator(self.subject, self.task.name, self.seed)
        for numbered in batched(self.fitting(writer, items), GENERATED_TOGETHER):
            block = [item for _, item in numbered]
            keys = [self.store.key(b"text", repr((replace(i, where=""), self.seed_of(i))).encode()) for i in block]
            known = {key: value for key in dict.fromkeys(keys) if (value := self.store.get(key)) is not None}
            fresh = {key: item for key, item in zip(keys, block, strict=True) if key not in known}
            for key, answer in zip(fresh, writer.answers(list(fresh.values())), strict=True):
                known[key] = json.dumps(answer).encode()
                self.store.put(key, known[key])
            self.store.fresh += len(fresh)
            self.store.reused += len(block) - len(fresh)
            for key, (number, item) in zip(keys, numbered, strict=True):
                prediction, tokens = json.loads(known[key])
                self.tokens += tokens
                assert isinstance(item, Question | Blank)
                about = {"item": number, "where": item.where, **prompt_of(item)}
                yield {**about, **generated_record(self.task, item, prediction)}

    def fitting(self, writer: AnswerGenerator, items: Iterable[Item]) -> Iterator[tuple[int, Item]]:
        """The items that are asked, with their numbers; what is too long is dealt with as the config says."""
        for number, item in enumerate(items):
            try:
                cut, hopeless = writer.cuts(item), False
            except TooLong:
                cut = hopeless = True
            if cut and self.config.too_long == "refuse":
                raise UserError(f"{item.where}: this does not fit the context; too_long=truncate or skip continues")
            if hopeless or (cut and self.config.too_long == "skip"):
                self.skipped += 1
                continue
            self.cut += cut
            yield number, item

    def seed_of(self, item: Item) -> int:
        """What an answer depends on: nothing is drawn where the likeliest token is taken."""
        return self.seed if isinstance(item, Question) and item.top_k > 1 else 0

    # -- judgements

    def choose_threshold(self, records: list[Record]) -> None:
        """Judgements need a threshold: the best one for some training items, or else the median of these."""
        if self.task.kind != "judgement":
            return
        training = find_rows(self.task, "train", self.config.data)
        if training is None:
            threshold = float(sorted(r["mean"] for r in records)[len(records) // 2])
            self.notes.append(f"threshold {threshold:.4f}: the median, as there is no training split")
        else:
            drawn = list(islice((i for i in self.items(training) if isinstance(i, Judgement)), THRESHOLD_ITEMS))
            other = TaskRun(self.task, self.protocol, self.subject, self.store, self.config, self.seed)
            seen = list(other.records(drawn, len(drawn), Progress(quiet=True)))
            means, good = [r["mean"] for r in seen], [r["good"] for r in seen]
            threshold = best_threshold(means, good, bounds=(-math.inf, math.inf), near=None)
            self.notes.append(f"threshold {threshold:.4f}: the best for the first {len(seen)} training items")
        for record in records:
            record["prediction"] = record["mean"] > threshold


def chance_level(records: Sequence[Record], name: str) -> float | None:
    """What random guessing scores, where that is known."""
    if not name.startswith("acc") or not all("chance" in record for record in records):
        return None
    return sum(record["chance"] for record in records) / len(records)


def interval(records: Sequence[Record], name: str, found: Metric) -> tuple[float, float] | None:
    """95 %: Wilson's for shares of right answers, honest for few items; else by errors, a perplexity's of its log."""
    values = [record.get(name) for record in records]
    if all(isinstance(value, float) and 0 <= value <= 1 for value in values) and name.startswith(("acc", "exact")):
        n, share, z = len(values), found.value, NORMAL_95
        middle, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return max(0.0, (middle - spread) / (1 + z * z / n)), min(1.0, (middle + spread) / (1 + z * z / n))
    if found.stderr is None:
        return None
    reach, (lowest, highest) = NORMAL_95 * found.stderr, possible(name)
    if "perplexity" in name:
        factor = safe_exp(reach / found.value)
        return max(lowest, found.value / factor), found.value * factor
    return max(lowest, found.value - reach), min(highest, found.value + reach)


def by_group(records: Sequence[Record], name: str) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for record in records:
        if "group" in record and name in record:
            groups.setdefault(record["group"], []).append(record[name])
    return {group: [sum(values) / len(values), len(values)] for group, values in sorted(groups.items())}


def batched(items: Iterable[T], count: int) -> Iterator[list[T]]:
    source = iter(items)
    while block := list(islice(source, count)):
        yield block


def blocks(asked: Iterable[ItemRequests]) -> Iterator[list[ItemRequests]]:
    """Items with about BLOCK requests together: enough to sort by length, few enough to hold."""
    block: list[ItemRequests] = []
    held = 0
    for one in asked:
        block.append(one)
        held += len(one.requests)
        if held >= BLOCK:
            yield block
            block, held = [], 0
    if block:
        yield block
