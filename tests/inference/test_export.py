"""Exported files give the same greedy tokens as Plume on a model trained here, and what cannot be exported says why."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from plume.config import EngineConfig, ExportConfig, UserError
from plume.hf import save_model
from plume.inference import export as export_module
from plume.inference.export import export
from plume.lm import LM
from plume.text import Tokenizer
from plume.text.definition import define

PROMPT, COUNT = "def wrap(", 30


@pytest.fixture(scope="module")
def greedy(trained_folder, tokenizer):
    lm = LM(trained_folder, tokenizer, EngineConfig(threads=2))
    yield lm.encode(PROMPT), lm.generate(PROMPT, temperature=0, max_new_tokens=COUNT, ignore_eos=True).tokens
    lm.close()


GREEDY_BY_LLAMA = """
import itertools, json, sys, llama_cpp
llama = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
prompt = llama.tokenize(sys.argv[2].encode(), add_bos=False)
written = llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0)
print(json.dumps([prompt, list(itertools.islice(written, int(sys.argv[3])))]))
"""


def needs_llama() -> None:
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python runs GGUF")


def greedy_by_llama(gguf: Path) -> list[list[int]]:
    """The prompt's tokens and those written."""
    words = [sys.executable, "-c", GREEDY_BY_LLAMA, str(gguf), PROMPT, str(COUNT)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "int4"])
def test_gguf_gives_the_same_greedy_tokens(trained_folder, tokenizer, tmp_path, greedy, precision):
    pytest.importorskip("gguf", reason="the gguf package writes GGUF")
    needs_llama()
    result = export(ExportConfig(model=str(trained_folder), precision=precision, out=tmp_path / "model.gguf"))
    assert result.checked_with == "llama.cpp"
    prompt, expected = greedy
    read, written = greedy_by_llama(result.path)
    assert read == prompt
    agreed = next((i for i, (a, b) in enumerate(zip(written, expected, strict=True)) if a != b), COUNT)
    assert agreed >= {"float32": COUNT, "int4": 1}.get(precision, 5)


def test_int4_files_keep_eight_bits_of_two_tables_and_llama_reads_them(tmp_path):
    """As the engine does where token embeddings and output weights are two; the bundled model is such a one."""
    gguf = pytest.importorskip("gguf", reason="the gguf package writes GGUF")
    needs_llama()
    result = export(ExportConfig(model="plume-en", precision="int4", out=tmp_path / "model.gguf"))
    assert result.checked_with == "llama.cpp"
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(result.path).tensors}
    assert types.pop("token_embd.weight") == types.pop("output.weight") == "Q8_0"
    assert {types[name] for name in types if ".weight" in name and "norm" not in name} == {"IQ4_NL", "F32"}


def test_a_crash_or_a_refusal_of_llama_does_not_end_the_export(trained_folder, tmp_path, monkeypatch):
    needs_llama()
    config = ExportConfig(model=str(trained_folder), out=tmp_path / "model.gguf")
    monkeypatch.setattr(export_module, "find_spec", lambda name: True)
    crash = tmp_path / "crash.py"
    crash.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setattr(export_module, "LLAMA_LOGITS", crash)
    assert str(export(config)).endswith("written, not checked (llama.cpp crashed, exit code -4)")
    crash.write_text("raise SystemExit('unknown pre-tokenizer')\n")
    with pytest.raises(RuntimeError, match=r"could not run .*removed: unknown pre-tokenizer"):
        export(config)
    assert not config.path.exists()


@pytest.mark.parametrize("cache", [pytest.param(False, marks=pytest.mark.slow), True])
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


# ---- every head --------------------------------------------------------------------------------------------------

BERT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
GPT = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "pad_token_id": 0}
MARIAN = {
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 2), ("ffn_dim", 32))},
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "d_model": 16,
    "vocab_size": 60,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def folder_of(name, folder):
    """A small model of transformers' class, every weight drawn, and its folder without a tokenizer."""
    kind = getattr(transformers, name)
    sizes = GPT if "GPT2" in name else MARIAN if "Marian" in name else BERT
    model = kind(kind.config_class(**sizes, **({"num_labels": 3} if "Classification" in name else {}))).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:  # sinusoids stay what they are
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model


def run_session(path, given):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    wanted = {one.name for one in session.get_inputs()}
    arrays = {name: tensor.numpy() for name, tensor in given.items() if name in wanted}
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, arrays), strict=True))


