"""From .jsonl to token shards against `datasets` map with `tokenizers`, and with two workers against one, interleaved;
and peak memory over input size.

    python -m benchmarks.prepare [--vocabulary FOLDER] [--megabytes 50] [--large 500] [--rounds 3] [--only workers]

FOLDER holds a vocab.json and merges.txt: GPT-2's, or else ones learned from Python's source. Every run is a process
of its own; its memory is that of its whole tree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.results import Row, made_text, real, report
from plume.config import TokenizerConfig
from plume.data.sources import find_files
from plume.text import train_tokenizer

WORKERS = 2
OURS = """
import sys
from pathlib import Path
from plume.config import DataConfig, TokenizerConfig
from plume.data import prepare
text, out, vocabulary, workers = sys.argv[1:]
tokenizer = TokenizerConfig(folder=Path(vocabulary))
prepare(DataConfig(paths=(text,), folder=Path(out), tokenizer=tokenizer, workers=int(workers)))
"""
# The usual script: map in processes, then one memory-mapped file per split, filled from Arrow without a copy per row.
THEIRS = """
import os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import datasets, numpy as np
from tokenizers import ByteLevelBPETokenizer
text, out, vocabulary, workers = sys.argv[1:]
datasets.disable_progress_bars()
tokenizer = ByteLevelBPETokenizer(f"{vocabulary}/vocab.json", f"{vocabulary}/merges.txt")._tokenizer
def encode(rows):
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = [[*e.ids, end] for e in tokenizer.encode_batch_fast(rows["text"])]
    return {"ids": ids, "len": [len(i) for i in ids]}
data = datasets.load_dataset("json", data_files=text, split="train", cache_dir=out)
data = data.train_test_split(test_size=0.01, seed=1)
data = data.map(encode, batched=True, num_proc=int(workers), remove_columns=["text"])
for split, rows in data.items():
    rows = rows.with_format("arrow")
    total = int(rows[:]["len"].to_numpy().sum())
    shard = np.memmap(f"{out}/{split}.bin", dtype=np.uint16, mode="w+", shape=(total,))
    place = 0
    for table in rows.iter(batch_size=1000):
        ids = table["ids"].combine_chunks().flatten().to_numpy()
        shard[place : place + len(ids)] = ids
        place += len(ids)
    assert place == total
    shard.flush()
"""


def write_corpus(path: Path, megabytes: int) -> None:
    """The standard library in documents of about 2 kB, over and over, each time a little different."""
    text = "".join(p.read_text(encoding="utf-8", errors="replace") for p in find_files("python:stdlib"))
    size, number = 0, 0
    with path.open("w") as stream:
        while size < megabytes << 20:
            start = number * 2000 % (len(text) - 2000)
            document = (
                text[start : start + 2000].replace("self", f"me{number % 97}").replace("the", f"the{number // 6000}")
            )
            size += stream.write(json.dumps({"text": f"# {number}\n{document}"}) + "\n")
            number += 1


def own_vocabulary(place: Path) -> Path:
    """One like GPT-2's, where that is not at hand."""
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=16_384), [made_text(3_000_000)])
    tokenizer.save(place / "vocabulary")
    return place / "vocabulary"


def cpu_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(script: str, *words: str, interval: float = 0.05) -> tuple[float, float, float]:
    """(seconds, seconds of processor, peak megabytes) of a process and its children, looked at every interval."""
    began, used, most = time.perf_counter(), cpu_seconds(), 0
    process = psutil.Popen([sys.executable, "-c", script, *words], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # a child may have just ended
            most = max(most, sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]))
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(interval)
    if process.returncode != 0:
        raise SystemExit(process.returncode)
    return time.perf_counter() - began, cpu_seconds() - used, most / 1e6


def measure_speed(text: Path, vocabulary: str, rounds: int) -> None:
    megabytes, ratios = text.stat().st_size / 1e6, []
    for n in range(rounds):
        speeds = {}
        for name, script in (("plume", OURS), ("datasets + tokenizers", THEIRS)):
            out = text.with_name(f"{name.split()[0]}{n}")
            seconds, used, peak = run(script, str(text), str(out), vocabulary, str(WORKERS))
            speeds[name] = megabytes / seconds
            print(f"  {name}: {speeds[name]:.1f} MB/s, {used:.0f} s of processor, peak {peak:.0f} MB", flush=True)
        ratios.append(speeds["plume"] / speeds["datasets + tokenizers"])
        print(f"round {n + 1}: ratio {ratios[-1]:.2f}", flush=True)
    report(
        Row(
            key="speed",
            what=".jsonl to token shards: MB/s against `datasets` map with `tokenizers`",
            figure=statistics.median(ratios),
            at_least=2.5,
            detail=f"rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}",
        )
    )


def measure_workers(text: Path, vocabulary: str, rounds: int) -> None:
    megabytes, ratios = text.stat().st_size / 1e6, []
    for n in range(rounds):
        seconds = {}
        for workers in (1, WORKERS):
            out = text.with_name(f"workers{workers}-{n}")
            # listing all processes takes 10 ms, which two workers on two cores would wait for
            seconds[workers], used, _ = run(OURS, str(text), str(out), vocabulary, str(workers), interval=60)
            speed = megabytes / seconds[workers]
            print(f"  {workers} worker(s): {speed:.1f} MB/s, {used:.0f} s of processor", flush=True)
            shutil.rmtree(out)
        ratios.append(seconds[1] / seconds[WORKERS])
        print(f"round {n + 1}: {WORKERS} workers are {ratios[-1]:.2f} times as fast as one", flush=True)
    report(
        Row(
            key="workers",
            what=f".jsonl to token shards: MB/s with {WORKERS} workers against one, {text.stat().st_size >> 20} MB",
            figure=statistics.median(ratios),
            at_least=1.8,
            detail=f"rounds {', '.join(f'{ratio:.2f}' for ratio in ratios)}",
        )
    )


def measure_memory(small: Path, large: Path, vocabulary: str) -> None:
    peaks, sizes = {}, {}
    for path in (small, large):
        seconds, _, peaks[path] = run(OURS, str(path), f"{path}.out", vocabulary, str(WORKERS))
        sizes[path] = path.stat().st_size
        megabytes = sizes[path] / 1e6
        print(f"plume on {megabytes:.0f} MB: {megabytes / seconds:.1f} MB/s, peak {peaks[path]:.0f} MB", flush=True)
    report(
        Row(
            key="memory",
            what=f"peak memory for {sizes[large] >> 20} MB of text, against {sizes[small] >> 20} MB",
            figure=peaks[large] / peaks[small],
            at_most=1.1,
            detail=f"{peaks[large]:.0f} and {peaks[small]:.0f} MB",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=Path, default=real("tokenizers", "gpt2"))
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--large", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["speed", "workers", "memory"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        vocabulary = str(own_vocabulary(base) if args.vocabulary is None else args.vocabulary)
        small, large = base / "small.jsonl", base / "large.jsonl"
        write_corpus(small, args.megabytes)
        if args.only in (None, "speed"):
            measure_speed(small, vocabulary, args.rounds)
        if args.large:
            write_corpus(large, args.large)
        if args.large and args.only in (None, "workers"):
            measure_workers(large, vocabulary, args.rounds)
        if args.large and args.only in (None, "memory"):
            measure_memory(small, large, vocabulary)


if __name__ == "__main__":
    main()
