"""Held-out bits per byte of a GPT by its size and the tokens it reads: a law fitted to runs, to choose sizes by.

benchmarks/size_law.py ran them and fits it, in the form of Kaplan et al. (2020) with a floor: bits over those of a
bigram model = FLOOR + ((A / weights)**(a/b) + B / tokens)**b, weights of the blocks and tokens in millions.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Law(NamedTuple):
    floor: float
    size: float
    size_power: float
    data: float
    data_power: float

    def ratio(self, weights: float, tokens: float) -> float:
        """Bits per byte over those of the bigram model, on prose."""
        by_size = (self.size / (weights / 1e6)) ** (self.size_power / self.data_power)
        return self.floor + (by_size + self.data / (tokens / 1e6)) ** self.data_power


LAW = Law(0.7555, 6.575e-5, 0.2321, 0.01127, 0.3346)
CODE = 0.826  # of these bits for Python's source, which is predictable from further back
SPREAD = 0.02  # relative: the furthest of the runs from their law
WEIGHTS, TOKENS = (98_304, 4_718_592), (0.5e6, 8e6)  # of the runs it was fitted to
WORN = 1.5  # passes after which a repeated text has given most of what it can, by two pairs of runs at these rates


def new_tokens(tokens: float, unique: float) -> float:
    """As many tokens read once as teach what these do, some of them read again and again."""
    if tokens <= unique:
        return tokens
    return unique * (1 + WORN * (1 - math.exp((1 - tokens / unique) / WORN)))


def fitted(weights: float, tokens: float) -> bool:
    """Whether such runs were among those that the law was fitted to."""
    return WEIGHTS[0] <= weights <= WEIGHTS[1] and TOKENS[0] <= tokens <= TOKENS[1]
