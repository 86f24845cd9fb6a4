"""A whole evaluation: every task and seed of a config, the store of scores, contamination, and the report."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from plume.config import EvaluateConfig, UserError
from plume.evaluate.contamination import Seen, contaminated
from plume.evaluate.progress import Progress
from plume.evaluate.protocols import protocol_called
from plume.evaluate.report import Report, TaskReport, write_report
from plume.evaluate.run import Result, Run, items_name
from plume.evaluate.store import Store
from plume.evaluate.subject import Subject
from plume.evaluate.tasks import Task, task_called


def run_all(config: EvaluateConfig) -> Report:
    config = replace(config, data=data_folder(config))
    names = [name for name in config.tasks if not name.startswith("harness:")]
    tasks = all_tasks(names, config)
    if len(names) < len(config.tasks) and importlib.util.find_spec("lm_eval") is None:
        raise UserError("harness:NAME needs lm-evaluation-harness: pip install 'plume-lm[eval]'")
    protocol = protocol_called(
        config.protocol, border=config.border, stride=config.stride, stop_words=config.stop_words
    )
    subject = Subject(config)
    store_file = None if config.out is None else config.out / "scores.sqlite"
    reports: list[TaskReport] = []
    with Store(store_file, subject.identity) as store, Progress() as progress:
        runs = [[Run(task, protocol, subject, store, config, seed) for seed in seeds(task, config)] for task in tasks]
        for task_runs in runs:
            task_runs[0].check()  # before anything is computed
        for task, task_runs in zip(tasks, runs, strict=True):
            results = [run.result(progress, items_file(config, task, run.seed)) for run in task_runs]
            reports.append(TaskReport(results=results, seen=contamination(task, config, task_runs[0])))
    reports += [TaskReport(results=[r]) for r in harness_results(config, subject)]
    report = Report(tasks=reports)
    if config.out is not None:
        write_report(report, config.out, plots=config.plots)
    return report


def data_folder(config: EvaluateConfig) -> Path | None:
    if config.data is not None:
        return config.data
    return Path("data") if Path("data").is_dir() else None


def all_tasks(names: list[str], config: EvaluateConfig) -> list[Task]:
    """Every task, or one error that names all that are not there."""
    fields = {"context": config.context_field, "choices": config.choices_field, "answer": config.answer_field}
    fields = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
    tasks, problems = list[Task](), list[str]()
    for name in names:
        try:
            tasks.append(task_called(name, fields))
        except UserError as error:
            problems.append(str(error))
    names = [task.name for task in tasks]
    problems += [f"two tasks would be called {n!r}; rename a file" for n in dict.fromkeys(names) if names.count(n) > 1]
    if problems:
        raise UserError("\n  ".join(problems))
    return tasks


def seeds(task: Task, config: EvaluateConfig) -> range:
    """Without examples and without sampling, one seed says all."""
    count = config.seeds if config.shots or (task.draws and config.protocol != "harness") else 1
    return range(config.seed, config.seed + count)


def items_file(config: EvaluateConfig, task: Task, seed: int) -> Path | None:
    return None if config.out is None else config.out / items_name(task.name, config.protocol, config.shots, seed)


def contamination(task: Task, config: EvaluateConfig, run: Run) -> Seen | None:
    if not config.training_data:
        return None
    file = items_file(config, task, run.seed)
    return contaminated(run, config.training_data, config.ngram, file)


def harness_results(config: EvaluateConfig, subject: Subject) -> list[Result]:
    names = [name.removeprefix("harness:") for name in config.tasks if name.startswith("harness:")]
    if not names:
        return []
    from plume.evaluate.harness import run_harness

    return run_harness(names, subject, config)
