"""One text in one model: its forward pass, the activations that are asked for, and edits made on the way."""

# B rows, T tokens, S source tokens or keys, H heads, K head width, D model width, V vocabulary

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from plume.config import UserError, did_you_mean
from plume.explain.results import DrawnArray, Floats
from plume.model.heads import TOKEN_HEADS, Model
from plume.model.transformer import Block, EncoderDecoder, Residual, Transformer, attention_mask

Spell = Callable[[int], str]
Stack = Literal["encoder", "decoder"]
AttentionKind = Literal["attention", "cross"]
ROWS = ("token_rows", "position_rows", "segment_rows")
ATTENTION = (
    "input", "norm", "q", "k", "v", "products", "scores", "masked", "weights", "heads", "update", "sum", "output",
)  # fmt: skip
MLP = ("input", "norm", "up", "activation", "update", "sum", "output")
BLOCK_PARTS = tuple(f"{kind}.{part}" for kind in ("attention", "cross") for part in ATTENTION) + tuple(
    f"mlp.{part}" for part in MLP
)
PARTS = (*ROWS, "embedding", *BLOCK_PARTS, "final_norm", "logits")
DERIVED = ("products", "scores", "masked", "weights")  # computed from q and k; fused attention never holds them
PER_POSITION = (*TOKEN_HEADS, "tag", "span")  # heads that answer at every position
Change = Callable[[Tensor], Tensor | None]  # from a site's value (B, T, D) to what replaces it; None leaves it


class Site(NamedTuple):
    """What goes into a module, or what comes out of it."""

    module: nn.Module
    side: Literal["input", "output"]


def stacks(model: Model) -> dict[str, Transformer]:
    """The stacks of a model: `decoder` for a causal one, `encoder` for a bidirectional one, or both."""
    body = model.body
    if isinstance(body, EncoderDecoder):
        return {"encoder": body.encoder, "decoder": body.decoder}
    if model.config.recurrent or not isinstance(body, Transformer):
        raise UserError(f"a {type(body).__name__} cannot be explained; a Transformer can")
    return {"decoder" if body.causal else "encoder": body}


def sites(model: Model) -> dict[str, Site]:
    """Every site by name, such as `decoder.0.attention.q` for the queries of the first block."""
    found = dict[str, Site]()
    for name, stack in stacks(model).items():
        found[f"{name}.embedding"] = Site(stack.embed, "output")
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            for kind, part in (("attention", block.attn), ("cross", block.cross), ("mlp", block.mlp)):
                if part is not None:
                    found |= {f"{name}.{i}.{kind}.{site}": where for site, where in sublayer(part).items()}
        if stack.norm is not None:
            found[f"{name}.final_norm"] = Site(stack.norm, "output")
    return found


def sublayer(part: Residual) -> dict[str, Site]:
    """The sites of one sublayer: what enters, its norm, its inner values, its update, the sum, what leaves."""
    inner: Any = part.inner
    found = {
        "input": Site(part, "input"),
        "norm": Site(part.norm, "output"),
        "update": Site(inner, "output"),
        "sum": Site(part, "output") if part.pre else Site(part.norm, "input"),
        "output": Site(part, "output"),
    }
    if hasattr(inner, "q"):
        return (
            found | {name: Site(getattr(inner, name), "output") for name in "qkv"} | {"heads": Site(inner.out, "input")}
        )
    return found | {"up": Site(inner.up, "output"), "activation": Site(inner.down, "input")}


