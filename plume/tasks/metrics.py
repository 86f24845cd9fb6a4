"""Every metric of fine-tuning and evaluation, once: shares and correlations up to 1, BLEU and chrF up to 100."""

# N items, L labels

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from plume.config import UserError
from plume.util.hashing import UNSPACED, separated

Floats = npt.NDArray[np.float64]
LOWER_IS_BETTER = ("perplexity", "bits_per", "loss", "mse")
ROUGE = ("rouge1", "rouge2", "rougeL")
PREFIXES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S", "O": "O"}  # BIOES, BILOU and BMES
NORMAL_95 = 1.96
RANGES = {**dict.fromkeys(("bleu", "chrf"), (0.0, 100.0)),
          **dict.fromkeys(("pearson", "spearman", "matthews", "mcc"), (-1.0, 1.0))}  # fmt: skip
HAN = "\u3400-\u9fff"  # Chinese characters: no space separates words, so each counts as one


# ---- values ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A value and its standard error."""

    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.4g}" if self.stderr is None else f"{self.value:.4g} ± {self.stderr:.2g}"


def higher_is_better(name: str) -> bool:
    return not any(word in name for word in LOWER_IS_BETTER)


def possible(name: str) -> tuple[float, float]:
    """The lowest and the highest value that a metric can have."""
    if name in RANGES:
        return RANGES[name]
    return (0.0, 1.0) if higher_is_better(name) else (float("perplexity" in name), math.inf)


def as_loss(name: str, value: float) -> float:
    """The value with a sign that makes lower better."""
    return -value if higher_is_better(name) else value


def summary(values: Sequence[float]) -> Mapping[str, float]:
    """Median and spread over seeds whose score is a number, if there is one."""
    array = np.array(values)
    array = array if np.isnan(array).all() else array[~np.isnan(array)]
    return {
        "median": float(np.median(array)),
        "lowest": float(array.min()),
        "highest": float(array.max()),
        "deviation": float(array.std(ddof=1)) if len(array) > 1 else 0.0,
    }


def mean(values: Sequence[float]) -> Metric:
    """The mean and its standard error, from the sample variance."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return Metric(float(array.mean()), None)
    return Metric(float(array.mean()), float(array.std(ddof=1) / math.sqrt(len(array))))


class TaskMetric(Protocol):
    """Accumulates predictions one at a time."""

    main: str  # selects the best checkpoint unless another is named

    def results(self) -> dict[str, float]: ...

    def baseline(self, name: str) -> float: ...  # of predictions that ignore the input


# ---- log-likelihoods ---------------------------------------------------------------------------------------------


def perplexity(totals: Sequence[float]) -> Metric:
    """exp of minus the mean; the error by the delta method."""
    average = mean(totals)
    value = safe_exp(-average.value)
    return Metric(value, None if average.stderr is None else value * average.stderr)


def safe_exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def per_unit(totals: Sequence[float], sizes: Sequence[int], units: int) -> tuple[float, float | None]:
    """Negative log-likelihood per unit (token, word, byte) and its error, each (total, size) an independent draw.

    The error is that of a ratio estimator: how far each draw is from its size times the common rate.
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


# ---- labels and numbers ------------------------------------------------------------------------------------------


class ClassificationMetric:
    """Accuracy, F1 and Matthews correlation from a confusion matrix."""

    main = "accuracy"

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.confusion = np.zeros((len(labels), len(labels)), dtype=np.int64)  # (gold, predicted)

    def add(self, gold: int, predicted: int) -> None:
        self.confusion[gold, predicted] += 1

    def results(self) -> dict[str, float]:
        c = self.confusion.astype(np.float64)
        hits, gold, predicted, total = np.diag(c), c.sum(axis=1), c.sum(axis=0), c.sum()
        f1 = _ratio(2 * hits, gold + predicted)
        present = (gold + predicted) > 0
        found = {"accuracy": float(hits.sum() / max(total, 1)), "f1_macro": float(f1[present].mean()) if total else 0.0}
        if len(self.labels) == 2:
            found["f1"] = float(f1[1])
            found["precision"], found["recall"] = (float(_ratio(hits, by)[1]) for by in (predicted, gold))
        return found | {"matthews": float(matthews(c))}

    def baseline(self, name: str) -> float:
        """The best that one constant label reaches."""
        found = []
        for constant in range(len(self.labels)):
            metric = ClassificationMetric(self.labels)
            metric.confusion[:, constant] = self.confusion.sum(axis=1)
            found.append(metric.results()[name])
        return max(found)


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def matthews(confusion: Floats) -> Floats:
    """Matthews correlation of confusion matrices (..., L, L); Gorodkin's generalisation for more than two labels."""
    hits = np.trace(confusion, axis1=-2, axis2=-1)
    gold, predicted, total = confusion.sum(axis=-1), confusion.sum(axis=-2), confusion.sum(axis=(-2, -1))
    spread = np.sqrt((total**2 - (predicted**2).sum(axis=-1)) * (total**2 - (gold**2).sum(axis=-1)))
    return _ratio(np.asarray(total * hits - (gold * predicted).sum(axis=-1)), np.asarray(spread))


