"""Sampling as machine code: the rows of a step in any order on any threads, each in few passes over its scores."""

# V vocabulary. A token's key is the distance of its score from the highest. What a truncation keeps is a `Cut`: keys
# below it, and equal ones up to an id. No row is sorted or copied together; groups of tokens that a cut leaves nothing
# of are skipped. Long loops run over parts of arrays from 0 on: an index that might be negative, for all the compiler
# knows, makes it gather numbers one by one.

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from plume.inference.cpu import lanes
from plume.inference.cpu.arithmetic import S40, exp, exp_bound, gumbel, mixed
from plume.inference.cpu.lanes import compiled, entry, larger

BUCKETS = 1024
WIDEST = np.float32(32)  # keys from here on share the last bucket: together they have next to no probability
GROUPED = 64  # tokens of which the likeliest stands for all
BLOCK = 512  # tokens whose noise is bounded together
FEW = 512  # candidates that are sorted at once
LOWEST, NOTHING, ALL = np.float32(-3.4e38), np.float32(-1), np.float32(np.inf)
NONE = np.int64(-1)  # an id before all
EXCLUDED = np.float32(1e9)  # in an order of candidates
USUAL, OPENAI = 0, 1
BEST = 128  # groups that are put in order at once
MOST = 32  # tokens whose log-probabilities a row can be asked for

