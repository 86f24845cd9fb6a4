"""The recurrent baseline: a stack of LSTM layers that is trained, cached, scored and served as a Transformer is."""

# B batch, T tokens, D model width

from __future__ import annotations

from bisect import bisect

import torch
from torch import Tensor, nn

from plume.config import ModelConfig
from plume.model.ragged import LengthGroups, PrefixTree, Ragged
from plume.model.transformer import LayerCache, Transformer


class RecurrentBlock(nn.Module):
    """One LSTM layer. With a cache, the state after every token is kept where a Transformer keeps keys and values.

    So a slot can be rewound to any token and copied up to any token.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.lstm = nn.LSTM(config.width, config.width, batch_first=True)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: object = None, cache: LayerCache | None = None, *_: object) -> Tensor:
        return self.drop(self.lstm(x)[0] if cache is None else self.continued(x, cache))  # (B, T, D)

    def continued(self, x: Tensor, layer: LayerCache) -> Tensor:
        rows, lengths = layer.cache.rows, layer.cache.lengths
        begun = (lengths > 0)[:, None]
        h, c = (torch.where(begun, side[rows, 0, lengths - 1], 0.0) for side in (layer.keys, layer.values))  # (B, D)
        hidden, cells = [], []
        for token in torch.split(x, 1, dim=1):
            h, c = (state[0] for state in self.lstm(token, (h[None], c[None]))[1])
            hidden.append(h)
            cells.append(c)
        layer.append(torch.stack(hidden, dim=1)[:, None], torch.stack(cells, dim=1)[:, None])  # (B, 1, T, D)
        return torch.stack(hidden, dim=1)


class Recurrent(Transformer):
    """A stack whose layers are LSTMs: no positions, no attention, no norms."""

    def block(self, cross: bool) -> nn.Module:
        return RecurrentBlock(self.config)

    def read_ragged(self, batch: Ragged | LengthGroups) -> Tensor:
        """Trees as the sequences they were made of, padded: a state has one past, so prefixes are read again."""
        if isinstance(batch, LengthGroups):
            return self(batch.rows)
        rows: list[list[int]] = []
        places: list[tuple[int, int]] = []
        for tree in batch.trees:
            starts = [0, *(begin for begin, _ in tree.branches)]
            places += [(len(rows) + bisect(starts, at) - 1, tree.positions[at]) for at in tree.wanted]
            rows += [[tree.tokens[at] for at in path] for path in paths(tree, starts)]
        longest = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=batch.device)
        where = torch.tensor(places, device=batch.device)
        return self(tokens)[where[:, 0], where[:, 1]]  # (A, D)


def paths(tree: PrefixTree, starts: list[int]) -> list[list[int]]:
    """The places of each sequence of a tree, from its root."""
    found: list[list[int]] = []
    for (begin, parent), end in zip([(0, -1), *tree.branches], [*starts[1:], len(tree)], strict=True):
        before = [] if parent < 0 else found[bisect(starts, parent) - 1][: tree.positions[parent] + 1]
        found.append([*before, *range(begin, end)])
    return found
