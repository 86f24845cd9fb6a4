"""What turns a text into ids, one engine for each kind of tokenizer: all ordinary text, no specials."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from plume.config import UserError
from plume.text.definition import BYTE_LETTERS, LETTER_BYTES, Definition, Kind
from plume.text.tokenizer_json import to_json
from plume.util.devices import cores

if TYPE_CHECKING:
    import tokenizers
    from spacy.tokenizer import Tokenizer as SpacyTokenizer

    from plume.text.encode_cache import EncodeCache

Ids = npt.NDArray[np.int32]
T = TypeVar("T")

# GPT-2's cut: contractions; letters, digits or others, each with the space before; white space, whose last space
# belongs to the next word. The possessive marks (++) save steps back that cannot succeed.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# Places where that pattern always cuts, in any context: before white space that ends a word, and between
# a full-width mark and an ideograph, for scripts without spaces.
SAFE_SPLIT = re.compile(r"(?<=\S)(?=[ \n])|(?<=[。，、！？；])(?=[\u4e00-\u9fff])")
MIN_CACHED_CHARACTERS = 1 << 18  # characters that are not worth compiling the memory for
JOB_CHARACTERS = 1 << 16  # a job is long enough that handing it to a thread costs nothing beside it


PLAIN = str.maketrans({"—": "-", "–": "-", "―": "-", "…": "...", "´": "'"})
MARKS = re.compile(r"([-~!\";?+,)(/*\[\]}{|_])\1*")  # a run of one mark becomes a word of its own
LINE_BREAK = re.compile(r"\s*\n\s*")
MAX_CACHED_WORDS = 1 << 19  # cached words before the cache is cleared
BLANKS = re.compile(r"[^\S\n]+")

BYTE_TABLE = str.maketrans(LETTER_BYTES)  # from a letter to the character whose code is its byte
PreTokenizer = Literal["gpt2", "words and marks", "between blanks"]
PRE_TOKENIZERS: dict[Kind, PreTokenizer] = {"wordpiece": "words and marks", "gpt1-bpe": "between blanks"}


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...


def engine_for(d: Definition, backend: Callable[[], tokenizers.Tokenizer], *, exact_ranks: bool) -> Encoder:
    if exact_ranks:
        return CachedEngine(ByteBpe(d), "gpt2")
    if d.kind == "bytes":
        return Bytes(d)
    if d.kind == "characters":
        return Characters(d)
    if d.kind == "gpt1-bpe" and d.words == "spacy":
        return Gpt1(backend())
    pre_tokenizer = PRE_TOKENIZERS.get(d.kind)
    return Library(backend()) if pre_tokenizer is None else CachedEngine(Library(backend()), pre_tokenizer)


def encoding_threads() -> int:
    """Threads to encode with: every available core, or one where TOKENIZERS_PARALLELISM is off."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "no", "off"):
        return 1
    return cores()


def check_text(text: str) -> None:
    """A lone surrogate is half a character: no tokenizer can spell it, and some replace it without a word."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text has a lone surrogate, {text[error.start]!r}, at character {error.start}; "
            "read it with errors='replace', or remove it"
        ) from None


def ranks_are_exact(d: Definition) -> bool:
    """Whether tiktoken gives the ids that the merges give.

    Tiktoken joins any two pieces whose whole is in the vocabulary; the merges join only the listed pairs. The two are
    the same when each token comes from one merge and the merges rebuild it from its own bytes: two pieces that meet
    in some word then also meet in the token they form, so that no unlisted pair ever meets.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    if d.kind != "byte-bpe":
        return False
    ids = d.ids()
    products = [a + b for a, b in d.merges]
    known = ids.keys() >= {*products, *BYTE_LETTERS} and set("".join(products)) <= LETTER_BYTES.keys()
    if len(set(products)) != len(products) or not known:
        return False
    alone = Backend(BPE(vocab=ids, merges=list(d.merges))).encode_batch_fast(products, add_special_tokens=False)
    return all(encoded.ids == [ids[token]] for encoded, token in zip(alone, products, strict=True))


