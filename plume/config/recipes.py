"""From tables, options and keywords to configs: recipes, presets, overrides, advice on every mistake, help."""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import (
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from plume.config.aliases import ALIASES
from plume.config.fields import UserError, at_home, did_you_mean, help_of, nearest, refuse
from plume.config.model_config import PRESETS, ModelConfig, preset

T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", contravariant=True)
R = TypeVar("R", covariant=True)
RECIPE = "recipe.toml"  # in a run folder: every setting, as run
RECIPES = Path(__file__).resolve().parents[1] / "recipes"  # included with Plume


# ---- from plain values to a config


def build(kind: type[T], table: Mapping[str, Any], *, origin: str = "") -> T:
    """One frozen dataclass from nested plain values, strings among them; every problem of the table in one error.

    A `preset` in a model's table is where its other fields start from.
    """
    filled, problems = _fill(kind, kind, table, "")
    value, wrong = _validate(kind, filled)
    problems += wrong
    if problems or value is None:
        raise UserError("\n  ".join([f"{origin}:"] * bool(origin) + problems))
    return cast(T, with_paths(value))


def from_fields(kind: type[T], given: Mapping[str, Any]) -> T:
    """A config from keywords; a name that only one section has needs no section."""
    return build(kind, _with_values({}, {locate(kind, name, value): value for name, value in given.items()}))


def locate(kind: type, name: str, value: Any = None) -> str:
    """The dotted name of a field that was given without its section, if only one section has it."""
    known = names_of(kind)
    if f"{name}.{name}" in known and not isinstance(value, Mapping) and not is_dataclass(value):
        return f"{name}.{name}"
    if name in known or "." in name:
        return name
    found = [one for one in known if one.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else name


@cache
def names_of(kind: type) -> tuple[str, ...]:
    """The dotted names of all fields, sections included."""
    hints, found = get_type_hints(kind), list[str]()
    for f in fields(kind):
        found.append(f.name)
        if is_dataclass(hints[f.name]):
            found += [f"{f.name}.{inner}" for inner in names_of(hints[f.name])]
    return (*found, "preset") if kind is ModelConfig else tuple(found)


def _validate(kind: type[T], filled: dict[str, Any]) -> tuple[T | None, list[str]]:
    """The value, or every problem: after wrong types, the rest is checked with defaults in their place."""
    from pydantic import TypeAdapter, ValidationError  # slow to import, so not at the top: --help must be quick

    adapter, problems, dropped = TypeAdapter(kind), list[str](), set[Any]()
    for _ in range(2):
        try:
            value = adapter.validate_python(filled)
        except ValidationError as error:
            found = [dict(e) for e in error.errors()]
        else:
            return (None if problems else value), problems
        found = [e for e in found if e["type"] != "missing" or e["loc"] not in dropped]
        problems += [sentence for e in found if (sentence := _sentence(kind, e)) not in problems]
        for e in found:
            if e["type"] not in ("missing", "value_error"):
                dropped.add(e["loc"])
                filled = _replaced(filled, e["loc"], str(e["type"]).startswith(("int", "float")))
    return None, problems


def _replaced(table: dict[str, Any], path: Any, number: bool) -> dict[str, Any]:
    """The table with 1 for a wrong number, and without any other wrong value."""
    name, *rest = path
    if rest and isinstance(table.get(name), dict):
        return table | {name: _replaced(table[name], rest, number)}
    return {key: 1 if key == name else value for key, value in table.items() if number or key != name}


def _fill(root: type, kind: type, table: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[str]]:
    """The table's known part with presets filled in, and a sentence for each unknown name."""
    hints, problems = get_type_hints(kind), list[str]()
    known = {f.name: hints[f.name] for f in fields(kind)}
    filled: dict[str, Any] = {}
    if kind is ModelConfig and "preset" in table:
        try:
            filled = asdict(preset(str(table["preset"])))
        except UserError as error:
            problems.append(str(error))
            filled = asdict(PRESETS["gpt2"])  # so that the other fields are still checked
    for name, value in table.items():
        if kind is ModelConfig and name == "preset":
            continue
        if name not in known:
            problems += _unknown(root, path, name, value)
        elif is_dataclass(known[name]) and (
            isinstance(value, Mapping) or (known[name] is ModelConfig and isinstance(value, str))
        ):
            inner = value if isinstance(value, Mapping) else {"preset": value}
            filled[name], found = _fill(root, cast(type, known[name]), inner, f"{path}{name}.")
            problems += found
        else:
            alone = get_origin(known[name]) is tuple and not isinstance(value, (list, tuple))
            filled[name] = plain_paths([value] if alone else value)  # one value stands for a list of one
            if value == "none" and type(None) in get_args(known[name]):  # TOML and the command line have no None
                filled[name] = None
    for f in fields(kind):  # of a section that is missing, the fields that it needs are named
        if f.default is MISSING and is_dataclass(known[f.name]) and known[f.name] is not ModelConfig:
            filled.setdefault(f.name, {})
    return filled, problems


def plain_paths(value: Any) -> Any:
    """Texts in place of paths, which a field of either kind takes."""
    if isinstance(value, (list, tuple)):
        return [plain_paths(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _unknown(root: type, path: str, name: str, value: Any) -> Iterator[str]:
    """A sentence for an unknown name, or for each name in an unknown section."""
    near = nearest(f"{path}{name}", names_of(root)) if isinstance(value, Mapping) else None
    if near is not None:
        yield f"there is no {path}{name}; did you mean {near}?"
    elif isinstance(value, Mapping) and value:
        for inner, deeper in value.items():
            yield from _unknown(root, f"{path}{name}.", inner, deeper)
    else:
        yield f"there is no {path}{name}{advice(root, name)}"


def advice(kind: type, name: str) -> str:
    """Where a misplaced, foreign or misspelt name belongs among the fields of a config; empty if nothing is close."""
    known = [one for one in names_of(kind) if one != name]
    name = name.replace("-", "_").rpartition(".")[2]
    same = [one for one in known if one.rpartition(".")[2] == name]
    if same:
        return f"; did you mean {' or '.join(sorted(same, key=lambda one: one.count('.'))[:3])}?"
    for alias in ALIASES.get(name.lower(), ()):
        for field in alias.fields:
            if found := [one for one in known if one.rpartition(".")[2] == field]:
                hint = f" ({alias.hint})" if alias.hint else ""
                return f"; use {min(found, key=lambda one: one.count('.'))}{hint}"
        if not alias.fields:
            return f": {alias.hint}"
    if name.lower() in ALIASES:
        return ""
    leaf = nearest(name, [one.rpartition(".")[2] for one in known])
    near = [one for one in known if one.rpartition(".")[2] == leaf]
    return f"; did you mean {min(near, key=lambda one: one.count('.'))}?" if near else ""


def _sentence(kind: type, error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        what = help_at(kind, error["loc"])
        return f"{where} is missing ({what})" if what else f"{where} is missing"
    if error["type"] == "dict_type":
        name, _, value = str(error["input"]).partition("=")
        return f"{where} has a value for each name: --{where}.{name} {value if value else 'VALUE'}"
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    text = message if error["type"] == "value_error" else f"{message}, not {error['input']!r}"
    return f"{where}: {text}" if where else text


def help_at(kind: Any, path: Sequence[Any]) -> str:
    """The help text of a field, by the names that lead to it; empty where there is none."""
    text = ""
    for name in path:
        found = {f.name: f for f in fields(kind)} if is_dataclass(kind) else {}
        if name not in found:
            return ""
        text, kind = help_of(found[name]), get_type_hints(kind)[name]
    return text


# ---- functions that take a config or its fields


class TakesFields(Protocol[P, C, R]):
    """A function of one config that also takes the config's fields by keyword.

    The last form is for plain values of nested fields (`task={"train": "rows.csv"}`, `train="rows.csv"`), which no
    signature can list; `build` checks every name and value, and says which field was meant.
    """

    @overload
    def __call__(self, config: C, /) -> R: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(self, **fields: Any) -> R: ...


def takes_fields(kind: Callable[P, C]) -> Callable[[Callable[[C], R]], TakesFields[P, C, R]]:
    """Let a function of one config take the config's fields by keyword instead."""

    def decorate(function: Callable[[C], R]) -> TakesFields[P, C, R]:
        @wraps(function)
        def call(config: C | None = None, /, **fields: Any) -> R:
            if config is not None and fields:
                raise UserError(f"give a config or keywords, not both: {', '.join(fields)}")
            if config is not None and not isinstance(config, cast(type, kind)):
                raise UserError(f"expected {cast(type, kind).__name__} or keywords, not {type(config).__name__}")
            if config is None:
                return function(from_fields(cast(type[C], kind), fields))
            refuse(wrong_choices(config))
            return function(with_paths(config))

        first = inspect.Parameter("config", inspect.Parameter.POSITIONAL_ONLY, default=None)
        rest = inspect.signature(kind).parameters.values()
        call.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
        return cast(TakesFields[P, C, R], call)

    return decorate


def wrong_choices(config: Any, path: str = "") -> Iterator[str]:
    """Python does not check that a field which takes a few words has got one of them."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name, None)
        if is_dataclass(value):
            yield from wrong_choices(value, f"{path}{name}.")
            continue
        kinds = [hint] if get_origin(hint) is Literal else [arg for arg in get_args(hint) if get_origin(arg) is Literal]
        words = [word for kind in kinds for word in get_args(kind)]
        if words and isinstance(value, str) and value not in words:
            yield f"{path}{name}={value!r} is none of {', '.join(map(str, words))}{did_you_mean(value, words)}"


def with_paths(config: Any) -> Any:
    """The config with a Path where one is meant and a text was given, and with the home folder for `~`."""
    changed: dict[str, Any] = {}
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name, None)
        if is_dataclass(value) and (inner := with_paths(value)) is not value:
            changed[name] = inner
        elif isinstance(value, str | Path) and hint in (Path, Path | None) and value != (path := at_home(value)):
            changed[name] = path
        elif isinstance(value, tuple) and hint == tuple[Path, ...]:
            changed[name] = tuple(map(at_home, value))
    return replace(config, **changed) if changed else config


class CallableModule(ModuleType):
    """A module that can be called like its function of the same name: `plume.evaluate(...)`, `plume.plan(...)`."""

    def __call__(self, *args: Any, **fields: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **fields)


# ---- recipes and overrides
def read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None


def find_recipe(name: str) -> tuple[dict[str, Any], str]:
    """A recipe by its file, its run folder or its name, and where it was found. A run's folder is where it lies now."""
    path = Path(name)
    if path.suffix == ".toml":
        ours = RECIPES.parent / path  # recipes/gpt2-laptop.toml, wherever one is
        return read_recipe(ours if ours.is_file() and not path.exists() else path), str(path)
    if (path / RECIPE).is_file():
        return read_recipe(path / RECIPE) | {"folder": str(path)}, str(path / RECIPE)
    known = recipe_names()
    if name not in known:
        raise UserError(
            f"there is no recipe {name!r}; a recipe is a .toml file, a run folder or one of {', '.join(known)}"
            f"{did_you_mean(name, known)}"
        )
    return read_recipe(known[name]), name


def recipe_names() -> dict[str, Path]:
    return {file.stem: file for file in sorted(RECIPES.glob("*.toml"))}


def parse_options(kind: type, words: Sequence[str]) -> tuple[list[str], dict[str, str | list[str]]]:
    """Positional words, and the values of `--section.field value` or `--section.field=value` by dotted name.

    A field takes one word, a list takes all words up to the next option, and a flag alone means true.
    """
    positional, found = list[str](), dict[str, list[str]]()
    name, left = "", 0.0  # the option that the next words belong to, and how many of them
    for word in words:
        if word.startswith("--") and len(word) > 2:
            given, equals, value = word[2:].partition("=")
            name = locate(kind, given.replace("-", "_"), value)
            left = 0 if equals else _words_taken(kind, name)
            found.setdefault(name, []).extend([value] if equals else [])
        elif left > 0 and (left != 0.5 or word.lower() in ("true", "false")):
            found[name].append(word)
            left -= 1
        else:
            positional.append(word)
            left = 0
    return positional, {name: _option_value(kind, name, values) for name, values in found.items()}


def _words_taken(kind: type, dotted: str) -> float:
    """How many words an option takes; half a word is a flag's true or false. Unknown ones take all, to be refused."""
    hint = _hint_of(kind, dotted)
    if hint is bool or bool in get_args(hint):
        return 0.5
    return math.inf if hint is None or get_origin(hint) is tuple else 1


def _hint_of(kind: type, dotted: str) -> Any:
    hint: Any = kind
    for part in dotted.split("."):
        if kind_of(hint, part) is None:
            return str if part == "preset" and hint is ModelConfig else None
        hint = kind_of(hint, part)
    return hint


def kind_of(owner: Any, name: str) -> Any:
    return get_type_hints(owner).get(name) if is_dataclass(owner) else None


def _option_value(kind: type, name: str, values: list[str]) -> str | list[str]:
    taken = _words_taken(kind, name)
    if not values and taken >= 1 and _hint_of(kind, name) is not None:
        raise UserError(f"--{name.replace('_', '-')} needs a value")
    if len(values) > 1 and taken <= 1:
        raise UserError(f"--{name.replace('_', '-')} was given {len(values)} times")
    return values[0] if len(values) == 1 else values or "true"


def with_overrides(table: Mapping[str, Any], overrides: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """The table with `section.field` values laid over it."""
    values = {
        name.replace("-", "_"): _toml_value(text) if isinstance(text, str) else [_toml_value(value) for value in text]
        for name, text in overrides.items()
    }
    return _with_values(table, values)


def _with_values(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The table with values by dotted name: whole sections first, then fields of them."""
    merged = dict(table)
    for dotted in sorted(values, key=lambda name: name.count(".")):
        *sections, name = dotted.split(".")
        place = merged
        for section in sections:
            place[section] = place = _opened(place.get(section))
        place[name] = values[dotted]
    return merged


def _opened(section: Any) -> dict[str, Any]:
    """A section as a table, also where a config or the name of a preset stands for it."""
    if is_dataclass(section) and not isinstance(section, type):
        return {f.name: getattr(section, f.name) for f in fields(section)}
    if isinstance(section, str):
        return {"preset": section}
    return dict(section) if isinstance(section, Mapping) else {}


def _toml_value(text: str) -> Any:
    """Lists, tables and quoted texts; plain words are what their field makes of them."""
    if not text.startswith(("[", "{", '"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


# ---- help


class Described(NamedTuple):
    """What --help shows of one field."""

    name: str  # dotted
    choices: tuple[str, ...]  # of a Literal
    default: str
    help: str


def describe(kind: type, prefix: str = "") -> list[Described]:
    """Every field with its help text, nested ones dotted."""
    hints, rows = get_type_hints(kind), list[Described]()
    for f in fields(kind):
        if is_dataclass(hints[f.name]):
            rows += describe(cast(type, hints[f.name]), f"{prefix}{f.name}.")
        else:
            rows.append(Described(prefix + f.name, _choices(hints[f.name]), _shown(f.default), help_of(f)))
    return rows


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return () if get_origin(hint) is tuple else tuple(c for one in get_args(hint) for c in _choices(one))


def _shown(default: Any) -> str:
    """A default as it would be typed; unset and off are not shown."""
    if default is MISSING or default is None or default is False:
        return ""
    return " ".join(str(value) for value in default) if isinstance(default, tuple) else str(default)
