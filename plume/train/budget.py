"""A recipe for a training time: size, vocabulary, batch, rates and steps, from the text and the measured speed."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from plume.config import DataConfig, ModelConfig, ObjectiveConfig, PretrainConfig, TrainConfig, UserError, build
from plume.data.batches import IGNORE
from plume.data.documents import read_documents
from plume.data.shards import read_manifest
from plume.data.sources import find_files
from plume.data.tables import COMPRESSED, Tally
from plume.model.heads import Model
from plume.model.loss import SampledSoftmax, token_loss
from plume.train.fused_softmax import compiled_softmax
from plume.train.optim import Optimizers
from plume.train.size_law import CODE, LAW, SPREAD, TOKENS, fitted, new_tokens
from plume.util.devices import best_seconds, choose_precision, pick_device
from plume.util.run_folder import is_run, read_recipe_of

SHAPES = ((2, 64), (3, 96), (4, 128), (4, 192), (4, 256), (6, 256), (7, 288), (8, 384), (8, 512), (12, 640), (12, 768))
HEAD_WIDTH = 32  # of narrow models; GPT-2's 64 from a width of 512 on
CONTEXTS = {10e6: 64, 20e6: 128, math.inf: 256}  # by the most tokens to be read: every position is to be seen often
SHORTER, SHORT_FRACTION = {256: (64, 128)}, 0.88  # sequences of most steps of long runs
BATCH_TOKENS = {5e6: 2048, 20e6: 4096, math.inf: 8192}  # of a step, likewise
REFERENCE_TOKENS = 4e6  # of the run that rates and batch were searched for
REFERENCE_MUON_LR, REFERENCE_WIDTH = 0.03, 128
PASSES = 8  # over a small text, at most
FEWEST_STEPS = 20
LARGEST_TABLE = 32768
BYTES_PER_TOKEN = 3.3
UNKNOWN = 1 << 40  # bytes of a hub dataset, whose size is not known: it bounds nothing
PACKED = 3  # bytes of text in a byte of a compressed file
LETTERS_READ = 4_000_000  # characters of the text in which letters are counted
LETTER_SEEN = 10  # times, and a letter of several bytes is to be one token
MICRO_TOKENS = 2048  # of a measured step
# seconds of measuring each size: a part of the time, at most; shorter ones meet the machine in a fast or a slow moment
MEASURED, MEASURED_MOST = 0.003, 3.0
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


class Sized(NamedTuple):
    config: PretrainConfig
    said: str  # what was chosen and why
    ratio: float | None  # expected bits per byte over those of a bigram model, if it is known


def sized(config: PretrainConfig, shapes: Sequence[tuple[int, int]] = SHAPES) -> Sized:
    """The config for its `minutes`, with the best of these shapes. A run that is resumed stays as it began."""
    assert config.minutes is not None
    if config.resume and is_run(config.folder):
        began = build(PretrainConfig, {**read_recipe_of(config.folder), "folder": str(config.folder)})
        return Sized(resumed(config, began), "resumed with the settings it began with", None)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("minutes sizes a run for one process; start the recipe.toml of such a run under torchrun")
    size = 0 if config.prepared is not None else text_bytes(config.data)
    letters = 0 if config.prepared is not None else wide_letters(config.data)
    unique = size / BYTES_PER_TOKEN if config.prepared is None else prepared_tokens(config.prepared)
    best: Affordable | None = None
    for layers, width in shapes:
        model = shaped(config, layers, width, size // rules(config.model).bytes_per_row, 256 + 2 * letters)
        choice = read_in(config, model, unique)
        if best is not None and (choice.late or choice.ratio >= best.ratio):  # from the best size on it only rises
            break
        best = choice
    assert best is not None
    chosen = read_in(config, replace(best.model, context=context_for(config.objective, best.tokens)), unique)
    sources, pairs = texts_of(config)
    ratio = chosen.ratio * (CODE if sources == ("python:stdlib",) else 1.0)
    known = ratio if config.model.causal and not pairs and chosen.tokens >= TOKENS[0] else None
    return Sized(with_size(config, chosen.model, chosen.batch, chosen.steps), said(chosen, known), known)


def texts_of(config: PretrainConfig) -> tuple[tuple[str, ...], bool]:
    """Where the texts are from, and whether they are pairs, of which the law says nothing."""
    if config.prepared is None:
        return config.data.paths, bool(config.data.targets) or config.data.target_field is not None
    manifest = read_manifest(config.prepared)
    return manifest.sources, manifest.pairs


def resumed(config: PretrainConfig, began: PretrainConfig) -> PretrainConfig:
    """As it began, but for what is set now of memory, device and precision."""
    names = ("micro_batch", "device", "precision")
    given = {name: value for name in names if (value := getattr(config.train, name)) != getattr(TrainConfig, name)}
    return replace(began, resume=True, train=replace(began.train, **given))


def context_for(objective: ObjectiveConfig, tokens: int) -> int:
    """The length that the recipe sets; else by the tokens to be read, and no shorter than its short sequences."""
    if objective.length is not None:
        return objective.length
    return max((next(length for limit, length in CONTEXTS.items() if tokens <= limit), *objective.short_lengths))


def announced(config: PretrainConfig) -> tuple[PretrainConfig, float | None]:
    """The config for its `minutes`, once it is printed, and the expected ratio."""
    chosen = sized(config)
    print(chosen.said, file=sys.stderr)
    return chosen.config, chosen.ratio


class Affordable(NamedTuple):
    """A model and what it can read in the time."""

    model: ModelConfig
    batch: int
    steps: int
    speed: float  # tokens/s
    ratio: float  # expected bits per byte over those of a bigram model
    tokens: int
    late: bool  # not even the fewest steps fit into the time


def said(choice: Affordable, ratio: float | None) -> str:
    model, weights, tokens = choice.model, block_weights(choice.model), choice.tokens
    words = (
        f"{model.layers} layers of width {model.width}, vocabulary {model.vocab_size:,}, context {model.context}, "
        f"{choice.steps:,} steps of {choice.batch} sequences ({tokens:,} tokens at {choice.speed:,.0f} tokens/s "
        f"measured here, {tokens / weights:.1f} per weight of the blocks"
    )
    if ratio is None:
        return f"{words})"
    far = "" if fitted(weights, tokens) else "; extrapolated, the law was fitted to smaller runs"
    return f"{words}); expected bits per byte: {ratio:.2f} of a bigram model's{far}"


def expected(ratio: float, bits: dict[str, float]) -> str:
    """What came, beside what the law expects; `bits` as of held_out_bits."""
    low, high = (ratio * bits["bigram"] * (1 + side * SPREAD) for side in (-1, 1))
    return (
        f"held-out text: {bits['this model']:.2f} bits per byte, a bigram model {bits['bigram']:.2f}; "
        f"expected of this size and these tokens: {low:.2f} to {high:.2f}"
    )


def read_in(config: PretrainConfig, model: ModelConfig, unique: float) -> Affordable:
    """What a model reads in the time, at most PASSES times over the text, and how well it should do then."""
    assert config.minutes is not None
    per_token, update = speed(model, config)
    seconds, most = config.minutes * 60 / OVERHEAD, PASSES * unique
    guess = min(seconds / (per_token + update / BATCH_TOKENS[math.inf]), most)
    length = mean_length(objective_for(config, model.context), model.context)
    batch = batch_for(length, guess)
    rows = batch * length
    per_step = per_token * rows + update
    affordable = min(seconds / per_step, most / rows)
    ratio = LAW.ratio(block_weights(model), new_tokens(affordable * rows, unique))
    steps = max(FEWEST_STEPS, 5 * round(affordable / 5))
    return Affordable(
        model, batch, steps, rows / per_step / OVERHEAD, ratio, round(steps * rows), FEWEST_STEPS * per_step > seconds
    )


def mean_length(objective: ObjectiveConfig, context: int) -> float:
    """Of the sequences of all steps."""
    longest = min(context, objective.length or context)
    if not objective.short_lengths:
        return longest
    return objective.short_fraction * fmean(objective.short_lengths) + (1 - objective.short_fraction) * longest


def block_weights(model: ModelConfig) -> int:
    return 12 * model.layers * model.width**2


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


def batch_for(length: float, tokens: float) -> int:
    """Sequences: 2,048 tokens up to a few million in all, more in longer runs, whose gradients are less than noise."""
    return max(1, int(next(size for limit, size in BATCH_TOKENS.items() if tokens <= limit) // length))


def with_size(config: PretrainConfig, model: ModelConfig, batch: int, steps: int) -> PretrainConfig:
    objective = objective_for(config, model.context)
    longer = max(1.0, steps * batch * mean_length(objective, model.context) / REFERENCE_TOKENS) ** -0.25
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
        objective=objective,
        minutes=None,
        embedding_init="cooccurrence",
    )


def objective_for(config: PretrainConfig, context: int) -> ObjectiveConfig:
    """Short sequences first where the recipe has none of its own: most of a text is predicted from few tokens."""
    objective = replace(config.objective, sampled_softmax=drawn(config))
    if objective.short_lengths or context not in SHORTER:
        return objective
    return replace(objective, short_lengths=SHORTER[context], short_fraction=SHORT_FRACTION)


def drawn(config: PretrainConfig) -> int | None:
    """Tokens drawn for the softmax: as the recipe says, else by the rules, but all where the loss is smoothed."""
    if config.objective.sampled_softmax is not None or config.train.label_smoothing:
        return config.objective.sampled_softmax
    return rules(config.model).sampled


def prepared_tokens(folder: Path) -> int:
    return sum(shard.tokens for shard in read_manifest(folder).train)


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


def speed(model: ModelConfig, config: PretrainConfig) -> tuple[float, float]:
    """Seconds here for the gradients of one token, and for an update, in the precision that training will choose."""
    device = pick_device(config.train.device)
    precision = choose_precision(device, config.train.precision)
    trial = Model(model).to(device).train()
    if device.type == "cpu":
        from plume.train.fused import fuse

        fuse(trial)
    optimizers = Optimizers(trial, TrainConfig(steps=1, optimizer="muon"), products=precision.dtype)
    rows = max(1, MICRO_TOKENS // model.context)
    shares = 1 / torch.arange(3.0, model.vocab_size + 3)  # as frequent as words are in a text
    shares /= shares.sum()
    tokens = torch.multinomial(shares, rows * model.context, replacement=True).view(rows, model.context).to(device)
    predicted = tokens if model.causal else tokens.masked_fill(torch.rand(tokens.shape, device=device) > 0.15, IGNORE)
    targets, candidates = tokens[predicted != IGNORE], drawn(config)
    sampled = None if candidates is None else SampledSoftmax(shares, candidates)

    def gradients() -> None:
        with precision.context():
            hidden = trial.body(tokens)[predicted != IGNORE]
            loss: Any = (
                sampled.loss(hidden, trial.table, targets, softmax=compiled_softmax)
                if sampled is not None
                else token_loss(hidden, trial.table, targets, vocab_size=model.vocab_size, softmax=compiled_softmax)
            )
        (loss / tokens.numel()).backward()
        loss.item()  # waits for the device

    def update() -> None:
        optimizers.step(1e-6)
        trial.table.detach()[0, 0].item()

    seconds = min(MEASURED_MOST, MEASURED * 60 * (0.0 if config.minutes is None else config.minutes))
    return best_seconds(gradients, seconds, rounds=4) / tokens.numel(), best_seconds(update, seconds / 4, rounds=2)
