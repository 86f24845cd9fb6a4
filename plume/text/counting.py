"""How often each word stands in texts of any size: counted in memory up to a cap, beyond it in sorted runs on disk."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

Counted = tuple[str, int]
BLOCK_CHARACTERS = 1 << 22  # of text counted at once
ENTRY_BYTES = 120  # what a word costs in a dict of counts, beside its letters
MOST_RUNS = 32  # files open at once while merging


def count_words(
    texts: Iterable[str], count: Callable[[list[str]], Mapping[str, int]], *, max_memory_mb: int
) -> Iterator[Counted]:
    """Every word with its count, sorted, the same whatever the cap; `count` counts the words of some texts."""
    cap = max_memory_mb * 1_000_000
    with TemporaryDirectory(prefix="plume-counts-") as folder:
        runs: list[Path] = []
        table: dict[str, int] = {}
        size = 0
        for block in blocks(texts, min(BLOCK_CHARACTERS, cap // 8)):
            for word, seen in count(block).items():
                if word not in table:
                    size += sys.getsizeof(word) + ENTRY_BYTES
                    table[word] = 0
                table[word] += seen
            if size > cap:
                runs.append(_write_run(Path(folder) / f"{len(runs)}-{size}.run", sorted(table.items())))
                table, size = {}, 0
                if len(runs) == MOST_RUNS:
                    runs = [_compacted(runs)]
        yield from _summed([*map(_read_run, runs), iter(sorted(table.items()))])


def blocks(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Texts in groups of about this many characters."""
    block: list[str] = []
    size = 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= characters:
            yield block
            block, size = [], 0
    if block:
        yield block


def _summed(runs: Iterable[Iterator[Counted]]) -> Iterator[Counted]:
    """Sorted runs as one, with the counts of a word added up."""
    for word, same in itertools.groupby(heapq.merge(*runs), key=itemgetter(0)):
        yield word, sum(count for _, count in same)


def _write_run(path: Path, counted: Iterable[Counted]) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(pair)}\n" for pair in counted)
    return path


def _read_run(path: Path) -> Iterator[Counted]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            word, count = json.loads(line)
            yield word, count


def _compacted(runs: list[Path]) -> Path:
    whole = _write_run(runs[0].with_suffix(".merged"), _summed(map(_read_run, runs)))
    for run in runs:
        run.unlink()
    return whole.replace(runs[0])
