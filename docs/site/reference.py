"""Pages of the site that are made from the code, when mkdocs builds it: README, options, HTTP API, Python API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in made_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def made_pages() -> dict[str, str]:
    return {
        "index.md": readme("README.md"),
        "index.zh.md": readme("README.zh.md"),
        "reference/python.md": python_page(),
        "reference/options.md": options_page(),
        "reference/http.md": http_page(),
        "reference/names.md": names_page(),
    }


def readme(name: str) -> str:
    """README with its links as they are from the site's first page."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    text = text.replace("](README.zh.md)", "](index.zh.md)").replace("](README.md)", "](index.md)")
    return re.sub(r"\[([^\]]+)\]\((?!index|http|(?:tutorials/)?[a-z_-]+(\.zh)?\.(?:md|png)|deploy)[^)]*\)", r"\1", text)


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def options_page() -> str:
    from plume.cli.verbs import KNOWN
    from plume.config import describe

    lines = ["# Commands and options", ""]
    for name, verb in KNOWN.items():
        if verb.kind is None:
            continue
        lines += [f"## plume {name}", "", f"`plume {name} {verb.usage}`".replace(" `", "`"), "", verb.about, ""]
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [f"| `--{flag}` | | {cell(text)} |" for flag, text in verb.flags.items()]
        for row in describe(verb.kind):
            choices = f" ({', '.join(row.choices)})" if row.choices else ""
            default = f"`{cell(row.default)}`" if row.default else ""
            lines.append(f"| `--{row.name.replace('_', '-')}` | {default} | {cell(row.help)}{choices} |")
        lines.append("")
    return "\n".join(lines)


def names_page() -> str:
    """What other tools call an option."""
    from plume.config.aliases import ALIASES

    lines = ["# Names of other tools", "", "Typed as options or fields, these are answered with Plume's own.", ""]
    lines += ["| there | Plume |", "|---|---|"]
    for theirs, meant in sorted(ALIASES.items()):
        told = [f"{', '.join(f'`{f}`' for f in a.fields)} {a.hint}".strip() for a in meant]
        lines.append(f"| `{cell(theirs)}` | {cell('; '.join(told))} |")
    return "\n".join(lines) + "\n"


def http_page() -> str:
    from plume.config import ServeConfig
    from plume.serve import create_app

    schema = create_app(ServeConfig(models=("model",))).openapi()
    lines = ["# HTTP API", "", "Also at `/docs` of every server, with a page to try it.", ""]
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            said = about.get("description") or about.get("summary") or ""
            lines += [f"## {method.upper()} {path}", "", said, ""]
            body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            fields = schema["components"]["schemas"].get(body.get("$ref", "").rpartition("/")[2], {})
            if fields.get("properties"):
                lines += ["| field | default | |", "|---|---|---|"]
                for name, field in fields["properties"].items():
                    default = f"`{cell(field['default'])}`" if field.get("default") is not None else ""
                    lines.append(f"| `{name}` | {default} | {cell(field.get('description', ''))} |")
                lines.append("")
    return "\n".join(lines)


def python_page() -> str:
    """Every public name where it is defined; a config without help in its docstring has its fields' help as a table."""
    import plume

    lines = ["# Python", "", "`import plume` gives these; a function takes its config or the config's fields.", ""]
    for name in plume.__all__:
        home = plume._HOME_OF.get(name, "plume.config")
        if home == "plume.config":
            lines += config_section(name)
        else:
            lines.append(f"::: {home}.{name}\n")
    return "\n".join(lines)


def config_section(name: str) -> list[str]:
    from dataclasses import is_dataclass

    import plume
    from plume.config import describe

    kind = getattr(plume, name)
    lines = [f"## {name}", "", (kind.__doc__ or "").strip().splitlines()[0], ""]
    if is_dataclass(kind):
        lines += ["| field | default | |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {f'`{cell(row.default)}`' if row.default else ''} | {cell(row.help)} |"
                  for row in describe(kind)]  # fmt: skip
    return [*lines, ""]
