"""Recipes for a time budget, from the text to what the model knows: bits per byte beside xz, and minimal pairs.

    python -m benchmarks.budgets english-20 [--place FOLDER] [--minutes M] [--limit PAIRS] [--run FOLDER]
    python -m benchmarks.budgets compress [--minutes 2] [--megabytes 0.3 3 30]

The English is that of plume-en (benchmarks/bundled.py), its tokenizer too for a GPT; the Chinese is modern prose.
--run only measures a run that is there. `compress` trains on the beginning of the novels, as `plume demo --text` does.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.__main__ import SIZED
from benchmarks.bundled import english_files, novels, tokenizer_of
from benchmarks.results import ROOT, Row, real, report, skip
from plume.config import DataConfig, DemoConfig, EvaluateConfig, PretrainConfig, build, read_recipe
from plume.data import prepare
from plume.demo import settings
from plume.evaluate import evaluate
from plume.train.held_out import held_out_bits
from plume.train.pretrain import pretrain
from plume.util.run_folder import read_metrics, read_recipe_of

BARS = {"english-20": 60.0, "english-night": 65.0, "bert-night": 60.0}  # % of BLiMP's pairs
PAIRS = {"english": ("blimp", "blimp/BLiMP.zip"), "chinese": ("zhoblimp", "zhoblimp/ZhoBLiMP.tar.gz")}


def language(recipe: str) -> str:
    return "chinese" if recipe.startswith("chinese") else "english"


def trained(recipe: str, place: Path, minutes: float | None) -> Path:
    """The recipe on the text of its language; a run that was begun goes on."""
    table = read_recipe(ROOT / "recipes" / f"{recipe}.toml")
    table["folder"] = str(place / recipe)
    table["minutes"] = table["minutes"] if minutes is None else minutes
    text = real("data", language(recipe))
    if text is None:
        skip(f"needs ../shared/data/{language(recipe)}")
    data = table["data"] | {"folder": str(place / "data" / recipe), "paths": [str(text)]}
    if language(recipe) == "english":
        files, weights = english_files(text, place)
        data |= {"paths": [str(file) for file in files], "weights": weights}
    if recipe.startswith("english"):
        data["tokenizer"] = tokenizer_of(text, place)
        table["prepared"] = str(prepare(build(DataConfig, data)).folder)
    config = build(PretrainConfig, {**table, "data": data})
    print(pretrain(replace(config, resume=(place / recipe / "recipe.toml").is_file())).summary(), flush=True)
    return place / recipe


def measured(recipe: str, run: Path, limit: int | None) -> list[Row]:
    task, packed = PAIRS[language(recipe)]
    file = real("data", *packed.split("/"))
    if file is None:
        skip(f"needs ../shared/data/{packed}")
    found = evaluate(EvaluateConfig(model=str(run), tasks=(f"{task}={file}",), limit=limit, plots=False))
    result = found[task].first
    groups = ", ".join(f"{name} {100 * part:.1f}" for name, (part, _) in result.groups.items())
    last = [row for row in read_metrics(run) if "seconds" in row][-1]
    settings = read_recipe_of(run)
    data = Path(settings.get("prepared") or settings["data"]["folder"])
    bits = held_out_bits(run / "model", data, compressor=False)
    model: dict[str, Any] = settings["model"]
    size = f"{model['layers']}x{model['width']}, {last['tokens'] / 1e6:.1f} million tokens"
    return [
        Row(
            key=f"{recipe}.pairs",
            what=f"`plume pretrain {recipe}`: {task}, pairs of which the acceptable sentence is likelier",
            figure=100 * result.score.value,
            unit="%",
            digits=1,
            at_least=BARS.get(recipe) if limit is None else None,
            detail=f"{result.items:,} pairs; {groups}",
        ),
        Row(
            key=f"{recipe}.bits",
            what=f"`plume pretrain {recipe}`: bits per byte of held-out text",
            figure=bits["this model"],
            unit="",
            detail=f"{size} in {last['seconds'] / 60:.0f} minutes; bigram {bits['bigram']:.2f}",
        ),
    ]


def compress(megabytes: list[float], minutes: float) -> list[Row]:
    """English of several sizes: held-out bits by a model of so many minutes, and by xz behind the training text."""
    english = real("data", "english")
    if english is None:
        skip("needs ../shared/data/english")
    text, rows = "\n".join(novels(english)), []
    for size in megabytes:
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "text.txt"
            file.write_text(text[: round(size * 1e6)], encoding="utf-8")
            config, chosen, _ = settings(DemoConfig(text=(str(file),), folder=Path(place) / "run", minutes=minutes))
            print(chosen, flush=True)
            bits = held_out_bits(pretrain(config).model, config.data.folder)
        rows.append(
            Row(
                key=f"compress.{size:g}",
                what=f"{size:g} MB of English, {minutes:g} minutes: bits of the held-out text, of those of xz",
                figure=bits["this model"] / bits["xz"],
                at_most=1.0 if minutes >= 2 else None,
                detail=", ".join(f"{name} {value:.2f}" for name, value in bits.items()) + f"; {chosen}",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*SIZED, "compress"))
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / "budgets")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--limit", type=int, help="pairs at most")
    parser.add_argument("--run", type=Path, help="a run that is there")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.3, 3, 30])
    args = parser.parse_args()
    if args.what == "compress":
        report(*compress(args.megabytes, 2.0 if args.minutes is None else args.minutes))
        return
    run = trained(args.what, args.place, args.minutes) if args.run is None else args.run
    report(*measured(args.what, run, args.limit))


if __name__ == "__main__":
    main()
