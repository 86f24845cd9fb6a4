"""Config fields with help texts, the sets of values they choose from, and the error for a user's mistake."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

T = TypeVar("T")

TokenizerKind = Literal["byte-bpe", "gpt1-bpe", "wordpiece", "characters", "bytes"]
SpecialTokens = Literal["gpt1", "gpt2", "bert", "roberta"]
Pretokenizer = Literal["auto", "spacy", "basic"]
ObjectiveKind = Literal["language-model", "masked", "masked-next-sentence", "sequence-to-sequence"]
TaskTarget = Literal["label", "number"]
TrainPrecision = Literal["auto", "float32", "bfloat16"]
WeightPrecision = Literal["float32", "bfloat16", "float16"]
Strategy = Literal["auto", "ddp", "fsdp"]
EngineKind = Literal["auto", "cpu", "torch"]
CachePrecision = Literal["float32", "float16", "int8"]
EnginePrecision = Literal["float32", "float24", "int8", "int4", "bfloat16", "float16", "auto"]
TopPRule = Literal["usual", "openai"]
Overflow = Literal["refuse", "truncate", "slide"]
Speculation = Literal["off", "lookup", "draft"]
ProtocolName = Literal["harness", "gpt2-paper", "gpt3-paper"]
Boundary = Literal["joint", "separate"]
Backend = Literal["local", "ray"]

DEVICE = "auto, cpu, cuda, cuda:1 or mps"
BACKEND = "local process pool, or a Ray cluster"
PIECES = "local: one after another; ray: at the same time on a Ray cluster"
ENCODING = "of plain text, .csv and .tsv: utf-8, cp1252 (Windows), gb18030, utf-16, ..."
SEED = "random seed of weights, batches and samples"
RESUME = "continue from the latest valid checkpoint"
OVERWRITE = "replace an existing run folder"
RUN_FOLDER = "run folder: model/, checkpoints/, metrics.jsonl, loss.png"
MODEL = "model folder, run folder or hub name"


class UserError(ValueError):
    """A user's mistake; the command line prints its message alone and exits with code 2."""


def about(text: str) -> Mapping[str, str]:
    """Metadata of a field: its help text."""
    return MappingProxyType({"help": text})


def option(default: T, text: str) -> T:
    """A field with a default and a help text; to a type checker it is its default, as dataclasses have it."""
    return field(default=default, metadata=about(text))


def help_of(one: Field[Any]) -> str:
    return str(one.metadata.get("help", ""))


def refuse(problems: Iterable[str]) -> None:
    """Raise all problems in one error."""
    if sentences := list(problems):
        raise UserError("; ".join(sentences))


class Checked:
    """A config that refuses what cannot work, all of it in one error."""

    def __post_init__(self) -> None:
        refuse([*fractions(self), *self._problems()])

    def _problems(self) -> Iterable[str]:
        """A sentence for each."""
        raise NotImplementedError


def fractions(config: Any) -> Iterator[str]:
    """A sentence for each count that is no whole number: Python does not check types, and 2.5 is never reached."""
    for one in fields(config):
        if str(one.type).startswith("int") and isinstance(value := getattr(config, one.name), float):
            yield f"{one.name}={value} must be a whole number"


def unknown_encoding(encoding: str) -> Iterator[str]:
    try:
        b"a".decode(encoding, "replace")
    except (LookupError, ValueError):  # the second: names that are no encoding of texts
        yield f"encoding={encoding!r} is not known; utf-8, gb18030 and latin-1 are"


def below_one(config: Any, *names: str) -> Iterator[str]:
    """A sentence for each of these fields that is set and less than 1."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            optional = getattr(type(config), name, 0) is None  # what a dataclass keeps as the default
            yield f"{name}={value} must be at least 1{', or unset' if optional else ''}"


def below_zero(config: Any, *names: str) -> Iterator[str]:
    """A sentence for each of these fields that is set and not at least 0."""
    for name in names:
        if (value := getattr(config, name)) is not None and not value >= 0:
            yield f"{name}={value} cannot be negative; 0 means none"


def wrong_seed(seed: int) -> Iterator[str]:
    if not -(1 << 63) <= seed < 1 << 63:
        yield f"seed={seed} has more than 64 bits; 1 would do"


def not_positive(config: Any, examples: Mapping[str, float]) -> Iterator[str]:
    """A sentence for each of these fields that is set and not above 0."""
    for name, example in examples.items():
        if (value := getattr(config, name)) is not None and not value > 0:
            yield f"{name}={value} must be above 0, for example {example:g}"


def not_probability(config: Any, examples: Mapping[str, float]) -> Iterator[str]:
    """A sentence for each of these fields that is set and not in [0, 1)."""
    for name, example in examples.items():
        if (value := getattr(config, name)) is not None and not 0.0 <= value < 1.0:
            yield f"{name}={value} must be at least 0 and below 1, for example {example:g}"


# ---- names that are alike


def at_home(path: str | Path) -> Path:
    """With the home folder for `~`; as it is where there is none of that name."""
    return Path(os.path.expanduser(path))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = nearest(word, list(known))
    return f"; did you mean {near!r}?" if near is not None else ""


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known name that this one misspells, or None: no suggestion is better than a wrong one."""
    close = [(edits(plain(word), plain(name)), name) for name in known if alike(word, name)]
    return min(close)[1] if close else None


def alike(word: str, name: str) -> bool:
    """Whether one is a misspelling of the other: equal without separators, or every part within a few edits."""
    if plain(word) == plain(name):
        return True
    ours, theirs = parts(word), parts(name)
    if len(ours) != len(theirs):
        return len(plain(name)) > 5 and edits(plain(word), plain(name)) == 1
    return all(a == b or misspelt(a, b) for a, b in zip(ours, theirs, strict=True))


def misspelt(a: str, b: str) -> bool:
    """One edit, in a long word two. A short word keeps its letters, or how it begins."""
    if len(b) < 4:
        return len(b) == 3 and a[:-1] == b  # one letter typed twice, as in /sett
    if edits(a, b) > (1 if len(b) < 7 else 2):
        return False
    if len(b) > 5 or sorted(a) == sorted(b):
        return True
    if len(a) < len(b):
        return a[:1] == b[:1]
    same = 2 if len(a) > len(b) or len(b) == 5 else 3
    return a[:same] == b[:same]


def parts(name: str) -> list[str]:
    return re.split(r"[-_./ ]+", name.lower())


def plain(name: str) -> str:
    return "".join(parts(name))


def edits(a: str, b: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn one word into the other."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            best = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]
