"""Folders made with transformers and tokenizers, not with Plume: each equals transformers, or is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from families import open_in_transformers
from safetensors.torch import load_file, save_file

import plume
from plume.cli.main import main
from plume.config import FinetuneConfig, TaskConfig, UserError
from plume.hf import load_model, read_chat_template, read_config, save_model
from plume.model.heads import Model
from plume.model.loss import token_loss
from plume.text import load_tokenizer
from plume.train.finetune_plan import make_plan

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
GPT = {"vocab_size": 61, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 4}
BERT = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
TOKENS = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(1))


def drawn(model):
    """Every tensor at random, so that one that is skipped shows."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def gpt2(**more):
    return drawn(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT | more)))


def gpt1(**more):
    return drawn(transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**GPT | more)))


def bert(name="BertForMaskedLM", **more):
    return drawn(getattr(transformers, name)(transformers.BertConfig(**BERT | more)))


def roberta(name="RobertaForMaskedLM", **more):
    return drawn(getattr(transformers, name)(transformers.RobertaConfig(**BERT | more)))


def distilbert(**more):
    sizes = {"vocab_size": 61, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "max_position_embeddings": 32}
    return drawn(transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes | more)))


def edit(folder: Path, *drop: str, **changes) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in drop}))
    return folder


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def same(ours, theirs) -> None:
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, **CLOSE)


def opens_and_saves(folder: Path, theirs, **given) -> None:
    """As transformers has it, and so again in transformers after Plume has saved it."""
    ours = load_model(folder, **given)
    same(ours, theirs)
    same(ours, open_in_transformers(save_model(ours, folder.parent / "saved")))


# ---- untied output weights ---------------------------------------------------------------------------------------

UNTIED = {"gpt2": gpt2, "openai-gpt": gpt1, "bert": bert, "roberta": roberta, "distilbert": distilbert}


@pytest.mark.parametrize("family", UNTIED)
def test_untied_output_weights(family, tmp_path):
    """They stay untied through saving, and transformers opens what was saved."""
    theirs = UNTIED[family](tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    same(ours, theirs)
    save_model(ours, tmp_path / "ours")
    again = open_in_transformers(tmp_path / "ours")
    assert again.config.tie_word_embeddings is False
    same(ours, again)
    same(load_model(tmp_path / "ours"), theirs)


def test_untied_pretraining_head(tmp_path):
    theirs = bert("BertForPreTraining", tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).prediction_logits, **CLOSE)
    open_in_transformers(save_model(ours, tmp_path / "ours"))


def test_output_weights_that_differ_though_the_config_ties_them(tmp_path):
    """The file decides, as in transformers."""
    gpt2().save_pretrained(tmp_path / "m")
    edit_tensors(tmp_path / "m", lambda t: t.update({"lm_head.weight": torch.randn(61, 16)}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert not torch.equal(theirs.lm_head.weight, theirs.transformer.wte.weight)
    opens_and_saves(tmp_path / "m", theirs)


def test_untied_marian(tmp_path):
    sizes = {"vocab_size": 61, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    config = transformers.MarianConfig(**sizes, **heads, **ids, activation_function="relu", tie_word_embeddings=False)
    theirs = drawn(transformers.MarianMTModel(config))
    theirs.save_pretrained(tmp_path / "m")
    with pytest.raises(UserError, match="token tables that are not shared are not supported"):
        load_model(tmp_path / "m")
    for stack in (theirs.model.encoder, theirs.model.decoder):
        stack.embed_tokens.weight.data.copy_(theirs.model.shared.weight)
    theirs.save_pretrained(tmp_path / "m")
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path / "m").eval()  # with its own sinusoids again
    ours = load_model(tmp_path / "m")
    with torch.no_grad():
        expected = theirs(TOKENS, decoder_input_ids=TOKENS[:, :5]).logits
        torch.testing.assert_close(ours(TOKENS, TOKENS[:, :5]), expected, **CLOSE)


# ---- what config.json leaves out ---------------------------------------------------------------------------------

ANY = {
    "gpt2": (gpt2, "next-token"),
    "openai-gpt": (gpt1, "next-token"),
    "bert": (bert, "masked-token"),
    "roberta": (roberta, "masked-token"),
    "distilbert": (distilbert, "masked-token"),
    "bert-classify": (lambda: bert("BertForSequenceClassification", num_labels=3), "classify"),
    "bert-tag": (lambda: bert("BertForTokenClassification", num_labels=3), "tag"),
    "roberta-classify": (lambda: roberta("RobertaForSequenceClassification", num_labels=3), "classify"),
}


@pytest.mark.parametrize("drop", [("architectures",), ("model_type",), ("architectures", "model_type")], ids="+".join)
@pytest.mark.parametrize("name", ANY)
def test_the_weights_tell_what_config_leaves_out(name, drop, tmp_path):
    make, head = ANY[name]
    theirs = make()
    theirs.save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", *drop)
    assert load_model(tmp_path / "m").kind == head
    opens_and_saves(tmp_path / "m", theirs)


def test_a_class_that_is_not_known_is_told_by_the_weights(tmp_path):
    theirs = bert()
    theirs.save_pretrained(tmp_path / "m")
    opens_and_saves(edit(tmp_path / "m", architectures=["BertForSomethingNew"]), theirs)


@pytest.mark.parametrize("pooler", [True, False])
def test_a_bare_stack_with_prefixed_names(pooler, tmp_path):
    """As others package it: AutoModel opens it, with a new pooler where the file has none."""
    theirs = drawn(transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=pooler))
    theirs.save_pretrained(tmp_path / "m")
    state = {f"bert.{name}": tensor for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items()}
    save_file(state, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    ours = load_model(edit(tmp_path / "m", "architectures"))
    assert ours.kind == "bare" and (ours.head.summary is not None) == pooler
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).last_hidden_state, **CLOSE)
    save_model(ours, tmp_path / "again")
    again = transformers.AutoModel.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), again(TOKENS).last_hidden_state, **CLOSE)


