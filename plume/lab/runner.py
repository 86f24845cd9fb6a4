"""Runs experiments: each job once, cached by content, here, in several processes or on Ray, with the time left."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import PRESETS, ReproduceConfig, UserError, at_home, did_you_mean, takes_fields
from plume.lab.experiment import Experiment, Lab, LabJob, jobs_of, label
from plume.lab.jobs import KINDS, Numbers
from plume.lab.lab_report import write_report
from plume.lab.papers import EXPERIMENTS
from plume.util.files import read_json, write_json
from plume.util.progress import Progress
from plume.util.run_folder import run_lock

if TYPE_CHECKING:
    from rich.console import RenderableType

SPEED_STEP = 0.012  # seconds of the step that is measured, on one core of the reference laptop


@takes_fields(ReproduceConfig)
def reproduce(config: ReproduceConfig) -> dict[str, str]:
    """Run an experiment of a paper in small, or all of them: reports in Markdown by name."""
    if config.experiment is None or config.dry_run:
        raise UserError(f"name an experiment to run, or all; experiments: {', '.join(EXPERIMENTS)}")
    return {name: run_experiment(EXPERIMENTS[name], config) for name in chosen_experiments(config.experiment)}


def chosen_experiments(name: str) -> list[str]:
    if name == "all":
        return list(EXPERIMENTS)
    if name not in EXPERIMENTS:
        raise UserError(f"there is no experiment {name!r}; plume reproduce lists them{did_you_mean(name, EXPERIMENTS)}")
    return [name]


def shown_experiments(config: ReproduceConfig) -> Iterator[RenderableType]:
    """What a person sees of each experiment; without a name, the list of them."""
    if config.experiment is None:
        yield overview(config)
        return
    from rich.markdown import Markdown

    for name in chosen_experiments(config.experiment):
        if config.dry_run:
            yield described(EXPERIMENTS[name], lab_for(EXPERIMENTS[name], config))
        else:
            yield Markdown(run_experiment(EXPERIMENTS[name], config))


def run_experiment(experiment: Experiment, config: ReproduceConfig) -> str:
    """Run what is not there yet, write the report, and return it as text."""
    config.folder.mkdir(parents=True, exist_ok=True)
    with run_lock(config.folder):
        lab = lab_for(experiment, config)
        cells = experiment.cells(lab)
        results = run_jobs(jobs_of(cells), config, experiment.name)
        table = {cell: {c: results[job.key][name] for c, (job, name) in m.items()} for cell, m in cells.items()}
        return write_report(experiment, lab, table, untrained(results.values()))


def untrained(results: Collection[Numbers]) -> str:
    """A warning where pretrained models know no more than how frequent each token is."""
    losses = [(found["loss"], found["unigram"]) for found in results if "unigram" in found]
    count = sum(loss > 0.995 * unigram for loss, unigram in losses)
    if not count:
        return ""
    return (
        f"**{count} of {len(losses)} pretrained models are no better than token frequencies alone:** what is made from "
        "them says nothing yet; a larger --scale trains them longer."
    )


# ---- the budget --------------------------------------------------------------------------------------------------


def lab_for(experiment: Experiment, config: ReproduceConfig) -> Lab:
    """The lab at the scale that the config names, or that fits into its minutes."""
    refuse_same_columns(config.tasks)
    lab = partial(Lab, config, digest=data_digest(config), task_digest=task_digest(config))
    if config.minutes is None:
        return lab(scale=1.0 if config.scale is None else config.scale)
    slower = speed(config.folder)
    low, high = 1e-3, 1e3
    for _ in range(40):  # times grow with the scale, though not in proportion
        middle = (low * high) ** 0.5
        fits = seconds_of(jobs_of(experiment.cells(lab(scale=middle)))) * slower < 60 * config.minutes
        low, high = (middle, high) if fits else (low, middle)
    return lab(scale=float(f"{low:.2g}"))


def refuse_same_columns(tasks: Sequence[str]) -> None:
    """Of two tasks with one name, the table would have the last alone."""
    names = [label(task) for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two tasks would be called {twice[0]!r}; rename a file")


def seconds_of(jobs: Sequence[LabJob]) -> float:
    return sum(job.seconds for job in jobs)


def speed(folder: Path, *, keep: bool = True) -> float:
    """How much slower than the reference laptop this machine is: measured once for a folder, so that runs agree."""
    from dataclasses import replace

    from plume.train.objectives import measure_step

    file = folder / "speed.json"
    if file.is_file():
        return float(read_json(file)["slower"])
    model = replace(PRESETS["gpt-laptop"], layers=2, width=64, context=64, vocab_size=1024)
    slower = round(measure_step(model, 4) / SPEED_STEP, 2)
    if keep:
        write_json(file, {"slower": slower})
    return slower


def data_digest(config: ReproduceConfig) -> str:
    """What the results are cached by, beside the settings: the bytes of the data, or the version of Python."""
    from plume.data.sources import find_files

    start = sys.version if not config.data else ""
    return digest_of(start, (file for path in (*config.data, *config.targets) for file in find_files(path)))


def task_digest(config: ReproduceConfig) -> str:
    """Apart from that of the data: other tasks need no new pretraining."""
    files = (at_home(name.partition("=")[2] or name) for name in config.tasks)
    return digest_of("", (file for file in files if file.is_file()))


def digest_of(start: str, files: Iterable[Path]) -> str:
    from plume.util.checkpoint_files import file_hash

    digest = hashlib.sha256(start.encode())
    for file in files:
        digest.update(file_hash(file).encode())
    return digest.hexdigest()[:16]


# ---- jobs --------------------------------------------------------------------------------------------------------


def run_jobs(jobs: Sequence[LabJob], config: ReproduceConfig, title: str) -> Mapping[str, Numbers]:
    """The results of all jobs; those that were finished before, by this or another experiment, are read."""
    from plume.data.pool import run_in_processes, run_on_ray

    store = config.folder / "jobs"
    waiting = [job for job in jobs if not (store / job.key / "result.json").is_file()]
    total = max(1, round(seconds_of(waiting)))
    with Progress() as progress, progress.task(f"{title}, {len(waiting)} of {len(jobs)} jobs", total) as advance:
        for _, level in groupby(waiting, key=lambda job: job.depth):  # what a job needs lies in the levels before
            tasks, setup = [{"job": job} for job in level], (store.resolve(),)
            if config.backend == "ray":
                done = run_on_ray(JobStage, setup, tasks)
            elif config.workers > 1 and len(tasks) > 1:
                done = run_in_processes(JobStage, setup, tasks, min(config.workers, len(tasks)))
            else:
                done = map(JobStage(*setup), tasks)
            for result in done:
                advance(result["seconds"], result["title"])
    return {job.key: read_json(store / job.key / "result.json")["results"] for job in jobs}


class JobStage:
    """What a worker does with jobs: run each in a folder of its own, and keep what it prints there."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        job: LabJob = task["job"]
        folder = self.store / job.key
        folder.mkdir(parents=True, exist_ok=True)
        needs = [self.store / needed.key / "work" for needed in job.needs]
        log, start = (folder / "log.txt").open("a", encoding="utf-8"), time.process_time()
        with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                results = KINDS[job.kind](job.settings, folder / "work", needs)
            except UserError as error:
                raise UserError(f"{error} (in a job of kind {job.kind}, {folder})") from error
        seconds = round(time.process_time() - start, 1)  # shows whether the estimates are true
        write_json(
            folder / "result.json",
            {"kind": job.kind, "settings": job.settings, "results": results, "processor_seconds": seconds},
        )
        return {"seconds": job.seconds, "title": job.kind}


