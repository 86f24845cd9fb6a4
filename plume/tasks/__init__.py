"""The kinds of task, one line each in the registry, and the predictions of a fine-tuned model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plume.config import UserError, did_you_mean
from plume.hf import folder_info
from plume.model.heads import Model
from plume.tasks.choose import Choice, ChooseTask
from plume.tasks.classify import ClassifyTask, Label, PairTask, SimilarityTask
from plume.tasks.embed import EmbedTask
from plume.tasks.generate import GenerateTask
from plume.tasks.multilabel import MultiLabelTask
from plume.tasks.schema import Example, Prediction, TaskSettings
from plume.tasks.span import Answer, SpanTask
from plume.tasks.tag import TaggedWord, TagTask
from plume.tasks.task_kind import TaskKind, evaluate, predict
from plume.text import Tokenizer

KINDS: list[type[TaskKind]] = [  # a table is of the first kind that its columns match, or else to classify
    TagTask,
    SpanTask,
    ChooseTask,
    PairTask,
    EmbedTask,
    SimilarityTask,
    MultiLabelTask,
    ClassifyTask,
    GenerateTask,
]
CALLS = {  # of models that are not fine-tuned, by their head
    "next-token": 'generate("...")',
    "masked-token": 'fill_mask("... [MASK] ...")',
    "pretraining": 'fill_mask("... [MASK] ...")',
}


def kind_named(name: str) -> type[TaskKind]:
    """The kind of task with this name."""
    names = {kind.name: kind for kind in KINDS}
    if name not in names:
        raise UserError(f"task.kind={name!r} does not exist; kinds are {', '.join(names)}{did_you_mean(name, names)}")
    return names[name]


def kind_for_head(head: str) -> type[TaskKind] | None:
    """The plainest kind whose models have this head."""
    return next((kind for kind in reversed(KINDS) if kind.head == head), None)


def saved_settings(folder: Path | None) -> TaskSettings | None:
    """What a model folder says about its task; None: nothing."""
    about = folder_info(folder).get("task")
    return None if about is None else TaskSettings.from_dict(about)


def saved_kind(folder: Path | None) -> str | None:
    """The kind of task that a model folder was fine-tuned for."""
    settings = saved_settings(folder)
    return None if settings is None else settings.kind


def how_to_ask(head: str, place: str, *, encoder_decoder: bool = False, task: str | None = None) -> str:
    """How to use a model in Python and over HTTP; `task`: what it was fine-tuned for; `head` does not matter then."""
    kind = kind_for_head(head) if task is None else kind_named(task)
    call = CALLS[head] if kind is None or (head in CALLS and task is None and not encoder_decoder) else kind.call
    return f"use it in Python: plume.load({place!r}).{call}, or over HTTP: plume serve {shlex.quote(place)}"


class Predictor:
    """A model with the head of a task, and the settings that its folder holds."""

    def __init__(self, model: Model, tokenizer: Tokenizer, folder: Path | None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        found = saved_settings(folder)
        self.known = found is not None  # folders of other tools do not say what their texts are
        self.settings = default_settings(model) if found is None else found

    def kind(self, settings: TaskSettings | None = None) -> TaskKind:
        chosen = self.settings if settings is None else settings
        kind = kind_named(chosen.kind)
        self.need(kind.head)
        return kind(chosen, self.tokenizer, causal=self.model.config.causal)

    def kind_for(self, pairs: object) -> TaskKind:
        """The task of single texts, or of pairs of texts where they are given and no setting says otherwise."""
        two = not self.known and pairs is not None and self.settings.kind == ClassifyTask.name
        return self.kind(replace(self.settings, kind=PairTask.name) if two else None)

    def predict(self, rows: Sequence[Mapping[str, Any]], kind: TaskKind | None = None) -> list[Prediction]:
        """A prediction for each row, given by the fields of the task."""
        kind = self.kind() if kind is None else kind
        examples = [_checked(kind, row, number) for number, row in enumerate(rows)]
        found = predict(kind, self.model, kind.encode(examples), examples) if examples else {}
        return [found[number] for number in range(len(examples))]

    def evaluate(self, path: str | Path) -> dict[str, float]:
        """The metrics of the task over a labelled file."""
        from plume.tasks.task_data import read_labelled

        kind, examples = self.kind(), read_labelled(Path(path), self.settings)
        return evaluate(kind, examples, predict(kind, self.model, kind.encode(examples), examples)).results()

    def need(self, *heads: str) -> None:
        if self.model.kind not in heads:
            raise UserError(
                f"this model has a {self.model.kind} head, not {' or '.join(heads)}; fine-tune one with: plume finetune"
            )

    def classify(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Label] | list[float]:
        """A label for each text or pair of texts; a number where the model was trained on numbers."""
        self.need("classify", "similarity")
        if isinstance(texts, str):
            raise UserError('texts must be a list, such as ["..."]')
        if pairs is not None and len(pairs) != len(texts):
            raise UserError(f"{len(texts)} texts and {len(pairs)} pairs; each text needs one")
        kind = self.kind_for(pairs)
        if ("pair" in kind.fields) != (pairs is not None):
            wanted = "pairs of texts" if "pair" in kind.fields else "single texts"
            raise UserError(f"this model was fine-tuned on {wanted}")
        assert isinstance(kind, ClassifyTask)
        rows: list[dict[str, Any]] = [{"text": text} for text in texts]
        for row, pair in zip(rows, pairs if pairs is not None else [], strict=False):
            row["pair"] = pair
        return kind.answers(self.predict(rows, kind))

    def choose(self, context: str, choices: Sequence[str], question: str | None = None) -> Choice:
        self.need(ChooseTask.head)
        more = {} if question is None else {"question": question}
        (found,) = self.predict([{"context": context, "choices": list(choices), **more}])
        return Choice(found.value, choices[found.value], tuple(found.scores.values()))

    def tag(self, sentences: Sequence[str | Sequence[str]]) -> list[list[TaggedWord]]:
        """A tag for every word; a sentence that is one text is split at spaces."""
        self.need(TagTask.head)
        words = [s.split() if isinstance(s, str) else list(s) for s in sentences]
        found = self.predict([{"words": each} for each in words])
        return [[TaggedWord(*pair) for pair in zip(w, p.value, strict=True)] for w, p in zip(words, found, strict=True)]

    def answer(self, question: str, context: str) -> Answer:
        self.need(SpanTask.head)
        kind = self.kind()
        assert isinstance(kind, SpanTask)
        return kind.answer(self.predict([{"question": question, "context": context}], kind)[0])


def _checked(kind: TaskKind, row: Mapping[str, Any], number: int) -> Example:
    missing = [name for name in kind.fields if name not in row]
    if missing:
        raise UserError(
            f"row {number} has no {missing[0]!r}; a {kind.name} task has the fields {', '.join(kind.fields)}"
        )
    fields = {name: row[name] for name in (*kind.fields, *kind.optional_fields) if name in row}
    for name, value in fields.items():
        several = name in ("words", "choices")
        if not isinstance(value, list if several else str | int | float):
            raise UserError(f"{name} {number} is {value!r}; it must be a {'list of texts' if several else 'text'}")
        if not all(
            isinstance(v, str | int | float) and str(v).strip() for v in (value or [""] if several else [value])
        ):
            raise UserError(f"{name} {number} is empty")
        fields[name] = list(map(str, value)) if several else str(value)
    return Example(fields, None, f"row {number}")


def default_settings(model: Model) -> TaskSettings:
    """For a folder that says nothing of its task: what follows from its head and labels."""
    kind = kind_for_head(model.kind)
    return TaskSettings(
        kind=ClassifyTask.name if kind is None else kind.name,
        target="number" if len(model.labels) == 1 else "label",
        labels=model.labels,
        length=model.config.context,
    )
