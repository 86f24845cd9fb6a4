"""How likely tokens are: the one scorer behind LM, server, evaluation and perplexity, alone or rolling over a text."""

# A scored positions, D model width, V vocabulary

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Barrier
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from plume.config import Boundary, UserError
from plume.inference.outputs import fill_all_masks, token_text
from plume.model.likelihood import Floats, joined, score_rows
from plume.model.likelihood import Score as Score
from plume.text import Tokenizer
from plume.util import drawings

if TYPE_CHECKING:
    from plume.model.heads import Model
    from plume.model.ragged import PrefixTree

B = TypeVar("B")
R = TypeVar("R")
ROWS_AT_ONCE = 64  # all logits of a long text at once would be large
WINDOWS_AT_ONCE = 64  # of a long text that are cut at once


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to score after a context. A masked model sees the whole, with one scored token hidden at a time."""

    context: tuple[int, ...]
    target: tuple[int, ...]
    filtered: bool = False  # the scorer's banned tokens cannot be the likeliest at the first position


Answer = tuple[int, Score]  # the request's number and its score


class Scorer(Protocol):
    """Scores requests in any order, each as soon as it is known."""

    tokenizer: Tokenizer
    causal: bool
    room: int  # most tokens of context and target together
    start: tuple[int, ...]  # what precedes a text that has no context

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]: ...


def start_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The start token, or the end token where there is none, as GPT-2 separates documents with it."""
    first = tokenizer.end if tokenizer.start is None else tokenizer.start
    return () if first is None else (first,)


def scorer_for(
    model: Model,
    tokenizer: Tokenizer,
    *,
    batch_tokens: int | None = None,
    banned: Iterable[int] = (),
    details: bool = False,
) -> CausalScorer | MaskedScorer:
    """The scorer of a torch model; with details it also gives ranks and entropies."""
    from plume.model.heads import TOKEN_HEADS

    if model.config.decoder_layers or model.kind not in TOKEN_HEADS:
        kind = "an encoder-decoder" if model.config.decoder_layers else f"a model with a {model.kind} head"
        raise UserError(f"{kind} gives no likelihood of a text; a next-token or masked-token model does")
    budget = (1024 if model.table.device.type == "cpu" else 16_384) if batch_tokens is None else batch_tokens
    kind_of_scorer = CausalScorer if model.config.causal else MaskedScorer
    return kind_of_scorer(model, tokenizer, budget, banned, details=details)


class EngineScorer:
    """A causal model behind an engine: whatever gives the logits of the last tokens it has read."""

    causal = True

    def __init__(self, logits_for: Callable[[list[int], int], Floats], tokenizer: Tokenizer, context: int) -> None:
        self.logits_for, self.tokenizer = logits_for, tokenizer
        self.room = context + 1  # the last token is only predicted, never read
        self.start = start_tokens(tokenizer)

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]:
        for number, request in enumerate(requests):
            window, first = [*request.context, *request.target], len(request.context)
            parts = []
            for at in range(first, len(window), ROWS_AT_ONCE):
                until = min(at + ROWS_AT_ONCE, len(window))
                logits = self.logits_for(window[: until - 1], until - at)
                parts.append(score_rows(logits, window[at:until]))
            yield number, joined(parts)


class CausalScorer:
    """A causal torch model: requests in ragged batches, shared prefixes computed once."""

    causal = True

    def __init__(
        self, model: Model, tokenizer: Tokenizer, budget: int, banned: Iterable[int] = (), *, details: bool = False
    ) -> None:
        from plume.model.loss import TokenLikelihoods

        self.model, self.tokenizer, self.budget = model, tokenizer, budget
        self.likelihoods = TokenLikelihoods(model, banned, details=details)
        self.threads = batch_threads(model)
        self.room = model.config.context + 1  # the last token is only predicted, never read
        self.start = start_tokens(tokenizer)

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]:
        from plume.model.ragged import batches, prefix_trees

        inputs = [(r.context + r.target)[:-1] for r in requests]
        for request, tokens in zip(requests, inputs, strict=True):
            assert request.context and request.target, "a context to read and a target to score"
            assert len(tokens) < self.room, "cut to the context before"
        config = self.model.config
        wanted = [slice(len(r.context) - 1, None) for r in requests]
        trees = prefix_trees(inputs, wanted, width=config.width, most=2 * config.context)
        made = [[trees[i] for i in batch] for batch in batches([len(tree) for tree in trees], self.budget)]
        with self.model.eval_mode():
            yield from in_threads(lambda batch: self._scored(batch, requests), made, self.threads)

    def _scored(self, trees: list[PrefixTree], requests: Sequence[Request]) -> list[Answer]:
        import torch

        members = [member for tree in trees for member in tree.members]
        mine = [requests[m] for m in members]
        targets = [token for r in mine for token in r.target]
        filtered = [r.filtered and n == 0 for r in mine for n in range(len(r.target))]
        rows, before = list[int](), 0
        for tree in trees:
            rows += [before + row for row in tree.rows]
            before += len(tree.wanted)
        with torch.inference_mode():
            whole = self.likelihoods.read(self.model.read_ragged(trees), targets, filtered, rows)  # (A, D)
        return list(zip(members, whole.cut(len(r.target) for r in mine), strict=True))


