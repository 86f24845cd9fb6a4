"""What a model is and what a run does, as plain frozen data: fields, presets, recipes, overrides. No torch here."""

from __future__ import annotations

import difflib
import inspect
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin, get_type_hints


class UserError(ValueError):
    """A mistake that the user can mend; the command line shows its message alone and leaves with code 2."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One stack of Transformer blocks, or two. Fields say how it behaves, never which checkpoint it is."""

    vocab_size: int
    context: int  # longest sequence the position table covers
    layers: int
    heads: int
    width: int
    hidden: int | None = None  # width inside the MLP; unset means four times the width
    decoder_layers: int = 0  # more than none makes an encoder-decoder, `layers` being the encoder's
    norm: Literal["pre", "post"] = "pre"  # pre: GPT-2, GPT-3; post: Transformer, GPT-1, BERT, RoBERTa
    causal: bool = True
    band: int = 0  # every second layer sees only this many tokens back; 0 means all layers see everything
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu_tanh"
    positions: Literal["learned", "sinusoidal"] = "learned"
    first_position: int = 0  # RoBERTa counts positions from 2
    segments: int = 0  # rows of the segment table; 0 means there is none
    embed_norm: bool = False  # BERT normalises the summed embeddings
    embed_scale: bool = False  # the original Transformer multiplies token embeddings by sqrt(width)
    attention_bias: bool = True
    summary: Literal["last", "tanh", "relu"] = "last"  # one vector per text: last token, or first through a dense layer
    norm_eps: float = 1e-5
    dropout: float = 0.1
    vocab_multiple: int = 1  # rows of the token table are padded up to a multiple of this

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "layers", "heads", "width", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden is not None and self.hidden < 1:
            raise UserError(f"hidden={self.hidden} must be at least 1, or unset for {4 * self.width}")
        if self.width % self.heads:
            divisors = (h for h in range(1, self.width + 1) if self.width % h == 0)
            near = min(divisors, key=lambda h: abs(h - self.heads))
            raise UserError(f"heads={self.heads} does not divide width={self.width}; heads={near} would")
        if self.positions == "sinusoidal" and self.width % 2:
            raise UserError(f"width={self.width} must be even for sinusoidal positions; {self.width + 1} would do")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout={self.dropout} must be at least 0 and below 1, for example 0.1")
        if self.band < 0 or self.decoder_layers < 0 or self.segments < 0 or self.first_position < 0:
            raise UserError("band, decoder_layers, segments and first_position cannot be negative; 0 turns each off")

    @property
    def mlp_width(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def table_rows(self) -> int:
        """Rows of the token table: the vocabulary, padded."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def band_of(self, layer: int) -> int:
        """How far back this layer sees; 0 means everything. Layers 1, 3, 5, ... are the banded ones."""
        return self.band if layer % 2 else 0


def _gpt2(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {"vocab_size": 50_257, "context": 1024} | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


def _gpt1(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {"vocab_size": 40_478, "context": 512, "norm": "post"} | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


def _gpt3(layers: int, width: int, heads: int) -> ModelConfig:
    # the paper alternates dense and banded layers without giving the width of the band: 256 is our choice
    return _gpt2(layers, width, heads, context=2048, band=256, dropout=0.0)


def _bert(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "vocab_size": 30_522,
        "context": 512,
        "norm": "post",
        "causal": False,
        "activation": "gelu",
        "segments": 2,
        "embed_norm": True,
        "summary": "tanh",
        "norm_eps": 1e-12,
    } | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


def _roberta(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {"vocab_size": 50_265, "segments": 1, "first_position": 2, "norm_eps": 1e-5} | more
    return _bert(layers, width, heads, **given)


def _transformer(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "vocab_size": 37_000,
        "context": 512,
        "decoder_layers": layers,
        "norm": "post",
        "causal": False,
        "activation": "relu",
        "positions": "sinusoidal",
        "embed_scale": True,
        "attention_bias": False,
    } | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


PRESETS: dict[str, ModelConfig] = {
    "openai-gpt": _gpt1(12, 768, 12),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "distilgpt2": _gpt2(6, 768, 12),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "bert-tiny": _bert(2, 128, 2),
    "bert-mini": _bert(4, 256, 4),
    "bert-small": _bert(4, 512, 8),
    "bert-medium": _bert(8, 512, 8),
    "bert-base-uncased": _bert(12, 768, 12),
    "bert-base-cased": _bert(12, 768, 12, vocab_size=28_996),
    "bert-large-uncased": _bert(24, 1024, 16),
    "bert-large-cased": _bert(24, 1024, 16, vocab_size=28_996),
    "distilbert": _bert(6, 768, 12, segments=0, summary="relu"),
    "roberta-base": _roberta(12, 768, 12),
    "roberta-large": _roberta(24, 1024, 16),
    "distilroberta": _roberta(6, 768, 12),
    "transformer-base": _transformer(6, 512, 8),
    "transformer-big": _transformer(6, 1024, 16, dropout=0.3),
    "transformer-decoder": _transformer(
        6, 512, 8, decoder_layers=0, causal=True, context=4000, embed_scale=False, attention_bias=True
    ),
    # small ones that train in minutes on two cores
    "gpt-laptop": _gpt1(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "gpt2-char": _gpt2(4, 128, 4, vocab_size=128, context=64, dropout=0.0),
    "gpt2-laptop": _gpt2(4, 256, 4, vocab_size=4096, context=256, dropout=0.0),
    "gpt3-laptop": _gpt2(4, 256, 4, vocab_size=4096, context=256, band=64, dropout=0.0),
    "bert-laptop": _bert(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "roberta-laptop": _roberta(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "transformer-laptop": _transformer(2, 128, 4, vocab_size=4096, context=128),
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        all_presets = f"; all: {', '.join(PRESETS)}"
        raise UserError(f"there is no preset {name!r}{did_you_mean(name, PRESETS) or all_presets}")
    return PRESETS[name]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer to train, or the folder of a ready one."""

    kind: Literal["byte-bpe", "gpt1-bpe", "wordpiece", "characters", "bytes"] = "byte-bpe"
    vocab_size: int = 4096  # special tokens included; characters and bytes take what they need
    folder: Path | None = None  # a model or tokenizer folder to take the tokenizer from instead of training one
    specials: Literal["gpt1", "gpt2", "bert", "roberta"] | None = (
        None  # whose special tokens; unset means the kind's own
    )
    lowercase: bool = True  # wordpiece only; accents go with it
    words: Literal["auto", "spacy", "basic"] = (
        "auto"  # gpt1-bpe only; auto means spacy where the extra gpt1 is installed
    )
    score: Literal["frequency", "likelihood"] = "frequency"  # wordpiece only: which pair of pieces to join next
    min_count: int = 2  # pairs, and letters outside byte-bpe, that are seen less often get no token
    max_memory_mb: int = 1024  # word counts beyond this spill to disk

    def __post_init__(self) -> None:
        for name in ("vocab_size", "min_count", "max_memory_mb"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """What prepare leaves out. Nothing but empty documents, unless asked."""

    min_characters: int = 1
    max_characters: int | None = None
    languages: tuple[str, ...] = ()  # keep only these, judged by their commonest words: en, de, fr, es, it, pt, nl
    quality: bool = False  # leave out what does not read like prose: word lengths, symbols, repeated lines
    min_score: float | None = None  # WebText took links of 3 and more
    drop_domains: tuple[str, ...] = ()  # wikipedia.org also drops en.wikipedia.org
    duplicates: Literal["keep", "exact", "near"] = "keep"  # near also drops the exact ones; the first one stays
    near: float = 0.8  # share of five-word runs (Jaccard) from which two documents are near
    held_out: tuple[str, ...] = ()  # evaluation texts, as paths; documents that share a run of words with them go
    held_out_words: int = 13  # length of that run

    def __post_init__(self) -> None:
        if not 0.5 <= self.near <= 1.0:
            raise UserError(f"near={self.near} must lie between 0.5 and 1, for example 0.8")
        if self.held_out_words < 1:
            raise UserError(f"held_out_words={self.held_out_words} must be at least 1, for example 13")
        known = ("en", "de", "fr", "es", "it", "pt", "nl")
        for language in self.languages:
            if language not in known:
                raise UserError(f"languages: {language!r} is not one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """From texts to token shards."""

    paths: tuple[str, ...]  # files, folders, globs, python:stdlib, python:PACKAGE, hub:NAME:CONFIG:SPLIT
    folder: Path  # where the shards go
    weights: tuple[float, ...] = ()  # share of each path in training; unset means as large as they are
    tokenizer: TokenizerConfig = TokenizerConfig()
    field: str = "text"  # of .jsonl, .csv, .parquet rows
    target_field: str | None = None  # the other side of a pair, for sequence to sequence
    url_field: str = "url"
    score_field: str = "score"
    targets: tuple[str, ...] = ()  # files aligned line by line with paths, for sequence to sequence
    documents: Literal["file", "paragraph", "line"] = "file"  # what one document is in plain text
    encoding: str = "utf-8"  # of plain text
    validation: float = 0.01  # share held out
    split: Literal["hash", "tail"] | None = (
        None  # by each document's hash, or the end; unset: tail below 1000 documents
    )
    shard_mb: int = 16  # input that goes into one shard
    workers: int | None = None  # processes; unset means one per core
    on: Literal["local", "ray"] = "local"
    budget: int | None = None  # training tokens that the report counts epochs for; unset means one pass
    overwrite: bool = False  # replace data that was prepared with other settings
    clean: CleanConfig = CleanConfig()

    def __post_init__(self) -> None:
        if not self.paths:
            raise UserError("paths is empty; name a file, a folder or python:stdlib")
        for name in ("weights", "targets"):
            given = getattr(self, name)
            if given and len(given) != len(self.paths):
                raise UserError(f"{name} has {len(given)} entries for {len(self.paths)} paths; give one for each")
        if any(w < 0 for w in self.weights):
            raise UserError(f"weights={list(self.weights)}: a weight cannot be negative; 0 leaves a path out")
        if self.weights and not sum(self.weights) > 0:
            raise UserError(f"weights={list(self.weights)}: at least one weight must be above 0")
        if not 0.0 <= self.validation < 1.0:
            raise UserError(f"validation={self.validation} must be at least 0 and below 1, for example 0.01")
        if self.shard_mb < 1 or (self.workers is not None and self.workers < 1):
            raise UserError(f"shard_mb={self.shard_mb} and workers={self.workers} must be at least 1")
        try:
            "".encode(self.encoding)
        except LookupError:
            raise UserError(f"encoding={self.encoding!r} is not known; utf-8 and latin-1 are") from None


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """A first model, in a few minutes."""

    text: tuple[str, ...] = ()  # files, folders or globs; unset means Python's own standard library
    folder: Path = Path("runs/demo")
    minutes: float = 2.0  # of training
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise UserError(f"minutes={self.minutes} must be above 0, for example 2")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A model and how much it is to read, before anything is spent."""

    model: ModelConfig
    name: str = "model"
    tokens: int = 1_000_000_000  # to train on
    batch: int = 8  # sequences in memory at once
    sequence: int | None = None  # tokens per sequence; unset means the whole context
    ranks: int = 1  # devices that train together
    strategy: Literal["ddp", "fsdp"] = "fsdp"  # copies, or shards of one copy
    tensor_parallel: int = 1  # ranks that share each matrix
    accumulate: int = 1  # micro-batches before the ranks exchange gradients
    activation_checkpointing: bool = False
    hardware: str = "A100 80GB"  # of each rank
    per_node: int = 8  # ranks in one machine, where links are fast
    link_gb: float = 300.0  # GB/s of one rank to others in its machine
    network_gb: float = 25.0  # GB/s of one rank to other machines


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained, whatever it learns."""

    steps: int  # updates of the weights
    batch: int = 64  # sequences in one update, over all ranks
    micro_batch: int | None = None  # sequences computed at a time on one rank; unset means some thousand tokens
    batch_start: int | None = None  # the batch grows evenly from this, as GPT-3's; unset means it is constant
    ramp_steps: int = 0  # steps over which it grows
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon is for the matrices of the blocks, with adamw for the rest
    lr: float = 6e-4  # peak, of adamw
    muon_lr: float = 0.02  # peak, of muon
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    bias_correction: bool = True  # BERT's code left it out
    weight_decay: float = 0.1  # on matrices; never on biases and norms
    decay_embeddings: bool = True
    muon_momentum: float = 0.95
    muon_iterations: int = 5  # of its orthogonalisation
    muon_weight_decay: float | None = None  # unset means as weight_decay
    clip: float | None = 1.0  # largest norm of the gradient; unset means unclipped
    schedule: Literal["cosine", "linear", "constant", "constant-then-decay", "inverse-sqrt"] = "cosine"
    warmup: int = 0  # steps
    final_lr: float = 0.1  # where the decay ends, as a fraction of the peak
    decay_steps: int | None = None  # step at which the decay has ended; unset means the last
    cooldown: float = 0.2  # share of the steps that constant-then-decay decays over
    label_smoothing: float = 0.0
    seed: int = 0
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto measures what the device is fast at
    compile: bool = False  # torch.compile
    activation_checkpointing: bool = False  # compute activations again in the backward: less memory, more time
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"  # over many ranks; auto shards when a copy would not fit
    tensor_parallel: int = 1  # ranks that share each matrix
    log_every: int = 10
    validate_every: int | None = None  # unset means ten times in the run
    validation_rows: int = 256  # sequences; always the same ones, masked the same way
    checkpoint_every: int | None = None  # unset means as often as validation
    keep_last: int = 2  # checkpoints
    keep_best: bool = True  # also the checkpoint of the lowest validation loss; the model folder is made from it
    average: int = (
        1  # last checkpoints whose mean the model folder is made from, as the Transformer's 5; 1 means the last
    )
    sample_every: int | None = None  # unset means as often as validation
    sample_prompt: str = ""
    sample_tokens: int = 64
    sanity_step: int | None = None  # by then the loss must beat the unigram entropy; unset means half way
    tensorboard: bool = False
    wandb: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} must be at least 1"
            for name in ("steps", "batch", "log_every", "keep_last", "tensor_parallel", "validation_rows")
            if (value := getattr(self, name)) < 1
        ]
        problems += [
            f"{name}={value} must be at least 1, or unset"
            for name in ("micro_batch", "batch_start", "validate_every", "checkpoint_every", "sample_every")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        problems += [
            f"{name}={getattr(self, name)} must be at least 0 and below 1, for example {example}"
            for name, example in (("beta1", 0.9), ("beta2", 0.95), ("muon_momentum", 0.95), ("label_smoothing", 0.1))
            if not 0.0 <= getattr(self, name) < 1.0
        ]
        problems += [
            f"{name}={getattr(self, name)} must be above 0, for example {example}"
            for name, example in (("lr", 6e-4), ("muon_lr", 0.02), ("eps", 1e-8))
            if not getattr(self, name) > 0
        ]
        if self.clip is not None and not self.clip > 0:
            problems.append(f"clip={self.clip} must be above 0, for example 1.0, or unset")
        if self.warmup < 0:
            problems.append(f"warmup={self.warmup} cannot be negative; 0 means none")
        if not 0.0 <= self.final_lr <= 1.0 or not 0.0 < self.cooldown <= 1.0:
            problems.append(f"final_lr={self.final_lr} and cooldown={self.cooldown} are shares between 0 and 1")
        if not 1 <= self.muon_iterations <= 5:
            problems.append(f"muon_iterations={self.muon_iterations} must lie between 1 and 5")
        if self.batch_start is not None and not self.batch_start <= self.batch:
            problems.append(f"batch_start={self.batch_start} must be at most batch={self.batch}")
        if self.batch_start is not None and self.ramp_steps < 1:
            problems.append(
                f"ramp_steps={self.ramp_steps} must be at least 1 when the batch grows from {self.batch_start}"
            )
        if not 1 <= self.average <= self.keep_last or (self.average > 1 and self.keep_best):
            problems.append(
                f"average={self.average} needs keep_last={self.average} or more, and keep_best=false when it is above 1"
            )
        if problems:
            raise UserError("; ".join(problems))


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
    labels: tuple[str, ...] = ()  # in this order; unset means the sorted labels of the training rows
    template: tuple[str, ...] = ()  # other passes than the kind's own, such as "{text} | {pair}"
    targets: str | None = None  # file aligned line by line with `train`, for translate
    validation_targets: str | None = None
    test_targets: str | None = None
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
    lora_dropout: float = 0.0
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
    epochs: float = 3.0
    batch: int = 32
    micro_batch: int | None = None  # examples computed at a time; unset means the whole batch
    lr: float | None = None  # peak; unset means GPT-1's 6.25e-5 or BERT's 2e-5, and 1e-3 for lora and features
    warmup: float | None = None  # share of the steps; unset means GPT-1's 0.002, or 0.1
    weight_decay: float = 0.01
    clip: float | None = 1.0
    dropout: float | None = None  # in the whole model; unset means as it was pretrained
    classifier_dropout: float = 0.1
    auxiliary: float | None = None  # weight of the language model on the task's text; unset: 0.5 where the model is one
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: float = 0.0
    temperature: float = 0.05  # of the contrastive objective
    tune_threshold: bool = False  # of a two-class task: the probability from which the second label is given
    metric: str | None = None  # that picks the best checkpoint; unset means the task's own
    validate_every: int | None = None  # steps; unset means five times in each epoch
    patience: int | None = None  # validations without a better one after which to stop; unset means never
    seeds: int | None = None  # runs; unset means 3 below 5000 training rows, else 1
    seed: int = 0
    beams: int = 4  # for translate
    answer_length: int = 30  # tokens of the longest answer, for span
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    resume: bool = False  # go on with a run that was stopped; finished seeds are kept
    overwrite: bool = False  # replace a run that is there

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} must be at least 1"
            for name in ("batch", "micro_batch", "validate_every", "patience", "seeds", "beams", "answer_length")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if not self.epochs > 0:
            problems.append(f"epochs={self.epochs} must be above 0, for example 3")
        if self.lr is not None and not self.lr > 0:
            problems.append(f"lr={self.lr} must be above 0, for example 5e-5")
        if self.warmup is not None and not 0.0 <= self.warmup <= 1.0:
            problems.append(f"warmup={self.warmup} is a share of the steps, between 0 and 1, for example 0.1")
        for name in ("dropout", "classifier_dropout", "label_smoothing"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                problems.append(f"{name}={value} must be at least 0 and below 1, for example 0.1")
        if self.auxiliary is not None and self.auxiliary < 0:
            problems.append(f"auxiliary={self.auxiliary} cannot be negative; 0 turns it off")
        if not self.temperature > 0:
            problems.append(f"temperature={self.temperature} must be above 0, for example 0.05")
        if problems:
            raise UserError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen, and when to stop."""

    max_new_tokens: int | None = 100  # unset means up to the end of the context
    min_new_tokens: int = 0  # no end and no stop before this many
    temperature: float = 1.0  # 0 always takes the likeliest token
    top_k: int | None = 40  # only the k likeliest tokens; unset means all
    top_p: float | None = None  # only the likeliest tokens that together have this probability
    top_p_rule: Literal["usual", "openai"] = "usual"  # openai: GPT-2's own code, which keeps one token fewer
    min_p: float | None = None  # only tokens at least this likely, relative to the likeliest
    typical_p: float | None = None  # only the tokens nearest to the expected surprise, up to this probability
    repetition_penalty: float = 1.0  # above 1 makes every token seen so far less likely
    presence_penalty: float = 0.0  # taken off the score of every token written so far
    frequency_penalty: float = 0.0  # taken off once for each time a token was written
    no_repeat_ngram: int = 0  # no sequence of this many tokens comes twice; 0 allows all
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the scores of these ids
    stop: tuple[str, ...] = ()  # texts that end the answer; they are not part of it
    stop_tokens: tuple[int, ...] = ()  # ids that end the answer, beside the end token
    ignore_end: bool = False  # write on when the end token comes
    n: int = 1  # samples of each prompt
    best_of: int | None = None  # draw this many and keep the n with the highest mean log-probability
    beams: int = 1  # more than one searches for the likeliest text instead of sampling
    length_penalty: float = 1.0  # beam search divides by length to this power
    seed: int | None = None  # unset draws a fresh one, which the result names
    logprobs: int | None = None  # report log-probabilities, with this many alternatives
    overflow: Literal["refuse", "truncate", "slide"] = "refuse"  # a prompt past the context: error, cut, or move on
    heal: bool = False  # let the first token complete a word that the prompt's end has cut
    speculate: Literal["off", "lookup", "draft"] = "off"  # guess ahead from the text so far, or with a smaller model
    speculate_tokens: int = 6  # how many tokens are guessed at once

    def __post_init__(self) -> None:
        problems = [sentence for wrong, sentence in self._checks() if wrong]
        if problems:
            raise UserError("; ".join(problems))

    def _checks(self) -> Iterator[tuple[bool, str]]:
        limit, t = self.max_new_tokens, self.temperature
        yield limit is not None and limit < 1, f"max_new_tokens={limit} must be at least 1, or unset"
        yield self.min_new_tokens < 0, f"min_new_tokens={self.min_new_tokens} cannot be negative; 0 turns it off"
        yield not 0 <= t < math.inf, f"temperature={t} must be 0 (the likeliest token) or more, for example 0.8"
        yield self.top_k is not None and self.top_k < 1, f"top_k={self.top_k} must be at least 1, or unset for all"
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            yield value is not None and not 0 < value <= 1, f"{name}={value} must be above 0 and at most 1, e.g. 0.9"
        yield self.repetition_penalty <= 0, f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is off"
        yield self.no_repeat_ngram < 0, f"no_repeat_ngram={self.no_repeat_ngram} cannot be negative; 0 is off"
        yield "" in self.stop, "stop has a text of zero length, which would end every answer; leave it out"
        yield self.n < 1, f"n={self.n} must be at least 1"
        yield self.best_of is not None and self.best_of < self.n, f"best_of={self.best_of} must be at least n={self.n}"
        yield self.beams < 1, f"beams={self.beams} must be at least 1"
        yield self.beams > 1 and self.n > self.beams, f"n={self.n} texts cannot come out of beams={self.beams}"
        yield self.seed is not None and self.seed < 0, f"seed={self.seed} cannot be negative"
        yield self.logprobs is not None and self.logprobs < 0, f"logprobs={self.logprobs} cannot be negative"
        yield self.speculate_tokens < 1, f"speculate_tokens={self.speculate_tokens} must be at least 1"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What runs a model."""

    engine: Literal["auto", "cpu", "torch"] = "auto"  # auto: the compiled CPU engine, or torch where there is a GPU
    precision: Literal["float32", "int8", "bfloat16", "float16"] = "float32"  # of the weights; int8: CPU engine only
    device: str | None = None  # for torch; unset means the first GPU, or else the CPU
    threads: int | None = None  # unset means all cores
    slots: int = 8  # sequences that are kept and advanced together
    compile: bool = False  # let torch compile the model
    draft: Path | None = None  # folder of a smaller model with the same tokenizer, for speculate=draft

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads={self.threads} must be at least 1, or unset for all cores")
        if self.slots < 1:
            raise UserError(f"slots={self.slots} must be at least 1, for example 8")
        if self.engine == "torch" and self.precision == "int8":
            raise UserError("precision=int8 needs engine=cpu; torch has float32, bfloat16 and float16")
        if self.engine == "cpu" and self.precision in ("bfloat16", "float16"):
            raise UserError(f"precision={self.precision} needs engine=torch; the CPU engine has float32 and int8")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A server: which models, for whom, and how much of it at once."""

    models: tuple[str, ...]  # model folders, run folders or hub names; NAME=PLACE gives one another name
    host: str = "127.0.0.1"  # any other than this machine needs keys
    port: int = 8000
    keys: tuple[str, ...] = ()  # sha256 of each API key; `plume serve --new-key` makes a pair
    runs: Path | None = None  # a folder of training runs to show, with their checkpoints as models
    engine: EngineConfig = EngineConfig()  # its slots follow from batch
    batch: int = 16  # sequences of one model that are written together
    queue: int = 256  # sequences that may wait; more are told to come again
    timeout: float = 120.0  # seconds that one request may take
    drain: float = 30.0  # seconds that running requests get to end when the server is stopped
    max_tokens: int = 4096  # new tokens of one request, over all its samples
    max_body: int = 2_000_000  # bytes of one request
    rate: float = 0.0  # requests per minute of one client; 0 means no limit
    access_log: Path | None = None  # JSON lines; unset means the standard error

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("batch", "queue", "max_tokens", "max_body")
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name}={getattr(self, name)} must be more than 0, for example {usual}"
            for name, usual in (("timeout", 120), ("drain", 30))
            if getattr(self, name) <= 0
        ]
        if not 0 <= self.port < 65536:
            problems.append(f"port={self.port} must lie between 0 (any free one) and 65535, for example 8000")
        if self.rate < 0:
            problems.append(f"rate={self.rate} cannot be negative; 0 means no limit")
        if wrong := [key for key in self.keys if not re.fullmatch(r"[0-9a-f]{64}", key)]:
            problems.append(f"keys: {wrong[0][:12]!r} is not a sha256; `plume serve --new-key` makes one with its key")
        if not self.keys and self.host not in ("127.0.0.1", "localhost", "::1"):
            problems.append(f"host={self.host} is open to others, so it needs keys; `plume serve --new-key` makes one")
        if problems:
            raise UserError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Which places are masked and what is put there."""

    share: float = 0.15
    most: int | None = None  # places in one row; unset means the share of its full length
    masked: float = 0.8  # become the mask token
    random: float = 0.1  # become any token; the rest stays as it is
    whole_words: bool = False
    copies: int | None = None  # fixed versions of each text, in turn (BERT: 10); unset means a new one in each pass

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"share={self.share} must lie between 0 and 1, for example 0.15")
        if self.masked < 0 or self.random < 0 or self.masked + self.random > 1:
            raise UserError(f"masked={self.masked} and random={self.random} must be shares of 1, such as 0.8 and 0.1")
        if self.copies is not None and self.copies < 1:
            raise UserError(f"copies={self.copies} must be at least 1, for example 10; unset masks anew each pass")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What pretraining asks of the model."""

    name: Literal["language-model", "masked", "masked-next-sentence", "sequence-to-sequence"] = "language-model"
    length: int | None = None  # tokens of a sequence; unset means the model's context
    short_length: int | None = None  # of the first steps, as BERT's 128; unset means all are alike
    short_share: float = 0.9  # of the steps that are short
    isolate: bool = False  # packed documents do not see each other
    masking: MaskingConfig = MaskingConfig()

    def __post_init__(self) -> None:
        for name in ("length", "short_length"):
            if (value := getattr(self, name)) is not None and value < 2:
                raise UserError(f"{name}={value} must be at least 2, for example 128")
        if not 0.0 < self.short_share <= 1.0:
            raise UserError(f"short_share={self.short_share} must be above 0 and at most 1, for example 0.9")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """From texts to a pretrained model, all in one run folder."""

    folder: Path  # of the run: model/, checkpoints/, metrics.jsonl, loss.png
    model: ModelConfig  # vocab_size follows the tokenizer
    train: TrainConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    data: DataConfig = DataConfig(paths=("python:stdlib",), folder=Path("data/stdlib"))
    prepared: Path | None = None  # a folder that `plume prepare` has filled; then [data] is not looked at
    resume: bool = False  # go on from the newest whole checkpoint
    overwrite: bool = False  # replace what is in the run folder

    def __post_init__(self) -> None:
        length = self.model.context if self.objective.length is None else self.objective.length
        if length > self.model.context:
            raise UserError(f"objective.length={length} is longer than model.context={self.model.context}")
        masked, two_stacks = self.objective.name.startswith("masked"), self.model.decoder_layers > 0
        if masked == (self.model.causal or two_stacks):
            fits = "language-model" if self.model.causal else "masked"
            fits = "sequence-to-sequence" if two_stacks else fits
            raise UserError(f"objective.name={self.objective.name!r} does not fit this model; {fits!r} does")
        if two_stacks != (self.objective.name == "sequence-to-sequence"):
            raise UserError(
                f"objective.name={self.objective.name!r} with decoder_layers={self.model.decoder_layers}: "
                "sequence-to-sequence needs a decoder beside the encoder, and nothing else does"
            )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """A prompt, a file of prompts, or a conversation at the terminal when there is neither."""

    model: str  # model folder, run folder or hub name
    prompt: str | None = None
    prompts: Path | None = None  # a file with one prompt per line, or .jsonl with "prompt" in each line
    out: Path | None = None  # where the answers to a file of prompts go, as .jsonl; unset means the standard output
    unconditional: bool = False  # a sample from the start token
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A model folder in another format."""

    model: Path  # model folder, run folder or hub name
    format: Literal["gguf", "onnx"] = "gguf"  # gguf: llama.cpp; onnx: onnxruntime and others
    precision: Literal["f32", "f16", "q8_0"] = "f32"  # of the weights; onnx has f32 only
    cache: bool = True  # onnx: with a key-value cache among inputs and outputs
    out: Path | None = None  # file to write; unset means beside the model's weights

    @property
    def path(self) -> Path:
        name = f"model-{self.precision}.gguf" if self.format == "gguf" else f"model{'-cache' * self.cache}.onnx"
        return self.model / name if self.out is None else self.out


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Which model is measured on what, and how."""

    model: str  # a model folder, a run folder or a hub name
    tasks: tuple[str, ...]  # built-in names, NAME=FILE, files of your own, harness:NAME
    protocol: Literal["harness", "gpt2-paper", "gpt3-paper"] = "harness"
    data: Path | None = None  # a folder with a folder for each task; unset means ./data if there is one, else the hub
    out: Path | None = None  # report.md, report.json, plots, items and the store of scores go here
    shots: int = 0  # solved examples before each item
    seeds: tuple[int, ...] = (1234,)  # each draws other examples
    limit: int | None = None  # items of each task
    stride: int | None = None  # tokens scored per window of a long text; unset means windows do not overlap
    border: Literal["joined", "apart"] | None = None  # where context and continuation are cut; unset: as the protocol
    stop_words: bool | None = None  # bar them from LAMBADA's predictions; unset means as the protocol
    too_long: Literal["truncate", "skip", "refuse"] = "truncate"  # items beyond the context; truncate cuts on the left
    training_data: tuple[str, ...] = ()  # prepared folders or texts to look for the items in
    ngram: int = 13  # words in a row that count as seen before
    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_tokens: int | None = None  # tokens computed at a time; unset means what suits the device
    plots: bool = True
    context_field: str = "context"  # names in your own rows
    choices_field: str = "choices"
    answer_field: str = "answer"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("tasks is empty; name one, for example lambada, or a file")
        if not self.seeds:
            raise UserError("seeds is empty; give one, for example 1234")
        for name in ("limit", "stride", "batch_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1, or unset")
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
    data: DataConfig = DataConfig(paths=("python:stdlib",), folder=Path("data/stdlib"))
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


@dataclass(frozen=True, kw_only=True)
class DecodeBenchConfig:
    """How fast a GPT writes here, beside other engines."""

    model: Path | None = None  # a gpt2 folder; unset means random weights of the preset's shape
    preset: str = "gpt2"
    prompt: int = 32  # tokens in each prompt
    new: int = 128  # tokens written after it
    batch: int = 8  # sequences in the batched run
    prefill: int = 512  # tokens of the long prompt that is only read
    rounds: int = 3  # the best of these counts
    threads: int | None = None  # unset means all cores
    peers: tuple[str, ...] = ("llama_cpp", "ctranslate2", "transformers", "onnxruntime")  # packages to compare with


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """From a pretrained teacher and texts to a smaller student."""

    teacher: str  # folder or hub name
    folder: Path  # of the run: model/, checkpoints/, metrics.jsonl, loss.png
    train: TrainConfig
    layers: int | None = None  # of the student; unset means half of the teacher's
    width: int | None = None  # unset means the teacher's
    heads: int | None = None  # unset means the teacher's
    drop_segments: bool = False  # DistilBERT has no segment table and no pooler
    start: Literal["teacher", "random"] = "teacher"  # first weights: layers of the teacher, evenly spaced, or new ones
    temperature: float = 2.0  # that softens what both say of the tokens
    soft: float = 5.0  # weight of the teacher's probabilities; these four are DistilBERT's, whose attention is 0
    hard: float = 2.0  # weight of the text itself
    hidden: float = 1.0  # weight of the angle between hidden states, layer by layer
    attention: float = 0.0  # weight of the squared distance of attention scores, as in TinyBERT
    objective: ObjectiveConfig = ObjectiveConfig()  # name follows the teacher
    data: DataConfig = DataConfig(paths=("python:stdlib",), folder=Path("data/stdlib"))  # in the teacher's tokens
    prepared: Path | None = None  # a folder that `plume prepare` has filled with the teacher's tokenizer
    resume: bool = False  # go on from the newest whole checkpoint
    overwrite: bool = False  # replace what is in the run folder

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f"temperature={self.temperature} must be above 0, for example 2")
        weights = (self.soft, self.hard, self.hidden, self.attention)
        if min(weights) < 0 or max(weights) == 0:
            raise UserError("soft, hard, hidden and attention are weights: none below 0 and one at least above it")
        if self.layers is not None and self.layers < 1:
            raise UserError(f"layers={self.layers} must be at least 1")


