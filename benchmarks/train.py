"""Training against the same job written plainly: time to a loss on characters, and speed and memory of the 124M model.

python -m benchmarks.train characters [--text FILE]
python -m benchmarks.train gpt2
python -m benchmarks.train steps --before CHECKOUT   (another commit of Plume, by turns with this one)
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.results import ROOT, Row, real, report, skip
from plume.config import PRESETS, PretrainConfig, TrainConfig, build, read_recipe
from plume.data import PackedWindows, open_shards, prepare
from plume.model.heads import Model
from plume.model.loss import TensorBatch
from plume.text import load_tokenizer
from plume.train.distribute import Ranks
from plume.train.loop import Task, Trainer
from plume.train.objectives import Tokens
from plume.train.pretrain import make_task
from plume.util.devices import choose_precision

TARGET = 1.88  # nats per character over the whole held-out tenth of Shakespeare
CHECK = 100  # steps of the plain recipe between two looks at its validation loss
CPU = torch.device("cpu")


@dataclass
class Clock:
    """Seconds spent in training steps alone: measuring the loss counts for nobody."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0

    def count(self, began: float, tokens: int) -> None:
        self.seconds += time.perf_counter() - began
        self.steps += 1
        self.tokens += tokens


# ---- characters: time to a loss ----------------------------------------------------------------------------------


@torch.no_grad()
def full_validation(model: Model, held_out: PackedWindows) -> float:
    model.eval()
    total = count = 0.0
    for batch in held_out.sweep(256):
        targets = torch.from_numpy(batch.targets).flatten()
        total += float(F.cross_entropy(model(torch.from_numpy(batch.tokens)).flatten(0, 1), targets, reduction="sum"))
        count += len(targets)
    model.train()
    return total / count


