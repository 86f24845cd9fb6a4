"""What happens to one text inside one model: attention, lens, contributions, interventions, attribution, surprise."""

# T tokens, S keys, L layers, H heads, K head width, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from plume.config import UserError
from plume.explain.attribution import Method, attribute
from plume.explain.contributions import contributions
from plume.explain.forward_pass import AttentionKind, ForwardPass, Spell, Stack, as_floats, body_of, hooked
from plume.explain.head_kinds import head_scores
from plume.explain.interventions import Edit, EditPart, Replacement, change_of, effects
from plume.explain.results import (
    Attribution,
    Candidates,
    Contributions,
    Effects,
    Floats,
    HeadScores,
    Lens,
    Steps,
    Surprise,
    as_json,
)
from plume.model.heads import TOKEN_HEADS, Model
from plume.model.likelihood import joined, score_rows
from plume.util import drawings

ROWS_AT_ONCE = 64  # of logits, whose log-probabilities are held together
MASKED_AT_ONCE = 16  # rows of one forward when every token of a masked model is hidden in turn


class Explanation(ForwardPass):
    """One text inside one model. Nothing large is computed before it is asked for."""

    start: int | None = None  # the token to put before the text when its tokens are predicted
    mask: int | None = None  # the token that hides one of them from a masked model
    predicted: slice = slice(0, None)  # the tokens without special ones around them

    # ---- attention

    def attention(
        self, layer: int, head: int | None = None, *, kind: AttentionKind = "attention", stack: Stack | None = None
    ) -> Floats:
        """Softmax weights of one layer, (H, T, S), or of one head, (T, S). Each row sums to one."""
        return self.activation(f"{kind}.weights", layer=layer, head=head, stack=stack)

    def _all_weights(self, layers: Sequence[int], kind: AttentionKind, stack: Stack | None) -> list[Tensor]:
        name = self.stack if stack is None else stack
        self.record([site for i in layers for part in "qk" if (site := f"{name}.{i}.{kind}.{part}") in self.sites])
        return [self.value(f"{kind}.weights", i, None, stack) for i in layers]

    def _blocks(self, stack: Stack | None) -> int:
        name = self.stack if stack is None else stack
        self.check("embedding", None, None, name)
        return len(self.stacks[name].blocks)

    def mean_attention(
        self, layer: int | None = None, *, kind: AttentionKind = "attention", stack: Stack | None = None
    ) -> Floats:
        """Averaged over the heads of one layer, or of all, (T, S)."""
        wanted = range(self._blocks(stack)) if layer is None else [layer]
        return as_floats(torch.stack([w.mean(0) for w in self._all_weights(wanted, kind, stack)]).mean(0))

    def rollout(self, layer: int | None = None, *, stack: Stack | None = None) -> Floats:
        """Attention multiplied through the layers down to the input, the residual stream counted as half, (T, S)."""
        last = self._blocks(stack) - 1 if layer is None else layer
        self.check("attention.weights", last, None, self.stack if stack is None else stack)
        weights = self._all_weights(range(last + 1), "attention", stack)
        same = torch.eye(weights[0].shape[-1], device=self.device)
        through = same
        for w in weights:
            through = (0.5 * w.mean(0) + 0.5 * same) @ through
        return as_floats(through)

    def steps(
        self, layer: int, head: int, query: int, *, kind: AttentionKind = "attention", stack: Stack | None = None
    ) -> Steps:
        """Every number from one token's query to the head's output there."""
        name = self.stack if stack is None else stack
        self.check(f"{kind}.q", layer, head, name)
        sites = [f"{name}.{layer}.{kind}.{part}" for part in "qkv"]
        self.record(sites)
        queries, keys, values = (self.split(site)[head] for site in sites)
        if not 0 <= query < len(queries):
            raise UserError(f"query={query} is not in the text; positions go from 0 to {len(queries) - 1}")
        hidden = self.hidden_keys(layer, name, kind)
        positions = torch.arange(len(keys), device=self.device)
        seen = positions if hidden is None else positions[~hidden[query]]
        scores, scaled, weights = (
            self.value(f"{kind}.{part}", layer, head, stack)[query, seen] for part in ("products", "scores", "weights")
        )
        q, k, v = queries[query], keys[seen], values[seen]  # (K,), (S, K), (S, K)
        numbers = [as_floats(x) for x in (q, k, v, scores, scaled, weights, weights @ v)]
        names = self.source_pieces if kind == "cross" or (name == "encoder" and self.source_pieces) else self.pieces
        places = tuple(seen.tolist())
        return Steps(query, places, tuple(names[i] for i in places) if names else (), *numbers)

    def head_scores(self, *, kind: AttentionKind = "attention", stack: Stack | None = None) -> HeadScores:
        """Where each head's attention goes on this text: previous, first, duplicate, induction, distance."""
        return head_scores(self, stack, kind)

    # ---- the residual stream

    def residual(self, stack: Stack | None = None) -> Floats:
        """The residual stream after the embedding and after each layer, (L + 1, T, D)."""
        return as_floats(torch.stack(self._streams(stack)))

    def norms(self, stack: Stack | None = None) -> Floats:
        """Length of the residual stream, (L + 1, T)."""
        return as_floats(torch.stack([x.norm(dim=-1) for x in self._streams(stack)]))

    def _streams(self, stack: Stack | None = None) -> list[Tensor]:
        name, count = self.stack if stack is None else stack, self._blocks(stack)
        sites = [f"{name}.embedding", *(f"{name}.{i}.mlp.output" for i in range(count))]
        known = self.record(sites)
        return [known[site] for site in sites]  # (T, D) each

    def lens(self, k: int = 5, start: int = 0, stop: int | None = None) -> Lens:
        """The top k tokens when the head reads the stream after each layer, for the positions from start to stop."""
        if self.model.kind not in TOKEN_HEADS:
            raise UserError(f"a model with a {self.model.kind} head does not predict tokens, so it has no lens")
        if k < 1:
            raise UserError(f"k={k} must be at least 1, for example 5")
        final: Any = body_of(self).norm
        tokens, probabilities = list[Tensor](), list[Tensor]()
        for stream in self._streams():
            with torch.no_grad():
                x = stream[start:stop].to(self.model.table.dtype)
                logits = self.model.read((x if final is None else final(x))[None])[0].float()  # (T, V)
            top = logits.softmax(-1).topk(min(k, logits.shape[-1]))
            tokens.append(top.indices)
            probabilities.append(top.values)
        ids = torch.stack(tokens).cpu().numpy()
        spelled = tuple(tuple(tuple(self.spell(int(t)) for t in cell) for cell in row) for row in ids)
        return Lens(ids, spelled, as_floats(torch.stack(probabilities)))

    def contributions(self, index: int | None = None) -> Contributions:
        """What embedding, heads and MLPs add to the logit of `index` (unset: the largest) at every position."""
        return contributions(self, index)

    # ---- cause

    def edited(self, *edits: Edit, other: ForwardPass | None = None) -> Self:
        """The same text with interventions: everything can be asked of it again. `other` is the text to patch from."""
        changes = [change_of(self, edit, other) for edit in edits]
        found = type(self)(
            self.model,
            self.tokens,
            spell=self.spell,
            segments=self.segments,
            source=self.source,
            changes=[*self.changes, *changes],
        )
        found.mask, found.predicted = self.mask, self.predicted  # no start token: edits are at positions of this text
        return found

    def effects(
        self,
        part: EditPart = "head",
        value: Replacement = "zero",
        *,
        index: int | None = None,
        position: int | None = None,
        other: ForwardPass | None = None,
        stack: Stack | None = None,
    ) -> Effects:
        """How the logit of `index` at `position` changes when each head (or position of a part) is edited alone."""
        return effects(self, self.target(index, position), part, value, other, stack)

    def attribution(
        self,
        method: Method = "integrated_gradients",
        *,
        index: int | None = None,
        position: int | None = None,
        baseline: int | None = None,
    ) -> Attribution:
        """How much each token counts for the logit of `index` at `position`."""
        return attribute(self, self.target(index, position), method, baseline)

    # ---- the distribution

    def next_tokens(self, k: int = 200, position: int = -1) -> Candidates:
        """The k likeliest tokens at a position: next tokens, or fills of a masked model."""
        if self.model.kind not in TOKEN_HEADS:
            raise UserError(f"a model with a {self.model.kind} head does not predict tokens")
        if not -len(self.tokens) <= position < len(self.tokens):
            raise UserError(f"position={position} is not in the text; positions go from 0 to {len(self.tokens) - 1}")
        return candidates(self.logits[position], k, self.spell)

    def surprise(self, mask: int | None = None, start: int | None = None) -> Surprise:
        """Surprisal, entropy and rank of each token; a masked model hides each in turn behind `mask`.

        `start` is the token to put before the text, so that the first one is predicted too. Both are those of the
        tokenizer where the explanation is of a text; special tokens around it are then not predicted. An edited text
        has no start token, because edits are at its own positions.
        """
        mask, start = self.mask if mask is None else mask, self.start if start is None else start
        if self.model.kind not in TOKEN_HEADS:
            raise UserError(f"a model with a {self.model.kind} head does not predict tokens")
        if not self.causal:
            if mask is None:
                raise UserError("mask is not given; a bidirectional model needs the mask token's id")
            return self._one_by_one(mask)
        if start is not None and self.changes:
            raise UserError(f"start={start}: an edited text has no token before it; leave start out")
        if start is not None:
            row = [start, *self.tokens][: self.model.config.context]
            return surprise(Explanation(self.model, row, spell=str, source=self.source).logits, self.tokens)
        shifted = self.logits.new_full(self.logits.shape, torch.nan)
        shifted[1:] = self.logits[:-1]
        return surprise(shifted, self.tokens)

    def _one_by_one(self, mask: int) -> Surprise:
        row = torch.tensor(self.tokens, device=self.device)
        positions = torch.arange(len(row), device=row.device)
        segments = None if self.segments is None else torch.tensor(self.segments, device=row.device)
        found = list[Tensor]()
        for first in range(0, len(row), MASKED_AT_ONCE):
            chunk = positions[first : first + MASKED_AT_ONCE]
            batch = row.repeat(len(chunk), 1)
            batch[torch.arange(len(chunk)), chunk] = mask
            with torch.no_grad(), hooked((self.sites[name], change) for name, change in self.changes):
                hidden = self.model.body(batch, segments=None if segments is None else segments.expand(len(chunk), -1))
                found.append(self.model.read(hidden[torch.arange(len(chunk)), chunk][:, None])[:, 0].float())
        logits = torch.cat(found)
        predicted = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        predicted[self.predicted] = True
        logits[~predicted] = torch.nan
        return surprise(logits, self.tokens)

    # ---- as data

    def as_json(self) -> dict[str, Any]:
        """Everything that is small; attention of single heads is a request of its own."""
        known: dict[str, Any] = {
            "tokens": list(self.tokens),
            "pieces": list(self.pieces),
            "causal": self.causal,
            "layers": self.layers,
            "heads": self.heads,
            "norms": as_json(self.norms()),
            "head_scores": self.head_scores().as_json(),
        }
        if self.model.kind in TOKEN_HEADS:
            known |= {"lens": self.lens().as_json(), "contributions": self.contributions().as_json()}
        return known

    def _repr_html_(self) -> str:
        """A matrix per layer, averaged over heads: darker is more."""
        return "".join(
            f"<figure style='display:inline-block;margin:.5em'>"
            f"{drawings.attention(self.mean_attention(i), self.pieces)}<figcaption>layer {i}</figcaption></figure>"
            for i in range(self.layers)
        )


def explain(
    model: Model,
    tokens: Sequence[int],
    *,
    spell: Spell = str,
    segments: Sequence[int] | None = None,
    source: Sequence[int] | None = None,
) -> Explanation:
    """What happens inside a model on these tokens; `spell` gives the text of an id, `source` is the encoder's input."""
    return Explanation(model, tokens, spell=spell, segments=segments, source=source)


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
    cuts = [slice(first, min(first + ROWS_AT_ONCE, len(tokens))) for first in range(0, len(tokens), ROWS_AT_ONCE)]
    found = joined([score_rows(logits[cut].cpu().numpy(), tokens[cut]) for cut in cuts])
    assert found.ranks is not None and found.entropies is not None
    ranks = np.where(np.isnan(found.logprobs), -1, found.ranks)
    return Surprise(-found.logprobs, found.entropies, ranks, np.exp(found.logprobs))
