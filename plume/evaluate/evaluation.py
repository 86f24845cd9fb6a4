"""A whole evaluation: every task and seed of a config, the store of scores, contamination, and the report."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import DataConfig, EvaluateConfig, UserError, at_home
from plume.data import open_shards, read_documents
from plume.data.pool import run_on_ray
from plume.data.shards import MANIFEST
from plume.data.tables import Tally
from plume.evaluate.eval_tasks import EvalTask, find_task
from plume.evaluate.items import find_protocol
from plume.evaluate.report import Contamination, EvaluationReport, TaskReport, write_curve, write_report
from plume.evaluate.requests import METRICS, headline
from plume.evaluate.subject import ScoreStore, Subject, check_head
from plume.evaluate.task_run import TaskResult, TaskRun, file_name, items_name
from plume.hf import openable_steps
from plume.text import load_tokenizer
from plume.util.files import write_rows
from plume.util.hashing import Hashes, run_hashes, word_hashes
from plume.util.progress import Progress
from plume.util.run_folder import run_lock


def run_all(config: EvaluateConfig) -> EvaluationReport:
    """Evaluate; a report folder is held while it is written, so that two evaluations cannot mix in it."""
    if config.out is None and config.checkpoints == "last":
        return run_tasks(config)
    if config.out is None:
        raise UserError("checkpoints=all writes a report for each checkpoint; name a folder with --out")
    config.out.mkdir(parents=True, exist_ok=True)
    with run_lock(config.out):
        return run_tasks(config) if config.checkpoints == "last" else run_checkpoints(config, config.out)


def run_checkpoints(config: EvaluateConfig, out: Path) -> EvaluationReport:
    """Every checkpoint of a run in turn, each with a report of its own, and one curve; the last report is returned."""
    steps = openable_steps(at_home(config.model))
    if not steps:
        raise UserError(f"checkpoints=all: {config.model} is not a run folder with checkpoints")
    reports = [
        run_tasks(replace(config, model=f"{config.model}@{step}", out=out / f"step-{step}", plots=False))
        for step in steps
    ]
    write_curve(steps, reports, out, plots=config.plots)
    return reports[-1]


def run_tasks(config: EvaluateConfig) -> EvaluationReport:
    config = replace(config, data=data_folder(config))
    check_head(str(config.model))
    all_tasks([name for name in config.tasks if not name.startswith("harness:")], config)  # before anything is computed
    for place in config.training_data:
        if not place.startswith("hub:"):
            next(training_texts((place,)), None)  # an error where no text is found
    if any(name.startswith("harness:") for name in config.tasks) and importlib.util.find_spec("lm_eval") is None:
        raise UserError("harness:NAME needs lm-evaluation-harness: pip install 'plume-lm[eval]'")
    if config.backend == "ray":
        tasks = [{"number": number, "name": name} for number, name in enumerate(config.tasks)]
        found = run_on_ray(TaskStage, (config,), tasks, device=config.device)
        done = {result["number"]: result["reports"] for result in found}
        reports = [report for number in sorted(done) for report in done[number]]
    else:
        reports = task_reports(config, "scores.sqlite")
    report = EvaluationReport(tasks=reports)
    if config.out is not None:
        write_report(report, config.out, plots=config.plots)
    return report


class TaskStage:
    """What a worker does with a task: evaluate it, with a store of its own."""

    def __init__(self, config: EvaluateConfig) -> None:
        self.config = config

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        alone = replace(self.config, tasks=(task["name"],))
        return {**task, "reports": task_reports(alone, f"scores-{task['number']}.sqlite")}


def task_reports(config: EvaluateConfig, store_name: str) -> list[TaskReport]:
    tasks = all_tasks([name for name in config.tasks if not name.startswith("harness:")], config)
    protocol = find_protocol(
        config.protocol, boundary=config.boundary, stride=config.stride, stop_word_filter=config.stop_word_filter
    )
    subject = Subject(config)
    store_file = None if config.out is None else config.out / store_name
    reports: list[TaskReport] = []
    with ScoreStore(store_file, subject.identity) as store, Progress() as progress:
        runs = [
            [TaskRun(task, protocol, subject, store, config, seed) for seed in seeds(task, config)] for task in tasks
        ]
        for task_runs in runs:
            task_runs[0].check()  # before anything is computed
        for task, task_runs in zip(tasks, runs, strict=True):
            results = [run.result(progress, items_file(config, task, run.seed)) for run in task_runs]
            reports.append(TaskReport(results=results, seen=contamination(task, config, task_runs[0])))
    return reports + [TaskReport(results=[r]) for r in harness_results(config, subject)]


def data_folder(config: EvaluateConfig) -> Path | None:
    if config.data is not None:
        if not config.data.is_dir():
            raise UserError(f"there is no folder data={config.data}; unset, tasks come from ./data or the hub")
        return config.data
    return Path("data") if Path("data").is_dir() else None


def all_tasks(names: list[str], config: EvaluateConfig) -> list[EvalTask]:
    """Every task, or one error that names all that are not there."""
    fields = {"context": config.context_field, "choices": config.choices_field, "answer": config.answer_field}
    fields = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
    tasks, problems = list[EvalTask](), list[str]()
    for name in names:
        try:
            tasks.append(find_task(name, fields))
        except UserError as error:
            problems.append(str(error))
    names = [file_name(task.name) for task in tasks]  # of their items' files too
    problems += [f"two tasks would be called {n!r}; rename a file" for n in dict.fromkeys(names) if names.count(n) > 1]
    if problems:
        raise UserError("\n  ".join(problems))
    return tasks


def seeds(task: EvalTask, config: EvaluateConfig) -> range:
    """Without examples and without sampling, one seed says all."""
    count = config.seeds if config.shots or (task.draws and config.protocol != "harness") else 1
    return range(config.seed, config.seed + count)


def items_file(config: EvaluateConfig, task: EvalTask, seed: int) -> Path | None:
    return None if config.out is None else config.out / items_name(task.name, config.protocol, config.shots, seed)


def contamination(task: EvalTask, config: EvaluateConfig, run: TaskRun) -> Contamination | None:
    if not config.training_data:
        return None
    file = items_file(config, task, run.seed)
    return measure_contamination(run, config.training_data, config.ngram, file)


def harness_results(config: EvaluateConfig, subject: Subject) -> list[TaskResult]:
    names = [name.removeprefix("harness:") for name in config.tasks if name.startswith("harness:")]
    if not names:
        return []
    from plume.evaluate.harness import run_harness

    return run_harness(names, subject, config)


# ---- contamination -----------------------------------------------------------------------------------------------


def is_prepared(place: str) -> bool:
    return (at_home(place) / MANIFEST).is_file()


def training_texts(places: Sequence[str]) -> Iterator[str]:
    """Every document of prepared folders, decoded, or of texts in any form that `plume prepare` reads."""
    for place in places:
        folder = at_home(place)
        if not is_prepared(place):
            yield from raw_texts(place)
            continue
        tokenizer = load_tokenizer(folder / "tokenizer")
        shards = open_shards(folder, "train", tokenizer_hash=tokenizer.hash)
        for stream in shards.streams:
            for number in range(stream.documents):
                yield tokenizer.decode(stream.document(number).tolist(), skip_special=True)


def raw_texts(place: str) -> Iterator[str]:
    """Every document of a path; where there is none, nothing was searched, and no item may be called clean."""
    tally, found = Tally(), False
    for document in read_documents(DataConfig(paths=(place,), folder=Path(".")), tally):
        found = True
        yield document.text
    if not found:
        hint = "; `plume prepare --text-field NAME` reads another field, and its folder can be given here"
        raise UserError(f"training_data: no text is found in {place}{tally.reasons()}{hint}")


def found_in(wanted: Hashes, texts: Iterator[str], ngram: int) -> Hashes:
    """Which of some sorted hashes occur in any text. Memory grows with what is looked for, not with the texts."""
    seen = np.zeros(len(wanted), dtype=np.bool_)
    for text in texts:
        runs = run_hashes(text, ngram)
        places = np.searchsorted(wanted, runs)
        places[places == len(wanted)] = 0
        seen[places[wanted[places] == runs]] = True
    return wanted[seen]


def runs_of(text: str, ngram: int) -> Hashes:
    """Every run of the full length; none in a shorter text."""
    return run_hashes(text, ngram) if len(word_hashes(text)) >= ngram else np.empty(0, np.uint64)


def measure_contamination(run: TaskRun, training_data: Sequence[str], ngram: int, file: Path | None) -> Contamination:
    """Looks for the run's items in the training data; the records of items get their overlap."""
    items = run.limited_items(run.source)
    runs = [runs_of(item.text, ngram) for item in items]
    wanted = np.unique(np.concatenate(runs))
    known = found_in(wanted, training_texts(training_data), ngram) if len(wanted) else wanted
    shares = [float(np.isin(r, known).mean()) if len(r) else 0.0 for r in runs]
    for record in run.kept:
        record["overlap"] = shares[record["item"]]
    if file is not None:
        write_rows(file, run.kept)
    dirty = [record for record in run.kept if record["overlap"] > 0]
    clean = [record for record in run.kept if record["overlap"] == 0]
    measure = METRICS[run.task.kind]
    whole = measure(run.task, run.kept)
    name = headline(run.task, run.protocol, whole)
    return Contamination(
        ngram=ngram,
        training_data=list(training_data),
        dirty=len(dirty),
        clean=len(clean),
        short=sum(not len(runs[record["item"]]) for record in run.kept),
        overlap=float(np.mean([record["overlap"] for record in run.kept])),
        metric=name,
        all_items=whole[name],
        clean_items=measure(run.task, clean)[name] if clean else None,
        dirty_items=measure(run.task, dirty)[name] if dirty else None,
    )
