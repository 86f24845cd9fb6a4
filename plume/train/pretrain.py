"""Pretraining from end to end: texts, tokenizer, shards, batches, the loop, and a run folder with a model in it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plume.config import (
    DistillConfig,
    FinetuneConfig,
    ObjectiveConfig,
    ObjectiveKind,
    PretrainConfig,
    TrainConfig,
    UserError,
    takes_fields,
)
from plume.data import (
    IGNORE,
    Dataset,
    FullSentences,
    JoinedPairs,
    MaskedPairs,
    PackedWindows,
    Phases,
    SequencePairs,
    Shards,
    keyed_folder,
    open_shards,
    prepare,
    reuse,
)
from plume.data.shards import read_manifest
from plume.hf import gather_tensors, save_model, save_run_config
from plume.model.heads import Model
from plume.model.loss import SampledSoftmax, TensorBatch
from plume.text import Tokenizer, load_tokenizer
from plume.train import samples
from plume.train.budget import announced, expected
from plume.train.cooccurrence import CountedEmbeddings, counted_tokens
from plume.train.distribute import Ranks, join, shared_precision
from plume.train.first_weights import FirstWeights, StoredWeights, check_tokenizer, continued, deferred
from plume.train.held_out import held_out_bits
from plume.train.loop import Outcome, Task, Trainer
from plume.train.microbatches import Batches
from plume.train.objectives import HEAD_OF, Tokens, objective_called
from plume.train.optim import batch_rows, rows_before, short_rows, whole
from plume.train.training_log import clock
from plume.util.devices import training_flops_per_token
from plume.util.files import remove
from plume.util.run_folder import (
    BYTES_PER_TOKEN,
    MODEL,
    PLOT,
    differences_of,
    is_run,
    plot_runs,
    read_recipe_of,
    refuse_foreign_folder,
    remove_run,
    run_lock,
    write_recipe,
)

ENTROPY_ROWS, ENTROPY_TOKENS = 2048, 1 << 20  # token frequencies are counted over so many sequences or tokens
ROWS_VERSION = {"masked-next-sentence": " rows 2"}  # of objectives whose rows of the same data have changed
MAY_CHANGE = (  # when a run is resumed
    *("train.", "micro_batch", "device", "precision"),
    *("resume", "overwrite", "prepared", "data.workers", "data.backend", "backend", "folder"),
)
Samples = Dataset | Phases


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
        return self.folder / MODEL

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder), "model": str(self.model)}

    def summary(self) -> str:
        end = "finished" if self.outcome.finished else "stopped"
        loss = self.outcome.loss if self.outcome.validation is None else self.outcome.validation
        kind = "loss" if self.outcome.validation is None else "validation loss"
        first, *others = self.outcome.parts.items() if self.outcome.parts else [(kind, loss)]
        name = f"{kind} of {first[0]} tokens" if others else kind
        shown = "not logged yet" if math.isnan(first[1]) else f"{first[1]:.4f}"
        more = "".join(f", {other.replace('_', ' ')} {value:.4f}" for other, value in others)
        return (
            f"{end} at step {self.outcome.step}, {self.outcome.tokens:,} tokens, {clock(self.outcome.seconds)}: "
            f"{name} {shown} (token frequencies alone {self.unigram:.4f}, uniform {self.uniform:.4f}){more}\n"
            f"model: {self.model}"
        )


@dataclass
class TrainBatches:
    """Batch n is the next so many samples after all batches before it."""

    samples: Samples
    config: TrainConfig
    shift: int = 0  # rows used before the batch size was changed, beyond what the steps since would have used

    def position(self, step: int) -> int:
        return rows_before(step, self.config) + self.shift

    def over(self, step: int) -> list[int]:
        return self.samples.over(self.position(step)) if isinstance(self.samples, Phases) else []

    def seek(self, step: int, rows: int, over: Sequence[int]) -> None:
        self.shift = rows - rows_before(step, self.config)
        if isinstance(self.samples, Phases):
            self.samples.keep(over)

    def rows(self, step: int) -> int:
        return batch_rows(step, self.config)

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        return TensorBatch.of(self.samples.take(self.position(step) + first, rows))


@dataclass(frozen=True)
class ValidationBatches:
    """Always the same rows with the same masks."""

    samples: Samples
    count: int

    def rows(self, step: int) -> int:
        return self.count

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        return TensorBatch.of(self.samples.take(first, rows))


@takes_fields(PretrainConfig)
def pretrain(config: PretrainConfig) -> RunResult:
    """Run a recipe: alone, or as one of many processes that torchrun started."""
    stored, ratio = None, None
    if config.init_from is not None:
        config, stored = continued(config, config.init_from)
    if config.minutes is not None:
        config, ratio = announced(config)
    with open_run(config, config.train.device) as run:
        ranks = run.ranks
        with run.starting():
            data = prepared_data(config, ranks)
            tokenizer = load_tokenizer(data / "tokenizer")
            check_tokenizer(config, tokenizer)
            model, first = first_model(config, tokenizer.vocab_size, ranks, stored)
            stored = None  # a mapped file; the task holds it until each rank has its part
            if config.embedding_init == "cooccurrence":
                first = CountedEmbeddings(first, open_shards(data, "train"))
            task = replace(make_task(config, model, tokenizer, data), first_weights=first)
        task, unigram = with_frequencies(task, config, data, tokenizer)
        if ranks.main:
            save_run_config(config.folder, model, tokenizer, task.bytes_per_token)
        precision = shared_precision(ranks, config.train.precision)
        parameters = sum(p.numel() for p in model.parameters())
        trainer = Trainer(task, config.train, config.folder, ranks, precision)
        trainer.logger.measure_against(training_flops_per_token(model.config), precision.peak * ranks.size)
        if config.objective.kind == "language-model" and config.init_from is None and not read_manifest(data).pairs:
            trainer.logger.comparable = unigram, block_weights(model)
        trainer.logger.print(
            f"{parameters:,} parameters, vocabulary {tokenizer.vocab_size:,}, {precision.name} on "
            f"{ranks.size} x {ranks.device.type}; token frequencies alone give a loss of {unigram:.3f} per token"
        )
        try:
            outcome = trainer.run(resume=config.resume)
        finally:
            if ranks.main:
                plot_runs([config.folder], config.folder / PLOT)
        export(config, trainer, tokenizer, outcome, data)
        if ratio is not None and outcome.finished and outcome.validation is not None:
            trainer.logger.print(expected(ratio, held_out_bits(config.folder / MODEL, data, compressor=False)))
        return RunResult(config.folder, outcome, math.log(tokenizer.vocab_size), unigram, ranks.main)


def block_weights(model: Model) -> int:
    """Parameters without the embedding tables."""
    return sum(p.numel() for name, p in model.named_parameters() if "blocks." in name)


def first_model(
    config: PretrainConfig, vocab_size: int, ranks: Ranks, stored: Model | None
) -> tuple[Model, FirstWeights | None]:
    """The model with its first weights; of many ranks each draws or keeps its part later."""
    rows = vocab_size if config.init_from is None else config.model.vocab_size

    def make() -> Model:
        return Model(replace(config.model, vocab_size=rows), HEAD_OF[config.objective.kind])

    if ranks.many:
        model, drawn = deferred(make, config.train.seed)
        return model, drawn if stored is None else StoredWeights(stored)
    torch.manual_seed(config.train.seed)
    model = make()
    if stored is not None:
        model.load_state_dict(stored.state_dict())
    return model, None


# ---- the run folder ----------------------------------------------------------------------------------------------


AnyRun = PretrainConfig | FinetuneConfig | DistillConfig


@dataclass(frozen=True)
class Run:
    """A run folder held by this run: no other process may train in it."""

    config: AnyRun
    ranks: Ranks
    new: bool  # the folder was not there before

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around all that may refuse: a run that cannot start leaves no new folder behind, and replaces nothing."""
        folder, ranks = self.config.folder, self.ranks
        replaces = is_run(folder) and not self.config.resume
        if ranks.main:
            check_existing(self.config)
            if not replaces:
                write_recipe(folder, plain(self.config))
        ranks.barrier()
        try:
            yield
        except BaseException:
            if self.new and ranks.main:
                remove(folder)
            raise
        if ranks.main and replaces:
            remove_run(folder)
            write_recipe(folder, plain(self.config))
        ranks.barrier()


