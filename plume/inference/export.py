"""A model for other runtimes: GGUF for llama.cpp, ONNX for onnxruntime; each is run and compared afterwards."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from plume.config import ExportConfig, ModelConfig, UserError
from plume.hf import load_model, read_embedding, resolve
from plume.inference import onnx_export
from plume.inference.cpu.four_bits import iq4_blocks
from plume.model.heads import Model
from plume.text import Tokenizer, load_tokenizer
from plume.util.files import aside, room_on_disk

# how far the written file's logits may be from ours, relative to their spread; llama.cpp rounds GELU to half precision
TOLERANCE = {"float32": 1e-2, "float16": 2e-2, "int8": 1.5e-1, "int4": 1.0}
GGUF_TYPES = {
    "float32": ("F32", "ALL_F32"),
    "float16": ("F16", "MOSTLY_F16"),
    "int8": ("Q8_0", "MOSTLY_Q8_0"),
    "int4": ("IQ4_NL", "MOSTLY_IQ4_NL"),
}
CHECKED_TOKENS = 16
LLAMA_LOGITS = Path(__file__).with_name("llama_logits.py")  # a program


@dataclass(frozen=True)
class Exported:
    """What was written and how well it agrees."""

    path: Path
    checked_with: str | None  # None: it was not run
    difference: float  # largest difference of outputs, relative to their spread
    unchecked: str = "the runtime is not installed"  # why it was not run

    def __str__(self) -> str:
        if self.checked_with is None:
            return f"{self.path}: written, not checked ({self.unchecked})"
        return (
            f"{self.path}: checked with {self.checked_with}, outputs agree within {self.difference:.1e} of their spread"
        )


def export(config: ExportConfig) -> Exported:
    """Write a model folder in another format, run it, and compare."""
    if config.path.is_dir():
        raise UserError(f"out={config.path} is a folder; name a file, such as {config.path / 'model.gguf'}")
    folder = resolve(config.model)
    model = load_model(folder)
    if model.config.recurrent:
        raise UserError("a recurrent model has no other runtime; Plume's torch engine serves it")
    predicts_next = model.kind == "next-token" and not model.config.decoder_layers
    if config.format == "onnx":
        cache = predicts_next if config.cache is None else config.cache
        if cache and not predicts_next:
            raise UserError(f"cache=true is for models that predict the next token, not one with a {model.kind} head")
        return export_onnx(model, folder, replace(config, cache=cache))
    if not predicts_next:
        what = "an encoder-decoder" if model.config.decoder_layers else f"a model with a {model.kind} head"
        raise UserError(f"GGUF is written for models that predict the next token; format=onnx takes {what}")
    return export_gguf(model, folder, config)


def export_gguf(model: Model, folder: Path, config: ExportConfig) -> Exported:
    tokenizer = load_tokenizer(folder)
    refuse_gguf(model.config, tokenizer)
    with aside(config.path) as hidden:
        write_gguf(model, tokenizer, hidden, config.precision, folder.resolve().name)
    logits = run_gguf(config.path, _sample_tokens(model.config))
    if isinstance(logits, str):
        return Exported(config.path, None, float("nan"), logits)
    with torch.inference_mode():
        ours = model(torch.tensor([_sample_tokens(model.config)]))[0].numpy()
    difference = float(np.abs(logits - ours).max() / ours.std())
    return _agreed(config.path, "llama.cpp", difference, TOLERANCE[config.precision])


def export_onnx(model: Model, folder: Path, config: ExportConfig) -> Exported:
    if config.precision != "float32":
        raise UserError(f"precision={config.precision} is for GGUF; ONNX is written as float32")
    graph = onnx_export.graph_of(model, read_embedding(folder), cache=config.cache is True)
    config.path.parent.mkdir(parents=True, exist_ok=True)
    with room_on_disk(config.path), TemporaryDirectory(prefix=".", dir=config.path.parent) as hidden:
        onnx_export.write(graph, Path(hidden) / config.path.name)
        for file in sorted(Path(hidden).iterdir(), reverse=True):  # weights beyond 2 GB are in one of their own
            file.replace(config.path.with_name(file.name))
    difference = onnx_export.difference(graph, config.path)
    if difference is None:
        return Exported(config.path, None, float("nan"))
    return _agreed(config.path, "onnxruntime", difference, TOLERANCE["float32"])


def _sample_tokens(config: ModelConfig) -> list[int]:
    count = min(CHECKED_TOKENS, config.context)
    return [int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, count)]


def _agreed(path: Path, runner: str, difference: float, tolerance: float) -> Exported:
    if not difference < tolerance:
        path.unlink()
        raise RuntimeError(f"{path} did not give the model's outputs back (off by {difference:.2g}) and was removed")
    return Exported(path, runner, difference)


# ---- GGUF --------------------------------------------------------------------------------------------------------


def refuse_gguf(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Say why llama.cpp could not run this model as it is, if so."""
    if tokenizer.kind != "byte-bpe":
        raise UserError(
            f"llama.cpp knows GPT-2's way of cutting text into words, not that of this {tokenizer.kind} tokenizer; "
            "a model trained with a byte-bpe tokenizer can be exported, and format=onnx takes any"
        )
    fits = {
        "norm": "pre",
        "positions": "learned",
        "activation": "gelu_tanh",
        "band": 0,
        "segments": 0,
        "first_position": 0,
        "embed_norm": False,
        "embed_scale": False,
        "attention_bias": True,
    }
    other = [f"{name}={getattr(config, name)}" for name, value in fits.items() if getattr(config, name) != value]
    if other:
        raise UserError(f"llama.cpp's gpt2 has no {', '.join(other)}; format=onnx takes any causal model")


