"""Scores rather than speed: fine-tuning against transformers' Trainer, the search for a rate, BLiMP against lm-eval.

    python -m benchmarks.scores trainer [--data FOLDER] [--rows 1000] [--seeds 5]
    python -m benchmarks.scores search [--widths 128 256 512] [--grid 12]
    python -m benchmarks.scores pairs [--model FOLDER] [--limit 1000]

The folder holds sst2, rte, cola, stsb and blimp. The base models have random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.finetune import CPU, base_folder, labelled_lines
from benchmarks.results import Row, real, report, skip
from plume.config import PRESETS, EvaluateConfig, FinetuneConfig, TaskConfig, TokenizerConfig
from plume.evaluate import evaluate
from plume.evaluate.eval_tasks import TASKS, find_rows
from plume.hf import save_model
from plume.lab.verdicts import paired_test
from plume.model.heads import Model
from plume.tasks.token_rows import Grouped
from plume.text import train_tokenizer
from plume.train.distribute import Ranks
from plume.train.finetune import finetune, planned_steps, try_rate
from plume.train.finetune_plan import make_plan
from plume.util.devices import choose_precision

SETTINGS = {"epochs": 4.0, "batch": 32, "warmup_ratio": 0.1, "weight_decay": 0.01, "grad_clip": 1.0}


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


# ---- against Trainer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Glue:
    """Where a task's file holds texts and label, and how it is measured."""

    texts: tuple[int, ...]
    label: int
    metric: Callable[[Any, Any], float]
    labels: tuple[str, ...] = ("0", "1")  # none: numbers
    header: bool = True


def correlation(found: Any, true: Any) -> float:
    return float(np.corrcoef(np.squeeze(found), true)[0, 1])


def accuracy(logits: Any, true: Any) -> float:
    return float((logits.argmax(axis=1) == true).mean())


def phi(logits: Any, true: Any) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(true, logits.argmax(axis=1)))


GLUE = {
    "sst2": Glue((0,), 1, accuracy),
    "rte": Glue((1, 2), 3, accuracy, ("entailment", "not_entailment")),
    "cola": Glue((3,), 1, phi, header=False),
    "stsb": Glue((-3, -2), -1, correlation, ()),
}


def write_glue(place: Path, data: Path, name: str, rows: int) -> list[str]:
    """A task's first rows in a fixed random order, and its dev set; returns the training texts."""
    place.mkdir(parents=True, exist_ok=True)
    task, lines = GLUE[name], (data / name / "train.tsv").read_text(encoding="utf-8").splitlines()
    head, body = (lines[:1], lines[1:]) if task.header else ([], lines)
    random.Random(0).shuffle(body)
    (place / "train.tsv").write_text("\n".join([*head, *body[:rows]]) + "\n", encoding="utf-8")
    (place / "dev.tsv").write_text((data / name / "dev.tsv").read_text(encoding="utf-8"), encoding="utf-8")
    return [line.split("\t")[column] for line in body[:rows] for column in task.texts]


