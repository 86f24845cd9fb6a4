"""A model as ONNX sees it: plain tensors in and out, the cache among them."""

# B batch, T tokens, P tokens in the cache, L layers, H heads, K head width, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor, nn

from plume.heads import Model
from plume.model import Transformer


class Growing:
    """One layer's cache as a value: what was there, and what is there now."""

    def __init__(self, past: Tensor) -> None:
        self.past = past  # (2, B, H, P, K)
        self.now = past

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.now = torch.cat([self.past, torch.stack([k, v])], dim=3)
        return self.now[0], self.now[1]


class WithCache(nn.Module):
    """(B, T) tokens and (L, 2, B, H, P, K) past to (B, T, V) logits and the grown past; P may be 0."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        body = self.model.body
        assert isinstance(body, Transformer)
        keys = torch.arange(past.shape[4] + tokens.shape[1])
        asking = keys[past.shape[4] :]
        distance = asking[:, None] - keys  # (T, P + T)
        x = body.embed(tokens, asking, None)
        grown = []
        for i, block in enumerate(body.blocks):
            band = body.config.band_of(i)
            seen = distance >= 0
            seen = seen & (distance < band) if band else seen
            layer = Growing(past[i])
            x = block(x, seen[None, None], layer)
            grown.append(layer.now)
        x = x if body.norm is None else body.norm(x)
        return self.model.read(x), torch.stack(grown)


class Plain(nn.Module):
    """(B, T) tokens to (B, T, V) logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.inner = WithCache(model)

    def forward(self, tokens: Tensor) -> Tensor:
        c = self.inner.model.config
        nothing = torch.zeros(c.layers, 2, tokens.shape[0], c.heads, 0, c.head_width)
        logits: Tensor = self.inner(tokens, nothing)[0]
        return logits
