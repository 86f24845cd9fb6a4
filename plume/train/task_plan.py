"""What a fine-tuning needs before it begins: the task read and tokenised, the model, the loss, the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plume.config import FinetuneConfig, ModelConfig, TrainConfig, UserError
from plume.data.tasks import TaskData, load_task
from plume.data.transform import ready
from plume.heads import Model
from plume.text import Tokenizer, load_tokenizer
from plume.train import adapt
from plume.train.jobs import ChooseJob, EmbedJob, Job, JobSettings, LabelJob, RowJob, TagJob
from plume.train.labelled import Labelled
from plume.train.objectives import Tokens
from plume.train.span_job import SpanJob
from plume.train.task_loss import TaskObjective
from plume.train.translate import Pairs, TranslateJob, Writer
from plume.weights import load_model, read_config, resolve

PAPER_WIDTH = 768  # of GPT-1 and of BERT's base, for which the papers found their rates
NEW_WEIGHTS_LR = 1e-3  # for weights that were not pretrained; pretrained ones never get more


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is the same for every seed."""

    config: FinetuneConfig
    data: TaskData
    tokenizer: Tokenizer
    job: Job
    train: Labelled | Pairs
    validation: Labelled | Pairs
    metric: str
    auxiliary: float
    lr: float
    why_lr: str


def make_plan(config: FinetuneConfig, writer: Writer | None = None) -> Plan:
    """Read the task and tokenise it for the model."""
    place = resolve(config.model)
    said = read_config(place)
    data = load_task(config.task, seed=config.seed)
    check_family(said.model.decoder_layers > 0, data.kind, said.family.model_type)
    adapt.check_adapt(config.adapt, said.model.layers + said.model.decoder_layers)
    auxiliary = auxiliary_of(config, data.kind, said.model.causal)
    length = said.model.context if config.task.length is None else config.task.length
    if length > said.model.context:
        raise UserError(f"task.length={length} is longer than the model's context of {said.model.context}")
    tokenizer = load_tokenizer(place)
    if data.kind != "translate":
        tokenizer = ready(tokenizer)
    job = make_job(config, data, tokenizer, writer, causal=said.model.causal, length=length)
    if job.head not in said.family.heads:
        raise UserError(f"a {said.family.model_type} model cannot carry a {job.head} head")
    lr, why_lr = learning_rate(config, said.model)
    return Plan(
        config=config,
        data=data,
        tokenizer=tokenizer,
        job=job,
        train=job.encode(data.train),
        validation=job.encode(data.validation),
        metric=metric_name(config, data, job),
        auxiliary=auxiliary,
        lr=lr,
        why_lr=why_lr,
    )


def check_family(two_stacks: bool, kind: str, model_type: str) -> None:
    if two_stacks != (kind == "translate"):
        wanted = "an encoder-decoder" if kind == "translate" else "a GPT or a BERT, not an encoder-decoder"
        raise UserError(f"a {kind} task needs {wanted}; this model is a {model_type}")


def auxiliary_of(config: FinetuneConfig, kind: str, causal: bool) -> float:
    if config.auxiliary_weight is None:
        return 0.5 if causal and kind in ("classify", "pair", "similarity", "choose") else 0.0
    if config.auxiliary_weight > 0 and not causal:
        raise UserError(
            f"auxiliary_weight={config.auxiliary_weight}: a model that sees both sides has no next-token loss; "
            "auxiliary_weight=0 works"
        )
    return config.auxiliary_weight


def make_job(
    config: FinetuneConfig, data: TaskData, tokenizer: Tokenizer, writer: Writer | None, *, causal: bool, length: int
) -> Job:
    impossible = data.kind == "span" and any(not e.label for e in (*data.train, *data.validation))
    settings = JobSettings(
        kind=data.kind,
        target=data.target,
        labels=data.labels,
        template=config.task.template,
        length=length,
        stride=config.task.stride,
        question_length=config.task.question_length,
        answer_length=config.answer_length,
        null_threshold=0.0 if impossible else None,
    )
    match data.kind:
        case "choose":
            return ChooseJob(settings, tokenizer, causal=causal)
        case "tag":
            return TagJob(settings, tokenizer, causal=causal)
        case "span":
            return SpanJob(settings, tokenizer, causal=causal)
        case "translate":
            assert writer is not None, "texts are written by the generator: plume.finetune brings it"
            return TranslateJob(settings, tokenizer, writer, config.beams)
        case "embed":
            return EmbedJob(settings, tokenizer, causal=causal, temperature=config.temperature)
        case _:
            weights = balanced(data) if config.class_weights == "balanced" and data.target == "label" else None
            return LabelJob(settings, tokenizer, causal=causal, class_weights=weights, smoothing=config.label_smoothing)


