"""Every way to sample against greedy decoding, both of the int8 engine: python -m benchmarks.samplers."""

# A model of random weights finds all tokens about equally likely, which no trained one does: top-p then keeps most of
# the vocabulary. So all is measured twice, as it is and with an output of the entropy that trained models have.

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Row, report
from plume.bench import random_folder
from plume.config import EngineConfig, SamplingConfig
from plume.hf import load_model, save_model
from plume.inference.engine import Feed
from plume.lm import LM
from plume.text import load_tokenizer

SAMPLERS: dict[str, dict[str, Any]] = {  # what is compared with greedy decoding
    "temperature 1": {},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2},
    "logprobs 5": {"logprobs": 5},
}
BATCHES = (8, 64)
PROMPT = 4  # tokens: prompts are read at the same rate by all
NATS = 3.5  # of a trained model's next token
STEPS = 20  # of the search for it


def mean_entropy(logits: Any) -> float:
    """Of the next token, in nats."""
    logprobs = logits - logits.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    return float(-(np.exp(logprobs) * logprobs).sum(axis=1).mean())


def opened(folder: Path, threads: int | None) -> LM:
    return LM(folder, load_tokenizer(folder), EngineConfig(precision="int8", threads=threads, slots=max(BATCHES)))


def next_logits(lm: LM) -> Any:
    """Of a few random prompts (prompts, V)."""
    prompts = np.random.default_rng(1).integers(0, lm.config.vocab_size, (8, PROMPT)).tolist()
    logits = lm.engine.step([Feed(slot, prompt) for slot, prompt in enumerate(prompts)]).astype(np.float64)
    for slot in range(len(prompts)):
        lm.engine.rewind(slot, 0)
    return logits


def sharpened(folder: Path, factor: float, place: Path) -> Path:
    """The same model with larger logits: the gain of its last norm times the factor."""
    import torch

    model = load_model(folder)
    with torch.no_grad():
        model.body.norm.weight.mul_(factor)  # type: ignore[union-attr]
    return save_model(model, place / f"{folder.name}-sharp", tokenizer=load_tokenizer(folder))


def factor_for(logits: Any) -> float:
    """What logits must be multiplied by to have the entropy of a trained model's."""
    low, high = 0.0, 1000.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_entropy(logits * middle) > NATS else (low, middle)
    return high


def best_step(lm: LM, prompts: list[list[int]], config: SamplingConfig) -> float:
    """Seconds of the fastest step of a batch, all that a step does included: other work on the machine slows many
    steps, but hardly all of them."""
    batcher, taken = lm.batcher, list[float]()
    step = batcher.step

    def timed() -> Any:
        start = time.perf_counter()
        moved = step()
        taken.append(time.perf_counter() - start)
        return moved

    batcher.clear()
    batcher.step = timed  # type: ignore[method-assign]
    try:
        lm.generate_batch(prompts, config)
    finally:
        del batcher.step
    return min(taken[1:])  # the first one reads the prompts


def rates(lm: LM, new_tokens: int, rounds: int) -> dict[tuple[str, int], float]:
    """Tokens per second by (way to sample, batch), all of them in turns, of the fastest step of each."""
    prompts = np.random.default_rng(0).integers(0, lm.config.vocab_size, (max(BATCHES), PROMPT)).tolist()
    plain = SamplingConfig(top_k=None, ignore_eos=True)
    ways = {"greedy": {"temperature": 0.0}, **SAMPLERS}
    best: dict[tuple[str, int], float] = {}
    for number in range(rounds + 1):  # the first round only warms up
        for batch in BATCHES:
            new = max(3, new_tokens * BATCHES[0] // batch) if number else 3
            for name, given in ways.items():
                wanted = replace(plain, seed=number, max_new_tokens=new, **given)
                rate = batch / best_step(lm, prompts[:batch], wanted)
                best[name, batch] = max(best.get((name, batch), 0.0), rate if number else 0.0)
    return best


def rows(found: dict[tuple[str, int], float], about: str, nats: float) -> Iterator[Row]:
    for batch in BATCHES:
        for name in SAMPLERS:
            mine, greedy = found[name, batch], found["greedy", batch]
            yield Row(
                key=f"{name}, batch {batch}, {about}",
                what=f"int8, batch {batch}, {about}: tokens/s with {name} against greedy",
                figure=mine / greedy,
                at_least=0.9,
                detail=f"{mine:.1f} and {greedy:.1f} tokens/s; entropy {nats:.1f} nats",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a batch of 8; larger batches write fewer each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        folder, about = random_folder(args.preset, Path(place)), "flat output"
        for _ in range(2):
            lm = opened(folder, args.threads)
            logits = next_logits(lm)
            report(*rows(rates(lm, args.new_tokens, args.rounds), about, mean_entropy(logits)))
            lm.close()
            folder, about = sharpened(folder, factor_for(logits), Path(place)), "output as sharp as a trained model's"


if __name__ == "__main__":
    main()
