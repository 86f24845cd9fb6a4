"""Metrics equal those of scikit-learn, scipy, seqeval, sacrebleu, rouge-score and SQuAD's rules."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import scipy.stats
import sklearn.dummy
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from plume.tasks import metrics

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@settings(max_examples=50)
@given(st.integers(2, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=60))
def test_labels_equal_scikit_learn(count, pairs):
    right, given_ = [a % count for a, _ in pairs], [b % count for _, b in pairs]
    metric = metrics.ClassificationMetric([str(i) for i in range(count)])
    for a, b in zip(right, given_, strict=True):
        metric.add(a, b)
    found = metric.results()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(right, given_))
        assert found["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(right, given_))
        assert found["f1_macro"] == pytest.approx(
            sklearn.metrics.f1_score(right, given_, average="macro", zero_division=0)
        )
        if count == 2:
            assert found["f1"] == pytest.approx(sklearn.metrics.f1_score(right, given_, zero_division=0))
            assert found["recall"] == pytest.approx(sklearn.metrics.recall_score(right, given_, zero_division=0))


def test_numbers_equal_scipy():
    draw = np.random.default_rng(0)
    right = draw.integers(0, 6, 100).astype(float)  # with ties
    given_ = right + draw.normal(size=100).round(1)
    metric = metrics.RegressionMetric()
    for a, b in zip(right, given_, strict=True):
        metric.add(a, b)
    found = metric.results()
    assert found["pearson"] == pytest.approx(scipy.stats.pearsonr(right, given_).statistic)
    assert found["spearman"] == pytest.approx(scipy.stats.spearmanr(right, given_).statistic)
    assert found["mse"] == pytest.approx(sklearn.metrics.mean_squared_error(right, given_))
    rows = np.zeros((100, 1))
    constant = sklearn.dummy.DummyRegressor().fit(rows, right).predict(rows)
    assert metric.baseline("mse") == pytest.approx(sklearn.metrics.mean_squared_error(right, constant))
    assert metric.baseline("pearson") == metric.baseline("spearman") == 0.0


@given(st.lists(st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from(TAGS)), min_size=1, max_size=8), min_size=1))
def test_entities_equal_seqeval(sentences):
    from seqeval.metrics import f1_score, precision_score, recall_score

    right = [[a for a, _ in s] for s in sentences]
    given_ = [[b for _, b in s] for s in sentences]
    metric = metrics.EntityMetric()
    for a, b in zip(right, given_, strict=True):
        metric.add(a, b)
    found = metric.results()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found["f1"] == pytest.approx(f1_score(right, given_))
        assert found["precision"] == pytest.approx(precision_score(right, given_))
        assert found["recall"] == pytest.approx(recall_score(right, given_))


@given(st.lists(st.sampled_from(["O", "B-X", "I-X", "E-X", "S-X", "I-Y", "Z"]), max_size=8))
def test_entities_of_other_schemes_are_seqevals(tags):
    from seqeval.metrics.sequence_labeling import get_entities

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = get_entities(tags)
    if "Z" in tags:  # a bare tag: seqeval takes its last letter for a prefix, we take it for a kind
        return
    assert list(metrics.entities(tags)) == expected


@given(st.data())
@pytest.mark.parametrize("scheme", ["IOBES", "BILOU", "BMES"])
def test_entities_of_every_scheme_are_found_again(scheme, data):
    """Written out from spans: a single word has its own letter, and neighbours of one type stay apart."""
    begin, middle, end, single = {"IOBES": "BIES", "BILOU": "BILU", "BMES": "BMES"}[scheme]
    spans, tags = [], []
    for kind, size in data.draw(st.lists(st.tuples(st.sampled_from(["X", "Y", None]), st.integers(1, 4)), max_size=6)):
        if kind is not None:
            spans.append((kind, len(tags), len(tags) + size - 1))
        letters = [single] if size == 1 else [begin, *[middle] * (size - 2), end]
        tags += ["O" if kind is None else f"{letter}-{kind}" for letter in letters]
    assert list(metrics.entities(tags)) == spans


def test_tags_with_a_dash_that_is_no_prefix_are_types():
    tags = ["NN", "-LRB-", "NN", "NN-SHORT", "O", "-RRB-"]
    spans = [("NN", 0, 0), ("-LRB-", 1, 1), ("NN", 2, 2), ("NN-SHORT", 3, 3), ("-RRB-", 5, 5)]
    assert list(metrics.entities(tags)) == spans


def test_squad_rules():
    metric = metrics.AnswerMetric()
    metric.add(["the Denver Broncos", "Broncos"], "Denver Broncos!")
    metric.add([], "")
    metric.add(["Santa Clara, California"], "California")
    found = metric.results()
    assert found["exact_match"] == pytest.approx(2 / 3)
    assert found["f1"] == pytest.approx((1 + 1 + 2 * 1 / (3 + 1)) / 3)


def test_fine_tuning_and_evaluation_share_one_scale():
    answers, texts = ["the cat sat on the mat", "a dog runs"], ["the cat sat on a mat", "a dog runs away"]
    metric = metrics.GenerationMetric()
    for answer, text in zip(answers, texts, strict=True):
        metric.add(answer, text)
    each = [metrics.rouge(text, [answer]) for answer, text in zip(answers, texts, strict=True)]
    assert metric.results()["rougeL"] == pytest.approx(sum(e["rougeL"] for e in each) / 2)
    assert 0 < metric.results()["rougeL"] <= 1 < metric.results()["bleu"] <= 100
    gold, predicted = [0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0]
    labels = metrics.ClassificationMetric(["no", "yes"])
    for a, b in zip(gold, predicted, strict=True):
        labels.add(a, b)
    assert labels.results()["matthews"] == metrics.matthews_metric(gold, predicted).value


@pytest.mark.filterwarnings("ignore")
def test_the_error_of_matthews_is_a_jackknife():
    draw = np.random.default_rng(5)
    gold, predicted = draw.integers(0, 2, 30), draw.integers(0, 2, 30)
    keep = ~np.eye(30, dtype=bool)
    values = [sklearn.metrics.matthews_corrcoef(gold[k], predicted[k]) for k in keep]
    expected = np.sqrt(29 / 30 * ((values - np.mean(values)) ** 2).sum())
    assert metrics.matthews_metric(gold.tolist(), predicted.tolist()).stderr == pytest.approx(expected)


def test_texts_equal_the_libraries():
    import sacrebleu

    right, given_ = ["the cat sat on the mat", "a dog runs"], ["the cat sat on a mat", "a dog runs away"]
    metric = metrics.GenerationMetric()
    for a, b in zip(right, given_, strict=True):
        metric.add(a, b)
    found = metric.results()
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(given_, [right]).score)
    assert found["rouge1"] == pytest.approx((10 / 12 + 6 / 7) / 2)  # shared words of both sides


@pytest.mark.parametrize("name", ["accuracy", "f1", "f1_macro", "matthews"])
def test_the_best_threshold_is_the_best_of_all(name):
    draw = random.Random(1)
    scores = [round(draw.random(), 2) for _ in range(60)]
    right = [draw.random() < score**2 for score in scores]
    judge = {
        "accuracy": sklearn.metrics.accuracy_score,
        "f1": sklearn.metrics.f1_score,
        "f1_macro": partial(sklearn.metrics.f1_score, average="macro"),
        "matthews": sklearn.metrics.matthews_corrcoef,
    }[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best = max(judge(right, [s >= t / 100 - 0.005 for s in scores]) for t in range(102))  # between all scores
        chosen = metrics.best_threshold(scores, right, name)
        assert judge(right, [s >= chosen for s in scores]) == pytest.approx(best)


@pytest.mark.parametrize("text", ["Привет, дорогой мир", "これはペンです", "αυτό είναι", "한국어 문장 입니다"])
def test_rouge_of_texts_in_other_letters(text):
    """rouge-score's own tokenizer has no word of them."""
    assert metrics.rouge(text, [text]) == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert metrics.rouge("nothing", [text])["rouge1"] == 0.0


