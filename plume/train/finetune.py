"""Fine-tuning from end to end: labelled rows, a pretrained model, the loop for each seed, a measured model folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plume.config import FinetuneConfig, TrainConfig, UserError, takes_fields
from plume.data.batches import generator
from plume.data.pool import run_on_ray
from plume.hf import load_model, save_model
from plume.model.heads import Model
from plume.model.loss import token_loss
from plume.tasks import metrics, saved_settings
from plume.tasks.classify import ClassifyTask
from plume.tasks.schema import Example, Prediction
from plume.tasks.task_kind import TaskKind, evaluate, predict
from plume.tasks.token_rows import Grouped, LabelledBatch, LabelledRows, ValidationSample
from plume.train import adapt
from plume.train.assessment import Assessment, assess
from plume.train.distribute import Ranks, shared_precision
from plume.train.finetune_plan import FinetunePlan, make_plan, planned_steps
from plume.train.finetune_report import (
    describe_data,
    describe_rate,
    describe_run,
    plot_confusion,
    plot_curves,
    write_predictions,
)
from plume.train.loop import NonFiniteError, Outcome, Task, Trainer
from plume.train.lr_search import LONGEST, best_rate, plot_search, search
from plume.train.pretrain import open_run
from plume.util.console import plural, tell
from plume.util.devices import Precision, pick_device
from plume.util.files import aside, read_json, write_json, write_text
from plume.util.run_folder import read_metrics

FEW = 5000  # training rows below which results depend on the seed so much that one run says little
SEEDS = 3
VALIDATED = 512  # validation rows that the loss is measured on; the metric is measured on all
VALIDATIONS = 10  # of a contrastive training, which has few rows and many epochs
APART = 5  # steps between validations at least, unless configured


@dataclass(frozen=True)
class SeedResult:
    """The result of one seed."""

    seed: int
    score: float
    metrics: dict[str, float]
    best_step: int
    steps: int
    seconds: float
    failed: bool  # no better than predictions that ignore the input
    history: list[dict[str, float]] = field(default_factory=list)
    training: dict[str, float] = field(default_factory=dict)  # loss and metrics on a sample of the training rows


@dataclass(frozen=True)
class FinetuneResult:
    """The result of a fine-tuning."""

    folder: Path
    kind: str
    metric: str
    seeds: list[SeedResult]
    best: SeedResult
    test: dict[str, float] | None = None
    baseline: float = 0.0
    assessment: Assessment | None = None
    main: bool = True  # whether this process speaks for all ranks

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def summary(self) -> dict[str, float]:
        return dict(metrics.summary([seed.score for seed in self.seeds]))

    def as_json(self) -> dict[str, Any]:
        found = {
            "kind": self.kind,
            "metric": self.metric,
            "seeds": [asdict(seed) for seed in self.seeds],
            "test": self.test,
            "baseline": self.baseline,
            "summary": self.summary,
            "best_seed": self.best.seed,
        }
        return found | ({} if self.assessment is None else self.assessment.as_json())


# ---- the loss ----------------------------------------------------------------------------------------------------


class TaskObjective:
    """The task's loss and the language model's on the same rows: L3 = L2 + auxiliary_weight * L1.

    L1 of a row is the mean over its tokens, and an item's rows count equally, so that long texts weigh no more.
    """

    def __init__(self, kind: TaskKind, auxiliary_weight: float = 0.0, *, frozen_body: bool = False) -> None:
        self.kind, self.auxiliary_weight, self.frozen_body = kind, auxiliary_weight, frozen_body
        auxiliary = {"language_model": auxiliary_weight} if auxiliary_weight else {}
        self.parts: Mapping[str, float] = {"task": 1.0, **auxiliary}

    def counts(self, batch: Any) -> Tensor:
        counts = [self.kind.count(batch), *([float(len(batch))] if self.auxiliary_weight else [])]
        return torch.tensor(counts, dtype=torch.float32)

    def totals(self, model: Model, batch: Any) -> Tensor:
        if self.frozen_body:
            model.body.eval()  # no dropout in features
            with torch.no_grad():
                hidden = self.kind.hidden(model, batch)
        else:
            hidden = self.kind.hidden(model, batch)
        totals = [self.kind.losses(model, hidden, batch).sum()]
        if self.auxiliary_weight:
            totals.append(language_model_total(model, hidden, batch))
        return torch.stack(totals)


def language_model_total(model: Model, hidden: Tensor, batch: LabelledBatch) -> Tensor:
    """The sum over items of the mean over rows of the mean over tokens of the next-token loss."""
    following = torch.arange(1, batch.tokens.shape[1], device=hidden.device) < batch.lengths[:, None]  # (R, T - 1)
    rows_of_item = torch.bincount(batch.items, minlength=len(batch))[batch.items]  # (R,)
    share = 1.0 / ((batch.lengths - 1).clamp(min=1) * rows_of_item)  # (R,)
    weights = share[:, None].expand_as(following)[following]
    return token_loss(
        hidden[:, :-1][following],
        model.table,
        batch.tokens[:, 1:][following],
        vocab_size=model.config.vocab_size,
        weights=weights.to(hidden.dtype),
    )


# ---- one seed ----------------------------------------------------------------------------------------------------


def build_model(plan: FinetunePlan, seed: int) -> tuple[Model, adapt.Freezer]:
    """The pretrained model with a fresh head and new rows, and what decides which of its weights learn."""
    config = plan.config
    torch.manual_seed(seed)
    labels = plan.data.labels if plan.data.labels else None
    model = load_model(config.model, head=plan.kind.head, labels=labels)
    fresh = adapt.grow_table(model, max(plan.tokenizer.vocab_size, model.config.vocab_size))
    adapt.keep_layers(model, config.adapt.transfer_layers)
    adapt.set_dropout(model, config.dropout, config.classifier_dropout)
    if config.adapt.mode == "lora":
        adapt.add_lora(model, config.adapt, fresh)
    return model, adapt.Freezer(model, config.adapt)


def train_config(plan: FinetunePlan, steps_per_epoch: int, seed: int, *, causal: bool) -> TrainConfig:
    config = plan.config
    steps = planned_steps(config, len(plan.train))
    warmup = (0.002 if causal else 0.1) if config.warmup_ratio is None else config.warmup_ratio
    part = steps_per_epoch // 5 if config.contrastive is None else steps // VALIDATIONS
    every = max(APART, part) if config.validate_every is None else config.validate_every
    return TrainConfig(
        steps=steps,
        batch=config.batch,
        micro_batch=config.batch if config.micro_batch is None else config.micro_batch,
        lr=plan.lr,
        beta2=0.999,
        weight_decay=config.weight_decay,
        grad_clip=config.grad_clip,
        schedule="linear",
        warmup_steps=min(steps, math.ceil(warmup * steps)),
        final_lr_ratio=0.0,
        seed=seed,
        device=config.device,
        precision=config.precision,
        log_every=max(1, min(20, steps // 10)),
        validate_every=min(every, steps),
        checkpoint_every=steps_per_epoch if config.contrastive is None else steps,
        keep_last=1,
    )


def run_seed(plan: FinetunePlan, seed: int, folder: Path, ranks: Ranks, precision: Precision) -> SeedResult:
    """Train with one seed and save the best weights as a model folder."""
    config = plan.config
    model, freezer = build_model(plan, seed)
    batches = Grouped(plan.train, config.batch, seed=seed)
    history: list[dict[str, float]] = []

    def validate(model: Model) -> float:
        found = measured(plan, model).results()
        history.append({"step": float(trainer.step), **found})
        trainer.logger.metrics = {plan.metric: found[plan.metric]}
        return metrics.as_loss(plan.metric, found[plan.metric])

    task = make_task(plan, model, batches, validate, freezer)
    folder.mkdir(parents=True, exist_ok=True)
    settings = train_config(plan, batches.steps, seed, causal=model.config.causal)
    trainer = Trainer(task, settings, folder, ranks, precision)
    trained, total = adapt.trainable(model)
    trainer.logger.print(f"seed {seed}: {trained:,} of {total:,} weights are trained, {plural(settings.steps, 'step')}")
    outcome = trainer.run(resume=config.resume)
    if not outcome.finished:
        raise KeyboardInterrupt
    fit_head(plan, model.eval())
    rows, examples = plan.validation, plan.data.validation
    plan.kind.settings = plan.kind.tuned(examples, lambda: predict(plan.kind, model, rows, examples), plan.metric)
    result = seed_result(plan, model, seed, outcome, [*earlier(plan, folder, history), *history])
    if ranks.main:
        save_run(plan, model, result, folder)
    return result


def earlier(plan: FinetunePlan, folder: Path, history: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """The metric at the validations before the run was resumed."""
    known = {point["step"] for point in history} if plan.config.resume and plan.kind.selects_by_metric else None
    rows = [] if known is None else [row for row in read_metrics(folder) if "score" in row and row["step"] not in known]
    return [{"step": float(r["step"]), plan.metric: metrics.as_loss(plan.metric, r["score"])} for r in rows]


def with_best_rate(plan: FinetunePlan, count: int, ranks: Ranks, precision: Precision) -> FinetunePlan:
    """The plan with the learning rate that a search finds."""
    folder = plan.config.folder
    steps = min(LONGEST, planned_steps(plan.config, len(plan.train)))

    def attempt(lr: float) -> float:
        return try_rate(replace(plan, lr=lr), steps, folder / "search", ranks, precision)

    rates = search(count, attempt, folder, metric=plan.selected_by, resume=plan.config.resume, main=ranks.main)
    ranks.wait_long()
    shutil.rmtree(folder / "search", ignore_errors=True)
    lr = best_rate(rates)
    if ranks.main:
        plot_search(rates, plan.selected_by, lr, folder / "search.png")
    return replace(plan, rates=rates, lr=lr, lr_source=f"found by --search {count}, {plural(steps, 'step')} each")


def try_rate(plan: FinetunePlan, steps: int, folder: Path, ranks: Ranks, precision: Precision) -> float:
    """The validation score, lower is better, after a short training; infinite where it diverges."""
    model, freezer = build_model(plan, plan.config.seed)
    batches = Grouped(plan.train, plan.config.batch, seed=plan.config.seed)
    whole = train_config(plan, batches.steps, plan.config.seed, causal=model.config.causal)
    warmup = math.ceil(steps * whole.warmup_steps / whole.steps)
    settings = replace(whole, steps=steps, warmup_steps=warmup, validate_every=steps, checkpoint_every=steps)

    def validate(model: Model) -> float:
        return metrics.as_loss(plan.metric, measured(plan, model).results()[plan.metric])

    task = replace(make_task(plan, model, batches, validate, freezer), patience=None)
    if ranks.main:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    try:
        outcome = Trainer(task, settings, folder, ranks, precision).run(resume=False)
    except NonFiniteError:
        return math.inf
    if not outcome.finished:
        raise KeyboardInterrupt
    assert outcome.validation is not None
    return outcome.validation if math.isfinite(outcome.validation) else math.inf


def make_task(
    plan: FinetunePlan, model: Model, batches: Grouped, validate: Callable[[Model], float], freezer: adapt.Freezer
) -> Task:
    config = plan.config
    scales = adapt.lr_scales(model, config.adapt.layer_decay) if config.adapt.layer_decay < 1.0 else {}
    return Task(
        model=model,
        objective=make_objective(plan),
        train=batches,
        validation=ValidationSample(plan.validation, VALIDATED, group=config.batch, seed=config.seed),
        evaluate=validate if plan.kind.selects_by_metric else None,
        patience=config.patience,
        lr_scale=lambda name: scales.get(name, 1.0),
        before_step=freezer.at,
        find_unused_parameters=True,  # a frozen layer, a head that the loss does not use
    )


def make_objective(plan: FinetunePlan) -> TaskObjective:
    return TaskObjective(plan.kind, plan.auxiliary_weight, frozen_body=plan.config.adapt.mode == "features")


def measured(plan: FinetunePlan, model: Model) -> metrics.TaskMetric:
    """The task's metric on all validation rows."""
    fit_head(plan, model)
    examples = plan.data.validation
    return evaluate(plan.kind, examples, predict(plan.kind, model, plan.validation, examples))


