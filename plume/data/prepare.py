"""From texts to token shards: plan, tokenize in parallel, leave out duplicates, split, report. A killed run goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from plume.config import DataConfig, TokenizerConfig, UserError
from plume.data.clean import held_out_index
from plume.data.duplicates import find_duplicates
from plume.data.finish import finish, publish
from plume.data.pool import run_pieces
from plume.data.readers import read_documents
from plume.data.report import make_report
from plume.data.rows import Tally
from plume.data.shards import FORMAT, MANIFEST, Manifest, read_manifest
from plume.data.sources import Piece, find_files, plan_pieces
from plume.files import room_on_disk, stream_aside, write_json
from plume.text import Tokenizer, load_tokenizer, train_tokenizer

LOCK = ".lock"


@dataclass(frozen=True)
class Prepared:
    """A finished folder and the report on how it came about."""

    folder: Path
    manifest: Manifest
    report: dict[str, Any]


def prepare(config: DataConfig) -> Prepared:
    """Turn the texts of a config into shards in its folder; finished work is taken as it is."""
    pieces = plan_pieces(config)
    given = None if config.tokenizer.folder is None else load_tokenizer(config.tokenizer.folder)
    fingerprint = fingerprint_of(config, pieces, given)
    if (done := finished(config, fingerprint)) is not None:
        return done
    config.folder.mkdir(parents=True, exist_ok=True)
    with alone(config.folder):
        if (done := finished(config, fingerprint)) is not None:  # another process may just have done it
            return done
        with room_on_disk(config.folder / MANIFEST):
            work = open_work(config, fingerprint)
            return make(config, work, pieces, fingerprint, given)


def make(config: DataConfig, work: Path, pieces: list[Piece], fingerprint: str, given: Tokenizer | None) -> Prepared:
    began = time.perf_counter()
    tokenizer = the_tokenizer(config, work, given)
    if config.clean.held_out and not (work / "held_out").is_file():
        with stream_aside(work / "held_out") as stream:
            stream.write(held_out_index(config).tobytes())
    run_pieces(config, work, [p for p in pieces if not is_done(work, p)], sum(p.size for p in pieces))
    results = [json.loads((work / f"{p.number:05}.json").read_text()) for p in pieces]
    if not any(r["entries"] for r in results):
        raise nothing_left(config, work, [Tally.of(r["left_out"]) for r in results])
    dropped = find_duplicates(config.clean, work, [r["entries"] for r in results])
    manifest = finish(config, work, pieces, dropped, tokenizer, fingerprint)
    report = make_report(config, pieces, results, dropped, manifest, time.perf_counter() - began)
    publish(config.folder, work, manifest, report)
    return Prepared(config.folder, manifest, report)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time in a folder; the others wait and say so."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        Console(stderr=True).print(f"another process prepares {folder}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fingerprint_of(config: DataConfig, pieces: list[Piece], given: Tokenizer | None) -> str:
    """The same for the same settings and unchanged files, wherever and however they are prepared."""
    tokenizer = config.tokenizer if given is None else given.hash
    indifferent = {"folder": Path(), "tokenizer": TokenizerConfig(), "workers": None, "on": "local", "budget": None}
    settings = repr(replace(config, overwrite=False, **indifferent))  # type: ignore[arg-type]
    files = {path for piece in pieces for part in piece.parts for path in (part.path, part.target) if path is not None}
    files |= {str(path) for spec in config.clean.held_out for path in find_files(spec)}
    state = [(f, s.st_size, s.st_mtime_ns) for f in sorted(files) if not f.startswith("hub:") for s in [Path(f).stat()]]
    return hashlib.sha256(repr((FORMAT, settings, tokenizer, state)).encode()).hexdigest()


def finished(config: DataConfig, fingerprint: str) -> Prepared | None:
    if not (config.folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(config.folder)
    if manifest.fingerprint == fingerprint:
        if planned(config.folder / ".work") == fingerprint:  # killed when all was done but the tidying up
            shutil.rmtree(config.folder / ".work", ignore_errors=True)
        return Prepared(config.folder, manifest, json.loads((config.folder / "report.json").read_text()))
    if not config.overwrite:
        raise UserError(
            f"{config.folder} holds data prepared from other texts or settings; name another folder for it, "
            "or have it replaced: --overwrite of `plume prepare`, --data.overwrite of a run"
        )
    return None


def open_work(config: DataConfig, fingerprint: str) -> Path:
    """The folder of unfinished work: the one of the run before, if that was the same run."""
    work = config.folder / ".work"
    if planned(work) not in (None, fingerprint):
        if any(work.glob("[0-9]*.json")) and not config.overwrite:
            raise UserError(
                f"{config.folder} holds unfinished data of other texts or settings; finish that, name another "
                "folder, or have it dropped: --overwrite of `plume prepare`, --data.overwrite of a run"
            )
        shutil.rmtree(work)
    work.mkdir(exist_ok=True)
    for half_written in work.glob(".[0-9]*"):
        half_written.unlink(missing_ok=True)
    write_json(work / "plan.json", {"fingerprint": fingerprint})
    return work


def planned(work: Path) -> str | None:
    """The fingerprint of the run that a work folder belongs to."""
    plan = work / "plan.json"
    return str(json.loads(plan.read_text())["fingerprint"]) if plan.is_file() else None


def the_tokenizer(config: DataConfig, work: Path, given: Tokenizer | None) -> Tokenizer:
    """The given tokenizer, or one trained on these texts; a copy goes with the data."""
    folder = work / "tokenizer"
    if folder.is_dir():
        return load_tokenizer(folder)
    with Console(stderr=True).status(f"training a tokenizer ({config.tokenizer.kind}) on the texts"):
        tokenizer = train_tokenizer(config.tokenizer, training_texts(config, work)) if given is None else given
    half = work / ".tokenizer"
    shutil.rmtree(half, ignore_errors=True)
    tokenizer.save(half)
    half.rename(folder)
    return tokenizer


def training_texts(config: DataConfig, work: Path) -> Iterator[str]:
    tally, count = Tally(), 0
    for document in read_documents(config, tally):
        count += 1
        yield document.text
        if document.target is not None:
            yield document.target
    if not count:
        raise nothing_left(config, work, [tally])


def nothing_left(config: DataConfig, work: Path, tallies: list[Tally]) -> UserError:
    """Why there is no document at all; there is nothing to go on with either."""
    shutil.rmtree(work)
    if [p.name for p in config.folder.iterdir()] == [LOCK]:
        shutil.rmtree(config.folder)
    tally = Tally()
    for other in tallies:
        tally.merge(other)
    reasons = [f"{count} x {reason}; first at {tally.first[reason]}" for reason, count in tally.counts.most_common()]
    return UserError("\n  ".join([f"no document is left of {', '.join(config.paths)}", *reasons]))


def is_done(work: Path, piece: Piece) -> bool:
    return (work / f"{piece.number:05}.json").is_file()
