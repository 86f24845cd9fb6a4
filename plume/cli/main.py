"""`plume VERB ...`: each verb builds one config and calls one function."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume import __version__, config
from plume.cli.verbs import KNOWN, help_text, is_recipe, overview, settings, split_flags, usage, verb_of
from plume.config import UserError
from plume.util.console import show, tell

if TYPE_CHECKING:
    from plume.train.distill import DistillResult
    from plume.train.pretrain import RunResult

Words = Sequence[str]
Flags = set[str]


def plan(words: Words, flags: Flags) -> None:
    from plume.plan import PUBLISHED, plan_fields, plan_ranks, rank_table, table
    from plume.plan import plan as estimate

    leading, overrides = config.parse_options(config.PlanConfig, words)
    starts = [plan_fields(name) for name in leading if name not in PUBLISHED] if leading else [{}]
    found: list[dict[str, Any]] = []
    for start in starts:
        wanted = config.build(config.PlanConfig, config.with_overrides(start, overrides))
        result = estimate(wanted)
        share = plan_ranks(wanted, result) if wanted.ranks > 1 else None
        each = {} if share is None else {"rank": {**dataclasses.asdict(share), "total_bytes": share.total_bytes}}
        found.append({**result.as_json(), **each})
        if "json" not in flags:
            show(table(result, wanted), *([] if share is None else [rank_table(share, wanted)]))
    for name, (parameters, what) in ((name, PUBLISHED[name]) for name in leading if name in PUBLISHED):
        found.append({"name": name, "parameters": parameters})
        if "json" not in flags:
            tell(f"{name}: {parameters:,} parameters as published, {what}; Plume does not build it")
    if "json" in flags:
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))


def demo(words: Words, _: Flags) -> None:
    leading, _options = config.parse_options(config.DemoConfig, words)
    if leading and not leading[0].endswith(".toml"):
        raise UserError(f"unexpected argument {leading[0]!r}; a text is given as --text {leading[0]}")
    wanted = settings(config.DemoConfig, words)
    from plume.demo import demo as run

    exit_unless_finished(run(wanted).outcome.finished)


def prepare(words: Words, _: Flags) -> None:
    wanted = settings(config.DataConfig, words, "paths", section="data")
    from plume import data

    show(data.show_report(data.prepare(wanted).report))


def verify_data(words: Words, _: Flags) -> None:
    wanted = settings(config.VerifyConfig, words, "folder")
    from plume.data import verify_shards

    tell(f"{wanted.folder}: {verify_shards(wanted.folder):,} bytes of shards match their hashes")


def train_tokenizer(words: Words, _: Flags) -> None:
    wanted = settings(config.TrainTokenizerConfig, words, "files")
    from plume import text

    trained = text.train_command([Path(file) for file in wanted.files], wanted.out, wanted.tokenizer)
    tell(f"{trained.kind} tokenizer with {trained.vocab_size} tokens in {wanted.out}")


def inspect_tokenizer(words: Words, _: Flags) -> None:
    wanted = settings(config.InspectConfig, words, "folder", "text")
    from plume.text import inspect_table, load_tokenizer
    from plume.util.hub import bundled

    included = None if wanted.folder.is_dir() else bundled(str(wanted.folder))
    show(inspect_table(load_tokenizer(wanted.folder if included is None else included), wanted.text))


def pretrain(words: Words, flags: Flags) -> None:
    if not words:
        known = ", ".join(config.recipe_names())
        raise UserError(f"which recipe? for example plume pretrain gpt2-laptop; Plume includes {known}")
    wanted = settings(config.PretrainConfig, words)
    from plume.train.pretrain import pretrain as run

    result = run(wanted)
    show_result(result, flags)
    exit_unless_finished(result.outcome.finished)


def finetune(words: Words, flags: Flags) -> None:
    wanted = settings(config.FinetuneConfig, words, "model")
    from plume.tasks import how_to_ask
    from plume.train.finetune import finetune as run
    from plume.train.finetune_report import describe_scores

    result = run(wanted)
    if not result.main:
        return
    if "json" in flags:
        print((wanted.folder / "results.json").read_text(encoding="utf-8"))
    else:
        tell(describe_scores(result))
        tell(f"wrote {wanted.folder / 'report.md'} and {result.model}")
        tell(how_to_ask("", str(wanted.folder), task=result.kind))


def distill(words: Words, flags: Flags) -> None:
    leading, overrides = config.parse_options(config.DistillConfig, words)
    start = config.trained_like(leading[0]) if len(leading) == 1 else {}
    if any(name.startswith("data.") for name in overrides):
        start.pop("prepared", None)
    elif "prepared" in start:
        start["prepared"] = data_of_run(leading[0], start["prepared"])
    try:
        wanted = settings(config.DistillConfig, words, "teacher", start=start)
    except UserError as error:
        from plume.hf import resolve

        try:
            if leading and not is_recipe(leading, overrides):
                resolve(leading[0])  # it would say what to train on
        except UserError as missing:
            raise UserError(f"{missing}\n{error}") from None
        raise
    from plume.train.distill import distill as run

    result = run(wanted)
    show_result(result, flags)
    exit_unless_finished(result.outcome.finished)


def data_of_run(folder: str, named: str) -> str:
    """The data that a run was trained on: a folder with a key, where that of its recipe held other data."""
    from plume.data import keyed_folder

    table, origin = config.find_recipe(folder)
    if "prepared" in table:
        return named
    own = keyed_folder(config.build(config.DataConfig, table["data"], origin=origin)).folder
    return str(own) if own.is_dir() else named


def runs(words: Words, flags: Flags) -> None:
    wanted = settings(config.RunsConfig, words, "folders")
    from plume.util import run_folder as look

    found = look.find_runs(wanted.folders)
    if wanted.plot is not None:
        look.plot_runs([run.folder for run in found], wanted.plot)
        print(f"wrote {wanted.plot}")
    elif "json" in flags:
        print(json.dumps([run.as_json() for run in found], indent=2))
    elif wanted.compare:
        look.show_comparison(found)
    else:
        look.show_runs(found)


def doctor(words: Words, flags: Flags) -> None:
    wanted = settings(config.DoctorConfig, words, "run")
    if wanted.run is not None:
        from plume.train.run_doctor import examine_run, show_run

        diagnosis = examine_run(wanted.run, probe=wanted.probe)
        if "json" in flags:
            print(json.dumps(diagnosis.as_json(), indent=2))
        else:
            show_run(diagnosis)
        return
    from plume.train.doctor import doctor as examine
    from plume.train.doctor import show_diagnosis

    found = examine(wanted.device, wanted.timeout)
    if found is None:
        return
    if "json" in flags:
        print(json.dumps(found.as_json(), indent=2))
    else:
        show_diagnosis(found)
    if not found.well:
        raise UserError("not every check passed: see above")


def serve(words: Words, flags: Flags) -> None:
    from plume import serve as serving

    if "new-key" in flags:
        key, hashed = serving.new_key()
        print(f"key:  {key}\nhash: {hashed}\nStart the server with --keys {hashed} and give the key to its user.")
        return
    serving.serve(settings(config.ServeConfig, words, "models"))


def explore(words: Words, flags: Flags) -> None:
    from plume import serve as serving

    serving.explore(settings(config.ExploreConfig, words, "models"), browser="no-browser" not in flags)


def import_model(words: Words, _: Flags) -> None:
    wanted = settings(config.ImportConfig, words, "model")
    import torch

    from plume.hf import folder_info, load_model, load_tokenizer_of, model_hash, resolve, save_model
    from plume.text import load_tokenizer

    folder = resolve(wanted.model)
    info = folder_info(folder) | {"imported_from": wanted.model, "imported_hash": model_hash(folder)}
    model = load_model(folder, architecture=wanted.architecture, dtype=getattr(torch, wanted.precision))
    given, kind = wanted.tokenizer, wanted.architecture
    tokenizer = load_tokenizer_of(folder, kind) if given is None else load_tokenizer(given)
    print(save_model(model, wanted.out, tokenizer=tokenizer, info=info, settings_of=folder))


def generate(words: Words, _: Flags) -> None:
    wanted = settings(config.GenerateConfig, words, "model", "prompt")
    from plume.cli.generate_command import generate as run

    run(wanted)


def embed(words: Words, _: Flags) -> None:
    wanted = settings(config.EmbedConfig, words, "model", "texts")
    from plume.cli.embed_command import embed as run

    print(run(wanted))


def export(words: Words, _: Flags) -> None:
    wanted = settings(config.ExportConfig, words, "model")
    from plume.inference.export import export as write

    print(write(wanted))


def bench_decode(words: Words, _: Flags) -> None:
    wanted = settings(config.DecodeBenchConfig, words)
    from plume import bench as benching

    show(benching.table(benching.bench_decode(wanted), wanted))


def evaluate(words: Words, flags: Flags) -> None:
    if "compare" in flags:
        if len(words) != 2:
            raise UserError("--compare takes two report folders: plume evaluate --compare A B")
        from plume.evaluate.compare import compare, comparison_table

        print(comparison_table(compare(Path(words[0]), Path(words[1]))))
        return
    wanted = settings(config.EvaluateConfig, words, "model")
    names = tuple(name for given in wanted.tasks for name in given.split(",") if name)
    wanted = dataclasses.replace(wanted, tasks=names)
    from plume.evaluate import evaluate as run
    from plume.evaluate.report import summary

    show(summary(run(wanted)))
    if wanted.out is not None:
        tell(f"report: {wanted.out / 'report.md'}")


def sweep(words: Words, _: Flags) -> None:
    wanted = settings(config.SweepConfig, words)
    from plume.evaluate import sweep as train_all

    found = train_all(wanted)
    for size in found["sizes"]:
        kind, loss = ("loss", size["loss"]) if size["validation"] is None else ("validation loss", size["validation"])
        tell(f"{size['name']}: {size['parameters']:,} parameters, {kind} {loss:.4f}")
    tell(f"report: {wanted.folder / 'report.md'}")


def reproduce(words: Words, _: Flags) -> None:
    wanted = settings(config.ReproduceConfig, words, "experiment")
    from plume.lab.runner import shown_experiments as run

    for shown in run(wanted):
        show(shown)


COMMANDS: dict[str, Callable[[Words, Flags], None]] = {
    "demo": demo,
    "doctor": doctor,
    "plan": plan,
    "data verify": verify_data,
    "tokenizer train": train_tokenizer,
    "tokenizer inspect": inspect_tokenizer,
    "prepare": prepare,
    "pretrain": pretrain,
    "finetune": finetune,
    "distill": distill,
    "import": import_model,
    "generate": generate,
    "embed": embed,
    "explore": explore,
    "serve": serve,
    "export": export,
    "evaluate": evaluate,
    "sweep": sweep,
    "reproduce": reproduce,
    "runs": runs,
    "bench decode": bench_decode,
}


def show_result(result: RunResult | DistillResult, flags: Flags) -> None:
    """Of many ranks the main one prints."""
    if not result.main:
        return
    if "json" in flags:
        print(json.dumps(result.as_json(), indent=2))
    else:
        tell(result.summary())


def exit_unless_finished(finished: bool) -> None:
    """An interrupted run has saved a checkpoint, but a script that waits for it must not take it as finished."""
    if not finished:
        raise KeyboardInterrupt


def run_command(words: Words) -> None:
    if not words or words[0] in ("--help", "-h"):
        print(overview())
    elif words[0] == "--version":
        print(__version__)
    else:
        name = verb_of(words)
        rest, flags = split_flags(KNOWN[name], words[len(name.split()) :])
        if {"--help", "-h"} & set(rest) or (name not in COMMANDS and not rest):
            print(help_text(name))
        elif name not in COMMANDS:
            raise UserError(f"there is no plume {name} {rest[0]}; plume {name} --help lists its commands")
        else:
            COMMANDS[name](rest, flags)


def discard_output() -> None:
    """What could not be written is still buffered, and would fail again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(words: Sequence[str] | None = None) -> int:
    """Run a command. A user's mistake ends it with one message and code 2; a traceback means a defect of Plume."""
    words = sys.argv[1:] if words is None else list(words)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a pipe of Windows takes no other letters than its own
    if sys.stdout is None:  # closed, as by some schedulers
        sys.stdout = io.StringIO()
    try:
        run_command(words)
        sys.stdout.flush()
    except UserError as error:
        tell(f"plume: {error}", sys.stderr)
        if " ".join(words) in KNOWN:
            tell(f"{usage(' '.join(words))}\nplume {' '.join(words)} --help lists its options", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("plume: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has gone
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        tell(f"plume: {error.filename or 'output'}: {error.strerror}", sys.stderr)
        if error.filename is None:
            discard_output()
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
