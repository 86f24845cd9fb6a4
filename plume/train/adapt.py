"""Which weights of a pretrained model move: all, some layers, one layer after the other, or LoRA's small matrices."""

# D model width, K rank of LoRA

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plume.config import AdaptConfig, UserError
from plume.hf import rules_for
from plume.hf.families import family_of
from plume.model.heads import Model, NextToken
from plume.model.transformer import Attention, EncoderDecoder, Transformer, initialise
from plume.util.files import aside, write_json

PART_NAMES = {p: f"attn.inner.{p}" for p in ("q", "k", "v", "out")} | {p: f"mlp.inner.{p}" for p in ("up", "down")}


def grow_table(model: Model, vocab_size: int) -> int:
    """Rows for new tokens at the end of the table, drawn as the first weights were; how many are new."""
    old = model.config
    if vocab_size < old.vocab_size:
        raise UserError(f"the tokenizer has {vocab_size} tokens, fewer than the model's {old.vocab_size}")
    fresh = vocab_size - old.vocab_size
    if fresh == 0:
        return 0
    config = replace(old, vocab_size=vocab_size)
    table = nn.Embedding(config.table_rows, config.width)
    with torch.no_grad():
        nn.init.normal_(table.weight, std=0.02)
        table.weight[: old.vocab_size] = model.body.embed.tokens.weight[: old.vocab_size]
    model.config = config
    for stack in stacks(model):
        stack.config = config
        stack.embed.tokens = table
    model.body.config = config
    if isinstance(bias := getattr(model.head, "bias", None), nn.Parameter):  # a masked-token head has one per token
        model.head.bias = nn.Parameter(torch.cat([bias.detach(), bias.new_zeros(fresh)]))
    if isinstance(model.head, NextToken):
        model.head.vocab_size = vocab_size
    if isinstance(output := getattr(model.head, "output", None), nn.Linear):  # not tied to the token table
        grown = nn.Linear(config.width, config.table_rows, bias=False)
        with torch.no_grad():
            nn.init.normal_(grown.weight, std=0.02)
            grown.weight[: old.vocab_size] = output.weight[: old.vocab_size]
        model.head.output = grown
    return fresh


def check_adapt(config: AdaptConfig, layers: int) -> None:
    """Before anything is loaded: a model of so many layers can be adapted like this."""
    for name in ("freeze_layers", "transfer_layers"):
        value = getattr(config, name)
        if value is not None and value > layers:
            raise UserError(f"{name}={value} is more than the model's {layers} layers")


def stacks(model: Model) -> list[Transformer]:
    if isinstance(model.body, EncoderDecoder):
        return [model.body.encoder, model.body.decoder]
    return [model.body]


def layers_of(model: Model) -> list[nn.Module]:
    """Every block from the bottom to the top; a decoder stands on its encoder."""
    return [block for stack in stacks(model) for block in stack.blocks]


def set_dropout(model: Model, everywhere: float | None, classifier: float | None) -> None:
    if everywhere is not None:
        for part in model.body.modules():
            if isinstance(part, nn.Dropout):
                part.p = everywhere
            elif isinstance(part, Attention):
                part.dropout = everywhere
        model.config = replace(model.config, dropout=everywhere)
    if classifier is not None and isinstance(drop := getattr(model.head, "drop", None), nn.Dropout):
        drop.p = classifier


def keep_layers(model: Model, transferred: int | None) -> None:
    """Only the embeddings and the first layers stay as pretrained; the others, or with -1 all, begin anew."""
    if transferred is None:
        return
    blocks = layers_of(model)
    if transferred < 0:
        for stack in stacks(model):
            renew(stack, stack)
        return
    for stack in stacks(model):
        for block in stack.blocks:
            if blocks.index(block) >= transferred:
                renew(block, stack, prefix="blocks.0.")
        if stack.norm is not None and transferred < len(blocks):
            stack.norm.reset_parameters()


def renew(part: nn.Module, stack: Transformer, prefix: str = "") -> None:
    """First weights again, as the stack would draw them."""
    for module in part.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    holder = nn.Module()
    holder.add_module("blocks", nn.ModuleList([part])) if prefix else holder.add_module("stack", part)
    initialise(holder, stack.config)


