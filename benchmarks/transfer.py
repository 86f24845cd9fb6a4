"""What pretraining is worth: a small model pretrained here and fine-tuned on GLUE's files, and the same one without.

    python -m benchmarks.transfer [--data FOLDER] [--family gpt] [--out FOLDER]

The folder holds wikitext-2, sst2, cola, rte and stsb. Prints one line per task and variant, with every seed's score.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.results import Row, real, report, skip
from plume.config import (
    PRESETS,
    AdaptConfig,
    DataConfig,
    FinetuneConfig,
    MaskingConfig,
    ObjectiveConfig,
    PretrainConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from plume.lab.verdicts import paired_test
from plume.train.finetune import FinetuneResult, finetune
from plume.train.pretrain import pretrain

MODEL = {
    "gpt": replace(PRESETS["gpt2-laptop"], context=128, width=128),
    "bert": replace(PRESETS["bert-laptop"], context=64),
}
OBJECTIVE = {
    "gpt": ObjectiveConfig(kind="language-model"),
    "bert": ObjectiveConfig(
        kind="masked", masking=MaskingConfig(mask_prob=0.3)
    ),  # with 0.15 it learns half as fast here
}
STEPS = {"gpt": 1500, "bert": 6000}
KIND = {"gpt": "gpt1-bpe", "bert": "wordpiece"}


def base_model(family: str, data: Path, out: Path, steps: int) -> Path:
    """A model pretrained on WikiText-2 and on SST-2's training sentences without their labels; made once."""
    folder = out / f"{family}-base-{steps}"
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    lines = (data / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    out.mkdir(parents=True, exist_ok=True)
    (out / "sentences.txt").write_text("\n".join(line.split("\t")[0] for line in lines), encoding="utf-8")
    began = time.perf_counter()
    result = pretrain(
        PretrainConfig(
            folder=folder,
            model=MODEL[family],
            objective=OBJECTIVE[family],
            train=TrainConfig(
                steps=steps,
                batch=32,
                optimizer="adamw",
                lr=2e-3,
                weight_decay=0.1,
                schedule="linear",
                final_lr_ratio=0.0,
                warmup_steps=100,
                validate_every=max(1, steps // 4),
                validation_rows=64,
                log_every=50,
                sample_every=steps,
            ),
            data=DataConfig(
                paths=(str(data / "wikitext-2" / "wiki.train.raw"), str(out / "sentences.txt")),
                weights=(1.0, 1.0),
                folder=out / f"{family}-data",
                documents="line",
                tokenizer=TokenizerConfig(kind=KIND[family], vocab_size=4096),  # type: ignore[arg-type]
                workers=1,
            ),
            overwrite=True,
        )
    )
    if not result.outcome.finished:
        raise SystemExit("stopped while pretraining")
    print(f"pretrained {family}: {result.summary()} ({time.perf_counter() - began:.0f} s in all)", flush=True)
    return result.model


def some_rows(name: str, data: Path, out: Path, rows: int | None) -> Path:
    """The task's folder with so many training rows, chosen at random but always the same."""
    folder = out / f"{name}-{rows}"
    folder.mkdir(parents=True, exist_ok=True)
    lines = (data / name / "train.tsv").read_text(encoding="utf-8").splitlines()
    header, body = ([], lines) if name == "cola" else (lines[:1], lines[1:])
    random.Random(0).shuffle(body)
    (folder / "train.tsv").write_text("\n".join([*header, *body[:rows]]) + "\n", encoding="utf-8")
    (folder / "dev.tsv").write_text((data / name / "dev.tsv").read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def run(name: str, variant: str, model: Path, folder: Path, out: Path, args: argparse.Namespace) -> FinetuneResult:
    auxiliary = {"gpt": 0.5, "bert": 0.0}[args.family] if "no auxiliary" not in variant else 0.0
    config = FinetuneConfig(
        model=str(model),
        task=TaskConfig(train=str(folder), name=name),
        folder=out / f"{args.family}-{name}-{variant.replace(' ', '-')}",
        adapt=AdaptConfig(transfer_layers=-1 if "no pretraining" in variant else None),
        auxiliary_weight=auxiliary,
        epochs=args.epochs,
        lr=args.lr,
        warmup_ratio=0.1,
        dropout=0.1,
        seeds=args.seeds,
        validate_every=10**6,
        overwrite=True,
    )
    began = time.perf_counter()
    result = finetune(replace(config, validate_every=None) if args.pick_best else config)
    scores = ", ".join(f"{seed.score:.4f}" for seed in result.seeds)
    print(
        f"RESULT {args.family} {name}, {variant}: {result.metric} median {result.summary['median']:.4f} ({scores}; "
        f"ignoring the input {result.baseline:.4f}), {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return result


def rows(args: argparse.Namespace, name: str, scores: dict[str, list[float]]) -> list[Row]:
    """What pretraining adds, seed by seed, with and without the auxiliary loss where both were run."""
    found = []
    for ending in ("", ", no auxiliary"):
        if f"pretrained{ending}" in scores:
            with_it, without = scores[f"pretrained{ending}"], scores[f"no pretraining{ending}"]
            test = paired_test(with_it, without)
            found.append(
                Row(
                    key=f"{name}{ending}",
                    what=f"{args.family.upper()}{ending or ', with the auxiliary loss' * (args.family == 'gpt')}: "
                    f"what pretraining adds on {name}",
                    figure=100 * test.mean,
                    unit="points",
                    digits=1,
                    detail=f"95 % interval of {args.seeds} seeds {100 * test.low:.1f} to {100 * test.high:.1f}; means "
                    f"{100 * statistics.fmean(with_it):.1f} with, {100 * statistics.fmean(without):.1f} without",
                )
            )
    return found


def measure(args: argparse.Namespace, out: Path) -> None:
    model = base_model(args.family, args.data, out, STEPS[args.family] if args.steps is None else args.steps)
    for name in args.tasks:
        folder = some_rows(name, args.data, out, args.rows)
        variants = ["pretrained", "no pretraining"]
        if args.family == "gpt" and name == "sst2":
            variants += ["pretrained, no auxiliary", "no pretraining, no auxiliary"]
        results = {v: run(name, v, model, folder, out, args) for v in variants}
        report(*rows(args, name, {v: [seed.score for seed in result.seeds] for v, result in results.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=real("data"))
    parser.add_argument("--family", choices=tuple(MODEL), default="gpt")
    parser.add_argument("--out", type=Path, help="keep the models there, and take a pretrained one that it holds")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--tasks", nargs="*", default=["sst2"])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=15.0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pick-best", action="store_true", help="keep the best checkpoint instead of the last")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.data is None:
        skip("what pretraining is worth is measured on WikiText-2 and GLUE, which are not here; --data names them")
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        measure(args, Path(place) if args.out is None else args.out)


if __name__ == "__main__":
    main()