class MaskedScorer:
    """Pseudo-likelihood: each scored token is masked alone and predicted from everything else."""

    causal = False

    def __init__(
        self, model: Model, tokenizer: Tokenizer, budget: int, banned: Iterable[int] = (), *, details: bool = False
    ) -> None:
        from plume.model.loss import TokenLikelihoods

        if tokenizer.mask is None:
            raise UserError("this masked model's tokenizer has no mask token, so no token can be masked")
        self.model, self.tokenizer, self.budget, self.mask = model, tokenizer, budget, tokenizer.mask
        self.likelihoods = TokenLikelihoods(model, banned, details=details)
        self.threads = batch_threads(model)
        around = tokenizer.add_special_tokens([-1])[0]
        self.before = around.index(-1)
        self.room = model.config.context - len(around) + 1
        self.start: tuple[int, ...] = ()

    def score(self, requests: Sequence[Request]) -> Iterator[Answer]:
        from plume.model.ragged import batches

        wholes = [self.tokenizer.add_special_tokens(r.context + r.target)[0] for r in requests]
        for request, whole in zip(requests, wholes, strict=True):
            assert request.target and len(whole) <= self.model.config.context, "cut to the context before"
        order = sorted(range(len(requests)), key=lambda i: -len(wholes[i]))  # so that neighbours share batches
        rows = [(i, n) for i in order for n in range(len(requests[i].target))]
        found: dict[int, list[Score | None]] = {i: [None] * len(requests[i].target) for i in order}
        made = [[rows[b] for b in batch] for batch in batches([len(wholes[i]) for i, _ in rows], self.budget)]
        with self.model.eval_mode():
            for batch in in_threads(lambda batch: [self._masked(batch, requests, wholes)], made, self.threads):
                for (i, n), score in batch:
                    found[i][n] = score
                for i in dict.fromkeys(i for (i, _), _ in batch):
                    parts = [score for score in found[i] if score is not None]
                    if len(parts) == len(found[i]):
                        yield i, joined(parts)
                        found[i] = []

    def _masked(
        self, rows: list[tuple[int, int]], requests: Sequence[Request], wholes: list[list[int]]
    ) -> list[tuple[tuple[int, int], Score]]:
        import torch

        from plume.model.ragged import PrefixTree

        trees: list[PrefixTree] = []
        for i, n in rows:
            tokens, place = list(wholes[i]), self.before + len(requests[i].context) + n
            tokens[place] = self.mask
            trees.append(PrefixTree())
            trees[-1].add(i, tokens, 0, slice(place, place + 1))
        targets = [requests[i].target[n] for i, n in rows]
        filtered = [requests[i].filtered and n == 0 for i, n in rows]
        with torch.inference_mode():
            whole = self.likelihoods.read(self.model.read_ragged(trees), targets, filtered)
        return list(zip(rows, whole.cut([1] * len(rows)), strict=True))

    def fill(self, tokens: Sequence[int]) -> list[int]:
        """The tokens with every mask filled in, the surest one first."""
        return fill_all_masks(self.model, self.tokenizer, tokens)


# ---- batches in threads ------------------------------------------------------------------------------------------


def batch_threads(model: Model) -> int:
    """Batches that are computed at the same time; other devices, and engines, take one after the other."""
    import torch

    own = model.table.device.type == "cpu" and model.body.reads_in_any_thread
    return torch.get_num_threads() if own else 1


def in_threads(work: Callable[[B], Sequence[R]], batches: Sequence[B], threads: int) -> Iterator[R]:
    """The results of each batch, in order. One batch for each thread scales better than all threads on one."""
    if threads == 1 or len(batches) < 2 * threads:
        for batch in batches:
            yield from work(batch)
        return
    import torch

    own = torch.get_num_threads()  # a thread takes the common number when it first asks, and then keeps it
    ready, waiting = Barrier(threads + 1), deque[Future[Sequence[R]]]()
    pool = ThreadPoolExecutor(threads, initializer=compute_alone, initargs=(ready,))
    try:
        waiting += [pool.submit(work, batch) for batch in batches[:threads]]
        ready.wait()
        torch.set_num_threads(own)  # for threads that begin later
        for batch in batches[threads:]:
            waiting.append(pool.submit(work, batch))
            if len(waiting) > 2 * threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def compute_alone(ready: Barrier) -> None:
    """Operations that this thread calls use no other thread."""
    import torch

    torch.get_num_threads()
    torch.set_num_threads(1)
    ready.wait()


