"""What a task is measured by: running sums that take predictions as they come, under the names people know."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plume.config import UserError

Floats = npt.NDArray[np.float64]
LOWER_IS_BETTER = ("mse", "loss")


class Metric(Protocol):
    """Takes answers one by one and keeps sums only."""

    main: str  # the one that picks the best checkpoint unless another is asked for

    def results(self) -> dict[str, float]: ...

    def baseline(self, name: str) -> float: ...  # what answers that ignore the input get


class Labels:
    """Accuracy, F1 and Matthews' correlation from a confusion matrix."""

    main = "accuracy"

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)  # (right label, given label)

    def add(self, right: int, given: int) -> None:
        self.confusion[right, given] += 1

    def results(self) -> dict[str, float]:
        c = self.confusion.astype(np.float64)
        hits, truth, given, total = np.diag(c), c.sum(axis=1), c.sum(axis=0), c.sum()
        f1 = _ratio(2 * hits, truth + given)
        present = (truth + given) > 0
        found = {"accuracy": float(hits.sum() / max(total, 1)), "f1_macro": float(f1[present].mean()) if total else 0.0}
        if len(self.labels) == 2:
            found["f1"] = float(f1[1])
            found["precision"], found["recall"] = (float(_ratio(hits, by)[1]) for by in (given, truth))
        # Gorodkin's correlation, which is Matthews' for two classes
        spread = math.sqrt((total**2 - (given**2).sum()) * (total**2 - (truth**2).sum()))
        found["matthews"] = float((total * hits.sum() - (truth * given).sum()) / spread) if spread else 0.0
        return found

    def baseline(self, name: str) -> float:
        """The best that always giving one and the same label gets."""
        found = []
        for given in range(len(self.labels)):
            constant = Labels(self.labels)
            constant.confusion[:, given] = self.confusion.sum(axis=1)
            found.append(constant.results()[name])
        return max(found)


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


class Numbers:
    """Pearson's and Spearman's correlation and the mean squared error. Ranks need the numbers themselves: two each."""

    main = "pearson"

    def __init__(self) -> None:
        self.right: list[float] = []
        self.given: list[float] = []

    def add(self, right: float, given: float) -> None:
        self.right.append(right)
        self.given.append(given)

    def results(self) -> dict[str, float]:
        right, given = np.array(self.right), np.array(self.given)
        return {
            "pearson": correlation(right, given),
            "spearman": correlation(ranks(right), ranks(given)),
            "mse": float(np.mean((right - given) ** 2)) if len(right) else 0.0,
        }

    def baseline(self, name: str) -> float:
        return math.inf if name in LOWER_IS_BETTER else 0.0


def correlation(a: Floats, b: Floats) -> float:
    if len(a) < 2:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    spread = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / spread if spread else 0.0


def ranks(values: Floats) -> Floats:
    """Places in the order, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


class Choices:
    """How often the right one was chosen."""

    main = "accuracy"

    def __init__(self) -> None:
        self.right = self.total = 0
        self.chance = 0.0

    def add(self, right: int, given: int, choices: int) -> None:
        self.right += right == given
        self.total += 1
        self.chance += 1 / choices

    def results(self) -> dict[str, float]:
        return {"accuracy": self.right / max(self.total, 1)}

    def baseline(self, name: str) -> float:
        return self.chance / max(self.total, 1)


class Entities:
    """Precision, recall and F1 over whole entities, as seqeval counts them; and the share of tags that are right."""

    main = "f1"

    def __init__(self) -> None:
        self.found = self.truth = self.both = 0
        self.words = self.words_right = 0

    def add(self, right: Sequence[str], given: Sequence[str]) -> None:
        truth, found = set(entities(right)), set(entities(given))
        self.truth += len(truth)
        self.found += len(found)
        self.both += len(truth & found)
        self.words += len(right)
        self.words_right += sum(a == b for a, b in zip(right, given, strict=True))

    def results(self) -> dict[str, float]:
        both, found, truth = self.both, self.found, self.truth
        precision, recall = both / found if found else 0.0, both / truth if truth else 0.0
        f1 = 2 * both / (found + truth) if found + truth else 0.0
        accuracy = self.words_right / max(self.words, 1)
        return {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy}

    def baseline(self, name: str) -> float:
        return math.inf if name in LOWER_IS_BETTER else 0.0


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(kind, first word, last word) of each entity in B- I- O tags, E- S- too; a stray I- opens one.

    Tags without any prefix are entities where neighbours of one kind belong together.
    """
    before, kind, begin = "O", "", 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, rest = tag.partition("-") if "-" in tag else (("O", "", "") if tag == "O" else ("I", "", tag))
        here = rest or ("_" if prefix != "O" else "")
        begins = prefix in ("B", "S") or (prefix in ("I", "E") and (before in ("O", "E", "S") or here != kind))
        if before != "O" and (prefix == "O" or begins):
            yield kind, begin, place - 1
        if begins:
            begin = place
        before, kind = prefix, here


