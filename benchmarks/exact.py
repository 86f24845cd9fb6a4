"""What the CPU engine loses against torch, on a model trained here: python -m benchmarks.exact [--minutes 1]."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import Row, report
from plume.config import DemoConfig
from plume.data.shards import open_shards
from plume.demo import demo
from plume.generate.cpu.engine import CpuEngine
from plume.generate.cpu.pack import pack
from plume.generate.engine import Feed
from plume.heads import Model
from plume.weights import load_model

STEPS = 200  # tokens that the engine is given one by one
ANSWER = 64  # tokens that are written greedily behind each beginning
Ids = np.ndarray[Any, np.dtype[np.int64]]


def distance_from_torch(model: Model, tokens: Ids) -> float:
    """The largest difference of any logit while the engine reads token by token."""
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens)[None])[0].numpy()
    engine = CpuEngine(pack(model, "float32"))
    found = np.stack([engine.step([Feed(0, [token])])[0].copy() for token in tokens.tolist()])
    engine.close()
    return float(np.abs(found - expected).max())


def read_and_write(model: Model, precision: Any, windows: list[Ids]) -> tuple[float, Ids, list[list[int]]]:
    """Loss per token, the likeliest token of every place, and what is written behind the first half of each window."""
    engine = CpuEngine(pack(model, precision))
    losses, likeliest, answers = [], [], []
    for window in windows:
        logits = torch.from_numpy(engine.step([Feed(0, window[:-1].tolist(), len(window) - 1)]).copy())
        losses.append(torch.nn.functional.cross_entropy(logits, torch.from_numpy(window[1:])).item())
        likeliest.append(logits.argmax(-1).numpy())
        engine.rewind(0, 0)
        row = engine.step([Feed(0, window[: len(window) // 2].tolist())])[0]
        answer = [int(row.argmax())]
        while len(answer) < ANSWER:
            answer.append(int(engine.step([Feed(0, answer[-1:])])[0].argmax()))
        answers.append(answer)
        engine.rewind(0, 0)
    engine.close()
    return float(np.mean(losses)), np.concatenate(likeliest), answers


def measure(run: Path, count: int) -> None:
    model = load_model(run / "model").eval()
    stream = open_shards(run / "data", "validation").streams[0]
    size = model.config.context // 2
    windows = [stream.read(i * size, (i + 1) * size) for i in range(min(count, len(stream) // size))]
    far = distance_from_torch(model, stream.read(0, min(STEPS, model.config.context)))
    loss, likeliest, answers = read_and_write(model, "float32", windows)
    loss8, likeliest8, answers8 = read_and_write(model, "int8", windows)
    change = math.expm1(loss8 - loss)
    whole = sum(a == b for a, b in zip(answers, answers8, strict=True))
    report(
        Row(
            key="float32",
            what=f"float32: largest distance from torch's logits over {STEPS} steps",
            figure=far * 1e6,
            unit="millionths",
            digits=1,
            at_most=100,
        ),
        Row(
            key="perplexity",
            what="int8: change of perplexity",
            figure=100 * abs(change),
            unit="%",
            at_most=0.5,
            detail=f"{math.exp(loss):.3f} to {math.exp(loss8):.3f} over {len(likeliest):,} unseen tokens",
        ),
        Row(
            key="greedy",
            what="int8: places where the likeliest token is float32's",
            figure=100 * float(np.mean(likeliest == likeliest8)),
            unit="%",
            at_least=97,
            detail=f"{whole} of {len(windows)} greedy answers of {ANSWER} tokens are the same from first to last",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--run", type=Path, help="a run of `plume demo`, instead of training one")
    args = parser.parse_args()
    if args.run is not None:
        measure(args.run, args.windows)
        return
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        demo(DemoConfig(folder=Path(place) / "demo", minutes=args.minutes))
        measure(Path(place) / "demo", args.windows)


if __name__ == "__main__":
    main()
