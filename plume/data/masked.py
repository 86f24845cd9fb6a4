"""Batches for masked language models: BERT's pairs of texts and RoBERTa's full sentences, masks included."""

# B rows, T tokens of a row, N masked places

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from plume.config import MaskingConfig, UserError
from plume.data.batches import Array, Batch, Dataset, check_size, padded
from plume.data.sampling import Numbers, generator
from plume.data.shards import Shards, TokenStream
from plume.text import Tokenizer

ENDINGS = (".", "!", "?", "。", "！", "？", "\n")
CLOSERS = " \t\"')]}”’»"
BERT_MASKING = MaskingConfig()
TRIES = 10  # random places looked at for a text from another document


class MaskedTexts(Dataset):
    """What both kinds share: rows between special tokens, cut where sentences begin, and masked."""

    pairs = False  # whether a row has two texts

    def __init__(
        self,
        shards: Shards,
        tokenizer: Tokenizer,
        length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        masking: MaskingConfig = BERT_MASKING,
    ) -> None:
        around = len(tokenizer.wrap([], [] if self.pairs else None)[0])
        if tokenizer.mask is None or tokenizer.classify is None or tokenizer.separator is None:
            raise UserError(f"{tokenizer!r} has no mask, classify and separator tokens; a wordpiece tokenizer has")
        if length - around < 2:
            raise UserError(f"length={length} leaves no room for text between {around} special tokens; 128 would do")
        self.tokenizer, self.masking, self.length = tokenizer, masking, length
        self.room = length - around  # tokens of text in a full row
        self.mask_token: int = tokenizer.mask
        self.padding = tokenizer.pad if tokenizer.pad is not None else 0
        self.ends_sentence = sentence_ends(tokenizer)
        self.never = np.array([tokenizer.classify, tokenizer.separator])
        for stream in shards.streams:
            check_size(stream, self.room, shards)
        super().__init__(shards, [len(s) // self.room for s in shards.streams], seed=seed, shuffle=shuffle)

    def version(self, passes: int) -> int:
        """Static masks come round again; dynamic ones are new in every pass."""
        return passes if self.masking.copies is None else passes % self.masking.copies

    def anchor(self, source: int, version: int, item: int) -> int:
        """The place in the text around which a sample is built; every version shifts it."""
        shift = generator(self.seed, "shift", source, version).integers(0, self.room) if self.shuffle else 0
        return min(item * self.room + int(shift), len(self.streams[source]) - 1)

    def sentence_starts(self, tokens: Array) -> npt.NDArray[np.bool_]:
        """Which tokens open a sentence; the first is taken to."""
        starts = np.ones(len(tokens), np.bool_)
        ends = self.ends_sentence[tokens]
        starts[1:] = ends[:-1] & ~ends[1:] & self.tokenizer.word_starts(tokens)[1:]
        return starts

    def starts_between(self, stream: TokenStream, low: int, high: int) -> Numbers:
        """Where sentences start from low up to high."""
        first = max(0, low - 1)  # what stands before the first place decides about it
        places = first + np.flatnonzero(self.sentence_starts(stream.read(first, high)))
        return places[places >= low]

    def assemble(self, rows: Sequence[tuple[list[int], list[int]]], keys: Sequence[tuple[int, int, int]]) -> Batch:
        """Masked rows as a batch, next-sentence labels aside."""
        width = self.length
        tokens, targets, positions = list[Array](), list[Array](), list[Array]()
        for row, ((ids, _), key) in enumerate(zip(rows, keys, strict=True)):
            shown, places = self.mask(np.array(ids, np.int64), key)
            tokens.append(shown)
            positions.append(row * width + places)
            targets.append(np.array(ids, np.int64)[places])
        return Batch(
            tokens=padded(tokens, width, self.padding),
            targets=np.concatenate(targets),
            positions=np.concatenate(positions),
            lengths=np.array([len(t) for t in tokens]),
            segments=padded([segments for _, segments in rows], width, 0),
        )

    def mask(self, tokens: Array, key: tuple[int, int, int]) -> tuple[Array, Array]:
        """(what the model sees, the places it must tell), for one row."""
        m, random = self.masking, generator(self.seed, "mask", *key)
        open_places = np.flatnonzero(~np.isin(tokens, self.never))
        most = max(1, round(self.length * m.share)) if m.most is None else m.most
        count = min(most, max(1, round(len(tokens) * m.share)), len(open_places))
        places = np.sort(self.choose(tokens, open_places, count, random))
        shown, draw = tokens.copy(), random.random(len(places))
        shown[places[draw < m.masked]] = self.mask_token
        other = places[(draw >= m.masked) & (draw < m.masked + m.random)]
        shown[other] = random.integers(0, self.tokenizer.vocab_size, len(other))
        return shown, places

    def choose(self, tokens: Array, open_places: Numbers, count: int, random: np.random.Generator) -> Numbers:
        if not self.masking.whole_words:
            return random.permutation(open_places)[:count]
        starts = self.tokenizer.word_starts(tokens)[open_places]
        words = np.split(open_places, np.flatnonzero(starts)[1:])
        chosen = list[Numbers]()
        for word in random.permutation(len(words)):
            if sum(map(len, chosen)) + len(words[word]) <= count:
                chosen.append(words[word])
        return np.concatenate(chosen) if chosen else open_places[:0]


class MaskedPairs(MaskedTexts):
    """BERT: two runs of sentences, the second following the first or, half the time, from another document."""

    pairs = True

    def __init__(
        self,
        shards: Shards,
        tokenizer: Tokenizer,
        length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        masking: MaskingConfig = BERT_MASKING,
        short: float = 0.1,
        random_next: float = 0.5,
    ) -> None:
        super().__init__(shards, tokenizer, length, seed=seed, shuffle=shuffle, masking=masking)
        self.short, self.random_next = short, random_next  # shares of short rows and of random second texts

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        rows, labels, keys = list[tuple[list[int], list[int]]](), list[int](), list[tuple[int, int, int]]()
        for s, p, i in zip(source.tolist(), passes.tolist(), item.tolist(), strict=True):
            key = (s, self.version(p), i)
            first, second, label = self.pair(key)
            rows.append(self.tokenizer.wrap(first.tolist(), second.tolist()))
            labels.append(label)
            keys.append(key)
        return replace(self.assemble(rows, keys), next_sentence=np.array(labels))

    def pair(self, key: tuple[int, int, int]) -> tuple[Array, Array, int]:
        """(first text, second text, 1 if the second is a random one)."""
        source, version, item = key
        stream, random = self.streams[source], generator(self.seed, "pair", *key)
        room = int(random.integers(2, self.room + 1)) if random.random() < self.short else self.room
        text = self.run_at(stream, self.anchor(source, version, item), room)
        inside = np.flatnonzero(self.sentence_starts(text))[1:]
        cuts = inside if len(inside) else np.arange(1, max(2, len(text)))
        cut = int(random.choice(cuts))
        if len(text) > 1 and random.random() >= self.random_next:
            return text[:cut], text[cut:], 0
        first = text[: min(cut, room - 1)]
        return first, self.elsewhere(stream, self.anchor(source, version, item), room - len(first), random), 1

    def run_at(self, stream: TokenStream, place: int, room: int) -> Array:
        """Up to `room` tokens of one document from the sentence start nearest after `place`, if that leaves enough."""
        start, stop = self.document_around(stream, place)
        starts = self.starts_between(stream, max(start, place - room), min(stop, place + room))
        after = starts[(starts >= place) & (starts < stop - room // 2)]
        before = starts[starts <= stop - room]
        if len(after):
            begin = int(after[0])
        elif len(before):
            begin = int(before[-1])
        else:
            begin = max(start, min(place, stop - room))
        return stream.read(begin, min(stop, begin + room))

    def document_around(self, stream: TokenStream, place: int) -> tuple[int, int]:
        """First and last place of the document there, its separator left out."""
        document = stream.document_of(place)
        start, stop = stream.start_of(document), stream.start_of(document + 1)
        if self.shards.manifest.separator is not None and stop - start > 1:
            stop -= int(stream.read(stop - 1, stop)[0]) == self.shards.manifest.separator
        return start, stop

    def elsewhere(self, stream: TokenStream, place: int, room: int, random: np.random.Generator) -> Array:
        """A run of text from another document, or from another place if there is no other."""
        here = stream.document_of(place)
        for _ in range(TRIES):
            other = int(random.integers(0, len(stream)))
            if stream.document_of(other) != here:
                break
        return self.run_at(stream, other, room)


class FullSentences(MaskedTexts):
    """RoBERTa: sentences one after the other up to the full length; the separator shows where documents end."""

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        keys = [
            (s, self.version(p), i) for s, p, i in zip(source.tolist(), passes.tolist(), item.tolist(), strict=True)
        ]
        rows = [self.tokenizer.wrap(self.sentences(key).tolist()) for key in keys]
        return self.assemble(rows, keys)

    def sentences(self, key: tuple[int, int, int]) -> Array:
        stream = self.streams[key[0]]
        start = self.sentence_before(stream, self.anchor(*key), 0)
        stop = min(start + self.room, len(stream))
        return stream.read(start, stop if stop == len(stream) else self.sentence_before(stream, stop, start + 1))

    def sentence_before(self, stream: TokenStream, place: int, lowest: int) -> int:
        """The last sentence start at or before a place, looking back half a row; else the place itself."""
        starts = self.starts_between(stream, max(lowest, place - self.room // 2), place + 1)
        return int(starts[-1]) if len(starts) else place


def sentence_ends(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """For every token of the vocabulary: whether a sentence may end with it."""
    texts = [piece.decode(errors="replace").rstrip(CLOSERS) for piece in tokenizer.piece_table]
    ends = np.array([text.endswith(ENDINGS) for text in texts])
    for special in (tokenizer.end, tokenizer.separator):
        if special is not None:
            ends[special] = True
    return ends
