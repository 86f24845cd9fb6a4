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


def forward_flops_per_token(config: ModelConfig, parameters: dict[str, int], length: int) -> int:
    """Two operations per weight of each matrix a token meets, and the attention's own products."""
    matrices = 0
    for name, size in parameters.items():
        if name.endswith("weight") and "norm" not in name and "embed" not in name:
            layers = config.decoder_layers if ".decoder." in name else config.layers
            matrices += size * (layers if "{}" in name else 1)
    matrices += config.table_rows * config.width  # the table is read backwards for the answer
    seen = length / 2 if config.causal else length
    attention = 0.0
    for layer in range(config.layers + config.decoder_layers):
        band = config.band_of(layer)
        attention += 4 * config.width * (min(seen, band) if band else seen)
    return int(2 * matrices + attention)


def activation_floats(config: ModelConfig, batch: int, length: int) -> int:
    """What the forward pass keeps for the backward pass, without activation checkpointing and with chunked logits.

    Per token and layer: what goes into and comes out of the norms, q, k, v, the attention's result, the MLP's two inner
    tensors. Dropout keeps its masks, and on a CPU it makes attention keep its weights too.
    """
    width, inner = config.width, config.mlp_width
    per_layer = 8 * width + 2 * inner + config.heads
    if config.dropout:
        per_layer += 2 * width + 3 * config.heads * length
    stacks = config.layers + config.decoder_layers
    return batch * length * (stacks * per_layer + (2 if config.dropout else 1) * width)


