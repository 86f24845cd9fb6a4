"""Before a real run: what it would need, and a first model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plume.config.errors import UserError, check_encoding
from plume.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A model and how much it is to read, before anything is spent."""

    model: ModelConfig
    name: str = "model"  # shown above the table
    tokens: int = 1_000_000_000  # to train on
    micro_batch: int = 8  # sequences in memory at once
    length: int | None = None  # tokens of a sequence; unset means the whole context
    ranks: int = 1  # devices that train together
    strategy: Literal["ddp", "fsdp"] = "fsdp"  # copies, or shards of one copy
    tensor_parallel: int = 1  # ranks that share each matrix
    accumulate: int = 1  # micro-batches before the ranks exchange gradients
    activation_checkpointing: bool = False  # compute activations again in the backward: less memory, more time
    hardware: str = "A100 80GB"  # of each rank
    per_node: int = 8  # ranks in one machine, where links are fast
    link_gb: float = 300.0  # GB/s of one rank to others in its machine
    network_gb: float = 25.0  # GB/s of one rank to other machines


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """A first model, in a few minutes."""

    text: tuple[str, ...] = ()  # files, folders or globs; unset means Python's own standard library
    encoding: str = "utf-8"  # of the text; others are gb18030, latin-1, utf-16, ...
    folder: Path = Path("runs/demo")  # of the run: model/, metrics.jsonl, loss.png, samples.md
    minutes: float = 2.0  # of training
    seed: int = 1  # of weights, batches and samples

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise UserError(f"minutes={self.minutes} must be above 0, for example 2")
        check_encoding(self.encoding)
