"""A mistake that the user can mend, and the nearest right word for it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any


class UserError(ValueError):
    """A mistake that the user can mend; the command line shows its message alone and leaves with code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def refuse(problems: Iterable[str]) -> None:
    """Every problem there is, in one error."""
    if sentences := list(problems):
        raise UserError("; ".join(sentences))


def check_encoding(encoding: str) -> None:
    try:
        "".encode(encoding)
    except LookupError:
        raise UserError(f"encoding={encoding!r} is not known; utf-8, gb18030 and latin-1 are") from None


def below_one(config: Any, *names: str) -> Iterator[str]:
    """A sentence for each of these fields that is set and less than 1."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            optional = getattr(type(config), name, 0) is None  # what a dataclass keeps as the default
            yield f"{name}={value} must be at least 1{', or unset' if optional else ''}"
