"""One forward of one text with everything kept, and what is read off it: attention, lens, contributions, surprise."""

# T tokens, S tokens looked at, L layers, H heads, K head width, D model width, V vocabulary

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from plume.config import UserError
from plume.explain.results import (
    Candidates,
    Contributions,
    Floats,
    HeadProperties,
    Lens,
    Steps,
    Surprise,
    as_json,
    matrix_svg,
)
from plume.heads import TOKEN_HEADS, Model
from plume.model import Transformer

Spell = Callable[[int], str]
MASKED_AT_ONCE = 16  # rows of one forward when every token of a masked model is hidden in turn


@contextmanager
def listening(parts: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Keep what each part gives out, for this thread's forwards alone: others may use the model meanwhile."""
    heard: dict[str, Tensor] = {}
    thread = threading.get_ident()

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, given: Any, result: Tensor) -> None:
            if threading.get_ident() == thread:
                heard[name] = result.detach()[0].float()

        return hook

    handles = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


class Explanation:
    """One text inside one model. Nothing large is computed before it is asked for."""

    def __init__(
        self, model: Model, tokens: Sequence[int], *, spell: Spell = str, segments: Sequence[int] | None = None
    ) -> None:
        if not isinstance(model.body, Transformer):
            raise UserError("an encoder-decoder cannot be explained; a model with one stack can")
        if not 0 < len(tokens) <= model.config.context:
            limit = f"between 1 and {model.config.context}"
            raise UserError(f"the text has {len(tokens)} tokens; this model explains {limit}")
        wrong = [t for t in tokens if not 0 <= t < model.config.vocab_size]
        if wrong:
            raise UserError(
                f"token {wrong[0]} is not in the vocabulary; ids go from 0 to {model.config.vocab_size - 1}"
            )
        self.model, self.spell = model, spell
        self.tokens = tuple(int(t) for t in tokens)
        self.pieces = tuple(spell(t) for t in self.tokens)
        self.segments = None if segments is None else tuple(segments)
        self.causal: bool = model.body.causal
        self._heard, self._hidden = self._run()

    def _run(self) -> tuple[dict[str, Tensor], Tensor]:
        body, parts = self.model.body, dict[str, nn.Module]()
        parts["embed"] = body.embed
        for i, block in enumerate(body.blocks):  # type: ignore[arg-type]
            attention = block.attn.inner
            parts |= {f"{name}{i}": getattr(attention, name) for name in "qkv"}
            parts |= {f"attention{i}": attention, f"middle{i}": block.attn, f"mlp{i}": block.mlp.inner}
            parts[f"block{i}"] = block
        device = self.model.table.device
        row = torch.tensor([self.tokens], device=device)
        segments = None if self.segments is None else torch.tensor([self.segments], device=device)
        with torch.no_grad(), listening(parts) as heard:
            hidden = body(row, segments=segments)[0].float()  # (T, D)
        return heard, hidden

    @property
    def layers(self) -> int:
        return self.model.config.layers

    @property
    def heads(self) -> int:
        return self.model.config.heads

    @cached_property
    def logits(self) -> Tensor:
        """What the head says at every place, (T, V)."""
        if self.model.kind not in TOKEN_HEADS:
            raise UserError(f"a model with a {self.model.kind} head does not predict tokens")
        with torch.no_grad():
            return self.model.read(self._hidden[None].to(self.model.table.dtype))[0].float()

    # ---- attention

    def _check(self, layer: int, head: int | None = None) -> None:
        if not 0 <= layer < self.layers:
            raise UserError(f"layer={layer} is not there; layers go from 0 to {self.layers - 1}")
        if head is not None and not 0 <= head < self.heads:
            raise UserError(f"head={head} is not there; heads go from 0 to {self.heads - 1}")

    def _split(self, name: str, layer: int) -> Tensor:
        x = self._heard[f"{name}{layer}"]  # (T, D)
        return x.view(len(x), self.heads, -1).transpose(0, 1)  # (H, T, K)

    def _hidden_from(self, layer: int) -> Tensor | None:
        """Who may not look at whom, (T, S); None when everybody sees everybody."""
        if not self.causal:
            return None
        places = torch.arange(len(self.tokens), device=self._hidden.device)
        distance, band = places[:, None] - places, self.model.config.band_of(layer)
        return (distance < 0) | (distance >= band) if band else distance < 0

    def _weights(self, layer: int) -> Tensor:
        self._check(layer)
        q, k = self._split("q", layer), self._split("k", layer)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])  # (H, T, S)
        hidden = self._hidden_from(layer)
        return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)

    def attention(self, layer: int, head: int | None = None) -> Floats:
        """Weights of one layer, (H, T, S), or of one head, (T, S). Each row sums to one."""
        self._check(layer, head)
        weights = self._weights(layer)
        return as_floats(weights if head is None else weights[head])

    def mean_attention(self, layer: int | None = None) -> Floats:
        """Averaged over the heads of one layer, or of all, (T, S)."""
        wanted = range(self.layers) if layer is None else [layer]
        return as_floats(torch.stack([self._weights(i).mean(0) for i in wanted]).mean(0))

    def rollout(self, layer: int | None = None) -> Floats:
        """Attention followed down to the input, half of each step being the residual stream itself, (T, S)."""
        last = self.layers - 1 if layer is None else layer
        self._check(last)
        same = torch.eye(len(self.tokens), device=self._hidden.device)
        through = same
        for i in range(last + 1):
            through = (0.5 * self._weights(i).mean(0) + 0.5 * same) @ through
        return as_floats(through)

    def steps(self, layer: int, head: int, query: int) -> Steps:
        """The way from one token's query to what this head hands on, number by number."""
        self._check(layer, head)
        if not 0 <= query < len(self.tokens):
            raise UserError(f"query={query} is not a place in the text; places go from 0 to {len(self.tokens) - 1}")
        hidden = self._hidden_from(layer)
        places = torch.arange(len(self.tokens), device=self._hidden.device)
        seen = places if hidden is None else places[~hidden[query]]
        q = self._split("q", layer)[head, query]  # (K,)
        k, v = (self._split(name, layer)[head, seen] for name in "kv")  # (S, K)
        scores = k @ q  # (S,)
        scaled = scores / math.sqrt(len(q))
        weights = scaled.softmax(0)
        numbers = (as_floats(x) for x in (q, k, v, scores, scaled, weights, weights @ v))
        return Steps(query, tuple(seen.tolist()), *numbers)

    def head_properties(self) -> HeadProperties:
        count = len(self.tokens)
        ids = torch.tensor(self.tokens, device=self._hidden.device)
        places = torch.arange(count, device=ids.device)
        distance = (places[:, None] - places).float()
        same = (ids[:, None] == ids) & (distance > 0 if self.causal else distance != 0)  # (T, S)
        columns: list[list[Tensor]] = [[], [], [], []]
        for layer in range(self.layers):
            w = self._weights(layer)  # (H, T, S)
            nothing = w.new_zeros(self.heads)
            columns[0].append(w.diagonal(offset=-1, dim1=1, dim2=2).mean(1) if count > 1 else nothing)
            columns[1].append(w[:, 1:, 0].mean(1) if count > 1 else nothing)
            columns[2].append((w * same).sum(2)[:, same.any(1)].mean(1) if same.any() else nothing)
            columns[3].append((w * distance.abs()).sum(2).mean(1))
        return HeadProperties(*(as_floats(torch.stack(column)) for column in columns))

    # ---- the residual stream

    def residual(self) -> Floats:
        """The stream after the embedding and after each layer, (L + 1, T, D)."""
        return as_floats(torch.stack([self._stream(i) for i in range(self.layers + 1)]))

    def norms(self) -> Floats:
        """Length of the residual stream, (L + 1, T)."""
        return as_floats(torch.stack([self._stream(i).norm(dim=-1) for i in range(self.layers + 1)]))

    def _stream(self, row: int) -> Tensor:
        return self._heard["embed" if row == 0 else f"block{row - 1}"]  # (T, D)

    def lens(self, k: int = 5, start: int = 0, stop: int | None = None) -> Lens:
        """The top k tokens that each layer would answer with, for the places from start to stop."""
        if self.model.kind not in TOKEN_HEADS:
            raise UserError(f"a model with a {self.model.kind} head does not predict tokens, so it has no lens")
        final: Any = self.model.body.norm
        tokens, probabilities = list[Tensor](), list[Tensor]()
        for row in range(self.layers + 1):
            with torch.no_grad():
                x = self._stream(row)[start:stop].to(self.model.table.dtype)
                logits = self.model.read((x if final is None else final(x))[None])[0].float()  # (T, V)
            top = logits.softmax(-1).topk(min(k, logits.shape[-1]))
            tokens.append(top.indices)
            probabilities.append(top.values)
        ids = torch.stack(tokens).cpu().numpy()
        spelled = tuple(tuple(tuple(self.spell(int(t)) for t in cell) for cell in row) for row in ids)
        return Lens(ids, spelled, as_floats(torch.stack(probabilities)))

    @torch.no_grad()
    def contributions(self) -> Contributions:
        """What attention and MLP of each layer add along the direction of the final answer."""
        answer = self.logits.argmax(-1)  # (T,)
        total = self.logits.gather(1, answer[:, None])[:, 0] - self.logits.mean(1)
        direction, bias = self._direction(answer), torch.zeros_like(total)
        body, columns = self.model.body, list[tuple[Tensor, Tensor]]()
        if body.norm is not None:  # pre-norm: one norm stands between the stream and the head
            direction, bias = self._through(body.norm, self._stream(self.layers), direction, bias)
        for i in reversed(range(self.layers)):
            block: Any = body.blocks[i]  # type: ignore[index]
            attention, mlp, middle = (self._heard[f"{name}{i}"] for name in ("attention", "mlp", "middle"))
            if not block.mlp.pre:
                direction, bias = self._through(block.mlp.norm, middle + mlp, direction, bias)
            from_mlp = (direction * mlp).sum(-1)
            if not block.attn.pre:
                direction, bias = self._through(block.attn.norm, self._stream(i) + attention, direction, bias)
            columns.append(((direction * attention).sum(-1), from_mlp))
        columns.reverse()
        return Contributions(
            answer.cpu().numpy(),
            tuple(self.spell(t) for t in answer.tolist()),
            as_floats((direction * self._stream(0)).sum(-1)),
            as_floats(torch.stack([from_attention for from_attention, _ in columns])),
            as_floats(torch.stack([from_mlp for _, from_mlp in columns])),
            as_floats(bias),
            as_floats(total),
        )

    def _direction(self, answer: Tensor) -> Tensor:
        """Slope of (answer's logit - mean logit) at the last hidden state, (T, D); a masked head's is its tangent."""
        hidden = self._hidden.clone().requires_grad_()
        with torch.enable_grad():
            logits = self.model.read(hidden[None].to(self.model.table.dtype))[0].float()
            aim = (logits.gather(1, answer[:, None])[:, 0] - logits.mean(1)).sum()
            (slope,) = torch.autograd.grad(aim, hidden)
        return slope

    @staticmethod
    def _through(norm: Any, x: Tensor, direction: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The direction on the other side of a norm of x whose divisor is held, and the norm's own bias along it."""
        bias = bias + (direction * norm.bias.float()).sum(-1)
        scaled = direction * norm.weight.float()
        divisor = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return (scaled - scaled.mean(-1, keepdim=True)) / divisor, bias

    # ---- the distribution

    def next_tokens(self, k: int = 200, place: int = -1) -> Candidates:
        """What may follow the token at a place; at the end of the text unless told."""
        return candidates(self.logits[place], k, self.spell)

    def surprise(self, mask: int | None = None, start: int | None = None) -> Surprise:
        """Surprisal, entropy and rank of each token; a masked model hides each in turn behind `mask`.

        `start` is the token to put before the text, so that the first one has an expectation too.
        """
        if not self.causal:
            if mask is None:
                raise UserError("mask is not given; a model that sees both sides needs the mask token's id")
            return self._one_by_one(mask)
        shifted = self.logits.new_full(self.logits.shape, torch.nan)
        if start is not None:
            row = [start, *self.tokens][: self.model.config.context]
            shifted[: len(row) - 1] = Explanation(self.model, row, spell=str).logits[: len(row) - 1]
            shifted[len(row) - 1 :] = self.logits[len(row) - 2 : -1]
        else:
            shifted[1:] = self.logits[:-1]
        return surprise(shifted, self.tokens)

    def _one_by_one(self, mask: int) -> Surprise:
        row = torch.tensor(self.tokens, device=self.model.table.device)
        places = torch.arange(len(row), device=row.device)
        segments = None if self.segments is None else torch.tensor(self.segments, device=row.device)
        found = list[Tensor]()
        for first in range(0, len(row), MASKED_AT_ONCE):
            chunk = places[first : first + MASKED_AT_ONCE]
            batch = row.repeat(len(chunk), 1)
            batch[torch.arange(len(chunk)), chunk] = mask
            with torch.no_grad():
                hidden = self.model.body(batch, segments=None if segments is None else segments.expand(len(chunk), -1))
                found.append(self.model.read(hidden[torch.arange(len(chunk)), chunk][:, None])[:, 0].float())
        return surprise(torch.cat(found), self.tokens)

    # ---- as data

    def as_json(self) -> dict[str, Any]:
        """Everything that is small; attention of single heads is asked for by itself."""
        known: dict[str, Any] = {
            "tokens": list(self.tokens),
            "pieces": list(self.pieces),
            "causal": self.causal,
            "layers": self.layers,
            "heads": self.heads,
            "norms": as_json(self.norms()),
            "head_properties": self.head_properties().as_json(),
        }
        if self.model.kind in TOKEN_HEADS:
            known |= {"lens": self.lens().as_json(), "contributions": self.contributions().as_json()}
        return known

    def _repr_html_(self) -> str:
        """A matrix per layer, averaged over heads: darker is more."""
        return "".join(
            f"<figure style='display:inline-block;margin:.5em'>{matrix_svg(self.mean_attention(i), self.pieces)}"
            f"<figcaption>layer {i}</figcaption></figure>"
            for i in range(self.layers)
        )


def candidates(logits: Tensor, k: int, spell: Spell) -> Candidates:
    """The k largest of one row of logits (V,), and the log-sum of the rest."""
    if k < 1:
        raise UserError(f"k={k} must be at least 1, for example 10")
    top = logits.float().topk(min(k, len(logits)))
    rest = logits.float().scatter(0, top.indices, -torch.inf).logsumexp(0)
    everything = torch.logaddexp(rest, top.values.logsumexp(0))
    ids = top.indices.tolist()
    probabilities = (top.values - everything).exp()
    return Candidates(
        tuple(ids), tuple(spell(t) for t in ids), as_floats(top.values), as_floats(probabilities), float(rest)
    )


def surprise(logits: Tensor, tokens: Sequence[int]) -> Surprise:
    """logits[i] (V,) is the distribution that tokens[i] was drawn from; a row of NaN means that there is none."""
    found: list[list[Tensor]] = [[], [], [], []]
    row = torch.tensor(tokens, device=logits.device)
    for first in range(0, len(row), 64):  # bounds the memory of the log-probabilities
        logs, ids = logits[first : first + 64].log_softmax(-1), row[first : first + 64]
        own = logs.gather(1, ids[:, None])  # (T, 1)
        rank = (logs > own).sum(-1).masked_fill(own[:, 0].isnan(), -1)
        entropy = torch.special.entr(logs.exp()).sum(-1)
        for column, value in zip(found, (-own[:, 0], entropy, rank, own[:, 0].exp()), strict=True):
            column.append(value)
    surprisal, entropy, rank, probability = (torch.cat(column) for column in found)
    return Surprise(as_floats(surprisal), as_floats(entropy), rank.cpu().numpy(), as_floats(probability))


def as_floats(x: Tensor) -> Floats:
    return x.detach().float().cpu().numpy()
