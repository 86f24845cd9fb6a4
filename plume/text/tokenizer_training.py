"""Training a tokenizer: count the words, learn the merges, lay out the vocabulary."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from plume.config import TokenizerConfig, UserError
from plume.text.definition import BYTE_LETTERS, CONTINUES, LONGEST_WORD, WORD_END, Definition, Layout, Words, define
from plume.text.encoders import backend_for, check_text, cut, grouped, spacy_installed, spacy_words
from plume.text.tokenizer import Tokenizer

OWN_SPECIALS: dict[str, Layout] = {
    "byte-bpe": "gpt2",
    "gpt1-bpe": "gpt1",
    "wordpiece": "bert",
    "characters": "gpt2",
    "bytes": "gpt2",
}
POSITIONED = 1 << 21  # above every code point: marks a letter that GPT-1 or WordPiece spells by its place in the word
Counted = tuple[str, int]
BLOCK_CHARACTERS = 1 << 22  # of text counted at once
SAMPLED_CHARACTERS = 1 << 16  # of a long text that are drawn together, so that a megabyte has several
ENTRY_BYTES = 120  # what a word costs in a dict of counts, beside its letters
MOST_RUNS = 32  # files open at once while merging
NOT_PLAIN = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".html", ".htm", ".warc", ".wet", ".gz", ".zst")
PREPARE = "`plume prepare` reads tables, folders, compressed files and other encodings, and trains a tokenizer on them"
LETTERS_SHARE = 0.75  # of the vocabulary at most, where letters are learned; the rest is for longer pieces


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of the configured kind from any number of texts; they are read once and not kept."""
    counted = count_words(_checked(texts), word_counter(config), max_memory_mb=config.max_memory_mb)
    return train_from_counts(config, counted)


def word_counter(config: TokenizerConfig) -> Callable[[list[str]], Mapping[str, int]]:
    """What counts the words of some texts as the configured tokenizer will cut them."""
    frame = _define(config, [])
    _check_vocab_size(config, frame)
    return _counter(frame)


def train_from_counts(config: TokenizerConfig, counted: Iterable[Counted]) -> Tokenizer:
    """A tokenizer of the configured kind from sorted words with their counts."""
    if config.kind == "bytes":
        return Tokenizer(_define(config, BYTE_LETTERS))
    frame = _define(config, [])
    counts = list(counted)
    if not counts:
        raise UserError("there is no text to train a tokenizer on: every text is empty")
    if config.kind == "characters":
        return Tokenizer(_define(config, [letter for letter, _ in counts]))
    if config.kind == "wordpiece":  # a longer word is unknown as a whole
        counts = [(word, count) for word, count in counts if len(word) <= LONGEST_WORD]
    tokens, merges = learn(config, counts, config.vocab_size - len(frame.tokens))
    return Tokenizer(_define(config, tokens, merges))


def train_command(files: Sequence[Path], out: Path, config: TokenizerConfig) -> Tokenizer:
    """Train on text files and save; what `plume tokenizer train` runs."""
    if not files:
        raise UserError("no files to train on; give at least one text file")
    if missing := [str(file) for file in files if not file.exists()]:
        raise UserError(f"there is no file {', '.join(missing)}")
    if other := [file for file in files if not file.is_file() or file.suffix.lower() in NOT_PLAIN]:
        raise UserError(f"{other[0]} is not a plain text file; {PREPARE}")
    if config.folder is not None:
        raise UserError("tokenizer.folder names an existing tokenizer, and this trains one; leave it out")
    from rich.console import Console

    megabytes = sum(file.stat().st_size for file in files) / 1e6
    texts = chain.from_iterable(read_blocks(file) for file in files)
    with Console(stderr=True).status(f"training a tokenizer ({config.kind}) on {megabytes:.1f} MB"):
        tokenizer = train_tokenizer(config, sampled(texts, config.sample_mb / max(megabytes, 1e-9), config.seed))
    tokenizer.save(out)
    return tokenizer


def sampled(texts: Iterable[str], share: float, seed: int | str) -> Iterator[str]:
    """A share of texts, long ones in parts, evenly spaced from a random start; all of them from a share of 1 on."""
    if share >= 1:
        yield from texts
        return
    taken = random.Random(seed).random()
    for part in (part for text in texts for part in cut(text, SAMPLED_CHARACTERS)):
        taken += share
        if taken >= 1:
            taken -= 1
            yield part


