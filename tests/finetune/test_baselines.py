"""Baselines equal scikit-learn's own run on real sets, and a verdict equals an independent computation."""

import csv
import random
import re
import string
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import sacrebleu
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, matthews_corrcoef
from tiny import tokenizer_of

from plume.config import TaskConfig
from plume.tasks import baselines, kind_named, metrics
from plume.tasks.paired import compare
from plume.tasks.schema import Example, Prediction, TaskSettings
from plume.tasks.task_data import load_task
from plume.tasks.task_kind import evaluate


def task(kind, **settings):
    return kind_named(kind)(TaskSettings(kind=kind, length=32, **settings), tokenizer_of("bert"), causal=False)


def words():
    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")


def theirs(train, valid, vectors):
    """scikit-learn alone, over (text, label) rows."""
    x = vectors.fit_transform([t for t, _ in train])
    model = LogisticRegression(max_iter=300).fit(x, [y for _, y in train])
    return model.predict(vectors.transform([t for t, _ in valid])).tolist()


def ours(kind, train, valid):
    examples = [Example({"text": t}, y, "") for t, y in valid]
    found = kind.baselines([Example({"text": t}, y, "") for t, y in train], examples)
    return {b.name: b.predictions for b in found}, examples


def rows_of(path, text, label, delimiter="\t", limit=None, header=True):
    with open(path, newline="", encoding="utf-8") as file:
        quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        rows = list(csv.reader(file, delimiter=delimiter, quoting=quoting))[int(header) : limit]
    return [(row[text].strip(), row[label]) for row in rows if row[text].strip()]


@pytest.mark.parametrize("name", ["sst2", "cola", "chnsenticorp"])
def test_tfidf_equals_scikit_learns_own_run(shared, name):
    if name == "chnsenticorp":
        rows = rows_of(shared / "data/chnsenticorp/ChnSentiCorp_htl_all.csv", 1, 0, ",")
        random.Random(0).shuffle(rows)
        train, valid = rows[:1500], rows[1500:2000]
        vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, analyzer="char")
    else:
        columns, header = ((0, 1), True) if name == "sst2" else ((3, 1), False)
        train, valid = (
            rows_of(shared / f"data/{name}/{part}.tsv", *columns, limit=limit, header=header)
            for part, limit in (("train", 3000), ("dev", None))
        )
        vectors = words()
    kind = task("classify", labels=("0", "1"))
    found, examples = ours(kind, train, valid)
    predicted = found["TF-IDF + logistic regression"]
    expected, gold = theirs(train, valid, vectors), [y for _, y in valid]
    assert [predicted[n].value for n in range(len(valid))] == expected
    results = evaluate(kind, examples, predicted).results()
    assert results["accuracy"] == pytest.approx(accuracy_score(gold, expected))
    assert results["matthews"] == pytest.approx(matthews_corrcoef(gold, expected), abs=1e-9)
    usual = max({y for _, y in train}, key=[y for _, y in train].count)
    assert {p.value for p in found["most frequent label"].values()} == {usual}
    assert results["accuracy"] > (0.75 if name == "chnsenticorp" else 0.6)


def test_cosine_equals_scikit_learns_own_run(shared):
    config = TaskConfig(name="stsb", train=str(shared / "data/stsb"))
    data = load_task(config)
    train, valid = data.train[:1000], data.validation[:300]
    kind = task("pair", labels=("score",), target="number")
    found = {b.name: b.predictions for b in kind.baselines(train, valid)}
    vectors = words().fit([e.fields["text"] for e in train] + [e.fields["pair"] for e in train])

    def cosine(rows):
        a, b = (vectors.transform([e.fields[name] for e in rows]).toarray() for name in ("text", "pair"))
        return (a * b).sum(axis=1)

    line = LinearRegression().fit(cosine(train)[:, None], [e.label for e in train])
    expected = line.predict(cosine(valid)[:, None])
    assert np.allclose([found["TF-IDF cosine"][n].value for n in range(300)], expected, atol=1e-9)
    pearson = evaluate(kind, valid, found["TF-IDF cosine"]).results()["pearson"]
    assert pearson == pytest.approx(np.corrcoef(expected, [e.label for e in valid])[0, 1]) and pearson > 0.5
    assert set(found) == {"mean target", "TF-IDF + ridge regression", "TF-IDF cosine"}


