"""Fine-tuning from end to end: labelled rows, a pretrained model, the loop for each seed, a measured model folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from plume.config import FinetuneConfig
from plume.config.screen import tell
from plume.data.examples import Example
from plume.files import aside, read_json, write_json, write_text
from plume.heads import Model
from plume.train import adapt, metrics
from plume.train.devices import Precision, choose_precision
from plume.train.jobs import EmbedJob, JobSettings, LabelJob, settings_from
from plume.train.judge import best_null, measure, predict, sign, write_predictions
from plume.train.labelled import Grouped
from plume.train.loop import Outcome, Task, Trainer
from plume.train.pretrain import begun
from plume.train.ranks import Ranks, join
from plume.train.report import describe_data, describe_run, plot_confusion, plot_curves
from plume.train.span_job import SpanJob
from plume.train.task_plan import HeldOut, Plan, build_model, make_objective, make_plan, train_config
from plume.train.translate import Writer
from plume.weights import load_model, save_model

FEW = 5000  # training rows below which results depend on the seed so much that one run says little
SEEDS = 3
HELD_OUT = 512  # validation rows that the loss is measured on; the metric is measured on all


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
    test: dict[str, float] | None = None
    baseline: float = 0.0

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def summary(self) -> dict[str, float]:
        return dict(metrics.summary([seed.score for seed in self.seeds]))


# ---- one seed ----------------------------------------------------------------------------------------------------


def run_seed(plan: Plan, seed: int, folder: Path, ranks: Ranks, precision: Precision) -> SeedResult:
    """Train with one seed, keep its best weights as a model folder, and say how good they are."""
    config = plan.config
    model, freezer = build_model(plan, seed)
    batches = Grouped(plan.train, config.batch, seed=seed)
    history: list[dict[str, float]] = []

    def judge(model: Model) -> float:
        found = measure(plan.job, model, plan.validation, plan.data.validation).results()
        history.append({"step": float(trainer.step), **found})
        trainer.progress.found = {plan.metric: found[plan.metric]}
        return sign(plan.metric) * found[plan.metric]

    task = make_task(plan, model, batches, judge, freezer)
    folder.mkdir(parents=True, exist_ok=True)
    settings = train_config(plan, batches.steps, seed, causal=model.config.causal)
    trainer = Trainer(task, settings, folder, ranks, precision)
    learns, total = adapt.trainable(model)
    trainer.progress.say(f"seed {seed}: {learns:,} of {total:,} weights learn, {settings.steps} steps")
    outcome = trainer.run(resume=config.resume)
    if not outcome.finished:
        raise KeyboardInterrupt
    final = tuned_settings(plan, model.eval())
    result = measured(plan, model, seed, outcome, history)
    if ranks.main:
        save_run(plan, model, final, result, folder)
    return result


def make_task(
    plan: Plan, model: Model, batches: Grouped, judge: Callable[[Model], float], freezer: adapt.Freezer
) -> Task:
    config = plan.config
    shares = adapt.shares(model, config.adapt.layer_decay) if config.adapt.layer_decay < 1.0 else {}
    return Task(
        model=model,
        objective=make_objective(plan),
        train=batches,
        validation=HeldOut(plan.validation, min(HELD_OUT, len(plan.validation))),
        judge=judge if plan.job.judged else None,
        patience=config.patience,
        share=lambda name: shares.get(name, 1.0),
        before_step=freezer.at,
        some_rest=True,  # a frozen layer, a head that an objective does not ask
    )


def measured(plan: Plan, model: Model, seed: int, outcome: Outcome, history: list[dict[str, float]]) -> SeedResult:
    """What the weights that were kept are worth."""
    metric = measure(plan.job, model, plan.validation, plan.data.validation)
    found = metric.results()
    return SeedResult(
        seed=seed,
        score=found[plan.metric],
        metrics=found,
        best_step=outcome.step if outcome.best_step is None else outcome.best_step,
        steps=outcome.step,
        seconds=outcome.seconds,
        failed=not metrics.better(plan.metric, found[plan.metric], metric.baseline(plan.metric)),
        history=history,
    )


def tuned_settings(plan: Plan, model: Model) -> JobSettings:
    """The job's settings with thresholds chosen on the validation rows, where that was asked or is needed."""
    job, examples, settings = plan.job, plan.data.validation, plan.job.settings
    wants_label = plan.config.tune_threshold and isinstance(job, LabelJob) and len(settings.labels) == 2
    wants_null = isinstance(job, SpanJob) and settings.null_threshold is not None
    if not wants_label and not wants_null:
        return settings
    given = predict(job, model, plan.validation, examples)
    if wants_label:
        second = settings.labels[1]
        scores = [given[i].scores[second] for i in range(len(examples))]
        chosen = metrics.best_threshold(scores, [e.label == second for e in examples], plan.metric)
        job.settings = replace(settings, threshold=chosen)
    else:
        job.settings = replace(settings, null_threshold=best_null(examples, given))
    return job.settings


