"""Exact and near duplicates over any number of documents: MinHash signatures, bands, and one pass per band on disk."""

# N documents, R runs of words in one, P hash functions

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plume.config import CleanConfig
from plume.data.shards import mapped
from plume.data.words import mixed, run_hashes

RUN = 5  # words
FUNCTIONS = 128
ROWS = 8  # of a band: two documents meet when all rows of some band agree
AT_ONCE = 1 << 22  # keys sorted at a time, which bounds the memory
_random = np.random.Generator(np.random.Philox(key=20260101))
FACTORS = _random.integers(1, 1 << 64, FUNCTIONS, dtype=np.uint64) | np.uint64(1)  # (P,)
OFFSETS = _random.integers(0, 1 << 64, FUNCTIONS, dtype=np.uint64)
Keys = npt.NDArray[np.uint64]


def signature(text: str) -> npt.NDArray[np.uint32]:
    """The smallest value of each hash function over the text's runs of words, (P,).

    Two signatures agree in about the share of runs that the texts have in common.
    """
    runs = run_hashes(text, RUN)
    smallest = np.full(FUNCTIONS, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(runs), 4096):
        block = runs[start : start + 4096]
        np.minimum(smallest, (FACTORS[:, None] * block + OFFSETS[:, None]).min(axis=1), out=smallest)  # (P, R)
    return (smallest >> np.uint64(32)).astype(np.uint32)


def find_duplicates(config: CleanConfig, work: Path, entries: list[int]) -> npt.NDArray[np.bool_]:
    """(N,): whether a document repeats an earlier one, over the pieces of a work folder."""
    dropped = np.zeros(sum(entries), np.bool_)
    if config.duplicates == "keep":
        return dropped
    hashes = [mapped(work / f"{n:05}.hashes", "<u8") for n in range(len(entries))]
    for _, repeats in same_keys(hashes):
        dropped[repeats] = True
    if config.duplicates == "near":
        signatures = Signatures(work, entries)
        for band in range(FUNCTIONS // ROWS):
            for firsts, repeats in same_keys(signatures.band(band)):
                alike = signatures.agreement(firsts, repeats) >= config.near
                dropped[repeats[alike]] = True
    return dropped


def same_keys(columns: list[Keys]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(first document with a key, later document with it) for all keys that repeat, a share of the keys at a time."""
    total = sum(len(c) for c in columns)
    shares = -(-total // AT_ONCE)
    for share in range(shares):
        keys, documents, base = list[Keys](), list[npt.NDArray[np.int64]](), 0
        for column in columns:
            mine = np.flatnonzero(column % np.uint64(shares) == share) if shares > 1 else np.arange(len(column))
            keys.append(column[mine])
            documents.append(base + mine)
            base += len(column)
        key, document = np.concatenate(keys), np.concatenate(documents)
        order = np.argsort(key, kind="stable")
        key, document = key[order], document[order]
        new = np.ones(len(key), np.bool_)
        new[1:] = key[1:] != key[:-1]
        first = document[np.maximum.accumulate(np.where(new, np.arange(len(key)), 0))]
        yield first[~new], document[~new]


class Signatures:
    """The signatures of all documents, on disk."""

    def __init__(self, work: Path, entries: list[int]) -> None:
        self.tables = [mapped(work / f"{n:05}.signatures", "<u4").reshape(-1, FUNCTIONS) for n in range(len(entries))]
        self.edges = np.cumsum([0, *entries])

    def band(self, band: int) -> list[Keys]:
        """One key per document from the rows of a band."""
        columns: list[Keys] = []
        for table in self.tables:
            key = np.zeros(len(table), np.uint64)
            for row in range(band * ROWS, (band + 1) * ROWS):
                key = mixed(key + table[:, row])
            columns.append(key)
        return columns

    def rows(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        piece = np.searchsorted(self.edges, documents, side="right") - 1
        return np.stack([self.tables[p][d - self.edges[p]] for p, d in zip(piece, documents, strict=True)])

    def agreement(self, firsts: npt.NDArray[np.int64], repeats: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        if not len(firsts):
            return np.empty(0)
        return np.concatenate(
            [
                (self.rows(firsts[i : i + 4096]) == self.rows(repeats[i : i + 4096])).mean(axis=1)
                for i in range(0, len(firsts), 4096)
            ]
        )