# ---- what is there -----------------------------------------------------------------------------------------------


def overview(config: ReproduceConfig) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    slower = speed(config.folder, keep=False)
    shown = Table("experiment", "claims", "jobs", "TFLOP", "minutes here", title="Experiments", show_lines=True)
    for experiment in EXPERIMENTS.values():
        jobs = jobs_of(experiment.cells(lab_for(experiment, config)))
        minutes = f"{seconds_of(jobs) * slower / 60:.0f}"
        operations = f"{sum(job.flops for job in jobs) / 1e12:.1f}"
        counts = (str(len(experiment.claims)), str(len(jobs)), operations, minutes)
        title = Text.assemble((experiment.name, "bold"), f"\n{experiment.question} ", (experiment.paper, "dim"))
        shown.add_row(title, *counts)
    return shown


def described(experiment: Experiment, lab: Lab) -> RenderableType:
    from rich.table import Table

    jobs, slower = jobs_of(experiment.cells(lab)), speed(lab.config.folder, keep=False)
    shown = Table("job", "number", "minutes here", title=f"{experiment.name} at scale {lab.scale:g}")
    for kind, same in groupby(sorted(jobs, key=lambda job: job.kind), key=lambda job: job.kind):
        group = list(same)
        shown.add_row(kind, str(len(group)), f"{seconds_of(group) * slower / 60:.1f}")
    shown.add_row("all", str(len(jobs)), f"{seconds_of(jobs) * slower / 60:.1f}")
    return shown
