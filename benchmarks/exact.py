"""What the CPU engine loses against torch: python -m benchmarks.exact [--model plume-en] [--text FILE].

On the bundled model and WikiText-2 where that is there; otherwise on a model that `plume demo` trains, and its text.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import Row, real, report
from plume.config import DemoConfig
from plume.data.shards import open_shards
from plume.demo import demo
from plume.hf import load_model, resolve
from plume.inference.cpu.cpu_engine import CpuEngine
from plume.inference.cpu.pack import pack
from plume.inference.engine import Feed
from plume.model.heads import Model
from plume.text import load_tokenizer

STEPS = 200  # tokens that the engine is given one by one
ANSWER = 64  # tokens that are written greedily behind each beginning
Ids = np.ndarray[Any, np.dtype[np.int64]]
Read = tuple[float, Ids, list[list[int]]]  # see read_and_write
PERPLEXITY = {"int8": 0.5, "int4": 2.0}  # percent by which it may change


def distance_from_torch(model: Model, tokens: Ids, precision: Any) -> float:
    """The largest difference of any logit while the engine reads token by token."""
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens)[None])[0].numpy()
    engine = CpuEngine(pack(model, precision))
    found = np.stack([engine.step([Feed(0, [token])])[0].copy() for token in tokens.tolist()])
    engine.close()
    return float(np.abs(found - expected).max())


def read_and_write(model: Model, precision: Any, windows: list[Ids]) -> Read:
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


def measure(name: str, model: Model, ids: Ids, count: int) -> None:
    """On the first windows of a text, each half a context long."""
    size = model.config.context // 2
    windows = [ids[i * size : (i + 1) * size] for i in range(min(count, len(ids) // size))]
    first = ids[: min(STEPS, model.config.context)]
    loss, likeliest, answers = read_and_write(model, "float32", windows)
    low = {precision: read_and_write(model, precision, windows) for precision in PERPLEXITY}
    report(
        *(
            Row(
                key=precision,
                what=f"{precision}: largest distance from torch's logits over {STEPS} steps, {name}",
                figure=1e6 * distance_from_torch(model, first, precision),
                unit="millionths",
                digits=1,
                at_most=100,
            )
            for precision in ("float32", "float24")
        ),
        *(row for precision in low for row in low_rows(name, precision, (loss, likeliest, answers), low[precision])),
    )


def low_rows(name: str, precision: str, whole: Read, low: Read) -> Iterator[Row]:
    """What a low precision does to perplexity and choices."""
    loss, likeliest, answers = whole
    low_loss, low_likeliest, low_answers = low
    key = "" if precision == "int8" else f", {precision}"
    yield Row(
        key=f"perplexity{key}",
        what=f"{precision}: change of perplexity, {name}",
        figure=100 * abs(math.expm1(low_loss - loss)),
        unit="%",
        at_most=PERPLEXITY[precision],
        detail=f"{math.exp(loss):.3f} to {math.exp(low_loss):.3f} over {len(likeliest):,} unseen tokens",
    )
    same = sum(a == b for a, b in zip(answers, low_answers, strict=True))
    yield Row(
        key=f"greedy{key}",
        what=f"{precision}: places where the likeliest token is float32's, {name}",
        figure=100 * float(np.mean(likeliest == low_likeliest)),
        unit="%",
        at_least=97 if precision == "int8" else None,
        detail=f"{same} of {len(answers)} greedy answers of {ANSWER} tokens are the same from first to last",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--model", default="plume-en")
    parser.add_argument("--text", type=Path, default=real("data", "wikitext-2", "wiki.valid.raw"))
    args = parser.parse_args()
    if args.text is not None:
        place = resolve(args.model)
        ids = load_tokenizer(place).encode(args.text.read_text(encoding="utf-8")[:1_000_000])
        measure(args.model, load_model(place), np.array(ids), args.windows)
        return
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as made:
        folder = Path(made) / "demo"
        demo(DemoConfig(folder=folder, minutes=args.minutes))
        stream = open_shards(folder / "data", "validation").streams[0]
        measure("demo", load_model(folder), stream.read(0, len(stream)), args.windows)


if __name__ == "__main__":
    main()
