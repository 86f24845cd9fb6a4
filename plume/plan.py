"""What a run needs before it is started: parameters, memory, arithmetic, time and money."""

# B sequences per step, T tokens per sequence, D model width, H heads, L layers, V vocabulary

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from plume.config import ModelConfig, PlanConfig, UserError
from plume.heads import Model
from plume.model import Block

if TYPE_CHECKING:
    from rich.console import RenderableType

FLOAT = 4  # bytes
HALF = 2


@dataclass(frozen=True)
class Hardware:
    """Peak rate of matrix products in 16 bits, memory, the share of the peak that training reaches, rent per hour."""

    name: str
    teraflops: float
    memory_gb: float
    reached: float
    dollars_per_hour: float


HARDWARE = [  # peaks and memory from the makers' data sheets; the share reached and the rent are round assumptions
    Hardware("T4", 65, 16, 0.30, 0.35),
    Hardware("RTX 4090", 165, 24, 0.40, 0.40),
    Hardware("A100 80GB", 312, 80, 0.45, 1.50),
    Hardware("H100 SXM", 989, 80, 0.40, 2.50),
    Hardware("8 x A100 80GB", 8 * 312, 8 * 80, 0.43, 12.0),
    Hardware("8 x H100 SXM", 8 * 989, 8 * 80, 0.38, 20.0),
]


@dataclass(frozen=True)
class Plan:
    """Everything in plain numbers: bytes, floating-point operations, seconds."""

    name: str
    parameters: int
    by_tensor: dict[str, int]  # one layer stands for all: names with {} count once per layer
    layers: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # of one micro-batch, kept for the backward pass
    cache_bytes_per_token: int
    flops_per_token_forward: int
    flops_per_token_training: int
    tokens: int
    measured_flops_per_second: float
    seconds: dict[str, float]
    dollars: dict[str, float]

    @property
    def training_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "training_bytes": self.training_bytes}


def count_parameters(model: Model) -> dict[str, int]:
    """Parameters by tensor, the layers' own ones under one name with {} for the layer's number."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        general = re.sub(r"blocks\.\d+\.", "blocks.{}.", name)
        counts.setdefault(general, parameter.numel())
    return counts


def forward_flops_per_token(config: ModelConfig, parameters: dict[str, int], sequence: int) -> int:
    """Two operations per weight of each matrix a token meets, and the attention's own products."""
    matrices = 0
    for name, size in parameters.items():
        if name.endswith("weight") and "norm" not in name and "embed" not in name:
            layers = config.decoder_layers if ".decoder." in name else config.layers
            matrices += size * (layers if "{}" in name else 1)
    matrices += config.table_rows * config.width  # the table is read backwards for the answer
    seen = sequence / 2 if config.causal else sequence
    attention = 0.0
    for layer in range(config.layers + config.decoder_layers):
        band = config.band_of(layer)
        attention += 4 * config.width * (min(seen, band) if band else seen)
    return int(2 * matrices + attention)


def activation_floats(config: ModelConfig, batch: int, sequence: int) -> int:
    """What the forward pass keeps for the backward pass, without activation checkpointing and with chunked logits.

    Per token and layer: what goes into and comes out of the norms, q, k, v, the attention's result, the MLP's two inner
    tensors. Dropout keeps its masks, and on a CPU it makes attention keep its weights too.
    """
    width, inner = config.width, config.mlp_width
    per_layer = 8 * width + 2 * inner + config.heads
    if config.dropout:
        per_layer += 2 * width + 3 * config.heads * sequence
    stacks = config.layers + config.decoder_layers
    return batch * sequence * (stacks * per_layer + (2 if config.dropout else 1) * width)


