"""What a model gives for texts beside continuations: likeliest tokens, words, masks, the next sentence, vectors."""

# N texts, T tokens, M masks, L layers, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plume.config import UserError
from plume.hf import EmbeddingConfig
from plume.hf.config_json import Pooling
from plume.inference import sampler
from plume.inference.batcher import Batcher
from plume.inference.sequences import SequenceState, check_ids, healing, token_ids
from plume.model.likelihood import Floats, log_softmax
from plume.text import Tokenizer
from plume.util import drawings

if TYPE_CHECKING:
    from torch import Tensor

    from plume.model.heads import Model

Pool = Pooling | Literal["summary"]


@dataclass(frozen=True, repr=False)
class Candidate:
    """One token that may stand at a place."""

    id: int
    text: str
    probability: float

    def __repr__(self) -> str:
        return f"{self.text!r} {self.probability:.2%}"


class CandidateList(list[Candidate]):
    """The likeliest tokens at one place, likeliest first."""

    def __str__(self) -> str:
        return "\n".join(f"{c.probability:7.2%}  {c.text!r}" for c in self)

    def _repr_html_(self) -> str:
        return drawings.chances((c.text, c.probability) for c in self)


def token_text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.piece_bytes(id).decode(errors="replace")


def likeliest(tokenizer: Tokenizer, logits: Floats, k: int) -> CandidateList:
    """The k likeliest tokens of one row of logits, (V,)."""
    logprobs = log_softmax(logits[: tokenizer.vocab_size])
    best = (int(i) for i in sampler.largest(logprobs, min(k, len(logprobs))))
    return CandidateList(Candidate(i, token_text(tokenizer, i), float(np.exp(logprobs[i]))) for i in best)


def suggest(batcher: Batcher, tokenizer: Tokenizer, sequence: SequenceState, n: int) -> list[str]:
    """Whole words that may come next, or complete the last one, by the likeliest first tokens of a new sequence."""
    tokens, owed = sequence.tokens, sequence.owed
    allowed = np.array(healing(tokenizer).starting_with(owed))
    logits = batcher.logits_for(tokens)[-1]
    best = allowed[sampler.largest(logits[allowed], min(4 * n, len(allowed)))]
    words = list[str]()
    for token in best:
        word = _finish_word(batcher, tokenizer, tokens, int(token), owed)
        if word.strip() and word not in words:
            words.append(word)
        if len(words) == n:
            break
    return words


def _finish_word(batcher: Batcher, tokenizer: Tokenizer, tokens: list[int], token: int, owed: bytes) -> str:
    """The token and what most likely follows until a new word begins."""
    word = [token]
    while len(word) < 8 and len(tokens) + len(word) < batcher.engine.capacity:
        following = int(np.argmax(batcher.logits_for([*tokens, *word])[-1][: tokenizer.vocab_size]))
        opens = bool(tokenizer.word_starts([word[-1], following])[1])
        if opens or not token_text(tokenizer, following).strip(" \n\t.,;:!?\"'()"):
            break
        word.append(following)
    spelled = tokenizer.decode_bytes(word)
    return spelled[len(owed) :].decode(errors="replace") if spelled.startswith(owed) else ""


