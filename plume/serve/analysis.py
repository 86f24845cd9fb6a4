"""The endpoints that read texts: next tokens, scores, masks, labels, tokens, embeddings."""

from __future__ import annotations

import base64
import math
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch

from plume.config import SamplingConfig
from plume.explain import as_json, candidates
from plume.inference import outputs, sampler
from plume.inference.scoring import score_tokens
from plume.serve import schemas
from plume.serve.api_errors import ApiError
from plume.serve.scheduler import unhurried
from plume.serve.served_models import Served
from plume.tasks import saved_settings

TEMPERATURES = tuple(round(0.05 * i, 2) for i in range(1, 41))
TOKENIZE_CHARACTERS = 100_000  # of one request: an answer has several rows per token


def next_tokens(served: Served, body: schemas.NextTokensRequest) -> dict[str, Any]:
    served.generating()
    ids = served.tokens_of(body.input, start=True)
    served.check_length(ids)
    row = torch.from_numpy(served.lm.batcher.logits_for(ids)[-1][: served.vocabulary])
    found = candidates(row, body.k, served.spell)
    likeliest = as_json(found)
    if body.temperatures:
        rest = row.scatter(0, torch.tensor(found.tokens), -torch.inf)
        likeliest["rests"] = [as_json(float((rest / t).logsumexp(0))) for t in TEMPERATURES]
    if body.temperature is not None:
        filters = SamplingConfig(temperature=body.temperature, top_k=body.top_k, top_p=body.top_p)
        likeliest["kept"] = kept(row, filters)
    return {**text_fields(served, ids), "vocabulary": served.vocabulary, "candidates": likeliest}


def kept(row: torch.Tensor, config: SamplingConfig) -> dict[str, Any]:
    """How many tokens the sampler's filters leave, and their probability before those are scaled to 1."""
    ids, _ = sampler.candidates(row.numpy(), config)
    chances = (row / max(config.temperature, 1e-6)).softmax(0)
    return {"count": len(ids), "probability": as_json(float(chances[torch.from_numpy(ids)].sum()))}


def text_fields(served: Served, ids: list[int]) -> dict[str, Any]:
    """The text as the model reads it, in every answer about a text."""
    return {
        "model": served.name,
        "text": served.lm.tokenizer.decode(unhurried(ids)),
        "tokens": ids,
        "pieces": [served.spell(t) for t in unhurried(ids)],
        "context": served.lm.config.context,
    }


