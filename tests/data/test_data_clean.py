"""What is left out and why: each rule against a plain count, MinHash against true Jaccard shares."""

import json
import random
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plume.config import CleanConfig, DataConfig, TokenizerConfig, UserError
from plume.data import Document, prepare, read_documents
from plume.data.clean import (
    Cleaner,
    DuplicateFinder,
    contains_held_out,
    held_out_index,
    language_of,
    same_keys,
    signature,
    sorted_keys,
)
from plume.util.hashing import run_hashes, word_hashes

PROSE = "The owl is a bird that hunts at night, and it was known for this to all of the people in the village. "


def reason(text="some text that is long enough", url=None, score=None, **clean):
    return Cleaner(CleanConfig(**clean)).reason(Document(text, "here", url, score))


def test_a_score_that_is_no_number_is_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "score": NaN}\n{"text": "two", "score": 5}\n')
    config = DataConfig(paths=(str(tmp_path / "a.jsonl"),), folder=tmp_path / "out")
    assert [document.score for document in read_documents(config)] == [None, 5]


def test_each_rule_says_why():
    assert reason(min_characters=5) is None
    assert reason("abc", min_characters=5) == "shorter than 5 characters"
    assert reason("abcdef", max_characters=5) == "longer than 5 characters"
    assert reason(score=3, min_score=3) is None
    assert reason(score=2, min_score=3) == "score below 3"
    assert reason(min_score=3) == "no score"
    wikipedia = {"drop_domains": ("wikipedia.org",)}
    for url in ("https://en.wikipedia.org/wiki/Owl", "http://www.wikipedia.org", "wikipedia.org/x"):
        assert reason(url=url, **wikipedia) == "domain wikipedia.org"
    for url in ("https://notwikipedia.org/", "https://example.org/wikipedia.org", "http://[broken", None):
        assert reason(url=url, **wikipedia) is None
    assert reason(PROSE, quality=True) is None
    assert reason("#### 1234 5678 {} {} 90 %% ## 12" * 5, quality=True).startswith("quality: ")
    assert reason("buy now\n" * 50, quality=True) == "quality: repeated lines"
    assert (
        reason("\n".join(f"- this is item number {n} of many more things" for n in range(50)), quality=True)
        == "quality: bullets"
    )


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", PROSE),
        ("de", "Die Eule ist ein Vogel, der in der Nacht jagt und den die Menschen auf dem Land nicht oft sehen."),
        ("fr", "La chouette est un oiseau qui chasse la nuit et que les gens ne voient pas dans les villages."),
        ("es", "La lechuza es un ave que caza por la noche y que los campesinos no ven en el pueblo con su luz."),
        ("zh", "猫头鹰是一种在夜间捕猎的鸟，村里的人都知道它，白天却很少有人看见。"),
        ("ja", "フクロウは夜に狩りをする鳥で、村の人々によく知られているが、昼間に見かけることは少ない。"),
        ("other", "12345 67890 ++++ ----"),
    ],
)
def test_languages_are_identified(language, text):
    assert language_of(text) == language
    assert reason(text, languages=("en",)) == (None if language == "en" else f"language {language}")


def test_an_unknown_language_is_refused():
    with pytest.raises(UserError, match="'English' is not a language code such as en"):
        CleanConfig(languages=("English",))
    with pytest.raises(UserError, match="'xx' is not a language that can be identified"):
        Cleaner(CleanConfig(languages=("xx",)))


def plain_words(text):
    """Runs of letters, digits and characters beyond ASCII; of scripts without spaces every character."""
    spread = ""
    for letter in text.lower():
        name = unicodedata.name(letter, "")
        alone = name.startswith(
            ("CJK UNIFIED", "CJK COMPAT", "HIRAGANA", "KATAKANA", "THAI", "LAO", "MYANMAR", "KHMER")
        )
        spread += f" {letter} " if alone else letter
    return re.findall(rb"[0-9a-z\x80-\xff]+", spread.encode(errors="replace"))


LETTERS = st.text(st.sampled_from("ab 1-Éß“é漢字かなカไทยអြ🙂\n"), max_size=200)


