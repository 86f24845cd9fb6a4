"""From texts to token shards: plan, tokenize in parallel, leave out duplicates, split, report. A killed run resumes."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from plume.config import DataConfig, TokenizerConfig, UserError, takes_fields
from plume.data.batches import generator
from plume.data.clean import find_duplicates, held_out_index
from plume.data.documents import NO_FIELD
from plume.data.finalize import discard, finish, open_mask, publish
from plume.data.pool import kept_workers, run_stage
from plume.data.shards import FORMAT, MANIFEST, WORK, Manifest, Shard, mapped, read_manifest
from plume.data.sources import WorkUnit, file_names, plan_pieces, unread_files, with_absolute_paths
from plume.data.stages import HELD_OUT, ShardMaker, Survey, WordCounter, write_held_out
from plume.data.tables import Tally
from plume.text import Tokenizer, load_tokenizer
from plume.text.tokenizer_training import merge_runs, train_from_counts
from plume.util.console import tell, terminal
from plume.util.devices import cores
from plume.util.files import aside, read_json, room_on_disk, write_json

if TYPE_CHECKING:  # takes longer to import than all of this module, also in every worker
    from rich.console import Group

LOCK = ".lock"
SPREAD = 4  # times the sample that its pieces hold, so that no stretch of the corpus is the whole sample
DROPPED_SHARE = 0.01  # of a source's text from which the loss is reported on the console
UNREAD = "files of other kinds (by their endings, or pipes and devices) were not read"


@dataclass(frozen=True)
class Prepared:
    """A finished folder and the report on how it came about."""

    folder: Path
    manifest: Manifest
    report: dict[str, Any]


@takes_fields(DataConfig)
def prepare(config: DataConfig) -> Prepared:
    """Turn the texts of a config into shards in its folder; finished work is taken as it is."""
    pieces = plan_pieces(config)
    if (config.folder / MANIFEST).is_file():
        return prepare_pieces(config, pieces)
    with kept_workers(config, len(pieces), sum(piece.size for piece in pieces)):
        return prepare_pieces(config, pieces)


def prepare_pieces(config: DataConfig, pieces: list[WorkUnit]) -> Prepared:
    given = None if config.tokenizer.folder is None else load_tokenizer(config.tokenizer.folder)
    fingerprint = fingerprint_of(config, pieces, given)
    if (done := finished(config, fingerprint)) is not None:
        return done
    config.folder.mkdir(parents=True, exist_ok=True)
    with folder_lock(config.folder):
        if (done := finished(config, fingerprint)) is not None:  # another process may just have done it
            return done
        with room_on_disk(config.folder / MANIFEST):
            work = open_work(config, fingerprint, pieces)
            return make(config, work, pieces, fingerprint, given)


def make(config: DataConfig, work: Path, pieces: list[WorkUnit], fingerprint: str, given: Tokenizer | None) -> Prepared:
    began = time.perf_counter()
    if config.clean.decontaminate and not (work / HELD_OUT).is_dir():
        write_held_out(work, held_out_index(config))
    tokenizer = get_tokenizer(config, work, pieces, given)
    results = run_pieces(ShardMaker, config, work, pieces, "prepare", tokenizer)
    if not any(r["entries"] for r in results):
        raise nothing_left(config, work, [Tally.from_dict(r["dropped"]) for r in results])
    find_duplicates(config, work, [r["entries"] for r in results])
    manifest = finish(
        config, work, pieces, results, tokenizer, {"fingerprint": fingerprint, "settings": settings_of(config, given)}
    )
    report = make_report(config, work, pieces, results, manifest, time.perf_counter() - began)
    publish(config.folder, work, manifest, report)
    warn_of_loss(report)
    return Prepared(config.folder, manifest, report)


def run_pieces(
    stage: type[Survey], config: DataConfig, work: Path, pieces: list[WorkUnit], title: str, *setup: Any
) -> list[dict[str, Any]]:
    """The results of a stage for all pieces in order; those of an earlier run are taken as they are."""
    missing = [piece for piece in pieces if not (work / f"{piece.number:05}.json").is_file()]
    before = sum(p.size for p in pieces) - sum(p.size for p in missing)
    tasks = [{"piece": with_absolute_paths(p).to_dict(), "size": p.size} for p in missing]
    run_stage(stage, (config, work.resolve(), *setup), tasks, config, title=title, before=before)
    return [read_json(work / f"{p.number:05}.json") for p in pieces]


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """One process at a time in a folder; the others wait and say so."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(f"another process prepares {folder}; waiting for it", sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def settings_of(config: DataConfig, given: Tokenizer | None = None) -> str:
    """The same for the same settings, given tokenizer and names of texts, wherever and however they are prepared."""
    tokenizer, own = config.tokenizer, ""
    if config.tokenizer.folder is not None:
        tokenizer, own = TokenizerConfig(), (given or load_tokenizer(config.tokenizer.folder)).hash
    indifferent = {"folder": Path(), "workers": None, "backend": "local", "token_budget": None, "overwrite": False}
    settings = replace(config, tokenizer=tokenizer, **indifferent)  # type: ignore[arg-type]
    return hashlib.sha256(repr((FORMAT, settings, own)).encode()).hexdigest()