def token_logits(
    model: Model,
    tokens: Tensor,
    places: Tensor,
    segments: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """The head's logits at places of one row of tokens (1, T), (M, V)."""
    return model.read(row_states(model, tokens, segments, lengths)[0, places]).float()


def row_states(model: Model, tokens: Tensor, segments: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """The last hidden states of one row of tokens (1, T), (1, T, D)."""
    import torch

    from plume.model.ragged import LengthGroups

    if lengths is None:
        lengths = torch.full((1,), tokens.shape[1], device=tokens.device)
    body: Any = model.body
    hidden: Tensor = body.read_ragged(LengthGroups(tokens, lengths, segments, causal=model.config.causal))
    return hidden


def mask_logits(model: Model, tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], Floats]:
    """Where the masks stand among the ids, and the logits at each of them, (M, V)."""
    import torch

    if model.kind not in ("masked-token", "pretraining") or tokenizer.mask is None:
        raise UserError(f"a model with a {model.kind} head cannot fill a mask; one with a masked-token head can")
    whole, segments = tokenizer.add_special_tokens(ids)
    check_ids(whole, model.config.vocab_size)
    places = [i for i, token in enumerate(whole) if token == tokenizer.mask]
    if not places:
        raise UserError(f"the text has no {tokenizer.token(tokenizer.mask)}")
    if len(whole) > model.config.context:
        raise UserError(f"the text has {len(whole)} tokens, the context holds {model.config.context}")
    before = tokenizer.add_special_tokens([-1])[0].index(-1)
    with torch.inference_mode(), model.eval_mode():
        row = torch.tensor([whole, segments], device=model.table.device)
        given = row[1:] if model.config.segments > 1 else None
        logits = token_logits(model, row[:1], torch.tensor(places, device=row.device), given)
    return [place - before for place in places], logits.cpu().numpy()


def fill_mask(model: Model, tokenizer: Tokenizer, text: str | Sequence[int], k: int) -> list[CandidateList]:
    """For each mask in the text, the k likeliest tokens there."""
    if k < 1:
        raise UserError(f"k={k} must be at least 1, for example 5")
    ids = tokenizer.encode(text, allow_special=True) if isinstance(text, str) else token_ids(tokenizer, text)
    _, logits = mask_logits(model, tokenizer, ids)
    return [likeliest(tokenizer, row, k) for row in logits]


def fill_all_masks(model: Model, tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The ids with every mask filled, the surest one first; special tokens are never filled in."""
    specials, filled = sorted(tokenizer.special_ids.values()), list(ids)
    while tokenizer.mask in filled:
        places, logits = mask_logits(model, tokenizer, filled)
        logits[:, specials] = -np.inf
        logprobs = np.stack([log_softmax(row) for row in logits])
        surest = int(logprobs.max(axis=1).argmax())
        filled[places[surest]] = int(logprobs[surest].argmax())
    return filled


def next_sentence(
    model: Model, tokenizer: Tokenizer, first: str | Sequence[int], second: str | Sequence[int]
) -> tuple[float, list[int]]:
    """The probability that the second text follows the first, and the tokens that were read."""
    import torch

    from plume.model.heads import Pretraining

    head = model.head
    if not isinstance(head, Pretraining):
        raise UserError(f"a model with a {model.kind} head was not pretrained on next-sentence prediction; BERT's is")
    parts = [token_ids(tokenizer, text) for text in (first, second)]
    whole, segments = tokenizer.add_special_tokens(*parts)
    check_ids(whole, model.config.vocab_size)
    if len(whole) > model.config.context:
        raise UserError(f"the texts have {len(whole)} tokens, the context holds {model.config.context}")
    row = torch.tensor([whole, segments], device=model.table.device)
    with torch.inference_mode(), model.eval_mode():
        chances = head.follows(row_states(model, row[:1], row[1:])).softmax(-1)[0]
    return float(chances[0]), whole


def embed(
    model: Model,
    tokenizer: Tokenizer,
    texts: Sequence[str | Sequence[int]],
    *,
    pool: Pool | None,
    batch: int,
    layers: int | Sequence[int] | None = None,
    settings: EmbeddingConfig | None = None,
) -> Floats:
    """One vector per text (or its ids), (N, D): the last hidden states pooled by this setting, else by the folder's.

    Without either it is their mean; `summary` is the family's own summary of a text. Of several layers the vectors
    stand one behind another, (N, L * D).
    """
    import torch

    pooled = pooling(model, pool if pool is not None else "mean" if settings is None else settings.pool)
    if batch < 1:
        raise UserError(f"batch={batch} must be at least 1, for example 32")
    if not texts:
        return np.empty((0, model.config.width * (len(layers) if isinstance(layers, Sequence) else 1)), np.float32)
    encoded = with_special_tokens(model, tokenizer, texts, None if settings is None else settings.max_tokens)
    with torch.inference_mode(), model.eval_mode():
        rows = [
            torch.cat([pooled(hidden, lengths) for hidden in states], dim=1).float().cpu().numpy()  # (B, L * D)
            for states, lengths in text_states(model, encoded, batch, layers)
        ]
    found: Floats = np.concatenate(rows)
    if settings is not None and settings.normalize:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found


def layer_numbers(count: int, layers: int | Sequence[int] | None) -> list[int]:
    """Layers from 0, the embeddings, to the number of blocks; negative ones are counted from the end."""
    given = [-1] if layers is None else [layers] if isinstance(layers, int) else list(layers)
    wrong = [layer for layer in given if not -count - 1 <= layer <= count]
    if wrong or not given:
        what = f"layers={wrong[0]} does not exist" if wrong else "layers is empty"
        raise UserError(f"{what}; layers go from 0 (embeddings) to {count}, and -1 is the last")
    return [layer % (count + 1) for layer in given]


def layer_states(body: Any, layers: Sequence[int], tokens: Tensor, lengths: Tensor) -> list[Tensor]:
    """The hidden states (N, T, D) behind each of the layers; the last ones have passed the final norm."""
    from plume.explain.forward_pass import Site, hooked

    kept: dict[int, Tensor] = {}
    parts = (body.embed, *body.blocks)
    with hooked((Site(parts[i], "output"), partial(kept.__setitem__, i)) for i in set(layers) - {len(parts) - 1}):
        kept[len(parts) - 1] = body(tokens, lengths=lengths)
    return [kept[layer] for layer in layers]


def text_states(
    model: Model, encoded: list[list[int]], batch: int, layers: int | Sequence[int] | None
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Hidden states (B, T, D) behind each of the layers and lengths (B,) of all texts, a batch at a time.

    Those that an engine computes come one by one: then no rounding of a text's vector depends on other texts.
    """
    import torch

    from plume.inference.engine_stack import EngineStack

    device = model.table.device
    if isinstance(model.body, EngineStack):  # which gives out the last layer only
        for hidden in model.body.encode(encoded, None):
            yield [torch.from_numpy(hidden)[None].to(device)], torch.tensor([len(hidden)], device=device)
        return
    body: Any = model.body.encoder if model.config.decoder_layers else model.body
    chosen = layer_numbers(len(body.blocks), layers)
    for at in range(0, len(encoded), batch):
        part = encoded[at : at + batch]
        longest = max(map(len, part))
        lengths = torch.tensor([len(ids) for ids in part], device=device)
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in part], device=device)
        yield layer_states(body, chosen, tokens, lengths), lengths


