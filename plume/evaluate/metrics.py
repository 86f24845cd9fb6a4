"""From what was found for each item to one number and its standard error."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.config import UserError

LOWER_IS_BETTER = ("perplexity", "bits_per", "loss")
BINS = 10


@dataclass(frozen=True)
class Metric:
    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.4g}" if self.stderr is None else f"{self.value:.4g} ± {self.stderr:.2g}"


def higher_is_better(name: str) -> bool:
    return not any(word in name for word in LOWER_IS_BETTER)


def mean(values: Sequence[float]) -> Metric:
    """The mean and its standard error, from the sample's variance."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return Metric(float(array.mean()), None)
    return Metric(float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))))


def perplexity(totals: Sequence[float]) -> Metric:
    """exp of minus the mean, the error carried through the exponential."""
    average = mean(totals)
    value = safe_exp(-average.value)
    return Metric(value, None if average.stderr is None else value * average.stderr)


def safe_exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def per_unit(totals: Sequence[float], sizes: Sequence[int], units: int) -> tuple[float, float | None]:
    """Minus log-likelihood per unit (token, word, byte) and its error, each (total, size) an independent draw.

    The error is that of a ratio: what a draw deviates from its share at the common rate.
    """
    total, size = float(np.sum(totals)), int(np.sum(sizes))
    rate = -total / units
    if len(totals) < 2:
        return rate, None
    deviation = -np.asarray(totals) - np.asarray(sizes) * (-total / size)
    n = len(totals)
    return rate, float(math.sqrt((deviation**2).sum() * n / (n - 1)) / units)


def exp_metric(rate: tuple[float, float | None]) -> Metric:
    value = safe_exp(rate[0])
    return Metric(value, None if rate[1] is None else value * rate[1])


def bits_metric(rate: tuple[float, float | None]) -> Metric:
    return Metric(rate[0] / math.log(2), None if rate[1] is None else rate[1] / math.log(2))


def matthews(gold: Sequence[bool], said: Sequence[bool]) -> Metric:
    """Matthews' correlation; its error by leaving out one item at a time, which only four cases can be."""
    counts = Counter(zip(map(bool, gold), map(bool, said), strict=True))
    value, n = _matthews(counts), len(gold)
    if n < 2:
        return Metric(value, None)
    left_out = [(_matthews(counts - Counter([case])), count) for case, count in counts.items()]
    middle = sum(v * c for v, c in left_out) / n
    return Metric(value, math.sqrt((n - 1) / n * sum(c * (v - middle) ** 2 for v, c in left_out)))


def _matthews(counts: Counter[tuple[bool, bool]]) -> float:
    tp, tn, fp, fn = (counts[case] for case in ((True, True), (False, False), (False, True), (True, False)))
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return (tp * tn - fp * fn) / below if below else 0.0


def best_threshold(scores: Sequence[float], good: Sequence[bool]) -> float:
    """From where on a score should count as good: where most are judged right, every place between two tried."""
    order = np.argsort(scores)
    values, right = np.asarray(scores)[order], np.asarray(good, dtype=np.int64)[order]
    # cutting before place i: the good from i on and the bad before it are judged right
    correct = np.concatenate([[right.sum()], right.sum() - np.cumsum(right) + np.cumsum(1 - right)])
    cut = int(correct.argmax())
    if cut == 0:
        return float("-inf")
    return float("inf") if cut == len(values) else float((values[cut - 1] + values[cut]) / 2)


# ---- reliability -------------------------------------------------------------------------------------------------


class Calibration:
    """How often the likeliest was right, by how sure the model was."""

    def __init__(self) -> None:
        self.count = np.zeros(BINS, dtype=np.int64)
        self.hits = np.zeros(BINS, dtype=np.int64)
        self.sure = np.zeros(BINS)

    def add(self, confidence: npt.NDArray[np.float64], hits: npt.NDArray[np.bool_]) -> None:
        bins = np.clip((confidence * BINS).astype(np.int64), 0, BINS - 1)
        self.count += np.bincount(bins, minlength=BINS)
        self.hits += np.bincount(bins[hits], minlength=BINS)
        self.sure += np.bincount(bins, weights=confidence, minlength=BINS)

    def plain(self) -> dict[str, list[float] | float]:
        known = self.count > 0
        sure = np.divide(self.sure, self.count, where=known, out=np.zeros(BINS))
        right = np.divide(self.hits, self.count, where=known, out=np.zeros(BINS))
        total = max(1, int(self.count.sum()))
        error = float((np.abs(sure - right) * self.count).sum() / total)
        return {"count": self.count.tolist(), "confidence": sure.tolist(), "right": right.tolist(), "error": error}


