"""Fine-tuning against transformers' Trainer: same first weights, and with --exact the same batches without dropout.

`python -m benchmarks.scores trainer` runs it. The first weights are a small BERT, pretrained for some minutes on the
texts of the tasks without their labels; its head is drawn by Plume and handed to transformers.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.results import Row, report
from plume.config import (
    PRESETS,
    DataConfig,
    FinetuneConfig,
    MaskingConfig,
    ObjectiveConfig,
    PretrainConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from plume.hf import load_model, save_model
from plume.lab.verdicts import paired_test
from plume.tasks.token_rows import Grouped, LabelledRows
from plume.train.finetune import build_model, finetune, measured, train_config
from plume.train.finetune_plan import FinetunePlan, make_plan
from plume.train.optim import rate
from plume.train.pretrain import pretrain

SETTINGS = {"batch": 32, "warmup_ratio": 0.1, "weight_decay": 0.01, "grad_clip": 1.0}
SQUAD_ROWS = 4  # a window of SQuAD costs as much as so many rows of the others


def accuracy(logits: Any, true: Any) -> float:
    return float((logits.argmax(axis=1) == true).mean())


def phi(logits: Any, true: Any) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(true, logits.argmax(axis=1)))


def correlation(found: Any, true: Any) -> float:
    return float(np.corrcoef(np.squeeze(found), true)[0, 1])


# the measure of transformers' logits; none: an answer's F1, of its weights
MEASURES: dict[str, Callable[[Any, Any], float] | None] = {
    "sst2": accuracy,
    "rte": accuracy,
    "cola": phi,
    "stsb": correlation,
    "chnsenticorp": accuracy,
    "squad": None,
}
TEXT_COLUMNS = {"sst2": (0,), "rte": (1, 2), "cola": (3,), "stsb": (-3, -2)}


# ---- rows and first weights --------------------------------------------------------------------------------------


def glue_lines(data: Path, name: str) -> tuple[list[str], list[str]]:
    """A GLUE task's header, if it has one, and its training rows."""
    lines = (data / name / "train.tsv").read_text(encoding="utf-8").splitlines()
    return ([], lines) if name == "cola" else (lines[:1], lines[1:])


def hotel_reviews(data: Path) -> list[dict[str, str]]:
    with (data / "chnsenticorp" / "ChnSentiCorp_htl_all.csv").open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["review"]]


def squad_pages(data: Path) -> list[dict[str, Any]]:
    pages: list[dict[str, Any]] = json.loads((data / "squad" / "dev-v1.1.json").read_text(encoding="utf-8"))["data"]
    return pages