@pytest.mark.parametrize("text", ["これはペンです", "สวัสดีชาวโลก"])
def test_bleu_of_texts_without_spaces(text):
    """Over characters: a whole sentence would be one word, which has no four words in a row."""
    assert metrics.bleu([text], [[text]]).value == pytest.approx(100)
    assert 0 < metrics.bleu([text[:-1]], [[text]]).value < 100


def test_chinese_is_compared_character_by_character():
    """Words are not separated by spaces: whole sentences would count as one word, and be equal or not."""
    import sacrebleu
    from rouge_score.rouge_scorer import RougeScorer

    answers, texts = ["我喜欢在春天去北京看花", "今天天气很好。"], ["我喜欢在春天去上海看花", "今天天气很好啊！"]
    found = metrics.GenerationMetric()
    for answer, text in zip(answers, texts, strict=True):
        found.add(answer, text)
    results = found.results()
    spaced = [[" ".join(text) for text in side] for side in (texts, answers)]
    assert results["bleu"] == pytest.approx(sacrebleu.corpus_bleu(spaced[0], [spaced[1]], tokenize="none").score)
    assert results["bleu"] > 40
    ids = {c: f"w{n}x" for n, c in enumerate(sorted(set("".join(texts + answers)) - set("。！")))}
    latin = [[" ".join(ids[c] for c in text if c in ids) for text in side] for side in (texts, answers)]
    scorer = RougeScorer(["rouge1", "rougeL"])
    for name in ("rouge1", "rougeL"):
        expected = [scorer.score(b, a)[name].fmeasure for a, b in zip(*latin, strict=True)]
        assert results[name] == pytest.approx(sum(expected) / 2)
    assert (
        metrics.answer_f1("去上海", ["去北京"]) == pytest.approx(1 / 3)
        and metrics.answer_f1("GPT 模型", ["gpt 模"]) == 0.8
    )
