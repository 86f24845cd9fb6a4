"""What `plume plan` says is what a real model of that shape has and keeps."""

import json
from dataclasses import replace

import pytest
import torch

from plume.cli import main
from plume.config import PRESETS, PlanConfig, UserError, preset
from plume.model import Transformer
from plume.plan import activation_floats, plan


@pytest.mark.parametrize("base", ["gpt2", "bert-tiny", "openai-gpt"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activation_memory_is_what_autograd_really_saves(base, dropout):
    shape = {"layers": 3, "width": 64, "heads": 4, "vocab_size": 100, "context": 64}
    config = replace(preset(base), dropout=dropout, **shape)
    body, saved, alive = Transformer(config).train(), {}, []
    own = {parameter.untyped_storage().data_ptr() for parameter in body.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        body(torch.randint(0, 100, (4, 64)))
    assert 4 * activation_floats(config, 4, 64) == pytest.approx(sum(saved.values()), rel=0.03)


def test_forward_operations_are_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    from plume.heads import Model

    config = replace(preset("gpt2"), layers=2, width=64, heads=4, vocab_size=500, context=64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        Model(config).eval()(torch.zeros(1, 64, dtype=torch.long))
    said = plan(PlanConfig(model=config, tokens=1)).flops_per_token_forward
    assert said * 64 == pytest.approx(counter.get_total_flops(), rel=0.1)  # torch counts both halves of the mask


def test_the_table_of_one_gpt2_block(capsys):
    assert main(["plan", "gpt2"]) == 0
    shown = capsys.readouterr().out
    for part in ("124,439,808", "7,087,872", "2,359,296", "this machine", "A100"):
        assert part in shown


def test_json_even_for_the_largest(capsys):
    assert main(["plan", "gpt3-175b", "--json", "--tokens", "300_000_000_000"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 174_604_259_328
    assert said["tokens"] == 300_000_000_000
    assert said["weight_bytes"] == 4 * 174_604_259_328


def test_bad_numbers_are_refused():
    with pytest.raises(UserError, match="length=2000 must lie between 1 and the context 1024"):
        plan(PlanConfig(model=PRESETS["gpt2"], length=2000))
    with pytest.raises(UserError, match="tokens=0"):
        plan(PlanConfig(model=PRESETS["gpt2"], tokens=0))
