"""The verbs of the command line: their configs, the words behind them, and what --help prints."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from plume import config
from plume.config import RECIPE, UserError, build, describe, did_you_mean, find_recipe, parse_options, with_overrides

T = TypeVar("T")
JSON = {"json": "print the result as JSON"}
OTHER_NAMES = {  # of the same in other tools
    "train": "plume pretrain or plume finetune",
    "chat": "plume generate MODEL",
    "run": "plume generate MODEL",
    "predict": "plume generate MODEL",
    "eval": "plume evaluate",
    "list": "plume runs",
    "help": "plume --help, or plume VERB --help",
    "version": "plume --version",
}


@dataclass(frozen=True)
class Verb:
    """A verb: its usage, what it does, the config whose fields are its options, and flags of the command line alone."""

    usage: str
    about: str
    kind: type | None = None  # None for a group of verbs
    flags: Mapping[str, str] = field(default_factory=dict)


FIRST, MAKE, USE, MEASURE = "First steps", "Train", "Use", "Evaluate"
VERBS: dict[str, dict[str, Verb]] = {
    FIRST: {
        "demo": Verb(
            "[--text FILE...] [--folder FOLDER]",
            "Train a first model in a few minutes: tokenizer, small GPT-2, baselines, samples. It reads the source of "
            "Python's standard library, or your --text.",
            config.DemoConfig,
        ),
        "doctor": Verb(
            "[RUN]",
            "Check that this machine can train: devices, memory, the fastest precision; under torchrun also an "
            "all-reduce over the ranks. With RUN: why a pretraining does not learn as it should.",
            config.DoctorConfig,
            JSON,
        ),
        "plan": Verb(
            "PRESET|RECIPE|RUN... [--ranks N]",
            "Parameters, memory, FLOPs, time and cost of a model, here and on other hardware; with --ranks per rank.",
            config.PlanConfig,
            JSON,
        ),
    },
    MAKE: {
        "data": Verb("COMMAND", "Check prepared data."),
        "data verify": Verb(
            "FOLDER", "Check every byte of a folder of prepared data against its hashes.", config.VerifyConfig
        ),
        "tokenizer": Verb("COMMAND", "Train a tokenizer, or show how one splits a text."),
        "tokenizer train": Verb(
            "FILE... --out FOLDER [--vocab-size 8192]", "Train a tokenizer on text files.", config.TrainTokenizerConfig
        ),
        "tokenizer inspect": Verb(
            "FOLDER TEXT", "Show how a tokenizer splits a text: tokens, ids, bytes, offsets.", config.InspectConfig
        ),
        "prepare": Verb(
            "TEXT... --folder FOLDER, or plume prepare RECIPE",
            "Tokenize texts into shards. TEXT is a file, a folder, a glob, python:stdlib or hub:NAME; of a recipe, the "
            "section [data] is used. An interrupted run continues when it is started again.",
            config.DataConfig,
        ),
        "pretrain": Verb(
            "RECIPE [--folder FOLDER], or plume pretrain RUN --resume",
            "Pretrain a model by a recipe: a .toml file or the name of one that Plume includes, such as gpt2-laptop. "
            "--resume continues an interrupted run, --overwrite replaces it. Under torchrun it is one rank.",
            config.PretrainConfig,
            JSON,
        ),
        "finetune": Verb(
            "MODEL --task.train FILE --folder FOLDER, or plume finetune RECIPE",
            "Fine-tune a pretrained model on labelled rows and evaluate it. FILE has a row per example: text (or two) "
            "and its label.",
            config.FinetuneConfig,
            JSON,
        ),
        "distill": Verb(
            "TEACHER --folder FOLDER, or plume distill RECIPE",
            "Distill a pretrained teacher into a smaller student. If the teacher is a run folder, its data and train "
            "settings are the defaults.",
            config.DistillConfig,
            JSON,
        ),
        "import": Verb("MODEL --out FOLDER", "Copy a model into a checked model folder.", config.ImportConfig),
    },
    USE: {
        "generate": Verb(
            "MODEL [PROMPT] [--temperature 0.8] [--seed 1]",
            "Generate text after a PROMPT, after standard input as one prompt, after each prompt of --prompts, "
            "or in a conversation at the terminal.",
            config.GenerateConfig,
        ),
        "embed": Verb(
            "MODEL FILE --out vectors.npy",
            "Write a vector for each text of a file: a line, or a row of a table.",
            config.EmbedConfig,
        ),
        "explore": Verb(
            "[MODEL...] [--save page.html]",
            "Serve models as `plume serve` does and open the Explorer: next tokens, attention, layers, surprise, runs. "
            "Without a MODEL it shows plume-en, the English model that comes with Plume. "
            "--save writes one HTML file with the model in it instead, which needs no server.",
            config.ExploreConfig,
            {"no-browser": "print the address instead of opening a browser"},
        ),
        "serve": Verb(
            "MODEL... [--port 9000]",
            "Serve models over HTTP with OpenAI's API. NAME=MODEL gives a model another name.",
            config.ServeConfig,
            {"new-key": "print a new API key and its hash for --keys"},
        ),
        "export": Verb(
            "MODEL [--format gguf] [--out FILE]",
            "Convert a model for another runtime, and verify it there if that is installed.",
            config.ExportConfig,
        ),
    },
    MEASURE: {
        "evaluate": Verb(
            "MODEL --tasks TASK,... [--out FOLDER], or plume evaluate --compare FOLDER FOLDER",
            "Evaluate a model on tasks: built-in names, NAME=FILE, your own files, harness:NAME, separated by commas.",
            config.EvaluateConfig,
            {"compare": "compare two report folders"},
        ),
        "sweep": Verb(
            "RECIPE [--folder FOLDER] [--sizes 1x32 2x64]",
            "Train several sizes on the same data: loss against parameters and compute. An interrupted sweep continues "
            "when it is started again.",
            config.SweepConfig,
        ),
        "reproduce": Verb(
            "[EXPERIMENT|all] [--minutes 30] [--data TEXT...] [--tasks FILE...]",
            "Run an experiment of a paper in small, on Python's source or your data: table, plot, a verdict per claim. "
            "Without a name, list the experiments with their time. An interrupted one continues when started again.",
            config.ReproduceConfig,
        ),
        "runs": Verb(
            "[FOLDER...] [--compare] [--plot FILE]",
            "List run folders, compare their settings and losses, or plot them.",
            config.RunsConfig,
            JSON,
        ),
        "bench": Verb("COMMAND", "Measure Plume's speed on this machine."),
        "bench decode": Verb(
            "[--preset gpt2] [--rounds 3]",
            "Measure generation speed. `python -m benchmarks decode` compares other engines, from a clone.",
            config.DecodeBenchConfig,
        ),
    },
}
KNOWN = {name: verb for verbs in VERBS.values() for name, verb in verbs.items()}


def verb_of(words: Sequence[str]) -> str:
    """The verb at the start of a command line."""
    for name in (" ".join(words[:2]), *words[:1]):
        if name in KNOWN:
            return name
    hint = f"; use {OTHER_NAMES[words[0]]}" if words[0] in OTHER_NAMES else did_you_mean(words[0], KNOWN)
    raise UserError(f"there is no verb {words[0]!r}; plume --help lists them{hint}")


def split_flags(verb: Verb, words: Sequence[str]) -> tuple[list[str], set[str]]:
    """The words without the flags of the command line alone, and those flags."""
    flags = {word[2:] for word in words if word.startswith("--") and word[2:] in verb.flags}
    return [word for word in words if word[2:] not in flags or not word.startswith("--")], flags


def settings(
    kind: type[T], words: Sequence[str], *takes: str, section: str = "", start: Mapping[str, Any] | None = None
) -> T:
    """A config from the words behind a verb: positional values or a recipe, then `--section.field value` options.

    Positional values fill the fields that `takes` names. Of a recipe, `section` is used if it has one. A run folder
    stands for its recipe with --resume, or where the verb takes nothing else.
    """
    leading, overrides = parse_options(kind, words)
    table, origin = dict(start or {}), ""
    named = section and len(leading) == 1 and leading[0] in config.recipe_names() and not Path(leading[0]).exists()
    if takes and leading and not named and not is_recipe(leading, overrides):
        table |= positional(kind, takes, leading)
    elif leading:
        if len(leading) > 1:
            raise UserError(f"unexpected argument {leading[1]!r}; options look like --section.field value")
        read, origin = find_recipe(leading[0])
        table |= read.get(section, read)
    return build(kind, with_overrides(table, overrides), origin=origin)


def positional(kind: type, takes: Sequence[str], leading: Sequence[str]) -> dict[str, Any]:
    several = str(kind.__dataclass_fields__[takes[-1]].type).startswith("tuple")  # type: ignore[attr-defined]
    if several:
        return {takes[-1]: list(leading)}
    if len(leading) > len(takes):
        extra = leading[len(takes)]
        if kind is config.FinetuneConfig:
            raise UserError(f"unexpected argument {extra!r}; labelled rows are given as --task.train {extra}")
        raise UserError(f"unexpected argument {extra!r}; quote a text with blanks, and give options as --name value")
    return dict(zip(takes, leading, strict=False))


def is_recipe(leading: Sequence[str], overrides: Mapping[str, Any]) -> bool:
    run = (Path(leading[0]) / RECIPE).is_file() and "resume" in overrides
    return len(leading) == 1 and (leading[0].endswith(".toml") or run)


# ---- help


def usage(name: str) -> str:
    return f"Usage: plume {name} {KNOWN[name].usage}".rstrip()


def overview() -> str:
    lines = [
        "Usage: plume VERB ...",
        "",
        *wrapped("From raw text to a pretrained, fine-tuned, evaluated, served and explorable language model."),
    ]
    for title, verbs in VERBS.items():
        lines += ["", f"{title}:", *rows({name: verb.about for name, verb in verbs.items() if " " not in name})]
    lines += [
        "",
        *wrapped("Begin with `plume demo`. Every verb explains its options: `plume finetune --help`."),
        "--version prints the version.",
    ]
    return "\n".join(lines)


def help_text(name: str) -> str:
    """Usage, what the verb does, and its options: its own first, then section by section."""
    verb = KNOWN[name]
    lines = [*wrapped(usage(name), 4), "", *wrapped(verb.about)]
    if inner := {other: v.about for other, v in KNOWN.items() if other.startswith(f"{name} ")}:
        lines += ["", "Commands:", *rows(inner)]
    described = describe(verb.kind) if verb.kind else []
    for section in dict.fromkeys(["", *(row.name.rpartition(".")[0] for row in described)]):
        here = {f"--{flag}": text for flag, text in verb.flags.items() if not section}
        for row in described:
            if row.name.rpartition(".")[0] == section:
                meaning = ": ".join(part for part in (" | ".join(row.choices), row.help) if part)
                here[f"--{row.name.replace('_', '-')}"] = (
                    f"{meaning} (default {row.default})" if row.default else meaning
                )
        if here:
            lines += ["", f"Options of {section}:" if section else "Options:", *rows(here)]
    if any("." in row.name for row in described):
        lines += ["", *wrapped("An option that only one section has needs no section name: --lr for --train.lr.")]
    return "\n".join(lines)


def rows(texts: Mapping[str, str]) -> Iterator[str]:
    """Two columns, or text below names that leave too little place for it."""
    column = max(map(len, texts)) + 4
    for name, text in texts.items():
        if column > columns() // 2:
            yield from (f"  {name}", *(f"      {line}" for line in wrapped(text, at=6)))
        else:
            first, *rest = wrapped(text, at=column)
            yield f"  {name:{column - 2}}{first}"
            yield from (" " * column + line for line in rest)


def wrapped(text: str, indent: int = 0, *, at: int = 0) -> list[str]:
    lines = textwrap.wrap(
        text, columns() - at, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return lines if lines else [""]


def columns() -> int:
    return min(120, max(40, shutil.get_terminal_size((100, 24)).columns))
