"""Equivalences the model promises: cached = uncached, batch = single, masks that mask, sizes that are exact."""

import math
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, TRANSFORMER, random_model

from plume.config import PRESETS, preset
from plume.model.heads import Model
from plume.model.transformer import Attention, Cache, Transformer

GPT2 = FAMILIES["gpt2"]
CAUSAL = {
    "gpt2": GPT2,
    "openai-gpt": FAMILIES["openai-gpt"],
    "transformer-decoder": FAMILIES["transformer-decoder"],
    "banded": replace(GPT2, band=5),
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, GPT2.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("cuts", [[1] * 20, [12, 1, 1, 6], [20], [3, 3, 14]])
def test_cached_equals_uncached(name, cuts):
    body, tokens = random_model(CAUSAL[name]).body, draw(2, 20)
    cache = Cache(body.config, 2, 24)
    pieces = [body(piece, cache=cache) for piece in tokens.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), body(tokens), **CLOSE)
    assert cache.lengths.tolist() == [20, 20]


@pytest.mark.parametrize("name", CAUSAL)
def test_ragged_rows_in_one_cache_equal_each_row_alone(name):
    body = random_model(CAUSAL[name]).body
    rows = [draw(1, n, seed=n) for n in (4, 11, 7)]
    lengths = torch.tensor([4, 11, 7])
    padded = torch.stack([torch.nn.functional.pad(row[0], (0, 11 - row.shape[1])) for row in rows])
    cache = Cache(body.config, 3, 20)
    first = body(padded, lengths=lengths, cache=cache)
    following = [body(draw(3, 2, seed=50 + i), cache=cache) for i in range(3)]
    for b, row in enumerate(rows):
        whole = torch.cat([row, *[draw(3, 2, seed=50 + i)[b : b + 1] for i in range(3)]], dim=1)
        alone, n = body(whole)[0], int(lengths[b])
        torch.testing.assert_close(first[b, :n], alone[:n], **CLOSE)
        torch.testing.assert_close(torch.cat([step[b] for step in following]), alone[n:], **CLOSE)


@pytest.mark.parametrize("name", [*CAUSAL, "bert", "roberta", "distilbert"])
def test_a_padded_batch_equals_its_members_alone(name):
    config = CAUSAL.get(name, FAMILIES.get(name))
    assert config is not None
    body, lengths = random_model(config, "bare").body, torch.tensor([5, 16, 1])
    tokens = draw(3, 16)
    together = body(tokens, lengths=lengths)
    for b, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(together[b, :n], body(tokens[b : b + 1, :n])[0], **CLOSE)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_never_changes_the_past(name):
    body, tokens = random_model(CAUSAL[name]).body, draw(1, 16)
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % GPT2.vocab_size
    assert torch.equal(body(tokens)[0, :9], body(changed)[0, :9])  # bit for bit


def written_out(attention: Attention, x: torch.Tensor, sees) -> torch.Tensor:
    """Attention as the paper's formula, one query at a time; sees(t, s) says whether t may look at s."""
    q, k, v = (attention.split(layer(x))[0] for layer in (attention.q, attention.k, attention.v))  # (H, T, K)
    rows = []
    for t in range(x.shape[1]):
        visible = [s for s in range(x.shape[1]) if sees(t, s)]
        scores = torch.einsum("hk,hsk->hs", q[:, t], k[:, visible]) / math.sqrt(q.shape[-1])
        rows.append(torch.einsum("hs,hsk->hk", scores.softmax(-1), v[:, visible]).flatten())
    return attention.out(torch.stack(rows))


@pytest.mark.parametrize(
    ("options", "band", "sees"),
    [
        ({}, 0, lambda t, s: s <= t),
        ({}, 3, lambda t, s: t - 3 < s <= t),
        ({"prefix": torch.tensor([4])}, 0, lambda t, s: s <= t or (t < 4 and s < 4)),
        ({"documents": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]])}, 0, lambda t, s: s <= t and cut(s) == cut(t)),
    ],
    ids=["causal", "banded", "prefix", "documents"],
)
def test_masks_equal_the_written_out_attention(options, band, sees):
    config = replace(GPT2, layers=2, band=band)
    body, seen = random_model(config).body, []
    attention = body.blocks[1].attn.inner  # the banded one, if there is a band
    attention.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    body(draw(1, 10), **options)
    x, y = seen[0]
    torch.testing.assert_close(y[0], written_out(attention, x, sees), **CLOSE)


