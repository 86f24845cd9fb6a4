"""One tokenizer of any kind: text to ids and back, whole or streamed, by pieces, by words, as a table."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from plume.config import UserError
from plume.text.definition import BYTE_KINDS, CONTINUES, LETTER_BYTES, WORD_END, Definition, Kind, Special, Words
from plume.text.encoders import Encoder, Ids, backend_for, check_text, engine_for, ranks_are_exact
from plume.util.hashing import UNSPACED

if TYPE_CHECKING:
    import tokenizers
    from rich.table import Table

VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"})


@dataclass(frozen=True)
class Piece:
    """One token of a text and its span in characters."""

    id: int
    text: str
    bytes: bytes
    start: int
    end: int


class Tokenizer:
    """Text to ids and back. Made by `train_tokenizer` or `load_tokenizer`; it never changes."""

    def __init__(self, definition: Definition, ends: Sequence[int] | None = None) -> None:
        self.definition = definition
        self.kind: Kind = definition.kind
        self.vocab_size = len(definition.tokens)
        self.specials: dict[str, int] = dict(definition.roles)
        self.start, self.end, self.pad, self.mask = map(self.specials.get, ("start", "end", "pad", "mask"))
        self.unknown, self.separator, self.classify = map(self.specials.get, ("unknown", "separator", "classify"))
        # the tokens that end a generation; a model folder may name others than the tokenizer's end token
        self.ends: tuple[int, ...] = tuple(ends) if ends is not None else () if self.end is None else (self.end,)
        self._special_ids = {s.text: i for i, s in definition.added.items()}

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.vocab_size} tokens, {self.hash[:8]})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.definition, self.ends), {"exact_ranks": self.exact_ranks}

    def __len__(self) -> int:
        return self.vocab_size

    # -- what it is

    @cached_property
    def hash(self) -> str:
        """Sha256 of everything that decides the ids."""
        return self.definition.hash()

    @property
    def words(self) -> Words | None:
        """What cuts the text into words, for GPT-1's kind: spaCy as the original, or BERT's plain rules."""
        return self.definition.words

    @property
    def special_ids(self) -> dict[str, int]:
        """Every special token by its text, with or without a role."""
        return dict(self._special_ids)

    def token(self, id: int) -> str:
        """A token as the vocabulary spells it."""
        return self.definition.tokens[self._checked_id(id)]

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self.definition.ids()

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        return backend_for(self.definition)

    @cached_property
    def _engine(self) -> Encoder:
        return engine_for(self.definition, lambda: self._backend, exact_ranks=self.exact_ranks)

    @cached_property
    def exact_ranks(self) -> bool:
        """Whether tiktoken can encode for it; copies in other processes are told."""
        return ranks_are_exact(self.definition)

    # -- text to ids

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a text. The names of special tokens in it are ordinary text unless allowed."""
        check_text(text)
        if not allow_special or not self._special_ids:
            return self._engine.encode(text)
        ids: list[int] = []
        for part in self._special_pattern.split(text):
            special = self._special_ids.get(part.lstrip()) if part else None
            ids += self._engine.encode(part) if special is None else [special]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of many texts, as ordinary text, on all cores."""
        for text in texts:
            check_text(text)
        return self._engine.encode_batch(texts)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.definition.added.values(), key=lambda s: -len(s.text))
        spelled = [(r"\s*" if s.lstrip else "") + re.escape(s.text) for s in longest_first]
        return re.compile("(" + "|".join(spelled) + ")")

    def add_special_tokens(
        self, ids_a: Sequence[int], ids_b: Sequence[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """The ids with the special tokens of the family around one text or two, and the segment of each."""
        ids: list[int] = []
        segments: list[int] = []
        texts = {"A": ids_a, "B": () if ids_b is None else ids_b}
        for part, segment in self.definition.single if ids_b is None else self.definition.pair:
            more = [part] if isinstance(part, int) else [int(i) for i in texts[part]]
            ids += more
            segments += [segment] * len(more)
        return ids, segments

    # -- ids to text

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of some ids; bytes that are no UTF-8 become replacement marks."""
        checked = [self._checked_id(i) for i in ids]
        if skip_special:
            checked = [i for i in checked if i not in self.definition.added]
        if self.kind == "library":
            return str(self._backend.decode(checked, skip_special_tokens=False))
        if self.kind in BYTE_KINDS:
            return b"".join(map(self.piece_table.__getitem__, checked)).decode(errors="replace")
        streamer = self.streamer()
        return "".join(streamer.push(i) for i in checked) + streamer.flush()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of some ids."""
        return b"".join(self.piece_table[self._checked_id(i)] for i in ids)

    def streamer(self) -> Streamer:
        """A decoder that takes one id at a time."""
        if self.kind == "library":
            return LibraryStreamer(self)
        return Streamer(self)

    def piece_bytes(self, id: int) -> bytes:
        """The bytes that a token adds to a text, in the middle of it."""
        return self.piece_table[self._checked_id(id)]

    @cached_property
    def piece_table(self) -> list[bytes]:
        """The bytes of every token by id."""
        tokens, added = self.definition.tokens, set(self.definition.added)
        if self.kind == "library":
            added |= set(self._backend.get_added_tokens_decoder())
        if self.kind in BYTE_KINDS or self._byte_level:
            return [
                token.encode()
                if i in added or not LETTER_BYTES.keys() >= set(token)
                else bytes(LETTER_BYTES[letter] for letter in token)
                for i, token in enumerate(tokens)
            ]
        if self.kind == "gpt1-bpe":
            return [token.replace(WORD_END, " ").encode() for token in tokens]
        if self.kind == "characters":
            return [token.encode() for token in tokens]
        decode = self._decode_tokens  # what a token adds after another one
        return [decode(["a", token])[1:].encode() for token in tokens]

    def first_piece(self, id: int) -> bytes:
        """The bytes that a WordPiece token gives at the very start of a text."""
        return self._decode_tokens([self.token(id)]).encode()

    def _decode_tokens(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))  # as the library joins without one

    @property
    def _byte_level(self) -> bool:
        return self.kind == "library" and "ByteLevel" in repr(self._backend.decoder)

    def _checked_id(self, id: int) -> int:
        if not 0 <= id < self.vocab_size:
            raise UserError(
                f"id {id} is outside the vocabulary of {self.vocab_size} tokens (0 to {self.vocab_size - 1})"
            )
        return int(id)

    # -- pieces and words

    def pieces(self, text: str) -> list[Piece]:
        """The tokens of a text with the characters that each covers; parts of one character cover all of it."""
        check_text(text)
        if self.kind in (*BYTE_KINDS, "characters"):
            ids = self._engine.encode(text)
            spans = _byte_spans(text, [len(self.piece_table[i]) for i in ids]) if self.kind in BYTE_KINDS else None
            spans = [(n, n + 1) for n in range(len(ids))] if spans is None else spans
        elif self.words == "spacy":
            ids = self._engine.encode(text)
            spans = _found_spans(text.lower(), [self.piece_table[i].decode().strip(" ") for i in ids])
        else:
            encoded = self._backend.encode(text, add_special_tokens=False)
            ids, spans = encoded.ids, encoded.offsets
        return [
            Piece(i, self._readable(i), self.piece_table[i], start, end)
            for i, (start, end) in zip(ids, spans, strict=True)
        ]

    def _readable(self, id: int) -> str:
        if self.kind in BYTE_KINDS:
            return self.piece_table[id].decode(errors="replace")
        return self.definition.tokens[id]

    def merge_history(self, word: str) -> list[list[str]]:
        """How the merges build one word, a step at a time, from its letters or bytes to its pieces."""
        if self.kind not in ("byte-bpe", "gpt1-bpe"):
            raise UserError(f"a {self.kind} tokenizer has no merges; byte-bpe and gpt1-bpe have")
        check_text(word)
        if self.kind == "byte-bpe":
            letters = {byte: letter for letter, byte in LETTER_BYTES.items()}
            symbols = [letters[byte] for byte in word.encode()]
        else:
            symbols = [*word.lower()]
            symbols[-1:] = [symbols[-1] + WORD_END] if symbols else []
        steps = [symbols]
        while (best := self._best_merge(steps[-1])) is not None:
            steps.append(_merge_all(steps[-1], best))
        return [[self._readable_symbol(symbol) for symbol in step] for step in steps]

    @cached_property
    def _ranks(self) -> dict[tuple[str, str], int]:
        return {pair: rank for rank, pair in enumerate(self.definition.merges)}

    def _best_merge(self, symbols: list[str]) -> tuple[str, str] | None:
        pairs = [pair for pair in pairwise(symbols) if pair in self._ranks]
        return min(pairs, key=self._ranks.__getitem__, default=None)

    def _readable_symbol(self, symbol: str) -> str:
        if self.kind != "byte-bpe":
            return symbol
        return bytes(LETTER_BYTES[letter] for letter in symbol).decode(errors="backslashreplace")

    def word_starts(self, ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which ids open a word, for masking whole words and for tags per word; without spaces every piece does."""
        array = np.asarray(ids, dtype=np.int64)
        opens, closes = self.word_tables
        starts = opens[array]
        starts[1:] |= closes[array[:-1]]
        starts[:1] = True
        return starts

    @cached_property
    def word_tables(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For every token: whether a word opens with it, and whether one must open after it."""
        special = np.zeros(self.vocab_size, dtype=np.bool_)
        special[list(self.definition.added)] = True
        if self.kind == "wordpiece":
            opens = np.array([not token.startswith(CONTINUES) for token in self.definition.tokens])
            return opens | special, special
        texts = [piece.decode(errors="replace") for piece in self.piece_table]
        opens = np.array([text[:1].isspace() or UNSPACED.match(text) is not None for text in texts])
        return opens | special, np.array([text[-1:].isspace() for text in texts]) | special

    # -- others made from it

    def with_specials(self, names: Iterable[str]) -> Tokenizer:
        """A tokenizer with these special tokens as new last rows."""
        names = list(names)
        if taken := [name for name in names if not name or name in self._ids or names.count(name) > 1]:
            raise UserError(f"special tokens must be new and not empty, but these are not: {taken}")
        d = self.definition
        added = dict(d.added) | {self.vocab_size + n: Special(name) for n, name in enumerate(names)}
        if d.library is not None:
            backend = backend_for(d)
            backend.add_special_tokens(names)
            d = replace(d, library=json.dumps(json.loads(backend.to_str()), ensure_ascii=False, sort_keys=True))
        return Tokenizer(replace(d, tokens=(*d.tokens, *names), added=added))

    def save(self, folder: Path | str) -> None:
        """Write the files that Plume, `tokenizers` and `transformers` open."""
        from plume.text.tokenizer_folder import save_tokenizer

        save_tokenizer(self.definition, Path(folder))


def _byte_spans(text: str, lengths: list[int]) -> list[tuple[int, int]]:
    """The characters that pieces of these byte lengths cover."""
    character = np.repeat(np.arange(len(text)), [len(c.encode()) for c in text])
    ends = np.cumsum(lengths)
    return [(int(character[end - n]), int(character[end - 1]) + 1) for end, n in zip(ends, lengths, strict=True)]


def _found_spans(text: str, pieces: list[str]) -> list[tuple[int, int]]:
    """Spans of the pieces of a cleaned text in the text before cleaning; an empty span where one is not found."""
    spans: list[tuple[int, int]] = []
    position = 0
    for piece in pieces:
        found = text.find(piece, position)
        start = position if found < 0 else found
        position = start if found < 0 else found + len(piece)
        spans.append((start, position))
    return spans


def _merge_all(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def visible(text: str) -> str:
    """White space and control characters as marks that can be seen."""
    shown = text.translate(VISIBLE)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def inspect_table(tokenizer: Tokenizer, text: str) -> Table:
    """One row per piece of the text; the caption says whether the ids give the text back."""
    from rich.table import Table
    from rich.text import Text

    pieces = tokenizer.pieces(text)
    decoded = tokenizer.decode([piece.id for piece in pieces])
    back = "the ids give the text back" if decoded == text else f"the ids give back: {visible(decoded)}"
    cut_by = "" if tokenizer.words is None else f", words by {'spaCy' if tokenizer.words == 'spacy' else 'plain rules'}"
    table = Table(
        title=f"{tokenizer.kind}, {tokenizer.vocab_size} tokens{cut_by}",
        caption=Text(f"{len(text)} characters, {len(pieces)} tokens; {back}"),
    )
    for name in ("", "piece", "id", "bytes", "characters"):
        table.add_column(name, justify="left" if name in ("piece", "bytes") else "right")
    for number, piece in enumerate(pieces):
        place = f"{piece.start}-{piece.end}"
        table.add_row(str(number), Text(visible(piece.text)), str(piece.id), piece.bytes.hex(" "), place)
    return table


class Streamer:
    """Takes ids, gives text; all of it together is what `decode` gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.first = True
        self.space = ""  # GPT-1: the space after a word, held until another token follows

    def push(self, id: int) -> str:
        """The text that this token completes; it may be empty."""
        piece = self.tokenizer.piece_bytes(id)
        if self.first and self.tokenizer.kind == "wordpiece":
            piece = self.tokenizer.first_piece(id)
        self.first = False
        text = self.space + self.utf8.decode(piece)
        self.space = " " if self.tokenizer.kind == "gpt1-bpe" and text.endswith(" ") else ""
        return text.removesuffix(" ") if self.space else text

    def flush(self) -> str:
        """What is left at the end: a replacement mark for a character that never came whole."""
        return self.utf8.decode(b"", final=True)


class LibraryStreamer(Streamer):
    """The same for a tokenizer whose decoder only the library knows: decode all, give out what is new."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.ids: list[int] = []
        self.given = ""

    def push(self, id: int) -> str:
        self.ids.append(id)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(self.given):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self.tokenizer.decode(self.ids))

    def _give(self, text: str) -> str:
        new, self.given = text[len(self.given) :], text
        return new