Request = np.dtype(  # what one row is to become; addresses are in bytes, 0 switches a rule off
    [
        ("logits", np.int64),
        ("scores", np.int64),  # of logits after bans and biases; the same where there are none
        ("vocab", np.int64),
        ("history", np.int64),  # the tokens before, 64 bits each
        ("length", np.int64),
        ("prompt_length", np.int64),
        ("key", np.uint64),  # of the noise
        ("top_k", np.int64),
        ("rule", np.int64),  # of top-p
        ("logprobs", np.int64),  # -1: none, also not of the token itself
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("typical_p", np.float64),
        ("repetition", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("token", np.int64),  # the answer
        ("normaliser", np.float64),  # what a logit's log-probability is less than it
        ("top", np.int64, (MOST,)),  # the ids of the highest logits
    ]
)


class Cut(NamedTuple):
    """What is kept: keys below `key`, and those equal to it of ids up to `last`."""

    key: Any
    last: Any


class Work(NamedTuple):
    """Working memory of one thread: addresses."""

    scores: int  # (V,) after penalties
    keys: int  # (V,)
    masses: int  # (V,) probability relative to the likeliest
    order: int  # (V,) keys by which typical sampling keeps
    near_keys: int  # (V,)
    tops: int  # the highest score of each group
    bounds: int  # (BLOCK,)
    best: int  # (BEST,)
    near: int  # (V,) ids of candidates
    buckets: int  # (V,)
    counts: int  # (V,) zeros between rows
    parts: int  # (BLOCK,)
    hashes: int  # (V,) of the ids, 64 bits each
    sums: int  # (BUCKETS,) of double precision


@compiled
def floats(address: int, n: int) -> Any:
    return carray(lanes.floats_at(address), (n,))


@compiled
def ints(address: int, n: int) -> Any:
    return carray(lanes.ints_at(address), (n,))


@compiled
def group_tops(scores: Any, n: int, work: Work) -> Any:
    """The highest score of each group of neighbours, and of all."""
    highest, groups = LOWEST, (n + GROUPED - 1) // GROUPED
    tops = floats(work.tops, groups)
    for g in range(groups):
        top, group = LOWEST, scores[g * GROUPED : (g + 1) * GROUPED]
        for i in range(group.size):
            top = larger(top, group[i])
        tops[g] = top
        highest = larger(highest, top)
    return highest


@compiled
def likeliest(scores: Any, n: int, work: Work, highest: Any) -> int:
    """The first token with the highest score."""
    tops = floats(work.tops, (n + GROUPED - 1) // GROUPED)
    for g in range((n + GROUPED - 1) // GROUPED):
        if tops[g] == highest:
            for i in range(g * GROUPED, min(n, (g + 1) * GROUPED)):
                if scores[i] == highest:
                    return i
    return 0


@compiled
def penalise(request: Any, work: Work) -> None:
    """Penalties of the tokens before, on a copy of the scores (see sampler.penalised)."""
    n = request.vocab
    scores, counts, given = floats(work.scores, n), ints(work.counts, n), floats(request.scores, n)
    for i in range(n):
        scores[i] = given[i]
    history = carray(lanes.longs_at(request.history), (request.length,))
    repetition = np.float32(request.repetition)
    for i in range(request.length):
        token = history[i]
        if counts[token] == 0 and request.repetition != 1:
            old = scores[token]
            scores[token] = old / repetition if old > 0 else old * repetition
        counts[token] = 1
    for i in range(request.length):
        counts[history[i]] = 0
    for i in range(request.prompt_length, request.length):
        counts[history[i]] += 1
    for i in range(request.prompt_length, request.length):
        token = history[i]
        if counts[token] > 0:
            scores[token] -= np.float32(request.presence + request.frequency * counts[token])
            counts[token] = 0


@compiled
def nearest_keys(work: Work, n: int, widest: Any, highest: Any, scale: Any) -> int:
    """Note the candidates with keys up to this; returns how many. Groups whose best one is farther are skipped."""
    found, groups = 0, (n + GROUPED - 1) // GROUPED
    tops, near, near_keys = floats(work.tops, groups), ints(work.near, n), floats(work.near_keys, n)
    for g in range(groups):
        if highest / scale - tops[g] / scale > widest:
            continue
        keys = floats(work.keys, n)[g * GROUPED : (g + 1) * GROUPED]
        for i in range(keys.size):
            near[found], near_keys[found] = g * GROUPED + i, keys[i]  # overwritten by the next one unless it is near
            found += int(keys[i] <= widest)
    return found


@compiled
def bucket_of_target(work: Work, n: int, target: float, rule: int, masses: Any) -> tuple[int, float]:
    """Candidates by their keys in buckets; those of the bucket in which masses reach the target are noted alone.
    Returns how many they are, and the masses of the buckets before."""
    near, keys, buckets = ints(work.near, n), floats(work.near_keys, n), ints(work.buckets, n)
    sums, widest = carray(lanes.doubles_at(work.sums), (BUCKETS,)), np.float32(0)
    for i in range(n):
        widest = larger(widest, min(keys[i], WIDEST))
    scale = np.float32(BUCKETS - 1) / larger(widest, np.float32(1e-6))
    for i in range(n):
        buckets[i] = np.int32(min(keys[i], widest) * scale)
    for b in range(BUCKETS):
        sums[b] = 0.0
    for i in range(n):
        sums[buckets[i]] += masses[near[i]]
    total, last, farthest = 0.0, 0, int(np.int32(widest * scale))
    while last < farthest and (total + sums[last] < target if rule == USUAL else total + sums[last] <= target):
        total += sums[last]
        last += 1
    found = 0
    for i in range(n):
        near[found], keys[found] = near[i], keys[i]
        found += int(buckets[i] == last)
    return found, total


@compiled
def cut_near(work: Work, n: int, target: float, rule: int, masses: Any) -> Cut:
    """Keep the noted candidates with the smallest keys until their masses reach the target, equal keys by id."""
    total, cut = 0.0, Cut(NOTHING, NONE)
    if n > FEW:
        n, total = bucket_of_target(work, n, target, rule, masses)
    near, keys = ints(work.near, n), floats(work.near_keys, n)
    order = np.argsort(keys, kind="mergesort")
    if total > 0:  # whatever is kept of this bucket, those before it are
        cut = Cut(keys[order[0]], NONE)
    for j in order:
        mass = float(masses[near[j]])
        if (total >= target) if rule == USUAL else (total + mass > target):
            break
        total += mass
        cut = Cut(keys[j], np.int64(near[j]))
    return cut


@compiled
def kth_top(work: Work, groups: int, k: int) -> Any:
    """The k-th highest of the groups' tops; nothing where that takes longer than doing without it."""
    if k > min(groups, BEST):
        return np.float32(-np.inf)
    tops, best, found = floats(work.tops, groups), floats(work.best, BEST), 0
    for g in range(groups):
        if found == k and tops[g] <= best[k - 1]:
            continue
        found = min(found + 1, k)
        i = found - 1
        while i > 0 and best[i - 1] < tops[g]:
            best[i] = best[i - 1]
            i -= 1
        best[i] = tops[g]
    return best[k - 1]


@compiled
def kept(cut: Cut, key: Any, token: int) -> bool:
    return bool(key < cut.key or (key == cut.key and token <= cut.last))


@compiled
def weigh(work: Work, n: int, cut: Cut) -> float:
    """Each candidate's probability relative to the likeliest, 0 for others, and their sum."""
    keys, masses, total = floats(work.keys, n), floats(work.masses, n), 0.0
    for i in range(n):
        masses[i] = exp(-keys[i])
    if cut.key < ALL:
        for i in range(n):
            masses[i] = masses[i] if kept(cut, keys[i], i) else np.float32(0)
    for i in range(n):
        total += masses[i]
    return total


@compiled
def cut_top_k(work: Work, n: int, k: int, highest: Any, scale: Any) -> Cut:
    """The k highest. At least k candidates are as near as the k-th nearest group's best one."""
    masses = floats(work.masses, n)
    for i in range(n):
        masses[i] = np.float32(1)
    widest = highest / scale - kth_top(work, (n + GROUPED - 1) // GROUPED, k) / scale
    near = nearest_keys(work, n, widest, highest, scale)
    return cut_near(work, near, float(k), USUAL, masses)


@compiled
def cut_top_p(work: Work, n: int, request: Any, cut: Cut, highest: Any, total: float) -> Cut:
    """The likeliest until p, where a rule after it has to know them all."""
    near = nearest_keys(work, n, cut.key, highest, np.float32(request.temperature))
    found = cut_near(work, near, request.top_p * total, request.rule, floats(work.masses, n))
    if found.key < cut.key:
        return found
    return Cut(cut.key, min(cut.last, found.last)) if found.key == cut.key else cut


@compiled
def order_by_typicality(work: Work, n: int, cut: Cut) -> tuple[int, float]:
    """`order` becomes how far each candidate's surprise is from the expected one; returns the nearest candidate, and
    the sum of their masses."""
    total, entropy, nearest = weigh(work, n, cut), 0.0, 0
    keys, masses, order = floats(work.keys, n), floats(work.masses, n), floats(work.order, n)
    log_total = math.log(total)
    for i in range(n):
        entropy += masses[i] / total * (keys[i] + log_total) if masses[i] > 0 else 0.0
    for i in range(n):
        distance = np.float32(abs(keys[i] + log_total - entropy))
        order[i] = distance if masses[i] > 0 else EXCLUDED
    for i in range(n):
        nearest = i if order[i] < order[nearest] else nearest
    return nearest, total


@compiled
def mass_before(order: Any, masses: Any, token: int) -> float:
    """Of the candidates before this one: smaller in order, or equal with a smaller id."""
    total, own = 0.0, order[token]
    for start in range(0, order.size, BLOCK):
        part, rank, mass = np.float32(0), order[start : start + BLOCK], masses[start : start + BLOCK]
        for i in range(rank.size):
            part += mass[i] if rank[i] < own else np.float32(0)
        total += float(part)
    equal, rank = np.float32(0), order[:token]
    for i in range(rank.size):
        equal += masses[i] if rank[i] == own else np.float32(0)
    return total + float(equal)


@compiled
def draw_until(
    work: Work, n: int, order: Any, by_key: bool, cut: Cut, first: int, request: Any, highest: Any, target: float,
    rule: int,
) -> int:  # fmt: skip
    """A draw from the first candidates of an order, as many as reach a mass. Nobody has to know which they are: who
    wins among all wins among those too, if it is one of them, and otherwise they are all before it."""
    masses, scale = floats(work.masses, n), np.float32(request.temperature)
    while True:
        token = draw(work, n, order, by_key, cut, first, request.key, highest, scale)
        before = mass_before(order, masses, token)
        if token == first or (before < target if rule == USUAL else before + masses[token] <= target):
            return token
        cut = Cut(order[token], np.int64(token - 1))


@compiled
def draw(work: Work, n: int, order: Any, by_key: bool, cut: Cut, first: int, key: Any, highest: Any, scale: Any) -> int:
    """The kept candidate with the largest score plus noise.

    One can only win if the first bits of its uniform number reach a bound, which needs no logarithm, so that few
    logarithms are computed.
    """
    keys, parts, bounds = floats(work.keys, n), ints(work.parts, BLOCK), floats(work.bounds, BLOCK)
    tops, hashes = floats(work.tops, (n + GROUPED - 1) // GROUPED), carray(lanes.longs_at(work.hashes), (n,))
    found, best = first, gumbel(key, first) - np.float64(keys[first])
    for start in range(0, n, BLOCK):
        count, limit, top = min(BLOCK, n - start), np.float32(best), LOWEST
        near, rank, mixes = keys[start : start + count], order[start : start + count], hashes[start : start + count]
        for g in range(start // GROUPED, (start + count + GROUPED - 1) // GROUPED):
            top = larger(top, tops[g])
        if by_key and highest / scale - top / scale > cut.key:
            continue
        for i in range(count):
            parts[i] = np.int32(mixed(key ^ np.uint64(mixes[i])) >> S40)  # the first 24 of 64 bits
        for i in range(count):
            below_one = np.float32(np.int32(0xFFFFFF) - parts[i]) * np.float32(2.0**-24)  # at most 1 - uniform
            reach = exp_bound(-near[i] - limit) - below_one
            bounds[i] = reach if rank[i] <= cut.key else NOTHING
        most = NOTHING
        for i in range(count):
            most = larger(most, bounds[i])
        if most < 0:
            continue
        for i in range(count):
            if bounds[i] >= 0 and kept(cut, rank[i], start + i):
                value = gumbel(key, start + i) - np.float64(near[i])
                if value > best:
                    found, best = start + i, value
    return found


@compiled
def sample(request: Any, scores: Any, work: Work, highest: Any) -> tuple[int, float]:
    """One token of a row of scores, after top-k, top-p, min-p and typical in this order; and the sum of all masses,
    or 0 where it was not needed."""
    n, scale = request.vocab, np.float32(request.temperature)
    keys, first, whole = floats(work.keys, n), likeliest(scores, n, work, highest), 0.0
    if scale == np.float32(1):
        for i in range(n):
            keys[i] = highest - scores[i]
    else:
        for i in range(n):
            keys[i] = highest / scale - scores[i] / scale
    cut = Cut(ALL, n)
    if 0 < request.top_k < n:
        cut = cut_top_k(work, n, request.top_k, highest, scale)
    if request.top_p > 0:
        whole = weigh(work, n, cut)
    if request.top_p > 0 and request.typical_p > 0:
        cut = cut_top_p(work, n, request, cut, highest, whole)
        if cut.key < 0:  # the likeliest alone passes p, and OpenAI's rule keeps it nevertheless
            cut = Cut(np.float32(0), first)
    if request.min_p > 0:
        widest = -np.float32(math.log(request.min_p))
        cut = Cut(widest, n) if widest < cut.key else cut
    if request.typical_p > 0:
        nearest, total = order_by_typicality(work, n, cut)
        order, cut, target = floats(work.order, n), Cut(EXCLUDED, NONE), request.typical_p * total
        return draw_until(work, n, order, False, cut, nearest, request, highest, target, USUAL), 0.0
    if request.top_p > 0:
        target = request.top_p * whole
        token = draw_until(work, n, keys, True, cut, first, request, highest, target, request.rule)
    else:
        token = draw(work, n, keys, True, cut, first, request.key, highest, scale)
    return token, 0.0 if 0 < request.top_k < n else whole


@compiled
def note_top(request: Any, logits: Any, work: Work, k: int) -> None:
    """The ids of the k highest logits, highest first, equal ones by id; `tops` are of these logits."""
    n = request.vocab
    groups, found = (n + GROUPED - 1) // GROUPED, 0
    tops, near, keys, bound = floats(work.tops, groups), ints(work.near, n), floats(work.near_keys, n), LOWEST
    if k <= groups:
        bound = kth_top(work, groups, k)
    for g in range(groups):
        for i in range(g * GROUPED, min(n, (g + 1) * GROUPED) if tops[g] >= bound else 0):
            if logits[i] >= bound:
                near[found], keys[found] = i, -logits[i]
                found += 1
    order = np.argsort(floats(work.near_keys, found), kind="mergesort")
    for j in range(min(k, found)):
        request.top[j] = near[order[j]]


@compiled
def log_sum_exp(scores: Any, n: int, highest: Any) -> float:
    total = 0.0
    for start in range(0, n, BLOCK):  # so few that single precision adds them exactly enough
        part, few = np.float32(0), scores[start : start + BLOCK]
        for i in range(few.size):
            part += exp(few[i] - highest)
        total += float(part)
    return float(highest) + math.log(total)


@compiled
def answer(request: Any, work: Work) -> None:
    """One row: its token, and log-probabilities where they are wanted."""
    n, total = request.vocab, 0.0
    logits, scores, same = floats(request.logits, n), floats(request.scores, n), request.scores == request.logits
    if request.length > 0:
        penalise(request, work)
        scores, same = floats(work.scores, n), False
    highest = group_tops(scores, n, work)
    if request.temperature == 0:
        request.token = likeliest(scores, n, work, highest)
    else:
        request.token, total = sample(request, scores, work, highest)
    if request.logprobs < 0:
        return
    if not same:
        highest = group_tops(logits, n, work)
    if same and total > 0 and request.temperature == 1:
        request.normaliser = float(highest) + math.log(total)
    else:
        request.normaliser = log_sum_exp(logits, n, highest)
    if request.logprobs > 0:
        note_top(request, logits, work, request.logprobs)


@entry
def answer_all(requests: Any, count: int, counter: int, work: Work) -> None:
    """Rows until none is left, whichever thread comes first; `counter` is the address of how many were taken."""
    row = lanes.atomic_add(counter, 1)
    while row < count:
        answer(requests[row], work)
        row = lanes.atomic_add(counter, 1)


@entry
def hash_ids(hashes: Any) -> None:
    for i in range(hashes.size):
        hashes[i] = mixed(np.uint64(i))


class Workspace:
    """The working memory of some threads, for rows of up to so many scores."""

    def __init__(self, vocab: int, threads: int = 1) -> None:
        hashes = np.empty(vocab, np.uint64)
        hash_ids(hashes)
        rows = [vocab] * 5 + [-(-vocab // GROUPED), BLOCK, BEST] + [vocab] * 3 + [BLOCK]  # of 32 bits each
        starts = np.cumsum([0, *rows])
        self._memory = [np.zeros(starts[-1], np.float32) for _ in range(threads)]
        self._sums = np.empty((threads, BUCKETS))
        self._hashes, self.vocab = hashes, vocab
        self.works = [
            Work._make(
                (*(memory.ctypes.data + 4 * int(at) for at in starts[:-1]), hashes.ctypes.data, sums.ctypes.data)
            )
            for memory, sums in zip(self._memory, self._sums, strict=True)
        ]


class Scratch(threading.local):
    """The working memory of a thread that has no engine's."""

    held = Workspace(1)

    def work(self, vocab: int) -> Work:
        if vocab > self.held.vocab:
            self.held = Workspace(vocab)
        return self.held.works[0]


SCRATCH = Scratch()


def answer_here(requests: Any) -> None:
    """Answer requests on the calling thread."""
    counter = np.zeros(1, np.int64)
    answer_all(requests, len(requests), counter.ctypes.data, SCRATCH.work(requests["vocab"].max(initial=1)))