def test_pairs_equal_scikit_learns_own_run(shared):
    """RTE: both texts and the product of their features, which shows what they share."""
    data = load_task(TaskConfig(name="rte", train=str(shared / "data/rte")))
    train, valid = data.train[:1200], data.validation
    kind = task("pair", labels=data.labels)
    found = {b.name: b.predictions for b in kind.baselines(train, valid)}["TF-IDF + logistic regression"]
    vectors = words().fit([e.fields["text"] for e in train] + [e.fields["pair"] for e in train])

    def both(rows):
        a, b = (vectors.transform([e.fields[name] for e in rows]) for name in ("text", "pair"))
        return sparse.hstack([a, b, a.multiply(b)], format="csr")

    theirs = LogisticRegression(max_iter=300).fit(both(train), [e.label for e in train])
    expected = theirs.predict(both(valid)).tolist()
    assert [found[n].value for n in range(len(valid))] == expected
    gold = [e.label for e in valid]
    assert evaluate(kind, valid, found).results()["accuracy"] == pytest.approx(accuracy_score(gold, expected))


def test_short_texts_without_spaces_are_known_by_their_letters():
    """Their runs between blanks are no longer than words are; each would be a word that no other text has."""
    things, ends = (
        ("这部电影", "这本书", "这家店", "这个手机"),
        {"pos": ("很好看", "真不错"), "neg": ("太差了", "浪费时间")},
    )
    rows = [
        Example({"text": f"{when}{thing}{end}"}, label, "")
        for when in ("昨天", "今天", "上周", "总之", "听说")
        for thing in things
        for label, endings in ends.items()
        for end in endings
    ]
    kind = task("classify", labels=("neg", "pos"))
    (_, tfidf) = kind.baselines(rows[:48], rows[48:])
    assert evaluate(kind, rows[48:], tfidf.predictions).results()["accuracy"] == 1.0
    assert not baselines.without_spaces(["a fine film", "Donaudampfschiff"])


def test_sentences_without_spaces():
    context = "张三住在北京。李四喜欢喝茶！王五在上海工作。"
    rows = [Example({"question": "谁在上海？", "context": context}, None, "")]
    assert baselines.nearest_sentence(rows).predictions[0].value == "王五在上海工作。"
    assert metrics.first_sentences(context, 2) == "张三住在北京。李四喜欢喝茶！"
    assert metrics.first_sentences("Aha.  So it is. No", 2) == "Aha.  So it is."


def test_copies_and_first_sentences_equal_sacrebleu(shared):
    sides = [
        (shared / f"data/multi30k/val.{name}").read_text(encoding="utf-8").splitlines()[:300] for name in ("en", "de")
    ]
    rows = [Example({"source": a}, b, "") for a, b in zip(*sides, strict=True)]
    kind = kind_named("generate")(TaskSettings(kind="generate", length=32), tokenizer_of("gpt2"), causal=True)
    found = {b.name: evaluate(kind, rows, b.predictions).results() for b in kind.baselines(rows, rows)}
    copied = sacrebleu.corpus_bleu(sides[0], [sides[1]]).score
    assert found["copy of the source"]["bleu"] == pytest.approx(copied, abs=1e-6) and copied > 0
    assert found["first sentence"]["bleu"] <= 100


def test_the_nearest_sentence_is_that_of_scikit_learns_counts(shared):
    """SQuAD: the sentence with the most words of the question, found with CountVectorizer; scored as by its script."""
    data = load_task(TaskConfig(train=str(shared / "data/squad/dev-v1.1.json")))
    rows = data.validation[:150]
    kind = task("span")
    (found,) = kind.baselines(data.train[:10], rows)
    scores = []
    for number, row in enumerate(rows):
        sentences = [s for s in re.split(r"(?<=[.!?。！？])\s*", row.fields["context"].strip()) if s]
        counts = CountVectorizer(binary=True, token_pattern=r"(?u)\w+").fit([row.fields["question"]])
        shared_words = np.asarray(counts.transform(sentences).sum(axis=1)).ravel()
        best = sentences[int(shared_words.argmax())]
        assert found.predictions[number].value == best
        scores.append(max(squad_f1(best, answer) for _, answer in row.label))
    assert evaluate(kind, rows, found.predictions).results()["f1"] == pytest.approx(np.mean(scores), abs=1e-9)


def squad_f1(prediction, answer):
    def pieces(text):
        plain = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", plain).split()

    ours, gold = pieces(prediction), pieces(answer)
    common = sum((Counter(ours) & Counter(gold)).values())
    return 2 * common / (len(ours) + len(gold)) if common else 0.0


def test_without_scikit_learn_constants_remain(monkeypatch):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    found, _ = ours(task("classify", labels=("a", "b")), [("x", "a"), ("y", "b"), ("z", "a")], [("x", "b")])
    assert list(found) == ["most frequent label"] and found["most frequent label"][0].value == "a"
    assert "pip install 'plume-lm[finetune]'" in baselines.missing_package()


