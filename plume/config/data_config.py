"""Tokenizers, cleaning and token shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from plume.config.fields import (
    BACKEND,
    ENCODING,
    Backend,
    Checked,
    Pretokenizer,
    SpecialTokens,
    TokenizerKind,
    about,
    below_one,
    not_probability,
    option,
    refuse,
    unknown_encoding,
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer to train, or the folder of an existing one."""

    kind: TokenizerKind = option("byte-bpe", "byte-bpe suits any language; wordpiece is BERT's")
    vocab_size: int = option(4096, "vocabulary size with special tokens; ignored by characters and bytes")
    folder: Path | None = option(None, "use the tokenizer of this folder instead of training one")
    special_tokens: SpecialTokens | None = option(None, "special tokens of this family; unset: the kind's own")
    lowercase: bool = option(True, "wordpiece: lowercase and strip accents")
    pretokenizer: Pretokenizer = option("auto", "gpt1-bpe: word splitting; auto: spacy if installed")
    merge_score: Literal["frequency", "likelihood"] = option("frequency", "wordpiece: score that picks the next merge")
    min_frequency: int = option(2, "minimum count of a merge, in wordpiece and gpt1-bpe also of a character")
    max_memory_mb: int = option(1024, "memory for word counts in MB; more spills to disk")
    sample_mb: int = option(1024, "text to train on in MB: a random sample of larger corpora")
    seed: int = option(0, "seed of that sample")

    def __post_init__(self) -> None:
        refuse(below_one(self, "vocab_size", "min_frequency", "max_memory_mb", "sample_mb"))


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerConfig:
    """Train a tokenizer on text files."""

    files: tuple[str, ...] = field(metadata=about("text files to train on"))
    out: Path = field(metadata=about("folder to write the tokenizer to"))
    tokenizer: TokenizerConfig = option(TokenizerConfig(), "kind and size of the tokenizer")


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show how a tokenizer splits a text."""

    folder: Path = field(metadata=about("model or tokenizer folder"))
    text: str = field(metadata=about("text to tokenize"))


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check prepared data against its hashes."""

    folder: Path = field(metadata=about("folder of prepared data"))


@dataclass(frozen=True, kw_only=True)
class CleanConfig(Checked):
    """Which documents prepare drops. By default only empty ones."""

    min_characters: int = option(1, "minimum document length in characters")
    max_characters: int | None = option(None, "maximum document length in characters")
    languages: tuple[str, ...] = option((), "keep only these languages: en, zh, ja, ... (extra language)")
    quality: bool = option(False, "drop text unlike prose: word lengths, symbols, repeated lines")
    min_score: float | None = option(None, "minimum of score_field; WebText: 3")
    drop_domains: tuple[str, ...] = option((), "domains to drop, subdomains included")
    duplicates: Literal["keep", "exact", "near"] = option("keep", "which duplicates to drop; near includes exact")
    near_threshold: float = option(0.8, "Jaccard similarity of 5-word shingles of a near duplicate")
    decontaminate: tuple[str, ...] = option(
        (), "evaluation texts; documents that share an n-gram with them are dropped"
    )
    decontaminate_ngram: int = option(13, "n-gram length in words for decontaminate")

    def _problems(self) -> Iterator[str]:
        if not 0.5 <= self.near_threshold <= 1.0:
            yield f"near_threshold={self.near_threshold} must lie between 0.5 and 1, for example 0.8"
        if self.decontaminate_ngram < 1:
            yield f"decontaminate_ngram={self.decontaminate_ngram} must be at least 1, for example 13"
        for language in self.languages:
            if not (language.isascii() and language.islower() and len(language) in (2, 3)):
                yield f"languages: {language!r} is not a language code such as en, zh or ja"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """From texts to token shards."""

    paths: tuple[str, ...] = field(metadata=about("files, folders, globs, python:stdlib or hub:NAME:CONFIG:SPLIT"))
    folder: Path = field(metadata=about("folder for the token shards"))
    weights: tuple[float, ...] = option((), "sampling weight of each path; unset: proportional to size")
    tokenizer: TokenizerConfig = option(TokenizerConfig(), "tokenizer to train or to use")
    text_field: str = option("text", "name of the text field in .jsonl, .csv and .parquet rows")
    target_field: str | None = option(None, "name of the target field, for sequence-to-sequence")
    url_field: str = option("url", "name of the URL field, for clean.drop_domains")
    score_field: str = option("score", "name of the score field, for clean.min_score")
    targets: tuple[str, ...] = option((), "target files aligned line by line with paths, for sequence-to-sequence")
    documents: Literal["file", "paragraph", "line"] = option("file", "what one document is in plain text")
    encoding: str = option("utf-8", ENCODING)
    validation_fraction: float = option(0.01, "fraction of the documents held out for validation")
    split: Literal["hash", "tail"] | None = option(
        None, "held out by document hash or from the end; unset: the end of sources below 1000"
    )
    shard_mb: int = option(16, "MB of input per piece of work")
    workers: int | None = option(None, "worker processes; unset: one per core")
    backend: Backend = option("local", BACKEND)
    token_budget: int | None = option(None, "training tokens for the epochs in the report; unset: one epoch")
    overwrite: bool = option(False, "replace data that was prepared with other settings")
    clean: CleanConfig = option(CleanConfig(), "filters and deduplication")

    def _problems(self) -> Iterator[str]:
        if not self.paths:
            yield "paths is empty; name a file, a folder or python:stdlib"
        for name in ("weights", "targets"):
            given = getattr(self, name)
            if given and len(given) != len(self.paths):
                yield f"{name} has {len(given)} entries for {len(self.paths)} paths; give one for each"
        if any(w < 0 for w in self.weights):
            yield f"weights={list(self.weights)}: a weight cannot be negative; 0 leaves a path out"
        elif self.weights and not 0 < sum(self.weights) < math.inf:
            yield f"weights={list(self.weights)}: at least one weight must be above 0, and none infinite"
        yield from not_probability(self, {"validation_fraction": 0.01})
        yield from below_one(self, "shard_mb", "workers", "token_budget")
        yield from unknown_encoding(self.encoding)


STANDARD_LIBRARY = DataConfig(paths=("python:stdlib",), folder=Path("data/stdlib"))  # text that every machine has
