"""Fine-tuning from end to end: labelled rows, a pretrained model, the loop for each seed, a measured model folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from plume.config import FinetuneConfig, TrainConfig, UserError
from plume.data.examples import Example
from plume.data.tasks import TaskData, load_task
from plume.data.transform import ready
from plume.heads import Model
from plume.text import Tokenizer, load_tokenizer
from plume.train import adapt, metrics
from plume.train.devices import Precision, choose_precision
from plume.train.jobs import (
    ChooseJob,
    EmbedJob,
    Job,
    JobSettings,
    LabelJob,
    Prediction,
    SpanJob,
    TagJob,
    settings_from,
)
from plume.train.judge import JUDGED, best_null, measure, predict, sign, write_predictions
from plume.train.labelled import Grouped, Labelled
from plume.train.loop import Task, Trainer
from plume.train.objectives import Tokens
from plume.train.pretrain import no_trace_of_failure, open_folder
from plume.train.ranks import Ranks, join
from plume.train.report import describe_data, describe_run, plot_confusion, plot_curves
from plume.train.task_loss import TaskObjective
from plume.train.translate import Pairs
from plume.weights import load_model, read_config, read_json, resolve, save_model, write_json

FEW = 5000  # training rows below which results depend on the seed so much that one run says little
SEEDS = 3
Writer = Callable[[Model, Tokenizer, Sequence[str], int], list[str]]  # texts for sources, by so many beams


@dataclass(frozen=True)
class SeedResult:
    """How one run of one seed ended."""

    seed: int
    score: float
    metrics: dict[str, float]
    best_step: int
    steps: int
    seconds: float
    failed: bool  # no better than answers that ignore the input
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class FinetuneResult:
    """What came of a fine-tuning."""

    folder: Path
    metric: str
    seeds: list[SeedResult]
    best: SeedResult
    test: dict[str, float] | None
    baseline: float

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def summary(self) -> dict[str, float]:
        return dict(metrics.summary([seed.score for seed in self.seeds]))


# ---- what is trained ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that is the same for every seed."""

    config: FinetuneConfig
    data: TaskData
    tokenizer: Tokenizer
    job: Job | None  # None for translate
    train: Labelled | Pairs
    validation: Labelled | Pairs
    metric: str
    auxiliary: float
    writer: Writer | None

    @property
    def head(self) -> str:
        return "next-token" if self.job is None else self.job.head


def make_plan(config: FinetuneConfig, writer: Writer | None = None) -> Plan:
    """Read the task and tokenise it for the model."""
    place = resolve(config.model)
    said = read_config(place)
    data = load_task(config.task, seed=config.seed)
    check_family(said.model.decoder_layers > 0, data.kind, said.family.model_type)
    adapt.check_adapt(config.adapt, said.model.layers + said.model.decoder_layers)
    tokenizer = load_tokenizer(place)
    causal = said.model.causal
    auxiliary = auxiliary_of(config, data.kind, causal)
    length = said.model.context if config.task.length is None else config.task.length
    if length > said.model.context:
        raise UserError(f"task.length={length} is longer than the model's context of {said.model.context}")
    if data.kind == "translate":
        train, validation = (Pairs(e, tokenizer, length=length) for e in (data.train, data.validation))
        metric = config.metric or ("bleu" if writer is not None else "loss")
        return Plan(
            config=config,
            data=data,
            tokenizer=tokenizer,
            job=None,
            train=train,
            validation=validation,
            metric=metric,
            auxiliary=0.0,
            writer=writer,
        )
    tokenizer = ready(tokenizer)
    job = make_job(config, data, tokenizer, causal=causal, length=length)
    train_rows, validation_rows = job.encode(data.train), job.encode(data.validation)
    metric = metric_name(config, data, job)
    return Plan(
        config=config,
        data=data,
        tokenizer=tokenizer,
        job=job,
        train=train_rows,
        validation=validation_rows,
        metric=metric,
        auxiliary=auxiliary,
        writer=None,
    )


def check_family(two_stacks: bool, kind: str, model_type: str) -> None:
    if two_stacks != (kind == "translate"):
        wanted = "an encoder-decoder" if kind == "translate" else "a GPT or a BERT, not an encoder-decoder"
        raise UserError(f"a {kind} task needs {wanted}; this model is a {model_type}")


def auxiliary_of(config: FinetuneConfig, kind: str, causal: bool) -> float:
    if config.auxiliary is None:
        return 0.5 if causal and kind in ("classify", "pair", "similarity", "choose") else 0.0
    if config.auxiliary > 0 and not causal:
        raise UserError(
            f"auxiliary={config.auxiliary}: a model that sees both sides has no next-token loss; auxiliary=0 works"
        )
    return config.auxiliary


