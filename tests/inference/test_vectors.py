"""Vectors of chosen layers, the next sentence, and files of vectors: equal to transformers."""

import json

import numpy as np
import pytest
import torch
import transformers

import plume
from plume.cli.main import main
from plume.config import UserError

TEXTS = ["the robot must obey", "once upon a time there was", "a", "it would conflict with the first law of robots"]
BERT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """BERT's two pretraining heads with transformers' own tokenizer, and the folder."""
    folder = tmp_path_factory.mktemp("bert")
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**BERT)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model, transformers.BertTokenizer(str(folder / "vocab.txt")), folder


@torch.no_grad()
def means(model, tokenizer, texts, layer):
    """The mean over tokens of one of transformers' hidden states, a text at a time."""
    rows = [model.bert(**tokenizer(text, return_tensors="pt"), output_hidden_states=True) for text in texts]
    return np.stack([row.hidden_states[layer][0].mean(dim=0).numpy() for row in rows])


@pytest.mark.parametrize("layers", [None, 0, 2, -1, -2, [0, 3], (-3, -2, -1)])
def test_layers_are_the_hidden_states_of_transformers(bert, layers):
    model, tokenizer, folder = bert
    lm = plume.load(folder)
    wanted = [-1] if layers is None else [layers] if isinstance(layers, int) else layers
    expected = np.concatenate([means(model, tokenizer, TEXTS, layer) for layer in wanted], axis=1)
    found = lm.embed(TEXTS, layers=layers, batch=3)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(lm.embed(TEXTS[1], layers=layers), expected[1], atol=1e-5)


def test_the_last_layer_of_a_gpt_has_passed_the_final_norm(tmp_path):
    model = transformers.GPT2Model(transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2)).eval()
    model.save_pretrained(tmp_path)
    lm, ids = plume.load(tmp_path), [5, 6, 7, 8]
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in (0, 1, 2):
        np.testing.assert_allclose(lm.embed(ids, layers=layer), states[layer][0].mean(dim=0).numpy(), atol=1e-5)


def test_layers_that_do_not_exist(bert):
    lm = plume.load(bert[2])
    for layers, says in ((4, "layers=4 does not exist"), ([0, -5], "layers=-5"), ([], "layers is empty")):
        with pytest.raises(UserError, match=f"{says}.*from 0 .embeddings. to 3"):
            lm.embed("a", layers=layers)


def test_the_next_sentence_is_that_of_transformers(bert):
    model, tokenizer, folder = bert
    lm = plume.load(folder)
    with torch.no_grad():
        logits = model(**tokenizer(TEXTS[0], TEXTS[1], return_tensors="pt")).seq_relationship_logits
    assert lm.next_sentence(TEXTS[0], TEXTS[1]) == pytest.approx(float(logits.softmax(-1)[0, 0]), abs=1e-5)
    with pytest.raises(UserError, match="the context holds 40"):
        lm.next_sentence("a " * 30, "a " * 30)


def test_a_model_without_the_head_cannot_tell_the_next_sentence(tmp_path):
    transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a masked-token head was not pretrained on next-sentence prediction"):
        plume.load(tmp_path).next_sentence([5], [6])


# ---- files -------------------------------------------------------------------------------------------------------


def read(out):
    rows = [json.loads(line) for line in out.with_suffix(".ids.jsonl").read_text("utf-8").split("\n") if line]
    return np.load(out), rows


def test_a_vector_for_every_line(bert, tmp_path, capsys):
    model, tokenizer, folder = bert
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
    out = tmp_path / "made" / "vectors.npy"
    assert main(["embed", str(folder), str(tmp_path / "texts.txt"), "--out", str(out), "--batch", "2"]) == 0
    assert "4 vectors of 16 numbers" in capsys.readouterr().out
    found, rows = read(out)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, means(model, tokenizer, TEXTS, -1), atol=1e-5)
    assert [row["id"] for row in rows] == [1, 3, 5, 7] and [row["text"] for row in rows] == TEXTS


def test_only_line_ends_divide_texts(bert, tmp_path):
    texts = ["the\u2028robot", "obeys\x0corders", " and\x85sleeps "]
    (tmp_path / "texts.txt").write_bytes(f"{texts[0]}\n{texts[1]}\r\n{texts[2]}\r".encode())
    assert main(["embed", str(bert[2]), str(tmp_path / "texts.txt"), "--out", str(tmp_path / "v.npy")]) == 0
    _, rows = read(tmp_path / "v.npy")
    assert [(row["id"], row["text"]) for row in rows] == list(enumerate(texts, 1))


def test_a_vector_for_every_row_of_a_table(bert, tmp_path):
    model, tokenizer, folder = bert
    lines = [json.dumps({"key": f"k{n}", "review": text}) for n, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    words = ["embed", str(folder), str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "v.npy")]
    assert main([*words, "--id", "key", "--layers", "-2", "-1", "--normalize"]) == 0
    found, rows = read(tmp_path / "v.npy")
    expected = np.concatenate([means(model, tokenizer, TEXTS, layer) for layer in (-2, -1)], axis=1)
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)
    assert [row["id"] for row in rows] == ["k0", "k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--column", "tekst"], "no column 'tekst'"),
        (["--id", "number"], "no column 'number'"),
        (["--pool", "median"], "median"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(bert, tmp_path, capsys, more, says):
    (tmp_path / "rows.csv").write_text("text,label\nthe robot,1\n")
    words = ["embed", str(bert[2]), str(tmp_path / "rows.csv"), "--out", str(tmp_path / "v.npy")]
    assert main([*words, *more]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "v.npy").exists()


def test_files_that_are_not_there_or_empty(bert, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    for name, out, says in (
        ("none.txt", "v.npy", "there is no file"),
        ("empty.txt", "v.npy", "holds no texts"),
        ("empty.txt", "v.bin", "must end in .npy"),
    ):
        assert main(["embed", str(bert[2]), str(tmp_path / name), "--out", str(tmp_path / out)]) == 2
        assert says in capsys.readouterr().err
