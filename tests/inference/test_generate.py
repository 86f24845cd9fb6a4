"""The generator: stops, streams, samples, context policies, healing, guessing ahead, reuse, and clear refusals."""

import itertools
import math

import numpy as np
import pytest
import torch

import plume
from plume.config import EngineConfig, SamplingConfig, UserError
from plume.inference.batcher import Batcher
from plume.inference.sampler import choose_rows
from plume.inference.sequences import Healing, SequenceState
from plume.inference.speculation import PAUSE, Guesser, StepCost, look_up
from plume.lm import LM

PROMPT = "hello the world"


def plain_greedy(lm, prompt, count):
    """The definition: read everything again for every token."""
    tokens = lm.encode(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(lm.model(torch.tensor([tokens]))[0, -1].argmax()))
    return tuple(tokens[-count:])


def test_greedy_is_the_uncached_definition_on_both_engines(lm, open_lm):
    on_torch = open_lm(EngineConfig(engine="torch"))
    expected = plain_greedy(lm, PROMPT, 30)
    for one in (lm, on_torch):
        result = one.generate(PROMPT, max_new_tokens=30, temperature=0, ignore_eos=True)
        assert result.tokens == expected
        assert result.finish_reason == "length"
        assert result.text == lm.tokenizer.decode(expected)


def test_a_seed_gives_the_same_text_and_another_another(lm):
    first, second, other = (lm.generate(PROMPT, seed=seed, max_new_tokens=20).tokens for seed in (1, 1, 2))
    assert first == second != other
    drawn = lm.generate(PROMPT, max_new_tokens=20)
    assert lm.generate(PROMPT, max_new_tokens=20, seed=drawn.seed).tokens == drawn.tokens


def test_a_batch_is_its_members_alone(lm):
    prompts = [PROMPT, "a", "the quick brown fox jumps over", [1, 2, 3], None] * 3  # more than there are slots
    config = SamplingConfig(seed=5, max_new_tokens=12, top_k=None)
    together = lm.generate_batch(prompts, config)
    for prompt, result in zip(prompts, together, strict=True):
        assert lm.generate(prompt, config) == result


def test_samples_differ_and_the_first_is_the_single_one(lm):
    result = lm.generate(PROMPT, seed=3, n=4, max_new_tokens=10)
    assert len({sample.tokens for sample in result.samples}) == 4
    assert result.samples[0].tokens == lm.generate(PROMPT, seed=3, max_new_tokens=10).tokens


def test_best_of_keeps_the_likeliest(lm):
    drawn = lm.generate(PROMPT, seed=3, n=6, logprobs=0, max_new_tokens=10).samples
    kept = lm.generate(PROMPT, seed=3, n=2, best_of=6, max_new_tokens=10).samples
    means = sorted((np.mean(sample.logprobs) for sample in drawn), reverse=True)
    assert [np.mean(sample.logprobs) for sample in kept] == pytest.approx(means[:2])


def test_logprobs_are_the_models_own(lm):
    result = lm.generate(PROMPT, seed=1, max_new_tokens=8, logprobs=3, temperature=0.5, top_k=5, ignore_eos=True)
    tokens = [*lm.encode(PROMPT), *result.tokens]
    with torch.inference_mode():
        expected = torch.log_softmax(lm.model(torch.tensor([tokens]))[0], -1)
    start = len(tokens) - len(result.tokens) - 1
    for i, (token, logprob, top) in enumerate(zip(result.tokens, result.logprobs, result.top_logprobs, strict=True)):
        assert logprob == pytest.approx(float(expected[start + i, token]), abs=1e-3)
        best = expected[start + i].topk(3)
        assert [i for i, _ in top] == best.indices.tolist()
        assert [p for _, p in top] == pytest.approx(best.values.tolist(), abs=1e-3)


# -- text and stops


class Scripted(SequenceState):
    """A continuation whose tokens are given instead of drawn."""

    def play(self, tokens):
        pieces = []
        for token in tokens:
            if self.finish_reason is not None:
                break
            logits = np.zeros((1, self.vocab_size), np.float32)
            logits[0, token] = 100
            self.accept(choose_rows(self.rows(logits, [])), [])
            pieces.append(self.news())
        return pieces


def scripted(tokenizer, **fields):
    config = SamplingConfig(**{"temperature": 0, "max_new_tokens": 200, **fields})
    return Scripted([0], config, tokenizer=tokenizer, context=300, vocab_size=266, seed=0)


