"""What is found inside a model, as plain data: arrays with names, their JSON, and how a notebook shows them."""

# T tokens, S tokens looked at, L layers, H heads, K head width

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """Arrays and strings with names. `as_json` is what the server sends; a notebook shows `_repr_html_`."""

    def as_json(self) -> dict[str, Any]:
        return as_json(self)

    def _repr_html_(self) -> str:
        rows = ((f.name, getattr(self, f.name)) for f in fields(self))
        cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{_show(value)}</td></tr>" for name, value in rows)
        return f"<table>{cells}</table>"


@dataclass(frozen=True)
class Candidates(Result):
    """The likeliest tokens, and how much weight all the others have together."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    logits: Floats  # (k,) sorted, largest first
    probabilities: Floats  # (k,)
    rest: float  # log of the sum of exp(logit) over the tokens that are not listed; -inf when none is left

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>{html.escape(visible(piece))}</code></td>"
            f"<td style='width:16em'><div style='background:#4477aa;height:.8em;width:{100 * p:.1f}%'></div></td>"
            f"<td>{100 * p:.2f} %</td></tr>"
            for piece, p in zip(self.pieces[:10], self.probabilities, strict=False)
        )
        return f"<table>{rows}</table>"


@dataclass(frozen=True)
class Steps(Result):
    """Every number between one head's query and what it passes on, for one token that asks."""

    query: int  # place of the asking token
    seen: tuple[int, ...]  # places it may look at, S of them
    q: Floats  # (K,)
    k: Floats  # (S, K)
    v: Floats  # (S, K)
    scores: Floats  # (S,) q · k
    scaled: Floats  # (S,) scores / sqrt(K)
    weights: Floats  # (S,) softmax of scaled
    output: Floats  # (K,) sum of weights times v


@dataclass(frozen=True)
class Lens(Result):
    """What would be said after each layer. Row 0 is the embedding; the last row is the model's real answer."""

    tokens: Ints  # (L + 1, T, k)
    pieces: tuple[tuple[tuple[str, ...], ...], ...]
    probabilities: Floats  # (L + 1, T, k)


@dataclass(frozen=True)
class Contributions(Result):
    """How far each part moves the residual stream along the direction of the final answer.

    The direction is the slope of (the answer's logit minus the mean logit), with every norm's divisor held as it was.
    With a linear head embedding, attention, MLPs and biases add up to that difference exactly.
    """

    answer: Ints  # (T,) the likeliest token at each place
    pieces: tuple[str, ...]
    embedding: Floats  # (T,)
    attention: Floats  # (L, T)
    mlp: Floats  # (L, T)
    bias: Floats  # (T,) what the norms after the stack's parts add
    total: Floats  # (T,) the answer's logit minus the mean logit


@dataclass(frozen=True)
class Surprise(Result):
    """How unexpected each token was. Without a start token the first one has no expectation: NaN, rank -1."""

    surprisal: Floats  # (T,) -ln p of the token that is there
    entropy: Floats  # (T,) of the distribution it was drawn from, in nats
    rank: Ints  # (T,) 0 when it was the likeliest
    probability: Floats  # (T,)

    @property
    def perplexity(self) -> float:
        known = self.surprisal[~np.isnan(self.surprisal)]
        return float(np.exp(known.mean())) if len(known) else math.nan


@dataclass(frozen=True)
class HeadProperties(Result):
    """What kind of head each one is on this text, (L, H)."""

    to_previous: Floats  # mean weight on the token just before
    to_first: Floats  # mean weight on the first token
    to_same: Floats  # mean weight on other places with the same token, where there are any
    distance: Floats  # mean distance looked at, in tokens


def as_json(value: Any) -> Any:
    """Plain lists and numbers of six digits; what JSON has no word for (NaN, infinities) is null."""
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


def packed(array: Floats) -> dict[str, Any]:
    """An array as half precision in base64: a quarter of the size of digits."""
    half = np.ascontiguousarray(array, dtype="<f2")
    return {"shape": list(half.shape), "f16": base64.b64encode(half.tobytes()).decode("ascii")}


def visible(piece: str) -> str:
    """A token's text with its white space shown."""
    return piece.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def matrix_svg(matrix: Floats, pieces: Sequence[str], size: int = 12) -> str:
    """A matrix as a picture; hovering a cell says from whom to whom."""
    cells = "".join(
        f"<rect x='{j * size}' y='{i * size}' width='{size}' height='{size}' fill='#223a5e' "
        f"fill-opacity='{float(w):.3f}'><title>{html.escape(visible(pieces[i]))} → {html.escape(visible(pieces[j]))} "
        f"{float(w):.3f}</title></rect>"
        for i, row in enumerate(matrix[:64])
        for j, w in enumerate(row[:64])
        if w > 0.001
    )
    side = size * min(len(matrix), 64)
    return f"<svg xmlns='http://www.w3.org/2000/svg' width='{side}' height='{side}' class='matrix'>{cells}</svg>"


def _show(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size > 8:
        return html.escape(f"array {value.shape}, {np.nanmin(value):.4g} to {np.nanmax(value):.4g}")
    return html.escape(str(as_json(value))[:400])
