"""Predictions that need no training steps and that a fine-tuned model should beat: constants, TF-IDF, copies."""

# N rows, F features

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from plume.tasks.schema import Example, Prediction
from plume.util.hashing import UNSPACED, separated

Floats = npt.NDArray[np.float64]
MOST_ROWS = 50_000  # training rows that TF-IDF is fitted on, drawn at random: seconds on one core
MOST_FEATURES = 100_000
MOST_WEIGHTS = 20_000_000  # features times labels
LONGEST_WORD = 12  # mean characters between spaces above which a language is taken to write none


@dataclass(frozen=True)
class Baseline:
    """A trivial model's name and its prediction for every row of a set."""

    name: str
    predictions: Mapping[int, Prediction]


def installed() -> bool:
    return find_spec("sklearn") is not None


def missing_package() -> str:
    """One line where scikit-learn is not installed; empty: it is."""
    if installed():
        return ""
    return "scikit-learn is not installed, so baselines are constant predictions only: pip install 'plume-lm[finetune]'"


def each(name: str, examples: Sequence[Example], value: Callable[[Example], Any]) -> Baseline:
    """The baseline that computes its prediction from the row alone."""
    return Baseline(name, {number: Prediction(value(e), {}) for number, e in enumerate(examples)})


# ---- constants ---------------------------------------------------------------------------------------------------


def most_frequent_label(train: Sequence[Example], examples: Sequence[Example]) -> Baseline:
    counts = Counter(e.label for e in train)
    label, total = counts.most_common(1)[0][0], sum(counts.values())
    scores = {name: count / total for name, count in counts.items()}
    return Baseline("most frequent label", dict.fromkeys(range(len(examples)), Prediction(label, scores)))


def mean_target(train: Sequence[Example], examples: Sequence[Example]) -> Baseline:
    mean = float(np.mean([e.label for e in train]))
    return Baseline("mean target", dict.fromkeys(range(len(examples)), Prediction(mean, {"score": mean})))


def most_frequent_index(train: Sequence[Example], examples: Sequence[Example]) -> Baseline:
    index = Counter(e.label for e in train).most_common(1)[0][0]
    return each("most frequent index", examples, lambda e: min(index, len(e.fields["choices"]) - 1))


def most_frequent_tags(train: Sequence[Example], examples: Sequence[Example]) -> Baseline:
    """Each word's most frequent tag in training; unseen words get the most frequent tag of all."""
    by_word: dict[str, Counter[str]] = {}
    for example in train:
        for word, tag in zip(example.fields["words"], example.label, strict=True):
            by_word.setdefault(word, Counter())[tag] += 1
    usual = sum(by_word.values(), Counter[str]()).most_common(1)[0][0]
    table = {word: tags.most_common(1)[0][0] for word, tags in by_word.items()}
    return each("most frequent tag per word", examples, lambda e: [table.get(w, usual) for w in e.fields["words"]])


def nearest_sentence(examples: Sequence[Example]) -> Baseline:
    """The sentence of the context that shares the most words with the question; without spaces, letters."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"\w+", separated(text.lower())))

    def best(example: Example) -> str:
        wanted = words(example.fields["question"])
        sentences = re.split(r"(?<=[.!?。！？])\s*", example.fields["context"].strip())
        return max(sentences, key=lambda s: len(wanted & words(s)))

    return each("sentence nearest to the question", examples, best)


# ---- TF-IDF ------------------------------------------------------------------------------------------------------


def without_spaces(texts: Sequence[str]) -> bool:
    """Whether texts are of a language written without spaces, such as Chinese: by letters, or the words' length."""
    words = [word for text in texts[:1000] for word in text.split()]
    letters = "".join(words)
    return 2 * len(UNSPACED.findall(letters)) > len(letters) or len(letters) > LONGEST_WORD * max(1, len(words))