def test_a_stream_never_shows_a_part_of_a_character(tokenizer):
    text = "né 日本 🙂 the"
    continuation = scripted(tokenizer)
    pieces = continuation.play(list(text.encode()) if tokenizer.kind == "bytes" else tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["END", "a END", "Dx", "xyz"])
def test_stop_texts_are_found_across_tokens_and_not_shown(tokenizer, stop):
    text = "some a ENDxyz more"
    continuation = scripted(tokenizer, stop=(stop, "never there"))
    pieces = continuation.play(tokenizer.encode(text))
    assert "".join(pieces) == continuation.text == text[: text.index(stop)]
    assert continuation.finish_reason == "stop"


def test_held_back_text_comes_when_the_stop_does_not(tokenizer):
    continuation = scripted(tokenizer, stop=("world!",), max_new_tokens=11)
    pieces = continuation.play(tokenizer.encode("xx world? yes"))
    assert "".join(pieces) == "xx world? y"[: len("".join(pieces))]
    assert "world?" in continuation.text


def test_end_and_stop_tokens_end_and_minimum_length_holds_them_off(tokenizer):
    end = tokenizer.end
    continuation = scripted(tokenizer)
    continuation.play([*tokenizer.encode("ab"), end, *tokenizer.encode("c")])
    assert (continuation.text, continuation.finish_reason) == ("ab", "stop")
    continuation = scripted(tokenizer, stop_tokens=(tokenizer.encode("b")[0],))
    continuation.play(tokenizer.encode("abc"))
    assert continuation.text == "a"
    continuation = scripted(tokenizer, min_new_tokens=3)
    continuation.play([end, end, end, end])
    assert len(continuation.choices) == 4 and end not in [c.id for c in continuation.choices[:3]]


def test_streaming_gives_what_generate_gives(lm):
    config = SamplingConfig(seed=4, max_new_tokens=40, top_k=None)
    assert "".join(lm.stream(PROMPT, config)) == lm.generate(PROMPT, config).text


def test_rows_that_pad_the_table_are_never_written(open_lm):
    padded = open_lm(vocab_size=300)
    result = padded.generate(PROMPT, top_k=None, temperature=5.0, max_new_tokens=50, seed=1, ignore_eos=True)
    assert max(result.tokens) < padded.tokenizer.vocab_size


# -- the context


def test_a_prompt_past_the_context(lm):
    long = "a b c d e f g h " * 20
    with pytest.raises(UserError, match=r"context holds 64.*overflow=truncate keeps the last 54,"):
        lm.generate(long, max_new_tokens=10)
    tokens = lm.encode(long)
    cut = lm.generate(long, overflow="truncate", max_new_tokens=10, temperature=0, ignore_eos=True)
    assert cut.tokens == plain_greedy(lm, tokens[-54:], 10)
    assert len(lm.generate(long, overflow="slide", max_new_tokens=150, seed=1, ignore_eos=True).tokens) == 150


def test_generation_ends_with_the_context_or_slides_on(lm):
    result = lm.generate(PROMPT, max_new_tokens=None, seed=1, ignore_eos=True)
    assert result.finish_reason == "length"
    assert len(lm.encode(PROMPT)) + len(result.tokens) == 64
    slid = lm.generate(PROMPT, max_new_tokens=120, temperature=0, overflow="slide", ignore_eos=True)
    assert len(slid.tokens) == 120
    # right after the window has moved on, the next token depends on the newer half alone
    whole = [*lm.encode(PROMPT), *slid.tokens]
    assert whole[64] == plain_greedy(lm, whole[32:64], 1)[0]


# -- healing, guessing, reuse


def test_healing_lets_the_prompts_last_word_be_completed(lm, tokenizer):
    healed = lm.start("say hel", SamplingConfig(token_healing=True, seed=1))[0]
    assert healed.owed == b"hel" and healed.tokens == tokenizer.encode("say ")
    seen = set()
    for seed in range(10):
        result = lm.generate("say hel", token_healing=True, seed=seed, max_new_tokens=6, ignore_eos=True, top_k=None)
        written = tokenizer.decode_bytes(result.tokens)
        assert written.startswith(b"hel")
        assert result.text == tokenizer.decode(result.tokens)[3:]
        seen.add(result.tokens[0])
    assert len(seen) > 1