def test_tags_spans_and_choices_have_their_own():
    train = [Example({"words": ["in", "Paris"]}, ["O", "B-LOC"], ""), Example({"words": ["in", "May"]}, ["O", "O"], "")]
    (tags,) = task("tag", labels=("B-LOC", "O")).baselines(train, [Example({"words": ["Paris", "x"]}, None, "")])
    assert tags.predictions[0].value == ["B-LOC", "O"]
    asked = Example({"question": "Who wrote it?", "context": "It rained. Ann wrote it. Then night."}, [(11, "Ann")], "")
    (span,) = task("span").baselines([asked], [asked])
    assert span.predictions[0].value == "Ann wrote it."
    rows = [Example({"context": "the red fox", "choices": ["a hen", "a fox", "x"]}, n, "") for n in (1, 1, 0)]
    usual, nearest = task("choose").baselines(rows, rows[2:])
    assert usual.predictions[0].value == 1 and nearest.predictions[0].value == 1


def test_the_interval_is_that_of_the_paired_difference():
    """For accuracy the error of a paired difference is written out: the standard deviation of row differences."""
    draw = np.random.default_rng(0)
    gold = draw.integers(0, 2, 800)
    right = {"ours": draw.random(800) < 0.8, "theirs": draw.random(800) < 0.7}
    kind = task("classify", labels=("0", "1"))
    examples = [Example({"text": "x"}, str(y), "") for y in gold]
    given = {
        name: {n: Prediction(str(y if hit else 1 - y), {}) for n, (y, hit) in enumerate(zip(gold, hits, strict=True))}
        for name, hits in right.items()
    }
    verdict = compare(kind, examples, given["ours"], given["theirs"], "accuracy", "TF-IDF")
    apart = right["ours"].astype(float) - right["theirs"]
    error = apart.std(ddof=1) / 800**0.5
    assert verdict.score - verdict.baseline == pytest.approx(apart.mean())
    assert verdict.high - verdict.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert verdict.outcome == "better" and str(verdict).startswith("better than TF-IDF: accuracy 0.")
    same = compare(kind, examples, given["ours"], given["ours"], "accuracy", "itself")
    assert same.outcome == "level" and same.low == same.high == 0
    assert compare(kind, examples, given["theirs"], given["ours"], "accuracy", "x").outcome == "worse"


@pytest.mark.parametrize("count", range(1, 9))
def test_a_few_rows_show_no_difference(count):
    """All rows for one of two equal models: by chance as often as heads alone, or tails alone, of so many coins."""
    kind = task("classify", labels=("0", "1"))
    examples = [Example({"text": "x"}, "1", "") for _ in range(count)]
    right, wrong = ({n: Prediction(value, {}) for n in range(count)} for value in "10")
    for sign, pair in ((1, (right, wrong)), (-1, (wrong, right))):
        verdict = compare(kind, examples, *pair, "accuracy", "x")
        assert (verdict.outcome == "level") == (2 * 0.5**count > 0.05)
        assert verdict.low <= sign == verdict.score - verdict.baseline <= verdict.high


def test_a_difference_is_never_larger_than_the_metric_allows():
    """7 of 8 rows, where 1.96 errors end at 1.1 (the error written out as above); correlations differ by 2 at most."""
    kind = task("classify", labels=("0", "1"))
    examples = [Example({"text": "x"}, "1", "") for _ in range(8)]
    right, wrong = (
        {n: Prediction(str(int(hit(n))), {}) for n in range(8)} for hit in (lambda n: True, lambda n: n > 6)
    )
    better, worse = (compare(kind, examples, *pair, "accuracy", "x") for pair in ((right, wrong), (wrong, right)))
    error = np.array([1.0] * 7 + [0.0]).std(ddof=1) / 8**0.5
    assert 0.875 + 1.96 * error > 1.05 and better.high == 1.0 and worse.low == -1.0
    assert better.low == pytest.approx(0.875 - 1.96 * error, abs=0.05) and better.outcome == "better"
    assert "on 8 rows" in str(better) and "on 1 row " in str(replace(better, rows=1))
    numbers = task("similarity", target="number", labels=("score",))
    pairs = [Example({"text": "x", "pair": "y"}, float(n), "") for n in range(3)]
    up, down = ({n: Prediction(sign * n, {}) for n in range(3)} for sign in (1.0, -1.0))
    assert compare(numbers, pairs, up, down, "pearson", "x").high == 2.0
