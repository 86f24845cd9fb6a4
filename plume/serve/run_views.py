"""Training runs as the page shows them: metrics, samples, live updates; and their checkpoints as models."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from plume.config import UserError
from plume.hf import openable_steps
from plume.serve.served_models import Origin
from plume.util.run_folder import RECIPE, SAMPLES, metrics_file, metrics_rows, read_run, token_loss

QUIET = 300.0  # seconds without a line after which an unfinished run counts as stopped
EVERY = 1.0  # seconds between two readings of a run's files
LAST_BYTES = 256  # compared at the next reading: a run that was resumed has written others
NAMES = {
    "loss": "loss",
    "validation_loss": "validation",
    "validation_bits_per_byte": "bits",
    "lr": "rate",
    "gradient_norm": "norm",
    "tokens_per_second": "speed",
    "tokens": "tokens",
    "seconds": "seconds",
}
KEEP_ALIVE = 10  # readings without news after which a comment is sent


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
            "tokenizer": info.tokenizer,
            "masked": info.masked,
            "tokens": info.tokens,
            "seconds": info.seconds,
            "running": not done and age < QUIET,
            "age": round(age, 1),
            "restarts": restarts,
        }

    def checkpoints(self) -> dict[str, Origin]:
        """Every checkpoint of every run, by its name RUN@STEP."""
        found: dict[str, Origin] = {}
        for name, folder in self.folders().items():
            steps = openable_steps(folder)
            found |= {f"{name}@{step}": Origin(f"{folder}@{step}", run=name, step=step) for step in steps}
        return found

    async def follow(
        self, folder: Path, serving: Callable[[], bool], deadline: float
    ) -> AsyncIterator[dict[str, Any] | None]:
        """All records, then new ones; all again, with reset, when the run was resumed from an earlier step."""
        tail, first, quiet, shown = MetricsTail(folder), True, 0, 0
        while serving() and time.monotonic() < deadline:
            (again, points), written = await asyncio.to_thread(lambda: (tail.read(), samples(folder)))
            if again:
                first, shown = True, 0
            if first or points or len(written) != shown:
                yield {"reset": first, "records": [*points, *written[shown:]]}
                quiet = 0
            elif quiet >= KEEP_ALIVE:
                yield None
                quiet = 0
            shown, first, quiet = len(written), False, quiet + 1
            await asyncio.sleep(EVERY)


class MetricsTail:
    """The rows added to a run's metrics since the last reading; all of them where the file was cut or replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._start_again()

    def _start_again(self) -> None:
        self._read, self._end = 0, b""  # bytes read, and the last of them
        self._at: dict[str, Any] = {"tokens": 0, "seconds": 0}

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether it starts again, and the new rows. A last line that is not whole is left for the next time."""
        path = metrics_file(self.folder)
        if not path.is_file():
            return False, []
        with path.open("rb") as file:
            file.seek(self._read - len(self._end))
            again = file.read(len(self._end)) != self._end
            if again:
                self._start_again()
                file.seek(0)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read, self._end = self._read + len(new), (self._end + new)[-LAST_BYTES:]
        return again, [self._point(row) for row in metrics_rows(new.decode("utf-8", "replace"))]

    def _point(self, line: dict[str, Any]) -> dict[str, Any]:
        """A row under the page's names; a validation has the tokens and seconds of the row before it."""
        losses = {f"{prefix}loss": token_loss(line, prefix) for prefix in ("", "validation_")}
        line = {**line, **losses}
        row = {ours: line[theirs] for theirs, ours in NAMES.items() if isinstance(line.get(theirs), int | float)}
        row = {name: value for name, value in row.items() if value == value and abs(value) < 1e300}
        self._at |= {name: row[name] for name in ("tokens", "seconds") if name in row}
        return {"step": line["step"], **self._at, **row}


def curve(folder: Path) -> list[dict[str, Any]]:
    """All metrics of a run."""
    return MetricsTail(folder).read()[1]


def samples(folder: Path) -> list[dict[str, Any]]:
    """Texts that the model generated during training."""
    file = folder / SAMPLES
    if not file.is_file():
        return []
    parts = re.split(r"^--- step (\d+)\n", file.read_text(encoding="utf-8", errors="replace"), flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"step": int(step), "sample": text.strip()[:2000]} for step, text in pairs]
