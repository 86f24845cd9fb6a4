"""What is read: tokenizers, cleaning, token shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plume.config.errors import UserError, below_one, check_encoding, refuse


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer to train, or the folder of a ready one."""

    kind: Literal["byte-bpe", "gpt1-bpe", "wordpiece", "characters", "bytes"] = (
        "byte-bpe"  # byte-bpe suits any language; wordpiece is BERT's
    )
    vocab_size: int = 4096  # special tokens included; characters and bytes take what they need
    folder: Path | None = None  # a model or tokenizer folder to take the tokenizer from instead of training one
    specials: Literal["gpt1", "gpt2", "bert", "roberta"] | None = (
        None  # whose special tokens; unset means the kind's own
    )
    lowercase: bool = True  # wordpiece only; accents go with it
    words: Literal["auto", "spacy", "basic"] = (
        "auto"  # gpt1-bpe only; auto means spacy where the extra gpt1 is installed
    )
    score: Literal["frequency", "likelihood"] = "frequency"  # wordpiece only: which pair of pieces to join next
    min_count: int = 2  # pairs, and letters outside byte-bpe, that are seen less often get no token
    max_memory_mb: int = 1024  # word counts beyond this spill to disk

    def __post_init__(self) -> None:
        refuse(below_one(self, "vocab_size", "min_count", "max_memory_mb"))


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """What prepare leaves out. Nothing but empty documents, unless asked."""

    min_characters: int = 1  # shorter documents are left out
    max_characters: int | None = None  # longer documents are left out
    languages: tuple[str, ...] = ()  # keep only these, judged by their commonest words: en, de, fr, es, it, pt, nl
    quality: bool = False  # leave out what does not read like prose: word lengths, symbols, repeated lines
    min_score: float | None = None  # WebText took links of 3 and more
    drop_domains: tuple[str, ...] = ()  # wikipedia.org also drops en.wikipedia.org
    duplicates: Literal["keep", "exact", "near"] = "keep"  # near also drops the exact ones; the first one stays
    near: float = 0.8  # share of five-word runs (Jaccard) from which two documents are near
    held_out: tuple[str, ...] = ()  # evaluation texts, as paths; documents that share a run of words with them go
    held_out_words: int = 13  # length of that run

    def __post_init__(self) -> None:
        if not 0.5 <= self.near <= 1.0:
            raise UserError(f"near={self.near} must lie between 0.5 and 1, for example 0.8")
        if self.held_out_words < 1:
            raise UserError(f"held_out_words={self.held_out_words} must be at least 1, for example 13")
        known = ("en", "de", "fr", "es", "it", "pt", "nl")
        for language in self.languages:
            if language not in known:
                raise UserError(f"languages: {language!r} is not one of {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """From texts to token shards."""

    paths: tuple[str, ...]  # files, folders, globs, python:stdlib, python:PACKAGE, hub:NAME:CONFIG:SPLIT
    folder: Path  # where the shards go
    weights: tuple[float, ...] = ()  # share of each path in training; unset means as large as they are
    tokenizer: TokenizerConfig = TokenizerConfig()
    field: str = "text"  # of .jsonl, .csv, .parquet rows
    target_field: str | None = None  # the other side of a pair, for sequence to sequence
    url_field: str = "url"  # where rows name their address, for clean.drop_domains
    score_field: str = "score"  # where rows have a number, for clean.min_score
    targets: tuple[str, ...] = ()  # files aligned line by line with paths, for sequence to sequence
    documents: Literal["file", "paragraph", "line"] = "file"  # what one document is in plain text
    encoding: str = "utf-8"  # of plain text, .csv and .tsv; others are gb18030, latin-1, utf-16, ...
    validation_share: float = 0.01  # held out
    split: Literal["hash", "tail"] | None = (
        None  # by each document's hash, or the end; unset: tail below 1000 documents
    )
    shard_mb: int = 16  # input that goes into one shard
    workers: int | None = None  # processes; unset means one per core
    on: Literal["local", "ray"] = "local"  # ray: on a Ray cluster
    budget: int | None = None  # training tokens that the report counts epochs for; unset means one pass
    overwrite: bool = False  # replace data that was prepared with other settings
    clean: CleanConfig = CleanConfig()

    def __post_init__(self) -> None:
        if not self.paths:
            raise UserError("paths is empty; name a file, a folder or python:stdlib")
        for name in ("weights", "targets"):
            given = getattr(self, name)
            if given and len(given) != len(self.paths):
                raise UserError(f"{name} has {len(given)} entries for {len(self.paths)} paths; give one for each")
        if any(w < 0 for w in self.weights):
            raise UserError(f"weights={list(self.weights)}: a weight cannot be negative; 0 leaves a path out")
        if self.weights and not sum(self.weights) > 0:
            raise UserError(f"weights={list(self.weights)}: at least one weight must be above 0")
        if not 0.0 <= self.validation_share < 1.0:
            raise UserError(f"validation_share={self.validation_share} must be from 0 to below 1, for example 0.01")
        if self.shard_mb < 1 or (self.workers is not None and self.workers < 1):
            raise UserError(f"shard_mb={self.shard_mb} and workers={self.workers} must be at least 1")
        check_encoding(self.encoding)


STANDARD_LIBRARY = DataConfig(paths=("python:stdlib",), folder=Path("data/stdlib"))  # text that every machine has
