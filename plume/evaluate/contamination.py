"""Which items the training data holds: shared runs of words, item by item, and what that does to the score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import DataConfig
from plume.data import open_shards, read_documents
from plume.data.shards import MANIFEST
from plume.data.words import Hashes, run_hashes, word_hashes
from plume.evaluate.kinds import METRICS, headline
from plume.evaluate.metrics import Metric
from plume.evaluate.run import Run
from plume.files import write_rows
from plume.text import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Items by whether any run of words in them stands in the training data."""

    ngram: int
    training_data: list[str]
    dirty: int
    clean: int
    short: int  # with fewer words than a run has: nothing can be said of them, and they count as clean
    overlap: float  # mean share of an item's runs that were found
    metric: str
    all_items: Metric
    clean_items: Metric | None
    dirty_items: Metric | None

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Seen:
        numbers = {name: None if plain[name] is None else Metric(**plain[name]) for name in SUBSETS}
        return cls(**plain | numbers)


SUBSETS = ("all_items", "clean_items", "dirty_items")


def training_texts(places: Sequence[str]) -> Iterator[str]:
    """Every document of prepared folders, decoded, or of texts in any form that `plume prepare` reads."""
    for place in places:
        folder = Path(place).expanduser()
        if not (folder / MANIFEST).is_file():
            config = DataConfig(paths=(place,), folder=Path("."))
            yield from (document.text for document in read_documents(config))
            continue
        tokenizer = load_tokenizer(folder / "tokenizer")
        shards = open_shards(folder, "train", tokenizer_hash=tokenizer.hash)
        for stream in shards.streams:
            for number in range(stream.documents):
                yield tokenizer.decode(stream.document(number).tolist(), skip_special=True)


def found_in(wanted: Hashes, texts: Iterator[str], ngram: int) -> Hashes:
    """Which of some sorted hashes occur in any text. Memory grows with what is looked for, not with the texts."""
    seen = np.zeros(len(wanted), dtype=np.bool_)
    for text in texts:
        runs = run_hashes(text, ngram)
        places = np.searchsorted(wanted, runs)
        places[places == len(wanted)] = 0
        seen[places[wanted[places] == runs]] = True
    return wanted[seen]


def runs_of(text: str, ngram: int) -> Hashes:
    """Every run of the full length; none in a shorter text."""
    return run_hashes(text, ngram) if len(word_hashes(text)) >= ngram else np.empty(0, np.uint64)


def contaminated(run: Run, training_data: Sequence[str], ngram: int, file: Path | None) -> Seen:
    """Looks for the run's items in the training data; the records of items get their overlap."""
    items = list(islice(run.items(run.source), run.config.limit))
    runs = [runs_of(item.text, ngram) for item in items]
    wanted = np.unique(np.concatenate(runs))
    known = found_in(wanted, training_texts(training_data), ngram) if len(wanted) else wanted
    shares = [float(np.isin(r, known).mean()) if len(r) else 0.0 for r in runs]
    for record in run.kept:
        record["overlap"] = shares[record["item"]]
    if file is not None:
        write_rows(file, run.kept)
    dirty = [record for record in run.kept if record["overlap"] > 0]
    clean = [record for record in run.kept if record["overlap"] == 0]
    measure = METRICS[run.task.kind]
    whole = measure(run.task, run.kept)
    name = headline(run.task, run.protocol, whole)
    return Seen(
        ngram=ngram,
        training_data=list(training_data),
        dirty=len(dirty),
        clean=len(clean),
        short=sum(not len(runs[record["item"]]) for record in run.kept),
        overlap=float(np.mean([record["overlap"] for record in run.kept])),
        metric=name,
        all_items=whole[name],
        clean_items=measure(run.task, clean)[name] if clean else None,
        dirty_items=measure(run.task, dirty)[name] if dirty else None,
    )
