"""Scores rather than speed: fine-tuning against transformers' Trainer, the search for a rate, BLiMP against lm-eval.

    python -m benchmarks.scores trainer [--data FOLDER] [--rows 400] [--seeds 5] [--own-order] [--base FOLDER]
    python -m benchmarks.scores search [--widths 128 256 512] [--grid 12]
    python -m benchmarks.scores pairs [--model plume-en] [--limit 2000]

The folder holds sst2, rte, cola, stsb, squad, chnsenticorp, multi30k and blimp. The models of the search have
random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.against_trainer import MEASURES, SETTINGS, against_trainer
from benchmarks.finetune import CPU, labelled_lines
from benchmarks.results import Row, real, report, skip
from plume.config import PRESETS, EvaluateConfig, FinetuneConfig, TaskConfig, TokenizerConfig
from plume.evaluate import evaluate
from plume.evaluate.eval_tasks import TASKS, find_rows
from plume.evaluate.items import TaskRow
from plume.hf import resolve, save_model
from plume.model.heads import Model
from plume.text import train_tokenizer
from plume.train.distribute import Ranks
from plume.train.finetune import finetune, try_rate
from plume.train.finetune_plan import make_plan, planned_steps
from plume.util.devices import choose_precision


def write_split(place: Path, data: Path, rows: int) -> list[str]:
    """SST-2's first rows in a fixed random order, and its dev set, as GLUE's own files."""
    lines = labelled_lines(data)[:rows]
    (place / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
    (place / "dev.tsv").write_text((data / "sst2" / "dev.tsv").read_text(encoding="utf-8"), encoding="utf-8")
    return lines


def finetune_config(base: Path, place: Path, name: str, task: str = "sst2", **more: Any) -> FinetuneConfig:
    return FinetuneConfig(
        model=str(base),
        task=TaskConfig(train=str(place), name=task, length=64),
        folder=place / name,
        validate_every=10**6,
        device="cpu",
        precision="float32",
        overwrite=True,
        **{**SETTINGS, "seeds": 1, **more},
    )


def run(base: Path, place: Path, name: str, task: str = "sst2", **more: Any) -> float:
    """The validation score of the last weights; of a search, with the rate that it found."""
    return finetune(finetune_config(base, place, name, task, **more)).summary["median"]


# ---- the search for a rate ---------------------------------------------------------------------------------------


def search_against_grid(args: argparse.Namespace, place: Path) -> None:
    """How many points the rate of --search 8 is behind the best of a grid, for every width."""
    lines = write_split(place, args.data, args.rows)
    texts = [line.split("\t")[0] for line in lines]
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=2000), texts)
    for width in args.widths:
        torch.manual_seed(0)
        shape = {"width": width, "heads": max(2, width // 64), "layers": 1, "context": 64, "mlp_width": None}
        config = replace(PRESETS["bert-tiny"], vocab_size=tokenizer.vocab_size, **shape)
        base = save_model(Model(config, "masked-token"), place / f"base-{width}", tokenizer=tokenizer)
        grid = grid_scores(base, place, args.grid, args.epochs)
        found = run(base, place, f"search-{width}", search=8, epochs=args.epochs)
        best = max(grid, key=grid.__getitem__)
        report(
            Row(
                key=f"search {width}",
                what=f"width {width}: the best of {args.grid} rates is better than --search 8 by",
                figure=100 * (grid[best] - found),
                unit="points",
                digits=1,
                at_most=5.0,
                detail=f"{grid[best]:.4f} at {best:.2g}; {found:.4f} by the search; worst {min(grid.values()):.4f}; "
                f"{args.rows} rows, {args.epochs:g} epochs",
            )
        )


def grid_scores(base: Path, place: Path, count: int, epochs: float) -> dict[float, float]:
    """The validation score of a whole training at each of `count` rates."""
    plan = make_plan(finetune_config(base, place, "grid", lr=1e-3, epochs=epochs))
    steps = planned_steps(plan.config, len(plan.train))
    settings = Ranks(device=CPU), choose_precision(CPU, "float32")
    found = dict[float, float]()
    for lr in np.geomspace(1e-5, 1e-2, count).tolist():
        found[lr] = -try_rate(replace(plan, lr=lr), steps, place / "grid", *settings)
        print(f"grid: learning rate {lr:.2g}, score {found[lr]:.4f}", flush=True)
    return found


# ---- BLiMP -------------------------------------------------------------------------------------------------------


def harness_accuracy(folder: Path, rows: Sequence[TaskRow], place: Path) -> float:
    """lm-eval's own description of a BLiMP task over the same rows, with transformers."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate as run_harness
    from lm_eval.models.huggingface import HFLM

    file = place / "rows.jsonl"
    pairs = ({name: row[name] for name in ("sentence_good", "sentence_bad")} for row in rows)  # other columns differ
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    task = {
        "task": "pairs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_target": 0,
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
        "metric_list": [{"metric": "acc"}],
        "num_fewshot": 0,
    }
    model = HFLM(pretrained=str(folder), device="cpu", batch_size=32, dtype="float32")
    made = ConfigurableTask(config=task)
    found = run_harness(lm=model, task_dict={"pairs": made}, bootstrap_iters=0)
    return float(found["results"]["pairs"]["acc,none"])


