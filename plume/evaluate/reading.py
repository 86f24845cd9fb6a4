"""What scoring needs of a model and no more: hidden states where they are asked for, likelihoods without the logits."""

# N tokens of a batch, B bundles of one size, T tokens of a bundle, A asked positions, H heads, K head width, D model
# width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from plume.heads import Model
from plume.model import MLP, Attention, Block, Transformer
from plume.train.objectives import token_features

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
LOGITS_HELD = 1 << 21  # numbers of logits in memory at a time: few enough to be still in the cache when they are read
COLUMNS = 2048  # tokens of the vocabulary that are looked at together at least


@dataclass(frozen=True, slots=True)
class Score:
    """For every scored token: its log-probability, that of the likeliest token, and whether it was that one."""

    logprobs: Floats  # (A,)
    best: Floats  # (A,)
    hits: Bools  # (A,)

    @property
    def total(self) -> float:
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def greedy(self) -> bool:
        return bool(self.hits.all())

    def cut(self, lengths: Iterable[int]) -> Iterator[Score]:
        """One request's share after the other."""
        at = 0
        for n in lengths:
            yield Score(self.logprobs[at : at + n], self.best[at : at + n], self.hits[at : at + n])
            at += n


# ---- sequences that begin alike ----------------------------------------------------------------------------------