def pooling(model: Model, pool: Pool) -> Callable[[Tensor, Tensor], Tensor]:
    """What makes one vector (N, D) of hidden states (N, T, D) and lengths."""
    from plume.model.heads import Summary, max_pool, mean_pool

    if pool == "summary":
        summary = next((m for m in model.modules() if isinstance(m, Summary)), None)
        if summary is None:
            raise UserError("this model has no summary of its own; pool=mean always works")
        return summary
    pools = {"mean": mean_pool, "max": max_pool, "cls": lambda hidden, lengths: hidden[:, 0]}
    if pool not in pools:
        raise UserError(f"pool={pool!r} does not exist; mean, max, cls and summary do")
    return pools[pool]


def with_special_tokens(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str | Sequence[int]], longest: int | None
) -> list[list[int]]:
    """The ids of each text with the family's special tokens, cut on the right to what fits."""
    given = [token_ids(tokenizer, text) for text in texts]
    for ids in given:
        check_ids(ids, model.config.vocab_size)
    most = model.config.context if longest is None else min(longest, model.config.context)
    room = max(0, most - len(tokenizer.add_special_tokens([])[0]))
    encoded = [tokenizer.add_special_tokens(ids[:room])[0] for ids in given]
    if empty := [i for i, ids in enumerate(encoded) if not ids]:
        raise UserError(f"text {empty[0]} is empty")
    return encoded
