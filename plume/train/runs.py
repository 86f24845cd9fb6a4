"""Run folders looked at from outside: list them, compare them, plot their losses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plume.config import RECIPE as RECIPE
from plume.config import UserError, did_you_mean
from plume.files import new_figure, save_figure, write_text

METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
PLOT = "loss.png"


@dataclass(frozen=True)
class RunInfo:
    """What a run folder says of itself."""

    name: str
    folder: Path
    step: int
    steps: int | None
    loss: float | None
    validation: float | None  # the lowest
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
    """Every whole line; a torn last one, left by a crash, is none."""
    path = metrics_file(folder)
    rows: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
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
    return RunInfo(
        name=folder.name,
        folder=folder,
        step=max((row["step"] for row in rows), default=0),
        steps=recipe.get("train", {}).get("steps"),
        loss=last.get("loss"),
        validation=min((row["validation_loss"] for row in rows if "validation_loss" in row), default=None),
        tokens=last.get("tokens", 0),
        seconds=last.get("seconds", 0.0),
        model=(folder / "model" / "config.json").is_file(),
        recipe=recipe,
    )


def read_recipe_of(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / RECIPE).read_text(encoding="utf-8"))


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
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has no surrogates


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


def show_runs(runs: Sequence[RunInfo]) -> None:
    """A table of runs on the console."""
    from rich.console import Console
    from rich.table import Column, Table

    titles = ("run", "step", "loss", "validation", "tokens", "minutes", "model")
    table = Table(*(Column(title, overflow="fold") for title in titles))  # a number must not lose digits
    for run in runs:
        table.add_row(
            run.name,
            str(run.step) if run.steps is None else f"{run.step}/{run.steps}",
            number(run.loss),
            number(run.validation),
            f"{run.tokens:,}",
            f"{run.seconds / 60:.1f}",
            "yes" if run.model else "no",
        )
    Console().print(table)


def show_comparison(runs: Sequence[RunInfo]) -> None:
    """What differs between runs, and what came of it."""
    from rich.console import Console
    from rich.table import Column, Table

    values_fold = (Column(run.name, overflow="fold") for run in runs)
    table = Table(Column("setting", no_wrap=True), *values_fold)  # its name in full; values may take several lines
    for name, values in differences(runs).items():
        table.add_row(name, *("" if value is None else str(value) for value in values))
    table.add_section()
    table.add_row("loss", *(number(run.loss) for run in runs))
    table.add_row("validation", *(number(run.validation) for run in runs))
    table.add_row("tokens", *(f"{run.tokens:,}" for run in runs))
    table.add_row("seconds", *(f"{run.seconds:.0f}" for run in runs))
    Console().print(table)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def plot_runs(folders: Sequence[Path], file: Path) -> Path | None:
    """Training and validation loss of runs by step, as a PNG; None when there is nothing to draw."""
    curves = [(folder.name, read_metrics(folder)) for folder in folders]
    if not any(rows for _, rows in curves):
        return None
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    for index, (name, rows) in enumerate(curves):
        for key, style, alpha in (("loss", "-", 0.5), ("validation_loss", "o-", 1.0)):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                label = f"{name} {'validation' if key == 'validation_loss' else 'training'}"
                style = style if len(points) > 1 else "o"  # a line needs two
                axes.plot(*zip(*points, strict=True), style, alpha=alpha, color=f"C{index}", markersize=3, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, file)
    return file