def read_blocks(file: Path) -> Iterator[str]:
    """A text file in parts that are tokenized as the whole would be."""
    rest = ""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            while block := opened.read(BLOCK_CHARACTERS):
                *parts, rest = cut(rest + block, BLOCK_CHARACTERS // 4)
                yield from parts
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error.reason}; {PREPARE}") from None
    if rest:
        yield rest


def _define(config: TokenizerConfig, body: Iterable[str], merges: Iterable[tuple[str, str]] = ()) -> Definition:
    layout = OWN_SPECIALS[config.kind] if config.special_tokens is None else config.special_tokens
    d = define(config.kind, body, () if config.kind == "wordpiece" else merges, layout)
    if config.kind == "wordpiece":
        return replace(d, lowercase=config.lowercase)
    if config.kind == "gpt1-bpe":
        here: Words = "spacy" if spacy_installed() else "basic"
        return replace(d, lowercase=True, words=here if config.pretokenizer == "auto" else config.pretokenizer)
    return d


def merge_runs(runs: Sequence[Path]) -> Iterator[Counted]:
    """The words of many runs on disk with their counts, sorted; few files are open at a time."""
    left = list(runs)
    while len(left) > MOST_RUNS:
        left = [*left[MOST_RUNS:], _compacted(left[:MOST_RUNS])]
    return _summed(map(_read_run, left))


def _check_vocab_size(config: TokenizerConfig, frame: Definition) -> None:
    least = len(frame.tokens) + {"byte-bpe": len(BYTE_LETTERS), "characters": 0}.get(config.kind, 2)
    if config.kind != "characters" and config.vocab_size < least:
        raise UserError(
            f"vocab_size={config.vocab_size} is too small for {config.kind}, "
            f"whose letters and special tokens need at least {least}; 4096 would do"
        )


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        check_text(text)
        yield text


def _counter(frame: Definition) -> Callable[[list[str]], Mapping[str, int]]:
    """What counts the words of some texts as the finished tokenizer will cut them."""
    if frame.kind == "characters":
        return lambda texts: Counter(chain.from_iterable(texts))
    if frame.words == "spacy":
        return lambda texts: Counter(chain.from_iterable(map(spacy_words, texts)))
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.trainers import WordLevelTrainer

    cutter = backend_for(frame)

    def count(texts: list[str]) -> Mapping[str, int]:
        # the trainer of whole words counts them on all cores; its state, as pickled, has the counts
        counting, trainer = Backend(WordLevel()), WordLevelTrainer(vocab_size=0, show_progress=False)
        counting.normalizer, counting.pre_tokenizer = cutter.normalizer, cutter.pre_tokenizer
        counting.train_from_iterator((part for text in texts for part in cut(text, BLOCK_CHARACTERS)), trainer)
        words: dict[str, int] = json.loads(trainer.__getstate__())["WordLevelTrainer"]["words"]
        return words

    return count


def learn(
    config: TokenizerConfig, counts: Sequence[tuple[str, int]], max_tokens: int
) -> tuple[list[str], list[tuple[str, str]]]:
    """At most `max_tokens` tokens for words with these counts, letters first, then merges."""
    from plume.text.merging import BETWEEN, learn_merges  # compiles when first used

    text = "".join(word + "\0" for word, _ in counts).encode("utf-32-le")
    codes = np.frombuffer(text, dtype="<u4").astype(np.int64)  # the letters of the words, a zero after each word
    seen = np.array([count for _, count in counts], dtype=np.int64)
    weights = np.repeat(seen, [len(word) + 1 for word, _ in counts])
    codes[_positioned(config, codes)] |= POSITIONED
    alphabet = _alphabet(config, codes, weights, int(max_tokens * LETTERS_SHARE))
    if not len(alphabet):
        raise UserError(
            f"no character occurs min_frequency={config.min_frequency} times; give more text, or min_frequency=1"
        )
    nearest = np.searchsorted(alphabet, codes).clip(max=len(alphabet) - 1)
    learned = learn_merges(
        np.where(alphabet[nearest] == codes, nearest, BETWEEN).astype(np.int32),
        weights,
        alphabet=len(alphabet),
        most=max_tokens - len(alphabet),
        least_count=config.min_frequency,
        likelihood=config.kind == "wordpiece" and config.merge_score == "likelihood",
    )
    tokens = [_symbol(config, int(code)) for code in alphabet]
    merges: list[tuple[str, str]] = []
    for left, right in learned:
        merges.append((tokens[left], tokens[right]))
        inner = tokens[right].removeprefix(CONTINUES) if config.kind == "wordpiece" else tokens[right]
        tokens.append(tokens[left] + inner)
    return tokens, merges