@contextmanager
def open_run(config: AnyRun, device: str) -> Iterator[Run]:
    """Join the other ranks and hold the run folder until the end."""
    with join(device) as ranks:
        if not ranks.main:
            yield Run(config, ranks, new=False)
            return
        refuse_foreign_folder(config.folder)
        new = not config.folder.exists()
        config.folder.mkdir(parents=True, exist_ok=True)
        with run_lock(config.folder):
            yield Run(config, ranks, new)


def check_existing(config: AnyRun) -> None:
    """Refuse a run that may be neither resumed nor replaced."""
    if not is_run(config.folder):
        return
    if config.resume:
        refuse_other_settings(config)
    elif not config.overwrite:
        raise UserError(
            f"{config.folder} already contains a run; --resume continues it, --overwrite replaces it, "
            "--folder chooses another folder"
        )


def refuse_other_settings(config: AnyRun) -> None:
    """A run is resumed as it began; what decides which rows are read changes only when the run says so."""
    changed = differences_of(read_recipe_of(config.folder), plain(config))
    rows = {name for name in changed if decides_rows(name)}
    allowed = rows if isinstance(config, PretrainConfig) and config.allow_changes else set()
    if isinstance(config, PretrainConfig) and config.init_from is not None:
        changed.pop("data.tokenizer.folder", None)  # now the run's own
    refused = {name for name in changed if name in rows or not name.startswith(MAY_CHANGE)} - allowed
    if refused:
        hint = "\n--allow-changes continues with these settings from the next unread row" if refused <= rows else ""
        lines = "\n  ".join(changed[name] for name in sorted(refused))
        raise UserError(f"a run cannot be resumed with other settings than it began with:\n  {lines}{hint}")


