"""Batches for masked language models: BERT's pairs of texts and RoBERTa's full sentences, masks included."""

# B rows, T tokens of a row, N masked places

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from plume.config import MaskingConfig, UserError
from plume.data.batches import Array, Batch, Dataset, Numbers, check_size, generator, padded
from plume.data.shards import Shards, TokenStream
from plume.text import Tokenizer

ENDINGS = (".", "!", "?", "。", "！", "？", "\n")
CLOSERS = " \t\"')]}”’»"
BERT_MASKING = MaskingConfig()
MAX_LOOKBACK = 48  # tokens: most sentences are shorter
MAX_DRAWS = 10  # random draws for a text from another document


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
        around = len(tokenizer.add_special_tokens([], [] if self.pairs else None)[0])
        if tokenizer.mask is None or tokenizer.classify is None or tokenizer.separator is None:
            raise UserError(f"{tokenizer!r} has no mask, classify and separator tokens; a wordpiece tokenizer has")
        if length - around < 2:
            raise UserError(f"length={length} leaves no space for text between {around} special tokens; 128 would do")
        self.tokenizer, self.masking, self.length = tokenizer, masking, length
        self.capacity = length - around  # tokens of text in a full row
        self.mask_token: int = tokenizer.mask
        self.padding = tokenizer.pad if tokenizer.pad is not None else 0
        self.ends_sentence = sentence_ends(tokenizer)
        self.unmaskable = np.array([tokenizer.classify, tokenizer.separator])
        for stream in shards.streams:
            check_size(stream, self.capacity, shards)
        self.shuffle = shuffle
        super().__init__(shards, [self.rows_of(s) for s in shards.streams], seed=seed, shuffle=shuffle)

    def rows_of(self, stream: TokenStream) -> int:
        """Rows in one pass over a source."""
        return len(stream) // self.capacity

    def version(self, passes: int) -> int:
        """Static masks come round again; dynamic ones are new in every pass."""
        return passes if self.masking.static_copies is None else passes % self.masking.static_copies

    def anchor(self, source: int, version: int, item: int) -> int:
        """The place in the text around which a sample is built; every version shifts it."""
        shift = generator(self.seed, "shift", source, version).integers(0, self.capacity) if self.shuffle else 0
        return min(item * self.capacity + int(shift), len(self.streams[source]) - 1)

    def sentence_starts(self, tokens: Array) -> npt.NDArray[np.bool_]:
        """Which tokens open a sentence; the first is taken to."""
        starts = np.ones(len(tokens), np.bool_)
        ends = self.ends_sentence[tokens]
        starts[1:] = ends[:-1] & ~ends[1:] & self.tokenizer.word_starts(tokens)[1:]
        return starts

    def starts_between(self, stream: TokenStream, low: int, high: int) -> Numbers:
        """Where sentences start from low up to high."""
        first = max(0, low - 1)  # the token before the first place decides about it
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
        open_places = np.flatnonzero(~np.isin(tokens, self.unmaskable))
        most = max(1, round(self.length * m.mask_prob)) if m.max_predictions is None else m.max_predictions
        count = min(most, max(1, round(len(tokens) * m.mask_prob)), len(open_places))
        places = np.sort(self.choose(tokens, open_places, count, random))
        shown, draw = tokens.copy(), random.random(len(places))
        shown[places[draw < m.mask_token_prob]] = self.mask_token
        other = places[(draw >= m.mask_token_prob) & (draw < m.mask_token_prob + m.random_token_prob)]
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
    """BERT: two runs of sentences, the second following the first or, half the time, from another document.

    A pass has a row from the start of every document, and rows from places spread over the text for what lies further
    inside long ones. A text that its document does not fill continues with the documents after it. The second text
    always begins inside a document, so that neither its start nor the length of a document tells which kind it is.
    """

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
        single_sentences: bool = False,
    ) -> None:
        super().__init__(shards, tokenizer, length, seed=seed, shuffle=shuffle, masking=masking)
        self.short, self.random_next = short, random_next  # shares of short rows and of random second texts
        self.single_sentences = single_sentences

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        rows, labels, keys = list[tuple[list[int], list[int]]](), list[int](), list[tuple[int, int, int]]()
        for s, p, i in zip(source.tolist(), passes.tolist(), item.tolist(), strict=True):
            key = (s, self.version(p), i)
            first, second, label = self.pair(key)
            rows.append(self.tokenizer.add_special_tokens(first.tolist(), second.tolist()))
            labels.append(label)
            keys.append(key)
        return replace(self.assemble(rows, keys), next_sentence=np.array(labels))

    def rows_of(self, stream: TokenStream) -> int:
        return stream.documents + super().rows_of(stream)

    def anchor(self, source: int, version: int, item: int) -> int:
        stream = self.streams[source]
        if item >= stream.documents:
            return super().anchor(source, version, item - stream.documents)
        return min(stream.start_of(item), len(stream) - 1)

    def pair(self, key: tuple[int, int, int]) -> tuple[Array, Array, int]:
        """(first text, second text, 1 if the second is a random one)."""
        stream, random = self.streams[key[0]], generator(self.seed, "pair", *key)
        capacity = int(random.integers(2, self.capacity + 1)) if random.random() < self.short else self.capacity
        parts, documents = self.texts_from(stream, self.first_place(stream, self.anchor(*key), capacity), capacity)
        text, inside = np.concatenate(parts), self.cuts(parts)
        cuts = inside if len(inside) else np.arange(1, max(2, len(text)))
        cut = int(cuts[0] if self.single_sentences else random.choice(cuts))
        if len(inside) and random.random() >= self.random_next:
            return text[:cut], self.second(text[cut:]), 0
        first = text[: min(cut, capacity - 1)]
        return first, self.second(self.random_text(stream, documents, capacity - len(first), random)), 1

    def cuts(self, parts: Sequence[Array]) -> Numbers:
        """Where a second text may begin: with a sentence inside a document, or if there is none, anywhere inside."""
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])]).tolist()
        sentences = [np.flatnonzero(self.sentence_starts(part))[1:] for part in parts]
        if not any(map(len, sentences)):
            sentences = [np.arange(1, len(part)) for part in parts]
        return np.concatenate([start + inside for start, inside in zip(starts, sentences, strict=True)])

    def second(self, text: Array) -> Array:
        """The whole run of sentences, or the first of them."""
        inside = np.flatnonzero(self.sentence_starts(text))[1:]
        return text[: int(inside[0])] if self.single_sentences and len(inside) else text

    def first_place(self, stream: TokenStream, place: int, capacity: int) -> int:
        """Where a row begins: with its document, or with a sentence near `place` that has text after it."""
        start, stop = self.document_text(stream, stream.document_of(place))
        if place == start:
            return start
        starts = self.starts_between(stream, max(start, place - capacity), min(stop, place + capacity))
        after = starts[(starts >= place) & (starts < stop - capacity // 2)]
        before = starts[starts <= stop - capacity]
        if len(after):
            return int(after[0])
        return int(before[-1]) if len(before) else max(start, min(place, stop - capacity))

    def texts_from(
        self, stream: TokenStream, begin: int, capacity: int, apart: Set[int] = frozenset()
    ) -> tuple[list[Array], set[int]]:
        """Up to `capacity` tokens document by document, and the documents; those in `apart` are not continued with."""
        document = stream.document_of(begin)
        parts = [stream.read(begin, min(begin + capacity, self.document_text(stream, document)[1]))]
        documents, room = {document}, capacity - len(parts[0])
        for following in range(document + 1, document + stream.documents):  # after the last one the first
            if room == 0 or self.single_sentences:
                break
            if (number := following % stream.documents) not in apart:
                start, stop = self.document_text(stream, number)
                parts.append(stream.read(start, min(stop, start + room)))
                documents.add(number)
                room -= len(parts[-1])
        return parts, documents

    def document_text(self, stream: TokenStream, document: int) -> tuple[int, int]:
        """First and last place of a document, its separator left out."""
        start, stop = stream.start_of(document), stream.start_of(document + 1)
        if self.shards.manifest.separator is not None and stop - start > 1:
            stop -= int(stream.read(stop - 1, stop)[0]) == self.shards.manifest.separator
        return start, stop

    def random_text(
        self, stream: TokenStream, documents: Set[int], capacity: int, random: np.random.Generator
    ) -> Array:
        """A run of text from inside another document than these, or from another place if there is no other."""
        for _ in range(MAX_DRAWS):
            place = int(random.integers(0, len(stream)))
            if stream.document_of(place) not in documents:
                break
        start, stop = self.document_text(stream, stream.document_of(place))
        near = max(start + 1, place - self.capacity), min(stop, place + self.capacity)
        sentences = self.starts_between(stream, *near) if near[0] < near[1] else np.empty(0, np.int64)
        inside = max(start, min(max(place, start + 1), stop - 1))
        begin = int(random.choice(sentences)) if len(sentences) else inside
        return np.concatenate(self.texts_from(stream, begin, capacity, documents)[0])


class FullSentences(MaskedTexts):
    """RoBERTa: sentences one after the other up to the full length; the separator shows where documents end.

    The rows of a pass overlap a little, so that together they hold every token of the text. A row begins with a
    sentence if one begins shortly before its place, and ends with one if that leaves it at least 95 % full.
    With `document_mask`, the documents of a row do not see each other.
    """

    def __init__(
        self,
        shards: Shards,
        tokenizer: Tokenizer,
        length: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        masking: MaskingConfig = BERT_MASKING,
        document_mask: bool = False,
    ) -> None:
        super().__init__(shards, tokenizer, length, seed=seed, shuffle=shuffle, masking=masking)
        self.document_mask = document_mask
        self.before = tokenizer.add_special_tokens([-1])[0].index(-1)  # special tokens in front of the text

    def read(self, source: Numbers, passes: Numbers, item: Numbers) -> Batch:
        keys = [
            (s, self.version(p), i) for s, p, i in zip(source.tolist(), passes.tolist(), item.tolist(), strict=True)
        ]
        spans = [self.span(key) for key in keys]
        texts = [self.streams[key[0]].read(*span).tolist() for key, span in zip(keys, spans, strict=True)]
        batch = self.assemble([self.tokenizer.add_special_tokens(text) for text in texts], keys)
        if not self.document_mask:
            return batch
        return replace(batch, documents=np.stack([self.documents(*place) for place in zip(keys, spans, strict=True)]))

    def documents(self, key: tuple[int, int, int], span: tuple[int, int]) -> Array:
        """(T,), the document of each token, from 0; special tokens and padding belong to the one beside them."""
        found = self.streams[key[0]].documents_between(*span)
        return np.pad(found - found[0], (self.before, self.length - self.before - len(found)), mode="edge")

    @property
    def lookback(self) -> int:
        """Tokens before a place in which a sentence may begin."""
        return min(self.capacity // 4, MAX_LOOKBACK)

    @property
    def stride(self) -> int:
        return max(1, self.capacity - self.lookback - self.capacity // 20)

    def rows_of(self, stream: TokenStream) -> int:
        return -(-len(stream) // self.stride) + self.shuffle  # one more, since every version begins elsewhere

    def anchor(self, source: int, version: int, item: int) -> int:
        if not self.shuffle:
            return item * self.stride
        shift = int(generator(self.seed, "shift", source, version).integers(0, self.stride))
        return max(0, (item - 1) * self.stride + shift)

    def span(self, key: tuple[int, int, int]) -> tuple[int, int]:
        """Where the text of a row starts and stops."""
        stream, place = self.streams[key[0]], self.anchor(*key)
        last = max(0, len(stream) - self.capacity)
        if place >= last:
            return last, len(stream)
        start = self.sentence_before(stream, place, self.lookback)
        return start, self.sentence_before(stream, start + self.capacity, self.capacity // 20)

    def sentence_before(self, stream: TokenStream, place: int, back: int) -> int:
        """The last sentence start at or before a place, at most so many tokens back; else the place itself."""
        starts = self.starts_between(stream, max(0, place - back), place + 1)
        return int(starts[-1]) if len(starts) else place


def sentence_ends(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """For every token of the vocabulary: whether a sentence may end with it."""
    texts = [piece.decode(errors="replace").rstrip(CLOSERS) for piece in tokenizer.piece_table]
    ends = np.array([text.endswith(ENDINGS) for text in texts])
    for special in (tokenizer.end, tokenizer.separator):
        if special is not None:
            ends[special] = True
    return ends
