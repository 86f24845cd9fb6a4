"""What is wrong with a run: its data and its metrics are read, and short trainings at other rates are compared."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from plume.config import PretrainConfig, UserError, build, find_recipe
from plume.data import Shards, keyed_folder, open_shards
from plume.data.shards import read_manifest
from plume.text import Tokenizer, load_tokenizer
from plume.train.loop import NonFiniteError
from plume.train.optim import rate
from plume.train.pretrain import pretrain
from plume.util.console import terminal
from plume.util.run_folder import MODEL, RECIPE, is_run, read_metrics

Cause = Literal[
    "rate too high",
    "rate too low",
    "batch changed without the rate",
    "data repeated",
    "too little data",
    "targets do not follow from inputs",
    "tokenizer mismatched",
]
SAMPLE = 1_000_000  # tokens of the data that are looked at
SPAN = 64  # tokens: a stretch of this length is seldom written twice
REPEATED = 0.3  # share of stretches that occur more than once; source code has up to a tenth
DEPENDENCE = 0.1  # nats that a token must tell about the next one
DOCUMENTS, PREFIX = 40, 400  # encoded again, and tokens of each
ENCODED_AGAIN = 0.9  # share of their tokens that must come out the same
FEW_EPOCHS, MANY_EPOCHS = 4.0, 20.0  # up to here repetition costs little; from here on it is memorised
PROBE_STEPS, PROBE_SECONDS = 60, 120.0  # of each short training at most, and of all of them
FEWEST_STEPS = 20
FACTORS = (1 / 30, 1 / 5, 1.0, 5.0, 30.0)  # of the recipe's rates
CLEARLY = 0.03  # share by which the loss must be better


@dataclass(frozen=True)
class RunFault:
    cause: Cause
    seen: str
    change: str


@dataclass(frozen=True)
class RunDiagnosis:
    run: str
    faults: list[RunFault]
    epochs: float | None
    probes: dict[float, float]  # loss after the short training, by the factor of the rate

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def examine_run(folder: Path, *, probe: bool = True) -> RunDiagnosis:
    """The likely causes why a pretraining run is off, the surest first; none for a healthy one."""
    if not is_run(folder):
        raise UserError(f"{folder} is not a run folder ({RECIPE} is missing)")
    table, origin = find_recipe(str(folder))
    if "objective" not in table:
        raise UserError(f"{folder} is not a pretraining run; `plume doctor` reads those alone")
    config = build(PretrainConfig, table, origin=origin)
    rows = read_metrics(folder)
    data = keyed_folder(config.data).folder if config.prepared is None else config.prepared
    pairs = read_manifest(data).pairs
    tokenizer = load_tokenizer(data / "tokenizer")
    shards = open_shards(data, "train", tokenizer_hash=tokenizer.hash)
    tokens = max((row["tokens"] for row in rows if "tokens" in row), default=0)
    epochs = tokens / shards.tokens if shards.tokens and config.objective.kind == "language-model" else None
    ids = sample_tokens(shards)
    faults = [*data_faults(ids, shards, tokenizer, pairs=pairs), *batch_faults(rows, config)]
    faults += little_data(rows, epochs)
    probes: dict[float, float] = {}
    if probe and (steps := affordable_steps(rows, config)) >= FEWEST_STEPS:
        probes = {factor: probe_loss(config, data, factor, steps) for factor in FACTORS}
        faults += rate_faults(probes, config)
    return RunDiagnosis(str(folder), faults, epochs, probes)


# ---- data --------------------------------------------------------------------------------------------------------


def sample_tokens(shards: Shards) -> npt.NDArray[np.int64]:
    share = SAMPLE // len(shards.streams)
    return np.concatenate([stream.read(0, min(len(stream), share)) for stream in shards.streams])


def data_faults(ids: npt.NDArray[np.int64], shards: Shards, tokenizer: Tokenizer, *, pairs: bool) -> Iterator[RunFault]:
    same = encoded_again(shards, tokenizer)
    if same < ENCODED_AGAIN:
        yield RunFault(
            "tokenizer mismatched",
            f"decoded and encoded again, {same:.0%} of the tokens come out the same",
            "prepare the data with the tokenizer that is used: plume prepare --tokenizer.folder FOLDER",
        )
    elif not pairs and (nats := dependence(ids)) < DEPENDENCE:
        yield RunFault(
            "targets do not follow from inputs",
            f"a token tells {nats:.2f} nats about the next one, in any text it is more than {DEPENDENCE:g}",
            "read the tokens in order: were documents shuffled token by token, or targets shifted?",
        )
    if (share := repeated_share(ids)) > REPEATED:
        yield RunFault(
            "data repeated",
            f"{share:.0%} of the stretches of {SPAN} tokens occur more than once",
            "remove copies: --data.clean.duplicates near, or look for a file that is read twice",
        )


def encoded_again(shards: Shards, tokenizer: Tokenizer) -> float:
    """Share of the tokens of some documents that their text gives again."""
    right = total = 0
    special = set(tokenizer.definition.added)
    for stream in shards.streams:
        for number in np.linspace(0, stream.documents - 1, min(DOCUMENTS, stream.documents)).astype(int):
            start = stream.start_of(int(number))
            ids = [t for t in stream.read(start, start + PREFIX).tolist() if t not in special]
            again = Counter(tokenizer.encode(tokenizer.decode(ids)))
            right, total = right + sum((again & Counter(ids)).values()), total + len(ids)
    return right / max(total, 1)


def dependence(ids: npt.NDArray[np.int64]) -> float:
    """Mutual information of neighbours in nats, less what as many independent pairs would show by chance."""

    def information(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
        joint = np.unique(first * (int(ids.max()) + 1) + second, return_counts=True)[1] / len(first)
        return float((joint * np.log(joint)).sum())

    shuffled = np.random.default_rng(0).permutation(ids)
    return information(ids[:-1], ids[1:]) - information(shuffled[:-1], shuffled[1:])


def repeated_share(ids: npt.NDArray[np.int64]) -> float:
    """Share of the stretches of SPAN tokens that occur more than once, from a sixteenth of them chosen by content."""
    if len(ids) < 2 * SPAN:
        return 0.0
    hashes = np.zeros(len(ids) - SPAN + 1, dtype=np.uint64)
    for offset in range(SPAN):
        hashes = hashes * np.uint64(6364136223846793005) + ids[offset : offset + len(hashes)].astype(np.uint64)
    hashes ^= hashes >> np.uint64(31)
    counts = np.unique(hashes[hashes % np.uint64(16) == 0], return_counts=True)[1]
    return float(counts[counts > 1].sum() / max(counts.sum(), 1))


# ---- metrics -----------------------------------------------------------------------------------------------------


def batch_faults(rows: list[dict[str, Any]], config: PretrainConfig) -> Iterator[RunFault]:
    """A jump of the tokens per step in the course of the run, while the rate stayed as it was."""
    logged = [row for row in rows if "lr" in row and rate(row["step"] - 1, config.train) > 0]
    if config.train.batch_start is not None or config.objective.short_lengths or len(logged) < 6:
        return
    steps, tokens = (np.array([row[name] for row in logged], dtype=float) for name in ("step", "tokens"))
    peaks = np.array([row["lr"] / rate(row["step"] - 1, config.train) for row in logged])[1:]
    per_step = np.diff(tokens) / np.maximum(np.diff(steps), 1)
    jumps = {k: np.median(per_step[k:]) / np.median(per_step[:k]) for k in range(2, len(per_step) - 1)}
    at = max(jumps, key=lambda k: abs(math.log(jumps[k])))
    factor, rates = float(jumps[at]), float(np.median(peaks[at:]) / np.median(peaks[:at]))
    if abs(math.log(factor)) > math.log(1.8) and abs(math.log(rates)) < math.log(1.25):
        better = math.sqrt(factor)
        yield RunFault(
            "batch changed without the rate",
            f"from step {steps[at]:.0f} on a step reads {factor:.2g} times the tokens at the same learning rate",
            f"multiply the learning rate by about {better:.2g}, the square root, or keep the batch",
        )


def little_data(rows: list[dict[str, Any]], epochs: float | None) -> Iterator[RunFault]:
    """Many passes over the text, and a validation loss that shows it."""
    validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    if epochs is None or epochs <= FEW_EPOCHS or not losses:
        return
    if not validation:
        if epochs > MANY_EPOCHS:
            yield RunFault(
                "too little data",
                f"{epochs:.0f} passes over the text, and none is held out that would show what was learned from it",
                "use more text, or fewer steps",
            )
        return
    rose, gap = validation[-1] / min(validation) - 1, 1 - losses[-1] / validation[-1]
    if rose > 0.01 or gap > 0.1:
        yield RunFault(
            "too little data",
            f"{epochs:.1f} passes over the text; the training loss is {gap:.0%} below the validation loss"
            + (f", which rose {rose:.0%} above its best" if rose > 0.01 else ""),
            "use more text, a smaller model, dropout or fewer steps",
        )


# ---- rates -------------------------------------------------------------------------------------------------------


def affordable_steps(rows: list[dict[str, Any]], config: PretrainConfig) -> int:
    """Steps of one short training, so that all of them take PROBE_SECONDS at most."""
    timed = [row["seconds"] / row["step"] for row in rows if row.get("seconds") and row["step"]]
    each = timed[-1] if timed else 1.0
    return min(PROBE_STEPS, config.train.steps, int(PROBE_SECONDS / len(FACTORS) / each))


def probe_loss(config: PretrainConfig, data: Path, factor: float, steps: int) -> float:
    """The training loss of the last quarter of a short training with the recipe's rates times a factor."""
    train = config.train
    warmup = max(1, round(train.warmup_steps / train.steps * steps))
    short = replace(
        train,
        steps=steps,
        warmup_steps=warmup,
        decay_steps=None,
        lr=train.lr * factor,
        muon_lr=train.muon_lr * factor,
        log_every=max(1, steps // 4),
        validate_every=steps,
        checkpoint_every=steps,
        sample_every=steps,
        keep_best=False,
        average_checkpoints=1,
        tensorboard=False,
        wandb=False,
    )
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(place) / MODEL
        try:
            result = pretrain(replace(config, train=short, prepared=data, folder=folder, resume=False))
        except NonFiniteError:
            return math.inf
        if not result.outcome.finished:
            raise KeyboardInterrupt
        return result.outcome.loss


def rate_faults(probes: dict[float, float], config: PretrainConfig) -> Iterator[RunFault]:
    own, name = probes[1.0], "--train.lr and --train.muon-lr" if config.train.optimizer == "muon" else "--train.lr"
    best = min(probes, key=lambda factor: probes[factor])
    # short trainings like high rates too well: only a far higher one says it
    compared = best if best < 1 else FACTORS[-1]
    if probes[compared] >= (1 - CLEARLY) * own:
        return
    seen = f"a short training ends at {own:.3f}, with {best:.2g} times the rate at {probes[best]:.3f}"
    if best < 1:
        yield RunFault("rate too high", seen, f"divide {name} by {1 / best:.0f}")
    else:
        yield RunFault("rate too low", seen, f"multiply {name} by {best:.0f}")


def show_run(found: RunDiagnosis) -> None:
    from rich.text import Text

    console = terminal()
    for fault in found.faults:
        console.print(Text.assemble((fault.cause, "bold red"), f": {fault.seen}"))
        console.print(f"  {fault.change}")
    if found.probes:
        shown = ", ".join(f"x{factor:.2g}: {loss:.3f}" for factor, loss in found.probes.items())
        console.print(f"loss of short trainings by rate: {shown}")
    if not found.faults:
        console.print("nothing is wrong with this run", style="green")
