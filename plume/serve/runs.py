"""Training runs as the page shows them: curves, samples, live news; and their checkpoints as models."""

from __future__ import annotations

import asyncio
import re
import time
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from plume.config import ServeConfig, UserError
from plume.generate.lm import LM
from plume.serve.models import Origin, engine_settings
from plume.text import load_tokenizer
from plume.train.runs import RECIPE, SAMPLES, metrics_file, read_metrics, read_run
from plume.weights import load_model

QUIET = 300.0  # seconds without a line after which an unfinished run counts as stopped
EVERY = 1.0  # seconds between two looks at a run's files
STEP = re.compile(r"step-(\d{8,})")


class Runs:
    """The run folders below one folder. Names from requests are looked up in a listing, never joined to a path."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._seen: dict[str, tuple[int, int]] = {}  # last step and restarts, by run

    def folders(self) -> dict[str, Path]:
        if self.folder is None or not self.folder.is_dir():
            return {}
        return {path.parent.name: path.parent for path in sorted(self.folder.glob(f"*/{RECIPE}"))}

    def listing(self) -> list[dict[str, Any]]:
        rows = [self._about(name, folder) for name, folder in self.folders().items()]
        return sorted(rows, key=lambda row: row["age"])

    def _about(self, name: str, folder: Path) -> dict[str, Any]:
        try:
            info = read_run(folder)
        except (UserError, ValueError, OSError):
            return {"name": name, "step": None, "running": False, "age": 1e9, "restarts": 0}
        file = metrics_file(folder)
        age = time.time() - file.stat().st_mtime if file.is_file() else 1e9
        last, restarts = self._seen.get(name, (0, 0))
        restarts += info.step < last
        self._seen[name] = (info.step, restarts)
        done = info.model or (info.steps is not None and info.step >= info.steps)
        return {
            "name": name,
            "step": info.step,
            "steps": info.steps,
            "loss": info.loss,
            "validation": info.validation,
            "tokens": info.tokens,
            "seconds": info.seconds,
            "running": not done and age < QUIET,
            "age": round(age, 1),
            "restarts": restarts,
        }

    def checkpoints(self) -> dict[str, Origin]:
        """Every checkpoint of every run that has a model folder, by the name it is asked for."""
        found: dict[str, Origin] = {}
        for name, folder in self.folders().items():
            if not (folder / "model" / "config.json").is_file() or not (folder / "checkpoints").is_dir():
                continue
            steps = sorted(int(m[1]) for path in (folder / "checkpoints").iterdir() if (m := STEP.fullmatch(path.name)))
            found |= {f"{name}@{step}": Origin(str(folder), run=name, step=step) for step in steps}
        return found

    async def follow(self, folder: Path, going_on: Callable[[], bool]) -> AsyncIterator[dict[str, Any]]:
        """All records, then new ones as they come; all again, marked so, when the run has gone back to a checkpoint."""
        sent, first = (0, 0), True
        while going_on():
            points, written = await asyncio.to_thread(lambda: (curve(folder), samples(folder)))
            if len(points) < sent[0]:
                sent, first = (0, 0), True
            if first or (len(points), len(written)) != sent:
                yield {"reset": first, "records": [*points[sent[0] :], *written[sent[1] :]]}
            sent, first = (len(points), len(written)), False
            await asyncio.sleep(EVERY)


def curve(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run under the page's names; a validation stands where the training was then."""
    rows: list[dict[str, Any]] = []
    names = {"loss": "loss", "validation_loss": "validation", "lr": "rate", "gradient_norm": "norm",
             "tokens_per_second": "speed", "tokens": "tokens", "seconds": "seconds"}  # fmt: skip
    at: dict[str, Any] = {"tokens": 0, "seconds": 0}
    for line in read_metrics(folder):
        row = {ours: line[theirs] for theirs, ours in names.items() if isinstance(line.get(theirs), int | float)}
        row = {name: value for name, value in row.items() if value == value and abs(value) < 1e300}
        at |= {name: row[name] for name in ("tokens", "seconds") if name in row}
        rows.append({"step": line["step"], **at, **row})
    return rows


def samples(folder: Path) -> list[dict[str, Any]]:
    """What the model wrote on the way."""
    file = folder / SAMPLES
    if not file.is_file():
        return []
    parts = re.split(r"^--- step (\d+)\n", file.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"step": int(step), "sample": text.strip()[:2000]} for step, text in pairs]


def open_checkpoint(origin: Origin, config: ServeConfig) -> LM:
    """A checkpoint as a model: the run's own model folder with the weights of that step."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = Path(origin.place)
    model = load_model(folder / "model")
    weights = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = FileSystemReader(folder / "checkpoints" / f"step-{origin.step:08d}")
        load(dict(weights), storage_reader=reader, no_dist=True)
    return LM(None, load_tokenizer(folder / "model"), engine_settings(config), model=model)
