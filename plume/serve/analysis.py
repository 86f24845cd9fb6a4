"""The endpoints that look at texts: next tokens, scores, masks, labels, tokens, embeddings, explanations."""

from __future__ import annotations

import asyncio
import base64
import math
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from plume.explain import Explanation, as_json, candidates, packed
from plume.serve import schemas
from plume.serve.errors import ApiError
from plume.serve.models import Served

THUMBNAIL = 24  # cells along one side of a head's small picture
TEMPERATURES = tuple(round(0.05 * i, 2) for i in range(1, 41))


async def next_tokens(served: Served, asked: schemas.NextTokensRequest) -> dict[str, Any]:
    scheduler, lm = served.writing(), served.lm
    ids = served.tokens_of(asked.text, asked.tokens, start=True)
    served.check_length(ids)
    logits = await asyncio.wrap_future(scheduler.look(ids))
    vocabulary = min(lm.config.vocab_size, lm.tokenizer.vocab_size)

    def rank() -> dict[str, Any]:
        row = torch.from_numpy(logits[-1][:vocabulary])
        found = candidates(row, asked.k, served.spell)
        told = as_json(found)
        if asked.temperatures:
            rest = row.scatter(0, torch.tensor(found.tokens), -torch.inf)
            told["rests"] = [as_json(float((rest / t).logsumexp(0))) for t in TEMPERATURES]
        return told

    return {**told_of(served, ids), "vocabulary": vocabulary, "candidates": await served.think(rank)}


def told_of(served: Served, ids: list[int]) -> dict[str, Any]:
    """The text as the model reads it, in every answer about a text."""
    return {
        "model": served.name,
        "text": served.lm.tokenizer.decode(ids),
        "tokens": ids,
        "pieces": [served.spell(t) for t in ids],
        "context": served.lm.config.context,
    }


async def score(served: Served, asked: schemas.ScoreRequest) -> dict[str, Any]:
    ids = served.tokens_of(asked.text, asked.tokens)
    if served.writes:
        scored = await served.think(lambda: served.lm.score(ids))
        missing = len(ids) - len(scored.tokens)  # the first token, when there is no start token to expect it from
        nothing = [None] * missing
        surprisal: list[float | None] = [*nothing, *(-token.logprob for token in scored.tokens)]
        told: dict[str, Any] = {
            "surprisal": surprisal,
            "entropy": [*nothing, *(token.entropy for token in scored.tokens)],
            "rank": [*[-1] * missing, *(token.rank for token in scored.tokens)],
            "probability": [*nothing, *(math.exp(token.logprob) for token in scored.tokens)],
        }
    elif served.masks:
        served.check_length(ids)
        told = await served.think(lambda: masked_score(served, ids))
        surprisal = told["surprisal"]
    else:
        raise wrong_model(served, "predict tokens")
    known = [x for x in surprisal if x is not None]
    size = len(served.lm.tokenizer.decode(ids).encode())
    total = sum(known)
    told |= {
        "logprob": -total,
        "perplexity": math.exp(min(total / len(known), 700)) if known else None,
        "bits_per_byte": total / math.log(2) / size if size else None,
        "bytes": size,
    }
    return {**told_of(served, ids), **as_json_lists(told)}


def masked_score(served: Served, ids: list[int]) -> dict[str, Any]:
    """Each token hidden in turn, without the frame that the family puts around a text."""
    seen = served.explanation(ids)
    found = seen.surprise(mask=served.lm.tokenizer.mask)
    before = framed(served, ids)
    part = slice(before, before + len(ids))
    fields = ("surprisal", "entropy", "rank", "probability")
    return {name: getattr(found, name)[part].tolist() for name in fields}


def framed(served: Served, ids: list[int]) -> int:
    """How many tokens the family puts before a text."""
    marked, _ = served.lm.tokenizer.wrap([-1] * len(ids))
    return marked.index(-1)


def as_json_lists(told: dict[str, Any]) -> dict[str, Any]:
    return {name: as_json(value) for name, value in told.items()}


