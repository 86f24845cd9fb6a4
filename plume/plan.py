"""What a run needs before it is started: parameters, memory, arithmetic, time and money."""

# B sequences per step, T tokens per sequence, D model width, H heads, L layers, V vocabulary

from __future__ import annotations

import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from plume.config import (
    PRESETS,
    CallableModule,
    ModelConfig,
    PlanConfig,
    PretrainConfig,
    UserError,
    build,
    did_you_mean,
    find_recipe,
    takes_fields,
)
from plume.model.heads import Model
from plume.model.transformer import Block
from plume.model.unfilled import unfilled
from plume.util.devices import best_seconds, forward_flops_per_token, memory_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

FLOAT = 4  # bytes
BYTES = {"auto": 2, "bfloat16": 2, "float32": FLOAT}  # of a number in products


@dataclass(frozen=True)
class Hardware:
    """Of one device: peak rate in 16 bits, memory, share of the peak that training reaches; price of all per hour."""

    name: str
    teraflops: float
    memory_gb: float
    reached: float
    dollars_per_hour: float
    devices: int = 1

    @property
    def flops_per_second(self) -> float:
        """Of all devices, in training."""
        return self.devices * self.teraflops * 1e12 * self.reached

    def fits(self, state_bytes: int, activation_bytes: int) -> bool:
        """Whether training fits, with weights, gradients and optimizer sharded over the devices."""
        return state_bytes / self.devices + activation_bytes <= self.memory_gb * 1e9


HARDWARE = [  # peaks and memory from the makers' data sheets; the share reached and the rent are round assumptions
    Hardware("T4", 65, 16, 0.30, 0.35),
    Hardware("RTX 4090", 165, 24, 0.40, 0.40),
    Hardware("A100 80GB", 312, 80, 0.45, 1.50),
    Hardware("H100 SXM", 989, 80, 0.40, 2.50),
    Hardware("8 x A100 80GB", 312, 80, 0.43, 12.0, devices=8),
    Hardware("8 x H100 SXM", 989, 80, 0.38, 20.0, devices=8),
]
OWN_REACHED = 0.4  # share of its peak that a device of the user's own is taken to reach


@dataclass(frozen=True)
class Plan:
    """Everything in plain numbers: bytes, floating-point operations, seconds."""

    name: str
    parameters: int
    by_tensor: dict[str, int]  # one layer stands for all: names with {} count once per layer
    shapes: dict[str, tuple[int, ...]]
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
    fits: dict[str, bool]

    @property
    def state_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def training_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "training_bytes": self.training_bytes}


# models that Plume does not build, for comparison: parameters and what they are
PUBLISHED = {"elmo": (93_600_000, "2 layers of LSTMs in both directions, 4096 units projected to 512, over characters")}


def plan_fields(name: str) -> dict[str, Any]:
    """Where a plan starts from: a preset, or the model and training of a recipe or a run folder."""
    if name in PRESETS:
        return {"name": name, "model": {"preset": name}}
    if not Path(name).exists() and (hint := did_you_mean(name, PRESETS)):
        raise UserError(f"there is no preset, recipe or run folder {name!r}{hint}")
    table, origin = find_recipe(name)
    for key, other in (("task", "fine-tuning"), ("teacher", "distillation")):
        if key in table:
            raise UserError(f"{origin} is the recipe of a {other}; a plan is of a preset or of a pretraining")
    recipe = build(PretrainConfig, table, origin=origin)
    length = recipe.model.context if recipe.objective.length is None else recipe.objective.length
    micro = min(recipe.train.batch, 8) if recipe.train.micro_batch is None else recipe.train.micro_batch
    return {
        "name": name,
        "model": asdict(recipe.model),
        "tokens": tokens_of(recipe, length),
        "micro_batch": micro,
        "length": length,
        "tensor_parallel": recipe.train.tensor_parallel,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "precision": recipe.train.precision,
    }


def tokens_of(recipe: PretrainConfig, length: int) -> int:
    """Of all steps: batches may grow, and the first ones may be shorter."""
    from plume.train.optim import rows_before, short_rows

    less = sum(rows * (length - short) for rows, short in short_rows(recipe.objective, recipe.train))
    return rows_before(recipe.train.steps, recipe.train) * length - less


def tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor, the layers' own ones under one name with {} for the layer's number."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        shapes.setdefault(re.sub(r"blocks\.\d+\.", "blocks.{}.", name), tuple(parameter.shape))
    return shapes


def activation_floats(config: ModelConfig, batch: int, length: int) -> int:
    """What the forward pass keeps for the backward pass, without activation checkpointing and with chunked logits.

    Per token and layer: what goes into and comes out of the norms, q, k, v, the attention's result, the MLP's two inner
    tensors. Dropout keeps its masks, and on a CPU it makes attention keep its weights too.
    """
    width, inner = config.width, config.ffn_width
    per_layer = 8 * width + 2 * inner + config.heads
    if config.dropout:
        per_layer += 2 * width + 3 * config.heads * length
    if config.recurrent:  # gates, cells, inputs and outputs, and what the kernel keeps of them again
        per_layer = (18 if config.dropout else 17) * width
    stacks = config.layers + config.decoder_layers
    return batch * length * (stacks * per_layer + (2 if config.dropout else 1) * width)


def measure_block(config: ModelConfig, seconds: float = 0.5) -> float:
    """FLOP/s that this machine reaches in the forward and backward pass of one such block."""
    width = max(min(config.width, 768) // config.heads, 1) * config.heads
    small = ModelConfig(
        vocab_size=1, context=256, layers=1, heads=config.heads, width=width, mlp_width=4 * width, dropout=0.0
    )
    block = Block(small, causal=True, cross=False)
    length, batch = 128, 2
    x = torch.randn(batch, length, width)
    operations = 3 * batch * length * (2 * 12 * width * width + 4 * width * length / 2)
    return operations / best_seconds(lambda: block(x).sum().backward(), seconds, rounds=3)


def length_of(config: PlanConfig) -> int:
    return config.model.context if config.length is None else config.length


def checked_length(config: PlanConfig) -> int:
    """The sequence length, once the numbers of a plan are possible."""
    length = length_of(config)
    if not 0 < length <= config.model.context:
        raise UserError(f"length={length} must lie between 1 and the context {config.model.context}")
    return length


@takes_fields(PlanConfig)
def plan(config: PlanConfig) -> Plan:
    """Parameters, memory, FLOPs, time and cost of a model before a run."""
    model_config, length = config.model, checked_length(config)
    generates = model_config.causal or model_config.decoder_layers > 0
    model = unfilled(model_config, "next-token" if generates else "bare")
    shapes = tensor_shapes(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    forward = forward_flops_per_token(model_config, length)
    measured = measure_block(model_config)
    here = Hardware("this machine", measured / 1e12, memory_bytes(torch.device("cpu")) / 1e9, 1.0, 0.0)
    activations = FLOAT * activation_floats(model_config, config.micro_batch, length)
    own = own_hardware(config)
    known = [here, *HARDWARE] if own is None else [here, own, *HARDWARE]
    seconds = {each.name: 3 * forward * config.tokens / each.flops_per_second for each in known}
    fits = {each.name: each.fits(4 * FLOAT * total, activations) for each in known}
    dollars = {each.name: seconds[each.name] / 3600 * each.dollars_per_hour for each in known[1:]}
    layers = model_config.decoder_layers if model_config.decoder_layers else model_config.layers
    return Plan(
        name=config.name,
        parameters=total,
        by_tensor={name: math.prod(shape) for name, shape in shapes.items()},
        shapes=shapes,
        layers=model_config.layers,
        weight_bytes=FLOAT * total,
        gradient_bytes=FLOAT * total,
        optimizer_bytes=2 * FLOAT * total,
        activation_bytes=activations,
        cache_bytes_per_token=2 * FLOAT * layers * model_config.width,
        flops_per_token_forward=forward,
        flops_per_token_training=3 * forward,
        tokens=config.tokens,
        measured_flops_per_second=measured,
        seconds=seconds,
        dollars=dollars,
        fits=fits,
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
    """Memory, traffic and time of each rank in this package's own loop: states in float32, products as configured."""
    hardware = hardware_of(config)
    tensor, ranks = config.tensor_parallel, config.ranks
    if ranks % tensor or config.model.heads % tensor:
        raise UserError(f"tensor_parallel={tensor} must divide ranks={ranks} and heads={config.model.heads}")
    replicas = ranks // tensor
    shards = replicas if config.strategy == "fsdp" else 1
    split, tables, shared = split_counts(config, whole.by_tensor)
    root = tables // tensor + shared  # what is gathered from the first block to the last, in float32
    held = split // tensor + root  # weights of one replica's rank before sharding
    resident = FLOAT * -(-held // shards)
    block = BYTES[config.precision] * (split // tensor // (config.model.layers + config.model.decoder_layers))
    gathered = 2 * (FLOAT * root + 2 * block) if shards > 1 else 0  # weights and gradients; two blocks at a time
    length = length_of(config)
    activations = rank_activations(config, length)
    sent = traffic(config, held, replicas, length)
    tokens = config.micro_batch * length * replicas * config.accumulation_steps
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


def own_hardware(config: PlanConfig) -> Hardware | None:
    """The device that the user describes."""
    if config.tflops is None or config.memory_gb is None:
        return None
    price = 0.0 if config.dollars_per_hour is None else config.dollars_per_hour
    name = "your device" if config.hardware in {known.name for known in HARDWARE} else config.hardware
    return Hardware(name, config.tflops, config.memory_gb, OWN_REACHED, price)


def hardware_of(config: PlanConfig) -> Hardware:
    """The device of each rank: the user's own, or one of the table; a node of several devices is no rank."""
    if (own := own_hardware(config)) is not None:
        return own
    for hardware in HARDWARE:
        if hardware.name == config.hardware and hardware.devices == 1:
            return hardware
    known = ", ".join(h.name for h in HARDWARE if h.devices == 1)
    raise UserError(
        f"hardware={config.hardware!r} is not known as one device; known: {known}; "
        "--tflops and --memory-gb describe another"
    )


def send_seconds(config: PlanConfig, sent: dict[str, int]) -> float:
    """Over the fast links where all who exchange something sit in one machine, else over the network."""

    def per_second(ranks: int) -> float:
        return 1e9 * (config.node_bandwidth_gb if ranks <= config.ranks_per_node else config.network_bandwidth_gb)

    slow = sent["weights"] + sent["gradients"]
    return slow / per_second(config.ranks) + sent["activations"] / per_second(config.tensor_parallel)


def split_counts(config: PlanConfig, by_tensor: dict[str, int]) -> tuple[int, int, int]:
    """Parameters of blocks and of token tables that tensor parallelism cuts, and of what all ranks of a group hold."""
    split = tables = shared = 0
    even = splits_tables(config)
    for name, size in by_tensor.items():
        times = copies(config, name)
        if re.search(r"inner\.(q|k|v|up)\.(weight|bias)$|inner\.(out|down)\.weight$", name):
            split += size * times
        elif even and name.endswith(("embed.tokens.weight", "head.output.weight")):
            tables += size
        else:
            shared += size * times
    return split, tables, shared


def copies(config: PlanConfig, name: str) -> int:
    """How many tensors a name stands for: one, or one per layer."""
    if "{}" not in name:
        return 1
    return config.model.decoder_layers if ".decoder." in name else config.model.layers


def splits_tables(config: PlanConfig) -> bool:
    """Whether tensor-parallel ranks share the token table; else each holds all of it."""
    return config.tensor_parallel > 1 and config.model.table_rows % config.ranks == 0


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
    return BYTES[config.precision] * kept


def traffic(config: PlanConfig, held: int, replicas: int, length: int) -> dict[str, int]:
    """Bytes that one rank sends in a step: gathering weights, meeting gradients, and summing inside split blocks."""
    ring = (replicas - 1) / replicas
    product, weights, gradients = BYTES[config.precision], 0.0, 0.0
    if replicas > 1 and config.strategy == "fsdp":
        weights = 2 * config.accumulation_steps * ring * product * held  # for the forward and again for the backward
        gradients = ring * FLOAT * held
    elif replicas > 1:
        gradients = 2 * ring * FLOAT * held
    sums = 4 * (config.model.layers + config.model.decoder_layers)  # two sub-blocks, forward and backward
    sums += 2 * splits_tables(config)  # the embeddings, and the gradient behind the output
    pair = 2 * (config.tensor_parallel - 1) / config.tensor_parallel
    activations = sums * pair * product * config.micro_batch * length * config.model.width * config.accumulation_steps
    return {"weights": int(weights), "gradients": int(gradients), "activations": int(activations)}


def rank_table(found: RankPlan, config: PlanConfig) -> RenderableType:
    from rich.table import Table

    shape = f"{found.replicas} x {config.tensor_parallel}" if config.tensor_parallel > 1 else f"{found.ranks}"
    title = f"Each of {shape} ranks ({config.strategy}, {hardware_of(config).name})"
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
    cost = f", ${found.run_dollars:,.0f}" if found.run_dollars else ""  # none where no price is known
    rows.add_row(f"{config.tokens:,} tokens", human_time(found.run_seconds) + cost)
    return rows


# ---- for people ---------------------------------------------------------------------------------------------------


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:  # which three digits would round up
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{three_digits(count)} TB"


def human_time(seconds: float) -> str:
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{three_digits(seconds / length)} {unit}"
    return f"{seconds:.3g} s"


def three_digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def table(plan: Plan, config: PlanConfig) -> RenderableType:
    from rich.console import Group
    from rich.table import Column, Table

    title = f"{plan.name}: {plan.parameters:,} parameters"
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("shape", "parameters", "times", "in all"))
    parameters = Table(Column("tensor", overflow="fold"), *numbers, title=title)
    for name, size in plan.by_tensor.items():
        times = copies(config, name)
        shape = " x ".join(map(str, plan.shapes[name]))
        parameters.add_row(name.removeprefix("body."), shape, f"{size:,}", f"{times}", f"{size * times:,}")
    per_block = sum(size for name, size in plan.by_tensor.items() if "{}" in name and ".decoder." not in name)
    parameters.add_section()
    parameters.add_row("one block", "", f"{per_block:,}", f"{plan.layers}", f"{per_block * plan.layers:,}")

    length = length_of(config)
    needs = Table("need", "amount", title="Memory and arithmetic", show_header=False)
    needs.columns[1].justify = "right"
    needs.add_row("weights (float32)", human_bytes(plan.weight_bytes))
    needs.add_row("weights (16 bits)", human_bytes(plan.weight_bytes / 2))
    needs.add_row("gradients", human_bytes(plan.gradient_bytes))
    needs.add_row("optimizer (AdamW)", human_bytes(plan.optimizer_bytes))
    needs.add_row(f"activations of {config.micro_batch} x {length} tokens", human_bytes(plan.activation_bytes))
    needs.add_row("training, total", human_bytes(plan.training_bytes))
    needs.add_row("key-value cache per token (float32)", human_bytes(plan.cache_bytes_per_token))
    needs.add_row("FLOPs per token, forward", f"{plan.flops_per_token_forward:.3g}")
    needs.add_row("FLOPs per token, training", f"{plan.flops_per_token_training:.3g}")

    clock = Table("on", "time", "cost", "memory", title=f"Training on {plan.tokens:,} tokens")
    clock.columns[1].justify = clock.columns[2].justify = "right"
    for name, seconds in plan.seconds.items():
        cost = f"${plan.dollars[name]:,.2f}" if plan.dollars.get(name) else ""
        rate = f" ({plan.measured_flops_per_second / 1e9:.0f} GFLOP/s measured)" if name == "this machine" else ""
        memory = "" if plan.fits[name] else "does not fit"
        clock.add_row(name + rate, human_time(seconds), cost, memory)
    return Group(parameters, needs, clock)


sys.modules[__name__].__class__ = CallableModule  # plume.plan(...) is this module and its function
