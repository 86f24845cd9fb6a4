"""Text generation, the engine that runs a model, serving, import and export."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plume.config.fields import (
    DEVICE,
    MODEL,
    CachePrecision,
    Checked,
    EngineKind,
    EnginePrecision,
    Overflow,
    Speculation,
    TopPRule,
    WeightPrecision,
    about,
    at_home,
    below_one,
    fractions,
    not_positive,
    option,
    refuse,
)

PACKED = ("float24", "int8", "int4")  # precisions of weights that only the CPU engine has
SERVED = "model folders, run folders or hub names; NAME=MODEL renames one"


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen, and when to stop."""

    max_new_tokens: int | None = option(100, "maximum number of new tokens; none: up to the context length")
    min_new_tokens: int = option(0, "minimum number of new tokens before an end token or stop string")
    temperature: float = option(1.0, "softmax temperature; 0: greedy")
    top_k: int | None = option(40, "sample from the k most likely tokens; none: all")
    top_p: float | None = option(None, "nucleus sampling: smallest set of tokens with this probability")
    top_p_rule: TopPRule = option("usual", "openai: GPT-2's own code, which keeps one token fewer")
    min_p: float | None = option(None, "minimum probability relative to the most likely token")
    typical_p: float | None = option(None, "locally typical sampling with this probability mass")
    repetition_penalty: float = option(1.0, "above 1: tokens of prompt and output become less likely")
    presence_penalty: float = option(0.0, "subtracted from the logit of every generated token")
    frequency_penalty: float = option(0.0, "subtracted from the logit once per occurrence of a token")
    no_repeat_ngram: int = option(0, "n-grams of this length do not repeat; 0: off")
    logit_bias: dict[int, float] = field(default_factory=dict, metadata=about("added to the logits of these token ids"))
    stop: tuple[str, ...] = option((), "stop strings; they are not part of the output")
    stop_tokens: tuple[int, ...] = option((), "token ids that end generation, besides the end token")
    ignore_eos: bool = option(False, "continue after the end token")
    n: int = option(1, "samples per prompt")
    best_of: int | None = option(None, "draw this many samples, return the n with the best mean log-probability")
    beams: int = option(1, "beam size; 1: sampling")
    length_penalty: float = option(1.0, "beam search: exponent of the length that scores are divided by")
    seed: int | None = option(None, "random seed; unset: a fresh one, which the result reports")
    logprobs: int | None = option(None, "return log-probabilities with this many alternatives")
    overflow: Overflow = option("refuse", "beyond the context: error, truncate the prompt, or slide the window")
    token_healing: bool = option(False, "let the first token complete the last word of the prompt")
    speculate: Speculation = option("off", "speculative decoding: prompt lookup, or a draft model")
    speculate_tokens: int = option(6, "draft tokens per step")

    def __post_init__(self) -> None:
        refuse([*fractions(self), *(sentence for wrong, sentence in self._checks() if wrong)])

    @property
    def sequences(self) -> int:
        """How many are written for one prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def unsearched(self) -> str:
        """The options that are set and that a beam search, which draws nothing, cannot use."""
        unset: dict[str, tuple[object, ...]] = dict.fromkeys(("top_p", "min_p", "typical_p", "best_of"), (None,))
        unset |= {"temperature": (0, 1), "top_k": (None, 1, SamplingConfig.top_k), "top_p_rule": ("usual",)}
        unset |= {"token_healing": (False,), "speculate": ("off",), "overflow": ("refuse", "truncate")}
        found = {name: getattr(self, name) for name in unset}
        return ", ".join(f"{name}={value}" for name, value in found.items() if value not in unset[name])

    def _checks(self) -> Iterator[tuple[bool, str]]:
        limit, t = self.max_new_tokens, self.temperature
        yield limit is not None and limit < 1, f"max_new_tokens={limit} must be at least 1, or none"
        yield self.min_new_tokens < 0, f"min_new_tokens={self.min_new_tokens} cannot be negative; 0 turns it off"
        yield not 0 <= t < math.inf, f"temperature={t} must be 0 (the likeliest token) or more, for example 0.8"
        yield self.top_k is not None and self.top_k < 1, f"top_k={self.top_k} must be at least 1, or none for all"
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            yield value is not None and not 0 < value <= 1, f"{name}={value} must be above 0 and at most 1, e.g. 0.9"
        yield (
            not 0 < self.repetition_penalty < math.inf,
            f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is off",
        )
        yield self.no_repeat_ngram < 0, f"no_repeat_ngram={self.no_repeat_ngram} cannot be negative; 0 is off"
        for name in ("presence_penalty", "frequency_penalty", "length_penalty"):
            yield not math.isfinite(getattr(self, name)), f"{name}={getattr(self, name)} must be a finite number"
        biases = list(self.logit_bias.values())
        yield any(map(math.isnan, biases)), f"logit_bias={self.logit_bias} must hold numbers"
        yield "" in self.stop, "stop has a text of zero length, which would end every answer; leave it out"
        yield self.n < 1, f"n={self.n} must be at least 1"
        yield self.best_of is not None and self.best_of < self.n, f"best_of={self.best_of} must be at least n={self.n}"
        yield self.beams < 1, f"beams={self.beams} must be at least 1"
        yield self.beams > 1 and self.n > self.beams, f"n={self.n} texts cannot come out of beams={self.beams}"
        yield (
            self.beams > 1 and self.unsearched != "",
            f"beams={self.beams} draws nothing and cannot use {self.unsearched}",
        )
        yield self.seed is not None and self.seed < 0, f"seed={self.seed} cannot be negative"
        yield self.logprobs is not None and self.logprobs < 0, f"logprobs={self.logprobs} cannot be negative"
        yield self.speculate_tokens < 1, f"speculate_tokens={self.speculate_tokens} must be at least 1"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked):
    """The engine that runs a model."""

    engine: EngineKind = option("auto", "cpu: compiled kernels; auto: torch with a GPU, else cpu")
    precision: EnginePrecision = option(
        "float32", "of the weights; float24, int8, int4: CPU engine; auto: float24 if as exact"
    )
    device: str = option("auto", f"of the torch engine: {DEVICE}")
    threads: int | None = option(None, "CPU threads; unset: OMP_NUM_THREADS, or all cores")
    slots: int = option(8, "sequences in the key-value cache at once")
    cache_precision: CachePrecision = option("float32", "of the key-value cache; float16, int8: CPU engine")
    compile: bool = option(False, "use torch.compile")
    draft: Path | None = option(None, "folder of the draft model for speculate=draft")

    def _problems(self) -> Iterator[str]:
        if self.threads is not None and self.threads < 1:
            yield f"threads={self.threads} must be at least 1, or none for all cores"
        if self.slots < 1:
            yield f"slots={self.slots} must be at least 1, for example 8"
        torch_only = self.precision in ("bfloat16", "float16")
        if self.engine == "torch" and self.precision in PACKED:
            yield f"precision={self.precision} needs engine=cpu; torch has float32, bfloat16 and float16"
        if self.cache_precision != "float32" and (self.engine == "torch" or torch_only):
            yield f"cache_precision={self.cache_precision} needs engine=cpu; torch caches in the weights' precision"
        if self.engine == "cpu" or self.packed_only:
            for name, wrong in {"compile": self.compile, "device": self.device not in ("auto", "cpu")}.items():
                if wrong:
                    yield f"{name}={getattr(self, name)} is for torch; engine=torch precision=float32 takes it"
        if self.engine == "cpu" and torch_only:
            yield f"precision={self.precision} needs engine=torch; the CPU engine has float32, float24, int8 and int4"

    @property
    def packed_only(self) -> bool:
        """Whether only the CPU engine has these precisions."""
        return self.precision in PACKED or self.cache_precision != "float32"


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Checked):
    """A prompt, a file of prompts, or a conversation at the terminal if there is neither."""

    model: str = field(metadata=about(MODEL))
    prompt: str | None = option(None, "prompt; unset: standard input as one prompt, or a conversation")
    prompts: Path | None = option(None, 'file with a prompt per line (-: stdin), or .jsonl with "prompt" in each line')
    out: Path | None = option(None, "write the answers to `prompts` to this .jsonl; unset: standard output")
    unconditional: bool = option(False, "sample from the start token")
    sampling: SamplingConfig = option(SamplingConfig(), "sampling and stopping")
    engine: EngineConfig = option(EngineConfig(), "what runs the model")

    def _problems(self) -> Iterator[str]:
        given = {"prompt": self.prompt is not None, "prompts": self.prompts is not None}
        named = [name for name, there in (given | {"unconditional": self.unconditional}).items() if there]
        if len(named) > 1:
            yield f"{' and '.join(named)} are different beginnings; give one of them"
        if self.out is not None and self.prompts is None:
            yield f"out={self.out} is for the answers to prompts; redirect the standard output of a single prompt"


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Texts to a file of vectors."""

    model: str = field(metadata=about(MODEL))
    texts: Path = field(metadata=about("file with a text per line, or a table: .csv, .tsv, .jsonl, .json, .parquet"))
    out: Path = field(metadata=about(".npy file to write, a float32 row per text; ids are beside it as .ids.jsonl"))
    column: str | None = option(None, "column of a table that holds the text; unset: one with a usual name")
    id: str | None = option(None, "column of a table that holds the ids; unset: id, or else the line number")
    pool: Literal["mean", "cls", "max", "summary"] | None = option(
        None, "how hidden states become one vector; unset: as modules.json says, else mean"
    )
    layers: tuple[int, ...] = option((), "0: embeddings, -1: the last one; several one behind another; unset: the last")
    normalize: bool = option(False, "scale vectors to length 1")
    batch: int = option(32, "texts per forward pass")
    device: str = option("auto", DEVICE)

    def __post_init__(self) -> None:
        refuse(below_one(self, "batch"))


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Copy a model into a checked model folder."""

    model: str = field(metadata=about("hub name, or a folder made elsewhere"))
    out: Path = field(metadata=about("model folder to write"))
    architecture: str | None = option(None, "its class in transformers, such as BertForMaskedLM")
    tokenizer: Path | None = option(None, "folder with the tokenizer; unset: the model's folder")
    precision: WeightPrecision = option("float32", "of the weights in the new folder; float16 halves its size")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Convert a model folder to another format."""

    model: str = field(metadata=about(MODEL))
    format: Literal["gguf", "onnx"] = option("gguf", "gguf: llama.cpp; onnx: onnxruntime")
    precision: Literal["float32", "float16", "int8", "int4"] = option(
        "float32", "int8 is GGUF's q8_0, int4 its iq4_nl; onnx has float32 only"
    )
    cache: bool | None = option(None, "onnx: key-value cache as input and output; unset: for next-token models")
    out: Path | None = option(None, "file to write; unset: in the model folder, or here for a hub name")

    def __post_init__(self) -> None:
        named = None if self.out is None else self.out.suffix.lower()
        problems = [f"cache={self.cache} is for format=onnx"] * (self.cache is not None and self.format != "onnx")
        if named in (".gguf", ".onnx") and named != f".{self.format}":
            problems.append(f"out={self.out} is named like another format than format={self.format}; set one of them")
        refuse(problems)

    @property
    def path(self) -> Path:
        name = f"model-{self.precision}.gguf" if self.format == "gguf" else f"model{'-cache' * bool(self.cache)}.onnx"
        folder = at_home(self.model)
        return (folder / name if folder.is_dir() else Path(name)) if self.out is None else self.out


