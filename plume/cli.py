"""The command line: one verb per stage, each a thin door to one function that takes one config."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import cyclopts

from plume import config
from plume.config import UserError

app = cyclopts.App(
    name="plume",
    help="From raw text to a pretrained, fine-tuned, measured, served and explorable language model.",
    version_flags=["--version"],
)
tokenizer = cyclopts.App(name="tokenizer", help="Train a tokenizer, or look at how one cuts a text.")
app.command(tokenizer)
bench = cyclopts.App(name="bench", help="Measure Plume beside its peers on this machine.")
app.command(bench)

T = TypeVar("T")
Overrides = Annotated[str, cyclopts.Parameter(show=False, allow_leading_hyphen=True)]


def configured(kind: type[T], recipe: Path | None, words: Sequence[str], *, start: dict[str, Any] | None = None) -> T:
    """A config from a recipe with `--section.field value` words laid over it."""
    table = {**(start or {}), **({} if recipe is None else config.read_recipe(recipe))}
    overrides = config.parse_overrides(words)
    return config.build(kind, config.with_overrides(table, overrides), origin="" if recipe is None else str(recipe))


@app.command
def plan(
    preset: str, /, *overrides: Overrides, as_json: Annotated[bool, cyclopts.Parameter(name="--json")] = False
) -> None:
    """What a model needs: parameters per layer, memory, arithmetic, time here and on named hardware.

    Other options: --tokens, --batch, --sequence, and --model.FIELD for every field of the model. With --ranks N also
    what each of N ranks holds and sends: --strategy, --tensor-parallel, --accumulate, --activation-checkpointing.
    """
    start = {"name": preset, "model": {"preset": preset}}
    settings = configured(config.PlanConfig, None, overrides, start=start)
    from plume import plan as planning

    result = planning.plan(settings)
    share = planning.plan_ranks(settings, result) if settings.ranks > 1 else None
    if as_json:
        each = {} if share is None else {"rank": {**dataclasses.asdict(share), "total_bytes": share.total_bytes}}
        print(json.dumps({**result.as_json(), **each}, indent=2))
    else:
        show(planning.table(result, settings), *([] if share is None else [planning.rank_table(share, settings)]))


@app.command
def demo(
    *, text: list[str] | None = None, folder: Path = Path("runs/demo"), minutes: float = 2.0, seed: int = 1
) -> None:
    """A first model in a few minutes: from text to samples.

    It reads the source of Python's standard library, or your --text, trains a tokenizer and a small GPT-2, compares its
    loss with what simple statistics reach, writes samples, and says how to go on.
    """
    settings = config.DemoConfig(text=() if text is None else tuple(text), folder=folder, minutes=minutes, seed=seed)
    from plume.demo import demo as run

    run(settings)


@app.command
def prepare(*words: Overrides) -> None:
    """Texts to token shards.

    `plume prepare TEXT... --folder FOLDER` reads files, folders, globs, python:stdlib or hub:NAME, with any field of
    the data config as an option (--clean.duplicates near, --tokenizer.folder FOLDER); or `plume prepare RECIPE.toml`,
    whose section [data] has the same fields. Run again after an interruption, it goes on where it was.
    """
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    recipe = Path(words[0]) if count == 1 and words[0].endswith(".toml") else None
    table = {"paths": list(words[:count])} if recipe is None else config.read_recipe(recipe)
    table = config.with_overrides(table.get("data", table), config.parse_overrides(words[count:]))
    settings = config.build(config.DataConfig, table, origin="" if recipe is None else str(recipe))
    from plume import data

    show(data.show_report(data.prepare(settings).report))


@tokenizer.command(name="train")
def train_tokenizer(*words: Overrides) -> None:
    """Train a tokenizer on text files: `plume tokenizer train FILE... --out FOLDER`.

    Options: every field of the tokenizer config, such as --kind wordpiece, --vocab-size 8192, --specials roberta.
    """
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    overrides = config.parse_overrides(words[count:])
    out = overrides.pop("out", None)
    if out is None:
        raise UserError("--out is missing: the folder to write the tokenizer to, for example --out tokenizer")
    settings = config.build(config.TokenizerConfig, config.with_overrides({}, overrides))
    from plume import text

    trained = text.train_command([Path(word) for word in words[:count]], Path(out), settings)
    show(f"{trained.kind} tokenizer with {trained.vocab_size} tokens in {out}")


@tokenizer.command(name="inspect")
def inspect_tokenizer(folder: Path, text: str) -> None:
    """How a tokenizer cuts a text: pieces, ids, bytes, places."""
    from plume.text import inspect_table, load_tokenizer

    show(inspect_table(load_tokenizer(folder), text))


@app.command
def pretrain(
    recipe: Path, /, *overrides: Overrides, as_json: Annotated[bool, cyclopts.Parameter(name="--json")] = False
) -> None:
    """Texts to a pretrained model, as a recipe says.

    Any field of the recipe is an option: --folder runs/mine, --train.steps 500, --data.paths '["my.txt"]'. With
    --resume it goes on from the newest whole checkpoint; with --overwrite it begins again. Under torchrun it is one
    rank of many.
    """
    settings = configured(config.PretrainConfig, recipe, overrides)
    from plume.train.pretrain import pretrain as run

    result = run(settings)
    if result.main:
        print(json.dumps(result.as_json(), indent=2) if as_json else result.summary())


@app.command
def finetune(*words: Overrides, as_json: Annotated[bool, cyclopts.Parameter(name="--json")] = False) -> None:
    """A pretrained model and labelled rows to a measured model.

    `plume finetune --model MODEL --task.train FILE --folder FOLDER`, with any field of the config as an option
    (--task.kind tag, --task.columns.text review, --adapt.mode lora, --seeds 5); or `plume finetune RECIPE.toml`. The
    model folder, report.md, predictions.jsonl and plots are written into the folder.
    """
    recipe, overrides = (Path(words[0]), words[1:]) if words and not words[0].startswith("--") else (None, words)
    settings = configured(config.FinetuneConfig, recipe, overrides)
    from plume.generate.translating import finetune as run

    result = run(settings)
    if as_json:
        print((settings.folder / "results.json").read_text(encoding="utf-8"))
    else:
        about = result.summary
        spread = f"from {about['lowest']:.4f} to {about['highest']:.4f} over {len(result.seeds)} seeds"
        print(f"validation {result.metric}: median {about['median']:.4f}, {spread}")
        print(f"wrote {settings.folder / 'report.md'} and {result.model}")


@app.command
def distill(*words: Overrides, as_json: Annotated[bool, cyclopts.Parameter(name="--json")] = False) -> None:
    """A smaller student of a pretrained teacher.

    `plume distill --teacher MODEL --prepared DATA --folder FOLDER`, with any field of the config as an option
    (--layers 6, --temperature 2, --train.steps 2000); or `plume distill RECIPE.toml`.
    """
    recipe, overrides = (Path(words[0]), words[1:]) if words and not words[0].startswith("--") else (None, words)
    settings = configured(config.DistillConfig, recipe, overrides)
    from plume.train.distill import distill as run

    result = run(settings)
    print(json.dumps(result.as_json(), indent=2) if as_json else result.summary())


@app.command
def runs(
    *folders: Path,
    compare: bool = False,
    plot: Path | None = None,
    as_json: Annotated[bool, cyclopts.Parameter(name="--json")] = False,
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
def doctor(
    *, device: str = "auto", as_json: Annotated[bool, cyclopts.Parameter(name="--json")] = False, patience: float = 30.0
) -> None:
    """Is this machine fit to train: devices, memory, the fastest precision; under torchrun also a sum over ranks."""
    from plume.train.doctor import doctor as examine
    from plume.train.doctor import show_diagnosis

    found = examine(device, patience)
    if found is None:
        return
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show_diagnosis(found)
    if not found.well:
        raise UserError("not all is well: see above")


@app.command
def serve(
    *words: Overrides, new_key: Annotated[bool, cyclopts.Parameter(name="--new-key", negative=())] = False
) -> None:
    """Serve models over HTTP, in the shape that OpenAI's clients speak: `plume serve MODEL [MODEL...]`.

    MODEL is a model folder, a run folder or a hub name; NAME=MODEL gives it another name. Options: every field of the
    serve config (--port 9000, --batch 32, --engine.precision int8, --runs runs), or a recipe file with the same fields.
    --new-key prints a fresh API key and the hash to give with --keys.
    """
    from plume import serve as serving

    if new_key:
        key, hashed = serving.new_key()
        print(
            f"key:  {key}\nhash: {hashed}\nStart the server with --keys '[\"{hashed}\"]' and give the key to its user."
        )
        return
    serving.serve(served(words))


@app.command
def explore(*words: Overrides, browser: Annotated[bool, cyclopts.Parameter(name="--browser")] = True) -> None:
    """Open the Explorer on a model: next tokens, attention, layers, surprise, training runs.

    `plume explore MODEL [MODEL...]` serves them and opens the page; --no-browser only prints its address. Options as
    for `plume serve`.
    """
    from plume import serve as serving

    serving.explore(served(words), browser=browser)


def served(words: Sequence[str]) -> config.ServeConfig:
    """Models first, then options; or a recipe and options."""
    count = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    recipe = Path(words[0]) if count == 1 and words[0].endswith(".toml") else None
    start = {"models": list(words[:count])} if recipe is None else {}
    return configured(config.ServeConfig, recipe, words[count:], start=start)


@app.command(name="import")
def import_model(source: str, /, *, out: Path) -> None:
    """Copy a model from the hub, or a folder made elsewhere, into a checked model folder of your own."""
    from plume.text import load_tokenizer
    from plume.weights import load_model, model_hash, resolve, save_model

    folder = resolve(source)
    info = {"imported_from": source, "imported_hash": model_hash(folder)}
    print(save_model(load_model(folder), out, tokenizer=load_tokenizer(folder), info=info))


@app.command
def generate(model: str, /, *words: Overrides) -> None:
    """Write text after a PROMPT, after each prompt of a file (--prompts), or in a conversation at the terminal.

    Other options: the fields of sampling and engine by name, for example --temperature 0.8 --top-k 20 --seed 1
    --precision int8 --stop "END"; --out FILE, --unconditional. `plume generate MODEL --options` lists them all.
    """
    from plume.generate import command

    if "--options" in words:
        show(options_table(config.GenerateConfig))
        return
    prompt = words[0] if words and not words[0].startswith("--") else None
    command.generate(command.configure(model, prompt, words if prompt is None else words[1:]))


@app.command
def export(model: Path, /, *words: Overrides) -> None:
    """Write a model for another runtime and check it there: --format gguf or onnx, --precision, --cache, --out."""
    settings = configured(config.ExportConfig, None, words, start={"model": str(model)})
    from plume.generate.export import export as write

    print(write(settings))


@bench.command(name="decode")
def bench_decode(*words: Overrides) -> None:
    """How fast a GPT writes here, beside every other installed engine: --model, --preset, --rounds, --threads, ..."""
    settings = configured(config.DecodeBenchConfig, None, words)
    from plume.generate import bench as benching

    show(benching.table(benching.bench_decode(settings), settings))


def options_table(kind: type) -> Any:
    from rich.table import Table

    table = Table("option", "type", "default", "meaning")
    for row in config.describe(kind):
        table.add_row(*row)
    return table


@app.command
def evaluate(
    model: str | None = None,
    /,
    *overrides: Overrides,
    tasks: str = "",
    compare: Annotated[tuple[Path, Path] | None, cyclopts.Parameter(consume_multiple=True)] = None,
) -> None:
    """Measure a model: `plume evaluate MODEL --tasks lambada,wikitext-2 --out report`.

    Tasks are built-in names, NAME=FILE, files of your own or harness:NAME, parted by commas. Other options: every
    field of the evaluation config, such as --protocol gpt2-paper, --data FOLDER, --shots 5, --seeds "[1, 2, 3]",
    --stride 512, --training-data FOLDER. `--compare A B` sets two report folders side by side.
    """
    if compare is not None:
        from plume.evaluate.compare import compare as side_by_side
        from plume.evaluate.compare import comparison_table

        print(comparison_table(side_by_side(*compare)))
        return
    if model is None:
        raise UserError("which model? plume evaluate MODEL --tasks lambada; or plume evaluate --compare A B")
    start = {"model": model, "tasks": [name for name in tasks.split(",") if name]}
    settings = configured(config.EvaluateConfig, None, overrides, start=start)
    from plume.evaluate import evaluate as measure
    from plume.evaluate.report import summary

    show(summary(measure(settings)))
    if settings.out is not None:
        show(f"report: {settings.out / 'report.md'}")


@app.command
def sweep(recipe: Path, /, *overrides: Overrides) -> None:
    """Train several sizes on the same data: `plume sweep RECIPE.toml --folder runs/sweep --sizes '["1x32", "2x64"]'`.

    Run again after an interruption, it goes on where it was.
    """
    settings = configured(config.SweepConfig, recipe, overrides)
    from plume.evaluate import sweep as train_all

    found = train_all(settings)
    for size in found["sizes"]:
        show(f"{size['name']}: {size['parameters']:,} parameters, loss {size['loss']:.4f}")
    show(f"report: {settings.folder / 'report.md'}")


def show(*things: Any) -> None:
    from rich.console import Console

    console = Console()
    for thing in things:
        console.print(thing)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command. A user's mistake ends it with one message and code 2; a traceback means a defect of Plume."""
    try:
        app(sys.argv[1:] if words is None else list(words), exit_on_error=False, result_action="return_value")
    except UserError as error:
        print(f"plume: {error}", file=sys.stderr)
        return 2
    except cyclopts.CycloptsError:  # already shown
        return 2
    except KeyboardInterrupt:
        print("plume: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has gone: nothing more to say
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
