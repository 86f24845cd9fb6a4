"""Explanations agree with the model: attentions, answers and sums against transformers and plain definitions."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import FAMILIES, TRANSFORMER, random_model, random_pair

from plume.config import UserError
from plume.explain import as_json, candidates, explain, packed

CAUSAL = ["gpt2", "gpt2-narrow-mlp", "openai-gpt", "transformer-decoder"]
BOTH_SIDES = ["bert", "roberta", "distilbert"]
TOKENS = [5, 9, 17, 9, 33, 60, 5, 41, 12, 7, 9, 3]


def head_of(family: str) -> str:
    return "next-token" if family in CAUSAL else "masked-token"


@pytest.mark.parametrize("family", CAUSAL + BOTH_SIDES)
def test_attention_equals_transformers_eager_attention(family, tmp_path):
    theirs, ours = random_pair(family, head_of(family), tmp_path / "model")
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS]), output_attentions=True)
    seen = explain(ours, TOKENS)
    for layer, weights in enumerate(expected.attentions):
        np.testing.assert_allclose(seen.attention(layer), weights[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(seen.attention(layer).sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(seen.logits.numpy(), expected.logits[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("family", CAUSAL + BOTH_SIDES)
def test_the_stream_equals_transformers_hidden_states(family, tmp_path):
    theirs, ours = random_pair(family, head_of(family), tmp_path / "model")
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    stream = explain(ours, TOKENS).residual()
    inner = len(expected) - (ours.body.norm is not None)  # theirs end behind the final norm
    for row in range(inner):
        np.testing.assert_allclose(stream[row], expected[row][0].numpy(), atol=1e-5)
    np.testing.assert_allclose(explain(ours, TOKENS).norms(), np.linalg.norm(stream, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "openai-gpt", "bert"])
def test_the_last_row_of_the_lens_is_the_real_distribution(family, tmp_path):
    theirs, ours = random_pair(family, head_of(family), tmp_path / "model")
    with torch.no_grad():
        real = theirs(torch.tensor([TOKENS])).logits[0].softmax(-1).topk(5)
    lens = explain(ours, TOKENS).lens(5)
    assert lens.tokens.shape == (4, len(TOKENS), 5)
    np.testing.assert_array_equal(lens.tokens[-1], real.indices.numpy())
    np.testing.assert_allclose(lens.probabilities[-1], real.values.numpy(), atol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
def test_contributions_add_up_to_the_logit_of_the_answer(family, tmp_path):
    theirs, ours = random_pair(family, "next-token", tmp_path / "model")
    with torch.no_grad():
        logits = theirs(torch.tensor([TOKENS])).logits[0]
    parts = explain(ours, TOKENS).contributions()
    expected = (logits.max(-1).values - logits.mean(-1)).numpy()
    summed = parts.embedding + parts.attention.sum(0) + parts.mlp.sum(0) + parts.bias
    np.testing.assert_allclose(summed, expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(parts.answer, logits.argmax(-1).numpy())
    assert np.abs(parts.attention).max() > 0.01 and np.abs(parts.mlp).max() > 0.01


def test_contributions_of_a_masked_model_have_the_shapes_of_its_layers():
    parts = explain(random_model(FAMILIES["bert"], "masked-token"), TOKENS).contributions()
    assert parts.attention.shape == parts.mlp.shape == (3, len(TOKENS))
    assert np.isfinite(parts.attention).all()


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_steps_lead_from_the_query_to_the_sum(family):
    model = random_model(FAMILIES[family], head_of(family))
    seen = explain(model, TOKENS)
    steps = seen.steps(layer=1, head=2, query=6)
    assert len(steps.seen) == (7 if family == "gpt2" else len(TOKENS))
    by_hand = [sum(float(a) * float(b) for a, b in zip(steps.q, key, strict=True)) for key in steps.k]
    np.testing.assert_allclose(steps.scores, by_hand, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(steps.scaled, np.array(by_hand) / 2, rtol=1e-4, atol=1e-5)  # sqrt of a head width of 4
    powers = [math.exp(s) for s in steps.scaled]
    np.testing.assert_allclose(steps.weights, np.array(powers) / sum(powers), rtol=1e-4)
    np.testing.assert_allclose(steps.weights, seen.attention(1, 2)[6][list(steps.seen)], atol=1e-6)
    np.testing.assert_allclose(steps.output, (steps.weights[:, None] * steps.v).sum(0), atol=1e-5)


def test_the_heads_outputs_are_what_the_layer_writes():
    """All heads' sums, side by side, through the output matrix: attention's own result."""
    model = random_model(FAMILIES["gpt2"])
    seen = explain(model, TOKENS)
    side_by_side = np.concatenate([seen.steps(2, head, 8).output for head in range(4)])
    out = model.body.blocks[2].attn.inner.out
    with torch.no_grad():
        written = out(torch.from_numpy(side_by_side)).numpy()
    np.testing.assert_allclose(seen._heard["attention2"][8].numpy(), written, atol=1e-5)


def test_a_banded_layer_looks_no_further_than_its_band():
    seen = explain(random_model(replace(FAMILIES["gpt2"], band=4)), TOKENS)
    places = np.arange(len(TOKENS))
    far = places[:, None] - places >= 4
    assert (seen.attention(1)[:, far] == 0).all()
    assert (seen.attention(0)[:, np.tril(far)] > 0).all()
    assert seen.steps(1, 0, 9).seen == (6, 7, 8, 9)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_head_properties_follow_their_definitions(family):
    seen = explain(random_model(FAMILIES[family], head_of(family)), TOKENS)
    properties, count = seen.head_properties(), len(TOKENS)
    w = seen.attention(2, 1)
    assert properties.to_previous[2, 1] == pytest.approx(np.mean([w[i, i - 1] for i in range(1, count)]), abs=1e-6)
    assert properties.to_first[2, 1] == pytest.approx(np.mean([w[i, 0] for i in range(1, count)]), abs=1e-6)
    looked = [
        [w[i, j] for j in range(count) if TOKENS[i] == TOKENS[j] and (j < i if family == "gpt2" else j != i)]
        for i in range(count)
    ]
    assert properties.to_same[2, 1] == pytest.approx(np.mean([sum(row) for row in looked if row]), abs=1e-6)
    distance = np.mean([sum(w[i, j] * abs(i - j) for j in range(count)) for i in range(count)])
    assert properties.distance[2, 1] == pytest.approx(distance, rel=1e-4)


def test_averages_and_rollout_follow_their_definitions():
    seen = explain(random_model(FAMILIES["gpt2"]), TOKENS)
    np.testing.assert_allclose(seen.mean_attention(1), seen.attention(1).mean(0), atol=1e-6)
    through = np.eye(len(TOKENS))
    for layer in range(3):
        through = (seen.attention(layer).mean(0) + np.eye(len(TOKENS))) / 2 @ through
    np.testing.assert_allclose(seen.rollout(), through, atol=1e-5)
    np.testing.assert_allclose(seen.rollout().sum(-1), 1, atol=1e-5)


def test_surprise_equals_a_written_out_loop(tmp_path):
    theirs, ours = random_pair("gpt2", "next-token", tmp_path / "model")
    found = explain(ours, TOKENS).surprise()
    assert math.isnan(found.surprisal[0]) and found.rank[0] == -1
    for i in range(1, len(TOKENS)):
        with torch.no_grad():
            p = theirs(torch.tensor([TOKENS[:i]])).logits[0, -1].double().softmax(-1)
        assert found.surprisal[i] == pytest.approx(-math.log(p[TOKENS[i]]), abs=1e-4)
        assert found.entropy[i] == pytest.approx(-sum(float(x) * math.log(x) for x in p if x > 0), abs=1e-4)
        assert found.rank[i] == int((p > p[TOKENS[i]]).sum())
    assert found.perplexity == pytest.approx(math.exp(found.surprisal[1:].mean()), rel=1e-5)


def test_a_start_token_gives_the_first_token_an_expectation():
    model = random_model(FAMILIES["gpt2"])
    with_start = explain(model, TOKENS).surprise(start=60)
    shifted = explain(model, [60, *TOKENS]).surprise()
    np.testing.assert_allclose(with_start.surprisal, shifted.surprisal[1:], atol=1e-5)


def test_a_full_context_still_has_surprise_with_a_start_token():
    model = random_model(FAMILIES["gpt2"])
    tokens = [3 + i % 50 for i in range(32)]
    found = explain(model, tokens).surprise(start=60)
    assert not np.isnan(found.surprisal).any()


def test_a_masked_model_hides_each_token_in_turn(tmp_path):
    theirs, ours = random_pair("bert", "masked-token", tmp_path / "model")
    found = explain(ours, TOKENS).surprise(mask=4)
    for i in range(len(TOKENS)):
        masked = [4 if j == i else t for j, t in enumerate(TOKENS)]
        with torch.no_grad():
            p = theirs(torch.tensor([masked])).logits[0, i].softmax(-1)
        assert found.surprisal[i] == pytest.approx(-math.log(p[TOKENS[i]]), abs=1e-3)
    with pytest.raises(UserError, match="mask"):
        explain(ours, TOKENS).surprise()


@pytest.mark.parametrize("k", [1, 10, 61, 200])
def test_candidates_and_the_rest_make_the_whole(k):
    logits = torch.randn(61, generator=torch.Generator().manual_seed(3)) * 4
    found = candidates(logits, k, str)
    p = logits.double().softmax(0).sort(descending=True).values[:k].numpy()
    np.testing.assert_allclose(found.probabilities, p, rtol=1e-5)
    whole = np.exp(found.logits.astype(float)).sum() + math.exp(found.rest)
    assert whole == pytest.approx(float(logits.double().exp().sum()), rel=1e-5)


def test_the_model_is_left_as_it_was():
    model = random_model(FAMILIES["gpt2"])
    explain(model, TOKENS).contributions()
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_data_and_pictures_are_plain(tmp_path):
    seen = explain(random_model(FAMILIES["gpt2"]), TOKENS, spell=lambda t: "</script>" if t == 9 else f"<{t}>")
    text = json.dumps(seen.as_json(), allow_nan=False)
    assert len(json.loads(text)["lens"]["pieces"]) == 4
    results = (seen, seen.next_tokens(), seen.steps(0, 0, 3), seen.lens(), seen.surprise(), seen.contributions())
    for result in results:
        shown = result._repr_html_()
        assert "</script>" not in shown and "<5>" not in shown
    assert as_json(float("nan")) is None
    half = packed(np.array([[0.5, 1.0]], dtype=np.float32))
    assert half["shape"] == [1, 2]


@pytest.mark.parametrize(
    ("tokens", "message"), [([], "0 tokens"), ([1] * 33, "33 tokens"), ([61], "token 61"), ([-1], "token -1")]
)
def test_wrong_tokens_are_named(tokens, message):
    with pytest.raises(UserError, match=message):
        explain(random_model(FAMILIES["gpt2"]), tokens)


def test_wrong_places_are_named():
    seen = explain(random_model(FAMILIES["gpt2"]), TOKENS)
    for call, message in [
        (lambda: seen.attention(3), "layer=3"),
        (lambda: seen.attention(0, 4), "head=4"),
        (lambda: seen.steps(0, 0, 12), "query=12"),
        (lambda: explain(random_model(TRANSFORMER), TOKENS), "encoder-decoder"),
        (lambda: explain(random_model(FAMILIES["bert"], "classify"), TOKENS).lens(), "classify"),
    ]:
        with pytest.raises(UserError, match=message):
            call()


def test_an_lm_explains_a_text(tmp_path):
    import plume
    from plume.config import TokenizerConfig
    from plume.text import train_tokenizer
    from plume.weights import save_model

    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), ["x"])
    model = random_model(replace(FAMILIES["gpt2"], vocab_size=tokenizer.vocab_size))
    save_model(model, tmp_path / "model", tokenizer=tokenizer)
    seen = plume.load(tmp_path / "model").explain("robot 你")
    assert "".join(seen.pieces[:6]) == "robot " and seen.pieces[6] == "\\xe4"
    np.testing.assert_allclose(seen.attention(0).sum(-1), 1, atol=1e-5)
    assert seen.next_tokens(3).probabilities[0] > 0