async def fill_mask(served: Served, asked: schemas.FillMaskRequest) -> dict[str, Any]:
    if not served.masks:
        raise wrong_model(served, "fill masks")
    tokenizer, lm = served.lm.tokenizer, served.lm
    ids = asked.tokens if asked.tokens is not None else tokenizer.encode(asked.text or "", allow_special=True)
    ids = served.tokens_of(None, ids)
    places = [i for i, token in enumerate(ids) if token == tokenizer.mask]
    if not places:
        assert tokenizer.mask is not None
        raise ApiError(400, f"the text has no mask; write {tokenizer.token(tokenizer.mask)} where one is", param="text")

    def fill() -> list[dict[str, Any]]:
        seen, before = served.explanation(ids), framed(served, ids)
        limit = min(lm.config.vocab_size, tokenizer.vocab_size)
        logits = seen.logits[:, :limit]
        return [
            {"place": p, "candidates": as_json(candidates(logits[before + p], asked.k, served.spell))} for p in places
        ]

    return {**told_of(served, ids), "masks": await served.think(fill)}


async def tokenize(served: Served, asked: schemas.TokenizeRequest) -> dict[str, Any]:
    tokenizer = served.lm.tokenizer

    def cut() -> dict[str, Any]:
        pieces = None if asked.text is None else tokenizer.pieces(asked.text)
        ids = [p.id for p in pieces] if pieces is not None else list(asked.tokens or ())
        if ids:
            ids = served.tokens_of(None, ids)
        told = {
            **told_of(served, ids),
            "bytes": [tokenizer.piece_bytes(t).hex() for t in ids],
            "spans": None if pieces is None else [[p.start, p.end] for p in pieces],
            "starts": [bool(x) for x in tokenizer.word_starts(ids)] if ids else [],
        }
        if asked.merges:
            told["merges"] = merges(served, ids[0]) if ids else None
        return told

    return await served.think(cut)


def merges(served: Served, token: int) -> list[list[str]] | None:
    """How the merges build a token; None when the kind has none, or it is only a part of a character."""
    tokenizer = served.lm.tokenizer
    if tokenizer.kind not in ("byte-bpe", "gpt1-bpe"):
        return None
    try:
        word = tokenizer.piece_bytes(token).decode()
    except UnicodeDecodeError:
        return None
    return tokenizer.merge_history(word.strip() if tokenizer.kind == "gpt1-bpe" else word)


