"""Models built on the meta device, and folders written tensor by tensor: the same bits as built and written whole."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from safetensors.torch import load_file, save_file

from plume.config import PRESETS
from plume.hf import load_model, save_model
from plume.model.heads import Model
from plume.train.first_weights import deferred
from plume.util.tensor_files import write_tensor_file

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*FAMILIES, "lstm"])
def test_fresh_weights_are_those_of_a_model_built_whole(name: str) -> None:
    """Also the random numbers that come after."""
    config = FAMILIES[name] if name in FAMILIES else replace(PRESETS[name], vocab_size=31, width=16, layers=2)
    head = "next-token" if config.causal or config.decoder_layers else "pretraining"
    torch.manual_seed(7)
    plain, after = Model(config, head), torch.rand(3)
    model, first = deferred(lambda: Model(config, head), 7)
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(1)
    first.fill(model, model, CPU)
    assert torch.equal(torch.rand(3), after)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert expected.keys() == found.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


def test_a_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    """Of every dtype, with empty and single numbers, narrow ones before wide ones."""
    torch.manual_seed(0)
    tensors = {
        "byte": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "turned": torch.randn(4, 6).T,
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 7),
        "whole": torch.arange(9).view(3, 3),
    }
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    written = write_tensor_file(tmp_path / "ours", layout, tensors.__getitem__, {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in theirs)
    assert written["bytes"] == (tmp_path / "ours").stat().st_size


def test_a_folder_is_written_one_tensor_at_a_time(tmp_path: Path) -> None:
    """In shards of a few kilobytes; no part is asked for before the one ahead of it is on the disk."""
    model = Model(FAMILIES["gpt2"])
    sizes = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(sum(file.stat().st_size for file in tmp_path.glob(".folder.*/*.safetensors")))
        return tensor

    save_model(model, tmp_path / "folder", max_shard_bytes=4000, gather=gather)
    assert len(sizes) == sum(1 for _ in model.parameters()) and sizes[len(sizes) // 2] > sizes[0]
    again = dict(load_model(tmp_path / "folder").named_parameters())
    assert all(torch.equal(again[name], p) for name, p in model.named_parameters())