def write_task(place: Path, data: Path, name: str, rows: int) -> TaskConfig:
    """A task's training rows in a fixed random order, and rows to validate on, as Plume's own reader takes them."""
    place.mkdir(parents=True, exist_ok=True)
    if name in TEXT_COLUMNS:
        head, body = glue_lines(data, name)
        random.Random(0).shuffle(body)
        (place / "train.tsv").write_text("\n".join([*head, *body[:rows]]) + "\n", encoding="utf-8")
        (place / "dev.tsv").write_bytes((data / name / "dev.tsv").read_bytes())
        return TaskConfig(train=str(place), name=name, length=64)
    if name == "squad":
        pages = squad_pages(data)
        asked = [{**p, "title": page["title"], "qas": p["qas"][:2]} for page in pages for p in page["paragraphs"]]
        random.Random(0).shuffle(asked)
        count = max(4, rows // SQUAD_ROWS // 2)
        for file, part in (("train", asked[:count]), ("dev", asked[count : 2 * count])):
            (place / f"{file}.json").write_text(json.dumps({"data": [{"paragraphs": part}]}), encoding="utf-8")
        return TaskConfig(train=str(place / "train.json"), validation=str(place / "dev.json"), kind="span", length=128)
    reviews = hotel_reviews(data)
    random.Random(0).shuffle(reviews)
    for file, some in (("train", reviews[:rows]), ("dev", reviews[rows : rows + 800])):
        lines = [json.dumps({"text": row["review"], "label": row["label"]}) for row in some]
        (place / f"{file}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return TaskConfig(train=str(place / "train.jsonl"), validation=str(place / "dev.jsonl"), kind="classify", length=64)


def unlabelled(data: Path) -> Iterator[str]:
    """The texts of all tasks, without labels."""
    for name, columns in TEXT_COLUMNS.items():
        yield from (line.split("\t")[column] for line in glue_lines(data, name)[1] for column in columns)
    yield from (" ".join(row["review"].split()) for row in hotel_reviews(data))
    yield from (p["context"] for page in squad_pages(data) for p in page["paragraphs"])


def pretrained(folder: Path, data: Path, steps: int) -> Path:
    """A small BERT that has read the tasks' texts; made once."""
    if (folder / "run" / "model" / "config.json").is_file():
        return folder / "run" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(unlabelled(data))
    random.Random(0).shuffle(texts)
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    result = pretrain(
        PretrainConfig(
            folder=folder / "run",
            model=replace(PRESETS["bert-tiny"], context=128),
            objective=ObjectiveConfig(kind="masked", length=64, masking=MaskingConfig(mask_prob=0.3)),
            train=TrainConfig(
                steps=steps,
                batch=32,
                lr=2e-3,
                schedule="linear",
                warmup_steps=min(100, steps),
                validate_every=steps,
                validation_rows=64,
                sample_every=steps,
            ),
            data=DataConfig(
                paths=(str(folder / "texts.txt"),),
                folder=folder / "data",
                documents="line",
                tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=8000),
                workers=1,
            ),
            overwrite=True,
        )
    )
    return result.model


# ---- one seed on either side -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A seed's scores, and how far the logits of the two models are apart at most."""

    ours: float
    theirs: float
    apart: float


def items(rows: LabelledRows, *, regression: bool) -> list[dict[str, Any]]:
    """Plume's token rows as a Trainer takes them."""
    found = []
    for number in range(len(rows)):
        inside = slice(*rows.starts[rows.firsts[number] : rows.firsts[number] + 2])
        item: dict[str, Any] = {
            "input_ids": rows.tokens[inside].tolist(),
            "token_type_ids": rows.segments[inside].tolist(),
        }
        target = rows.targets[number].tolist()
        if isinstance(target, list):
            item |= {"start_positions": target[0], "end_positions": target[1]}
        else:
            item["labels"] = float(target) if regression else int(target)
        found.append(item)
    return found


def make_trainer(plan: FinetunePlan, start: Path, place: Path, seed: int, *, exact: bool, lr: float) -> Any:
    """A Trainer with Plume's first weights and settings; with `exact` also its batches and its schedule."""
    import transformers

    batches = Grouped(plan.train, plan.config.batch, seed=seed)
    ours = train_config(plan, batches.steps, seed, causal=False)
    regression = plan.data.target == "number"
    train = items(plan.train, regression=regression)  # type: ignore[arg-type]

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if not exact:
                return super().get_train_dataloader()
            order = [batches.numbers(step).tolist() for step in range(ours.steps)]
            return DataLoader(train, batch_sampler=order, collate_fn=self.data_collator)  # type: ignore[arg-type]

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if not exact:
                return super().create_scheduler(num_training_steps, optimizer)
            given = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: rate(step, ours))
            return self.lr_scheduler

    transformers.set_seed(seed)
    auto = transformers.AutoModelForQuestionAnswering
    if plan.kind.name != "span":
        auto = transformers.AutoModelForSequenceClassification
    settings = transformers.TrainingArguments(
        output_dir=str(place / "theirs"),
        per_device_train_batch_size=plan.config.batch,
        per_device_eval_batch_size=plan.config.batch,
        max_steps=ours.steps,
        learning_rate=lr,
        adam_epsilon=ours.eps,
        weight_decay=ours.weight_decay,
        warmup_steps=ours.warmup_steps,
        max_grad_norm=ours.grad_clip,
        logging_steps=10**6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=seed,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    collate = transformers.DataCollatorWithPadding(tokenizer)
    return Trainer(model=auto.from_pretrained(start), args=settings, train_dataset=train, data_collator=collate)


def one_seed(name: str, config: FinetuneConfig, place: Path, *, exact: bool) -> Outcome:
    plan = make_plan(config)
    assert config.lr is not None
    model, _ = build_model(plan, config.seed)
    start = save_model(model, place / "start", tokenizer=plan.tokenizer)
    ours = finetune(config)
    trainer = make_trainer(plan, start, place, config.seed, exact=exact, lr=config.lr)
    trainer.train()
    regression = plan.data.target == "number"
    dev = items(plan.validation, regression=regression)  # type: ignore[arg-type]
    theirs = trainer.predict(dev).predictions
    if (measure := MEASURES[name]) is None:
        trainer.save_model(str(place / "theirs"))
        score = measured(plan, load_model(str(place / "theirs"), head="span").eval()).results()[plan.metric]
    else:
        score = measure(theirs, plan.validation.targets)  # type: ignore[attr-defined]
    trainer.model = type(trainer.model).from_pretrained(ours.model).eval()  # Plume's weights in transformers
    again = trainer.predict(dev).predictions
    pairs = zip(theirs, again, strict=True) if isinstance(theirs, tuple) else [(theirs, again)]
    return Outcome(ours.summary["median"], score, max(float(np.abs(a - b).max()) for a, b in pairs))


def against_trainer(args: argparse.Namespace, place: Path) -> None:
    base = pretrained(args.base if args.base is not None else place / "base", args.data, args.pretrain_steps)
    for name in args.tasks:
        task = write_task(place / name, args.data, name, args.rows)
        for exact in (True, False) if args.own_order else (True,):
            found = []
            for seed in range(args.seeds):
                config = FinetuneConfig(
                    model=str(base),
                    task=task,
                    folder=place / name / f"run-{exact}-{seed}",
                    epochs=args.epochs,
                    lr=args.lr,
                    seeds=1,
                    seed=seed,
                    dropout=0.0 if exact else None,
                    classifier_dropout=0.0 if exact else 0.1,
                    validate_every=10**6,
                    device="cpu",
                    precision="float32",
                    overwrite=True,
                    **SETTINGS,
                )
                found.append(one_seed(name, config, place / name, exact=exact))
                print(f"{name}, seed {seed}: {found[-1]}", flush=True)
            report(row_of(name, found, exact=exact, rows=args.rows))


def row_of(name: str, found: list[Outcome], *, exact: bool, rows: int) -> Row:
    ours, theirs = [one.ours for one in found], [one.theirs for one in found]
    medians = statistics.median(ours), statistics.median(theirs)
    how = "same weights, batches and schedule, no dropout" if exact else "same weights, own order and dropout"
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    if exact:
        rest = (
            f"largest difference of a seed {100 * apart:.2f} points, of a logit {max(one.apart for one in found):.1e}"
        )
    else:
        test = paired_test(ours, theirs)
        rest = f"95 % interval of the mean difference {100 * test.low:.1f} to {100 * test.high:.1f}"
    return Row(
        key=f"trainer {name}" if exact else f"trainer {name}, own order",
        what=f"{name}, {how}: median score less that of transformers' Trainer",
        figure=100 * (medians[0] - medians[1]),
        unit="points",
        at_least=-1.0 if exact else None,
        at_most=1.0 if exact else None,
        detail=f"{medians[0]:.4f} and {medians[1]:.4f}, {len(found)} seeds, {rows} rows; {rest}",
    )
