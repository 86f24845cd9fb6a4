"""A recipe for a training time: size, vocabulary, batch, rates and steps, from the text and the measured speed."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from plume.config import DataConfig, ModelConfig, PretrainConfig, TrainConfig, UserError, build
from plume.data.batches import IGNORE
from plume.data.documents import read_documents
from plume.data.shards import read_manifest
from plume.data.sources import find_files
from plume.data.tables import COMPRESSED, Tally
from plume.model.heads import Model
from plume.model.loss import SampledSoftmax, token_loss
from plume.train.optim import Optimizers
from plume.util.devices import best_seconds, pick_device
from plume.util.run_folder import is_run, read_recipe_of

SHAPES = ((2, 64), (3, 96), (4, 128), (4, 192), (4, 256), (6, 256), (6, 320), (8, 384), (8, 512), (12, 640), (12, 768))
HEAD_WIDTH = 32  # of narrow models; GPT-2's 64 from a width of 512 on
CONTEXTS = {3e6: 64, 12e6: 128, math.inf: 256}  # by the most tokens to be read: every position is to be seen often
TOKENS_PER_WEIGHT = 1.2  # of the blocks: with fewer a smaller model learns more in the same time
REFERENCE_TOKENS = 4e6  # of the run that rates and batch were searched for
REFERENCE_MUON_LR, REFERENCE_WIDTH = 0.03, 128
PASSES = 8  # over a small text, at most
LARGEST_TABLE = 32768
BYTES_PER_TOKEN = 3.3
UNKNOWN = 1 << 40  # bytes of a hub dataset, whose size is not known: it bounds nothing
PACKED = 3  # bytes of text in a byte of a compressed file
LETTERS_READ = 4_000_000  # characters of the text in which letters are counted
LETTER_SEEN = 10  # times, and a letter of several bytes is to be one token
MICRO_TOKENS = 2048  # of a measured step
OVERHEAD = 1.2  # validation, logging, checkpoints, reading; and steps that are slower than the fastest few


class Rules(NamedTuple):
    """What differs between a GPT and a BERT."""

    lr: float  # of the run that rates were searched for
    rows: int  # of the token table, for each layer and column of the blocks
    bytes_per_row: int  # of the text: a token is to be seen often enough
    sampled: int | None  # tokens drawn for the softmax: with them a large vocabulary costs little time


GPT, BERT = Rules(1e-2, 32, 600, 128), Rules(6e-3, 8, 1500, None)


def rules(model: ModelConfig) -> Rules:
    return GPT if model.causal else BERT


def sized(config: PretrainConfig) -> tuple[PretrainConfig, str]:
    """The config for its `minutes`, and what was chosen. A run that is resumed stays as it began."""
    assert config.minutes is not None
    if config.resume and is_run(config.folder):
        began = build(PretrainConfig, {**read_recipe_of(config.folder), "folder": str(config.folder)})
        return replace(began, resume=True), "resumed with the settings it began with"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("minutes sizes a run for one process; start the recipe.toml of such a run under torchrun")
    size = 0 if config.prepared is not None else text_bytes(config.data)
    unique = size / BYTES_PER_TOKEN if size else float("inf")
    letters = 0 if config.prepared is not None else wide_letters(config.data)
    most = PASSES * unique
    model: ModelConfig | None = None
    tokens = 0.0
    for layers, width in SHAPES:
        trial = shaped(config, layers, width, size // rules(config.model).bytes_per_row, 256 + 2 * letters)
        seconds = step_seconds(trial, batch_for(trial, config.minutes), config)
        read = min(config.minutes * 60 / seconds * batch_for(trial, config.minutes) * trial.context, most)
        if model is not None and read < TOKENS_PER_WEIGHT * 12 * layers * width**2:
            break
        model, tokens = trial, read
    assert model is not None
    model = replace(model, context=next(length for limit, length in CONTEXTS.items() if tokens <= limit))
    batch = batch_for(model, config.minutes)
    seconds, rows = step_seconds(model, batch, config), batch * model.context
    steps = max(20, 5 * round(min(config.minutes * 60 / seconds, most / rows) / 5))
    return with_size(config, model, batch, steps), (
        f"{model.layers} layers of width {model.width}, vocabulary {model.vocab_size:,}, context {model.context}, "
        f"{steps:,} steps of {batch} sequences ({steps * rows / 1e6:.1f} million tokens at {rows / seconds:,.0f} "
        f"tokens/s measured here, {steps * rows / (12 * model.layers * model.width**2):.1f} per weight of the blocks)"
    )


def shaped(config: PretrainConfig, layers: int, width: int, most: int, least: int) -> ModelConfig:
    """A token table in proportion to the blocks, within bounds that the text sets; the context is chosen later.

    A GPT has output weights of its own: they cost no time, and begin as the tokens that follow. Since its softmax is
    sampled, so are more tokens nearly free.
    """
    heads = width // (HEAD_WIDTH if width < 512 else 2 * HEAD_WIDTH)
    if config.prepared is not None:
        rows = read_manifest(config.prepared).vocab_size
    else:
        wanted = 1 << round(math.log2(rules(config.model).rows * layers * width))
        rows = max(min(wanted, LARGEST_TABLE, most), least, 512) // 256 * 256
    tied = config.model.tie_embeddings and not config.model.causal
    return replace(
        config.model, layers=layers, width=width, heads=heads, context=128, vocab_size=rows, tie_embeddings=tied
    )


def batch_for(model: ModelConfig, minutes: float) -> int:
    """Sequences: 2,048 tokens for two minutes, more for longer runs, whose gradients are smaller than their noise."""
    doublings = max(0, round(max(0.0, minutes / 2 - 1) ** 0.25 - 0.5))
    return max(1, (2048 << doublings) // model.context)


def with_size(config: PretrainConfig, model: ModelConfig, batch: int, steps: int) -> PretrainConfig:
    longer = max(1.0, steps * batch * model.context / REFERENCE_TOKENS) ** -0.25
    train = replace(
        config.train,
        steps=steps,
        batch=batch,
        optimizer="muon",
        lr=rules(model).lr * longer * (REFERENCE_WIDTH / model.width) ** 0.5,
        muon_lr=REFERENCE_MUON_LR * longer,
        decay_embeddings=False,  # it would shrink rare tokens, which few steps have a gradient of
        schedule="linear",
        final_lr_ratio=0.0,
        warmup_steps=min(100, max(1, steps // 50)),
        validate_every=max(1, steps // (5 if steps < 5000 else 20)),
    )
    tokenizer = replace(config.data.tokenizer, vocab_size=model.vocab_size)
    data = replace(config.data, tokenizer=tokenizer)
    return replace(
        config,
        model=model,
        train=train,
        data=data,
        objective=replace(config.objective, sampled_softmax=drawn(config)),
        minutes=None,
        embedding_init="cooccurrence",
    )


def drawn(config: PretrainConfig) -> int | None:
    """Tokens drawn for the softmax: as the recipe says, else by the rules, but all where the loss is smoothed."""
    if config.objective.sampled_softmax is not None or config.train.label_smoothing:
        return config.objective.sampled_softmax
    return rules(config.model).sampled


def text_bytes(data: DataConfig) -> int:
    if any(path.startswith("hub:") for path in data.paths):
        return UNKNOWN
    files = [file for path in data.paths for file in find_files(path)]
    size = sum(file.stat().st_size * (PACKED if file.suffix.lower() in COMPRESSED else 1) for file in files)
    if size == 0:
        raise UserError(f"there is no text in {', '.join(data.paths)}")
    return size


def wide_letters(data: DataConfig) -> int:
    """Letters of several bytes that are frequent, as Chinese has thousands: without a token each would be torn."""
    if data.paths == ("python:stdlib",):
        return 0  # Python's source has hardly any
    seen, read = Counter[str](), 0
    for document in read_documents(data, Tally()):
        part = document.text[: LETTERS_READ - read]
        seen.update(part)
        read += len(part)
        if read >= LETTERS_READ:
            break
    return sum(count >= LETTER_SEEN and not letter.isascii() for letter, count in seen.items())


def step_seconds(model: ModelConfig, batch: int, config: PretrainConfig) -> float:
    """Seconds of one optimizer step here: micro-batches forward and backward, then the update."""
    device = pick_device(config.train.device)
    trial = Model(model).to(device).train()
    if device.type == "cpu":
        from plume.train.fused import fuse

        fuse(trial)
    optimizers = Optimizers(trial, TrainConfig(steps=1, optimizer="muon"))
    rows = min(batch, max(1, MICRO_TOKENS // model.context))
    shares = 1 / torch.arange(3.0, model.vocab_size + 3)  # as frequent as words are in a text
    shares /= shares.sum()
    tokens = torch.multinomial(shares, rows * model.context, replacement=True).view(rows, model.context).to(device)
    predicted = tokens if model.causal else tokens.masked_fill(torch.rand(tokens.shape, device=device) > 0.15, IGNORE)
    targets, candidates = tokens[predicted != IGNORE], drawn(config)
    sampled = None if candidates is None else SampledSoftmax(shares, candidates)

    def gradients() -> None:
        hidden = trial.body(tokens)[predicted != IGNORE]
        loss: Any = (
            sampled.loss(hidden, trial.table, targets)
            if sampled is not None
            else token_loss(hidden, trial.table, targets, vocab_size=model.vocab_size)
        )
        (loss / tokens.numel()).backward()
        loss.item()  # waits for the device

    def update() -> None:
        optimizers.step(1e-6)
        trial.table.detach()[0, 0].item()

    forward = best_seconds(gradients, 0.0, rounds=4)
    return OVERHEAD * (forward * batch / rows + best_seconds(update, 0.0, rounds=2))
