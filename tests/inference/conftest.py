"""Tiny models: random ones for equalities, and one that was really trained, on the standard library's own source."""

import inspect
import os
import shutil
import string
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from plume.config import EngineConfig, ModelConfig
from plume.hf import load_model, save_model
from plume.lm import LM
from plume.model.heads import Model
from plume.text import Tokenizer
from plume.text.definition import BYTE_LETTERS, define

MERGES = [
    ("h", "e"),
    ("Ġ", "t"),
    ("Ġt", "he"),
    ("i", "n"),
    ("e", "r"),
    ("Ġ", "a"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """GPT-2's bytes with a few merges: 256 + 9 + the end token."""
    return Tokenizer(define("byte-bpe", [*BYTE_LETTERS, *("".join(pair) for pair in MERGES)], MERGES, "gpt2"))


def make_model(**fields: object) -> Model:
    given: dict[str, object] = {"vocab_size": 266, "context": 64, "layers": 2, "heads": 4, "width": 64} | fields
    torch.manual_seed(0)
    model = Model(ModelConfig(**given)).eval()  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else 0.12)
    return model


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Model]:
    return make_model


@pytest.fixture(scope="session")
def open_lm(tokenizer: Tokenizer) -> Iterator[Callable[..., LM]]:
    """Makes LMs of random models and closes them at the end."""
    opened: list[LM] = []

    def make(engine: EngineConfig | None = None, **fields: object) -> LM:
        settings = EngineConfig(threads=2) if engine is None else engine
        opened.append(LM(None, tokenizer, settings, make_model(**fields)))
        return opened[-1]

    yield make
    for lm in opened:
        lm.close()


@pytest.fixture(scope="session")
def lm(open_lm: Callable[..., LM]) -> LM:
    return open_lm()


@pytest.fixture(scope="session")
def training_text() -> str:
    return "".join(inspect.getsource(module) for module in (textwrap, string, inspect))


def train(tokenizer: Tokenizer, text: str) -> Model:
    torch.manual_seed(1)
    model = Model(ModelConfig(vocab_size=266, context=64, layers=2, heads=2, width=96, dropout=0.0))
    tokens = torch.tensor(tokenizer.encode(text))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(150):
        starts = torch.randint(0, len(tokens) - 65, (16,))
        batch = torch.stack([tokens[i : i + 65] for i in starts])
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 3.0, "the model should have learnt something"
    return model.eval()


@pytest.fixture(scope="session")
def trained_folder(tokenizer: Tokenizer, training_text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained here, for a few seconds; the first worker that needs it trains it, each has a copy of its own."""
    own = tmp_path_factory.mktemp("trained") / "model"
    shared = own.parents[2 if "PYTEST_XDIST_WORKER" in os.environ else 1] / "trained-once"
    with FileLock(f"{shared}.lock"):
        if not shared.is_dir():
            save_model(train(tokenizer, training_text), shared, tokenizer=tokenizer)
    return shutil.copytree(shared, own)


@pytest.fixture(scope="session")
def trained(trained_folder: Path) -> Model:
    return load_model(trained_folder).eval()
