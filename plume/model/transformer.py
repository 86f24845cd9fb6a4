"""The Transformer: cache, attention, MLP, residual, block, the stack, and two stacks as encoder and decoder."""

# B batch, T tokens asking, S tokens answering, H heads, K head width, D model width

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plume.config import ModelConfig
from plume.model.ragged import LengthGroups, Ragged, RaggedMask, query_rows

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {  # and in place
    "gelu": (F.gelu, torch.ops.aten.gelu_),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_, approximate="tanh")),
    "relu": (torch.relu, torch.relu_),
}
Mask = Tensor | RaggedMask | None
Memory = Tensor | tuple[Tensor, Tensor] | None  # the encoder's output, or its keys and values


class LayerCache:
    """Keys and values of one layer, written at each row's own place."""

    def __init__(self, cache: Cache, keys: Tensor, values: Tensor) -> None:
        self.cache, self.keys, self.values = cache, keys, values  # (B, H, capacity, K)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, K) behind what is there; return all (B, H, S, K) up to the longest row."""
        past, new = self.cache.longest, k.shape[2]
        if self.cache.ragged:
            rows, places = self.cache.rows[:, None], self.cache.positions(new)  # (B, 1), (B, T)
            self.keys[rows, :, places] = k.transpose(1, 2)
            self.values[rows, :, places] = v.transpose(1, 2)
        else:
            self.keys[:, :, past : past + new] = k
            self.values[:, :, past : past + new] = v
        return self.keys[:, :, : past + new], self.values[:, :, : past + new]


class Cache:
    """Keys and values of what has been read. The Transformer advances it, once per forward."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        layers = config.decoder_layers if config.decoder_layers > 0 else config.layers
        store = torch.zeros(layers, 2, batch, config.heads, capacity, config.head_width, device=device, dtype=dtype)
        self.layers = [LayerCache(self, pair[0], pair[1]) for pair in store]
        self.rows = torch.arange(batch, device=device)
        self.memory: list[tuple[Tensor, Tensor]] = []  # a decoder's keys and values of the encoder's output, by layer
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens read, row by row
        self.longest = 0
        self.ragged = False
        self.capacity = capacity

    def positions(self, new: int) -> Tensor:
        return self.lengths[:, None] + torch.arange(new, device=self.lengths.device)  # (B, T)

    def advance(self, new: int, lengths: Tensor | None) -> None:
        """Count `new` tokens as read, or only the first lengths[b] of them in row b."""
        if lengths is None:
            self.lengths = self.lengths + new
            self.longest += new
        else:
            self.lengths = self.lengths + lengths
            self.longest, shortest = int(self.lengths.max()), int(self.lengths.min())
            self.ragged = shortest < self.longest


def attention_mask(
    past: int,
    new: int,
    *,
    causal: bool,
    device: torch.device,
    positions: Tensor | None = None,
    lengths: Tensor | None = None,
    prefix: Tensor | None = None,
    documents: Tensor | None = None,
    band: int = 0,
) -> Tensor | None:
    """Who may look at whom, (B or 1, 1, T, S) with True for yes; None when plain causal or full attention says it.

    `positions` (B, T) places ragged rows in a cache; `lengths` (B,) hides padding from a bidirectional model;
    before `prefix` (B,) everybody sees everybody; `documents` (B, T) numbers packed texts that must not meet.
    """
    total = past + new
    keys = torch.arange(total, device=device)  # (S,)
    asking = keys[past:][None] if positions is None else positions  # (B or 1, T)
    seen: Tensor | None = None
    plain = not torch.compiler.is_exporting() and prefix is None and documents is None and (band == 0 or band >= total)
    if causal and not (plain and positions is None and (past == 0 or new == 1)):
        distance = asking[:, :, None] - keys  # (B or 1, T, S)
        seen = distance >= 0
        if band:
            seen = seen & (distance < band)
        if prefix is not None:
            inside = prefix[:, None, None]
            seen = seen | ((asking[:, :, None] < inside) & (keys < inside))
    if documents is not None:
        same = documents[:, :, None] == documents[:, None, :]  # (B, T, S)
        seen = same if seen is None else seen & same
    if lengths is not None and not causal:
        real = (keys < lengths[:, None])[:, None, :]  # (B, 1, S)
        seen = real if seen is None else seen & real
    return None if seen is None else seen[:, None]


class Attention(nn.Module):
    """Attention from x to memory; to x itself when there is no memory."""

    def __init__(self, config: ModelConfig, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = config.heads, config.dropout, causal
        self.q, self.k, self.v, self.out = (
            nn.Linear(config.width, config.width, bias=config.attention_bias) for _ in range(4)
        )

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (B, H, T, K)

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.k(source)), self.split(self.v(source))  # (B, H, S, K)

    def forward(
        self,
        x: Tensor,
        mask: Mask = None,
        cache: LayerCache | None = None,
        memory: Memory = None,
    ) -> Tensor:
        q = self.split(self.q(query_rows(x, mask)))  # (B, H, T, K)
        k, v = memory if isinstance(memory, tuple) else self.keys_and_values(x if memory is None else memory)
        if cache is not None:
            k, v = cache.append(k, v)  # S is now past + T
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))  # (B, T, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        if isinstance(mask, RaggedMask):
            return mask.attend(q, k, v, self.dropout if self.training else 0.0)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None and q.shape[2] == k.shape[2],
        )  # (B, H, T, K)


class Activation(nn.Module):
    """In place under inference mode: the widest tensor of a block would otherwise need new, cleared memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.activation

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.kind][torch.is_inference_mode_enabled()](x)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ffn_width)
        self.activation = Activation(config)
        self.down = nn.Linear(config.ffn_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))  # (B, T, D)


