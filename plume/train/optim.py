"""Optimizers and schedules: AdamW with the papers' groups, Muon for matrices, learning rate and batch size."""

# R rows, C columns, G matrices of one shape

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plume.config import ObjectiveConfig, TrainConfig
from plume.train.distribute import Ranks
from plume.train.shared_matrices import SharedWork, local_part

# each row drives singular values nearer to 1; the first rows accept a wider range of them (Polar Express, 2025)
POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
SAFETY = 1.02  # singular values stay so much below the largest that the polynomials accept, beyond which they explode
NO_CORRECTION = 1e7  # a step count at which Adam's bias correction is exactly 1


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values become about 1, (G, R, C) to (G, R, C)."""
    x = matrices
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * SAFETY + 1e-7)
    # of long matrices the small product with themselves is followed through two polynomials, then found anew
    pairs = 2 * x.shape[-2] <= x.shape[-1]
    number = 0
    while number < steps:
        gram = x @ x.mT  # (G, R, R)
        first = polynomial(gram, number)
        number += 1
        if pairs and number < steps:
            first = polynomial(first @ gram @ first, number) @ first
            number += 1
        x = first @ x
    return x if wide else x.mT


def polynomial(gram: Tensor, number: int) -> Tensor:
    """What one row of coefficients multiplies matrices with whose product with themselves is `gram`, (G, R, R)."""
    a, b, c = POLYNOMIALS[number]
    if number + 1 < len(POLYNOMIALS):  # products in bfloat16 come out up to a percent too large
        a, b, c = a / SAFETY, b / SAFETY**3, c / SAFETY**5
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    return factor


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised: every direction of a matrix moves by about the same amount.

    Matrices of one shape are worked on together. Of many ranks each orthogonalises its share of the matrices.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        iterations: int = 5,
        dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(params), defaults)
        self.iterations, self.dtype = iterations, dtype
        self.shared = SharedWork(ranks) if ranks is not None and ranks.many else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrices in same_shape(group["params"]):
                self.move(matrices, group)

    def move(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        rows, columns = matrices[0].shape
        scale = -group["lr"] * math.sqrt(max(1.0, rows / columns))
        weights = [local_part(p) for p in matrices]
        gradients = [local_part(p.grad) for p in matrices if p.grad is not None]
        buffers = [local_part(self.state[p]["momentum"]) for p in matrices]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])  # Nesterov's look ahead
        updates = [update.to(self.dtype) for update in ahead]
        work = partial(orthogonalise, steps=self.iterations)
        shared = self.shared
        moved = list(work(torch.stack(updates))) if shared is None else shared.run(work, matrices, updates)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, [update.to(weights[0].dtype) for update in moved], alpha=scale)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors in groups that torch can work on together: those cut over the same ranks."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all tensors as one long vector."""
    norms = [float(whole(nn.utils.get_total_norm(group))) for group in same_mesh(tensors)]
    return math.hypot(*norms)