def test_a_stack_that_two_families_fit_asks_for_the_architecture(tmp_path):
    theirs = drawn(transformers.RobertaModel(transformers.RobertaConfig(**BERT)))
    theirs.save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", "architectures", "model_type")
    with pytest.raises(UserError, match=r"model_type is missing, and the tensors do not tell it.*--architecture"):
        load_model(tmp_path / "m")
    ours = load_model(tmp_path / "m", architecture="RobertaModel")
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).last_hidden_state, **CLOSE)


def test_other_names_of_sizes(tmp_path):
    """transformers takes hidden_size for GPT-2's n_embd."""
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "m")
    names = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 32}
    edit(tmp_path / "m", "n_embd", "n_layer", "n_head", "n_positions", **names)
    opens_and_saves(tmp_path / "m", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m"))


def test_num_labels_counts_beside_id2label(tmp_path):
    theirs = bert("BertForSequenceClassification", num_labels=3)
    theirs.save_pretrained(tmp_path / "m")
    for changes in ({"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, {"id2label": None, "num_labels": 3}):
        edit(tmp_path / "m", **changes)
        labels = transformers.AutoConfig.from_pretrained(tmp_path / "m").id2label
        assert load_model(tmp_path / "m").labels == tuple(labels.values())
        opens_and_saves(tmp_path / "m", theirs)


# ---- the file itself ---------------------------------------------------------------------------------------------


def test_extra_tensors_are_named_and_ignored(tmp_path, capsys):
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "m")
    edit_tensors(tmp_path / "m", lambda t: t.update({"value_head.weight": torch.ones(3)}))
    opens_and_saves(tmp_path / "m", theirs)
    assert "ignoring tensors that the model does not use: value_head.weight" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_shards(dtype, tmp_path):
    gpt2().to(dtype).save_pretrained(tmp_path / "m", max_shard_size="10KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    opens_and_saves(tmp_path / "m", transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").float())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_layer": 2.5}, r"n_layer=2.5 is not a whole number"),
        ({"n_layer": 10**7}, r"n_layer=10000000 is not between 0 and 10000"),
        ({"n_layer": 9_999}, r"it lacks: transformer.h.3"),
        ({"n_embd": "16"}, r"n_embd='16' is not a whole number"),
        ({"vocab_size": 10**12}, r"vocab_size=1000000000000 is not between"),
        ({"vocab_size": True}, r"vocab_size=True is not a whole number"),
        ({"layer_norm_epsilon": float("nan")}, r"layer_norm_epsilon=nan is not a finite number"),
        ({"resid_pdrop": "often"}, r"resid_pdrop='often' is not a finite number"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings='yes' is neither true nor false"),
        ({"eos_token_id": 61}, r"eos_token_id=61 is not in the vocabulary of 61 tokens"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id=\[1, '2'\] is not in the vocabulary"),
        ({"id2label": [1]}, r"id2label=\[1\]"),
    ],
    ids=str,
)
def test_nonsense_in_config_is_refused(change, says, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").unlink()
    edit(tmp_path / "m", **change)
    with pytest.raises(UserError, match=says):
        load_model(tmp_path / "m")


def test_a_large_position_table_without_weights_is_refused(tmp_path):
    gpt1().save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", positions="sinusoidal", n_positions=2**30)
    with pytest.raises(UserError, match="too large for sinusoids"):
        load_model(tmp_path / "m")


def test_a_config_that_is_no_object(tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("[1]")
    with pytest.raises(UserError, match=r"config.json"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.ones(16, dtype=torch.int64), "ln_f.weight holds int64, not floating-point numbers"),
        (torch.full((16,), float("nan")), "ln_f.weight holds NaN or infinity"),
        (torch.ones(17), r"norm.weight is \(17,\) in the file, \(16,\) by config.json"),
    ],
    ids=["integers", "nan", "shape"],
)
def test_tensors_that_cannot_be_weights(tensor, says, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    edit_tensors(tmp_path / "m", lambda t: t.update({"transformer.ln_f.weight": tensor}))
    with pytest.raises(UserError, match=says):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("index", [{"weight_map": {"a": "../other.safetensors"}}, {"weight_map": {"a": "/etc/passwd"}}])
def test_an_index_stays_in_its_folder(index, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="names files outside its folder"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_a_broken_index(index, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="has no weight_map"):
        load_model(tmp_path / "m")


# ---- end tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(5, None, (5,)), ([5, 7], None, (5, 7)), (5, [9], (9,)), (5, {}, (5,)), (None, None, None), (50_256, None, None)],
)
def test_end_tokens_of_both_files(config, generation, expected, tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", eos_token_id=config)
    path = tmp_path / "m" / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps({"eos_token_id": generation} if generation else {}))
    assert read_config(tmp_path / "m").end_ids == expected


# ---- through plume.load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "precision"), [("cpu", "float32"), ("cpu", "int8"), ("torch", "float32")])
def test_untied_weights_in_both_engines(engine, precision, tmp_path, capsys):
    """Ids in, ids out: the folder has no tokenizer, which is told once."""
    theirs = gpt2(tie_word_embeddings=False, n_embd=64)
    theirs.save_pretrained(tmp_path / "m")
    lm = plume.load(tmp_path / "m", engine=engine, precision=precision)
    assert "has no tokenizer" in capsys.readouterr().err
    prompt = TOKENS[0, :7].tolist()
    with torch.no_grad():
        expected = theirs(TOKENS[:1, :7]).logits[0, -1].softmax(dim=0)
    found = {c.id: c.probability for c in lm.next_tokens(prompt, k=61)}
    close = 1e-4 if precision == "float32" else 0.1
    assert max(abs(found[i] - float(p)) for i, p in enumerate(expected)) < close
    if precision == "float32":
        written = theirs.generate(TOKENS[:1, :7], max_new_tokens=12, **GREEDY)
        assert list(lm.generate(prompt, max_new_tokens=12, temperature=0).tokens) == written[0, 7:].tolist()
        with torch.no_grad():
            logprobs = theirs(TOKENS[:1]).logits[0].log_softmax(dim=1)
        score = lm.score(TOKENS[0].tolist())
        assert [t.logprob for t in score.tokens] == pytest.approx(
            [float(logprobs[i, t]) for i, t in enumerate(TOKENS[0, 1:])], abs=1e-4
        )


def test_weights_without_a_tokenizer_refuse_text(tmp_path):
    gpt2().save_pretrained(tmp_path / "m")
    lm = plume.load(tmp_path / "m")
    with pytest.raises(UserError, match=r"has no tokenizer, so it takes token ids and no text.*--tokenizer"):
        lm.generate("some text")
    assert lm.generate([5, 6], max_new_tokens=3, temperature=0).text.count("<") == 3
    with pytest.raises(UserError, match="61"):
        lm.generate([61])
    with pytest.raises(UserError, match="61"):
        lm.embed([[61]])
    again = plume.load(lm.save(tmp_path / "again"))
    greedy = {"max_new_tokens": 3, "temperature": 0}
    assert again.generate([5, 6], **greedy).tokens == lm.generate([5, 6], **greedy).tokens


def test_generation_ends_where_the_folder_says(tmp_path):
    theirs = gpt2(tie_word_embeddings=False, n_embd=64)
    theirs.save_pretrained(tmp_path / "m")
    prompt = TOKENS[:1, :5]
    free = theirs.generate(prompt, max_new_tokens=20, **GREEDY)[0, 5:].tolist()
    end = free[-1]
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 60]}))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    expected = other.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, 5:].tolist()
    assert expected[-1] == end and len(expected) < 20
    lm = plume.load(tmp_path / "m")
    for settings in ({}, {"beams": 1}):
        found = lm.generate(prompt[0].tolist(), max_new_tokens=20, temperature=0, **settings)
        assert [*found.tokens][: len(expected) - 1] == expected[:-1] and found.finish_reason == "stop"
    whole = lm.generate(prompt[0].tolist(), max_new_tokens=20, temperature=0, ignore_eos=True)
    assert list(whole.tokens) == free
    assert read_config(lm.save(tmp_path / "again")).end_ids == (end, 60)


