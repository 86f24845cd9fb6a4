"""The calls that carry every benchmark: how likely tokens are, alone or rolling over a text, and what fills a mask."""

# B rows of a batch, T tokens of the longest row, N scored positions, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plume.config import ModelConfig, UserError
from plume.heads import TOKEN_HEADS, Model
from plume.model import Cache, EncoderDecoder
from plume.text import Tokenizer

Floats = npt.NDArray[np.float32]
LOGITS_HELD = 1 << 23  # numbers of logits in memory at a time: 32 MiB of float32, whatever is scored
WASTE = 0.125  # largest share of padding in a batch
SHARED = 16  # prefixes shorter than this are not worth a second pass


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to score after a context. A masked model sees the whole, with one scored token hidden at a time."""

    context: tuple[int, ...]
    target: tuple[int, ...]
    filtered: bool = False  # the scorer's banned tokens cannot be the likeliest at the first position


@dataclass(frozen=True, slots=True)
class Score:
    """For every scored token: its log-probability, that of the likeliest token, and whether it was that one."""

    logprobs: Floats  # (N,)
    best: Floats  # (N,)
    hits: npt.NDArray[np.bool_]  # (N,)

    @property
    def total(self) -> float:
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def greedy(self) -> bool:
        return bool(self.hits.all())


Inputs = list[tuple[int, ...]]  # what the model reads, by request
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


# ---- batches -----------------------------------------------------------------------------------------------------


def batches(lengths: Sequence[int], budget: int, *, most: int | None = None) -> Iterator[list[int]]:
    """Numbers of rows, longest first, in batches of at most `budget` tokens and `most` rows with little padding."""
    batch: list[int] = []
    held = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        width = lengths[batch[0]] if batch else lengths[row]
        total = (len(batch) + 1) * width
        waste = total - held - lengths[row]
        if batch and (total > budget or waste > WASTE * total or len(batch) == most):
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += lengths[row]
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(table).to(device)  # (B, T)


class Reader:
    """Reads the head at chosen hidden states only, a few rows at a time: no (B, T, V) tensor ever exists."""

    def __init__(self, model: Model, banned: Iterable[int]) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.banned = torch.tensor(sorted(banned), dtype=torch.long, device=self.device)
        self.rows = max(1, LOGITS_HELD // model.config.vocab_size)

    def read(self, hidden: Tensor, targets: Sequence[int], filtered: Sequence[bool]) -> Score:
        """(N, D) hidden states against N tokens."""
        wanted = torch.tensor(targets, dtype=torch.long, device=self.device)
        first = torch.tensor(filtered, dtype=torch.bool, device=self.device)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for at in range(0, len(wanted), self.rows):
            part = slice(at, at + self.rows)
            logits = self.model.read(hidden[part]).float()  # (rows, V)
            scale = logits.logsumexp(dim=1)
            found = logits.gather(1, wanted[part, None])[:, 0] - scale
            if len(self.banned) and bool(first[part].any()):
                barred = first[part].nonzero()  # (n, 1)
                logits[barred, self.banned] = -torch.inf
            best, token = logits.max(dim=1)
            parts.append((found, best - scale, token == wanted[part]))
        return Score(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)))


def cut(score: Score, lengths: Sequence[int]) -> Iterator[Score]:
    """One request's share after the other."""
    at = 0
    for n in lengths:
        yield Score(score.logprobs[at : at + n], score.best[at : at + n], score.hits[at : at + n])
        at += n


# ---- causal models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """Requests that begin with the same tokens, which are then computed once."""

    members: tuple[int, ...]
    shared: int


