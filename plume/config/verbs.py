"""What --help says of every verb beside its own words: the order of the work, the usage, the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plume.config.data import DataConfig, TokenizerConfig
from plume.config.evaluate import EvaluateConfig, SweepConfig
from plume.config.finetune import FinetuneConfig
from plume.config.generate import DecodeBenchConfig, ExportConfig, GenerateConfig
from plume.config.plan import DemoConfig, PlanConfig
from plume.config.serve import ServeConfig
from plume.config.tables import describe
from plume.config.train import DistillConfig, PretrainConfig


@dataclass(frozen=True)
class Verb:
    """What --help says of a verb beside its own words."""

    usage: str
    options: type | None = None  # the config behind it: each field is an option
    hidden: str = ""  # a field that is no option here


FIRST, MAKE, USE, MEASURE = "First steps", "Make a model", "Use it", "Measure"
VERBS = {
    FIRST: {
        "demo": Verb("[--text FILE...] [--folder FOLDER]", DemoConfig),
        "doctor": Verb(""),
        "plan": Verb("PRESET [--ranks N]", PlanConfig),
    },
    MAKE: {
        "tokenizer": Verb("COMMAND"),
        "tokenizer train": Verb("FILE... --out FOLDER [--vocab-size 8192]", TokenizerConfig, hidden="folder"),
        "tokenizer inspect": Verb("FOLDER TEXT"),
        "prepare": Verb("TEXT... --folder FOLDER, or plume prepare RECIPE", DataConfig),
        "pretrain": Verb("RECIPE [--folder FOLDER], or plume pretrain RUN --resume", PretrainConfig),
        "finetune": Verb("MODEL --task.train FILE --folder FOLDER, or plume finetune RECIPE", FinetuneConfig),
        "distill": Verb("TEACHER --folder FOLDER, or plume distill RECIPE", DistillConfig),
        "import": Verb("MODEL --out FOLDER"),
    },
    USE: {
        "generate": Verb("MODEL [PROMPT] [--temperature 0.8] [--seed 1]", GenerateConfig),
        "explore": Verb("MODEL...", ServeConfig),
        "serve": Verb("MODEL... [--port 9000]", ServeConfig),
        "export": Verb("MODEL [--format gguf] [--out FILE]", ExportConfig),
    },
    MEASURE: {
        "evaluate": Verb("MODEL --tasks TASK,... [--out FOLDER]", EvaluateConfig),
        "sweep": Verb("RECIPE --folder FOLDER [--sizes 1x32 2x64]", SweepConfig),
        "runs": Verb("[FOLDER...] [--compare] [--plot FILE]"),
        "bench": Verb("COMMAND"),
        "bench decode": Verb("[--preset gpt2] [--rounds 3]", DecodeBenchConfig),
    },
}


def usage(name: str, verb: Verb) -> str:
    return f"Usage: plume {name} {verb.usage}".rstrip()


def verb_of(words: Sequence[str]) -> tuple[str, Verb] | None:
    known = {name: verb for verbs in VERBS.values() for name, verb in verbs.items()}
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in known), "")
    return (name, known[name]) if name else None


def show_options(verb: Verb) -> None:
    """The fields behind a verb whose --help was asked for: its own first, then section by section."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    rows = [row for row in describe(verb.options) if row[0] != verb.hidden] if verb.options else []
    for section in dict.fromkeys(["", *(name.rpartition(".")[0] for name, *_ in rows)]):
        table = Table.grid(padding=(0, 2), pad_edge=True)
        table.add_column(no_wrap=True)
        for name, type_, default, comment in rows:
            if name.rpartition(".")[0] == section:
                choices = type_.replace("|", " | ") if "|" in type_ else ""
                meaning = ": ".join(part for part in (choices, comment) if part)
                option = f"--{name.replace('_', '-')}"
                table.add_row(Text(option), Text(f"{meaning} (default {default})" if default else meaning))
        if table.row_count:
            console.print(Text(f"Options of {section}" if section else "Options", style="bold"), table)
