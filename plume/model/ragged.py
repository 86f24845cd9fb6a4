"""Ragged batches: sequences laid end to end without padding, shared prefixes once, hidden states only where wanted."""

# N tokens of a batch, B trees of one size, T tokens of a tree, A wanted positions, H heads, K head width, D model width

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

WASTE, GPU_WASTE = 16, 2048  # tokens of padding that take about as long as a group of their own
Bools = npt.NDArray[np.bool_]


class PrefixTree:
    """Sequences as one tree of tokens: a shared prefix is stored once, and each token attends to its ancestors."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.members: list[int] = []  # whose sequences these are
        self.wanted: list[int] = []  # places whose hidden states are returned, each once
        self.rows: list[int] = []  # which of these each member's wanted tokens are, member by member
        self._row_of: dict[int, int] = {}  # by place
        self.last: Sequence[int] = ()  # the sequence that was added last,
        self.path: list[int] = []  # and its places
        self.branches: list[tuple[int, int]] = []  # where a later sequence begins, and the place it continues from

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, member: int, sequence: Sequence[int], shared: int, wanted: slice) -> None:
        """A sequence whose first `shared` tokens are those of the last one."""
        begin = len(self)
        if begin and shared < len(sequence):
            self.branches.append((begin, self.path[shared - 1]))
        self.tokens += sequence[shared:]
        self.positions += range(shared, len(sequence))
        self.path = [*self.path[:shared], *range(begin, len(self))]
        self.last = sequence
        self.members.append(member)
        for place in self.path[wanted]:
            if place not in self._row_of:
                self._row_of[place] = len(self.wanted)
                self.wanted.append(place)
            self.rows.append(self._row_of[place])

    def visible(self, band: int) -> Bools:
        """Who attends to whom, (T, T); with a band, only so many positions back."""
        table = np.tri(len(self), dtype=np.bool_)
        for (begin, parent), (end, _) in pairwise([*self.branches, (len(self), 0)]):
            table[begin:end, :begin] = table[parent, :begin]
        if band:
            table &= np.subtract.outer(self.positions, self.positions) < band
        return table


def prefix_trees(
    sequences: Sequence[tuple[int, ...]], wanted: Sequence[slice], *, width: int, most: int
) -> list[PrefixTree]:
    """Every sequence in a tree. One joins its neighbour in sorted order where that saves work.

    It saves the matrix products of the tokens they share, and costs the attention between tokens that see nothing of
    each other; a token's products cost about as much as attention to as many tokens as the model is wide. No tree
    becomes longer than `most`.
    """
    found: list[PrefixTree] = []
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i]):
        sequence = sequences[i]
        if found:
            shared = common_prefix(found[-1].last, sequence)
            rest = len(sequence) - shared
            if shared * width > len(found[-1]) * rest and len(found[-1]) + rest <= most:
                found[-1].add(i, sequence, shared, wanted[i])
                continue
        found.append(PrefixTree())
        found[-1].add(i, sequence, 0, wanted[i])
    return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def batches(sizes: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Numbers of trees, longest first, in batches of at most `budget` tokens that are about equally large."""
    total = sum(sizes)
    enough = total / max(1, -(-total // budget))
    batch: list[int] = []
    held = 0
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if batch and (held >= enough or held + sizes[i] > budget):
            yield batch
            batch, held = [], 0
        batch.append(i)
        held += sizes[i]
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class TreeSpan:
    """Trees of one length that attend together, each within itself."""

    count: int
    queries: slice
    keys: slice
    mask: Tensor | None  # (B, 1, queries, T) with True for visible; None where nothing is hidden


@dataclass(frozen=True, slots=True)
class RaggedMask:
    """Who attends to whom in one layer, span by span; `rows` are the queries where not every token is one."""

    spans: tuple[TreeSpan, ...]
    causal: bool
    rows: Tensor | None = None  # (A,)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """(1, H, A or N, K) queries to (1, H, N, K) keys and values."""
        parts: list[Tensor] = []
        for span in self.spans:
            asking, keys, values = (
                side[:, :, part].transpose(1, 2).reshape(span.count, -1, side.shape[1], side.shape[3]).transpose(1, 2)
                for side, part in ((q, span.queries), (k, span.keys), (v, span.keys))
            )  # (B, H, queries or T, K)
            causal = self.causal and span.mask is None
            y = F.scaled_dot_product_attention(
                asking, keys, values, attn_mask=span.mask, dropout_p=dropout, is_causal=causal
            )
            parts.append(y.transpose(1, 2).flatten(0, 1))  # (B * queries, H, K)
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None].transpose(1, 2)


class Ragged:
    """One forward's layout: the tokens of all trees in one row, and which hidden states are returned."""

    segments = None

    def __init__(self, trees: Sequence[PrefixTree], *, causal: bool, device: torch.device) -> None:
        self.trees, self.causal, self.device = trees, causal, device
        self.starts: list[int] = np.cumsum([0, *map(len, trees)]).tolist()
        self.tokens = torch.tensor([[token for tree in trees for token in tree.tokens]], device=device)  # (1, N)
        self.positions = torch.tensor([place for tree in trees for place in tree.positions], device=device)  # (N,)
        places = [s + n for s, tree in zip(self.starts, trees, strict=False) for n in tree.wanted]
        self.wanted = torch.tensor(places, device=device)  # (A,)
        self.few = 2 * len(places) < self.starts[-1]  # then the last block computes these alone
        self._masks: dict[tuple[int, bool], RaggedMask] = {}

    def mask(self, band: int, *, last: bool) -> RaggedMask:
        """That of a layer with this band; the last one attends from the wanted places alone where they are few."""
        key = band, last and self.few
        if key not in self._masks:
            spans = self._wanted_spans(band) if key[1] else self._spans(band)
            self._masks[key] = RaggedMask(tuple(spans), self.causal, self.wanted if key[1] else None)
        return self._masks[key]

    def sequences(self) -> tuple[list[list[int]] | None, None]:
        """The tokens of each tree and no segments; None where one is more than a sequence."""
        plain = not any(tree.branches for tree in self.trees)
        return [tree.tokens for tree in self.trees] if plain else None, None

    def gathered(self, states: Sequence[Tensor]) -> Tensor:
        """The wanted hidden states, (A, D), of those of each sequence, (T, D)."""
        return torch.cat([hidden[tree.wanted] for hidden, tree in zip(states, self.trees, strict=True)])

    def select(self, hidden: Tensor) -> Tensor:
        """The wanted hidden states, (1, A, D), of what the last block returned."""
        return hidden if self.few else hidden[:, self.wanted]

    def _spans(self, band: int) -> Iterator[TreeSpan]:
        at = 0
        for (size, _), same in groupby(self.trees, key=lambda tree: (len(tree), bool(tree.branches))):
            trees = list(same)
            place = slice(at, at + size * len(trees))
            plain = not trees[0].branches and (band == 0 or band >= size)
            seen = None if plain or not self.causal else np.stack([tree.visible(band) for tree in trees])
            yield TreeSpan(len(trees), place, place, self._tensor(seen))
            at = place.stop

    def _wanted_spans(self, band: int) -> Iterator[TreeSpan]:
        """One for each tree, whose wanted places alone are queries."""
        at = 0
        for start, tree in zip(self.starts, self.trees, strict=False):
            queries = slice(at, at + len(tree.wanted))
            seen = tree.visible(band)[tree.wanted][None] if self.causal else None
            yield TreeSpan(1, queries, slice(start, start + len(tree)), self._tensor(seen))
            at = queries.stop

    def _tensor(self, seen: Bools | None) -> Tensor | None:
        return None if seen is None else torch.from_numpy(seen)[:, None].to(self.device)  # (B, 1, queries, T)


class LengthGroups:
    """One forward's layout of padded rows: groups of like length laid end to end, padded to their own longest row."""

    def __init__(self, tokens: Tensor, lengths: Tensor, segments: Tensor | None, *, causal: bool) -> None:
        self.causal, self.lengths, self.rows, self.row_segments = causal, lengths, tokens, segments
        groups = length_groups(lengths.cpu().numpy(), WASTE if tokens.device.type == "cpu" else GPU_WASTE)
        self.groups = [torch.from_numpy(group).to(tokens.device) for group in groups]
        self.back = torch.from_numpy(np.argsort(np.concatenate(groups))).to(tokens.device)
        self.widths = [int(lengths[rows[0]]) for rows in self.groups]
        self.tokens = self.laid(tokens)  # (1, N)
        self.segments = None if segments is None else self.laid(segments)
        self.positions = self.laid(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))[0]  # (N,)

    def sequences(self) -> tuple[list[list[int]], list[list[int]] | None]:
        """The tokens of each row, and their segments where there are any, without the padding."""
        tokens, segments = (
            None if rows is None else [row[:n] for row, n in zip(rows.tolist(), self.lengths.tolist(), strict=True)]
            for rows in (self.rows, self.row_segments)
        )
        assert tokens is not None
        return tokens, segments

    def gathered(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states of each row, (T, D), padded: (R, T, D)."""
        missing = [self.rows.shape[1] - len(hidden) for hidden in states]
        return torch.stack([F.pad(hidden, (0, 0, 0, m)) for hidden, m in zip(states, missing, strict=True)])

    def laid(self, rows: Tensor) -> Tensor:
        parts = zip(self.groups, self.widths, strict=True)
        return torch.cat([rows[group, :width].flatten() for group, width in parts])[None]

    def mask(self, band: int, *, last: bool) -> RaggedMask:
        spans, at = [], 0
        for group, width in zip(self.groups, self.widths, strict=True):
            place = slice(at, at + len(group) * width)
            spans.append(TreeSpan(len(group), place, place, self.visible(group, width, band)))
            at = place.stop
        return RaggedMask(tuple(spans), self.causal)

    def visible(self, group: Tensor, width: int, band: int) -> Tensor | None:
        keys = torch.arange(width, device=group.device)
        if not self.causal:
            real = keys < self.lengths[group][:, None]  # (B, T)
            return None if bool(real.all()) else real[:, None, None]
        distance = keys[:, None] - keys  # (T, T)
        return None if band == 0 or band >= width else ((distance >= 0) & (distance < band))[None, None]

    def select(self, hidden: Tensor) -> Tensor:
        """(1, R, T, D) of (1, N, D)."""
        sizes = [len(group) * width for group, width in zip(self.groups, self.widths, strict=True)]
        parts = [
            F.pad(part.view(len(group), width, -1), (0, 0, 0, self.rows.shape[1] - width))
            for part, group, width in zip(torch.split(hidden[0], sizes), self.groups, self.widths, strict=True)
        ]
        return torch.cat(parts)[self.back][None]


def length_groups(lengths: npt.NDArray[np.int64], waste: int) -> list[npt.NDArray[np.int64]]:
    """Rows in groups of like length, longest first: a group ends before it has more than `waste` tokens of padding."""
    order = np.argsort(-lengths, kind="stable")
    edges, padding = [0], 0
    for place, length in enumerate(lengths[order].tolist()):
        padding += int(lengths[order[edges[-1]]]) - length
        if padding > waste:
            edges.append(place)
            padding = 0
    return np.split(order, edges[1:])


def query_rows(x: Tensor, mask: object = None, *rest: object) -> Tensor:
    """The rows of x that a layer computes: all, or those that a ragged mask names."""
    rows = mask.rows if isinstance(mask, RaggedMask) else None
    return x if rows is None else x[:, rows]
