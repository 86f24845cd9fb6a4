"""Samplers against their plain definitions, written out as loops over probabilities."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from plume.config import SamplingConfig, UserError
from plume.inference.sampler import (
    Row,
    candidates,
    choose,
    choose_plainly,
    choose_rows,
    draw,
    largest,
    log_normaliser,
    noise,
    penalised,
)
from plume.model.likelihood import log_softmax

SCORES = np.random.default_rng(0).normal(size=200).astype(np.float32) * 2


def softmax(scores):
    weights = [math.exp(s - max(scores)) for s in map(float, scores)]
    return [w / sum(weights) for w in weights]


def plain_distribution(scores, config):
    """The definition of each rule, token by token."""
    alive = dict(enumerate(softmax([float(s) / config.temperature for s in scores])))

    def normalised(kept):
        return {i: alive[i] / sum(alive[j] for j in kept) for i in kept}

    if config.top_k is not None:
        alive = normalised(sorted(alive, key=lambda i: (-alive[i], i))[: config.top_k])
    if config.top_p is not None:
        kept, total = [], 0.0
        for i in sorted(alive, key=lambda i: (-alive[i], i)):
            if config.top_p_rule == "usual":
                if total >= config.top_p:
                    break
            elif kept and total + alive[i] > config.top_p:
                break
            kept.append(i)
            total += alive[i]
        alive = normalised(kept)
    if config.min_p is not None:
        alive = normalised([i for i in alive if alive[i] >= config.min_p * max(alive.values())])
    if config.typical_p is not None:
        entropy = -sum(p * math.log(p) for p in alive.values())
        kept, total = [], 0.0
        for i in sorted(alive, key=lambda i: abs(-math.log(alive[i]) - entropy)):
            if total >= config.typical_p:
                break
            kept.append(i)
            total += alive[i]
        alive = normalised(kept)
    return alive


RULES = [
    {},
    {"temperature": 0.5},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"top_p": 0.8, "top_p_rule": "openai"},
    {"top_p": 0.01, "top_p_rule": "openai"},
    {"min_p": 0.1},
    {"typical_p": 0.6},
    {"typical_p": 0.05},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9},
]


@pytest.mark.parametrize("fields", RULES, ids=str)
def test_candidates_are_those_of_the_definition(fields):
    config = SamplingConfig(**{"top_k": None, **fields})
    expected = plain_distribution(SCORES, config)
    ids, logprobs = candidates(SCORES, config)
    assert {int(i) for i in ids} == set(expected)
    for i, logprob in zip(ids, logprobs, strict=True):
        assert math.exp(logprob) == pytest.approx(expected[int(i)], rel=1e-4)


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.7}, {"typical_p": 0.5}], ids=str)
def test_draws_have_the_distribution(fields):
    config = SamplingConfig(**{"top_k": None, **fields})
    expected = plain_distribution(SCORES, config)
    ids, logprobs = candidates(SCORES, config)
    counts = dict.fromkeys(expected, 0)
    draws = 20_000
    for position in range(draws):
        counts[draw(ids, logprobs, 7, 0, position)] += 1
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("fields", RULES, ids=str)
def test_machine_code_draws_what_the_definition_draws(fields):
    """Every rule, small and large vocabularies, flat and sharp scores, equal ones and banned ones: the same tokens."""
    pytest.importorskip("numba")
    config = SamplingConfig(**{"top_k": None, **fields})
    random = np.random.default_rng(1)
    for size, spread in ((3, 1.0), (200, 2.0), (5_000, 0.01), (20_000, 3.0), (20_000, 12.0)):
        scores = (random.normal(size=size) * spread).astype(np.float32)
        scores[random.integers(0, size, size // 20)] = -np.inf
        scores[random.integers(0, size, 3)] = scores.max()  # many would reach p at a number of them, by rounding alone
        ids, logprobs = candidates(scores, config)
        for position in range(60):
            assert choose(scores, config, 3, 1, position) == draw(ids, logprobs, 3, 1, position)


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"min_p": 0.02}, {"typical_p": 0.7}], ids=str)
def test_machine_code_has_the_distribution(fields):
    pytest.importorskip("numba")
    config = SamplingConfig(**{"top_k": None, **fields})
    scores = SCORES[:60]
    expected = plain_distribution(scores, config)
    counts = dict.fromkeys(expected, 0)
    draws = 20_000
    for position in range(draws):
        counts[choose(scores, config, 11, 0, position)] += 1
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items() if draws * p > 5)
    freedom = sum(draws * p > 5 for p in expected.values()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}


def some_rows(size=5_000):
    """Rows of all kinds, as the sequences of one step may be."""
    random = np.random.default_rng(4)
    more = [PENALTIES, {**PENALTIES, "logit_bias": {7: 2.0}}, {"logprobs": 5}, {"logprobs": 0}, {"logprobs": 40}]
    more += [{"temperature": 0.0, "logprobs": 3}, {**PENALTIES, "top_p": 0.9, "logprobs": 2}, {"top_k": 2_000}]
    made = []
    for number, fields in enumerate([*RULES, *more]):
        logits = (random.normal(size=size) * 3).astype(np.float32)
        tokens = random.integers(0, 50, 80).tolist()
        made.append(Row(logits, SamplingConfig(**{"top_k": None, **fields}), 5, number, 9, tokens, 30, {3}))
    return made


def test_rows_of_a_step_are_answered_as_the_definition_says():
    """Tokens, penalties on the way to them, log-probabilities of the model itself, and the likeliest alternatives."""
    rows = some_rows()
    for row, (token, logprob, top) in zip(rows, choose_rows(rows), strict=True):
        assert token == choose_plainly(row.penalised, row), row.config
        if row.config.logprobs is None:
            assert (logprob, top) == (None, ())
            continue
        known = row.logits.astype(np.float64) - math.log(np.exp(row.logits.astype(np.float64)).sum())
        assert logprob == pytest.approx(known[token], abs=1e-5)
        assert [i for i, _ in top] == sorted(range(len(known)), key=lambda i: (-known[i], i))[: row.config.logprobs]
        assert [p for _, p in top] == pytest.approx([known[i] for i, _ in top], abs=1e-5)


def test_rows_do_not_depend_on_each_other():
    rows = some_rows()
    together = choose_rows(rows)
    assert [choose_rows([row])[0] for row in rows] == together
    assert choose_rows(rows[::-1]) == together[::-1]


def test_log_probabilities_and_a_row_without_any_token():
    rows = np.random.default_rng(2).normal(size=(5, 3_000)).astype(np.float32) * 4
    for row in rows:
        expected = math.log(sum(math.exp(float(x)) for x in row))
        assert log_normaliser(row) == pytest.approx(expected, abs=1e-5)
    nothing = np.full(300, -np.inf, np.float32)
    for fields in RULES:
        assert 0 <= choose(nothing, SamplingConfig(**{"top_k": None, **fields}), 1, 0, 0) < 300


def test_openai_rule_keeps_one_token_fewer():
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    usual, _ = candidates(scores, SamplingConfig(top_k=None, top_p=0.6))
    theirs, _ = candidates(scores, SamplingConfig(top_k=None, top_p=0.6, top_p_rule="openai"))
    assert usual.tolist() == [0, 1]
    assert theirs.tolist() == [0]


@given(arrays(np.float32, st.integers(1, 400), elements=st.floats(-10, 10, width=32)), st.integers(1, 400))
@settings(max_examples=100)
def test_largest_is_the_head_of_a_full_sort(scores, k):
    full = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert largest(scores, min(k, len(scores))).tolist() == full[: min(k, len(scores))]


def test_noise_depends_on_every_argument_and_nothing_else():
    ids = np.arange(50)
    base = noise(1, 2, 3, ids)
    assert (base == noise(1, 2, 3, ids)).all()
    assert (base[10:20] == noise(1, 2, 3, ids[10:20])).all()
    for other in (noise(2, 2, 3, ids), noise(1, 3, 3, ids), noise(1, 2, 4, ids), noise(1 + (1 << 64), 2, 3, ids)):
        assert not np.isclose(base, other).any()
    many = np.concatenate([noise(seed, 0, 0, np.arange(1000)) for seed in range(50)])
    assert many.mean() == pytest.approx(0.57722, abs=0.02)  # a Gumbel variable's mean and spread
    assert many.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)


def test_penalties_follow_their_formulas():
    config = SamplingConfig(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 3.0})
    scores = np.array([1.0, -1.0, 2.0, 0.5, 0.0], np.float32)
    changed = penalised(scores, config, [0, 1, 2, 2], 2, ())
    assert changed.tolist() == pytest.approx([0.5, -2.0, 1.0 - 0.5 - 0.5, 0.5, 3.0])
    assert scores.tolist() == [1.0, -1.0, 2.0, 0.5, 0.0], "the model's own scores stay"


def test_no_ngram_comes_twice_and_no_end_comes_early():
    scores = np.zeros(6, np.float32)
    banned = penalised(scores, SamplingConfig(no_repeat_ngram=3), [1, 2, 3, 1, 2, 4, 1, 2], 0, ())
    assert np.flatnonzero(np.isneginf(banned)).tolist() == [3, 4]
    early = penalised(scores, SamplingConfig(min_new_tokens=2), [1, 2], 1, {5})
    assert np.flatnonzero(np.isneginf(early)).tolist() == [5]
    assert penalised(scores, SamplingConfig(min_new_tokens=1), [1, 2], 1, {5}) is scores


def test_temperature_zero_is_the_likeliest():
    assert candidates(SCORES, SamplingConfig(temperature=0))[0].tolist() == [int(SCORES.argmax())]
    assert np.exp(log_softmax(SCORES)).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1.0}, ["temperature=-1.0", "0.8"]),
        ({"temperature": math.nan}, ["temperature=nan"]),
        ({"top_p": 2.0}, ["top_p=2.0", "0.9"]),
        ({"top_k": 0}, ["top_k=0", "at least 1"]),
        ({"min_p": 0.0}, ["min_p=0.0"]),
        ({"stop": ("a", "")}, ["zero length"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"n": 3, "best_of": 2}, ["best_of=2", "n=3"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty=0.0"]),
        ({"seed": -1}, ["seed=-1"]),
        ({"temperature": -1.0, "top_k": 0}, ["temperature", "top_k"]),
    ],
    ids=str,
)
def test_wrong_options_are_named(fields, words):
    with pytest.raises(UserError) as caught:
        SamplingConfig(**fields)
    assert all(word in str(caught.value) for word in words)


def test_options_by_name_are_the_fields_of_the_config():
    from typing import get_type_hints

    from plume.config import SamplingConfig
    from plume.inference.sampler import SamplingOptions

    options, fields = get_type_hints(SamplingOptions), get_type_hints(SamplingConfig)
    assert list(options) == list(fields)
    assert {name for name in fields if options[name] != fields[name]} == {"stop", "stop_tokens"}  # one or many