# ---- text to requests, scores to text ----------------------------------------------------------------------------


def pair(context: str, continuation: str, tokenizer: Tokenizer, boundary: Boundary) -> tuple[list[int], list[int]]:
    """Two texts as tokens, encoded together and cut, or each for itself. Spaces at the context's end go with the
    continuation."""
    bare = context.rstrip()
    continuation = context[len(bare) :] + continuation
    if not bare:
        return [], tokenizer.encode(continuation)
    if boundary == "separate":
        return tokenizer.encode(bare), tokenizer.encode(continuation)
    before = tokenizer.encode(bare)
    after = tokenizer.encode(bare + continuation)[len(before) :]
    return before, after if after else tokenizer.encode(continuation)  # merged into the context without a trace


def windows(
    tokens: Sequence[int], scorer: Scorer, stride: int | None = None, *, given: Sequence[int] = ()
) -> Iterator[Request]:
    """A long text in steps of `stride` tokens, each token scored once and with as much before it as fits.

    Unset, the stride is the whole context: only a window's first token then has nothing but its predecessor. The last
    window reaches back as far as it can. Where a causal model has no token to start from, the first is not scored.
    Tokens that are `given` come before the text and are not scored.
    """
    size = scorer.room - 1 if scorer.causal else scorer.room
    step = size if stride is None else stride
    if not 1 <= step <= size:
        raise UserError(f"stride={step} must lie between 1 and {size}, for example {max(1, size // 2)}")
    sequence = (*scorer.start, *given, *tokens)
    done = len(scorer.start) + len(given)
    done = max(done, 1) if scorer.causal else done
    while done < len(sequence):
        end = min(scorer.room if done < scorer.room else done + step, len(sequence))
        begin = max(0, end - scorer.room)
        yield Request(sequence[begin:done], sequence[done:end])
        done = end


@dataclass(frozen=True)
class TokenScore:
    """One token of a text under the model."""

    id: int
    text: str
    logprob: float
    rank: int  # 0 for the likeliest
    entropy: float  # of the whole distribution at this place, in nats


@dataclass(frozen=True, repr=False)
class TextScore:
    """How likely a text is, token by token."""

    tokens: tuple[TokenScore, ...]

    @property
    def logprob(self) -> float:
        return sum(token.logprob for token in self.tokens)

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.logprob / len(self.tokens)))

    def __repr__(self) -> str:
        return f"TextScore(perplexity={self.perplexity:.4g}, logprob={self.logprob:.4g}, tokens={len(self.tokens)})"

    def __str__(self) -> str:
        rows = [f"{t.logprob:9.3f}  rank {t.rank:<6} {t.text!r}" for t in self.tokens]
        return "\n".join([*rows, f"perplexity {self.perplexity:.2f}, {len(self.tokens)} tokens"])

    def _repr_html_(self) -> str:
        """The text coloured by rank, as in the Explorer's Surprise."""
        about = ((t.text, t.rank, f"p = {np.exp(t.logprob):.3%}, rank {t.rank + 1}") for t in self.tokens)
        return f"{drawings.ranked(about)}<p>perplexity {self.perplexity:.2f}, {len(self.tokens)} tokens</p>"


def score_tokens(
    scorer: Scorer, tokens: Sequence[int], *, given: Sequence[int] = (), stride: int | None = None
) -> Score:
    """The scores of a text's tokens, read in windows; the first of a text without a start token has none."""
    requests, parts = windows(tokens, scorer, stride, given=given), list[Score]()
    while some := list(islice(requests, WINDOWS_AT_ONCE)):
        found = dict(scorer.score(some))
        parts += [found[number] for number in range(len(some))]
    if not parts:
        raise UserError("there is nothing to score: this tokenizer has no start token, so two tokens are needed")
    return joined(parts)


def score_text(
    scorer: Scorer, tokens: Sequence[int], *, given: Sequence[int] = (), stride: int | None = None
) -> TextScore:
    """A text's tokens with their scores; the scorer must give details."""
    found = score_tokens(scorer, tokens, given=given, stride=stride)
    assert found.ranks is not None and found.entropies is not None, "a scorer with details"
    columns = (tokens[-len(found.logprobs) :], found.logprobs.tolist(), found.ranks.tolist(), found.entropies.tolist())
    return TextScore(
        tuple(
            TokenScore(token, token_text(scorer.tokenizer, token), logprob, rank, entropy)
            for token, logprob, rank, entropy in zip(*columns, strict=True)
        )
    )
