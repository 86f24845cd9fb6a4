"""The sizes that have a name: published models, and small ones for a laptop."""

from __future__ import annotations

from typing import Any

from plume.config.errors import UserError, did_you_mean
from plume.config.model import ModelConfig


def _gpt2(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {"vocab_size": 50_257, "context": 1024} | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


def _gpt1(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {"vocab_size": 40_478, "context": 512, "norm": "post"} | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


def _gpt3(layers: int, width: int, heads: int) -> ModelConfig:
    # the paper alternates dense and banded layers without giving the width of the band: 256 is our choice
    return _gpt2(layers, width, heads, context=2048, band=256, dropout=0.0)


def _bert(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "vocab_size": 30_522,
        "context": 512,
        "norm": "post",
        "causal": False,
        "activation": "gelu",
        "segments": 2,
        "embed_norm": True,
        "summary": "tanh",
        "norm_eps": 1e-12,
    } | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


def _roberta(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {"vocab_size": 50_265, "segments": 1, "first_position": 2, "norm_eps": 1e-5} | more
    return _bert(layers, width, heads, **given)


def _transformer(layers: int, width: int, heads: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {
        "vocab_size": 37_000,
        "context": 512,
        "decoder_layers": layers,
        "norm": "post",
        "causal": False,
        "activation": "relu",
        "positions": "sinusoidal",
        "embed_scale": True,
        "attention_bias": False,
    } | more
    return ModelConfig(layers=layers, width=width, heads=heads, **given)


PRESETS: dict[str, ModelConfig] = {
    "openai-gpt": _gpt1(12, 768, 12),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "distilgpt2": _gpt2(6, 768, 12),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "bert-tiny": _bert(2, 128, 2),
    "bert-mini": _bert(4, 256, 4),
    "bert-small": _bert(4, 512, 8),
    "bert-medium": _bert(8, 512, 8),
    "bert-base-uncased": _bert(12, 768, 12),
    "bert-base-cased": _bert(12, 768, 12, vocab_size=28_996),
    "bert-large-uncased": _bert(24, 1024, 16),
    "bert-large-cased": _bert(24, 1024, 16, vocab_size=28_996),
    "distilbert": _bert(6, 768, 12, segments=0, summary="relu"),
    "roberta-base": _roberta(12, 768, 12),
    "roberta-large": _roberta(24, 1024, 16),
    "distilroberta": _roberta(6, 768, 12),
    "transformer-base": _transformer(6, 512, 8),
    "transformer-big": _transformer(6, 1024, 16, dropout=0.3),
    "transformer-decoder": _transformer(
        6, 512, 8, decoder_layers=0, causal=True, context=4000, embed_scale=False, attention_bias=True
    ),
    # small ones that train in minutes on two cores
    "gpt-laptop": _gpt1(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "gpt2-char": _gpt2(4, 128, 4, vocab_size=128, context=64, dropout=0.0),
    "gpt2-laptop": _gpt2(4, 256, 4, vocab_size=4096, context=256, dropout=0.0),
    "gpt3-laptop": _gpt2(4, 256, 4, vocab_size=4096, context=256, band=64, dropout=0.0),
    "bert-laptop": _bert(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "roberta-laptop": _roberta(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "transformer-laptop": _transformer(2, 128, 4, vocab_size=4096, context=128),
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        all_presets = f"; all: {', '.join(PRESETS)}"
        raise UserError(f"there is no preset {name!r}{did_you_mean(name, PRESETS) or all_presets}")
    return PRESETS[name]
