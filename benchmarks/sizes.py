"""Corpora of real sizes: a terabyte of shards opened and read, many files planned, shards verified, millions of
documents searched for near duplicates.

    python -m benchmarks.sizes [--shards 2048] [--files 50000] [--gigabytes 1] [--documents 5000000]

Shards of the terabyte are sparse files: they take no space on the disk. Signatures take 700 bytes per document.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.results import Row, report
from plume.config import CleanConfig, DataConfig
from plume.data import PackedWindows, open_shards, verify_shards
from plume.data.clean import find_duplicates, sorted_keys
from plume.data.shards import CHUNK, FORMAT, Manifest, Shard, chunk_sums
from plume.data.sources import plan_pieces

SHARD_BYTES = 1 << 29
OPEN_FILES = 256
FAR = 10**9  # the number of a batch far into the corpus
PIECE = 20_000  # documents whose signatures are in one file
MAX_MEGABYTES = 700  # of one worker that searches for near duplicates


def write_shards(folder: Path, shards: int, size: int, content: bytes | None = None) -> None:
    """Prepared data of `size` bytes per shard: zeros that take no space on the disk, or the content over and over."""
    folder.mkdir()
    tokens, documents, made = size // 2, 1000, list[Shard]()
    starts = (np.arange(documents, dtype="<i8") * (tokens // documents)).tobytes()
    for number in range(shards):
        name = f"train-{number:05}"
        file = folder / f"{name}.tokens"
        with file.open("wb") as stream:
            if content is not None:
                stream.writelines([content] * (size // len(content)))
            stream.truncate(size)
        zero = np.full(size // CHUNK, zlib.crc32(bytes(CHUNK)), "<u4")
        sums = (zero if content is None else chunk_sums(file)).tobytes() + np.uint32(zlib.crc32(starts)).tobytes()
        (folder / f"{name}.starts").write_bytes(starts)
        (folder / f"{name}.sums").write_bytes(sums)
        counts = {"tokens": tokens, "documents": documents}
        made.append(Shard(name=name, source=0, **counts, hash=sha256(sums).hexdigest()))
    manifest = Manifest(
        format=FORMAT, tokenizer="t", vocab_size=100, dtype="uint16", separator=None, pairs=False, fingerprint="f",
        settings="s", sources=("x",), weights=(), train=tuple(made), validation=(),
    )  # fmt: skip
    (folder / "data.json").write_text(json.dumps(asdict(manifest)))


def open_and_read(folder: Path) -> tuple[float, float]:
    """(seconds to open the shards, seconds for a batch far into them) under few file descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    began = time.perf_counter()
    windows = PackedWindows(open_shards(folder), 1024, seed=1, document_mask=True)
    opened = time.perf_counter()
    windows.batch(FAR, 8)
    return opened - began, time.perf_counter() - opened


def measure_terabyte(base: Path, shards: int, rounds: int) -> None:
    write_shards(base / "terabyte", shards, SHARD_BYTES)
    times = [in_fresh_process(open_and_read, base / "terabyte") for _ in range(rounds)]
    opened, batch = ([t[i] for t in times] for i in (0, 1))
    what = f"{shards * SHARD_BYTES / 2**40:.3g} TiB of shards under {OPEN_FILES} file descriptors"
    report(
        Row(
            key="open",
            what=f"{what}: open",
            figure=statistics.median(opened),
            unit="s",
            at_most=2.0,
            detail=f"rounds {', '.join(f'{seconds:.2f}' for seconds in opened)}",
        ),
        Row(
            key="batch",
            what=f"{what}: the first batch read, number 10^9",
            figure=1000 * statistics.median(batch),
            unit="ms",
            digits=1,
            at_most=50.0,
            detail=f"rounds {', '.join(f'{1000 * seconds:.1f}' for seconds in batch)}",
        ),
    )


