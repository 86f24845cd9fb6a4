"""Checkpoints of a run as models: the weights of that step, opened when somebody asks, a few at a time."""

import asyncio
import json
import math
import os
import pickle
import shutil
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from running import run_server, serving

from plume.hf import load_model, save_model
from plume.lm import load
from plume.serve import run_views, served_models
from plume.serve.api_errors import ApiError
from plume.serve.run_views import Runs, curve
from plume.serve.scheduler import Busy
from plume.serve.served_models import Origin, ServedModels, memory_of, open_lm
from plume.serve.server import with_runs
from plume.train.checkpoint import Checkpoints
from plume.train.distribute import Ranks
from plume.util.run_folder import write_recipe


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """A run whose checkpoints are the final weights times 1, 2, 3, 4."""
    folder = tmp_path_factory.mktemp("trained") / "demo"
    folder.mkdir()
    write_recipe(folder, {"train": {"steps": 40}})
    lm = load(models["gpt"])
    save_model(lm.model, folder / "model", tokenizer=lm.tokenizer)
    checkpoints = Checkpoints(folder / "checkpoints", Ranks(), keep_last=9, print=print)
    for step in (10, 20, 30, 40):
        tensors = {f"model/{name}": p.detach() * (step / 40) for name, p in lm.model.named_parameters()}
        checkpoints.save(step, tensors, {}, best=None)
    return folder


@pytest.mark.slow
def test_a_checkpoint_answers_with_its_own_weights(run, models, serve_config):
    each = memory_of(open_lm(str(run), serve_config))
    config = with_runs(replace(serve_config, models=(str(run),), runs=None, checkpoint_bytes=int(2.5 * each)))
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
            body = {"model": f"demo@{step}", "input": "The robot", "k": 5}
            answer = client.post("/v1/next-tokens", json=body).json()
            with torch.no_grad():
                p = model(torch.tensor([answer["tokens"]]))[0, -1].softmax(-1).topk(5)
            np.testing.assert_allclose(answer["candidates"]["probabilities"], p.values.numpy(), rtol=1e-4)
        lazy = site.app.state.models._lazy
        assert len(lazy) == 2
        reading = lazy["demo@10"].scheduler.start_reading("a", math.inf)  # it is in use
        for step in (20, 30):
            client.post("/v1/next-tokens", json={"model": f"demo@{step}", "input": "The robot", "k": 5})
        assert set(lazy) == {"demo@10", "demo@30"}
        held = lazy["demo@30"].scheduler.start_reading("a", math.inf)
        refused = client.post("/v1/next-tokens", json={"model": "demo@40", "input": "The robot"})
        assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
        before = [weakref.ref(lazy[name].lm) for name in lazy]
        reading.cancel()
        held.cancel()
        for step in (20, 40):
            client.post("/v1/next-tokens", json={"model": f"demo@{step}", "input": "The robot", "k": 5})
        assert [ref() for ref in before] == [None, None]  # closed models are not in memory any more
        assert client.post("/v1/next-tokens", json={"model": "demo@11", "input": "a"}).status_code == 404
    with pytest.raises(StopIteration):
        next(running)


@pytest.fixture
def lazy_models(run, serve_config):
    """The models of a server that has one checkpoint open at a time; none is opened at the start."""
    config = replace(serve_config, models=(str(run),), runs=run.parent, checkpoint_bytes=1)
    made = ServedModels(config, Runs(run.parent).checkpoints)
    yield made
    made.close()


def test_checkpoints_that_nobody_waits_for_are_not_opened(lazy_models, monkeypatch):
    """A client asks for all of them and leaves: the one being opened is, the others are not."""
    opened, begun, go_on = [], threading.Event(), threading.Event()

    def open_slowly(place, config):
        opened.append(place.rpartition("@")[2])
        begun.set()
        assert go_on.wait(60)
        return open_lm(place, config)

    monkeypatch.setattr(served_models, "open_lm", open_slowly)

    async def ask() -> str:
        asked = {step: asyncio.create_task(lazy_models.get(f"demo@{step}")) for step in (10, 20, 30, 40)}
        await asyncio.to_thread(begun.wait, 60)
        while len(lazy_models._opening) < 4:
            await asyncio.sleep(0.01)
        for step in (10, 20, 30):
            asked[step].cancel()
        go_on.set()
        return (await asked[40]).name

    assert asyncio.run(ask()) == "demo@40"
    assert opened in (["10", "40"], ["20", "40"], ["30", "40"], ["40"])
    assert not lazy_models._opening and not lazy_models._wanted


