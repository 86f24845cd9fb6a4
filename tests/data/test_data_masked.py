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
            paths=(str(tmp_path / "a.jsonl"),), folder=tmp_path / "out", tokenizer=tokenizer, validation_fraction=0.05
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
    text = shards.streams[0].read(0, shards.tokens).astype(np.uint16)
    text = text[text != tokenizer.separator].tobytes()
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
    masking = MaskingConfig(mask_prob=0.3, mask_token_prob=0.5, random_token_prob=0.0, max_predictions=10)
    batch = FullSentences(open_shards(folder), tokenizer, 128, masking=masking).batch(0, 50)
    assert np.bincount(batch.positions // 128).max() == 10
    assert sum(masked_shares(batch, tokenizer)) == pytest.approx(1.0)
    with pytest.raises(UserError, match=r"mask_prob=1\.5 must lie between"):
        MaskingConfig(mask_prob=1.5)


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
        texts = FullSentences(shards, tokenizer, 64, seed=1, masking=MaskingConfig(static_copies=copies))
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
    batch, crossing, begun = texts.batch(0, 200), 0, 0
    for ids, length in zip(unmasked(batch), batch.lengths, strict=True):
        assert ids[0] == tokenizer.classify and ids[length - 1] == tokenizer.separator
        words = tokenizer.decode(ids[1 : length - 1]).split()
        begun += words[0].startswith("doc") or words[0] == "[SEP]"
        assert words[-1].endswith(".") or words[-1] == "[SEP]" or length == 128
        crossing += (ids[1 : length - 1] == tokenizer.separator).any()
    assert begun > 120  # the others are in sentences longer than a quarter of a row
    assert batch.lengths.min() >= 0.95 * 128
    assert 0 < crossing < 200
    assert len(texts) < 1.6 * len(stream) / 126


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_token_is_in_a_row_of_each_pass_of_full_sentences(folder, tokenizer, shuffle):
    """Also of short documents, and in rows that are at least 95 % full."""
    shards = open_shards(folder)
    (stream,) = shards.streams
    texts = FullSentences(shards, tokenizer, 64, seed=5, shuffle=shuffle)
    for version in range(3 if shuffle else 1):
        seen = np.zeros(len(stream), np.bool_)
        for item in range(len(texts)):
            start, stop = texts.span((0, version, item))
            seen[start:stop] = True
            assert stop - start >= 0.95 * texts.capacity - 1
        assert seen.all()


def test_documents_of_a_row_of_full_sentences_are_numbered(folder, tokenizer):
    """RoBERTa's doc-sentences: the number changes behind each separator of documents, nowhere else."""
    shards = open_shards(folder)
    plain, apart = (FullSentences(shards, tokenizer, 128, seed=1, document_mask=mask) for mask in (False, True))
    whole, batch = plain.batch(0, 100), apart.batch(0, 100)
    np.testing.assert_array_equal(whole.tokens, batch.tokens)
    assert whole.documents is None and batch.documents.shape == batch.tokens.shape
    for ids, length, documents in zip(unmasked(batch), batch.lengths, batch.documents, strict=True):
        ends = np.append(0, np.cumsum(ids[1 : length - 2] == tokenizer.separator))
        np.testing.assert_array_equal(documents[1 : length - 1], ends)
        assert documents[0] == 0 and (documents[length - 1 :] == documents[length - 2]).all()
    assert batch.documents.max() > 0


def test_pairs_of_single_sentences(folder, tokenizer):
    texts = MaskedPairs(open_shards(folder), tokenizer, 128, seed=1, single_sentences=True)
    segments = MaskedPairs(open_shards(folder), tokenizer, 128, seed=1)
    for text in (part for item in range(60) for part in texts.pair((0, 0, item))[:2]):
        assert texts.sentence_starts(text).sum() == 1
    ratio = texts.batch(0, 200).lengths.mean() / segments.batch(0, 200).lengths.mean()
    assert ratio < 0.8
    assert 60 < texts.batch(0, 200).next_sentence.sum() < 140


# ---- short documents


LETTERS = "abcdefghijklmnopqrst"


def lettered(folder, lengths, sentence=10):
    """Documents of these many tokens, each a letter, a full stop or the separator at the end, in sentences of ten."""
    rng = np.random.default_rng(1)
    rows = []
    for length in lengths:
        words = ["." if n % sentence == sentence - 1 else str(rng.choice([*LETTERS])) for n in range(length - 1)]
        rows.append({"text": " ".join(words)})
    (folder / "short.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    wordpiece = TokenizerConfig(kind="wordpiece", vocab_size=50)
    paths = (str(folder / "short.jsonl"),)
    prepare(DataConfig(paths=paths, folder=folder / "out", tokenizer=wordpiece, validation_fraction=0.0, workers=1))
    shards = open_shards(folder / "out")
    (stream,) = shards.streams
    assert sorted(len(stream.document(d)) for d in range(stream.documents)) == sorted(lengths)
    return shards, load_tokenizer(folder / "out" / "tokenizer")


MIXED = [7, 31, 31, 12, 200, 64, 31, 600, 3, 90] * 20
SHORT_LENGTHS = {"of 31 tokens": [31] * 200, "mixed": MIXED}


@pytest.fixture(scope="module", params=SHORT_LENGTHS, ids=list(SHORT_LENGTHS))
def short_texts(request, tmp_path_factory):
    return lettered(tmp_path_factory.mktemp("short"), SHORT_LENGTHS[request.param])


def all_pairs(pairs, version=0):
    return [pairs.pair((0, version, item)) for item in range(len(pairs))]


def test_every_document_begins_a_row_of_each_pass_of_pairs(short_texts):
    shards, tokenizer = short_texts
    (stream,) = shards.streams
    pairs = MaskedPairs(shards, tokenizer, 128, seed=3)
    for version in range(2):
        anchors = [pairs.anchor(0, version, item) for item in range(len(pairs))]
        assert {stream.document_of(place) for place in anchors} == set(range(stream.documents))
        firsts = [first for first, _, _ in all_pairs(pairs, version)[: stream.documents]]
        for document, first in enumerate(firsts):
            text = stream.document(document)[:-1]
            shared = min(len(text), len(first))
            np.testing.assert_array_equal(first[:shared], text[:shared])


def test_rows_of_pairs_are_full_whatever_the_documents(short_texts):
    shards, tokenizer = short_texts
    full = MaskedPairs(shards, tokenizer, 128, seed=3, short=0.0)
    lengths = np.concatenate([batch.lengths for batch in full.sweep(64)])
    assert len(lengths) == len(full) and lengths.min() >= 0.95 * 128
    some = MaskedPairs(shards, tokenizer, 128, seed=3)  # every tenth row short, as BERT's are
    lengths = np.concatenate([batch.lengths for batch in some.sweep(64)])
    assert lengths.mean() > 0.93 * 128 and (lengths >= 0.95 * 128).mean() > 0.85


def test_pairs_over_short_documents_truly_follow_or_not(short_texts):
    """Inside one document where the second follows the first, and from documents apart where it does not."""
    shards, tokenizer = short_texts
    (stream,) = shards.streams
    pairs = MaskedPairs(shards, tokenizer, 128, seed=3, short=0.0)
    documents = [stream.document(d)[:-1] for d in range(stream.documents)]
    starts = set(np.cumsum([0, *map(len, documents)]).tolist())
    owner = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    flat, owner = np.concatenate(documents * 2), np.concatenate([owner, owner])  # past the last comes the first
    text, size = flat.astype(np.uint16).tobytes(), len(owner) // 2
    found, begun = {0: 0, 1: 0}, {0: 0, 1: 0}
    for first, second, label in all_pairs(pairs):
        a, b = (text.find(side.astype(np.uint16).tobytes()) // 2 for side in (first, second))
        if len(second) < 8 or len(first) < 8:
            continue  # such a piece may be there twice
        follows = text.find(np.concatenate([first, second]).astype(np.uint16).tobytes()) >= 0
        assert follows == (label == 0) and a >= 0 and b % size not in starts
        assert label == 0 or not {*owner[a : a + len(first)]} & {*owner[b : b + len(second)]}
        found[label] += 1
        begun[label] += flat[b - 1] == tokenizer.encode(".")[0]
    assert found[1] / sum(found.values()) == pytest.approx(0.5, abs=0.07)
    assert begun[0] / found[0] > 0.95 and begun[1] / found[1] > 0.95  # both begin with a sentence


def test_documents_of_one_sentence_or_one_token_make_pairs(tmp_path):
    (tmp_path / "one").mkdir()
    shards, tokenizer = lettered(tmp_path / "one", [12] * 40, sentence=100)
    batch = MaskedPairs(shards, tokenizer, 64, seed=1, short=0.0).batch(0, 64)
    assert (batch.lengths == 64).all() and 16 < batch.next_sentence.sum() < 48
    (tmp_path / "two").mkdir()
    shards, tokenizer = lettered(tmp_path / "two", [2] * 100)
    batch = MaskedPairs(shards, tokenizer, 32, seed=1, short=0.0).batch(0, 64)
    assert (batch.lengths == 32).all() and (batch.next_sentence == 1).all()  # nothing follows inside a document


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
        validation_fraction=0.0,
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
