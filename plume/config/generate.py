"""How a model writes: sampling, the engine that runs it, export to other engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plume.config.errors import UserError, refuse


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen, and when to stop."""

    max_new_tokens: int | None = 100  # none means up to the end of the context
    min_new_tokens: int = 0  # no end and no stop before this many
    temperature: float = 1.0  # 0 always takes the likeliest token
    top_k: int | None = 40  # only the k likeliest tokens; none means all
    top_p: float | None = None  # only the likeliest tokens that together have this probability
    top_p_rule: Literal["usual", "openai"] = "usual"  # openai: GPT-2's own code, which keeps one token fewer
    min_p: float | None = None  # only tokens at least this likely, relative to the likeliest
    typical_p: float | None = None  # only the tokens nearest to the expected surprise, up to this probability
    repetition_penalty: float = 1.0  # above 1 makes every token seen so far less likely
    presence_penalty: float = 0.0  # taken off the score of every token written so far
    frequency_penalty: float = 0.0  # taken off once for each time a token was written
    no_repeat_ngram: int = 0  # no sequence of this many tokens comes twice; 0 allows all
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the scores of these ids
    stop: tuple[str, ...] = ()  # texts that end the answer; they are not part of it
    stop_tokens: tuple[int, ...] = ()  # ids that end the answer, beside the end token
    ignore_end: bool = False  # write on when the end token comes
    n: int = 1  # samples of each prompt
    best_of: int | None = None  # draw this many and keep the n with the highest mean log-probability
    beams: int = 1  # more than one searches for the likeliest text instead of sampling
    length_penalty: float = 1.0  # beam search divides by length to this power
    seed: int | None = None  # unset draws a fresh one, which the result names
    logprobs: int | None = None  # report log-probabilities, with this many alternatives
    overflow: Literal["refuse", "truncate", "slide"] = "refuse"  # a prompt past the context: error, cut, or move on
    heal: bool = False  # let the first token complete a word that the prompt's end has cut
    speculate: Literal["off", "lookup", "draft"] = "off"  # guess ahead from the text so far, or with a smaller model
    speculate_tokens: int = 6  # how many tokens are guessed at once

    def __post_init__(self) -> None:
        refuse(sentence for wrong, sentence in self._checks() if wrong)

    @property
    def sequences(self) -> int:
        """How many are written for one prompt."""
        return self.n if self.best_of is None else self.best_of

    def _checks(self) -> Iterator[tuple[bool, str]]:
        limit, t = self.max_new_tokens, self.temperature
        yield limit is not None and limit < 1, f"max_new_tokens={limit} must be at least 1, or none"
        yield self.min_new_tokens < 0, f"min_new_tokens={self.min_new_tokens} cannot be negative; 0 turns it off"
        yield not 0 <= t < math.inf, f"temperature={t} must be 0 (the likeliest token) or more, for example 0.8"
        yield self.top_k is not None and self.top_k < 1, f"top_k={self.top_k} must be at least 1, or none for all"
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            yield value is not None and not 0 < value <= 1, f"{name}={value} must be above 0 and at most 1, e.g. 0.9"
        yield self.repetition_penalty <= 0, f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is off"
        yield self.no_repeat_ngram < 0, f"no_repeat_ngram={self.no_repeat_ngram} cannot be negative; 0 is off"
        yield "" in self.stop, "stop has a text of zero length, which would end every answer; leave it out"
        yield self.n < 1, f"n={self.n} must be at least 1"
        yield self.best_of is not None and self.best_of < self.n, f"best_of={self.best_of} must be at least n={self.n}"
        yield self.beams < 1, f"beams={self.beams} must be at least 1"
        yield self.beams > 1 and self.n > self.beams, f"n={self.n} texts cannot come out of beams={self.beams}"
        yield self.seed is not None and self.seed < 0, f"seed={self.seed} cannot be negative"
        yield self.logprobs is not None and self.logprobs < 0, f"logprobs={self.logprobs} cannot be negative"
        yield self.speculate_tokens < 1, f"speculate_tokens={self.speculate_tokens} must be at least 1"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What runs a model."""

    engine: Literal["auto", "cpu", "torch"] = "auto"  # auto: the compiled CPU engine, or torch where there is a GPU
    precision: Literal["float32", "int8", "bfloat16", "float16"] = "float32"  # of the weights; int8: CPU engine only
    device: str = "auto"  # for torch: auto, cpu, cuda, cuda:1, mps
    threads: int | None = None  # unset means all cores
    slots: int = 8  # sequences that are kept and advanced together
    compile: bool = False  # let torch compile the model
    draft: Path | None = None  # folder of a smaller model with the same tokenizer, for speculate=draft

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads={self.threads} must be at least 1, or none for all cores")
        if self.slots < 1:
            raise UserError(f"slots={self.slots} must be at least 1, for example 8")
        if self.engine == "torch" and self.precision == "int8":
            raise UserError("precision=int8 needs engine=cpu; torch has float32, bfloat16 and float16")
        if self.engine == "cpu" and self.precision in ("bfloat16", "float16"):
            raise UserError(f"precision={self.precision} needs engine=torch; the CPU engine has float32 and int8")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """A prompt, a file of prompts, or a conversation at the terminal when there is neither."""

    model: str  # model folder, run folder or hub name
    prompt: str | None = None  # the text to continue
    prompts: Path | None = None  # a file with one prompt per line, or .jsonl with "prompt" in each line
    out: Path | None = None  # where the answers to a file of prompts go, as .jsonl; unset means the standard output
    unconditional: bool = False  # a sample from the start token
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """A model folder in another format."""

    model: str  # a model folder, a run folder or a hub name
    format: Literal["gguf", "onnx"] = "gguf"  # gguf: llama.cpp; onnx: onnxruntime and others
    precision: Literal["float32", "float16", "int8"] = "float32"  # int8 is GGUF's q8_0; onnx has float32 only
    cache: bool = True  # onnx: with a key-value cache among inputs and outputs
    out: Path | None = None  # file to write; unset means in the folder that is named, or here for a hub name

    @property
    def path(self) -> Path:
        name = f"model-{self.precision}.gguf" if self.format == "gguf" else f"model{'-cache' * self.cache}.onnx"
        folder = Path(self.model).expanduser()
        return (folder / name if folder.is_dir() else Path(name)) if self.out is None else self.out


@dataclass(frozen=True, kw_only=True)
class DecodeBenchConfig:
    """How fast a GPT writes here, beside other engines."""

    model: Path | None = None  # a gpt2 folder; unset means random weights of the preset's shape
    preset: str = "gpt2"  # shape of the model: gpt2, gpt2-medium, ...
    prompt_tokens: int = 32  # in each prompt
    new_tokens: int = 128  # written after it
    batch: int = 8  # sequences in the batched run
    prefill_tokens: int = 512  # in the long prompt that is only read
    rounds: int = 3  # the best of these counts
    threads: int | None = None  # unset means all cores
    peers: tuple[str, ...] = ("llama_cpp", "ctranslate2", "transformers", "onnxruntime")  # packages to compare with
