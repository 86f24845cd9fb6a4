"""The torch engine: the same protocol on any device and for any family, over one static cache."""

# B slots in this step, T tokens each, S tokens they can see, H heads, K head width, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from plume.config import UserError
from plume.inference.engine import Feed, Logits
from plume.model.heads import Model
from plume.model.transformer import Cache, EncoderDecoder, LayerCache, Transformer
from plume.util.devices import need_compiler


class SlotLayer(LayerCache):
    """One layer of a few chosen slots of the engine's static cache."""

    cache: SlotCache

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cache, new = self.cache, k.shape[2]
        rows, places = cache.rows[:, None], cache.positions(new)  # (B, 1), (B, T)
        self.keys[rows, :, places] = k.transpose(1, 2).to(self.keys.dtype)
        self.values[rows, :, places] = v.transpose(1, 2).to(self.values.dtype)
        until = cache.longest + new
        if cache.everyone:
            return self.keys[:, :, :until], self.values[:, :, :until]
        return self.keys[cache.rows, :, :until], self.values[cache.rows, :, :until]  # (B, H, S, K)


class SlotCache(Cache):
    """What the Transformer sees as its cache: the chosen rows, each with its own length."""

    def __init__(self, store: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> None:
        device = store.device
        self.rows = torch.tensor(rows, device=device)
        self.everyone = list(rows) == list(range(store.shape[2]))
        self.layers = [SlotLayer(self, pair[0], pair[1]) for pair in store]
        self.memory = []
        self.lengths = torch.tensor(lengths, device=device)
        self.longest, self.ragged = max(lengths), min(lengths) < max(lengths)
        self.capacity = store.shape[4]


class TorchEngine:
    """See engine.Engine. An encoder-decoder's slots are given a source first, with `encode`."""

    def __init__(
        self,
        model: Model,
        *,
        slots: int = 1,
        capacity: int | None = None,
        compiled: bool = False,
    ) -> None:
        if model.kind != "next-token":
            raise UserError(f"a model with a {model.kind} head does not write text; one with a next-token head does")
        self.model, self.config, self.slots = model, model.config, slots
        self.capacity = self.config.context if capacity is None else min(capacity, self.config.context)
        self.device, dtype = model.table.device, model.table.dtype
        self.name = f"torch on {self.device}, {str(dtype).removeprefix('torch.')}"
        body = model.body
        stack = body.decoder if isinstance(body, EncoderDecoder) else body
        self.stack: Transformer = stack
        if compiled:
            need_compiler()
            self.stack = torch.compile(stack, dynamic=True)  # type: ignore[assignment]
        c = self.config
        layers = c.decoder_layers if c.decoder_layers else c.layers
        shape = (layers, 2, slots, c.heads, self.capacity, c.head_width)
        self.store = torch.zeros(shape, device=self.device, dtype=dtype)
        self.lengths = [0] * slots
        self.memories: dict[int, list[tuple[Tensor, Tensor]]] = {}  # slot -> keys and values (H, S, K) by layer

    def length(self, slot: int) -> int:
        return self.lengths[slot]

    @torch.inference_mode()
    def encode(self, slot: int, source: Sequence[int]) -> None:
        """Give a slot of an encoder-decoder the text that it answers to."""
        body = self.model.body
        assert isinstance(body, EncoderDecoder), "only an encoder-decoder has a source"
        with self.model.eval_mode():
            memory = body.encoder(torch.tensor([list(source)], device=self.device))  # (1, S, D)
        cache = Cache(self.config, 1, 0, device=self.device, dtype=memory.dtype)
        pairs = [body.decoder.remember(layer, memory, cache) for layer in range(self.config.decoder_layers)]
        self.memories[slot] = [(pair[0][0], pair[1][0]) for pair in pairs if pair is not None]
        self.rewind(slot, 0)

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed]) -> Logits:
        order = sorted(range(len(feeds)), key=lambda i: len(feeds[i].tokens))
        results: dict[int, Logits] = {}
        for _, group in groupby(order, key=lambda i: len(feeds[i].tokens)):  # equal lengths need no padding
            members = list(group)
            results |= zip(members, self._together([feeds[i] for i in members]), strict=True)
        return np.concatenate([results[i] for i in range(len(feeds))])

    def _together(self, feeds: list[Feed]) -> list[Logits]:
        rows = [feed.slot for feed in feeds]
        new = len(feeds[0].tokens)
        for row in rows:
            assert self.lengths[row] + new <= self.capacity, f"slot {row} is full"
        cache = SlotCache(self.store, rows, [self.lengths[row] for row in rows])
        tokens = torch.tensor([list(feed.tokens) for feed in feeds], device=self.device)  # (B, T)
        memory, memory_lengths = self._memory(rows, cache)
        with self.model.eval_mode():
            hidden = self.stack(tokens, cache=cache, memory=memory, memory_lengths=memory_lengths)  # (B, T, D)
        for row in rows:
            self.lengths[row] += new
        wanted = [hidden[i, new - feed.wanted :] for i, feed in enumerate(feeds)]
        logits = self.model.read(torch.cat(wanted)).float().cpu().numpy()  # (all wanted, V)
        cuts = np.cumsum([feed.wanted for feed in feeds])[:-1]
        return np.split(logits, cuts)

    def _memory(self, rows: list[int], cache: SlotCache) -> tuple[Tensor | None, Tensor | None]:
        """Put the sources' keys and values into the cache, padded to the longest."""
        if not self.memories:
            return None, None
        sizes = [self.memories[row][0][0].shape[1] for row in rows]
        longest = max(sizes)

        def together(layer: int, which: int) -> Tensor:
            parts = [self.memories[row][layer][which] for row in rows]
            padded = [torch.nn.functional.pad(p, (0, 0, 0, longest - p.shape[1])) for p in parts]
            return torch.stack(padded)  # (B, H, S, K)

        cache.memory = [(together(i, 0), together(i, 1)) for i in range(self.config.decoder_layers)]
        shape_only = torch.empty(len(rows), longest, 0, device=self.device)  # its keys and values are in the cache
        return shape_only, torch.tensor(sizes, device=self.device)

    def rewind(self, slot: int, length: int) -> None:
        assert 0 <= length <= self.lengths[slot]
        self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= self.lengths[source]
        self.store[:, :, target, :, :length] = self.store[:, :, source, :, :length]
        self.lengths[target] = length
        if source in self.memories:
            self.memories[target] = self.memories[source]

    def close(self) -> None:
        self.store = torch.empty(0)
        self.memories.clear()