def fingerprint_of(config: DataConfig, pieces: list[WorkUnit], given: Tokenizer | None) -> str:
    """The same for the same settings, tokenizer and unchanged files."""
    files = {path for piece in pieces for part in piece.parts for path in (part.path, part.target) if path is not None}
    texts = [spec for spec in config.clean.decontaminate if not spec.startswith("hub:")]
    files |= {name for spec in texts for name in file_names(spec)}
    state = [(f, s.st_size, s.st_mtime_ns) for f in sorted(files) if not f.startswith("hub:") for s in [os.stat(f)]]
    return hashlib.sha256(repr((settings_of(config, given), state)).encode()).hexdigest()


def keyed_folder(config: DataConfig) -> DataConfig:
    """The config as it is, or with a folder of its own if its folder was made from other texts or settings."""
    try:
        other = read_manifest(config.folder).settings != settings_of(config)
    except UserError:  # nothing there yet, or not whole
        other = False
    if not other or config.overwrite:
        return config
    return replace(config, folder=config.folder.with_name(f"{config.folder.name}-{settings_of(config)[:8]}"))


def reuse(config: DataConfig) -> Prepared:
    """What was prepared with these settings, also if the texts have changed or are gone since; else `prepare`."""
    if (config.folder / MANIFEST).is_file():
        manifest = read_manifest(config.folder)
        if manifest.settings == settings_of(config):
            return Prepared(config.folder, manifest, read_json(config.folder / "report.json"))
    return prepare(config)


