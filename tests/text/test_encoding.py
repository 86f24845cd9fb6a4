"""Texts to ids and back, against the real vocabularies, `tokenizers` and `transformers`."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from plume.config import TokenizerConfig, UserError
from plume.text import Tokenizer, encode_cache, encoders, load_tokenizer, train_tokenizer
from plume.text.encoders import ByteBpe, CachedEngine, Library, cut
from plume.text.tokenizer_json import to_json

SAMPLE = (
    "The quick brown fox can't jump over 12 lazy dogs, they'll say; it's   naïve.\n\n\tdef main(self): return 0x1F\n"
    "人工智能是计算机科学的一个分支。日本語のテキスト、ไทย 한국어 🙂👍🏽 the end — “quoted” Straße ÅNGSTRÖM\r\n"
) * 3
KINDS = ["byte-bpe", "gpt1-bpe", "wordpiece", "characters", "bytes"]
# text of every script, with the characters that tokenizers trip over made frequent
TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\t'sdm.ab1é你🙂\0\u3000\u200d")),
    max_size=60,
)


def trained(kind: str, **options: object) -> Tokenizer:
    config = TokenizerConfig(kind=kind, vocab_size=400, pretokenizer="basic", **options)  # type: ignore[arg-type]
    return train_tokenizer(config, [SAMPLE])


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: trained(kind) for kind in KINDS}


@pytest.mark.parametrize(
    ("folder", "text", "ids"),
    [
        ("gpt2", "Hello world, my dog is cute", [15496, 995, 11, 616, 3290, 318, 13779]),
        ("bert-base-uncased", "Hello, my dog is cute", [7592, 1010, 2026, 3899, 2003, 10140]),
        ("openai-gpt", "Hello, my dog is cute", [3570, 240, 547, 2585, 544, 4957]),
    ],
)
def test_reference_ids(shared: Path, folder: str, text: str, ids: list[int]) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / folder)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids).replace(" ,", ",") in (text, text.lower())


def test_bert_wraps_its_texts(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "bert-base-uncased")
    ids, segments = tokenizer.add_special_tokens(tokenizer.encode("Hello, my dog is cute"))
    assert ids == [101, 7592, 1010, 2026, 3899, 2003, 10140, 102] and segments == [0] * 8
    assert tokenizer.add_special_tokens([1], [2, 3]) == ([101, 1, 102, 2, 3, 102], [0, 0, 0, 1, 1, 1])
    assert tokenizer.specials == {"pad": 0, "unknown": 100, "classify": 101, "separator": 102, "mask": 103}


def test_gpt2_same_ids_as_tokenizers_on_real_text(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "gpt2")
    assert isinstance(tokenizer._engine, CachedEngine) and isinstance(tokenizer._engine.engine, ByteBpe)
    texts = (shared / "data" / "wikitext-2" / "wiki.test.raw").read_text(encoding="utf-8").split("\n")[:400]
    texts += [(shared / "data" / "multi30k" / "val.de").read_text(encoding="utf-8"), SAMPLE]
    theirs = Backend.from_str(to_json(tokenizer.definition)).encode_batch(texts, add_special_tokens=False)
    assert [e.ids for e in theirs] == [tokenizer.encode(text) for text in texts]
    assert [e.ids for e in theirs] == [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@settings(max_examples=300)
@given(text=TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_ids_as_tokenizers(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    theirs = Backend.from_str(to_json(tokenizer.definition)).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, allow_special=True) == theirs


@settings(max_examples=300)
@given(text=TEXTS)
@pytest.mark.parametrize("kind", ["byte-bpe", "bytes"])
def test_any_text_comes_back(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode()
    assert all(i not in tokenizer.definition.added for i in ids)
    pieces = tokenizer.pieces(text)
    assert b"".join(piece.bytes for piece in pieces) == text.encode()
    assert all(piece.bytes.decode(errors="ignore") in text[piece.start : piece.end] for piece in pieces)


@settings(max_examples=200)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_streaming_gives_the_decoded_text(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    streamer = tokenizer.streamer()
    parts = [streamer.push(i) for i in ids] + [streamer.flush()]
    assert "".join(parts) == tokenizer.decode(ids)
    theirs = Backend.from_str(to_json(tokenizer.definition)).decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == theirs
    valid = tokenizer.encode(data.draw(TEXTS))
    streamer = tokenizer.streamer()
    shown = [streamer.push(i) for i in valid]
    assert streamer.flush() == "" and "".join(shown) == tokenizer.decode(valid)


def test_streams_hold_back_half_characters(tokenizers: dict[str, Tokenizer]) -> None:
    streamer = tokenizers["bytes"].streamer()
    assert [streamer.push(i) for i in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    streamer = tokenizers["bytes"].streamer()
    assert streamer.push(0xF0) == "" and streamer.flush() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_members(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    texts = ["", "a", SAMPLE, "\n\n x" * 50, "你好。" * 30, SAMPLE * 40]
    batch = tokenizers[kind].encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [tokenizers[kind].encode(text) for text in texts]
    assert all(ids.dtype == np.int32 for ids in batch)
    assert tokenizers[kind].encode_batch([]) == []


REMEMBERED = ["byte-bpe", "gpt1-bpe", "wordpiece"]


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every batch were worth it."""
    monkeypatch.setattr(encoders, "MIN_CACHED_CHARACTERS", 0)
    monkeypatch.setattr(encoders, "mostly_ascii", lambda text: True)