def minimal_pairs(args: argparse.Namespace, place: Path) -> None:
    """Some pairs of every paradigm against lm-eval, and the time of all."""
    every = list(find_rows(TASKS["blimp"], "test", args.data).rows())
    some = every[:: max(1, len(every) // args.limit)][: args.limit]
    accuracy, _ = blimp_run(args.model, some, place)
    theirs = harness_accuracy(resolve(args.model), some, place)
    timed = every[: args.timed]
    _, seconds = blimp_run(args.model, timed, place)
    report(
        Row(
            key="blimp",
            what=f"BLiMP, {len(some)} pairs of all paradigms, {args.model}: accuracy apart from lm-eval's",
            figure=100 * abs(accuracy - theirs),
            unit="points",
            at_most=0.1,
            detail=f"{100 * accuracy:.2f} and {100 * theirs:.2f}",
        ),
        Row(
            key="blimp seconds",
            what=f"BLiMP, all {len(every):,} pairs, {args.model}, {args.threads} threads",
            figure=seconds * len(every) / len(timed) / 60,
            unit="minutes",
            digits=1,
            at_most=3.0,
            detail=f"{seconds:.1f} s for {len(timed):,} pairs, with opening the model",
        ),
    )


def blimp_run(model: str, rows: Sequence[TaskRow], place: Path) -> tuple[float, float]:
    """The accuracy of Plume on some pairs, and the seconds that it took."""
    file = place / "blimp.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    began = time.perf_counter()
    found = evaluate(EvaluateConfig(model=model, tasks=(f"blimp={file}",), plots=False))
    return found["blimp"].score().value, time.perf_counter() - began


JOBS = {"trainer": against_trainer, "search": search_against_grid, "pairs": minimal_pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=tuple(JOBS))
    parser.add_argument("--data", type=Path, default=real("data"))
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--validation", type=int, default=400, help="rows of trainer to validate on, at most")
    parser.add_argument("--tasks", nargs="*", default=list(MEASURES), choices=tuple(MEASURES), help="of trainer")
    parser.add_argument("--own-order", action="store_true", help="also with each one's own order and dropout")
    parser.add_argument("--base", type=Path, help="folder of the first weights; made where there are none")
    parser.add_argument("--pretrain-steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--grid", type=int, default=12)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--model", default="plume-en", help="whose pairs are scored")
    parser.add_argument("--limit", type=int, default=2000, help="pairs that lm-eval scores too, evenly from all")
    parser.add_argument("--timed", type=int, default=67_000, help="pairs whose scoring is timed")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # read when the harness is imported
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    if args.data is None:
        skip("scores are measured on SST-2 and BLiMP, which are not here; --data names them")
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        JOBS[args.job](args, Path(place))


if __name__ == "__main__":
    main()
