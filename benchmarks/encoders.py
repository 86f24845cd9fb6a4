"""Hidden states of encoders beside CTranslate2, onnxruntime and transformers: python -m benchmarks.encoders."""

# Every engine reads the same ids, without padding, by turns in one process; weights are random, so figures are speeds.

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import peer_bar
from benchmarks.results import Row, made_text, report
from plume.config import PRESETS, ModelConfig, TokenizerConfig
from plume.hf import load_model, save_model
from plume.inference.onnx_export import graph_of, write
from plume.text import train_tokenizer

SIZES = {"12x768": (12, 768, 12), "12x384": (12, 384, 12), "2x128": (2, 128, 2)}  # layers, width, heads
BARS = {  # (precision of ours, peer) -> how many times as fast
    ("int8", "ctranslate2 int8"): 1.3,
    ("int8", "onnxruntime float32"): 3.0,
    ("float32", "onnxruntime float32"): 1.3,
    ("int8", "onnxruntime int8"): None,
    ("int8", "transformers float32"): None,
    ("float32", "transformers float32"): None,
}
Ids = list[list[int]]
Read = Callable[[Ids], object]  # gives the last hidden states of texts of one length


@dataclass(frozen=True)
class Setting:
    folder: Path  # a BERT with a bare head
    room: Path
    threads: int


def plume_engine(setting: Setting, precision: Any) -> Read:
    from plume.inference.cpu.cpu_engine import CpuEngine
    from plume.inference.cpu.pack import pack

    return CpuEngine(pack(load_model(setting.folder), precision), threads=setting.threads).encode


