"""Small models with tokenizers, random and trained, in folders that transformers opens too; made data."""

import os
import random
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from stories import ANIMALS, PLACES, sentence, small, story, write_rows

from plume.config import PRESETS, TokenizerConfig
from plume.hf import save_model
from plume.model.heads import Model
from plume.text import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(TokenizerConfig(vocab_size=400), [story(seed, 20) for seed in range(20)])


@pytest.fixture(scope="session")
def random_folder(tokenizer, tmp_path_factory) -> Path:
    torch.manual_seed(1)
    model = Model(small(tokenizer))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return save_model(model, tmp_path_factory.mktemp("random") / "model", tokenizer=tokenizer)


@pytest.fixture(scope="session")
def trained_folder(tokenizer, tmp_path_factory) -> Path:
    """A few dozen steps: enough that it knows what each animal eats."""
    torch.manual_seed(0)
    model = Model(small(tokenizer))
    ids = torch.tensor([i for seed in range(60) for i in tokenizer.encode(story(seed, 20))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(100):
        at = torch.randint(len(ids) - 49, (16,), generator=torch.Generator().manual_seed(step))
        rows = torch.stack([ids[a : a + 49] for a in at])
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.2
    return save_model(model, tmp_path_factory.mktemp("trained") / "model", tokenizer=tokenizer)


@pytest.fixture(scope="session")
def masked_folder(tmp_path_factory) -> Path:
    words = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=120), [story(seed, 20) for seed in range(20)])
    torch.manual_seed(2)
    config = replace(
        PRESETS["bert-tiny"], vocab_size=words.vocab_size, context=48, layers=2, heads=4, width=32, dropout=0.0
    )
    model = Model(config, "masked-token")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return save_model(model, tmp_path_factory.mktemp("masked") / "model", tokenizer=words)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A data folder in the shape of the shared one, with made rows."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(5)
    for name in ("lambada", "wikitext-2", "hellaswag"):
        (folder / name).mkdir()
    passages = [" ".join(sentence(draw) for _ in range(draw.randint(1, 3)))[:-1] for _ in range(40)]
    passages.append(story(99, 30)[:-1])  # longer than the context
    write_rows(folder / "lambada" / "lambada_test.jsonl", [{"text": text} for text in passages])
    pages = [f" \n = Page {n} = \n \n {story(n, 3 + 4 * n).replace(',', ' ,').replace('.', ' .')} \n" for n in range(4)]
    (folder / "wikitext-2" / "wiki.test.raw").write_text("".join(pages), encoding="utf-8")
    rows = []
    for _ in range(40):
        animal = draw.choice(list(ANIMALS))
        rows.append(
            {
                "activity_label": "Eating",
                "ctx_a": f"The {animal} went to the {draw.choice(PLACES)} and, because",
                "ctx_b": "it was hungry, it ate",
                "endings": [f"{food} [step] with joy"[: draw.randint(4, 30)] for food in ANIMALS.values()][:4],
                "label": str(draw.randrange(4)),
            }
        )
    write_rows(folder / "hellaswag" / "validation.jsonl", rows[:30])
    write_rows(folder / "hellaswag" / "train.jsonl", rows[30:])
    return folder
