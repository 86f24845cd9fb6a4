"""A model's architecture as one frozen table, and the presets: published sizes, and small ones for a laptop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from plume.config.fields import Checked, UserError, about, below_one, did_you_mean, not_probability, option


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Checked):
    """One stack of Transformer blocks, or two. Fields say how it behaves, never which checkpoint it is."""

    vocab_size: int = field(metadata=about("vocabulary size; in training it follows the tokenizer"))
    context: int = field(metadata=about("context length: maximum sequence length in tokens"))
    layers: int = field(metadata=about("number of Transformer blocks"))
    heads: int = field(metadata=about("attention heads per block; must divide width"))
    width: int = field(metadata=about("hidden size (d_model)"))
    mlp_width: int | None = option(None, "feed-forward size; unset: 4 * width")
    decoder_layers: int = option(0, "decoder blocks of an encoder-decoder; 0: a single stack")
    norm: Literal["pre", "post"] = option("pre", "layer norm: pre (GPT-2, GPT-3) or post (Transformer, GPT-1, BERT)")
    causal: bool = option(True, "causal attention mask; false: bidirectional (BERT, RoBERTa)")
    band: int = option(0, "GPT-3's banded attention: window of every second layer; 0: full attention")
    activation: Literal["gelu", "gelu_tanh", "relu"] = option(
        "gelu_tanh", "gelu_tanh: GPT, GPT-2, GPT-3; gelu: BERT, RoBERTa; relu: Transformer"
    )
    recurrent: bool = option(False, "LSTM layers in place of Transformer blocks; needs heads=1, positions=none")
    positions: Literal["learned", "sinusoidal", "none"] = option(
        "learned", "position embeddings; sinusoidal: the original Transformer; none: recurrent models"
    )
    first_position: int = option(0, "index of the first position; RoBERTa: 2")
    segments: int = option(0, "segment (token type) embeddings; BERT: 2, 0: none")
    embed_norm: bool = option(False, "layer norm on the summed embeddings, as in BERT")
    embed_scale: bool = option(False, "multiply token embeddings by sqrt(width), as in the Transformer")
    attention_bias: bool = option(True, "biases in the attention projections")
    summary: Literal["last", "tanh", "relu"] = option(
        "last", "pooling for classification: last token, or first token through a dense layer"
    )
    tie_embeddings: bool = option(True, "use the token table as output weights")
    norm_eps: float = option(1e-5, "epsilon of layer norms")
    dropout: float = option(0.1, "dropout probability")
    vocab_multiple: int = option(1, "pad the embedding table to a multiple of this")

    def _problems(self) -> Iterator[str]:
        yield from below_one(self, "vocab_size", "context", "layers", "heads", "width", "vocab_multiple")
        if self.mlp_width is not None and self.mlp_width < 1:
            yield f"mlp_width={self.mlp_width} must be at least 1, or unset for {4 * self.width}"
        if min(self.heads, self.width) > 0 and self.width % self.heads:
            divisors = (h for h in range(1, self.width + 1) if self.width % h == 0)
            near = min(divisors, key=lambda h: abs(h - self.heads))
            yield f"heads={self.heads} does not divide width={self.width}; heads={near} would"
        if self.positions == "sinusoidal" and self.width % 2:
            yield f"width={self.width} must be even for sinusoidal positions; {self.width + 1} would do"
        if self.recurrent != (self.positions == "none"):
            yield f"positions={self.positions!r} does not fit recurrent={self.recurrent}; none is for recurrent models"
        wrong = [f"{name}={value!r}" for name, value in RECURRENT.items() if getattr(self, name) != value]
        if self.recurrent and wrong:
            yield f"a recurrent model needs {', '.join(wrong)}"
        yield from not_probability(self, {"dropout": 0.1})
        for name in ("band", "decoder_layers", "segments", "first_position"):
            if getattr(self, name) < 0:
                yield f"{name}={getattr(self, name)} cannot be negative; 0 turns it off"

    @property
    def ffn_width(self) -> int:
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def table_rows(self) -> int:
        """Rows of the token table: the vocabulary, padded."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def band_of(self, layer: int) -> int:
        """Attention window of a layer; 0 means full attention. Layers 1, 3, 5, ... are the banded ones."""
        return self.band if layer % 2 else 0


RECURRENT = {  # what else a recurrent stack is
    "heads": 1,
    "mlp_width": None,
    "decoder_layers": 0,
    "norm": "post",
    "causal": True,
    "band": 0,
    "first_position": 0,
    "segments": 0,
    "embed_norm": False,
    "embed_scale": False,
    "summary": "last",
}


def _lstm(layers: int, width: int, **more: Any) -> ModelConfig:
    given: dict[str, Any] = {"vocab_size": 40_478, "context": 512, "norm": "post", "positions": "none"} | more
    return ModelConfig(layers=layers, width=width, heads=1, recurrent=True, **given)


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
    "transformer-decoder": _transformer(6, 512, 8, decoder_layers=0, causal=True, context=4000, attention_bias=True),
    "lstm": _lstm(1, 2048),  # the baseline of GPT-1's paper
    # small ones that train in minutes on two cores
    "gpt-laptop": _gpt1(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "gpt2-char": _gpt2(4, 128, 4, vocab_size=128, context=64, dropout=0.0),
    "gpt2-laptop": _gpt2(4, 256, 4, vocab_size=4096, context=256, dropout=0.0),
    "gpt3-laptop": _gpt2(4, 256, 4, vocab_size=4096, context=256, band=64, dropout=0.0),
    "bert-laptop": _bert(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "roberta-laptop": _roberta(4, 128, 4, vocab_size=4096, context=128, dropout=0.0),
    "lstm-laptop": _lstm(1, 256, vocab_size=4096, context=128, dropout=0.0),
    "transformer-laptop": _transformer(2, 128, 4, vocab_size=4096, context=128),
}


def preset(name: str) -> ModelConfig:
    if name not in PRESETS:
        all_presets = f"; all: {', '.join(PRESETS)}"
        raise UserError(f"there is no preset {name!r}{did_you_mean(name, PRESETS) or all_presets}")
    return PRESETS[name]
