"""The main job on what every machine has: read Python's own source, train a small GPT-2 on it, and let it write."""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plume.config import (
    PRESETS,
    DataConfig,
    DemoConfig,
    ModelConfig,
    PretrainConfig,
    TokenizerConfig,
    TrainConfig,
    UserError,
)
from plume.config.screen import harmless
from plume.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

    from plume.train.pretrain import RunResult

BATCH = 8  # sequences in one update: small, so that two minutes are enough for many updates
BYTES_PER_TABLE_ROW = 1500  # a token should have been seen often enough to be learned
LETTERS_READ = 4_000_000  # characters of the text in which letters are counted
LETTER_SEEN = 10  # times, and a letter of several bytes is to be one token
OWN_PROMPTS = (None, None)  # from the start token
PYTHON_PROMPTS = ("def read(", "class", "import")  # a trailing space would stand for a token that never comes alone


def demo(config: DemoConfig) -> RunResult:
    """Everything from text to samples, told as it goes along."""
    from rich.console import Console

    from plume.train.pretrain import pretrain

    console = Console()
    console.rule("[bold]Plume[/]: from text to a language model", align="left")
    run = settings(config)
    console.print(
        f"Reading {', '.join(run.data.paths)}, training a tokenizer of {run.model.vocab_size} tokens, "
        f"then a {run.model.layers}-layer GPT-2 for about {config.minutes:g} minutes."
    )
    result = pretrain(run)
    if not result.outcome.finished:
        return result
    show_losses(console, result)
    show_samples(console, config, result.model)
    show_next(console, result)
    return result


def settings(config: DemoConfig) -> PretrainConfig:
    """A recipe cut to the text's size and the machine's speed."""
    paths = config.text if config.text else ("python:stdlib",)
    model = PRESETS["gpt2-laptop"]
    room = max(text_bytes(paths) // BYTES_PER_TABLE_ROW, 256 + 2 * wide_letters(config))
    vocab_size = max(512, min(model.vocab_size, room // 256 * 256))
    model = replace(model, vocab_size=vocab_size)
    possible = config.minutes * 60 / measure_step(model, BATCH)
    steps = max(20, 5 * round(possible / 5))  # five times validated, the last time at its end
    return PretrainConfig(
        folder=config.folder,
        overwrite=True,
        model=model,
        data=DataConfig(
            paths=paths,
            folder=config.folder / "data",
            encoding=config.encoding,
            tokenizer=TokenizerConfig(kind="byte-bpe", vocab_size=vocab_size),
            validation_share=0.05 if config.text else 0.02,
            overwrite=True,
        ),
        train=TrainConfig(
            steps=steps,
            batch=BATCH,
            optimizer="muon",
            lr=3e-3,
            muon_lr=0.02,
            weight_decay=0.0,
            warmup_steps=min(20, steps // 10),
            schedule="constant-then-decay",
            cooldown_share=0.6,
            final_lr_share=0.0,
            validate_every=max(1, steps // 5),
            validation_rows=64,
            sample_prompt="" if config.text else PYTHON_PROMPTS[0],
            sample_tokens=40,
            seed=config.seed,
        ),
    )


def text_bytes(paths: tuple[str, ...]) -> int:
    from plume.data.sources import find_files

    files = [file for path in paths for file in find_files(path)]
    size = sum(file.stat().st_size for file in files)
    if size == 0:
        raise UserError(f"there is no text in {', '.join(paths)}")
    return size


def wide_letters(config: DemoConfig) -> int:
    """Letters of several bytes that are frequent, as Chinese has thousands: without a token each would be torn."""
    if not config.text:
        return 0  # Python's source has hardly any
    from plume.data.readers import read_documents
    from plume.data.rows import Tally

    seen, read = Counter[str](), 0
    texts = DataConfig(paths=config.text, folder=Path(), encoding=config.encoding)
    for document in read_documents(texts, Tally()):
        part = document.text[: LETTERS_READ - read]
        seen.update(part)
        read += len(part)
        if read >= LETTERS_READ:
            break
    return sum(count >= LETTER_SEEN and not letter.isascii() for letter, count in seen.items())


def measure_step(model: ModelConfig, batch: int) -> float:
    """Seconds that one update takes here: forward, backward, and the optimiser's share on top."""
    import torch

    from plume.heads import Model
    from plume.train.objectives import token_loss

    trial = Model(model)
    tokens = torch.zeros(batch, model.context, dtype=torch.long)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        hidden = trial.body(tokens)
        token_loss(hidden, trial.table, tokens, vocab_size=model.vocab_size).backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter() - start)
    return 1.15 * sorted(times[1:])[1]


# ---- for people ---------------------------------------------------------------------------------------------------


def show_losses(console: Console, result: RunResult) -> None:
    from rich.table import Table

    table = Table("a model that knows", "loss", "perplexity", title="How well it predicts text it has not seen")
    table.columns[1].justify = table.columns[2].justify = "right"
    validation = result.outcome.validation
    losses = {"nothing (uniform)": result.uniform, "how frequent each token is (unigram)": result.unigram}
    losses["what came before (this one)"] = result.outcome.loss if validation is None else validation
    for name, loss in losses.items():
        table.add_row(name, f"{loss:.3f}", f"{math.exp(loss):,.1f}")
    console.print(table)


def show_samples(console: Console, config: DemoConfig, folder: Path) -> None:
    from rich.panel import Panel
    from rich.text import Text

    from plume.generate.lm import load

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


def show_next(console: Console, result: RunResult) -> None:
    folder = shlex.quote(str(result.folder))  # as a shell wants to have it
    console.print(f"The loss curve is in {result.folder / 'loss.png'}, the model in {result.model}. Now you can:")
    for command, what in (
        (f"plume generate {folder}", "write with it"),
        (f"plume explore {folder}", "look inside it, in the browser"),
        (f"plume serve {folder}", "serve it, as OpenAI's API"),
        ("plume demo --text my_book.txt", "do the same with your own text"),
    ):
        console.print(f"  [bold]{command:34}[/] {what}", highlight=False)
