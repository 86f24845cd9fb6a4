"""From tables to configs and back to words: recipes, overrides, every mistake explained, what --help shows."""

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from plume.config.errors import UserError, did_you_mean
from plume.config.model import ModelConfig
from plume.config.presets import PRESETS, preset

T = TypeVar("T")
RECIPE = "recipe.toml"  # in a run folder: every setting, as run
RECIPES = Path(__file__).resolve().parents[1] / "recipes"  # that Plume brings along


def build(kind: type[T], table: Mapping[str, Any], *, origin: str = "") -> T:
    """One frozen dataclass from nested plain values, strings among them; every problem of the table in one error.

    A `preset` in a model's table is where its other fields start from.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import, so not at the top: --help must be quick

    filled, problems = _fill(kind, table, "")
    try:
        value = TypeAdapter(kind).validate_python(filled)
    except ValidationError as error:
        problems += [_sentence(dict(e)) for e in error.errors()]
    if problems:
        raise UserError("\n  ".join([f"{origin}:"] * bool(origin) + problems))
    return value


def _fill(kind: type, table: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The table's known part with presets filled in, and a sentence for each unknown name."""
    hints, problems = get_type_hints(kind), list[str]()
    known = {f.name: hints[f.name] for f in fields(kind)}
    filled: dict[str, Any] = {}
    if kind is ModelConfig and "preset" in table:
        try:
            filled = asdict(preset(str(table["preset"])))
        except UserError as error:
            problems.append(str(error))
            filled = asdict(PRESETS["gpt2"])  # so that the other fields are still looked at
    for name, value in table.items():
        if kind is ModelConfig and name == "preset":
            continue
        if name not in known:
            problems.append(f"there is no {path}{name}{_whereabouts(name, known, path)}")
        elif is_dataclass(known[name]) and isinstance(value, Mapping):
            filled[name], inner = _fill(known[name], value, f"{path}{name}.")
            problems += inner
        else:
            alone = get_origin(known[name]) is tuple and not isinstance(value, (list, tuple))
            filled[name] = [value] if alone else value  # one value stands for a list of one
            if value == "none" and type(None) in get_args(known[name]):  # TOML and the command line have no None
                filled[name] = None
    return filled, problems


def _whereabouts(name: str, known: Mapping[str, Any], path: str) -> str:
    """Where a misspelt or misplaced name probably belongs."""
    for section, kind in known.items():
        if is_dataclass(kind) and name in {f.name for f in fields(kind)}:
            return f"; did you mean {path}{section}.{name}?"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {path}{near[0]}?" if near else f"; known here: {', '.join(known)}"


def _sentence(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{where} is missing"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    said = message if error["type"] == "value_error" else f"{message}, not {error['input']!r}"
    return f"{where}: {said}" if where else said


def read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no recipe {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None


def find_recipe(name: str) -> tuple[dict[str, Any], str]:
    """A recipe by its file, its run folder or its name, and where it was found. A run's folder is where it lies now."""
    path = Path(name)
    if path.suffix == ".toml":
        ours = RECIPES.parent / path  # recipes/gpt2-laptop.toml, wherever one is
        return read_recipe(ours if ours.is_file() and not path.exists() else path), str(path)
    if (path / RECIPE).is_file():
        return read_recipe(path / RECIPE) | {"folder": str(path)}, str(path / RECIPE)
    known = {file.stem: file for file in sorted(RECIPES.glob("*.toml"))}
    if name not in known:
        raise UserError(
            f"there is no recipe {name!r}{did_you_mean(name, known)}; a recipe is a .toml file, a run folder "
            f"or one of {', '.join(known)}"
        )
    return read_recipe(known[name]), name


def parse_overrides(words: Sequence[str]) -> dict[str, str | list[str]]:
    """`--section.field value` and `--section.field=value`; several values make a list, and a flag alone means true."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.setdefault(name, []).extend([value] if equals else [])
        elif name:
            found[name].append(word)
        else:
            raise UserError(f"{word!r} stands alone; options look like --section.field value")
    return {name: values[0] if len(values) == 1 else values or "true" for name, values in found.items()}


def with_overrides(table: Mapping[str, Any], overrides: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """The table with `section.field` values laid over it."""
    merged: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in table.items()}
    for dotted, text in overrides.items():
        *sections, name = dotted.replace("-", "_").split(".")
        place = merged
        for section in sections:
            inner = place.get(section)
            place[section] = place = dict(inner) if isinstance(inner, Mapping) else {}
        place[name] = _toml_value(text) if isinstance(text, str) else [_toml_value(value) for value in text]
    return merged


def _toml_value(text: str) -> Any:
    """Lists, tables and quoted texts; plain words are what their field makes of them."""
    if not text.startswith(("[", "{", '"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def describe(kind: type, prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(name, type, default, comment) of every field, nested ones dotted: what --help shows."""
    parts = re.split(r"^    (?=\w+: )", inspect.getsource(kind), flags=re.MULTILINE)[1:]
    comments = {
        part.split(":")[0]: found[1] for part in parts if (found := re.search(r"  # (.*)$", part, re.MULTILINE))
    }
    hints, rows = get_type_hints(kind), list[tuple[str, str, str, str]]()
    for f in fields(kind):
        if is_dataclass(hints[f.name]):
            rows += describe(hints[f.name], f"{prefix}{f.name}.")
            continue
        choices = re.search(r"Literal\[(.*?)\]", str(f.type))
        type_ = choices[1].replace('"', "").replace("'", "").replace(", ", "|") if choices else str(f.type)
        rows.append((prefix + f.name, type_.removesuffix(" | None"), _shown(f.default), comments.get(f.name, "")))
    return rows


def _shown(default: Any) -> str:
    """A default as it would be typed; what is unset or off needs no word."""
    if default is MISSING or default is None or default is False:
        return ""
    return " ".join(str(value) for value in default) if isinstance(default, tuple) else str(default)