def trainer_score(base: Path, place: Path, name: str, seed: int, lr: float) -> float:
    """The same weights and settings in transformers."""
    import transformers

    task = GLUE[name]

    def rows(file: str) -> list[dict[str, Any]]:
        lines = (place / file).read_text(encoding="utf-8").splitlines()[int(task.header) :]
        cells = [line.split("\t") for line in lines]
        texts = [[row[column] for row in cells] for column in task.texts]
        encoded = tokenizer(*texts, truncation=True, max_length=64)
        given = [row[task.label] for row in cells]
        labels = [task.labels.index(y) for y in given] if task.labels else [float(y) for y in given]
        return [{**{k: encoded[k][i] for k in encoded}, "labels": y} for i, y in enumerate(labels)]

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    transformers.set_seed(seed)
    outputs = {"num_labels": max(1, len(task.labels)), "problem_type": None if task.labels else "regression"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, **outputs)
    train, dev = rows("train.tsv"), rows("dev.tsv")
    steps = -(-len(train) // 32) * int(SETTINGS["epochs"])
    settings = transformers.TrainingArguments(
        output_dir=str(place / "theirs"),
        per_device_train_batch_size=32,
        max_steps=steps,
        learning_rate=lr,
        adam_epsilon=1e-8,
        weight_decay=SETTINGS["weight_decay"],
        warmup_steps=-(-steps // 10),
        max_grad_norm=SETTINGS["grad_clip"],
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=seed,
    )
    collate = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=train, data_collator=collate)
    trainer.train()
    return task.metric(trainer.predict(dev).predictions, np.array([row["labels"] for row in dev]))


def against_trainer(args: argparse.Namespace, place: Path) -> None:
    for name in GLUE:
        texts = write_glue(place / name, args.data, name, args.rows)
        base = base_folder(args.preset, texts, place / name)
        ours, theirs = list[float](), list[float]()
        for seed in range(args.seeds):
            ours.append(run(base, place / name, f"ours-{seed}", task=name, seed=seed, lr=args.lr))
            theirs.append(trainer_score(base, place / name, name, seed, args.lr))
            print(f"{name}, seed {seed}: plume {ours[-1]:.4f}, Trainer {theirs[-1]:.4f}", flush=True)
        test, medians = paired_test(ours, theirs), (statistics.median(ours), statistics.median(theirs))
        report(
            Row(
                key=f"trainer {name}",
                what=f"{name}, same weights and settings: median score less that of transformers' Trainer",
                figure=100 * (medians[0] - medians[1]),
                unit="points",
                digits=1,
                at_least=-1.0,
                at_most=1.0,
                detail=f"{medians[0]:.4f} and {medians[1]:.4f}, {args.seeds} seeds, {args.rows} rows; 95 % interval of "
                f"the mean difference {100 * test.low:.1f} to {100 * test.high:.1f}",
            )
        )


# ---- the search for a rate ---------------------------------------------------------------------------------------


def search_against_grid(args: argparse.Namespace, place: Path) -> None:
    """How many points the rate of --search 8 is behind the best of a grid, for every width."""
    lines = write_split(place, args.data, args.rows)
    texts = [line.split("\t")[0] for line in lines]
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=4000), texts)
    for width in args.widths:
        torch.manual_seed(0)
        shape = {"width": width, "heads": max(2, width // 64), "layers": 2, "context": 64, "mlp_width": None}
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
    steps = planned_steps(plan.config, Grouped(plan.train, plan.config.batch, seed=0).steps)
    settings = Ranks(device=CPU), choose_precision(CPU, "float32")
    rates = np.geomspace(1e-5, 1e-2, count).tolist()
    return {lr: -try_rate(replace(plan, lr=lr), steps, place / "grid", *settings) for lr in rates}


# ---- BLiMP -------------------------------------------------------------------------------------------------------


def laptop_model(place: Path, texts: Iterable[str]) -> Path:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=8192), list(texts))
    torch.manual_seed(0)
    model = Model(replace(PRESETS["gpt2-laptop"], vocab_size=tokenizer.vocab_size))
    return save_model(model, place / "laptop", tokenizer=tokenizer)


def harness_accuracy(folder: Path, rows: list[dict[str, Any]], place: Path) -> float:
    """lm-eval's own description of a BLiMP task over the same rows, with transformers."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate as run_harness
    from lm_eval.models.huggingface import HFLM

    file = place / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
    every = [row.row for row in find_rows(TASKS["blimp"], "test", args.data).rows()]
    rows = list(islice(every[:: max(1, len(every) // args.limit)], args.limit))
    folder = args.model if args.model is not None else laptop_model(place, (row["sentence_good"] for row in every[::5]))
    (place / "blimp").mkdir()
    (place / "blimp" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def ours(data: str) -> tuple[float, float]:
        began = time.perf_counter()
        config = EvaluateConfig(model=str(folder), tasks=(f"blimp={data}",), plots=False)
        return evaluate(config)["blimp"].score().value, time.perf_counter() - began

    accuracy, seconds = ours(str(place / "blimp" / "rows.jsonl"))
    theirs = harness_accuracy(folder, rows, place)
    report(
        Row(
            key="blimp",
            what=f"BLiMP, {len(rows)} pairs of all paradigms: accuracy apart from lm-eval's",
            figure=100 * abs(accuracy - theirs),
            unit="points",
            at_most=0.1,
            detail=f"{100 * accuracy:.2f} and {100 * theirs:.2f}",
        ),
        Row(
            key="blimp seconds",
            what="BLiMP, 67,000 pairs of the laptop model, from the time of these",
            figure=seconds * len(every) / len(rows) / 60,
            unit="minutes",
            digits=1,
            at_most=3.0,
            detail=f"{seconds:.1f} s with opening the model",
        ),
    )


JOBS = {"trainer": against_trainer, "search": search_against_grid, "pairs": minimal_pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=tuple(JOBS))
    parser.add_argument("--data", type=Path, default=real("data"))
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--preset", default="bert-tiny")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--grid", type=int, default=12)
    parser.add_argument("--epochs", type=float, default=SETTINGS["epochs"], help="of the search and its grid")
    parser.add_argument("--model", type=Path, help="a GPT's folder for pairs; unset: random weights of gpt2-laptop")
    parser.add_argument("--limit", type=int, default=2000, help="pairs, evenly from all paradigms")
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
