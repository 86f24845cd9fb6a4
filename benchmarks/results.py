"""What a benchmark hands on: rows, each a promise with its figure and its bar; and where it finds real texts."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real texts and vocabularies; not part of the project
ROWS_FILE = "PLUME_BENCH_ROWS"  # the variable that says where `python -m benchmarks` wants the rows


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. Without a bar it is only reported."""

    key: str  # stays the same from run to run
    what: str
    figure: float
    unit: str = "x"
    digits: int = 2  # shown behind the point
    at_least: float | None = None
    at_most: float | None = None
    detail: str = ""  # what the figure was made of

    @property
    def met(self) -> bool | None:
        if self.at_least is None and self.at_most is None:
            return None
        low = self.at_least is None or self.figure >= self.at_least
        return low and (self.at_most is None or self.figure <= self.at_most)

    @property
    def bar(self) -> str:
        words = {"at least": self.at_least, "at most": self.at_most}
        return ", ".join(f"{word} {value:.3g}" for word, value in words.items() if value is not None)

    @property
    def shown(self) -> str:
        return f"{self.figure:,.{self.digits}f} {self.unit}".strip()


def report(*rows: Row) -> None:
    """Say what was found, and leave it for `python -m benchmarks` if that is who asked."""
    width = max((len(row.what) for row in rows), default=0)
    for row in rows:
        verdict = {None: "", True: f"({row.bar}: met)", False: f"({row.bar}: MISSED)"}[row.met]
        print(f"{row.what:{width}}  {row.shown:>12}  {verdict}  {row.detail}".rstrip(), flush=True)
    if file := os.environ.get(ROWS_FILE):
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def real(*path: str) -> Path | None:
    """A file or folder of the real data, if it is there."""
    found = SHARED.joinpath(*path)
    return found if found.exists() else None


def skip(reason: str) -> NoReturn:
    """End without figures where something is missing that cannot be made."""
    print(f"skipped: {reason}")
    sys.exit(0)


def made_text(characters: int) -> str:
    """Python's own source: real text that every machine has."""
    from plume.data.sources import find_files

    pieces, size = [], 0
    for file in find_files("python:stdlib"):
        pieces.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(pieces[-1])
        if size >= characters:
            break
    return "".join(pieces)[:characters]
