"""Sampling as machine code: truncations by buckets instead of sorts, and a draw that computes few of its logarithms."""

# V vocabulary, N candidates. A candidate's key says how early it is kept: the distance of its score from the highest.

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from plume.inference.cpu.arithmetic import exp
from plume.inference.cpu.lanes import compiled, larger

BUCKETS = 1024
WIDEST = np.float32(32)  # keys from here on share the last bucket: together they have next to no probability
BLOCK = 512  # tokens whose noise is bounded together
GROUPED = 64  # tokens of which the likeliest stands for all in a first bound of top-k
GOLDEN, FIRST, SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
S12, S27, S30, S31, S40 = (np.uint64(n) for n in (12, 27, 30, 31, 40))
UNIT = 2.0**-52
SLACK = np.float32(1.0001)  # more than the rounding of the bound
USUAL, OPENAI = 0, 1


@compiled
def mixed(x: Any) -> Any:
    """64 bits to 64 bits, each output bit depending on all input bits (splitmix64's finaliser)."""
    x = x + GOLDEN
    x = (x ^ (x >> S30)) * FIRST
    x = (x ^ (x >> S27)) * SECOND
    return x ^ (x >> S31)


@compiled
def gumbel(key: Any, token: int) -> float:
    """The noise of one token, as sampler.noise defines it."""
    bits = mixed(key ^ mixed(np.uint64(token)))
    return -math.log(-math.log((np.float64(bits >> S12) + 0.5) * UNIT))


@compiled
def keep_first(ids: Any, keys: Any, masses: Any, n: int, target: float, rule: int, sums: Any) -> int:
    """Keep the candidates with the smallest keys until their masses reach the target; returns how many.

    Those of one bucket are sorted only where the target is reached. Equal keys keep their order.
    """
    widest = np.float32(0)
    for i in range(n):
        widest = larger(widest, min(keys[i], WIDEST))
    scale = np.float32(BUCKETS - 1) / larger(widest, np.float32(1e-6))
    sums[:] = 0.0
    kept, buckets = np.zeros(n, np.bool_), np.empty(n, np.int32)
    for i in range(n):
        buckets[i] = int(min(keys[i], widest) * scale)
    for i in range(n):
        sums[buckets[i]] += masses[i]
    total, last = 0.0, 0
    while last < BUCKETS - 1 and (total + sums[last] < target if rule == USUAL else total + sums[last] <= target):
        total += sums[last]
        last += 1
    places = np.flatnonzero(buckets == last)
    for j in np.argsort(keys[places], kind="mergesort"):
        i = places[j]
        if (total >= target) if rule == USUAL else (total + masses[i] > target):
            break
        total += masses[i]
        kept[i] = True
    found = 0
    for i in range(n):
        if buckets[i] < last or kept[i]:
            ids[found], keys[found], masses[found] = ids[i], keys[i], masses[i]
            found += 1
    return found


@compiled
def weigh(keys: Any, masses: Any, n: int) -> float:
    """Each candidate's probability relative to the likeliest, and their sum."""
    total = 0.0
    for i in range(n):
        masses[i] = exp(-keys[i])
    for i in range(n):
        total += masses[i]
    return total


@compiled
def keep_typical(ids: Any, keys: Any, masses: Any, n: int, p: float, sums: Any) -> int:
    """Keep those whose surprise is nearest to the expected one; the keys become those distances."""
    total = weigh(keys, masses, n)
    log_total, entropy = math.log(total), 0.0
    for i in range(n):
        entropy += masses[i] / total * (keys[i] + log_total) if masses[i] > 0 else 0.0
    for i in range(n):
        keys[i] = np.float32(abs(keys[i] + log_total - entropy)) if masses[i] > 0 else np.float32(1e9)
    return keep_first(ids, keys, masses, n, p * total, USUAL, sums)


@compiled
def keep_near(ids: Any, keys: Any, n: int, widest: Any) -> int:
    """Keep the candidates with keys up to this."""
    left = 0
    for i in range(n):
        if keys[i] <= widest:
            ids[left], keys[left] = ids[i], keys[i]
            left += 1
    return left


@compiled
def kth_bound(keys: Any, n: int, k: int, nearest: Any) -> Any:
    """A key that at least k candidates do not pass: the k-th smallest of the smallest keys of groups."""
    groups = n // GROUPED
    for g in range(groups):
        least = keys[g * GROUPED]
        for i in range(g * GROUPED + 1, (g + 1) * GROUPED):
            least = -larger(-least, -keys[i])
        nearest[g] = least
    return np.partition(nearest[:groups], k - 1)[k - 1]