def decides_rows(name: str) -> bool:
    """Whether a setting decides which rows a step reads."""
    of_data = name.startswith("data.") and not name.startswith((*MAY_CHANGE, "data.tokenizer"))
    return of_data or name in ("train.batch", "train.batch_start", "train.batch_ramp_steps", "train.seed")


def plain(config: AnyRun) -> dict[str, Any]:
    """The config as a recipe, without what only says how this call deals with the folder."""
    table = asdict(config)
    return {name: value for name, value in table.items() if name not in ("resume", "overwrite", "allow_changes")}


def export(config: PretrainConfig, trainer: Trainer, tokenizer: Tokenizer, outcome: Outcome, data: Path) -> None:
    """Write the model folder from the weights that the run ended with, tensor by tensor."""
    model: Model = trainer.task.model.eval()

    def gather(tensor: Tensor) -> Tensor:
        gathered = whole(tensor)
        return gathered.cpu() if trainer.ranks.main else gathered

    if trainer.ranks.main:
        info = {
            "objective": config.objective.kind,
            "tokens": outcome.tokens,
            "step": outcome.step,
            "loss": outcome.loss,
            "validation_loss": outcome.validation,
            BYTES_PER_TOKEN: trainer.task.bytes_per_token,
            "data_fingerprint": read_manifest(data).fingerprint,
            "recipe": plain(config),
        }
        save_model(model, config.folder / MODEL, tokenizer=tokenizer, info=as_json(info), gather=gather)
    else:
        gather_tensors(model, gather)
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
        (reuse if config.resume else prepare)(keyed_folder(config.data))
    ranks.wait_long()
    return keyed_folder(config.data).folder


def make_task(config: PretrainConfig, model: Model, tokenizer: Tokenizer, data: Path) -> Task:
    train = open_shards(data, "train", tokenizer_hash=tokenizer.hash)
    order = phases(config, lambda length: dataset(config.objective, train, tokenizer, length, seed=config.train.seed))
    validation = validation_batches(config, tokenizer, data)
    sample: Callable[[Any], str] | None = None
    if config.objective.kind == "language-model":
        sample = samples.continuation(tokenizer, config.train)
    elif validation is not None:
        row = validation.samples.take(0, 1)
        translation = samples.translation(tokenizer, row, config.train.sample_tokens)
        sample = samples.filled_gaps(tokenizer, row) if config.objective.kind.startswith("masked") else translation
    return Task(
        model=model,
        objective=objective_of(config),
        train=TrainBatches(order, config.train),
        validation=validation,
        sample=sample,
        bytes_per_token=bytes_per_token(config.objective, validation, tokenizer),
        data=read_manifest(data).fingerprint + ROWS_VERSION.get(config.objective.kind, ""),
        allow_other_data=config.allow_changes,
        short_rows=[
            (rows, length / whole_length(config)) for rows, length in short_rows(config.objective, config.train)
        ],
    )


def objective_of(config: PretrainConfig, shares: Tensor | None = None) -> Tokens:
    """The loss of a recipe; with the frequency of each token (V,) it may compare targets with a sample of them."""
    drawn = config.objective.sampled_softmax
    sampled = None if shares is None or drawn is None else SampledSoftmax(shares, drawn)
    return objective_called(config.objective.kind, config.train.label_smoothing, sampled)


def whole_length(config: PretrainConfig) -> int:
    return config.model.context if config.objective.length is None else config.objective.length


def phases(config: PretrainConfig, make: Callable[[int], Dataset]) -> Samples:
    """All sequences of one length, or shorter ones first. A border lies between two batches."""
    short = [(rows, make(length)) for rows, length in short_rows(config.objective, config.train)]
    last = make(whole_length(config))
    return Phases([*short, (0, last)]) if short else last


