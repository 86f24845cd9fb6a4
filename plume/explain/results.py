"""Results of explanations as plain data: arrays with names, their JSON, and how a notebook shows them."""

# T tokens, S keys, L layers, H heads, K head width

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from plume.util.drawings import bar, chances, drawn, picture, table, visible

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """Arrays and strings with names. `as_json` is what the server sends; a notebook shows `_repr_html_`."""

    def as_json(self) -> dict[str, Any]:
        return as_json(self)

    def _repr_html_(self) -> str:
        rows = ((f.name, getattr(self, f.name)) for f in fields(self))
        return table(
            [f"<b>{name}</b>", value._repr_html_() if isinstance(value, Result) else drawn(value)]
            for name, value in rows
        )


class DrawnArray(np.ndarray[Any, np.dtype[np.float32]]):
    """A numpy array that a notebook draws: strips for vectors, a grid for a matrix, one below the other for heads."""

    def _repr_html_(self) -> str:
        parts = [self] if self.ndim < 3 else list(self)
        return "<br>".join(f"<figure style='margin:.4em 0'>{drawn(np.asarray(part))}</figure>" for part in parts)


@dataclass(frozen=True)
class Candidates(Result):
    """The likeliest tokens, and how much weight all the others have together."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    logits: Floats  # (k,) sorted, largest first
    probabilities: Floats  # (k,)
    rest: float  # log of the sum of exp(logit) over the tokens that are not listed; -inf when none is left

    def _repr_html_(self) -> str:
        return chances(zip(self.pieces[:10], map(float, self.probabilities), strict=False))


@dataclass(frozen=True)
class Steps(Result):
    """Every number between one head's query and its output, for one query token."""

    query: int  # position of the query token
    keys: tuple[int, ...]  # positions that the mask leaves it, S of them
    pieces: tuple[str, ...]  # the tokens there
    q: Floats  # (K,)
    k: Floats  # (S, K)
    v: Floats  # (S, K)
    scores: Floats  # (S,) q · k
    scaled: Floats  # (S,) scores / sqrt(K)
    weights: Floats  # (S,) softmax of scaled
    output: Floats  # (K,) sum of weights times v

    def _repr_html_(self) -> str:
        """The walk of one head: its query, every key with score, weight and value, and the sum."""
        head = ("key", "k", "q · k", f"÷ √{len(self.q)}", "softmax", "", "v")
        rows = (
            [f"<code>{visible(self.pieces[i])}</code>", picture(self.k[i], size=6), f"{self.scores[i]:.3f}",
             f"{self.scaled[i]:.3f}", f"{w:.2%}", bar(float(w)), picture(self.v[i], size=6)]
            for i, w in enumerate(self.weights)
        )  # fmt: skip
        ends = table([["q", picture(self.q, size=6)], ["Σ softmax · v", picture(self.output, size=6)]])
        return ends + table(rows, head)


@dataclass(frozen=True)
class Lens(Result):
    """The logit lens: the head read after each layer. Row 0 is the embedding, the last row the model's own answer."""

    tokens: Ints  # (L + 1, T, k)
    pieces: tuple[tuple[tuple[str, ...], ...], ...]
    probabilities: Floats  # (L + 1, T, k)

    def _repr_html_(self) -> str:
        """The likeliest token after each layer, with its probability as bold as it is sure."""
        rows = (
            [f"layer {i}" if i else "embedding", *(f"<code title='{p[0]:.2%}' style='opacity:{0.35 + 0.65 * p[0]:.2f}'>"
             f"{visible(cell[0])}</code>" for cell, p in zip(row, self.probabilities[i], strict=True))]
            for i, row in enumerate(self.pieces)
        )  # fmt: skip
        return table(rows)


@dataclass(frozen=True)
class Contributions(Result):
    """Direct contributions to a logit, position by position: see plume.explain.contributions.

    embedding + attention + cross + mlp + bias + head = total. A head for whole texts reads one position: others are 0.
    """

    answer: Ints  # (T,) index of the explained logit
    names: tuple[str, ...]  # (T,) its token or label
    embedding: Floats  # (T,)
    attention: Floats  # (L, T) with the bias of the output projection
    heads: Floats  # (L, H, T) without it
    cross: Floats  # (L, T) of a decoder with an encoder, else (0, T)
    cross_heads: Floats  # (L, H, T), else (0, 1, T)
    mlp: Floats  # (L, T)
    bias: Floats  # (T,) of the norms
    head: Floats  # (T,) what the head adds that is not linear in the hidden state, and its bias
    total: Floats  # (T,) the logit, minus the mean logit where a softmax goes over several


@dataclass(frozen=True)
class Effects(Result):
    """How a logit changes under each intervention alone."""

    part: str
    value: str
    effect: Floats  # (L, H) for heads, else (L, T) or (L + 1, T): logit after minus logit before
    before: float


@dataclass(frozen=True)
class Attribution(Result):
    """How much each token counts for a logit."""

    method: str
    scores: Floats  # (T,)
    source_scores: Floats | None  # of an encoder-decoder's source
    total: float  # sum of all scores
    logit: float  # of the text
    baseline: float  # logit of the baseline text; 0 for gradient times input
    steps: int


@dataclass(frozen=True)
class Surprise(Result):
    """Surprisal of each token. Without a start token the first one has no prediction: NaN, rank -1."""

    surprisal: Floats  # (T,) -ln p of the token that is there
    entropy: Floats  # (T,) of the distribution it was drawn from, in nats
    rank: Ints  # (T,) 0 when it was the likeliest
    probability: Floats  # (T,)

    @property
    def perplexity(self) -> float:
        known = self.surprisal[~np.isnan(self.surprisal)]
        return float(np.exp(known.mean())) if len(known) else math.nan


@dataclass(frozen=True)
class HeadScores(Result):
    """Mean attention weight of each head by where it goes, (L, H)."""

    previous: Floats  # on the previous token
    first: Floats  # on the first token
    duplicate: Floats  # on other positions with the same token, where there are any
    induction: Floats  # on the token after an earlier copy of this one, where there is one
    distance: Floats  # mean distance between query and key, in tokens


@dataclass(frozen=True)
class HeadKinds(Result):
    """The name of each head's kind, or the empty string, and the scores that it comes from."""

    names: tuple[tuple[str, ...], ...]  # (L, H): previous, first, duplicate, induction or nothing
    scores: HeadScores

    def _repr_html_(self) -> str:
        heads = ("", *(f"head {i}" for i in range(len(self.names[0]))))
        return table(([f"layer {i}", *row] for i, row in enumerate(self.names)), heads) + self.scores._repr_html_()


def as_json(value: Any) -> Any:
    """Plain lists and numbers of six digits; NaN and infinities are null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    if isinstance(value, Mapping):
        return {name: as_json(v) for name, v in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def packed(array: Floats, precision: Literal["f16", "f32"] = "f16") -> dict[str, Any]:
    """An array in base64, at half precision or whole."""
    raw = np.ascontiguousarray(array, dtype=f"<{precision[0]}{int(precision[1:]) // 8}")
    return {"shape": list(raw.shape), precision: base64.b64encode(raw.tobytes()).decode("ascii")}
