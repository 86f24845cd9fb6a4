"""Many ranks as real processes under torchrun, on gloo: the same losses whatever their number and way of sharing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plume.train.runs import read_metrics

HERE = Path(__file__).parent
JOBS = """
import json, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from dataclasses import replace
from toys import toy_trainer
from plume.config import TrainConfig
from plume.train.ranks import join

with join("cpu") as ranks:
    for name, settings in json.loads(sys.argv[1]).items():
        resume = settings.pop("resume", False)
        folder = Path(settings.pop("folder", name))
        usual = dict(steps=20, batch=8, lr=1e-2, log_every=1, validate_every=10, warmup_steps=2)
        config = TrainConfig(**{{**usual, **settings}})
        if ranks.main:
            folder.mkdir(exist_ok=True)
        ranks.barrier()
        toy_trainer(folder, config, ranks).run(resume=resume)
"""
Jobs = dict[str, dict[str, object]]


def torchrun(size: int, folder: Path, script: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)] if size > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, "job.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def run_jobs(size: int, folder: Path, jobs: Jobs) -> str:
    return torchrun(size, folder, JOBS.format(here=str(HERE)), json.dumps(jobs)).stderr


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process gives, for AdamW and for Muon."""
    folder = tmp_path_factory.mktemp("alone")
    run_jobs(1, folder, {"adamw": {}, "muon": {"optimizer": "muon"}})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_same_losses_as_one_rank(size: int, alone: Path, tmp_path: Path) -> None:
    """Copies and shards, accumulation 1 and 4 (masks are uneven), split matrices, checkpointing, both optimisers."""
    micro = 8 // size  # one micro-batch a rank
    jobs: Jobs = {
        "ddp-1": {"strategy": "ddp", "micro_batch": micro},
        "ddp-4": {"strategy": "ddp", "micro_batch": max(1, micro // 4)},
        "fsdp-1": {"strategy": "fsdp", "micro_batch": micro},
        "fsdp-4": {"strategy": "fsdp", "micro_batch": max(1, micro // 4)},
        "tensor": {"tensor_parallel": 2, "activation_checkpointing": True},
        "muon-ddp": {"optimizer": "muon", "strategy": "ddp"},
        "muon-fsdp": {"optimizer": "muon", "strategy": "fsdp"},
        "muon-tensor": {"optimizer": "muon", "tensor_parallel": 2},
    }
    run_jobs(size, tmp_path, jobs)
    for name in jobs:
        expected = losses(alone / ("muon" if name.startswith("muon") else "adamw"))
        assert len(expected) == 20
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-5), name


@pytest.mark.slow
def test_a_checkpoint_loads_with_another_number_of_ranks(alone: Path, tmp_path: Path) -> None:
    """Ten steps on two ranks in shards, five on one, five on four in copies: the losses of one process all along."""
    half = {"folder": "run", "strategy": "fsdp", "checkpoint_every": 5}
    script = JOBS.format(here=str(HERE))
    for size, steps, strategy in ((2, 10, "fsdp"), (1, 15, "auto"), (4, 20, "ddp")):
        stopping = script.replace(
            "toy_trainer(folder, config, ranks).run",
            f"t = toy_trainer(folder, config, ranks); "
            f"t.task = replace(t.task, before_step=lambda step: setattr(t, 'asked', step >= {steps - 1})); t.run",
        )
        torchrun(size, tmp_path, stopping, json.dumps({"run": {**half, "strategy": strategy, "resume": True}}))
    assert losses(tmp_path / "run") == pytest.approx(losses(alone / "adamw"), abs=1e-5)


MEMORY = """
import json, sys, torch
sys.path.insert(0, {here!r})
from dataclasses import asdict, replace
from pathlib import Path
from toys import toy_trainer, TINY
from plume.config import PlanConfig, TrainConfig
from plume.heads import Model
from plume.plan import plan, plan_ranks
from plume.train.ranks import join

local = lambda tensor: getattr(tensor, "to_local", lambda: tensor)().nbytes
config = replace(TINY, width=64, heads=4, context=12, layers=3)
with join("cpu") as ranks:
    for strategy, tensor in (("ddp", 1), ("fsdp", 1), ("fsdp", 2)):
        train = TrainConfig(steps=1, batch=8, strategy=strategy, tensor_parallel=tensor)
        trainer = toy_trainer(Path("run"), train, ranks, model=Model(config, "pretraining"))
        trainer.gradients()
        parameters = list(trainer.task.model.parameters())
        found = dict(
            weight=sum(local(p) for p in parameters),
            gradient=sum(local(p.grad) for p in parameters),
            optimizer=sum(local(t) for name, t in trainer.optimizers.state().items() if "exp_avg" in name),
        )
        named = trainer.task.model.named_parameters()
        body = sum(local(p) for n, p in named if n.startswith(("body.", "head.summary.")))
        settings = PlanConfig(model=config, ranks=ranks.size, strategy=strategy, tensor_parallel=tensor, micro_batch=1)
        said = plan_ranks(settings, plan(settings))
        if ranks.main:
            print("FOUND", json.dumps([strategy, tensor, found, body, asdict(said)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_the_plan_of_memory_is_what_ranks_really_hold(size: int, tmp_path: Path) -> None:
    """The plan counts the body and its summary; what the head has besides is left out of what was found."""
    out = torchrun(size, tmp_path, MEMORY.format(here=str(HERE))).stdout
    lines = [json.loads(line.split("FOUND ")[1]) for line in out.splitlines() if "FOUND " in line]
    assert len(lines) == 3
    for strategy, tensor, found, body, said in lines:
        assert said["weight_bytes"] == pytest.approx(body, rel=0.04), (strategy, tensor)
        for kind in ("gradient", "optimizer"):
            assert found[kind] / found["weight"] == pytest.approx(
                said[f"{kind}_bytes"] / said["weight_bytes"], rel=0.02
            )


DOCTOR = """
import os, time, sys
from plume.train import doctor
if os.environ["RANK"] == sys.argv[2]:
    if sys.argv[1] == "dead":
        doctor.missing_ranks = lambda *a: time.sleep(8) or [0]
    if sys.argv[1] == "slow":
        speed = doctor.matmul_speed
        doctor.matmul_speed = lambda *a: speed(*a) / 100
found = doctor.doctor("cpu", timeout=4.0)
if found is not None:
    print("FOUND", found.dead, found.slow, found.well, found.bytes_per_second)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank", "dead", "slow"),
    [("nothing", "9", "[]", "[]"), ("slow", "1", "[]", "[1]"), ("dead", "2", "[2]", "[]")],
)
def test_doctor_names_the_rank(tmp_path: Path, what: str, rank: str, dead: str, slow: str) -> None:
    out = torchrun(3, tmp_path, DOCTOR, what, rank).stdout
    assert f"FOUND {dead} {slow} {what == 'nothing'}" in out