@compiled
def draw(ids: Any, keys: Any, first: int, n: int, key: Any, hashes: Any, parts: Any, bounds: Any) -> int:
    """The candidate with the largest score plus noise, where keys are the distances to the highest score.

    A token can only win if the first bits of its uniform number reach a bound, which needs no logarithm, so that few
    logarithms are computed.
    """
    found, best = first, gumbel(key, first)
    for start in range(0, n, BLOCK):
        count, limit = min(BLOCK, n - start), np.float32(best)
        for i in range(count):
            parts[i] = np.int32(mixed(key ^ hashes[ids[start + i]]) >> S40)  # the first 24 of 64 bits
        for i in range(count):
            below_one = np.float32(np.int32(0xFFFFFF) - parts[i]) * np.float32(2.0**-24)  # at most 1 - uniform
            bounds[i] = exp(-keys[start + i] - limit) * SLACK - below_one
        for i in range(count):
            if bounds[i] >= 0:
                value = gumbel(key, ids[start + i]) - np.float64(keys[start + i])
                if value > best:
                    found, best = ids[start + i], value
    return found


@compiled
def sample(
    scores: Any, key: Any, top_k: int, top_p: float, rule: int, min_p: float, typical_p: float, ids: Any, keys: Any,
    masses: Any, hashes: Any, sums: Any, parts: Any, bounds: Any,
) -> int:  # fmt: skip
    """One token of a row of scores (V,), after top-k, top-p, min-p and typical in this order; 0 switches one off."""
    n, first, highest = scores.size, 0, np.float32(-3.4e38)
    for i in range(n):
        highest = larger(highest, scores[i])
    while first < n - 1 and scores[first] != highest:
        first += 1
    for i in range(n):
        ids[i] = i
        keys[i] = highest - scores[i]
    if 0 < top_k < n:
        if top_k <= n // GROUPED:
            n = keep_near(ids, keys, n, kth_bound(keys, n, top_k, masses))
        masses[:n] = np.float32(1)
        n = keep_first(ids, keys, masses, n, float(top_k), USUAL, sums)
    if top_p > 0:
        total = weigh(keys, masses, n)
        if top_p < 1:  # tokens behind this key have less than 1 - p together
            n = keep_near(ids, keys, n, np.float32(math.log(n / ((1 - top_p) * total)) + 0.01))
            weigh(keys, masses, n)
        n = keep_first(ids, keys, masses, n, top_p * total, rule, sums)
        if n == 0:  # the likeliest alone passes p, and OpenAI's rule keeps it nevertheless
            ids[0], keys[0], n = first, np.float32(0), 1
    if min_p > 0:
        n = keep_near(ids, keys, n, -np.float32(math.log(min_p)))
    if typical_p > 0:
        n = keep_typical(ids, keys, masses, n, typical_p, sums)
        first = ids[0]
        for i in range(n):
            first = ids[i] if scores[ids[i]] > scores[first] else first
        for i in range(n):
            keys[i] = scores[first] - scores[ids[i]]
    return draw(ids, keys, first, n, key, hashes, parts, bounds)


@compiled
def log_sum_exp(scores: Any) -> float:
    """Of one row of logits (V,)."""
    highest, total = np.float32(-3.4e38), 0.0
    for i in range(scores.size):
        highest = larger(highest, scores[i])
    for i in range(scores.size):
        total += exp(scores[i] - highest)
    return float(highest) + math.log(total)


@compiled
def hash_ids(hashes: Any) -> None:
    for i in range(hashes.size):
        hashes[i] = mixed(np.uint64(i))


class Scratch(threading.local):
    """Working memory of one thread."""

    size = 0

    def arrays(self, size: int) -> tuple[Any, ...]:
        """For a vocabulary: ids, keys, masses, the ids' hashes, sums of buckets, and two blocks of the draw."""
        if size > self.size:
            ids, hashes = np.empty(size, np.int64), np.empty(size, np.uint64)
            keys, masses, bounds = (np.empty(n, np.float32) for n in (size, size, BLOCK))
            hash_ids(hashes)
            self.held = ids, keys, masses, hashes, np.empty(BUCKETS), np.empty(BLOCK, np.int32), bounds
            self.size = size
        return self.held


SCRATCH = Scratch()
