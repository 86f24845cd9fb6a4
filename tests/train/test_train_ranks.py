"""Many ranks as real processes under torchrun, on gloo: the same losses whatever their number and way of sharing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import launched

from plume.util.run_folder import read_metrics

HERE = Path(__file__).parent
JOBS = """
import json, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from dataclasses import replace
from toys import pairs_trainer, toy_trainer
from plume.config import TrainConfig
from plume.train.distribute import join

with join("cpu") as ranks:
    for name, settings in json.loads(sys.argv[1]).items():
        resume = settings.pop("resume", False)
        folder, shape = Path(settings.pop("folder", name)), settings.pop("shape", None)
        usual = dict(steps=20, batch=8, lr=1e-2, log_every=1, validate_every=10, warmup_steps=2)
        config = TrainConfig(**{{**usual, **settings}})
        if ranks.main:
            folder.mkdir(exist_ok=True)
        ranks.barrier()
        (pairs_trainer if "pairs" in name else toy_trainer)(folder, config, ranks, shape).run(resume=resume)
"""
Jobs = dict[str, dict[str, object]]
SPLIT: Jobs = {  # 32 rows for 31 tokens, so that ranks can share the token table
    "table": {"shape": {"vocab_multiple": 4}, "label_smoothing": 0.1},
    "output": {"shape": {"vocab_multiple": 4, "tie_embeddings": False}},
    "tablepairs": {"shape": {"vocab_multiple": 4}, "label_smoothing": 0.1},
}


def torchrun(size: int, folder: Path, script: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)] if size > 1 else []
    return launched([sys.executable, *launch, "job.py", *words], folder, check=check)


def run_jobs(size: int, folder: Path, jobs: Jobs) -> str:
    return torchrun(size, folder, JOBS.format(here=str(HERE)), json.dumps(jobs)).stderr


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process gives, for AdamW and for Muon."""
    folder = tmp_path_factory.mktemp("alone")
    run_jobs(1, folder, {"adamw": {}, "muon": {"optimizer": "muon"}, "pairs": {}, **SPLIT})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_same_losses_as_one_rank(size: int, alone: Path, tmp_path: Path) -> None:
    """Copies and shards, accumulation 1 and 4 (masks are uneven), tensor parallel, both optimizers, two stacks."""
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
        "pairs-ddp": {"strategy": "ddp"},
        "pairs-fsdp": {"strategy": "fsdp"},
        "pairs-tensor": {"tensor_parallel": 2, "activation_checkpointing": True},
        **{f"{name}-tensor": {**settings, "tensor_parallel": 2} for name, settings in SPLIT.items()},
    }
    run_jobs(size, tmp_path, jobs)
    for name in jobs:
        kind = name.split("-")[0]
        expected = losses(alone / (kind if kind in ("muon", "pairs", *SPLIT) else "adamw"))
        assert len(expected) == 20
        assert losses(tmp_path / name) == pytest.approx(expected, abs=1e-5), name


@pytest.mark.slow
def test_a_checkpoint_loads_with_another_number_of_ranks(alone: Path, tmp_path: Path) -> None:
    """Ten steps on two ranks in shards, five on one, five on four in copies: the losses of one process all along."""
    half = {"folder": "run", "strategy": "fsdp", "checkpoint_every": 5}
    script = JOBS.format(here=str(HERE))
    for size, steps, strategy in ((2, 10, "fsdp"), (1, 15, "auto"), (4, 20, "ddp")):
        stopping = script.replace(
            '(pairs_trainer if "pairs" in name else toy_trainer)(folder, config, ranks, shape).run',
            f"t = toy_trainer(folder, config, ranks); "
            f"stop = lambda step: setattr(t, 'stop_requested', step >= {steps - 1}); "
            f"t.task = replace(t.task, before_step=stop); t.run",
        )
        torchrun(size, tmp_path, stopping, json.dumps({"run": {**half, "strategy": strategy, "resume": True}}))
    assert losses(tmp_path / "run") == pytest.approx(losses(alone / "adamw"), abs=1e-5)