class Answers:
    """Exact match and F1 of words, as SQuAD's script counts them; no answer is an answer too."""

    main = "f1"

    def __init__(self) -> None:
        self.exact = self.f1 = 0.0
        self.total = self.empty = 0

    def add(self, right: Sequence[str], given: str) -> None:
        truths = [text for text in right if normalised(text)] or [""]
        self.exact += max(float(normalised(t) == normalised(given)) for t in truths)
        self.f1 += max(word_f1(t, given) for t in truths)
        self.empty += truths == [""]
        self.total += 1

    def results(self) -> dict[str, float]:
        return {"exact_match": self.exact / max(self.total, 1), "f1": self.f1 / max(self.total, 1)}

    def baseline(self, name: str) -> float:
        return self.empty / max(self.total, 1)


def normalised(text: str) -> str:
    """Lower case without punctuation, articles and extra blanks."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def word_f1(right: str, given: str) -> float:
    a, b = normalised(right).split(), normalised(given).split()
    if not a or not b:
        return float(a == b)
    shared = sum((Counter(a) & Counter(b)).values())
    return 2 * shared / (len(a) + len(b))


class Texts:
    """BLEU and chrF by sacrebleu, ROUGE by rouge-score, over whole texts."""

    main = "bleu"

    def __init__(self) -> None:
        self.right: list[str] = []
        self.given: list[str] = []

    def add(self, right: str, given: str) -> None:
        self.right.append(right)
        self.given.append(given)

    def results(self) -> dict[str, float]:
        try:
            import sacrebleu
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise UserError(f"BLEU and ROUGE need {error.name}: pip install 'plume-lm[finetune]'") from None

        kinds = ("rouge1", "rouge2", "rougeL")
        if not self.given:
            return dict.fromkeys(("bleu", "chrf", *kinds), 0.0)
        scorer = RougeScorer(list(kinds), use_stemmer=True)
        scores = [scorer.score(a, b) for a, b in zip(self.right, self.given, strict=True)]
        found = {
            "bleu": float(sacrebleu.corpus_bleu(self.given, [self.right]).score),
            "chrf": float(sacrebleu.corpus_chrf(self.given, [self.right]).score),
        }
        return found | {kind: 100 * sum(s[kind].fmeasure for s in scores) / max(len(scores), 1) for kind in kinds}

    def baseline(self, name: str) -> float:
        return math.inf if name in LOWER_IS_BETTER else 0.0


def best_threshold(scores: Iterable[float], right: Iterable[bool], metric: str) -> float:
    """The probability from which the second label should be given, so that the metric is highest.

    Halfway between two neighbouring scores; of equally good ones the nearest to a half.
    """
    order = sorted(zip(scores, right, strict=True))
    values, truth = np.array([s for s, _ in order]), np.array([r for _, r in order], dtype=np.float64)
    positives, total = truth.sum(), len(truth)
    below = np.concatenate([[0.0], np.cumsum(truth)])  # right ones of the second label that a cut leaves out
    cuts = np.arange(total + 1)
    hits = positives - below
    given = total - cuts
    table = {
        "accuracy": (hits + cuts - below) / max(total, 1),
        "f1": _ratio(2 * hits, given + positives),
        "matthews": _matthews(hits, given - hits, below, cuts - below),
    }
    quality = table.get(metric, table["accuracy"])
    edges = np.concatenate([[0.0], (values[1:] + values[:-1]) / 2, [1.0]])
    apart = np.concatenate([[True], values[1:] > values[:-1], [True]])  # no cut lies between equal scores
    good = np.flatnonzero(apart & (quality >= quality[apart].max() - 1e-12))
    return float(edges[good[np.argmin(np.abs(edges[good] - 0.5))]])


def _matthews(tp: Floats, fp: Floats, fn: Floats, tn: Floats) -> Floats:
    below = np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return _ratio(tp * tn - fp * fn, below)


def better(name: str, value: float, than: float | None) -> bool:
    if than is None:
        return True
    return value < than if name in LOWER_IS_BETTER else value > than


def summary(values: Sequence[float]) -> Mapping[str, float]:
    """Median and spread over seeds."""
    array = np.array(values)
    return {
        "median": float(np.median(array)),
        "lowest": float(array.min()),
        "highest": float(array.max()),
        "deviation": float(array.std(ddof=1)) if len(array) > 1 else 0.0,
    }
