"""An experiment as a declaration: variants, the jobs that measure them, claims about the table, the paper's numbers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from plume import __version__
from plume.config import PRESETS, ModelConfig, ReproduceConfig, at_home, build
from plume.util.devices import training_flops_per_token

LOWER = ("loss", "bits")  # columns that begin so are better when lower
TIMED = "speed"  # columns that begin so are measured with a clock: shown, but no result
SCORES = "scores"  # in a claim: all columns that are better when higher
FLOPS = 4e10  # per second, of small models on one core of the reference machine
STEP_SECONDS = 0.02  # of an update, beside its products
OVERHEAD = {"corpus": 1.0, "prepare": 3.0, "finetune": 1.0, "pretrain": 2.0, "distill": 2.0, "evaluate": 2.0}  # seconds


@dataclass(frozen=True)
class LabJob:
    """One piece of work, named by its content: the same settings on the same inputs are run once."""

    kind: str  # a function of plume.lab.jobs
    settings: Mapping[str, Any]  # plain values
    needs: tuple[LabJob, ...] = ()  # jobs whose folders it reads
    flops: float = 0.0
    steps: int = 0  # updates of weights

    @cached_property
    def key(self) -> str:
        content = [__version__, self.kind, self.settings, [job.key for job in self.needs]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]

    @property
    def depth(self) -> int:
        return 1 + max((job.depth for job in self.needs), default=0)

    @property
    def seconds(self) -> float:
        """On one core of the reference machine."""
        return OVERHEAD.get(self.kind, 1.0) + self.steps * STEP_SECONDS + self.flops / FLOPS


Changes = Mapping[str, Any]  # of the fields of a recipe
NONE: Changes = {}
Measures = Mapping[str, tuple[LabJob, str]]  # column: the job and the name of its result


@dataclass(frozen=True)
class Claim:
    """One variant is better than another: in these columns, or in the mean of all."""

    text: str
    better: str
    worse: str
    columns: tuple[str, ...] = ()

    def chosen(self, columns: Sequence[str]) -> list[str]:
        """Those it is tested in."""
        wanted = [c for c in columns if not self.columns or c in self.columns]
        return [c for c in columns if not c.startswith(LOWER)] if self.columns == (SCORES,) else wanted


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Variants are functions of the lab and a seed; everything else is read from what they measure."""

    name: str
    paper: str
    question: str
    variants: Mapping[str, Callable[[Lab, int], Measures]]
    claims: tuple[Claim, ...]
    published: Mapping[str, str] = field(default_factory=dict)  # variant: the paper's figure
    published_as: str = ""  # what those figures are
    note: str = ""  # what differs from the paper
    curves: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # series: variant: its x
    x_label: str = ""
    fits: str | None = None  # a column to which a power law over the x of each curve is fitted

    def cells(self, lab: Lab) -> dict[tuple[str, int], Measures]:
        seeds = range(lab.config.seeds)
        return {(name, seed): make(lab, seed) for name, make in self.variants.items() for seed in seeds}


def jobs_of(cells: Mapping[tuple[str, int], Measures]) -> list[LabJob]:
    """Every job that the cells need, each once, needed ones first."""
    ordered: dict[str, LabJob] = {}

    def visit(job: LabJob) -> None:
        for needed in job.needs:
            visit(needed)
        ordered.setdefault(job.key, job)

    for measures in cells.values():
        for job, _ in measures.values():
            visit(job)
    return sorted(ordered.values(), key=lambda job: job.depth)


# ---- what variants are made of -----------------------------------------------------------------------------------

WIDTH, LAYERS, HEADS, CONTEXT, BATCH, VOCAB_SIZE = 64, 3, 4, 64, 32, 1024
STEPS, ROWS, TASK_BATCH = 200, 400, 16  # of pretraining; of a task
RATES = {"lr": 0.02, "muon_lr": 0.06}
POST_NORM_RATES = {"lr": 0.006, "muon_lr": 0.02}  # norms behind the blocks want lower ones
FINETUNE_RATES = (1e-3, 1e-2)  # weights trained by Muon hardly turn at the lower one
MASKED = {"kind": "masked-next-sentence"}
SHORT_CONTEXT, SMALL_VOCAB = 32, 512  # of masked models, which predict one token in seven
KINDS_OF_MODEL: dict[str, tuple[str, str, Changes]] = {  # preset, tokenizer, objective
    "gpt": ("gpt-laptop", "byte-bpe", {}),
    "gpt2": ("gpt2-laptop", "byte-bpe", {}),
    "lstm": ("lstm-laptop", "byte-bpe", {}),
    "bert": ("bert-laptop", "wordpiece", MASKED),
    "transformer": ("transformer-laptop", "byte-bpe", {"kind": "sequence-to-sequence"}),
}
PAIR_TOKENS = 48  # of a sentence and its translation each
TASKS = ("word-order", "next-passage")
CHOICES = ("missing-word", "swapped-words", "repeated-word")  # zero-shot: LAMBADA-, BLiMP- and Winograd-like


