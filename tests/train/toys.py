"""A small task for the loop: random text with uneven masks, each row a pure function of its number."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plume.config import PRESETS, ModelConfig, TrainConfig
from plume.model.heads import Model
from plume.model.loss import TensorBatch
from plume.train.distribute import Ranks
from plume.train.loop import Task, Trainer
from plume.train.objectives import objective_called
from plume.train.optim import batch_rows, rows_before
from plume.util.devices import Precision

TINY: ModelConfig = replace(PRESETS["bert-tiny"], vocab_size=31, context=12, layers=2, heads=2, width=16, dropout=0.0)
FLOAT32 = Precision("float32", torch.device("cpu"), 1e9)


@dataclass(frozen=True)
class ToyRows:
    """BERT-like rows: lengths, the number of masked places and the pair labels all differ from row to row."""

    config: TrainConfig
    model: ModelConfig = TINY
    fixed: int | None = None  # rows of a validation set

    def rows(self, step: int) -> int:
        return batch_rows(step, self.config) if self.fixed is None else self.fixed

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        before = rows_before(step, self.config) if self.fixed is None else 1 << 20
        return joined([self.row(before + first + i) for i in range(rows)])

    def row(self, number: int) -> dict[str, Any]:
        random = torch.Generator().manual_seed(number)
        length = int(torch.randint(4, 13, (), generator=random))
        tokens = torch.arange(12) * 7 % 29 + torch.randint(0, 3, (12,), generator=random)
        places = (
            torch.randperm(length, generator=random)[: int(torch.randint(0, 5, (), generator=random))].sort().values
        )
        seen = tokens.clone()
        seen[places] = 30
        return {"tokens": seen, "places": places, "targets": tokens[places], "length": length, "follows": number % 2}


@dataclass(frozen=True)
class ToyPairs(ToyRows):
    """Source and target texts of uneven lengths, for an encoder-decoder."""

    def part(self, step: int, first: int, rows: int) -> TensorBatch:
        before = rows_before(step, self.config) if self.fixed is None else 1 << 20
        found = [self.row(before + first + i) for i in range(rows)]
        lengths = torch.tensor([row["length"] for row in found])
        tokens = torch.stack([row["tokens"] for row in found])
        targets = tokens.masked_fill(torch.arange(12) >= lengths[:, None], -100)
        return TensorBatch(
            tokens=tokens, targets=targets, lengths=lengths, source=tokens.flip(1), source_lengths=13 - lengths % 5
        )


def joined(rows: list[dict[str, Any]]) -> TensorBatch:
    return TensorBatch(
        tokens=torch.stack([row["tokens"] for row in rows]),
        targets=torch.cat([row["targets"] for row in rows]),
        positions=torch.cat([row["places"] + 12 * i for i, row in enumerate(rows)]),
        lengths=torch.tensor([row["length"] for row in rows]),
        segments=torch.zeros(len(rows), 12, dtype=torch.long),
        next_sentence=torch.tensor([row["follows"] for row in rows]),
    )


def toy_trainer(
    folder: Path, config: TrainConfig, ranks: Ranks | None = None, shape: dict[str, Any] | None = None, **task: Any
) -> Trainer:
    """`shape`: fields of the model that differ from TINY's."""
    torch.manual_seed(config.seed)
    model = task.pop("model", None)
    given = {
        "model": Model(replace(TINY, **(shape or {})), "pretraining") if model is None else model,
        "objective": objective_called("masked-next-sentence", config.label_smoothing),
        "train": ToyRows(config),
        "validation": ToyRows(config, fixed=6),
    } | task
    folder.mkdir(parents=True, exist_ok=True)
    return Trainer(Task(**given), config, folder, Ranks() if ranks is None else ranks, FLOAT32)


def pairs_trainer(
    folder: Path, config: TrainConfig, ranks: Ranks | None = None, shape: dict[str, Any] | None = None
) -> Trainer:
    """The same loop over an encoder-decoder."""
    torch.manual_seed(config.seed)
    small = {"vocab_size": 31, "context": 12, "layers": 2, "decoder_layers": 2, "heads": 2, "width": 16, "dropout": 0.0}
    return toy_trainer(
        folder,
        config,
        ranks,
        model=Model(replace(PRESETS["transformer-base"], **{**small, **(shape or {})})),
        objective=objective_called("sequence-to-sequence", config.label_smoothing),
        train=ToyPairs(config),
        validation=ToyPairs(config, fixed=6),
    )


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.tensors().items()}
