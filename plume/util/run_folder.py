"""Run folders: what they hold, which process uses one, RUN@STEP, and how runs are listed, compared and plotted."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plume.config import RECIPE as RECIPE
from plume.config import UserError, at_home, did_you_mean, read_recipe
from plume.util.console import show, tell
from plume.util.files import encodable, new_figure, read_json, remove, save_figure, write_json, write_text

METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
PLOT = "loss.png"
CHECKPOINTS = "checkpoints"
MODEL = "model"
ABOUT = "plume.json"  # beside a model: what it is and where it comes from
BYTES_PER_TOKEN = "validation_bytes_per_token"  # in it: of the text that the loss is measured on
TOKEN_PARTS = ("masked", "hard")  # of a loss with several parts, that of predicted tokens: BERT's and a student's
MASKED_HEADS = ("masked-token", "pretraining")
TOKEN_HEADS = ("next-token", *MASKED_HEADS)  # their losses are in nats per token
LOCK, HOLDER = ".lock", ".lock.json"  # the second names the process that holds the first
CONTENTS = (  # what runs write
    *(RECIPE, METRICS, SAMPLES, PLOT, CHECKPOINTS, MODEL, "tensorboard", "report.md", "results.json"),
    *("predictions.jsonl", "test_predictions.jsonl", "confusion.png", "curve.png", "search.png", "search.json"),
)


# ---- one process at a time ---------------------------------------------------------------------------------------


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold an existing run folder until the end of this process, also when it is killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder} is in use by {holder(folder)}; wait until it ends, or stop it first") from None
    try:
        started = time.strftime("%Y-%m-%d %H:%M")
        write_json(
            folder / HOLDER,
            {"pid": os.getpid(), "host": platform.node(), "started": started, "command": " ".join(sys.argv)},
        )
        yield
    finally:
        remove(folder / HOLDER)
        lock.release()


def holder(folder: Path) -> str:
    """The process that holds a run folder, in words."""
    try:
        found = read_json(folder / HOLDER)
        return f"process {found['pid']} on {found['host']} since {found['started']} ({found['command']})"
    except (UserError, KeyError):
        return "another process"


def is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file()


def refuse_foreign_folder(folder: Path) -> None:
    """A folder that is neither a run nor empty is left alone."""
    if is_run(folder) or not folder.exists():
        return
    if not folder.is_dir() or any(path.name not in (LOCK, HOLDER) for path in folder.iterdir()):
        raise UserError(f"{folder} exists and is not a run folder, so it is left alone; choose another with --folder")


def remove_run(folder: Path) -> None:
    """What runs write into their folder, and nothing else."""
    for name in (*CONTENTS, *(path.name for path in folder.glob("seed-*"))):
        remove(folder / name)


def split_reference(name: str | Path) -> tuple[Path, int | None]:
    """RUN@STEP taken apart: the folder and the step, which is None where only a folder is named."""
    path = at_home(name)
    run, at, step = str(path).rpartition("@")
    if at and step.isdecimal() and not path.exists():
        return Path(run), int(step)
    return path, None


# ---- what a run folder says --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunInfo:
    """What a run folder says of itself. Losses are those of predicted tokens, where a loss has other parts too."""

    name: str
    folder: Path
    step: int
    steps: int | None
    loss: float | None
    validation: float | None  # the lowest
    bits_per_byte: float | None  # of the validation, the lowest; a masked run has none
    bytes_per_token: float | None  # of the validation text
    tokenizer: str | None  # its hash, where the loss is in nats per token
    masked: bool  # whether masked tokens are predicted
    tokens: int
    seconds: float
    model: bool  # whether its model folder is written
    recipe: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": str(self.folder)}


def metrics_file(folder: Path) -> Path:
    """The run's own figures; of a run with several seeds, those of the one that was trained last."""
    seeds = [path for path in folder.glob(f"seed-*/{METRICS}") if not (folder / METRICS).is_file()]
    return max(seeds, key=lambda path: path.stat().st_mtime, default=folder / METRICS)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = metrics_file(folder)
    return metrics_rows(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else []


def metrics_rows(text: str) -> list[dict[str, Any]]:
    """Every whole line; a torn last one, left by a crash, is none."""
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def read_run(folder: Path) -> RunInfo:
    if not (folder / RECIPE).is_file():
        neighbours = [path.parent.name for path in folder.parent.glob(f"*/{RECIPE}")]
        raise UserError(f"{folder} is not a run folder ({RECIPE} is missing){did_you_mean(folder.name, neighbours)}")
    recipe = read_recipe_of(folder)
    rows = read_metrics(folder)
    logged = [row for row in rows if "loss" in row]
    last = logged[-1] if logged else {}
    about = read_about(folder)
    return RunInfo(
        name=folder.name,
        folder=folder,
        step=max((row["step"] for row in rows), default=0),
        steps=recipe.get("train", {}).get("steps"),
        loss=token_loss(last),
        validation=lowest(token_loss(row, "validation_") for row in rows),
        bits_per_byte=lowest(row.get("validation_bits_per_byte") for row in rows),
        bytes_per_token=about.get(BYTES_PER_TOKEN),
        tokenizer=tokenizer_of(about),
        masked=about.get("head") in MASKED_HEADS,
        tokens=last.get("tokens", 0),
        seconds=last.get("seconds", 0.0),
        model=(folder / MODEL / "config.json").is_file(),
        recipe=recipe,
    )


def read_about(folder: Path) -> dict[str, Any]:
    """What a run says of its model; an older one may say less."""
    for place in (folder / CHECKPOINTS / MODEL, folder / MODEL):
        if (place / ABOUT).is_file():
            try:
                return read_json(place / ABOUT)
            except UserError:
                continue
    return {}


def tokenizer_of(about: Mapping[str, Any]) -> str | None:
    """The hash of the tokenizer, where the loss is in nats per token."""
    found = about.get("tokenizer_hash")
    return found if isinstance(found, str) and about.get("head") in TOKEN_HEADS else None


def token_loss(row: Mapping[str, Any], prefix: str = "") -> float | None:
    """The loss of predicted tokens in a row of metrics: without BERT's next sentence, without a teacher's part."""
    return next((row[prefix + part] for part in TOKEN_PARTS if prefix + part in row), row.get(f"{prefix}loss"))


def lowest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token in a unit that does not depend on the tokenizer."""
    return loss / math.log(2) / bytes_per_token


def read_recipe_of(folder: Path) -> dict[str, Any]:
    return read_recipe(folder / RECIPE)


def write_recipe(folder: Path, table: Mapping[str, Any]) -> None:
    """The settings of a run as TOML, whole or not at all."""
    write_text(folder / RECIPE, to_toml(table))


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Nested plain values as TOML; what is None is left out, which is how a recipe says unset."""
    values = {name: value for name, value in table.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"[{path}]"] * bool(path and values) + [f"{name} = {toml_value(value)}" for name, value in values.items()]
    text = "\n".join(lines) + "\n\n" * bool(lines)
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            text += to_toml(inner, f"{path}.{name}" if path else name)
    return text


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(inner) for inner in value)}]"
    if isinstance(value, int | float):
        return repr(value)
    if not encodable(text := str(value)):  # TOML has no surrogates
        raise UserError(f"{text!r} is a name that is not UTF-8, which a recipe cannot hold; rename it")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """A sentence for every setting that two recipes do not share."""
    before, after = flat(old), flat(tomllib.loads(to_toml(new)))
    return {
        name: f"{name} was {before.get(name, 'unset')!r} and is now {after.get(name, 'unset')!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def find_runs(folders: Sequence[Path]) -> list[RunInfo]:
    """The runs named, and those below a folder that is none itself."""
    found: list[RunInfo] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; runs of Plume are in runs/ unless --folder says otherwise")
        below = sorted(path.parent for path in folder.glob(f"*/{RECIPE}"))
        found += [read_run(path) for path in below] if below else [read_run(folder)]
    return found


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted names."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values


def differences(runs: Sequence[RunInfo]) -> dict[str, list[Any]]:
    """Settings in which runs of one kind differ, with each run's value; what a kind does not have is no difference."""
    recipes = [flat(run.recipe) for run in runs]
    kinds = [{name for name, value in run.recipe.items() if isinstance(value, Mapping)} for run in runs]
    table: dict[str, list[Any]] = {}
    for name in sorted({name for recipe in recipes for name in recipe}):
        having = [kind for recipe, kind in zip(recipes, kinds, strict=True) if name in recipe]
        compared = [recipe.get(name) for recipe, kind in zip(recipes, kinds, strict=True) if kind in having]
        if any(value != compared[0] for value in compared):
            table[name] = [recipe.get(name) for recipe in recipes]
    return table


def other_tokenizers(hashes: Iterable[str | None]) -> bool:
    return len({*hashes} - {None}) > 1


def comparability(runs: Sequence[RunInfo]) -> list[str]:
    """Why the losses of these runs cannot be compared, a line per reason."""
    masked, lines = [run.name for run in runs if run.masked], list[str]()
    if differ := other_tokenizers(run.tokenizer for run in runs):
        lines.append(
            "the runs have different tokenizers: a token is not the same amount of text in each, so losses in nats "
            "per token are not comparable; bits per byte on the same validation text are"
        )
    if masked and (differ or any(run.tokenizer is not None and not run.masked for run in runs)):
        lines.append(
            f"{', '.join(masked)}: the loss of masked tokens, predicted from both sides; it has no bits per byte and "
            "is not comparable with a language model's"
        )
    return lines


def show_runs(runs: Sequence[RunInfo]) -> None:
    """A table of runs on the console."""
    from rich.table import Column, Table

    titles = ("run", "step", "loss", "validation", "bits per byte", "tokens", "minutes", "model")
    table = Table(*(Column(title, overflow="fold") for title in titles))  # a number must not lose digits
    for run in runs:
        table.add_row(
            run.name,
            str(run.step) if run.steps is None else f"{run.step}/{run.steps}",
            number(run.loss),
            number(run.validation),
            number(run.bits_per_byte),
            f"{run.tokens:,}",
            f"{run.seconds / 60:.1f}",
            "yes" if run.model else "no",
        )
    show(table)
    for line in comparability(runs):
        tell(line)


def show_comparison(runs: Sequence[RunInfo]) -> None:
    """What differs between runs, and what came of it."""
    from rich.table import Column, Table

    values_fold = (Column(run.name, overflow="fold") for run in runs)
    table = Table(Column("setting", no_wrap=True), *values_fold)  # its name in full; values may take several lines
    for name, values in differences(runs).items():
        table.add_row(name, *("" if value is None else str(value) for value in values))
    table.add_section()
    table.add_row("loss", *(number(run.loss) for run in runs))
    table.add_row("validation", *(number(run.validation) for run in runs))
    table.add_row("bits per byte", *(number(run.bits_per_byte) for run in runs))
    table.add_row("tokens", *(f"{run.tokens:,}" for run in runs))
    table.add_row("seconds", *(f"{run.seconds:.0f}" for run in runs))
    show(table)
    for line in comparability(runs):
        tell(line)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


Series = tuple[str, Callable[[dict[str, Any]], float | None], str, float]  # name, value of a row, line style, opacity
LOSSES: tuple[Series, ...] = (
    (" training", token_loss, "-", 0.5),
    (" validation", lambda row: token_loss(row, "validation_"), "o-", 1.0),
)
BITS: tuple[Series, ...] = (("", lambda row: row.get("validation_bits_per_byte"), "o-", 1.0),)


def plot_runs(folders: Sequence[Path], file: Path) -> Path | None:
    """Training and validation loss of runs by step, as a PNG; None when there is nothing to draw.

    Where tokenizers differ, bits per byte of the validation are drawn above it.
    """
    curves = [(folder.name, read_metrics(folder)) for folder in folders]
    if not any(rows for _, rows in curves):
        return None
    differ = other_tokenizers(tokenizer_of(read_about(folder)) for folder in folders)
    pictures = [("loss (nats per token)", LOSSES)]
    if differ and any("validation_bits_per_byte" in row for _, rows in curves for row in rows):
        pictures = [("validation (bits per byte)", BITS), *pictures]
    figure = new_figure(8, 5 * len(pictures))
    for axes, (label, series) in zip(figure.subplots(len(pictures), squeeze=False)[:, 0], pictures, strict=True):
        draw_curves(axes, curves, series)
        axes.set_ylabel(label)
    if differ:
        axes.set_title("different tokenizers: losses per token are not comparable", fontsize="medium")
    save_figure(figure, file)
    return file


def draw_curves(axes: Any, curves: Sequence[tuple[str, list[dict[str, Any]]]], series: Sequence[Series]) -> None:
    for index, (name, rows) in enumerate(curves):
        for kind, value, style, alpha in series:
            points = [(row["step"], value(row)) for row in rows if value(row) is not None]
            if points:
                style = style if len(points) > 1 else "o"  # a line needs two
                label, color = f"{name}{kind}", f"C{index}"
                axes.plot(*zip(*points, strict=True), style, alpha=alpha, color=color, markersize=3, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend()
