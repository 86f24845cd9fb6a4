"""Bits per byte of a run's held-out text: by its model, by counts of tokens and pairs of tokens, and by xz."""

from __future__ import annotations

import lzma
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from plume.data import IGNORE, open_shards
from plume.data.shards import Ids, Shards
from plume.hf import load_model
from plume.model.loss import token_loss
from plume.text import load_tokenizer
from plume.text.tokenizer import Tokenizer

# V tokens of the vocabulary, N tokens of a text

MOST_TOKENS = 16_000_000  # of the training text that is counted
MOST_HELD_OUT = 300_000  # of each source's held-out text
MOST_PACKED = 32_000_000  # bytes of it, the last ones, that xz may refer to
ROWS = 32  # windows that the model reads together
STRIDES = 4  # windows begin a quarter of the context apart
DISCOUNT = 0.75  # of each count of a pair, given to pairs that were never seen
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]


def held_out_bits(model: Path, data: Path, *, compressor: bool = True) -> dict[str, float]:
    """Bits per byte of held-out text, by name of what predicts it; everything else knows the training text."""
    tokenizer = load_tokenizer(model)
    train, held_out = tokens_of(open_shards(data), MOST_TOKENS), held_out_tokens(data)
    size = len(text_bytes(tokenizer, held_out))
    singles = counted(train, tokenizer.vocab_size)
    bits = {
        "uniform": len(held_out) * math.log2(tokenizer.vocab_size) / size,
        "unigram": float(-np.log2(singles[held_out]).sum()) / size,
        "bigram": pair_bits(train, held_out, singles) / size,
    }
    if compressor:
        before = text_bytes(tokenizer, train)[-MOST_PACKED:]
        bits["xz"] = packed_bits(before, text_bytes(tokenizer, held_out)) / size
    return {**bits, "this model": model_bits(model, data, tokenizer)}


def tokens_of(shards: Shards, most: int) -> Ids:
    return np.concatenate([stream.read(0, min(len(stream), most)) for stream in shards.streams])


def held_out_tokens(data: Path) -> Ids:
    return tokens_of(open_shards(data, "validation"), MOST_HELD_OUT)


def text_bytes(tokenizer: Tokenizer, tokens: Ids) -> bytes:
    pieces = list(tokenizer.piece_table)
    for special in tokenizer.special_ids.values():
        pieces[special] = b""
    return b"".join([pieces[token] for token in tokens.tolist()])


def counted(train: Ids, vocab_size: int) -> npt.NDArray[np.float64]:
    """How frequent each token is, none of them impossible; (V,)."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return counts / counts.sum()


def pair_bits(train: Ids, held_out: Ids, singles: npt.NDArray[np.float64]) -> float:
    """Bits of a text by its pairs of tokens, absolute discounting with the frequencies of single tokens below."""
    vocab_size = len(singles)
    seen, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    totals = np.bincount(seen // vocab_size, counts, vocab_size)  # (V,) times that a token came first
    kinds = np.bincount(seen // vocab_size, minlength=vocab_size)  # (V,) different tokens behind it
    first, then = held_out[:-1], held_out[1:]
    wanted = first * vocab_size + then  # (N - 1,)
    at = np.minimum(np.searchsorted(seen, wanted), len(seen) - 1)
    count = np.where(seen[at] == wanted, counts[at], 0)
    left = np.where(totals[first] > 0, DISCOUNT * kinds[first] / np.maximum(totals[first], 1), 1.0)
    shares = np.maximum(count - DISCOUNT, 0) / np.maximum(totals[first], 1) + left * singles[then]
    return float(-np.log2(shares).sum() - np.log2(singles[held_out[:1]]).sum())


def packed_bits(before: bytes, text: bytes) -> float:
    """Bits that xz adds for a text behind the one before it."""

    def size(data: bytes) -> int:
        return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=XZ))

    with ThreadPoolExecutor(2) as pool:
        both, alone = pool.map(size, (before + text, before))
    return 8.0 * (both - alone)


@torch.no_grad()
def model_bits(folder: Path, data: Path, tokenizer: Tokenizer) -> float:
    """In overlapping windows of the context: each token behind three quarters of a context, if there is so much.

    The first token has nothing before it and is not counted.
    """
    model, tokens = load_model(folder).eval(), held_out_tokens(data)
    context, vocab_size = min(model.config.context, len(tokens) - 1), model.config.vocab_size
    last = len(tokens) - 1 - context
    starts = [*range(0, last, max(1, context // STRIDES)), last]
    total = 0.0
    for first in range(0, len(starts), ROWS):
        group = starts[first : first + ROWS]
        windows = torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in group]))
        targets = windows[:, 1:].clone()
        for row, start in enumerate(group):
            known = starts[first + row - 1] + context if start else 0  # the last token that was predicted before
            targets[row, : known - start] = IGNORE
        new = targets != IGNORE  # only these meet the vocabulary
        features = model.body(windows[:, :-1])[new]
        total += float(token_loss(features, model.table, targets[new], vocab_size=vocab_size))
    return total / math.log(2) / len(text_bytes(tokenizer, tokens[1:]))
