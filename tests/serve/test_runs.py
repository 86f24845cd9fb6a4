"""Checkpoints of a run as models: the weights of that step, opened when somebody asks, a few at a time."""

import json
import os
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
from running import run_server

from plume.generate.lm import load
from plume.serve import models as serving
from plume.serve.run import with_runs
from plume.serve.runs import Runs, curve
from plume.train.checkpoint import Checkpoints
from plume.train.ranks import Ranks
from plume.train.runs import write_recipe
from plume.weights import load_model, save_model


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A run whose checkpoints are the final weights times 1, 2, 3, 4."""
    folder = tmp_path_factory.mktemp("trained") / "demo"
    folder.mkdir()
    write_recipe(folder, {"train": {"steps": 40}})
    lm = load(models["gpt"])
    save_model(lm.model, folder / "model", tokenizer=lm.tokenizer)
    checkpoints = Checkpoints(folder / "checkpoints", Ranks(), keep_last=9, say=print)
    for step in (10, 20, 30, 40):
        tensors = {f"model/{name}": p.detach() * (step / 40) for name, p in lm.model.named_parameters()}
        checkpoints.save(step, tensors, {}, best=None)
    return folder


def test_a_checkpoint_answers_with_its_own_weights(run, models, serve_config, monkeypatch):
    monkeypatch.setattr(serving, "CHECKPOINTS_OPEN", 2)
    config = with_runs(replace(serve_config, models=(str(run),), runs=None))
    assert config.runs == run.parent
    running = run_server(config)
    site = next(running)
    with httpx.Client(base_url=site.url, timeout=60) as client:
        listed = {row["id"]: row["plume"] for row in client.get("/v1/models").json()["data"]}
        assert list(listed) == ["demo", "demo@10", "demo@20", "demo@30", "demo@40"]
        assert listed["demo@20"]["step"] == 20 and listed["demo@20"]["run"] == listed["demo"]["run"] == "demo"
        for step in (10, 20, 30, 10):
            model = load_model(models["gpt"])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= step / 40
            body = {"model": f"demo@{step}", "text": "The robot", "k": 5}
            answer = client.post("/v1/next-tokens", json=body).json()
            with torch.no_grad():
                p = model(torch.tensor([answer["tokens"]]))[0, -1].softmax(-1).topk(5)
            np.testing.assert_allclose(answer["candidates"]["probabilities"], p.values.numpy(), rtol=1e-4)
        lazy = site.app.state.models._lazy
        assert len(lazy) == 2
        lazy["demo@10"]._thinking += 1  # somebody waits for an answer
        for step in (20, 30):
            client.post("/v1/next-tokens", json={"model": f"demo@{step}", "text": "The robot", "k": 5})
        assert set(lazy) == {"demo@10", "demo@30"}
        lazy["demo@10"]._thinking -= 1
        assert client.post("/v1/next-tokens", json={"model": "demo@11", "text": "a"}).status_code == 404
    with pytest.raises(StopIteration):
        next(running)


def test_folders_that_are_no_runs_are_not_shown(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.toml").write_text("= not toml")
    runs = Runs(tmp_path)
    assert [row["name"] for row in runs.listing()] == ["broken"]
    assert runs.checkpoints() == {}
    assert Runs(None).listing() == [] and Runs(tmp_path / "nowhere").folders() == {}


def test_a_run_of_several_seeds_shows_the_last_one(tmp_path):
    (tmp_path / "tuned").mkdir()
    write_recipe(tmp_path / "tuned", {"model": "runs/base"})
    for seed, steps in ((0, 3), (1, 2)):
        folder = tmp_path / "tuned" / f"seed-{seed}"
        folder.mkdir()
        rows = [{"step": step, "loss": 1.0 / step} for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(folder / "metrics.jsonl", (1000 + seed, 1000 + seed))
    assert [row["step"] for row in curve(tmp_path / "tuned")] == [1, 2]
    (about,) = Runs(tmp_path).listing()
    assert (about["name"], about["step"], about["loss"]) == ("tuned", 2, 0.5)


def test_a_run_that_goes_back_is_seen_as_restarted(runs_folder):
    runs = Runs(runs_folder)
    file = runs_folder / "first" / "metrics.jsonl"
    kept = file.read_text()
    runs.listing()
    file.write_text(kept.splitlines()[0] + "\n")
    assert {row["name"]: row["restarts"] for row in runs.listing()}["first"] == 1
    file.write_text(kept)
