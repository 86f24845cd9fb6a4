"""Activations, contributions, interventions and attribution against hooks on transformers' model of the same folder."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import FAMILIES, LABELS, TRANSFORMER, open_in_transformers, random_model
from hooked import hooks, recorded, their_answer, their_sites

from plume.config import UserError
from plume.explain import Edit, explain
from plume.hf import save_model

TOKENS = [5, 9, 17, 9, 33, 60, 5, 41, 12, 7]
OTHER = [8, 9, 11, 30, 33, 2, 5, 44, 12, 20]
SOURCE = [20, 31, 5, 8, 50, 11, 2]
HEADS, WIDTH = 4, 16
CASES = {
    "gpt2": (FAMILIES["gpt2"], "next-token"),
    "openai-gpt": (FAMILIES["openai-gpt"], "next-token"),
    "openai-gpt-classify": (FAMILIES["openai-gpt"], "classify"),
    "bert-classify": (FAMILIES["bert"], "classify"),
    "bert-masked": (FAMILIES["bert"], "masked-token"),
    "bert-span": (FAMILIES["bert"], "span"),
    "bert-tag": (FAMILIES["bert"], "tag"),
    "marian": (TRANSFORMER, "next-token"),
}


def pair(case, folder):
    config, head = CASES[case]
    ours = random_model(config, head)
    save_model(ours, folder)
    theirs = open_in_transformers(folder)
    assert not theirs.training
    return theirs, ours


def seen_by_us(ours, tokens=TOKENS):
    return explain(ours, tokens, source=SOURCE if ours.config.decoder_layers else None)


def cut(x):
    return x.view(len(x), HEADS, -1).transpose(0, 1).numpy()


@pytest.mark.parametrize("case", CASES)
def test_every_activation_equals_a_hook_on_transformers(case, tmp_path):
    theirs, ours = pair(case, tmp_path / "model")
    seen, found = seen_by_us(ours), recorded(theirs, TOKENS, SOURCE)
    np.testing.assert_allclose(seen.activation("logits"), found.pop("logits").numpy(), atol=1e-4)
    for name, expected in found.items():
        stack, _, rest = name.partition(".")
        layer, _, part = rest.partition(".")
        if part:
            value = seen.activation(part, layer=int(layer), stack=stack)
            split = part.rpartition(".")[2] in ("q", "k", "v", "heads")
            np.testing.assert_allclose(value, cut(expected) if split else expected.numpy(), atol=1e-4, err_msg=name)
        else:
            np.testing.assert_allclose(seen.activation(rest, stack=stack), expected.numpy(), atol=1e-4, err_msg=name)
    assert len(found) >= 12 * len(ours.body.blocks) if case != "marian" else len(found) > 60


@pytest.mark.parametrize("case", ["gpt2", "bert-classify", "marian"])
def test_attention_numbers_follow_from_hooked_queries_and_keys(case, tmp_path):
    theirs, ours = pair(case, tmp_path / "model")
    seen, found = seen_by_us(ours), recorded(theirs, TOKENS, SOURCE)
    stack = "encoder" if case == "bert-classify" else "decoder"
    for kind in ("attention", "cross") if case == "marian" else ("attention",):
        q, k, v = (cut(found[f"{stack}.1.{kind}.{name}"]).astype(float) for name in "qkv")
        products = np.einsum("htk,hsk->hts", q, k)
        np.testing.assert_allclose(seen.activation(f"{kind}.products", layer=1), products, atol=1e-4)
        scores = products / math.sqrt(WIDTH // HEADS)
        np.testing.assert_allclose(seen.activation(f"{kind}.scores", layer=1), scores, atol=1e-4)
        if seen.causal and kind == "attention":
            scores = np.where(np.tril(np.ones(scores.shape[1:])), scores, -np.inf)
        np.testing.assert_array_equal(np.isinf(seen.activation(f"{kind}.masked", layer=1)), np.isinf(scores))
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        weights = powers / powers.sum(-1, keepdims=True)
        np.testing.assert_allclose(seen.activation(f"{kind}.weights", layer=1, head=2), weights[2], atol=1e-5)
        np.testing.assert_allclose(seen.activation(f"{kind}.heads", layer=1), weights @ v, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "stack"), [("gpt2", None), ("bert-masked", None), ("marian", "encoder"), ("marian", None)]
)
def test_embedding_rows_add_up(case, stack, tmp_path):
    """Token, position and segment rows sum to the embedding, up to its norm."""
    _, ours = pair(case, tmp_path / "model")
    seen = seen_by_us(ours)
    rows = seen.activation("token_rows", stack=stack) + seen.activation("position_rows", stack=stack)
    if ours.config.segments:
        rows = rows + seen.activation("segment_rows", stack=stack)
    if ours.config.embed_norm:
        with torch.no_grad():
            rows = ours.body.embed.norm(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(rows, seen.activation("embedding", stack=stack), atol=1e-5)


def test_only_what_was_asked_for_is_kept():
    seen = explain(random_model(FAMILIES["gpt2"]), TOKENS)
    assert seen._recorded == {}
    seen.activation("mlp.up", layer=1)
    assert set(seen._recorded) == {"hidden", "decoder.1.mlp.up"}


# ---- contributions


@pytest.mark.parametrize("case", CASES)
def test_contributions_add_up_to_the_logit(case, tmp_path):
    theirs, ours = pair(case, tmp_path / "model")
    with torch.no_grad():
        logits = their_answer(theirs, TOKENS, SOURCE)
    parts = seen_by_us(ours).contributions(index=1)
    summed = parts.embedding + parts.attention.sum(0) + parts.cross.sum(0) + parts.mlp.sum(0) + parts.bias + parts.head
    expected = logits[..., 1] if case == "bert-span" else logits[..., 1] - logits.mean(-1)
    if logits.dim() == 1:
        at = 0 if "bert" in case else -1
        assert (np.delete(parts.total, at) == 0).all()
        expected = torch.zeros(len(TOKENS)).index_put((torch.tensor([at]),), expected)
    np.testing.assert_allclose(parts.total, expected.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(summed, expected.numpy(), rtol=1e-4, atol=2e-3)
    assert parts.names[0] == (LABELS[1] if case.endswith(("classify", "tag")) else "end" if "span" in case else "1")


def test_a_heads_contribution_is_its_part_of_the_logit(tmp_path):
    """Written out over transformers' weights: the head's update, through the last norm, times the token's row."""
    theirs, ours = pair("gpt2", tmp_path / "model")
    found, parts = recorded(theirs, TOKENS), seen_by_us(ours).contributions()
    norm, table = theirs.transformer.ln_f, theirs.lm_head.weight.detach().double()
    stream = found["decoder.2.mlp.output"].double()
    divisor = (stream.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    rows = table[found["logits"].argmax(-1)] - table.mean(0)  # (T, D)
    size = WIDTH // HEADS
    for layer, block in enumerate(theirs.transformer.h):
        weight = block.attn.c_proj.weight.detach().double()  # (in, out)
        for head in range(HEADS):
            columns = slice(head * size, (head + 1) * size)
            update = found[f"decoder.{layer}.attention.heads"][:, columns].double() @ weight[columns]
            normed = (update - update.mean(-1, keepdim=True)) / divisor * norm.weight.detach().double()
            np.testing.assert_allclose(parts.heads[layer, head], (normed * rows).sum(-1).numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", ["gpt2", "openai-gpt-classify", "bert-classify", "marian"])
def test_heads_add_up_to_their_attention(case):
    ours = random_model(*CASES[case])
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("inner.out.bias"):  # what belongs to no head
                parameter.zero_()
    parts = seen_by_us(ours).contributions()
    np.testing.assert_allclose(parts.heads.sum(1), parts.attention, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(parts.cross_heads.sum(1), parts.cross, rtol=1e-4, atol=1e-4)
    assert np.abs(parts.heads).max() > 0.01 and len(parts.cross) == (2 if case == "marian" else 0)


# ---- interventions


def edits():
    for value in ("zero", "mean", "patch"):
        for positions in (None, (2, 5)):
            yield Edit(part="head", layer=1, head=2, value=value, positions=positions)
            yield Edit(part="mlp", layer=0, value=value, positions=positions)
            yield Edit(part="attention", layer=1, value=value, positions=positions)
            yield Edit(part="residual", layer=1, value=value, positions=positions)


def edited_by_hooks(case, theirs, sites, edit, stack):
    """The same edit done on transformers' model."""
    part = {"head": "attention.heads", "cross_head": "cross.heads"}.get(edit.part, f"{edit.part}.update")
    name = f"{stack}.{edit.layer}.{part}" if edit.part != "residual" else f"{stack}.{edit.layer}.attention.input"
    if edit.part == "residual" and name not in sites:  # post-norm: what leaves the block before
        name = f"{stack}.{edit.layer - 1}.mlp.output"
    own, other = (recorded(theirs, tokens, SOURCE)[name] for tokens in (TOKENS, OTHER))
    new = {"zero": torch.zeros_like(own), "mean": own.mean(0).expand_as(own), "patch": other}[edit.value]
    size = WIDTH // HEADS
    columns = slice(None) if edit.head is None else slice(edit.head * size, (edit.head + 1) * size)
    positions = list(range(len(own))) if edit.positions is None else list(edit.positions)

    def change(_, x):
        x = x.clone()
        x[0, positions, columns] = new[positions, columns]
        return x

    with torch.no_grad(), hooks({name: residual_site(case, theirs, sites, name)}, change):
        return their_answer(theirs, TOKENS, SOURCE)


def residual_site(case, theirs, sites, name):
    """Where the stream itself can be replaced, not only a branch of it: what enters a block of GPT-2 and GPT-1."""
    if "gpt" in case and name.endswith(("attention.input", "mlp.output")):
        layer = int(name.split(".")[1])
        layer = layer if name.endswith("attention.input") else layer + 1
        return (theirs.transformer.h[layer], "input", slice(None))
    return sites[name]


@pytest.mark.parametrize("case", ["gpt2", "openai-gpt", "bert-classify", "marian"])
def test_interventions_equal_the_same_edit_by_hooks(case, tmp_path):
    theirs, ours = pair(case, tmp_path / "model")
    sites, seen, other = their_sites(theirs), seen_by_us(ours), seen_by_us(ours, OTHER)
    more = [Edit(part="cross_head", layer=1, head=3), Edit(part="cross", layer=0)] if case == "marian" else []
    for edit in [*edits(), *more]:
        expected = edited_by_hooks(case, theirs, sites, edit, seen.stack)
        found = seen.edited(edit, other=other).logits
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-4, err_msg=str(edit))
        assert (found != seen.logits).any(), edit


def test_an_encoders_head_can_be_edited_below_a_decoder(tmp_path):
    theirs, ours = pair("marian", tmp_path / "model")
    edit = Edit(part="head", layer=2, head=1, stack="encoder")
    expected = edited_by_hooks("marian", theirs, their_sites(theirs), edit, "encoder")
    np.testing.assert_allclose(seen_by_us(ours).edited(edit).logits.numpy(), expected.numpy(), atol=1e-4)


def test_edits_stack_and_everything_can_be_asked_again():
    seen = explain(random_model(FAMILIES["gpt2"]), TOKENS)
    first = seen.edited(Edit(part="head", layer=0, head=1))
    both = first.edited(Edit(part="mlp", layer=2))
    assert (both.activation("mlp.update", layer=2) == 0).all() and (first.activation("mlp.update", layer=2) != 0).any()
    assert (both.activation("attention.heads", layer=0, head=1) == 0).all()
    assert (both.logits != first.logits).any() and (first.logits != seen.logits).any()
    shifted = first.logits[:-1].log_softmax(-1)[range(len(TOKENS) - 1), TOKENS[1:]]
    np.testing.assert_allclose(first.surprise().surprisal[1:], -shifted.numpy(), atol=1e-5)
    with pytest.raises(UserError, match="start=3: an edited text"):
        first.surprise(start=3)
    np.testing.assert_array_equal(both.attention(0), seen.attention(0))


def test_an_edited_masked_model_is_surprised_as_it_was_edited():
    seen = explain(random_model(FAMILIES["bert"], "masked-token"), TOKENS)
    seen.mask, seen.predicted = 4, slice(1, -1)
    first = seen.edited(Edit(part="mlp", layer=1))
    found = first.surprise()
    assert np.isnan(found.surprisal[[0, -1]]).all()
    for i in (1, 5):
        masked = explain(seen.model, [4 if j == i else t for j, t in enumerate(TOKENS)])
        logits = masked.edited(Edit(part="mlp", layer=1)).logits[i].log_softmax(-1)
        assert found.surprisal[i] == pytest.approx(-float(logits[TOKENS[i]]), abs=1e-4)


@pytest.mark.parametrize("case", ["gpt2", "bert-classify", "marian"])
@pytest.mark.parametrize("part", ["head", "mlp", "residual"])
def test_the_map_of_effects_holds_each_intervention(case, part):
    ours = random_model(*CASES[case])
    seen, other = seen_by_us(ours), seen_by_us(ours, OTHER)
    position = None if case == "bert-classify" else 4
    target = seen.target(2, position)
    for value in ("zero", "patch"):
        found = seen.effects(part, value, index=2, position=position, other=other)
        layers = len(blocks(ours))
        assert found.effect.shape == {"head": (layers, HEADS), "mlp": (layers, 10), "residual": (layers + 1, 10)}[part]
        for layer, item in [(0, 1), (layers - 1, 3)]:
            where = {"head": item} if part == "head" else {"positions": (item,)}
            edited = seen.edited(Edit(part=part, layer=layer, value=value, **where), other=other)
            with torch.no_grad():
                after = float(edited.target_logit(edited.hidden[None], target)[0])
            assert found.effect[layer, item] == pytest.approx(after - found.before, abs=1e-4)


def blocks(model):
    return model.body.decoder.blocks if model.config.decoder_layers else model.body.blocks


def test_texts_of_other_lengths_are_patched_where_both_have_tokens():
    ours = random_model(FAMILIES["gpt2"])
    seen, short = explain(ours, TOKENS), explain(ours, TOKENS[:4])
    edited = seen.edited(Edit(part="mlp", layer=0, positions=(1, 3), value="patch"), other=short)
    np.testing.assert_allclose(edited.activation("mlp.update", layer=0)[1], short.activation("mlp.update", layer=0)[1])
    with pytest.raises(UserError, match="position 4"):
        seen.edited(Edit(part="mlp", layer=0, value="patch"), other=short)
    with pytest.raises(UserError, match="equal lengths"):
        seen.effects("head", "patch", other=short)


# ---- attribution


@pytest.mark.parametrize("case", CASES)
def test_integrated_gradients_sum_to_the_difference_of_logits(case, tmp_path):
    """The two logits themselves are transformers': of the text, and of the text whose every token is the baseline's."""
    theirs, ours = pair(case, tmp_path / "model")
    seen = seen_by_us(ours)
    position = None if case.endswith("classify") else 6
    found = seen.attribution(index=1, position=position, baseline=3)
    with torch.no_grad():
        ends = [their_answer(theirs, TOKENS, SOURCE), their_answer_to_baseline(theirs, 3)]
    logits = [row if position is None else row[position] for row in ends]
    values = [float(row[1] if case == "bert-span" else row[1] - row.mean()) for row in logits]
    assert found.logit == pytest.approx(values[0], abs=1e-3) and found.baseline == pytest.approx(values[1], abs=1e-3)
    assert found.total == pytest.approx(values[0] - values[1], rel=0.02, abs=1e-3)
    assert len(found.scores) == len(TOKENS) and (found.source_scores is not None) == (case == "marian")
    if seen.causal and position is not None:
        np.testing.assert_allclose(found.scores[position + 1 :], 0, atol=1e-6)


def their_answer_to_baseline(theirs, token):
    if theirs.config.is_encoder_decoder:
        given = {"input_ids": torch.tensor([[token] * len(SOURCE)])}
        return theirs(**given, decoder_input_ids=torch.tensor([[token] * len(TOKENS)])).logits[0]
    return their_answer(theirs, [token] * len(TOKENS))


def test_the_baseline_is_a_text_where_input_and_output_tables_differ():
    model = random_model(replace(FAMILIES["gpt2"], tie_embeddings=False))
    found, other = explain(model, TOKENS).attribution(index=7, baseline=3), explain(model, [3] * len(TOKENS))
    row = other.logits[-1]
    assert found.baseline == pytest.approx(float(row[7] - row.mean()), abs=1e-5)
    assert found.total == pytest.approx(found.logit - found.baseline, rel=0.02)


def test_the_default_baseline_is_the_mean_row():
    found = explain(random_model(FAMILIES["gpt2"]), TOKENS).attribution(index=7)
    assert found.total == pytest.approx(found.logit - found.baseline, rel=0.02)


def test_gradient_times_input_equals_autograd_on_transformers(tmp_path):
    theirs, ours = pair("gpt2", tmp_path / "model")
    found = explain(ours, TOKENS).attribution("gradient_x_input", index=7, position=8)
    rows = theirs.transformer.wte(torch.tensor([TOKENS])) + theirs.transformer.wpe.weight[None, : len(TOKENS)]
    rows = rows.detach().requires_grad_()
    only_rows = theirs(inputs_embeds=rows - theirs.transformer.wpe.weight[None, : len(TOKENS)])
    logits = only_rows.logits[0, 8]
    (gradient,) = torch.autograd.grad(logits[7] - logits.mean(), rows)
    np.testing.assert_allclose(found.scores, (gradient * rows).sum(-1)[0].detach().numpy(), rtol=1e-3, atol=1e-4)