@contextmanager
def hooked(changes: Iterable[tuple[Site, Change]]) -> Iterator[None]:
    """Call each function on its site's value, in the forward passes of this thread alone."""
    handles = [attach(site, change, threading.get_ident()) for site, change in changes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attach(site: Site, change: Change, thread: int) -> Any:
    def before(module: nn.Module, given: tuple[Any, ...]) -> Any:
        if threading.get_ident() != thread or (new := change(given[0])) is None:
            return None
        return new, *given[1:]

    def after(module: nn.Module, given: Any, result: Tensor) -> Tensor | None:
        return change(result) if threading.get_ident() == thread else None

    if site.side == "input":
        return site.module.register_forward_pre_hook(before)
    return site.module.register_forward_hook(after)


@dataclass(frozen=True)
class Target:
    """The logit that is explained: of a token, a label or an end of the answer; heads for texts have no position."""

    index: int
    position: int | None
    centred: bool  # minus the mean logit, which the softmax does not see


class ForwardPass:
    """One forward pass. Nothing is computed before it is asked for, and only what was asked for is kept."""

    def __init__(
        self,
        model: Model,
        tokens: Sequence[int],
        *,
        spell: Spell = str,
        segments: Sequence[int] | None = None,
        source: Sequence[int] | None = None,
        changes: Sequence[tuple[str, Change]] = (),
    ) -> None:
        self.model, self.spell = model, spell
        self.stacks = stacks(model)
        self.stack: Stack = "decoder" if "decoder" in self.stacks else "encoder"  # the one that the head reads
        self.causal = self.stacks[self.stack].causal
        self.tokens = self._checked(tokens, "text")
        self.pieces = tuple(spell(t) for t in self.tokens)
        self.segments = None if segments is None else tuple(segments)
        if isinstance(model.body, EncoderDecoder) != (source is not None):
            wanted = "an encoder-decoder needs a source" if source is None else "only an encoder-decoder has a source"
            raise UserError(f"source={source}: {wanted}")
        self.source = None if source is None else self._checked(source, "source")
        self.source_pieces = None if self.source is None else tuple(spell(t) for t in self.source)
        self.changes = tuple(changes)
        self._recorded = dict[str, Tensor]()

    def _checked(self, tokens: Sequence[int], name: str) -> tuple[int, ...]:
        config = self.model.config
        if not 0 < len(tokens) <= config.context:
            raise UserError(f"the {name} has {len(tokens)} tokens; this model explains between 1 and {config.context}")
        if wrong := [t for t in tokens if not 0 <= t < config.vocab_size]:
            raise UserError(f"token {wrong[0]} is not in the vocabulary; ids go from 0 to {config.vocab_size - 1}")
        return tuple(int(t) for t in tokens)

    # ---- the forward pass

    @cached_property
    def sites(self) -> dict[str, Site]:
        return sites(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.table.device

    def run(self, rows: int = 1, changes: Iterable[tuple[str, Change]] = ()) -> Tensor:
        """Hidden states of so many equal rows, (B, T, D), with changes made at sites, those of this pass first."""
        tokens = torch.tensor([self.tokens] * rows, device=self.device)
        segments = None if self.segments is None else torch.tensor([self.segments] * rows, device=self.device)
        with hooked((self.sites[name], change) for name, change in (*self.changes, *changes)):
            if self.source is None:
                return self.model.body(tokens, segments=segments)
            return self.model.body(torch.tensor([self.source] * rows, device=self.device), tokens)

    def run_from(self, layer: int, rows: int, changes: Iterable[tuple[str, Change]]) -> Tensor:
        """The same when all changes lie in the reading stack from this block on: blocks before it are not run again."""
        body, config = body_of(self), self.model.config
        if layer == 0 or self.source is not None:
            return self.run(rows, changes)
        site = f"{self.stack}.{layer}.attention.input"
        x = self.record([site])[site].to(self.model.table.dtype).expand(rows, -1, -1)
        count, device = len(self.tokens), self.device
        masks = {
            band: attention_mask(0, count, causal=body.causal, device=device, band=band) for band in {0, config.band}
        }
        with hooked((self.sites[name], change) for name, change in (*self.changes, *changes)):
            for i in range(layer, self.layers):
                x = body.blocks[i](x, masks[config.band_of(i)])
            return x if body.norm is None else body.norm(x)

    def record(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """The values of these sites, (T, D) each, from one forward pass for all that are not known yet."""
        wanted = [name for name in names if name not in self._recorded]

        def keep(name: str) -> tuple[str, Change]:
            def change(value: Tensor) -> None:
                self._recorded[name] = value.detach()[0].float()

            return name, change

        if wanted or "hidden" not in self._recorded:
            with torch.no_grad():
                self._recorded["hidden"] = self.run(1, map(keep, wanted))[0].float()
        return self._recorded

    @property
    def bytes(self) -> int:
        """Memory of what was asked for so far; many sites share theirs, such as a sum and what it leaves as."""
        known = [*self._recorded.values(), *([self.logits] if "logits" in self.__dict__ else [])]
        return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in known)}.values())

    @property
    def hidden(self) -> Tensor:
        """The last hidden states, (T, D)."""
        return self.record([])["hidden"]

    @cached_property
    def logits(self) -> Tensor:
        """What the head gives: (T, V) of tokens, (T, L) of tags, (T, 2) of spans, (L,) of labels, () of a score."""
        if self.model.kind == "bare":
            raise UserError("a model with a bare head has no logits; one with another head has")
        with torch.no_grad():
            return self.model.read(self.hidden[None].to(self.model.table.dtype))[0].float()

    @property
    def layers(self) -> int:
        return len(self.stacks[self.stack].blocks)

    @property
    def heads(self) -> int:
        return self.model.config.heads

    # ---- activations, one chosen part at a time

    def activation(
        self, part: str, *, layer: int | None = None, head: int | None = None, stack: Stack | None = None
    ) -> Floats:
        """One part of the forward pass as an array: see PARTS for the names.

        Parts of a block need `layer`; q, k, v, products, scores, masked, weights and heads are (H, T, ...) or, with
        `head`, one head's. Others are (T, D), mlp.up and mlp.activation (T, mlp_width), logits what the head gives.
        """
        return as_floats(self.value(part, layer, head, stack)).view(DrawnArray)

    def value(self, part: str, layer: int | None = None, head: int | None = None, stack: Stack | None = None) -> Tensor:
        name = self.stack if stack is None else stack
        self.check(part, layer, head, name)
        if part == "logits":
            return self.logits
        if part in ROWS:
            return self._rows(part, name)
        site = f"{name}.{part}" if layer is None else f"{name}.{layer}.{part}"
        kind, _, last = part.partition(".")
        if last in DERIVED:
            assert layer is not None
            found = self._attention(last, layer, name, kind)
        elif last in ("q", "k", "v", "heads"):
            found = self.split(site)
        else:
            return self.record([site])[site]
        return found if head is None else found[head]

    def check(self, part: str, layer: int | None, head: int | None, stack: str) -> None:
        if stack not in self.stacks:
            raise UserError(f"stack={stack!r} is not in this model; it has {' and '.join(self.stacks)}")
        if part not in PARTS:
            raise UserError(f"there is no part {part!r}; all: {', '.join(PARTS)}{did_you_mean(part, PARTS)}")
        if (part in BLOCK_PARTS) != (layer is not None):
            raise UserError(
                f"layer={layer}: {part} {'is a part of a block' if layer is None else 'belongs to no block'}"
            )
        count = len(self.stacks[stack].blocks)
        if layer is not None and not 0 <= layer < count:
            raise UserError(f"layer={layer} does not exist; layers go from 0 to {count - 1}")
        if head is not None and not 0 <= head < self.heads:
            raise UserError(f"head={head} does not exist; heads go from 0 to {self.heads - 1}")
        if part == "segment_rows" and self.stacks[stack].embed.segments is None:
            raise UserError("this model has no segment table")
        if part == "final_norm" and self.stacks[stack].norm is None:
            raise UserError("a post-norm model has no final norm; its last block ends with one")
        if part.startswith("cross.") and (stack != "decoder" or self.source is None):
            raise UserError("only the decoder of an encoder-decoder has cross-attention")

    def _rows(self, part: str, stack: str) -> Tensor:
        """The rows that the embedding adds up, as they are added: token rows with their scale."""
        embed = self.stacks[stack].embed
        ids = self.source if stack == "encoder" and self.source is not None else self.tokens
        tokens = torch.tensor(ids, device=self.device)
        with torch.no_grad():
            if part == "token_rows":
                return (embed.tokens(tokens) * embed.scale).float()
            if part == "position_rows":
                table = embed.waves if embed.positions is None else embed.positions.weight
                return table[embed.first_position : embed.first_position + len(ids)].detach().float()
            assert embed.segments is not None
            segments = [0] * len(ids) if self.segments is None else self.segments
            return embed.segments(torch.tensor(segments, device=self.device)).float()

    def split(self, site: str) -> Tensor:
        """A site's value cut into heads, (H, T, K)."""
        x = self.record([site])[site]  # (T, D)
        return x.view(len(x), self.heads, -1).transpose(0, 1)

    def _attention(self, part: str, layer: int, stack: str, kind: str) -> Tensor:
        """products q·k, scores (divided by sqrt(K)), masked scores or softmax weights, (H, T, S)."""
        names = [f"{stack}.{layer}.{kind}.{name}" for name in "qk"]
        self.record(names)
        q, k = map(self.split, names)
        products = q @ k.transpose(1, 2)
        if part == "products":
            return products
        scores = products / math.sqrt(q.shape[-1])
        hidden = self.hidden_keys(layer, stack, kind)
        if part == "scores" or hidden is None:
            return scores.softmax(-1) if part == "weights" else scores
        masked = scores.masked_fill(hidden, -torch.inf)
        return masked.softmax(-1) if part == "weights" else masked

    def hidden_keys(self, layer: int, stack: str, kind: str = "attention") -> Tensor | None:
        """Which keys the mask hides from each query, (T, S); None when it hides none."""
        if kind == "cross" or not self.stacks[stack].causal:
            return None
        positions = torch.arange(len(self.tokens), device=self.device)
        distance, band = positions[:, None] - positions, self.model.config.band_of(layer)
        return (distance < 0) | (distance >= band) if band else distance < 0

    # ---- what is explained

    def target(self, index: int | None = None, position: int | None = None) -> Target:
        """A logit by its index and position; unset means the largest, at the last position."""
        logits = self.logits
        if self.model.kind in PER_POSITION:
            position = len(self.tokens) - 1 if position is None else position
            if not 0 <= position < len(self.tokens):
                raise UserError(
                    f"position={position} is not in the text; positions go from 0 to {len(self.tokens) - 1}"
                )
            logits = logits[position]
        elif position is not None:
            raise UserError(f"position={position}: a {self.model.kind} head gives one answer for the whole text")
        row = logits.reshape(-1)
        index = int(row.argmax()) if index is None else index
        if not 0 <= index < len(row):
            raise UserError(f"index={index} is not an answer of this head; answers go from 0 to {len(row) - 1}")
        return Target(index, position, centred=len(row) > 1 and self.model.kind != "span")

    def target_logit(self, hidden: Tensor, target: Target) -> Tensor:
        """The target's logit for rows of hidden states (B, T, D), (B,)."""
        x = hidden.to(self.model.table.dtype)
        if target.position is not None:
            x = x[:, target.position : target.position + 1]
        logits = self.model.read(x).float().reshape(len(x), -1)  # (B, V)
        logit = logits[:, target.index]
        return logit - logits.mean(1) if target.centred else logit


def as_floats(x: Tensor) -> Floats:
    return x.detach().float().cpu().numpy()


def body_of(seen: ForwardPass) -> Transformer:
    """The stack that the head reads."""
    return seen.stacks[seen.stack]
