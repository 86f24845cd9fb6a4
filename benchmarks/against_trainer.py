"""Fine-tuning against transformers' Trainer: same first weights, batches and schedule, no dropout.

`python -m benchmarks.scores trainer` runs it, with --own-order also with each one's order and dropout. The first
weights are a small BERT, pretrained for some minutes on the texts of the tasks without their labels, and for Multi30k
a small encoder-decoder with random weights; heads are drawn by Plume and handed to transformers.

The loss of a span has one intended difference: transformers gives padding a share of the softmax, Plume does not.
Training windows of SQuAD therefore have one length, so that no batch has padding.
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

from benchmarks.finetune import CPU
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
from plume.model.heads import Model
from plume.tasks.generate import PairRows
from plume.tasks.token_rows import Grouped, LabelledRows
from plume.text import Tokenizer, load_tokenizer, train_tokenizer
from plume.train.distribute import Ranks
from plume.train.finetune import build_model, measured, run_seed, train_config
from plume.train.finetune_plan import FinetunePlan, make_plan
from plume.train.optim import rate
from plume.train.pretrain import pretrain
from plume.util.devices import choose_precision

SETTINGS = {"batch": 32, "warmup_ratio": 0.1, "weight_decay": 0.01, "grad_clip": 1.0}
SQUAD_ROWS = 4  # a window of SQuAD costs as much as so many rows of the others
SQUAD_LENGTH = 128
EPOCHS = {"squad": 2, "multi30k": 6}  # times as many as of the others: fewer rows, and random first weights
RATES = {"multi30k": 3}  # times the rate of the others


def accuracy(logits: Any, true: Any) -> float:
    return float((logits.argmax(axis=1) == true).mean())


def phi(logits: Any, true: Any) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(true, logits.argmax(axis=1)))


def correlation(found: Any, true: Any) -> float:
    return float(np.corrcoef(np.squeeze(found), true)[0, 1])


# the measure of transformers' logits; none: Plume's, an answer's F1 or BLEU, of its weights
MEASURES: dict[str, Callable[[Any, Any], float] | None] = {
    "sst2": accuracy,
    "rte": accuracy,
    "cola": phi,
    "stsb": correlation,
    "chnsenticorp": accuracy,
    "squad": None,
    "multi30k": None,
}
NOTES = {"squad": "; windows without padding", "multi30k": "; BLEU, German to English, random first weights"}
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


def write_glue(place: Path, data: Path, name: str, rows: int, held: int) -> TaskConfig:
    head, body = glue_lines(data, name)
    random.Random(0).shuffle(body)
    (place / "train.tsv").write_text("\n".join([*head, *body[:rows]]) + "\n", encoding="utf-8")
    dev = (data / name / "dev.tsv").read_text(encoding="utf-8").splitlines()
    (place / "dev.tsv").write_text("\n".join(dev[: held + len(head)]) + "\n", encoding="utf-8")
    return TaskConfig(train=str(place), name=name, length=64)


def write_squad(place: Path, data: Path, rows: int, tokenizer: Tokenizer) -> TaskConfig:
    """A question for each paragraph, whose context ends where the window is full: batches have no padding."""
    paragraphs = [p for page in squad_pages(data) for p in page["paragraphs"]]
    random.Random(0).shuffle(paragraphs)
    count = max(8, rows // SQUAD_ROWS)
    asked = [cut for p in paragraphs if (cut := full_window(p, tokenizer)) is not None][: 2 * count]
    for file, part in (("train", asked[:count]), ("dev", asked[count:])):
        (place / f"{file}.json").write_text(json.dumps({"data": [{"paragraphs": part}]}), encoding="utf-8")
    files = {"train": str(place / "train.json"), "validation": str(place / "dev.json")}
    return TaskConfig(**files, kind="span", length=SQUAD_LENGTH)


def full_window(paragraph: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The first question of a paragraph with as much of the context as fits; none where that is too little."""
    question, pieces = paragraph["qas"][0], tokenizer.pieces(paragraph["context"])
    room = SQUAD_LENGTH - len(tokenizer.add_special_tokens(tokenizer.encode(question["question"]), [])[0])
    if len(pieces) < room:
        return None
    context = paragraph["context"][: pieces[room - 1].end]
    answers = [a for a in question["answers"] if a["answer_start"] + len(a["text"]) <= len(context)]
    return {"context": context, "qas": [{**question, "answers": answers}]} if answers else None