class Freezer:
    """Decides, step by step, which weights learn. The optimiser skips those without a gradient."""

    def __init__(self, model: Model, config: AdaptConfig) -> None:
        self.model, self.config = model, config
        self.blocks = layers_of(model)
        frozen_body = config.mode == "features"
        self.bottom = len(self.blocks) if frozen_body else config.freeze_layers  # never learn
        if frozen_body or config.freeze_layers:
            self.set_embeddings(learn=False)
        for block in self.blocks[: self.bottom]:
            block.requires_grad_(False)
        if frozen_body:
            model.body.requires_grad_(False)
        self.open: int | None = None  # blocks that learn now, from the top, while they are opened one by one

    def set_embeddings(self, *, learn: bool) -> None:
        for stack in stacks(self.model):
            stack.embed.requires_grad_(learn)

    def at(self, step: int) -> None:
        """Open the layers that are due at this step: gradual unfreezing, from the top."""
        if self.config.unfreeze_every is None:
            return
        wanted = min(1 + step // self.config.unfreeze_every, len(self.blocks) + 1)
        if wanted == self.open:
            return
        self.open = wanted
        for depth, block in enumerate(reversed(self.blocks)):
            learns = depth < wanted and len(self.blocks) - 1 - depth >= self.bottom
            block.requires_grad_(learns)
        self.set_embeddings(learn=wanted > len(self.blocks) and self.bottom == 0)


def lr_scales(model: Model, decay: float) -> dict[str, float]:
    """The factor on the learning rate of each parameter: 1 for the head, smaller from layer to layer downwards."""
    blocks = layers_of(model)
    depth = {id(p): len(blocks) - number for number, block in enumerate(blocks) for p in block.parameters()}
    top = {id(p) for p in model.head.parameters()} | {
        id(p) for stack in stacks(model) if stack.norm is not None for p in stack.norm.parameters()
    }
    return {
        name: 1.0 if id(p) in top else decay ** depth.get(id(p), len(blocks) + 1)
        for name, p in model.named_parameters()
    }


# ---- LoRA --------------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen matrix and a small one beside it: weight + alpha / rank * up @ down."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))  # (K, D)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)
        self.scale = alpha / rank
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(self.drop(x), self.down), self.up)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        self.base.weight += self.scale * self.up @ self.down
        return self.base


class GrownTable(nn.Module):
    """A frozen token table whose last rows are new and learn."""

    def __init__(self, table: nn.Embedding, size: int, fresh: int) -> None:
        super().__init__()
        self.size = size  # of the vocabulary; rows beyond only pad
        self.known = nn.Parameter(table.weight.detach(), requires_grad=False)
        self.fresh = nn.Parameter(table.weight.detach()[size - fresh : size].clone())

    @property
    def weight(self) -> Tensor:
        first = self.size - len(self.fresh)
        return torch.cat([self.known[:first], self.fresh, self.known[self.size :]])

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.size - len(self.fresh)
        new = (tokens >= first)[..., None]
        return torch.where(new, F.embedding((tokens - first).clamp(min=0), self.fresh), F.embedding(tokens, self.known))


def add_lora(model: Model, config: AdaptConfig, fresh_rows: int) -> None:
    """Freeze the body; put a small pair of matrices beside each chosen one; the head and new token rows learn."""
    model.body.requires_grad_(False)
    if fresh_rows:
        table = GrownTable(stacks(model)[0].embed.tokens, model.config.vocab_size, fresh_rows)
        for stack in stacks(model):
            stack.embed.tokens = table  # type: ignore[assignment]
    for parent, name, linear in list(_chosen(model, config)):
        setattr(parent, name, LowRank(linear, config.lora_rank, config.lora_alpha, config.lora_dropout))


def _chosen(model: Model, config: AdaptConfig) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for block in layers_of(model):
        for part in config.lora_modules:
            *path, name = PART_NAMES[part].split(".")
            parent: Any = block
            for step in path:
                parent = getattr(parent, step)
            yield parent, name, getattr(parent, name)


