"""The merge loop behind BPE and WordPiece training: join the best pair everywhere, again and again."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba.typed import Dict

Function = TypeVar("Function")
if TYPE_CHECKING:  # numba's decorator has no types

    def compiled(function: Function) -> Function: ...
else:
    compiled = numba.njit(cache=True)

BETWEEN = -1  # the symbol after each word; it pairs with nothing
GONE = -2  # the symbol of a place that was joined to the one before it
NONE = -1  # no pair, or the end of a chain

# One place of the text: its symbol, its neighbours, the pair that starts here, and the chain of that pair's places.
PLACE = np.dtype([("weight", "i8"), *((n, "i4") for n in ("symbol", "after", "before", "pair", "next", "last"))])
# One pair of symbols: its count in the text, its first place, and the chains of pairs with the same part.
PAIR = np.dtype([("count", "i8"), *((n, "i4") for n in ("left", "right", "head", "same_left", "same_right", "_"))])
PAIR_TYPE: Any = numba.from_dtype(PAIR)
SYMBOL = np.dtype([("count", "i8"), ("as_left", "i4"), ("as_right", "i4")])
Records = Any  # an array of these; numba reads their fields as attributes
Int = Any  # numba's integers
CAPACITY = 1 << 16  # pairs to begin with, and places to scan before growing


def learn_merges(
    symbols: npt.NDArray[np.int32],
    weights: npt.NDArray[np.int64],
    *,
    alphabet: int,
    most: int,
    least_count: int,
    likelihood: bool,
) -> npt.NDArray[np.int32]:
    """The merges as (left, right) symbols, in order; the n-th makes the symbol `alphabet + n`.

    `symbols` holds the words one after another, BETWEEN after each, and `weights` how often the word of each place was
    seen. The best pair is the most frequent one, or with `likelihood` the one that is most frequent against the counts
    of its parts; among equals it is the one with the smaller symbols.
    """
    places = np.zeros(len(symbols), PLACE)
    places["weight"], places["symbol"] = weights, symbols
    places["after"], places["before"] = np.arange(1, len(symbols) + 1), np.arange(-1, len(symbols) - 1)
    places["pair"] = NONE
    table = np.zeros(alphabet + most, SYMBOL)
    table["as_left"] = table["as_right"] = NONE
    letters = symbols >= 0
    np.add.at(table["count"], symbols[letters], weights[letters])
    return _learn(places, table, alphabet, most, least_count, likelihood)


@compiled
def _learn(
    places: Records, table: Records, alphabet: Int, most: Int, least_count: Int, likelihood: bool
) -> npt.NDArray[np.int32]:
    numbers = Dict.empty(numba.int64, numba.int64)  # of pairs, by their two symbols
    pairs: Records = np.zeros(2 * CAPACITY, PAIR_TYPE)
    heap: list[tuple[float, Int, Int, Int]] = [(0.0, 0, 0, 0) for _ in range(0)]  # empty, but numba sees what it holds
    merges = np.empty((most, 2), np.int32)
    changed = np.arange(len(places))
    for made in range(most + 1):
        touched = [NONE]
        for start in range(0, len(changed), CAPACITY):
            if len(numbers) + CAPACITY > len(pairs):
                pairs = np.concatenate((pairs, np.zeros(len(pairs), PAIR_TYPE)))
            touched += [_link(places, pairs, table, numbers, place) for place in changed[start : start + CAPACITY]]
        if likelihood and made > 0:
            for part in merges[made - 1]:  # it became rarer, so its pairs count for more
                _add_pairs_with(pairs, table, part, touched)
        for pair in np.unique(np.array(touched)):
            if pair != NONE and pairs[pair].count >= least_count:
                score = _score(pairs, table, pair, likelihood)
                heapq.heappush(heap, (-score, np.int64(pairs[pair].left), np.int64(pairs[pair].right), pair))
        best = _pop_best(heap, pairs, table, least_count, likelihood) if made < most else NONE
        if best == NONE:
            return merges[:made]
        merges[made, 0], merges[made, 1] = pairs[best].left, pairs[best].right
        changed = _join(places, pairs, table, best, alphabet + made)
    return merges


@compiled
def _link(places: Records, pairs: Records, table: Records, numbers: dict[Int, Int], place: Int) -> Int:
    """Count the pair that starts at a place, if one does and it is not counted yet; its number, or NONE."""
    here = places[place]
    if here.symbol < 0 or here.pair != NONE or here.after >= len(places) or places[here.after].symbol < 0:
        return NONE
    left, right = here.symbol, places[here.after].symbol
    key = np.int64(left) << 32 | np.int64(right)
    if key not in numbers:
        new = len(numbers)
        numbers[key] = new
        pairs[new].left, pairs[new].right, pairs[new].head = left, right, NONE
        pairs[new].same_left, table[left].as_left = table[left].as_left, new
        pairs[new].same_right, table[right].as_right = table[right].as_right, new
    pair = numbers[key]
    here.pair, here.last, here.next = pair, NONE, pairs[pair].head
    if here.next != NONE:
        places[here.next].last = place
    pairs[pair].head = place
    pairs[pair].count += here.weight
    return pair


@compiled
def _unlink(places: Records, pairs: Records, place: Int) -> None:
    """Count the pair that starts at a place no more."""
    here = places[place]
    if here.pair == NONE:
        return
    pairs[here.pair].count -= here.weight
    if here.last == NONE:
        pairs[here.pair].head = here.next
    else:
        places[here.last].next = here.next
    if here.next != NONE:
        places[here.next].last = here.last
    here.pair = NONE


@compiled
def _join(places: Records, pairs: Records, table: Records, best: Int, new: Int) -> npt.NDArray[np.int64]:
    """Join a pair at all its places; where pairs have to be counted anew."""
    left, right = pairs[best].left, pairs[best].right
    starts = [np.int64(0) for _ in range(0)]
    place = np.int64(pairs[best].head)
    while place != NONE:
        starts.append(place)
        place = np.int64(places[place].next)
    changed = [np.int64(0) for _ in range(0)]
    for place in np.sort(np.array(starts)):  # from left to right, so that of "aaa" the first two are joined
        here = places[place]
        follower = places[here.after]
        if here.symbol != left or follower.symbol != right:
            continue
        _unlink(places, pairs, place)
        _unlink(places, pairs, here.after)
        if here.before >= 0:
            _unlink(places, pairs, here.before)
            changed.append(here.before)
        changed.append(place)
        here.symbol, follower.symbol, here.after = new, GONE, follower.after
        if here.after < len(places):
            places[here.after].before = place
        table[left].count -= here.weight
        table[right].count -= here.weight
        table[new].count += here.weight
    return np.array(changed)


@compiled
def _add_pairs_with(pairs: Records, table: Records, part: Int, found: list[Int]) -> None:
    pair = np.int64(table[part].as_left)
    while pair != NONE:
        found.append(pair)
        pair = np.int64(pairs[pair].same_left)
    pair = np.int64(table[part].as_right)
    while pair != NONE:
        found.append(pair)
        pair = np.int64(pairs[pair].same_right)


@compiled
def _pop_best(
    heap: list[tuple[float, Int, Int, Int]], pairs: Records, table: Records, least_count: Int, likelihood: bool
) -> Int:
    """The best pair. Entries may be out of date: one that became worse is put back, a better one is there anew."""
    while len(heap) > 0:
        minus_score, left, right, pair = heapq.heappop(heap)
        if pairs[pair].count < least_count:
            continue
        now = -_score(pairs, table, pair, likelihood)
        if now == minus_score:
            return pair
        if now > minus_score:
            heapq.heappush(heap, (now, left, right, pair))
    return NONE


@compiled
def _score(pairs: Records, table: Records, pair: Int, likelihood: bool) -> float:
    count = np.float64(pairs[pair].count)
    if not likelihood:
        return count
    return count / (np.float64(table[pairs[pair].left].count) * np.float64(table[pairs[pair].right].count))
