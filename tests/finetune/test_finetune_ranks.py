"""Fine-tuning and distillation as real processes under torchrun, where layers rest and weights are shared."""

import json
import sys

import pytest
from launched import launched
from tiny import TEXTS, random_base

from plume.hf import load_model

pytestmark = pytest.mark.slow


def two_ranks(folder, *words):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "plume"]
    return launched([*launch, *words], folder).stdout


def test_layers_that_rest_and_a_last_batch_of_one_row(tmp_path):
    """65 rows in batches of 32 leave one over; only the head learns at first."""
    random_base("bert", tmp_path / "base")
    lines = [f"text number {n} {'fine' if n % 2 else 'dull'},{'good' if n % 2 else 'bad'}" for n in range(65)]
    for name in ("train", "later"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    shown = two_ranks(
        tmp_path, "finetune", "base", "--task.train", "train.csv", "--task.validation", "later.csv", "--folder", "run",
        "--adapt.unfreeze-every", "1", "--epochs", "2", "--seeds", "1", "--device", "cpu", "--precision", "float32",
    )  # fmt: skip
    assert json.loads((tmp_path / "run" / "results.json").read_text())["seeds"][0]["seed"] == 0
    assert shown.count("wrote ") == shown.count("use it in Python") == 1  # one rank speaks for all


def test_a_head_that_is_not_asked(tmp_path):
    random_base("bert", tmp_path / "base")
    rows = [{"text": f"the old house {n}", "pair": f"a house on hill {n}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    two_ranks(
        tmp_path, "finetune", "base", "--task.train", "pairs.jsonl", "--task.kind", "embed", "--folder", "run",
        "--epochs", "1", "--seeds", "1", "--batch", "8", "--device", "cpu", "--precision", "float32",
    )  # fmt: skip
    assert load_model(tmp_path / "run" / "model").kind == "bare"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_student_whose_weights_are_shared(strategy, tmp_path):
    random_base("gpt2", tmp_path / "teacher")
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS * 40))
    shown = two_ranks(
        tmp_path, "distill", "teacher", "--folder", "run", "--data.paths", '["text.txt"]', "--data.folder", "data",
        "--data.validation-fraction", "0.2", "--data.workers", "1", "--train.steps", "3", "--train.batch", "4",
        "--train.strategy", strategy, "--train.device", "cpu", "--train.precision", "float32",
    )  # fmt: skip
    assert load_model(tmp_path / "run" / "model").config.layers == 1
    assert shown.count("student") == 1, shown