def cut(position: int) -> int:
    return (position >= 3) + (position >= 7)


def test_packed_documents_equal_each_document_alone():
    body, parts = random_model(GPT2).body, [draw(1, n, seed=n) for n in (5, 8, 3)]
    documents = torch.cat([torch.full((1, part.shape[1]), i) for i, part in enumerate(parts)], dim=1)
    packed = body(torch.cat(parts, dim=1), documents=documents)
    alone = torch.cat([body(part) for part in parts], dim=1)
    torch.testing.assert_close(packed, alone, **CLOSE)


def test_the_decoder_with_a_cache_equals_the_whole_target():
    model = random_model(TRANSFORMER)
    source, target, lengths = draw(2, 9), draw(2, 6, seed=2), torch.tensor([9, 4])
    memory = model.body.encoder(source, lengths=lengths)
    cache = Cache(TRANSFORMER, 2, 8)
    steps = [
        model.body.decoder(token, cache=cache, memory=memory, memory_lengths=lengths)
        for token in target.split(1, dim=1)
    ]
    whole = model.body(source, target, source_lengths=lengths)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, **CLOSE)


def test_the_mlp_treats_every_position_alike():
    mlp, x = random_model(GPT2).body.blocks[0].mlp.inner, torch.randn(1, 8, GPT2.width)
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    torch.testing.assert_close(mlp(x)[:, order], mlp(x[:, order]))


def test_too_many_tokens_are_refused_before_the_table_ends():
    body = random_model(GPT2).body
    with pytest.raises(ValueError, match="33 tokens do not fit into a context of 32"):
        body(draw(1, 33))
    with pytest.raises(ValueError, match="9 tokens do not fit into a context of 8"):
        body(draw(1, 9), cache=Cache(GPT2, 1, 8))


def test_first_weights_are_those_of_the_papers():
    torch.manual_seed(0)
    config = replace(PRESETS["gpt2"], layers=4, width=256, heads=4, vocab_size=2000)
    body = Transformer(config)
    assert body.embed.tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert body.blocks[0].attn.inner.q.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for part in (body.blocks[1].attn.inner.out, body.blocks[1].mlp.inner.down):
        assert part.weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    original = Model(replace(PRESETS["transformer-base"], vocab_size=2000))
    assert original.table.std().item() == pytest.approx(512**-0.5, rel=0.02)


EXACT = {  # computed from the papers' configurations; BERT-like ones with their pooler
    "openai-gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
    "gpt3-125m": 125_226_240,
    "gpt3-350m": 355_871_744,
    "gpt3-760m": 760_300_032,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "bert-base-uncased": 109_482_240,
    "bert-base-cased": 108_310_272,
    "bert-large-uncased": 335_141_888,
    "bert-large-cased": 333_579_264,
    "bert-tiny": 4_385_920,
    "bert-mini": 11_170_560,
    "bert-small": 28_763_648,
    "bert-medium": 41_373_184,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
}
EXACT_WITH_HEAD = {
    ("bert-base-uncased", "masked-token"): 109_514_298,
    ("bert-base-uncased", "pretraining"): 110_106_428,
    ("bert-base-cased", "masked-token"): 108_340_804,
    ("bert-base-cased", "pretraining"): 108_932_934,
    ("bert-large-uncased", "masked-token"): 335_174_458,
    ("bert-large-uncased", "pretraining"): 336_226_108,
    ("bert-large-cased", "masked-token"): 333_610_308,
    ("bert-large-cased", "pretraining"): 334_661_958,
    ("roberta-base", "masked-token"): 124_697_433,
    ("roberta-large", "masked-token"): 355_412_057,
}


def count(name: str, head: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Model(preset(name), head).parameters())


@pytest.mark.parametrize("name", EXACT)
def test_exact_parameter_counts(name):
    assert count(name, "bare") == EXACT[name]


@pytest.mark.parametrize(("name", "head"), EXACT_WITH_HEAD)
def test_exact_parameter_counts_with_a_head(name, head):
    assert count(name, head) == EXACT_WITH_HEAD[name, head]


@pytest.mark.parametrize(("name", "millions"), [("transformer-base", 63.0), ("transformer-big", 214.2)])
def test_encoder_decoder_sizes(name, millions):
    assert count(name, "next-token") / 1e6 == pytest.approx(millions, abs=0.05)