class ByPosition:
    """Mean loss by how many tokens stood before, in ranges that double."""

    def __init__(self) -> None:
        self.total = np.zeros(32)
        self.count = np.zeros(32, dtype=np.int64)

    def add(self, before: int, logprobs: npt.NDArray[np.float32]) -> None:
        places = np.log2(before + np.arange(len(logprobs)) + 1).astype(np.int64)
        self.total += np.bincount(places, weights=-logprobs.astype(np.float64), minlength=32)
        self.count += np.bincount(places, minlength=32)

    def plain(self) -> dict[str, list[float]]:
        used = np.flatnonzero(self.count)
        return {
            "from": (2**used - 1).tolist(),
            "loss": (self.total[used] / self.count[used]).tolist(),
            "tokens": self.count[used].tolist(),
        }


# ---- generated texts ---------------------------------------------------------------------------------------------


def normal(text: str) -> str:
    """SQuAD's: lower case, without punctuation and articles, single blanks."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def without_marks(text: str) -> str:
    return text.lower().translate(str.maketrans("", "", string.punctuation))


def without_articles(text: str) -> str:
    """As the harness has it for natural questions: only before a blank, and most but not all ways to write them."""
    return without_marks(re.sub(r"\b(?:The |the |An |A |a |an )", "", text))


NORMAL: dict[str, Callable[[str], str]] = {
    "squad": normal,
    "but-marks": without_marks,
    "but-articles": without_articles,
}


def exact_match(said: str, answers: Sequence[str], normal: Callable[[str], str] = normal) -> float:
    return float(any(normal(said) == normal(answer) for answer in answers))


def f1(said: str, answers: Sequence[str]) -> float:
    return max(_f1(normal(said).split(), normal(answer).split()) for answer in answers)


def _f1(said: list[str], answer: list[str]) -> float:
    if not said or not answer:
        return float(said == answer)
    common = sum((Counter(said) & Counter(answer)).values())
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(answer)
    return 2 * precision * recall / (precision + recall)


def among(measure: Callable[[str, Sequence[str]], float], said: str, answers: Sequence[str]) -> float:
    """A measure against people's answers, the mean of leaving each out, as one of them would be measured."""
    others = [[*answers[:n], *answers[n + 1 :]] for n in range(len(answers))] if len(answers) > 1 else [list(answers)]
    return sum(measure(said, rest) for rest in others) / len(others)


def bleu(said: Sequence[str], answers: Sequence[Sequence[str]]) -> Metric:
    return Metric(_sacrebleu().corpus_bleu(list(said), _columns(answers)).score, None)


def chrf(said: Sequence[str], answers: Sequence[Sequence[str]]) -> Metric:
    return Metric(_sacrebleu().corpus_chrf(list(said), _columns(answers)).score, None)


def _columns(answers: Sequence[Sequence[str]]) -> list[list[str]]:
    """References in sacrebleu's order: the first of every item, then the second; the first stands in for others."""
    most = max(map(len, answers))
    return [[a[n] if n < len(a) else a[0] for a in answers] for n in range(most)]


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError:
        raise UserError("translations are measured with sacrebleu: pip install 'plume-lm[eval]'") from None
    return sacrebleu


def rouge(said: str, answers: Sequence[str]) -> dict[str, float]:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise UserError("summaries are measured with rouge-score: pip install 'plume-lm[eval]'") from None
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    found = [scorer.score(answer, said) for answer in answers]
    return {name: max(f[name].fmeasure for f in found) for name in ("rouge1", "rouge2", "rougeL")}


def sentences(text: str, count: int | None) -> str:
    """The first sentences of a text; all of it where no count is given."""
    if count is None:
        return text.strip()
    return " ".join(re.split(r"(?<=[.!?])\s+", text.strip())[:count])
