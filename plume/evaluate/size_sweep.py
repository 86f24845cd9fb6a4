"""Several sizes of a model on the same data: loss against parameters and against compute, on log axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import PretrainConfig, SweepConfig, UserError
from plume.data import keyed_folder, prepare
from plume.data.pool import run_on_ray
from plume.evaluate.report import picture, table
from plume.util.console import tell
from plume.util.files import write_json, write_text
from plume.util.run_folder import RECIPE, RunInfo, differences_of, read_metrics, read_recipe_of, read_run, token_loss

LEAST_SIZES = 3  # that a power law is fitted to


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size and what became of it."""

    name: str
    parameters: int
    tokens: int
    compute: float  # operations of the whole run
    loss: float  # of training, at the end
    validation: float | None
    seconds: float
    curve: list[tuple[float, float]]  # (compute so far, validation loss)


def run_sweep(config: SweepConfig) -> dict[str, Any]:
    """Train what is not trained yet, in order of size; called again after an interruption it continues."""
    config.folder.mkdir(parents=True, exist_ok=True)
    tasks = [{"name": name} for name in ordered(config.sizes) if not is_trained(config, name)]
    if config.backend == "ray":
        if config.prepared is None:
            prepare(keyed_folder(config.data))  # once, before the sizes need it
        done = run_on_ray(SizeStage, (config,), tasks, device=config.train.device)
    else:
        done = map(SizeStage(config), tasks)
    for _ in done:
        pass
    sizes = [measured(config.folder / name, name) for name in ordered(config.sizes)]
    report: dict[str, Any] = {"sizes": [asdict(size) for size in sizes], "fits": fits(sizes)}
    write_json(config.folder / "report.json", report)
    pictures = draw(sizes, config.folder)
    write_text(config.folder / "report.md", markdown(sizes, report["fits"], pictures))
    return report


def is_trained(config: SweepConfig, name: str) -> bool:
    """Whether a size has been trained, with these settings and no others."""
    from plume.train.pretrain import plain

    folder = config.folder / name
    if not finished(folder, config.train.steps):
        return False
    if changed := differences_of(read_recipe_of(folder), plain(of_size(config, name, resume=True))):
        lines = "\n  ".join(changed.values())
        raise UserError(f"{folder} was trained with other settings; name another folder\n  {lines}")
    return True


class SizeStage:
    """What a worker does with a size: train it, from where it was stopped."""

    def __init__(self, config: SweepConfig) -> None:
        self.config = config

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        from plume.train.pretrain import pretrain

        name = task["name"]
        begun = (self.config.folder / name / RECIPE).is_file()
        if not pretrain(of_size(self.config, name, resume=begun)).outcome.finished:
            tell(f"interrupted while training {name}; the same command continues")
            raise KeyboardInterrupt
        return task


def ordered(sizes: Sequence[str]) -> list[str]:
    return sorted(dict.fromkeys(sizes), key=lambda size: [int(n) ** 2 for n in reversed(size.split("x"))])


def of_size(config: SweepConfig, name: str, *, resume: bool) -> PretrainConfig:
    layers, width = (int(n) for n in name.split("x"))
    heads = max(1, width // config.head_width)
    model = replace(config.model, layers=layers, width=width, heads=heads, mlp_width=None)
    return PretrainConfig(
        folder=config.folder / name,
        model=model,
        train=config.train,
        objective=config.objective,
        data=config.data,
        prepared=config.prepared,
        resume=resume,
    )


def finished(folder: Path, steps: int) -> bool:
    if not (folder / RECIPE).is_file():
        return False
    run = read_run(folder)
    return run.model and run.step >= steps


def measured(folder: Path, name: str) -> Size:
    from plume.hf import read_config
    from plume.model.unfilled import unfilled
    from plume.util.devices import training_flops_per_token

    run, kept = read_run(folder), read_config(folder / "model")
    parameters = sum(p.numel() for p in unfilled(kept.model, kept.head, kept.labels).parameters())
    per_token = training_flops_per_token(kept.model)
    if run.loss is None:
        raise UserError(f"{folder} has logged no loss; log_every must be at most the number of steps")
    return Size(
        name=name,
        parameters=parameters,
        tokens=run.tokens,
        compute=per_token * run.tokens,
        loss=run.loss,
        validation=run.validation,
        seconds=run.seconds,
        curve=curve(run, per_token),
    )


def curve(run: RunInfo, per_token: float) -> list[tuple[float, float]]:
    rows = read_metrics(run.folder)
    tokens_per_step = run.tokens / max(1, run.step)
    losses = [(row["step"], token_loss(row, "validation_")) for row in rows]
    return [(per_token * tokens_per_step * step, loss) for step, loss in losses if loss is not None]


def fits(sizes: Sequence[Size]) -> dict[str, dict[str, float]]:
    """loss = scale * x ** -power, a straight line on log axes, by least squares; any two points lie on a line."""
    found: dict[str, dict[str, float]] = {}
    if len(sizes) < LEAST_SIZES:
        return found
    losses = [size.loss if size.validation is None else size.validation for size in sizes]
    for what in ("parameters", "compute"):
        x = np.log([getattr(size, what) for size in sizes])
        slope, offset = np.polyfit(x, np.log(losses), 1)
        found[what] = {"scale": float(np.exp(offset)), "power": float(-slope)}
    return found


def draw(sizes: Sequence[Size], folder: Path) -> list[str]:
    def log_axes(axes: Any, label: str) -> bool:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for which in ("major", "minor"):  # losses differ too little for powers of ten
            getattr(axes.yaxis, f"set_{which}_formatter")("{x:.3g}")
        axes.set_xlabel(label)
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
        return True

    def by_size(axes: Any) -> bool:
        x = [size.parameters for size in sizes]
        axes.plot(x, [size.loss for size in sizes], "o-", label="training")
        known = [(size.parameters, size.validation) for size in sizes if size.validation is not None]
        if known:
            axes.plot(*zip(*known, strict=True), "s-", label="validation")
        return log_axes(axes, "parameters")

    def by_compute(axes: Any) -> bool:
        for size in sizes:
            points = size.curve if size.curve else [(size.compute, size.loss)]
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=f"{size.name}, {size.parameters:,}")
        return log_axes(axes, "operations of training")

    drawn = {"loss_by_parameters.png": by_size, "loss_by_compute.png": by_compute}
    return [name for name, make in drawn.items() if picture(folder / name, make)]


def markdown(sizes: Sequence[Size], found: dict[str, dict[str, float]], pictures: Sequence[str]) -> str:
    header = ["size", "parameters", "tokens", "operations", "training loss", "validation loss", "seconds"]
    rows = [
        [s.name, f"{s.parameters:,}", f"{s.tokens:,}", f"{s.compute:.3g}", f"{s.loss:.4f}",
         "" if s.validation is None else f"{s.validation:.4f}", f"{s.seconds:.0f}"]
        for s in sizes
    ]  # fmt: skip
    lines = [f"- loss = {fit['scale']:.4g} x {what} ^ -{fit['power']:.4f}" for what, fit in found.items()]
    lines = lines or [f"A power law is fitted to {LEAST_SIZES} sizes or more."]
    parts = ["# Loss by size", table(header, rows), "\n".join(lines)]
    return "\n\n".join([*parts, *(f"![{name.removesuffix('.png')}]({name})" for name in pictures)]) + "\n"