MUON = """
import json, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from toys import toy_trainer
from plume.config import TrainConfig
from plume.train import optim
from plume.train.distribute import join

plain, worked = optim.orthogonalise, []

def counted(matrices, steps):
    worked.append(len(matrices))
    return plain(matrices, steps)

optim.orthogonalise = counted
with join("cpu") as ranks:
    for strategy in ("ddp", "fsdp"):
        worked.clear()
        usual = dict(steps=20, batch=8, lr=1e-2, log_every=1, validate_every=10, warmup_steps=2)
        trainer = toy_trainer(Path(strategy), TrainConfig(optimizer="muon", strategy=strategy, **usual), ranks)
        trainer.run(resume=False)
        matrices = len(trainer.optimizers.parts[1].state)
        found = ranks.gather(sum(worked))
        if ranks.main:
            print("FOUND", json.dumps([strategy, matrices, found]))
"""


@pytest.mark.slow
def test_each_matrix_is_orthogonalised_once_by_one_rank(alone: Path, tmp_path: Path) -> None:
    """On three ranks, which cut 16 rows unevenly."""
    out = torchrun(3, tmp_path, MUON.format(here=str(HERE))).stdout
    lines = [json.loads(line.split("FOUND ")[1]) for line in out.splitlines() if "FOUND " in line]
    assert [strategy for strategy, *_ in lines] == ["ddp", "fsdp"]
    for strategy, matrices, found in lines:
        assert sum(found) == 20 * matrices and max(found) - min(found) <= 20, (strategy, found)
        assert losses(tmp_path / strategy) == pytest.approx(losses(alone / "muon"), abs=1e-5), strategy


MEMORY = """
import json, sys, torch
sys.path.insert(0, {here!r})
from dataclasses import asdict, replace
from pathlib import Path
from toys import toy_trainer, TINY
from plume.config import PlanConfig, TrainConfig
from plume.model.heads import Model
from plume.plan import plan, plan_ranks
from plume.train.distribute import join

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


PRECISION = """
import os
from plume.train.distribute import join, shared_precision
from plume.util import devices

fast = 9.0 if os.environ["RANK"] == "1" else 0.5  # each rank measures something else
devices.matmul_speed = lambda device, dtype: 1e9 * (fast if "bfloat16" in str(dtype) else 1.0)
with join("cpu") as ranks:
    own = devices.choose_precision(ranks.device, "auto").name
    os.write(1, f"FOUND {ranks.rank} {own} {shared_precision(ranks, 'auto').name}\\n".encode())  # at once
"""


@pytest.mark.slow
def test_the_main_rank_decides_the_precision(tmp_path: Path) -> None:
    found = torchrun(2, tmp_path, PRECISION).stdout
    assert "FOUND 0 float32 float32" in found and "FOUND 1 bfloat16 float32" in found


GRADIENTS = """
import sys, torch
sys.path.insert(0, {here!r})
from dataclasses import replace
from pathlib import Path
import toys
from toys import TINY, toy_trainer
from plume.config import TrainConfig
from plume.model.heads import Model
from plume.train.distribute import join
from plume.util.devices import Precision

def gradient(strategy, name):
    train = TrainConfig(steps=1, batch=512, strategy=strategy, micro_batch=256)
    torch.manual_seed(0)
    toys.FLOAT32 = Precision(name, ranks.device, 1e9)
    trainer = toy_trainer(Path("run"), train, ranks, model=Model(replace(TINY, width=64, heads=4), "pretraining"))
    trainer.gradients()
    grad = trainer.task.model.body.embed.tokens.weight.grad
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float().clone()

with join("cpu") as ranks:
    true = gradient("ddp", "float32")
    errors = [float((gradient(s, "bfloat16") - true).norm() / true.norm()) for s in ("ddp", "fsdp")]
    if ranks.main:
        print("FOUND", *errors)
