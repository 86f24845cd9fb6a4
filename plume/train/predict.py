"""Answers of a fine-tuned model: labels, similarities, choices, tags and spans for new texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plume.config import UserError
from plume.data.examples import Example, Kind
from plume.files import read_json
from plume.heads import Model
from plume.text import Tokenizer
from plume.train.jobs import ChooseJob, Job, JobSettings, LabelJob, Prediction, TagJob, settings_from
from plume.train.judge import predict
from plume.train.span_job import SpanJob

KIND_OF: dict[str, Kind] = {
    "classify": "classify",
    "similarity": "similarity",
    "choose": "choose",
    "tag": "tag",
    "span": "span",
}


@dataclass(frozen=True)
class Label:
    """What a text is, how sure the model is, and what it gives the other labels."""

    label: str
    probability: float
    probabilities: Mapping[str, float]


@dataclass(frozen=True)
class Choice:
    """The place and text of the chosen candidate, and the probability of each."""

    place: int
    text: str
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class TaggedWord:
    word: str
    tag: str


@dataclass(frozen=True)
class Answer:
    """A stretch of the context, or the empty text where there is no answer in it."""

    text: str
    start: int
    end: int
    score: float  # of the stretch above that of no answer


class Predictor:
    """A model with a task's head and what its folder says of the task."""

    def __init__(self, model: Model, tokenizer: Tokenizer, folder: Path | None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        about: dict[str, Any] | None = None
        if folder is not None and (folder / "plume.json").is_file():
            about = read_json(folder / "plume.json").get("task")
        self.told = about is not None  # a folder of another tool does not say what its texts looked like
        self.settings = default_settings(model) if about is None else settings_from(about)

    def need(self, *heads: str) -> None:
        if self.model.kind not in heads:
            raise UserError(
                f"this model has a {self.model.kind} head, not {' or '.join(heads)}; fine-tune one with: plume finetune"
            )

    def run(self, job: Job, fields: Sequence[Mapping[str, Any]]) -> list[Prediction]:
        for number, each in enumerate(fields):
            for name, value in each.items():
                if not value or not all(str(v).strip() for v in (value if isinstance(value, list) else [value])):
                    raise UserError(f"{name} {number} is empty")
        if not fields:
            return []
        examples = [Example(each, None, f"text {number}") for number, each in enumerate(fields)]
        answers = predict(job, self.model, job.encode(examples), examples)
        return [answers[number] for number in range(len(examples))]

    def labels(self, texts: Sequence[str], pairs: Sequence[str] | None) -> list[Prediction]:
        self.need("classify", "similarity")
        if isinstance(texts, str):
            raise UserError('texts must be a list, such as ["..."]')
        if pairs is not None and len(pairs) != len(texts):
            raise UserError(f"{len(texts)} texts and {len(pairs)} pairs; each text needs one")
        settings = self.settings
        if not self.told and settings.kind == "classify" and pairs is not None:
            settings = replace(settings, kind="pair")
        wants_pair = settings.kind != "classify"
        if wants_pair != (pairs is not None):
            raise UserError(f"this model was fine-tuned on {'pairs of texts' if wants_pair else 'single texts'}")
        job = LabelJob(settings, self.tokenizer, causal=self.model.config.causal)
        fields: list[dict[str, Any]] = [{"text": text} for text in texts]
        for each, pair in zip(fields, pairs if pairs is not None else [], strict=False):
            each["pair"] = pair
        return self.run(job, fields)

    def classify(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Label] | list[float]:
        """A label for each text or pair of texts; a number where the model was trained on numbers."""
        answers = self.labels(texts, pairs)
        if self.settings.target == "number":
            return [float(a.value) for a in answers]
        return [Label(a.value, a.scores[a.value], a.scores) for a in answers]

    def choose(self, context: str, choices: Sequence[str], question: str | None = None) -> Choice:
        self.need("choose")
        job = ChooseJob(self.settings, self.tokenizer, causal=self.model.config.causal)
        fields: dict[str, Any] = {"context": context, "choices": list(choices)}
        if question is not None:
            fields["question"] = question
        (answer,) = self.run(job, [fields])
        return Choice(answer.value, choices[answer.value], tuple(answer.scores.values()))

    def tag(self, sentences: Sequence[str | Sequence[str]]) -> list[list[TaggedWord]]:
        """A tag for every word; a sentence given as one text is cut at its blanks."""
        self.need("tag")
        job = TagJob(self.settings, self.tokenizer, causal=self.model.config.causal)
        words = [s.split() if isinstance(s, str) else list(s) for s in sentences]
        answers = self.run(job, [{"words": each} for each in words])
        return [
            [TaggedWord(word, tag) for word, tag in zip(each, answer.value, strict=True)]
            for each, answer in zip(words, answers, strict=True)
        ]

    def answer(self, question: str, context: str) -> Answer:
        self.need("span")
        job = SpanJob(self.settings, self.tokenizer, causal=self.model.config.causal)
        (found,) = self.run(job, [{"question": question, "context": context}])
        start, end = int(found.scores["start"]), int(found.scores["end"])
        refused = found.value == ""
        score = float(found.scores["score"] - found.scores["no_answer"])
        return Answer(found.value, 0 if refused else start, 0 if refused else end, score)


def default_settings(model: Model) -> JobSettings:
    """For a folder that says nothing of its task: what its head and labels tell."""
    return JobSettings(
        kind=KIND_OF.get(model.kind, "classify"),
        target="number" if len(model.labels) == 1 else "label",
        labels=model.labels,
        length=model.config.context,
    )
