"""How held-out bits per byte fall with the size of a GPT and the tokens it reads: python -m benchmarks.size_law run.

Each point is a whole run of the recipe of sized runs (its schedule ends with its tokens) on one thread, so it does not
depend on the machine's speed. `fit` fits the law in plume/train/size_law.py to the points kept in size_law.json beside
this file; `run` adds the points that are missing. docs/experiments.md says what came of it.
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
from scipy.optimize import least_squares

from benchmarks.bundled import english_files
from benchmarks.results import ROOT, real, skip
from plume.config import PRESETS, DataConfig, PretrainConfig, TokenizerConfig, TrainConfig
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
    data = DataConfig(
        paths=("python:stdlib",),
        folder=place / f"{point.text}-{point.vocab_size}",
        tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=point.vocab_size),
        validation_fraction=0.02,
    )
    if point.text == "python":
        return data
    text = real("data", point.text)
    if text is None:
        skip(f"needs ../shared/data/{point.text}")
    data = replace(data, documents="line", validation_fraction=0.003)
    if point.text == "chinese":
        return replace(data, paths=(str(text),), text_field="modern")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "fit", "one"))
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "size_law")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at-most", type=float, default=20.0, help="weights x tokens of a point, in 1e12")
    parser.add_argument("--point", help="one: the point as JSON")
    args = parser.parse_args()
    args.place.mkdir(parents=True, exist_ok=True)
    if args.what == "one":
        point = Point(**json.loads(args.point))
        (args.place / f"{point.name}.json").write_text(json.dumps(train(point, args.place)))
    elif args.what == "run":
        run(args.place, args.workers, args.at_most)
    else:
        law, others, furthest = fit(known())
        print(law, others, f"furthest {furthest:.4f}", sep="\n")


if __name__ == "__main__":
    main()
