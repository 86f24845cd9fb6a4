"""What a model says of a text without writing any: tokens with probabilities, scores, masks, vectors."""

# N texts, T tokens, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plume.config import UserError
from plume.generate import sampling
from plume.text import Tokenizer

if TYPE_CHECKING:
    from plume.heads import Model

Floats = np.ndarray[Any, np.dtype[np.float32]]
ROWS_AT_ONCE = 64  # all logits of a long text at once would be large


@dataclass(frozen=True)
class Candidate:
    """One token that may stand at a place."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class TokenScore:
    """What the model thought of one token of a text."""

    id: int
    text: str
    logprob: float
    rank: int  # 0 for the likeliest
    entropy: float  # of the whole distribution at this place, in nats


@dataclass(frozen=True)
class Score:
    tokens: tuple[TokenScore, ...]

    @property
    def logprob(self) -> float:
        return sum(token.logprob for token in self.tokens)

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprob / len(self.tokens)))


def text_of(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.piece_bytes(id).decode(errors="replace")


def likeliest(tokenizer: Tokenizer, logits: Floats, k: int) -> list[Candidate]:
    """The k likeliest tokens of one row of logits, (V,)."""
    logprobs = sampling.log_softmax(logits[: tokenizer.vocab_size])
    best = sampling.largest(logprobs, min(k, len(logprobs)))
    return [Candidate(int(i), text_of(tokenizer, int(i)), float(np.exp(logprobs[i]))) for i in best]


def score_window(
    tokenizer: Tokenizer, look: Callable[[list[int], int], Floats], window: list[int], first: int
) -> list[TokenScore]:
    """Scores of a window's tokens from `first` on; `look(tokens, rows)` gives the logits of the last rows."""
    scores = list[TokenScore]()
    for at in range(first, len(window), ROWS_AT_ONCE):
        until = min(at + ROWS_AT_ONCE, len(window))
        logits = look(window[: until - 1], until - at)[:, : tokenizer.vocab_size]
        for i, row in zip(range(at, until), logits, strict=True):
            logprobs = sampling.log_softmax(row)
            likely = logprobs[window[i]]
            entropy = -float(np.sum(np.exp(logprobs) * np.maximum(logprobs, -1e30)))
            rank = int(np.sum(logprobs > likely))
            scores.append(TokenScore(window[i], text_of(tokenizer, window[i]), float(likely), rank, entropy))
    return scores


def fill_mask(model: Model, tokenizer: Tokenizer, text: str, k: int) -> list[list[Candidate]]:
    """For each mask in the text, the k likeliest tokens there."""
    import torch

    if k < 1:
        raise UserError(f"k={k} must be at least 1, for example 5")
    if model.kind not in ("masked-token", "pretraining") or tokenizer.mask is None:
        raise UserError(f"a model with a {model.kind} head cannot fill a mask; one with a masked-token head can")
    ids, segments = tokenizer.wrap(tokenizer.encode(text, allow_special=True))
    places = [i for i, token in enumerate(ids) if token == tokenizer.mask]
    if not places:
        raise UserError(f"the text has no {tokenizer.token(tokenizer.mask)}")
    if len(ids) > model.config.context:
        raise UserError(f"the text has {len(ids)} tokens, the context holds {model.config.context}")
    with torch.inference_mode():
        device = model.table.device
        given = torch.tensor([segments], device=device) if model.config.segments > 1 else None
        logits = model(torch.tensor([ids], device=device), segments=given)[0].float().cpu().numpy()  # (T, V)
    return [likeliest(tokenizer, logits[place], k) for place in places]


def embed(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str | Sequence[int]],
    *,
    pool: Literal["mean", "summary"],
    batch: int,
) -> Floats:
    """One vector per text (or its ids): the mean of the last hidden states, or the family's own summary. (N, D)"""
    import torch

    from plume.heads import Summary, mean_pool

    body: Any = model.body.encoder if model.config.decoder_layers else model.body
    summary = next((m for m in model.modules() if isinstance(m, Summary)), None)
    if pool == "summary" and summary is None:
        raise UserError("this model has no summary of its own; pool=mean always works")
    given = [tokenizer.encode(text) if isinstance(text, str) else list(text) for text in texts]
    room = model.config.context - len(tokenizer.wrap([])[0])  # beside the family's own tokens
    encoded = [tokenizer.wrap(ids[:room])[0] for ids in given]
    if empty := [i for i, ids in enumerate(encoded) if not ids]:
        raise UserError(f"text {empty[0]} is empty")
    pooled = mean_pool if pool == "mean" or summary is None else summary
    rows = list[Floats]()
    for at in range(0, len(encoded), batch):
        part = encoded[at : at + batch]
        longest = max(map(len, part))
        lengths = torch.tensor([len(ids) for ids in part], device=model.table.device)
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in part], device=model.table.device)
        with torch.inference_mode():
            rows.append(pooled(body(tokens, lengths=lengths), lengths).float().cpu().numpy())  # (N, D)
    return np.concatenate(rows)
