"""The calls that carry every benchmark: how likely tokens are, alone or rolling over a text, and what fills a mask."""

# A scored positions, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from plume.config import UserError
from plume.evaluate.reading import Bundle, Head, Score, Stack, batches, bundled
from plume.heads import TOKEN_HEADS, Model
from plume.model import EncoderDecoder
from plume.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to score after a context. A masked model sees the whole, with one scored token hidden at a time."""

    context: tuple[int, ...]
    target: tuple[int, ...]
    filtered: bool = False  # the scorer's banned tokens cannot be the likeliest at the first position


Answer = tuple[int, Score]  # the request's number and what was found


class Scorer(Protocol):
    """A model that can be asked. Answers come in any order, as soon as they are known."""

    tokenizer: Tokenizer
    causal: bool
    room: int  # most tokens of context and target together
    start: tuple[int, ...]  # what stands before a text that has nothing before it

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]: ...


def scorer_for(
    model: Model, tokenizer: Tokenizer, *, batch_tokens: int | None = None, banned: Iterable[int] = ()
) -> CausalScorer | MaskedScorer:
    if isinstance(model.body, EncoderDecoder) or model.kind not in TOKEN_HEADS:
        kind = "an encoder-decoder" if isinstance(model.body, EncoderDecoder) else f"a model with a {model.kind} head"
        raise UserError(f"{kind} gives no likelihood of a text; a next-token or masked-token model does")
    place = next(model.parameters()).device
    budget = (1024 if place.type == "cpu" else 16_384) if batch_tokens is None else batch_tokens
    if model.config.causal:
        return CausalScorer(model, tokenizer, budget, banned)
    return MaskedScorer(model, tokenizer, budget, banned)


# ---- causal models -----------------------------------------------------------------------------------------------


class CausalScorer:
    """Likelihood of tokens given those before them."""

    causal = True

    def __init__(self, model: Model, tokenizer: Tokenizer, budget: int, banned: Iterable[int]) -> None:
        self.model, self.tokenizer, self.budget = model.eval(), tokenizer, budget
        self.stack, self.head = Stack(model), Head(model, banned)
        self.room = model.config.context + 1  # the last token is only predicted, never read
        first = tokenizer.end if tokenizer.start is None else tokenizer.start
        self.start: tuple[int, ...] = () if first is None else (first,)

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]:
        inputs = [(r.context + r.target)[:-1] for r in requests]
        for request, tokens in zip(requests, inputs, strict=True):
            assert request.context and request.target, "something to read and something to score"
            assert len(tokens) < self.room, "cut to the context before"
        config = self.model.config
        asked = [slice(len(r.context) - 1, None) for r in requests]
        bundles = bundled(inputs, asked, width=config.width, most=2 * config.context)
        for batch in batches([len(b) for b in bundles], self.budget):
            with torch.inference_mode():
                hidden = self.stack.read([bundles[i] for i in batch])  # (A, D)
                members = [member for i in batch for member in bundles[i].members]
                mine = [requests[m] for m in members]
                targets = [token for r in mine for token in r.target]
                filtered = [r.filtered and n == 0 for r in mine for n in range(len(r.target))]
                whole = self.head.read(hidden, targets, filtered)
            yield from zip(members, whole.cut(len(r.target) for r in mine), strict=True)


# ---- masked models -----------------------------------------------------------------------------------------------


class MaskedScorer:
    """Pseudo-likelihood: each scored token is hidden alone and predicted from everything else."""

    causal = False

    def __init__(self, model: Model, tokenizer: Tokenizer, budget: int, banned: Iterable[int]) -> None:
        if tokenizer.mask is None:
            raise UserError("this masked model's tokenizer has no mask token, so nothing can be hidden from it")
        self.model, self.tokenizer, self.budget, self.mask = model.eval(), tokenizer, budget, tokenizer.mask
        self.stack, self.head = Stack(model), Head(model, banned)
        around = tokenizer.wrap([-1])[0]
        self.before = around.index(-1)
        self.room = model.config.context - len(around) + 1
        self.start: tuple[int, ...] = ()

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]:
        wholes = [self.tokenizer.wrap(r.context + r.target)[0] for r in requests]
        for request, whole in zip(requests, wholes, strict=True):
            assert request.target and len(whole) <= self.model.config.context, "cut to the context before"
        order = sorted(range(len(requests)), key=lambda i: -len(wholes[i]))  # so that neighbours share batches
        rows = [(i, n) for i in order for n in range(len(requests[i].target))]
        found: dict[int, list[Score | None]] = {i: [None] * len(requests[i].target) for i in order}
        for batch in batches([len(wholes[i]) for i, _ in rows], self.budget):
            for (i, n), score in self._hidden([rows[b] for b in batch], requests, wholes):
                found[i][n] = score
            for i in dict.fromkeys(rows[b][0] for b in batch):
                parts = [score for score in found[i] if score is not None]
                if len(parts) == len(found[i]):
                    yield i, joined(parts)
                    found[i] = []

    def _hidden(
        self, rows: list[tuple[int, int]], requests: Sequence[Request], wholes: list[list[int]]
    ) -> Iterator[tuple[tuple[int, int], Score]]:
        batch: list[Bundle] = []
        for i, n in rows:
            tokens, place = list(wholes[i]), self.before + len(requests[i].context) + n
            tokens[place] = self.mask
            batch.append(Bundle())
            batch[-1].add(i, tokens, 0, slice(place, place + 1))
        with torch.inference_mode():
            targets = [requests[i].target[n] for i, n in rows]
            filtered = [requests[i].filtered and n == 0 for i, n in rows]
            whole = self.head.read(self.stack.read(batch), targets, filtered)
        yield from zip(rows, whole.cut([1] * len(rows)), strict=True)

    def fill(self, tokens: Sequence[int]) -> list[int]:
        """The tokens with every mask filled in, the surest one first."""
        whole = self.tokenizer.wrap(tokens)[0]
        if len(whole) > self.model.config.context:
            raise UserError(f"{len(tokens)} tokens do not fit into this model; {self.room} do")
        row = torch.tensor([whole], device=self.stack.device)
        specials = torch.tensor(sorted(self.tokenizer.special_ids.values()), device=row.device)
        with torch.inference_mode():
            while len(places := (row[0] == self.mask).nonzero()[:, 0]):
                logits = self.model.read(self.model.body(row)[0, places]).float()  # (masks, V)
                logits[:, specials] = -torch.inf
                sure, token = logits.log_softmax(dim=1).max(dim=1)
                surest = int(sure.argmax())
                row[0, places[surest]] = token[surest]
        return row[0, self.before : self.before + len(tokens)].tolist()


def joined(parts: Sequence[Score]) -> Score:
    columns = zip(*((p.logprobs, p.best, p.hits) for p in parts), strict=True)
    return Score(*(np.concatenate(column) for column in columns))


# ---- text to requests --------------------------------------------------------------------------------------------


def windows(tokens: Sequence[int], scorer: Scorer, stride: int | None = None) -> Iterator[Request]:
    """A long text in steps of `stride` tokens, each token scored once and with as much before it as fits.

    Unset, the stride is the whole context: only a window's first token then has nothing but its predecessor. The last
    window reaches back as far as it can. Where a causal model has no token to start from, the first is not scored.
    """
    size = scorer.room - 1 if scorer.causal else scorer.room
    step = size if stride is None else stride
    if not 1 <= step <= size:
        raise UserError(f"stride={step} must lie between 1 and {size}, which is what the model can see")
    sequence = (*scorer.start, *tokens)
    done = len(scorer.start) if not scorer.causal or scorer.start else 1
    while done < len(sequence):
        end = min(done + (size if done <= 1 else step), len(sequence))
        begin = max(0, end - scorer.room)
        yield Request(sequence[begin:done], sequence[done:end])
        done = end