def matthews_metric(gold: Sequence[bool], predicted: Sequence[bool]) -> Metric:
    """Matthews correlation with its jackknife error; leaving one item out has only four outcomes."""
    counts = np.zeros((2, 2))
    for case in zip(map(int, gold), map(int, predicted), strict=True):
        counts[case] += 1
    value, n = float(matthews(counts)), len(gold)
    if n < 2:
        return Metric(value, None)
    cases = [case for case in np.ndindex(2, 2) if counts[case]]
    without = np.array([counts - np.eye(2)[[a]].T * np.eye(2)[b] for a, b in cases])  # (cases, 2, 2)
    weights, values = np.array([counts[case] for case in cases]), matthews(without)
    centre = (values * weights).sum() / n
    return Metric(value, math.sqrt((n - 1) / n * float((weights * (values - centre) ** 2).sum())))


def best_threshold(
    scores: Iterable[float],
    positive: Iterable[bool],
    metric: str = "accuracy",
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    near: float | None = 0.5,
) -> float:
    """The score above which an item counts as positive so that the metric is highest.

    Halfway between two neighbouring scores; of equally good ones the nearest to `near`, or else the lowest.
    """
    order = sorted(zip(scores, positive, strict=True))
    values, truth = np.array([s for s, _ in order]), np.array([p for _, p in order], dtype=np.float64)
    positives, total = truth.sum(), len(truth)
    missed = np.concatenate([[0.0], np.cumsum(truth)])  # positives below each cut
    cuts = np.arange(total + 1)
    hits, rejected = positives - missed, cuts - missed
    alarms = total - cuts - hits
    f1, negative_f1 = _ratio(2 * hits, total - cuts + positives), _ratio(2 * rejected, cuts + total - positives)
    table = {
        "accuracy": (hits + rejected) / max(total, 1),
        "f1": f1,
        "f1_macro": (f1 + negative_f1) / 2,
        "matthews": matthews(np.moveaxis(np.array([[rejected, alarms], [missed, hits]]), -1, 0)),
    }
    quality = table.get(metric, table["accuracy"])
    edges = np.concatenate([[bounds[0]], (values[1:] + values[:-1]) / 2, [bounds[1]]])
    apart = np.concatenate([[True], values[1:] > values[:-1], [True]])  # no cut lies between equal scores
    best = np.flatnonzero(apart & (quality >= quality[apart].max() - 1e-12))
    return float(edges[best[0 if near is None else np.argmin(np.abs(edges[best] - near))]])


class RegressionMetric:
    """Pearson and Spearman correlation and the mean squared error."""

    main = "pearson"

    def __init__(self) -> None:
        self.gold: list[float] = []
        self.predicted: list[float] = []

    def add(self, gold: float, predicted: float) -> None:
        self.gold.append(gold)
        self.predicted.append(predicted)

    def results(self) -> dict[str, float]:
        gold, predicted = np.array(self.gold), np.array(self.predicted)
        return {
            "pearson": correlation(gold, predicted),
            "spearman": correlation(ranks(gold), ranks(predicted)),
            "mse": float(np.mean((gold - predicted) ** 2)) if len(gold) else 0.0,
        }

    def baseline(self, name: str) -> float:
        """Of the mean, the best constant: it correlates with nothing."""
        return float(np.var(self.gold)) if name == "mse" and self.gold else 0.0


def correlation(a: Floats, b: Floats) -> float:
    if len(a) < 2:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    spread = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / spread if spread else 0.0


def ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


