"""Few-shot classification: the loss of pairs, the fitted head, and a whole run."""

import math
import random

import numpy as np
import pytest
import torch
import transformers
from sklearn.linear_model import LogisticRegression
from tiny import BAD, GOOD, random_base, tokenizer_of

import plume
from plume.cli.main import main
from plume.config import FinetuneConfig, TaskConfig, UserError
from plume.tasks import few_shot
from plume.tasks.classify import ClassifyTask
from plume.tasks.schema import Example, TaskSettings
from plume.tasks.task_kind import TaskOptions
from plume.tasks.token_rows import Grouped
from plume.train.finetune import build_model
from plume.train.finetune_plan import make_plan


def rows(count, seed=0):
    """Both labels in turn; ten rows hold every phrase once."""
    draw = random.Random(seed)
    texts = [f"{(GOOD if n % 2 else BAD)[n // 2 % 5]} {draw.choice('xyz')}" for n in range(count)]
    return [(text, "pos" if n % 2 else "neg") for n, text in enumerate(texts)]


def write(path, given):
    path.write_text("\n".join(["text,label", *(f"{text},{label}" for text, label in given)]) + "\n")
    return str(path)


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


@pytest.mark.parametrize("sizes", [(7,), (4, 3), (1, 2, 4)])
def test_the_loss_is_a_loop_over_pairs_whatever_the_micro_batch(sizes):
    settings = TaskSettings(kind="classify", labels=("neg", "pos"), length=32)
    kind = ClassifyTask(settings, tokenizer_of("bert"), causal=False, options=TaskOptions(contrastive=True))
    given = [*rows(6), ("a fine film", "pos")]
    data = kind.encode([Example({"text": text}, label, "") for text, label in given])
    vectors = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    numbers, first, total, count = np.arange(7), 0, 0.0, 0.0
    for size in sizes:
        batch = data.part(numbers, first, size, group=7)
        total += float(few_shot.pair_losses(vectors, batch).sum())
        count += kind.count(batch)
        first += size
    expected = 0.0
    for i in range(7):
        same = [
            (cosine(vectors[i].tolist(), vectors[j].tolist()) - 1) ** 2
            for j in range(7)
            if j != i and given[j][1] == given[i][1]
        ]
        apart = [cosine(vectors[i].tolist(), vectors[j].tolist()) ** 2 for j in range(7) if given[j][1] != given[i][1]]
        expected += (sum(same) / len(same) + sum(apart) / len(apart)) / 2
    assert count == 7 and total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("labels", "intercept"), [(2, True), (3, True), (3, False)])
def test_the_head_is_scikit_learns_logistic_regression(labels, intercept):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 8))
    y = (x[:, 0] * 2 + draw.normal(size=60)).argsort().argsort() * labels // 60
    theirs = LogisticRegression(fit_intercept=intercept, max_iter=5000, tol=1e-10)
    penalty = 1.0
    if labels == 2:
        penalty = (
            2.0  # scikit-learn has one row of weights for two labels; two rows of half the size have half the penalty
        )
        theirs.C = penalty
    theirs.fit(x, y)
    weight, bias = few_shot.logistic_regression(torch.from_numpy(x), torch.from_numpy(y), labels, intercept=intercept)
    found = (torch.from_numpy(x) @ weight.T + bias).softmax(-1).numpy()
    np.testing.assert_allclose(found, theirs.predict_proba(x), atol=1e-4)
    assert intercept or not bias.any()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_few_rows_through_the_command_line(tmp_path, capsys, family):
    random_base(family, tmp_path / "base")
    words = ["finetune", str(tmp_path / "base"), "--task.train", write(tmp_path / "few.csv", rows(16))]
    words += ["--task.validation", write(tmp_path / "valid.csv", rows(60, seed=5)), "--folder", str(tmp_path / "run")]
    assert main([*words, "--contrastive", "40", "--lr", "3e-3", "--seeds", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "40 steps on pairs of rows, then logistic regression" in said and "underfitting" not in said
    lm = plume.load(tmp_path / "run")
    valid = rows(60, seed=5)
    right = [found.label == label for found, (_, label) in zip(lm.classify([t for t, _ in valid]), valid, strict=True)]
    assert sum(right) / 60 > 0.9
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    tokens, _ = lm.predictor.kind().encode([Example({"text": valid[0][0]}, None, "")]).batch(np.array([0])).tokens, None
    with torch.no_grad():
        probabilities = theirs(tokens).logits.softmax(-1)[0]
    ours = lm.classify(valid[0][0]).probabilities
    assert probabilities.tolist() == pytest.approx([ours["neg"], ours["pos"]], abs=1e-4)


def test_pairs_move_the_body_and_not_the_head(tmp_path):
    random_base("bert", tmp_path / "base")
    task = TaskConfig(
        train=write(tmp_path / "few.csv", rows(16)), validation=write(tmp_path / "v.csv", rows(8, seed=1))
    )
    config = FinetuneConfig(model=str(tmp_path / "base"), task=task, folder=tmp_path / "run", contrastive=5)
    plan = make_plan(config)
    model, _ = build_model(plan, 0)
    batch = Grouped(plan.train, 16, seed=0)
    part = plan.train.part(batch.numbers(0), 0, 16)
    plan.kind.losses(model, plan.kind.hidden(model, part), part).sum().backward()
    assert model.head.out.weight.grad is None and model.body.embed.tokens.weight.grad.abs().sum() > 0
    assert plan.auxiliary_weight == 0.0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"adapt": {"mode": "features"}}, "adapt.mode='features' keeps"),
        ({"task": {"target": "number"}}, "it does not take numbers"),
        ({"contrastive": 0}, "contrastive=0"),
    ],
)
def test_what_does_not_go_together(tmp_path, more, says):
    random_base("bert", tmp_path / "base")
    given = [(text, "1" if label == "pos" else "0") for text, label in rows(16)]
    task = {"train": write(tmp_path / "few.csv", given), **more.pop("task", {})}
    table = {"model": str(tmp_path / "base"), "folder": tmp_path / "run", "contrastive": 5, **more, "task": task}
    with pytest.raises(UserError, match=says):
        plume.finetune(**table)