def fit_head(plan: FinetunePlan, model: Model) -> None:
    """A head on the summaries of the training rows, where pairs of them trained the body alone."""
    if plan.config.contrastive is not None:
        assert isinstance(plan.kind, ClassifyTask) and isinstance(plan.train, LabelledRows)
        plan.kind.fit_head(model, plan.train)


def seed_result(
    plan: FinetunePlan, model: Model, seed: int, outcome: Outcome, history: list[dict[str, float]]
) -> SeedResult:
    metric = measured(plan, model)
    found = metric.results()
    return SeedResult(
        seed=seed,
        score=found[plan.metric],
        metrics=found,
        best_step=outcome.step if outcome.best_step is None else outcome.best_step,
        steps=outcome.step,
        seconds=outcome.seconds,
        failed=not metrics.as_loss(plan.metric, found[plan.metric] - metric.baseline(plan.metric)) < 0,
        history=history,
        training=training_fit(plan, model),
    )


@torch.no_grad()
def training_fit(plan: FinetunePlan, model: Model) -> dict[str, float]:
    """The loss, and the metrics unless they take long, on some training rows without dropout."""
    kind, size = plan.kind, plan.config.batch
    drawn = generator(plan.config.seed, "training sample").permutation(len(plan.data.train))[:VALIDATED]
    examples = [plan.data.train[i] for i in np.sort(drawn)]
    rows, device = kind.encode(examples), next(model.parameters()).device
    numbers, total, count = np.arange(len(rows)), 0.0, 0.0
    for first in range(0, len(rows), size):
        batch = rows.part(numbers, first, min(size, len(rows) - first), group=size).to(device)
        total += float(kind.losses(model, kind.hidden(model, batch), batch).sum())
        count += kind.count(batch)
    found = {"loss": total / max(count, 1.0)}
    if kind.selects_by_metric:
        found |= evaluate(kind, examples, predict(kind, model, rows, examples)).results()
    return found