def make_job(config: FinetuneConfig, data: TaskData, tokenizer: Tokenizer, *, causal: bool, length: int) -> Job:
    impossible = data.kind == "span" and any(not e.label for e in (*data.train, *data.validation))
    settings = JobSettings(
        kind=data.kind,
        target=data.target,
        labels=data.labels,
        template=config.task.template,
        length=length,
        stride=config.task.stride,
        question_length=config.task.question_length,
        answer_length=config.answer_length,
        null_threshold=0.0 if impossible else None,
    )
    match data.kind:
        case "choose":
            return ChooseJob(settings, tokenizer, causal=causal)
        case "tag":
            return TagJob(settings, tokenizer, causal=causal)
        case "span":
            return SpanJob(settings, tokenizer, causal=causal)
        case "embed":
            return EmbedJob(settings, tokenizer, causal=causal, temperature=config.temperature)
        case _:
            weights = balanced(data) if config.class_weights == "balanced" and data.target == "label" else None
            return LabelJob(settings, tokenizer, causal=causal, class_weights=weights, smoothing=config.label_smoothing)


def balanced(data: TaskData) -> list[float]:
    """Weights that make every class count the same: rows / (classes * rows of the class)."""
    counts = [sum(e.label == label for e in data.train) for label in data.labels]
    return [len(data.train) / (len(counts) * max(count, 1)) for count in counts]


def metric_name(config: FinetuneConfig, data: TaskData, job: Job) -> str:
    if config.metric is None:
        return job.metric().main if data.metric is None else data.metric
    empty = job.metric().results()
    if config.metric not in empty:
        raise UserError(f"metric={config.metric!r} is not one of this task's: {', '.join(empty)}")
    return config.metric


def build_model(plan: Plan, seed: int) -> tuple[Model, adapt.Freezer, int]:
    """The pretrained model with a fresh head, new rows and what is to be frozen or added; and how many rows are new."""
    config = plan.config
    torch.manual_seed(seed)
    said = read_config(resolve(config.model))
    if plan.head not in said.family.heads:
        raise UserError(f"a {said.family.model_type} model cannot carry a {plan.head} head")
    labels = plan.data.labels if plan.data.labels else None
    model = load_model(config.model, head=plan.head, labels=labels)
    fresh = adapt.grow_table(model, max(plan.tokenizer.vocab_size, model.config.vocab_size))
    adapt.keep_layers(model, config.adapt.transfer_layers)
    adapt.set_dropout(model, config.dropout, config.classifier_dropout)
    if config.adapt.mode == "lora":
        adapt.add_lora(model, config.adapt, fresh)
    return model, adapt.Freezer(model, config.adapt), fresh


