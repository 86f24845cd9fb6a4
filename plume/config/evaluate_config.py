"""Evaluation of a model on tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plume.config.fields import (
    BACKEND,
    DEVICE,
    MODEL,
    PIECES,
    Backend,
    Boundary,
    Checked,
    ProtocolName,
    WeightPrecision,
    about,
    below_one,
    not_positive,
    option,
)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Checked):
    """A model, tasks, and the protocol."""

    model: str = field(metadata=about(MODEL))
    tasks: tuple[str, ...] = field(metadata=about("built-in names, NAME=FILE, your own files, harness:NAME"))
    protocol: ProtocolName = option("harness", "as lm-evaluation-harness, or as in the paper")
    data: Path | None = option(None, "folder with a folder per task; unset: ./data if it exists, else the hub")
    out: Path | None = option(None, "folder for report.md, report.json, plots, items and cached scores")
    checkpoints: Literal["last", "all"] = option("last", "all: every checkpoint of a run, with a curve over its steps")
    shots: int = option(0, "few-shot examples before each item")
    seeds: int = option(1, "number of runs with different few-shot examples")
    seed: int = option(1234, "random seed of the first run; later runs use the next ones")
    limit: int | None = option(None, "maximum number of items per task")
    stride: int | None = option(None, "tokens scored per window of a long text; unset: disjoint windows")
    boundary: Boundary | None = option(
        None, "tokenize context and continuation jointly or separately; unset: by protocol"
    )
    stop_word_filter: bool | None = option(None, "exclude stop words from LAMBADA predictions; unset: by protocol")
    too_long: Literal["truncate", "skip", "refuse"] = option(
        "truncate", "items beyond the context; truncate drops from the left"
    )
    training_data: tuple[str, ...] = option((), "prepared folders or texts to check for contamination")
    ngram: int = option(13, "n-gram length in words for the contamination check")
    device: str = option("auto", DEVICE)
    precision: WeightPrecision = option("float32", "of weights and activations")
    batch_tokens: int | None = option(None, "tokens per forward pass; unset: by device")
    plots: bool = option(True, "write plots to out as PNG")
    context_field: str = option("context", "name of the context field in your own rows")
    choices_field: str = option("choices", "name of the choices field in your own rows")
    answer_field: str = option("answer", "name of the answer field in your own rows")
    backend: Backend = option("local", PIECES)

    def _problems(self) -> Iterator[str]:
        if not self.tasks:
            yield "tasks is empty; name one, for example lambada, or a file"
        yield from below_one(self, "seeds", "limit", "stride", "batch_tokens", "ngram")
        if self.shots < 0:
            yield f"shots={self.shots} cannot be negative; 0 means zero-shot"


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig(Checked):
    """An experiment of a paper in small, on its own or on given data."""

    experiment: str | None = option(None, "name of the experiment, or all; unset: list them")
    folder: Path = option(Path("runs/reproduce"), "reports, and the jobs that they are made from")
    minutes: float | None = option(None, "time budget on this machine; unset: scale")
    scale: float | None = option(None, "steps and rows relative to the full design; unset: by minutes, else 1")
    seeds: int = option(4, "runs of every variant with different seeds; a verdict needs 3")
    data: tuple[str, ...] = option((), "your texts: files, folders or globs; unset: Python's standard library")
    targets: tuple[str, ...] = option((), "target files aligned line by line with data, for translation")
    tasks: tuple[str, ...] = option(
        (), "labelled files, or for zero-shot tasks of plume evaluate; unset: made from text"
    )
    backend: Backend = option("local", BACKEND)
    workers: int = option(1, "jobs at a time")
    dry_run: bool = option(False, "show jobs and time, and run nothing")

    def _problems(self) -> Iterator[str]:
        yield from below_one(self, "seeds", "workers")
        yield from not_positive(self, {"minutes": 30, "scale": 1})
        if self.minutes is not None and self.scale is not None:
            yield f"minutes={self.minutes:g} decides the scale that scale={self.scale:g} sets; leave one of them out"
        if self.targets and len(self.targets) != len(self.data):
            yield f"targets has {len(self.targets)} entries for {len(self.data)} of data; give one for each"