def write_reviews(place: Path, data: Path, rows: int, held: int) -> TaskConfig:
    reviews = hotel_reviews(data)
    random.Random(0).shuffle(reviews)
    for file, some in (("train", reviews[:rows]), ("dev", reviews[rows : rows + held])):
        lines = [json.dumps({"text": row["review"], "label": row["label"]}) for row in some]
        (place / f"{file}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return TaskConfig(train=str(place / "train.jsonl"), validation=str(place / "dev.jsonl"), kind="classify", length=64)


def write_translations(place: Path, data: Path, rows: int, held: int) -> TaskConfig:
    for file, count in (("train", rows), ("val", held // 4)):  # texts are written one by one
        for side in ("de", "en"):
            lines = (data / "multi30k" / f"{file}.{side}").read_text(encoding="utf-8").splitlines()[:count]
            (place / f"{file}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sides = {"train": "train.de", "targets": "train.en", "validation": "val.de", "validation_targets": "val.en"}
    return TaskConfig(**{name: str(place / file) for name, file in sides.items()}, kind="generate", length=64)


def write_task(place: Path, data: Path, name: str, rows: int, held: int, base: Path) -> TaskConfig:
    """A task's training rows in a fixed random order, and rows to validate on, as Plume's own reader takes them."""
    place.mkdir(parents=True, exist_ok=True)
    if name in TEXT_COLUMNS:
        return write_glue(place, data, name, rows, held)
    if name == "squad":
        return write_squad(place, data, rows, load_tokenizer(base))
    return (write_translations if name == "multi30k" else write_reviews)(place, data, rows, held)


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


def translator(folder: Path, data: Path) -> Path:
    """A small encoder-decoder with random weights. Its attention has biases, as transformers' class has."""
    files = [data / "multi30k" / f"train.{side}" for side in ("de", "en")]
    texts = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()[:2000]]
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=1000), texts)
    shape = {"layers": 1, "decoder_layers": 1, "width": 64, "heads": 2, "context": 64, "mlp_width": None}
    config = replace(PRESETS["transformer-laptop"], vocab_size=tokenizer.vocab_size, attention_bias=True, **shape)
    torch.manual_seed(0)
    return save_model(Model(config, "next-token"), folder, tokenizer=tokenizer)


# ---- one seed on either side -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A seed's scores, and how far the logits of the two models are apart at most."""

    ours: float
    theirs: float
    apart: float


def items(rows: LabelledRows | PairRows, *, regression: bool) -> list[dict[str, Any]]:
    """Plume's token rows as a Trainer takes them."""
    if isinstance(rows, PairRows):
        return [{"input_ids": a, "labels": b} for a, b in zip(rows.sources, rows.targets, strict=True)]
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
    auto = {
        "span": transformers.AutoModelForQuestionAnswering,
        "generate": transformers.AutoModelForSeq2SeqLM,
    }.get(plan.kind.name, transformers.AutoModelForSequenceClassification)
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
    pairs = plan.kind.name == "generate"
    collate = (transformers.DataCollatorForSeq2Seq if pairs else transformers.DataCollatorWithPadding)(tokenizer)
    return Trainer(model=auto.from_pretrained(start), args=settings, train_dataset=train, data_collator=collate)


def one_seed(name: str, config: FinetuneConfig, place: Path, *, exact: bool) -> Outcome:
    plan = make_plan(config)
    assert config.lr is not None
    if name == "squad":
        assert set(plan.train.lengths) == {SQUAD_LENGTH}, "windows have padding"
    model, _ = build_model(plan, config.seed)
    start = save_model(model, place / "start", tokenizer=plan.tokenizer)
    settings = Ranks(device=CPU), choose_precision(CPU, "float32")
    ours = run_seed(plan, config.seed, config.folder, *settings)
    trainer = make_trainer(plan, start, place, config.seed, exact=exact, lr=config.lr)
    trainer.train()
    regression = plan.data.target == "number"
    dev = items(plan.validation, regression=regression)  # type: ignore[arg-type]
    theirs = predicted(trainer, dev)
    if (measure := MEASURES[name]) is None:
        trainer.save_model(str(place / "theirs"))
        found = load_model(str(place / "theirs"), head=plan.kind.head).eval()
        score = measured(plan, found).results()[plan.metric]
    else:
        score = measure(theirs[0], plan.validation.targets)  # type: ignore[attr-defined]
    trainer.model = type(trainer.model).from_pretrained(config.folder / "model").eval()  # Plume's weights
    pairs = zip(theirs, predicted(trainer, dev), strict=True)
    apart = max(float(np.abs(a - b).max()) for a, b in pairs)
    scale = 0.01 if plan.metric == "bleu" else 1.0
    return Outcome(scale * ours.score, scale * score, apart)


def predicted(trainer: Any, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The logits of some rows; of an encoder-decoder without its hidden states."""
    found = trainer.predict(rows).predictions
    if not isinstance(found, tuple):
        return (found,)
    return found[:1] if "labels" in rows[0] else found


def against_trainer(args: argparse.Namespace, place: Path) -> None:
    folder = args.base if args.base is not None else place / "base"
    for name in args.tasks:
        if name == "multi30k":
            base = translator(place / "translator", args.data)
        else:
            base = pretrained(folder, args.data, args.pretrain_steps)
        task = write_task(place / name, args.data, name, args.rows, args.validation, base)
        for exact in (True, False) if args.own_order else (True,):
            found = []
            for seed in range(args.seeds):
                config = FinetuneConfig(
                    model=str(base),
                    task=task,
                    folder=place / name / f"run-{exact}-{seed}",
                    epochs=args.epochs * EPOCHS.get(name, 1),
                    lr=args.lr * RATES.get(name, 1),
                    seeds=1,
                    seed=seed,
                    beams=1,
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
            size = f"{len(make_plan(config).data.train)} rows, {config.epochs:g} epochs"
            report(row_of(name, found, exact=exact, size=size))


def row_of(name: str, found: list[Outcome], *, exact: bool, size: str) -> Row:
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
        detail=f"{medians[0]:.4f} and {medians[1]:.4f}, {len(found)} seeds, {size}{NOTES.get(name, '')}; {rest}",
    )