def save_run(plan: FinetunePlan, model: Model, result: SeedResult, folder: Path) -> None:
    """The seed's model folder, its adapter if it has one, and its result; its checkpoints are removed."""
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
        "task": asdict(plan.kind.settings),
    }
    save_model(model, folder / "model", tokenizer=plan.tokenizer, info=info)
    write_json(folder / "result.json", asdict(result))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


# ---- the whole run -----------------------------------------------------------------------------------------------


@takes_fields(FinetuneConfig)
def finetune(config: FinetuneConfig) -> FinetuneResult:
    """Fine-tune a pretrained model on labelled rows, with several seeds on a small set; the best one is kept."""
    with open_run(config, config.device) as run:
        ranks = run.ranks
        with run.starting():
            plan = make_plan(config)
        precision = shared_precision(ranks, config.precision)
        if ranks.main:  # before the search, which may take long
            tell("\n".join([describe_data(plan), *(f"warning: {finding}" for finding in plan.findings)]))
        if config.search is not None:
            plan = with_best_rate(plan, config.search, ranks, precision)
        if ranks.main:
            tell(describe_rate(plan))
        results = run_seeds(plan, ranks, precision)
        best = best_seed(results, plan.metric)
        result = FinetuneResult(config.folder, plan.data.kind, plan.metric, results, best, main=ranks.main)
        if ranks.main:
            result = finish(plan, result, ranks.device)
            assert result.assessment is not None
            tell("\n".join(result.assessment.lines(shown=plan.findings)))
        ranks.wait_long()
        return result