@settings(max_examples=300)
@given(texts=st.lists(TEXTS, max_size=6))
@pytest.mark.parametrize("kind", REMEMBERED)
def test_remembered_chunks_have_the_ids_of_tokenizers(
    tokenizers: dict[str, Tokenizer], remembering: None, kind: str, texts: list[str]
) -> None:
    backend = Backend.from_str(to_json(tokenizers[kind].definition))
    backend.encode_special_tokens = True
    theirs = [backend.encode(text, add_special_tokens=False).ids for text in texts]
    for _ in range(2):  # as news, and as known
        assert [ids.tolist() for ids in tokenizers[kind].encode_batch(texts)] == theirs


@pytest.mark.slow
@pytest.mark.parametrize("kind", REMEMBERED)
def test_a_memory_grows_and_begins_anew(remembering: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(encode_cache, "MAX_CACHED_BYTES", 1 << 19)
    tokenizer = trained(kind)
    seen = set()
    for start in range(0, 200_000, 40_000):
        texts = [SAMPLE, " ".join(f"w{number}" for number in range(start, start + 40_000)), "", "x" * 300_000]
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]
        assert isinstance(tokenizer._engine, CachedEngine) and tokenizer._engine.cache is not None
        seen.add(int(tokenizer._engine.cache.table.used[0]))
    assert max(seen) > 1 << 14 and len(seen) < 5  # larger than at first; not larger and larger


def test_other_scripts_go_past_the_memory(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "MIN_CACHED_CHARACTERS", 0)
    tokenizer = trained("byte-bpe")
    texts = ["plain", "你好。" * 30, "words with an é", "한국어 텍스트"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]
    assert isinstance(tokenizer._engine, CachedEngine) and tokenizer._engine.cache is not None
    assert int(tokenizer._engine.cache.table.used[0]) == len(["plain", "words", " with", " an", " é"])


@settings(max_examples=300)
@given(text=TEXTS, size=st.integers(1, 20))
def test_cutting_long_texts_changes_no_id(tokenizers: dict[str, Tokenizer], text: str, size: int) -> None:
    tokenizer = tokenizers["byte-bpe"]
    parts = list(cut(text, size))
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text)


def test_specials_in_a_text_are_text_unless_allowed(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-bpe"]
    assert tokenizer.end not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.encode("a<|endoftext|>b", allow_special=True) == [*a, tokenizer.end, *b]
    assert tokenizer.decode([*a, tokenizer.end], skip_special=True) == "a"
    bert = tokenizers["wordpiece"]
    assert bert.mask not in bert.encode("the [MASK]") and bert.mask in bert.encode("the [MASK]", allow_special=True)
    roberta = trained("byte-bpe", special_tokens="roberta")
    assert roberta.encode("a  <mask>", allow_special=True) == [*roberta.encode("a"), roberta.mask]


def test_roberta_layout() -> None:
    tokenizer = trained("byte-bpe", special_tokens="roberta")
    assert [tokenizer.token(i) for i in (0, 1, 2, 3, tokenizer.vocab_size - 1)] == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
    ]
    assert tokenizer.add_special_tokens([9], [8]) == ([0, 9, 2, 2, 8, 2], [0] * 6)
    assert tokenizer.start == tokenizer.classify == 0 and tokenizer.end == tokenizer.separator == 2


def test_ids_that_are_not_in_merge_order(tokenizers: dict[str, Tokenizer]) -> None:
    from dataclasses import replace

    from plume.text.definition import with_specials

    d = tokenizers["byte-bpe"].definition
    shuffled = replace(d, tokens=tuple(np.random.default_rng(0).permutation(np.array(d.tokens, dtype=object))))
    tokenizer = Tokenizer(with_specials(shuffled, []))
    assert isinstance(tokenizer._engine, CachedEngine) and isinstance(tokenizer._engine.engine, ByteBpe)
    assert tokenizer._engine.engine.table is not None
    theirs = Backend.from_str(to_json(tokenizer.definition)).encode(SAMPLE, add_special_tokens=False).ids
    assert tokenizer.encode(SAMPLE) == theirs == tokenizer.encode_batch([SAMPLE])[0].tolist()