def dataset(
    objective: ObjectiveConfig, shards: Shards, tokenizer: Tokenizer, length: int, *, seed: int, shuffle: bool = True
) -> Dataset:
    match objective.kind:
        case "language-model" if shards.manifest.pairs:
            return JoinedPairs(shards, tokenizer, length, seed=seed, shuffle=shuffle)
        case "language-model":
            return PackedWindows(shards, length, seed=seed, shuffle=shuffle, document_mask=objective.document_mask)
        case "masked":
            whole = partial(FullSentences, document_mask=objective.document_mask, masking=objective.masking)
            return whole(shards, tokenizer, length, seed=seed, shuffle=shuffle)
        case "masked-next-sentence":
            pairs = partial(MaskedPairs, single_sentences=objective.single_sentences, masking=objective.masking)
            return pairs(shards, tokenizer, length, seed=seed, shuffle=shuffle)
        case "sequence-to-sequence":
            return SequencePairs(shards, tokenizer, length, seed=seed, shuffle=shuffle)


def validation_batches(config: PretrainConfig, tokenizer: Tokenizer, data: Path) -> ValidationBatches | None:
    if not read_manifest(data).validation:
        return None
    shards = open_shards(data, "validation", tokenizer_hash=tokenizer.hash)
    length = whole_length(config)
    try:
        every = dataset(config.objective, shards, tokenizer, length, seed=0, shuffle=False)
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"no validation: {error}", file=sys.stderr)
        return None
    rows = config.train.validation_rows
    if len(every) <= rows:
        return ValidationBatches(every, len(every))
    return ValidationBatches(dataset(config.objective, shards, tokenizer, length, seed=0), rows)


def bytes_per_token(
    objective: ObjectiveConfig, validation: ValidationBatches | None, tokenizer: Tokenizer
) -> float | None:
    """Bytes of text that a predicted token of the validation rows stands for; a special token stands for none.

    None for masked models: what they predict from both sides does not add up to the probability of a text.
    """
    if validation is None or objective.kind.startswith("masked"):
        return None
    sizes = torch.tensor([len(piece) for piece in tokenizer.piece_table])
    sizes[list(tokenizer.special_ids.values())] = 0
    targets = validation.part(0, 0, validation.count).targets
    mean = float(sizes[targets[targets != IGNORE]].double().mean())
    return mean if mean > 0 else None


def token_shares(batches: Batches, vocab_size: int) -> npt.NDArray[np.float64]:
    """How frequent each token is among the targets."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    rows = step = 0
    while rows < ENTROPY_ROWS and int(counts.sum()) < ENTROPY_TOKENS:
        targets = batches.part(step, 0, batches.rows(step)).targets
        counts += torch.bincount(targets[targets != IGNORE].flatten(), minlength=vocab_size)
        rows, step = rows + batches.rows(step), step + 1
    return (counts / counts.sum()).double().numpy()


def with_frequencies(task: Task, config: PretrainConfig, data: Path, tokenizer: Tokenizer) -> tuple[Task, float]:
    """The task with what follows from how frequent its targets are, and the loss of answering with that alone."""
    shares = target_shares(config.objective.kind, data, task.train, tokenizer)
    objective, smoothing = objective_of(config, torch.from_numpy(shares)), config.train.label_smoothing
    return replace(task, objective=objective, unigram_loss=entropy(shares, smoothing)), entropy(shares)


def target_shares(kind: ObjectiveKind, data: Path, batches: Batches, tokenizer: Tokenizer) -> npt.NDArray[np.float64]:
    """How frequent each token is among the targets: as in the text, unless some of it is only read."""
    if read_manifest(data).pairs or kind == "sequence-to-sequence":
        return token_shares(batches, tokenizer.vocab_size)
    return text_shares(open_shards(data), tokenizer, with_special=not kind.startswith("masked"))


def text_shares(shards: Shards, tokenizer: Tokenizer, *, with_special: bool) -> npt.NDArray[np.float64]:
    """How frequent each token is in the text, of several sources in the proportion in which they are read."""
    total = sum(stream.weight for stream in shards.streams)
    shares, special = np.zeros(tokenizer.vocab_size), list(tokenizer.special_ids.values())
    for stream, tokens in zip(shards.streams, counted_tokens(shards), strict=True):
        counts = np.bincount(tokens, minlength=tokenizer.vocab_size)
        if not with_special:
            counts[special] = 0
        shares += stream.weight / total * counts / max(1, counts.sum())
    return shares / shares.sum()


def entropy(shares: npt.NDArray[np.float64], smoothing: float = 0.0) -> float:
    """The loss of always answering with the frequencies, in nats: what any model must beat."""
    smoothed = (1 - smoothing) * shares + smoothing / len(shares)
    seen = smoothed[smoothed > 0]
    return float(-(seen * np.log(seen)).sum())
