"""Any number of labels per text: rows, loss, metrics and baseline against torch and scikit-learn, and a whole run."""

import json
from dataclasses import asdict
from itertools import product

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from test_losses import model_for, task
from tiny import config_of, random_base, tokenizer_of

import plume
from plume.config import FinetuneConfig, ServeConfig, TaskConfig, UserError
from plume.hf import save_model
from plume.model.heads import Model
from plume.serve.analysis import predict
from plume.serve.explanations import explain
from plume.serve.schemas import ExplainRequest, PredictRequest
from plume.serve.served_models import Origin, Served
from plume.tasks.multilabel import MultiLabelMetric
from plume.tasks.schema import Example, TaskSettings
from plume.tasks.task_data import load_task

LABELS = ("bad", "film", "good")
VIEWS = ("labels", "cause")


def write(path, count):
    """Each label has its word, so that the length of a text tells how many labels it has."""
    words, lines = {"bad": "dull", "film": "film", "good": "fine"}, []
    for number in range(count):
        given = [label for place, label in enumerate(LABELS) if number >> place & 1]
        lines.append(f"a {' '.join(words[label] for label in given)} {number},{';'.join(given) or ';'}")
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return str(path)


def test_rows_and_loss(tmp_path):
    data = load_task(TaskConfig(train=write(tmp_path / "a.csv", 60)))
    assert data.kind == "multilabel" and data.labels == LABELS and {len(e.label) for e in data.train} == {0, 1, 2, 3}
    model, tokenizer = model_for("bert", "classify", LABELS)
    kind = task("multilabel", "bert", tokenizer, labels=LABELS)
    batch = kind.encode([Example({"text": "a fine film"}, ["film", "good"], "")]).batch(np.arange(1))
    hidden = kind.hidden(model, batch)
    wanted = torch.nn.BCEWithLogitsLoss()(kind.logits(model, hidden, batch), torch.tensor([[0.0, 1.0, 1.0]]))
    assert kind.losses(model, hidden, batch).item() == pytest.approx(wanted.item(), abs=1e-6)


@pytest.mark.parametrize("often", [(0.9, 0.1, 0.1), (0.4, 0.4, 0.4), (0.2, 0.05, 0.6)])
def test_predictions_that_ignore_the_input_are_the_best_set_of_all(often):
    """Every set of labels for all rows, by scikit-learn."""
    gold = np.random.default_rng(1).random((40, 3)) < np.array(often)
    metric = MultiLabelMetric(LABELS)
    for row in gold:
        metric.add([label for label, mark in zip(LABELS, row, strict=True) if mark], [])
    every = [np.tile(np.array(marks, dtype=bool), (40, 1)) for marks in product((0, 1), repeat=3)]
    for average in ("micro", "macro"):
        best = max(f1_score(gold, constant, average=average, zero_division=0) for constant in every)
        assert metric.baseline(f"f1_{average}") == pytest.approx(best)
    assert metric.baseline("exact_match") == max(accuracy_score(gold, constant) for constant in every)


def test_metrics_and_baseline_equal_scikit_learn(tmp_path):
    draw = np.random.default_rng(0)
    gold, predicted = draw.random((2, 50, 3)) < 0.4
    metric = MultiLabelMetric(LABELS)
    for a, b in zip(gold, predicted, strict=True):
        metric.add(*([label for label, mark in zip(LABELS, row, strict=True) if mark] for row in (a, b)))
    found = metric.results()
    assert found["f1_micro"] == pytest.approx(f1_score(gold, predicted, average="micro"))
    assert found["f1_macro"] == pytest.approx(f1_score(gold, predicted, average="macro"))
    assert found["exact_match"] == pytest.approx((gold == predicted).all(axis=1).mean())
    data = load_task(TaskConfig(train=write(tmp_path / "a.csv", 120)))
    kind = task("multilabel", "bert", model_for("bert", "classify", LABELS)[1], labels=LABELS)
    trivial = {b.name: b.predictions for b in kind.baselines(data.train, data.validation)}
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    x = vectors.fit_transform([e.fields["text"] for e in data.train])
    rows = vectors.transform([e.fields["text"] for e in data.validation])
    for label in LABELS:
        model = LogisticRegression(max_iter=300).fit(x, [label in e.label for e in data.train])
        ours = [label in trivial["TF-IDF + logistic regression"][n].value for n in range(len(data.validation))]
        assert ours == model.predict(rows).tolist()