def measure_block(config: ModelConfig, seconds: float = 0.5) -> float:
    """Operations per second that this machine reaches in the forward and backward pass of one such block."""
    width = max(min(config.width, 768) // config.heads, 1) * config.heads
    small = ModelConfig(
        vocab_size=1, context=256, layers=1, heads=config.heads, width=width, hidden=4 * width, dropout=0.0
    )
    block = Block(small, causal=True, cross=False)
    sequence, batch = 128, 2
    x = torch.randn(batch, sequence, width)
    operations = 3 * batch * sequence * (2 * 12 * width * width + 4 * width * sequence / 2)
    block(x).sum().backward()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or rounds < 2:
        block(x).sum().backward()
        rounds += 1
    return rounds * operations / (time.perf_counter() - start)


def plan(config: PlanConfig) -> Plan:
    model_config = config.model
    sequence = model_config.context if config.sequence is None else config.sequence
    if not 0 < sequence <= model_config.context:
        raise UserError(f"sequence={sequence} must lie between 1 and the context {model_config.context}")
    if config.tokens <= 0 or config.batch <= 0:
        raise UserError(f"tokens={config.tokens} and batch={config.batch} must be positive")
    generates = model_config.causal or model_config.decoder_layers > 0
    with torch.device("meta"):
        model = Model(model_config, "next-token" if generates else "bare")
    by_tensor = count_parameters(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    forward = forward_flops_per_token(model_config, by_tensor, sequence)
    measured = measure_block(model_config)
    seconds = {"this machine": 3 * forward * config.tokens / measured}
    dollars: dict[str, float] = {}
    for hardware in HARDWARE:
        seconds[hardware.name] = 3 * forward * config.tokens / (hardware.teraflops * 1e12 * hardware.reached)
        dollars[hardware.name] = seconds[hardware.name] / 3600 * hardware.dollars_per_hour
    layers = model_config.decoder_layers if model_config.decoder_layers else model_config.layers
    return Plan(
        name=config.name,
        parameters=total,
        by_tensor=by_tensor,
        layers=model_config.layers,
        weight_bytes=FLOAT * total,
        gradient_bytes=FLOAT * total,
        optimizer_bytes=2 * FLOAT * total,
        activation_bytes=FLOAT * activation_floats(model_config, config.batch, sequence),
        cache_bytes_per_token=2 * FLOAT * layers * model_config.width,
        flops_per_token_forward=forward,
        flops_per_token_training=3 * forward,
        tokens=config.tokens,
        measured_flops_per_second=measured,
        seconds=seconds,
        dollars=dollars,
    )


# ---- for people ---------------------------------------------------------------------------------------------------


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.4g} TB"


def human_time(seconds: float) -> str:
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:,.3g} {unit}"
    return f"{seconds:.3g} s"


def table(plan: Plan, config: PlanConfig) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    parameters = Table("tensor", "parameters", "times", "in all", title=f"{plan.name}: {plan.parameters:,} parameters")
    for column in parameters.columns[1:]:
        column.justify = "right"
    for name, size in plan.by_tensor.items():
        times = 1
        if "{}" in name:
            times = config.model.decoder_layers if ".decoder." in name else config.model.layers
        parameters.add_row(name.removeprefix("body."), f"{size:,}", f"{times}", f"{size * times:,}")
    per_block = sum(size for name, size in plan.by_tensor.items() if "{}" in name and ".decoder." not in name)
    parameters.add_section()
    parameters.add_row("one block", f"{per_block:,}", f"{plan.layers}", f"{per_block * plan.layers:,}")

    sequence = config.model.context if config.sequence is None else config.sequence
    needs = Table("need", "amount", title="Memory and arithmetic", show_header=False)
    needs.columns[1].justify = "right"
    needs.add_row("weights (fp32)", human_bytes(plan.weight_bytes))
    needs.add_row("weights (16 bits)", human_bytes(plan.weight_bytes / 2))
    needs.add_row("gradients", human_bytes(plan.gradient_bytes))
    needs.add_row("optimiser (AdamW)", human_bytes(plan.optimizer_bytes))
    needs.add_row(f"activations of {config.batch} x {sequence} tokens", human_bytes(plan.activation_bytes))
    needs.add_row("training in all", human_bytes(plan.training_bytes))
    needs.add_row("key-value cache per token (fp32)", human_bytes(plan.cache_bytes_per_token))
    needs.add_row("operations per token, forward", f"{plan.flops_per_token_forward:.3g}")
    needs.add_row("operations per token, training", f"{plan.flops_per_token_training:.3g}")

    times = Table("on", "time", "cost", title=f"Training on {plan.tokens:,} tokens")
    times.columns[1].justify = times.columns[2].justify = "right"
    for name, seconds in plan.seconds.items():
        cost = f"${plan.dollars[name]:,.2f}" if name in plan.dollars else ""
        rate = f" ({plan.measured_flops_per_second / 1e9:.0f} GFLOP/s measured)" if name == "this machine" else ""
        times.add_row(name + rate, human_time(seconds), cost)
    return Group(parameters, needs, times)
