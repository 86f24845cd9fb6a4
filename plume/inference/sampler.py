"""Sampling: options by name, and from logits to a token by penalties, truncations and the draw."""

# V vocabulary, C candidates, highest score first

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypedDict

import numpy as np

from plume.config import Overflow, SamplingConfig, Speculation, TopPRule, UserError, advice, build
from plume.config.fields import refuse
from plume.config.recipes import wrong_choices
from plume.model.likelihood import Floats, log_softmax

Ids = np.ndarray[Any, np.dtype[np.int64]]
BLOCK = 64
WORD = (1 << 64) - 1


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingConfig, so that an editor and a type checker know them; a test keeps the two alike."""

    max_new_tokens: int | None
    min_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    top_p_rule: TopPRule
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    logit_bias: dict[int, float]
    stop: str | Sequence[str] | None
    stop_tokens: int | Sequence[int] | None
    ignore_eos: bool
    n: int
    best_of: int | None
    beams: int
    length_penalty: float
    seed: int | None
    logprobs: int | None
    overflow: Overflow
    token_healing: bool
    speculate: Speculation
    speculate_tokens: int


def with_options(config: SamplingConfig | None, options: SamplingOptions) -> SamplingConfig:
    """A config with options laid over it; unknown names are refused with Plume's names for them."""
    known = {f.name for f in fields(SamplingConfig)}
    given: dict[str, Any] = {**options}
    if unknown := [name for name in given if name not in known]:
        raise UserError("; ".join(f"there is no option {name!r}{advice(SamplingConfig, name)}" for name in unknown))
    base = SamplingConfig() if config is None else config
    try:
        for name, alone in (("stop", str), ("stop_tokens", int)):
            if name in given:
                value = () if given[name] is None else given[name]
                given[name] = (value,) if isinstance(value, alone) else tuple(value)
        found = replace(base, **given)
    except TypeError:  # a value of another type, which this names
        return build(SamplingConfig, {f.name: getattr(base, f.name) for f in fields(base)} | given)
    refuse(wrong_choices(found))
    return found


def largest(scores: Floats, k: int) -> Ids:
    """The ids of the k highest scores, highest first, equal ones by id. No sort of the whole: the k-th highest
    of the blocks' own maxima is a bound that few scores reach."""
    blocks = len(scores) // BLOCK
    if k < blocks:
        tops = scores[: blocks * BLOCK].reshape(blocks, BLOCK).max(axis=1)
        bound = np.partition(tops, blocks - k)[blocks - k]
        near = np.flatnonzero(scores >= bound)
    else:
        near = np.arange(len(scores))
    return near[np.argsort(-scores[near], kind="stable")[:k]]


def penalised(
    scores: Floats, config: SamplingConfig, tokens: Sequence[int], prompt_length: int, ends: Collection[int]
) -> Floats:
    """The scores after penalties, bias and bans; the given array itself when there are none."""
    written = tokens[prompt_length:]
    too_short = len(written) < config.min_new_tokens
    counting = config.presence_penalty != 0 or config.frequency_penalty != 0
    if not (
        config.repetition_penalty != 1
        or counting
        or config.no_repeat_ngram
        or config.logit_bias
        or (too_short and ends)
    ):
        return scores
    scores = scores.copy()
    if config.repetition_penalty != 1 and len(tokens):
        seen = np.unique(tokens)
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / config.repetition_penalty, old * config.repetition_penalty)
    if counting and len(written):
        ids, counts = np.unique(written, return_counts=True)
        scores[ids] -= (config.presence_penalty + config.frequency_penalty * counts).astype(np.float32)
    for token, bias in config.logit_bias.items():
        scores[token] += np.float32(bias)
    if config.no_repeat_ngram:
        scores[list(_would_repeat(tokens, config.no_repeat_ngram))] = -np.inf
    if too_short and ends:
        scores[list(ends)] = -np.inf
    return scores


def _would_repeat(tokens: Sequence[int], n: int) -> set[int]:
    """Tokens that would end a sequence of n tokens which has been there before."""
    if len(tokens) < n:
        return set()
    tail = tuple(tokens[len(tokens) - n + 1 :])
    return {tokens[i + n - 1] for i in range(len(tokens) - n + 1) if tuple(tokens[i : i + n - 1]) == tail}


