"""The search for a learning rate: what it picks from scores, and that its rate trains as well as the best of a grid."""

import json
import math

import numpy as np
import pytest
from tiny import random_base, write_reviews

from plume.config import FinetuneConfig, TaskConfig, UserError
from plume.train.finetune import finetune
from plume.train.lr_search import RateScore, best_rate, search


def picked(*losses):
    rates = [10.0**-n for n in range(len(losses))]
    return best_rate([RateScore(lr, loss) for lr, loss in zip(rates, losses, strict=True)])


def test_the_middle_of_the_best_rates_is_picked():
    assert picked(0.0, -0.9, -0.9, -0.9, 0.0) == 1e-2
    assert picked(-0.5, -0.5, -0.9, -0.5, -0.5) == 1e-2
    assert picked(math.inf, -0.8, -0.8, -0.8, -0.5) == 1e-2  # 0.1 is beside a rate that diverged
    assert picked(-0.5, -0.92, -0.5, -0.9, -0.9, -0.9, -0.9) in (1e-4, 1e-5)  # a lucky one is no region
    assert picked(math.inf, math.inf, math.inf) == 1e-2


@pytest.mark.parametrize(("metric", "sign"), [("matthews", -1), ("loss", 1)])
def test_scores_are_shown_with_their_sign(tmp_path, capsys, metric, sign):
    values = [-0.25, 0.5, math.inf] if metric == "matthews" else [2.5, 0.5, math.inf]
    losses = iter([sign * value if math.isfinite(value) else value for value in values])
    found = search(3, lambda lr: next(losses), tmp_path, metric=metric, resume=False)
    shown = [f"{value:.4f}" for value in values[:2]] + ["diverged"]
    assert [one.shown(metric) for one in found] == shown
    assert [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines()] == shown
    assert search(3, pytest.fail, tmp_path, metric=metric, resume=True) == found


def test_findings_come_before_the_search_and_do_not_ask_for_another(tmp_path, capsys):
    random_base("bert", tmp_path / "bert")
    write_reviews(tmp_path / "reviews.csv", copies=5)
    task = TaskConfig(train=str(tmp_path / "reviews.csv"))
    given = {"epochs": 1.0, "batch": 64, "seeds": 1, "device": "cpu", "precision": "float32", "search": 3}
    found = finetune(FinetuneConfig(model=str(tmp_path / "bert"), task=task, folder=tmp_path / "run", **given))
    said, report = capsys.readouterr().out, (found.folder / "report.md").read_text()
    order = [said.index(part) for part in ("- rows: ", "warning: few", "search 1/3", "found by --search 3")]
    assert order == sorted(order)
    assert "warning: underfitting" in report and "--search 8" not in report and "--epochs 2" in report
    assert "Failed runs" not in report or "lower learning rate" not in report


@pytest.mark.slow
def test_the_search_finds_a_rate_near_the_best_of_a_grid(tmp_path):
    random_base("bert", tmp_path / "bert", std=0.1)
    write_reviews(tmp_path / "reviews.csv", copies=16)

    def run(name, **more):
        config = FinetuneConfig(
            model=str(tmp_path / "bert"),
            task=TaskConfig(train=str(tmp_path / "reviews.csv"), validation_fraction=0.3),
            folder=tmp_path / name,
            epochs=8.0,
            batch=32,
            seeds=1,
            device="cpu",
            precision="float32",
            **more,
        )
        return finetune(config)

    grid = np.geomspace(1e-5, 1e-2, 4).tolist()
    best = max(run(f"lr-{lr:g}", lr=lr).best.score for lr in grid)
    found = run("search", search=5)
    assert found.best.score >= best - 0.05 and best > 0.8
    report = (found.folder / "report.md").read_text()
    assert "found by --search 5" in report and "![search.png](search.png)" in report
    assert (found.folder / "search.png").stat().st_size > 0 and not (found.folder / "search").exists()
    tried = [row["lr"] for row in json.loads((found.folder / "search.json").read_text())["rates"]]
    assert tried == pytest.approx(np.geomspace(1e-5, 1e-2, 5).tolist())


def test_a_rate_is_set_or_searched():
    with pytest.raises(UserError, match=r"search=8 finds the rate that lr=0\.1 sets"):
        FinetuneConfig(model="x", task=TaskConfig(train="x.csv"), folder="x", search=8, lr=0.1)