@given(LETTERS, LETTERS)
def test_words_have_equal_hashes_just_when_they_are_equal(a, b):
    words = plain_words(a) + plain_words(b)
    hashes = [*word_hashes(a).tolist(), *word_hashes(b).tolist()]
    assert len(hashes) == len(words)
    assert len(set(zip(words, hashes, strict=True))) == len(set(words)) == len(set(hashes))


def test_words_over_the_edge_of_a_block_are_whole(monkeypatch):
    text = " ".join(f"word{n}" for n in range(3000))
    whole = word_hashes(text)
    monkeypatch.setattr("plume.util.hashing.LONGEST", 100)
    np.testing.assert_array_equal(word_hashes(text), whole)


def plain_runs(text, length):
    words = plain_words(text)
    length = min(length, len(words))
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)} if words else set()


@given(
    st.lists(st.sampled_from("abcd"), max_size=30), st.lists(st.sampled_from("abcd"), max_size=30), st.integers(1, 5)
)
def test_a_shared_run_is_found_just_when_there_is_one(a, b, length):
    a, b = " ".join(a), ", ".join(b)
    held_out = {length: np.unique(run_hashes(b, length))} if len(b.split()) >= length else {}
    shared = bool(plain_runs(a, length) & plain_runs(b, length)) and len(b.split()) >= length
    assert contains_held_out(a, held_out, length) == shared


def changed(words, share, rng):
    return [f"new{rng.random()}" if rng.random() < share else w for w in words]


def test_signatures_agree_in_the_share_of_runs_in_common():
    rng = random.Random(0)
    words = [f"w{rng.randrange(5000)}" for _ in range(3000)]
    for share in (0.0, 0.02, 0.05, 0.2, 1.0):
        a, b = " ".join(words), " ".join(changed(words, share, rng))
        runs_a, runs_b = plain_runs(a, 5), plain_runs(b, 5)
        jaccard = len(runs_a & runs_b) / len(runs_a | runs_b)
        assert (signature(a) == signature(b)).mean() == pytest.approx(
            jaccard, abs=0.13
        )  # three deviations of 128 draws


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4), st.integers(1, 5))
def test_repeated_keys_are_found_in_any_number_of_shares(tmp_path_factory, columns, shares):
    columns = [[key << 60 for key in column] for column in columns]  # over the whole range
    flat = [k for c in columns for k in c]
    oracle = {(flat.index(k), n) for n, k in enumerate(flat) if flat.index(k) < n}
    work, found = tmp_path_factory.mktemp("keys"), set()
    for piece, column in enumerate(columns):
        keys, order = sorted_keys(column, [])
        (work / f"{piece:05}.keys").write_bytes(keys.tobytes())
        (work / f"{piece:05}.order").write_bytes(order.tobytes())
    finder = DuplicateFinder(work, [len(c) for c in columns], 0.8)
    for share in range(shares if flat else 0):
        firsts, repeats = same_keys(*finder.keys(0, share, shares))
        found |= set(zip(firsts.tolist(), repeats.tolist(), strict=True))
    assert found == oracle


def prepared(tmp_path, rows, **clean):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(
        paths=(str(path),),
        folder=tmp_path / "out",
        tokenizer=TokenizerConfig(kind="bytes"),
        validation_fraction=0.0,
        clean=CleanConfig(**clean),
    )
    return prepare(config).report["sources"][0]


def test_a_webtext_pipeline_counts_what_it_drops(tmp_path):
    rng = random.Random(1)
    base = [" ".join(f"w{rng.randrange(2000)}" for _ in range(300)) for _ in range(20)]
    (tmp_path / "evaluation.txt").write_text(
        "an evaluation text of exactly thirteen words and then some more, you see, here"
    )
    rows = [{"text": t, "score": 5} for t in base]
    rows += [{"text": base[3].upper().replace(" ", "  "), "score": 5}]  # exact but for case and space
    rows += [{"text": " ".join(changed(base[n].split(), 0.01, rng)), "score": 5} for n in range(4)]  # near
    rows += [{"text": " ".join(changed(base[n].split(), 0.5, rng)), "score": 5} for n in range(4)]  # far
    rows += [{"text": "owls", "url": "https://en.wikipedia.org/wiki/Owl", "score": 9}, {"text": "low", "score": 2}]
    leaked = "before AN EVALUATION text of exactly thirteen words, and then some more you see here after"
    rows += [{"text": leaked, "score": 4}]
    clean = {"min_score": 3, "drop_domains": ("wikipedia.org",), "decontaminate": (str(tmp_path / "evaluation.txt"),)}
    source = prepared(tmp_path, rows, duplicates="near", **clean)
    assert {reason: left["count"] for reason, left in source["dropped"].items()} == {
        "duplicate": 5,
        "domain wikipedia.org": 1,
        "score below 3": 1,
        "shares 13 words with an evaluation text": 1,
    }
    assert source["read"] == len(rows) and source["kept"] == len(rows) - 8