@dataclass(frozen=True, kw_only=True)
class DecodeBenchConfig:
    """Generation speed on this machine."""

    model: Path | None = option(None, "gpt2 folder; unset: random weights of the preset")
    preset: str = option("gpt2", "architecture: gpt2, gpt2-medium, ...")
    prompt_tokens: int = option(32, "tokens per prompt")
    new_tokens: int = option(128, "new tokens per sequence")
    batch: int = option(8, "sequences of the batched run")
    prefill_tokens: int = option(512, "prompt tokens of the prefill run")
    rounds: int = option(3, "repetitions; the fastest counts")
    threads: int | None = option(None, "CPU threads; unset: OMP_NUM_THREADS, or all cores")

    def __post_init__(self) -> None:
        counts = ("prompt_tokens", "new_tokens", "batch", "prefill_tokens", "rounds", "threads")
        refuse(below_one(self, *counts))


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Checked):
    """The HTTP server: models, keys, limits."""

    models: tuple[str, ...] = field(metadata=about(SERVED))
    host: str = option("127.0.0.1", "address to listen on; others than this machine need keys")
    port: int = option(8000, "port; 0: any free one")
    keys: tuple[str, ...] = option((), "SHA-256 of each API key; `plume serve --new-key` makes a pair")
    runs: Path | None = option(None, "folder of runs to show; unset: beside a run that is served")
    engine: EngineConfig = option(EngineConfig(), "what runs the models; slots follow from batch")
    batch: int = option(16, "maximum concurrent sequences per model")
    queue: int = option(256, "maximum queued sequences; more get status 429")
    timeout: float = option(120.0, "seconds from the arrival of a request to the end of its answer")
    shutdown_timeout: float = option(30.0, "seconds for running requests to finish at shutdown")
    max_new_tokens: int = option(4096, "maximum new tokens per request, over all its samples")
    max_body_bytes: int = option(2_000_000, "maximum request size in bytes")
    rate_limit: float = option(0.0, "requests per minute per client; 0: no limit")
    access_log: Path | None = option(None, "file for the access log as JSON lines; unset: standard error")
    header_timeout: float = option(10.0, "seconds to receive the headers of a request")
    body_timeout: float = option(30.0, "seconds to receive the body of a request")
    write_timeout: float = option(20.0, "seconds that a client may leave its answer unread")
    checkpoint_bytes: int = option(4_000_000_000, "memory of open checkpoints; beyond it idle ones are closed")
    connections: int = option(1000, "maximum open connections; beyond them idle ones are closed")
    connections_per_address: int = option(500, "maximum open connections of one address, such as a proxy")
    telemetry: bool = option(False, "send a trace of each request by OpenTelemetry, set up by the OTEL_ variables")

    def _problems(self) -> Iterator[str]:
        yield from below_one(self, "batch", "queue", "max_new_tokens", "max_body_bytes")
        yield from below_one(self, "checkpoint_bytes", "connections", "connections_per_address")
        yield from not_positive(self, {"timeout": 120, "shutdown_timeout": 30})
        yield from not_positive(self, {"header_timeout": 10, "body_timeout": 30, "write_timeout": 20})
        if not 0 <= self.port < 65536:
            yield f"port={self.port} must lie between 0 (any free one) and 65535, for example 8000"
        if self.rate_limit < 0:
            yield f"rate_limit={self.rate_limit} cannot be negative; 0 means no limit"
        if wrong := [key for key in self.keys if not re.fullmatch(r"[0-9a-f]{64}", key)]:
            yield f"keys: {wrong[0][:12]!r} is not a sha256; `plume serve --new-key` makes one with its key"
        if not self.keys and self.host not in ("127.0.0.1", "localhost", "::1"):
            yield f"host={self.host} is open to others, so it needs keys; `plume serve --new-key` makes one"


@dataclass(frozen=True, kw_only=True)
class ExploreConfig(ServeConfig):
    """The Explorer: a server with its page, or one file."""

    models: tuple[str, ...] = option(
        ("plume-en",), "models as for `plume serve`; unset: plume-en, the bundled English GPT"
    )
    save: Path | None = option(None, "write the page with its model's 8-bit weights to this HTML file; serve nothing")
    frame: bool = option(False, "let pages of this machine, such as notebooks, show the Explorer in a frame")
