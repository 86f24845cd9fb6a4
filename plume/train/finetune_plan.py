"""What every seed of a fine-tuning shares: the task's rows, tokenised for a model, and the options of its training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from plume.config import FinetuneConfig, ModelConfig, UserError
from plume.hf import read_config, resolve, stored_model
from plume.model.heads import TOKEN_HEADS
from plume.tasks import kind_named
from plume.tasks.classify import ClassifyTask
from plume.tasks.data_checks import Finding, check_data
from plume.tasks.generate import with_end_token
from plume.tasks.schema import TaskSettings
from plume.tasks.task_data import TaskData, load_task
from plume.tasks.task_kind import TaskKind, TaskOptions
from plume.tasks.token_rows import TaskRows, Truncation, with_task_tokens
from plume.text import Tokenizer, load_tokenizer
from plume.train import adapt
from plume.train.lr_search import RateScore
from plume.util.console import plural

PAPER_WIDTH = 768  # of GPT-1 and of BERT's base, for which the papers found their rates
KIND_OPTIONS = (
    "class_weights", "label_smoothing", "tune_threshold", "temperature", "beams", "answer_length",
    "template", "stride", "question_length", "labels", "target",
)  # fmt: skip
PAPER_SPREAD = 0.04  # of the weights of GPT-1, about: from the norms in Martin, Peng and Mahoney, 2021
MOST_TURN = 2.0  # for larger weights: beyond it nothing was measured
PAPER_STEPS = 200  # about those of the papers' smallest task
FIRST_SPREAD = 0.02  # of weights that were not pretrained
NEW_WEIGHTS_LR = 1e-3  # the most that they get; pretrained ones in proportion to their spread


@dataclass(frozen=True, kw_only=True)
class FinetunePlan:
    """Everything that is the same for every seed."""

    config: FinetuneConfig
    data: TaskData
    tokenizer: Tokenizer
    kind: TaskKind
    train: TaskRows
    validation: TaskRows
    metric: str
    auxiliary_weight: float
    lr: float
    lr_source: str
    width: int  # of the model
    findings: list[Finding] = field(default_factory=list)  # problems of the data
    rates: list[RateScore] = field(default_factory=list)  # that a search tried
    truncation: Truncation = field(default_factory=Truncation)  # of training and validation rows

    @property
    def selected_by(self) -> str:
        """What the best checkpoint is chosen by."""
        return self.metric if self.kind.selects_by_metric else "loss"


def make_plan(config: FinetuneConfig) -> FinetunePlan:
    """Read the task and tokenise it for the model."""
    place = resolve(config.model)
    found, data = read_config(place), load_task(config.task, seed=config.seed)
    kind_class = kind_named(data.kind)
    check_family(kind_class, found.model, found.family.model_type)
    if kind_class.head not in found.family.heads:
        raise UserError(f"a {found.family.model_type} model cannot have a {kind_class.head} head")
    adapt.check_adapt(config.adapt, found.model.layers + found.model.decoder_layers)
    if found.model.recurrent and config.adapt.mode == "lora":
        raise UserError("adapt.mode='lora' needs the matrices of attention; a recurrent model has adapt.mode='full'")
    if config.adapt.mode == "features" and kind_class.head in (*TOKEN_HEADS, "bare"):
        raise UserError(f"adapt.mode='features' trains a new head, which {kind_class.name} tasks lack; use lora")
    check_contrastive(config, kind_class, data)
    check_options(config, kind_class, data, found.model)
    auxiliary_weight = auxiliary_weight_of(config, kind_class, found.model.causal)
    tokenizer = load_tokenizer(place)
    if kind_class.decoder_only and not found.model.decoder_layers:
        tokenizer = with_end_token(tokenizer)
    elif not kind_class.encoder_decoder:
        tokenizer = with_task_tokens(tokenizer)
    kind = make_kind(kind_class, config, data, tokenizer, found.model)
    train, validation = kind.encode(data.train), kind.encode(data.validation)
    spread, steps = weight_spread(place, config), planned_steps(config, len(train))
    lr, lr_source = learning_rate(config, found.model, spread, steps)
    return FinetunePlan(
        config=config,
        data=data,
        tokenizer=tokenizer,
        kind=kind,
        train=train,
        validation=validation,
        metric=metric_name(config, data, kind),
        auxiliary_weight=auxiliary_weight,
        lr=lr,
        lr_source=lr_source,
        width=found.model.width,
        findings=check_data(data, kind),
        truncation=replace(kind.truncation),
    )


def check_family(kind: type[TaskKind], model: ModelConfig, model_type: str) -> None:
    fits = kind.encoder_decoder == (model.decoder_layers > 0) or (kind.decoder_only and model.causal)
    if not fits:
        wanted = "an encoder-decoder or a GPT" if kind.encoder_decoder else "a GPT or a BERT, not an encoder-decoder"
        raise UserError(f"a {kind.name} task needs {wanted}; this model is a {model_type}")


def check_contrastive(config: FinetuneConfig, kind: type[TaskKind], data: TaskData) -> None:
    if config.contrastive is None:
        return
    if not (issubclass(kind, ClassifyTask) and kind.one_label) or data.target == "number":
        what = "numbers" if data.target == "number" else f"a {kind.name} task"
        raise UserError(f"contrastive={config.contrastive} needs one label for each row; it does not take {what}")
    if config.auxiliary_weight is not None and config.auxiliary_weight > 0:
        raise UserError("contrastive has no next-token loss; leave auxiliary_weight out")


def check_options(config: FinetuneConfig, kind: type[TaskKind], data: TaskData, model: ModelConfig) -> None:
    """Refuse options that are set and that this task would not use."""
    used = {*kind.uses}
    if data.target == "number" or config.contrastive is not None:
        used -= {"class_weights", "label_smoothing"}
    if data.target == "number":
        used.discard("labels")
    if data.target == "number" or (issubclass(kind, ClassifyTask) and kind.one_label and len(data.labels) != 2):
        used.discard("tune_threshold")
    if model.decoder_layers:
        used.discard("template")
    for name in KIND_OPTIONS:
        section = config.task if hasattr(config.task, name) else config
        if name not in used and (value := getattr(section, name)) != getattr(type(section), name):
            raise UserError(f"{name}={value} has no effect on this {kind.name} task; leave it out")


def auxiliary_weight_of(config: FinetuneConfig, kind: type[TaskKind], causal: bool) -> float:
    if config.contrastive is not None:
        return 0.0
    if config.auxiliary_weight is None:
        return kind.auxiliary_weight if causal else 0.0
    if config.auxiliary_weight > 0 and not (causal and kind.allows_auxiliary):
        what = f"a {kind.name} task" if causal else "a model that is not causal"
        raise UserError(
            f"auxiliary_weight={config.auxiliary_weight}: {what} has no next-token loss; auxiliary_weight=0 works"
        )
    return config.auxiliary_weight


def make_kind(
    kind: type[TaskKind], config: FinetuneConfig, data: TaskData, tokenizer: Tokenizer, model: ModelConfig
) -> TaskKind:
    length = model.context if config.task.length is None else config.task.length
    if length > model.context:
        raise UserError(f"task.length={length} is longer than the model's context of {model.context}")
    settings = TaskSettings(
        kind=data.kind,
        target=data.target,
        labels=data.labels,
        template=config.task.template,
        length=length,
        stride=config.task.stride,
        question_length=config.task.question_length,
        answer_length=config.answer_length,
        columns=data.columns,
        header=data.header,
        encoding=config.task.encoding,
    )
    options = TaskOptions(
        class_weights=balanced(data) if config.class_weights == "balanced" and data.target == "label" else None,
        label_smoothing=config.label_smoothing,
        temperature=config.temperature,
        beams=config.beams,
        tune_threshold=config.tune_threshold,
        contrastive=config.contrastive is not None,
    )
    settings = kind.settings_for(settings, (*data.train, *data.validation))
    return kind(settings, tokenizer, causal=model.causal, options=options)


def balanced(data: TaskData) -> tuple[float, ...]:
    """Weights that make every class count the same: rows / (classes * rows of the class)."""
    counts = [sum(e.label == label for e in data.train) for label in data.labels]
    return tuple(len(data.train) / (len(counts) * max(count, 1)) for count in counts)


def metric_name(config: FinetuneConfig, data: TaskData, kind: TaskKind) -> str:
    known = kind.metric().results()
    if config.metric is None:
        return data.metric if data.metric is not None and data.metric in known else str(kind.metric().main)
    if config.metric not in known:
        raise UserError(f"metric={config.metric!r} is not one of this task's: {', '.join(known)}")
    return config.metric


def planned_steps(config: FinetuneConfig, rows: int) -> int:
    if config.contrastive is not None:
        return config.contrastive
    return max(1, math.ceil(config.epochs * -(-rows // config.batch)))


def learning_rate(config: FinetuneConfig, model: ModelConfig, spread: float, steps: int) -> tuple[float, str]:
    """The peak and where it comes from.

    Adam moves each weight by about the rate, whatever the gradient. So the papers' rates belong to their width,
    narrower models take larger steps; to the size of their weights, larger ones turn as far; and to hundreds of steps.
    """
    if config.lr is not None:
        return config.lr, "set by --lr"
    if config.adapt.mode in ("lora", "features"):
        return NEW_WEIGHTS_LR, f"for {config.adapt.mode}"
    paper, rate = ("GPT-1", 6.25e-5) if model.causal else ("BERT", 2e-5)
    turn = min(spread / PAPER_SPREAD, MOST_TURN)
    scaled = rate * PAPER_WIDTH / model.width * turn * max(1.0, math.sqrt(PAPER_STEPS / steps))
    of_model = f"width {model.width}, weights of {spread:.2g}, {plural(steps, 'step')}"
    return min(scaled, NEW_WEIGHTS_LR * spread / FIRST_SPREAD), f"{paper}'s {rate:g}, for {of_model}"


def weight_spread(place: Path, config: FinetuneConfig) -> float:
    """The root mean square of the matrices in the middle layer, which are not read where the rate is set."""
    if config.lr is not None or (config.adapt.transfer_layers is not None and config.adapt.transfer_layers < 0):
        return FIRST_SPREAD
    blocks = adapt.layers_of(stored_model(place))
    matrices = [p.detach().float() for p in blocks[len(blocks) // 2].parameters() if p.ndim == 2]
    return math.sqrt(sum(float(p.square().sum()) for p in matrices) / sum(p.numel() for p in matrices))