def save_run(plan: Plan, model: Model, settings: JobSettings, result: SeedResult, folder: Path) -> None:
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
        "task": asdict(settings),
    }
    save_model(model, folder / "model", tokenizer=plan.tokenizer, info=info)
    write_json(folder / "result.json", asdict(result))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


# ---- the whole run -----------------------------------------------------------------------------------------------


def finetune(config: FinetuneConfig, *, writer: Writer | None = None) -> FinetuneResult:
    """Fine-tune, with several seeds where the set is small; the best one's model is the run's.

    `writer` gives an encoder-decoder's texts; plume.finetune brings the generator's.
    """
    with join(config.device) as ranks:
        with begun(config, ranks):
            plan = make_plan(config, writer)
        precision = choose_precision(ranks.device, config.precision)
        if ranks.main:
            tell(describe_data(plan))
        results, settings = [], plan.job.settings
        for seed in seeds_of(config, len(plan.data.train)):
            folder = config.folder / f"seed-{seed}"
            if config.resume and (folder / "result.json").is_file():
                results.append(SeedResult(**read_json(folder / "result.json")))
                continue
            plan.job.settings = settings  # without the thresholds of the seed before
            results.append(run_seed(plan, seed, folder, ranks, precision))
        best = min(results, key=lambda r: sign(plan.metric) * r.score)
        result = FinetuneResult(config.folder, plan.metric, results, best)
        if ranks.main:
            result = finish(plan, result, ranks.device)
        ranks.wait_long()
        return result


def seeds_of(config: FinetuneConfig, rows: int) -> range:
    """One run says little on a small set."""
    count = config.seeds if config.seeds is not None else SEEDS if rows < FEW else 1
    return range(config.seed, config.seed + count)


def finish(plan: Plan, result: FinetuneResult, device: torch.device) -> FinetuneResult:
    """The best seed's model, its predictions, plots and the report."""
    folder, data, job = plan.config.folder, plan.data, plan.job
    with aside(folder / "model") as new:
        shutil.copytree(folder / f"seed-{result.best.seed}" / "model", new)
    model = load_model(folder / "model").to(device)
    job.settings = settings_from(read_json(folder / "model" / "plume.json")["task"])
    metric = answered(plan, model, data.validation, folder / "predictions.jsonl")
    test = answered(plan, model, data.test, folder / "test_predictions.jsonl") if data.test else None
    measured = all(e.label is not None for e in data.test)
    result = replace(
        result,
        test=test.results() if test is not None and measured else None,
        baseline=metric.baseline(plan.metric),
    )
    if isinstance(metric, metrics.Labels):
        plot_confusion(metric.confusion, data.labels, folder / "confusion.png")
    plot_curves({f"seed {s.seed}": s.history for s in result.seeds}, plan.metric, folder / "curve.png")
    write_text(folder / "report.md", describe_run(plan, result))
    about = {name: value for name, value in asdict(result).items() if name not in ("folder", "best")}
    write_json(folder / "results.json", {**about, "summary": result.summary, "best_seed": result.best.seed})
    return result


def answered(plan: Plan, model: Model, examples: list[Example], path: Path) -> Any:
    """The metric over some examples, those without a label left out; every answer is written down."""
    job = plan.job
    answers = predict(job, model, job.encode(examples), examples)
    write_predictions(path, examples, answers)
    metric = job.metric()
    for number, answer in answers.items():
        if examples[number].label is not None or (isinstance(job, EmbedJob) and not job.scored):
            job.judge(metric, examples[number], answer)
    return metric