@dataclass(frozen=True)
class Lab:
    """A budget and data, and jobs cut to them."""

    config: ReproduceConfig
    scale: float
    digest: str  # of the data
    task_digest: str = ""  # of the user's tasks

    @property
    def wide(self) -> int:
        """A budget far above the design makes models wider, not only longer trained."""
        return 2 if self.scale >= 8 else 1

    def scaled(self, count: float, least: int = 4) -> int:
        return max(least, round(count * self.scale / self.wide**2))

    def model(self, kind: str, changes: Changes = NONE) -> dict[str, Any]:
        preset = KINDS_OF_MODEL[kind][0]
        size: dict[str, Any] = {"width": WIDTH * self.wide, "layers": LAYERS, "heads": HEADS, "dropout": 0.0}
        if PRESETS[preset].recurrent:  # the paper's 2048 units beside 768, in proportion
            size |= {"width": 8 * round(WIDTH * self.wide * 2048 / 768 / 8), "layers": 1, "heads": 1}
        if PRESETS[preset].decoder_layers:
            size |= {"layers": 2, "decoder_layers": 2, "dropout": 0.1}
        return {"preset": preset, "context": SHORT_CONTEXT if masked(kind) else CONTEXT, **size, **changes}

    def corpus(self, limit: int | None = None, changes: Changes = NONE) -> LabJob:
        most = max(300_000, round(3e6 * min(4.0, self.scale))) if limit is None else limit
        return LabJob("corpus", {"paths": list(self.config.data), "digest": self.digest, "limit": most, **changes})

    def prepared(
        self, kind: str, source: LabJob | None = None, file: str = "pretrain.jsonl", data: Changes = NONE
    ) -> LabJob:
        tokenizer = {"kind": KINDS_OF_MODEL[kind][1], "vocab_size": SMALL_VOCAB if masked(kind) else VOCAB_SIZE}
        settings = {"file": file, "data": {"tokenizer": tokenizer, "validation_fraction": 0.05, **data}}
        return LabJob("prepare", settings, (self.corpus() if source is None else source,))

    def trained(self, steps: int, seed: int, changes: Changes = NONE) -> dict[str, Any]:
        """The rates are the best of a few for models and texts of this size."""
        quarter = max(1, steps // 4)
        rates = {"optimizer": "muon", **RATES, "weight_decay": 0.0, "seed": seed}
        shape = {"schedule": "linear", "final_lr_ratio": 0.0, "warmup_steps": max(1, steps // 10)}
        seen = {"validate_every": steps, "sample_every": steps, "sample_tokens": 1, "validation_rows": 192}
        kept = {"checkpoint_every": quarter, "keep_last": 6, "keep_best": False}
        size = {"steps": steps, "batch": BATCH, "micro_batch": BATCH, "precision": "float32"}
        return {**rates, **shape, **seen, **kept, **size, **changes}

    def pretrained(
        self, kind: str, seed: int, *, steps: float = STEPS, data: LabJob | None = None,
        model: Changes = NONE, objective: Changes = NONE, train: Changes = NONE,
    ) -> LabJob:  # fmt: skip
        """A model of a kind, with changes of its architecture, its objective and its training.

        Those with a shorter context have more rows in a batch, so that all read equally many tokens.
        """
        source = self.prepared(kind) if data is None else data
        shape, preset = self.model(kind, model), PRESETS[KINDS_OF_MODEL[kind][0]]
        rates = POST_NORM_RATES if preset.norm == "post" and not preset.recurrent else RATES
        length = min(CONTEXT, shape["context"])
        batch = BATCH * CONTEXT // length
        loop = self.trained(self.scaled(steps), seed, {**rates, "batch": batch, "micro_batch": batch, **train})
        recipe = {"model": shape, "train": loop, "objective": objective or KINDS_OF_MODEL[kind][2]}
        read = PAIR_TOKENS if source.needs and source.needs[0].kind == "pairs" else length
        per_row = read * training_flops_per_token(sizes(shape), read)
        return LabJob("pretrain", recipe, (source,), float(loop["steps"] * loop["batch"] * per_row), loop["steps"])

    def loss(self, job: LabJob, column: str = "bits per byte") -> Measures:
        return {column: (job, "bits_per_byte" if column.startswith("bits") else "loss")}

    def finetuned(self, model: LabJob, seed: int, tasks: Sequence[str] = TASKS, recipe: Changes = NONE) -> Measures:
        """Scores on tasks made from text, or on the user's own: for every variant the best of the same rates."""
        own = [task for task in self.config.tasks if "=" not in task]
        settings = {"epochs": 3, "batch": TASK_BATCH, "seed": seed, "precision": "float32", **recipe}
        length = min(CONTEXT, shape_of(model)["context"])
        shared = {"recipe": {**settings, "validate_every": 1_000_000}, "length": length, "rates": FINETUNE_RATES}
        steps = len(FINETUNE_RATES) * settings["epochs"] * math.ceil(self.scaled(ROWS, 60) / TASK_BATCH)
        flops = float(steps * TASK_BATCH * SHORT_CONTEXT * training_flops_per_token(sizes(shape_of(model))))
        jobs = {name: LabJob("finetune", {**shared, **self.rows(name)}, (model, *self.rows_job(name)), flops, steps)
                for name in own or tasks}  # fmt: skip
        return {label(name): (job, "score") for name, job in jobs.items()}

    def rows(self, task: str) -> Changes:
        """Where the labelled rows of a task are: in a file of the user's, or in the folder of a job."""
        if task in self.config.tasks:
            return {"task": {"train": task}, "digest": self.task_digest}
        return {"task": {split: f"{task}/{split}.jsonl" for split in ("train", "validation")}}

    def rows_job(self, task: str) -> tuple[LabJob, ...]:
        return () if task in self.config.tasks else (self.made_tasks([task]),)

    def made_tasks(self, names: Sequence[str]) -> LabJob:
        return LabJob("tasks", {"names": list(names), "rows": self.scaled(ROWS, 60), "seed": 0}, (self.corpus(),))

    def features(self, model: LabJob, seed: int, layer: int, tasks: Sequence[str] = TASKS) -> Measures:
        """Scores of a head on the frozen hidden states of one layer."""
        below = LabJob("cut", {"layers": layer}, (model,))
        return self.finetuned(below, seed, tasks, {"adapt": {"mode": "features"}, "epochs": 10})

    def evaluated(
        self, model: LabJob, tasks: Sequence[str] = CHOICES, source: LabJob | None = None, recipe: Changes = NONE
    ) -> Measures:
        """Scores of `plume evaluate`, of the user's tasks too; a quarter asks for an earlier checkpoint."""
        own = list(self.config.tasks) if source is None else []
        names = [*(f"{name}.jsonl" for name in tasks), *own]
        made = self.made_tasks(tasks) if source is None else source
        settings = {"tasks": names, "recipe": {"limit": self.scaled(300, 20), **recipe}, "digest": self.task_digest}
        job = LabJob("evaluate", settings, (model, made))
        return {label(name, is_text(name)): (job, name) for name in names}


def masked(kind: str) -> bool:
    return KINDS_OF_MODEL[kind][2] == MASKED


def sizes(shape: Changes) -> ModelConfig:
    return build(ModelConfig, {**shape, "vocab_size": VOCAB_SIZE})


def shape_of(model: LabJob) -> dict[str, Any]:
    """The architecture of a pretrained model, or of one without its last layers."""
    return dict(model.settings["model"]) if model.kind == "pretrain" else {**shape_of(model.needs[0]), **model.settings}


def label(task: str, text: bool = False) -> str:
    """The column of a task."""
    name = task.split("=")[0].rsplit("/", 1)[-1].split(".")[0]
    return f"bits per byte of {name}" if text else name


def is_text(task: str) -> bool:
    """Whether a task of `plume evaluate` is a text to predict, whose score is better when lower."""
    if task.endswith(".jsonl") and "=" not in task and not at_home(task).is_file():
        return False  # made by a job
    from plume.evaluate.eval_tasks import find_task

    return find_task(task).kind == "text"
