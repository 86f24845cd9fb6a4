"""What a masked model would put at a gap, against transformers with the same weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from plume.config import PRESETS, EngineConfig, TokenizerConfig, UserError
from plume.hf import save_model
from plume.lm import LM
from plume.model.heads import Model
from plume.text import train_tokenizer

TEXT = "the cat sat on the mat and the dog ran to the house"


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    words = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=90), [TEXT] * 20)
    torch.manual_seed(3)
    shape = {"vocab_size": words.vocab_size, "context": 24, "layers": 2, "heads": 2, "width": 16}
    model = Model(replace(PRESETS["bert-tiny"], **shape), "masked-token")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    folder = save_model(model, tmp_path_factory.mktemp("masked") / "model", tokenizer=words)
    lm = LM(folder, words, EngineConfig())
    yield folder, words, lm
    lm.close()


def test_gaps_are_filled_as_transformers_would(masked):
    folder, tokenizer, lm = masked
    mask = tokenizer.token(tokenizer.mask)
    text = f"the cat {mask} on the {mask}"
    ids, _ = tokenizer.add_special_tokens(tokenizer.encode(text, allow_special=True))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        likely = theirs(torch.tensor([ids])).logits[0].softmax(-1)
    places = [place for place, token in enumerate(ids) if token == tokenizer.mask]
    found = lm.fill_mask(text, k=4)
    assert len(found) == len(places) == 2
    for place, candidates in zip(places, found, strict=True):
        best = likely[place].topk(4)
        assert [c.id for c in candidates] == best.indices.tolist()
        assert [c.probability for c in candidates] == pytest.approx(best.values.tolist(), abs=1e-5)
        pieces = [tokenizer.token(i).removeprefix("##") for i in best.indices.tolist()]
        assert [c.text.strip() for c in candidates] == pieces


def test_what_cannot_be_filled_is_said(masked):
    _, _, lm = masked
    with pytest.raises(UserError, match=r"the text has no \[MASK\]"):
        lm.fill_mask("the cat sat")
    with pytest.raises(UserError, match="the context holds 24"):
        lm.fill_mask("[MASK]" + " the" * 40)
    with pytest.raises(UserError, match="k=0 must be at least 1"):
        lm.fill_mask("[MASK]", k=0)
    with pytest.raises(UserError, match="token id 99999 is outside the vocabulary"):
        lm.fill_mask([99999, lm.tokenizer.mask])


def test_a_long_text_keeps_what_closes_it(masked):
    """A vector of a text that is cut is that of the text cut by hand; ids say the same as the text."""
    folder, tokenizer, lm = masked
    ids = tokenizer.encode("the cat sat on the mat " * 10)
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = theirs(torch.tensor([tokenizer.add_special_tokens(ids[:22])[0]])).last_hidden_state[0]
    expected = states.mean(0).numpy()
    np.testing.assert_allclose(lm.embed([ids])[0], expected, atol=1e-5)
    np.testing.assert_allclose(lm.embed([tokenizer.decode(ids)])[0], expected, atol=1e-5)


def test_a_masked_text_is_scored_as_transformers_would(masked):
    """Each token hidden alone; LM, explanation and the loop agree, without the special tokens."""
    folder, tokenizer, lm = masked
    text = "the cat sat on the mat"
    ids = tokenizer.encode(text)
    whole, _ = tokenizer.add_special_tokens(ids)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    expected = []
    for place, token in list(enumerate(whole))[1:-1]:
        hidden = [*whole[:place], tokenizer.mask, *whole[place + 1 :]]
        with torch.no_grad():
            expected.append(float(theirs(torch.tensor([hidden])).logits[0, place].log_softmax(-1)[token]))
    found = lm.score(text)
    assert [t.id for t in found.tokens] == ids
    assert [t.logprob for t in found.tokens] == pytest.approx(expected, abs=1e-4)
    assert lm.explain(text).surprise().perplexity == pytest.approx(found.perplexity, rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(-np.mean(expected)), rel=1e-4)
    mask = tokenizer.token(tokenizer.mask)
    some = [f"the {mask} sat", f"a {mask}"]
    assert lm.fill_mask(some) == [lm.fill_mask(one) for one in some]
