"""How a model is measured, alone or beside other sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plume.config.data import STANDARD_LIBRARY, DataConfig
from plume.config.errors import UserError, below_one, refuse
from plume.config.model import ModelConfig
from plume.config.train import ObjectiveConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Which model is measured on what, and how."""

    model: str  # a model folder, a run folder or a hub name
    tasks: tuple[str, ...]  # built-in names, NAME=FILE, files of your own, harness:NAME
    protocol: Literal["harness", "gpt2-paper", "gpt3-paper"] = "harness"  # whose way of measuring
    data: Path | None = None  # a folder with a folder for each task; unset means ./data if there is one, else the hub
    out: Path | None = None  # report.md, report.json, plots, items and the store of scores go here
    shots: int = 0  # solved examples before each item
    seeds: int = 1  # runs of a task that draws: examples, or words
    seed: int = 1234  # of the first run; each further run has the next
    limit: int | None = None  # items of each task
    stride: int | None = None  # tokens scored per window of a long text; unset means windows do not overlap
    border: Literal["joined", "apart"] | None = None  # where context and continuation are cut; unset: as the protocol
    stop_words: bool | None = None  # bar them from LAMBADA's predictions; unset means as the protocol
    too_long: Literal["truncate", "skip", "refuse"] = "truncate"  # items beyond the context; truncate cuts on the left
    training_data: tuple[str, ...] = ()  # prepared folders or texts to look for the items in
    ngram: int = 13  # words in a row that count as seen before
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: Literal["float32", "bfloat16", "float16"] = "float32"  # of the arithmetic
    batch_tokens: int | None = None  # tokens computed at a time; unset means what suits the device
    plots: bool = True  # calibration, ... as PNG in `out`
    context_field: str = "context"  # names in your own rows
    choices_field: str = "choices"  # likewise
    answer_field: str = "answer"  # likewise

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("tasks is empty; name one, for example lambada, or a file")
        refuse(below_one(self, "seeds", "limit", "stride", "batch_tokens"))
        if self.shots < 0 or self.ngram < 1:
            raise UserError(f"shots={self.shots} cannot be negative and ngram={self.ngram} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Several sizes of one family, trained alike on the same data."""

    folder: Path  # a run for each size, and one report
    model: ModelConfig  # what all sizes share; layers, heads and width are theirs
    train: TrainConfig
    sizes: tuple[str, ...] = ("1x32", "2x64", "4x128")  # layers x width
    head_width: int = 32  # heads follow from the width
    data: DataConfig = STANDARD_LIBRARY
    prepared: Path | None = None  # a folder that `plume prepare` has filled; then [data] is not looked at
    objective: ObjectiveConfig = ObjectiveConfig()

    def __post_init__(self) -> None:
        if len(self.sizes) < 2:
            raise UserError("sizes needs at least two entries, for example 1x32, 2x64, 4x128")
        for size in self.sizes:
            found = re.fullmatch(r"(\d+)x(\d+)", size)
            if found is None or not int(found[1]) or not int(found[2]):
                raise UserError(f"sizes: {size!r} is not LAYERSxWIDTH, for example 4x128")
            if int(found[2]) % min(self.head_width, int(found[2])):
                raise UserError(f"sizes: the width of {size!r} is no multiple of head_width={self.head_width}")
