"""How fast a GPT writes here: Plume's engines, and others that are handed in, in one interleaved run."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import DecodeBenchConfig, EngineConfig, SamplingConfig, UserError, preset
from plume.inference.engine import Feed
from plume.util.console import plural
from plume.util.devices import cores

Prompts = list[list[int]]


@dataclass(frozen=True)
class Setting:
    """What every engine is given."""

    folder: Path
    config: DecodeBenchConfig
    threads: int
    room: Path  # for files made on the way
    prompts: Prompts
    long_prompt: list[int]


@dataclass(frozen=True)
class BenchEngine:
    """How an engine writes after prompts, and how it reads a long prompt."""

    write: Callable[[Prompts, int], None]
    read: Callable[[list[int]], None]
    weights: int  # bytes read for every step, for the share of the memory bandwidth


def plume_engine(setting: Setting, precision: Any) -> BenchEngine:
    from plume.lm import open_lm

    config = setting.config
    lm = open_lm(setting.folder, EngineConfig(precision=precision, threads=config.threads, slots=config.batch))

    def write(prompts: Prompts, new: int) -> None:
        lm.batcher.clear()
        lm.generate_batch(prompts, SamplingConfig(temperature=0, max_new_tokens=new, ignore_eos=True))

    def read(prompt: list[int]) -> None:
        lm.batcher.clear()
        lm.engine.step([Feed(0, prompt)])
        lm.engine.rewind(0, 0)

    size = lm.engine.packed.size if hasattr(lm.engine, "packed") else 0
    return BenchEngine(write, read, size)


Maker = Callable[[Setting], BenchEngine]
OWN: dict[str, Maker] = {
    f"plume {precision}": partial(plume_engine, precision=precision)
    for precision in ("float32", "float24", "int8", "int4")
}
COMPARED = ("plume float32", "plume int8")  # everybody is compared with these


def read_bandwidth(threads: int, size: int) -> float:
    """Bytes per second that all threads together read out of a buffer of this size, which a cache may hold in part."""
    from numba import njit

    def total(x: Any) -> Any:
        result = np.float32(0)
        for i in range(x.size):
            result += x[i]
        return result

    read: Any = njit(nogil=True, fastmath=True)(total)
    buffer = np.ones(size // 4, np.float32)
    read(buffer[:8])
    parts = np.array_split(buffer, threads)

    def once() -> float:
        workers = [threading.Thread(target=read, args=(part,)) for part in parts[1:]]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        read(parts[0])
        for worker in workers:
            worker.join()
        return time.perf_counter() - start

    return size / min(once() for _ in range(5))


def random_folder(name: str, folder: Path) -> Path:
    """A model folder of a preset's shape with random weights: speed does not depend on what a model knows."""
    import torch

    from plume.hf import save_model
    from plume.model.heads import Model
    from plume.text import Tokenizer
    from plume.text.definition import BYTE_LETTERS, define

    config = preset(name)
    pairs = [(a, b) for a in BYTE_LETTERS for b in BYTE_LETTERS][: config.vocab_size - 257]
    tokenizer = Tokenizer(define("byte-bpe", [*BYTE_LETTERS, *("".join(p) for p in pairs)], pairs, "gpt2"))
    torch.manual_seed(0)
    return save_model(Model(config), folder / name, tokenizer=tokenizer)


# ---- a process for each ------------------------------------------------------------------------------------------


def serve_engine(make: Maker, setting: Setting, line: Connection) -> None:
    """The life of an engine's process: make it, say what it weighs, then do each job that is named and say how fast."""
    config = setting.config
    try:
        engine = make(setting)
        line.send(engine.weights)
        while (job := line.recv()) is not None:
            start = time.perf_counter()
            if job == "prefill":
                engine.read(setting.long_prompt)
                tokens = config.prefill_tokens
            else:
                prompts = setting.prompts[:1] if job == "batch 1" else setting.prompts
                engine.write(prompts, config.new_tokens)
                tokens = len(prompts) * config.new_tokens
            line.send(tokens / (time.perf_counter() - start))
    except Exception as error:
        line.send(f"{type(error).__name__}: {str(error)[:200]}")