def best_seed(results: Sequence[SeedResult], metric: str) -> SeedResult:
    """The one with the best score; a failed one, whose score may be no number, only where all failed."""
    return min(results, key=lambda r: (r.failed, math.isnan(r.score), metrics.as_loss(metric, r.score)))


def run_seeds(plan: FinetunePlan, ranks: Ranks, precision: Precision) -> list[SeedResult]:
    """The results of all seeds, in their order; finished ones are read when a run is resumed."""
    config, results = plan.config, dict[int, SeedResult]()
    seeds = seeds_of(config, len(plan.data.train))
    for seed in seeds:
        file = config.folder / f"seed-{seed}" / "result.json"
        if config.resume and file.is_file():
            results[seed] = SeedResult(**read_json(file))
    tasks = [{"seed": seed} for seed in seeds if seed not in results]
    if config.backend == "ray":
        if ranks.many:
            raise UserError("backend=ray trains each seed in one process; start it without torchrun")
        done = run_on_ray(SeedStage, (config, plan.lr), tasks, device=config.device)
    else:
        done = map(SeedStage(config, plan.lr, plan, ranks, precision), tasks)
    results |= {result["seed"]: SeedResult(**result) for result in done}
    return [results[seed] for seed in seeds]


class SeedStage:
    """What a worker does with a seed: train with it; elsewhere from the config alone."""

    def __init__(
        self,
        config: FinetuneConfig,
        lr: float,
        plan: FinetunePlan | None = None,
        ranks: Ranks | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.plan = replace(make_plan(config), lr=lr) if plan is None else plan
        self.ranks = Ranks(device=pick_device(config.device)) if ranks is None else ranks
        self.precision = shared_precision(self.ranks, config.precision) if precision is None else precision
        self.settings = self.plan.kind.settings

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        self.plan.kind.settings = self.settings  # without the thresholds of the seed before
        folder = self.plan.config.folder / f"seed-{task['seed']}"
        return asdict(run_seed(self.plan, task["seed"], folder, self.ranks, self.precision))


def seeds_of(config: FinetuneConfig, rows: int) -> range:
    """Several on a small set, where one run says little."""
    count = config.seeds if config.seeds is not None else SEEDS if rows < FEW else 1
    return range(config.seed, config.seed + count)


def finish(plan: FinetunePlan, result: FinetuneResult, device: torch.device) -> FinetuneResult:
    """The best seed's model, its predictions, plots and the report."""
    folder, data = plan.config.folder, plan.data
    with aside(folder / "model") as new:
        shutil.copytree(folder / f"seed-{result.best.seed}" / "model", new)
    model = load_model(folder / "model").to(device)
    if (settings := saved_settings(folder / "model")) is not None:
        plan.kind.settings = settings
    validation = predicted(plan, model, data.validation, folder / "predictions.jsonl")
    test = predicted(plan, model, data.test, folder / "test_predictions.jsonl") if data.test else None
    if not any(plan.kind.measurable(e) for e in data.test):
        test = None
    metric = evaluate(plan.kind, data.validation, validation)
    result = replace(
        result,
        test=None if test is None else evaluate(plan.kind, data.test, test).results(),
        baseline=metric.baseline(plan.metric),
        assessment=assess(plan, result.best, validation, test),
    )
    if isinstance(metric, metrics.ClassificationMetric):
        plot_confusion(metric.confusion, data.labels, folder / "confusion.png")
    plot_curves({f"seed {s.seed}": s.history for s in result.seeds}, plan.metric, folder / "curve.png")
    write_text(folder / "report.md", describe_run(plan, result, metric, validation))
    write_json(folder / "results.json", result.as_json())
    return result


def predicted(plan: FinetunePlan, model: Model, examples: Sequence[Example], path: Path) -> dict[int, Prediction]:
    """A prediction for every example, also written to a file."""
    predictions = predict(plan.kind, model, plan.kind.encode(examples), examples)
    write_predictions(path, examples, predictions)
    return predictions
