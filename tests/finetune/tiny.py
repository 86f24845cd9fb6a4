"""Tiny tokenizers, models and labelled sets that the tests of fine-tuning share."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from plume.config import PRESETS, ModelConfig, TokenizerConfig
from plume.hf import save_model
from plume.model.heads import Model
from plume.text import Tokenizer
from plume.text.tokenizer_training import train_tokenizer

GOOD = ["a fine film", "what a joy", "lovely and warm", "truly great fun", "fine fine work"]
BAD = ["a dull film", "what a bore", "cold and empty", "truly awful mess", "dull dull work"]
TEXTS = [*GOOD, *BAD, "who lives in the old house on the hill?", "Mary Smith lives in Paris, near the river.", "yes no"]
KINDS = {"gpt2": "byte-bpe", "openai-gpt": "gpt1-bpe", "bert": "wordpiece", "roberta": "byte-bpe", "marian": "byte-bpe"}
PRESET = {
    "gpt2": "gpt2",
    "openai-gpt": "openai-gpt",
    "bert": "bert-tiny",
    "roberta": "roberta-base",
    "marian": "transformer-base",
}
SMALL = {"context": 32, "layers": 2, "heads": 2, "width": 16, "dropout": 0.0}


@cache
def tokenizer_of(family: str) -> Tokenizer:
    layout = {"gpt2": "gpt2", "openai-gpt": "gpt1", "bert": "bert", "roberta": "roberta", "marian": "gpt2"}[family]
    config = TokenizerConfig(kind=KINDS[family], vocab_size=330, special_tokens=layout)
    return train_tokenizer(config, TEXTS * 3)


def config_of(family: str) -> ModelConfig:
    small = {**SMALL, "vocab_size": tokenizer_of(family).vocab_size}
    if family == "marian":
        small["decoder_layers"] = 2
    return replace(PRESETS[PRESET[family]], **small)


def random_base(family: str, folder: Path, *, seed: int = 0, std: float = 0.2) -> Path:
    """A model folder with random weights, as if pretrained."""
    torch.manual_seed(seed)
    head = "masked-token" if family in ("bert", "roberta") else "next-token"
    model = Model(config_of(family), head).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=std)
    return save_model(model, folder, tokenizer=tokenizer_of(family))


def write_reviews(path: Path, copies: int = 8) -> Path:
    """A small set that anything can learn: which words are good and which are bad."""
    rows = [(text, "pos") for text in GOOD] + [(text, "neg") for text in BAD]
    lines = [f"{text} {'so' * (n % 3)} {n},{label}" for n in range(copies) for text, label in rows]
    path.write_text("review,sentiment\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path
