"""The bundled model: it is found by its name, small, opens in transformers, and attends as it should."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import plume
from plume.config import UserError
from plume.hf import load_model, resolve
from plume.inference.cpu.pack import cache_paths
from plume.tasks.explained_rows import page_fields
from plume.util import hub
from plume.util.hub import BUNDLED, bundled

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are not part of the package

from benchmarks.bundled import two_names  # noqa: E402

FOLDER = BUNDLED / "plume-en"
ROBOT = "A robot must obey the orders given it by human beings"


@pytest.fixture(scope="module")
def lm():
    opened = plume.load("plume-en", threads=1)
    yield opened
    opened.close()


def test_a_bundled_model_has_a_name():
    assert resolve("plume-en") == FOLDER == bundled("plume-en")
    assert bundled("plume-xx") is None and bundled("../models/plume-en") is None


@pytest.mark.parametrize("scheme", ["https", "all"])
def test_a_hub_behind_a_proxy_is_not_asked_directly(scheme, monkeypatch):
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", lambda: {scheme: "http://proxy:1"})
    monkeypatch.setattr(hub, "is_reachable", lambda endpoint: pytest.fail("asked"))
    assert not hub.hub_is_offline()


def test_the_server_describes_it(lm):
    """Its card names the recipe, where a run's own holds it as a table."""
    from plume.serve.served_models import Origin, describe

    assert json.loads((FOLDER / "plume.json").read_text())["recipe"] == "plume-en"
    assert describe(lm, Origin("plume-en"))["first_view"] == "attention"


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    (tmp_path / "plume-en").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"has no config\.json"):
        resolve("plume-en")


def test_nothing_is_written_into_the_package():
    assert all(FOLDER not in path.parents for path in cache_paths(FOLDER, "int8", "0" * 64))
    allowed = {"config.json", "model.safetensors", "plume.json", "README.md"}
    assert {path.name for path in FOLDER.iterdir()} <= allowed | {
        *("merges.txt", "vocab.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    }


def test_it_is_small_and_in_half_precision():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 24e6
    assert json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["dtype"] == "float16"


def test_frequent_words_are_one_token(lm):
    assert [lm.tokenizer.decode([token]) for token in lm.tokenizer.encode(ROBOT)][:8] == [
        *("A", " robot", " must", " obey", " the", " orders", " given", " it"),
    ]
    assert len(lm.tokenizer.encode(" because")) == 1


def test_transformers_reads_the_same_model():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokens = torch.tensor([plume.load("plume-en").tokenizer.encode(ROBOT)])
    model = load_model(FOLDER)
    with torch.no_grad():
        ours = model.body(tokens) @ model.table.T
        torch.testing.assert_close(ours[..., : theirs.config.vocab_size], theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_the_page_can_ask_what_it_is(lm):
    """Its plume.json names its recipe and does not hold it."""
    found = page_fields(lm.config, lm.head, FOLDER, lm.tokenizer)
    assert found["first_view"] == "attention" and len(found["prompts"]) == 1


def test_it_writes_english(lm):
    """Frequent words are as frequent as in English, about two of five."""
    common = re.findall(r"\w+", "the a to of and i he she it was is in that you his her had not with for on be as at")
    written = " ".join(lm.generate("The", max_new_tokens=60, seed=seed, top_k=40).text for seed in range(12))
    words = "".join(letter if letter.isalpha() else " " for letter in written.lower()).split()
    assert len(words) > 60
    assert sum(word in common for word in words) / len(words) > 0.3


def test_sentences_with_two_names(lm):
    """What `python -m benchmarks.bundled` asks of its heads: both names are single tokens, and one is meant."""
    asked = dict(two_names())
    assert len(asked) == 50
    for text, name in asked.items():
        pieces = [lm.tokenizer.decode([token]).strip() for token in lm.tokenizer.encode(text)]
        assert name in pieces and {"she", "he"} & {pieces[-1]}