def balanced(data: TaskData) -> list[float]:
    """Weights that make every class count the same: rows / (classes * rows of the class)."""
    counts = [sum(e.label == label for e in data.train) for label in data.labels]
    return [len(data.train) / (len(counts) * max(count, 1)) for count in counts]


def metric_name(config: FinetuneConfig, data: TaskData, job: Job) -> str:
    if config.metric is None:
        return job.metric().main if data.metric is None else data.metric
    if config.metric not in (known := job.metric().results()):
        raise UserError(f"metric={config.metric!r} is not one of this task's: {', '.join(known)}")
    return config.metric


def build_model(plan: Plan, seed: int) -> tuple[Model, adapt.Freezer]:
    """The pretrained model with a fresh head and new rows, and what decides which of its weights learn."""
    config = plan.config
    torch.manual_seed(seed)
    labels = plan.data.labels if plan.data.labels else None
    model = load_model(config.model, head=plan.job.head, labels=labels)
    fresh = adapt.grow_table(model, max(plan.tokenizer.vocab_size, model.config.vocab_size))
    adapt.keep_layers(model, config.adapt.transfer_layers)
    adapt.set_dropout(model, config.dropout, config.classifier_dropout)
    if config.adapt.mode == "lora":
        adapt.add_lora(model, config.adapt, fresh)
    return model, adapt.Freezer(model, config.adapt)


def make_objective(plan: Plan) -> Any:
    if isinstance(plan.job, RowJob):
        return TaskObjective(plan.job, plan.auxiliary, frozen_body=plan.config.adapt.mode == "features")
    return Tokens(plan.config.label_smoothing)


def learning_rate(config: FinetuneConfig, model: ModelConfig) -> tuple[float, str]:
    """The peak and where it comes from.

    Adam moves each weight by about the rate, whatever the gradient, so the sum over a row moves by the rate times the
    width: the papers' rates belong to their width, and narrower models take larger steps.
    """
    if config.lr is not None:
        return config.lr, "as asked"
    if config.adapt.mode in ("lora", "features"):
        return NEW_WEIGHTS_LR, f"for {config.adapt.mode}"
    paper, rate = ("GPT-1", 6.25e-5) if model.causal else ("BERT", 2e-5)
    scaled = min(rate * PAPER_WIDTH / model.width, NEW_WEIGHTS_LR)
    return scaled, f"{paper}'s {rate:g} at width {PAPER_WIDTH}, for width {model.width}"


def train_config(plan: Plan, steps_per_epoch: int, seed: int, *, causal: bool) -> TrainConfig:
    config = plan.config
    steps = max(1, math.ceil(config.epochs * steps_per_epoch))
    warmup = (0.002 if causal else 0.1) if config.warmup_share is None else config.warmup_share
    every = max(1, steps_per_epoch // 5) if config.validate_every is None else config.validate_every
    return TrainConfig(
        steps=steps,
        batch=config.batch,
        micro_batch=config.batch if config.micro_batch is None else config.micro_batch,
        lr=plan.lr,
        beta2=0.999,
        weight_decay=config.weight_decay,
        clip=config.clip,
        schedule="linear",
        warmup_steps=min(steps, math.ceil(warmup * steps)),
        final_lr_share=0.0,
        seed=seed,
        device=config.device,
        precision=config.precision,
        log_every=max(1, min(20, steps // 10)),
        validate_every=min(every, steps),
        checkpoint_every=steps_per_epoch,
        keep_last=1,
    )


@dataclass(frozen=True)
class HeldOut:
    """Validation items as batches of the loop: the shortest first."""

    data: Labelled | Pairs
    count: int

    def rows(self, step: int) -> int:
        return self.count

    def part(self, step: int, first: int, rows: int) -> Any:
        return self.data.batch(np.argsort(self.data.lengths, kind="stable")[first : first + rows])