def test_merges_that_tiktoken_would_apply_otherwise_go_to_the_library(tokenizers: dict[str, Tokenizer]) -> None:
    from plume.text.definition import BYTE_LETTERS, define

    merges = [("b", "c"), ("a", "b"), ("ab", "c")]  # "abc" is never built: "bc" comes first
    tokenizer = Tokenizer(define("byte-bpe", [*BYTE_LETTERS, "bc", "ab", "abc"], merges, "gpt2"))
    assert isinstance(tokenizer._engine, Library)
    assert [tokenizer.token(i) for i in tokenizer.encode("abc")] == ["a", "bc"]


def test_lone_surrogates_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(UserError, match=r"lone surrogate, '\\ud83d', at character 1"):
            tokenizer.encode("a\ud83d")
        with pytest.raises(UserError, match="lone surrogate"):
            tokenizer.encode_batch(["fine", "a\ud83d"])


@pytest.mark.parametrize("kind", KINDS)
def test_empty_text_and_wrong_ids(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == "" and tokenizer.pieces("") == []
    assert tokenizer.word_starts([]).shape == (0,)
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(UserError, match=f"id {wrong} is outside the vocabulary"):
            tokenizer.decode([wrong])


def test_wordpiece_follows_bert(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "bert-base-uncased")
    spelled = [tokenizer.token(i) for i in tokenizer.encode("Héllo unaffable 北京x " + "a" * 101)]
    assert spelled == ["hello", "una", "##ffa", "##ble", "北", "京", "x", "[UNK]"]
    assert tokenizer.unknown not in tokenizer.encode("a" * 100)
    assert tokenizer.word_starts(tokenizer.encode("unaffable dog")).tolist() == [True, False, False, True]


def test_pieces_know_their_place(tokenizers: dict[str, Tokenizer]) -> None:
    text = "The dogs, naïve 你 🙂"
    for kind in ("wordpiece", "gpt1-bpe", "byte-bpe", "characters"):
        pieces = tokenizers[kind].pieces(text)
        assert [piece.id for piece in pieces] == tokenizers[kind].encode(text)
        covered = {c for piece in pieces for c in range(piece.start, piece.end)}
        assert covered >= {c for c, letter in enumerate(text) if not letter.isspace()}


def test_words_start_after_spaces_and_at_ideographs(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in KINDS:
        pieces = tokenizers[kind].pieces("the lazy dogs")
        starts = tokenizers[kind].word_starts([piece.id for piece in pieces])
        opening = [piece.text.strip(" ")[:1] for piece, start in zip(pieces, starts, strict=True) if start]
        assert [letter for letter in opening if letter] == ["t", "l", "d"], kind
    ids = tokenizers["characters"].encode("人工智能")
    assert tokenizers["characters"].word_starts(ids).all()


def test_merge_history_ends_in_the_pieces(tokenizers: dict[str, Tokenizer]) -> None:
    byte, gpt1 = tokenizers["byte-bpe"], tokenizers["gpt1-bpe"]
    for word in (" quick", " jump", "self", "é你"):
        steps = byte.merge_history(word)
        assert steps[-1] == [piece.bytes.decode(errors="backslashreplace") for piece in byte.pieces(word)]
        assert len(steps[0]) == len(word.encode())
    assert gpt1.merge_history("quick")[-1] == [piece.text for piece in gpt1.pieces("quick")]
    assert gpt1.merge_history("") == [[]]
    with pytest.raises(UserError, match="wordpiece tokenizer has no merges"):
        tokenizers["wordpiece"].merge_history("x")


@pytest.mark.parametrize("kind", KINDS)
def test_added_specials_get_the_last_rows(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    more = tokenizer.with_specials(["_start_", "_delimiter_", "_classify_"])
    assert more.vocab_size == tokenizer.vocab_size + 3 and more.hash != tokenizer.hash
    assert more.special_ids["_delimiter_"] == tokenizer.vocab_size + 1
    assert more.encode(SAMPLE) == tokenizer.encode(SAMPLE)
    assert more.encode("_start_", allow_special=True) == [tokenizer.vocab_size]
    assert more.add_special_tokens([5]) == tokenizer.add_special_tokens([5])
    with pytest.raises(UserError, match="_start_"):
        more.with_specials(["_start_"])


def test_tokenizers_can_be_sent_to_other_processes(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        tokenizer.encode("warm")
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.hash == tokenizer.hash and copy.encode(SAMPLE) == tokenizer.encode(SAMPLE)
