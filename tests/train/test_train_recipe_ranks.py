"""Every recipe in small under torchrun, whatever the way of sharing: the losses and the model of one process."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train_pretrain import RECIPES, texts
from test_train_ranks import HERE, losses, torchrun

from plume.config import PretrainConfig, build, read_recipe
from plume.util.run_folder import write_recipe

START = """
import ctypes, gc, json, sys
sys.path[:0] = [{here!r}, {here!r} + '/..']
from pathlib import Path
import torch
from forked_ranks import fork_ranks
from plume.config import PlanConfig, PretrainConfig, build
from plume.plan import plan, plan_ranks
from plume.train import fused, pretrain, split_vocabulary
from plume.train.distribute import join

torch.set_num_threads(1)
pretrain.plot_runs = lambda *given: None
pretrain.ENTROPY_ROWS = 64  # counting 2,048 rows of masked pairs takes longer than all else
size, tables = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
"""
RUN = """
def work():
    with join("cpu"):
        for table in tables:
            pretrain.pretrain(build(PretrainConfig, table))

fork_ranks(size, work)
"""
WAYS = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor_parallel": 2, "activation_checkpointing": True},
}


def forked(size: int, folder: Path, script: str) -> str:
    return torchrun(1, folder, START.format(here=str(HERE)) + script, str(size), "jobs.json").stdout


def small_table(recipe: Path, place: Path, name: str, train: dict[str, object]) -> dict[str, object]:
    """The recipe with a small model and text, three steps, no dropout and no tokens drawn for the softmax: all of them.

    What decides how it trains stays.
    """
    table = read_recipe(recipe)
    table.pop("minutes", None)
    plain, capitals = texts(place)
    pairs = "targets" in table["data"]
    tokenizer = {**table["data"]["tokenizer"], "vocab_size": 300}
    tokenizer.pop("folder", None)
    if tokenizer.get("pretokenizer") == "spacy":
        tokenizer["pretokenizer"] = "basic"
    table["data"] = {
        "paths": [str(plain)],
        "folder": str(place / f"data-{tokenizer['kind']}-{tokenizer.get('special_tokens', '')}-{pairs}"),
        "documents": "line",
        "workers": 1,
        "validation_fraction": 0.1,
        "tokenizer": tokenizer,
        **({"targets": [str(capitals)]} if pairs else {}),
    }
    model = build(PretrainConfig, table).model
    shape = {"layers": 2, "width": 16, "heads": 1 if model.recurrent else 2, "context": 16, "dropout": 0.0}
    table["model"] |= shape | ({"decoder_layers": 2} if model.decoder_layers else {})
    table["model"].pop("mlp_width", None)
    table["model"].pop("vocab_size", None)
    objective = table.get("objective", {})
    table["objective"] = objective | {key: [8] for key in ("short_lengths",) if key in objective}
    table["objective"].pop("length", None)
    table["objective"] |= {key: 300 for key in ("sampled_softmax",) if key in objective}
    ramp = {"batch_start": 4, "batch_ramp_steps": 2} if "batch_start" in table["train"] else {}
    brief = {"steps": 3, "batch": 6, "warmup_steps": 1, "log_every": 1, "validate_every": 3, "validation_rows": 6}
    table["train"] |= brief | ramp | {"device": "cpu", "precision": "float32", "sample_every": 9, "decay_steps": None}
    table["train"] |= {"checkpoint_every": 3, **train}
    return {**table, "folder": str(place / name)}


def different_recipes(place: Path) -> list[Path]:
    """Recipes of pretraining, without those that are another one in small."""
    found: dict[str, Path] = {}
    for path in sorted(RECIPES.glob("*.toml")):
        if "train" in (table := read_recipe(path)) and "model" in table:
            found.setdefault(repr(build(PretrainConfig, small_table(path, place, "same", {}))), path)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ranks_that_continue_from_a_model_have_the_losses_of_one_process(tmp_path: Path) -> None:
    """Each rank reads its part of the folder."""
    names = ("gpt2", "bert", "transformer")
    first = [small_table(RECIPES / f"{name}.toml", tmp_path, f"{name}-first", {}) for name in names]

    def later(name: str, way: str, train: dict[str, object]) -> dict[str, object]:
        table = small_table(RECIPES / f"{name}.toml", tmp_path, f"{name}-{way}", train)
        return table | {
            "init_from": str(tmp_path / f"{name}-first"),
            "model": {"preset": f"{name}-laptop", "dropout": 0.0},
        }

    alone = [later(name, "alone", {}) for name in names]
    shared = [later(name, way, train) for name in names for way, train in WAYS.items()]
    for ranks, tables in ((1, first), (1, alone), (2, shared)):
        (tmp_path / "jobs.json").write_text(json.dumps(tables))
        forked(ranks, tmp_path, RUN)
    for name in names:
        one = losses(tmp_path / f"{name}-alone")
        assert one[0] < losses(tmp_path / f"{name}-first")[0] - 0.01  # what was learned before
        for way in WAYS:
            assert losses(tmp_path / f"{name}-{way}") == pytest.approx(one, abs=1e-5), (name, way)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("size", [2, 4])
def test_every_recipe_has_the_losses_and_weights_of_one_process(size: int, tmp_path: Path) -> None:
    alone, shared = [], []
    for path in different_recipes(tmp_path):
        alone.append(small_table(path, tmp_path, f"{path.stem}-alone", {}))
        config = build(PretrainConfig, alone[-1])
        ways = set(WAYS) if config.objective.sampled_softmax is None else set(WAYS) - {"tensor"}  # it is refused
        for way in ("ddp",) if config.model.recurrent else sorted(ways):
            shared.append(small_table(path, tmp_path, f"{path.stem}-{way}", WAYS[way]))  # noqa: PERF401
    for ranks, tables in ((1, alone), (size, shared)):
        (tmp_path / "jobs.json").write_text(json.dumps(tables))
        forked(ranks, tmp_path, RUN)
    for table in shared:
        folder = Path(str(table["folder"]))
        one = folder.with_name(folder.name.rsplit("-", 1)[0] + "-alone")
        assert len(losses(one)) == 3
        assert losses(folder) == pytest.approx(losses(one), abs=1e-5), folder.name
        expected, found = (load_file(each / "model" / "model.safetensors") for each in (one, folder))
        assert expected.keys() == found.keys()
        far = {n: float((found[n] - expected[n]).abs().max()) for n in found if found[n].shape == expected[n].shape}
        assert len(far) == len(found) and max(far.values()) < 2e-3, (folder.name, max(far, key=lambda n: far[n]))
        assert all(torch.isfinite(tensor).all() for tensor in found.values())


KILLED = """
import os, signal, sys
from plume.cli.main import main
from plume.train.loop import Trainer

