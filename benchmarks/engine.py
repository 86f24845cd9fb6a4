"""What else the CPU engine promises: python -m benchmarks.engine [cache|guesses|together|corrupt]."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Row, made_text, report
from plume.bench import random_folder
from plume.config import EngineConfig, ModelConfig, SamplingConfig, TokenizerConfig
from plume.hf import load_model, load_tokenizer_of, resolve, save_model
from plume.inference import engine_factory
from plume.inference.cpu.cpu_engine import CpuEngine
from plume.inference.cpu.pack import PAGE, cache_paths, pack, source_hash
from plume.inference.cpu.panels import CACHE_BYTES
from plume.inference.engine import Feed
from plume.inference.speculation import StepCost
from plume.lm import LM, open_lm
from plume.text import train_tokenizer

# ---- keys and values in fewer bytes --------------------------------------------------------------------------------


def step_seconds(engine: CpuEngine, batch: int, behind: int, rounds: int) -> float:
    """The fastest step of a batch behind so many tokens: other work on the machine slows many steps, but hardly all."""
    best = math.inf
    for _ in range(rounds):
        start = time.perf_counter()
        engine.step([Feed(slot, [1]) for slot in range(batch)])
        best = min(best, time.perf_counter() - start)
        for slot in range(batch):
            engine.rewind(slot, behind)
    return best


def fill(engine: CpuEngine, behind: int) -> None:
    """Let every slot have read so many tokens."""
    for slot in range(engine.slots):
        engine.rewind(slot, 0)
    prompt = np.random.default_rng(0).integers(0, engine.config.vocab_size, behind).tolist()
    engine.step([Feed(0, prompt)])
    for slot in range(1, engine.slots):
        engine.copy(0, slot, behind)


def cache(preset: str, rounds: int, threads: int | None) -> None:
    """Tokens per second behind texts, by the precision of the cache, in turns; and what a slot takes."""
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        packed = pack(load_model(random_folder(preset, Path(place))), "int8")
    slots, context = 8, packed.config.context
    engines = {kind: CpuEngine(packed, slots=slots, threads=threads, cache=kind) for kind in CACHE_BYTES}
    for behind in (64, context // 4, context - 24):
        for engine in engines.values():
            fill(engine, behind)
        for batch in (1, slots):
            best = dict.fromkeys(engines, math.inf)
            for _ in range(rounds):
                for kind, engine in engines.items():
                    best[kind] = min(best[kind], step_seconds(engine, batch, behind, 12))
            report(*cache_rows(batch, behind, best))
    whole = engines["float32"].slot_bytes
    for kind in ("float16", "int8"):
        size = engines[kind].slot_bytes
        report(
            Row(
                key=f"cache {kind}, memory",
                what=f"{preset}: a full slot of {context} tokens with a {kind} cache, of float32's",
                figure=size / whole,
                detail=f"{size / 1e6:.1f} and {whole / 1e6:.1f} MB",
            )
        )
    for engine in engines.values():
        engine.close()


def cache_rows(batch: int, behind: int, seconds: dict[Any, float]) -> Iterator[Row]:
    for kind in ("float16", "int8"):
        mine, other = (batch / seconds[name] for name in (kind, "float32"))
        yield Row(
            key=f"cache {kind}, batch {batch}, behind {behind}",
            what=f"int8 weights, batch {batch} behind {behind} tokens: tokens/s with a {kind} cache against float32",
            figure=mine / other,
            at_least=1.0,
            detail=f"{mine:.1f} and {other:.1f} tokens/s",
        )


# ---- guessing ahead ------------------------------------------------------------------------------------------------

SUITS = {True: {"temperature": 0.0}, False: {"temperature": 1.0, "top_k": None}}  # whether text repeats itself


@contextmanager
def never_switched_off() -> Iterator[None]:
    """Guesses at every step, as many as there may be, whatever they cost."""
    measured = StepCost.of_guess
    StepCost.of_guess = lambda *_: 0.0  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        StepCost.of_guess = measured  # type: ignore[method-assign]


def seconds(lm: LM, prompts: Sequence[list[int]], config: SamplingConfig) -> float:
    lm.batcher.clear()
    start = time.perf_counter()
    for prompt in prompts:
        lm.generate(prompt, config)
    return time.perf_counter() - start


def guess_row(name: str, lm: LM, kind: Any, suits: bool, rounds: int, tokens: int) -> Row:
    """Tokens/s with guesses against without, in turns; and, for comparison, with guesses that are never given up."""
    prompts = np.random.default_rng(0).integers(0, lm.config.vocab_size, (2, 16)).tolist()
    plain = SamplingConfig(max_new_tokens=tokens, ignore_eos=True, seed=1, **SUITS[suits])
    ahead = replace(plain, speculate=kind)
    assert lm.generate(prompts[0], ahead).tokens == lm.generate(prompts[0], plain).tokens
    ratios, fixed = list[float](), list[float]()
    for _ in range(rounds):
        without = seconds(lm, prompts, plain)
        ratios.append(without / seconds(lm, prompts, ahead))
        with never_switched_off():
            fixed.append(without / seconds(lm, prompts, ahead))
    text = "a text that suits" if suits else "a text that does not suit"
    return Row(
        key=f"{kind}, {name}, {'suits' if suits else 'does not'}",
        what=f"{name}, speculate={kind}, {text}: tokens/s against speculate=off",
        figure=statistics.median(ratios),
        at_least=1.0 if suits else 0.95,
        detail=f"rounds {min(ratios):.2f} to {max(ratios):.2f}; never switched off {statistics.median(fixed):.2f}",
    )


def deep_copy(folder: Path, place: Path, layers: int) -> Path:
    """The same function with more layers, which add nothing: a model that its draft is always right about."""
    import torch

    from plume.model.heads import Model

    small = load_model(folder)
    model = Model(replace(small.config, layers=layers), small.kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("attn.inner.out.weight", "attn.inner.out.bias", "mlp.inner.down.weight", "down.bias")):
                parameter.zero_()
    model.load_state_dict(small.state_dict(), strict=False)
    return save_model(model, place / f"{folder.name}-{layers}", tokenizer=load_tokenizer_of(folder))


def guesses(preset: str, rounds: int, threads: int | None) -> None:
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        settings = EngineConfig(precision="int8", threads=threads, slots=1)
        english = resolve("plume-en")
        for name, folder in ((preset, random_folder(preset, Path(place))), ("plume-en", english)):
            lm = open_lm(folder, settings)
            for suits in SUITS:
                report(guess_row(name, lm, "lookup", suits, rounds, 200))
            lm.close()
        deep, other = deep_copy(english, Path(place), 24), deep_copy(english, Path(place), 7)
        shuffled = load_model(other)
        shuffled.table.data = shuffled.table.data.flip(0)  # it knows the words, and none of them is where it was
        save_model(shuffled, other, tokenizer=load_tokenizer_of(english))
        for suits, draft in ((True, english), (False, other)):
            lm = open_lm(deep, replace(settings, draft=draft))
            report(guess_row("plume-en in 24 layers", lm, "draft", suits, rounds, 200))
            lm.close()


# ---- two models at once --------------------------------------------------------------------------------------------


def rate(models: Sequence[LM], span: float) -> list[float]:
    """Tokens per second of each, while all of them write."""
    counts, over = [0] * len(models), threading.Event()

    def write(number: int) -> None:
        config = SamplingConfig(max_new_tokens=32, ignore_eos=True, seed=number)
        while not over.is_set():
            counts[number] += len(models[number].generate([1, 2, 3], config).tokens)

    for lm in models:
        lm.generate([1, 2, 3], max_new_tokens=4)
    writers = [threading.Thread(target=write, args=(i,)) for i in range(len(models))]
    start = time.perf_counter()
    for writer in writers:
        writer.start()
    time.sleep(span)
    over.set()
    for writer in writers:
        writer.join()
    return [count / (time.perf_counter() - start) for count in counts]


def together(preset: str, rounds: int, threads: int | None, span: float) -> None:
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        folder = random_folder(preset, Path(place))
        models = [open_lm(folder, EngineConfig(precision="int8", threads=threads, slots=1)) for _ in range(2)]
        ratios, shown = list[float](), ""
        for _ in range(rounds):
            alone = [one for lm in models for one in rate([lm], span)]
            both = rate(models, span)
            ratios.append(sum(both) / (sum(alone) / 2))
            shown = f"alone {alone[0]:.1f} and {alone[1]:.1f}, together {both[0]:.1f} and {both[1]:.1f} tokens/s"
    report(
        Row(
            key="two models",
            what=f"two models of {preset}'s size in one process, int8, both under load: tokens/s, of the sum of halves",
            figure=statistics.median(ratios),
            at_least=0.9,
            detail=f"{shown}; rounds {min(ratios):.2f} to {max(ratios):.2f}",
        )
    )
    for lm in models:
        lm.close()


# ---- damaged caches ------------------------------------------------------------------------------------------------

PRECISIONS = ("int8", "int4", "float32")
CHUNK = 500


def flipped(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def edited(data: bytearray, draw: random.Random) -> None:
    at, size = draw.randrange(len(data)), draw.choice((1, 4, 64, 4096))
    data[at : at + size] = draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size)))


def swapped(data: bytearray, draw: random.Random) -> None:
    size = draw.choice((1, 4, 64, PAGE))
    a, b = (draw.randrange(len(data) // size) * size for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def resized(data: bytearray, draw: random.Random) -> None:
    if draw.random() < 0.5:
        del data[draw.randrange(len(data)) :]
    else:
        data += draw.randbytes(draw.randint(1, 2 * PAGE))


def reheaded(data: bytearray, draw: random.Random) -> None:
    try:
        head = json.loads(data[:PAGE])
    except ValueError:  # damaged before
        return
    head[draw.choice(sorted(head))] = draw.choice((0, -1, None, "", 10**30, [], "a" * 64, {"format": 5}))
    data[:PAGE] = json.dumps(head).encode().ljust(PAGE)


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (flipped, edited, swapped, resized, reheaded)


def small_models(place: Path) -> list[Path]:
    """Two models of one shape with other weights, so that the cache of one fits the other."""
    import torch

    from plume.model.heads import Model

    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=300), made_text(20_000).split("\n"))
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context=32, layers=2, heads=2, width=32)
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        folders.append(save_model(Model(config), place / f"model-{seed}", tokenizer=tokenizer))
    return folders


def written(folder: Path, precision: Any) -> str:
    lm = open_lm(folder, EngineConfig(precision=precision, threads=1, slots=1))
    text = lm.generate("def ", temperature=0, max_new_tokens=12, ignore_eos=True).text
    lm.close()
    return text


def damage_some(folders: list[Path], count: int, seed: int) -> tuple[int, int]:
    """How many texts or weights were others than those of the folder, and how many damaged files were refused."""
    draw, wrong, refused, kept = random.Random(seed), 0, 0, dict[tuple[Path, str], Any]()
    for folder in folders:
        for precision in PRECISIONS:
            packed = engine_factory.packed_weights(folder, precision)
            path = cache_paths(folder, precision, source_hash(folder))[0]
            kept[folder, precision] = packed.block.copy(), path, path.read_bytes(), written(folder, precision)
    for number in range(count):
        folder, precision = draw.choice(folders), draw.choice(PRECISIONS)
        block, path, good, text = kept[folder, precision]
        data = bytearray(good)
        if draw.random() < 0.15:  # the valid file of another model, precision or both
            data = bytearray(kept[draw.choice(folders), draw.choice(PRECISIONS)][2])
        else:
            for _ in range(draw.choice((1, 1, 2))):
                draw.choice(DAMAGES)(data, draw) if len(data) > PAGE else flipped(data := bytearray(good), draw)
        path.write_bytes(data)
        wrong += bool((engine_factory.packed_weights(folder, precision).block != block).any())
        refused += data != good and path.read_bytes() == good
        if number % 20 == 0:
            path.write_bytes(data)
            wrong += written(folder, precision) != text
    return wrong, refused


def corrupt(count: int) -> None:
    wrong = refused = crashes = 0
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        os.environ["XDG_CACHE_HOME"] = str(Path(place) / "cache")  # with a key of its own
        folders = small_models(Path(place))
        for seed in range(-(-count // CHUNK)):
            try:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    found = pool.submit(damage_some, folders, min(CHUNK, count - seed * CHUNK), seed).result()
            except BrokenProcessPool:
                crashes += 1
                continue
            wrong, refused = wrong + found[0], refused + found[1]
            print(f"{min(count, (seed + 1) * CHUNK):,} caches: {wrong} wrong, {crashes} crashes", flush=True)
    about = f"{count:,} damaged caches (flips, edits, swaps, sizes, headers, files of other models)"
    report(
        Row(
            key="corrupt, wrong", what=f"{about}: other weights or texts", figure=wrong, unit="", digits=0, at_most=0,
            detail=f"{refused:,} packed anew; a text was written behind every twentieth",
        ),
        Row(key="corrupt, crashes", what=f"{about}: crashes", figure=crashes, unit="", digits=0, at_most=0),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cache", "guesses", "together", "corrupt"])
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--span", type=float, default=5.0, help="for together: seconds of each measurement")
    parser.add_argument("--count", type=int, default=10_000, help="for corrupt: damaged files")
    args = parser.parse_args()
    if args.what == "corrupt":
        corrupt(args.count)
    elif args.what == "together":
        together(args.preset, args.rounds, args.threads, args.span)
    else:
        {"cache": cache, "guesses": guesses}[args.what](args.preset, args.rounds, args.threads)


if __name__ == "__main__":
    main()
