"""The calls themselves against written-out loops over the transformers copy of the same folder."""

import math
import random
import threading

import numpy as np
import pytest
import torch
import transformers
from stories import small, story

from plume.config import EvaluateConfig, UserError
from plume.evaluate import evaluate
from plume.evaluate.subject import ScoreStore
from plume.hf import load_model
from plume.inference.engine_stack import with_engine
from plume.inference.scoring import Request, batch_threads, scorer_for, windows
from plume.model import loss
from plume.model.heads import Model
from plume.model.ragged import batches, prefix_trees
from plume.text import load_tokenizer


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


AS_MANY = [Request((1, 2), (3, 4)), Request((1, 2), (5, 6))]  # asked places as there are tokens in their tree
FOUR = [Request((1, 2, 3, 4), (n, 9, n)) for n in (5, 6, 7, 8)]


def compare(theirs, requests, found):
    """With the logits of transformers, one request at a time."""
    for number, request in enumerate(requests):
        whole = torch.tensor([request.context + request.target])
        logprobs = theirs(whole[:, :-1]).logits[0].log_softmax(-1)[len(request.context) - 1 :]
        wanted = logprobs[range(len(request.target)), list(request.target)]
        np.testing.assert_allclose(found[number].logprobs, wanted, atol=1e-4)
        if request.filtered:
            logprobs[0, [5, 6, 7]] = -torch.inf
        assert found[number].hits.tolist() == (logprobs.argmax(-1) == whole[0, len(request.context) :]).tolist()
        np.testing.assert_allclose(found[number].best, logprobs.max(-1).values, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("made", [some_requests, lambda _: AS_MANY, lambda _: FOUR], ids=["many", "two", "four"])
def test_scores_equal_a_loop_one_request_at_a_time(causal, made):
    theirs, scorer = causal
    requests = made(theirs.config.vocab_size)
    compare(theirs, requests, dict(scorer.score(requests)))


@torch.no_grad()
def test_batches_in_threads_give_the_same_scores_and_leave_the_number_of_threads(causal, trained_folder, monkeypatch):
    theirs, scorer = causal
    before, used, read = torch.get_num_threads(), set(), scorer.likelihoods.read
    monkeypatch.setattr(scorer, "threads", 3)
    monkeypatch.setattr(
        scorer.likelihoods,
        "read",
        lambda *given: used.add((threading.get_ident(), torch.get_num_threads())) or read(*given),
    )
    torch.set_num_threads(3)
    try:
        requests = some_requests(theirs.config.vocab_size)
        compare(theirs, requests, dict(scorer.score(requests)))
        assert torch.get_num_threads() == 3 and {threads for _, threads in used} == {1}
        assert threading.get_ident() not in {thread for thread, _ in used}
        scores = scorer.score(requests)
        next(scores)
        scores.close()  # a caller may leave before the end
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_masked_tokens_in_threads_have_the_same_scores(masked, monkeypatch):
    theirs, scorer = masked
    requests = [Request(r.context[:9], r.target[:9]) for r in some_requests(theirs.config.vocab_size, 20)]
    alone = dict(scorer.score(requests))
    monkeypatch.setattr(scorer, "threads", 3)
    found = dict(scorer.score(requests))
    assert found.keys() == alone.keys() == set(range(len(requests)))
    for number, score in found.items():
        np.testing.assert_allclose(score.logprobs, alone[number].logprobs, atol=1e-5)


def test_an_engine_reads_one_batch_after_the_other(causal):
    model = causal[1].model
    assert batch_threads(model) == torch.get_num_threads()
    assert batch_threads(with_engine(model, lambda *given: [])) == 1


@torch.no_grad()
def test_a_place_that_predicts_several_tokens_is_compared_with_the_vocabulary_once(causal, monkeypatch):
    theirs, scorer = causal
    rows, read = [], scorer.likelihoods.read
    monkeypatch.setattr(
        scorer.likelihoods, "read", lambda hidden, *more: rows.append(len(hidden)) or read(hidden, *more)
    )
    stem = tuple(range(20, 30))
    requests = [Request((1,), (*stem, 3, 4)), Request((1,), (*stem, 5, 4)), Request((1,), stem)]
    compare(theirs, requests, dict(scorer.score(requests)))
    assert sum(rows) == len(stem) + 1 + 2  # places before the stem's tokens, after it, and one after each branch


def test_only_scored_positions_reach_the_last_mlp_and_the_head(causal, monkeypatch):
    _, scorer = causal
    last, rows, read = [], [], scorer.likelihoods.read
    up = scorer.model.body.blocks[-1].mlp.inner.up
    monkeypatch.setattr(up, "forward", lambda x, old=up.forward: last.append(x.shape[-2]) or old(x))
    monkeypatch.setattr(
        scorer.likelihoods, "read", lambda hidden, *more: rows.append(len(hidden)) or read(hidden, *more)
    )
    draw = random.Random(4)
    requests = [Request(tuple(draw.sample(range(300), 40)), tuple(range(n))) for n in (1, 2, 3, 9, 5, 1)]
    list(scorer.score(requests))
    assert sum(rows) == sum(last) == sum(len(r.target) for r in requests)


def test_a_shared_beginning_is_read_once(causal, monkeypatch):
    _, scorer = causal
    read, embed = [], scorer.model.body.embed
    monkeypatch.setattr(embed, "forward", lambda t, *more, old=embed.forward: read.append(t.numel()) or old(t, *more))
    context = tuple(range(40))
    list(scorer.score([Request(context, (n, n + 1)) for n in range(4)]))
    assert sum(read) == 40 + 4  # the context, and of each target all but its last token


def test_prefix_trees_hold_every_sequence_and_each_token_sees_its_own():
    draw = random.Random(1)
    sequences = [tuple([1] * draw.randint(0, 30) + [draw.randrange(3) for _ in range(9)]) for _ in range(50)]
    wanted = [slice(len(s) - draw.randint(1, 10), None) for s in sequences]
    trees = prefix_trees(sequences, wanted, width=64, most=60)
    assert sorted(m for b in trees for m in b.members) == list(range(50))
    assert any(len(b.members) > 2 for b in trees) and all(len(b) <= 60 for b in trees)
    for tree in trees:
        assert len(set(tree.wanted)) == len(tree.wanted)
        seen, places = tree.visible(0), (tree.wanted[row] for row in tree.rows)
        for member in tree.members:
            for end in range(*wanted[member].indices(len(sequences[member]))):
                ancestors = np.flatnonzero(seen[next(places)])
                assert tuple(tree.tokens[a] for a in ancestors) == sequences[member][: end + 1]
                assert [tree.positions[a] for a in ancestors] == list(range(end + 1))
        assert next(places, None) is None


def test_batches_hold_every_tree_once_within_the_budget():
    draw = random.Random(2)
    sizes = [draw.randint(1, 90) for _ in range(200)] + [400]
    made = list(batches(sizes, 300))
    assert sorted(i for batch in made for i in batch) == list(range(201))
    assert all(len(batch) == 1 or sum(sizes[i] for i in batch) <= 300 for batch in made)
    assert len(made) < 1 + 1.2 * sum(sizes[:200]) / 300


@torch.no_grad()
@pytest.mark.parametrize(
    "more",
    [{"band": 7}, {"norm": "post", "activation": "gelu"}, {"positions": "sinusoidal", "activation": "relu"}],
    ids=["band", "post-norm", "waves"],
)
def test_every_kind_of_stack_scores_as_its_forward_says(tokenizer, more):
    """The model's own forward is compared with transformers elsewhere."""
    torch.manual_seed(3)
    model = Model(small(tokenizer, **more)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    scorer = scorer_for(model, tokenizer, batch_tokens=96)
    requests = some_requests(model.config.vocab_size, 20)
    for number, score in scorer.score(requests):
        whole = torch.tensor([requests[number].context + requests[number].target])
        logprobs = model(whole[:, :-1])[0].log_softmax(-1)
        wanted = logprobs[range(whole.shape[1] - 1), whole[0, 1:]][len(requests[number].context) - 1 :]
        np.testing.assert_allclose(score.logprobs, wanted, atol=1e-4)


@torch.no_grad()
def test_of_equally_likely_tokens_the_first_is_the_prediction(tokenizer, monkeypatch):
    monkeypatch.setattr(loss, "SCORED_COLUMNS", 64)  # so that equals stand in several parts of the vocabulary
    monkeypatch.setattr(loss, "SCORED_NUMBERS", 64)
    model = Model(small(tokenizer))
    logits = torch.randint(5, (32, model.config.vocab_size), generator=torch.Generator().manual_seed(0)).float()
    model.table.copy_(logits.T)  # which is what unit vectors get from it
    targets = [int(row.argmax()) if n % 2 else n for n, row in enumerate(logits)]
    found = loss.TokenLikelihoods(model, [5, 6, 7]).read(torch.eye(32), targets, [n % 3 == 0 for n in range(32)])
    np.testing.assert_allclose(found.logprobs, logits.log_softmax(1)[range(32), targets], atol=1e-5)
    logits[::3, [5, 6, 7]] = -torch.inf
    assert found.hits.tolist() == (logits.argmax(1) == torch.tensor(targets)).tolist()
    assert 10 < found.hits.sum() < 22


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
    encode, wrap = scorer.tokenizer.encode, scorer.tokenizer.add_special_tokens
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
        whole = torch.tensor([scorer.tokenizer.add_special_tokens(tokens[begin:end])[0]])
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
    row = torch.tensor([scorer.tokenizer.add_special_tokens(tokens)[0]])
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
    with ScoreStore(tmp_path / "scores.sqlite", "m") as store:
        first = dict(store.scores(scorer, requests[:12]))
    asked = []
    score = scorer.score
    monkeypatch.setattr(scorer, "score", lambda rs: asked.extend(rs) or score(rs))
    with ScoreStore(tmp_path / "scores.sqlite", "m") as store:
        second = dict(store.scores(scorer, requests))
        assert set(asked) == set(requests[12:]) - set(requests[:12])
        assert store.fresh == len(asked) and store.reused >= 12
    for number in range(12):
        np.testing.assert_array_equal(first[number].logprobs, second[number].logprobs)
        assert first[number].hits.tolist() == second[number].hits.tolist()
    asked.clear()
    with ScoreStore(tmp_path / "scores.sqlite", "another model") as store:
        list(store.scores(scorer, requests))
    assert set(asked) == set(requests)


def test_a_damaged_store_is_named(tmp_path):
    (tmp_path / "scores.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(UserError, match="cannot be used as the store"):
        ScoreStore(tmp_path / "scores.sqlite", "m")
