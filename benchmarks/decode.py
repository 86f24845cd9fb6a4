"""Decoding speed beside every installed peer: python -m benchmarks.decode (takes the fields of DecodeBenchConfig)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.machine import peer_bar
from benchmarks.peers import installed
from benchmarks.results import Row, report
from plume.bench import Report, bench_decode, table
from plume.cli.verbs import settings
from plume.config import DecodeBenchConfig

PEER_PACKAGES = ("llama_cpp", "ctranslate2", "transformers", "onnxruntime")
SAME = {"float32": "ctranslate2 float32", "int8": "ctranslate2 int8"}  # the peer in the precision of ours
BARS = {  # (precision of ours, job, engine) -> how many times as fast
    ("float32", "batch 1", "llama.cpp f32"): 1.1,
    ("int8", "batch 1", "llama.cpp q8_0"): 1.25,
    ("int8", "batch 1", "llama.cpp q4_0"): 1.0,
    ("int8", "batch 8", "llama.cpp q8_0"): 1.25,
    ("int4", "batch 1", "plume int8"): 1.5,
    ("int4", "batch 8", "plume int8"): None,
    ("int4", "prefill", "plume int8"): 0.9,
    ("int4", "batch 1", "llama.cpp q4_0"): 1.25,
    ("int4", "batch 1", "llama.cpp iq4_nl"): 1.25,
    **{(precision, job, peer): 2.0 for precision, peer in SAME.items() for job in ("batch 1", "batch 8")},
    ("float24", "batch 1", "plume float32"): None,
    **{
        (precision, job, peer): None
        for precision, peers in (
            ("float24", ("llama.cpp f32", "ctranslate2 float32", "transformers float32")),
            ("float32", ("transformers float32",)),
            ("int8", ("transformers float32",)),
        )
        for peer in peers
        for job in ("batch 1", "batch 8")
    },
}


def rows(found: Report) -> Iterator[Row]:
    """Each bar with its ratio; prefill against the best peer; the share of the bandwidth; attention's growth."""
    engines = {row["engine"]: row for row in found.rows}
    for (precision, job, peer), bar in BARS.items():
        mine, theirs = engines[f"plume {precision}"].get(job), engines.get(peer, {}).get(job)
        if mine and theirs:
            yield Row(
                key=f"{job}, {precision}, {peer}",
                what=f"{job}, {precision}: tokens/s against {peer}",
                figure=mine / theirs,
                at_least=bar if peer.startswith("plume") else peer_bar(bar),
                detail=f"{mine:.1f} and {theirs:.1f} tokens/s",
            )
    peers = {name: row["prefill"] for name, row in engines.items() if not name.startswith("plume") and row["prefill"]}
    ours = {name: row["prefill"] for name, row in engines.items() if name.startswith("plume")}
    if peers:
        mine, theirs = max(ours, key=ours.__getitem__), max(peers, key=peers.__getitem__)
        yield Row(
            key="prefill",
            what="reading a long prompt, against the best peer",
            figure=ours[mine] / peers[theirs],
            at_least=1.0,
            detail=f"{mine} {ours[mine]:.0f}, {theirs} {peers[theirs]:.0f} tokens/s",
        )
    for name, bandwidth in found.bandwidths.items():
        precision = name.removeprefix("plume ")
        yield Row(
            key=f"bandwidth, {precision}",
            what=f"batch 1, {precision}: weights read per second, against a loop that only reads as many bytes",
            figure=100 * engines[name]["bandwidth"],
            unit="%",
            digits=0,
            at_least=None if precision == "int4" else 85,
            detail=f"the read loop: {bandwidth / 1e9:.1f} GB/s",
        )
    for length, milliseconds in found.growth.items():
        yield Row(key=f"context {length}", what=f"int8, a token behind {length} others", figure=milliseconds, unit="ms")


if __name__ == "__main__":
    from rich.console import Console

    config = settings(DecodeBenchConfig, sys.argv[1:])
    measured = bench_decode(config, installed(PEER_PACKAGES))
    Console(width=160).print(table(measured, config))
    report(*rows(measured))