T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def build(kind: type[T], table: Mapping[str, Any], *, origin: str = "") -> T:
    """One frozen dataclass from nested plain values, strings among them; every problem of the table in one error.

    A `preset` in a model's table is where its other fields start from.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import, so not at the top: --help must be quick

    filled, problems = _fill(kind, table, "")
    try:
        value = TypeAdapter(kind).validate_python(filled)
    except ValidationError as error:
        problems += [_sentence(dict(e)) for e in error.errors()]
    if problems:
        raise UserError("\n  ".join([f"{origin}:"] * bool(origin) + problems))
    return value


def _fill(kind: type, table: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The table's known part with presets filled in, and a sentence for each unknown name."""
    hints, problems = get_type_hints(kind), list[str]()
    known = {f.name: hints[f.name] for f in fields(kind)}
    filled: dict[str, Any] = {}
    if kind is ModelConfig and "preset" in table:
        try:
            filled = asdict(preset(str(table["preset"])))
        except UserError as error:
            problems.append(str(error))
            filled = asdict(PRESETS["gpt2"])  # so that the other fields are still looked at
    for name, value in table.items():
        if kind is ModelConfig and name == "preset":
            continue
        if name not in known:
            problems.append(f"there is no {path}{name}{_whereabouts(name, known, path)}")
        elif is_dataclass(known[name]) and isinstance(value, Mapping):
            filled[name], inner = _fill(known[name], value, f"{path}{name}.")
            problems += inner
        elif get_origin(known[name]) is tuple and not isinstance(value, (list, tuple)):
            filled[name] = [value]  # one value stands for a list of one
        else:
            alone = get_origin(known[name]) is tuple and isinstance(value, str | int | float)
            filled[name] = (value,) if alone else value  # one word for a list is a list of one
    return filled, problems