def test_exact_duplicates_alone(tmp_path):
    rows = [{"text": f"text {n % 7}"} for n in range(21)] + [{"text": "text 0 and more"}]
    source = prepared(tmp_path, rows, duplicates="exact")
    assert source["kept"] == 8 and source["dropped"]["duplicate"]["count"] == 14


def test_the_first_of_the_duplicates_stays(tmp_path):
    prepared(tmp_path, [{"text": "Same text"}, {"text": "other"}, {"text": "same  TEXT"}], duplicates="near")
    tokens = Path(tmp_path / "out" / "train-00000.tokens").read_bytes()
    assert b"Same text" in tokens.replace(b"\0", b"") and b"TEXT" not in tokens.replace(b"\0", b"")


@pytest.mark.parametrize("duplicates", ["exact", "near"])
def test_a_pair_is_a_duplicate_only_with_both_its_sides(tmp_path, duplicates):
    rows = [{"text": "Thank you.", "target": target} for target in ("Danke.", "Vielen Dank!", "danke.", "Danke schön.")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, tokenizer = tmp_path / "out", TokenizerConfig(kind="bytes")
    options = {"split": "hash", "validation_fraction": 0.0, "clean": CleanConfig(duplicates=duplicates)}
    done = prepare(paths=(tmp_path / "a.jsonl",), folder=out, target_field="target", tokenizer=tokenizer, **options)
    assert done.report["sources"][0]["kept"] == 3
    assert done.report["sources"][0]["dropped"]["duplicate"]["count"] == 1


def test_a_target_can_hold_an_evaluation_text(tmp_path):
    (tmp_path / "items.txt").write_text(PROSE)
    clean = CleanConfig(decontaminate=(str(tmp_path / "items.txt"),))
    cleaner = Cleaner(clean, held_out_index(DataConfig(paths=("x",), folder=tmp_path, clean=clean)))
    pair = Document("What is an owl, and what is it known for?", "here", target=f"It was said: {PROSE}")
    assert cleaner.reason(pair) == "shares 13 words with an evaluation text"


CHINESE = "".join(chr(0x4E00 + n * 37 % 2000) for n in range(600))


def test_near_duplicates_without_spaces():
    for changes in (0, 3, 15, 300):
        other = list(CHINESE)
        for place in range(changes):
            other[place * 600 // changes] = "变"
        shingles = [{t[i : i + 5] for i in range(596)} for t in (CHINESE, "".join(other))]
        jaccard = len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])
        agreed = (signature(CHINESE) == signature("".join(other))).mean()
        assert agreed == pytest.approx(jaccard, abs=0.13)


def test_contamination_without_spaces(tmp_path):
    (tmp_path / "items.txt").write_text(CHINESE[100:160], encoding="utf-8")
    clean = CleanConfig(decontaminate=(str(tmp_path / "items.txt"),))
    index = held_out_index(DataConfig(paths=("x",), folder=tmp_path, clean=clean))
    assert contains_held_out(f"前面的话，{CHINESE[120:140]}。后面的话", index, 13)
    assert contains_held_out(f"前面，{CHINESE[120:126]}，{CHINESE[126:140]}", index, 13)  # as for commas between words
    assert not contains_held_out(CHINESE[200:], index, 13)


def test_chinese_prose_passes_the_quality_filter():
    prose = "猫头鹰是一种在夜间捕猎的鸟，村里的人都知道它，白天却很少有人看见。" * 10
    assert reason(prose, quality=True) is None
    assert reason("{价格}#{链接}#…{价格}" * 20, quality=True).startswith("quality: ")
