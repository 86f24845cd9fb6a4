"""How a model is trained on text: the loop, the objective, pretraining and distillation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plume.config.data import STANDARD_LIBRARY, DataConfig
from plume.config.errors import UserError, below_one, refuse
from plume.config.model import ModelConfig
from plume.config.tables import RECIPE, read_recipe


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
    beta1: float = 0.9  # of adamw: how slowly the mean of gradients changes
    beta2: float = 0.95  # of adamw: how slowly the mean of their squares changes
    eps: float = 1e-8  # of adamw
    bias_correction: bool = True  # BERT's code left it out
    weight_decay: float = 0.1  # on matrices; never on biases and norms
    decay_embeddings: bool = True  # weight decay on token and position tables too
    muon_momentum: float = 0.95  # how slowly the mean of gradients changes
    muon_iterations: int = 5  # of its orthogonalisation
    muon_weight_decay: float | None = None  # unset means as weight_decay
    clip: float = 1.0  # largest norm of the gradient; inf means unclipped
    schedule: Literal["cosine", "linear", "constant", "constant-then-decay", "inverse-sqrt"] = (
        "cosine"  # of the learning rate, behind the warm-up
    )
    warmup_steps: int = 0  # over which the learning rate rises
    final_lr_share: float = 0.1  # of the peak, where the decay ends
    decay_steps: int | None = None  # step at which the decay has ended; unset means the last
    cooldown_share: float = 0.2  # of the steps, over which constant-then-decay decays
    label_smoothing: float = 0.0  # probability spread over all other tokens, as the Transformer's 0.1
    seed: int = 0  # of weights, batches and samples
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto measures what the device is fast at
    compile: bool = False  # torch.compile
    activation_checkpointing: bool = False  # compute activations again in the backward: less memory, more time
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"  # over many ranks; auto shards when a copy would not fit
    tensor_parallel: int = 1  # ranks that share each matrix
    log_every: int = 10  # steps from one line of metrics.jsonl to the next
    validate_every: int | None = None  # unset means ten times in the run
    validation_rows: int = 256  # sequences; always the same ones, masked the same way
    checkpoint_every: int | None = None  # unset means as often as validation
    keep_last: int = 2  # checkpoints
    keep_best: bool = True  # also the checkpoint of the lowest validation loss; the model folder is made from it
    average: int = (
        1  # last checkpoints whose mean the model folder is made from, as the Transformer's 5; 1 means the last
    )
    sample_every: int | None = None  # unset means as often as validation
    sample_prompt: str = ""  # what samples begin with; empty means the start token
    sample_tokens: int = 64  # new tokens of a sample
    sanity_step: int | None = None  # by then the loss must beat the unigram entropy; unset means half way
    tensorboard: bool = False  # also write events for TensorBoard
    wandb: bool = False  # also log to Weights & Biases

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below_one(self, "steps", "batch", "log_every", "keep_last", "tensor_parallel", "validation_rows")
        yield from below_one(self, "micro_batch", "batch_start", "validate_every", "checkpoint_every", "sample_every")
        for name, example in (("beta1", 0.9), ("beta2", 0.95), ("muon_momentum", 0.95), ("label_smoothing", 0.1)):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield f"{name}={getattr(self, name)} must be at least 0 and below 1, for example {example}"
        for name, example in (("lr", 6e-4), ("muon_lr", 0.02), ("eps", 1e-8)):
            if not getattr(self, name) > 0:
                yield f"{name}={getattr(self, name)} must be above 0, for example {example}"
        if not self.clip > 0:
            yield f"clip={self.clip} must be above 0, for example 1.0; inf means unclipped"
        if self.warmup_steps < 0:
            yield f"warmup_steps={self.warmup_steps} cannot be negative; 0 means none"
        for name in ("final_lr_share", "cooldown_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                yield f"{name}={getattr(self, name)} is a share between 0 and 1, for example 0.1"
        if not 1 <= self.muon_iterations <= 5:
            yield f"muon_iterations={self.muon_iterations} must lie between 1 and 5"
        if self.batch_start is not None and not self.batch_start <= self.batch:
            yield f"batch_start={self.batch_start} must be at most batch={self.batch}"
        if self.batch_start is not None and self.ramp_steps < 1:
            yield f"ramp_steps={self.ramp_steps} must be at least 1 when the batch grows from {self.batch_start}"
        if not 1 <= self.average <= self.keep_last or (self.average > 1 and self.keep_best):
            yield f"average={self.average} needs keep_last={self.average} or more, and keep_best=false above 1"


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Which places are masked and what is put there."""

    share: float = 0.15  # of the tokens that are guessed
    most: int | None = None  # places in one row; unset means the share of its full length
    masked: float = 0.8  # become the mask token
    random: float = 0.1  # become any token; the rest stays as it is
    whole_words: bool = False  # all pieces of a word are masked together
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

    kind: Literal["language-model", "masked", "masked-next-sentence", "sequence-to-sequence"] = (
        "language-model"  # what is guessed: the next token, masked ones, also the next sentence, or a target text
    )
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
    data: DataConfig = STANDARD_LIBRARY
    prepared: Path | None = None  # a folder that `plume prepare` has filled; then [data] is not looked at
    resume: bool = False  # go on from the newest whole checkpoint
    overwrite: bool = False  # replace what is in the run folder

    def __post_init__(self) -> None:
        length = self.model.context if self.objective.length is None else self.objective.length
        if length > self.model.context:
            raise UserError(f"objective.length={length} is longer than model.context={self.model.context}")
        if self.objective.short_length is not None and self.objective.short_length > length:
            raise UserError(f"objective.short_length={self.objective.short_length} is longer than the others' {length}")
        masked, two_stacks = self.objective.kind.startswith("masked"), self.model.decoder_layers > 0
        if masked == (self.model.causal or two_stacks):
            fits = "language-model" if self.model.causal else "masked"
            fits = "sequence-to-sequence" if two_stacks else fits
            raise UserError(f"objective.kind={self.objective.kind!r} does not fit this model; {fits!r} does")
        if two_stacks != (self.objective.kind == "sequence-to-sequence"):
            raise UserError(
                f"objective.kind={self.objective.kind!r} with decoder_layers={self.model.decoder_layers}: "
                "sequence-to-sequence needs a decoder beside the encoder, and nothing else does"
            )


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
    soft_weight: float = 5.0  # of the teacher's probabilities; these four are DistilBERT's, whose attention is 0
    hard_weight: float = 2.0  # of the text itself
    hidden_weight: float = 1.0  # of the angle between hidden states, layer by layer
    attention_weight: float = 0.0  # of the squared distance of attention scores, as in TinyBERT
    objective: ObjectiveConfig = ObjectiveConfig()  # kind follows the teacher
    data: DataConfig = STANDARD_LIBRARY  # in the teacher's tokens
    prepared: Path | None = None  # a folder that `plume prepare` has filled with the teacher's tokenizer
    resume: bool = False  # go on from the newest whole checkpoint
    overwrite: bool = False  # replace what is in the run folder

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UserError(f"temperature={self.temperature} must be above 0, for example 2")
        weights = (self.soft_weight, self.hard_weight, self.hidden_weight, self.attention_weight)
        if min(weights) < 0 or max(weights) == 0:
            raise UserError(
                "of the weights soft, hard, hidden and attention none may be below 0, and one must be above"
            )
        if self.layers is not None and self.layers < 1:
            raise UserError(f"layers={self.layers} must be at least 1")


def trained_like(teacher: str) -> dict[str, Any]:
    """How a teacher that is a run folder was trained, and on which prepared data: where its student's recipe starts."""
    file = Path(teacher).expanduser() / RECIPE
    if not file.is_file():
        return {}
    recipe = read_recipe(file)
    data = recipe.get("prepared", recipe.get("data", {}).get("folder"))
    return {"train": recipe.get("train", {}), **({} if data is None else {"prepared": data})}
