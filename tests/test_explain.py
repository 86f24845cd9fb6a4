"""Explanations agree with the model: attentions, answers and sums against transformers and plain definitions."""

import base64
import io
import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from families import FAMILIES, TRANSFORMER, random_model, random_pair
from PIL import Image

from plume.config import PRESETS, EngineConfig, TokenizerConfig, UserError
from plume.explain import Edit, as_json, candidates, explain, head_kinds, packed
from plume.lm import LM
from plume.model.heads import Model
from plume.tasks import Predictor
from plume.text import train_tokenizer
from plume.util import drawings

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


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_steps_lead_from_the_query_to_the_sum(family):
    model = random_model(FAMILIES[family], head_of(family))
    seen = explain(model, TOKENS)
    steps = seen.steps(layer=1, head=2, query=6)
    assert len(steps.keys) == (7 if family == "gpt2" else len(TOKENS))
    by_hand = [sum(float(a) * float(b) for a, b in zip(steps.q, key, strict=True)) for key in steps.k]
    np.testing.assert_allclose(steps.scores, by_hand, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(steps.scaled, np.array(by_hand) / 2, rtol=1e-4, atol=1e-5)  # sqrt of a head width of 4
    powers = [math.exp(s) for s in steps.scaled]
    np.testing.assert_allclose(steps.weights, np.array(powers) / sum(powers), rtol=1e-4)
    np.testing.assert_allclose(steps.weights, seen.attention(1, 2)[6][list(steps.keys)], atol=1e-6)
    np.testing.assert_allclose(steps.output, (steps.weights[:, None] * steps.v).sum(0), atol=1e-5)


def test_the_heads_outputs_are_what_the_layer_writes():
    """All heads' sums, side by side, through the output matrix: attention's own result."""
    model = random_model(FAMILIES["gpt2"])
    seen = explain(model, TOKENS)
    side_by_side = np.concatenate([seen.steps(2, head, 8).output for head in range(4)])
    out = model.body.blocks[2].attn.inner.out
    with torch.no_grad():
        written = out(torch.from_numpy(side_by_side)).numpy()
    np.testing.assert_allclose(seen.activation("attention.update", layer=2)[8], written, atol=1e-5)


def test_a_banded_layer_looks_no_further_than_its_band():
    seen = explain(random_model(replace(FAMILIES["gpt2"], band=4)), TOKENS)
    places = np.arange(len(TOKENS))
    far = places[:, None] - places >= 4
    assert (seen.attention(1)[:, far] == 0).all()
    assert (seen.attention(0)[:, np.tril(far)] > 0).all()
    assert seen.steps(1, 0, 9).keys == (6, 7, 8, 9)


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_head_scores_follow_their_definitions(family):
    seen = explain(random_model(FAMILIES[family], head_of(family)), TOKENS)
    scores, count, causal = seen.head_scores(), len(TOKENS), family == "gpt2"
    w = seen.attention(2, 1)
    assert scores.previous[2, 1] == pytest.approx(np.mean([w[i, i - 1] for i in range(1, count)]), abs=1e-6)
    assert scores.first[2, 1] == pytest.approx(np.mean([w[i, 0] for i in range(1, count)]), abs=1e-6)
    copies = [
        [j for j in range(count) if TOKENS[i] == TOKENS[j] and (j < i if causal else j != i)] for i in range(count)
    ]
    same = [sum(w[i, j] for j in row) for i, row in enumerate(copies) if row]
    assert scores.duplicate[2, 1] == pytest.approx(np.mean(same), abs=1e-6)
    after = [
        [j + 1 for j in row if j + 1 < count and (j + 1 < i if causal else j + 1 != i)] for i, row in enumerate(copies)
    ]
    induced = [sum(w[i, j] for j in row) for i, row in enumerate(after) if row]
    assert scores.induction[2, 1] == pytest.approx(np.mean(induced), abs=1e-6)
    distance = np.mean([sum(w[i, j] * abs(i - j) for j in range(count)) for i in range(count)])
    assert scores.distance[2, 1] == pytest.approx(distance, rel=1e-4)


def test_a_head_that_attends_to_the_previous_token_is_named():
    """One head made by hand: queries of a position match the keys of the position before it."""
    model = random_model(replace(FAMILIES["gpt2"], layers=1, norm="pre"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        block, context = model.body.blocks[0], model.config.context
        block.attn.norm.weight.fill_(1)
        angle = torch.arange(context) * 0.7
        waves = torch.stack([angle.cos(), angle.sin()], 1)  # (T, 2)
        model.body.embed.positions.weight[:, :2], model.body.embed.positions.weight[:, 2:4] = waves, -waves  # mean 0
        turn = torch.tensor([[math.cos(0.7), math.sin(0.7)], [-math.sin(0.7), math.cos(0.7)]])
        block.attn.inner.q.weight[:2, :2], block.attn.inner.k.weight[:2, :2] = 20 * turn, torch.eye(2)
    kinds = head_kinds(model)
    assert kinds.names == (("previous", "", "", ""),), kinds.scores.previous


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
    seen = explain(model, TOKENS)
    seen.contributions()
    seen.attribution()
    seen.effects("mlp", "mean")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
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
        (lambda: explain(random_model(TRANSFORMER), TOKENS), "encoder-decoder needs a source"),
        (lambda: explain(random_model(FAMILIES["gpt2"]), TOKENS, source=TOKENS), "only an encoder-decoder"),
        (lambda: explain(random_model(FAMILIES["bert"], "classify"), TOKENS).lens(), "classify"),
        (lambda: seen.activation("attention.wieghts", layer=0), "attention.weights"),
        (lambda: seen.activation("attention.q"), "layer=None"),
        (lambda: seen.activation("embedding", layer=0), "layer=0"),
        (lambda: seen.activation("segment_rows"), "segment table"),
        (lambda: seen.activation("embedding", stack="encoder"), "stack='encoder'"),
        (lambda: seen.activation("cross.q", layer=0), "cross-attention"),
        (lambda: seen.mean_attention(stack="encoder"), "stack='encoder'"),
        (lambda: seen.rollout(stack="encoder"), "stack='encoder'"),
        (lambda: seen.head_scores(stack="encoder"), "stack='encoder'"),
        (lambda: seen.head_scores(kind="cross"), "cross-attention"),
        (lambda: seen.lens(k=0), "k=0"),
        (lambda: seen.next_tokens(3, position=12), "position=12"),
        (lambda: seen.target(index=61), "index=61"),
        (lambda: seen.target(position=12), "position=12"),
        (lambda: seen.edited(Edit(part="head", layer=0)), "head=None"),
        (lambda: seen.edited(Edit(part="mlp", layer=0, head=1)), "head=1"),
        (lambda: seen.edited(Edit(part="residual", layer=4)), "layer=4"),
        (lambda: seen.edited(Edit(part="mlp", layer=0, positions=(12,))), "position 12"),
        (lambda: seen.edited(Edit(part="mlp", layer=0, value="patch")), "patch"),
    ]:
        with pytest.raises(UserError, match=message):
            call()


def test_an_lm_explains_a_text(tmp_path):
    import plume
    from plume.config import TokenizerConfig
    from plume.hf import save_model
    from plume.text import train_tokenizer

    tokenizer = train_tokenizer(TokenizerConfig(kind="bytes"), ["x"])
    model = random_model(replace(FAMILIES["gpt2"], vocab_size=tokenizer.vocab_size))
    save_model(model, tmp_path / "model", tokenizer=tokenizer)
    lm = plume.load(tmp_path / "model")
    with pytest.raises(UserError, match="reads one text"):
        lm.explain("robot", "a second text")
    seen = lm.explain("robot 你")
    assert "".join(seen.pieces[:6]) == "robot " and seen.pieces[6] == "\\xe4"
    np.testing.assert_allclose(seen.attention(0).sum(-1), 1, atol=1e-5)
    assert seen.next_tokens(3).probabilities[0] > 0


def test_a_second_text_is_read_or_refused():
    """A classifier of another tool may be one of pairs; one that was fine-tuned on single texts is not."""
    from plume.tasks.explained_rows import task_rows

    tokenizer = train_tokenizer(
        TokenizerConfig(kind="wordpiece", vocab_size=60, special_tokens="bert"), ["a b c d"] * 2
    )
    model = random_model(replace(FAMILIES["bert"], vocab_size=tokenizer.vocab_size), "classify")
    predictor = Predictor(model, tokenizer, None)
    (row,) = task_rows(predictor, "a b", "c d")
    assert row.tokens == tokenizer.add_special_tokens(tokenizer.encode("a b"), tokenizer.encode("c d"))[0]
    predictor.known = True
    with pytest.raises(UserError, match="single texts; leave pair out"):
        task_rows(predictor, "a b", "c d")


def test_a_long_strip_with_numbers_that_are_missing():
    """What has no surprisal, as special tokens of a masked model, is drawn as zero; warnings are errors here."""
    values = np.linspace(-1, 1, 300, dtype=np.float32)
    values[[0, 299]] = np.nan
    source = re.search(r"base64,([^']+)", drawings.drawn(values))[1]
    pixels = Image.open(io.BytesIO(base64.b64decode(source)))
    assert pixels.size == (128, 3) and pixels.getpixel((0, 0)) == pixels.getpixel((43, 2)) == drawings.PAPER
    assert pixels.getpixel((42, 2)) == drawings.BLUE


def test_results_draw_themselves_in_a_notebook(tmp_path):
    """Every picture is well formed, has one pixel per number, and holds no markup of a text."""
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=300), ["<b>robot</b> must obey"] * 3)
    config = replace(PRESETS["gpt2"], layers=2, heads=2, width=32, context=32, vocab_size=tokenizer.vocab_size)
    lm = LM(None, tokenizer, EngineConfig(engine="torch"), Model(config, "next-token").eval())
    seen = lm.explain("<b>robot</b>")
    shown = [
        *(lm.generate("<b>", seed=1, max_new_tokens=8, n=n) for n in (1, 2)), lm.next_tokens("<b>"), lm.score("<b>r"),
        seen, seen.activation("attention.weights", layer=0), seen.activation("mlp.up", layer=1), seen.steps(0, 1, 2),
        seen.lens(), seen.contributions(), seen.effects(), seen.attribution(), seen.surprise(), seen.next_tokens(5),
        seen.head_scores(), head_kinds(lm.model),
    ]  # fmt: skip
    for result in shown:
        drawing = result._repr_html_()
        assert "<b>robot" not in drawing and "<b></b>" not in drawing
        closed = re.sub(r"(<img[^>]*)>", r"\1/>", drawing).replace("<br>", "<br/>")
        ElementTree.fromstring(f"<div>{closed}</div>")
    up = seen.activation("mlp.up", layer=1)
    source = re.search(r"base64,([^']+)", up._repr_html_())[1]
    pixels = Image.open(io.BytesIO(base64.b64decode(source)))
    assert pixels.size == (up.shape[1], up.shape[0])
    best = np.unravel_index(np.abs(up).argmax(), up.shape)
    strongest = (42, 95, 168) if up[best] > 0 else (179, 87, 26)
    assert pixels.getpixel((int(best[1]), int(best[0]))) == strongest
