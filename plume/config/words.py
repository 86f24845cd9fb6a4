"""From the words behind a verb of the command line to its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plume.config.errors import UserError
from plume.config.tables import RECIPE, build, find_recipe, parse_overrides, with_overrides

T = TypeVar("T")


def settings(
    kind: type[T], words: Sequence[str], takes: str = "", *, section: str = "", start: Mapping[str, Any] | None = None
) -> T:
    """A config from the words behind a verb: what it takes, or a recipe; then `--section.field value` options.

    What it takes fills the field of that name. Of a recipe, `section` is used if it has one. A run folder stands for
    its recipe where the run is to go on, or where nothing else can be meant.
    """
    leading, options = split(words)
    table, origin = dict(start or {}), ""
    if takes and leading and not is_recipe(leading, options):
        table[takes] = list(leading) if len(leading) > 1 else leading[0]
    elif leading:
        if len(leading) > 1:
            raise UserError(f"{leading[1]!r} stands alone; options look like --section.field value")
        read, origin = find_recipe(leading[0])
        table |= read.get(section, read)
    table = with_overrides(table, parse_overrides(options))
    return build(kind, table, origin=origin)


def is_recipe(leading: Sequence[str], options: Sequence[str]) -> bool:
    run = (Path(leading[0]) / RECIPE).is_file() and "--resume" in options
    return len(leading) == 1 and (leading[0].endswith(".toml") or run)


def split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return words[:count], words[count:]