async def embeddings(served: Served, asked: schemas.EmbeddingRequest) -> dict[str, Any]:
    tokenizer, lm = served.lm.tokenizer, served.lm
    given: Any = asked.input
    many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if asked.dimensions is not None and asked.dimensions != lm.config.width:
        raise ApiError(400, f"dimensions must be {lm.config.width}, the model's width", param="dimensions")
    texts = [served.tokens_of(item, None) if isinstance(item, str) else served.tokens_of(None, item) for item in many]
    for ids in texts:
        served.check_length(tokenizer.wrap(ids)[0])
    count = sum(map(len, texts))
    vectors = await served.think(lambda: lm.embed(texts))
    rows = [
        {"object": "embedding", "index": i, "embedding": coded(vector, asked.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": rows, "model": served.name, "usage": usage}


def coded(vector: np.ndarray[Any, Any], form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return [float(x) for x in vector]


# ---- fine-tuned heads --------------------------------------------------------------------------------------------


async def classify(served: Served, asked: schemas.TextsRequest) -> dict[str, Any]:
    if served.lm.head not in ("classify", "similarity"):
        raise wrong_model(served, "classify")
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    pairs = [asked.pair] if isinstance(asked.pair, str) else asked.pair
    if pairs is not None and len(pairs) != len(texts):
        raise ApiError(400, f"{len(texts)} texts have {len(pairs)} pairs; each needs one", param="pair")
    found = await served.think(lambda: served.lm.classify(texts, pairs))
    rows = [{"index": i, **(as_json(one) if is_dataclass(one) else {"value": one})} for i, one in enumerate(found)]
    return {"object": "list", "model": served.name, "data": rows}


async def tag(served: Served, asked: schemas.TagRequest) -> dict[str, Any]:
    if served.lm.head != "tag":
        raise wrong_model(served, "tag words")
    (found,) = await served.think(lambda: served.lm.tag([asked.input]))
    return {"object": "list", "model": served.name, "data": as_json(found)}


async def answer(served: Served, asked: schemas.AnswerRequest) -> dict[str, Any]:
    if served.lm.head != "span":
        raise wrong_model(served, "answer questions")
    found = await served.think(lambda: served.lm.answer(question=asked.question, context=asked.context))
    return {"model": served.name, **as_json(found)}


def wrong_model(served: Served, what: str) -> ApiError:
    return ApiError(
        400, f"{served.name} has a {served.lm.head} head and does not {what}", param="model", code="wrong_model"
    )


# ---- explanations ------------------------------------------------------------------------------------------------


async def explain(served: Served, asked: schemas.ExplainRequest) -> dict[str, Any]:
    if served.lm.config.decoder_layers:
        raise wrong_model(served, "explain itself: it has two stacks")
    ids = served.tokens_of(asked.text, asked.tokens)

    def look() -> dict[str, Any]:
        seen = served.explanation(ids)
        total = len(seen.tokens)
        size = min(asked.size, total)
        start = total - size if asked.start is None else min(asked.start, total - size)
        window = slice(start, start + size)
        told: dict[str, Any] = {
            "model": served.name,
            "text": served.lm.tokenizer.decode(ids),
            "view": asked.view,
            "tokens": list(seen.tokens[window]),
            "pieces": list(seen.pieces[window]),
            "window": {"start": start, "size": size, "total": total},
            "causal": seen.causal,
        }
        return told | VIEWS[asked.view](seen, asked, window)

    return await served.think(look)


def heads_view(seen: Explanation, asked: schemas.ExplainRequest, window: slice) -> dict[str, Any]:
    """Every head as a small picture, and what kind of head it is."""
    pictures = np.stack([small(seen.attention(layer)[:, window, window]) for layer in range(seen.layers)])
    whole = np.clip(np.rint(255 * pictures), 0, 255).astype(np.uint8)  # (L, H, n, n)
    shown = {"shape": list(whole.shape), "u8": base64.b64encode(whole.tobytes()).decode("ascii")}
    return {"properties": as_json(seen.head_properties()), "thumbnails": shown}


def small(weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(H, T, T) made at most THUMBNAIL wide; each cell is the largest of those it stands for."""
    width = weights.shape[-1]
    if width <= THUMBNAIL:
        return weights
    edges = [width * i // THUMBNAIL for i in range(THUMBNAIL)]
    return np.maximum.reduceat(np.maximum.reduceat(weights, edges, axis=1), edges, axis=2)


def attention_view(seen: Explanation, asked: schemas.ExplainRequest, window: slice) -> dict[str, Any]:
    match asked.mix:
        case "head":
            weights = seen.attention(asked.layer, asked.head)
        case "mean":
            weights = seen.mean_attention(asked.layer)
        case "rollout":
            weights = seen.rollout(asked.layer)
    matrix = packed(weights[window, window])
    return {"layer": asked.layer, "head": asked.head, "mix": asked.mix, "matrix": matrix}


def steps_view(seen: Explanation, asked: schemas.ExplainRequest, window: slice) -> dict[str, Any]:
    steps = seen.steps(asked.layer, asked.head, asked.query)
    near = [i for i, place in enumerate(steps.seen) if window.start <= place < window.stop]
    told = as_json(steps)
    for name in ("seen", "k", "v", "scores", "scaled", "weights"):
        told[name] = [told[name][i] for i in near]
    return {"layer": asked.layer, "head": asked.head, "steps": told}


def layers_view(seen: Explanation, asked: schemas.ExplainRequest, window: slice) -> dict[str, Any]:
    parts = seen.contributions()
    lists = {
        name: as_json(getattr(parts, name)[..., window]) for name in ("embedding", "attention", "mlp", "bias", "total")
    }
    named = {"pieces": list(parts.pieces[window]), "answer": parts.answer[window].tolist()}
    lens = as_json(seen.lens(5, window.start, window.stop))
    return {"lens": lens, "norms": as_json(seen.norms()[:, window]), "contributions": {**lists, **named}}


VIEWS = {"heads": heads_view, "attention": attention_view, "steps": steps_view, "layers": layers_view}
