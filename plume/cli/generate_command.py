"""`plume generate`: one prompt, a file of prompts, or a conversation at the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TextIO

from plume.config import GenerateConfig, SamplingConfig, UserError, build, did_you_mean, with_overrides
from plume.inference.sequences import Generation
from plume.lm import LM, best_of, open_lm
from plume.util.console import shown
from plume.util.files import write_text

STANDARD_INPUT = Path("-")
HELP = """/set NAME VALUE   change an option, e.g. /set temperature 0.8
/options          show the options that differ from the defaults
/next [TEXT]      the ten most likely next tokens of TEXT, or of the conversation so far
/score TEXT       log-probability and rank of each token, and the perplexity
/again            another answer to the last prompt
/more             continue the last answer
/unconditional    a sample from the start token
/help, /quit      this, and the end (also Ctrl-D); Ctrl-C ends an answer"""


def generate(config: GenerateConfig) -> None:
    """One prompt, a file of them, standard input, or a conversation."""
    lm = open_lm(config.model, config.engine)
    try:
        if config.prompts is not None:
            batch(lm, config)
        elif config.prompt is not None or config.unconditional:
            answer(lm, None if config.unconditional else config.prompt, config.sampling, sys.stdout)
        elif sys.stdin is not None and sys.stdin.isatty():
            Conversation(lm, config.sampling).run()
        else:
            answer(lm, _standard_input().removesuffix("\n"), config.sampling, sys.stdout)
    finally:
        lm.close()


def _standard_input() -> str:
    """What was piped in, its lines ending as everywhere else in Python."""
    if sys.stdin is None:  # closed, as by some schedulers
        raise UserError("there is no standard input; give a prompt, --prompts FILE or --unconditional")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UserError(f"the standard input is not UTF-8 text: {error}") from None


def answer(lm: LM, prompt: str | None, sampling: SamplingConfig, out: TextIO) -> str:
    """Write the answer as it comes, or all of them when several were asked for; returns the first."""
    if lm.config.decoder_layers and prompt is not None:
        return _show_all([lm.translate(prompt, sampling)], out)
    if sampling.n == 1 and sampling.beams == 1 and sampling.best_of is None:
        text = ""
        try:
            for piece in lm.stream(prompt, sampling):
                text += piece
                out.write(shown(piece, out))
                out.flush()
        except BaseException:
            out.write("\n" * bool(text))  # so that what is said next has its own line
            raise
        out.write("\n")
        return text
    first = lm.generate(prompt, sampling)
    return _show_all(list(first.samples) or [first], out)


def _show_all(results: list[Generation], out: TextIO) -> str:
    for number, result in enumerate(results):
        out.write(f"--- {number + 1} ---\n" * (len(results) > 1) + shown(result.text, out) + "\n")
    return results[0].text


# ---- a file of prompts -------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> Iterator[str | None]:
    """One prompt per line, where a blank line stands for the start token; or the "prompt" of each line of JSON."""
    try:
        text = _standard_input() if path == STANDARD_INPUT else path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}; iconv can turn it into that") from None
    lines = text.split("\n")  # other ends of lines may stand inside a prompt
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        if path.suffix != ".jsonl":
            yield line if line.strip() else None
            continue
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f'{path}, line {number}: not JSON with a "prompt"') from None
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f"{path}, line {number}: the prompt must be a text that is not empty")
        yield prompt


def batch(lm: LM, config: GenerateConfig) -> None:
    """Answer every prompt of a file together, and write one line of JSON for each, in their order."""
    assert config.prompts is not None
    if config.out is not None and config.out.is_dir():  # known before anything is computed
        raise UserError(f"out={config.out} is a folder; name a file, such as {config.out / 'answers.jsonl'}")
    prompts = list(read_prompts(config.prompts))
    if not prompts:
        raise UserError(f"{config.prompts} has no prompts")
    results = run_batch(lm, prompts, config.sampling)
    lines = [_json_line(prompt, result) for prompt, result in zip(prompts, results, strict=True)]
    if config.out is None:
        sys.stdout.writelines(lines)
        return
    write_text(config.out, "".join(lines))
    print(f"{len(lines)} answers in {config.out}", file=sys.stderr)


def run_batch(lm: LM, prompts: Sequence[str | None], sampling: SamplingConfig) -> list[Generation]:
    """Every prompt with its own random stream: a seed is that of the first, and each further one takes the next."""
    from plume.util.progress import Progress

    with Progress(lines=False) as progress:
        if sampling.beams > 1 or lm.config.decoder_layers:
            one: Callable[..., Generation] = lm.translate if lm.config.decoder_layers else lm.generate
            found = []
            with progress.task("searching", len(prompts)) as advance:
                for prompt in prompts:
                    found.append(one(prompt, sampling))
                    advance(1)
            return found
        seeds = [None if sampling.seed is None else sampling.seed + number for number in range(len(prompts))]
        groups = [lm.start(p, replace(sampling, seed=seed)) for p, seed in zip(prompts, seeds, strict=True)]
        everyone = [c for group in groups for c in group]
        with progress.task("writing", len(everyone)) as advance:
            for moved in lm.batcher.run(everyone):
                if moved.finish_reason is not None:
                    advance(1)
    return [best_of([c.result() for c in group], sampling) for group in groups]


def _json_line(prompt: str | None, result: Generation) -> str:
    def plain(one: Generation) -> dict[str, Any]:
        found = {"text": one.text, "finish_reason": one.finish_reason, "tokens": len(one.tokens), "seed": one.seed}
        return found if one.logprobs is None else found | {"logprobs": list(one.logprobs)}

    more: Mapping[str, Any] = {"samples": [plain(s) for s in result.samples]} if result.samples else plain(result)
    return json.dumps({"prompt": "" if prompt is None else prompt, **more}, ensure_ascii=False) + "\n"


# ---- at the terminal ---------------------------------------------------------------------------------------------


class Conversation:
    """Prompts typed one after another, with history and a few commands."""

    def __init__(self, lm: LM, sampling: SamplingConfig, out: TextIO = sys.stdout) -> None:
        self.lm, self.sampling, self.out = lm, sampling, out
        self.last: str | None = None  # the last prompt
        self.text = ""  # the last prompt and its answer
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.say(HELP),
            "set": self.set,
            "options": self.options,
            "next": self.next,
            "score": self.score,
            "again": lambda _: self.ask(self.last),
            "more": lambda _: self.ask(self.text if self.text else None),
            "unconditional": lambda _: self.ask(None),
        }

    def run(self) -> None:
        remember_lines()
        self.say(f"{self.lm.engine.name}; /help for commands")
        while True:
            try:
                line = input("\n> ")
            except (EOFError, KeyboardInterrupt):
                self.say("")
                return
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                self.take(line)
            except UserError as error:
                self.say(str(error))
            except KeyboardInterrupt:
                self.say(" ...")

    def take(self, line: str) -> None:
        """One line: a command, or a prompt."""
        if not line.startswith("/"):
            if line:
                self.ask(line)
            return
        name, _, rest = line[1:].partition(" ")
        if name not in self.commands:
            raise UserError(f"there is no command /{name}; /help shows them all{did_you_mean(name, self.commands)}")
        self.commands[name](rest)

    def say(self, text: str) -> None:
        print(text, file=self.out)

    def ask(self, prompt: str | None) -> None:
        self.last = prompt
        told = "" if prompt is None else prompt
        self.out.write(told)
        self.text = told + answer(self.lm, prompt, self.sampling, self.out)

    def set(self, rest: str) -> None:
        name, _, value = rest.strip().partition(" ")
        if not name or not value:
            raise UserError("say /set NAME VALUE, for example /set temperature 0.8")
        table = {f.name: getattr(self.sampling, f.name) for f in fields(SamplingConfig)}
        self.sampling = build(SamplingConfig, with_overrides(table, {name: value}))

    def options(self, _: str) -> None:
        plain = SamplingConfig()
        changed = [
            f"{f.name} = {getattr(self.sampling, f.name)}"
            for f in fields(SamplingConfig)
            if getattr(self.sampling, f.name) != getattr(plain, f.name)
        ]
        self.say("\n".join(changed) if changed else "all options are at their defaults")

    def next(self, rest: str) -> None:
        prompt = rest if rest else (self.text if self.text else None)
        for token in self.lm.next_tokens(prompt):
            self.say(f"{token.probability:7.2%}  {token.text!r}")

    def score(self, rest: str) -> None:
        result = self.lm.score(rest)
        for token in result.tokens:
            self.say(f"{token.logprob:8.3f}  rank {token.rank:<6} {token.text!r}")
        self.say(f"perplexity {result.perplexity:.2f}")


def remember_lines() -> None:
    """Line editing and a history that lasts, where the platform has them."""
    try:
        import atexit
        import readline
    except ImportError:
        return
    try:
        state = Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "plume"
        history = state / "history"
        state.mkdir(parents=True, exist_ok=True)
        if history.exists():
            readline.read_history_file(history)
        readline.set_history_length(1000)
        atexit.register(readline.write_history_file, history)
    except (OSError, RuntimeError):
        pass  # without a place to keep it, or a home, the history lasts as long as the conversation
