"""How long the training loop waits for a checkpoint: asynchronous against synchronous, in turns.

    python -m benchmarks.checkpoint [--megabytes 400] [--rounds 5]

The tensors are those of a small GPT with AdamW's moments. An asynchronous save makes the loop wait for the copy and,
once the file is written beside the training, for the manifest; a synchronous one for writing, syncing and hashing too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import Row, report
from plume.train.checkpoint import Checkpoints
from plume.train.distribute import Ranks

MATRICES = 24


def waited(checkpoints: Checkpoints, step: int, tensors: dict[str, torch.Tensor]) -> float:
    """Seconds that a loop spends in this checkpoint."""
    began = time.perf_counter()
    checkpoints.save(step, tensors, {"data": None}, best=None)
    seconds = time.perf_counter() - began
    while checkpoints.saving is not None and not checkpoints.written:
        time.sleep(0.005)  # here the loop would train
    began = time.perf_counter()
    checkpoints.commit()
    return seconds + time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    columns = args.megabytes * 1_000_000 // (4 * 1024 * MATRICES)
    tensors = {f"model/{n}": torch.randn(1024, columns) for n in range(MATRICES)}
    seconds: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        kinds = {
            name: Checkpoints(Path(place) / name, Ranks(), keep_last=1, print=print, background=name == "asynchronous")
            for name in seconds
        }
        for n in range(args.rounds + 1):
            for name, checkpoints in kinds.items():
                took = waited(checkpoints, n + 1, tensors)
                print(f"{name}: the loop waited {took:.3f} s{' (first, not counted)' if n == 0 else ''}", flush=True)
                if n:
                    seconds[name].append(took)
    ratios = [a / b for a, b in zip(seconds["asynchronous"], seconds["synchronous"], strict=True)]
    report(
        Row(
            key="wait",
            what=f"asynchronous checkpoint of {args.megabytes} MB: wait of the loop, of that for a synchronous one",
            figure=100 * statistics.median(ratios),
            unit="%",
            at_most=10,
            detail=f"medians {statistics.median(seconds['asynchronous']):.3f} and "
            f"{statistics.median(seconds['synchronous']):.2f} s; the first, which makes the copy's memory, not counted",
        )
    )


if __name__ == "__main__":
    main()
