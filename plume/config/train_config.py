"""Training on text: the loop, the objective, pretraining, distillation, sweeps, the demo, and the plan before a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from plume.config.data_config import STANDARD_LIBRARY, DataConfig
from plume.config.fields import (
    DEVICE,
    ENCODING,
    OVERWRITE,
    PIECES,
    RESUME,
    RUN_FOLDER,
    SEED,
    Backend,
    Checked,
    ObjectiveKind,
    Strategy,
    TrainPrecision,
    about,
    at_home,
    below_one,
    below_zero,
    not_positive,
    not_probability,
    option,
    refuse,
    unknown_encoding,
    wrong_seed,
)
from plume.config.model_config import ModelConfig
from plume.config.recipes import RECIPE, read_recipe

PREPARED = "folder that `plume prepare` wrote; [data] is then ignored"
DATA = "training text; ignored if `prepared` is set"


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """The training loop, whatever the objective."""

    steps: int = field(metadata=about("optimizer steps"))
    batch: int = option(64, "sequences per optimizer step, over all ranks")
    micro_batch: int | None = option(None, "sequences per forward pass on one rank; unset: by memory")
    batch_start: int | None = option(None, "batch size at step 0, as in GPT-3; unset: constant batch size")
    batch_ramp_steps: int = option(0, "steps over which the batch size grows from batch_start")
    optimizer: Literal["adamw", "muon"] = option("adamw", "muon: for the matrices of the blocks, AdamW for the rest")
    lr: float = option(6e-4, "peak learning rate of AdamW")
    muon_lr: float = option(0.02, "peak learning rate of Muon")
    beta1: float = option(0.9, "AdamW beta1")
    beta2: float = option(0.95, "AdamW beta2")
    eps: float = option(1e-8, "AdamW epsilon")
    bias_correction: bool = option(True, "AdamW bias correction; BERT's code had none")
    weight_decay: float = option(0.1, "weight decay of matrices; biases and norms have none")
    decay_embeddings: bool = option(True, "weight decay of embeddings and output weights too")
    muon_momentum: float = option(0.95, "Muon momentum")
    muon_iterations: int = option(5, "Newton-Schulz iterations of Muon")
    muon_weight_decay: float | None = option(None, "weight decay of Muon; unset: weight_decay")
    grad_clip: float = option(1.0, "maximum gradient norm; inf: no clipping")
    schedule: Literal["cosine", "linear", "constant", "constant-then-decay", "inverse-sqrt"] = option(
        "cosine", "learning-rate schedule after the warmup"
    )
    warmup_steps: int = option(0, "steps of linear learning-rate warmup")
    final_lr_ratio: float = option(0.1, "final learning rate divided by the peak")
    decay_steps: int | None = option(None, "step at which the decay ends; unset: the last step")
    cooldown_fraction: float = option(0.2, "fraction of the steps that constant-then-decay decays over")
    label_smoothing: float = option(0.0, "label smoothing, spread over all tokens; the Transformer: 0.1")
    seed: int = option(0, SEED)
    device: str = option("auto", DEVICE)
    precision: TrainPrecision = option("auto", "of matrix products; auto measures which is faster")
    compile: bool = option(False, "use torch.compile")
    activation_checkpointing: bool = option(False, "recompute activations in the backward: less memory, more time")
    strategy: Strategy = option("auto", "of many ranks; auto: fsdp if a replica does not fit")
    tensor_parallel: int = option(1, "tensor-parallel group size")
    log_every: int = option(10, "steps between lines of metrics.jsonl")
    validate_every: int | None = option(None, "steps between validations; unset: ten in the run")
    validation_rows: int = option(256, "validation sequences, the same every time")
    checkpoint_every: int | None = option(None, "steps between checkpoints; unset: as validate_every")
    keep_last: int = option(2, "number of latest checkpoints to keep")
    async_checkpoints: bool | None = option(None, "write checkpoints in the background; unset: on GPUs")
    keep_best: bool = option(True, "also keep the checkpoint with the lowest validation loss, and export it")
    average_checkpoints: int = option(1, "average the last N checkpoints; the Transformer: 5")
    sample_every: int | None = option(None, "steps between samples; unset: as validate_every")
    sample_prompt: str = option("", "prompt of samples; empty: the start token")
    sample_tokens: int = option(64, "new tokens per sample")
    unigram_check_step: int | None = option(
        None, "warn if the loss is above the unigram entropy at this step; unset: half of steps"
    )
    tensorboard: bool = option(False, "write TensorBoard events")
    wandb: bool = option(False, "log to Weights & Biases")

    def _problems(self) -> Iterator[str]:
        yield from below_one(self, "steps", "batch", "log_every", "keep_last", "tensor_parallel", "validation_rows")
        yield from below_one(self, "micro_batch", "batch_start", "validate_every", "checkpoint_every", "sample_every")
        yield from not_probability(self, {"beta1": 0.9, "beta2": 0.95, "muon_momentum": 0.95, "label_smoothing": 0.1})
        yield from not_positive(self, {"lr": 6e-4, "muon_lr": 0.02, "eps": 1e-8})
        if not self.grad_clip > 0:
            yield f"grad_clip={self.grad_clip} must be above 0, for example 1.0; inf means unclipped"
        yield from below_zero(self, "warmup_steps", "weight_decay", "muon_weight_decay")
        yield from wrong_seed(self.seed)
        for name in ("final_lr_ratio", "cooldown_fraction"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                yield f"{name}={getattr(self, name)} must lie between 0 and 1, for example 0.1"
        if not 1 <= self.muon_iterations <= 5:
            yield f"muon_iterations={self.muon_iterations} must lie between 1 and 5"
        if self.batch_start is not None and not self.batch_start <= self.batch:
            yield f"batch_start={self.batch_start} must be at most batch={self.batch}"
        if self.batch_start is not None and self.batch_ramp_steps < 1:
            yield f"batch_ramp_steps={self.batch_ramp_steps} must be at least 1 with batch_start={self.batch_start}"
        count = self.average_checkpoints
        if not 1 <= count <= self.keep_last or (count > 1 and self.keep_best):
            yield f"average_checkpoints={count} needs keep_last={count} or more, and keep_best=false above 1"


@dataclass(frozen=True, kw_only=True)
class MaskingConfig(Checked):
    """Masked language modelling: which tokens are predicted and what the model sees in their place."""

    mask_prob: float = option(0.15, "probability that a token is predicted")
    max_predictions: int | None = option(None, "maximum predictions per sequence; unset: mask_prob * length")
    mask_token_prob: float = option(0.8, "probability that a predicted token becomes the mask token")
    random_token_prob: float = option(0.1, "probability that it becomes a random token; the rest is unchanged")
    whole_words: bool = option(False, "whole-word masking")
    static_copies: int | None = option(None, "static masking: masked copies of each text (BERT: 10); unset: dynamic")

    def _problems(self) -> Iterator[str]:
        if not 0 < self.mask_prob < 1:
            yield f"mask_prob={self.mask_prob} must lie between 0 and 1, for example 0.15"
        mask, random = self.mask_token_prob, self.random_token_prob
        if mask < 0 or random < 0 or mask + random > 1:
            yield f"mask_token_prob={mask} and random_token_prob={random} must add up to at most 1, such as 0.8 and 0.1"
        yield from below_one(self, "static_copies", "max_predictions")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Checked):
    """The pretraining objective."""

    kind: ObjectiveKind = option("language-model", "what is predicted")
    length: int | None = option(None, "sequence length in tokens; unset: the model's context")
    short_lengths: tuple[int, ...] = option((), "sequence lengths of the first steps, in turn (BERT: 128)")
    short_fraction: float = option(0.9, "fraction of the steps that use short_lengths, in equal parts")
    sampled_softmax: int | None = option(
        None, "tokens drawn per step to stand for the vocabulary in the softmax; unset: all"
    )
    document_mask: bool = option(False, "no attention across document boundaries")
    single_sentences: bool = option(False, "masked-next-sentence: pairs of one sentence each, not of longer segments")
    masking: MaskingConfig = option(MaskingConfig(), "masking of the masked objectives")

    def _problems(self) -> Iterator[str]:
        if self.length is not None and self.length < 2:
            yield f"length={self.length} must be at least 2, for example 128"
        if any(length < 2 for length in self.short_lengths):
            yield f"short_lengths={self.short_lengths} must be at least 2 each, for example 64 and 128"
        if not 0.0 < self.short_fraction <= 1.0:
            yield f"short_fraction={self.short_fraction} must be above 0 and at most 1, for example 0.9"
        if self.sampled_softmax is not None:
            yield from not_positive(self, {"sampled_softmax": 512})
        if self.single_sentences and self.kind != "masked-next-sentence":
            yield f"single_sentences=true needs kind='masked-next-sentence'; it is {self.kind!r}"
        if self.document_mask and self.kind not in ("language-model", "masked"):
            yield f"document_mask=true needs kind='language-model' or 'masked'; it is {self.kind!r}"


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Checked):
    """From texts to a pretrained model, in one run folder."""

    folder: Path = field(metadata=about(RUN_FOLDER))
    model: ModelConfig = field(metadata=about("architecture; vocab_size follows the tokenizer"))
    train: TrainConfig = field(metadata=about("training loop"))
    objective: ObjectiveConfig = option(ObjectiveConfig(), "pretraining objective")
    data: DataConfig = option(STANDARD_LIBRARY, DATA)
    prepared: Path | None = option(None, PREPARED)
    init_from: str | None = option(None, "model to continue from: its weights, sizes and tokenizer; unset: random")
    embedding_init: Literal["random", "cooccurrence"] = option(
        "random", "first token embeddings: random, or from counts of neighbouring tokens (PPMI, SVD)"
    )
    minutes: float | None = option(
        None, "training time: choose layers, width, vocabulary, context, batch, rates and steps for it"
    )
    resume: bool = option(False, RESUME)
    allow_changes: bool = option(False, "resume with another batch, seed or data, from the next unread row")
    overwrite: bool = option(False, OVERWRITE)

    def _problems(self) -> Iterator[str]:
        if self.minutes is not None:
            yield from not_positive(self, {"minutes": 20})
            if self.model.decoder_layers or self.model.recurrent:
                yield "minutes sizes one stack of Transformer blocks; unset it, and set sizes and steps in the recipe"
            if self.init_from is not None:
                yield "minutes chooses the sizes of a fresh model, init_from has its own; unset one, set train.steps"
        if self.embedding_init != "random" and (self.init_from is not None or self.model.decoder_layers):
            yield "embedding_init=cooccurrence is for a fresh model of one stack; leave it out"
        length = self.model.context if self.objective.length is None else self.objective.length
        if length > self.model.context:
            yield f"objective.length={length} is longer than model.context={self.model.context}"
        if (longest := max(self.objective.short_lengths, default=0)) > length:
            yield f"objective.short_lengths has {longest}, which is longer than objective.length={length}"
        if self.objective.sampled_softmax is not None and (
            self.train.label_smoothing or self.train.tensor_parallel > 1
        ):
            yield "objective.sampled_softmax needs train.label_smoothing=0 and train.tensor_parallel=1"
        if self.model.recurrent and self.objective.document_mask:
            yield "objective.document_mask=true is for attention; a recurrent model needs false"
        kind, encoder_decoder = self.objective.kind, self.model.decoder_layers > 0
        fits = "language-model" if self.model.causal else "masked"
        fits = "sequence-to-sequence" if encoder_decoder else fits
        if not kind.startswith(fits):
            yield f"objective.kind={kind!r} does not fit this model; {fits!r} does"


@dataclass(frozen=True, kw_only=True)
class DistillConfig(Checked):
    """From a pretrained teacher and texts to a smaller student."""

    teacher: str = field(metadata=about("folder or hub name of the teacher"))
    folder: Path = field(metadata=about(RUN_FOLDER))
    train: TrainConfig = field(metadata=about("training loop"))
    layers: int | None = option(None, "blocks of the student; unset: half of the teacher's")
    width: int | None = option(None, "hidden size of the student; unset: the teacher's")
    heads: int | None = option(None, "attention heads of the student; unset: the teacher's")
    drop_segments: bool = option(False, "no segment embeddings and no pooler, as in DistilBERT")
    init: Literal["teacher", "random"] = option("teacher", "initial weights: evenly spaced teacher layers, or random")
    temperature: float = option(2.0, "softmax temperature of the soft targets")
    soft_weight: float = option(5.0, "weight of the KL divergence to the teacher; defaults are DistilBERT's")
    hard_weight: float = option(2.0, "weight of the training loss")
    hidden_weight: float = option(1.0, "weight of the cosine distance of hidden states")
    attention_weight: float = option(0.0, "weight of the squared error of attention scores, as in TinyBERT")
    objective: ObjectiveConfig = option(ObjectiveConfig(), "training objective; kind follows the teacher")
    data: DataConfig = option(STANDARD_LIBRARY, "training text, tokenized by the teacher's tokenizer")
    prepared: Path | None = option(None, "folder that `plume prepare` wrote with the teacher's tokenizer")
    resume: bool = option(False, RESUME)
    overwrite: bool = option(False, OVERWRITE)

    def _problems(self) -> Iterator[str]:
        yield from not_positive(self, {"temperature": 2})
        yield from below_one(self, "layers", "width", "heads")
        weights = (self.soft_weight, self.hard_weight, self.hidden_weight, self.attention_weight)
        if min(weights) < 0 or max(weights) == 0:
            yield "soft_weight, hard_weight, hidden_weight and attention_weight: none may be negative, not all 0"
        if self.objective.sampled_softmax is not None:
            yield "objective.sampled_softmax: a teacher has probabilities for all tokens; leave it out"


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Checked):
    """Several sizes of one architecture, trained alike on the same data."""

    folder: Path = field(metadata=about("a run for each size, and one report"))
    model: ModelConfig = field(metadata=about("what all sizes share; layers, heads and width vary"))
    train: TrainConfig = field(metadata=about("training loop of every size"))
    sizes: tuple[str, ...] = option(("1x32", "2x64", "4x128"), "LAYERSxWIDTH of each model")
    head_width: int = option(32, "width of one attention head; heads = width / head_width")
    data: DataConfig = option(STANDARD_LIBRARY, DATA)
    prepared: Path | None = option(None, PREPARED)
    objective: ObjectiveConfig = option(ObjectiveConfig(), "pretraining objective")
    backend: Backend = option("local", PIECES)

    def _problems(self) -> Iterator[str]:
        if len(self.sizes) < 2:
            yield "sizes needs at least two entries, for example 1x32, 2x64, 4x128"
        for size in self.sizes:
            found = re.fullmatch(r"(\d+)x(\d+)", size)
            if found is None or not int(found[1]) or not int(found[2]):
                yield f"sizes: {size!r} is not LAYERSxWIDTH, for example 4x128"


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """A first model in a few minutes."""

    text: tuple[str, ...] = option((), "files, folders or globs; unset: Python's standard library")
    encoding: str = option("utf-8", ENCODING)
    folder: Path | None = option(None, "run folder; unset: runs/demo, or runs/demo-2 and so on if it holds a run")
    minutes: float = option(2.0, "training time in minutes")
    seed: int = option(1, SEED)
    overwrite: bool = option(False, OVERWRITE)

    def __post_init__(self) -> None:
        refuse([*not_positive(self, {"minutes": 2}), *unknown_encoding(self.encoding), *wrong_seed(self.seed)])


@dataclass(frozen=True, kw_only=True)
class PlanConfig(Checked):
    """A model and its training tokens, before a run."""

    model: ModelConfig = field(metadata=about("architecture"))
    name: str = option("model", "title of the table")
    tokens: int = option(1_000_000_000, "training tokens")
    micro_batch: int = option(8, "sequences per forward pass on one rank")
    length: int | None = option(None, "sequence length in tokens; unset: the model's context")
    ranks: int = option(1, "number of ranks (devices)")
    strategy: Literal["ddp", "fsdp"] = option("fsdp", "replicas, or shards of one replica")
    tensor_parallel: int = option(1, "tensor-parallel group size")
    accumulation_steps: int = option(1, "gradient accumulation steps")
    activation_checkpointing: bool = option(False, "recompute activations in the backward: less memory, more time")
    precision: TrainPrecision = option("auto", "of matrix products, for memory and traffic per rank; auto: bfloat16")
    hardware: str = option("A100 80GB", "device of each rank; any name with --tflops and --memory-gb")
    tflops: float | None = option(None, "peak TFLOP/s of a device of your own, in 16 bits")
    memory_gb: float | None = option(None, "memory of a device of your own, in GB")
    dollars_per_hour: float | None = option(None, "price of a device of your own")
    ranks_per_node: int = option(8, "ranks per node")
    node_bandwidth_gb: float = option(300.0, "GB/s between ranks of one node")
    network_bandwidth_gb: float = option(25.0, "GB/s between nodes, per rank")

    def _problems(self) -> Iterator[str]:
        yield from below_one(self, "tokens", "micro_batch", "length", "ranks", "tensor_parallel", "accumulation_steps")
        yield from below_one(self, "ranks_per_node")
        yield from not_positive(self, {"tflops": 312, "memory_gb": 80, "node_bandwidth_gb": 300})
        yield from not_positive(self, {"network_bandwidth_gb": 25})
        if (self.tflops is None) != (self.memory_gb is None):
            yield "a device of your own needs both --tflops and --memory-gb"


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """List run folders, compare their settings and losses, or plot them."""

    folders: tuple[Path, ...] = option((Path("runs"),), "run folders, or folders that hold some")
    compare: bool = option(False, "show the settings that differ and the losses, side by side")
    plot: Path | None = option(None, "write the loss curves to this PNG")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check that this machine can train, or what is wrong with a run."""

    run: Path | None = option(None, "run folder of a pretraining to examine; unset: this machine")
    probe: bool = option(True, "with a run: try its recipe for a few steps at other learning rates")
    device: str = option("auto", DEVICE)
    timeout: float = option(30.0, "seconds to wait for other ranks")

    def __post_init__(self) -> None:
        refuse(not_positive(self, {"timeout": 30}))


def trained_like(teacher: str) -> dict[str, Any]:
    """The training settings and the prepared data of a teacher's run folder, where its student's recipe starts."""
    file = at_home(teacher) / RECIPE
    if not file.is_file():
        return {}
    recipe = read_recipe(file)
    data = recipe.get("prepared", recipe.get("data", {}).get("folder"))
    return {"train": recipe.get("train", {}), **({} if data is None else {"prepared": data})}
