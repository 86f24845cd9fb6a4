"""How a pretrained model learns a task: labelled rows, which weights move, the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plume.config.errors import UserError, below_one, check_encoding, refuse


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Labelled rows: where they are, what their columns mean, and what the task is."""

    train: str  # a file (.csv .tsv .jsonl .json .parquet .conll), or a folder with train and dev or validation files
    validation: str | None = None  # a file; unset means a share of the training rows
    test: str | None = None  # a file to predict for at the end; labels there may be missing
    name: str | None = None  # of a GLUE task, whose own files, columns and metric are known: sst2, cola, rte, stsb, ...
    kind: Literal["classify", "pair", "similarity", "choose", "tag", "span", "embed", "translate"] | None = (
        None  # unset means guessed from the columns
    )
    target: Literal["label", "number"] | None = None  # unset means number where labels are numbers with a fraction
    columns: dict[str, str] = field(default_factory=dict)  # our field: their column; what is not named is guessed
    header: tuple[str, ...] = ()  # names of the columns where a .csv or .tsv has no header line
    encoding: str = "utf-8"  # of .csv and .tsv; others are gb18030, latin-1, utf-16, ...
    labels: tuple[str, ...] = ()  # in this order; unset means the sorted labels of the training rows
    template: tuple[str, ...] = ()  # other passes than the kind's own, such as "{text} | {pair}"
    targets: str | None = None  # file aligned line by line with `train`, for translate
    validation_targets: str | None = None  # likewise for `validation`
    test_targets: str | None = None  # likewise for `test`
    validation_share: float = 0.1  # of the training rows, when there is no validation file
    length: int | None = None  # tokens of the longest row; unset means the model's context
    stride: int | None = None  # tokens from one window of a long context to the next; unset: 128 or a third of `length`
    question_length: int = 64  # tokens of a question that are kept, for span
    skip_bad_rows: bool = False  # leave out rows without text or with a broken label, instead of stopping

    def __post_init__(self) -> None:
        if not 0.0 < self.validation_share < 1.0:
            raise UserError(f"validation_share={self.validation_share} must lie between 0 and 1, for example 0.1")
        if self.length is not None and self.length < 8:
            raise UserError(f"length={self.length} must be at least 8")
        if self.stride is not None and self.stride < 1:
            raise UserError(f"stride={self.stride} must be at least 1, for example 128")
        check_encoding(self.encoding)


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """Which weights move, and how much."""

    mode: Literal["full", "features", "lora"] = "full"  # features: the body is frozen and only the head learns
    freeze_layers: int = 0  # the embeddings and this many first layers stay as they are
    unfreeze_every: int | None = None  # steps after which one more layer, from the top, begins to learn
    layer_decay: float = 1.0  # the learning rate of each layer, as a share of that of the layer above it
    transfer_layers: int | None = None  # only the first layers are taken from the model; -1 takes nothing at all
    rank: int = 8  # of LoRA
    alpha: float = 16.0  # LoRA's update is multiplied by alpha / rank
    lora_dropout: float = 0.0  # on what goes into LoRA's matrices
    lora_parts: tuple[Literal["q", "k", "v", "out", "up", "down"], ...] = ("q", "v")  # matrices that LoRA adds to

    def __post_init__(self) -> None:
        if self.freeze_layers < 0:
            raise UserError(f"freeze_layers={self.freeze_layers} cannot be negative; 0 freezes nothing")
        if not 0.0 < self.layer_decay <= 1.0:
            raise UserError(f"layer_decay={self.layer_decay} must be above 0 and at most 1, for example 0.95")
        if self.transfer_layers is not None and self.transfer_layers < -1:
            raise UserError(f"transfer_layers={self.transfer_layers} must be -1 (nothing), 0 (embeddings) or more")
        if self.rank < 1 or not self.alpha > 0 or not 0.0 <= self.lora_dropout < 1.0 or not self.lora_parts:
            raise UserError("rank must be at least 1, alpha above 0, lora_dropout in [0, 1), lora_parts not empty")
        if self.unfreeze_every is not None and (self.unfreeze_every < 1 or self.mode != "full"):
            raise UserError(f"unfreeze_every={self.unfreeze_every} must be at least 1, and needs mode=full")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """From a pretrained model and labelled rows to a measured model."""

    model: str  # folder or hub name of the pretrained model
    task: TaskConfig
    folder: Path  # of the run: model/, report.md, predictions.jsonl, plots
    adapt: AdaptConfig = AdaptConfig()
    epochs: float = 3.0  # passes over the training rows
    batch: int = 32  # rows in one update
    micro_batch: int | None = None  # examples computed at a time; unset means the whole batch
    lr: float | None = None  # peak; unset: GPT-1's 6.25e-5 or BERT's 2e-5 times 768 / width; 1e-3 for lora and features
    warmup_share: float | None = None  # of the steps; unset means GPT-1's 0.002, or 0.1
    weight_decay: float = 0.01  # on matrices; never on biases and norms
    clip: float = 1.0  # largest norm of the gradient; inf means unclipped
    dropout: float | None = None  # in the whole model; unset means as it was pretrained
    classifier_dropout: float = 0.1  # before the new head
    auxiliary_weight: float | None = None  # of a GPT's own loss beside the task's; unset: 0.5 to classify or choose
    class_weights: Literal["none", "balanced"] = "none"  # balanced: a rare label counts as much as a frequent one
    label_smoothing: float = 0.0  # probability spread over all other labels
    temperature: float = 0.05  # of the contrastive objective
    tune_threshold: bool = False  # of a two-class task: the probability from which the second label is given
    metric: str | None = None  # that picks the best checkpoint; unset means the task's own
    validate_every: int | None = None  # steps; unset means five times in each epoch
    patience: int | None = None  # validations without a better one after which to stop; unset means never
    seeds: int | None = None  # runs; unset means 3 below 5000 training rows, else 1
    seed: int = 0  # of the first run; each further run has the next
    beams: int = 4  # for translate
    answer_length: int = 30  # tokens of the longest answer, for span
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto measures what the device is fast at
    resume: bool = False  # go on with a run that was stopped; finished seeds are kept
    overwrite: bool = False  # replace a run that is there

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below_one(
            self, "batch", "micro_batch", "validate_every", "patience", "seeds", "beams", "answer_length"
        )
        if not self.epochs > 0:
            yield f"epochs={self.epochs} must be above 0, for example 3"
        if self.lr is not None and not self.lr > 0:
            yield f"lr={self.lr} must be above 0, for example 5e-5"
        if self.warmup_share is not None and not 0.0 <= self.warmup_share <= 1.0:
            yield f"warmup_share={self.warmup_share} is a share of the steps, between 0 and 1, for example 0.1"
        for name in ("dropout", "classifier_dropout", "label_smoothing"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                yield f"{name}={value} must be at least 0 and below 1, for example 0.1"
        if self.auxiliary_weight is not None and self.auxiliary_weight < 0:
            yield f"auxiliary_weight={self.auxiliary_weight} cannot be negative; 0 turns it off"
        if not self.temperature > 0:
            yield f"temperature={self.temperature} must be above 0, for example 0.05"