"""


@pytest.mark.slow
def test_shards_sum_the_gradient_of_the_token_table_as_exactly_as_copies(tmp_path: Path) -> None:
    out = torchrun(2, tmp_path, GRADIENTS.format(here=str(HERE))).stdout
    copies, shards = map(float, next(line for line in out.splitlines() if "FOUND" in line).split()[1:])
    assert 0 < shards < 2 * copies, (copies, shards)  # summed in bfloat16 it would be 4.6 times


DYING = """
import os, signal, sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from toys import toy_trainer
from plume.config import TrainConfig, UserError
from plume.train import distribute
from plume.train.distribute import join

def die(step):
    if step == 6 and os.environ["RANK"] == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)

class Clock:
    # it stands still until every rank that lives has answered, however long that takes here
    now, sleep = 0.0, staticmethod(time.sleep)

    def monotonic(self):
        store = distribute.dist.distributed_c10d._get_default_store()
        alive = [f"plume/alive/{{rank}}" for rank in range(3) if str(rank) != sys.argv[1]]
        self.now += store.check(alive)
        return self.now

distribute.time = Clock()

try:
    with join("cpu") as ranks:
        config = TrainConfig(steps=10**6, batch=9, log_every=10**6, checkpoint_every=5, validate_every=10**6)
        toy_trainer(Path("run"), config, ranks, before_step=die).run(resume=False)
except UserError as error:
    print(f"SAID {{error}}", file=sys.stderr, flush=True)
    sys.exit(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dead", ["0", "1"])
def test_a_dead_rank_is_named_once_with_the_way_to_resume(tmp_path: Path, dead: str) -> None:
    done = torchrun(3, tmp_path, DYING.format(here=str(HERE)), dead, check=False)
    said = [line for line in done.stderr.splitlines() if "SAID" in line]
    assert len(said) == 1, done.stderr[-3000:]
    assert f"rank {dead} died during step 6; the last checkpoint is of step 5. Resume with: torchrun" in said[0]
    assert f"job.py {dead} --resume" in said[0]


FULL = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from toys import toy_trainer
from plume.config import TrainConfig, UserError
from plume.train import checkpoint
from plume.train.distribute import join

def full(*given):
    raise OSError(28, "No space left on device")

if os.environ["RANK"] == "1":
    checkpoint.write_rank_file = full
try:
    with join("cpu") as ranks:
        toy_trainer(Path("run"), TrainConfig(steps=8, batch=8, checkpoint_every=2), ranks).run(resume=False)
except UserError as error:
    print(f"SAID {{os.environ['RANK']}}: {{error}}", file=sys.stderr, flush=True)
    sys.exit(2)
"""


@pytest.mark.slow
def test_a_full_disk_of_one_rank_ends_all_with_its_name(tmp_path: Path) -> None:
    done = torchrun(2, tmp_path, FULL.format(here=str(HERE)), check=False)
    said = [line for line in done.stderr.splitlines() if "SAID" in line]
    assert said and all("(rank 1): [Errno 28] No space left on device" in line for line in said), done.stderr[-2000:]
    assert all("continue with --resume" in line for line in said)


DOCTOR = """
import os, sys, time
from pathlib import Path
from plume.train import doctor
what, chosen = sys.argv[1], os.environ["RANK"] == sys.argv[2]
examine = doctor.examine

def together(ranks):
    mine = examine(ranks)
    ranks.barrier()  # so that those who live answer at about the same time
    return mine

def wait_for_the_end(*given):
    while not Path("found").exists():
        time.sleep(0.1)
    return [0]

doctor.examine = together
if what == "dead" and chosen:
    doctor.missing_ranks = wait_for_the_end
doctor.matmul_speed = lambda *given: 1e9 / (100 if what == "slow" and chosen else 1)
found = doctor.doctor("cpu", timeout=20.0 if what == "dead" else 600.0)
if found is not None:
    Path("found").touch()
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
