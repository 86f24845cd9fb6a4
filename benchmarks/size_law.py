"""How held-out bits per byte fall with the size of a GPT and the tokens it reads.

    python -m benchmarks.size_law run | fit
    python -m benchmarks.size_law sweep --text english [--minutes 2] [--around 1] [--workers 2]

Each point is a whole run of the recipe of sized runs (its schedule ends with its tokens) on one thread, so it does not
depend on the machine's speed. `fit` fits the law in plume/train/size_law.py to the points kept in size_law.json beside
this file; `run` adds the points that are missing. docs/experiments.md says what came of it. `sweep` holds the size that
`plume pretrain auto` takes against its neighbours, each trained for the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from benchmarks.bundled import english_files
from benchmarks.results import ROOT, Row, real, report, skip
from plume.config import PRESETS, DataConfig, PretrainConfig, TokenizerConfig, TrainConfig, build, read_recipe
from plume.data import prepare
from plume.train import budget
from plume.train.held_out import held_out_bits
from plume.train.pretrain import pretrain
from plume.train.size_law import Law

POINTS = Path(__file__).with_suffix(".json")
TEXTS = ("english", "python", "chinese")


@dataclass(frozen=True)
class Point:
    text: str
    layers: int
    width: int
    millions: float  # of tokens
    vocab_size: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.text}-{self.layers}x{self.width}-{self.millions:g}-{self.vocab_size}-{self.context}"

    @property
    def weights(self) -> int:
        return 12 * self.layers * self.width**2


def wanted() -> list[Point]:
    """The most telling first: sizes and tokens on three texts, then vocabularies, contexts and longer runs."""
    small, large = ((2, 64), (4, 128), (4, 192)), ((4, 256), (6, 256))
    points = [Point("english", *shape, m, 8192, 64) for m in (0.5, 2.0) for shape in small]
    points += [Point(text, *shape, m, 8192, 64) for text in TEXTS[1:] for m in (0.5, 1.5) for shape in small]
    points += [Point("english", *shape, 0.5, 8192, 64) for shape in large]
    points += [Point("english", 4, 128, 2.0, v, 64) for v in (4096, 16384)]
    points += [Point("english", 4, 128, 2.0, 8192, 128), Point("english", 4, 256, 2.0, 8192, 64)]
    points += [Point("english", 2, 64, 8.0, 8192, 64), Point("english", 4, 128, 6.0, 8192, 64)]
    points += [Point("english", 4, 128, 6.0, 8192, 128), Point("english", 4, 192, 5.0, 8192, 64)]
    points += [Point("english", 6, 256, 2.0, 8192, 64), Point("english", 4, 256, 4.0, 8192, 64)]
    return points


def data_of(point: Point, place: Path) -> DataConfig:
    tokenizer = TokenizerConfig(kind="byte-bpe", vocab_size=point.vocab_size)
    return replace(texts(point.text, place), folder=place / f"{point.text}-{point.vocab_size}", tokenizer=tokenizer)


def texts(name: str, place: Path) -> DataConfig:
    if name == "python":
        return DataConfig(paths=("python:stdlib",), folder=place, validation_fraction=0.02)
    text = real("data", name)
    if text is None:
        skip(f"needs ../shared/data/{name}")
    data = DataConfig(paths=(str(text),), folder=place, documents="line", validation_fraction=0.003)
    if name == "chinese":
        return replace(data, text_field="modern")
    files, weights = english_files(text, place)
    return replace(data, paths=tuple(map(str, files)), weights=tuple(weights))


def train(point: Point, place: Path) -> dict[str, Any]:
    data = data_of(point, place)
    heads = point.width // budget.HEAD_WIDTH
    model = replace(
        PRESETS["gpt2-laptop"], layers=point.layers, width=point.width, heads=heads, context=point.context,
        vocab_size=point.vocab_size, dropout=0.0, tie_embeddings=False,
    )  # fmt: skip
    plain = PretrainConfig(folder=place / "runs" / point.name, data=data, model=model, train=TrainConfig(steps=1))
    rows = budget.batch_for(point.context, point.millions * 1e6)
    steps = round(point.millions * 1e6 / rows / point.context)
    config = budget.with_size(plain, model, rows, steps)
    brief = replace(config.train, validate_every=steps, validation_rows=32, sample_tokens=1, log_every=200)
    result = pretrain(replace(config, train=brief, prepared=data.folder, overwrite=True))
    bits = held_out_bits(result.model, data.folder, compressor=False)
    return {**asdict(point), "bits": bits["this model"], "unigram": bits["unigram"], "bigram": bits["bigram"]}


def known() -> list[dict[str, Any]]:
    return json.loads(POINTS.read_text()) if POINTS.is_file() else []


def run(place: Path, workers: int, at_most: float) -> None:
    """Every missing point in a process of its own with one thread."""
    done = {Point(**{key: row[key] for key in Point.__dataclass_fields__}) for row in known()}
    missing = [point for point in wanted() if point not in done and point.weights * point.millions / 1e6 <= at_most]
    for point in {(p.text, p.vocab_size): p for p in missing}.values():
        prepare(data_of(point, place))

    def start(point: Point) -> None:
        words = [sys.executable, "-m", "benchmarks.size_law", "one", "--place", str(place), "--point"]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        log = (place / f"{point.name}.log").open("w")
        subprocess.run([*words, json.dumps(asdict(point))], cwd=ROOT, env=alone, check=True, stdout=log, stderr=log)
        row = json.loads((place / f"{point.name}.json").read_text())
        rows = [*known(), row]
        POINTS.write_text("[\n" + ",\n".join(f" {json.dumps(each)}" for each in rows) + "\n]\n")
        print(f"{point.name}: {row['bits']:.4f}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(start, missing))


def fit(rows: list[dict[str, Any]]) -> tuple[Law, dict[str, float], float]:
    """The law by least squares of log bits, a factor for each text beside English, and the furthest run from it."""
    alike = [row for row in rows if (row["vocab_size"], row["context"]) == (8192, 64)]
    weights, tokens, ratios = np.array(
        [[12 * row["layers"] * row["width"] ** 2, row["millions"] * 1e6, row["bits"] / row["bigram"]] for row in alike]
    ).T
    text = np.array([TEXTS.index(row["text"]) for row in alike])

    def misses(values: np.ndarray) -> np.ndarray:
        law, factors = Law(*values[:5]), np.array([1.0, *values[5:]])
        return np.log(np.vectorize(law.ratio)(weights, tokens) * factors[text] / ratios)

    start = [0.5, 0.1, 0.3, 0.3, 0.3, 1.0, 1.0]
    found = least_squares(misses, start, bounds=(1e-9, 5.0), x_scale=start)
    others = dict(zip(TEXTS[1:], map(float, found.x[5:]), strict=True))
    return Law(*map(float, found.x[:5])), others, float(np.abs(found.fun).max())


# ---- the size that is chosen, and its neighbours ---------------------------------------------------------------------


def auto(text: str, minutes: float, place: Path) -> PretrainConfig:
    """As `plume pretrain auto --minutes M` begins, on this text."""
    table = read_recipe(ROOT / "recipes" / "auto.toml")
    config = build(PretrainConfig, {**table, "minutes": minutes, "folder": str(place / "auto")})
    return replace(config, data=replace(texts(text, place), tokenizer=config.data.tokenizer))


def shape_run(text: str, minutes: float, place: Path, layers: int, width: int) -> dict[str, Any]:
    config = auto(text, minutes, place)
    own = place / f"{text}-{minutes:g}-{layers}x{width}"
    config = replace(config, folder=own / "run", data=replace(config.data, folder=own / "data"), overwrite=True)
    chosen = budget.sized(config, ((layers, width),))
    print(chosen.said, flush=True)
    result = pretrain(chosen.config)
    bits = held_out_bits(result.model, config.data.folder, compressor=False)
    return {"bits": bits["this model"], "tokens": result.outcome.tokens, "seconds": result.outcome.seconds}


def sweep(text: str, minutes: float, around: int, workers: int, place: Path) -> None:
    if workers > 1:
        torch.set_num_threads(1)  # as each of the runs has, so that the size is chosen for what they can read
    model = budget.sized(auto(text, minutes, place)).config.model
    middle = budget.SHAPES.index((model.layers, model.width))
    near = budget.SHAPES[max(0, middle - around) : middle + around + 1]
    environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if workers > 1 else {})}

    def start(shape: tuple[int, int]) -> dict[str, Any]:
        words = [sys.executable, "-m", "benchmarks.size_law", "shape", "--text", text, "--minutes", f"{minutes:g}"]
        name = f"{text}-{minutes:g}-{shape[0]}x{shape[1]}"
        options = ["--place", str(place), "--shape", *map(str, shape)]
        with (place / f"{name}.log").open("w") as log:
            subprocess.run([*words, *options], cwd=ROOT, env=environment, check=True, stdout=log, stderr=log)
        return json.loads((place / f"{name}.json").read_text())

    with ThreadPoolExecutor(workers) as pool:
        found = dict(zip(near, pool.map(start, near), strict=True))
    best = min(row["bits"] for row in found.values())
    each = (f"{a}x{b} {row['bits']:.3f} ({row['tokens'] / 1e6:.1f} million tokens)" for (a, b), row in found.items())
    report(
        Row(
            key=f"{text}.{minutes:g}",
            what=f"{text}, {minutes:g} minutes: bits per byte of the size that `auto` takes, of the best around it",
            figure=found[budget.SHAPES[middle]]["bits"] / best,
            digits=3,
            at_most=1.02 if minutes >= 2 else None,
            detail=f"{model.layers}x{model.width} taken; {', '.join(each)}; {workers} at a time",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "fit", "one", "sweep", "shape"))
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "size_law")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at-most", type=float, default=20.0, help="weights x tokens of a point, in 1e12")
    parser.add_argument("--point", help="one: the point as JSON")
    parser.add_argument("--text", choices=TEXTS, default="python")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--around", type=int, default=1, help="sweep: sizes on each side of the one that is taken")
    parser.add_argument("--shape", type=int, nargs=2, help="shape: layers and width")
    args = parser.parse_args()
    args.place.mkdir(parents=True, exist_ok=True)
    if args.what == "sweep":
        sweep(args.text, args.minutes, args.around, args.workers, args.place)
    elif args.what == "shape":
        name = f"{args.text}-{args.minutes:g}-{args.shape[0]}x{args.shape[1]}.json"
        (args.place / name).write_text(json.dumps(shape_run(args.text, args.minutes, args.place, *args.shape)))
    elif args.what == "one":
        point = Point(**json.loads(args.point))
        (args.place / f"{point.name}.json").write_text(json.dumps(train(point, args.place)))
    elif args.what == "run":
        run(args.place, args.workers, args.at_most)
    else:
        law, others, furthest = fit(known())
        print(law, others, f"furthest {furthest:.4f}", sep="\n")


if __name__ == "__main__":
    main()
