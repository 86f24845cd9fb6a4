"""The main job on what every machine has: read Python's own source, train a small GPT-2 on it, and let it write."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from plume.config import (
    PRESETS,
    DataConfig,
    DemoConfig,
    PretrainConfig,
    TokenizerConfig,
    TrainConfig,
    UserError,
)
from plume.util.console import harmless, plural, terminal
from plume.util.files import write_text
from plume.util.run_folder import is_run

if TYPE_CHECKING:
    from rich.console import Console

    from plume.train.budget import Sized
    from plume.train.pretrain import RunResult

FOLDER = Path("runs/demo")  # unless another is named
OWN_PROMPTS = (None, None)  # from the start token
NAMES = {
    "uniform": "nothing: all tokens equally likely",
    "unigram": "how frequent each token is",
    "bigram": "the token before (bigram)",
    "xz": "xz, after the training text",
}
PYTHON_PROMPTS = ("def read(", "class Reader(", "import os\nimport")  # no space behind: it is a part of the next token


def demo(config: DemoConfig) -> RunResult:
    """From text to samples, printed as it runs."""
    from plume.train.pretrain import pretrain

    folder = run_folder(config)
    console = terminal()
    console.rule("Plume: from text to a language model", align="left")
    if config.folder is None and folder != FOLDER:
        console.print(f"{FOLDER} holds a run already; this one goes to {folder}.")
    console.print(f"Sizing a GPT-2 for {plural(config.minutes, 'minute')} on this machine ...")
    run, chosen, ratio = settings(replace(config, folder=folder))
    console.print(f"Reading {', '.join(run.data.paths)}, training a tokenizer, then a GPT-2: {chosen}.")
    result = pretrain(run)
    if not result.outcome.finished:
        return result
    show_losses(console, result, run.data.folder, ratio)
    show_samples(console, config, result.model)
    show_next(console, result, config)
    return result


def run_folder(config: DemoConfig) -> Path:
    """The folder that was named, or the first of runs/demo, runs/demo-2, ... without a run."""
    if config.folder is None:
        names = (FOLDER.with_name(f"{FOLDER.name}-{number}") for number in count(2))
        return FOLDER if config.overwrite else next(name for name in chain([FOLDER], names) if not is_run(name))
    if is_run(config.folder) and not config.overwrite:
        again = f"plume pretrain {shlex.quote(str(config.folder))} --resume"
        raise UserError(
            f"{config.folder} already contains a run; --overwrite replaces it, --folder chooses another folder, "
            f"and `{again}` continues an unfinished one"
        )
    return config.folder


def settings(config: DemoConfig) -> Sized:
    """A recipe sized by the text and the machine's speed."""
    from plume.train.budget import sized

    folder = run_folder(config)
    return sized(
        PretrainConfig(
            folder=folder,
            overwrite=config.overwrite,
            minutes=config.minutes,
            model=PRESETS["gpt2-laptop"],
            data=DataConfig(
                paths=config.text if config.text else ("python:stdlib",),
                folder=folder / "data",
                encoding=config.encoding,
                tokenizer=TokenizerConfig(kind="byte-bpe"),
                validation_fraction=0.05 if config.text else 0.02,
                overwrite=True,
            ),
            train=TrainConfig(
                steps=1,  # as all that is sized, chosen for the time
                weight_decay=0.0,
                validation_rows=64,
                sample_prompt="" if config.text else PYTHON_PROMPTS[0],
                sample_tokens=40,
                seed=config.seed,
            ),
        )
    )


# ---- output ---------------------------------------------------------------------------------------------------


def show_losses(console: Console, result: RunResult, data: Path, ratio: float | None = None) -> None:
    """What the held-out text takes by the model, beside what needs no model; nothing where too little was held out."""
    from rich.table import Table

    from plume.train.budget import expected
    from plume.train.held_out import held_out_bits

    if result.outcome.validation is None:
        console.print(f"Training loss {result.outcome.loss:.3f} (token frequencies alone {result.unigram:.3f})")
        return
    table = Table("predicted by", "bits per byte", title="Held-out text", title_justify="left")
    table.columns[1].justify = "right"
    bits = held_out_bits(result.model, data)
    for name, value in bits.items():
        table.add_row(NAMES.get(name, name), f"{value:.2f}", style="bold" if name == "this model" else "")
    console.print(table)
    if ratio is not None:
        console.print(expected(ratio, bits).capitalize())


def show_samples(console: Console, config: DemoConfig, folder: Path) -> None:
    from rich.panel import Panel
    from rich.text import Text

    from plume.lm import load

    lm = load(folder)
    pages: list[str] = []
    for number, prompt in enumerate(OWN_PROMPTS if config.text else PYTHON_PROMPTS):
        written = lm.generate(prompt, max_new_tokens=120, temperature=0.8, top_k=40, seed=config.seed + number)
        given = "" if prompt is None else prompt
        pages.append(given + written.text)
        page = Text(given, style="bold") + Text(harmless(written.text))
        console.print(Panel(page, title=f"sample, seed {config.seed + number}", title_align="left"))
    lm.close()
    write_text(folder.parent / "samples.md", "".join(f"```\n{page}\n```\n\n" for page in pages))


def show_next(console: Console, result: RunResult, config: DemoConfig) -> None:
    from rich.text import Text

    folder, gap = shlex.quote(str(result.folder)), " " if console.width >= 80 else "\n    "  # as a shell wants it
    console.print(f"The loss curve is in {result.folder / 'loss.png'}, the model in {result.model}. Now you can:")
    paths = " ".join(map(shlex.quote, config.text))
    if config.encoding != DemoConfig().encoding:
        paths += f" --data.encoding {config.encoding}"
    longer_folder = shlex.quote(f"{result.folder}-20")
    longer = (f"plume pretrain auto --minutes 20 --data.paths {paths} --folder {longer_folder}", "train longer")
    for command, what in (
        (f"plume generate {folder}", "generate text"),
        (f"plume explore {folder}", "inspect it in the browser"),
        (f"plume serve {folder}", "serve it with OpenAI's API"),
        longer if config.text else ("plume demo --text my_book.txt --folder runs/my_book", "train on your own text"),
    ):
        console.print("  ", Text(f"{command:50}", "bold"), f"{gap}{what}", sep="", soft_wrap=True)
