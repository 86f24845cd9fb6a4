"""Batches for sequence to sequence: sources for the encoder and targets for the decoder, of like length together."""

# B rows, T tokens of a target, S tokens of a source

from __future__ import annotations

from functools import lru_cache

import numpy as np

from plume.config import UserError
from plume.data.batches import IGNORE, Array, Batch, Dataset, padded
from plume.data.sampling import Numbers, generator
from plume.data.shards import Shards
from plume.text import Tokenizer

POOL = 64  # groups that are sorted by length together


def decoder_start(tokenizer: Tokenizer) -> int:
    """The token that a decoder reads first."""
    for token in (tokenizer.start, tokenizer.classify, tokenizer.end, tokenizer.separator):
        if token is not None:
            return token
    raise UserError(f"{tokenizer!r} has no special token to begin and end a target with; a byte-bpe tokenizer has")


class SequencePairs(Dataset):
    """Pairs from two aligned files or two fields. Both sides close with the separator; longer ones are cut."""

    def __init__(
        self, shards: Shards, tokenizer: Tokenizer, length: int, *, seed: int = 0, shuffle: bool = True, group: int = 64
    ) -> None:
        if not shards.manifest.pairs:
            raise UserError(f"{shards.folder} holds no pairs; prepare it with targets, or with target_field")
        self.length, self.group = length, group  # pairs of like length stand together in groups
        self.start = decoder_start(tokenizer)
        self.padding = tokenizer.pad if tokenizer.pad is not None else 0
        self.pool = lru_cache(maxsize=4)(self._pool)
        super().__init__(shards, [s.documents // 2 for s in shards.streams], seed=seed, shuffle=shuffle)

    def numbers(self, samples: Numbers) -> Numbers:
        if not self.shuffle:
            return samples
        pools, places = np.divmod(samples, self.group * POOL)
        return np.array([self.pool(p)[i] for p, i in zip(pools.tolist(), places.tolist(), strict=True)], np.int64)

    def _pool(self, pool: int) -> Numbers:
        """The samples of a pool sorted by length, then its groups in random order."""
        size = self.group * POOL
        samples = np.arange(pool * size, (pool + 1) * size)
        source, _, item = self.order.locate(samples)
        lengths = [self.size_of(s, i) for s, i in zip(source.tolist(), item.tolist(), strict=True)]
        groups = samples[np.argsort(lengths, kind="stable")].reshape(POOL, self.group)
        return groups[generator(self.seed, "groups", pool).permutation(POOL)].reshape(-1)

    def size_of(self, source: int, item: int) -> int:
        stream = self.streams[source]
        return stream.start_of(2 * item + 2) - stream.start_of(2 * item)

    def side(self, source: int, document: int) -> Array:
        """One side of a pair; a long one is cut but keeps its close."""
        tokens = self.streams[source].document(document)
        return tokens if len(tokens) <= self.length else np.append(tokens[: self.length - 1], tokens[-1])

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        places = list(zip(source.tolist(), item.tolist(), strict=True))
        sources = [self.side(s, 2 * i) for s, i in places]
        targets = [self.side(s, 2 * i + 1) for s, i in places]
        lengths, source_lengths = (np.array([len(row) for row in side]) for side in (targets, sources))
        width = int(lengths.max())
        return Batch(
            tokens=padded([[self.start, *target[:-1]] for target in targets], width, self.padding),
            targets=padded(targets, width, IGNORE),
            lengths=lengths,
            source=padded(sources, int(source_lengths.max()), self.padding),
            source_lengths=source_lengths,
        )