def measure_planning(base: Path, files: int) -> None:
    for folder in range(50):
        (base / "files" / str(folder)).mkdir(parents=True)
        for number in range(files // 50):
            os.close(os.open(base / "files" / str(folder) / f"{number}.txt", os.O_CREAT))
    config = DataConfig(paths=(str(base / "files" / "*" / "*.txt"),), folder=base / "unused")
    began, used = time.perf_counter(), time.process_time()
    pieces = plan_pieces(config)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    assert sum(len(piece.parts) for piece in pieces) == files // 50 * 50
    report(
        Row(
            key="plan",
            what=f"{files:,} files planned",
            figure=seconds,
            unit="s",
            at_most=1.0,
            detail=f"{used:.2f} s of processor",
        )
    )


def measure_verification(base: Path, gigabytes: float, rounds: int) -> None:
    content = np.random.default_rng(0).integers(0, 100, CHUNK, dtype=np.uint16).tobytes()
    size = int(gigabytes * 1e9) // len(content) * len(content)
    write_shards(base / "random", 1, size, content)
    speeds = []
    for _ in range(rounds):
        began = time.perf_counter()
        speeds.append(verify_shards(base / "random") / 1e9 / (time.perf_counter() - began))
    report(
        Row(
            key="verify",
            what=f"`plume data verify`: {gigabytes:g} GB of shards against their hashes",
            figure=statistics.median(speeds),
            unit="GB/s",
            at_least=1.0,
            detail=f"rounds {', '.join(f'{speed:.2f}' for speed in speeds)}",
        )
    )


def write_signatures(work: Path, piece: int, documents: int) -> set[int]:
    """Random signatures; every tenth document repeats an earlier one of its piece, up to a few rows."""
    rng = np.random.default_rng(piece)
    table = rng.integers(0, 1 << 32, (documents, 128), dtype=np.uint32)
    later = np.arange(9, documents, 10)
    table[later] = table[later - 9]
    table[later, rng.integers(0, 128, len(later))] ^= 1
    keys, order = sorted_keys(rng.integers(0, 1 << 63, documents).tolist(), list(table))
    for kind, values in (("signatures", table), ("keys", keys), ("order", order)):
        (work / f"{piece:05}.{kind}").write_bytes(values.tobytes())
    return set((piece * documents + later).tolist())


def search(work: Path, pieces: int) -> tuple[float, float]:
    """(microseconds of processor per document, peak megabytes) of one worker's search for near duplicates."""
    config = DataConfig(paths=("x",), folder=work / "out", workers=1, clean=CleanConfig(duplicates="near"))
    began = time.process_time()
    find_duplicates(config, work, [PIECE] * pieces)
    used = time.process_time() - began
    assert np.fromfile(work / "dropped", np.bool_).sum() == pieces * PIECE // 10
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # ru_maxrss is inherited
    return 1e6 * used / (pieces * PIECE), int(peak) / 1024


def measure_duplicates(base: Path, documents: int) -> None:
    """Of a fifth of the documents and of all."""
    work, found = base / "signatures", dict[int, tuple[float, float]]()
    work.mkdir()
    pieces = max(5, documents // PIECE)
    for piece in range(pieces):
        write_signatures(work, piece, PIECE)
    for some in (pieces // 5, pieces):
        found[some] = in_fresh_process(search, work, some)
    shutil.rmtree(work)
    (few, _), (many, peak) = found.values()
    report(
        Row(
            key="near",
            what=f"near duplicates of {pieces * PIECE:,} documents: time of each, against {pieces // 5 * PIECE:,}",
            figure=many / few,
            at_most=1.5,
            detail=f"{many:.1f} and {few:.1f} microseconds of processor",
        ),
        Row(
            key="near_memory",
            what=f"near duplicates of {pieces * PIECE:,} documents: peak memory of a worker",
            figure=peak,
            unit="MB",
            digits=0,
            at_most=MAX_MEGABYTES,
        ),
    )


def in_fresh_process(function: Callable[..., tuple[float, float]], *args: object) -> tuple[float, float]:
    """What was opened, mapped or held before does not count."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(function, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2048)
    parser.add_argument("--files", type=int, default=50_000)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plume-sizes-") as folder:
        measure_terabyte(Path(folder), args.shards, args.rounds)
        measure_planning(Path(folder), args.files)
        measure_verification(Path(folder), args.gigabytes, args.rounds)
        measure_duplicates(Path(folder), args.documents)


if __name__ == "__main__":
    main()
