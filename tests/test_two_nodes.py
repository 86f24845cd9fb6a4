"""A Ray cluster of two nodes on this machine: the same bytes as without it, though workers die and a node is lost."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plume.config import (
    CleanConfig,
    DataConfig,
    EvaluateConfig,
    FinetuneConfig,
    SweepConfig,
    TokenizerConfig,
    UserError,
    build,
)
from plume.data import prepare
from plume.data.clean import DuplicateFinder
from plume.data.pool import run_on_ray
from plume.data.stages import ShardMaker
from plume.evaluate import evaluate
from plume.evaluate.size_sweep import run_sweep
from plume.train.finetune import SeedStage, finetune

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(2400)]  # Ray's own warnings
PREPARE = sys.modules["plume.data.prepare"]  # the package has a function of this name
LOOPBACK = "127.0.0.1"
HEALTH = {"health_check_period_ms": 1000, "health_check_timeout_ms": 300_000}  # a busy node is not a lost one
TRAIN = {"steps": 6, "batch": 4, "log_every": 2, "checkpoint_every": 2, "precision": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Both nodes on the loopback address, which Ray would turn into one that others can reach."""
    ray = pytest.importorskip("ray", reason="needs the extra `cluster`")
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # its workers cannot import a test
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": LOOPBACK}
    head = {**small, "include_dashboard": False, "_system_config": HEALTH}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: host)
        patch.setattr("ray._private.utils.write_ray_address", lambda *given: None)  # no other test joins it
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.second = nodes.add_node(**small)
        ray.init(address=nodes.address, _node_ip_address=LOOPBACK, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def dying(stage: Any, method: str, marker: Path) -> Any:
    """A stage whose worker is killed once, when this method has just done its work."""

    def lethal(self: Any, *given: Any) -> Any:
        result = getattr(stage, method)(self, *given)
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return type("Dying", (stage,), {method: lethal})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Three pieces of documents of which many are almost the same, prepared without a cluster."""
    place = tmp_path_factory.mktemp("texts")
    rows = [" ".join(f"word{(n % 1000) * 31 + i}" for i in range(60)) + (" end" if n % 3 else "") for n in range(5000)]
    (place / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    config = DataConfig(
        paths=(str(place / "rows.jsonl"),),
        folder=place / "here",
        tokenizer=TokenizerConfig(kind="bytes"),
        clean=CleanConfig(duplicates="near"),
        shard_mb=1,
        workers=1,
    )
    assert 900 < prepare(config).report["documents"] < 1500  # copies are gone
    return config


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != "report.json"}


def test_near_duplicates_with_a_worker_killed_while_it_maps(
    cluster: Any, texts: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, finding = tmp_path / "mapping", tmp_path / "finding"
    monkeypatch.setattr(PREPARE, "ShardMaker", dying(ShardMaker, "write_keys", mapping))  # with a half-written piece
    monkeypatch.setattr("plume.data.clean.DuplicateFinder", dying(DuplicateFinder, "__call__", finding))
    prepare(replace(texts, folder=tmp_path / "out", backend="ray"))
    assert mapping.exists() and finding.exists()
    assert contents(tmp_path / "out") == contents(texts.folder)


PETS = ("cat", "dog")


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, labelled rows and two tasks."""
    place = tmp_path_factory.mktemp("pets")
    (place / "text.txt").write_text("the cat ate the fish. the dog ate the bone. " * 200)
    lines = [f"the {PETS[n % 2]} number {n},{PETS[n % 2]}" for n in range(40)]
    (place / "pets.csv").write_text("\n".join(["text,pet", *lines]))
    rows = [{"context": f"the dog {n} ate", "choices": [" the fish", " the bone"], "answer": 1} for n in range(20)]
    for name in PETS:
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def sizes_seeds_and_scores(pets: Path, out: Path, backend: str) -> list[Any]:
    """What a sweep, a fine-tuning and an evaluation give."""
    place = {"paths": [str(pets / "text.txt")], "folder": str(out / "data"), "workers": 1}
    data = {**place, "validation_fraction": 0.2, "tokenizer": {"kind": "characters"}}
    shape = {"preset": "gpt2-laptop", "context": 32}
    sweep = {"folder": str(out / "sweep"), "sizes": ["1x16", "2x16"], "head_width": 16, "model": shape}
    run_sweep(build(SweepConfig, {**sweep, "train": TRAIN, "data": data, "backend": backend}))
    usual = {"model": str(out / "sweep" / "1x16" / "model"), "backend": backend, "device": "cpu"}
    tune = {"folder": str(out / "tuned"), "epochs": 1.0, "lr": 3e-3, "seeds": 2, "precision": "float32"}
    tuned = finetune(build(FinetuneConfig, {**usual, **tune, "task": {"train": str(pets / "pets.csv")}}))
    names = [str(pets / f"{name}.jsonl") for name in PETS]
    report = evaluate(build(EvaluateConfig, {**usual, "tasks": names, "plots": False}))
    scores = [(task.first.task, task.first.metrics) for task in report.tasks]
    return [weights(out / "sweep"), weights(out / "tuned"), [seed.metrics for seed in tuned.seeds], scores]


def weights(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("model.safetensors")}


def test_sizes_seeds_and_scores_are_those_of_one_machine(
    cluster: Any, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies when the first seed is done and all of it written, but the answer is not sent."""
    here = sizes_seeds_and_scores(pets, tmp_path / "here", "local")
    monkeypatch.setattr("plume.train.finetune.SeedStage", dying(SeedStage, "__call__", tmp_path / "died"))
    there = sizes_seeds_and_scores(pets, tmp_path / "there", "ray")
    assert (tmp_path / "died").exists() and all(map(len, here))
    assert here == there


class Deadly:
    """Work that ends its worker whenever it is tried."""

    def __call__(self, task: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_piece_that_always_kills_its_worker_ends_with_one_message(cluster: Any) -> None:
    with pytest.raises(UserError, match="worker process died 4 times on the same piece, probably out of memory"):
        list(run_on_ray(Deadly, (), [{"number": 0}]))


def test_a_lost_node_has_its_pieces_repeated(
    cluster: Any, texts: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces on the second node wait until it is lost, so that the others can only be done on the first."""
    import ray

    second, begun = cluster.second.node_id, tmp_path / "begun"

    class Waiting(ShardMaker):
        def __call__(self, task: Any) -> Any:
            if ray.get_runtime_context().get_node_id() == second:
                begun.touch()
                while True:
                    time.sleep(1)
            while not begun.exists():  # the first node leaves it one
                time.sleep(0.1)
            return super().__call__(task)

    def lose_node() -> None:
        while not begun.exists():
            time.sleep(0.1)
        cluster.remove_node(cluster.second, allow_graceful=False)

    monkeypatch.setattr(PREPARE, "ShardMaker", Waiting)
    loser = threading.Thread(target=lose_node, daemon=True)
    loser.start()
    prepare(replace(texts, folder=tmp_path / "out", backend="ray"))
    loser.join()
    assert contents(tmp_path / "out") == contents(texts.folder)
