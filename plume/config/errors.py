"""A mistake that the user can mend, and the nearest right word for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend; the command line shows its message alone and leaves with code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
