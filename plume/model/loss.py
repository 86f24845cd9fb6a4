"""Loss and likelihood of predicted tokens, computed in chunks so that the logits of a batch never exist together."""

# B batch, T tokens, N positions with a target, A scored positions, D model width, V vocabulary, C positions in a chunk
# or candidates

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plume.data.batches import IGNORE, Batch
from plume.model.heads import MaskedToken, Model, Pretraining
from plume.model.likelihood import Score

CHUNK_NUMBERS = 1 << 19  # logits held at a time: few enough to stay in the processor's cache
CHUNK_ROWS, LARGEST_CHUNK = 256, 7_000_000  # but so many rows if all fit into memory that malloc need not map anew

SCORED_NUMBERS = 1 << 21  # logits held at a time while scoring: few enough to stay in the processor's cache
SCORED_COLUMNS = 2048  # tokens of the vocabulary that are scored together at least


def softmax_slope(logits: Tensor, y: Tensor, raised: Tensor | None, smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropies of (C, V) logits with (C,) smoothed targets, (C,), and their gradient by the logits, (C, V).

    `raised` (C,) is added to each target's own logit. The memory of the logits may be that of the gradient.
    """
    at, exact = y[:, None], logits.float()
    if raised is not None:
        exact.scatter_add_(1, at, raised[:, None])
    logp = exact.log_softmax(dim=1)
    losses = (smoothing - 1) * logp.gather(1, at)[:, 0]
    if smoothing:
        losses = losses - smoothing * logp.mean(dim=1)
    gradient = logp.exp_()
    if smoothing:
        gradient.sub_(smoothing / logp.shape[1])
    gradient.scatter_add_(1, at, torch.full_like(at, smoothing - 1, dtype=gradient.dtype))
    return losses, gradient.to(logits.dtype)


Softmax = Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]  # in this way, or a faster one


class ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of `features @ table.T + bias`, whose gradient is found in the forward, chunk by chunk.

    Logits of the whole batch never exist together: each chunk's are turned into its gradient and dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,  # (N, D)
        table: Tensor,  # (rows, D); rows from V on are padding
        bias: Tensor | None,  # (V,)
        targets: Tensor,  # (N,), IGNORE where there is none
        vocab_size: int,
        smoothing: float,
        rows: int,
        weights: Tensor | None,  # (N,), of each target's loss; None means 1
        raised: Tensor | None,  # (N,), what is added to each target's own logit
        softmax: Softmax,
    ) -> Tensor:
        wants = [ctx.needs_input_grad[i] for i in range(3)]
        words = table[:vocab_size].to(features.dtype)  # (V, D)
        total = torch.zeros((), device=features.device)
        grad_features = torch.empty_like(features) if wants[0] else None
        grad_table = torch.zeros_like(table) if wants[1] else None
        grad_bias = torch.zeros_like(bias) if wants[2] and bias is not None else None
        for start in range(0, len(features), rows):
            x, y = features[start : start + rows], targets[start : start + rows]  # (C, D), (C,)
            logits = F.linear(x, words, None if bias is None else bias.to(x.dtype))  # (C, V)
            share = (y != IGNORE).to(total.dtype)  # (C,), 0 where there is no target
            share = share if weights is None else share * weights[start : start + rows]
            own = None if raised is None else raised[start : start + rows]
            losses, gradient = softmax(logits, y.clamp(min=0), own, smoothing)
            total += (losses * share).sum()  # a product would be rounded by autocast
            if grad_bias is not None:
                grad_bias += share @ gradient.to(share.dtype)
            share = share.to(x.dtype)[:, None]  # laid on rows of D below, not of V
            if grad_features is not None:
                grad_features[start : start + rows] = (gradient @ words) * share
            if grad_table is not None:
                grad_table[:vocab_size] += gradient.T @ (x * share)
        ctx.gradients = (grad_features, grad_table, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if g is None else g.mul_(upstream[0]) for g in ctx.gradients]
        ctx.gradients = None
        return (*scaled, *(None,) * (len(ctx.needs_input_grad) - 3))


def token_loss(
    features: Tensor,
    table: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
    raised: Tensor | None = None,
    softmax: Softmax = softmax_slope,
    chunk_numbers: int | None = None,
) -> Tensor:
    """The summed cross-entropy of (..., D) features against (...) targets, never holding all logits at once.

    `weights` (...) are laid on each target's loss, `raised` (...) is added to its own logit.
    """
    if chunk_numbers is None:
        chunk_numbers = max(CHUNK_NUMBERS, min(CHUNK_ROWS * vocab_size, LARGEST_CHUNK))
    rows = max(1, chunk_numbers // vocab_size)
    flat = features.reshape(-1, features.shape[-1])
    of_targets = [None if numbers is None else numbers.reshape(-1) for numbers in (weights, raised)]
    total: Tensor = ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        flat, table, bias, targets.reshape(-1), vocab_size, smoothing, rows, *of_targets, softmax
    )
    return total


class SampledSoftmax:
    """In training, targets are compared with each other and with some tokens drawn at random, not with all tokens.

    A candidate's logit is raised by the logarithm of how rarely it is one, so that sums over the candidates estimate
    sums over the vocabulary, and the loss that of the whole softmax (Jean et al., 2015). A target is always one.
    """

    def __init__(self, shares: Tensor, drawn: int) -> None:
        """`shares` (V,): how frequent each token is among the targets."""
        self.shares, self.drawn = shares.double(), min(drawn, len(shares))

    def candidates(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Candidate tokens (C,), what their logits are raised by (C,), and the targets' places among them (N,)."""
        real = targets[targets != IGNORE]
        shares = self.shares = self.shares.to(targets.device)
        drawn = torch.randperm(len(shares), device=targets.device)[: self.drawn]
        ids = torch.unique(torch.cat([real, drawn]))
        absent = (1 - shares[ids]) ** len(real) * (1 - self.drawn / len(shares))
        places = torch.searchsorted(ids, targets.clamp(min=0)).where(targets != IGNORE, IGNORE)
        return ids, -torch.log1p(-absent).float(), places

    def loss(
        self, features: Tensor, table: Tensor, targets: Tensor, bias: Tensor | None = None,
        softmax: Softmax = softmax_slope,
    ) -> Tensor:  # fmt: skip
        """As token_loss, of (N, D) features against (N,) targets."""
        ids, raised, places = self.candidates(targets)
        return token_loss(
            features,
            F.embedding(ids, table),
            places,
            vocab_size=len(ids),
            bias=raised if bias is None else bias[ids] + raised,
            raised=-raised[places.clamp(min=0)],
            softmax=softmax,
        )


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A batch of plume.data as tensors, field by field."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    lengths: Tensor | None = None
    segments: Tensor | None = None
    documents: Tensor | None = None
    next_sentence: Tensor | None = None
    source: Tensor | None = None
    source_lengths: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> TensorBatch:
        given = {f.name: getattr(batch, f.name) for f in fields(batch)}
        return cls(**{name: torch.from_numpy(array) for name, array in given.items() if array is not None})

    def to(self, device: torch.device) -> TensorBatch:
        if device.type == "cpu":
            return self
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return TensorBatch(**{n: t.to(device, non_blocking=True) for n, t in given.items() if t is not None})


def token_features(model: Model, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the token table is multiplied with, and the bias that is added."""
    head = model.head.token if isinstance(model.head, Pretraining) else model.head
    if isinstance(head, MaskedToken):
        return head.norm(head.activation(head.dense(hidden))), head.bias
    return hidden, None


class TokenLikelihoods:
    """Compares hidden states with the whole vocabulary, a part of it at a time: no (A, V) tensor ever exists."""

    def __init__(self, model: Model, banned: Iterable[int] = (), *, details: bool = False) -> None:
        self.model, self.vocab_size, self.details = model, model.config.vocab_size, details
        self.banned = torch.tensor(sorted(banned), dtype=torch.long, device=model.table.device)

    def read(
        self, hidden: Tensor, targets: Sequence[int], filtered: Sequence[bool], rows: Sequence[int] | None = None
    ) -> Score:
        """(A, D) hidden states against Q tokens; where filtered, banned tokens cannot be the likeliest.

        `rows` (Q,) says which hidden state predicts each token; unset: one each, in order.
        """
        wanted, at = (torch.tensor(numbers, device=hidden.device) for numbers in (targets, rows or range(len(targets))))
        if any(filtered):  # a state may predict tokens with and without the filter
            hidden, at = hidden[at], torch.arange(len(wanted), device=hidden.device)
        barred = torch.tensor(filtered, device=hidden.device).nonzero()[:, 0]
        top = torch.full((len(hidden),), -torch.inf, device=hidden.device)  # the largest logit so far
        mass = torch.zeros_like(top)  # the sum of exp(logit - top) so far
        best = top.clone()  # the largest that may be predicted
        found = torch.full_like(wanted, -torch.inf, dtype=top.dtype)  # the target's
        hits = torch.zeros_like(wanted, dtype=torch.bool)
        for first, logits in self.parts(hidden):  # (A, columns)
            inside = ((wanted >= first) & (wanted < first + logits.shape[1])).nonzero()[:, 0]
            found[inside] = logits[at[inside], wanted[inside] - first]
            allowed = self.allowed(logits, barred, first)
            leader = allowed.amax(dim=1)
            hits &= found >= leader[at]
            # of equals the first counts, so the target must beat whatever came before it
            rivals = inside[(found[inside] >= leader[at[inside]]) & (found[inside] > best[at[inside]])]
            hits[rivals] = allowed[at[rivals]].argmax(dim=1) == wanted[rivals] - first
            best = torch.maximum(best, leader)
            new = torch.maximum(top, leader if allowed is logits else logits.amax(dim=1))
            mass = mass * (top - new).exp_() + logits.sub_(new[:, None]).exp_().sum(dim=1)
            top = new
        scale = top + mass.log_()
        ranks = self.ranks(hidden[at], found, scale[at]) if self.details else ()
        return Score(*(column.cpu().numpy() for column in (found - scale[at], (best - scale)[at], hits, *ranks)))

    def allowed(self, logits: Tensor, barred: Tensor, first: int) -> Tensor:
        """The logits that a prediction is made from: in barred rows without the banned tokens."""
        if not len(barred):
            return logits
        banned = self.banned[(self.banned >= first) & (self.banned < first + logits.shape[1])] - first
        return logits.index_put((barred[:, None], banned), logits.new_tensor(-torch.inf))

    def ranks(self, hidden: Tensor, found: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """How many tokens are likelier than the one that was found, and the entropy of all."""
        likelier, entropy = torch.zeros_like(found, dtype=torch.long), torch.zeros_like(found)
        for _, logits in self.parts(hidden):
            likelier += (logits > found[:, None]).sum(dim=1)
            logprobs = logits - scale[:, None]
            entropy -= (logprobs.exp() * logprobs).sum(dim=1)
        return likelier, entropy

    def parts(self, hidden: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits of a part of the vocabulary, and its first token. Each part overwrites the one before."""
        x, bias = token_features(self.model, hidden)
        rows, columns = len(x), min(self.vocab_size, max(SCORED_COLUMNS, SCORED_NUMBERS // len(x)))
        held = torch.empty(rows * columns, dtype=x.dtype, device=x.device)
        for first in range(0, self.vocab_size, columns):
            words = self.model.table[first : min(first + columns, self.vocab_size)]
            logits = held[: rows * len(words)].view(rows, len(words))
            if bias is None:
                torch.mm(x, words.T, out=logits)
            else:
                torch.addmm(bias[first : first + len(words)], x, words.T, out=logits)
            yield first, logits.float()