def train_config(plan: Plan, steps_per_epoch: int, seed: int, *, causal: bool) -> TrainConfig:
    config = plan.config
    steps = max(1, math.ceil(config.epochs * steps_per_epoch))
    small = config.adapt.mode in ("lora", "features")
    lr = config.lr if config.lr is not None else 1e-3 if small else 6.25e-5 if causal else 2e-5
    warmup = (0.002 if causal else 0.1) if config.warmup is None else config.warmup
    every = max(1, steps_per_epoch // 5) if config.validate_every is None else config.validate_every
    return TrainConfig(
        steps=steps,
        batch=config.batch,
        micro_batch=config.batch if config.micro_batch is None else config.micro_batch,
        lr=lr,
        beta2=0.999,
        weight_decay=config.weight_decay,
        clip=config.clip,
        schedule="linear",
        warmup=min(steps, math.ceil(warmup * steps)),
        final_lr=0.0,
        seed=seed,
        device=config.device,
        precision=config.precision,
        log_every=max(1, min(20, steps // 10)),
        validate_every=min(every, steps),
        checkpoint_every=steps_per_epoch,
        keep_last=1,
    )


@dataclass(frozen=True)
class HeldOut:
    """Validation items as batches of the loop: the shortest first."""

    data: Labelled | Pairs
    count: int

    def rows(self, step: int) -> int:
        return self.count

    def part(self, step: int, first: int, rows: int) -> Any:
        return self.data.batch(np.argsort(self.data.lengths, kind="stable")[first : first + rows])


# ---- one seed ----------------------------------------------------------------------------------------------------


def run_seed(plan: Plan, seed: int, folder: Path, ranks: Ranks, precision: Precision, *, resume: bool) -> SeedResult:
    """Train with one seed, keep its best weights as a model folder, and say how good they are."""
    config, job = plan.config, plan.job
    model, freezer, _ = build_model(plan, seed)
    batches = Grouped(plan.train, config.batch, seed=seed)
    settings = train_config(plan, batches.steps, seed, causal=model.config.causal)
    history: list[dict[str, float]] = []
    frozen = config.adapt.mode == "features"
    objective: Any = (
        Tokens(config.label_smoothing) if job is None else TaskObjective(job, plan.auxiliary, frozen_body=frozen)
    )

    def judge(model: Model) -> float:
        if job is None:
            return 0.0
        assert isinstance(plan.validation, Labelled)
        found = measure(job, model, plan.validation, plan.data.validation).results()
        history.append({"step": float(trainer.step), **found})
        return sign(plan.metric) * found[plan.metric]

    shares = adapt.shares(model, config.adapt.layer_decay) if config.adapt.layer_decay < 1.0 else {}
    task = Task(
        model=model,
        objective=objective,
        train=batches,
        validation=HeldOut(plan.validation, min(512, len(plan.validation))),
        judge=None if job is None else judge,
        patience=config.patience,
        share=lambda name: shares.get(name, 1.0),
        before_step=freezer.at,
    )
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(task, settings, folder, ranks, precision)
    learns, total = adapt.trainable(model)
    trainer.progress.say(f"seed {seed}: {learns:,} of {total:,} weights learn, {settings.steps} steps")
    outcome = trainer.run(resume=resume)
    if not outcome.finished:
        raise KeyboardInterrupt
    model.eval()
    final = tuned_settings(plan, model)
    found, baseline = final_metrics(plan, model)
    result = SeedResult(
        seed=seed,
        score=found[plan.metric],
        metrics=found,
        best_step=outcome.step if outcome.best_step is None else outcome.best_step,
        steps=outcome.step,
        seconds=outcome.seconds,
        failed=not metrics.better(plan.metric, found[plan.metric], baseline),
        history=history,
    )
    if ranks.main:
        save_run(plan, model, final, result, folder)
    return result


def measure_texts(plan: Plan, model: Model, examples: Sequence[Example]) -> metrics.Texts:
    assert plan.writer is not None
    metric = metrics.Texts()
    texts = plan.writer(model, plan.tokenizer, [e.fields["source"] for e in examples], plan.config.beams)
    for example, text in zip(examples, texts, strict=True):
        metric.add(example.label, text)
    return metric


def tuned_settings(plan: Plan, model: Model) -> JobSettings | None:
    """The job's settings with thresholds chosen on the validation rows, where that was asked or is needed."""
    job, examples = plan.job, plan.data.validation
    if job is None:
        return None
    settings = job.settings
    wants_label = plan.config.tune_threshold and isinstance(job, LabelJob) and len(settings.labels) == 2
    wants_null = isinstance(job, SpanJob) and settings.null_threshold is not None
    if not wants_label and not wants_null:
        return settings
    assert isinstance(plan.validation, Labelled)
    given = predict(job, model, plan.validation, examples)
    if wants_label:
        second = settings.labels[1]
        scores = [given[i].scores[second] for i in range(len(examples))]
        chosen = metrics.best_threshold(scores, [e.label == second for e in examples], plan.metric)
        settings = replace(settings, threshold=chosen)
    else:
        settings = replace(settings, null_threshold=best_null(examples, given))
    job.settings = settings
    return settings


def final_metrics(plan: Plan, model: Model) -> tuple[dict[str, float], float]:
    """Metrics of the kept weights on the validation rows, and what ignoring the input would give."""
    if plan.job is not None:
        assert isinstance(plan.validation, Labelled)
        metric = measure(plan.job, model, plan.validation, plan.data.validation)
        return metric.results(), metric.baseline(plan.metric)
    objective, total, count = Tokens(), 0.0, 0.0
    device = next(model.parameters()).device
    with torch.no_grad():
        batch: Any
        for batch in plan.validation.sweep(JUDGED):
            total += float(objective.totals(model, batch.to(device))[0])
            count += float(objective.counts(batch)[0])
    found = {"loss": total / max(count, 1.0)}
    if plan.writer is not None:
        found |= measure_texts(plan, model, plan.data.validation).results()
    return found, math.inf if plan.metric == "loss" else 0.0


def save_run(plan: Plan, model: Model, settings: JobSettings | None, result: SeedResult, folder: Path) -> None:
    """The seed's model folder, its adapter if it has one, and its result; its checkpoints are not needed any more."""
    config = plan.config
    if config.adapt.mode == "lora":
        adapt.save_adapter(model, config.adapt, folder / "adapter", base=str(config.model))
        adapt.merge_lora(model)
    info: dict[str, Any] = {
        "finetuned_from": str(config.model),
        "metric": plan.metric,
        "score": result.score,
        "results": result.metrics,
        "seed": result.seed,
        "task": None if settings is None else asdict(settings),
    }
    save_model(model, folder / "model", tokenizer=plan.tokenizer, info=info)
    write_json(folder / "result.json", asdict(result))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


# ---- the whole run -----------------------------------------------------------------------------------------------


def finetune(config: FinetuneConfig, *, writer: Writer | None = None) -> FinetuneResult:
    """Fine-tune, with several seeds where the set is small; the best one's model is the run's.

    `writer` gives an encoder-decoder's texts, for BLEU and ROUGE; without one the loss alone is measured.
    """
    with join(config.device) as ranks:
        with no_trace_of_failure(config.folder, ranks):
            plan = make_plan(config, writer)
            open_folder(config, ranks)
        precision = choose_precision(ranks.device, config.precision)
        if ranks.main:
            print(describe_data(plan.data, plan.train, plan.job, plan.tokenizer), flush=True)
        results = []
        for seed in seeds_of(config, len(plan.data.train)):
            folder = config.folder / f"seed-{seed}"
            if config.resume and (folder / "result.json").is_file():
                results.append(SeedResult(**read_json(folder / "result.json")))
                continue
            if plan.job is not None:  # thresholds of the seed before are its own
                plan.job.settings = replace(plan.job.settings, threshold=None)
            results.append(run_seed(plan, seed, folder, ranks, precision, resume=config.resume))
        best = min(results, key=lambda r: sign(plan.metric) * r.score)
        result = FinetuneResult(config.folder, plan.metric, results, best, None, 0.0)
        if ranks.main:
            result = finish(plan, result)
        ranks.barrier()
        return result


def seeds_of(config: FinetuneConfig, rows: int) -> range:
    """One run says little on a small set."""
    count = config.seeds if config.seeds is not None else SEEDS if rows < FEW else 1
    return range(config.seed, config.seed + count)


def finish(plan: Plan, result: FinetuneResult) -> FinetuneResult:
    """The best seed's model, its predictions, plots and the report."""
    folder, job = plan.config.folder, plan.job
    shutil.copytree(folder / f"seed-{result.best.seed}" / "model", folder / ".model.writing", dirs_exist_ok=True)
    shutil.rmtree(folder / "model", ignore_errors=True)
    (folder / ".model.writing").rename(folder / "model")
    model = load_model(folder / "model")
    confusion, test, baseline = None, None, 0.0
    if job is not None:
        about = read_json(folder / "model" / "plume.json")["task"]
        job.settings = settings_from(about)
        metric = job.metric()
        assert isinstance(plan.validation, Labelled)
        answers = predict(job, model, plan.validation, plan.data.validation)
        write_predictions(folder / "predictions.jsonl", plan.data.validation, answers)
        for number, answer in answers.items():
            job.judge(metric, plan.data.validation[number], answer)
        baseline = metric.baseline(plan.metric)
        confusion = getattr(metric, "confusion", None)
        test = measure_test(plan, model)
    elif plan.writer is not None:
        texts = plan.writer(
            model, plan.tokenizer, [e.fields["source"] for e in plan.data.validation], plan.config.beams
        )
        write_predictions(
            folder / "predictions.jsonl", plan.data.validation, {i: Prediction(t, {}) for i, t in enumerate(texts)}
        )
        test = measure_texts(plan, model, plan.data.test).results() if plan.data.test else None
    result = replace(result, test=test, baseline=baseline)
    if confusion is not None:
        plot_confusion(confusion, plan.data.labels, folder / "confusion.png")
    plot_curves({f"seed {s.seed}": s.history for s in result.seeds}, plan.metric, folder / "curve.png")
    data_text = describe_data(plan.data, plan.train, plan.job, plan.tokenizer)
    (folder / "report.md").write_text(describe_run(plan, result, data_text), encoding="utf-8")
    write_json(
        folder / "results.json",
        {
            "metric": result.metric,
            "baseline": None if math.isinf(baseline) else baseline,
            "summary": result.summary,
            "best_seed": result.best.seed,
            "seeds": [asdict(s) for s in result.seeds],
            "test": test,
        },
    )
    return result


def measure_test(plan: Plan, model: Model) -> dict[str, float] | None:
    """Predictions for the test rows, and their metrics where they have labels."""
    job, examples = plan.job, plan.data.test
    if not examples or job is None:
        return None
    answers = predict(job, model, job.encode(examples), examples)
    write_predictions(plan.config.folder / "test_predictions.jsonl", examples, answers)
    if any(e.label is None for e in examples):
        return None
    metric = job.metric()
    for number, answer in answers.items():
        job.judge(metric, examples[number], answer)
    found: dict[str, float] = metric.results()
    return found
