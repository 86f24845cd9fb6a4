"""What pretraining is worth: learning curves of a pretrained model, of the same network fresh, and of a trivial model.

    python -m benchmarks.transfer [--tasks restoring sentiment] [--rows 100 400] [--seeds 5] [--out FOLDER]

Every seed draws its own training rows. Both networks train with their default learning rates, and each may take the
other's instead, by its validation score with the first seed. Runs are kept in FOLDER, a file for each model, and are
not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import zstandard

from benchmarks.results import ROOT, real, report, skip
from benchmarks.results import Row as Figure
from benchmarks.transfer_tasks import CHINESE, TASKS, TEST, Rows, TransferTask, reviews
from plume.config import (
    PRESETS,
    AdaptConfig,
    DataConfig,
    FinetuneConfig,
    PretrainConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from plume.hf import resolve
from plume.lab.verdicts import paired_test
from plume.model.heads import Model
from plume.tasks.schema import Example
from plume.tasks.task_kind import evaluate, predict
from plume.tasks.token_rows import Grouped
from plume.train.finetune import build_model, make_objective, train_config
from plume.train.finetune_plan import FinetunePlan, make_plan
from plume.train.optim import Optimizers, rate
from plume.train.pretrain import pretrain
from plume.util.files import new_figure, save_figure

BATCH, FEWEST_STEPS, EPOCHS = 16, 48, 3
ADAPT = {"pretrained": AdaptConfig(), "fresh": AdaptConfig(transfer_layers=-1)}
GAIN, CERTAIN, LOSS = 3.0, 0.01, -1.0  # points, p, points
Run = dict[str, Any]


# ---- a Chinese model ------------------------------------------------------------------------------------------------


def chinese_model(data: Path, out: Path, steps: int) -> str:
    """A GPT of modern Chinese and of the hotel reviews to train on, without their labels; made once."""
    folder = out / "chinese"
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    with (data / "chinese" / "classical-modern.jsonl.zst").open("rb") as stream:
        lines = zstandard.ZstdDecompressor().stream_reader(stream).read().decode().splitlines()
    texts = {
        "modern": [json.loads(line)["modern"] for line in random.Random(0).sample(lines, 40_000)],
        "reviews": [" ".join(row["text"].split()) for row in reviews(data)[TEST:]],
    }
    for name, rows in texts.items():
        (out / f"{name}.txt").write_text("\n".join(rows), encoding="utf-8")
    config = PretrainConfig(
        folder=folder,
        model=replace(PRESETS["gpt2-laptop"], layers=4, heads=4, width=128, context=64),
        train=TrainConfig(
            steps=steps,
            batch=16,
            optimizer="muon",
            lr=6e-3,
            muon_lr=0.03,
            weight_decay=0.1,
            schedule="linear",
            final_lr_ratio=0.0,
            warmup_steps=max(1, steps // 20),
            validate_every=max(1, steps // 3),
            validation_rows=64,
            sample_every=steps,
        ),
        data=DataConfig(
            paths=tuple(str(out / f"{name}.txt") for name in texts),
            weights=(1.0, 1.0),
            folder=out / "chinese-data",
            documents="line",
            tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=4096),
            workers=1,
        ),
        overwrite=True,
    )
    print(pretrain(config).summary(), flush=True)
    return str(folder / "model")


# ---- one run -------------------------------------------------------------------------------------------------------


def write_rows(rows: Rows, count: int, seed: int, folder: Path) -> TaskConfig:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(seed).sample(rows.train, count)
    files = {}
    for name, part in (("train", drawn), ("validation", rows.validation), ("test", rows.test)):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return TaskConfig(**{name: str(file) for name, file in files.items()})  # type: ignore[arg-type]


def plan_of(
    task: TransferTask, rows: TaskConfig, model: str, variant: str, count: int, steps: int | None
) -> FinetunePlan:
    epochs = max(EPOCHS, FEWEST_STEPS / math.ceil(count / BATCH)) if steps is None else steps / math.ceil(count / BATCH)
    target = "number" if task.kind == "similarity" else None
    return make_plan(
        FinetuneConfig(
            model=model,
            task=replace(rows, kind=task.kind, length=task.length, target=target),  # type: ignore[arg-type]
            folder=Path("unused"),
            adapt=ADAPT[variant],
            batch=BATCH,
            epochs=epochs,
            auxiliary_weight=0.0 if task.kind != "tag" else None,
            warmup_ratio=0.1,
            precision="float32",
            metric=task.metric,
        )
    )


def trained(plan: FinetunePlan, seed: int) -> Model:
    """The model after its last step: no best checkpoint is chosen."""
    model, _ = build_model(plan, seed)
    model.train()
    batches = Grouped(plan.train, plan.config.batch, seed=seed)
    config = train_config(plan, batches.steps, seed, causal=model.config.causal)
    optimizers, objective = Optimizers(model, config), make_objective(plan)
    for step in range(config.steps):
        batch = batches.part(step, 0, batches.rows(step))
        loss = (objective.totals(model, batch) / objective.counts(batch)).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        optimizers.step(rate(step, config))
        optimizers.zero_grad()
    return model.eval()


def score(plan: FinetunePlan, model: Model, examples: list[Example]) -> float:
    given = predict(plan.kind, model, plan.kind.encode(examples), examples)
    return 100 * evaluate(plan.kind, examples, given).results()[plan.metric]


def trivial(plan: FinetunePlan) -> float:
    """The best of the task's own baselines: TF-IDF with a regression, the usual tag of each word, the usual label."""
    test = plan.data.test
    found = [evaluate(plan.kind, test, one.predictions).results() for one in plan.kind.baselines(plan.data.train, test)]
    return 100 * max(0.0 if math.isnan(one[plan.metric]) else one[plan.metric] for one in found)