@pytest.mark.slow
def test_a_whole_run_with_thresholds(tmp_path):
    random_base("bert", tmp_path / "bert")
    config = FinetuneConfig(
        model=str(tmp_path / "bert"),
        task=TaskConfig(train=write(tmp_path / "a.csv", 240)),
        folder=tmp_path / "run",
        epochs=25.0,
        batch=8,
        classifier_dropout=0.0,
        lr=3e-3,
        seeds=1,
        tune_threshold=True,
        device="cpu",
        precision="float32",
    )
    result = plume.finetune(config)
    assert result.metric == "f1_micro" and result.best.score > 0.9
    lm = plume.load(result.folder)
    assert lm.predict([{"text": "a dull film 1"}])[0].value == ["bad", "film"]
    saved = json.loads((result.model / "plume.json").read_text())["task"]
    assert saved["kind"] == "multilabel" and len(saved["thresholds"]) == 3
    with pytest.raises(UserError, match=r"any number of labels; use lm.predict"):
        lm.classify(["dull film"])


def test_the_explorer_shows_a_probability_of_each_label(tmp_path):
    """They are sigmoids, as in a prediction, and do not add up to 1."""
    tokenizer, settings = tokenizer_of("bert"), TaskSettings(kind="multilabel", labels=LABELS, length=32)
    torch.manual_seed(0)
    model = Model(config_of("bert"), "classify", LABELS).eval()
    save_model(model, tmp_path / "m", tokenizer=tokenizer, info={"task": asdict(settings)})
    lm = plume.load(tmp_path / "m")
    (found,) = lm.predict([{"text": "a fine film"}])
    served = Served("m", Origin(str(tmp_path / "m")), lm, ServeConfig(models=(str(tmp_path / "m"),)))
    try:
        shown, caused = (explain(served, ExplainRequest(model="m", input="a fine film", view=v)) for v in VIEWS)
        row = {"text": "a fine film", "label": 0, "id": None}  # as it stands in a data set
        predicted = predict(served, PredictRequest(model="m", input=[row]))["data"][0]["scores"]
    finally:
        served.close()
    assert {row["name"]: row["probability"] for row in shown["answers"]} == pytest.approx(found.scores, abs=1e-5)
    assert {row["name"]: row["before"] for row in caused["rows"]} == pytest.approx(found.scores, abs=1e-5)
    assert predicted == pytest.approx(found.scores, abs=1e-5)
    assert caused["divergence"] is None  # several probabilities are no distribution


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "labels", "target"), [("multilabel", LABELS, "label"), ("classify", ("s",), "number")]
)
def test_transformers_computes_the_same_scores(kind, labels, target, tmp_path):
    """`problem_type` of config.json says which, in both directions: a softmax was computed without it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = TaskSettings(kind=kind, labels=labels, target=target, length=32)
    model, row = Model(config_of("bert"), "classify", labels).eval(), {"text": "a fine film"}
    save_model(model, tmp_path / "m", tokenizer=tokenizer_of("bert"), info={"task": asdict(settings)})
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path / "m"), top_k=None, device="cpu")
    (found,) = pipeline([row["text"]])
    theirs = {one["label"]: one["score"] for one in found}
    scores = {"score": theirs.pop("s")} if target == "number" else theirs
    assert plume.load(tmp_path / "m").predict([row])[0].scores == pytest.approx(scores, abs=1e-5)
    if kind == "multilabel":  # as another tool writes it
        (tmp_path / "m/plume.json").unlink()
        plume.load(tmp_path / "m").save(tmp_path / "copy")
        for folder in ("m", "copy"):
            assert plume.load(tmp_path / folder).predict([row])[0].scores == pytest.approx(scores, abs=1e-5)
        with pytest.raises(UserError, match=r"any number of labels; use lm.predict"):
            plume.load(tmp_path / "m").classify(["a fine film"])
