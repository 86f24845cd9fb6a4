"""The engines that Plume is measured against, each made so that it can write and read on its own."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from plume.bench import BenchEngine, Prompts, Setting
from plume.config import ExportConfig


def llama_engine(setting: Setting, kind: str) -> BenchEngine:
    """llama.cpp's bare decode loop: no sampling, no Python objects per token."""
    import llama_cpp

    silence_llama()
    gguf = llama_file(setting, kind)
    model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), llama_cpp.llama_model_default_params())
    context = llama_cpp.llama_init_from_model(model, llama_settings(setting))
    config = setting.config
    most = max(config.prefill_tokens, config.prompt_tokens, config.batch)
    batch = llama_cpp.llama_batch_init(most, 0, config.batch)

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

    return BenchEngine(write, read, gguf.stat().st_size)


@cache
def silence_llama() -> Any:
    """llama.cpp logs to the terminal by itself; failures still come back as exceptions."""
    import llama_cpp

    kept = llama_cpp.llama_log_callback(lambda *_: None)  # C holds no reference to it: the cache does
    llama_cpp.llama_log_set(kept, None)
    return kept


def llama_settings(setting: Setting) -> Any:
    import llama_cpp

    config, params = setting.config, llama_cpp.llama_context_default_params()
    longest = max(config.prompt_tokens + config.new_tokens + 8, config.prefill_tokens)
    params.n_ctx = config.batch * longest  # it is shared out evenly
    params.n_batch, params.n_ubatch = max(512, config.prefill_tokens), 512
    params.n_seq_max, params.n_threads, params.n_threads_batch = config.batch, setting.threads, setting.threads
    return params


def llama_file(setting: Setting, kind: str) -> Path:
    """The model as llama.cpp wants it."""
    import llama_cpp

    from plume.inference.export import export

    whole, path = setting.room / "f32.gguf", setting.room / f"{kind}.gguf"
    if not whole.is_file():
        export(ExportConfig(model=str(setting.folder), out=whole))
    if kind != "f32":
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}"), setting.threads
        assert llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), params) == 0
    return path


def transformers_engine(setting: Setting) -> BenchEngine:
    import torch
    import transformers

    torch.set_num_threads(setting.threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(setting.folder)
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

    return BenchEngine(write, read, sum(p.nbytes for p in model.parameters()))


def ctranslate2_engine(setting: Setting, kind: str) -> BenchEngine:
    import ctranslate2

    path = setting.room / f"ct2-{kind}"
    converter = ctranslate2.converters.TransformersConverter(str(setting.folder))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        converter.convert(str(path), quantization=kind, force=True)
    settings = json.loads((path / "config.json").read_text())
    filled = {"unk_token": settings["eos_token"]} if settings.get("unk_token") is None else {}
    (path / "config.json").write_text(json.dumps(settings | filled))  # it cannot start without an unknown token
    generator = ctranslate2.Generator(
        str(path), device="cpu", inter_threads=1, intra_threads=setting.threads, compute_type=kind
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

    return BenchEngine(write, read, (path / "model.bin").stat().st_size)


def onnx_engine(setting: Setting) -> BenchEngine:
    import onnxruntime

    from plume.hf import read_config
    from plume.inference.export import export

    path = setting.room / "model.onnx"
    export(ExportConfig(model=str(setting.folder), format="onnx", out=path))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    c = read_config(setting.folder).model

    def empty(batch: int) -> Any:
        return np.zeros((c.layers, 2, batch, c.heads, 0, c.head_width), np.float32)

    def write(prompts: Prompts, new: int) -> None:
        tokens, past = np.array(prompts, np.int64), empty(len(prompts))
        for _ in range(new):
            logits, past = session.run(["logits", "present"], {"tokens": tokens, "past": past})
            tokens = logits[:, -1].argmax(axis=1)[:, None]

    def read(prompt: list[int]) -> None:
        session.run(["logits"], {"tokens": np.array([prompt], np.int64), "past": empty(1)})

    return BenchEngine(write, read, path.stat().st_size)


# name -> (the package it needs, how it is made)
PEERS: dict[str, tuple[str, Callable[[Setting], BenchEngine]]] = {
    "llama.cpp f32": ("llama_cpp", partial(llama_engine, kind="f32")),
    "llama.cpp q8_0": ("llama_cpp", partial(llama_engine, kind="q8_0")),
    "llama.cpp q4_0": ("llama_cpp", partial(llama_engine, kind="q4_0")),
    "llama.cpp iq4_nl": ("llama_cpp", partial(llama_engine, kind="iq4_nl")),
    "ctranslate2 float32": ("ctranslate2", partial(ctranslate2_engine, kind="float32")),
    "ctranslate2 int8": ("ctranslate2", partial(ctranslate2_engine, kind="int8")),
    "transformers float32": ("transformers", transformers_engine),
    "onnxruntime float32": ("onnxruntime", onnx_engine),
}


def installed(packages: Sequence[str]) -> dict[str, Callable[[Setting], BenchEngine]]:
    """The peers among these packages; one that is not installed is left out, and that is said."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    for package in missing:
        print(f"{package} is not installed and left out")
    there = set(packages) - set(missing)
    return {name: make for name, (package, make) in PEERS.items() if package in there}