class ChoiceMetric:
    """The share of items whose correct candidate was chosen."""

    main = "accuracy"

    def __init__(self) -> None:
        self.correct = self.total = 0
        self.chance = 0.0

    def add(self, gold: int, predicted: int, choices: int) -> None:
        self.correct += gold == predicted
        self.total += 1
        self.chance += 1 / choices

    def results(self) -> dict[str, float]:
        return {"accuracy": self.correct / max(self.total, 1)}

    def baseline(self, name: str) -> float:
        return self.chance / max(self.total, 1)


# ---- tags --------------------------------------------------------------------------------------------------------


class EntityMetric:
    """Precision, recall and F1 over whole entities, as seqeval counts them; accuracy over words."""

    main = "f1"

    def __init__(self) -> None:
        self.predicted = self.gold = self.correct = 0
        self.words = self.words_correct = 0

    def add(self, gold: Sequence[str], predicted: Sequence[str]) -> None:
        wanted, found = set(entities(gold)), set(entities(predicted))
        self.gold += len(wanted)
        self.predicted += len(found)
        self.correct += len(wanted & found)
        self.words += len(gold)
        self.words_correct += sum(a == b for a, b in zip(gold, predicted, strict=True))

    def results(self) -> dict[str, float]:
        correct, predicted, gold = self.correct, self.predicted, self.gold
        precision, recall = correct / predicted if predicted else 0.0, correct / gold if gold else 0.0
        f1 = 2 * correct / (predicted + gold) if predicted + gold else 0.0
        accuracy = self.words_correct / max(self.words, 1)
        return {"f1": f1, "precision": precision, "recall": recall, "accuracy": accuracy}

    def baseline(self, name: str) -> float:
        return 0.0


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(type, first word, last word) of each entity in BIO, BIOES, BILOU or BMES tags; a stray I- opens one.

    Without prefixes, neighbouring words with one tag are one entity.
    """
    before, kind, begin = "O", "", 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, here = split_tag(tag)
        begins = prefix in ("B", "S") or (prefix in ("I", "E") and (before in ("O", "E", "S") or here != kind))
        if before != "O" and (prefix == "O" or begins):
            yield kind, begin, place - 1
        if begins:
            begin = place
        before, kind = prefix, here


def split_tag(tag: str) -> tuple[str, str]:
    """(B, I, E, S or O; type); a tag without a known prefix, such as NN or -LRB-, is a type."""
    if tag == "O":
        return "O", ""
    letter, dash, kind = tag.partition("-")
    return (PREFIXES[letter], kind or "_") if dash and letter in PREFIXES else ("I", tag)


# ---- texts -------------------------------------------------------------------------------------------------------


def squad_text(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without_punctuation(text)).split())


def without_punctuation(text: str) -> str:
    return text.lower().translate(str.maketrans("", "", string.punctuation))


def without_articles(text: str) -> str:
    """The harness's form for natural questions: articles before a space, in most but not all spellings."""
    return without_punctuation(re.sub(r"\b(?:The |the |An |A |a |an )", "", text))


NORMAL_FORMS: dict[str, Callable[[str], str]] = {
    "squad": squad_text,
    "but-marks": without_punctuation,
    "but-articles": without_articles,
}


def exact_match(text: str, answers: Sequence[str], normal: Callable[[str], str] = squad_text) -> float:
    return float(any(normal(text) == normal(answer) for answer in answers))


def answer_f1(text: str, answers: Sequence[str]) -> float:
    """SQuAD's F1 over words, of the answer that fits best."""
    words, *known = (re.findall(rf"[{HAN}]|[^\s{HAN}]+", squad_text(each)) for each in (text, *answers))
    return max(_word_f1(words, answer) for answer in known)


def _word_f1(words: Sequence[str], answer: Sequence[str]) -> float:
    if not words or not answer:
        return float(words == answer)
    return 2 * sum((Counter(words) & Counter(answer)).values()) / (len(words) + len(answer))


def leave_one_out(measure: Callable[[str, Sequence[str]], float], text: str, answers: Sequence[str]) -> float:
    """The mean of a measure over the answers without each one in turn, as CoQA compares people."""
    others = [[*answers[:n], *answers[n + 1 :]] for n in range(len(answers))] if len(answers) > 1 else [list(answers)]
    return sum(measure(text, rest) for rest in others) / len(others)