plain = Trainer.update

def update(trainer):
    if trainer.step == 6 and os.environ.get("RANK") == "1" and "--resume" not in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(trainer)

Trainer.update = update
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_command_named_when_a_rank_dies_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Killed on two ranks in the middle of a step; the losses are those of one process that was left alone."""
    brief = {
        "strategy": "fsdp",
        "steps": 8,
        "validate_every": 8,
        "checkpoint_every": 5,
        "optimizer": "adamw",
        "lr": 1e-3,
    }
    for name in ("whole", "run"):
        write_recipe(tmp_path / f"{name}-recipe", small_table(RECIPES / "gpt2-char.toml", tmp_path, name, brief))
    torchrun(1, tmp_path, KILLED, "pretrain", "whole-recipe/recipe.toml")
    done = torchrun(2, tmp_path, KILLED, "pretrain", "run-recipe/recipe.toml", check=False)
    said = [line for line in done.stderr.splitlines() if "Resume with: " in line]
    assert len(said) == 1, done.stderr[-3000:]
    assert "rank 1 died during step 6; the last checkpoint is of step 5. Resume with: " in said[0]
    command = shlex.split(said[0].split("Resume with: ")[1])
    assert command[:4] == ["torchrun", "--nproc-per-node", "2", "job.py"]
    assert len(losses(tmp_path / "whole")) == 8
    for ranks in (1, 3):
        folder = tmp_path / f"run-{ranks}"
        shutil.copytree(tmp_path / "run", folder)
        torchrun(ranks, tmp_path, KILLED, *command[4:], "--folder", str(folder))
        assert losses(folder) == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
        assert (folder / "model" / "model.safetensors").is_file()


PEAK = """
import os
from memory import begin_peak, kilobytes

def work():
    small, large = (build(PretrainConfig, table) for table in tables)
    with join("cpu") as ranks:
        pretrain.pretrain(small)  # whatever is loaded and kept by libraries
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = begin_peak()
        pretrain.pretrain(large)
        peak = 1024 * (kilobytes() - before)
        strategy = "fsdp" if ranks.many else "ddp"
        usual = dict(model=large.model, micro_batch=4 // ranks.size, precision="float32")
        settings = PlanConfig(ranks=ranks.size, strategy=strategy, **usual)
        found = json.dumps([ranks.rank, peak, plan_ranks(settings, plan(settings)).total_bytes])
        os.write(1, f"FOUND {found}\\n".encode())  # at once, so that those of ranks do not mix

fork_ranks(size, work)
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure the peak of memory")
def test_no_rank_ever_holds_more_than_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first weights to the exported folder, with checkpoints, where states are almost all that is needed."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # so that what is freed leaves the process at once
    peaks, planned = {}, {}
    for size in (1, 2, 4):
        tables = []
        for name, layers in (("small", 1), ("large", 64)):
            table = small_table(
                RECIPES / "gpt2-char.toml", tmp_path, f"{name}-{size}", {"strategy": "fsdp", "batch": 4}
            )
            table["model"] |= {"layers": layers, "width": 384, "heads": 4, "context": 8, "vocab_size": 40}
            table["train"] |= {"optimizer": "adamw", "validation_rows": 4, "steps": 2, "validate_every": 2}
            tables.append(table)
        (tmp_path / "jobs.json").write_text(json.dumps(tables))
        out = forked(size, tmp_path, PEAK)
        found = [json.loads(part) for part in re.findall(r"FOUND (\[.*?\])", out)]
        assert sorted(rank for rank, *_ in found) == list(range(size))
        peaks[size], planned[size] = max(peak for _, peak, _ in found), found[0][2]
        shutil.rmtree(tmp_path / f"large-{size}")  # gigabytes
    for size in (2, 4):
        assert peaks[size] <= 1.15 / size * peaks[1], peaks
    for size in (1, 2, 4):
        assert peaks[size] == pytest.approx(planned[size], rel=0.1), (peaks, planned)
