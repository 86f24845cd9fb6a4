"""The recurrent baseline: the numbers of torch.nn.LSTM, and every command that a Transformer goes through."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import random_model
from torch import nn

import plume
from plume.config import PRESETS, EngineConfig, UserError, preset
from plume.hf import load_model, save_model
from plume.inference.engine import Feed
from plume.inference.engine_factory import open_engine
from plume.inference.torch_engine import TorchEngine
from plume.model.ragged import prefix_trees

LSTM = replace(PRESETS["lstm"], vocab_size=61, context=32, layers=2, width=16, dropout=0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("lstm")
    text = root / "text.txt"
    text.write_text("".join(f"the {a} cat saw the {b} dog .\n\n" for a in "abcdefgh" for b in "abcdefgh"))
    table = {
        "folder": str(root / "run"),
        "model": {"preset": "lstm-laptop", "width": 32, "context": 16},
        "train": {"steps": 120, "batch": 16, "lr": 0.02, "precision": "float32"},
        "data": {"paths": [str(text)], "folder": str(root / "data"), "documents": "paragraph",
                 "tokenizer": {"kind": "characters"}, "validation_fraction": 0.1},
    }  # fmt: skip
    return plume.pretrain(plume.config.build(plume.config.PretrainConfig, table))


def reference(folder):
    """torch.nn.LSTM itself with the folder's tensors, loaded under torch's own names."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    prefix = "model.lstm."
    lstm = nn.LSTM(LSTM.width, LSTM.width, LSTM.layers, batch_first=True)
    lstm.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    table = tensors["model.embeddings.weight"]
    return lambda tokens: lstm(table[tokens])[0] @ table.T


def test_equal_to_torch_lstm_whole_in_steps_and_in_ragged_batches(tmp_path):
    model = random_model(LSTM)
    save_model(model, tmp_path / "m")
    theirs, tokens = reference(tmp_path / "m"), torch.randint(0, 61, (3, 20))
    with torch.no_grad():
        expected = theirs(tokens)
        torch.testing.assert_close(load_model(tmp_path / "m")(tokens), expected, atol=1e-6, rtol=0)
        engine = TorchEngine(model, slots=3)
        first = engine.step([Feed(1, tokens[0, :7].tolist(), 7)])
        engine.step([Feed(1, [5, 6, 7])])
        engine.rewind(1, 7)
        engine.copy(1, 2, 4)
        rest = engine.step([Feed(1, tokens[0, 7:].tolist(), 13), Feed(2, tokens[0, 4:6].tolist(), 2)])
    np.testing.assert_allclose(first, expected[0, :7], atol=1e-6)
    np.testing.assert_allclose(rest[:13], expected[0, 7:], atol=1e-6)
    np.testing.assert_allclose(rest[13:], expected[0, 4:6], atol=1e-6)


def test_prefix_trees_give_what_each_sequence_gives_alone():
    model = random_model(LSTM)
    sequences = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 9), (1, 2, 3, 4, 5, 7, 8), (8, 8), (1, 2, 3, 4), (1, 2, 3, 4, 5, 7, 9)]
    wanted = [slice(1, None)] * len(sequences)
    trees = prefix_trees(sequences, wanted, width=1000, most=64)
    assert any(tree.branches for tree in trees)
    with torch.no_grad():
        starts = np.cumsum([0, *(len(tree.wanted) for tree in trees)])
        rows = [start + row for start, tree in zip(starts, trees, strict=False) for row in tree.rows]
        found = model.read_ragged(trees)[rows]
        alone = [model.body(torch.tensor([sequences[i]]))[0, 1:] for tree in trees for i in tree.members]
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-6, rtol=0)


def test_the_folder_says_that_it_is_plumes_own(tmp_path):
    save_model(random_model(LSTM), tmp_path / "m")
    told = json.loads((tmp_path / "m" / "config.json").read_text())
    assert told["model_type"] == "plume-lstm" and told["architectures"] == ["LSTMLMHeadModel"]
    import transformers

    with pytest.raises(ValueError, match="plume-lstm"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")


def test_it_learns_generates_scores_and_is_fine_tuned(trained, tmp_path):
    assert trained.outcome.validation < trained.unigram - 0.5
    lm = plume.load(trained.model)
    one, other = (lm.generate("the ", max_new_tokens=8, temperature=0.0) for _ in range(2))
    assert one.text == other.text
    assert lm.score("the a cat saw").perplexity < lm.score("was tac a eht").perplexity
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"the {a} {w} .,{w}\n" for a in "abcdefgh" * 3 for w in ("cat", "dog")))
    result = plume.finetune(
        model=str(trained.folder), folder=tmp_path / "task", task={"train": str(rows)}, epochs=3, lr=0.01
    )
    assert plume.load(result.folder).classify("the a cat .").label in ("cat", "dog")


def test_the_reference_preset_is_that_of_the_paper():
    with torch.device("meta"):
        size = sum(p.numel() for p in plume.model.heads.Model(preset("lstm")).parameters())
    assert size == 40_478 * 2048 + 4 * (2 * 2048 * 2048 + 2 * 2048)


@pytest.mark.parametrize("change", [{"heads": 2}, {"positions": "learned"}, {"causal": False}, {"recurrent": False}])
def test_what_is_not_an_lstm_is_refused(change):
    with pytest.raises(UserError, match=r"recurrent|heads"):
        replace(LSTM, **change)


def test_what_needs_attention_is_refused(trained, tmp_path):
    lm = plume.load(trained.model)
    with pytest.raises(UserError, match="cannot be explained"):
        lm.explain("the cat")
    with pytest.raises(UserError, match="recurrent"):
        open_engine(trained.model, EngineConfig(engine="cpu"))
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"{i} a,x\n{i} b,y\n" for i in range(20)))
    with pytest.raises(UserError, match="lora"):
        plume.finetune(
            model=str(trained.folder), folder=tmp_path / "t", task={"train": str(rows)}, adapt={"mode": "lora"}
        )


def test_it_is_served(trained):
    from fastapi.testclient import TestClient

    from plume.config import ServeConfig
    from plume.serve.app import create_app

    with TestClient(create_app(ServeConfig(models=(str(trained.folder),))), "http://127.0.0.1") as client:
        asked = {"model": "run", "prompt": "the ", "max_tokens": 4, "temperature": 0}
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["choices"][0]["text"]