def test_healing_knows_all_tokens_of_a_prefix(tokenizer):
    found = Healing(tokenizer).starting_with(b"hel")
    pieces = {tokenizer.piece_bytes(i) for i in found}
    assert pieces == {b"h", b"he", b"hell", b"hello"}


def test_look_up_finds_the_latest_longest_match():
    assert look_up([1, 2, 3, 9, 1, 2, 4, 8, 7, 1, 2], 3) == [4, 8, 7]
    assert look_up([5, 1, 2, 3, 6, 2, 3, 7, 1, 2, 3], 2) == [6, 2]
    assert look_up([1, 2, 3], 4) == []


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "top_k": 3}, {"top_p": 0.5}], ids=str)
def test_guessing_ahead_changes_nothing(trained_folder, fields, monkeypatch):
    monkeypatch.setattr(StepCost, "of_guess", lambda *_: 0.0)  # a draft as slow as the model would not pay
    lm = LM(trained_folder, _tokenizer(trained_folder), EngineConfig(threads=2, draft=trained_folder, slots=2))
    config = SamplingConfig(seed=9, max_new_tokens=40, **fields)
    plain = lm.generate("def wrap(", config)
    steps = _count_steps(lm)
    for kind in ("lookup", "draft"):
        steps.clear()
        guessed = lm.generate("def wrap(", config, speculate=kind)
        assert (guessed.tokens, guessed.text) == (plain.tokens, plain.text)
        if kind == "draft":  # the draft is the model itself: every guess is right
            assert len(steps) <= -(-len(plain.tokens) // 7) + 1
    lm.close()


@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_guessing_ahead_does_not_move_the_window(open_lm, tokens, monkeypatch):
    monkeypatch.setattr(StepCost, "of_guess", lambda *_: 0.0)
    lm = open_lm(EngineConfig(engine="torch"))
    options = {"overflow": "slide", "max_new_tokens": 3 * lm.config.context, "ignore_eos": True, "temperature": 0}
    plain = lm.generate("the a the b", **options)
    assert lm.generate("the a the b", speculate="lookup", speculate_tokens=tokens, **options).tokens == plain.tokens


def cost_of_steps(fixed=0.7, per_row=0.3):
    cost = StepCost()
    for rows in (1, 7, 1, 4, 2, 1):
        cost.note(rows, fixed + per_row * rows)
    return cost


def test_the_cost_of_a_guess_is_fitted_to_the_steps():
    cost = cost_of_steps()
    assert cost.of_guess(1, 0.0) == pytest.approx(0.3)
    assert cost.of_guess(1, 0.5) == pytest.approx(0.8)  # a draft that takes half as long as a plain step
    assert cost.of_guess(8, 0.0) == pytest.approx(0.3 * 8 / (0.7 + 0.3 * 8))  # a full batch has little to gain
    assert 0 < StepCost().of_guess(1, 0.0) < 1


def guessed(guesser, right, tokens=400, most=6, cost=None):
    """How many tokens were guessed over this many steps, `right` of each guess being what the model writes."""
    counts = []
    for _ in range(tokens):
        guesses = guesser([1, 2], most, cost_of_steps() if cost is None else cost, 1)
        if guesses:
            guesser.note(len(guesses), min(right, len(guesses)))
        counts.append(len(guesses))
    return counts


def test_guessing_is_switched_off_where_it_loses_and_on_where_it_pays():
    def propose(tokens, most):
        return [0] * most

    wrong = guessed(Guesser(propose), right=0)
    assert sum(wrong) < 15 and sum(wrong[:PAUSE]) > 0  # tried, given up, tried again ever more rarely
    assert set(guessed(Guesser(propose), right=6)) == {6}
    half = guessed(Guesser(propose), right=1)
    assert 1 <= np.mean(half[50:]) <= 3
    later = Guesser(propose)
    guessed(later, right=0, tokens=100)
    again = guessed(later, right=6, tokens=200)  # the text has begun to suit
    assert again[-50:] == [6] * 50
    slow = Guesser(propose, seconds=1.0)  # a draft that takes as long as the model
    assert sum(guessed(slow, right=6)) == 0


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_a_text_that_does_not_suit_is_hardly_guessed(open_lm, engine):
    lm = open_lm(EngineConfig(engine=engine, threads=1))
    asked, step = [], lm.engine.step
    lm.engine.step = lambda feeds: asked.append(sum(feed.wanted for feed in feeds)) or step(feeds)
    options = {"seed": 3, "max_new_tokens": 60, "ignore_eos": True, "top_k": None, "temperature": 2.0}
    plain = lm.generate("the a the b", **options)
    asked.clear()
    assert lm.generate("the a the b", speculate="lookup", **options).tokens == plain.tokens
    assert sum(asked) < 60 + 25


def test_a_draft_begins_each_text_anew(trained_folder, monkeypatch):
    """Its guesses are right for a second text, for several samples and after much has been written."""
    monkeypatch.setattr(StepCost, "of_guess", lambda *_: 0.0)
    lm = LM(trained_folder, _tokenizer(trained_folder), EngineConfig(threads=2, draft=trained_folder, slots=2))
    prompts = ("def wrap(", "class A", "import ")
    plain = [lm.generate(prompt, temperature=0, max_new_tokens=30) for prompt in prompts]
    steps = _count_steps(lm)
    for result, prompt in zip(plain, prompts, strict=True):
        steps.clear()
        guessed = lm.generate(prompt, temperature=0, max_new_tokens=30, speculate="draft", n=2)
        assert guessed.tokens == result.tokens
        assert len(steps) <= -(-len(result.tokens) // 7) + 2
    assert lm.draft.engine.threads == 2
    lm.close()


def test_streams_of_one_model_do_not_mix(open_lm):
    lm = open_lm(EngineConfig(threads=2, slots=2))
    options = {"temperature": 0, "max_new_tokens": 12}
    alone = [lm.generate(prompt, **options).text for prompt in ("the robot", "a house")]
    streams = [lm.stream(prompt, **options) for prompt in ("the robot", "a house")]
    pieces: list[list[str]] = [[], []]
    for together in itertools.zip_longest(*streams):
        for mine, piece in zip(pieces, together, strict=True):
            mine.append(piece or "")
    assert ["".join(mine) for mine in pieces] == alone


def test_an_interrupted_step_leaves_no_trace(open_lm, monkeypatch):
    """Ctrl-C while a prompt is read: the engine has read it, the batcher does not know."""
    lm = open_lm(EngineConfig(threads=2, slots=2))
    expected = lm.generate(PROMPT, temperature=0, max_new_tokens=8).tokens
    step = type(lm.engine).step

    def pressed(self, feeds):
        step(self, feeds)
        raise KeyboardInterrupt

    for ask in (
        lambda: lm.generate("something else entirely, and long", temperature=0),
        lambda: lm.generate("another text", beams=2),
        lambda: lm.score("a third text"),
    ):
        lm.batcher.clear()
        monkeypatch.setattr(type(lm.engine), "step", pressed)
        with pytest.raises(KeyboardInterrupt):
            ask()
        monkeypatch.setattr(type(lm.engine), "step", step)
        for _ in range(2):  # in either slot
            assert lm.generate(PROMPT, temperature=0, max_new_tokens=8, n=2).tokens == expected


def test_an_interrupted_step_changes_no_other_sequence(open_lm, monkeypatch):
    """Ctrl-C in one thread, whose step also advanced the sequence of another."""
    lm = open_lm(EngineConfig(engine="torch", slots=2))
    expected = lm.generate(PROMPT, temperature=0, max_new_tokens=8).tokens
    (sequence,) = lm.start(PROMPT, SamplingConfig(temperature=0, max_new_tokens=8))
    lm.batcher.add(sequence)
    lm.batcher.step()
    step = lm.engine.step

    def pressed(feeds):
        step(feeds)
        raise KeyboardInterrupt

    monkeypatch.setattr(lm.engine, "step", pressed)
    with pytest.raises(KeyboardInterrupt):
        lm.generate("another thread's", temperature=0)
    monkeypatch.setattr(lm.engine, "step", step)
    while sequence.finish_reason is None:
        lm.batcher.step()
    assert sequence.result().tokens == expected


@pytest.mark.slow
def test_guesses_leave_the_distribution_alone(lm):
    """First tokens after a lookup guess, over many seeds, against the model's own probabilities."""
    prompt = "the a the a the"
    config = {"top_k": 4, "max_new_tokens": 2, "ignore_eos": True, "speculate": "lookup"}
    counts: dict[int, int] = {}
    draws = 600
    for seed in range(draws):
        token = lm.generate(prompt, seed=seed, **config).tokens[0]
        counts[token] = counts.get(token, 0) + 1
    with torch.inference_mode():
        logits = lm.model(torch.tensor([lm.encode(prompt)]))[0, -1].topk(4)
    expected = dict(zip(logits.indices.tolist(), torch.softmax(logits.values, -1).tolist(), strict=True))
    assert set(counts) <= set(expected)
    chi_square = sum((counts.get(i, 0) - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    assert chi_square < 3 + 5 * 6**0.5


def test_requests_share_what_they_begin_with(open_lm):
    lm = open_lm(EngineConfig(threads=2, slots=3))
    prefix = "the same long beginning of two prompts "
    config = SamplingConfig(seed=1, max_new_tokens=5)
    alone = [open_lm().generate(prefix + end, config).tokens for end in ("one", "two")]
    assert lm.generate(prefix + "one", config).tokens == alone[0]
    before = lm.batcher.reused_tokens
    assert lm.generate(prefix + "two", config).tokens == alone[1]
    assert lm.batcher.reused_tokens - before >= len(lm.encode(prefix)) - 1
    read = []
    step = lm.engine.step
    lm.engine.step = lambda feeds: (read.append(sum(len(f.tokens) for f in feeds)), step(feeds))[1]
    lm.generate("a wholly different and rather long text to begin with", config, n=3)
    assert sum(read) < 2 * len(lm.encode("a wholly different and rather long text to begin with"))


def test_more_requests_than_slots_and_dropped_ones(open_lm):
    lm = open_lm(EngineConfig(threads=2, slots=2))
    everyone = [lm.start(f"prompt {i}", SamplingConfig(seed=1, max_new_tokens=6))[0] for i in range(5)]
    batcher = Batcher(lm.engine)
    for one in everyone:
        batcher.add(one)
    batcher.step()
    batcher.drop(everyone[0])
    batcher.drop(everyone[4])
    while batcher.busy:
        batcher.step()
    assert [c.finish_reason is not None for c in everyone] == [False, True, True, True, False]


# -- the other calls


def test_next_tokens_and_score_are_the_models(lm):
    with torch.inference_mode():
        tokens = [lm.tokenizer.start, *lm.encode(PROMPT)]
        logprobs = torch.log_softmax(lm.model(torch.tensor([tokens]))[0], -1)
        after = torch.softmax(lm.model(torch.tensor([lm.encode(PROMPT)]))[0, -1], -1).topk(4)
    found = lm.next_tokens(PROMPT, k=4)
    assert [t.id for t in found] == after.indices.tolist()
    assert [t.probability for t in found] == pytest.approx(after.values.tolist(), rel=1e-3)
    score = lm.score(PROMPT)
    for i, token in enumerate(score.tokens):
        row = logprobs[i]
        assert token.logprob == pytest.approx(float(row[tokens[i + 1]]), abs=1e-3)
        assert token.rank == int((row > row[tokens[i + 1]]).sum())
        assert token.entropy == pytest.approx(float(-(row.exp() * row).sum()), abs=1e-3)
    mean = np.mean([float(logprobs[i, tokens[i + 1]]) for i in range(len(tokens) - 1)])
    assert score.perplexity == pytest.approx(np.exp(-mean), rel=1e-3)


def test_long_texts_are_scored_whole(lm):
    text = "the quick brown fox " * 20
    score = lm.score(text)
    assert [t.id for t in score.tokens] == lm.encode(text)
    assert np.isfinite(score.perplexity)


def test_suggestions_are_words(trained_folder):
    lm = LM(trained_folder, _tokenizer(trained_folder), EngineConfig(threads=2))
    words = lm.suggest("    def __in", n=3)
    assert 1 <= len(words) <= 3
    assert all(word.strip() and " " not in word.strip() for word in words)
    lm.close()


def test_suggestions_after_a_space_or_a_sentence():
    """The space belongs to the word that comes, a full stop does not, and an end token is no word."""
    lm = plume.load("plume-en", threads=1)
    likely = tuple(candidate.text.strip() for candidate in lm.next_tokens("I went to the", k=10))
    assert all(word.startswith(likely) for word in lm.suggest("I went to the ", n=5))
    after = [word.replace("'", "") for word in lm.suggest("This is the end.", n=5)]  # I'm is a word
    assert all(word[:1] == " " and word[1:].isalpha() for word in after)
    assert not any("<" in word for word in lm.suggest("The end.\n\n", n=200))
    lm.close()


def test_embeddings_do_not_depend_on_padding(lm):
    texts = ["hello", "the longer text of the two", "x"]
    together = lm.embed(texts)
    assert together.shape == (3, lm.config.width)
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_allclose(lm.embed([text])[0], row, atol=1e-5)


# -- mistakes


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda lm: lm.generate(""), "the prompt is empty"),
        (lambda lm: lm.generate("a", max_new_tokens=10.5), "max_new_tokens=10.5 must be a whole number"),
        (lambda lm: lm.generate("a", seed=1.5, n=2.0), "n=2.0 must be a whole number; seed=1.5 must be"),
        (lambda lm: lm.generate("a", logit_bias={5: math.nan}), "logit_bias=.* must hold numbers"),
        (lambda lm: lm.generate([5, 266]), "token id 266"),
        (lambda lm: lm.generate([-1]), "token id -1"),
        (lambda lm: lm.generate("a", logit_bias={999: 1.0}), "id 999"),
        (lambda lm: lm.generate("a", temprature=1.0), "did you mean temperature"),
        (lambda lm: lm.generate("a", top_p=2.0), "top_p=2.0"),
        (lambda lm: lm.generate("a", stop=""), "zero length"),
        (lambda lm: lm.stream("a", n=2), "single sample"),
        (lambda lm: lm.stream(["a", "b"]), "one prompt can be streamed"),
        (lambda lm: lm.generate(5), "a text or a list of token ids, not 5"),
        (lambda lm: lm.generate([["a"]]), r"a list of token ids, not \['a'\]"),
        (lambda lm: lm.next_tokens([5] * 65), "the prompt has 65 tokens, the context holds 64$"),
        (lambda lm: lm.score(""), "the text is empty"),
        (lambda lm: lm.score("", given="a"), "the text is empty"),
        (lambda lm: lm.score("a", given=["b"]), r"a list of token ids, not \['b'\]"),
        (lambda lm: lm.predict([{"text": "a"}]), "row 0 has no 'source'"),
        (lambda lm: lm.generate("a", overflow="cut"), "overflow='cut' is none of refuse, truncate, slide"),
        (lambda lm: lm.embed("a", pool="median"), "pool='median' does not exist; mean"),
        (lambda lm: lm.embed(["a"], batch=0), "batch=0 must be at least 1"),
        (lambda lm: lm.generate("a", temperature="hot"), "temperature: input should be a valid number, .* not 'hot'"),
        (lambda lm: lm.generate("a", temperature=None), "temperature: input should be a valid number, not None"),
        (lambda lm: lm.generate("a", stop=5), "stop.0: input should be a valid string, not 5"),
        (lambda lm: lm.generate("a", logit_bias={"5": 1.0}), "token ids as whole numbers"),
        (lambda lm: lm.generate("a", beams=20), "slots=20"),
        (lambda lm: lm.generate("a", speculate="draft"), "draft"),
        (lambda lm: lm.next_tokens("a", k=0), "k=0"),
        (lambda lm: lm.suggest("a", n=0), "n=0"),
        (lambda lm: lm.suggest([5, 6]), r"expected a text, not \[5, 6\]"),
        (lambda lm: lm.generate("a" * 99), "overflow=truncate keeps the last 32,"),  # 100 new tokens would leave none
        (lambda lm: lm.score([5, 10**6]), "token id 1000000"),
        (lambda lm: lm.score("a text", stride=0), "stride=0 must lie between 1 and 64"),
        (lambda lm: lm.score("a text", stride=65), "stride=65"),
        (lambda lm: lm.fill_mask("a [MASK]"), "masked-token"),
        (lambda lm: lm.translate("a"), "encoder-decoder"),
    ],
)
def test_mistakes_are_answered_clearly(lm, call, words):
    with pytest.raises(UserError, match=words):
        call(lm)


def _tokenizer(folder):
    from plume.text import load_tokenizer

    return load_tokenizer(folder)


def _count_steps(lm):
    steps: list[int] = []
    step = lm.engine.step
    lm.engine.step = lambda feeds: (steps.append(len(feeds)), step(feeds))[1]
    return steps