def same_shape(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    groups: dict[torch.Size, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            groups.setdefault(p.shape, []).append(p)
    yield from groups.values()


class Optimizers:
    """The optimisers of one model as one: rates by step, state by parameter name."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        lr_scale: Callable[[str], float] = lambda name: 1.0,
        ranks: Ranks | None = None,
        products: torch.dtype = torch.float32,
    ) -> None:
        """`lr_scale` multiplies the learning rate of a parameter, by its name; `products` are Muon's, on a CPU."""
        self.names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.parts: list[torch.optim.Optimizer] = []
        matrices = [p for p, name in self.names.items() if config.optimizer == "muon" and is_inner_matrix(name, p)]
        rest = {p: name for p, name in self.names.items() if p not in set(matrices)}
        self.parts.append(adamw(rest, config, lr_scale))
        if matrices:
            decay = config.weight_decay if config.muon_weight_decay is None else config.muon_weight_decay
            muon = Muon(
                matrices,
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                weight_decay=decay,
                iterations=config.muon_iterations,
                ranks=ranks,
            )
            for p in matrices:
                muon.state[p] = {"momentum": torch.zeros_like(p)}
            self.parts.append(muon)
        self.multiply_in(products)
        self.peaks = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def multiply_in(self, products: torch.dtype) -> None:
        """The dtype of Muon's matrix products, on a CPU; on a GPU it is bfloat16."""
        on_gpu = any(p.device.type == "cuda" for p in self.names)
        for part in self.parts:
            if isinstance(part, Muon):
                part.dtype = torch.bfloat16 if on_gpu else products

    def step(self, scale: float) -> None:
        """One update at this fraction of the peak rates."""
        for part, peaks in zip(self.parts, self.peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
            part.step()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.names if p.grad is not None]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of state under the name of its parameter; the same tensors, so loading writes into them."""
        return {
            f"{self.names[p]}/{slot}": tensor
            for part in self.parts
            for p, slots in part.state.items()
            for slot, tensor in slots.items()
        }


def is_inner_matrix(name: str, p: Tensor) -> bool:
    return p.ndim == 2 and ".blocks." in name


def adamw(names: Mapping[Tensor, str], config: TrainConfig, lr_scale: Callable[[str], float]) -> torch.optim.Optimizer:
    """AdamW: no decay on biases and norms, nor on embeddings unless asked."""

    def decays(p: Tensor) -> bool:
        table = ".embed." in names[p] or names[p].endswith(".output.weight")
        return p.ndim >= 2 and (config.decay_embeddings or not table)

    alike: dict[tuple[float, float], list[Tensor]] = {}
    for p, name in names.items():
        alike.setdefault((config.lr * lr_scale(name), config.weight_decay if decays(p) else 0.0), []).append(p)
    groups = [
        {"params": together, "lr": lr, "weight_decay": decay}
        for (lr, decay), params in alike.items()
        for together in same_mesh(params)
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in names)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
    for p in names:
        begun = torch.tensor(0.0 if config.bias_correction else NO_CORRECTION, device=p.device if fused else "cpu")
        optimizer.state[p] = {"step": begun, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


# ---- schedules ---------------------------------------------------------------------------------------------------


def rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0, as a fraction of its peak."""
    warmup = config.warmup_steps
    if config.schedule == "inverse-sqrt":  # the Transformer's: its peak is where the warm-up ends
        return min((step + 1) / max(warmup, 1), math.sqrt(max(warmup, 1) / (step + 1)))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    end = config.steps if config.decay_steps is None else config.decay_steps
    if config.schedule == "constant-then-decay":
        length = max(1, round(end * config.cooldown_fraction))
        share = min(1.0, max(0.0, (step - (end - length)) / length))
    else:
        share = min(1.0, (step - warmup) / max(1, end - warmup))
    match config.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return config.final_lr_ratio + (1 - config.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * share))
        case _:
            return config.final_lr_ratio + (1 - config.final_lr_ratio) * (1 - share)


def batch_rows(step: int, config: TrainConfig) -> int:
    """Sequences in the batch of a step: constant, or growing evenly from `batch_start` as GPT-3's."""
    if config.batch_start is None or step >= config.batch_ramp_steps:
        return config.batch
    return config.batch_start + (config.batch - config.batch_start) * step // config.batch_ramp_steps


def rows_before(step: int, config: TrainConfig) -> int:
    """Sequences used by all steps before this one."""
    if config.batch_start is None:
        return step * config.batch
    ramp = ramp_totals(config)
    ramped = min(step, config.batch_ramp_steps)
    return ramp[ramped] + (step - ramped) * config.batch


def short_rows(objective: ObjectiveConfig, config: TrainConfig) -> list[tuple[int, int]]:
    """Sequences of the first steps that are shorter: how many, and how long, phase by phase."""
    part = objective.short_fraction * config.steps / max(1, len(objective.short_lengths))
    borders = [rows_before(round(part * number), config) for number in range(len(objective.short_lengths) + 1)]
    return [(borders[n + 1] - borders[n], length) for n, length in enumerate(objective.short_lengths)]


@cache
def ramp_totals(config: TrainConfig) -> list[int]:
    """Sequences used before each step of the ramp, and after it."""
    return list(accumulate((batch_rows(step, config) for step in range(config.batch_ramp_steps)), initial=0))
