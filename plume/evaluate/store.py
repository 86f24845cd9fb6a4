"""Answers already found, in one file: what was scored once is not scored again, whatever ended the run."""

from __future__ import annotations

import hashlib
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from plume.config import UserError
from plume.evaluate.reading import Score
from plume.evaluate.scoring import Answer, Request, Scorer

SCORING = b"2"  # changes with whatever changes a score, so that no older one is taken for it
BLOCK = 2048  # requests looked at together: enough to sort by length, little enough to hold


class Store:
    """Scores and generated texts by request. Without a file it remembers nothing between runs."""

    def __init__(self, path: Path | None, model: str) -> None:
        self.model = model.encode()
        self.fresh, self.reused = 0, 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.file = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            self.file.execute("PRAGMA journal_mode=WAL")
            self.file.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing, a power cut may
            self.file.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} cannot be used as the store of scores ({error}); move it away") from None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def key(self, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(SCORING + self.model, digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def get(self, key: bytes) -> bytes | None:
        row = self.file.execute("SELECT value FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, key: bytes, value: bytes) -> None:
        """Kept at once; a key that is there already would be a defect, and says so."""
        self.file.execute("INSERT INTO scores VALUES (?, ?)", (key, value))

    def scores(self, scorer: Scorer, requests: Sequence[Request]) -> Iterator[Answer]:
        """The score of every request, in any order."""
        unknown: dict[bytes, list[int]] = {}
        for number, request in enumerate(requests):
            key = self.key(b"score", packed(request.context), packed(request.target), bytes([request.filtered]))
            if key in unknown:
                unknown[key].append(number)
            elif (value := self.get(key)) is None:
                unknown[key] = [number]
            else:
                self.reused += 1
                yield number, unpacked(value)
        keys = list(unknown)
        for place, score in scorer.score([requests[unknown[key][0]] for key in keys]):
            self.put(keys[place], as_bytes(score))
            self.fresh += 1
            self.reused += len(unknown[keys[place]]) - 1
            for number in unknown[keys[place]]:
                yield number, score


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def as_bytes(score: Score) -> bytes:
    return score.logprobs.tobytes() + score.best.tobytes() + score.hits.tobytes()


def unpacked(value: bytes) -> Score:
    n = len(value) // 9
    floats = np.frombuffer(value, dtype=np.float32, count=2 * n)
    return Score(floats[:n], floats[n:], np.frombuffer(value, dtype=np.bool_, offset=8 * n))
