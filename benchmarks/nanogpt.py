"""nanoGPT itself against `plume pretrain gpt2-char`: whole commands by the clock, by turns.

    python -m benchmarks.nanogpt [--checkout FOLDER] [--rounds 2]

The checkout is `git clone https://github.com/karpathy/nanoGPT runs/nanoGPT`; its settings are its README's for a CPU.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.results import ROOT, Row, real, report, skip
from benchmarks.train import TARGET, full_validation
from plume.data import PackedWindows, open_shards
from plume.hf import load_model

STEPS = 2000
SETTINGS = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4"
    " --n_head=4 --n_embd=128 --max_iters={steps} --lr_decay_iters={steps} --dropout=0.0"
)


def seconds(place: Path, *words: str) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=place, check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def theirs(checkout: Path, text: Path, place: Path, steps: int) -> tuple[float, float]:
    """Seconds for the data and the training, and the last validation loss that it printed."""
    shutil.copytree(checkout, place, ignore=shutil.ignore_patterns(".git"))
    shutil.copy(text, place / "data" / "shakespeare_char" / "input.txt")
    (place / "requests.py").touch()  # its script imports it to fetch the text, which is here
    data, _ = seconds(place, "-c", "import runpy; runpy.run_path('data/shakespeare_char/prepare.py')")
    settings = SETTINGS.format(steps=steps).split()
    training, said = seconds(place, "train.py", "config/train_shakespeare_char.py", *settings)
    return data + training, float(re.findall(r"val loss ([0-9.]+)", said)[-1])


def ours(text: Path, place: Path, steps: int | None) -> tuple[float, float]:
    """The same for Plume, and the loss over the whole held-out tenth, measured afterwards."""
    options = [f"--data.paths={text}", f"--data.folder={place / 'data'}", f"--folder={place / 'run'}"]
    options += [] if steps is None else [f"--train.steps={steps}"]
    spent, _ = seconds(ROOT, "-m", "plume", "pretrain", "gpt2-char", *options)
    model = load_model(place / "run" / "model")
    held_out = PackedWindows(open_shards(place / "data", "validation"), model.config.context, shuffle=False)
    return spent, full_validation(model, held_out)


def compared(checkout: Path, text: Path, rounds: int, steps: int | None) -> list[Row]:
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            found.append((theirs(checkout, text, place / "theirs", steps or STEPS), ours(text, place / "ours", steps)))
    ratios = [mine[0] / its[0] for its, mine in found]
    shown = "; ".join(f"{mine[0]:.1f} against {its[0]:.1f} s (to {its[1]:.3f})" for its, mine in found)
    return [
        Row(
            key="time",
            what="Shakespeare's characters: the whole command, of the time of nanoGPT's own",
            figure=median(ratios),
            at_most=0.2,
            detail=shown,
        ),
        Row(
            key="loss",
            what="the loss reached",
            figure=max(mine[1] for _, mine in found),
            unit="nats",
            digits=3,
            at_most=TARGET,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT / "runs" / "nanoGPT")
    parser.add_argument("--text", type=Path, default=real("data", "tinyshakespeare", "input.txt"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of both, to see that it runs")
    given = parser.parse_args()
    if given.text is None:
        skip("the loss to reach belongs to Shakespeare's text, which is not here; --text names it")
    if not (given.checkout / "train.py").is_file():
        skip("needs nanoGPT: git clone https://github.com/karpathy/nanoGPT runs/nanoGPT")
    report(*compared(given.checkout.resolve(), given.text.resolve(), given.rounds, given.steps))


if __name__ == "__main__":
    main()