def score(served: Served, body: schemas.ScoreRequest) -> dict[str, Any]:
    check_model(served, "predict tokens", served.generates or served.masks)
    ids = served.tokens_of(body.input)
    given = served.tokens_of(body.prompt, param="prompt") if body.prompt else []
    lm = served.lm if served.generates else served.sliced_lm
    found = score_tokens(lm.scorer(), ids, given=given, stride=lm.config.context // 2)
    assert found.ranks is not None and found.entropies is not None
    missing = len(ids) - len(found.logprobs)  # the first token, when there is no start token before it
    total = -found.total
    fields = text_fields(served, ids)
    size = len(fields["text"].encode())
    return {
        **fields,
        "surprisal": [*[None] * missing, *map(as_json, unhurried((-found.logprobs).tolist()))],
        "entropy": [*[None] * missing, *map(as_json, unhurried(found.entropies.tolist()))],
        "rank": [*[-1] * missing, *found.ranks.tolist()],
        "probability": [*[None] * missing, *map(as_json, unhurried(np.exp(found.logprobs).tolist()))],
        "logprob": as_json(-total),
        "perplexity": as_json(math.exp(min(total / len(found.logprobs), 700))),
        "bits_per_byte": as_json(total / math.log(2) / size) if size else None,
        "bytes": size,
    }


def fill_mask(served: Served, body: schemas.FillMaskRequest) -> dict[str, Any]:
    check_model(served, "fill masks", served.masks)
    lm, ids = served.sliced_lm, served.tokens_of(body.input, special=True)
    places, logits = outputs.mask_logits(lm.inference_model, lm.tokenizer, ids)
    rows = torch.from_numpy(logits)[:, : served.vocabulary]
    found = [
        {"place": p, "candidates": as_json(candidates(row, body.k, served.spell))}
        for p, row in zip(places, rows, strict=True)
    ]
    return {**text_fields(served, ids), "masks": found}


def tokenize(served: Served, body: schemas.TokenizeRequest) -> dict[str, Any]:
    tokenizer, pieces = served.lm.tokenizer, None
    if isinstance(body.input, str):
        if len(body.input) > TOKENIZE_CHARACTERS:
            message = f"{len(body.input)} characters; at most {TOKENIZE_CHARACTERS} are tokenized in one request"
            raise ApiError(400, message, param="input")
        pieces = tokenizer.pieces(body.input)
    ids = [p.id for p in pieces] if pieces is not None else served.tokens_of(body.input) if body.input else []
    fields = {
        **text_fields(served, ids),
        "bytes": [tokenizer.piece_bytes(t).hex() for t in ids],
        "spans": None if pieces is None else [[p.start, p.end] for p in pieces],
        "starts": [bool(x) for x in tokenizer.word_starts(ids)] if ids else [],
    }
    if body.merges:
        fields["merges"] = merges(served, ids[0]) if ids else None
    return fields


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


def embeddings(served: Served, body: schemas.EmbeddingRequest) -> dict[str, Any]:
    width = served.lm.config.width * (len(body.layers) if isinstance(body.layers, list) else 1)
    if body.dimensions is not None and body.dimensions != width:
        raise ApiError(400, f"dimensions must be {width}, the model's hidden size for each layer", param="dimensions")
    texts = [served.tokens_of(text) for text in body.input]
    for ids in texts:
        served.check_length(served.lm.tokenizer.add_special_tokens(ids)[0])
    count = sum(map(len, texts))
    vectors = served.sliced_lm.embed(texts, pool=body.pool, layers=body.layers)
    rows = [
        {"object": "embedding", "index": i, "embedding": encoded(vector, body.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": rows, "model": served.name, "usage": usage}


def encoded(vector: np.ndarray[Any, Any], form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return [float(x) for x in vector]


# ---- fine-tuned heads --------------------------------------------------------------------------------------------


def classify(served: Served, body: schemas.ClassifyRequest) -> dict[str, Any]:
    check_model(served, "classify", served.lm.head in ("classify", "similarity"))
    texts = [body.input] if isinstance(body.input, str) else body.input
    pairs = [body.pair] if isinstance(body.pair, str) else body.pair
    if pairs is not None and len(pairs) != len(texts):
        raise ApiError(400, f"input has {len(texts)} texts and pair has {len(pairs)}; each needs one", param="pair")
    found = served.sliced_lm.classify(texts, pairs)
    rows = [{"index": i, **(as_json(one) if is_dataclass(one) else {"value": one})} for i, one in enumerate(found)]
    return {"object": "list", "model": served.name, "data": rows}


def tag(served: Served, body: schemas.TagRequest) -> dict[str, Any]:
    check_model(served, "tag words", served.lm.head == "tag")
    (found,) = served.sliced_lm.tag([body.input])
    return {"object": "list", "model": served.name, "data": as_json(found)}


def answer(served: Served, body: schemas.AnswerRequest) -> dict[str, Any]:
    check_model(served, "answer questions", served.lm.head == "span")
    found = served.sliced_lm.answer(question=body.question, context=body.input)
    return {"model": served.name, **as_json(found)}


def predict(served: Served, body: schemas.PredictRequest) -> dict[str, Any]:
    """For whatever kind of task the model was fine-tuned."""
    check_model(served, "predict: it was not fine-tuned", saved_settings(served.lm.folder) is not None)
    found = served.sliced_lm.predict(body.input)
    rows = [{"index": i, "value": one.value, "scores": as_json(one.scores)} for i, one in enumerate(found)]
    return {"object": "list", "model": served.name, "data": rows}


def choose(served: Served, body: schemas.ChooseRequest) -> dict[str, Any]:
    check_model(served, "choose", served.lm.head == "choose")
    found = served.sliced_lm.choose(body.input, body.choices, question=body.question)
    return {"model": served.name, **as_json(found)}


def next_sentence(served: Served, body: schemas.NextSentenceRequest) -> dict[str, Any]:
    """The probability that one sentence follows the other, of a model that was pretrained to tell."""
    check_model(served, "predict the next sentence", served.lm.head == "pretraining")
    first, second = served.tokens_of(body.input), served.tokens_of(body.pair)
    served.check_length(served.lm.tokenizer.add_special_tokens(first, second)[0])
    lm = served.sliced_lm
    follows, ids = outputs.next_sentence(lm.inference_model, lm.tokenizer, first, second)
    return {"model": served.name, "follows": follows, "tokens": ids}


def translate(served: Served, body: schemas.TranslateRequest) -> dict[str, Any]:
    check_model(served, "translate", bool(served.lm.config.decoder_layers) or served.lm.prompts is not None)
    texts = [body.input] if isinstance(body.input, str) else body.input
    limit = served.config.max_new_tokens
    if body.max_tokens is not None and len(texts) * body.max_tokens > limit:
        message = f"{len(texts) * body.max_tokens} new tokens over all texts; this server generates {limit}"
        raise ApiError(400, message, param="max_tokens")
    most = limit if body.max_tokens is None else body.max_tokens
    config = replace(body.sampling, max_new_tokens=most, n=1, best_of=None, beams=body.beams)
    config = replace(config, length_penalty=body.length_penalty)
    rows = []
    for index, text in enumerate(texts):
        with served.searching() as lm:
            found = lm.translate(text, config)
        rows.append({"index": index, "text": found.text, "tokens": list(found.tokens)})
    return {"object": "list", "model": served.name, "data": rows}


def check_model(served: Served, what: str, can: bool) -> None:
    """Refuse a request that the model's head is not made for."""
    if not can:
        message = f"{served.name} has a {served.lm.head} head and does not {what}"
        raise ApiError(400, message, param="model", code="wrong_model")
