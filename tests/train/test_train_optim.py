"""Optimisers against written-out loops and the SVD; schedules against the papers' formulas."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from families import FAMILIES, random_model
from torch import nn

from plume.config import ObjectiveConfig, TrainConfig, UserError
from plume.model.heads import Model
from plume.train.optim import Muon, Optimizers, batch_rows, orthogonalise, rate, rows_before, short_rows, total_norm


def fill_gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bias_correction", [True, False])
def test_adamw_is_the_written_out_loop(bias_correction: bool) -> None:
    config = TrainConfig(
        steps=5, lr=0.01, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, bias_correction=bias_correction
    )
    model = random_model(FAMILIES["bert"], "pretraining")
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in expected.items()}
    v = {name: torch.zeros_like(p) for name, p in expected.items()}
    optimizers = Optimizers(model, config)
    for step in range(1, 4):
        gradients = fill_gradients(model, step)
        optimizers.step(0.5)
        for name, p in expected.items():
            g = gradients[name]
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g * g
            first, second = (1 - 0.8**step, 1 - 0.9**step) if bias_correction else (1.0, 1.0)
            if name.endswith("weight") and "norm" not in name:  # neither biases nor norms decay
                p *= 1 - 0.005 * 0.1
            p -= 0.005 * (m[name] / first) / ((v[name] / second).sqrt() + 1e-3)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_decay_only_when_asked(tied: bool) -> None:
    for decay, shrinks in ((True, True), (False, False)):
        model = random_model(replace(FAMILIES["gpt2"], tie_embeddings=tied))
        before = model.table.detach().clone()
        config = TrainConfig(steps=1, lr=0.1, weight_decay=0.5, decay_embeddings=decay)
        optimizers = Optimizers(model, config)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizers.step(1.0)
        assert torch.allclose(model.table, before * 0.95) == shrinks
        assert torch.equal(model.table, before) != shrinks


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    model = random_model(FAMILIES["gpt2"])
    adam, muon = Optimizers(model, TrainConfig(steps=1, optimizer="muon")).parts
    names = {p: name for name, p in model.named_parameters()}
    in_muon = {names[p] for group in muon.param_groups for p in group["params"]}
    in_adam = {names[p] for group in adam.param_groups for p in group["params"]}
    assert in_muon == {n for n, p in model.named_parameters() if ".blocks." in n and p.ndim == 2}
    assert in_muon.isdisjoint(in_adam) and in_muon | in_adam == set(names.values())


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_orthogonalise_is_near_the_polar_factor(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    ours = orthogonalise(matrices, 5)
    values = torch.linalg.svdvals(ours)
    assert values.min() > 0.8 and values.max() < 1.2
    assert torch.linalg.matrix_norm(ours - u @ vh, ord=2).max() < 0.25  # the same directions, not only the same sizes


def test_matrices_together_move_as_each_alone() -> None:
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(8, 16)) for _ in range(3)]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    optimizers = [Muon(together, lr=0.1), *(Muon([p], lr=0.1) for p in alone)]
    for optimizer in optimizers:
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p] = {"momentum": torch.zeros_like(p)}
    for step in range(2):
        torch.manual_seed(step)
        for a, b in zip(together, alone, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b)


def test_total_norm_is_that_of_one_long_vector() -> None:
    parts = [torch.randn(3, 4), torch.randn(5)]
    assert total_norm(parts) == pytest.approx(float(torch.cat([p.flatten() for p in parts]).norm()))


def rates(config: TrainConfig) -> list[float]:
    return [rate(step, config) for step in range(config.steps)]


def test_cosine_and_linear() -> None:
    cosine = rates(TrainConfig(steps=101, warmup_steps=0, schedule="cosine", final_lr_ratio=0.1))
    assert cosine[0] == 1.0 and cosine[50] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 50 / 101)))
    linear = rates(TrainConfig(steps=100, warmup_steps=20, schedule="linear", final_lr_ratio=0.0))
    assert linear[:20] == pytest.approx([(s + 1) / 21 for s in range(20)])
    assert linear[20] == 1.0 and linear[60] == pytest.approx(0.5)


def test_gpt3_decays_over_a_part_and_then_stays() -> None:
    config = TrainConfig(steps=300, warmup_steps=0, schedule="cosine", final_lr_ratio=0.1, decay_steps=260)
    assert rate(259, config) > 0.1 and rate(260, config) == pytest.approx(0.1) == rate(299, config)


def test_the_transformers_rate_is_the_papers() -> None:
    width, warmup = 512, 4000
    peak = width**-0.5 * warmup**-0.5
    config = TrainConfig(steps=100_000, warmup_steps=warmup, schedule="inverse-sqrt", lr=peak)
    for step in (1, 100, 4000, 4001, 50_000):
        paper = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert peak * rate(step - 1, config) == pytest.approx(paper)


def test_constant_then_decay() -> None:
    config = TrainConfig(steps=100, schedule="constant-then-decay", cooldown_fraction=0.2, final_lr_ratio=0.0)
    assert (
        rate(80, config) == 1.0 and rate(90, config) == pytest.approx(0.5) and rate(99, config) == pytest.approx(0.05)
    )


def test_the_batch_grows_and_no_sample_is_used_twice() -> None:
    config = TrainConfig(steps=50, batch=32, batch_start=4, batch_ramp_steps=20)
    sizes = [batch_rows(step, config) for step in range(50)]
    assert sizes[0] == 4 and sizes[10] == 18 and sizes[20:] == [32] * 30 and sizes == sorted(sizes)
    assert [rows_before(step, config) for step in range(50)] == [sum(sizes[:step]) for step in range(50)]


def test_wrong_settings_are_told_together() -> None:
    with pytest.raises(UserError, match=r"steps=0 .*; lr=-1.0 .*; warmup_steps=-5"):
        TrainConfig(steps=0, lr=-1.0, warmup_steps=-5)


def test_shares_of_the_rate_by_name() -> None:
    model = Model(FAMILIES["gpt2"])
    optimizers = Optimizers(model, TrainConfig(steps=1, lr=0.1), lambda name: 0.5 if "blocks.0" in name else 1.0)
    rates_of = {p: group["lr"] for group in optimizers.parts[0].param_groups for p in group["params"]}
    assert all(rates_of[p] == (0.05 if "blocks.0" in n else 0.1) for n, p in model.named_parameters())


@pytest.mark.parametrize(("lengths", "fraction"), [((8,), 0.9), ((8, 16), 0.6), ((4, 8, 16), 0.9), ((), 0.9)])
def test_short_sequences_are_those_of_the_first_steps(lengths: tuple[int, ...], fraction: float) -> None:
    config = TrainConfig(steps=50, batch=6, batch_start=2, batch_ramp_steps=20)
    expected = dict.fromkeys(lengths, 0)
    for step in range(round(fraction * config.steps) if lengths else 0):
        share = step / (fraction * config.steps)
        expected[lengths[int(share * len(lengths) + 1e-9)]] += batch_rows(step, config)
    objective = ObjectiveConfig(short_lengths=lengths, short_fraction=fraction)
    assert short_rows(objective, config) == [(rows, length) for length, rows in expected.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ill_conditioned_matrices_are_orthogonalised_in_any_precision(dtype: torch.dtype) -> None:
    """Gradients are: in bfloat16 their largest singular values once grew beyond all bounds."""
    torch.manual_seed(0)
    for rows, columns, decay in product((32, 64), (64, 256), (1, 2, 4, 8)):
        (u, _), (v, _) = (torch.linalg.qr(torch.randn(4, size, rows)) for size in (rows, columns))
        given = (u * torch.logspace(0, -decay, rows)) @ v.mT
        values = torch.linalg.svdvals(orthogonalise(given.to(dtype), steps=5).float())
        assert values.max() < 1.25 and (values > 0.5).float().mean() > 0.35


def test_muon_multiplies_in_the_precision_of_training() -> None:
    """In bfloat16 too the update of a matrix is as good as orthogonal."""
    config = TrainConfig(steps=1, optimizer="muon", muon_lr=1.0, weight_decay=0.0)
    for products in (torch.float32, torch.bfloat16):
        model = random_model(FAMILIES["gpt2"])
        optimizers = Optimizers(model, config, products=products)
        assert optimizers.parts[1].dtype is products  # type: ignore[attr-defined]
        up = model.body.blocks[0].mlp.inner.up.weight  # (F, D)
        before = up.detach().clone()
        up.grad = torch.randn_like(up)
        optimizers.step(1.0)
        moved = torch.linalg.svdvals(up.detach() - before) / math.sqrt(up.shape[0] / up.shape[1])
        assert moved.min() > 0.6 and moved.max() < 1.3