def vectorizer(texts: Sequence[str], labels: int = 1) -> Any:
    """scikit-learn's TF-IDF of words and pairs of words, or of characters and pairs where there are no spaces."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    units = {"analyzer": "char"} if without_spaces(texts) else {"token_pattern": r"(?u)\b\w+\b"}
    most = min(MOST_FEATURES, MOST_WEIGHTS // max(1, labels))
    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, max_features=most, **units)


def texts_of(examples: Sequence[Example], fields: Sequence[str]) -> list[list[str]]:
    """The texts of each field."""
    return [[str(e.fields[name]) for e in examples] for name in fields]


def features(vectors: Any, columns: Sequence[Sequence[str]]) -> Any:
    """(N, F * fields) TF-IDF of each field; of two fields also their product, which shows what they share."""
    from scipy.sparse import csr_array, hstack

    parts = [csr_array(vectors.transform(column)) for column in columns]
    return hstack([*parts, *([parts[0].multiply(parts[1])] if len(parts) == 2 else [])], format="csr")


def cosines(vectors: Any, left: Sequence[str], right: Sequence[str]) -> Floats:
    """(N,) cosine of each pair of texts; TF-IDF rows have length 1."""
    a, b = vectors.transform(left), vectors.transform(right)
    return np.asarray(a.multiply(b).sum(axis=1), dtype=np.float64).ravel()


def sampled(train: Sequence[Example]) -> Sequence[Example]:
    if len(train) <= MOST_ROWS:
        return train
    return [train[i] for i in np.sort(np.random.default_rng(0).choice(len(train), MOST_ROWS, replace=False))]


def fitted(train: Sequence[Example], fields: Sequence[str], labels: int = 1) -> tuple[Any, list[list[str]]] | None:
    """TF-IDF of the training texts, and those; None where they hold no word or scikit-learn is not installed."""
    if not installed():
        return None
    columns = texts_of(train, fields)
    texts = [text for column in columns for text in column]
    try:
        return vectorizer(texts, labels).fit(texts), columns
    except ValueError:  # an empty vocabulary
        return None


def tfidf_labels(
    train: Sequence[Example], examples: Sequence[Example], fields: Sequence[str], labels: Sequence[str]
) -> list[Baseline]:
    """Logistic regression on TF-IDF; an empty list where it cannot be fitted."""
    train = sampled(train)
    found = fitted(train, fields, len(labels))
    if found is None or len({e.label for e in train}) < 2:
        return []
    from sklearn.linear_model import LogisticRegression

    vectors, columns = found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that has not quite converged is still a baseline
        model = LogisticRegression(max_iter=300).fit(features(vectors, columns), [e.label for e in train])
    rows = model.predict_proba(features(vectors, texts_of(examples, fields)))
    names = [str(name) for name in model.classes_]
    predictions = {
        number: Prediction(names[int(np.argmax(row))], dict(zip(names, row.tolist(), strict=True)))
        for number, row in enumerate(rows)
    }
    return [Baseline("TF-IDF + logistic regression", predictions)]


def tfidf_label_sets(
    train: Sequence[Example], examples: Sequence[Example], fields: Sequence[str], labels: Sequence[str], marks: Floats
) -> list[Baseline]:
    """A logistic regression on TF-IDF for every label; `marks` (N, L) are 1 where a training row has the label."""
    found = fitted(train, fields, len(labels)) if len(train) <= MOST_ROWS else None
    if found is None:
        return []
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    vectors, columns = found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = OneVsRestClassifier(LogisticRegression(max_iter=300)).fit(features(vectors, columns), marks)
    rows = model.predict(features(vectors, texts_of(examples, fields)))
    given = [[label for label, mark in zip(labels, row, strict=True) if mark] for row in rows]
    return [Baseline("TF-IDF + logistic regression", {n: Prediction(value, {}) for n, value in enumerate(given)})]


def tfidf_numbers(train: Sequence[Example], examples: Sequence[Example], fields: Sequence[str]) -> list[Baseline]:
    """Ridge regression on TF-IDF; for two texts also their cosine on the scale of the target."""
    train = sampled(train)
    found = fitted(train, fields)
    if found is None:
        return []
    from sklearn.linear_model import LinearRegression, Ridge

    (vectors, columns), others = found, texts_of(examples, fields)
    targets = [e.label for e in train]
    ridge = Ridge().fit(features(vectors, columns), targets)
    results = [_numbers("TF-IDF + ridge regression", ridge.predict(features(vectors, others)))]
    if len(fields) == 2:
        line = LinearRegression().fit(cosines(vectors, *columns)[:, None], targets)
        results.append(_numbers("TF-IDF cosine", line.predict(cosines(vectors, *others)[:, None])))
    return results


def tfidf_cosine(train: Sequence[Example], examples: Sequence[Example], fields: Sequence[str]) -> list[Baseline]:
    """The cosine of two texts as it is."""
    found = fitted(sampled(train), fields)
    return [] if found is None else [_numbers("TF-IDF cosine", cosines(found[0], *texts_of(examples, fields)))]


def _numbers(name: str, values: Floats) -> Baseline:
    return Baseline(name, {number: Prediction(v, {"score": v}) for number, v in enumerate(map(float, values))})


def tfidf_choice(train: Sequence[Example], examples: Sequence[Example]) -> list[Baseline]:
    """The choice with the highest TF-IDF cosine to the context."""
    found = fitted(sampled(train), ("context",))
    if found is None:
        return []

    def best(example: Example) -> int:
        choices = example.fields["choices"]
        context = f"{example.fields['context']} {example.fields.get('question', '')}"
        return int(np.argmax(cosines(found[0], [context] * len(choices), choices)))

    return [each("TF-IDF cosine", examples, best)]