def merge_lora(model: Model) -> None:
    """The model as if it had been trained whole: small matrices added to theirs, new rows put into the table."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LowRank):
                setattr(module, name, child.merged())
    for stack in stacks(model):
        if isinstance(table := stack.embed.tokens, GrownTable):
            rows, width = table.weight.shape
            whole = nn.Embedding(rows, width, _weight=table.weight.detach().clone())
            for other in stacks(model):
                other.embed.tokens = whole
    model.requires_grad_(True)


def save_adapter(model: Model, config: AdaptConfig, folder: Path, *, base: str) -> Path:
    """What LoRA learned, as a folder that `peft` opens on the base model.

    A matrix that transformers stores as one (GPT's q, k and v) gets one pair whose rank is that of its parts together.
    When the vocabulary has grown, the whole token table goes with it: peft wants the base resized first.
    """
    from safetensors.torch import save_file

    tensors, ranks = adapter_tensors(model)
    with aside(folder) as new:
        write_json(new / "adapter_config.json", adapter_config(model, config, base, ranks))
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, new / "adapter_model.safetensors")
    return folder


def adapter_tensors(model: Model) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Tensors under peft's names, and the rank of each matrix that has a pair."""
    family, modules, prefix = family_of(model.config), dict(model.named_modules()), "base_model.model."
    tensors, ranks = dict[str, Tensor](), dict[str, int]()
    for rule in rules_for(family, model.config, model.kind, family.prefix):
        parts = [part.removesuffix(".weight") for part in rule.parts()]
        if rule.ours.endswith(".weight") and any(isinstance(modules.get(part), LowRank) for part in parts):
            name = rule.theirs.removesuffix(".weight")
            down, up = joined([modules[part] for part in parts])
            tensors[f"{prefix}{name}.lora_A.weight"], tensors[f"{prefix}{name}.lora_B.weight"] = down, up
            ranks[name] = len(down)
        elif rule.ours.startswith("head."):
            tensors[prefix + rule.theirs] = model.state_dict()[rule.ours]
        elif rule.ours.endswith("embed.tokens.weight") and isinstance(stacks(model)[0].embed.tokens, GrownTable):
            tensors[prefix + rule.theirs] = model.body.embed.tokens.weight[: model.config.vocab_size].detach()
    return tensors, ranks


def adapter_config(model: Model, config: AdaptConfig, base: str, ranks: dict[str, int]) -> dict[str, Any]:
    family = family_of(model.config)
    others = {name: rank for name, rank in ranks.items() if rank != config.lora_rank}
    heads = sorted({r.theirs.removeprefix(family.prefix).split(".")[0] for r in family.heads[model.kind][1]})
    return {
        "peft_type": "LORA",
        "task_type": {"classify": "SEQ_CLS", "similarity": "SEQ_CLS", "tag": "TOKEN_CLS", "span": "QUESTION_ANS"}.get(
            model.kind
        ),
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "bias": "none",
        "target_modules": list(ranks),
        "rank_pattern": others,
        "alpha_pattern": {name: config.lora_alpha * rank / config.lora_rank for name, rank in others.items()},
        "modules_to_save": heads if heads else None,
        "fan_in_fan_out": any(rule.transposed for rule in family.body),
        "inference_mode": True,
    }


def joined(parts: list[nn.Module]) -> tuple[Tensor, Tensor]:
    """One pair for matrices that are stored one below the other; a part without LoRA adds nothing."""
    low = [part for part in parts if isinstance(part, LowRank)]
    down = torch.cat([part.down for part in low])  # (sum of K, D)
    up = down.new_zeros(sum(_outputs(part) for part in parts), len(down))
    row = column = 0
    for part in parts:
        if isinstance(part, LowRank):
            up[row : row + len(part.up), column : column + len(part.down)] = part.up.detach()
            column += len(part.down)
        row += _outputs(part)
    return down, up


def _outputs(part: nn.Module) -> int:
    linear = part.base if isinstance(part, LowRank) else part
    assert isinstance(linear, nn.Linear)
    return linear.out_features


def trainable(model: nn.Module) -> tuple[int, int]:
    """(weights that learn, all weights)."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)
