"""How fast a GPT writes here: Plume beside every other installed engine, in one interleaved run, as ratios."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import DecodeBenchConfig, EngineConfig, ExportConfig, SamplingConfig, UserError, did_you_mean, preset
from plume.generate.engine import Feed

Prompts = list[list[int]]


@dataclass
class Contender:
    """One engine: how to write after prompts and how to read a long prompt. What it cannot do is None."""

    name: str
    write: Callable[[Prompts, int], None] | None
    read: Callable[[list[int]], None] | None
    weights: int  # bytes read for every step, for the share of the memory bandwidth
    close: Callable[[], None] = lambda: None
    rates: dict[str, list[float]] = field(default_factory=dict)  # job -> tokens per second, round by round

    def best(self, job: str) -> float | None:
        return max(self.rates[job]) if self.rates.get(job) else None


def read_bandwidth(threads: int, size: int = 1 << 30) -> float:
    """Bytes per second that all threads together read out of a buffer no cache holds."""
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

    from plume.heads import Model
    from plume.text import Tokenizer
    from plume.text.definition import BYTE_LETTERS, define
    from plume.weights import save_model

    config = preset(name)
    pairs = [(a, b) for a in BYTE_LETTERS for b in BYTE_LETTERS][: config.vocab_size - 257]
    tokenizer = Tokenizer(define("byte-bpe", [*BYTE_LETTERS, *("".join(p) for p in pairs)], pairs, "gpt2"))
    torch.manual_seed(0)
    return save_model(Model(config), folder / name, tokenizer=tokenizer)


# ---- the engines -------------------------------------------------------------------------------------------------


def plume_engine(folder: Path, config: DecodeBenchConfig, precision: Any) -> Contender:
    from plume.generate.lm import LM
    from plume.text import load_tokenizer

    lm = LM(
        folder, load_tokenizer(folder), EngineConfig(precision=precision, threads=config.threads, slots=config.batch)
    )

    def write(prompts: Prompts, new: int) -> None:
        lm.runner.forget()
        lm.generate_batch(prompts, SamplingConfig(temperature=0, max_new_tokens=new, ignore_end=True))

    def read(prompt: list[int]) -> None:
        lm.runner.forget()
        lm.engine.step([Feed(0, prompt)])
        lm.engine.rewind(0, 0)

    size = lm.engine.packed.size if hasattr(lm.engine, "packed") else 0
    return Contender(f"plume {precision}", write, read, size, lm.close)


def llama_engine(gguf: Path, config: DecodeBenchConfig, threads: int, name: str) -> Contender:
    """llama.cpp's bare decode loop: no sampling, no Python objects per token."""
    import llama_cpp

    from plume.generate.export import silence_llama

    silence_llama()
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), settings)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = config.batch * max(config.prompt + config.new + 8, config.prefill)  # it is shared out evenly
    params.n_batch, params.n_ubatch = max(512, config.prefill), 512
    params.n_seq_max, params.n_threads, params.n_threads_batch = config.batch, threads, threads
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(max(512, config.prefill), 0, config.batch)

    def feed(rows: Sequence[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_get_logits(context)  # waits for the result

    def clear() -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def write(prompts: Prompts, new: int) -> None:
        clear()
        for s, prompt in enumerate(prompts):
            feed([(token, i, s, i == len(prompt) - 1) for i, token in enumerate(prompt)])
        for i in range(new - 1):
            feed([(prompt[i % len(prompt)], len(prompt) + i, s, True) for s, prompt in enumerate(prompts)])

    def read(prompt: list[int]) -> None:
        clear()
        feed([(token, i, 0, i == len(prompt) - 1) for i, token in enumerate(prompt)])

    return Contender(name, write, read, gguf.stat().st_size)


def llama_engines(folder: Path, config: DecodeBenchConfig, threads: int, room: Path) -> Iterator[Contender]:
    import llama_cpp

    from plume.generate.export import export, silence_llama

    silence_llama()
    whole = room / "f32.gguf"
    export(ExportConfig(model=folder, out=whole))
    yield llama_engine(whole, config, threads, "llama.cpp f32")
    for name, kind in (("q8_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0), ("q4_0", llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0)):
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = kind, threads
        path = room / f"{name}.gguf"
        assert llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), params) == 0
        yield llama_engine(path, config, threads, f"llama.cpp {name}")


def transformers_engine(folder: Path, config: DecodeBenchConfig, threads: int) -> Contender:
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.eval()

    def write(prompts: Prompts, new: int) -> None:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )

    def read(prompt: list[int]) -> None:
        with torch.inference_mode():
            model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)

    return Contender("transformers fp32", write, read, sum(p.nbytes for p in model.parameters()))


