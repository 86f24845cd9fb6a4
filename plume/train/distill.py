"""Distillation: a smaller student learns from its teacher's probabilities, states and attention, and from the text."""

# B batch, T tokens, N positions with a target, D model width, V vocabulary, H heads, C positions in a chunk

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plume.config import DistillConfig, ModelConfig, PretrainConfig, UserError, takes_fields
from plume.data.batches import IGNORE
from plume.hf import load_model, resolve, save_model, save_run_config
from plume.model.heads import Model
from plume.model.loss import LARGEST_CHUNK, TensorBatch, token_features
from plume.model.transformer import Attention
from plume.text import Tokenizer, load_tokenizer
from plume.train.distribute import Ranks, shared_precision
from plume.train.loop import Outcome, Task, Trainer
from plume.train.objectives import Tokens
from plume.train.optim import whole
from plume.train.pretrain import as_json, make_task, open_run, plain, prepared_data
from plume.util.run_folder import BYTES_PER_TOKEN


@dataclass(frozen=True)
class DistillResult:
    """What came of a distillation: the loss of both on the held-out text, and their sizes."""

    folder: Path
    outcome: Outcome
    teacher_loss: float | None  # None where no text was held out
    student_loss: float | None
    teacher_weights: int
    student_weights: int
    main: bool = True  # whether this process is the main rank

    def as_json(self) -> dict[str, Any]:
        return as_json({**self.__dict__, "outcome": self.outcome.__dict__})

    def summary(self) -> str:
        losses = [
            "no text held out" if loss is None else f"loss {loss:.4f}"
            for loss in (self.student_loss, self.teacher_loss)
        ]
        return (
            f"student: {self.student_weights:,} weights, {losses[0]}; teacher: {self.teacher_weights:,} weights, "
            f"{losses[1]}\nmodel: {self.folder / 'model'}"
        )


# ---- the student -------------------------------------------------------------------------------------------------


def matched_layers(student: int, teacher: int) -> list[int]:
    """For each layer of the student the teacher's that it stands for: evenly spaced, the last for the last."""
    return [round((i + 1) * teacher / student) - 1 for i in range(student)]