class CausalScorer:
    """Likelihood of tokens given those before them."""

    causal = True

    def __init__(self, model: Model, tokenizer: Tokenizer, budget: int, banned: Iterable[int]) -> None:
        self.model, self.tokenizer, self.budget = model.eval(), tokenizer, budget
        self.reader = Reader(model, banned)
        self.room = model.config.context + 1  # the last token is only predicted, never read
        first = tokenizer.end if tokenizer.start is None else tokenizer.start
        self.start: tuple[int, ...] = () if first is None else (first,)

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]:
        inputs = [(r.context + r.target)[:-1] for r in requests]
        for request, tokens in zip(requests, inputs, strict=True):
            assert request.context and request.target, "something to read and something to score"
            assert len(tokens) < self.room, "cut to the context before"
        families = share(inputs, [len(r.context) - 1 for r in requests])
        alone = [f.members[0] for f in families if len(f.members) == 1]
        together = [f for f in families if len(f.members) > 1]
        with torch.inference_mode():
            for batch in batches([len(inputs[i]) for i in alone], self.budget):
                yield from self._plain([alone[i] for i in batch], requests, inputs)
            for batch in batches([f.shared for f in together], self.budget):
                yield from self._shared([together[i] for i in batch], requests, inputs)

    def _plain(self, batch: list[int], requests: Sequence[Request], inputs: Inputs) -> Iterator[Answer]:
        hidden = self.model.body(padded([inputs[i] for i in batch], self.reader.device))  # (B, T, D)
        yield from self._read(hidden, batch, requests, inputs, 0)

    def _shared(self, families: list[Family], requests: Sequence[Request], inputs: Inputs) -> Iterator[Answer]:
        """Each family's beginning once, cut to one length for all, and then the members' rests behind copies of it."""
        config, device = self.model.config, self.reader.device
        shared = min(f.shared for f in families)
        cache = Cache(config, len(families), shared, device=device, dtype=self.model.table.dtype)
        self.model.body(padded([inputs[f.members[0]][:shared] for f in families], device), cache=cache)
        rows = [(n, member) for n, family in enumerate(families) for member in family.members]
        rests = [inputs[member][shared:] for _, member in rows]
        most = max(1, 2 * self.budget // (shared + max(map(len, rests))))  # each row has its own keys and values
        for batch in batches([len(rest) for rest in rests], self.budget, most=most):
            owner = torch.tensor([rows[i][0] for i in batch], device=device)
            mine = spread(cache, owner, max(len(rests[i]) for i in batch), config)
            hidden = self.model.body(padded([rests[i] for i in batch], device), cache=mine)  # (B, T, D)
            yield from self._read(hidden, [rows[i][1] for i in batch], requests, inputs, shared)

    def _read(
        self,
        hidden: Tensor,
        members: list[int],
        requests: Sequence[Request],
        inputs: Inputs,
        start: int,
    ) -> Iterator[Answer]:
        """Only the hidden states that predict a target go to the head."""
        asked = [requests[m] for m in members]
        picked = torch.cat(
            [
                hidden[row, len(r.context) - 1 - start : len(inputs[m]) - start]
                for row, (m, r) in enumerate(zip(members, asked, strict=True))
            ]
        )  # (N, D)
        targets = [token for r in asked for token in r.target]
        filtered = [r.filtered and i == 0 for r in asked for i in range(len(r.target))]
        whole = self.reader.read(picked, targets, filtered)
        yield from zip(members, cut(whole, [len(r.target) for r in asked]), strict=True)


def spread(cache: Cache, owner: Tensor, more: int, config: ModelConfig) -> Cache:
    """A cache whose row i goes on from row owner[i] of another, with room for `more` tokens."""
    past, first = cache.longest, cache.layers[0].keys
    new = Cache(config, len(owner), past + more, device=first.device, dtype=first.dtype)
    for ours, theirs in zip(new.layers, cache.layers, strict=True):
        ours.keys[:, :, :past] = theirs.keys[owner]
        ours.values[:, :, :past] = theirs.values[owner]
    new.advance(past, None)
    return new


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two sequences begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def share(inputs: Sequence[tuple[int, ...]], limits: Sequence[int]) -> list[Family]:
    """Neighbours in sorted order that begin alike, as long as joining saves tokens. Row i shares at most limits[i]."""
    order = sorted(range(len(inputs)), key=lambda i: inputs[i])
    families: list[Family] = []
    members: list[int] = []
    shared = 0
    for i in order:
        alike = min(common(inputs[members[-1]], inputs[i]), limits[i], shared) if members else 0
        if members and alike >= SHARED and alike * len(members) >= shared * (len(members) - 1):
            members.append(i)
            shared = alike
            continue
        if members:
            families.append(Family(tuple(members), shared))
        members, shared = [i], limits[i]
    if members:
        families.append(Family(tuple(members), shared))
    return families


# ---- masked models -----------------------------------------------------------------------------------------------


class MaskedScorer:
    """Pseudo-likelihood: each scored token is hidden alone and predicted from everything else."""

    causal = False

    def __init__(self, model: Model, tokenizer: Tokenizer, budget: int, banned: Iterable[int]) -> None:
        if tokenizer.mask is None:
            raise UserError("this masked model's tokenizer has no mask token, so nothing can be hidden from it")
        self.model, self.tokenizer, self.budget, self.mask = model.eval(), tokenizer, budget, tokenizer.mask
        self.reader = Reader(model, banned)
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
        with torch.inference_mode():
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
        places = [self.before + len(requests[i].context) + n for i, n in rows]
        tokens = padded([wholes[i] for i, _ in rows], self.reader.device)  # (B, T)
        at = torch.arange(len(rows), device=tokens.device), torch.tensor(places, device=tokens.device)
        tokens[at] = self.mask
        sizes = [len(wholes[i]) for i, _ in rows]
        lengths = None if min(sizes) == max(sizes) else torch.tensor(sizes, device=tokens.device)
        hidden = self.model.body(tokens, lengths=lengths)[at]  # (B, D)
        targets = [requests[i].target[n] for i, n in rows]
        whole = self.reader.read(hidden, targets, [requests[i].filtered and n == 0 for i, n in rows])
        yield from zip(rows, cut(whole, [1] * len(rows)), strict=True)

    def fill(self, tokens: Sequence[int]) -> list[int]:
        """The tokens with every mask filled in, the surest one first."""
        whole = self.tokenizer.wrap(tokens)[0]
        if len(whole) > self.model.config.context:
            raise UserError(f"{len(tokens)} tokens do not fit into this model; {self.room} do")
        row = torch.tensor([whole], device=self.reader.device)
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
