"""What a run reports: progress, metrics.jsonl, samples, TensorBoard, wandb, and a check that it learns."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from plume.config import TrainConfig, UserError
from plume.train.distribute import Ranks
from plume.train.expectations import TimeLeft, usual_loss
from plume.util.console import harmless, plural, tell
from plume.util.files import room_on_disk, write_rows
from plume.util.progress import Advance, Progress
from plume.util.run_folder import METRICS, SAMPLES, bits_per_byte, read_metrics, token_loss


class TrainingLog:
    """Everything that the loop prints and writes, by the main rank alone."""

    def __init__(self, folder: Path, config: TrainConfig, ranks: Ranks, parts: Sequence[str]) -> None:
        self.folder, self.config, self.ranks, self.parts = folder, config, ranks, list(parts)
        self.flops_per_token: float | None = None
        self.peak: float | None = None  # of all devices together
        self.last_loss = self.last_part = math.nan  # the whole, and its first part: that of the tokens
        self.last_parts: dict[str, float] = {}
        self.norm = math.nan
        self.metrics: Mapping[str, float] = {}  # of the newest validation, besides the loss
        self.checked = False
        self.bytes_per_token: float | None = None  # of the validation text, where bits per byte say something
        self.comparable: tuple[float, int] | None = None  # unigram entropy and block weights, of a GPT
        self.time_left = TimeLeft(config)
        self.since: tuple[int, float] | None = None  # tokens and seconds of training at the log line before
        self.first_part: float | None = None
        self.progress = Progress(quiet=True)
        self.advance: Advance | None = None
        self.shown_step = 0
        self.writers = open_writers(folder, config) if ranks.main else []

    def measure_against(self, flops_per_token: float, peak: float) -> None:
        """What the fraction of peak is taken of: operations of one token, and operations per second of all devices."""
        self.flops_per_token, self.peak = flops_per_token, peak

    # -- the display

    @contextmanager
    def live(self, step: int) -> Iterator[None]:
        """A bar on a terminal; otherwise lines."""
        try:
            with (
                Progress(quiet=not self.ranks.main, lines=False, remaining=False) as self.progress,
                self.progress.task("training", self.config.steps, completed=step) as self.advance,
            ):
                self.shown_step = step
                yield
        finally:
            for writer in self.writers:
                writer.close()

    def print(self, text: str) -> None:
        if self.ranks.main and not self.progress.print(harmless(text)):
            tell(text, sys.stderr)

    def log(self, *, step: int, loss: float, parts: Sequence[float], rate: float, tokens: int, seconds: float) -> None:
        self.last_loss, self.last_part = loss, parts[0]
        self.last_parts = dict(zip(self.parts, parts, strict=True)) if len(parts) > 1 else {}
        self.first_part = parts[0] if self.first_part is None else self.first_part
        before = self.since
        self.since = (tokens, seconds - self.time_left.paused_seconds)
        row: dict[str, Any] = {"step": step, "loss": loss}
        if len(self.parts) > 1:
            row |= dict(zip(self.parts, parts, strict=True))
        row |= {"lr": self.config.lr * rate, "gradient_norm": self.norm, "tokens": tokens, "seconds": round(seconds, 3)}
        if before is not None and self.since[1] > before[1]:
            row["tokens_per_second"] = round((tokens - before[0]) / (self.since[1] - before[1]), 1)
            if self.flops_per_token is not None and self.peak:
                row["fraction_of_peak"] = round(row["tokens_per_second"] * self.flops_per_token / self.peak, 4)
        self.write(row)
        self.show(row)

    def show(self, row: Mapping[str, Any]) -> None:
        status = [f"loss {row['loss']:.4f}"]
        if "tokens_per_second" in row:
            status.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        if row.get("fraction_of_peak", 2.0) <= 1:  # above it, the peak was measured on a busier machine
            status.append(f"{row['fraction_of_peak']:.0%} of peak")
        if math.isfinite(left := self.time_left.seconds(row["step"])):
            status.append(f"{clock(left)} left")
        if self.advance is not None:
            self.advance(row["step"] - self.shown_step, ", ".join(status))
        self.shown_step = row["step"]
        if self.progress.bar is None:
            self.print(f"step {row['step']}/{self.config.steps}: {', '.join(status)}")

    def validated(self, step: int, loss: float, parts: Sequence[float], score: float, *, best: bool) -> None:
        row: dict[str, Any] = {"step": step, "validation_loss": loss}
        if len(self.parts) > 1:
            row |= {f"validation_{name}": value for name, value in zip(self.parts, parts, strict=True)}
        of_tokens, bits = token_loss(row, "validation_"), ""
        if self.bytes_per_token is not None and of_tokens is not None:
            row["validation_bits_per_byte"] = bits_per_byte(of_tokens, self.bytes_per_token)
            bits = f", {row['validation_bits_per_byte']:.4f} bits per byte"
        row["score"] = score
        self.write(row)
        several = dict(zip(self.parts, parts, strict=True)) if len(parts) > 1 else {}
        found = "".join(f", {name} {value:.4f}" for name, value in {**several, **self.metrics}.items())
        self.print(f"step {step}: validation loss {loss:.4f}{found}{bits}{' (best)' if best else ''}")

    def sample(self, step: int, text: str) -> None:
        file = self.folder / SAMPLES
        with room_on_disk(file), file.open("a", encoding="utf-8") as stream:
            stream.write(f"--- step {step}\n{text}\n")
        shown = " ".join(text.split())
        self.print(f"step {step}: {shown if len(shown) <= 160 else shown[:159] + '…'}")

    # -- files

    def write(self, row: Mapping[str, Any]) -> None:
        if not self.ranks.main:
            return
        file = self.folder / METRICS
        with room_on_disk(file), file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        for writer in self.writers:
            writer.write(row)

    def restart(self, step: int) -> None:
        """Drop what was written after the step that the run resumes from."""
        if self.ranks.main:
            rows = [row for row in read_metrics(self.folder) if row["step"] <= step]
            write_rows(self.folder / METRICS, rows)
            first = "loss" if len(self.parts) == 1 else self.parts[0]
            self.first_part = next((row[first] for row in rows if first in row), None)

    # -- is anything learned?

    def check_sanity(self, step: int, unigram_loss: float | None, *, by: int) -> None:
        """Once, at the first log line from step `by` on: the loss must have beaten the token frequencies alone."""
        if self.checked or unigram_loss is None or step < by:
            return
        self.checked = True
        if self.last_part >= unigram_loss and self.last_part != self.first_part:  # one line shows no trend
            self.print(self.diagnosis(step, unigram_loss))
        elif self.comparable is not None and self.since is not None:
            self.compare(step, usual_loss(self.comparable[0], self.since[0], self.comparable[1]))

    def compare(self, step: int, usual: tuple[float, float] | None) -> None:
        """The loss beside that of comparable runs; above their range it is a warning."""
        if usual is None:
            return
        text = f"the loss at step {step} is {self.last_part:.3f}; comparable runs had {usual[0]:.2f} to {usual[1]:.2f}"
        if self.last_part > usual[1]:
            text = f"warning: {text}. `plume doctor {self.folder}` looks for the cause"
        self.print(text)

    def diagnosis(self, step: int, unigram_loss: float) -> str:
        loss, first = self.last_part, math.inf if self.first_part is None else self.first_part
        if loss > first + 0.1:
            why = f"It rose from {first:.3f}: the learning rate {self.config.lr:g} is probably too high"
        elif self.norm < 1e-4:
            why = f"The gradient norm is {self.norm:.1e}, so there is hardly a signal: check the targets and the data"
        elif loss < unigram_loss + 0.3:
            why = "Frequencies are learned and nothing else yet; masked models stay there for long: give it more steps"
        else:
            why = (
                f"It fell only from {first:.3f}: the learning rate {self.config.lr:g} is probably too low, "
                f"or the warm-up of {plural(self.config.warmup_steps, 'step')} too long"
            )
        return f"warning: the loss at step {step} is {loss:.3f}; token frequencies alone give {unigram_loss:.3f}. {why}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# ---- trackers --------------------------------------------------------------------------------


class Writer(Protocol):
    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path) -> None:
        import wandb

        self.run = wandb.init(project="plume", name=folder.name, dir=str(folder), id=folder.name, resume="allow")

    def write(self, row: Mapping[str, Any]) -> None:
        self.run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self) -> None:
        self.run.finish()


def open_writers(folder: Path, config: TrainConfig) -> list[Writer]:
    wanted: list[tuple[bool, str, Callable[[Path], Writer]]] = [
        (config.tensorboard, "tensorboard", TensorBoard),
        (config.wandb, "wandb", WeightsAndBiases),
    ]
    for on, package, _ in wanted:
        if on and find_spec(package) is None:
            raise UserError(f"train.{package}=true needs the package {package}: pip install 'plume-lm[track]'")
    return [make(folder) for on, _, make in wanted if on]