class AnswerMetric:
    """SQuAD's exact match and F1; an empty answer is correct where there is none."""

    main = "f1"

    def __init__(self) -> None:
        self.exact = self.f1 = 0.0
        self.total = self.empty = 0

    def add(self, answers: Sequence[str], predicted: str) -> None:
        gold = [text for text in answers if squad_text(text)] or [""]
        self.exact += exact_match(predicted, gold)
        self.f1 += answer_f1(predicted, gold)
        self.empty += gold == [""]
        self.total += 1

    def results(self) -> dict[str, float]:
        return {"exact_match": self.exact / max(self.total, 1), "f1": self.f1 / max(self.total, 1)}

    def baseline(self, name: str) -> float:
        return self.empty / max(self.total, 1)


def in_chinese(whole: str) -> bool:
    return 3 * len(re.findall(f"[{HAN}]", whole)) > len(whole)


def bleu(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> Metric:
    """By sacrebleu's tokenizer 13a; zh where the answers are Chinese, char in other scripts without spaces."""
    whole = "".join(answer for each in answers for answer in each)
    words = "zh" if in_chinese(whole) else "char" if 3 * len(UNSPACED.findall(whole)) > len(whole) else "13a"
    return Metric(_sacrebleu().corpus_bleu(list(texts), _columns(answers), tokenize=words).score, None)


def chrf(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> Metric:
    return Metric(_sacrebleu().corpus_chrf(list(texts), _columns(answers)).score, None)


def _columns(answers: Sequence[Sequence[str]]) -> list[list[str]]:
    """References in sacrebleu's order: the first of every item, then the second; missing ones repeat the first."""
    most = max(map(len, answers))
    return [[a[n] if n < len(a) else a[0] for a in answers] for n in range(most)]


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError as error:
        raise _missing(error) from None
    return sacrebleu


def _missing(error: ImportError) -> UserError:
    return UserError(f"BLEU, chrF and ROUGE need the package {error.name}: pip install 'plume-lm[eval]'")


class RougeTokens:
    """What rouge-score takes as a tokenizer; its own drops every letter that is not ASCII."""

    @staticmethod
    def tokenize(text: str) -> list[str]:
        return re.findall(r"\w+", separated(text.lower()))


def drops_letters(texts: Iterable[str]) -> bool:
    """Whether rouge-score's own tokenizer would drop a third of the letters, as of Russian or Japanese all of them."""
    letters = [letter for text in texts for letter in text if letter.isalpha()]
    return 3 * sum(not letter.isascii() for letter in letters) > len(letters)


def rouge(text: str, answers: Sequence[str]) -> dict[str, float]:
    """ROUGE F-measures of the answer that fits best, up to 1."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise _missing(error) from None
    scorer = RougeScorer(list(ROUGE), use_stemmer=True, tokenizer=RougeTokens() if drops_letters(answers) else None)
    found = [scorer.score(answer, text) for answer in answers]
    return {name: max(f[name].fmeasure for f in found) for name in ROUGE}


def first_sentences(text: str, count: int | None) -> str:
    """The first sentences of a text; all of it where no count is given."""
    if count is None:
        return text.strip()
    parts = re.split(r"((?<=[.!?])\s+|(?<=[。！？])\s*)", text.strip())  # sentences, and what stands between two
    return "".join(parts[: 2 * count - 1])


class GenerationMetric:
    """BLEU and chrF by sacrebleu over the whole set, mean ROUGE by rouge-score, and the share of equal texts."""

    main = "bleu"

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.texts: list[str] = []

    def add(self, answer: str, text: str) -> None:
        self.answers.append(answer)
        self.texts.append(text)

    def results(self) -> dict[str, float]:
        if not self.texts:
            return dict.fromkeys(("bleu", "chrf", *ROUGE, "exact_match"), 0.0)
        references = [[answer] for answer in self.answers]
        scores = [rouge(text, answer) for text, answer in zip(self.texts, references, strict=True)]
        found = {"bleu": bleu(self.texts, references).value, "chrf": chrf(self.texts, references).value}
        found |= {name: mean([s[name] for s in scores]).value for name in ROUGE}
        same = [float(text.strip() == answer.strip()) for text, answer in zip(self.texts, self.answers, strict=True)]
        return found | {"exact_match": mean(same).value}

    def baseline(self, name: str) -> float:
        return 0.0
