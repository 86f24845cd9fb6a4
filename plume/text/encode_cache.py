"""Encodes text chunk by chunk: the ids of every chunk seen before are in a hash table that compiled code reads.

A chunk is text that a tokenizer encodes alike in any context. A new one is encoded by the tokenizer itself, once.
"""

# B bytes of a batch, T texts, E chunks in the table

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from plume.text.encoders import Ids, PreTokenizer

Function = TypeVar("Function", bound=Callable[..., Any])
if TYPE_CHECKING:  # numba's decorator has no types

    def compiled(function: Function) -> Function: ...

else:
    compiled = numba.njit(cache=True, nogil=True)

Bytes = npt.NDArray[np.uint8]
Int = Any  # numba's integers

# what a byte is; BREAK and OTHER_SPACE are white space too, WIDE is part of a character beyond ASCII
LETTER, DIGIT, MARK, SPACE, BREAK, OTHER_SPACE, WIDE = range(7)
KINDS: Bytes = np.full(256, WIDE, np.uint8)
KINDS[:128] = MARK  # control characters too: GPT-2's cut does not set them apart
KINDS[[*b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"]] = LETTER
KINDS[[*b"0123456789"]] = DIGIT
KINDS[[*b" "]] = SPACE
KINDS[[*b"\t\n\r"]] = BREAK
KINDS[[*b"\v\f"]] = OTHER_SPACE
APOSTROPHE, D, E, L, M, R, S, T, V = (int(letter) for letter in b"'delmrstv")

BETWEEN_BLANKS, WORDS_AND_MARKS, GPT2 = range(3)
MODES: dict[PreTokenizer, int] = {"between blanks": BETWEEN_BLANKS, "words and marks": WORDS_AND_MARKS, "gpt2": GPT2}
MAX_CACHED_BYTES = 1 << 24  # of cached chunks before the cache is cleared


class Table(NamedTuple):
    """Chunks by their hash; open addressing."""

    slots: npt.NDArray[np.int32]  # entry + 1, or 0; twice as many as there may be entries, a power of two
    hashes: npt.NDArray[np.uint64]  # (E,)
    edges: npt.NDArray[np.int64]  # (E + 1,): where each entry's bytes begin, and the next one's
    bytes: Bytes
    used: npt.NDArray[np.int64]  # (1,): entries


def empty_table(entries: int, size: int) -> Table:
    return Table(
        np.zeros(2 * entries, np.int32),
        np.zeros(entries, np.uint64),
        np.zeros(entries + 1, np.int64),
        np.zeros(size, np.uint8),
        np.zeros(1, np.int64),
    )


class Job(NamedTuple):
    """A batch of texts being encoded through a table."""

    data: Bytes  # (B,)
    edges: npt.NDArray[np.int64]  # (T + 1,): where the bytes of each text begin, and the next one's
    found: npt.NDArray[np.int32]  # the entry of each chunk; written as far as there are chunks
    ends: npt.NDArray[np.int64]  # (T + 1,): where the chunks of each text begin, and the next one's
    place: npt.NDArray[np.int64]  # how far it is: text, byte, chunks


def new_job(texts: Sequence[str]) -> Job:
    raw = [text.encode() for text in texts]
    edges = np.zeros(len(raw) + 1, np.int64)
    np.cumsum([len(r) for r in raw], out=edges[1:])
    data = np.frombuffer(b"".join(raw), np.uint8)
    return Job(data, edges, np.empty(len(data), np.int32), np.zeros(len(edges), np.int64), np.zeros(3, np.int64))


class EncodeCache:
    """A tokenizer with a cache; `encode` is the tokenizer, for many chunks at a time."""

    def __init__(self, encode: Callable[[list[str]], list[Ids]], pre_tokenizer: PreTokenizer) -> None:
        self.encode, self.mode = encode, MODES[pre_tokenizer]
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.table = empty_table(1 << 14, 1 << 18)
        self.ids = np.zeros(1 << 16, np.int32)
        self.id_edges = np.zeros(1 << 14, np.int64)  # (E + 1,): where the ids of each entry begin, and the next one's
        self.learned = 0  # entries whose ids are encoded

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        job = new_job(texts)
        with self.lock:
            if self.table.edges[self.table.used[0]] > MAX_CACHED_BYTES:
                self._clear()
            while not scan(self.table, job, self.mode, KINDS):
                self.table = grown(self.table)
            self._learn()
            ids = gather(job.found[: job.place[2]], job.ends, self.id_edges, self.ids)
        return [ids[a:b] for a, b in pairwise(job.ends.tolist())]

    def _learn(self) -> None:
        """Ask the real tokenizer for what is new."""
        first, last = self.learned, int(self.table.used[0])
        if first == last:
            return
        edges = self.table.edges[first : last + 1].tolist()
        base = edges[0]
        new = self.table.bytes[base : edges[-1]].tobytes()
        chunks = [new[a - base : b - base].decode() for a, b in pairwise(edges)]
        encoded = self.encode(chunks)
        start = int(self.id_edges[first])
        self.id_edges = with_capacity(self.id_edges, last + 1)
        np.cumsum([len(ids) for ids in encoded], out=self.id_edges[first + 1 : last + 1])
        self.id_edges[first + 1 : last + 1] += start
        stop = int(self.id_edges[last])
        self.ids = with_capacity(self.ids, stop)
        np.concatenate(encoded, out=self.ids[start:stop])
        self.learned = last


def load_compiled() -> None:
    """Load the compiled functions from numba's cache ahead of the first text."""
    EncodeCache(lambda chunks: [np.zeros(1, np.int32) for _ in chunks], "gpt2").encode_batch(["a"])
    place_all(empty_table(1, 1))


def with_capacity(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    if len(array) >= size:
        return array
    return np.concatenate([array, np.zeros(max(size, 2 * len(array)) - len(array), array.dtype)])


def grown(table: Table) -> Table:
    """The same entries with twice the capacity; a chunk longer than that comes back once more."""
    entries = int(table.used[0])
    larger = empty_table(2 * len(table.hashes), 2 * len(table.bytes))
    larger.hashes[:entries] = table.hashes[:entries]
    larger.edges[: entries + 1] = table.edges[: entries + 1]
    larger.bytes[: len(table.bytes)] = table.bytes
    larger.used[0] = entries
    place_all(larger)
    return larger


# ---- compiled ----------------------------------------------------------------------------------------------------


@compiled
def scan(table: Table, job: Job, mode: int, kinds: Bytes) -> bool:
    """Cut all texts and look the chunks up, inserting new ones. False, to be called again, when the table is full."""
    while True:
        end = scan_cached(table, job, mode, kinds)
        if end < 0:
            return True
        if not put_in(table, job.data, job.place[1], end):
            return False


@compiled
def scan_cached(table: Table, job: Job, mode: int, kinds: Bytes) -> Int:
    """Continue as far as all chunks are in the table: the end of the first that is not, or -1 when all are.

    The look-up is inlined: passing its arrays to a call would take longer than the look-up.
    """
    slots, hashes, starts, stored, _ = table
    data, edges, found, ends, place = job
    mask = np.uint64(len(slots) - 1)
    text, at, chunks = place[0], place[1], place[2]
    while text < len(edges) - 1:
        stop = edges[text + 1]
        plain = at  # up to here all is visible ASCII
        while at < stop:
            kind = kinds[data[at]]
            if mode == GPT2:
                end = gpt2_end(data, at, stop, kinds)
            elif kind in (SPACE, BREAK):
                at += 1
                continue
            elif mode == BETWEEN_BLANKS:
                end = blank_end(data, at, stop, kinds)
            else:
                if at >= plain:
                    plain = plain_end(data, at, stop, kinds)
                end = word_end(data, at, plain, kinds) if at < plain else blank_end(data, at, stop, kinds)
            code, size = hash_of(data, at, end), end - at
            slot = code & mask
            while slots[slot] > 0:
                entry = slots[slot] - 1
                if hashes[entry] == code and starts[entry + 1] - starts[entry] == size:
                    begin, differs = starts[entry], 0
                    for i in range(size):  # to the end: an early exit would be mispredicted too often
                        differs |= stored[begin + i] ^ data[at + i]
                    if differs == 0:
                        break
                slot = (slot + np.uint64(1)) & mask
            if slots[slot] == 0:
                place[0], place[1], place[2] = text, at, chunks
                return end
            found[chunks] = slots[slot] - 1
            chunks += 1
            at = end
        text += 1
        ends[text] = chunks
    place[0], place[1], place[2] = text, at, chunks
    return -1


@compiled
def blank_end(data: Bytes, at: Int, stop: Int, kinds: Bytes) -> Int:
    while at < stop and kinds[data[at]] != SPACE and kinds[data[at]] != BREAK:
        at += 1
    return at


@compiled
def plain_end(data: Bytes, at: Int, stop: Int, kinds: Bytes) -> Int:
    """The end of the text between blanks when all of it is visible ASCII, else `at`."""
    end = blank_end(data, at, stop, kinds)
    for i in range(at, end):
        if not 32 < data[i] < 127:
            return at
    return end


@compiled
def word_end(data: Bytes, at: Int, stop: Int, kinds: Bytes) -> Int:
    """A run of letters and digits, or one mark."""
    end = at + 1
    if kinds[data[at]] != MARK:
        while end < stop and kinds[data[end]] != MARK:
            end += 1
    return end


@compiled
def gpt2_end(data: Bytes, at: Int, stop: Int, kinds: Bytes) -> Int:
    """One piece of GPT-2's cut, or several where there are characters beyond ASCII."""
    if data[at] == APOSTROPHE:
        length = contraction(data, at, stop)
        if length > 0:
            return at + length
    end = at + 1
    if kinds[data[at]] == SPACE and end < stop and kinds[data[end]] < SPACE:
        end += 1
    kind = kinds[data[end - 1]]
    if kind < SPACE:
        while end < stop and kinds[data[end]] == kind:
            end += 1
    elif kind < WIDE:
        while end < stop and SPACE <= kinds[data[end]] < WIDE:
            end += 1
    if kind == WIDE or (end < stop and kinds[data[end]] == WIDE):
        return sure_end(data, end, stop, kinds)
    if kind >= SPACE and end < stop and end > at + 1:  # the last of the white space goes with what follows
        return end - 1
    return end


@compiled
def sure_end(data: Bytes, at: Int, stop: Int, kinds: Bytes) -> Int:
    """The next place where GPT-2's pattern cuts in any context: between visible ASCII and white space."""
    while at < stop:
        if kinds[data[at - 1]] < SPACE <= kinds[data[at]] < WIDE:
            return at
        at += 1
    return stop


@compiled
def contraction(data: Bytes, at: Int, stop: Int) -> Int:
    """Length of 's, 'd, 'm, 't, 'll, 've or 're; 0 if there is none here."""
    one = data[at + 1] if at + 1 < stop else 0
    two = data[at + 2] if at + 2 < stop else 0
    if one in (S, D, M, T):
        return 2
    if (one == L and two == L) or (one in (V, R) and two == E):
        return 3
    return 0


@compiled
def hash_of(data: Bytes, start: Int, stop: Int) -> Int:
    code = np.uint64(14695981039346656037)  # FNV-1a
    for i in range(start, stop):
        code = (code ^ np.uint64(data[i])) * np.uint64(1099511628211)
    return code ^ (code >> np.uint64(32))


@compiled
def put_in(table: Table, data: Bytes, start: Int, stop: Int) -> bool:
    """Make an entry of a new chunk; False when the table is full."""
    entry = table.used[0]
    begin = table.edges[entry]
    end = begin + stop - start
    if entry == len(table.hashes) or end > len(table.bytes):
        return False
    table.bytes[begin:end] = data[start:stop]
    table.edges[entry + 1] = end
    table.hashes[entry] = hash_of(data, start, stop)
    table.used[0] = entry + 1
    place_entry(table, entry)
    return True


@compiled
def place_entry(table: Table, entry: Int) -> None:
    mask = np.uint64(len(table.slots) - 1)
    slot = table.hashes[entry] & mask
    while table.slots[slot] > 0:
        slot = (slot + np.uint64(1)) & mask
    table.slots[slot] = entry + 1


@compiled
def place_all(table: Table) -> None:
    for entry in range(table.used[0]):
        place_entry(table, entry)


@compiled
def gather(found: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], id_edges: npt.NDArray[np.int64], ids: Ids) -> Ids:
    """The ids of all chunks in order; `ends`, in chunks, become ends in ids."""
    total = 0
    for entry in found:
        total += id_edges[entry + 1] - id_edges[entry]
    out = np.empty(total, np.int32)
    at = chunk = 0
    for text in range(1, len(ends)):
        while chunk < ends[text]:
            for i in range(id_edges[found[chunk]], id_edges[found[chunk] + 1]):
                out[at] = ids[i]
                at += 1
            chunk += 1
        ends[text] = at
    return out