# ---- all runs ------------------------------------------------------------------------------------------------------


class Log:
    """Runs that were made, in a file that grows by a line for each."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file = file
        self.runs: list[Run] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def add(self, run: Run) -> Run:
        self.runs.append(run)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(run) + "\n")
        print(json.dumps(run), flush=True)
        return run

    def find(self, **key: Any) -> Run | None:
        return next((run for run in self.runs if all(run.get(name) == value for name, value in key.items())), None)


class Curves:
    """The runs of one task at one number of rows."""

    def __init__(self, task: TransferTask, count: int, args: argparse.Namespace, log: Log) -> None:
        self.task, self.count, self.args, self.log = task, count, args, log
        self.rows = task.make(args.data)
        self.model = args.model
        if task.name in CHINESE:
            self.model = chinese_model(args.data, args.out, args.chinese_steps)

    def plan(self, variant: str, seed: int) -> FinetunePlan:
        rows = write_rows(self.rows, self.count, seed, self.args.out / "rows")
        return plan_of(self.task, rows, self.model, variant, self.count, self.args.steps)

    def run(self, variant: str, rates: str, seed: int) -> Run:
        """`rates` says whose default learning rate it is."""
        key = {"task": self.task.name, "rows": self.count, "variant": variant, "rates": rates, "seed": seed}
        if (found := self.log.find(**key)) is not None:
            return found
        began, plan = time.process_time(), self.plan(variant, seed)
        lr = plan.lr if rates == variant else self.plan(rates, seed).lr
        model = trained(replace(plan, lr=lr), seed)
        validation = score(plan, model, list(plan.data.validation)) if seed == 0 else None
        test = score(plan, model, list(plan.data.test))
        seconds = round(time.process_time() - began, 1)
        return self.log.add({**key, "lr": lr, "validation": validation, "test": test, "seconds": seconds})

    def trivial(self, seed: int) -> Run:
        key = {"task": self.task.name, "rows": self.count, "variant": "trivial", "rates": "none", "seed": seed}
        found = self.log.find(**key)
        return self.log.add({**key, "test": trivial(self.plan("fresh", seed))}) if found is None else found

    def all(self) -> None:
        chosen = {}
        for variant in ADAPT:
            tried = [self.run(variant, rates, 0) for rates in ADAPT]
            chosen[variant] = max(tried, key=lambda run: run["validation"])["rates"]
        for seed in range(self.args.seeds):
            self.trivial(seed)
            for variant in ADAPT:
                for rates in sorted({variant, chosen[variant]}):
                    self.run(variant, rates, seed)


# ---- what was found ------------------------------------------------------------------------------------------------


def scores_of(runs: list[Run], variant: str, rates: str | None = None) -> list[float]:
    """The test scores of all seeds, at one rate or at the one that was chosen."""
    own = [run for run in runs if run["variant"] == variant]
    if rates is None:
        first = [run for run in own if run["seed"] == 0]
        rates = max(first, key=lambda run: run["validation"])["rates"] if variant in ADAPT else "none"
    return [run["test"] for run in sorted(own, key=lambda run: run["seed"]) if run["rates"] == rates]


def points(log: Log, seeds: int) -> Iterator[tuple[str, int, list[Run]]]:
    """Each task and number of rows of which all seeds are there."""
    for name, count in dict.fromkeys((run["task"], run["rows"]) for run in log.runs):
        runs = [run for run in log.runs if (run["task"], run["rows"]) == (name, count)]
        names = (*ADAPT, "trivial")
        if {run["variant"] for run in runs} == set(names) and all(len(scores_of(runs, n)) == seeds for n in names):
            yield name, count, runs


def figures(name: str, count: int, runs: list[Run]) -> list[Figure]:
    """What pretraining adds at chosen rates and at the default ones."""
    best, fresh, trivial = (scores_of(runs, variant) for variant in (*ADAPT, "trivial"))
    gain, over = paired_test(best, fresh), paired_test(best, trivial)
    default = paired_test(scores_of(runs, "pretrained", "pretrained"), scores_of(runs, "fresh", "fresh"))
    means = ", ".join(f"{statistics.fmean(s):.1f}" for s in (best, fresh, trivial))
    at = f"{TASKS[name].what}, {count} rows, {TASKS[name].metric}"
    return [
        Figure(
            key=f"{name} {count}",
            what=f"{at}: what pretraining adds",
            figure=gain.mean,
            unit="points",
            digits=1,
            detail=f"{len(best)} seeds, p {gain.p:.4f}; pretrained, fresh, trivial {means}; over the trivial model "
            f"{over.mean:+.1f}, p {over.p:.4f}",
        ),
        Figure(
            key=f"{name} {count} default",
            what=f"{at}: what it adds at default rates",
            figure=default.mean,
            unit="points",
            digits=1,
            at_least=LOSS,
            detail=f"{len(best)} seeds, p {default.p:.4f}",
        ),
    ]


def summary(log: Log, seeds: int) -> list[Figure]:
    """On how many tasks pretraining pays, and on how many it also beats the trivial model."""
    pays, beats = set(), set()
    for name, _, runs in points(log, seeds):
        best, fresh, trivial = (scores_of(runs, variant) for variant in (*ADAPT, "trivial"))
        gain, over = paired_test(best, fresh), paired_test(best, trivial)
        if gain.mean >= GAIN and gain.p < CERTAIN:
            pays.add(name)
            beats |= {name} if over.mean > 0 and over.p < CERTAIN else set()
    shown = {"pays": (pays, f"pretraining adds {GAIN:g} points or more (p < {CERTAIN:g})", 2)}
    shown["beats"] = (beats, "it also beats the trivial model", 1)
    return [
        Figure(
            key=key,
            what=f"tasks on which {what}",
            figure=len(found),
            unit="tasks",
            digits=0,
            at_least=least,
            detail=", ".join(sorted(found)),
        )
        for key, (found, what, least) in shown.items()
    ]


def plot(log: Log, seeds: int, file: Path) -> None:
    """A panel for each task: score by labelled rows."""
    found = list(points(log, seeds))
    names = list(dict.fromkeys(name for name, _, _ in found))
    if not names:
        return
    figure = new_figure(4 * min(3, len(names)), 3.2 * math.ceil(len(names) / 3))
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(math.ceil(len(names) / 3), min(3, len(names)), place)
        curve = sorted((count, runs) for task, count, runs in found if task == name)
        for variant, style in (("pretrained", "o-"), ("fresh", "s--"), ("trivial", "^:")):
            scores = [scores_of(runs, variant) for _, runs in curve]
            errors = [statistics.stdev(s) if len(s) > 1 else 0.0 for s in scores]
            means = [statistics.fmean(s) for s in scores]
            axes.errorbar([count for count, _ in curve], means, yerr=errors, fmt=style, capsize=2, label=variant)
        axes.set_xscale("log")
        axes.set_title(TASKS[name].what, fontsize=9)
        axes.set_xlabel("labelled rows")
        axes.set_ylabel(TASKS[name].metric)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    save_figure(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=real("data"))
    parser.add_argument("--model", default="plume-en")
    parser.add_argument("--chinese-steps", type=int, default=400, help="of pretraining, for the Chinese tasks")
    parser.add_argument(
        "--tasks", nargs="*", choices=tuple(TASKS), default=[name for name in TASKS if name != "hotels"]
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[400, 100])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="instead of three epochs, or as many as give 48 steps")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "transfer")
    parser.add_argument("--plot", type=Path, help="PNG with the curves")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.data is None:
        skip("what pretraining is worth is measured on real tasks, which are not here; --data names their folder")
    weights = (resolve(args.model) / "model.safetensors").read_bytes()
    log = Log(args.out / f"runs-{hashlib.sha256(weights).hexdigest()[:8]}.jsonl")
    for count in args.rows:
        for name in args.tasks:
            Curves(TASKS[name], count, args, log).all()
    for name, count, runs in points(log, args.seeds):
        if name in args.tasks and count in args.rows:
            report(*figures(name, count, runs))
    report(*summary(log, args.seeds))
    if args.plot is not None:
        plot(log, args.seeds, args.plot)


if __name__ == "__main__":
    main()
