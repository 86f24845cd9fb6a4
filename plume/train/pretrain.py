"""Pretraining from end to end: texts, tokenizer, shards, batches, the loop, and a run folder with a model in it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from plume.config import DistillConfig, FinetuneConfig, ObjectiveConfig, PretrainConfig, TrainConfig, UserError
from plume.data import (
    IGNORE,
    Batch,
    Dataset,
    FullSentences,
    MaskedPairs,
    PackedWindows,
    Phases,
    SequencePairs,
    Shards,
    open_shards,
    prepare,
)
from plume.data.shards import read_manifest
from plume.files import remove
from plume.heads import Model
from plume.text import Tokenizer, load_tokenizer
from plume.train import samples
from plume.train.devices import choose_precision, flops_per_token
from plume.train.feed import Batches
from plume.train.loop import Outcome, Task, Trainer
from plume.train.objectives import HEAD_OF, TensorBatch, objective_called
from plume.train.optim import batch_rows, rows_before, whole
from plume.train.progress import clock
from plume.train.ranks import Ranks, join
from plume.train.runs import METRICS, PLOT, RECIPE, SAMPLES, differences_of, plot_runs, read_recipe_of, write_recipe
from plume.weights import save_model

ENTROPY_ROWS, ENTROPY_TOKENS = 2048, 1 << 20  # token frequencies are counted over so many sequences or tokens
MAY_CHANGE = (  # when a run goes on
    *("train.", "micro_batch", "device", "precision"),
    *("resume", "overwrite", "prepared", "data.workers", "data.on", "folder"),
)


@dataclass(frozen=True)
class RunResult:
    """What came of a run."""

    folder: Path
    outcome: Outcome
    uniform: float  # the loss of knowing nothing
    unigram: float  # the loss of knowing only how frequent each token is

    main: bool = True  # whether this process speaks for all ranks

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder), "model": str(self.model)}

    def summary(self) -> str:
        end = "finished" if self.outcome.finished else "stopped"
        loss = self.outcome.loss if self.outcome.validation is None else self.outcome.validation
        kind = "loss" if self.outcome.validation is None else "validation loss"
        return (
            f"{end} at step {self.outcome.step}, {self.outcome.tokens:,} tokens, {clock(self.outcome.seconds)}: "
            f"{kind} {loss:.4f} (token frequencies alone {self.unigram:.4f}, knowing nothing {self.uniform:.4f})\n"
            f"model: {self.model}"
        )


class Samples(Protocol):
    def take(self, first: int, count: int) -> Batch: ...


@dataclass(frozen=True)
class TrainBatches:
    """Batch n is the next so many samples after all batches before it."""

    samples: Samples
    config: TrainConfig

    def rows(self, step: int) -> int:
        return batch_rows(step, self.config)

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        return TensorBatch.of(self.samples.take(rows_before(step, self.config) + first, rows))


@dataclass(frozen=True)
class ValidationBatches:
    """Always the same rows with the same masks."""

    samples: Samples
    count: int

    def rows(self, step: int) -> int:
        return self.count

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        return TensorBatch.of(self.samples.take(first, rows))


def pretrain(config: PretrainConfig) -> RunResult:
    """Run a recipe: alone, or as one of many processes that torchrun started."""
    with join(config.train.device) as ranks:
        with begun(config, ranks):
            data = prepared_data(config, ranks)
            tokenizer = load_tokenizer(data / "tokenizer")
            torch.manual_seed(config.train.seed)
            model = Model(replace(config.model, vocab_size=tokenizer.vocab_size), HEAD_OF[config.objective.kind])
            task = make_task(config, model, tokenizer, data)
        shares = token_shares(task.train, tokenizer.vocab_size)
        task, unigram = replace(task, floor=entropy(shares, config.train.label_smoothing)), entropy(shares)
        precision = choose_precision(ranks.device, config.train.precision)
        trainer = Trainer(task, config.train, config.folder, ranks, precision)
        parameters = sum(p.numel() for p in model.parameters())
        trainer.progress.measure_against(flops_per_token(model.config, parameters), precision.peak * ranks.size)
        trainer.progress.say(
            f"{parameters:,} parameters, vocabulary {tokenizer.vocab_size:,}, {precision.name} on "
            f"{ranks.size} x {ranks.device.type}; token frequencies alone give a loss of {unigram:.3f}"
        )
        try:
            outcome = trainer.run(resume=config.resume)
        finally:
            if ranks.main:
                plot_runs([config.folder], config.folder / PLOT)
        export(config, trainer, tokenizer, outcome, data)
        return RunResult(config.folder, outcome, math.log(tokenizer.vocab_size), unigram, ranks.main)


# ---- the run folder ----------------------------------------------------------------------------------------------


AnyRun = PretrainConfig | FinetuneConfig | DistillConfig


@contextmanager
def begun(config: AnyRun, ranks: Ranks) -> Iterator[None]:
    """The run folder, around all that may refuse: a run that cannot begin leaves no folder behind that was not there
    before, and the run that it would replace is still whole."""
    folder = config.folder
    new, replaces = not folder.exists(), (folder / RECIPE).is_file() and not config.resume
    if ranks.main:
        check_folder(config)
        folder.mkdir(parents=True, exist_ok=True)
        if not replaces:
            write_recipe(folder, plain(config))
    ranks.barrier()
    try:
        yield
    except UserError:
        if new and ranks.main:
            remove(folder)
        raise
    if ranks.main and replaces:
        remove_run(folder)
        write_recipe(folder, plain(config))
    ranks.barrier()


def check_folder(config: AnyRun) -> None:
    """Refuse a folder that is something else, or a run that may be neither continued nor replaced."""
    folder = config.folder
    if not (folder / RECIPE).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not a run folder, so it is left alone; name another")
    elif config.resume:
        refuse_other_settings(folder, plain(config))
    elif not config.overwrite:
        raise UserError(
            f"{folder} holds a run already; --resume goes on with it, --overwrite replaces it, "
            "--folder names another place"
        )


def refuse_other_settings(folder: Path, wanted: dict[str, Any]) -> None:
    changed = differences_of(read_recipe_of(folder), wanted)
    if refused := [line for name, line in changed.items() if not name.startswith(MAY_CHANGE)]:
        raise UserError("the run cannot go on with other settings than it began with:\n  " + "\n  ".join(refused))


def remove_run(folder: Path) -> None:
    """What runs leave in their folder, and nothing else."""
    seeds = [path.name for path in folder.glob("seed-*")]
    found = ("report.md", "results.json", "predictions.jsonl", "test_predictions.jsonl", "confusion.png", "curve.png")
    for name in ("checkpoints", "model", "tensorboard", *seeds, RECIPE, METRICS, PLOT, SAMPLES, *found):
        remove(folder / name)


def plain(config: AnyRun) -> dict[str, Any]:
    """The config as a recipe, without what only says how this call deals with the folder."""
    table = asdict(config)
    return {name: value for name, value in table.items() if name not in ("resume", "overwrite")}


def export(config: PretrainConfig, trainer: Trainer, tokenizer: Tokenizer, outcome: Outcome, data: Path) -> None:
    """Write the model folder from the weights that the run ended with."""
    weights = {name: whole(p.detach()).cpu() for name, p in trainer.task.model.named_parameters()}
    if trainer.ranks.main:
        kept: Model = trainer.task.model
        with torch.device("meta"):
            model = Model(kept.config, kept.kind, kept.labels)
        model.load_state_dict(weights, strict=False, assign=True)
        if kept.config.decoder_layers:
            model.body.tie()  # type: ignore[operator]
        info = {
            "objective": config.objective.kind,
            "tokens": outcome.tokens,
            "step": outcome.step,
            "loss": outcome.loss,
            "validation_loss": outcome.validation,
            "data_fingerprint": read_manifest(data).fingerprint,
            "recipe": plain(config),
        }
        save_model(model.eval(), config.folder / "model", tokenizer=tokenizer, info=as_json(info))
    trainer.ranks.barrier()


def as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


# ---- data --------------------------------------------------------------------------------------------------------


def prepared_data(config: PretrainConfig, ranks: Ranks) -> Path:
    """The folder of token shards; the main rank prepares it if need be, and the others wait."""
    if config.prepared is not None:
        read_manifest(config.prepared)
        return config.prepared
    if ranks.main:
        prepare(config.data)
    ranks.wait_long()
    return config.data.folder


def make_task(config: PretrainConfig, model: Model, tokenizer: Tokenizer, data: Path) -> Task:
    train = open_shards(data, "train", tokenizer_hash=tokenizer.hash)
    order = phases(config, lambda length: dataset(config.objective, train, tokenizer, length, seed=config.train.seed))
    validation = validation_batches(config, tokenizer, data)
    sample: Callable[[Any], str] | None = None
    if config.objective.kind == "language-model":
        sample = samples.continuation(tokenizer, config.train)
    elif validation is not None:
        row = validation.samples.take(0, 1)
        masked = config.objective.kind.startswith("masked")
        sample = (
            samples.filled_gaps(tokenizer, row)
            if masked
            else samples.translation(tokenizer, row, config.train.sample_tokens)
        )
    return Task(
        model=model,
        objective=objective_called(config.objective.kind, config.train.label_smoothing),
        train=TrainBatches(order, config.train),
        validation=validation,
        sample=sample,
    )


def phases(config: PretrainConfig, make: Callable[[int], Dataset]) -> Samples:
    """All sequences of one length, or short ones first. The border lies between two batches."""
    objective = config.objective
    whole_length = config.model.context if objective.length is None else objective.length
    if objective.short_length is None:
        return make(whole_length)
    border = rows_before(round(objective.short_share * config.train.steps), config.train)
    return Phases([(border, make(objective.short_length)), (0, make(whole_length))])


def dataset(
    objective: ObjectiveConfig, shards: Shards, tokenizer: Tokenizer, length: int, *, seed: int, shuffle: bool = True
) -> Dataset:
    match objective.kind:
        case "language-model":
            return PackedWindows(shards, length, seed=seed, shuffle=shuffle, isolate=objective.isolate)
        case "masked":
            return FullSentences(shards, tokenizer, length, seed=seed, shuffle=shuffle, masking=objective.masking)
        case "masked-next-sentence":
            return MaskedPairs(shards, tokenizer, length, seed=seed, shuffle=shuffle, masking=objective.masking)
        case "sequence-to-sequence":
            return SequencePairs(shards, tokenizer, length, seed=seed, shuffle=shuffle)


def validation_batches(config: PretrainConfig, tokenizer: Tokenizer, data: Path) -> ValidationBatches | None:
    if not read_manifest(data).validation:
        return None
    shards = open_shards(data, "validation", tokenizer_hash=tokenizer.hash)
    length = config.model.context if config.objective.length is None else config.objective.length
    try:
        every = dataset(config.objective, shards, tokenizer, length, seed=0, shuffle=False)
    except UserError as error:
        print(f"no validation: {error}", file=sys.stderr)
        return None
    rows = config.train.validation_rows
    if len(every) <= rows:
        return ValidationBatches(every, len(every))
    return ValidationBatches(dataset(config.objective, shards, tokenizer, length, seed=0), rows)


def token_shares(batches: Batches, vocab_size: int) -> npt.NDArray[np.float64]:
    """How frequent each token is among the targets."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    rows = step = 0
    while rows < ENTROPY_ROWS and int(counts.sum()) < ENTROPY_TOKENS:
        targets = batches.part(step, 0, batches.rows(step)).targets
        counts += torch.bincount(targets[targets != IGNORE].flatten(), minlength=vocab_size)
        rows, step = rows + batches.rows(step), step + 1
    return (counts / counts.sum()).double().numpy()


def entropy(shares: npt.NDArray[np.float64], smoothing: float = 0.0) -> float:
    """The loss of always answering with the frequencies, in nats: what any model must beat."""
    smoothed = (1 - smoothing) * shares + smoothing / len(shares)
    seen = smoothed[smoothed > 0]
    return float(-(seen * np.log(seen)).sum())
