"""What happens inside a model on one text: attention, lens, contributions, surprise, as plain numbers to draw."""

from __future__ import annotations

from collections.abc import Sequence

from plume.explain.explanation import Explanation, Spell, candidates
from plume.explain.results import as_json, packed
from plume.heads import Model
from plume.text import Tokenizer

__all__ = ["Explanation", "as_json", "candidates", "explain", "explain_text", "packed", "spelled"]


def explain(
    model: Model, tokens: Sequence[int], *, spell: Spell = str, segments: Sequence[int] | None = None
) -> Explanation:
    """Look inside a model while it reads these tokens; `spell` gives the text of a token id."""
    return Explanation(model, tokens, spell=spell, segments=segments)


def explain_text(model: Model, tokenizer: Tokenizer, text: str | Sequence[int]) -> Explanation:
    """The same for a text or its ids, with what the family puts around a text that is read from both sides."""
    ids = tokenizer.encode(text) if isinstance(text, str) else list(text)
    segments = None
    if not model.config.causal:
        ids, segments = tokenizer.wrap(ids)
    two = segments is not None and model.config.segments > 1
    return Explanation(model, ids, spell=lambda t: spelled(tokenizer, t), segments=segments if two else None)


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; bytes that are only a part of a character are written out."""
    raw = tokenizer.piece_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)