def measure_block(config: ModelConfig, seconds: float = 0.5) -> float:
    """Operations per second that this machine reaches in the forward and backward pass of one such block."""
    width = max(min(config.width, 768) // config.heads, 1) * config.heads
    small = ModelConfig(
        vocab_size=1, context=256, layers=1, heads=config.heads, width=width, hidden=4 * width, dropout=0.0
    )
    block = Block(small, causal=True, cross=False)
    length, batch = 128, 2
    x = torch.randn(batch, length, width)
    operations = 3 * batch * length * (2 * 12 * width * width + 4 * width * length / 2)
    block(x).sum().backward()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds or rounds < 2:
        block(x).sum().backward()
        rounds += 1
    return rounds * operations / (time.perf_counter() - start)


def plan(config: PlanConfig) -> Plan:
    model_config = config.model
    length = model_config.context if config.length is None else config.length
    if not 0 < length <= model_config.context:
        raise UserError(f"length={length} must lie between 1 and the context {model_config.context}")
    if config.tokens <= 0 or config.micro_batch <= 0:
        raise UserError(f"tokens={config.tokens} and micro_batch={config.micro_batch} must be positive")
    generates = model_config.causal or model_config.decoder_layers > 0
    with torch.device("meta"):
        model = Model(model_config, "next-token" if generates else "bare")
    by_tensor = count_parameters(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    forward = forward_flops_per_token(model_config, by_tensor, length)
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
        activation_bytes=FLOAT * activation_floats(model_config, config.micro_batch, length),
        cache_bytes_per_token=2 * FLOAT * layers * model_config.width,
        flops_per_token_forward=forward,
        flops_per_token_training=3 * forward,
        tokens=config.tokens,
        measured_flops_per_second=measured,
        seconds=seconds,
        dollars=dollars,
    )


# ---- many ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPlan:
    """What each of many ranks holds and sends, in bytes and seconds of one step."""

    ranks: int
    replicas: int  # groups of ranks that each read their own sequences
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int  # whole weights and gradients that shards are put together to while they are used
    activation_bytes: int
    sent_bytes: dict[str, int]  # by one rank in one step
    tokens_per_step: int
    compute_seconds: float
    send_seconds: float  # while it computes, if all goes well
    run_seconds: float
    run_dollars: float
    fits: bool

    @property
    def resident_bytes(self) -> int:
        """What stays all the time: weights, gradients, optimiser."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.gathered_bytes + self.activation_bytes


def plan_ranks(config: PlanConfig, whole: Plan) -> RankPlan:
    """Memory, traffic and time of each rank in this package's own loop: states in float32, products in 16 bits."""
    hardware = hardware_named(config.hardware)
    tensor, ranks = config.tensor_parallel, config.ranks
    if ranks % tensor or config.model.heads % tensor:
        raise UserError(f"tensor_parallel={tensor} must divide ranks={ranks} and heads={config.model.heads}")
    replicas = ranks // tensor
    shards = replicas if config.strategy == "fsdp" else 1
    split, shared = split_counts(config.model, whole.by_tensor)
    held = split // tensor + shared  # weights of one replica's rank before sharding
    resident = FLOAT * -(-held // shards)
    layers = config.model.layers + config.model.decoder_layers
    block = split // tensor // layers
    gathered = 2 * HALF * (shared + 2 * block) if shards > 1 else 0  # weights and gradients; two blocks at a time
    length = config.model.context if config.length is None else config.length
    activations = rank_activations(config, length)
    sent = traffic(config, held, replicas, length)
    tokens = config.micro_batch * length * replicas * config.accumulate
    compute = tokens * whole.flops_per_token_training / (ranks * hardware.teraflops * 1e12 * hardware.reached)
    compute *= 4 / 3 if config.activation_checkpointing else 1
    seconds = send_seconds(config, sent)
    run = max(compute, seconds) * config.tokens / tokens
    total = 4 * resident + gathered + activations
    return RankPlan(
        ranks=ranks,
        replicas=replicas,
        weight_bytes=resident,
        gradient_bytes=resident,
        optimizer_bytes=2 * resident,
        gathered_bytes=gathered,
        activation_bytes=activations,
        sent_bytes=sent,
        tokens_per_step=tokens,
        compute_seconds=compute,
        send_seconds=seconds,
        run_seconds=run,
        run_dollars=run / 3600 * hardware.dollars_per_hour * ranks,
        fits=total <= hardware.memory_gb * 1e9,
    )


def hardware_named(name: str) -> Hardware:
    for hardware in HARDWARE:
        if hardware.name == name:
            return hardware
    raise UserError(f"hardware={name!r} is not known; known: {', '.join(h.name for h in HARDWARE)}")


def send_seconds(config: PlanConfig, sent: dict[str, int]) -> float:
    """Over the fast links where all who exchange something sit in one machine, else over the network."""

    def per_second(ranks: int) -> float:
        return 1e9 * (config.link_gb if ranks <= config.per_node else config.network_gb)

    slow = sent["weights"] + sent["gradients"]
    return slow / per_second(config.ranks) + sent["activations"] / per_second(config.tensor_parallel)


def split_counts(config: ModelConfig, by_tensor: dict[str, int]) -> tuple[int, int]:
    """Parameters that tensor parallelism cuts, and those that every rank of a group holds whole."""
    split = shared = 0
    for name, size in by_tensor.items():
        times = 1
        if "{}" in name:
            times = config.decoder_layers if ".decoder." in name else config.layers
        if re.search(r"inner\.(q|k|v|up)\.(weight|bias)$|inner\.(out|down)\.weight$", name):
            split += size * times
        else:
            shared += size * times
    return split, shared


def rank_activations(config: PlanConfig, length: int) -> int:
    """Bytes kept for the backward: everything, or each block's input and one block in full."""
    model, tokens = config.model, config.micro_batch * length
    full = activation_floats(model, config.micro_batch, length)
    stacks = model.layers + model.decoder_layers
    per_block = (full - tokens * model.width) // stacks
    outside = tokens * model.width * (stacks * 4 if not config.activation_checkpointing else 4)  # not cut by tensors
    if config.activation_checkpointing:
        kept = (
            tokens * model.width * stacks + outside + (per_block - 4 * tokens * model.width) // config.tensor_parallel
        )
    else:
        kept = outside + (full - outside) // config.tensor_parallel
    return HALF * kept


def traffic(config: PlanConfig, held: int, replicas: int, length: int) -> dict[str, int]:
    """Bytes that one rank sends in a step: gathering weights, meeting gradients, and summing inside split blocks."""
    ring = (replicas - 1) / replicas
    weights = gradients = 0.0
    if replicas > 1 and config.strategy == "fsdp":
        weights = 2 * config.accumulate * ring * HALF * held  # for the forward and again for the backward
        gradients = ring * FLOAT * held
    elif replicas > 1:
        gradients = 2 * ring * FLOAT * held
    sums = 4 * (config.model.layers + config.model.decoder_layers)  # two sub-blocks, forward and backward
    pair = 2 * (config.tensor_parallel - 1) / config.tensor_parallel
    activations = sums * pair * HALF * config.micro_batch * length * config.model.width * config.accumulate
    return {"weights": int(weights), "gradients": int(gradients), "activations": int(activations)}


def rank_table(found: RankPlan, config: PlanConfig) -> RenderableType:
    from rich.table import Table

    shape = f"{found.replicas} x {config.tensor_parallel}" if config.tensor_parallel > 1 else f"{found.ranks}"
    title = f"Each of {shape} ranks ({config.strategy}, {config.hardware})"
    rows = Table("per rank", "amount", title=title, show_header=False)
    rows.columns[1].justify = "right"
    for name in ("weight", "gradient", "optimizer", "gathered", "activation"):
        rows.add_row(f"{name} memory", human_bytes(getattr(found, f"{name}_bytes")))
    rows.add_row("in all", human_bytes(found.total_bytes) + ("" if found.fits else ", which does not fit"))
    for name, size in found.sent_bytes.items():
        rows.add_row(f"sends {name}, per step", human_bytes(size))
    rows.add_row("tokens per step", f"{found.tokens_per_step:,}")
    rows.add_row("computes, per step", human_time(found.compute_seconds))
    rows.add_row("sends, per step", human_time(found.send_seconds))
    rows.add_row(f"{config.tokens:,} tokens", f"{human_time(found.run_seconds)}, ${found.run_dollars:,.0f}")
    return rows


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

    length = config.model.context if config.length is None else config.length
    needs = Table("need", "amount", title="Memory and arithmetic", show_header=False)
    needs.columns[1].justify = "right"
    needs.add_row("weights (float32)", human_bytes(plan.weight_bytes))
    needs.add_row("weights (16 bits)", human_bytes(plan.weight_bytes / 2))
    needs.add_row("gradients", human_bytes(plan.gradient_bytes))
    needs.add_row("optimiser (AdamW)", human_bytes(plan.optimizer_bytes))
    needs.add_row(f"activations of {config.micro_batch} x {length} tokens", human_bytes(plan.activation_bytes))
    needs.add_row("training in all", human_bytes(plan.training_bytes))
    needs.add_row("key-value cache per token (float32)", human_bytes(plan.cache_bytes_per_token))
    needs.add_row("operations per token, forward", f"{plan.flops_per_token_forward:.3g}")
    needs.add_row("operations per token, training", f"{plan.flops_per_token_training:.3g}")

    clock = Table("on", "time", "cost", title=f"Training on {plan.tokens:,} tokens")
    clock.columns[1].justify = clock.columns[2].justify = "right"
    for name, seconds in plan.seconds.items():
        cost = f"${plan.dollars[name]:,.2f}" if name in plan.dollars else ""
        rate = f" ({plan.measured_flops_per_second / 1e9:.0f} GFLOP/s measured)" if name == "this machine" else ""
        clock.add_row(name + rate, human_time(seconds), cost)
    return Group(parameters, needs, clock)