class ByteBpe:
    """Tiktoken in threads. It numbers tokens by merge order, which need not be their ids."""

    def __init__(self, d: Definition) -> None:
        from tiktoken import Encoding

        ids = d.ids()
        ranked = sorted(BYTE_LETTERS, key=ids.__getitem__) + [a + b for a, b in d.merges]
        spelled, ends = "".join(ranked).translate(BYTE_TABLE).encode("latin-1"), [0, *accumulate(map(len, ranked))]
        ranks = {spelled[a:b]: rank for rank, (a, b) in enumerate(pairwise(ends))}
        self.encoding = Encoding("plume", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        table = np.array([ids[token] for token in ranked], dtype=np.int32)
        self.table = None if np.array_equal(table, np.arange(len(table))) else table

    def encode(self, text: str) -> list[int]:
        ranks = self.encoding.encode_ordinary(text)
        return ranks if self.table is None else [int(i) for i in self.table[ranks]] if ranks else []

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        pieces = [(n, piece) for n, text in enumerate(texts) for piece in cut(text, JOB_CHARACTERS)]
        parts: list[list[Ids]] = [[] for _ in texts]
        with ThreadPoolExecutor(encoding_threads()) as pool:
            for job in pool.map(self._encode_job, grouped(pieces, JOB_CHARACTERS, lambda pair: len(pair[1]))):
                for n, ids in job:
                    parts[n].append(ids)
        return [part[0] if len(part) == 1 else np.concatenate(part or [np.empty(0, np.int32)]) for part in parts]

    def _encode_job(self, job: list[tuple[int, str]]) -> list[tuple[int, Ids]]:
        """Of all pieces in one array: most are a word, and an array of each would take as long as encoding it."""
        encode = self.encoding.encode_ordinary
        ranks = [encode(piece) for _, piece in job]
        edges = [0, *accumulate(map(len, ranks))]
        ids = np.fromiter(chain.from_iterable(ranks), np.int32, edges[-1])
        ids = ids if self.table is None else self.table[ids]
        return [(n, ids[a:b]) for (n, _), (a, b) in zip(job, pairwise(edges), strict=True)]


def cut(text: str, size: int) -> Iterator[str]:
    """The text in pieces of about `size` characters that GPT-2's pattern treats as it would the whole."""
    start = 0
    while len(text) - start > size:
        border = SAFE_SPLIT.search(text, start + size)
        if border is None:
            break
        yield text[start : border.start()]
        start = border.start()
    yield text[start:] if start else text


def grouped(items: Iterable[T], least: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in groups of at least a size, in order; the last may be smaller."""
    group: list[T] = []
    held = 0
    for item in items:
        group.append(item)
        held += size(item)
        if held >= least:
            yield group
            group, held = [], 0
    if group:
        yield group


class Bytes:
    """One id per byte of UTF-8."""

    def __init__(self, d: Definition) -> None:
        ids = d.ids()
        self.table: Ids = np.array([ids[letter] for letter in BYTE_LETTERS], dtype=np.int32)

    def encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> Ids:
        return self.table[np.frombuffer(text.encode(), dtype=np.uint8)]


class Characters:
    """One id per character; those not in the vocabulary are unknown."""

    def __init__(self, d: Definition) -> None:
        self.table: Ids = np.full(0x110000, d.roles["unknown"], dtype=np.int32)
        for i, token in enumerate(d.tokens):
            if i not in d.added:
                self.table[ord(token)] = i

    def encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> Ids:
        ids: Ids = self.table[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]
        return ids


class Library:
    """The `tokenizers` library as it is."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.int32) for e in encoded]


class CachedEngine:
    """An engine behind a cache of chunks; the pre-tokenizer says where texts may be split into chunks."""

    def __init__(self, engine: Encoder, pre_tokenizer: PreTokenizer) -> None:
        self.engine, self.pre_tokenizer = engine, pre_tokenizer
        self.cache: EncodeCache | None = None

    def encode(self, text: str) -> list[int]:
        return self.engine.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self.cache is None:
            if sum(map(len, texts)) < MIN_CACHED_CHARACTERS:
                return self.engine.encode_batch(texts)
            from plume.text.encode_cache import EncodeCache

            self.cache = EncodeCache(self.engine.encode_batch, self.pre_tokenizer)
        chosen = [mostly_ascii(text) for text in texts]
        if all(chosen):
            return self.cache.encode_batch(texts)
        cached = iter(self.cache.encode_batch([t for t, yes in zip(texts, chosen, strict=True) if yes]))
        others = iter(self.engine.encode_batch([t for t, yes in zip(texts, chosen, strict=True) if not yes]))
        return [next(cached if yes else others) for yes in chosen]


def mostly_ascii(text: str) -> bool:
    """Whether the cache helps: chunks of other scripts are too long to occur twice."""
    return text.isascii() or len(text.encode()) < 1.2 * len(text)


def backend_for(d: Definition) -> tokenizers.Tokenizer:
    """The library's tokenizer of a definition, for which specials in a text are ordinary text."""
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(to_json(d))
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"this tokenizer.json cannot be read by the tokenizers library: {error}") from None
    backend.encode_special_tokens = True
    return backend


def spacy_installed() -> bool:
    """Whether the words can be cut as the original cut them."""
    return find_spec("spacy") is not None and find_spec("ftfy") is not None


@cache
def _spacy_tokenizer() -> SpacyTokenizer:
    if not spacy_installed():
        raise UserError(
            "this tokenizer cuts words as GPT-1 did, with ftfy and spaCy, which are not installed; "
            "install the extra: pip install 'plume-lm[gpt1]'"
        )
    from spacy.lang.en import English

    return English().tokenizer


def standardize(text: str) -> str:
    """The text with mended Unicode, plain dashes and quotes, and space around marks and line breaks."""
    from ftfy import fix_text

    text = MARKS.sub(r" \g<0> ", fix_text(text).translate(PLAIN))
    return BLANKS.sub(" ", LINE_BREAK.sub(" \n ", text)).strip()


def spacy_words(text: str) -> Iterator[str]:
    """The words of a text in lower case; a line break is a word."""
    english = _spacy_tokenizer()
    for token in english(standardize(text)):
        if word := token.text.lower().strip(" "):
            yield word


class Gpt1:
    """Words by spaCy, pieces by the library's merges; a word's ids are cached."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        _spacy_tokenizer()  # a missing extra is reported at once, not at the first text
        self.model = backend.model
        self.word_ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if len(self.word_ids) > MAX_CACHED_WORDS:  # a new table: another thread may still read the old one
            self.word_ids = {}
        word_ids = self.word_ids
        ids: list[int] = []
        for word in spacy_words(text):
            if word not in word_ids:
                word_ids[word] = [token.id for token in self.model.tokenize(word)]
            ids += word_ids[word]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        return [np.array(self.encode(text), dtype=np.int32) for text in texts]
