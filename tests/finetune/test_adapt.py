"""What is frozen stays, what is transferred is the same, and LoRA is peft's."""

import pytest
import torch
import transformers
from tiny import config_of, random_base, tokenizer_of

from plume.config import AdaptConfig, UserError
from plume.hf import load_model, save_model
from plume.model.heads import Model
from plume.tasks.token_rows import with_task_tokens
from plume.train.adapt import (
    Freezer,
    add_lora,
    check_adapt,
    grow_table,
    keep_layers,
    lr_scales,
    merge_lora,
    save_adapter,
    set_dropout,
    trainable,
)

LABELS = ("no", "yes")
PARTS = ("q", "k", "v", "out", "up", "down")


def model_of(family, head="classify"):
    torch.manual_seed(1)
    model = Model(config_of(family), head, LABELS if head == "classify" else ())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def learning(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_frozen_layers_do_not_learn():
    model = model_of("bert")
    Freezer(model, AdaptConfig(freeze_layers=1))
    left = learning(model)
    assert not any("embed" in name or "blocks.0" in name for name in left)
    assert any("blocks.1" in name for name in left) and any(name.startswith("head") for name in left)


def test_features_train_the_head_alone():
    model = model_of("gpt2")
    Freezer(model, AdaptConfig(mode="features"))
    assert all(name.startswith("head") for name in learning(model))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_rank": 16}, "lora_rank=16 needs mode=lora, not full"),
        ({"mode": "features", "lora_modules": ("q",)}, "lora_modules=.* needs mode=lora, not features"),
        ({"mode": "features", "freeze_layers": 1}, "freeze_layers=1 needs mode=full or lora, not features"),
        ({"mode": "features", "layer_decay": 0.9}, "layer_decay=0.9 needs mode=full or lora, not features"),
    ],
)
def test_what_a_mode_does_not_use_is_an_error(fields, message):
    with pytest.raises(UserError, match=message):
        AdaptConfig(**fields)


def test_layers_open_one_by_one_from_the_top():
    model = model_of("bert")
    freezer = Freezer(model, AdaptConfig(unfreeze_every=10))
    freezer.at(0)
    assert not any("blocks.0" in n or "embed" in n for n in learning(model)) and any(
        "blocks.1" in n for n in learning(model)
    )
    freezer.at(10)
    assert any("blocks.0" in n for n in learning(model)) and not any("embed" in n for n in learning(model))
    freezer.at(20)
    assert any("embed" in n for n in learning(model))
    freezer.at(5)  # going on from a checkpoint: a pure function of the step
    assert not any("blocks.0" in n for n in learning(model))


def test_rates_fall_from_layer_to_layer():
    rates = lr_scales(model_of("gpt2"), 0.5)
    assert rates["head.out.weight"] == 1.0 and rates["body.norm.weight"] == 1.0
    assert rates["body.blocks.1.attn.norm.weight"] == 0.5
    assert rates["body.blocks.0.attn.norm.weight"] == 0.25
    assert rates["body.embed.tokens.weight"] == 0.125


def test_only_the_first_layers_are_transferred():
    model, before = model_of("gpt2"), model_of("gpt2").state_dict()
    keep_layers(model, 1)
    after = model.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {n for n in before if "embed" in n or "blocks.0" in n} <= same
    assert not any("blocks.1" in n and n.endswith("weight") for n in same)
    # fresh weights have the spread that a new model has
    assert after["body.blocks.1.attn.inner.q.weight"].std() == pytest.approx(0.02, rel=0.3)
    assert after["body.blocks.1.attn.inner.out.weight"].std() == pytest.approx(0.02 / 2, rel=0.3)
    assert torch.equal(after["body.blocks.1.attn.norm.weight"], torch.ones(16))
    keep_layers(model, -1)
    assert model.state_dict()["body.embed.tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(UserError, match="transfer_layers=9"):
        check_adapt(AdaptConfig(transfer_layers=9), 2)


def with_lora(family, folder, parts):
    """A model with LoRA whose small matrices are random, as if trained; and its base folder."""
    tokenizer = with_task_tokens(tokenizer_of(family))
    base = random_base(family, folder / "base")
    torch.manual_seed(5)
    model = load_model(base, head="classify", labels=LABELS)
    fresh = grow_table(model, tokenizer.vocab_size)
    save_model(model, folder / "grown", tokenizer=tokenizer)
    config = AdaptConfig(mode="lora", lora_rank=3, lora_alpha=5.0, lora_modules=parts)
    add_lora(model, config, fresh)
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.2)
            assert name.startswith("head") or name.endswith((".up", ".down", ".fresh")), name
    return model.eval(), config, tokenizer


@pytest.mark.parametrize("parts", [("q", "v"), PARTS])
@pytest.mark.parametrize("family", ["gpt2", "openai-gpt", "bert", "roberta"])
def test_peft_opens_the_adapter_and_merging_changes_nothing(family, parts, tmp_path):
    import peft

    model, config, tokenizer = with_lora(family, tmp_path, parts)
    tokens = torch.randint(5, tokenizer.vocab_size, (1, 9), generator=torch.Generator().manual_seed(2))
    tokens[0, -1] = tokenizer.vocab_size - 1  # a new row, where there are any
    with torch.no_grad():
        expected = model(tokens)
    learns, total = trainable(model)
    assert 0 < learns < total / 2
    save_adapter(model, config, tmp_path / "adapter", base=str(tmp_path / "base"))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=2)
    theirs.resize_token_embeddings(tokenizer.vocab_size, mean_resizing=False)
    theirs.config.pad_token_id = tokenizer.vocab_size + 1  # nothing here is padding
    opened = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    merge_lora(model)
    assert not any("fresh" in name or ".down" in name for name in model.state_dict() if "mlp" not in name)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)
    save_model(model, tmp_path / "merged", tokenizer=tokenizer)
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "merged")(tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_dropout_is_changed_in_every_part(family):
    """Without any, training computes the same twice; with it in one part alone, it does not."""
    tokens, lengths = torch.tensor([[3, 4, 5, 6]]), torch.tensor([4])

    def twice(everywhere, classifier):
        model = model_of(family).train()
        set_dropout(model, everywhere, classifier)
        return [model(tokens, lengths=lengths) for _ in range(2)], model

    (first, second), model = twice(0.0, 0.0)
    assert torch.equal(first, second) and model.config.dropout == 0.0
    for part in ((0.5, 0.0), (0.0, 0.5)):
        (first, second), _ = twice(*part)
        assert not torch.equal(first, second)
    (_, _), kept = twice(None, None)
    assert kept.config.dropout == config_of(family).dropout