class Contender:
    """An engine in a process of its own: the threads of one, spinning a while after their work, disturb no other."""

    def __init__(self, name: str, make: Maker, setting: Setting) -> None:
        self.name = name
        self.rates: dict[str, list[float]] = {}  # job -> tokens per second, round by round
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=serve_engine, args=(make, setting, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.weights = self._answer()

    def measure(self, job: str, *, keep: bool) -> None:
        self._line.send(job)
        rate = self._answer()
        if keep:
            self.rates.setdefault(job, []).append(rate)

    def best(self, job: str) -> float | None:
        return max(self.rates[job]) if self.rates.get(job) else None

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._line.send(None)
        self._process.join(10)

    def _answer(self) -> Any:
        try:
            answer = self._line.recv()
        except EOFError:
            answer = "its process ended by itself"
        if isinstance(answer, str):
            mistake = answer.removeprefix(f"{UserError.__name__}: ")
            raise RuntimeError(answer) if mistake == answer else UserError(mistake)
        return answer


def well(name: str, work: Callable[[], None]) -> bool:
    """Whether something went well; a peer's fault must not end the run."""
    try:
        work()
    except RuntimeError as error:
        if name.startswith("plume"):
            raise
        print(f"{name} is left out: {error}")
        return False
    return True


def started(makers: Mapping[str, Maker], setting: Setting) -> list[Contender]:
    """Those that start."""
    found = list[Contender]()
    for name, make in makers.items():
        well(name, lambda name=name, make=make: found.append(Contender(name, make, setting)))  # type: ignore[misc]
    return found


# ---- the run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    rows: list[dict[str, Any]]
    bandwidths: dict[str, float]  # engine of Plume -> bytes per second of a loop that reads as many
    growth: dict[int, float]  # context -> milliseconds per token of Plume's int8 engine


def bench_decode(config: DecodeBenchConfig, peers: Mapping[str, Maker] | None = None) -> Report:
    """Measure everybody, round by round in turns, and report the best of each."""
    threads = cores() if config.threads is None else config.threads
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        room = Path(place)
        folder = random_folder(config.preset, room) if config.model is None else config.model
        from plume.hf import read_config, resolve

        folder = resolve(folder)
        found = read_config(folder).model
        vocab, config = found.vocab_size, fitted(config, found.context)
        prompts = rng.integers(0, vocab, (config.batch, config.prompt_tokens)).tolist()
        long_prompt = rng.integers(0, vocab, config.prefill_tokens).tolist()
        everyone = started(OWN | dict(peers or {}), Setting(folder, config, threads, room, prompts, long_prompt))
        bandwidths = {one.name: 0.0 for one in everyone if one.name in OWN}
        for number in range(config.rounds + 1):
            turn = partial(take_turn, config=config, keep=number > 0)  # the first round only warms up
            everyone = [one for one in everyone if well(one.name, partial(turn, one))]
            for one in everyone[: len(bandwidths)]:
                bandwidths[one.name] = max(bandwidths[one.name], read_bandwidth(threads, one.weights))
        growth = context_growth(folder, config)
        for one in everyone:
            one.close()
    return Report([_row(one, everyone, bandwidths, config) for one in everyone], bandwidths, growth)


def fitted(config: DecodeBenchConfig, context: int) -> DecodeBenchConfig:
    """The lengths of a run, as far as the context of the model allows them."""
    prompt = min(config.prompt_tokens, context // 2)
    new, prefill = min(config.new_tokens, context - prompt), min(config.prefill_tokens, context)
    return replace(config, prompt_tokens=prompt, new_tokens=new, prefill_tokens=prefill)


def take_turn(one: Contender, *, config: DecodeBenchConfig, keep: bool) -> None:
    for job in jobs_of(config):
        one.measure(job, keep=keep)


def jobs_of(config: DecodeBenchConfig) -> list[str]:
    return ["batch 1", f"batch {config.batch}", "prefill"]


def _row(
    one: Contender, everyone: list[Contender], bandwidths: Mapping[str, float], config: DecodeBenchConfig
) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": one.name}
    for job in jobs_of(config):
        row[job] = one.best(job)
        for ours in (one for one in everyone if one.name in COMPARED):
            mine, theirs = ours.best(job), one.best(job)
            row[f"{job}: {ours.name} is"] = mine / theirs if mine and theirs else None
    rate, bandwidth = one.best("batch 1"), bandwidths.get(one.name)
    row["bandwidth"] = rate * one.weights / bandwidth if rate and bandwidth else None
    return row


def context_growth(folder: Path, config: DecodeBenchConfig) -> dict[int, float]:
    """Milliseconds per token of the int8 engine behind contexts of several lengths."""
    from plume.inference.engine_factory import open_engine

    engine = open_engine(folder, EngineConfig(precision="int8", threads=config.threads, slots=1))
    growth = {}
    for length in (64, 256, 1000):
        if length + 16 > engine.capacity:
            continue
        engine.step([Feed(0, [1] * length)])
        times = []
        for _ in range(24):
            start = time.perf_counter()
            engine.step([Feed(0, [1])])
            times.append(time.perf_counter() - start)
            engine.rewind(0, length)
        growth[length] = 1e3 * float(np.median(times))
        engine.rewind(0, 0)
    engine.close()
    return growth


def table(report: Report, config: DecodeBenchConfig) -> Any:
    """The report as a table for the terminal."""
    from rich.table import Table

    jobs = jobs_of(config)
    shown = Table(title=f"tokens/s, best of {plural(config.rounds, 'round')}; x: Plume's float32 / int8 against it")
    shown.add_column("engine")
    for job in jobs:
        shown.add_column(job, justify="right")
        shown.add_column("x", justify="right")
    shown.add_column("of a read loop", justify="right")
    for row in report.rows:
        cells = [row["engine"]]
        for job in jobs:
            ratios = [row[f"{job}: {name} is"] for name in COMPARED]
            cells.append("-" if row[job] is None else f"{row[job]:.1f}")
            cells.append(" / ".join("-" if r is None else f"{r:.2f}" for r in ratios))
        cells.append("-" if row["bandwidth"] is None else f"{row['bandwidth']:.0%}")
        shown.add_row(*cells)
    shown.caption = "int8 ms per token behind a context of " + ", ".join(
        f"{length}: {ms:.2f}" for length, ms in report.growth.items()
    )
    return shown
