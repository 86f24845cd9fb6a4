"""What a run tells: a display or plain lines, metrics.jsonl, samples, TensorBoard, wandb, the plot, a sanity check."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plume.config import TrainConfig, UserError
from plume.config.screen import harmless, tell
from plume.files import room_on_disk, write_rows
from plume.train.ranks import Ranks
from plume.train.runs import METRICS, SAMPLES, read_metrics

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


class Progress:
    """All that leaves the loop. Only the main rank writes; the others keep silent."""

    def __init__(self, folder: Path, config: TrainConfig, ranks: Ranks, parts: Sequence[str]) -> None:
        self.folder, self.config, self.ranks, self.parts = folder, config, ranks, list(parts)
        self.flops_per_token: float | None = None
        self.peak: float | None = None  # of all devices together
        self.last_loss = self.last_part = math.nan  # the whole, and its first part: that of the tokens
        self.norm = math.nan
        self.best = math.inf
        self.found: Mapping[str, float] = {}  # by the judge of the newest validation, if there is one
        self.checked = False
        self.since: tuple[int, float] | None = None  # tokens and seconds at the log line before
        self.first_part: float | None = None
        self.bar: Bar | None = None
        self.writers = open_writers(folder, config) if ranks.main else []

    def measure_against(self, flops_per_token: float, peak: float) -> None:
        """What the fraction of peak is taken of: operations of one token, and operations per second of all devices."""
        self.flops_per_token, self.peak = flops_per_token, peak

    # -- the display

    @contextmanager
    def live(self, step: int) -> Iterator[None]:
        """A bar on a terminal; otherwise lines."""
        from rich.console import Console

        console = Console(stderr=True)
        try:
            if self.ranks.main and console.is_terminal:
                with make_bar(console) as self.bar:
                    self.bar.add_task("training", total=self.config.steps, completed=step, about="")
                    yield
            else:
                yield
        finally:
            self.bar = None
            for writer in self.writers:
                writer.close()

    def say(self, text: str) -> None:
        if not self.ranks.main:
            return
        if self.bar is not None:
            self.bar.console.print(harmless(text), highlight=False, markup=False, emoji=False)
        else:
            tell(text, sys.stderr)

    def log(self, *, step: int, loss: float, parts: Sequence[float], rate: float, tokens: int, seconds: float) -> None:
        self.last_loss, self.last_part = loss, parts[0]
        self.first_part = parts[0] if self.first_part is None else self.first_part
        before = self.since
        self.since = (tokens, seconds)
        row: dict[str, Any] = {"step": step, "loss": loss}
        if len(self.parts) > 1:
            row |= dict(zip(self.parts, parts, strict=True))
        row |= {"lr": self.config.lr * rate, "gradient_norm": self.norm, "tokens": tokens, "seconds": round(seconds, 3)}
        if before is not None and seconds > before[1]:
            row["tokens_per_second"] = round((tokens - before[0]) / (seconds - before[1]), 1)
            if self.flops_per_token is not None and self.peak:
                row["fraction_of_peak"] = round(row["tokens_per_second"] * self.flops_per_token / self.peak, 4)
        self.write(row)
        self.show(row)

    def show(self, row: Mapping[str, Any]) -> None:
        said = [f"loss {row['loss']:.4f}"]
        if "tokens_per_second" in row:
            said.append(f"{row['tokens_per_second']:,.0f} tokens/s")
        if "fraction_of_peak" in row:
            said.append(f"{row['fraction_of_peak']:.0%} of peak")
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=row["step"], about=", ".join(said))
            return
        left = (self.config.steps - row["step"]) * row["seconds"] / row["step"]
        self.say(f"step {row['step']}/{self.config.steps}: {', '.join(said)}, {clock(left)} left")

    def validated(self, step: int, loss: float, parts: Sequence[float], score: float) -> None:
        row: dict[str, Any] = {"step": step, "validation_loss": loss}
        if len(self.parts) > 1:
            row |= {f"validation_{name}": value for name, value in zip(self.parts, parts, strict=True)}
        row["score"] = score
        self.write(row)
        better, self.best = score < self.best, min(self.best, score)  # of equals the first is kept
        found = "".join(f", {name} {value:.4f}" for name, value in self.found.items())
        self.say(f"step {step}: validation loss {loss:.4f}{found}{' (best)' if better else ''}")

    def sample(self, step: int, text: str) -> None:
        file = self.folder / SAMPLES
        with room_on_disk(file), file.open("a", encoding="utf-8") as stream:
            stream.write(f"--- step {step}\n{text}\n")
        shown = " ".join(text.split())
        self.say(f"step {step}: {shown if len(shown) <= 160 else shown[:159] + '…'}")

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
        """Forget what was written after the step that the run goes on from."""
        if self.ranks.main:
            rows = [row for row in read_metrics(self.folder) if row["step"] <= step]
            write_rows(self.folder / METRICS, rows)
            self.best = min((row["score"] for row in rows if "score" in row), default=math.inf)
            first = "loss" if len(self.parts) == 1 else self.parts[0]
            self.first_part = next((row[first] for row in rows if first in row), None)

    # -- is anything learned?

    def check_sanity(self, step: int, floor: float | None, *, by: int) -> None:
        """Once, at the first log line from step `by` on: the loss must have beaten the token frequencies alone."""
        if self.checked or floor is None or step < by:
            return
        self.checked = True
        if self.last_part >= floor and self.last_part != self.first_part:  # from one line no trend can be told
            self.say(self.diagnosis(step, floor))

    def diagnosis(self, step: int, floor: float) -> str:
        loss, first = self.last_part, math.inf if self.first_part is None else self.first_part
        if loss > first + 0.1:
            why = f"It rose from {first:.3f}: the learning rate {self.config.lr:g} is probably too high"
        elif self.norm < 1e-4:
            why = f"The gradient norm is {self.norm:.1e}, so there is hardly a signal: check the targets and the data"
        elif loss < floor + 0.3:
            why = "Frequencies are learned and nothing else yet; masked models stay there for long: give it more steps"
        else:
            why = (
                f"It fell only from {first:.3f}: the learning rate {self.config.lr:g} is probably too low, "
                f"or the warm-up of {self.config.warmup_steps} steps too long"
            )
        return f"warning: at step {step} the loss is {loss:.3f}, and token frequencies alone give {floor:.3f}. {why}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def make_bar(console: Console) -> Bar:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[about]}"))
    return Bar(*columns, TimeRemainingColumn(), console=console, refresh_per_second=4)


# ---- others that want the numbers --------------------------------------------------------------------------------


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