def _positioned(config: TokenizerConfig, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which letters are spelled by their place: after the first in WordPiece, the last in GPT-1."""
    ends: npt.NDArray[np.bool_] = codes == 0
    if config.kind == "byte-bpe":
        return np.zeros_like(ends)
    if config.kind == "gpt1-bpe":
        return np.asarray(np.append(ends[1:], False) & ~ends)
    return np.asarray(~(np.append(True, ends[:-1]) | ends))


def _alphabet(
    config: TokenizerConfig, codes: npt.NDArray[np.int64], weights: npt.NDArray[np.int64], most: int
) -> npt.NDArray[np.int64]:
    """The letters that get a token, sorted: all bytes, or else the most frequent, each bare and as it is placed."""
    if config.kind == "byte-bpe":
        return np.array(sorted(ord(letter) for letter in BYTE_LETTERS))
    letters, which = np.unique(codes & ~POSITIONED, return_inverse=True)
    seen = np.zeros(len(letters), dtype=np.int64)
    np.add.at(seen, which, weights)
    placed = np.isin(letters | POSITIONED, codes)
    order = np.lexsort((letters, -seen))  # the most frequent first
    order = order[(letters[order] > 0) & (seen[order] >= config.min_frequency)]
    fits = order[np.cumsum(1 + placed[order]) <= max(most, 2)]
    return np.sort(np.concatenate([letters[fits], letters[fits][placed[fits]] | POSITIONED]))


def _symbol(config: TokenizerConfig, code: int) -> str:
    letter = chr(code & ~POSITIONED)
    if code < POSITIONED:
        return letter
    return CONTINUES + letter if config.kind == "wordpiece" else letter + WORD_END


def count_words(
    texts: Iterable[str], count: Callable[[list[str]], Mapping[str, int]], *, max_memory_mb: int
) -> Iterator[Counted]:
    """Every word with its count, sorted, the same whatever the cap; `count` counts the words of some texts."""
    cap = max_memory_mb * 1_000_000
    with TemporaryDirectory(prefix="plume-counts-") as folder:
        runs: list[Path] = []
        table: dict[str, int] = {}
        size = 0
        for block in grouped(texts, min(BLOCK_CHARACTERS, cap // 8), len):
            for word, seen in count(block).items():
                if word not in table:
                    size += sys.getsizeof(word) + ENTRY_BYTES
                    table[word] = 0
                table[word] += seen
            if size > cap:
                runs.append(write_run(Path(folder) / f"{len(runs)}-{size}.run", sorted(table.items())))
                table, size = {}, 0
                if len(runs) == MOST_RUNS:
                    runs = [_compacted(runs)]
        yield from _summed([*map(_read_run, runs), iter(sorted(table.items()))])


def _summed(runs: Iterable[Iterator[Counted]]) -> Iterator[Counted]:
    """Sorted runs as one, with the counts of a word added up."""
    for word, same in itertools.groupby(heapq.merge(*runs), key=itemgetter(0)):
        yield word, sum(count for _, count in same)


def write_run(path: Path, counted: Iterable[Counted]) -> Path:
    """Sorted words with their counts as a file."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(pair)}\n" for pair in counted)
    return path


def _read_run(path: Path) -> Iterator[Counted]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            word, count = json.loads(line)
            yield word, count


def _compacted(runs: list[Path]) -> Path:
    whole = write_run(runs[0].with_suffix(".merged"), _summed(map(_read_run, runs)))
    for run in runs:
        run.unlink()
    return whole.replace(runs[0])
