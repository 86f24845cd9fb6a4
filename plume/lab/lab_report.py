"""The report of an experiment: the table beside the paper's, a verdict per claim, a plot, the scale it was run at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np

from plume.evaluate.report import picture, table
from plume.lab.experiment import (
    BATCH,
    CONTEXT,
    FINETUNE_RATES,
    LOWER,
    STEPS,
    TIMED,
    WIDTH,
    Claim,
    Experiment,
    Lab,
    jobs_of,
)
from plume.lab.jobs import Numbers
from plume.lab.verdicts import PairedTest, paired_test, verdict
from plume.util.console import plural
from plume.util.files import read_json, write_json, write_text

Cells = Mapping[tuple[str, int], Numbers]  # variant and seed: column: number
LAW_POINTS = 5  # below which a fitted law is only a line through a few points
MEAN = "mean"
NO_SCORES = ("parameters",)


def write_report(experiment: Experiment, lab: Lab, cells: Cells, warning: str = "") -> str:
    """results.json (the same bytes for the same settings), report.md and plot.png."""
    folder = lab.config.folder / experiment.name
    tests = [(claim, tested(claim, cells)) for claim in experiment.claims]
    laws = fitted(experiment, cells)
    rows = {
        name: {c: values(cells, name, c) for c in columns_of(cells, name) if not c.startswith(TIMED)}
        for name in experiment.variants
    }
    write_json(folder / "results.json", {
        "experiment": experiment.name, "scale": lab.scale, "seeds": lab.config.seeds, "data": lab.digest, "table": rows,
        "claims": [as_json(claim, test) for claim, test in tests], "laws": laws,
    })  # fmt: skip
    picture(folder / "plot.png", lambda axes: draw(experiment, cells, axes))
    text = markdown(experiment, lab, cells, tests, laws, warning)
    write_text(folder / "report.md", text)
    write_summary(lab.config.folder)
    return text.replace("![plot](plot.png)", f"Wrote {folder / 'report.md'} and plot.png.")


def columns_of(cells: Cells, variant: str | None = None) -> list[str]:
    return list(dict.fromkeys(c for (name, _), row in cells.items() if variant in (None, name) for c in row))


def values(cells: Cells, variant: str, column: str) -> list[float]:
    """Over the seeds."""
    return [row[column] for (name, _), row in cells.items() if name == variant and column in row]


def tested(claim: Claim, cells: Cells) -> PairedTest:
    """Seed by seed, the mean over the columns of the claim; pairs are of one seed."""
    shared = [c for c in columns_of(cells, claim.better) if c in columns_of(cells, claim.worse)]
    columns = claim.chosen(shared)
    assert columns, f"no column to test {claim.text!r} in"
    signs = {c: -1.0 if c.startswith(LOWER) else 1.0 for c in columns}
    better, worse = (
        [
            math.fsum(signs[c] * row[c] for c in columns) / len(columns)
            for (name, _), row in cells.items()
            if name == side
        ]
        for side in (claim.better, claim.worse)
    )
    return paired_test(better, worse)


def as_json(claim: Claim, test: PairedTest) -> dict[str, Any]:
    interval = [end if math.isfinite(end) else None for end in (test.low, test.high)]
    found = {"claim": claim.text, "verdict": verdict(test), "seeds": test.pairs, "difference": test.mean}
    return {**found, "interval": interval, "p": test.p}


def fitted(experiment: Experiment, cells: Cells) -> dict[str, Any]:
    """For each curve a power law of one column over its x, seed by seed, with the interval of the power."""
    found = {}
    for series, places in experiment.curves.items() if experiment.fits is not None else ():
        x = np.log(list(places.values()))
        seeds = zip(*(values(cells, name, str(experiment.fits)) for name in places), strict=True)
        powers = [-float(np.polyfit(x, np.log(losses), 1)[0]) for losses in seeds]
        spread = paired_test(powers, [0.0] * len(powers))
        interval = [end if math.isfinite(end) else None for end in (spread.low, spread.high)]
        found[series] = {"power": spread.mean, "interval": interval, "points": len(places)}
    return found


# ---- for people --------------------------------------------------------------------------------------------------


def markdown(
    experiment: Experiment,
    lab: Lab,
    cells: Cells,
    tests: Sequence[tuple[Claim, PairedTest]],
    laws: dict[str, Any],
    warning: str = "",
) -> str:
    data = ", ".join(Path(path).name for path in lab.config.data) or "Python's standard library"
    parts = [
        f"# {experiment.name}",
        f"{experiment.question} {experiment.paper}.",
        f"Scale {lab.scale:g}, {plural(lab.config.seeds, 'seed')}, on {data}: models of {lab.wide * WIDTH} units "
        f"trained for about {lab.scaled(STEPS):,} steps of {BATCH * CONTEXT:,} tokens. The paper's are thousands of "
        f"times larger, so compare directions, not figures. {experiment.note}".rstrip(),
        table(["variant", *shown(cells), f"in the paper ({experiment.published_as})"], rows_of(experiment, cells)),
        f"Mean over seeds (lowest to highest). Loss and bits per byte: lower is better.{tuned_at(experiment, lab)}",
        table(["claim", "difference", "95 % interval", "seeds", "p", "verdict"], [claim_row(c, t) for c, t in tests]),
    ]
    parts += [*filter(None, [warning]), *(law_text(experiment, series, law) for series, law in laws.items())]
    return "\n\n".join([*parts, "![plot](plot.png)"]) + "\n"


def shown(cells: Cells) -> list[str]:
    """Columns of the table; where all of them are scores, their mean too."""
    columns = columns_of(cells)
    scores = [c for c in columns if not c.startswith((*LOWER, TIMED)) and c not in NO_SCORES]
    return [*columns, MEAN] if len(columns) == len(scores) > 1 else columns


def rows_of(experiment: Experiment, cells: Cells) -> list[list[str]]:
    return [
        [name, *(cell_text(column_values(cells, name, c)) for c in shown(cells)), experiment.published.get(name, "")]
        for name in experiment.variants
    ]


def column_values(cells: Cells, variant: str, column: str) -> list[float]:
    if column != MEAN:
        return values(cells, variant, column)
    return [math.fsum(row.values()) / len(row) for (name, _), row in cells.items() if name == variant]


def cell_text(found: Sequence[float]) -> str:
    if not found:
        return ""
    digits = ".0f" if max(found) >= 1000 else ".3f"
    spread = f" ({min(found):,{digits}} to {max(found):,{digits}})" if min(found) < max(found) else ""
    return f"{sum(found) / len(found):,{digits}}{spread}"


def tuned_at(experiment: Experiment, lab: Lab) -> str:
    """How the rates of fine-tuning were chosen, where there was any."""
    if all(job.kind != "finetune" for job in jobs_of(experiment.cells(lab))):
        return ""
    return f" Each fine-tuning score is the best of those at rates {' and '.join(f'{r:g}' for r in FINETUNE_RATES)}."


def claim_row(claim: Claim, test: PairedTest) -> list[str]:
    interval = f"{test.low:+.4f} to {test.high:+.4f}" if math.isfinite(test.low) else "needs two seeds"
    where = f" ({', '.join(claim.columns)})" if claim.columns else ""
    p = "below 0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return [claim.text + where, f"{test.mean:+.4f}", interval, str(test.pairs), p, f"**{verdict(test)}**"]


def law_text(experiment: Experiment, series: str, law: dict[str, Any]) -> str:
    low, high = law["interval"]
    interval = "" if low is None else f", 95 % interval {low:.4f} to {high:.4f} over seeds"
    few = "" if law["points"] >= LAW_POINTS else f" Fitted to only {law['points']} points: do not extrapolate it."
    return f"Fitted law: {experiment.fits} is proportional to {series} ^ -{law['power']:.4f}{interval}.{few}"


def write_summary(folder: Path) -> None:
    """results.md: the claims of all experiments that were run into a folder, then their reports."""
    found = {file.parent.name: read_json(file) for file in sorted(folder.glob("*/results.json"))}
    verdicts = [claim["verdict"] for result in found.values() for claim in result["claims"]]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("reproduced", "open", "contrary"))
    parts = [
        "# Results of the experiments",
        f"{plural(len(found), 'experiment')}, {plural(len(verdicts), 'claim')}: {counts}.",
        table(
            ["experiment", "claim", "seeds", "difference", "95 % interval", "verdict"],
            [summary_row(name, claim) for name, result in found.items() for claim in result["claims"]],
        ),
    ]
    for name in found:
        text = (folder / name / "report.md").read_text(encoding="utf-8")
        parts.append(f"#{text}".replace("![plot](plot.png)", f"![{name}](results/{name}.png)").rstrip())
        (folder / "results").mkdir(exist_ok=True)
        copyfile(folder / name / "plot.png", folder / "results" / f"{name}.png")
    write_text(folder / "results.md", "\n\n".join(parts) + "\n")


def summary_row(name: str, claim: Mapping[str, Any]) -> list[str]:
    low, high = claim["interval"]
    interval = "needs two seeds" if low is None else f"{low:+.4f} to {high:+.4f}"
    difference = f"{claim['difference']:+.4f}"
    return [f"[{name}](#{name})", claim["claim"], str(claim["seeds"]), difference, interval, claim["verdict"]]


def draw(experiment: Experiment, cells: Cells, axes: Any) -> bool:
    """Lines over the x of the curves, or a row of dots for each variant."""
    columns = [c for c in columns_of(cells) if c not in NO_SCORES and not c.startswith(TIMED)]
    if experiment.curves:
        draw_curves(experiment, cells, columns, axes)
    else:
        draw_dots(experiment, cells, columns, axes)
    axes.set_title(experiment.name)
    axes.grid(alpha=0.3)
    lines = [line for part in axes.figure.axes for line in part.get_legend_handles_labels()[0]]
    axes.legend(handles=lines, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")
    return True


def draw_curves(experiment: Experiment, cells: Cells, columns: Sequence[str], axes: Any) -> None:
    """A colour for each column, a line style for each series."""
    for (series, places), style in zip(experiment.curves.items(), cycle(("-", "--", ":", "-.")), strict=False):
        for number, column in enumerate(columns):
            points = [(x, found) for name, x in places.items() if (found := values(cells, name, column))]
            if points:
                x, ys = [x for x, _ in points], [found for _, found in points]
                means, label = [sum(y) / len(y) for y in ys], f"{series} {column}".strip()
                axes.plot(x, means, f"o{style}", color=f"C{number}", label=label)
                axes.fill_between(x, [min(y) for y in ys], [max(y) for y in ys], alpha=0.1, color=f"C{number}")
    axes.set_xlabel(experiment.x_label)
    if experiment.fits is not None:
        axes.set_xscale("log")


def draw_dots(experiment: Experiment, cells: Cells, columns: Sequence[str], axes: Any) -> None:
    """Losses below; scores, where there are both, on an axis of their own above."""
    losses, scores = ([c for c in columns if c.startswith(LOWER) == lower] for lower in (True, False))
    above = axes.twiny() if losses and scores else axes
    for number, column in enumerate([*losses, *scores]):
        part = axes if column in losses else above
        for place, name in enumerate(experiment.variants):
            found = values(cells, name, column)
            label = column if name == next(iter(experiment.variants)) else None
            part.plot(found, [place + 0.1 * number] * len(found), "o", color=f"C{number}", label=label)
    axes.set_yticks(range(len(experiment.variants)), list(experiment.variants))
    axes.invert_yaxis()
    axes.set_xlabel(", ".join(losses or scores))
    if above is not axes:
        above.set_xlabel(", ".join(scores))
