"""The token rows that a model's task makes of a text or two, so that it is explained on what it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import ModelConfig, UserError
from plume.data.batches import decoder_start
from plume.explain import Explanation, explain
from plume.hf import folder_info
from plume.inference.scoring import start_tokens
from plume.inference.sequences import token_ids
from plume.model.heads import TOKEN_HEADS, Model
from plume.tasks import Predictor
from plume.tasks.generate import end_token
from plume.tasks.schema import Example
from plume.text import Tokenizer
from plume.util.console import plural

LESSON = (
    "A robot must obey the orders given it by human beings except where such orders would conflict with the First Law."
)
WHOLE_WORDS = 1.4  # most tokens per word of a tokenizer that was made for the language


@dataclass(frozen=True)
class ExplainedRow:
    """One row of tokens, with segments where the model has them and a source where it is an encoder-decoder."""

    tokens: list[int]
    segments: list[int] | None = None
    source: list[int] | None = None


def explained_rows(
    model: Model, tokenizer: Tokenizer, folder: Path | None, text: str | Sequence[int], pair: str | None = None
) -> list[ExplainedRow]:
    """The rows of a text. `pair` is the second text, the context of a question, the choices (one a line) or the target.

    A task may make several rows: one per choice, per order of a pair, or per window of a long text.
    """
    if model.config.decoder_layers:
        target = [] if not pair else tokenizer.encode(pair)
        context = model.config.context
        source = [*token_ids(tokenizer, text)[: context - 1], end_token(tokenizer)]
        return [ExplainedRow([decoder_start(tokenizer), *target][:context], source=source)]
    if model.kind in TOKEN_HEADS or model.kind == "bare" or not isinstance(text, str):
        return [plain_row(model, tokenizer, text, pair)]
    return task_rows(Predictor(model, tokenizer, folder), text, pair)


def plain_row(model: Model, tokenizer: Tokenizer, text: str | Sequence[int], pair: str | None) -> ExplainedRow:
    """A text for a language model: as it is if causal; with special tokens, and masks, if bidirectional."""
    if model.config.causal and model.kind in TOKEN_HEADS:
        if pair:
            raise UserError("a model that predicts the next token reads one text; put both into one, or leave pair out")
        return ExplainedRow(token_ids(tokenizer, text))
    ids = tokenizer.encode(text, allow_special=True) if isinstance(text, str) else token_ids(tokenizer, text)
    tokens, segments = tokenizer.add_special_tokens(ids, tokenizer.encode(pair) if pair else None)
    return ExplainedRow(tokens, segments if model.config.segments > 1 else None)


def task_rows(predictor: Predictor, text: str, pair: str | None) -> list[ExplainedRow]:
    """The rows that a fine-tuned head is trained on."""
    kind, model = predictor.kind_for(pair), predictor.model
    if pair and len(kind.fields) == 1:
        raise UserError("this model was fine-tuned on single texts; leave pair out")
    fields = kind.fields_from(text, pair)
    if empty := [name for name, value in fields.items() if not value]:
        raise UserError(f"{empty[0]} is empty; a {kind.name} model needs {' and '.join(fields)}")
    data = kind.encode([Example(fields, None, "text")])
    cuts = [slice(a, b) for a, b in zip(data.starts[:-1], data.starts[1:], strict=True)]
    segments = [np.asarray(data.segments[cut]).tolist() if model.config.segments > 1 else None for cut in cuts]
    return [ExplainedRow(data.tokens[cut].tolist(), s) for cut, s in zip(cuts, segments, strict=True)]


def reads_english(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer knows most words of an English sentence whole: one of Python source of 8,192 does not."""
    return len(tokenizer.encode(LESSON)) <= WHOLE_WORDS * len(LESSON.split())


def section(table: dict[str, Any], name: str) -> dict[str, Any]:
    """A table in a table; empty where there is none: a recipe may be known by its name alone."""
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def page_fields(config: ModelConfig, head: str, folder: Path | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a page asks of a model: what `pair` holds (empty: nothing), prompts that suit it, the shape of a block."""
    info = folder_info(folder)
    task = str(section(info, "task").get("kind", ""))
    heads = {"span": "context", "choose": "choices", "similarity": "pair", "classify": "pair" if task == "pair" else ""}
    prompt = section(section(info, "recipe"), "train").get("sample_prompt")
    pair = "target" if config.decoder_layers else heads.get(head, "")
    stack = {"norm": config.norm, "decoder_layers": config.decoder_layers, "segments": config.segments}
    is_lesson = head == "next-token" and not pair and reads_english(tokenizer)
    prompts = [*([LESSON] if is_lesson else []), *([prompt] if prompt else [])]
    return {"pair": pair, "prompts": prompts, "first_view": "attention" if is_lesson else "next", **stack}


def explain_text(
    model: Model,
    tokenizer: Tokenizer,
    folder: Path | None,
    text: str | Sequence[int],
    pair: str | None = None,
    row: int = 0,
) -> Explanation:
    """One of a text's rows inside the model."""
    rows = explained_rows(model, tokenizer, folder, text, pair)
    if not 0 <= row < len(rows):
        raise UserError(f"row={row} does not exist; this text makes {plural(len(rows), 'row')}, counted from 0")
    chosen = rows[row]
    explained = explain(
        model, chosen.tokens, spell=lambda t: spelled(tokenizer, t), segments=chosen.segments, source=chosen.source
    )
    if chosen.source is None:
        explained.start, explained.mask = next(iter(start_tokens(tokenizer)), None), tokenizer.mask
    if not model.config.causal and pair is None and model.kind in TOKEN_HEADS:
        around = tokenizer.add_special_tokens([-1])[0]
        before = around.index(-1)
        explained.predicted = slice(before, len(chosen.tokens) - (len(around) - 1 - before))
    return explained


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; special tokens by name, bytes that are only a part of a character as hexadecimal escapes."""
    if token in tokenizer.special_ids.values():
        return tokenizer.token(token)
    raw = tokenizer.piece_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)
