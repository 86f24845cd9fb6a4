"""The command line: one verb per stage, each a thin door to one function that takes one config."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import cyclopts

from plume import __version__, config
from plume.config import UserError
from plume.config.screen import tell
from plume.config.verbs import VERBS, show_options, usage, verb_of
from plume.config.words import settings, split

if TYPE_CHECKING:
    from plume.train.distill import DistillResult
    from plume.train.pretrain import RunResult

app = cyclopts.App(
    name="plume",
    help="From raw text to a pretrained, fine-tuned, measured, served and explorable language model.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # main has a word for it
    help_epilogue="Begin with `plume demo`. Every verb explains its options: `plume finetune --help`.",
)
tokenizer = cyclopts.App(name="tokenizer", help="Train a tokenizer, or look at how one cuts a text.")
app.command(tokenizer)
bench = cyclopts.App(name="bench", help="Measure Plume beside its peers on this machine.")
app.command(bench)

T = TypeVar("T")
Words = Annotated[str, cyclopts.Parameter(show=False, allow_leading_hyphen=True)]
Json = Annotated[bool, cyclopts.Parameter(name="--json", negative=(), help="for programs instead of people")]
NewKey = Annotated[
    bool,
    cyclopts.Parameter(name="--new-key", negative=(), help="print a fresh API key and the hash to give with --keys"),
]
Browser = Annotated[bool, cyclopts.Parameter(name="--browser", help="open the page, or only print its address")]
Tasks = Annotated[str, cyclopts.Parameter(show=False)]
Compare = Annotated[
    tuple[Path, Path] | None,
    cyclopts.Parameter(consume_multiple=True, negative=(), help="two report folders, side by side"),
]


@app.command
def plan(preset: str, /, *words: Words, as_json: Json = False) -> None:
    """What a model needs: parameters per layer, memory, arithmetic, time here and on named hardware.

    With --ranks N also what each of N ranks holds and sends.
    """
    wanted = settings(config.PlanConfig, words, start={"name": preset, "model": {"preset": preset}})
    from plume import plan as planning

    result = planning.plan(wanted)
    share = planning.plan_ranks(wanted, result) if wanted.ranks > 1 else None
    if as_json:
        each = {} if share is None else {"rank": {**dataclasses.asdict(share), "total_bytes": share.total_bytes}}
        print(json.dumps({**result.as_json(), **each}, indent=2))
    else:
        show(planning.table(result, wanted), *([] if share is None else [planning.rank_table(share, wanted)]))


@app.command
def demo(*words: Words) -> None:
    """A first model in a few minutes: from text to samples.

    It reads the source of Python's standard library, or your --text, trains a tokenizer and a small GPT-2, compares its
    loss with what simple statistics reach, writes samples, and says how to go on.
    """
    wanted = settings(config.DemoConfig, words)
    from plume.demo import demo as run

    to_its_end(run(wanted).outcome.finished)


@app.command
def prepare(*words: Words) -> None:
    """Texts to token shards.

    A TEXT is a file, a folder, a glob, python:stdlib or hub:NAME. Of a recipe, the section [data] is used. Run again
    after an interruption, it goes on where it was.
    """
    wanted = settings(config.DataConfig, words, "paths", section="data")
    from plume import data

    show(data.show_report(data.prepare(wanted).report))


@tokenizer.command(name="train")
def train_tokenizer(
    *words: Words, out: Annotated[Path, cyclopts.Parameter(help="folder to write the tokenizer to")]
) -> None:
    """Train a tokenizer on text files."""
    files, options = split(words)
    wanted = config.build(config.TokenizerConfig, config.with_overrides({}, config.parse_overrides(options)))
    from plume import text

    trained = text.train_command([Path(file) for file in files], out, wanted)
    show(f"{trained.kind} tokenizer with {trained.vocab_size} tokens in {out}")


@tokenizer.command(name="inspect")
def inspect_tokenizer(folder: Path, text: str) -> None:
    """How a tokenizer cuts a text: pieces, ids, bytes, places."""
    from plume.text import inspect_table, load_tokenizer

    show(inspect_table(load_tokenizer(folder), text))


@app.command
def pretrain(*words: Words, as_json: Json = False) -> None:
    """Texts to a pretrained model, as a recipe says.

    A recipe is a .toml file or the name of one that Plume brings, such as gpt2-laptop. A run that was stopped goes on
    from its newest whole checkpoint with --resume, or begins again with --overwrite. Under torchrun it is one rank of
    many.
    """
    if not words:
        raise UserError("which recipe? for example plume pretrain gpt2-laptop")
    wanted = settings(config.PretrainConfig, words)
    from plume.train.pretrain import pretrain as run

    result = run(wanted)
    if result.main:
        show_result(result, as_json=as_json)
    to_its_end(result.outcome.finished)


@app.command
def finetune(*words: Words, as_json: Json = False) -> None:
    """A pretrained model and labelled rows to a measured model.

    FILE has a row for each example: a text (or two) and its label. The model folder, report.md, predictions.jsonl and
    plots are written into FOLDER.
    """
    wanted = settings(config.FinetuneConfig, words, "model")
    from plume.generate.lm import how_to_ask
    from plume.generate.translating import finetune as run
    from plume.weights import read_config

    result = run(wanted)
    if as_json:
        print((wanted.folder / "results.json").read_text(encoding="utf-8"))
    else:
        about = result.summary
        spread = f"from {about['lowest']:.4f} to {about['highest']:.4f} over {len(result.seeds)} seeds"
        tell(f"validation {result.metric}: median {about['median']:.4f}, {spread}")
        tell(f"wrote {wanted.folder / 'report.md'} and {result.model}")
        kept = read_config(result.model)
        tell(how_to_ask(kept.head, str(wanted.folder), two_stacks=kept.model.decoder_layers > 0))


@app.command
def distill(*words: Words, as_json: Json = False) -> None:
    """A smaller student of a pretrained teacher.

    A teacher that is a run folder says on which data and how its student learns, unless --prepared, --data and --train
    say otherwise.
    """
    leading, options = split(words)
    start = config.trained_like(leading[0]) if len(leading) == 1 else {}
    if any(word.startswith("--data.") for word in options):
        start.pop("prepared", None)
    wanted = settings(config.DistillConfig, words, "teacher", start=start)
    from plume.train.distill import distill as run

    result = run(wanted)
    show_result(result, as_json=as_json)
    to_its_end(result.outcome.finished)


@app.command
def runs(
    *folders: Path,
    compare: bool = False,
    plot: Path | None = None,
    as_json: Json = False,
) -> None:
    """List run folders (those below runs/ unless named), compare their settings and losses, or plot them as a PNG."""
    from plume.train import runs as look

    found = look.find_runs(folders if folders else (Path("runs"),))
    if plot is not None:
        look.plot_runs([run.folder for run in found], plot)
        print(f"wrote {plot}")
    elif as_json:
        print(json.dumps([run.as_json() for run in found], indent=2))
    elif compare:
        look.show_comparison(found)
    else:
        look.show_runs(found)


@app.command
def doctor(*, device: str = "auto", as_json: Json = False, timeout: float = 30.0) -> None:
    """Is this machine fit to train: devices, memory, the fastest precision; under torchrun also a sum over ranks."""
    from plume.train.doctor import doctor as examine
    from plume.train.doctor import show_diagnosis

    found = examine(device, timeout)
    if found is None:
        return
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show_diagnosis(found)
    if not found.well:
        raise UserError("not all is well: see above")


@app.command
def serve(*words: Words, new_key: NewKey = False) -> None:
    """Serve models over HTTP, in the shape that OpenAI's clients speak.

    MODEL is a model folder, a run folder or a hub name; NAME=MODEL gives it another name.
    """
    from plume import serve as serving

    if new_key:
        key, hashed = serving.new_key()
        print(
            f"key:  {key}\nhash: {hashed}\nStart the server with --keys '[\"{hashed}\"]' and give the key to its user."
        )
        return
    serving.serve(settings(config.ServeConfig, words, "models"))


@app.command
def explore(*words: Words, browser: Browser = True) -> None:
    """Open the Explorer on a model: next tokens, attention, layers, surprise, training runs.

    It serves them as `plume serve` does, and opens the page.
    """
    from plume import serve as serving

    serving.explore(settings(config.ServeConfig, words, "models"), browser=browser)


@app.command(name="import")
def import_model(source: str, /, *, out: Path) -> None:
    """Copy a model from the hub, or a folder made elsewhere, into a checked model folder of your own."""
    from plume.text import load_tokenizer
    from plume.weights import load_model, model_hash, resolve, save_model

    folder = resolve(source)
    info = {"imported_from": source, "imported_hash": model_hash(folder)}
    print(save_model(load_model(folder), out, tokenizer=load_tokenizer(folder), info=info))


@app.command
def generate(model: str, /, *words: Words) -> None:
    """Write text after a PROMPT, after each prompt of a file (--prompts), or in a conversation at the terminal.

    Options of sampling and engine need no section name: --temperature 0.8 --top-k 20 --seed 1 --precision int8.
    """
    from plume.generate import command

    prompt = words[0] if words and not words[0].startswith("--") else None
    command.generate(command.configure(model, prompt, words if prompt is None else words[1:]))


@app.command
def export(*words: Words) -> None:
    """Write a model for another runtime, and check it there."""
    wanted = settings(config.ExportConfig, words, "model")
    from plume.generate.export import export as write

    print(write(wanted))


@bench.command(name="decode")
def bench_decode(*words: Words) -> None:
    """How fast a GPT writes here, beside every other installed engine."""
    wanted = settings(config.DecodeBenchConfig, words)
    from plume.generate import bench as benching

    show(benching.table(benching.bench_decode(wanted), wanted))


@app.command
def evaluate(
    model: str | None = None,
    /,
    *words: Words,
    tasks: Tasks = "",
    compare: Compare = None,
) -> None:
    """Measure a model on tasks with known answers.

    Tasks are built-in names, NAME=FILE, files of your own or harness:NAME, parted by commas: lambada,wikitext-2.
    """
    if compare is not None:
        from plume.evaluate.compare import compare as side_by_side
        from plume.evaluate.compare import comparison_table

        print(comparison_table(side_by_side(*compare)))
        return
    if model is None:
        raise UserError("which model? plume evaluate MODEL --tasks lambada; or plume evaluate --compare A B")
    start = {"model": model, "tasks": [name for name in tasks.split(",") if name]}
    wanted = settings(config.EvaluateConfig, words, start=start)
    from plume.evaluate import evaluate as measure
    from plume.evaluate.report import summary

    show(summary(measure(wanted)))
    if wanted.out is not None:
        show(f"report: {wanted.out / 'report.md'}")


@app.command
def sweep(*words: Words) -> None:
    """Train several sizes on the same data: the loss against parameters and compute.

    Run again after an interruption, it goes on where it was.
    """
    wanted = settings(config.SweepConfig, words)
    from plume.evaluate import sweep as train_all

    found = train_all(wanted)
    for size in found["sizes"]:
        show(f"{size['name']}: {size['parameters']:,} parameters, loss {size['loss']:.4f}")
    show(f"report: {wanted.folder / 'report.md'}")


def arrange_verbs() -> None:
    """The verbs in the order of the work, each with its usage."""
    app.group_commands = cyclopts.Group("Plume itself", sort_key=len(VERBS))
    for place, (title, verbs) in enumerate(VERBS.items()):
        group = cyclopts.Group(title, sort_key=place)
        for order, (name, verb) in enumerate(verbs.items()):
            command = functools.reduce(lambda inside, word: inside[word], name.split(), app)
            command.sort_key, command.usage, command.help_epilogue = order, usage(name, verb), ""
            if " " not in name:
                command.group = group


def show_result(result: RunResult | DistillResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    else:
        tell(result.summary())


def to_its_end(finished: bool) -> None:
    """A run that was stopped has saved all and can go on, but whoever waits for it should not take it as done."""
    if not finished:
        raise KeyboardInterrupt


def show(*things: Any) -> None:
    from rich.console import Console

    console = Console()
    for thing in things:
        console.print(thing)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command. A user's mistake ends it with one message and code 2; a traceback means a defect of Plume."""
    words = sys.argv[1:] if words is None else list(words)
    verb = verb_of(words)
    try:
        app(words, exit_on_error=False, print_error=False, result_action="return_value")
        if verb is not None and {"--help", "-h"} & set(words):
            show_options(verb[1])
    except (UserError, cyclopts.CycloptsError) as error:
        tell(f"plume: {error}", sys.stderr)
        if verb is not None and len(words) == len(verb[0].split()):  # nothing was said but the verb
            tell(f"{usage(*verb)}\nplume {verb[0]} --help tells more", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plume: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has gone: nothing more to say
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        tell(f"plume: {error.filename}: {error.strerror}", sys.stderr)  # the machine's no, not a defect
        return 2
    return 0


arrange_verbs()

if __name__ == "__main__":
    sys.exit(main())
