"""The compiled training step against autograd in float64, and where it must stand aside."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, random_model
from toys import toy_trainer

from plume.config import AdaptConfig, TrainConfig
from plume.model.heads import Model
from plume.model.transformer import attention_mask
from plume.train import fused
from plume.train.adapt import add_lora
from plume.train.fused_softmax import compiled_softmax

PADDED = torch.tensor([32, 7, 19])


def gradients(model: Model, tokens: torch.Tensor, lengths: torch.Tensor | None) -> dict[str, torch.Tensor]:
    model.zero_grad()
    hidden = model.body(tokens, lengths=lengths)
    weights = torch.arange(hidden.numel(), dtype=hidden.dtype).sin().view_as(hidden)
    if lengths is not None:
        weights = weights * (torch.arange(hidden.shape[1]) < lengths[:, None])[:, :, None]
    (hidden * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in model.body.named_parameters() if p.grad is not None}
    return found | {"hidden": hidden.detach()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("family", "lengths", "length"),
    [
        ("gpt2", None, 32),
        ("gpt2", None, 5),
        ("openai-gpt", None, 32),
        ("bert", None, 32),
        ("bert", PADDED, 32),
        ("gpt2-narrow-mlp", None, 32),
        ("gpt2", None, 150),  # more than a block of queries, and neither whole blocks nor whole vectors
        ("bert", torch.tensor([150, 66, 1]), 150),
    ],
)
def test_gradients_are_those_of_autograd_in_float64(
    family: str, lengths: torch.Tensor | None, length: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(FAMILIES[family], context=max(length, FAMILIES[family].context))
    model = random_model(config, "next-token" if config.causal else "masked-token").train()
    tokens = torch.randint(0, 61, (3, length))
    expected = gradients(copy.deepcopy(model).double(), tokens, lengths)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    fused.fuse(model)
    for plain in (fused.MLP, fused.Attention):
        monkeypatch.setattr(plain, "forward", None)  # what falls back would fail
    try:
        found = gradients(model, tokens, lengths)
    finally:
        torch.set_num_threads(before)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        size = float(expected[name].abs().max())
        torch.testing.assert_close(gradient.double(), expected[name], rtol=0, atol=1e-5 * max(size, 1), msg=name)


SHORT_ROWS = """
import torch
from plume.config import ModelConfig
from plume.model.heads import Model
from plume.train.fused import fuse
torch.manual_seed(0)
config = ModelConfig(vocab_size=9, context=8, layers=1, heads=1, width=16, dropout=0.0)
model, tokens = Model(config, "next-token").train(), torch.randint(0, 9, (2, 5))
expected = model.body(tokens)
fuse(model)
torch.testing.assert_close(model.body(tokens), expected)
"""


def test_code_from_the_cache_computes_what_it_did_when_it_was_compiled(tmp_path: Path) -> None:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    for _ in ("compiles", "loads"):
        done = subprocess.run([sys.executable, "-c", SHORT_ROWS], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("family", "lengths"), [("gpt2", None), ("openai-gpt", None), ("bert", PADDED)])
def test_products_in_bfloat16_are_as_near_as_those_of_autocast(
    family: str, lengths: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FAMILIES[family]
    model = random_model(config, "next-token" if config.causal else "masked-token").train()
    tokens = torch.randint(0, 61, (3, 32))
    exact = gradients(copy.deepcopy(model).double(), tokens, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(model, tokens, lengths)
        fused.fuse(model)
        for part in (fused.MLP, fused.Attention):
            monkeypatch.setattr(part, "forward", None)  # what falls back would fail
        found = gradients(model, tokens, lengths)
    names = [name for name in exact if not name.endswith("k.bias")]  # whose gradient is 0
    errors = [[float((each[n] - exact[n]).norm() / exact[n].norm()) for n in names] for each in (plain, found)]
    assert 0 < sum(errors[1]) < 1.05 * sum(errors[0])
    assert all(gradient.dtype == torch.float32 for gradient in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_do_not_change_a_bit(dtype: torch.dtype) -> None:
    """The jobs alone: matrix products of torch may be cut differently."""
    x, bias, given = torch.randn(300, 48).to(dtype), torch.randn(48), torch.randn(300, 48).to(dtype)
    numbers, before, found = (300, 48, 1, int(dtype == torch.bfloat16)), torch.get_num_threads(), []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        y, slope, sums = torch.empty_like(x), given.clone(), torch.zeros(fused.parts_of(300), 48)
        fused.gelu_job(len(sums), *numbers, x, bias, y, fused.memory_of_threads(48))
        fused.slope_job(len(sums), *numbers, x, bias, slope, sums, fused.memory_of_threads(96))
        found.append(torch.cat([slope.float(), y.float(), sums]))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
    torch.testing.assert_close(y, F.gelu(x.float() + bias, approximate="tanh").to(dtype))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_the_softmax_is_torchs(dtype: torch.dtype, close: float, raises: bool, smoothing: float) -> None:
    torch.manual_seed(0)
    logits, y = (4 * torch.randn(21, 300)).to(dtype), torch.randint(300, (21,))
    raised = torch.randn(21) if raises else None
    exact = logits.double().requires_grad_()
    shift = torch.zeros_like(exact) if raised is None else F.one_hot(y, 300) * raised.double()[:, None]
    expected = F.cross_entropy(exact + shift, y, reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    losses, gradient = compiled_softmax(logits, y, raised, smoothing)
    assert gradient.dtype is dtype and exact.grad is not None
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=close, atol=close)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_the_softmax_keeps_what_is_not_finite(broken: float) -> None:
    logits = torch.randn(3, 40)
    logits[1, 7] = broken
    losses, _ = compiled_softmax(logits, torch.tensor([1, 2, 3]), None, 0.0)
    assert losses.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("case", ["eval", "no gradients", "dropout", "documents", "hook", "lora", "relu", "long"])
def test_it_stands_aside_where_it_would_not_compute_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(FAMILIES["transformer-decoder" if case == "relu" else "gpt2"], dropout=0.1 * (case == "dropout"))
    model = random_model(config).train(case != "eval")
    if case == "lora":
        add_lora(model, AdaptConfig(mode="lora", lora_rank=2, lora_modules=("q", "up")), 0)
    attention, mlp = model.body.blocks[0].attn.inner, model.body.blocks[0].mlp.inner
    if case == "hook":
        attention.k.register_forward_hook(lambda part, args, out: 2 * out)
    mask = attention_mask(0, 32, causal=True, device=torch.device("cpu"), documents=torch.arange(32)[None] // 20)
    x, mask = torch.randn(2, 32, 16), mask if case == "documents" else None
    monkeypatch.setattr(fused, "LONGEST", 31 if case == "long" else 1024)
    monkeypatch.setattr(fused.FusedMLP, "apply", None)
    monkeypatch.setattr(fused.FusedAttention, "apply", None)  # calling it would fail
    with torch.set_grad_enabled(case != "no gradients"):
        for forward, part, args in ((fused.attention_forward, attention, (x, mask)), (fused.mlp_forward, mlp, (x,))):
            same = case in (("relu",) if part is attention else ("dropout", "documents", "hook", "long"))
            if same:
                with pytest.raises(TypeError):
                    forward(part, *args)
                continue
            torch.manual_seed(0)
            found = forward(part, *args)
            torch.manual_seed(0)
            assert torch.equal(found, type(part).forward(part, *args))


def test_the_loop_uses_it(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, TrainConfig(steps=2, batch=4, device="cpu"))
    parts = [part for part in trainer.task.model.modules() if isinstance(part, fused.MLP | fused.Attention)]
    assert parts and all("forward" in vars(part) for part in parts)
