"""What a model is: one frozen table of how it behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plume.config.errors import UserError, below_one, refuse


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One stack of Transformer blocks, or two. Fields say how it behaves, never which checkpoint it is."""

    vocab_size: int  # tokens it knows; in training it follows the tokenizer
    context: int  # longest sequence the position table covers
    layers: int  # Transformer blocks
    heads: int  # of attention in each block; they divide the width
    width: int  # numbers that stand for one token
    hidden: int | None = None  # width inside the MLP; unset means four times the width
    decoder_layers: int = 0  # more than none makes an encoder-decoder, `layers` being the encoder's
    norm: Literal["pre", "post"] = "pre"  # pre: GPT-2, GPT-3; post: Transformer, GPT-1, BERT, RoBERTa
    causal: bool = True  # a token sees only those before it; false: BERT, RoBERTa
    band: int = 0  # every second layer sees only this many tokens back; 0 means all layers see everything
    activation: Literal["gelu", "gelu_tanh", "relu"] = (
        "gelu_tanh"  # gelu_tanh: GPT, GPT-2, GPT-3; gelu: BERT, RoBERTa; relu: Transformer
    )
    positions: Literal["learned", "sinusoidal"] = "learned"  # sinusoidal: the original Transformer
    first_position: int = 0  # RoBERTa counts positions from 2
    segments: int = 0  # rows of the segment table; 0 means there is none
    embed_norm: bool = False  # BERT normalises the summed embeddings
    embed_scale: bool = False  # the original Transformer multiplies token embeddings by sqrt(width)
    attention_bias: bool = True  # q, k, v and out have biases
    summary: Literal["last", "tanh", "relu"] = "last"  # one vector per text: last token, or first through a dense layer
    norm_eps: float = 1e-5  # added to the variance in layer norms
    dropout: float = 0.1  # share of numbers set to 0 in training
    vocab_multiple: int = 1  # rows of the token table are padded up to a multiple of this

    def __post_init__(self) -> None:
        refuse(below_one(self, "vocab_size", "context", "layers", "heads", "width", "vocab_multiple"))
        if self.hidden is not None and self.hidden < 1:
            raise UserError(f"hidden={self.hidden} must be at least 1, or unset for {4 * self.width}")
        if self.width % self.heads:
            divisors = (h for h in range(1, self.width + 1) if self.width % h == 0)
            near = min(divisors, key=lambda h: abs(h - self.heads))
            raise UserError(f"heads={self.heads} does not divide width={self.width}; heads={near} would")
        if self.positions == "sinusoidal" and self.width % 2:
            raise UserError(f"width={self.width} must be even for sinusoidal positions; {self.width + 1} would do")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout={self.dropout} must be at least 0 and below 1, for example 0.1")
        if self.band < 0 or self.decoder_layers < 0 or self.segments < 0 or self.first_position < 0:
            raise UserError("band, decoder_layers, segments and first_position cannot be negative; 0 turns each off")

    @property
    def mlp_width(self) -> int:
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def table_rows(self) -> int:
        """Rows of the token table: the vocabulary, padded."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def band_of(self, layer: int) -> int:
        """How far back this layer sees; 0 means everything. Layers 1, 3, 5, ... are the banded ones."""
        return self.band if layer % 2 else 0
