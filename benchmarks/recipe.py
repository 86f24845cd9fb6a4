"""The recipe of sized runs against plain AdamW, same data and code: python -m benchmarks.recipe [--seconds 240].

One thread and seconds of its processor time, so that other work beside it does not decide. The plain recipe (random
tied embeddings, AdamW, warm-up and cosine) has the best of a small grid of rates, vocabularies and contexts; then, seed
by seed, it trains for the whole time and the sized recipe for a third of it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean

import torch
from scipy.stats import ttest_rel

from benchmarks.results import Row, report
from plume.config import PRESETS, DataConfig, TokenizerConfig, TrainConfig
from plume.data import PackedWindows, open_shards, prepare
from plume.hf import save_model
from plume.model.heads import Model
from plume.model.loss import SampledSoftmax, TensorBatch, token_loss
from plume.text import load_tokenizer
from plume.train.budget import GPT, REFERENCE_MUON_LR
from plume.train.cooccurrence import counted_tokens, embeddings
from plume.train.fused import fuse
from plume.train.fused_softmax import compiled_softmax
from plume.train.held_out import model_bits
from plume.train.optim import Optimizers, rate
from plume.train.pretrain import text_shares

LAYERS, WIDTH, HEADS, STEP_TOKENS = 4, 128, 4, 2048
TRIAL_STEPS = 12  # that say how many fit into the time; the first two are not counted
RATES, TEXTS = (1e-3, 2e-3, 4e-3), ((2048, 128), (4096, 64))  # of the grid: learning rates; vocabularies and contexts


@dataclass(frozen=True)
class Recipe:
    vocab_size: int
    context: int
    lr: float
    sized: bool  # as sized runs are, or plain

    def train_config(self, steps: int) -> TrainConfig:
        plain = TrainConfig(
            steps=steps, lr=self.lr, beta2=0.95, weight_decay=0.1, schedule="cosine", final_lr_ratio=0.1,
            warmup_steps=max(1, steps // 20),
        )  # fmt: skip
        if not self.sized:
            return plain
        return replace(
            plain, optimizer="muon", muon_lr=REFERENCE_MUON_LR, weight_decay=0.0, schedule="linear",
            final_lr_ratio=0.0, warmup_steps=max(1, steps // 50), beta2=TrainConfig(steps=1).beta2,
        )  # fmt: skip


OURS = Recipe(16384, 64, GPT.lr, sized=True)


def first_model(recipe: Recipe, data: Path, seed: int) -> Model:
    torch.manual_seed(seed)
    config = replace(
        PRESETS["gpt2-laptop"], layers=LAYERS, width=WIDTH, heads=HEADS, context=recipe.context,
        vocab_size=recipe.vocab_size, dropout=0.0, tie_embeddings=not recipe.sized,
    )  # fmt: skip
    model = Model(config).train()
    if recipe.sized:
        read, follow = embeddings(counted_tokens(open_shards(data)), recipe.vocab_size, WIDTH).apart
        with torch.no_grad():
            model.body.embed.tokens.weight[: len(read)] = read
            model.table[: len(follow)] = follow
    fuse(model)
    return model


def train(recipe: Recipe, data: Path, steps: int, seed: int) -> tuple[Model, list[float]]:
    """The model after so many steps, and the processor seconds up to the first step and after each."""
    marks = [time.process_time()]
    model, config = first_model(recipe, data, seed), recipe.train_config(steps)
    optimizers = Optimizers(model, config)
    shards = open_shards(data)
    rows = PackedWindows(shards, recipe.context, seed=seed)
    shares = text_shares(shards, load_tokenizer(data / "tokenizer"), with_special=True)
    sampled = SampledSoftmax(torch.from_numpy(shares), GPT.sampled or len(shares))
    for step in range(steps):
        marks.append(time.process_time())
        batch = TensorBatch.of(rows.batch(step, STEP_TOKENS // recipe.context))
        optimizers.zero_grad()
        hidden = model.body(batch.tokens).flatten(0, 1)
        loss = (
            sampled.loss(hidden, model.table, batch.targets.flatten(), softmax=compiled_softmax)
            if recipe.sized
            else token_loss(
                hidden, model.table, batch.targets.flatten(), vocab_size=recipe.vocab_size, softmax=compiled_softmax
            )
        )
        (loss / batch.targets.numel()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(rate(step, config))
    return model, [*marks, time.process_time()]


def bits_after(recipe: Recipe, data: Path, seconds: float, seed: int) -> tuple[float, float, int]:
    """Bits per byte of the held-out text after so much processor time; the time that it took; tokens."""
    marks = train(recipe, data, TRIAL_STEPS, seed)[1]
    spans = sorted(after - before for before, after in pairwise(marks[1:]))
    steps = max(20, round((seconds - marks[1] + marks[0]) / spans[len(spans) // 2]))
    model, marks = train(recipe, data, steps, seed)
    tokenizer = load_tokenizer(data / "tokenizer")
    with tempfile.TemporaryDirectory() as place:
        folder = save_model(model, Path(place) / "model", tokenizer=tokenizer)
        return model_bits(folder, data, tokenizer), marks[-1] - marks[0], steps * STEP_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="processor time of the plain recipe")
    parser.add_argument("--grid-seconds", type=float, help="of each point of its grid; unset: as long")
    parser.add_argument("--points", type=int, default=len(TEXTS) * len(RATES), help="of the grid")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--paths", nargs="+", default=["python:stdlib"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        data = {vocab_size: Path(place) / str(vocab_size) for vocab_size, _ in (*TEXTS, (OURS.vocab_size, 0))}
        for vocab_size, folder in data.items():
            tokenizer = TokenizerConfig(vocab_size=vocab_size)
            prepare(DataConfig(paths=tuple(args.paths), folder=folder, tokenizer=tokenizer, validation_fraction=0.02))
        report(*compared(data, args.seconds, args.grid_seconds, args.points, args.seeds))


def compared(data: dict[int, Path], seconds: float, grid_seconds: float | None, points: int, seeds: int) -> list[Row]:
    grid: dict[Recipe, float] = {}
    for (vocab_size, context), lr in list(product(TEXTS, RATES))[:points]:
        recipe = Recipe(vocab_size, context, lr, sized=False)
        grid[recipe] = bits_after(recipe, data[vocab_size], seconds if grid_seconds is None else grid_seconds, 0)[0]
        print(f"{recipe}: {grid[recipe]:.3f} bits per byte", flush=True)
    best = min(grid, key=lambda recipe: grid[recipe])
    plain, ours = list[float](), list[float]()
    times = list[float]()
    for seed in range(1, seeds + 1):
        theirs, their_seconds, their_tokens = bits_after(best, data[best.vocab_size], seconds, seed)
        bits, our_seconds, our_tokens = bits_after(OURS, data[OURS.vocab_size], seconds / 3, seed)
        print(
            f"seed {seed}: plain {theirs:.3f} ({their_tokens:,} tokens), sized {bits:.3f} ({our_tokens:,})", flush=True
        )
        plain.append(theirs)
        ours.append(bits)
        times.append(our_seconds / their_seconds)
    p = float(ttest_rel(ours, plain, alternative="less").pvalue) if seeds > 1 else float("nan")
    return [
        Row(
            key="bits",
            what="the sized recipe in a third of the processor time of plain AdamW: bits per byte, of the plain ones",
            figure=mean(ours) / mean(plain),
            digits=3,
            at_most=1.0,
            detail=f"{mean(ours):.3f} and {mean(plain):.3f}, {seeds} seeds, p {p:.4f}; time {mean(times):.2f}; "
            f"plain at its best of {len(grid)}: lr {best.lr:g}, vocabulary {best.vocab_size:,}, context {best.context}",
        )
    ]


if __name__ == "__main__":
    main()
