"""Which precision is worth it: what the device multiplies fastest in, if it is faster by enough."""

import pytest
import torch

from plume.config import ModelConfig, TrainConfig, UserError
from plume.inference.torch_engine import TorchEngine
from plume.model.heads import Model
from plume.train.distribute import CPU, Ranks, change_blocks
from plume.util import devices


@pytest.mark.parametrize(
    ("wanted", "gain", "taken"),
    [
        ("auto", 1.1, "float32"),  # not worth the lost digits
        ("auto", 1.3, "bfloat16"),
        ("bfloat16", 0.5, "bfloat16"),
        ("float32", 9.0, "float32"),
    ],
)
def test_fewer_digits_must_be_worth_it(monkeypatch, wanted, gain, taken):
    monkeypatch.setattr(devices, "matmul_speed", lambda _, dtype: 1e9 * (gain if dtype == torch.bfloat16 else 1.0))
    found = devices.choose_precision(CPU, wanted)
    assert (found.name, found.peak) == (taken, 1e9 * (gain if taken == "bfloat16" else 1.0))
    with found.context():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if taken == "bfloat16" else torch.float32)


def test_devices_that_are_not_there(monkeypatch):
    for name in ("meta", "xpu", "gpu", "cuda:x"):
        with pytest.raises(UserError, match=f"device='{name}' is not a device; auto, cpu, cuda, cuda:1 and mps are"):
            devices.pick_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.pick_device("cuda:1").index == 1
    with pytest.raises(UserError, match="device='cuda:2': this machine has 2 GPUs"):
        devices.pick_device("cuda:2")


def test_torch_compile_without_a_compiler_is_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    model = Model(ModelConfig(vocab_size=9, context=8, layers=1, heads=1, width=4))
    with pytest.raises(UserError, match=r"compile: torch\.compile needs a C\+\+ compiler"):
        TorchEngine(model, compiled=True)
    with pytest.raises(UserError, match=r"compile: torch\.compile needs a C\+\+ compiler"):
        change_blocks(model, TrainConfig(steps=1, compile=True), Ranks(), None)
