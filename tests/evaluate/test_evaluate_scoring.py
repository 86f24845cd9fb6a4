"""The calls themselves against written-out loops over the transformers copy of the same folder."""

import math
import random

import numpy as np
import pytest
import torch
import transformers
from conftest import story

from plume.config import EvaluateConfig, UserError
from plume.evaluate import evaluate
from plume.evaluate.scoring import Request, batches, scorer_for, share, windows
from plume.evaluate.store import Store
from plume.text import load_tokenizer
from plume.weights import load_model


@pytest.fixture(scope="module")
def causal(trained_folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained_folder).eval()
    tokenizer = load_tokenizer(trained_folder)
    return theirs, scorer_for(load_model(trained_folder), tokenizer, batch_tokens=96, banned=[5, 6, 7])


@pytest.fixture(scope="module")
def masked(masked_folder):
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(masked_folder).eval()
    tokenizer = load_tokenizer(masked_folder)
    return theirs, scorer_for(load_model(masked_folder), tokenizer, batch_tokens=200)


def some_requests(vocabulary: int, count: int = 60) -> list[Request]:
    """Of all lengths; many share a beginning, some are equal."""
    draw = random.Random(0)
    stems = [tuple(draw.randrange(vocabulary) for _ in range(n)) for n in (1, 17, 30, 40, 41, 60)]
    made = []
    for _ in range(count):
        context = draw.choice(stems)[: draw.choice((1, 18, 33, 60))]
        target = tuple(draw.randrange(vocabulary) for _ in range(draw.randint(1, 65 - len(context))))
        made.append(Request(context, target, draw.random() < 0.3))
    return [*made, made[0]]


@torch.no_grad()
def test_scores_equal_a_loop_one_request_at_a_time(causal):
    theirs, scorer = causal
    requests = some_requests(theirs.config.vocab_size)
    found = dict(scorer.score(requests))
    assert sorted(found) == list(range(len(requests)))
    for number, request in enumerate(requests):
        whole = torch.tensor([request.context + request.target])
        logprobs = theirs(whole[:, :-1]).logits[0].log_softmax(-1)[len(request.context) - 1 :]
        wanted = logprobs[range(len(request.target)), list(request.target)]
        np.testing.assert_allclose(found[number].logprobs, wanted, atol=1e-4)
        if request.filtered:
            logprobs[0, [5, 6, 7]] = -torch.inf
        assert found[number].hits.tolist() == (logprobs.argmax(-1) == whole[0, len(request.context) :]).tolist()
        np.testing.assert_allclose(found[number].best, logprobs.max(-1).values, atol=1e-4)


def test_only_scored_positions_reach_the_head(causal, monkeypatch):
    _, scorer = causal
    rows = []
    read = scorer.model.read
    monkeypatch.setattr(scorer.model, "read", lambda hidden: rows.append(len(hidden)) or read(hidden))
    requests = some_requests(scorer.model.config.vocab_size)
    list(scorer.score(requests))
    assert sum(rows) == sum(len(r.target) for r in requests)


def test_a_shared_beginning_is_read_once(causal, monkeypatch):
    _, scorer = causal
    read = []
    body = scorer.model.body.forward
    monkeypatch.setattr(scorer.model.body, "forward", lambda t, **more: read.append(t.numel()) or body(t, **more))
    context = tuple(range(40))
    list(scorer.score([Request(context, (n, n + 1)) for n in range(4)]))
    assert sum(read) == 39 + 4 * 2  # the prefix, then the last context token and the target but its last for each


def test_families_begin_alike_and_hold_every_request():
    draw = random.Random(1)
    inputs = [tuple([1] * draw.randint(0, 30) + [draw.randrange(3) for _ in range(20)]) for _ in range(50)]
    limits = [len(i) - draw.randint(1, 10) for i in inputs]
    families = share(inputs, limits)
    assert sorted(m for f in families for m in f.members) == list(range(50))
    for family in families:
        assert len({inputs[m][: family.shared] for m in family.members}) == 1
        assert all(family.shared <= limits[m] for m in family.members)
    assert any(len(f.members) > 2 for f in families)


def test_batches_hold_every_row_once_within_the_budget():
    draw = random.Random(2)
    lengths = [draw.randint(1, 90) for _ in range(200)]
    made = list(batches(lengths, 300, most=7))
    assert sorted(i for batch in made for i in batch) == list(range(200))
    for batch in made:
        widest, total = max(lengths[i] for i in batch), sum(lengths[i] for i in batch)
        assert len(batch) <= 7 and (len(batch) == 1 or len(batch) * widest <= 300)
        assert len(batch) * widest - total <= len(batch) * widest / 8


@torch.no_grad()
@pytest.mark.parametrize("stride", [None, 16, 1])
def test_long_texts_in_strides(causal, stride):
    """Written out token by token: which tokens stand before each, and how likely it then is."""
    theirs, scorer = causal
    tokens, context = scorer.tokenizer.encode(story(7, 5)), 64
    step = context if stride is None else stride
    sequence = [scorer.tokenizer.end, *tokens]
    total = 0.0
    for place in range(1, len(sequence)):
        window = 0 if place <= context else math.ceil((place - context) / step)
        end = min(context + window * step, len(sequence) - 1)  # the last token that this window predicts
        begin = max(0, end - context)
        logits = theirs(torch.tensor([sequence[begin:place]])).logits[0, -1]
        total += logits.log_softmax(-1)[sequence[place]].item()
    made = list(windows(tokens, scorer, stride))
    assert [t for request in made for t in request.target] == tokens
    found = sum(score.total for _, score in scorer.score(made))
    assert found == pytest.approx(total, abs=1e-3)


