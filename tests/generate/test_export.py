"""Exported files give the same greedy tokens as Plume on a model trained here, and what cannot be exported says why."""

from pathlib import Path

import numpy as np
import pytest

from plume.config import EngineConfig, ExportConfig, UserError
from plume.generate.export import export
from plume.generate.lm import LM
from plume.text import Tokenizer
from plume.text.definition import define
from plume.weights import save_model

PROMPT, COUNT = "def wrap(", 30


@pytest.fixture(scope="module")
def greedy(trained_folder, tokenizer):
    lm = LM(trained_folder, tokenizer, EngineConfig(threads=2))
    yield lm.encode(PROMPT), lm.generate(PROMPT, temperature=0, max_new_tokens=COUNT, ignore_end=True).tokens
    lm.close()


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_gguf_gives_the_same_greedy_tokens(trained_folder, tokenizer, tmp_path, greedy, precision):
    pytest.importorskip("gguf", reason="the gguf package writes GGUF")
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python runs GGUF")
    result = export(ExportConfig(model=str(trained_folder), precision=precision, out=tmp_path / "model.gguf"))
    assert result.checked_with == "llama.cpp"
    llama = llama_cpp.Llama(str(result.path), n_ctx=64, verbose=False)
    prompt, expected = greedy
    assert llama.tokenize(PROMPT.encode(), add_bos=False) == prompt
    written = []
    for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        written.append(token)
        if len(written) == COUNT:
            break
    llama.close()
    agreed = next((i for i, (a, b) in enumerate(zip(written, expected, strict=True)) if a != b), COUNT)
    assert agreed == COUNT if precision == "float32" else agreed >= 5


@pytest.mark.parametrize("cache", [False, True])
def test_onnx_gives_the_same_greedy_tokens(trained_folder, tmp_path, trained, greedy, cache):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime runs ONNX")
    pytest.importorskip("onnxscript", reason="torch writes ONNX with onnxscript")
    config = ExportConfig(model=str(trained_folder), format="onnx", cache=cache, out=tmp_path / "model.onnx")
    assert export(config).difference < 1e-3
    session = onnxruntime.InferenceSession(str(config.path))
    prompt, expected = greedy
    c = trained.config
    past = np.zeros((c.layers, 2, 1, c.heads, 0, c.head_width), np.float32)
    tokens, new, written = list(prompt), list(prompt), []
    for _ in range(COUNT):
        if cache:
            logits, past = session.run(["logits", "present"], {"tokens": np.array([new]), "past": past})
        else:
            (logits,) = session.run(["logits"], {"tokens": np.array([tokens])})
        new = [int(logits[0, -1].argmax())]
        tokens += new
        written += new
    assert tuple(written) == expected


def test_gguf_is_refused_with_a_reason(random_model, tokenizer, tmp_path):
    characters = Tokenizer(define("characters", [chr(i) for i in range(32, 127)], [], "gpt2"))
    folder = save_model(random_model(), tmp_path / "characters", tokenizer=characters)
    with pytest.raises(UserError, match=r"cutting text into words.*characters"):
        export(ExportConfig(model=str(folder)))
    folder = save_model(random_model(norm="post"), tmp_path / "post", tokenizer=tokenizer)
    with pytest.raises(UserError, match="norm=post"):
        export(ExportConfig(model=str(folder)))
    assert not list(tmp_path.rglob("*.gguf"))


def test_where_an_export_goes(tmp_path, monkeypatch):
    """Into the folder that was named; a hub's name makes no folder of that name."""
    monkeypatch.chdir(tmp_path)
    assert ExportConfig(model=str(tmp_path)).path == tmp_path / "model-float32.gguf"
    assert ExportConfig(model="openai-community/gpt2", precision="int8").path == Path("model-int8.gguf")


def test_a_file_that_disagrees_is_removed(trained_folder, tmp_path, monkeypatch):
    from plume.generate import export as module

    pytest.importorskip("gguf", reason="the gguf package writes GGUF")
    path = tmp_path / "model.gguf"
    monkeypatch.setattr(module, "run_gguf", lambda _, tokens: ("nobody", np.zeros((len(tokens), 266))))
    with pytest.raises(RuntimeError, match="did not give the model's logits back"):
        export(ExportConfig(model=str(trained_folder), out=path))
    assert list(tmp_path.iterdir()) == []