# ---- tokenizers --------------------------------------------------------------------------------------------------

TEXT = ["the cat sat on the mat", "a dog and a cat ran", "the dog sat"] * 5


def tokenizer_json(name: str):
    """Any model of the tokenizers library, with and without a decoder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model, cut, join, trainer = {
        "WordLevel": (
            models.WordLevel(unk_token="[UNK]"),
            pre_tokenizers.Whitespace(),
            None,
            trainers.WordLevelTrainer,
        ),
        "Unigram": (models.Unigram(), pre_tokenizers.Metaspace(), decoders.Metaspace(), trainers.UnigramTrainer),
        "BPE": (models.BPE(unk_token="[UNK]"), pre_tokenizers.Whitespace(), None, trainers.BpeTrainer),
        "WordPiece": (
            models.WordPiece(unk_token="[UNK]"),
            pre_tokenizers.Whitespace(),
            None,
            trainers.WordPieceTrainer,
        ),
    }[name]
    made = Tokenizer(model)
    made.pre_tokenizer = cut
    if join is not None:
        made.decoder = join
    more = {"unk_token": "[UNK]"} if name == "Unigram" else {}
    made.train_from_iterator(TEXT, trainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False, **more))
    return made


@pytest.mark.parametrize("name", ["WordLevel", "Unigram", "BPE", "WordPiece"])
def test_tokenizers_of_any_model(name, tmp_path):
    theirs = gpt2()
    theirs.save_pretrained(tmp_path / "m")
    tokenizer_json(name).save(str(tmp_path / "m" / "tokenizer.json"))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "m" / "tokenizer.json"))
    lm, text = plume.load(tmp_path / "m", engine="torch"), "the dog sat on a zebra"
    ids = reference.encode(text, add_special_tokens=False)
    assert lm.tokenizer.encode(text) == ids
    assert lm.tokenizer.decode(ids) == reference.decode(ids)
    with torch.no_grad():
        logits = theirs(torch.tensor([ids])).logits[0].log_softmax(dim=1)  # also over rows without a token
    first = lm.next_tokens(text, k=1)[0]
    assert first.id == int(logits[-1, : len(reference)].argmax())  # a row without a token has no text
    expected = [float(logits[i, token]) for i, token in enumerate(ids[1:])]
    found = [t.logprob for t in lm.score(text).tokens][-len(expected) :]
    assert found == pytest.approx(expected, abs=1e-4)
    assert isinstance(lm.generate(text, max_new_tokens=4, temperature=0).text, str)


@pytest.mark.parametrize("pieces", [True, False], ids=["with ##", "without ##"])
def test_vocabularies_of_slow_tokenizers(pieces, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "a", *(["##s"] if pieces else [])]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"))
    ours = load_tokenizer(tmp_path)
    for text in ("The cats sat", "a dog [MASK]", "the cat"):
        assert ours.add_special_tokens(ours.encode(text, allow_special=True))[0] == theirs.encode(text)


def test_vocab_and_merges_of_slow_tokenizers(shared, tmp_path):
    for family, name in (("gpt2", "GPT2Tokenizer"), ("gpt2", "RobertaTokenizer")):
        folder = shared / "tokenizers" / family
        files = {kind: next(folder.rglob(f"*{kind}*"), None) for kind in ("vocab", "merges")}
        if None in files.values():
            pytest.skip(f"{folder} has no vocabulary files")
        (tmp_path / "vocab.json").write_bytes(files["vocab"].read_bytes())
        (tmp_path / "merges.txt").write_bytes(files["merges"].read_bytes())
        theirs = getattr(transformers, name).from_pretrained(tmp_path)
        for text in ("Hello world, my dog is cute", " naïve 中文"):
            assert load_tokenizer(tmp_path).encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_gpt2_with_the_vocabulary_of_a_bert_learns_to_write(tmp_path):
    """As Chinese GPT-2s on the hub are: GPT-2's own end token is out of range, the separator ends a text."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"我们今天去学校你好气很"]
    gpt2(vocab_size=len(words)).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "m" / "vocab.txt"))
    rows = [json.dumps({"source": "我们今天去学校"[:n], "target": "天气很好"}) for n in range(1, 8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    task = TaskConfig(train=str(tmp_path / "rows.jsonl"), kind="generate", length=32)
    plan = make_plan(FinetuneConfig(model=str(tmp_path / "m"), task=task, folder=tmp_path / "run"))
    assert plan.tokenizer.encode("我们今天") == theirs.encode("我们今天", add_special_tokens=False)
    assert {row[-1] for row in plan.train.targets} == {theirs.sep_token_id}


# ---- sentence-transformers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentence_base(tmp_path_factory) -> Path:
    from tokenizers import BertWordPieceTokenizer

    folder = tmp_path_factory.mktemp("sentence") / "base"
    made = BertWordPieceTokenizer()
    made.train_from_iterator(TEXT, vocab_size=60, min_frequency=1, show_progress=False)
    tokenizer = transformers.BertTokenizer(tokenizer_object=made._tokenizer)
    config = transformers.BertConfig(**BERT | {"vocab_size": len(tokenizer)})
    drawn(transformers.BertModel(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_sentence_vectors_are_those_of_sentence_transformers(mode, normalize, sentence_base, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models

    reader = models.Transformer(str(sentence_base), max_seq_length=9)
    modules = [reader, models.Pooling(16, pooling_mode=mode), *([models.Normalize()] if normalize else [])]
    made = library.SentenceTransformer(modules=modules, device="cpu")
    made.save(str(tmp_path / "st"))
    again = library.SentenceTransformer(str(tmp_path / "st"), device="cpu")
    texts = ["the cat", "a dog and a cat sat on the mat and the dog ran on the mat", "dog"]
    expected = again.encode(texts)
    found = plume.load(tmp_path / "st").embed(texts)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    (tmp_path / "st" / "sentence_bert_config.json").write_text('{"max_seq_length": 5, "do_lower_case": false}')
    short = library.SentenceTransformer(str(tmp_path / "st"), device="cpu")
    found = plume.load(tmp_path / "st").embed(texts)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(short.encode(texts)), atol=1e-5, rtol=1e-5)
    assert main(["import", str(tmp_path / "st"), "--out", str(tmp_path / "new")]) == 0  # pools as it did
    copied = library.SentenceTransformer(str(tmp_path / "new"), device="cpu")
    for vectors in (plume.load(tmp_path / "new").embed(texts), copied.encode(texts)):
        torch.testing.assert_close(torch.tensor(vectors), torch.tensor(found), atol=1e-5, rtol=1e-5)


def test_modules_that_are_not_supported_are_named(sentence_base, tmp_path):
    import shutil

    shutil.copytree(sentence_base, tmp_path / "st")
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (tmp_path / "st" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="the module Dense is not supported"):
        plume.load(tmp_path / "st").embed(["the cat"])


# ---- plume import ------------------------------------------------------------------------------------------------


def test_import_with_architecture_and_tokenizer(tmp_path, capsys):
    theirs = drawn(transformers.RobertaModel(transformers.RobertaConfig(**BERT)))
    theirs.save_pretrained(tmp_path / "m")
    edit(tmp_path / "m", "architectures", "model_type")
    words = ["<s>", "<pad>", "</s>", "<unk>", *(chr(97 + i) for i in range(26)), "<mask>"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_text("\n".join(words) + "\n")
    given = ["--architecture", "RobertaModel", "--tokenizer", str(tmp_path / "tokenizer")]
    assert main(["import", str(tmp_path / "m"), "--out", str(tmp_path / "new"), *given]) == 0
    lm = plume.load(tmp_path / "new")
    assert lm.head == "bare" and lm.tokenizer.encode("a b") == [4, 5]
    with torch.no_grad():
        torch.testing.assert_close(lm.model(TOKENS), theirs(TOKENS).last_hidden_state, **CLOSE)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
def test_the_head_of_roberta_has_one_activation(activation, tmp_path):
    """Whatever hidden_act says; its logits were others than those of transformers."""
    theirs = roberta(hidden_act=activation)
    theirs.save_pretrained(tmp_path / "m")
    if activation == "gelu":
        same(load_model(tmp_path / "m"), theirs)
        return
    with pytest.raises(UserError, match="RobertaForMaskedLM has 'gelu' in its head"):
        load_model(tmp_path / "m")
    roberta("RobertaModel", hidden_act=activation).save_pretrained(tmp_path / "bare")
    body = load_model(tmp_path / "bare")
    with pytest.raises(UserError, match="RobertaForMaskedLM has 'gelu' in its head"):
        save_model(Model(body.config, "masked-token"), tmp_path / "saved")


def test_weights_beside_other_values_without_a_family_named(tmp_path):
    theirs = gpt2()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**theirs.state_dict(), "epoch": 3}, tmp_path / "pytorch_model.bin")
    same(load_model(edit(tmp_path, "model_type", "architectures")), theirs)


@pytest.mark.parametrize("several", [False, True])
def test_chat_templates_are_found_and_kept(several, shared, tmp_path):
    """Of several templates the default, as transformers takes it; a copy had none, so that chats became plain text."""
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(shared / "tokenizers/gpt2")
    default, other = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "{{ tools }}"
    gpt2(vocab_size=50257).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    templates = [{"name": "tool_use", "template": other}, {"name": "default", "template": default}]
    config = json.loads((tmp_path / "m/tokenizer_config.json").read_text())
    config["chat_template"] = templates if several else default
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps(config))
    plume.load(tmp_path / "m", engine="torch").save(tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", tmp_path / "imported")
    (tmp_path / "imported/chat_template.jinja").write_text("of another model")
    assert main(["import", str(tmp_path / "m"), "--out", str(tmp_path / "imported")]) == 0
    chat = [{"role": "user", "content": "hi"}]
    for name in ("m", "saved", "imported"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs.apply_chat_template(chat, tokenize=False) == "<user>hi"
        assert read_chat_template(tmp_path / name) == default


@pytest.mark.slow
def test_untied_weights_are_exported(tmp_path):
    """ONNX is run and compared by the export itself; GGUF holds the output weights under llama.cpp's name."""
    import gguf
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer

    from plume.config import ExportConfig
    from plume.inference.export import export

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXT, vocab_size=270, special_tokens=["<|endoftext|>"], show_progress=False)
    theirs = gpt2(tie_word_embeddings=False, vocab_size=made.get_vocab_size(), n_embd=32)
    theirs.save_pretrained(tmp_path / "m")
    made.save(str(tmp_path / "m" / "tokenizer.json"))
    done = export(ExportConfig(model=str(tmp_path / "m"), out=tmp_path / "m.onnx", format="onnx"))
    assert done.checked_with == "onnxruntime" and done.difference < 1e-3
    export(ExportConfig(model=str(tmp_path / "m"), out=tmp_path / "m.gguf", format="gguf"))
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    np.testing.assert_allclose(tensors["output.weight"], theirs.lm_head.weight.detach().numpy())
    np.testing.assert_allclose(tensors["token_embd.weight"], theirs.transformer.wte.weight.detach().numpy())


def test_untied_weights_stay_untied_in_training(tmp_path):
    """The gradients of both tables are those of transformers."""
    theirs = gpt2(tie_word_embeddings=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    theirs.save_pretrained(tmp_path / "m")
    ours = load_model(tmp_path / "m").train()
    hidden = ours.body(TOKENS[:, :-1])
    loss = token_loss(hidden, ours.table, TOKENS[:, 1:], vocab_size=61) / TOKENS[:, 1:].numel()
    loss.backward()
    theirs(TOKENS, labels=TOKENS).loss.backward()
    torch.testing.assert_close(ours.table.grad, theirs.lm_head.weight.grad, **CLOSE)
    torch.testing.assert_close(ours.body.embed.tokens.weight.grad, theirs.transformer.wte.weight.grad, **CLOSE)