HEADS = [
    "BertForTokenClassification",
    "BertForSequenceClassification",
    "BertForQuestionAnswering",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertModel",
    "RobertaForMultipleChoice",
    "GPT2ForSequenceClassification",
    "GPT2ForTokenClassification",
    "MarianMTModel",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_onnx_of_every_head_gives_what_transformers_gives(name, tmp_path):
    """One row is padded; what stands at the padding is not compared."""
    theirs = folder_of(name, tmp_path / "m")
    written = export(ExportConfig(model=str(tmp_path / "m"), format="onnx"))
    assert written.checked_with == "onnxruntime" and written.path.name == "model.onnx"
    lengths = torch.tensor([9, 5, 9, 7])
    real = torch.arange(9) < lengths[:, None]
    tokens = torch.randint(5, 60, (4, 9), generator=torch.Generator().manual_seed(1)) * real
    segments = (torch.arange(9) > 3).long().expand(4, 9).contiguous()
    found = run_session(
        written.path, {"tokens": tokens, "lengths": lengths, "segments": segments, "target": tokens[:, :6]}
    )
    has_segments = name.startswith(("BertFor", "RobertaFor"))
    given = {"attention_mask": real.long(), **({"token_type_ids": segments} if has_segments else {})}
    if "Marian" in name:
        given["decoder_input_ids"] = tokens[:, :6]
    elif "MultipleChoice" in name:
        given, tokens = {key: value[:, None] for key, value in given.items()}, tokens[:, None]
    with torch.no_grad():
        out = theirs(input_ids=tokens, **given)
    for output, expected, per_token in expected_outputs(name, out, lengths):
        ours = torch.from_numpy(found[output]).reshape(expected.shape)
        kept = real if per_token else torch.ones(len(expected), dtype=torch.bool)
        torch.testing.assert_close(ours[kept], expected[kept], atol=1e-4, rtol=1e-4)


def expected_outputs(name, out, lengths):
    """(output of ours, what transformers gives, whether it has a place for each token)."""
    if name == "BertModel":
        real = (torch.arange(9) < lengths[:, None])[..., None]
        yield "token_embeddings", out.last_hidden_state, True
        yield "sentence_embedding", (out.last_hidden_state * real).sum(1) / lengths[:, None], False
    elif name == "BertForQuestionAnswering":
        yield "logits", torch.stack([out.start_logits, out.end_logits], dim=-1), True
    elif name == "BertForPreTraining":
        yield "logits", out.prediction_logits, True
        yield "next_sentence", out.seq_relationship_logits, False
    else:
        yield "logits", out.logits, "Token" in name or "Masked" in name


def test_what_onnx_and_gguf_do_not_take(tmp_path):
    folder_of("BertForSequenceClassification", tmp_path / "m")
    for more, says in (
        ({}, "format=onnx takes a model with a classify head"),
        ({"format": "onnx", "cache": True}, "cache"),
        ({"format": "gguf", "cache": False}, "cache=False is for format=onnx"),
    ):
        with pytest.raises(UserError, match=says):
            export(ExportConfig(model=str(tmp_path / "m"), **more))


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


def test_weights_in_a_file_of_their_own(trained_folder, tmp_path, monkeypatch):
    """A graph names that file, so both have their names before they take their places."""
    from plume.inference import onnx_export

    def write(graph, path):
        path.write_text(f"weights: {path.name}.data")
        path.with_name(f"{path.name}.data").write_text("weights")

    monkeypatch.setattr(onnx_export, "write", write)
    monkeypatch.setattr(onnx_export, "difference", lambda graph, path: 0.0)
    export(ExportConfig(model=str(trained_folder), format="onnx", out=tmp_path / "new" / "model.onnx"))
    found = {file.name: file.read_text() for file in (tmp_path / "new").iterdir()}
    assert found == {"model.onnx": "weights: model.onnx.data", "model.onnx.data": "weights"}


def test_a_file_is_named_like_its_format():
    for out, kind in (("model.onnx", "gguf"), ("model.GGUF", "onnx")):
        with pytest.raises(UserError, match=f"out={out} is named like another format than format={kind}"):
            ExportConfig(model="plume-en", format=kind, out=Path(out))
    assert ExportConfig(model="plume-en", out=Path("model.bin")).path == Path("model.bin")


def test_a_file_that_disagrees_is_removed(trained_folder, tmp_path, monkeypatch):
    from plume.inference import export as module

    pytest.importorskip("gguf", reason="the gguf package writes GGUF")
    path = tmp_path / "model.gguf"
    monkeypatch.setattr(module, "run_gguf", lambda _, tokens: np.zeros((len(tokens), 266)))
    with pytest.raises(RuntimeError, match="did not give the model's outputs back"):
        export(ExportConfig(model=str(trained_folder), out=path))
    assert list(tmp_path.iterdir()) == []