def precision_of(tensor: str, config: ModelConfig, precision: str) -> str:
    """As in the CPU engine: with four bits, a token table and output weights of their own keep eight."""
    two_tables = not config.tie_embeddings and tensor in ("token_embd.weight", "output.weight")
    return "int8" if precision == "int4" and two_tables else precision


def write_gguf(model: Model, tokenizer: Tokenizer, path: Path, precision: str, name: str) -> None:
    try:
        import gguf
    except ImportError:
        raise UserError("writing GGUF needs the gguf package: pip install 'plume-lm[export]'") from None
    c = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_name(name)
    writer.add_block_count(c.layers)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.width)
    writer.add_feed_forward_length(c.ffn_width)
    writer.add_head_count(c.heads)
    writer.add_layer_norm_eps(c.norm_eps)
    writer.add_file_type(gguf.LlamaFileType[GGUF_TYPES[precision][1]])
    _write_vocabulary(writer, tokenizer, c, gguf)
    for tensor_name, tensor in gguf_tensors(model):
        own = precision_of(tensor_name, c, precision)
        kind = gguf.GGMLQuantizationType[GGUF_TYPES[own][0]]
        if tensor.ndim == 1 or tensor_name == "position_embd.weight" or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor_name, tensor.astype(np.float32))
        else:
            if own in ("int8", "int4") and tensor.shape[-1] % 32:
                raise UserError(
                    f"precision={precision}, GGUF's {kind.name.lower()}, needs widths that are multiples of 32, but "
                    f"{tensor_name} has {tensor.shape[-1]}; float16 takes any"
                )
            data = iq4_blocks(tensor) if own == "int4" else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(tensor_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: Any, tokenizer: Tokenizer, config: ModelConfig, gguf: Any) -> None:
    definition = tokenizer.definition
    tokens = list(definition.tokens)
    kinds = [gguf.TokenType.CONTROL if i in definition.added else gguf.TokenType.NORMAL for i in range(len(tokens))]
    for i in range(len(tokens), config.vocab_size):  # rows that pad the table
        tokens.append(f"[PAD{i}]")
        kinds.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in definition.merges])
    if tokenizer.start is not None:
        writer.add_bos_token_id(tokenizer.start)
    if tokenizer.end is not None:
        writer.add_eos_token_id(tokenizer.end)
    writer.add_add_bos_token(False)


def gguf_tensors(model: Model) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Every tensor under llama.cpp's name; without an output of its own it takes the token table."""
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    body = "body."
    pairs = {
        "token_embd": f"{body}embed.tokens",
        "position_embd": f"{body}embed.positions",
        "output_norm": f"{body}norm",
        "output": "head.output",  # where it is not tied
    }
    for i in range(model.config.layers):
        ours, theirs = f"{body}blocks.{i}", f"blk.{i}"
        pairs |= {
            f"{theirs}.attn_norm": f"{ours}.attn.norm",
            f"{theirs}.attn_qkv": f"{ours}.attn.inner.q|k|v",
            f"{theirs}.attn_output": f"{ours}.attn.inner.out",
            f"{theirs}.ffn_norm": f"{ours}.mlp.norm",
            f"{theirs}.ffn_up": f"{ours}.mlp.inner.up",
            f"{theirs}.ffn_down": f"{ours}.mlp.inner.down",
        }
    found = list[tuple[str, np.ndarray[Any, Any]]]()
    for theirs, ours in pairs.items():
        stem, _, last = ours.rpartition(".")
        names = [f"{stem}.{part}" for part in last.split("|")]
        for kind in ("weight", "bias"):
            if f"{names[0]}.{kind}" in state:
                tensor = np.concatenate([state[f"{name}.{kind}"] for name in names])
                tensor = tensor[: model.config.vocab_size] if theirs in ("token_embd", "output") else tensor
                found.append((f"{theirs}.{kind}", tensor))
    return found


def run_gguf(path: Path, tokens: list[int]) -> np.ndarray[Any, Any] | str:
    """The logits that llama.cpp gives, or why there are none."""
    if find_spec("llama_cpp") is None:
        return "the runtime is not installed"
    with TemporaryDirectory() as place:
        out = Path(place) / "logits.npy"
        words = [str(LLAMA_LOGITS), str(path.absolute()), str(out), *map(str, tokens)]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, errors="replace", check=False)
        if done.returncode < 0:
            return f"llama.cpp crashed, exit code {done.returncode}"
        if done.returncode:
            path.unlink()
            raise RuntimeError(f"llama.cpp could not run {path}, which was removed: {done.stderr.strip()}")
        logits: np.ndarray[Any, Any] = np.load(out)
        return logits