def plain_characters(tokens: torch.Tensor, config: PretrainConfig, clock: Clock, total: int) -> Iterator[Model]:
    """nanoGPT's recipe for a CPU, written plainly: AdamW, random windows, cosine; gives the model after every step."""
    batch, length, peak, low, warmup = 12, config.model.context, 1e-3, 1e-4, 100
    torch.manual_seed(0)
    model = Model(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(total):
        began = time.perf_counter()
        share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = peak * (step + 1) / (warmup + 1) if step < warmup else low + share * (peak - low)
        starts = torch.randint(len(tokens) - length - 1, (batch,)).tolist()
        x = torch.stack([tokens[i : i + length] for i in starts])
        y = torch.stack([tokens[i + 1 : i + 1 + length] for i in starts])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.count(began, batch * length)
        yield model


def our_characters(config: PretrainConfig, data: Path, clock: Clock) -> Iterator[Model]:
    """The recipe through the real loop, one update at a time, log lines included."""
    torch.manual_seed(config.train.seed)
    model = Model(config.model)
    task = make_task(config, model, load_tokenizer(data / "tokenizer"), data)
    trainer = Trainer(task, config.train, config.folder, Ranks(), choose_precision(CPU, "float32"))
    while trainer.step < config.train.steps:
        began = time.perf_counter()
        trainer.update()
        if trainer.step % config.train.log_every == 0:
            trainer.log()
        clock.count(began, trainer.tokens - clock.tokens)
        yield model


def characters(text: Path, plain_steps: int, our_steps: int | None) -> dict[str, Any]:
    """Both recipes by turns in one run: a few plain steps, one of ours. Ours is judged at its end, the plain one where
    it first reaches the target, or at its end."""
    with tempfile.TemporaryDirectory() as temporary:
        table = read_recipe(ROOT / "recipes" / "gpt2-char.toml")
        table["folder"] = f"{temporary}/run"
        table["data"] |= {"paths": [str(text)], "folder": f"{temporary}/data"}
        if our_steps is not None:
            table["train"]["steps"] = our_steps
        config = build(PretrainConfig, table)
        config.folder.mkdir()
        data = prepare(config.data).folder
        vocabulary = load_tokenizer(data / "tokenizer").vocab_size
        config = replace(config, model=replace(config.model, vocab_size=vocabulary))
        held_out = PackedWindows(open_shards(data, "validation"), config.model.context, shuffle=False)
        stream = open_shards(data, "train").streams[0]
        clocks = {"plain": Clock(), "ours": Clock()}
        ours = our_characters(config, data, clocks["ours"])
        reached: dict[str, Any] = {}
        our_model: Model | None = None
        tokens = torch.from_numpy(stream.read(0, len(stream)))
        for plain in plain_characters(tokens, config, clocks["plain"], plain_steps):
            steps = clocks["plain"].steps
            while clocks["ours"].steps < config.train.steps * steps / plain_steps:
                our_model = next(ours)
            if "plain" not in reached and (steps % CHECK == 0 or steps == plain_steps):
                loss = full_validation(plain, held_out)
                if loss <= TARGET or steps == plain_steps:
                    reached["plain"] = {**vars(clocks["plain"]), "loss": loss}
        assert our_model is not None
        reached["ours"] = {**vars(clocks["ours"]), "loss": full_validation(our_model, held_out)}
    return reached | {"ratio": reached["ours"]["seconds"] / reached["plain"]["seconds"]}


# ---- the 124M model: speed and memory ----------------------------------------------------------------------------

ROWS, LENGTH = 16, 256


def plain_gpt2(steps: int, preset: str) -> list[float]:
    model = Model(replace(PRESETS[preset], dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    seconds = []
    for step in range(steps):
        batch = random_rows(step, 0, ROWS, model.config.vocab_size)
        began = time.perf_counter()
        logits = model(batch.tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def our_gpt2(steps: int, preset: str) -> list[float]:
    config = TrainConfig(steps=steps, batch=ROWS, lr=6e-4, weight_decay=0.1)
    model = Model(replace(PRESETS[preset], dropout=0.0))
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        task = Task(model=model, objective=Tokens(), train=RandomRows(model.config.vocab_size))
        trainer = Trainer(task, config, Path(folder), Ranks(), choose_precision(CPU, "float32"))
        for _ in range(steps):
            began = time.perf_counter()
            trainer.update()
            seconds.append(time.perf_counter() - began)
    return seconds


def random_rows(step: int, first: int, rows: int, vocab_size: int, length: int = LENGTH) -> TensorBatch:
    random = torch.Generator().manual_seed(step * ROWS + first)
    text = torch.randint(0, vocab_size, (rows, length + 1), generator=random)
    return TensorBatch(tokens=text[:, :-1].contiguous(), targets=text[:, 1:].contiguous())


@dataclass(frozen=True)
class RandomRows:
    vocab_size: int
    batch: int = ROWS
    length: int = LENGTH

    def rows(self, step: int) -> int:
        return self.batch

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        return random_rows(step, first, rows, self.vocab_size, self.length)


def gpt2(turns: int, steps: int, preset: str) -> dict[str, Any]:
    """Plain and ours by turns, each in a process of its own, so that each has its own peak of memory.

    On a busy machine the CPU seconds of the whole process say more than the clock.
    """
    speeds: dict[str, list[float]] = {"plain": [], "ours": []}
    peaks: dict[str, list[float]] = {"plain": [], "ours": []}
    used: dict[str, list[float]] = {"plain": [], "ours": []}
    for _ in range(turns):
        for name in speeds:
            command = [sys.executable, "-m", "benchmarks.train", "one", "--name", name, "--steps", str(steps)]
            command += ["--preset", preset]
            done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
            speeds[name].append(ROWS * LENGTH / median(done["seconds"][1:]))
            peaks[name].append(done["peak_gb"])
            used[name].append(done["cpu_seconds"])
    result: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "tokens_per_second": speeds, "peak_gb": peaks}
    result["speed_ratio"] = median(o / p for o, p in zip(speeds["ours"], speeds["plain"], strict=True))
    result["cpu_ratio"] = median(p / o for o, p in zip(used["ours"], used["plain"], strict=True))
    return result | {"memory_ratio": max(peaks["ours"]) / max(peaks["plain"])}


# ---- small models: the same steps by two commits -------------------------------------------------------------------

SHAPES = {  # what is trained, its sequences per step
    "4x128": (replace(PRESETS["gpt2-laptop"], vocab_size=2048, width=128, context=128), 16),
    "gpt2-laptop": (replace(PRESETS["gpt2-laptop"], vocab_size=4096), 16),
}


def timed_steps(shape: str, steps: int) -> list[list[float]]:
    """Clock and processor seconds of each step with Muon, the first two left out."""
    model, rows = SHAPES[shape]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        batches = RandomRows(model.vocab_size, rows, model.context)
        task = Task(model=Model(model), objective=Tokens(), train=batches)
        config = TrainConfig(steps=steps + 2, batch=rows, optimizer="muon")
        trainer = Trainer(task, config, Path(folder), Ranks(), choose_precision(CPU, "float32"))
        for _ in range(steps + 2):
            began = time.perf_counter(), time.process_time()
            trainer.update()
            seconds.append([time.perf_counter() - began[0], time.process_time() - began[1]])
    return seconds[2:]


def compared_steps(before: Path, turns: int, steps: int) -> list[Row]:
    """Each commit in processes of its own, by turns. The quickest step counts: others were disturbed more."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(turns):
        for shape in SHAPES:
            for name, root in (("before", before), ("now", ROOT)):
                command = [sys.executable, __file__, "timed", "--preset", shape, "--steps", str(steps)]
                done = subprocess.run(
                    command,
                    check=True,
                    capture_output=True,
                    text=True,
                    cwd=root,
                    env=os.environ | {"PYTHONPATH": str(root)},
                )
                found.setdefault((shape, name), []).extend(json.loads(done.stdout))
    rows = []
    for shape, (model, sequences) in SHAPES.items():
        (clock, processor), (old_clock, old_processor) = (
            (min(column) for column in zip(*found[shape, name], strict=True)) for name in ("now", "before")
        )
        speeds = [sequences * model.context / s for s in (clock, old_clock)]
        rows.append(
            Row(
                key=shape,
                what=f"{shape}, training: tokens/s against the commit before",
                figure=old_clock / clock,
                at_least=1.3,
                detail=f"{speeds[0]:,.0f} and {speeds[1]:,.0f} tokens/s; by processor {old_processor / processor:.2f}",
            )
        )
    return rows


def one(name: str, steps: int, preset: str) -> dict[str, Any]:
    torch.manual_seed(0)
    seconds = plain_gpt2(steps, preset) if name == "plain" else our_gpt2(steps, preset)
    unit = 2**30 if sys.platform == "darwin" else 2**20
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"seconds": seconds, "peak_gb": used.ru_maxrss / unit, "cpu_seconds": used.ru_utime + used.ru_stime}


def character_rows(found: dict[str, Any]) -> list[Row]:
    ours, plain = found["ours"], found["plain"]
    spent = [f"{r['steps']} steps, {r['tokens']:,} tokens, {r['seconds']:.0f} s" for r in (ours, plain)]
    return [
        Row(
            key="time",
            what=f"Shakespeare's characters to a loss of {TARGET}: time, of that of nanoGPT's recipe",
            figure=found["ratio"],
            at_most=1 / 3,
            detail=f"{spent[0]} against {spent[1]} (to {plain['loss']:.3f})",
        ),
        Row(key="loss", what="the loss reached", figure=ours["loss"], unit="nats", digits=3, at_most=TARGET),
    ]


def gpt2_rows(found: dict[str, Any]) -> list[Row]:
    speeds = {name: median(values) for name, values in found["tokens_per_second"].items()}
    peaks = {name: max(values) for name, values in found["peak_gb"].items()}
    return [
        Row(
            key="speed",
            what="124M, training: tokens/s against the same loop written plainly",
            figure=found["speed_ratio"],
            at_least=1.1,
            detail=f"{speeds['ours']:.0f} and {speeds['plain']:.0f} tokens/s; by processor {found['cpu_ratio']:.2f}",
        ),
        Row(
            key="memory",
            what="124M, training: peak memory, of that of the plain loop",
            figure=found["memory_ratio"],
            at_most=0.6,
            detail=f"{peaks['ours']:.1f} and {peaks['plain']:.1f} GB",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["characters", "gpt2", "steps", "one", "timed"])
    parser.add_argument("--before", type=Path, help="another checkout, for steps")
    parser.add_argument("--text", type=Path, default=real("data", "tinyshakespeare", "input.txt"))
    parser.add_argument("--plain-steps", type=int, default=2000, help="of the plain recipe on characters")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of ours; unset means the recipe's, or 4 for gpt2")
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--name", choices=["plain", "ours"], default="ours")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    steps = 4 if given.steps is None else given.steps
    match given.what:
        case "characters":
            if given.text is None:
                skip("the loss to reach belongs to Shakespeare's text, which is not here; --text names it")
            report(*character_rows(characters(given.text, given.plain_steps, given.steps)))
        case "gpt2":
            report(*gpt2_rows(gpt2(given.turns, steps, given.preset)))
        case "steps":
            if given.before is None:
                skip("there is no other commit to compare with; --before names its checkout")
            report(*compared_steps(given.before.resolve(), given.turns, steps))
        case "timed":
            print(json.dumps(timed_steps(given.preset, steps)))
        case _:
            print(json.dumps(one(given.name, steps, given.preset)))


if __name__ == "__main__":
    main()
