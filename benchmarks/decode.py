"""Decoding speed beside every installed peer: python -m benchmarks.decode (takes the fields of DecodeBenchConfig)."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import installed
from benchmarks.results import Row, report
from plume.bench import Report, bench_decode, random_folder, table
from plume.cli.verbs import settings
from plume.config import DecodeBenchConfig, EngineConfig, SamplingConfig
from plume.hf import resolve
from plume.lm import LM
from plume.text import load_tokenizer

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
SAMPLERS: dict[str, dict[str, Any]] = {  # what is compared with greedy decoding
    "temperature 1": {},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "logprobs 5": {"logprobs": 5},
}
BATCHES = (8, 64)


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
                at_least=bar,
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


def sampler_rates(config: DecodeBenchConfig, folder: Path) -> dict[tuple[str, int], float]:
    """Tokens per second of the int8 engine by (way to sample, batch), all of them in turns, the best round of each."""
    lm = LM(folder, load_tokenizer(folder), EngineConfig(precision="int8", threads=config.threads, slots=max(BATCHES)))
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, lm.config.vocab_size, (max(BATCHES), config.prompt_tokens)).tolist()
    plain = SamplingConfig(top_k=None, max_new_tokens=config.new_tokens, ignore_eos=True)
    ways = {"greedy": {"temperature": 0.0}, **SAMPLERS}
    best: dict[tuple[str, int], float] = {}
    for number in range(config.rounds + 1):  # the first round only warms up
        for batch in BATCHES:
            for name, given in ways.items():
                lm.batcher.clear()
                wanted = replace(plain, seed=number, **given)
                start = time.perf_counter()
                lm.generate_batch(prompts[:batch], wanted)
                rate = batch * config.new_tokens / (time.perf_counter() - start)
                best[name, batch] = max(best.get((name, batch), 0.0), rate if number else 0.0)
    lm.close()
    return best


def sampler_rows(config: DecodeBenchConfig) -> Iterator[Row]:
    """Sampling against greedy decoding, both of ours."""
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        folder = random_folder(config.preset, Path(place)) if config.model is None else resolve(config.model)
        rates = sampler_rates(config, folder)
    for batch in BATCHES:
        for name in SAMPLERS:
            mine, greedy = rates[name, batch], rates["greedy", batch]
            yield Row(
                key=f"{name}, batch {batch}",
                what=f"int8, batch {batch}: tokens/s with {name} against greedy",
                figure=mine / greedy,
                at_least=0.9,
                detail=f"{mine:.1f} and {greedy:.1f} tokens/s",
            )


if __name__ == "__main__":
    from rich.console import Console

    config = settings(DecodeBenchConfig, sys.argv[1:])
    measured = bench_decode(config, installed(PEER_PACKAGES))
    Console(width=160).print(table(measured, config))
    report(*rows(measured))
    report(*sampler_rows(config))