def ctranslate2_engine(folder: Path, config: DecodeBenchConfig, threads: int, room: Path, kind: str) -> Contender:
    import ctranslate2

    path = room / f"ct2-{kind}"
    converter = ctranslate2.converters.TransformersConverter(str(folder))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        converter.convert(str(path), quantization=kind, force=True)
    settings = json.loads((path / "config.json").read_text())
    filled = {"unk_token": settings["eos_token"]} if settings.get("unk_token") is None else {}
    (path / "config.json").write_text(json.dumps(settings | filled))  # it cannot start without an unknown token
    generator = ctranslate2.Generator(
        str(path), device="cpu", inter_threads=1, intra_threads=threads, compute_type=kind
    )
    vocabulary = json.loads((path / "vocabulary.json").read_text())

    def words(ids: list[int]) -> list[str]:
        return [vocabulary[i] for i in ids]

    def write(prompts: Prompts, new: int) -> None:
        generator.generate_batch(
            [words(p) for p in prompts],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
        )

    def read(prompt: list[int]) -> None:
        generator.generate_batch([words(prompt)], max_length=1, sampling_topk=1, include_prompt_in_result=False)

    return Contender(f"ctranslate2 {kind}", write, read, (path / "model.bin").stat().st_size)


def onnx_engine(folder: Path, config: DecodeBenchConfig, threads: int, room: Path) -> Contender:
    import onnxruntime

    from plume.generate.export import export
    from plume.weights import read_config

    path = room / "model.onnx"
    export(ExportConfig(model=folder, format="onnx", out=path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    c = read_config(folder).model

    def empty(batch: int) -> Any:
        return np.zeros((c.layers, 2, batch, c.heads, 0, c.head_width), np.float32)

    def write(prompts: Prompts, new: int) -> None:
        tokens, past = np.array(prompts, np.int64), empty(len(prompts))
        for _ in range(new):
            logits, past = session.run(["logits", "present"], {"tokens": tokens, "past": past})
            tokens = logits[:, -1].argmax(axis=1)[:, None]

    def read(prompt: list[int]) -> None:
        session.run(["logits"], {"tokens": np.array([prompt], np.int64), "past": empty(1)})

    return Contender("onnxruntime fp32", write, read, path.stat().st_size)


def contenders(folder: Path, config: DecodeBenchConfig, threads: int, room: Path) -> Iterator[Contender]:
    """Plume's engines, then every peer that is installed; one that fails to start is named and left out."""
    yield plume_engine(folder, config, "float32")
    yield plume_engine(folder, config, "int8")
    makers: dict[str, list[Callable[[], Any]]] = {
        "llama_cpp": [lambda: llama_engines(folder, config, threads, room)],
        "ctranslate2": [
            lambda: [ctranslate2_engine(folder, config, threads, room, "float32")],
            lambda: [ctranslate2_engine(folder, config, threads, room, "int8")],
        ],
        "transformers": [lambda: [transformers_engine(folder, config, threads)]],
        "onnxruntime": [lambda: [onnx_engine(folder, config, threads, room)]],
    }
    for package in config.peers:
        if package not in makers:
            raise UserError(f"there is no peer {package!r}{did_you_mean(package, makers)}; all: {', '.join(makers)}")
        starts = makers[package]
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed and left out")
            continue
        for start in starts:
            try:
                yield from start()
            except Exception as error:  # a peer's fault must not end the run
                print(f"{package} could not start and is left out: {type(error).__name__}: {str(error)[:200]}")


# ---- the run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    rows: list[dict[str, Any]]
    bandwidth: float
    growth: dict[int, float]  # context -> milliseconds per token of Plume's int8 engine


def bench_decode(config: DecodeBenchConfig) -> Report:
    """Measure everybody, round by round in turns, and report the best of each."""
    from plume.generate.cpu_engine import cores

    threads = cores() if config.threads is None else config.threads
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        room = Path(place)
        folder = random_folder(config.preset, room) if config.model is None else config.model
        from plume.weights import read_config, resolve

        folder = resolve(folder)
        vocab = read_config(folder).model.vocab_size
        prompts = rng.integers(0, vocab, (config.batch, config.prompt)).tolist()
        long_prompt = rng.integers(0, vocab, config.prefill).tolist()
        everyone = list(contenders(folder, config, threads, room))
        bandwidths = []
        for number in range(config.rounds + 1):
            for one in everyone:
                _measure(one, prompts, long_prompt, config, keep=number > 0)  # the first round only warms up
            bandwidths.append(read_bandwidth(threads))
        growth = context_growth(folder, config)
        for one in everyone:
            one.close()
    return Report([_row(one, everyone, max(bandwidths), config) for one in everyone], max(bandwidths), growth)


def _measure(
    one: Contender, prompts: Prompts, long_prompt: list[int], config: DecodeBenchConfig, *, keep: bool
) -> None:
    jobs: dict[str, tuple[Callable[[], None], int]] = {}
    if one.write is not None:
        write = one.write
        jobs["batch 1"] = (lambda: write(prompts[:1], config.new), config.new)
        jobs[f"batch {config.batch}"] = (lambda: write(prompts, config.new), config.batch * config.new)
    if one.read is not None:
        read = one.read
        jobs["prefill"] = (lambda: read(long_prompt), config.prefill)
    for job, (run, tokens) in jobs.items():
        start = time.perf_counter()
        run()
        rate = tokens / (time.perf_counter() - start)
        if keep:
            one.rates.setdefault(job, []).append(rate)


def _row(one: Contender, everyone: list[Contender], bandwidth: float, config: DecodeBenchConfig) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": one.name}
    for job in ("batch 1", f"batch {config.batch}", "prefill"):
        row[job] = one.best(job)
        for ours in everyone[:2]:
            mine, theirs = ours.best(job), one.best(job)
            row[f"{job}: {ours.name} is"] = mine / theirs if mine and theirs else None
    rate = one.best("batch 1")
    row["bandwidth"] = rate * one.weights / bandwidth if rate else None
    return row


def context_growth(folder: Path, config: DecodeBenchConfig) -> dict[int, float]:
    """Milliseconds per token of the int8 engine behind contexts of several lengths."""
    from plume.generate.opening import open_engine

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

    jobs = ["batch 1", f"batch {config.batch}", "prefill"]
    shown = Table(title=f"tokens/s, best of {config.rounds} rounds; x: Plume's float32 / int8 against it")
    shown.add_column("engine")
    for job in jobs:
        shown.add_column(job, justify="right")
        shown.add_column("x", justify="right")
    shown.add_column(f"of {report.bandwidth / 1e9:.1f} GB/s", justify="right")
    for row in report.rows:
        cells = [row["engine"]]
        for job in jobs:
            ratios = [row[f"{job}: plume {kind} is"] for kind in ("float32", "int8")]
            cells.append("-" if row[job] is None else f"{row[job]:.1f}")
            cells.append(" / ".join("-" if r is None else f"{r:.2f}" for r in ratios))
        cells.append("-" if row["bandwidth"] is None else f"{row['bandwidth']:.0%}")
        shown.add_row(*cells)
    shown.caption = "int8 ms per token behind a context of " + ", ".join(
        f"{length}: {ms:.2f}" for length, ms in report.growth.items()
    )
    return shown