def candidates(scores: Floats, config: SamplingConfig) -> tuple[Ids, Floats]:
    """The tokens that may be drawn and their log-probabilities: temperature, then top-k, top-p, min-p, typical."""
    if config.temperature == 0:
        return np.array([np.argmax(scores)]), np.zeros(1, np.float32)
    scaled = scores if config.temperature == 1 else scores / np.float32(config.temperature)
    truncated = (config.top_k, config.top_p, config.min_p, config.typical_p) != (None, None, None, None)
    if not truncated:
        return np.arange(len(scaled)), log_softmax(scaled)
    ids = largest(scaled, len(scaled) if config.top_k is None else min(config.top_k, len(scaled)))
    logprobs = log_softmax(scaled[ids])
    if config.top_p is not None:
        ids, logprobs = top_p(ids, logprobs, config.top_p, config.top_p_rule)
    if config.min_p is not None:
        keep = logprobs >= logprobs[0] + np.log(np.float32(config.min_p))
        ids, logprobs = ids[keep], log_softmax(logprobs[keep])
    if config.typical_p is not None:
        ids, logprobs = typical(ids, logprobs, config.typical_p)
    return ids, logprobs


def top_p(ids: Ids, logprobs: Floats, p: float, rule: str) -> tuple[Ids, Floats]:
    """The usual rule keeps tokens until p is reached; OpenAI's keeps those that do not pass it, at least one."""
    total = np.cumsum(np.exp(logprobs.astype(np.float64)))
    count = int(np.sum(total < p)) + 1 if rule == "usual" else max(1, int(np.sum(total <= p)))
    return ids[:count], log_softmax(logprobs[:count])


def typical(ids: Ids, logprobs: Floats, p: float) -> tuple[Ids, Floats]:
    """Tokens in the order of how near their surprise is to the expected one, until p is reached."""
    likely = np.where(np.isneginf(logprobs), 0, logprobs)
    expected = -np.sum(np.exp(logprobs) * likely)
    order = np.argsort(np.abs(-likely - expected) + np.isneginf(logprobs) * 1e9, kind="stable")
    total = np.cumsum(np.exp(logprobs[order].astype(np.float64)))
    kept = np.sort(order[: int(np.sum(total < p)) + 1])  # back to highest first
    return ids[kept], log_softmax(logprobs[kept])


def _mixed(x: Any) -> Any:
    """64 bits to 64 bits, each output bit depending on all input bits (splitmix64's finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def noise_key(seed: int, sample: int, position: int) -> int:
    """What the noise of one draw depends on, beside the token."""
    key = seed & WORD
    for part in (seed >> 64, sample, position):
        key = int(_mixed(key ^ _mixed(part & WORD)))
    return key


def noise(seed: int, sample: int, position: int, ids: Ids) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Gumbel noise for each token, a pure function of its arguments: batches and guesses change nothing."""
    key = noise_key(seed, sample, position)
    bits = _mixed(key ^ _mixed(ids.astype(np.uint64)))
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52  # never 0, never 1
    gumbel: np.ndarray[Any, np.dtype[np.float64]] = -np.log(-np.log(uniform))
    return gumbel


def draw(ids: Ids, logprobs: Floats, seed: int, sample: int, position: int) -> int:
    """One token, with the candidates' probabilities (the highest of log-probability plus Gumbel noise)."""
    if len(ids) == 1:
        return int(ids[0])
    return int(ids[np.argmax(logprobs + noise(seed, sample, position, ids))])


# ---- the rows of a step, as machine code where there is numba ------------------------------------------------------

Picked = tuple[int, float | None, tuple[tuple[int, float], ...]]  # a token, its log-probability, the likeliest ones
Run = Callable[[Any], None]  # answers requests, see cpu/sampling.py
WORDS = "q"  # 64 bits each, as compiled code reads them


