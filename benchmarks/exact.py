"""What the CPU engine loses against torch: python -m benchmarks.exact [--model plume-en] [--text FILE].

On the bundled model and WikiText-2 where that is there; otherwise on a model that `plume demo` trains, and its text.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import Row, real, report
from plume.config import CachePrecision, DemoConfig
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
CACHES: dict[CachePrecision, float] = {"float16": 0.05, "int8": 0.5}  # the same of keys and values


def distance_from_torch(model: Model, tokens: Ids, precision: Any) -> float:
    """The largest difference of any logit while the engine reads token by token."""
    with torch.inference_mode():
        expected = model(torch.from_numpy(tokens)[None])[0].numpy()
    engine = CpuEngine(pack(model, precision))
    found = np.stack([engine.step([Feed(0, [token])])[0].copy() for token in tokens.tolist()])
    engine.close()
    return float(np.abs(found - expected).max())


def spread_rows(model: Model) -> Model:
    """The same function, with columns 10^-3 to 10^3 times as large behind norms whose gains are as much smaller."""
    draw, other = torch.Generator().manual_seed(1), copy.deepcopy(model)
    blocks: Any = other.body.blocks
    with torch.no_grad():
        for block in blocks:
            attention, mlp = block.attn.inner, block.mlp.inner
            products = ((block.attn.norm, (attention.q, attention.k, attention.v)), (block.mlp.norm, (mlp.up,)))
            for norm, fed in products:
                factors = 10 ** (6 * torch.rand(norm.weight.shape, generator=draw) - 3)
                norm.weight.div_(factors)
                norm.bias.div_(factors)
                for product in fed:
                    product.weight.mul_(factors)
    return other


def error_row(name: str, model: Model, tokens: Ids) -> Row:
    """The largest error of a logit against float64, by the engine and by torch, both in float32."""
    ids = torch.from_numpy(tokens)[None]
    with torch.inference_mode():
        theirs = model(ids)[0].double().numpy()
        exact = copy.deepcopy(model).double()(ids)[0].numpy()
    engine = CpuEngine(pack(model, "float32"))
    ours = engine.step([Feed(0, tokens.tolist(), len(tokens))]).astype(np.float64)
    engine.close()
    mine, other = (float(np.abs(found - exact).max()) for found in (ours, theirs))
    rms = [float(np.square(found - exact).mean() ** 0.5) for found in (ours, theirs)]
    return Row(
        key=f"float64, {name}",
        what=f"float32, {name}: largest error of a logit against float64, of that of torch's float32",
        figure=mine / other,
        at_most=1.0,
        detail=f"{mine:.1e} and {other:.1e} over {len(tokens)} tokens; root mean squares {rms[0]:.1e} and {rms[1]:.1e}",
    )


def read_and_write(model: Model, precision: Any, windows: list[Ids], cache: CachePrecision = "float32") -> Read:
    """Loss per token, the likeliest token of every place, and what is written behind the first half of each window."""
    engine = CpuEngine(pack(model, precision), cache=cache)
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
    low |= {f"float32 with a cache of {kind}": read_and_write(model, "float32", windows, kind) for kind in CACHES}
    report(
        error_row(name, model, first),
        error_row(f"{name} with columns spread over 10^6", spread_rows(model), first),
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


def cached(precision: str) -> CachePrecision:
    return "int8" if precision.endswith("int8") else "float16"


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
        at_most=PERPLEXITY[precision] if precision in PERPLEXITY else CACHES[cached(precision)],
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
