"""Examples as token rows: templates, rows in flat arrays, and batches fixed by (seed, step)."""

# N items, B items of a batch, R rows of a batch (an item has one or more), T tokens

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plume.config import UserError, did_you_mean
from plume.data.batches import generator
from plume.tasks.schema import Example
from plume.text import Tokenizer

IntArray = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]
NO_LABEL = -100  # a token without a tag
IMPOSSIBLE = float("-inf")
POOL = 64  # batches that are cut from one pool of texts sorted by length, where there are no labels
POOLS = 16  # in an epoch at least
GPT1_TOKENS = {"start": "_start_", "delimiter": "_delimiter_", "extract": "_classify_"}  # in GPT-1's order


def with_task_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with special tokens around every text: its own, or else GPT-1's three new tokens as last ids.

    A text is then [start; text; extract] and two are [start; text; delimiter; text; extract], here and wherever the
    folder is opened.
    """
    if any(isinstance(part, int) for part, _ in tokenizer.definition.single):
        return tokenizer
    names = [name for name in GPT1_TOKENS.values() if name not in tokenizer.special_ids]
    grown = tokenizer.with_specials(names) if names else tokenizer
    start, delimiter, extract = (grown.special_ids[name] for name in GPT1_TOKENS.values())
    d = grown.definition
    if d.library is not None:
        raise UserError("this tokenizer runs in the tokenizers library alone and cannot take new special tokens")
    roles = dict(d.roles)
    roles.setdefault("pad", roles.get("end", start))  # other programs that open the folder need one
    return Tokenizer(
        replace(
            d,
            roles=roles,
            single=((start, 0), ("A", 0), (extract, 0)),
            pair=((start, 0), ("A", 0), (delimiter, 0), ("B", 0), (extract, 0)),
        )
    )


@dataclass(frozen=True)
class Part:
    """A piece of a pass: a field, or words of the template itself."""

    field: str | None
    words: str = ""


@dataclass(frozen=True)
class Pass:
    first: tuple[Part, ...]
    second: tuple[Part, ...] | None

    @property
    def fields(self) -> set[str]:
        return {part.field for part in (*self.first, *(self.second or ())) if part.field is not None}


def parse(template: str) -> Pass:
    """`{context} {question} | {choice}` taken apart."""
    sides = template.split("|")
    if len(sides) > 2 or not all(side.strip() for side in sides):
        raise UserError(f"template {template!r}: one text, or two with a bar between, such as '{{text}} | {{pair}}'")
    parts = []
    for side in sides:
        found = re.findall(r"\{(\w+)\}|([^{}]+)", side.strip())
        if re.sub(r"\{\w+\}|[^{}]+", "", side):
            raise UserError(f"template {template!r}: braces hold one field name each, such as {{text}}")
        parts.append(tuple(Part(name or None, words.strip()) for name, words in found if name or words.strip()))
    return Pass(parts[0], parts[1] if len(parts) > 1 else None)


@dataclass(frozen=True)
class TokenRow:
    """One token sequence with the segment of each token."""

    tokens: IntArray
    segments: IntArray


@dataclass
class Truncation:
    """How many rows were longer than they may be."""

    rows: int = 0
    longest: int = 0
    total: int = 0  # rows, also the shorter ones

    def add(self, wanted: int, kept: int) -> None:
        self.longest = max(self.longest, wanted)
        self.rows += wanted > kept
        self.total += 1


class Template:
    """From examples to token rows. A row that is too long loses tokens from the end of its longest text.

    Every pass reads the example once: fields in braces, plain words as they are, and a bar before the second text.
    """

    def __init__(self, tokenizer: Tokenizer, passes: Sequence[str], *, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        self.passes = [parse(text) for text in passes]
        if without := [text for text, p in zip(passes, self.passes, strict=True) if not p.fields]:
            raise UserError(
                f"template {without[0]!r} has no field in braces, such as {{text}}: all rows would be equal"
            )
        self.truncation = Truncation()
        two = any(p.second for p in self.passes)
        special = len(tokenizer.add_special_tokens([], [] if two else None)[0])
        if length <= special:
            raise UserError(f"length={length} leaves no tokens for text beside {special} special tokens")

    def rows(self, examples: Sequence[Example]) -> list[list[TokenRow]]:
        """The rows of each example: one for each pass, or for each choice of each pass."""
        plans = [list(self._filled(example)) for example in examples]
        texts = [text for plan in plans for _, sides in plan for side in sides for text in side]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [
            [self._row(p, [[next(encoded) for _ in side] for side in sides]) for p, sides in plan] for plan in plans
        ]

    def _filled(self, example: Example) -> Iterator[tuple[Pass, list[list[str]]]]:
        """Each pass with the texts of its fields."""
        choices = example.fields.get("choices", [None])
        for choice in choices:
            values = {**example.fields, **({} if choice is None else {"choice": choice})}
            for p in self.passes:
                yield p, [_texts(side, values) for side in (p.first, p.second) if side is not None]

    def _row(self, p: Pass, sides: list[list[Any]]) -> TokenRow:
        limit = self.length - len(self.tokenizer.add_special_tokens([], None if p.second is None else [])[0])
        parts = [part for side in sides for part in side]
        self.truncation.add(sum(len(part) for part in parts), limit)
        keep = iter(shares([len(part) for part in parts], limit))
        kept = [np.concatenate([part[: next(keep)] for part in side]).tolist() for side in sides]
        tokens, segments = self.tokenizer.add_special_tokens(kept[0], kept[1] if p.second is not None else None)
        return TokenRow(np.array(tokens, dtype=np.int32), np.array(segments, dtype=np.int32))


def _texts(side: tuple[Part, ...], values: Mapping[str, Any]) -> list[str]:
    """The texts of one side; each but the first begins with the space before it."""
    texts: list[str] = []
    for part in side:
        if part.field is not None and part.field not in values:
            if part.field == "question":  # a story has none
                continue
            raise UserError(
                f"the template needs {{{part.field}}}; fields are {', '.join(values)}{did_you_mean(part.field, values)}"
            )
        text = part.words if part.field is None else str(values[part.field])
        texts.append(f" {text}" if texts else text)
    return texts if texts else [""]


def shares(lengths: Sequence[int], limit: int) -> list[int]:
    """How much of each part is kept so that all fit: the longest loses tokens first, down to the next longest."""
    if sum(lengths) <= limit:
        return list(lengths)
    cap, left, waiting = 0, limit, sorted(lengths)
    for place, size in enumerate(waiting):
        cap = left // (len(waiting) - place)
        if size > cap:
            break
        left -= size
    kept = [min(size, cap) for size in lengths]
    spare = limit - sum(kept)
    for place, size in enumerate(lengths):
        if spare and size > kept[place]:
            kept[place] += 1
            spare -= 1
    return kept


# ---- rows and batches -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LabelledBatch:
    """Items of a task; rows are padded at the right, and `lengths` says how much of each is real."""

    tokens: Tensor  # (R, T)
    lengths: Tensor  # (R,)
    segments: Tensor  # (R, T)
    items: Tensor  # (R,) which item of the batch a row belongs to
    targets: Tensor  # (B,) labels, numbers or places of choices; (B, 2) spans; (R, T) tags
    numbers: Tensor  # (B,) which items of the whole set these are
    anchors: Tensor | None = None  # (A,) items of the batch that count, where the others are only negatives
    groups: Tensor | None = None  # (B,) items of other groups are no negatives
    step: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def to(self, device: torch.device) -> LabelledBatch:
        if device.type == "cpu":
            return self
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {n: t.to(device, non_blocking=True) for n, t in given.items() if isinstance(t, Tensor)}
        return replace(self, **moved)


class LabelledRows:
    """Every item of a set, tokenised."""

    mixed = True

    def __init__(
        self,
        items: Sequence[Sequence[TokenRow]],
        targets: npt.NDArray[np.int64] | npt.NDArray[np.float32] | None = None,
        tags: Sequence[npt.NDArray[np.int64]] | None = None,
        about: Sequence[tuple[int, Any]] | None = None,
    ) -> None:
        """`tags` holds a label per token of each row; `about` the example that an item was cut from, and what else."""
        rows = [row for item in items for row in item]
        sizes = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        self.tokens = _joined([row.tokens for row in rows])
        self.segments = _joined([row.segments for row in rows])
        self.tags = None if tags is None else _joined(tags)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])  # (rows + 1,)
        self.firsts = np.concatenate([[0], np.cumsum([len(item) for item in items])]).astype(np.int64)  # (N + 1,)
        self.targets = np.zeros(len(items), dtype=np.int64) if targets is None else targets
        self.lengths = np.array([max(len(row.tokens) for row in item) for item in items], dtype=np.int64)  # (N,)
        self.real_tokens = int(sizes.sum())
        self.about = [] if about is None else list(about)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, numbers: Numbers, step: int = 0) -> LabelledBatch:
        counts = self.firsts[numbers + 1] - self.firsts[numbers]  # rows of each item
        items = np.repeat(np.arange(len(numbers)), counts)
        rows = np.concatenate([np.arange(self.firsts[n], self.firsts[n + 1]) for n in numbers])
        lengths = self.starts[rows + 1] - self.starts[rows]
        width = int(lengths.max())
        real = np.arange(width) < lengths[:, None]  # (R, T)
        places = (self.starts[rows][:, None] + np.arange(width))[real]

        def padded(flat: Numbers, value: int) -> Tensor:
            whole = np.full(real.shape, value, dtype=np.int64)
            whole[real] = flat[places]
            return torch.from_numpy(whole)

        targets = torch.from_numpy(self.targets[numbers]) if self.tags is None else padded(self.tags, NO_LABEL)
        return LabelledBatch(
            tokens=padded(self.tokens, 0),
            lengths=torch.from_numpy(lengths),
            segments=padded(self.segments, 0),
            items=torch.from_numpy(items),
            targets=targets,
            numbers=torch.from_numpy(numbers),
            step=step,
        )

    def part(
        self, numbers: Numbers, first: int, rows: int, *, step: int = 0, group: int | None = None
    ) -> LabelledBatch:
        """Some items of a batch; `group` bounds how many belong together where items depend on each other."""
        return self.batch(numbers[first : first + rows], step)

    def sweep(self, size: int) -> Iterator[LabelledBatch]:
        """Every item once, shortest first, for measuring; a batch holds fewer items the longer they are."""
        order = np.argsort(self.lengths, kind="stable")
        first = 0
        while first < len(order):
            longest = self.lengths[order[min(first + size, len(order)) - 1]]
            count = max(1, min(size, 16384 // int(longest)))
            yield self.batch(order[first : first + count])
            first += count


class ContrastRows(LabelledRows):
    """Items that are each other's negatives: a part of a batch comes with all texts of the batch.

    The loss of a batch is then the same for every number of micro-batches and ranks; memory follows the batch.
    """

    def part(
        self, numbers: Numbers, first: int, rows: int, *, step: int = 0, group: int | None = None
    ) -> LabelledBatch:
        count = -(-len(numbers) // (len(numbers) if group is None else group))
        edges = np.array([len(numbers) * i // count for i in range(count + 1)])
        begin = int(edges[edges <= first][-1])
        end = int(edges[edges >= first + rows][0])
        groups = np.searchsorted(edges, np.arange(begin, end), side="right")
        return replace(
            self.batch(numbers[begin:end], step),
            anchors=torch.arange(first - begin, first - begin + rows),
            groups=torch.from_numpy(groups),
        )


def _joined(parts: Sequence[npt.NDArray[np.generic]]) -> Numbers:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)


class TaskRows(Protocol):
    """What batches are formed from."""

    lengths: Numbers  # (N,)
    firsts: Numbers  # (N + 1,) first row of each item
    real_tokens: int
    mixed: bool  # whether batches hold items of any length; otherwise of like length

    def __len__(self) -> int: ...

    def part(self, numbers: Numbers, first: int, rows: int, *, step: int = 0, group: int | None = None) -> Any: ...

    def sweep(self, size: int) -> Iterator[Any]: ...


@dataclass(frozen=True)
class ValidationSample:
    """Some validation items, drawn with a seed, as one batch of the loop that is sorted by length."""

    data: TaskRows
    count: int
    group: int
    seed: int

    def rows(self, step: int) -> int:
        return min(self.count, len(self.data))

    def part(self, step: int, first: int, rows: int) -> Any:
        return self.data.part(self._numbers, first, rows, group=self.group)

    @cached_property
    def _numbers(self) -> Numbers:
        drawn = np.sort(generator(self.seed, "validation sample").permutation(len(self.data))[: self.count])
        return drawn[np.argsort(self.data.lengths[drawn], kind="stable")]


class Grouped:
    """Batches for training: each epoch visits every item once, in an order that only (seed, epoch) decide.

    Batches of like length would hold like labels wherever the length tells something of the label, so those of
    labelled items are drawn from all, and the model computes them in groups of like length.
    """

    def __init__(self, data: TaskRows, size: int, *, seed: int) -> None:
        self.data, self.size, self.seed = data, min(size, len(data)), seed
        self.steps = -(-len(data) // self.size)  # in one epoch
        self.pool = 1 if data.mixed else max(1, min(POOL, self.steps // POOLS))  # batches
        self.plan = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[Numbers]:
        """Items shuffled, then sorted by length within pools, then cut into batches, whose order is shuffled."""
        draw = generator(self.seed, "labelled order", epoch)
        cuts = np.array_split(draw.permutation(len(self.data)), self.steps)  # of like size: no row stands alone
        batches: list[Numbers] = []
        for first in range(0, self.steps, self.pool):
            pool = cuts[first : first + self.pool]
            items = np.concatenate(pool)
            batches += np.array_split(items[np.argsort(-self.data.lengths[items], kind="stable")], len(pool))
        return [batches[i] for i in draw.permutation(len(batches))]

    def numbers(self, step: int) -> Numbers:
        epoch, place = divmod(step, self.steps)
        return self.plan(epoch)[place]

    def rows(self, step: int) -> int:
        return len(self.numbers(step))

    def part(self, step: int, first: int, rows: int) -> Any:
        return self.data.part(self.numbers(step), first, rows, step=step)