@dataclass(frozen=True)
class Row:
    """Logits (V,) that a token is to be chosen from, and all that the choice depends on."""

    logits: Floats
    config: SamplingConfig
    seed: int
    sample: int
    position: int
    tokens: Sequence[int] = ()  # those before; an array of WORDS spares a copy
    prompt_length: int = 0
    ends: Collection[int] = ()
    scores: Floats | None = None  # instead of what penalties would make of the logits

    @property
    def penalised(self) -> Floats:
        if self.scores is not None:
            return self.scores
        return penalised(self.logits, self.config, self.tokens, self.prompt_length, self.ends)

    @property
    def edited(self) -> Floats:
        """The scores before the penalties that compiled code applies; with bias or bans they come too late for it."""
        c = self.config
        too_short = bool(self.ends) and len(self.tokens) - self.prompt_length < c.min_new_tokens
        ready = self.scores is not None or c.no_repeat_ngram or c.logit_bias or too_short
        return self.penalised if ready else self.logits

    @property
    def with_logprobs(self) -> bool:
        return self.config.logprobs is not None or self.config.best_of is not None

    @property
    def wanted(self) -> int:
        """How many alternatives are to be returned."""
        return 0 if self.config.logprobs is None else min(self.config.logprobs, len(self.logits))


@cache
def _compiled() -> Any:
    """The compiled sampler; None without numba."""
    try:
        from plume.inference.cpu import lanes, sampling
    except ImportError:
        return None
    with lanes.announced_compilation("sampler"):
        sampling.answer_here(np.zeros(0, sampling.Request))
    return sampling


def choose_rows(rows: Sequence[Row], run: Run | None = None) -> list[Picked]:
    """A token for each row, as `candidates` and `draw` define it; `run` shares the rows among an engine's threads."""
    if (code := _compiled()) is None:
        return [_picked(row, choose_plainly(row.penalised, row)) for row in rows]
    requests = np.empty(len(rows), code.Request)
    held = [_fill(requests, i, row, code) for i, row in enumerate(rows)]  # memory that the requests point to
    (code.answer_here if run is None else run)(requests)
    del held
    tokens, totals, tops = requests["token"].tolist(), requests["normaliser"].tolist(), requests["top"]
    return [_picked(row, tokens[i], totals[i], tops[i]) for i, row in enumerate(rows)]


def _fill(requests: Any, i: int, row: Row, code: Any) -> tuple[Any, ...]:
    """Write one request; returns what must live until it is answered."""
    c, scores = row.config, row.edited
    counted = c.repetition_penalty != 1 or c.presence_penalty != 0 or c.frequency_penalty != 0
    history = array(WORDS)
    if counted and scores is row.logits and len(row.tokens):
        history = row.tokens if isinstance(row.tokens, array) else array(WORDS, row.tokens)
    own = row.logits.__array_interface__["data"][0]
    rules = (0.0 if p is None else p for p in (c.top_p, c.min_p, c.typical_p))
    requests[i] = (
        own, own if scores is row.logits else scores.__array_interface__["data"][0], len(scores),
        history.buffer_info()[0], len(history), row.prompt_length, noise_key(row.seed, row.sample, row.position),
        0 if c.top_k is None else c.top_k, code.USUAL if c.top_p_rule == "usual" else code.OPENAI,
        min(row.wanted, code.MOST) if row.with_logprobs else -1, c.temperature, *rules, c.repetition_penalty,
        c.presence_penalty, c.frequency_penalty, 0, 0.0, 0,
    )  # fmt: skip
    return scores, history


def _picked(row: Row, token: int, total: float | None = None, top: Ids | None = None) -> Picked:
    """A token with its log-probabilities, where they are wanted."""
    if not row.with_logprobs:
        return token, None, ()
    total = log_normaliser(row.logits) if total is None else total
    if row.wanted == 0:
        return token, float(row.logits[token]) - total, ()
    if top is None or row.wanted > len(top):
        top = largest(row.logits, row.wanted)
    best = tuple((int(i), float(row.logits[i]) - total) for i in top[: row.wanted])
    return token, float(row.logits[token]) - total, best


def choose_plainly(scores: Floats, row: Row) -> int:
    """The definition."""
    return draw(*candidates(scores, row.config), row.seed, row.sample, row.position)


def choose(scores: Floats, config: SamplingConfig, seed: int, sample: int, position: int) -> int:
    """One token of scores that are penalised already."""
    ((token, _, _),) = choose_rows([Row(scores, config, seed, sample, position, scores=scores)])
    return token


def log_normaliser(logits: Floats) -> float:
    """What a logit's log-probability is less than it."""
    highest = float(logits.max())
    return highest + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
