"""A run that is killed again and again, as real processes: it ends with the weights of the run that was left alone."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from plume.train.checkpoint import Checkpoints
from plume.train.distribute import Ranks
from plume.util.checkpoint_files import read_manifest

HERE = Path(__file__).parent
KILLS = int(os.environ.get("PLUME_KILLS", "20"))
STEPS = 15 * KILLS
RECIPE = f"""
[model]
vocab_size = 100
context = 16
layers = 2
heads = 2
width = 16
dropout = 0.1

[data]
paths = ["text.txt"]
folder = "data"
validation_fraction = 0.1
tokenizer = {{kind = "characters"}}

[train]
steps = {STEPS}
batch = 8
lr = 1e-2
optimizer = "muon"
device = "cpu"
precision = "float32"
log_every = 50
validate_every = 100
validation_rows = 8
checkpoint_every = 10
sample_every = 1000
"""
# A parent that has torch loaded forks the runs: twenty starts of an interpreter would be most of the test.
NURSERY = """
import os, sys
import plume.train.pretrain, pydantic, matplotlib.figure
from plume.cli.main import main
import torch
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.setsid()
        sys.exit(main(line.split()))
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
"""


@pytest.fixture
def nursery(tmp_path: Path):  # type: ignore[no-untyped-def]
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        yield process
        process.stdin.close()


def start(nursery: subprocess.Popen[str], words: str) -> int:
    assert nursery.stdin is not None
    nursery.stdin.write(words + "\n")
    nursery.stdin.flush()
    return int(next_number(nursery))


def next_number(nursery: subprocess.Popen[str]) -> str:
    """The next line that is a number: runs print there too."""
    assert nursery.stdout is not None
    return next(line for line in nursery.stdout if line.strip().isdigit())


def newest(folder: Path) -> int:
    steps = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")]
    return max(steps, default=0)


@pytest.mark.slow
@pytest.mark.timeout(120 * KILLS)
def test_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path, nursery: subprocess.Popen[str]) -> None:
    start(nursery, "pretrain recipe.toml --folder whole")
    assert next_number(nursery).strip() == "0", (tmp_path / "log").read_text()[-2000:]
    chance = random.Random(0)
    kills = 0
    while kills < KILLS:
        background = chance.choice(["true", "false"])  # checkpoints of either kind continue each other
        child = start(nursery, f"pretrain recipe.toml --folder cut --resume --train.async-checkpoints {background}")
        goal = newest(tmp_path / "cut") + chance.choice([0, 0, 10, 20])
        deadline = time.monotonic() + 30  # then it is killed where it is
        while newest(tmp_path / "cut") < goal and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.05)  # at any moment: also while a checkpoint is being written
        os.kill(child, signal.SIGKILL)
        if next_number(nursery).strip() == "0":
            shutil.rmtree(tmp_path / "cut")  # it had finished before the blow: another one is killed
        else:
            kills += 1
    start(nursery, "pretrain recipe.toml --folder cut --resume")
    assert next_number(nursery).strip() == "0", (tmp_path / "log").read_text()[-2000:]
    whole, cut = (last_tensors(tmp_path / name) for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert [name for name in whole if not torch.equal(whole[name], cut[name])] == []
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


def last_tensors(run: Path) -> dict[str, torch.Tensor]:
    manifest = read_manifest(run / "checkpoints" / f"step-{STEPS:08d}")
    stored = manifest.tensors.items()
    tensors = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype)) for name, tensor in stored}
    Checkpoints(run / "checkpoints", Ranks(), keep_last=9, print=print).load(STEPS, tensors)
    return tensors
