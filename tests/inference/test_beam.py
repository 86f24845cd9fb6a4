"""Beam search against transformers, and against looking at every text there is."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

import plume
from plume.config import EngineConfig, ModelConfig, SamplingConfig, TokenizerConfig, UserError
from plume.hf import save_model
from plume.inference.beam import beam_search
from plume.lm import LM
from plume.model.heads import Model
from plume.text import train_tokenizer


def test_beam_search_is_that_of_transformers(trained, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")
    folder = save_model(trained, tmp_path / "model", tokenizer=tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    lm = LM(folder, tokenizer, EngineConfig(threads=2))
    for prompt in ("def wrap(", "import ", "    return "):
        ids = torch.tensor([lm.encode(prompt)])
        expected = theirs.generate(
            ids, num_beams=4, do_sample=False, max_new_tokens=12, length_penalty=1.0, pad_token_id=tokenizer.end
        )[0, ids.shape[1] :]
        assert lm.generate(prompt, beams=4, max_new_tokens=12).tokens[:12] == tuple(expected.tolist())
    lm.close()


def all_texts(vocab, length, end):
    """Every sequence of at most this length that ends with the end token or with the limit."""
    for n in range(1, length + 1):
        for body in itertools.product([t for t in range(vocab) if t != end], repeat=n - 1):
            yield (*body, end)
    yield from itertools.product([t for t in range(vocab) if t != end], repeat=length)


@pytest.mark.parametrize("family", ["gpt", "encoder-decoder"])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_enough_beams_find_the_best_text_of_all(family, penalty):
    from plume.text import Tokenizer
    from plume.text.definition import define

    tokenizer = Tokenizer(define("characters", ["a", "b"], [], "gpt2"))  # unknown, a, b, end
    torch.manual_seed(3)
    shape = {"vocab_size": 4, "context": 8, "layers": 1, "heads": 2, "width": 16}
    if family == "encoder-decoder":
        shape |= {"decoder_layers": 1, "causal": False, "norm": "post"}
    model = Model(ModelConfig(**shape)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    lm = LM(None, tokenizer, EngineConfig(threads=2, slots=64), model)
    prompt, source = [tokenizer.start], [1, 2, 1] if family == "encoder-decoder" else None

    def rating(text):
        whole = torch.tensor([[*prompt, *text]])
        with torch.inference_mode():
            logits = model(whole) if source is None else model(torch.tensor([source]), whole)
        logprobs = torch.log_softmax(logits[0], -1)
        return sum(float(logprobs[i, t]) for i, t in enumerate(text)) / len(text) ** penalty

    best = max(all_texts(4, 4, tokenizer.end), key=rating)
    config = SamplingConfig(beams=64, max_new_tokens=4, length_penalty=penalty)
    found = beam_search(lm.batcher, tokenizer, prompt, config, source=source)
    assert found.tokens == best
    assert sum(found.logprobs) / len(best) ** penalty == pytest.approx(rating(best), abs=1e-4)
    lm.close()


def test_several_beams_come_best_first_and_stop_texts_end_them(lm):
    result = lm.generate("hello", beams=4, n=3, max_new_tokens=8)
    means = [np.mean(sample.logprobs) for sample in result.samples]
    assert len(means) == 3
    assert means == sorted(means, reverse=True)
    stop = result.text[2:4]
    assert stop not in lm.generate("hello", beams=4, max_new_tokens=8, stop=stop).text
    later = lm.generate("hello", beams=4, max_new_tokens=8, min_new_tokens=6, ignore_eos=True, stop=stop)
    assert len(later.tokens) >= 6


def test_a_stop_text_before_the_minimum_does_not_cut(lm):
    options = {"beams": 4, "max_new_tokens": 8, "ignore_eos": True}
    free = lm.generate("hello", **options)
    early = next(iter(lm.tokenizer.decode(free.tokens[:2]).strip()))
    found = lm.generate("hello", **options, min_new_tokens=8, stop=early)
    assert len(found.tokens) == 8 and early in found.text


def test_alternatives_of_found_tokens_are_those_of_greedy_ones(lm):
    found = lm.generate("hello", beams=2, max_new_tokens=4, logprobs=3, seed=7)
    assert found.seed == 7 and len(found.top_logprobs) == len(found.tokens)
    for i in range(len(found.tokens)):
        prompt = [*lm.encode("hello"), *found.tokens[:i]]
        (expected,) = lm.generate(prompt, temperature=0, max_new_tokens=1, logprobs=3).top_logprobs
        assert [token for token, _ in found.top_logprobs[i]] == [token for token, _ in expected]
        assert [value for _, value in found.top_logprobs[i]] == pytest.approx([v for _, v in expected], abs=1e-4)


UNUSED = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "top_p_rule": "openai", "min_p": 0.1, "typical_p": 0.9,
          "best_of": 3, "token_healing": True, "speculate": "lookup", "overflow": "slide"}  # fmt: skip


@pytest.mark.parametrize("name", UNUSED)
def test_what_a_search_cannot_use_is_an_error(name):
    with pytest.raises(UserError, match=f"beams=4 draws nothing and cannot use {name}="):
        SamplingConfig(beams=4, **{name: UNUSED[name]})
    SamplingConfig(beams=4, seed=1, temperature=0, top_k=None, overflow="truncate")


@pytest.mark.parametrize("options", [{"n": 3}, {"top_p": 0.9}, {"token_healing": True}])
def test_what_an_encoder_decoder_cannot_use_is_an_error(options, tokenizer, random_model):
    shape = {"vocab_size": tokenizer.vocab_size, "decoder_layers": 1, "causal": False, "norm": "post"}
    lm = LM(None, tokenizer, EngineConfig(), random_model(**shape))
    with pytest.raises(UserError, match=rf"beams=1\) and cannot use {next(iter(options))}="):
        lm.translate("hello", beams=1, **options)
    lm.close()


@pytest.mark.parametrize("beams", [1, 2])
def test_rows_of_the_table_without_a_token_are_outside_the_vocabulary(beams, tokenizer, random_model, tmp_path):
    """As ids they are refused, and as end tokens they are never written; both were tracebacks of a search."""
    last = tokenizer.vocab_size
    folder = save_model(random_model(vocab_size=last + 7), tmp_path / "model", tokenizer=tokenizer)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [last + 1, tokenizer.end]}))
    lm = plume.load(folder, threads=1)
    assert lm.tokenizer.ends == (tokenizer.end,)
    assert len(lm.generate("hello", beams=beams, min_new_tokens=3, max_new_tokens=4).tokens) >= 3
    for prompt, options in (("hello", {"logit_bias": {last: 1.0}}), ([1, last], {"repetition_penalty": 1.2})):
        with pytest.raises(UserError, match=f"token id {last}.* is outside the vocabulary"):
            lm.generate(prompt, beams=beams, max_new_tokens=2, **options)
    with pytest.raises(UserError, match="expected a text or a list of token ids, not b'hello'"):
        lm.generate(b"hello", beams=beams)
    lm.close()


def test_a_search_that_may_write_nothing_more_ends(lm):
    """No token may come twice, and the vocabulary is soon used up."""
    bias = dict.fromkeys(range(6, lm.config.vocab_size), -math.inf)
    found = lm.generate([0, 1], beams=2, no_repeat_ngram=1, logit_bias=bias, ignore_eos=True, max_new_tokens=20)
    assert sorted(found.tokens) == [2, 3, 4, 5] and found.finish_reason == "length"


@pytest.mark.parametrize("kind", ["gpt1-bpe", "wordpiece"])
def test_a_found_text_follows_its_prompt_as_a_written_one_does(kind, random_model):
    """Where the space between two words is in no token of its own."""
    config = TokenizerConfig(kind=kind, vocab_size=120, special_tokens="gpt1" if kind == "gpt1-bpe" else "bert")
    tokenizer = train_tokenizer(config, ["the robot in the house, a hill and the river"] * 3)
    lm = LM(None, tokenizer, EngineConfig(engine="torch"), random_model(vocab_size=tokenizer.vocab_size))
    for prompt in ("the robot", "a hill and"):
        (sequence,) = lm.start(prompt, SamplingConfig(temperature=0, ignore_eos=True))
        found = lm.generate(prompt, beams=3, max_new_tokens=5, ignore_eos=True)
        for token in found.tokens:
            sequence.accept([(token, None, ())], [])
        sequence.stop()
        assert found.text == sequence.result().text
    lm.close()