def transformers_engine(setting: Setting) -> Read:
    import torch
    import transformers

    torch.set_num_threads(setting.threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModel.from_pretrained(setting.folder).eval()

    def read(ids: Ids) -> object:
        with torch.inference_mode():
            return model(torch.tensor(ids)).last_hidden_state

    return read


def ctranslate2_engine(setting: Setting, kind: str) -> Read:
    import ctranslate2

    path = setting.room / f"ct2-{kind}"
    about = json.loads((setting.folder / "config.json").read_text(encoding="utf-8"))
    about["position_embedding_type"] = "absolute"  # its converter asks for what transformers no longer writes
    (setting.folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ctranslate2.converters.TransformersConverter(str(setting.folder)).convert(str(path), quantization=kind)
    encoder = ctranslate2.Encoder(
        str(path), device="cpu", inter_threads=1, intra_threads=setting.threads, compute_type=kind
    )
    return lambda ids: np.array(encoder.forward_batch(ids).last_hidden_state)


def onnx_engine(setting: Setting, kind: str) -> Read:
    import onnxruntime

    path, small = setting.room / "model.onnx", setting.room / "model-int8.onnx"
    if not path.exists():
        write(graph_of(load_model(setting.folder), None, cache=False), path)
    if kind == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(path, small, weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    place = str(small if kind == "int8" else path)
    session = onnxruntime.InferenceSession(place, options, providers=["CPUExecutionProvider"])
    wanted = {given.name for given in session.get_inputs()}

    def run(ids: Ids) -> Any:
        rows = np.array(ids, np.int64)
        lengths, segments = np.full(len(rows), rows.shape[1]), np.zeros_like(rows)
        inputs = {"tokens": rows, "lengths": lengths, "segments": segments}
        return session.run(None, {name: value for name, value in inputs.items() if name in wanted})

    return run


ENGINES: dict[str, tuple[str, Callable[[Setting], Read]]] = {  # name -> (the package it needs, how it is made)
    "plume float32": ("numba", partial(plume_engine, precision="float32")),
    "plume int8": ("numba", partial(plume_engine, precision="int8")),
    "ctranslate2 int8": ("ctranslate2", partial(ctranslate2_engine, kind="int8")),
    "onnxruntime float32": ("onnxruntime", partial(onnx_engine, kind="float32")),
    "onnxruntime int8": ("onnxruntime", partial(onnx_engine, kind="int8")),
    "transformers float32": ("transformers", transformers_engine),
}


def made_folder(room: Path, size: str) -> Path:
    """A BERT of this size with random weights. Its vocabulary is small: rows of the token table are only looked up."""
    import torch

    from plume.model.heads import Model

    layers, width, heads = SIZES[size]
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=1000), made_text(100_000).split("\n"))
    like = {"layers": layers, "width": width, "heads": heads, "vocab_size": tokenizer.vocab_size}
    config: ModelConfig = replace(PRESETS["bert-base-uncased"], **like)
    torch.manual_seed(0)
    return save_model(Model(config, "bare"), room / size, tokenizer=tokenizer)


def opened(setting: Setting) -> Iterator[tuple[str, Read]]:
    for name, (package, make) in ENGINES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed and left out")
            continue
        yield name, make(setting)


def jobs(texts: int, tokens: int) -> dict[str, list[Ids]]:
    """The calls of each job: one batch of long texts, or short texts one after another."""
    draw = np.random.default_rng(0)
    long = draw.integers(10, 900, (texts, tokens)).tolist()
    short = draw.integers(10, 900, (8, 12)).tolist()
    return {f"{texts} x {tokens} tokens": [long], "one text of 12 tokens": [[text] for text in short]}


def seconds(read: Read, calls: list[Ids]) -> float:
    start = time.perf_counter()
    for ids in calls:
        read(ids)
    return time.perf_counter() - start


def measured(engines: dict[str, Read], calls: list[Ids], rounds: int) -> dict[str, list[float]]:
    """Seconds of each engine in each round, by turns, so that other work on the machine meets all alike."""
    for read in engines.values():
        read(calls[0])
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, read in engines.items():
            taken[name].append(seconds(read, calls))
    return taken


def rows(size: str, job: str, taken: dict[str, list[float]], tokens: int) -> Iterator[Row]:
    for (precision, peer), bar in BARS.items():
        if peer not in taken:
            continue
        ours, theirs = taken[f"plume {precision}"], taken[peer]
        ratios = sorted(t / o for o, t in zip(ours, theirs, strict=True))
        rate = [tokens / statistics.median(times) for times in (ours, theirs)]
        yield Row(
            key=f"{size}, {job}, {precision}, {peer}",
            what=f"encoder {size}, {job}, {precision}: tokens/s against {peer}",
            figure=statistics.median(ratios),
            at_least=peer_bar(bar),
            detail=f"{rate[0]:,.0f} and {rate[1]:,.0f} tokens/s; rounds {ratios[0]:.2f} to {ratios[-1]:.2f}",
        )


def equality_rows(size: str, engines: dict[str, Read]) -> Iterator[Row]:
    """How near vectors are to torch's, and whether those of texts of many lengths depend on the others."""
    draw = np.random.default_rng(1)
    texts = [draw.integers(10, 900, int(n)).tolist() for n in draw.integers(1, 129, 64)]
    whole = [np.asarray(engines["transformers float32"]([text]))[0] for text in texts]
    for precision in ("float32", "int8"):
        read: Any = engines[f"plume {precision}"]
        together = read(texts)
        cosines = [float(cosine(a.mean(0), b.mean(0))) for a, b in zip(together, whole, strict=True)]
        tokens = np.concatenate([cosine(a, b) for a, b in zip(together, whole, strict=True)])
        yield Row(
            key=f"{size}, {precision}, cosine",
            what=f"encoder {size}, {precision}: smallest cosine of a text's vector to torch's, 64 texts",
            figure=min(cosines),
            unit="",
            digits=6,
            at_least=0.999,
            detail=f"smallest of a token's hidden state {tokens.min():.6f}",
        )
        yield Row(
            key=f"{size}, {precision}, alone",
            what=f"encoder {size}, {precision}: texts of 64 whose hidden states are others alone than among all",
            figure=sum(bool((read([text])[0] != found).any()) for text, found in zip(texts, together, strict=True)),
            unit="",
            digits=0,
            at_most=0,
        )


def cosine(a: Any, b: Any) -> Any:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["12x768", "12x384"])
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for size in args.sizes:
        with tempfile.TemporaryDirectory(prefix="plume-encoders-") as place:
            setting = Setting(made_folder(Path(place), size), Path(place), args.threads)
            engines = dict(opened(setting))
            if "transformers float32" in engines:
                report(*equality_rows(size, engines))
            for job, calls in jobs(args.texts, args.tokens).items():
                taken = measured(engines, calls, args.rounds)
                report(*rows(size, job, taken, sum(len(ids) for call in calls for ids in call)))
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