def student_config(config: DistillConfig, teacher: ModelConfig) -> ModelConfig:
    layers = max(1, teacher.layers // 2) if config.layers is None else config.layers
    if layers > teacher.layers:
        raise UserError(f"layers={layers} is more than the teacher's {teacher.layers}; {teacher.layers // 2} would do")
    width = teacher.width if config.width is None else config.width
    heads = teacher.heads if config.heads is None else config.heads
    small = replace(teacher, layers=layers, width=width, heads=heads)
    if width != teacher.width:
        small = replace(small, mlp_width=None)
        if config.init == "teacher":
            raise UserError(
                f"width={width}: layers of the teacher are {teacher.width} wide; init=random draws new ones"
            )
    if config.attention_weight and heads != teacher.heads:
        raise UserError(f"attention matching needs as many heads as the teacher: heads={teacher.heads}")
    if config.drop_segments:
        if teacher.causal or teacher.summary != "tanh":
            raise UserError("drop_segments makes a DistilBERT; the teacher must be a BERT")
        small = replace(small, segments=0, summary="relu")
    return small


@torch.no_grad()
def copy_layers(student: Model, teacher: Model) -> None:
    """The student's first weights: the teacher's embeddings, head and evenly spaced layers."""
    layers = matched_layers(student.config.layers, teacher.config.layers)
    theirs = teacher.state_dict()
    for name, tensor in student.state_dict().items():
        source = name
        if name.startswith("body.blocks."):
            number, _, rest = name.removeprefix("body.blocks.").partition(".")
            source = f"body.blocks.{layers[int(number)]}.{rest}"
        if source in theirs and theirs[source].shape == tensor.shape:
            tensor.copy_(theirs[source])
    embed, old = student.body.embed, teacher.body.embed
    if embed.segments is None and old.segments is not None and embed.positions is not None:
        embed.positions.weight += old.segments.weight[0]  # every token is in the first segment, so nothing changes


class StudentWithProjection(nn.Module):
    """The student, and a projection to the teacher's width where theirs differ."""

    def __init__(self, student: Model, teacher: Model, *, hidden: bool = True) -> None:
        super().__init__()
        self.student = student
        widths = student.config.width, teacher.config.width
        self.project = nn.Linear(*widths, bias=False) if hidden and widths[0] != widths[1] else None


# ---- what is compared --------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """Of one forward: every block's output, and where needed its attention scores."""

    hidden: list[Tensor]  # (B, T, D) by layer
    scores: list[Tensor]  # (B, H, T, T) by layer


@contextmanager
def record_activations(model: Model, *, scores: bool) -> Iterator[Recorded]:
    recorded = Recorded([], [])
    body: Any = model.body
    hooks = [block.register_forward_hook(lambda m, args, out: recorded.hidden.append(out)) for block in body.blocks]
    if scores:

        def record(attention: Attention, args: tuple[Tensor, ...]) -> None:
            q = attention.split(attention.q(args[0]))  # (B, H, T, K)
            k = attention.split(attention.k(args[0]))
            recorded.scores.append(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5)

        hooks += [block.attn.inner.register_forward_pre_hook(record) for block in body.blocks]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


class DistillObjective(Tokens):
    """DistilBERT's three losses, and TinyBERT's of attention; each a mean over the tokens it compares."""

    def __init__(self, teacher: Model, config: DistillConfig, layers: int) -> None:
        super().__init__(config.train.label_smoothing)
        self.teacher, self.config = teacher.eval().requires_grad_(False), config
        self.layers = matched_layers(layers, teacher.config.layers)
        named = {
            "soft": config.soft_weight,
            "hard": config.hard_weight,
            "hidden": config.hidden_weight,
            "attention": config.attention_weight,
        }
        self.parts = {name: weight for name, weight in named.items() if weight or name == "hard"}

    def counts(self, batch: TensorBatch) -> Tensor:
        targets = float((batch.targets != IGNORE).sum())
        tokens = float(real_tokens(batch).sum())
        counts = {"soft": targets, "hard": targets, "hidden": tokens, "attention": tokens}
        return torch.tensor([counts[name] for name in self.parts])

    def totals(self, wrapped: StudentWithProjection, batch: TensorBatch) -> Tensor:  # type: ignore[override]
        student, wants = wrapped.student, "attention" in self.parts
        if next(self.teacher.parameters()).device != batch.tokens.device:
            self.teacher.to(batch.tokens.device)
        with torch.no_grad(), record_activations(self.teacher, scores=wants) as theirs:
            their_states = self.hidden(self.teacher, batch)
        given = batch if student.config.segments > 1 else replace(batch, segments=None)
        with record_activations(student, scores=wants) as ours:
            states = self.hidden(student, given)
        real = real_tokens(batch)
        found = {"hard": self.token_total(student, states, batch)}
        if "soft" in self.parts:
            found["soft"] = self.soft_total(student, states, their_states, batch)
        if "hidden" in self.parts:
            found["hidden"] = self.hidden_total(wrapped, ours, theirs, real)
        if wants:
            found["attention"] = self.attention_total(ours, theirs, real, causal=student.config.causal)
        return torch.stack([found[name] for name in self.parts])

    def soft_total(self, student: Model, ours: Tensor, theirs: Tensor, batch: TensorBatch) -> Tensor:
        """Summed KL divergence of softened probabilities, times the temperature squared; logits live chunk by chunk."""
        chosen = self.chosen(batch)
        features, bias = token_features(student, ours.flatten(0, 1)[chosen])
        with torch.no_grad():
            their_features, their_bias = token_features(self.teacher, theirs.flatten(0, 1)[chosen])
        size, heat = student.config.vocab_size, self.config.temperature
        tables = student.table[:size], self.teacher.table[:size]

        def part(x: Tensor, y: Tensor) -> Tensor:
            mine = F.log_softmax(F.linear(x, tables[0], bias).float() / heat, dim=1)  # (C, V)
            with torch.no_grad():
                right = F.log_softmax(F.linear(y, tables[1], their_bias).float() / heat, dim=1)
            return F.kl_div(mine, right, reduction="sum", log_target=True) * heat**2

        rows = max(1, LARGEST_CHUNK // size)
        total = features.new_zeros((), dtype=torch.float32)
        for first in range(0, len(features), rows):
            x, y = features[first : first + rows], their_features[first : first + rows]
            total = total + (checkpoint(part, x, y, use_reentrant=False) if torch.is_grad_enabled() else part(x, y))
        return total

    @staticmethod
    def chosen(batch: TensorBatch) -> Tensor:
        """Places in the flattened tokens where something is predicted, (N,)."""
        if batch.positions is not None:
            return batch.positions
        return (batch.targets.flatten() != IGNORE).nonzero()[:, 0]

    def hidden_total(self, wrapped: StudentWithProjection, ours: Recorded, theirs: Recorded, real: Tensor) -> Tensor:
        """One minus the cosine of matched layers' states, averaged over layers, summed over tokens."""
        total = ours.hidden[0].new_zeros(())
        for mine, layer in zip(ours.hidden, self.layers, strict=True):
            states = mine if wrapped.project is None else wrapped.project(mine)
            total = total + (1 - F.cosine_similarity(states, theirs.hidden[layer], dim=2))[real].sum()
        return total / len(self.layers)

    def attention_total(self, ours: Recorded, theirs: Recorded, real: Tensor, *, causal: bool) -> Tensor:
        """Squared distance of attention scores: a mean over layers, heads and what a token sees, summed over tokens."""
        seen = real[:, None, :] & real[:, :, None]  # (B, T, T)
        if causal:
            seen = seen & torch.ones_like(seen[0]).tril()
        width = seen.sum(dim=2).clamp(min=1)  # (B, T)
        total = ours.scores[0].new_zeros(())
        for mine, layer in zip(ours.scores, self.layers, strict=True):
            squares = (mine - theirs.scores[layer]).square().mean(dim=1)  # (B, T, T)
            total = total + ((squares * seen).sum(dim=2) / width)[real].sum()
        return total / len(self.layers)


def real_tokens(batch: TensorBatch) -> Tensor:
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    if batch.lengths is None:
        return torch.ones_like(batch.tokens, dtype=torch.bool)
    return places < batch.lengths[:, None]  # (B, T)


# ---- the run -----------------------------------------------------------------------------------------------------

OBJECTIVE_OF = {"next-token": "language-model", "masked-token": "masked", "pretraining": "masked"}


@takes_fields(DistillConfig)
def distill(config: DistillConfig) -> DistillResult:
    """Train a student on prepared or raw texts, and compare it with its teacher on the held-out ones."""
    with open_run(config, config.train.device) as run:
        ranks = run.ranks
        with run.starting():
            task, teacher, tokenizer = distill_task(config, ranks)
        student: Model = task.model.student
        if ranks.main:
            save_run_config(config.folder, student, tokenizer, task.bytes_per_token)
        precision = shared_precision(ranks, config.train.precision)
        trainer = Trainer(task, config.train, config.folder, ranks, precision)
        outcome = trainer.run(resume=config.resume)
        student = gathered(student).to(ranks.device)
        losses = [held_out_loss(task, model, ranks.device) for model in (teacher, student)]
        counts = [sum(p.numel() for p in model.parameters()) for model in (teacher, student)]
        result = DistillResult(config.folder, outcome, losses[0], losses[1], counts[0], counts[1], ranks.main)
        if ranks.main:
            kept = {"distilled_from": config.teacher, BYTES_PER_TOKEN: task.bytes_per_token}
            info = {**kept, "recipe": plain(config), **result.as_json()}
            save_model(student.cpu().eval(), config.folder / "model", tokenizer=tokenizer, info=as_json(info))
        ranks.barrier()
        return result


def distill_task(config: DistillConfig, ranks: Ranks) -> tuple[Task, Model, Tokenizer]:
    """What is trained, the teacher, and the tokenizer of both."""
    if config.attention_weight > 0 and config.train.activation_checkpointing:
        raise UserError("attention_weight needs what train.activation_checkpointing drops; turn one off")
    place = resolve(config.teacher)
    teacher = masked_only(load_model(place))
    view = as_pretraining(config, teacher, place)
    data = prepared_data(view, ranks)
    tokenizer = load_tokenizer(data / "tokenizer")
    if tokenizer.hash != load_tokenizer(place).hash:
        raise UserError(f"{data} was not prepared with the teacher's tokenizer; prepare it with {place}")
    torch.manual_seed(config.train.seed)
    student = Model(view.model, teacher.kind)
    if config.init == "teacher":
        copy_layers(student, teacher)
    wrapped = StudentWithProjection(student, teacher, hidden=config.hidden_weight > 0)
    objective = DistillObjective(teacher, config, student.config.layers)
    task = make_task(view, student, tokenizer, data)
    return replace(task, model=wrapped, objective=objective, sample=None, unigram_loss=None), teacher, tokenizer


def gathered(student: Model) -> Model:
    """The same model with whole weights, whatever its ranks share; all of them must ask."""
    weights = {name: whole(p.detach()).cpu() for name, p in student.named_parameters()}
    copy = Model(student.config, student.kind)
    copy.load_state_dict(weights, strict=False)
    return copy


def masked_only(teacher: Model) -> Model:
    """A BERT with both of its pretraining heads teaches with the masked-token one alone."""
    if teacher.kind not in OBJECTIVE_OF or teacher.config.decoder_layers:
        raise UserError(f"a teacher predicts tokens; this one has a {teacher.kind} head")
    if teacher.kind == "pretraining":
        only = Model(teacher.config, "masked-token")
        only.body, only.head = teacher.body, teacher.head.token  # type: ignore[assignment]
        return only
    return teacher


def as_pretraining(config: DistillConfig, teacher: Model, place: Path) -> PretrainConfig:
    """The run as a pretraining of the student, whose texts are cut by the teacher's tokenizer."""
    objective = replace(config.objective, kind=OBJECTIVE_OF[teacher.kind])  # type: ignore[arg-type]
    data = replace(config.data, tokenizer=replace(config.data.tokenizer, folder=place))
    return PretrainConfig(
        folder=config.folder,
        model=student_config(config, teacher.config),
        train=config.train,
        objective=objective,
        data=data,
        prepared=config.prepared,
        resume=config.resume,
    )


@torch.no_grad()
def held_out_loss(task: Any, model: Model, device: torch.device) -> float | None:
    """The plain loss on the validation rows."""
    if task.validation is None:
        return None
    model.eval()
    tokens, total, count = Tokens(), 0.0, 0.0
    rows = task.validation.rows(0)
    for first in range(0, rows, 16):
        batch = task.validation.part(0, first, min(16, rows - first)).to(device)
        if model.config.segments <= 1:
            batch = replace(batch, segments=None)
        total += float(tokens.totals(model, batch)[0])
        count += float(tokens.counts(batch)[0])
    return total / max(count, 1.0)
