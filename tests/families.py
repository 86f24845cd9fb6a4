"""Tiny random models of every family, in two copies: ours, and the class of transformers that opens its folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from plume.config import PRESETS, ModelConfig
from plume.hf import save_model
from plume.hf.families import family_of
from plume.model.heads import Model

SMALL = {"vocab_size": 61, "context": 32, "layers": 3, "heads": 4, "width": 16, "dropout": 0.0}
FAMILIES: dict[str, ModelConfig] = {
    "gpt2": replace(PRESETS["gpt2"], **SMALL),
    "gpt2-narrow-mlp": replace(PRESETS["gpt2"], **SMALL, mlp_width=24),
    "openai-gpt": replace(PRESETS["openai-gpt"], **SMALL),
    "transformer-decoder": replace(PRESETS["transformer-decoder"], **SMALL, embed_scale=False),
    "bert": replace(PRESETS["bert-tiny"], **SMALL),
    "roberta": replace(PRESETS["roberta-base"], **SMALL),
    "distilbert": replace(PRESETS["distilbert"], **SMALL),
}
TRANSFORMER = replace(PRESETS["transformer-base"], **SMALL, decoder_layers=2)
LABELS = ("red", "green", "blue")
PAIRS = [
    (family, head)
    for family, config in FAMILIES.items()
    for head, (name, _) in family_of(config).heads.items()
    if head != "similarity" and hasattr(transformers, name)
]


def random_model(config: ModelConfig, head: str = "next-token", *, seed: int = 0) -> Model:
    """Every tensor drawn at random: a skipped bias or a norm left at one would show."""
    torch.manual_seed(seed)
    model = Model(config, head, LABELS if head in ("classify", "similarity", "tag") else ()).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def open_in_transformers(folder: Path) -> Any:
    """The class that the folder's config.json names, every weight found and none left over."""
    import json

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def random_pair(family: str, head: str, folder: Path) -> tuple[Any, Model]:
    ours = random_model(FAMILIES[family], head)
    save_model(ours, folder)
    return open_in_transformers(folder), ours
