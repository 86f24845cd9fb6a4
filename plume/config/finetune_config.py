"""Fine-tuning: labelled rows, which weights are trained, the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plume.config.fields import (
    DEVICE,
    ENCODING,
    MODEL,
    OVERWRITE,
    PIECES,
    Backend,
    Checked,
    TaskTarget,
    TrainPrecision,
    about,
    below_one,
    below_zero,
    not_positive,
    not_probability,
    option,
    unknown_encoding,
    wrong_seed,
)


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Checked):
    """Labelled rows: where they are, what their columns mean, and the kind of task."""

    train: str = field(metadata=about("training rows: .csv .tsv .jsonl .json .parquet .conll, or a folder"))
    validation: str | None = option(None, "validation rows; unset: split from the training rows")
    test: str | None = option(None, "test rows to predict at the end; labels may be missing")
    name: str | None = option(None, "GLUE task, whose files, columns and metric are known: sst2, cola, rte, ...")
    kind: str | None = option(
        None, "classify multilabel pair similarity choose tag span embed generate; unset: guessed"
    )
    target: TaskTarget | None = option(None, "unset: number if labels are numbers with a fraction")
    columns: dict[str, str] = field(
        default_factory=dict, metadata=about("Plume's field = column of the file; unset: guessed")
    )
    header: tuple[str, ...] = option((), "column names of a .csv or .tsv without a header line")
    encoding: str = option("utf-8", ENCODING)
    labels: tuple[str, ...] = option((), "labels in this order; unset: sorted labels of the training rows")
    template: tuple[str, ...] = option((), 'input template in place of the kind\'s own, e.g. "{text} | {pair}"')
    targets: str | None = option(None, "target file aligned line by line with train, for generate")
    validation_targets: str | None = option(None, "target file aligned with validation")
    test_targets: str | None = option(None, "target file aligned with test")
    validation_fraction: float = option(0.1, "fraction of the training rows to validate on without a validation file")
    length: int | None = option(None, "maximum sequence length in tokens; unset: the model's context")
    stride: int | None = option(None, "stride between windows of a long context; unset: 128 or a third of length")
    question_length: int = option(64, "span: maximum question length in tokens")
    skip_bad_rows: bool = option(False, "skip rows without text or with a bad label instead of stopping")

    def _problems(self) -> Iterator[str]:
        if not 0.0 < self.validation_fraction < 1.0:
            yield f"validation_fraction={self.validation_fraction} must lie between 0 and 1, for example 0.1"
        if self.length is not None and self.length < 8:
            yield f"length={self.length} must be at least 8"
        yield from below_one(self, "stride", "question_length")
        if self.validation is not None and self.validation_fraction != TaskConfig.validation_fraction:
            yield f"validation_fraction={self.validation_fraction} has no effect with validation={self.validation}"
        for name in ("validation", "test"):
            if getattr(self, f"{name}_targets") is not None and getattr(self, name) is None:
                yield f"{name}_targets needs {name}, the file that it is aligned with"
        yield from unknown_encoding(self.encoding)


@dataclass(frozen=True, kw_only=True)
class AdaptConfig(Checked):
    """Which weights are trained."""

    mode: Literal["full", "features", "lora"] = option("full", "features: frozen body, only the head is trained")
    freeze_layers: int = option(0, "freeze the embeddings and this many first layers")
    unfreeze_every: int | None = option(None, "gradual unfreezing: steps per layer, from the top")
    layer_decay: float = option(1.0, "layer-wise learning-rate decay: factor per layer, from the top")
    transfer_layers: int | None = option(None, "load only the first layers of the model; -1: none, not even embeddings")
    lora_rank: int = option(8, "LoRA rank")
    lora_alpha: float = option(16.0, "LoRA alpha; updates are scaled by alpha / rank")
    lora_dropout: float = option(0.0, "dropout on the input of LoRA's matrices")
    lora_modules: tuple[Literal["q", "k", "v", "out", "up", "down"], ...] = option(
        ("q", "v"), "matrices with LoRA: q k v out up down"
    )

    def _problems(self) -> Iterator[str]:
        if self.freeze_layers < 0:
            yield f"freeze_layers={self.freeze_layers} cannot be negative; 0 freezes nothing"
        if not 0.0 < self.layer_decay <= 1.0:
            yield f"layer_decay={self.layer_decay} must be above 0 and at most 1, for example 0.95"
        if self.transfer_layers is not None and self.transfer_layers < -1:
            yield f"transfer_layers={self.transfer_layers} must be -1 (nothing), 0 (embeddings) or more"
        yield from below_one(self, "lora_rank")
        yield from not_positive(self, {"lora_alpha": 16})
        yield from not_probability(self, {"lora_dropout": 0.1})
        if not self.lora_modules:
            yield "lora_modules is empty; q and v are the usual ones"
        lora = ("lora_rank", "lora_alpha", "lora_dropout", "lora_modules")
        unused: tuple[str, ...] = lora if self.mode != "lora" else ()
        unused += ("freeze_layers", "layer_decay") if self.mode == "features" else ()
        for name in unused:
            if (value := getattr(self, name)) != getattr(AdaptConfig, name):
                yield f"{name}={value} needs mode={'lora' if name in lora else 'full or lora'}, not {self.mode}"
        if self.unfreeze_every is not None and (self.unfreeze_every < 1 or self.mode != "full"):
            yield f"unfreeze_every={self.unfreeze_every} must be at least 1, and needs mode=full"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Checked):
    """From a pretrained model and labelled rows to an evaluated model."""

    model: str = field(metadata=about(MODEL))
    task: TaskConfig = field(metadata=about("labelled rows and the kind of task"))
    folder: Path = field(metadata=about("run folder: model/, report.md, predictions.jsonl, plots"))
    adapt: AdaptConfig = option(AdaptConfig(), "which weights are trained")
    epochs: float = option(3.0, "epochs over the training rows")
    batch: int = option(32, "rows per optimizer step, over all ranks")
    micro_batch: int | None = option(None, "rows per forward pass; unset: the whole batch")
    lr: float | None = option(None, "peak learning rate; unset: by family, weights and steps (docs/finetune.md)")
    search: int | None = option(None, "learning rates to try in short trainings; the best one is used")
    warmup_ratio: float | None = option(None, "fraction of the steps with warmup; unset: 0.002 (GPT) or 0.1")
    weight_decay: float = option(0.01, "weight decay of matrices; biases and norms have none")
    grad_clip: float = option(1.0, "maximum gradient norm; inf: no clipping")
    dropout: float | None = option(None, "dropout probability; unset: as pretrained")
    classifier_dropout: float = option(0.1, "dropout before the new head")
    auxiliary_weight: float | None = option(
        None, "weight of GPT's language-model loss; unset: 0.5 for classify and choose"
    )
    class_weights: Literal["none", "balanced"] = option("none", "balanced: weight classes by inverse frequency")
    label_smoothing: float = option(0.0, "label smoothing, spread over all labels")
    contrastive: int | None = option(None, "few-shot: steps on pairs of rows, then a logistic regression; unset: off")
    temperature: float = option(0.05, "temperature of the contrastive loss, for embed")
    tune_threshold: bool = option(False, "binary and multi-label tasks: tune the decision threshold on validation")
    metric: str | None = option(None, "metric that picks the best checkpoint; unset: the task's own")
    validate_every: int | None = option(None, "steps between validations; unset: five per epoch, at least 5 steps")
    patience: int | None = option(None, "early stopping: validations without improvement; unset: off")
    seeds: int | None = option(None, "number of runs with different seeds; unset: 3 below 5000 rows, else 1")
    seed: int = option(0, "random seed of the first run; later runs use the next ones")
    beams: int = option(4, "beam size, for generate")
    answer_length: int = option(30, "maximum answer length in tokens, for span")
    device: str = option("auto", DEVICE)
    precision: TrainPrecision = option("auto", "of matrix products; auto measures which is faster")
    backend: Backend = option("local", PIECES)
    resume: bool = option(False, "continue an interrupted run; finished seeds are kept")
    overwrite: bool = option(False, OVERWRITE)

    def _problems(self) -> Iterator[str]:
        yield from below_one(
            self, "batch", "micro_batch", "validate_every", "patience", "seeds", "beams", "answer_length", "contrastive"
        )
        yield from not_positive(self, {"epochs": 3, "lr": 5e-5, "temperature": 0.05})
        yield from below_zero(self, "weight_decay")
        yield from wrong_seed(self.seed)
        if self.search is not None and self.search < 3:
            yield f"search={self.search} must be 3 or more, for example 8"
        if self.search is not None and self.lr is not None:
            yield f"search={self.search} finds the rate that lr={self.lr} sets; leave one of them out"
        if self.contrastive is not None and self.adapt.mode == "features":
            yield f"contrastive={self.contrastive} trains the body, which adapt.mode='features' keeps; leave one out"
        if self.warmup_ratio is not None and not 0.0 <= self.warmup_ratio <= 1.0:
            yield f"warmup_ratio={self.warmup_ratio} must lie between 0 and 1, for example 0.1"
        yield from not_probability(self, {"dropout": 0.1, "classifier_dropout": 0.1, "label_smoothing": 0.1})
        if self.auxiliary_weight is not None and self.auxiliary_weight < 0:
            yield f"auxiliary_weight={self.auxiliary_weight} cannot be negative; 0 turns it off"
