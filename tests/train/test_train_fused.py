"""The compiled training step against autograd in float64, and where it must stand aside."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES, random_model
from toys import toy_trainer

from plume.config import AdaptConfig, TrainConfig
from plume.model.heads import Model
from plume.model.transformer import attention_mask
from plume.train import fused
from plume.train.adapt import add_lora

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


def test_threads_do_not_change_a_bit() -> None:
    """The jobs alone: matrix products of torch may be cut differently."""
    x, bias = torch.randn(300, 48), torch.randn(48)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        slope, y, sums = x.clone(), torch.empty_like(x), torch.zeros(fused.parts_of(300), 48)
        fused.gelu_job(len(sums), 300, 48, 1, slope, bias, y)
        fused.slope_job(len(sums), 300, 48, y, slope, sums)
        found.append(torch.cat([slope, y, sums]))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


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