@torch.no_grad()
def test_wikitext_perplexity_with_stride(trained_folder, shared, tmp_path):
    """The usual loop over overlapping windows, with the labels of what was scored before left out."""
    text = (shared / "data/wikitext-2/wiki.test.raw").read_text(encoding="utf-8")[:6000]
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained_folder).eval()
    tokenizer = load_tokenizer(trained_folder)
    ids = torch.tensor([tokenizer.end, *tokenizer.encode(text)])
    total, done, stride, window = 0.0, 1, 24, 65
    for end in [window, *range(window + stride, len(ids) + stride, stride)]:
        end = min(end, len(ids))
        part = ids[max(0, end - window) : end]
        labels = part.clone()
        labels[: len(part) - (end - done)] = -100
        total += (
            theirs(part[None, :-1]).logits[0].log_softmax(-1)[range(len(part) - 1), part[1:]][labels[1:] >= 0].sum()
        )
        done = end
    wanted = math.exp(-total.item() / (len(ids) - 1))
    config = EvaluateConfig(model=str(trained_folder), tasks=(str(file),), stride=stride)
    assert evaluate(config)["text"].score().value == pytest.approx(wanted, rel=1e-4)


def test_a_stride_beyond_the_context_is_refused(causal):
    with pytest.raises(UserError, match="stride=65 must lie between 1 and 64"):
        list(windows([1, 2], causal[1], 65))


# ---- masked models -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_pseudo_likelihood_equals_a_loop_over_masks(masked):
    theirs, scorer = masked
    encode, wrap = scorer.tokenizer.encode, scorer.tokenizer.wrap
    texts = [story(3, 1), story(4, 2), "The cat"]
    requests = [Request((), tuple(encode(text)[:40])) for text in texts]
    requests.append(Request(tuple(encode("The bear went to the")), tuple(encode(" river and it ate honey"))))
    found = dict(scorer.score(requests))
    for number, request in enumerate(requests):
        whole = wrap(request.context + request.target)[0]
        first = whole.index((request.context + request.target)[0], 1) + len(request.context)
        wanted = []
        for place in range(first, first + len(request.target)):
            hidden = torch.tensor([whole])
            hidden[0, place] = scorer.tokenizer.mask
            wanted.append(theirs(hidden).logits[0, place].log_softmax(-1)[whole[place]].item())
        np.testing.assert_allclose(found[number].logprobs, wanted, atol=1e-4)


def test_pseudo_perplexity_of_a_file(masked, masked_folder, tmp_path):
    theirs, scorer = masked
    file = tmp_path / "text.txt"
    file.write_text(story(5, 6))
    tokens = scorer.tokenizer.encode(story(5, 6))
    result = evaluate(EvaluateConfig(model=str(masked_folder), tasks=(str(file),), stride=10))["text"].first
    total, done = 0.0, 0
    while done < len(tokens):
        end = min(len(tokens), done + (46 if done == 0 else 10))
        begin = max(0, end - 46)
        whole = torch.tensor([scorer.tokenizer.wrap(tokens[begin:end])[0]])
        for place in range(done, end):
            row = whole.clone()
            row[0, 1 + place - begin] = scorer.tokenizer.mask
            with torch.no_grad():
                total += theirs(row).logits[0, 1 + place - begin].log_softmax(-1)[tokens[place]].item()
        done = end
    assert result.metrics["token_perplexity"].value == pytest.approx(math.exp(-total / len(tokens)), rel=1e-4)
    assert result.protocol["likelihood"].startswith("pseudo")


@torch.no_grad()
def test_masks_are_filled_the_surest_first(masked):
    theirs, scorer = masked
    mask = scorer.tokenizer.mask
    tokens = scorer.tokenizer.encode(story(6, 1))
    tokens[3] = tokens[7] = tokens[8] = mask
    row = torch.tensor([scorer.tokenizer.wrap(tokens)[0]])
    specials = list(scorer.tokenizer.special_ids.values())
    for _ in range(3):
        logprobs = theirs(row).logits[0]
        logprobs[:, specials] = -torch.inf
        sure, token = logprobs.log_softmax(-1).max(-1)
        place = max((p for p in range(row.shape[1]) if row[0, p] == mask), key=lambda p: sure[p])
        row[0, place] = token[place]
    assert scorer.fill(tokens) == row[0, 1:-1].tolist()


# ---- the store ---------------------------------------------------------------------------------------------------


def test_the_store_answers_what_it_knows_and_never_scores_twice(causal, tmp_path, monkeypatch):
    _, scorer = causal
    requests = some_requests(scorer.model.config.vocab_size, 20)
    with Store(tmp_path / "scores.sqlite", "m") as store:
        first = dict(store.scores(scorer, requests[:12]))
    asked = []
    score = scorer.score
    monkeypatch.setattr(scorer, "score", lambda rs: asked.extend(rs) or score(rs))
    with Store(tmp_path / "scores.sqlite", "m") as store:
        second = dict(store.scores(scorer, requests))
        assert set(asked) == set(requests[12:]) - set(requests[:12])
        assert store.fresh == len(asked) and store.reused >= 12
    for number in range(12):
        np.testing.assert_array_equal(first[number].logprobs, second[number].logprobs)
        assert first[number].hits.tolist() == second[number].hits.tolist()
    asked.clear()
    with Store(tmp_path / "scores.sqlite", "another model") as store:
        list(store.scores(scorer, requests))
    assert set(asked) == set(requests)


def test_a_damaged_store_is_named(tmp_path):
    (tmp_path / "scores.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(UserError, match="cannot be used as the store"):
        Store(tmp_path / "scores.sqlite", "m")
