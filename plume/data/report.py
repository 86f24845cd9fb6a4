"""What a prepare did: documents, tokens and epochs per source, and what was left out for which reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.table import Table

from plume.config import DataConfig
from plume.data.rows import Tally
from plume.data.shards import Manifest
from plume.data.sources import Piece


def make_report(
    config: DataConfig,
    pieces: list[Piece],
    results: list[dict[str, Any]],
    dropped: npt.NDArray[np.bool_],
    manifest: Manifest,
    seconds: float,
) -> dict[str, Any]:
    duplicates = [int(part.sum()) for part in np.split(dropped, np.cumsum([r["entries"] for r in results])[:-1])]
    sources = [
        describe_source(number, name, pieces, results, duplicates, manifest) for number, name in enumerate(config.paths)
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
    number: int,
    name: str,
    pieces: list[Piece],
    results: list[dict[str, Any]],
    duplicates: list[int],
    manifest: Manifest,
) -> dict[str, Any]:
    tally, mine = Tally(), [i for i, p in enumerate(pieces) if p.source == number]
    for i in mine:
        tally.merge(Tally.of(results[i]["left_out"]))
    for i in mine:
        if duplicates[i]:
            tally.counts["duplicate"] += duplicates[i]
            tally.first.setdefault("duplicate", pieces[i].parts[0].path)
    return {
        "name": name,
        "megabytes": round(sum(pieces[i].size for i in mine) / 1e6, 3),
        "read": sum(results[i].get("read", 0) for i in mine),
        "kept": sum(results[i]["entries"] - results[i]["going_on"] - duplicates[i] for i in mine),
        "tokens": sum(s.tokens for s in manifest.train if s.source == number),
        "validation_tokens": sum(s.tokens for s in manifest.validation if s.source == number),
        "left_out": tally.plain(),
    }


def add_shares(sources: list[dict[str, Any]], config: DataConfig) -> None:
    """Share of training and epochs of each source over the budget, or over as many tokens as there are."""
    tokens = [s["tokens"] for s in sources]
    weights = config.weights if config.weights else tokens
    budget = sum(tokens) if config.budget is None else config.budget
    for source, weight in zip(sources, weights, strict=True):
        share = weight / sum(weights)
        source["share"] = round(share, 6)
        source["epochs"] = round(share * budget / source["tokens"], 4) if source["tokens"] else 0.0


def show_report(report: dict[str, Any]) -> Group:
    """The report as tables for a terminal."""
    table = Table(title=f"{report['folder']}: {report['tokens']:,} training tokens", title_justify="left")
    table.add_column("source", overflow="fold")
    mixed = len(report["sources"]) > 1 or report["sources"][0]["epochs"] != 1.0  # else both would say all and once
    for column in ("MB", "documents", "kept", "tokens", "held out", *(("share", "epochs") if mixed else ())):
        table.add_column(column, justify="right", no_wrap=True)
    lost = Table()
    for column in ("left out of", "why", "first at"):
        lost.add_column(column, overflow="fold")
    lost.add_column("documents", justify="right", no_wrap=True)
    for s in report["sources"]:
        note = " (weight 0: not read)" if s["share"] == 0 else ""
        cells = [f"{s['megabytes']:,.1f}", *(f"{s[k]:,}" for k in ("read", "kept", "tokens", "validation_tokens"))]
        table.add_row(s["name"] + note, *cells, *((f"{s['share']:.1%}", f"{s['epochs']:.2f}") if mixed else ()))
        for reason, found in s["left_out"].items():
            lost.add_row(s["name"], reason, found["first"], f"{found['count']:,}")
    return Group(table, lost) if lost.row_count else Group(table)
