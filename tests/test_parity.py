"""Plume and transformers compute the same, both directions, for every family and head."""

from dataclasses import replace

import pytest
import torch
from families import FAMILIES, PAIRS, TRANSFORMER, open_in_transformers, random_model, random_pair

from plume.config import UserError
from plume.hf import load_model, read_config, save_model
from plume.hf.families import family_of
from plume.model.heads import Model

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def tokens_for(model: Model, rows: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def their_answer(theirs, head: str, tokens: torch.Tensor) -> torch.Tensor:
    if head == "choose":
        name = type(theirs).__name__
        if "DoubleHeads" in name:
            last = torch.full((1, len(tokens)), tokens.shape[1] - 1)
            return theirs(tokens[None], mc_token_ids=last).mc_logits[0]
        return theirs(tokens[None]).logits[0]
    if head == "classify" and theirs.config.pad_token_id is None:
        theirs.config.pad_token_id = (
            0  # without a tokenizer the folder names none, and transformers then refuses batches
        )
    out = theirs(tokens)
    if head == "bare":
        return out.last_hidden_state
    if head == "span":
        return torch.stack([out.start_logits, out.end_logits], dim=-1)
    return out.prediction_logits if head == "pretraining" else out.logits


@pytest.mark.parametrize(("family", "head"), PAIRS)
@torch.no_grad()
def test_same_answers_as_transformers(family, head, tmp_path):
    theirs, ours = random_pair(family, head, tmp_path / "model")
    tokens = tokens_for(ours)
    torch.testing.assert_close(ours(tokens), their_answer(theirs, head, tokens), **CLOSE)


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "distilbert"])
def test_a_stack_alone_has_no_output_weights(family, tmp_path):
    bare = random_model(replace(FAMILIES[family], tie_embeddings=False), "bare")
    open_in_transformers(save_model(bare, tmp_path / "model"))


@pytest.mark.parametrize(("family", "head"), PAIRS)
@torch.no_grad()
def test_reads_what_transformers_writes(family, head, tmp_path):
    theirs, ours = random_pair(family, head, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert again.kind == head
    assert again.config == ours.config
    tokens = tokens_for(ours)
    torch.testing.assert_close(again(tokens), ours(tokens), **CLOSE)


@torch.no_grad()
def test_next_sentence_is_the_same_as_in_transformers(tmp_path):
    theirs, ours = random_pair("bert", "pretraining", tmp_path / "model")
    tokens = tokens_for(ours)
    segments = (torch.arange(16) > 8).long().expand(2, -1)
    hidden = ours.body(tokens, segments=segments)
    expected = theirs(tokens, token_type_ids=segments)
    torch.testing.assert_close(ours.head.follows(hidden), expected.seq_relationship_logits, **CLOSE)
    torch.testing.assert_close(ours.read(hidden), expected.prediction_logits, **CLOSE)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@torch.no_grad()
def test_padding_is_masked_as_in_transformers(family, tmp_path):
    theirs, ours = random_pair(family, "masked-token", tmp_path / "model")
    tokens, lengths = tokens_for(ours), torch.tensor([16, 9])
    real = torch.arange(16) < lengths[:, None]
    tokens[~real] = theirs.config.pad_token_id or 0
    expected = theirs(tokens, attention_mask=real.long()).logits
    torch.testing.assert_close(ours(tokens, lengths=lengths)[real], expected[real], **CLOSE)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_encoder_decoder_is_marian(bias, tmp_path):
    ours = random_model(replace(TRANSFORMER, attention_bias=bias))
    save_model(ours, tmp_path / "model")
    theirs = open_in_transformers(tmp_path / "model")
    source, target, lengths = tokens_for(ours), tokens_for(ours, length=7), torch.tensor([16, 5])
    real = (torch.arange(16) < lengths[:, None]).long()
    expected = theirs(source, attention_mask=real, decoder_input_ids=target).logits
    torch.testing.assert_close(ours(source, target, lengths=lengths), expected, **CLOSE)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    torch.testing.assert_close(again(source, target, lengths=lengths), expected, **CLOSE)


def test_the_parity_test_can_fail(tmp_path):
    """The other GELU, or one norm bias set to zero, must be seen."""
    ours = random_model(FAMILIES["gpt2"])
    tokens = tokens_for(ours)
    with torch.no_grad():
        right = ours(tokens)
        ours.body.norm.bias.zero_()
        assert (ours(tokens) - right).abs().max() > 1e-2
    other = random_model(replace(FAMILIES["gpt2"], activation="gelu"))
    with torch.no_grad():
        assert (other(tokens) - right).abs().max() > 1e-4


def test_rows_that_pad_the_vocabulary_are_not_written(tmp_path):
    ours = random_model(replace(FAMILIES["gpt2"], vocab_multiple=64))
    assert ours.table.shape[0] == 64
    save_model(ours, tmp_path / "model")
    theirs = open_in_transformers(tmp_path / "model")
    assert theirs.transformer.wte.weight.shape[0] == 61
    tokens = tokens_for(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **CLOSE)


def test_a_large_model_is_sharded_with_an_index(tmp_path):
    ours = random_model(FAMILIES["gpt2"])
    save_model(ours, tmp_path / "model", max_shard_bytes=20_000)
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    theirs, again, tokens = open_in_transformers(tmp_path / "model"), load_model(tmp_path / "model"), tokens_for(ours)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), theirs(tokens).logits, **CLOSE)


def test_legacy_bin_with_old_names_and_buffers_opens(tmp_path):
    theirs, ours = random_pair("bert", "masked-token", tmp_path / "model")
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in theirs.state_dict().items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(32)[None]
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "model" / "pytorch_model.bin")
    tokens = tokens_for(ours)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "model")(tokens), ours(tokens), **CLOSE)


def test_a_pickle_with_code_is_not_run(tmp_path):
    random_pair("gpt2", "next-token", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"wte.weight": print}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        load_model(tmp_path / "model")


def test_banded_models_keep_their_own_type_and_come_back(tmp_path):
    ours = random_model(replace(FAMILIES["gpt2"], band=4))
    save_model(ours, tmp_path / "model")
    assert read_config(tmp_path / "model").raw["model_type"] != "gpt2"
    again, tokens = load_model(tmp_path / "model"), tokens_for(ours)
    assert again.config == ours.config
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), ours(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_own_type(family):
    expected = {"gpt2-narrow-mlp": "gpt2", "transformer-decoder": "openai-gpt"}.get(family, family)
    assert family_of(FAMILIES[family]).model_type == expected


def test_another_head_takes_the_stack_and_starts_fresh(tmp_path):
    _, ours = random_pair("bert", "masked-token", tmp_path / "model")
    tagger = load_model(tmp_path / "model", head="tag", labels=("a", "b"))
    tokens = tokens_for(ours)
    with torch.no_grad():
        torch.testing.assert_close(tagger.body(tokens), ours.body(tokens))
        assert tagger(tokens).shape == (2, 16, 2)