class Bundle:
    """Sequences as one tree of tokens: what several begin with stands there once, and each token sees its ancestors."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.members: list[int] = []  # whose sequences these are
        self.asked: list[int] = []  # places whose hidden states are read, member by member
        self.last: Sequence[int] = ()  # the sequence that was added last,
        self.path: list[int] = []  # and its places
        self.branches: list[tuple[int, int]] = []  # where a later sequence goes on, and the place it goes on from

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, member: int, sequence: Sequence[int], shared: int, asked: slice) -> None:
        """A sequence whose first `shared` tokens are those of the last one."""
        begin = len(self)
        if begin and shared < len(sequence):
            self.branches.append((begin, self.path[shared - 1]))
        self.tokens += sequence[shared:]
        self.positions += range(shared, len(sequence))
        self.path = [*self.path[:shared], *range(begin, len(self))]
        self.last = sequence
        self.members.append(member)
        self.asked += self.path[asked]

    def seen(self, band: int) -> Bools:
        """Who sees whom, (T, T); with a band, only so many positions back."""
        table = np.tri(len(self), dtype=np.bool_)
        for (begin, parent), (end, _) in pairwise([*self.branches, (len(self), 0)]):
            table[begin:end, :begin] = table[parent, :begin]
        if band:
            table &= np.subtract.outer(self.positions, self.positions) < band
        return table


def bundled(sequences: Sequence[tuple[int, ...]], asked: Sequence[slice], *, width: int, most: int) -> list[Bundle]:
    """Every sequence in a bundle. One joins its neighbour in sorted order where that saves work.

    It saves the matrix products of the tokens they share, and costs the attention between tokens that see nothing of
    each other; a token's products cost about as much as attention to as many tokens as the model is wide. No bundle
    becomes longer than `most`.
    """
    found: list[Bundle] = []
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        sequence = sequences[i]
        if found:
            shared = common(found[-1].last, sequence)
            rest = len(sequence) - shared
            if shared * width > len(found[-1]) * rest and len(found[-1]) + rest <= most:
                found[-1].add(i, sequence, shared, asked[i])
                continue
        found.append(Bundle())
        found[-1].add(i, sequence, 0, asked[i])
    return found


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def batches(sizes: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Numbers of bundles, longest first, in batches of at most `budget` tokens that are about equally large."""
    total = sum(sizes)
    enough = total / max(1, -(-total // budget))
    batch: list[int] = []
    held = 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if batch and (held >= enough or held + sizes[i] > budget):
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += sizes[i]
    if batch:
        yield batch


# ---- the stack ---------------------------------------------------------------------------------------------------

IN_PLACE: dict[
    str, Callable[[Tensor], Tensor]
] = {  # new memory for the widest tensor of a block would be cleared first
    "gelu": partial(torch.ops.aten.gelu_, approximate="none"),
    "gelu_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
    "relu": torch.relu_,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Bundles of one length that attend together, each within itself."""

    count: int
    queries: slice
    keys: slice
    masks: dict[int, Tensor | None]  # by band, (B, 1, queries, T) with True for seen; None where nothing is hidden


class Stack:
    """Runs a Transformer over bundles laid end to end: no padding, and the last block only where it is read."""

    def __init__(self, model: Model) -> None:
        assert isinstance(model.body, Transformer), "an encoder-decoder reads two sequences"
        self.body, self.config, self.causal = model.body, model.config, model.body.causal
        self.activate = IN_PLACE[model.config.activation]
        self.device = model.table.device

    def read(self, batch: Sequence[Bundle]) -> Tensor:
        """Hidden states where the bundles ask for them, (A, D)."""
        starts = np.cumsum([0, *map(len, batch)]).tolist()
        tokens = torch.tensor([token for b in batch for token in b.tokens], device=self.device)
        positions = torch.tensor([place for b in batch for place in b.positions], device=self.device)
        asked = torch.tensor([s + n for s, b in zip(starts, batch, strict=False) for n in b.asked], device=self.device)
        x = self.body.embed(tokens, positions, None)  # (N, D)
        spans, last = self.spans(batch), len(self.body.blocks) - 1
        few = 2 * len(asked) < len(tokens)
        for n, block in enumerate(cast(Iterable[Block], self.body.blocks)):
            band = self.config.band_of(n)
            if n == last and few:
                x = self.block(block, x, self.asked_spans(batch, starts), band, asked)  # (A, D)
            else:
                x = self.block(block, x, spans, band, None)
        x = x if few else x[asked]
        return x if self.body.norm is None else self.body.norm(x)

    def spans(self, batch: Sequence[Bundle]) -> list[Span]:
        found, at = list[Span](), 0
        for (size, _), same in groupby(batch, key=lambda b: (len(b), bool(b.branches))):
            bundles = list(same)
            place = slice(at, at + size * len(bundles))
            found.append(Span(len(bundles), place, place, self.masks(bundles, None)))
            at = place.stop
        return found

    def asked_spans(self, batch: Sequence[Bundle], starts: Sequence[int]) -> list[Span]:
        """One for each bundle, whose asked places alone look around."""
        found, at = list[Span](), 0
        for start, bundle in zip(starts, batch, strict=False):
            queries = slice(at, at + len(bundle.asked))
            keys = slice(start, start + len(bundle))
            found.append(Span(1, queries, keys, self.masks([bundle], bundle.asked)))
            at = queries.stop
        return found

    def masks(self, bundles: Sequence[Bundle], asked: list[int] | None) -> dict[int, Tensor | None]:
        size = len(bundles[0])
        masks: dict[int, Tensor | None] = {}
        for band in {0, self.config.band}:
            plain = asked is None and not bundles[0].branches and (band == 0 or band >= size)
            if plain or not self.causal:
                masks[band] = None
                continue
            seen = np.stack([b.seen(band)[slice(None) if asked is None else asked] for b in bundles])
            masks[band] = torch.from_numpy(seen)[:, None].to(self.device)  # (B, 1, queries, T)
        return masks

    def block(self, block: Block, x: Tensor, spans: Sequence[Span], band: int, asked: Tensor | None) -> Tensor:
        """All of (N, D), or the (A, D) that are asked for, which look at all."""
        pre = block.attn.pre
        source = block.attn.norm(x) if pre else x  # (N, D)
        if asked is None:
            y = self.attention(cast(Attention, block.attn.inner), source, source, spans, band).add_(x)
        else:
            y = self.attention(cast(Attention, block.attn.inner), source[asked], source, spans, band).add_(x[asked])
        x = y if pre else block.attn.norm(y)
        mlp = cast(MLP, block.mlp.inner)
        y = mlp.down(self.activate(mlp.up(block.mlp.norm(x) if pre else x))).add_(x)
        return y if pre else cast(Tensor, block.mlp.norm(y))

    def attention(self, attention: Attention, x: Tensor, source: Tensor, spans: Sequence[Span], band: int) -> Tensor:
        q, k, v = attention.q(x), attention.k(source), attention.v(source)
        parts: list[Tensor] = []
        for span in spans:
            mask = span.masks[band]
            asking, keys, values = (
                side.view(span.count, -1, self.config.heads, self.config.head_width).transpose(1, 2)
                for side in (q[span.queries], k[span.keys], v[span.keys])
            )  # (B, H, queries or T, K)
            causal = self.causal and mask is None
            y = F.scaled_dot_product_attention(asking, keys, values, attn_mask=mask, is_causal=causal)
            parts.append(y.transpose(1, 2).reshape(-1, self.config.width))
        return cast(Tensor, attention.out(parts[0] if len(parts) == 1 else torch.cat(parts)))


# ---- the head ----------------------------------------------------------------------------------------------------


class Head:
    """Compares hidden states with the whole vocabulary, a part of it at a time: no (A, V) tensor ever exists."""

    def __init__(self, model: Model, banned: Iterable[int]) -> None:
        self.model, self.vocab_size = model, model.config.vocab_size
        self.banned = torch.tensor(sorted(banned), dtype=torch.long, device=model.table.device)

    def read(self, hidden: Tensor, targets: Sequence[int], filtered: Sequence[bool]) -> Score:
        """(A, D) hidden states against A tokens."""
        wanted = torch.tensor(targets, device=hidden.device)
        barred = torch.tensor(filtered, device=hidden.device).nonzero()  # (barred, 1)
        top = torch.full((len(hidden),), -torch.inf, device=hidden.device)  # the largest logit so far
        mass = torch.zeros_like(top)  # the sum of exp(logit - top) so far
        best, found = top.clone(), top.clone()  # the largest that may be predicted, and the target's
        hits = torch.zeros_like(top, dtype=torch.bool)
        for first, logits in self.parts(hidden):  # (A, columns)
            inside = ((wanted >= first) & (wanted < first + logits.shape[1])).nonzero()[:, 0]
            target = wanted[inside] - first
            found[inside] = logits[inside, target]
            leader = logits.amax(dim=1)
            new = torch.maximum(top, leader)
            mass = mass * (top - new).exp_() + (logits - new[:, None]).exp_().sum(dim=1)
            top = new
            if len(barred):
                banned = self.banned[(self.banned >= first) & (self.banned < first + logits.shape[1])] - first
                logits[barred, banned] = -torch.inf
                leader = logits.amax(dim=1)
            hits &= found >= leader
            # of equals the first counts, so the target must beat whatever came before it
            hits[inside] = (logits[inside].argmax(dim=1) == target) & (logits[inside, target] > best[inside])
            best = torch.maximum(best, leader)
        scale = top + mass.log_()
        return Score((found - scale).cpu().numpy(), (best - scale).cpu().numpy(), hits.cpu().numpy())

    def parts(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits of a part of the vocabulary, and its first token. Each part takes the place of the one before."""
        x, bias = token_features(self.model, hidden)
        rows, columns = len(x), min(self.vocab_size, max(COLUMNS, LOGITS_HELD // len(x)))
        held = torch.empty(rows * columns, dtype=x.dtype, device=x.device)
        for first in range(0, self.vocab_size, columns):
            words = self.model.table[first : min(first + columns, self.vocab_size)]
            logits = held[: rows * len(words)].view(rows, len(words))
            if bias is None:
                torch.mm(x, words.T, out=logits)
            else:
                torch.addmm(bias[first : first + len(words)], x, words.T, out=logits)
            yield first, logits.float()