def test_a_checkpoint_is_not_closed_between_its_prompt_and_its_text(run, serve_config, monkeypatch):
    """Another is wanted just when the prompt was read and nothing is generated yet: the answer is no 503."""
    config = replace(serve_config, models=(str(run),), runs=run.parent, checkpoint_bytes=1)
    with serving(config) as (site, client):
        models, read = site.app.state.models, served_models.Served.read

        async def then_make_room(self, *given):
            found = await read(self, *given)
            with suppress(Busy):
                await models._make_room(10)
            return found

        monkeypatch.setattr(served_models.Served, "read", then_make_room)
        body = {"model": "demo@20", "prompt": "The robot", "max_tokens": 60, "ignore_eos": True, "overflow": "slide"}
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def test_an_unknown_model_is_told_some_names(serve_config):
    made = ServedModels(serve_config, lambda: {f"run@{step}": Origin("run") for step in range(1000)})
    with pytest.raises(ApiError, match="there is no model 'other'") as refused:
        asyncio.run(made.get("other"))
    assert refused.value.message.count("run@") == 20


def test_the_stream_of_a_run_sends_comments_and_ends_at_the_timeout(runs_folder, monkeypatch):
    monkeypatch.setattr(run_views, "EVERY", 0.01)
    monkeypatch.setattr(run_views, "KEEP_ALIVE", 2)

    async def everything():
        news = Runs(runs_folder).follow(runs_folder / "first", lambda: True, time.monotonic() + 2)
        return [records async for records in news]

    first, *others = asyncio.run(everything())
    assert first["reset"] and others and set(others) == {None}


def test_a_corrupt_checkpoint_is_not_served(run, serve_config, tmp_path, capsys):
    """One flipped byte anywhere in a checkpoint: the model is refused, and the client learns no paths."""
    broken = tmp_path / "demo"
    shutil.copytree(run, broken)
    folder = next(path for path in (broken / "checkpoints").iterdir() if path.name.endswith("20"))
    shutil.rmtree(folder / "model", ignore_errors=True)  # what was opened before
    file = max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with serving(replace(serve_config, models=(str(broken),), runs=tmp_path)) as (_, client):
        refused = client.post("/v1/next-tokens", json={"model": "demo@20", "input": "The robot"})
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "model_not_openable"
        assert str(tmp_path) not in refused.text
        assert client.post("/v1/next-tokens", json={"model": "demo@30", "input": "The robot"}).status_code == 200
    assert "corrupt" in capsys.readouterr().err


def test_a_pickle_in_a_run_folder_is_not_read(run, serve_config, tmp_path):
    place = tmp_path / "demo"
    shutil.copytree(run, place)
    marker = tmp_path / "ran"
    for folder in (place / "checkpoints").iterdir():
        (folder / ".metadata").write_bytes(pickle.dumps(Harmful(str(marker))))
    with serving(replace(serve_config, models=(str(place),), runs=tmp_path)) as (_, client):
        client.post("/v1/next-tokens", json={"model": "demo@20", "input": "The robot"})
    assert not marker.exists()


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


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


def test_the_loss_of_a_bert_is_that_of_its_masked_tokens(tmp_path):
    """Not the sum with next sentence; and which runs have which tokenizer is said."""
    rows = {
        "bert": [
            {"step": 1, "loss": 4.125, "masked": 3.5, "next_sentence": 0.625},
            {"step": 1, "validation_loss": 4.5, "validation_masked": 3.75, "validation_next_sentence": 0.75},
        ],
        "gpt": [{"step": 1, "loss": 2.0}, {"step": 1, "validation_loss": 2.5, "validation_bits_per_byte": 1.25}],
    }
    for name, head in (("bert", "pretraining"), ("gpt", "next-token")):
        (tmp_path / name / "checkpoints" / "model").mkdir(parents=True)
        write_recipe(tmp_path / name, {"train": {"steps": 1}})
        about = {"head": head, "tokenizer_hash": f"of {name}"}
        (tmp_path / name / "checkpoints" / "model" / "plume.json").write_text(json.dumps(about))
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    points = curve(tmp_path / "bert")
    assert [(row.get("loss"), row.get("validation")) for row in points] == [(3.5, None), (None, 3.75)]
    assert [row.get("bits") for row in curve(tmp_path / "gpt")] == [None, 1.25]
    listed = {row["name"]: row for row in Runs(tmp_path).listing()}
    assert (listed["bert"]["loss"], listed["bert"]["validation"], listed["bert"]["masked"]) == (3.5, 3.75, True)
    assert (listed["gpt"]["tokenizer"], listed["gpt"]["masked"]) == ("of gpt", False)


def test_a_run_that_goes_back_is_seen_as_restarted(runs_folder):
    runs = Runs(runs_folder)
    file = runs_folder / "first" / "metrics.jsonl"
    kept = file.read_text()
    runs.listing()
    file.write_text(kept.splitlines()[0] + "\n")
    assert {row["name"]: row["restarts"] for row in runs.listing()}["first"] == 1
    file.write_text(kept)