def finished(config: DataConfig, fingerprint: str) -> Prepared | None:
    if not (config.folder / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(config.folder)
        if manifest.fingerprint == fingerprint:
            discard(work_folder(config, fingerprint))  # killed when all was done but the tidying up
            return Prepared(config.folder, manifest, read_json(config.folder / "report.json"))
    except UserError:
        if not config.overwrite:
            raise
        return None
    if not config.overwrite:
        raise UserError(
            f"{config.folder} holds data prepared from other texts or settings; name another folder for it, train on "
            f"it as it is with --prepared {config.folder}, or have it replaced: --overwrite of `plume prepare`, "
            "--data.overwrite of a run"
        )
    return None


def work_folder(config: DataConfig, fingerprint: str) -> Path:
    """Unfinished work bears the name of what it is made from."""
    return config.folder / f"{WORK}-{fingerprint[:16]}"


def open_work(config: DataConfig, fingerprint: str, pieces: list[WorkUnit]) -> Path:
    """The folder of unfinished work: the one of the run before, if that was the same run, cut into the same pieces."""
    work = work_folder(config, fingerprint)
    plan = {"fingerprint": fingerprint, "pieces": hashlib.sha256(repr(pieces).encode()).hexdigest()}
    for other in config.folder.glob(f"{WORK}*"):
        if other == work and read_plan(work) == plan:
            continue
        if other != work and any(other.glob("[0-9]*.json")) and not config.overwrite:
            raise UserError(
                f"{config.folder} holds unfinished data of other texts or settings; finish that, name another "
                "folder, or have it dropped: --overwrite of `plume prepare`, --data.overwrite of a run"
            )
        discard(other)
    if not work.is_dir():
        with aside(work) as new:
            new.mkdir()
            write_json(new / "plan.json", plan)
    for half_written in work.glob(".[0-9]*"):
        half_written.unlink(missing_ok=True)
    return work


def read_plan(work: Path) -> dict[str, Any] | None:
    """The run that a work folder belongs to; None if that cannot be read."""
    try:
        return read_json(work / "plan.json")
    except UserError as error:
        tell(f"{error}; starting the unfinished work again", sys.stderr)
        return None


def get_tokenizer(config: DataConfig, work: Path, pieces: list[WorkUnit], given: Tokenizer | None) -> Tokenizer:
    """The given tokenizer, or one trained on a sample of what is kept; a copy is saved with the data."""
    folder = work / "tokenizer"
    if folder.is_dir():
        return load_tokenizer(folder)
    tokenizer = train_on_sample(config, work, pieces) if given is None else given
    with aside(folder) as half:
        tokenizer.save(half)
    return tokenizer


def train_on_sample(config: DataConfig, work: Path, pieces: list[WorkUnit]) -> Tokenizer:
    """Count the words of documents that are kept, in some pieces and some of their documents, and learn from them."""
    if config.tokenizer.kind == "bytes":
        return train_from_counts(config.tokenizer, [])
    survey = work / "survey"
    survey.mkdir(exist_ok=True)
    if config.clean.decontaminate and not (survey / HELD_OUT).is_dir():
        shutil.copytree(work / HELD_OUT, survey / HELD_OUT)
    entries = [0] * len(pieces)
    if config.clean.duplicates != "keep":
        entries = [r["entries"] for r in run_pieces(Survey, config, survey, pieces, "find duplicates")]
        if any(entries):
            find_duplicates(config, survey, entries)
    wanted = config.tokenizer.sample_mb * 1_000_000
    chosen, share = sample_pieces(pieces, wanted, config.tokenizer.seed)
    firsts = np.cumsum([0, *entries]).tolist()
    tasks = [{"piece": with_absolute_paths(p).to_dict(), "first": firsts[p.number], "size": p.size} for p in chosen]
    setup = (config, survey.resolve(), share, cores() if config.workers is None else config.workers)
    results = run_stage(WordCounter, setup, tasks, config, title=f"count words ({config.tokenizer.kind})")
    tallies = [Tally.from_dict(r["dropped"]) for r in results]
    if not sum(tally.text for tally in tallies):
        raise nothing_left(config, work, tallies)
    tokenizer = train_from_counts(config.tokenizer, merge_runs(sorted(Path(r["run"]) for r in results)))
    shutil.rmtree(survey)
    return tokenizer


def sample_pieces(pieces: list[WorkUnit], wanted: int, seed: int) -> tuple[list[WorkUnit], float]:
    """(pieces of about SPREAD times the wanted bytes, in order; the share of their documents to take)."""
    if sum(p.size for p in pieces) <= wanted:
        return pieces, 1.0
    order = generator(seed, "pieces").permutation(len(pieces)).tolist()
    sizes = np.cumsum([pieces[i].size for i in order])
    count = int(np.searchsorted(sizes, SPREAD * wanted)) + 1
    chosen = sorted(order[:count])
    return [pieces[i] for i in chosen], wanted / sum(pieces[i].size for i in chosen)


def nothing_left(config: DataConfig, work: Path, tallies: list[Tally]) -> UserError:
    """Why there is no document at all; nothing can be prepared then."""
    discard(work)
    if [p.name for p in config.folder.iterdir()] == [LOCK]:
        shutil.rmtree(config.folder)
    tally = Tally()
    for other in tallies:
        tally.merge(other)
    reasons = [f"{count} x {reason}; first at {tally.first[reason]}" for reason, count in tally.counts.most_common()]
    if any(reason.startswith(NO_FIELD) for reason in tally.counts):
        reasons.append("name the field that holds the text: --text-field NAME")
    return UserError("\n  ".join([f"no document is left of {', '.join(config.paths)}", *reasons]))


def make_report(
    config: DataConfig,
    work: Path,
    pieces: list[WorkUnit],
    results: list[dict[str, Any]],
    manifest: Manifest,
    seconds: float,
) -> dict[str, Any]:
    first, mask = 0, open_mask(work, sum(r["entries"] for r in results))
    for piece, result in zip(pieces, results, strict=True):
        repeats, first = mask[first : first + result["entries"]], first + result["entries"]
        sizes = mapped(work / f"{piece.number:05}.sizes", "<i8")
        result["duplicates"], result["duplicate_bytes"] = int(repeats.sum()), int(sizes[repeats].sum())
    sources = [
        describe_source(
            name,
            [(p, r) for p, r in zip(pieces, results, strict=True) if p.source == number],
            [s for s in manifest.train if s.source == number],
            [s for s in manifest.validation if s.source == number],
        )
        for number, name in enumerate(config.paths)
    ]
    add_shares(sources, config)
    megabytes = sum(s["megabytes"] for s in sources)
    return {
        "folder": str(config.folder),
        "fingerprint": manifest.fingerprint,
        "tokenizer": manifest.tokenizer,
        "tokens": sum(s["tokens"] for s in sources),
        "validation_tokens": sum(s["validation_tokens"] for s in sources),
        "documents": sum(s.documents for s in (*manifest.train, *manifest.validation)),
        "shards": len(manifest.train) + len(manifest.validation),
        "seconds": round(seconds, 2),
        "megabytes_per_second": round(megabytes / seconds, 2),
        "sources": sources,
    }


def describe_source(
    name: str, made: list[tuple[WorkUnit, dict[str, Any]]], train: list[Shard], validation: list[Shard]
) -> dict[str, Any]:
    """Documents, tokens and bytes of a source; bytes read are those kept, those dropped and the markup around them."""
    tally = Tally()
    for piece, result in made:
        tally.merge(Tally.from_dict(result["dropped"]))
        if result["duplicates"]:
            tally.add("duplicate", piece.parts[0].path, result["duplicate_bytes"], count=result["duplicates"])
    if made and (unread := unread_files(name)):  # not a part of the bytes read: nobody knows how much of them is text
        tally.add(UNREAD, str(unread[0]), count=len(unread))
    return {
        "name": name,
        "megabytes": round(sum(piece.size for piece, _ in made) / 1e6, 3),
        "read": sum(result.get("read", 0) for _, result in made),
        "kept": sum(result["entries"] - result["continued"] - result["duplicates"] for _, result in made),
        "tokens": sum(shard.tokens for shard in train),
        "validation_tokens": sum(shard.tokens for shard in validation),
        "bytes": {
            "read": tally.read,
            "kept": sum(result["kept_bytes"] - result["duplicate_bytes"] for _, result in made),
            "dropped": tally.bytes.total(),
            "markup": tally.markup,
        },
        "dropped": tally.to_dict()["reasons"],
    }


def dropped_share(source: dict[str, Any]) -> float:
    """Of the bytes of text, without markup."""
    sizes = source["bytes"]
    return sizes["dropped"] / max(1, sizes["kept"] + sizes["dropped"])


def warn_of_loss(report: dict[str, Any]) -> None:
    """One line on the console for each source that lost more than is to be expected."""
    for source in report["sources"]:
        if (share := dropped_share(source)) > DROPPED_SHARE:
            reasons = sorted(source["dropped"].items(), key=lambda item: -item[1]["bytes"])[:3]
            losses = [
                f"\n  {reason}: {shown_bytes(found['bytes'])}, first {found['first']}"
                for reason, found in reasons
                if found["bytes"]
            ]
            warn(f"{share:.1%} of the text of {source['name']} was dropped:{''.join(losses)}")
        if unread := source["dropped"].get(UNREAD):
            warn(f"{unread['count']} {UNREAD}, first {unread['first']}; a path to a file reads it whatever its ending")


def warn(message: str) -> None:
    terminal(sys.stderr).print(f"warning: {message}", style="yellow", soft_wrap=True)


def shown_bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"


def add_shares(sources: list[dict[str, Any]], config: DataConfig) -> None:
    """Share of training and epochs of each source over the budget, or over as many tokens as there are."""
    tokens = [s["tokens"] for s in sources]
    weights = config.weights if config.weights else tokens
    budget = sum(tokens) if config.token_budget is None else config.token_budget
    for source, weight in zip(sources, weights, strict=True):
        share = weight / sum(weights)
        source["share"] = round(share, 6)
        source["epochs"] = round(share * budget / source["tokens"], 4) if source["tokens"] else 0.0


def show_report(report: dict[str, Any]) -> Group:
    """The report as tables for a terminal."""
    from rich.console import Group
    from rich.table import Table

    table = Table(title=f"{report['folder']}: {report['tokens']:,} training tokens", title_justify="left")
    table.add_column("source", overflow="fold")
    mixed = len(report["sources"]) > 1 or report["sources"][0]["epochs"] != 1.0  # else both would say all and once
    for column in ("MB", "documents", "kept", "tokens", "held out", *(("share", "epochs") if mixed else ())):
        table.add_column(column, justify="right", no_wrap=True)
    lost = Table()
    for column in ("dropped from", "reason", "first at"):
        lost.add_column(column, overflow="fold")
    for column in ("documents", "MB"):
        lost.add_column(column, justify="right", no_wrap=True)
    for s in report["sources"]:
        note = " (weight 0: not read)" if s["share"] == 0 else ""
        cells = [f"{s['megabytes']:,.1f}", *(f"{s[k]:,}" for k in ("read", "kept", "tokens", "validation_tokens"))]
        table.add_row(s["name"] + note, *cells, *((f"{s['share']:.1%}", f"{s['epochs']:.2f}") if mixed else ()))
        for reason, found in s["dropped"].items():
            lost.add_row(s["name"], reason, found["first"], f"{found['count']:,}", f"{found['bytes'] / 1e6:,.2f}")
    return Group(table, lost) if lost.row_count else Group(table)
