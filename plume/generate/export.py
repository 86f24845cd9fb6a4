"""A model for other runtimes: GGUF for llama.cpp, ONNX with and without cache; each is run and compared afterwards."""

# B batch, T tokens, P tokens in the cache, L layers, H heads, K head width, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plume.config import ExportConfig, ModelConfig, UserError
from plume.files import aside
from plume.text import Tokenizer, load_tokenizer
from plume.weights import load_model, resolve

if TYPE_CHECKING:
    from plume.heads import Model

# how far the written file's logits may be from ours, relative to their spread
TOLERANCE = {"float32": 1e-2, "float16": 2e-2, "int8": 1.5e-1}  # llama.cpp has a GELU table of half precision
GGUF_TYPES = {"float32": ("F32", "ALL_F32"), "float16": ("F16", "MOSTLY_F16"), "int8": ("Q8_0", "MOSTLY_Q8_0")}
CHECKED_TOKENS = 16


@dataclass(frozen=True)
class Exported:
    """What was written and how well it agrees."""

    path: Path
    checked_with: str | None  # None: the runtime is not installed, so it was not run
    difference: float  # largest difference of logits, relative to their spread

    def __str__(self) -> str:
        if self.checked_with is None:
            return f"{self.path}: written, not checked (the runtime is not installed)"
        return (
            f"{self.path}: checked with {self.checked_with}, logits agree within {self.difference:.1e} of their spread"
        )


def export(config: ExportConfig) -> Exported:
    """Write a model folder in another format, run it, and compare."""
    folder = resolve(config.model)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    if model.kind != "next-token" or model.config.decoder_layers or not model.config.causal:
        raise UserError(f"only models that predict the next token can be exported, not one with a {model.kind} head")
    path = config.path
    if config.format == "gguf":
        refuse_gguf(model.config, tokenizer)
        with aside(path) as hidden:
            write_gguf(model, tokenizer, hidden, config.precision, folder.resolve().name)
        runner, logits = run_gguf(path, _sample_tokens(model.config))
    else:
        if config.precision != "float32":
            raise UserError(f"precision={config.precision} is for GGUF; ONNX is written as float32")
        with aside(path) as hidden:
            write_onnx(model, hidden, cache=config.cache)
        runner, logits = run_onnx(path, model.config, _sample_tokens(model.config), cache=config.cache)
    if logits is None:
        return Exported(path, None, float("nan"))
    return Exported(path, runner, _agreement(model, logits, path, config.precision))


def _sample_tokens(config: ModelConfig) -> list[int]:
    count = min(CHECKED_TOKENS, config.context)
    return [int(i) for i in np.random.default_rng(0).integers(0, config.vocab_size, count)]


def _agreement(model: Model, logits: np.ndarray[Any, Any], path: Path, precision: str) -> float:
    import torch

    with torch.inference_mode():
        ours = model(torch.tensor([_sample_tokens(model.config)]))[0].numpy()
    difference = float(np.abs(logits - ours).max() / ours.std())
    if not difference < TOLERANCE[precision]:
        path.unlink()
        raise RuntimeError(f"{path} did not give the model's logits back (off by {difference:.2g}) and was removed")
    return difference


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
    writer.add_feed_forward_length(c.mlp_width)
    writer.add_head_count(c.heads)
    writer.add_layer_norm_eps(c.norm_eps)
    tensor_type, file_type = GGUF_TYPES[precision]
    writer.add_file_type(gguf.LlamaFileType[file_type])
    _write_vocabulary(writer, tokenizer, c, gguf)
    kind = gguf.GGMLQuantizationType[tensor_type]
    for tensor_name, tensor in gguf_tensors(model):
        if tensor.ndim == 1 or tensor_name == "position_embd.weight" or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor_name, tensor.astype(np.float32))
        else:
            if precision == "int8" and tensor.shape[-1] % 32:
                raise UserError(
                    f"precision=int8, which is GGUF's q8_0, needs widths that are multiples of 32, but {tensor_name} "
                    f"has {tensor.shape[-1]}; float16 takes any"
                )
            writer.add_tensor(tensor_name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
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
    """Every tensor under llama.cpp's name; the output head is the token table."""
    state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
    body = "body."
    pairs = {
        "token_embd": f"{body}embed.tokens",
        "position_embd": f"{body}embed.positions",
        "output_norm": f"{body}norm",
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
                tensor = tensor[: model.config.vocab_size] if theirs == "token_embd" else tensor
                found.append((f"{theirs}.{kind}", tensor))
    return found


def run_gguf(path: Path, tokens: list[int]) -> tuple[str, np.ndarray[Any, Any] | None]:
    """The logits that llama.cpp gives, when it is installed."""
    try:
        import llama_cpp
    except ImportError:
        return "llama.cpp", None
    silence_llama()
    llama = llama_cpp.Llama(str(path), n_ctx=len(tokens), logits_all=True, type_k=0, type_v=0, verbose=False)
    try:
        llama.eval(tokens)
        return "llama.cpp", np.array(llama.scores[: len(tokens)])
    finally:
        llama.close()


def silence_llama() -> None:
    """llama.cpp logs to the terminal by itself; failures still come back as exceptions."""
    import llama_cpp

    if not _KEPT:
        _KEPT.append(llama_cpp.llama_log_callback(lambda *_: None))  # C holds no reference to it
        llama_cpp.llama_log_set(_KEPT[0], None)


_KEPT: list[Any] = []


# ---- ONNX --------------------------------------------------------------------------------------------------------


def write_onnx(model: Model, path: Path, *, cache: bool) -> None:
    import contextlib
    import io
    import logging
    import warnings

    import torch

    from plume.generate.onnx_form import Plain, WithCache

    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError("writing ONNX needs the onnx and onnxscript packages: pip install 'plume-lm[export]'") from None
    c, dim = model.config, torch.export.Dim
    tokens = torch.zeros(2, 3, dtype=torch.long)
    batch, length, past = dim("batch"), dim("tokens", max=c.context), dim("past", max=c.context)
    form: torch.nn.Module = Plain(model)
    args: tuple[torch.Tensor, ...] = (tokens,)
    shapes: dict[str, Any] = {"tokens": {0: batch, 1: length}}
    if cache:
        form = WithCache(model)
        args = (tokens, torch.zeros(c.layers, 2, 2, c.heads, 5, c.head_width))
        shapes["past"] = {2: batch, 4: past}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            form.eval(),
            args,
            str(path),
            input_names=list(shapes),
            output_names=["logits", "present"] if cache else ["logits"],
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=sum(p.numel() for p in model.parameters()) > 400_000_000,
            verbose=False,
        )


def run_onnx(
    path: Path, config: ModelConfig, tokens: list[int], *, cache: bool
) -> tuple[str, np.ndarray[Any, Any] | None]:
    """The logits that onnxruntime gives, when it is installed; with a cache, read in two parts."""
    try:
        import onnxruntime
    except ImportError:
        return "onnxruntime", None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = np.array([tokens], np.int64)
    if not cache:
        return "onnxruntime", session.run(["logits"], {"tokens": ids})[0][0]
    past = np.zeros((config.layers, 2, 1, config.heads, 0, config.head_width), np.float32)
    half = len(tokens) // 2
    first, past = session.run(["logits", "present"], {"tokens": ids[:, :half], "past": past})
    second, _ = session.run(["logits", "present"], {"tokens": ids[:, half:], "past": past})
    return "onnxruntime", np.concatenate([first[0], second[0]])