class Residual(nn.Module):
    """The one place that knows where the norm goes."""

    def __init__(self, config: ModelConfig, inner: nn.Module) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.inner = inner
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *args: Any) -> Tensor:  # (B, T, D)
        if self.pre:
            return query_rows(x, *args) + self.drop(self.inner(self.norm(x), *args))
        return self.norm(query_rows(x, *args) + self.drop(self.inner(x, *args)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, *, causal: bool, cross: bool) -> None:
        super().__init__()
        self.attn = Residual(config, Attention(config, causal=causal))
        self.cross = Residual(config, Attention(config, causal=False)) if cross else None
        self.mlp = Residual(config, MLP(config))

    def forward(
        self,
        x: Tensor,
        mask: Mask = None,
        cache: LayerCache | None = None,
        memory: Memory = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        x = self.attn(x, mask, cache)
        if self.cross is not None:
            x = self.cross(x, memory_mask, None, memory)
        return self.mlp(x)  # (B, T, D)


def sinusoids(rows: int, width: int) -> Tensor:
    """Sines in the first half of each row and cosines in the second, the layout of the paper's own code."""
    # always on the CPU: a model built on the meta device keeps these real, since no checkpoint holds them
    rates = 10_000.0 ** (-torch.arange(0, width, 2, device="cpu") / width)  # (D / 2,)
    angles = torch.arange(rows, device="cpu")[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)  # (rows, D)


class Embedding(nn.Module):
    """Token plus position plus segment."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rows = config.context + config.first_position
        self.first_position = config.first_position
        self.scale = math.sqrt(config.width) if config.embed_scale else 1.0
        self.tokens = nn.Embedding(config.table_rows, config.width)
        self.positions = nn.Embedding(rows, config.width) if config.positions == "learned" else None
        self.waves: Tensor
        waves = sinusoids(rows, config.width) if config.positions == "sinusoidal" else None
        self.register_buffer("waves", waves, persistent=False)
        self.segments = nn.Embedding(config.segments, config.width) if config.segments else None
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.embed_norm else None
        self.drop = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        places = positions + self.first_position
        x = self.tokens(tokens) * self.scale  # (B, T, D)
        table = self.waves if self.positions is None else self.positions.weight
        if table is not None:
            x = x + F.embedding(places, table)
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        if self.norm is not None:
            x = self.norm(x)
        return self.drop(x)


class Transformer(nn.Module):
    """A stack of blocks from token ids to hidden states.

    Rows of a batch are padded at the right to equal length; `lengths` says how much of each is real, and what is
    computed for the real part never depends on the padding.
    """

    reads_in_any_thread = True

    def __init__(self, config: ModelConfig, *, role: str = "alone") -> None:
        super().__init__()
        self.config = config
        self.causal = config.causal or role == "decoder"
        self.embed = Embedding(config)
        layers = config.decoder_layers if role == "decoder" else config.layers
        self.blocks = nn.ModuleList(self.block(role == "decoder") for _ in range(layers))
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps) if config.norm == "pre" else None
        initialise(self, config)

    def block(self, cross: bool) -> nn.Module:
        return Block(self.config, causal=self.causal, cross=cross)

    def forward(
        self,
        tokens: Tensor,
        *,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
        prefix: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        memory_lengths: Tensor | None = None,
    ) -> Tensor:
        new, past = tokens.shape[1], 0 if cache is None else cache.longest
        self.check_length(past + new, cache)
        places = cache.positions(new) if cache is not None and cache.ragged else None  # (B, T)
        masks = {
            band: attention_mask(
                past,
                new,
                causal=self.causal,
                device=tokens.device,
                positions=places,
                lengths=lengths,
                prefix=prefix,
                documents=documents,
                band=band,
            )
            for band in {0, self.config.band}
        }
        x = self.embed(tokens, self.place(tokens, past, places, documents), segments)  # (B, T, D)
        memory_mask = self.memory_mask(memory, memory_lengths)
        for i, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[i]
            x = block(x, masks[self.config.band_of(i)], layer_cache, self.remember(i, memory, cache), memory_mask)
        if cache is not None:
            cache.advance(new, lengths)
        return x if self.norm is None else self.norm(x)  # (B, T, D)

    def read_ragged(self, batch: Ragged | LengthGroups) -> Tensor:
        """The same blocks over sequences laid end to end: the hidden states that the batch wants, (A, D)."""
        x = self.embed(batch.tokens, batch.positions, batch.segments)  # (1, N, D)
        for i, block in enumerate(self.blocks):
            x = block(x, batch.mask(self.config.band_of(i), last=i + 1 == len(self.blocks)))
        x = batch.select(x)[0]
        return x if self.norm is None else self.norm(x)

    def check_length(self, total: int, cache: Cache | None) -> None:
        limit = self.config.context if cache is None else min(self.config.context, cache.capacity)
        if not torch.compiler.is_exporting() and total > limit:  # an exported graph has no length of its own
            raise ValueError(f"{total} tokens do not fit into a context of {limit}")

    def place(self, tokens: Tensor, past: int, places: Tensor | None, documents: Tensor | None) -> Tensor:
        """Position of each token, (T,) or (B, T); packed documents each start again at 0."""
        if places is not None:
            return places.clamp(max=self.config.context - 1)  # padding of a short row may lie beyond the table
        indices = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        if documents is None:
            return indices
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return indices - torch.where(first, indices, 0).cummax(dim=1).values

    @staticmethod
    def memory_mask(memory: Tensor | None, lengths: Tensor | None) -> Tensor | None:
        if memory is None or lengths is None:
            return None
        return (torch.arange(memory.shape[1], device=memory.device) < lengths[:, None])[:, None, None]  # (B, 1, 1, S)

    def remember(self, layer: int, memory: Tensor | None, cache: Cache | None) -> Memory:
        """The memory for one layer: its keys and values, computed once, when there is a cache; else as it is."""
        if memory is None or cache is None:
            return memory
        attention: Any = self.blocks[layer].cross.inner
        if layer == len(cache.memory):
            cache.memory.append(attention.keys_and_values(memory))
        return cache.memory[layer]


class EncoderDecoder(nn.Module):
    """Two stacks that share the token table; the decoder attends to the encoder's output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Transformer(config, role="encoder")
        self.decoder = Transformer(config, role="decoder")
        self.tie()

    def tie(self) -> None:
        self.decoder.embed.tokens = self.encoder.embed.tokens

    @property
    def embed(self) -> Embedding:
        return self.encoder.embed

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        memory = self.encoder(source, lengths=source_lengths)  # (B, S, D)
        return self.decoder(  # (B, T, D)
            target, lengths=lengths, memory=memory, memory_lengths=source_lengths
        )


def initialise(module: nn.Module, config: ModelConfig) -> None:
    """Each paper's first weights. Projections into the residual stream are smaller the deeper a pre-norm stack is."""
    xavier = config.embed_scale
    residual_scale = 1 / math.sqrt(2 * config.layers) if config.norm == "pre" else 1.0
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            if xavier:
                nn.init.xavier_uniform_(part.weight)
            else:
                into_stream = name.endswith(("attn.inner.out", "mlp.inner.down"))
                nn.init.normal_(part.weight, std=0.02 * (residual_scale if into_stream else 1.0))
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, nn.LSTM):
            part.reset_parameters()
        elif isinstance(part, nn.Embedding):
            first_std = 0.1 if config.recurrent else 0.02  # no norm makes up for small inputs of an LSTM
            position_std = 0.01 if config.norm == "pre" and name.endswith("embed.positions") else first_std
            nn.init.normal_(part.weight, std=config.width**-0.5 if xavier else position_std)