def _whereabouts(name: str, known: Mapping[str, Any], path: str) -> str:
    """Where a misspelt or misplaced name probably belongs."""
    for section, kind in known.items():
        if is_dataclass(kind) and name in {f.name for f in fields(kind)}:
            return f"; did you mean {path}{section}.{name}?"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {path}{near[0]}?" if near else f"; known here: {', '.join(known)}"


def _sentence(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{where} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    said = message if error["type"] == "value_error" else f"{message}, not {error['input']!r}"
    return f"{where}: {said}" if where else said


def read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no recipe {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None


def parse_overrides(words: Sequence[str]) -> dict[str, str | list[str]]:
    """`--section.field value` and `--section.field=value`; several values make a list, and a flag alone means true."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.setdefault(name, []).extend([value] if equals else [])
        elif name:
            found[name].append(word)
        else:
            raise UserError(f"{word!r} stands alone; options look like --section.field value")
    return {name: values[0] if len(values) == 1 else values or "true" for name, values in found.items()}


def with_overrides(table: Mapping[str, Any], overrides: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """The table with `section.field` values laid over it; a value is read as TOML, or else as plain text."""
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}
    for dotted, text in overrides.items():
        *sections, name = dotted.replace("-", "_").split(".")
        place = merged
        for section in sections:
            inner = place.get(section)
            place[section] = place = dict(inner) if isinstance(inner, Mapping) else {}
        place[name] = _toml_value(text) if isinstance(text, str) else [_toml_value(value) for value in text]
    return merged


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def describe(kind: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(name, type, default, comment) of every field, nested ones dotted: what --help shows."""
    parts = re.split(r"^    (?=\w+: )", inspect.getsource(kind), flags=re.MULTILINE)[1:]
    comments = {
        part.split(":")[0]: found[1] for part in parts if (found := re.search(r"  # (.*)$", part, re.MULTILINE))
    }
    hints, rows = get_type_hints(kind), list[tuple[str, str, str, str]]()
    for f in fields(kind):
        if is_dataclass(hints[f.name]):
            rows += describe(hints[f.name], f"{prefix}{f.name}.")
            continue
        choices = re.search(r"Literal\[(.*?)\]", str(f.type))
        type_ = choices[1].replace('"', "").replace("'", "").replace(", ", "|") if choices else str(f.type)
        default = "" if f.default is MISSING or f.default is None else str(f.default)
        rows.append((prefix + f.name, type_.removesuffix(" | None"), default, comments.get(f.name, "")))
    return rows
