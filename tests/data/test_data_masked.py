"""Masked batches: pairs that truly follow or not, sentences whole, masks that are functions of (seed, sample)."""

import json

import numpy as np
import pytest

from plume.config import DataConfig, MaskingConfig, TokenizerConfig, UserError
from plume.data import FullSentences, MaskedPairs, PackedWindows, Phases, open_shards, prepare
from plume.data.batches import IGNORE
from plume.text import load_tokenizer

WORDS = [f"w{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """200 documents of numbered sentences, so that every word says where it stood."""
    tmp_path = tmp_path_factory.mktemp("masked")
    rng = np.random.default_rng(0)
    rows = []
    for d in range(200):
        sentences = [f"doc{d} s{n} " + " ".join(rng.choice(WORDS, rng.integers(3, 12))) + "." for n in range(30)]
        rows.append({"text": " ".join(sentences)})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tokenizer = TokenizerConfig(kind="wordpiece", vocab_size=300)
    prepare(
        DataConfig(
            paths=(str(tmp_path / "a.jsonl"),), folder=tmp_path / "out", tokenizer=tokenizer, validation_share=0.05
        )
    )
    return tmp_path / "out"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder / "tokenizer")


def unmasked(batch):
    tokens = batch.tokens.copy().reshape(-1)
    tokens[batch.positions] = batch.targets
    return tokens.reshape(batch.tokens.shape)


def test_pairs_have_the_shape_of_bert(folder, tokenizer):
    batch = MaskedPairs(open_shards(folder), tokenizer, 64, seed=1).batch(0, 64)
    assert batch.tokens.shape == batch.segments.shape == (64, 64)
    for ids, segments, length in zip(unmasked(batch), batch.segments, batch.lengths, strict=True):
        assert ids[0] == tokenizer.classify and ids[length - 1] == tokenizer.separator
        (first, second) = np.flatnonzero(ids[:length] == tokenizer.separator)
        assert second == length - 1
        assert (segments[: first + 1] == 0).all() and (segments[first + 1 : length] == 1).all()
        assert (ids[length:] == tokenizer.pad).all()
        assert first > 1 and second > first + 1  # neither side is empty


def test_half_of_the_pairs_truly_follow_and_the_label_says_which(folder, tokenizer):
    shards = open_shards(folder)
    text = shards.streams[0].read(0, shards.tokens).astype(np.uint16).tobytes()
    pairs = MaskedPairs(shards, tokenizer, 64, seed=1)
    batch = pairs.batch(0, 400)
    for ids, label in zip(unmasked(batch), batch.next_sentence, strict=True):
        first, second = np.flatnonzero(ids == tokenizer.separator)[:2]
        a, b = ids[1:first], ids[first + 1 : second]
        together = text.find(np.concatenate([a, b]).astype(np.uint16).tobytes()) >= 0
        assert together == (label == 0)
        assert text.find(a.astype(np.uint16).tobytes()) >= 0 and text.find(b.astype(np.uint16).tobytes()) >= 0
    assert batch.next_sentence.mean() == pytest.approx(0.5, abs=0.08)


def test_a_random_second_text_is_from_another_document(folder, tokenizer):
    batch = MaskedPairs(open_shards(folder), tokenizer, 64, seed=1, random_next=1.0, short=0.0).batch(0, 100)
    assert (batch.next_sentence == 1).all()
    for ids in unmasked(batch):
        first, second = np.flatnonzero(ids == tokenizer.separator)[:2]
        sides = [tokenizer.decode(ids[1:first]).split(), tokenizer.decode(ids[first + 1 : second]).split()]
        names = [{w for w in side if w.startswith("doc")} for side in sides]
        assert not names[0] & names[1]


def test_a_tenth_of_the_rows_is_short(folder, tokenizer):
    shards = open_shards(folder)
    never = MaskedPairs(shards, tokenizer, 64, seed=1, short=0.0).batch(0, 1000).lengths
    some = MaskedPairs(shards, tokenizer, 64, seed=1, short=0.1).batch(0, 1000).lengths
    assert (never < 30).mean() < 0.02
    assert 0.02 < (some < 30).mean() - (never < 30).mean() < 0.09  # lengths 2 to 61 evenly: about half are below 30


def masked_shares(batch, tokenizer):
    shown = batch.tokens.reshape(-1)[batch.positions]
    return (shown == tokenizer.mask).mean(), (shown == batch.targets).mean()


def test_fifteen_of_a_hundred_are_masked_eighty_ten_ten(folder, tokenizer):
    batch = FullSentences(open_shards(folder), tokenizer, 128, seed=2).batch(0, 200)
    assert (batch.targets != IGNORE).sum() / batch.lengths.sum() == pytest.approx(0.15, abs=0.01)
    masked, kept = masked_shares(batch, tokenizer)
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)
    untouched = np.ones(batch.tokens.size, bool)
    untouched[batch.positions] = False
    assert not (batch.tokens.reshape(-1)[untouched] == tokenizer.mask).any()
    assert not np.isin(batch.targets, [tokenizer.classify, tokenizer.separator]).any()
    rows = np.bincount(batch.positions // 128, minlength=200)
    assert rows.max() <= 19 and rows.min() >= 1


def test_other_shares_are_kept_too(folder, tokenizer):
    masking = MaskingConfig(share=0.3, masked=0.5, random=0.0, most=10)
    batch = FullSentences(open_shards(folder), tokenizer, 128, masking=masking).batch(0, 50)
    assert np.bincount(batch.positions // 128).max() == 10
    assert sum(masked_shares(batch, tokenizer)) == pytest.approx(1.0)
    with pytest.raises(UserError, match=r"share=1\.5 must lie between"):
        MaskingConfig(share=1.5)


def test_whole_words_are_masked_whole(folder, tokenizer):
    shards = open_shards(folder)
    torn = {}
    for whole in (False, True):
        batch = FullSentences(shards, tokenizer, 128, masking=MaskingConfig(whole_words=whole)).batch(0, 50)
        chosen = np.zeros(batch.tokens.size, bool)
        chosen[batch.positions] = True
        torn[whole] = 0
        for ids, places, length in zip(unmasked(batch), chosen.reshape(50, 128), batch.lengths, strict=True):
            word = np.cumsum([not tokenizer.token(i).startswith("##") for i in ids[:length]])
            for w in set(word.tolist()):
                torn[whole] += len(set(places[:length][word == w].tolist())) > 1
    assert torn[True] == 0 and torn[False] > 50


def test_masks_are_functions_of_seed_and_sample(folder, tokenizer):
    shards = open_shards(folder)
    one, two = (MaskedPairs(shards, tokenizer, 64, seed=4) for _ in range(2))
    for step in range(5):
        one.batch(step, 8)
    whole, parts = two.batch(3, 8), [one.batch(3, 8, rank=r, world=2) for r in range(2)]
    np.testing.assert_array_equal(whole.tokens, np.concatenate([p.tokens for p in parts]))
    np.testing.assert_array_equal(whole.targets, np.concatenate([p.targets for p in parts]))
    np.testing.assert_array_equal(whole.positions, np.concatenate([parts[0].positions, parts[1].positions + 4 * 64]))
    other = MaskedPairs(shards, tokenizer, 64, seed=5).batch(3, 8)
    assert not np.array_equal(other.tokens, whole.tokens)
    micro = whole.rows(4, 8)
    np.testing.assert_array_equal(micro.positions, parts[1].positions)
    np.testing.assert_array_equal(micro.next_sentence, parts[1].next_sentence)


def test_static_masks_come_round_again_and_dynamic_ones_do_not(folder, tokenizer):
    shards = open_shards(folder)
    everything = {}
    for copies in (None, 2):
        texts = FullSentences(shards, tokenizer, 64, seed=1, masking=MaskingConfig(copies=copies))
        n = len(texts)
        everything[copies] = [sorted(map(tuple, texts.take(p * n, n).tokens.tolist())) for p in range(4)]
    passes = everything[2]
    assert passes[0] == passes[2] and passes[1] == passes[3] and passes[0] != passes[1]
    shared = [len(set(a) & set(b)) for a in everything[None] for b in everything[None] if a is not b]
    assert max(shared) == 0


def test_validation_masks_are_fixed(folder, tokenizer):
    texts = FullSentences(open_shards(folder, "validation"), tokenizer, 64, shuffle=False)
    first, second = ([b.tokens for b in texts.sweep(5)] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_full_sentences_begin_and_end_with_sentences_and_go_over_documents(folder, tokenizer):
    shards = open_shards(folder)
    texts = FullSentences(shards, tokenizer, 128, seed=1)
    stream = shards.streams[0].read(0, shards.tokens)
    batch, crossing = texts.batch(0, 200), 0
    for ids, length in zip(unmasked(batch), batch.lengths, strict=True):
        assert ids[0] == tokenizer.classify and ids[length - 1] == tokenizer.separator
        words = tokenizer.decode(ids[1 : length - 1]).split()
        assert words[0].startswith("doc") or words[0] == "[SEP]"
        assert words[-1].endswith(".") or words[-1] == "[SEP]" or length == 128
        crossing += (ids[1 : length - 1] == tokenizer.separator).any()
    assert batch.lengths.mean() > 0.85 * 128
    assert 0 < crossing < 200
    assert len(texts) == len(stream) // 126


def test_phases_of_128_then_512(folder, tokenizer):
    shards = open_shards(folder)
    phases = Phases([(9 * 4, MaskedPairs(shards, tokenizer, 128)), (4, MaskedPairs(shards, tokenizer, 512))])
    assert [phases.batch(step, 4).tokens.shape[1] for step in (0, 8, 9)] == [128, 128, 512]


def test_one_document_alone_still_makes_pairs(tmp_path):
    (tmp_path / "a.txt").write_text("One sentence here. " * 100)
    config = DataConfig(
        paths=(str(tmp_path / "a.txt"),),
        folder=tmp_path / "out",
        tokenizer=TokenizerConfig(kind="wordpiece", vocab_size=60),
        validation_share=0.0,
    )
    prepare(config)
    batch = MaskedPairs(open_shards(tmp_path / "out"), load_tokenizer(tmp_path / "out" / "tokenizer"), 32).batch(0, 20)
    assert 0 < batch.next_sentence.sum() < 20


def test_a_tokenizer_without_a_mask_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    tokenizer = TokenizerConfig(kind="bytes")
    prepare(DataConfig(paths=(str(tmp_path / "a.txt"),), folder=tmp_path / "out", tokenizer=tokenizer))
    shards, tokenizer = open_shards(tmp_path / "out"), load_tokenizer(tmp_path / "out" / "tokenizer")
    with pytest.raises(UserError, match="has no mask, classify and separator tokens"):
        FullSentences(shards, tokenizer, 64)
    assert len(PackedWindows(shards, 64)) > 0
