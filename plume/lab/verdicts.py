"""Whether a claim held: paired differences over seeds, a test that chance seldom passes, a word for the outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["reproduced", "open", "contrary"]
SIGNIFICANT = 0.02  # two-sided: identical variants are called different in 2 of 100 experiments
LEAST_PAIRS = 3


@dataclass(frozen=True)
class PairedTest:
    """The mean difference of paired measurements, its 95 % interval, and the two-sided p-value of the t-test."""

    pairs: int
    mean: float
    low: float
    high: float
    p: float


def paired_test(better: Sequence[float], worse: Sequence[float]) -> PairedTest:
    """How much the first exceeds the second, pair by pair."""
    differences = [a - b for a, b in zip(better, worse, strict=True)]
    n = len(differences)
    mean = math.fsum(differences) / n
    if n < 2:
        return PairedTest(n, mean, -math.inf, math.inf, 1.0)
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1))
    error = spread / math.sqrt(n)
    if error == 0.0:
        return PairedTest(n, mean, mean, mean, 1.0 if mean == 0 else 0.0)
    reach = t_quantile(0.975, n - 1) * error
    return PairedTest(n, mean, mean - reach, mean + reach, 2 * (1 - t_cdf(abs(mean) / error, n - 1)))


def verdict(test: PairedTest) -> Outcome:
    """Reproduced or contrary only where the difference is significant."""
    if test.pairs < LEAST_PAIRS or test.p >= SIGNIFICANT:
        return "open"
    return "reproduced" if test.mean > 0 else "contrary"


def t_cdf(t: float, df: int) -> float:
    """Student's t distribution, by the regularised incomplete beta function."""
    tail = 0.5 * incomplete_beta(df / (df + t * t), df / 2, 0.5)
    return 1 - tail if t >= 0 else tail


def t_quantile(p: float, df: int) -> float:
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b), by its continued fraction (Lentz's method)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * value
