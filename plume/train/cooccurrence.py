"""First token embeddings from counts of neighbouring tokens: a model begins with what pairs of tokens tell."""

# V tokens of the vocabulary, D model width, N tokens that are counted

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from plume.data.shards import Ids, Shards
from plume.model.heads import Model
from plume.train.first_weights import FirstWeights, allocate, keep_part

MOST_TOKENS = 16_000_000  # counted at most
WEIGHTS = {1: 1.0, 2: 0.5}  # of a pair, by the distance of its tokens
STD = 0.1  # of the embeddings: five times that of random ones, so that the norm of the first block sees more than noise
SPARE, ROUNDS = 16, 3  # directions beyond the wanted ones and iterations of the search for them


class CountedEmbeddings:
    """The first weights of another kind, but for the token tables, which come from counts."""

    def __init__(self, others: FirstWeights | None, shards: Shards) -> None:
        self.others, self.shards = others, shards

    def fill(self, module: nn.Module, model: nn.Module, device: torch.device) -> None:
        if self.others is None:
            allocate(module, device)
        else:
            self.others.fill(module, model, device)
        assert isinstance(model, Model)
        tables = embeddings(counted_tokens(self.shards), model.config.vocab_size, model.config.width)
        parameters = [model.body.embed.tokens.weight, model.table]
        tied = parameters[0] is parameters[1]
        for parameter, values in zip(parameters, [tables.both] * 2 if tied else tables.apart, strict=True):
            whole = torch.zeros(parameter.shape)  # rows beyond the vocabulary are padding
            whole[: len(values)] = values
            keep_part(parameter, whole)


class Embeddings:
    """Of a matrix of associations: rows as tokens that come first, columns as tokens that follow."""

    def __init__(self, associations: Tensor, width: int) -> None:
        self.associations, self.width = associations, width

    @property
    def apart(self) -> tuple[Tensor, Tensor]:
        """One table of tokens that are read, one of tokens that follow: their product is nearest to the matrix."""
        left, values, right = singular(self.associations, self.width)
        return scaled(left * values.sqrt()), scaled(right * values.sqrt())

    @property
    def both(self) -> Tensor:
        """One table for both uses."""
        matrix = self.associations
        left, values, _ = singular(torch.cat([matrix, matrix.t()], dim=1), self.width)
        return scaled(left * values.sqrt())


def counted_tokens(shards: Shards) -> list[Ids]:
    most = MOST_TOKENS // len(shards.streams)
    return [stream.read(0, min(len(stream), most)) for stream in shards.streams]


def embeddings(texts: list[Ids], vocab_size: int, width: int) -> Embeddings:
    return Embeddings(associations(texts, vocab_size), width)


def associations(texts: list[Ids], vocab_size: int) -> Tensor:
    """Positive pointwise mutual information of tokens that follow each other, sparse (V, V)."""
    keys, weights = list[Ids](), list[np.ndarray[tuple[int], np.dtype[np.float64]]]()
    for tokens in texts:
        for distance, weight in WEIGHTS.items():
            found, counts = np.unique(tokens[:-distance] * vocab_size + tokens[distance:], return_counts=True)
            keys.append(found)
            weights.append(weight * counts)
    pairs, places = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(places, np.concatenate(weights))
    first, then = pairs // vocab_size, pairs % vocab_size
    total = counts.sum()
    before, after = np.bincount(first, counts, vocab_size), np.bincount(then, counts, vocab_size)
    information = np.log(counts * total / (before[first] * after[then]))
    kept = information > 0
    at = torch.from_numpy(np.stack([first[kept], then[kept]]))
    values = torch.from_numpy(information[kept]).float()
    return torch.sparse_coo_tensor(at, values, (vocab_size, vocab_size), check_invariants=True).coalesce()


def singular(matrix: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular values of a sparse (V, C) matrix with their vectors: (V, D), (D,), (C, D)."""
    size = min(width + SPARE, *matrix.shape)
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(matrix.shape[1], size, generator=generator)
    across = matrix.t().coalesce()
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(torch.sparse.mm(across, torch.linalg.qr(torch.sparse.mm(matrix, basis)).Q)).Q
    left, values, small = torch.linalg.svd(torch.sparse.mm(matrix, basis), full_matrices=False)
    right = basis @ small.T
    found = min(width, size)
    parts = left.new_zeros(len(left), width), left.new_zeros(width), left.new_zeros(len(right), width)
    parts[0][:, :found], parts[1][:found], parts[2][:, :found] = left[:, :found], values[:found], right[:, :found]
    return parts


def scaled(table: Tensor) -> Tensor:
    return table * (STD / table.std().clamp(min=1e-9))
