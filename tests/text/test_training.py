"""Training: the merges that `tokenizers` learns, the same whatever the memory cap and the chunks; bad input is told."""

import argparse
import io
import subprocess
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from plume.config import TokenizerConfig, UserError
from plume.text import inspect_table, load_tokenizer, train_command, train_tokenizer
from plume.text import tokenizer_training as counting
from plume.text.tokenizer_training import learn, read_blocks, sampled

SOURCE = Path(argparse.__file__).read_text(encoding="utf-8")
MIXED = SOURCE + "人工智能是计算机科学的一个分支。人工智能。智能手机。\n" * 5 + "naïve café 🙂🙂 ÅNGSTRÖM straße\n" * 5


def library_trained(vocab_size: int, text: list[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    backend.train_from_iterator(text, trainer)
    return backend


@pytest.mark.parametrize("vocab_size", [257, 300, 1200])
def test_the_same_vocabulary_as_tokenizers_learns(vocab_size: int) -> None:
    ours = train_tokenizer(TokenizerConfig(vocab_size=vocab_size), [MIXED])
    theirs = library_trained(vocab_size - 1, [MIXED]).get_vocab()  # without the special token, which is our last
    assert {token: i for i, token in enumerate(ours.definition.tokens[:-1])} == theirs
    assert ours.definition.tokens[-1] == "<|endoftext|>" and ours.vocab_size == vocab_size


@settings(max_examples=25)
@given(st.lists(st.text("ab c", max_size=30), min_size=1, max_size=5), st.integers(258, 300))
def test_the_same_merges_as_tokenizers_on_repetitive_text(texts: list[str], vocab_size: int) -> None:
    if not "".join(texts):
        return
    ours = train_tokenizer(TokenizerConfig(vocab_size=vocab_size), texts)
    assert set(ours.definition.tokens[:-1]) == library_trained(vocab_size - 1, texts).get_vocab().keys()


def slow_merges(words: dict[str, int], room: int, least: int, *, likelihood: bool) -> list[tuple[str, str]]:
    """WordPiece training written out: count everything anew before each merge."""
    spelled = {word: [word[0], *("##" + letter for letter in word[1:])] for word in words}
    tokens = sorted({letter for word in words for letter in word})
    tokens += sorted({symbol for symbols in spelled.values() for symbol in symbols if symbol.startswith("##")})
    merges: list[tuple[str, str]] = []
    while len(tokens) < room:
        parts, pairs = Counter[str](), Counter[tuple[str, str]]()
        for word, symbols in spelled.items():
            for symbol in symbols:
                parts[symbol] += words[word]
            for pair in pairwise(symbols):
                pairs[pair] += words[word]
        scores = {p: n / (parts[p[0]] * parts[p[1]]) if likelihood else n for p, n in pairs.items() if n >= least}
        if not scores:
            break
        best = min(scores, key=lambda p: (-scores[p], tokens.index(p[0]), tokens.index(p[1])))
        merges.append(best)
        tokens.append(best[0] + best[1][2:])
        for symbols in spelled.values():
            i = 0
            while i < len(symbols) - 1:
                if (symbols[i], symbols[i + 1]) == best:
                    symbols[i : i + 2] = [tokens[-1]]
                i += 1
    return merges


@pytest.mark.parametrize("score", ["frequency", "likelihood"])
def test_wordpiece_merges_as_written_out(score: str) -> None:
    words = Counter(word.lower() for word in "".join(c if c.isalpha() else " " for c in SOURCE[:6000]).split())
    config = TokenizerConfig(kind="wordpiece", merge_score=score)  # type: ignore[arg-type]
    words = Counter({word: n for word, n in words.items() if all(words_with(words, letter) >= 2 for letter in word)})
    tokens, merges = learn(config, sorted(words.items()), 160)
    assert len(tokens) == 160 and len(merges) > 80
    assert merges == slow_merges(words, 160, 2, likelihood=score == "likelihood")


def words_with(words: Counter[str], letter: str) -> int:
    return sum(n for word, n in words.items() if letter in word)


def test_wordpiece_vocabulary_against_the_library() -> None:
    """By frequency it learns what the library's trainer does, but for ties that the library breaks by chance."""
    ours = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=900), [SOURCE])
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    specials = list(ours.definition.tokens[:5])
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=specials, show_progress=False, min_frequency=2)
    backend.train_from_iterator([SOURCE], trainer)
    assert len(backend.get_vocab().keys() & set(ours.definition.tokens)) > 0.97 * 900


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece", "gpt1-bpe", "characters"])
def test_cap_and_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TokenizerConfig(kind=kind, vocab_size=600, pretokenizer="basic")  # type: ignore[arg-type]
    lines = MIXED.splitlines(keepends=True)
    expected = train_tokenizer(config, lines).hash
    monkeypatch.setattr(counting, "BLOCK_CHARACTERS", 1000)
    assert train_tokenizer(config, lines).hash == expected
    monkeypatch.setattr(counting, "ENTRY_BYTES", 30_000)  # as if words were large: spills after every few dozen
    monkeypatch.setattr(counting, "MOST_RUNS", 3)
    spilled = []
    write = counting.write_run
    monkeypatch.setattr(counting, "write_run", lambda *args: spilled.append(args) or write(*args))
    capped = TokenizerConfig(kind=kind, vocab_size=600, pretokenizer="basic", max_memory_mb=1)  # type: ignore[arg-type]
    assert train_tokenizer(capped, lines).hash == expected
    assert len(spilled) > 3 and len({path for path, _ in spilled}) > 3


def test_counts_are_wider_than_32_bits() -> None:
    many = 5_000_000_000
    tokens, merges = learn(TokenizerConfig(), [("ab", many), ("cd", many + 1), ("ef", 3)], 258)
    assert merges == [("c", "d"), ("a", "b")] and len(tokens) == 258


def test_counting_holds_only_the_words() -> None:
    """Texts pass by: forty megabytes of them never take more than a few."""
    texts = (f"word{n % 7} " * 3000 for n in range(2000))
    tracemalloc.start()
    counted = dict(
        counting.count_words(texts, lambda block: Counter(text.split(" ", 1)[0] for text in block), max_memory_mb=1)
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted == {f"word{n}": len(range(n, 2000, 7)) for n in range(7)}
    assert peak < 4_000_000


def test_letters_leave_room_for_pieces() -> None:
    rare = "".join(chr(0x4E00 + n) for n in range(500))
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=200), [SOURCE, rare * 2])
    assert (
        tokenizer.vocab_size == 200 and sum(len(t.removeprefix("##")) > 1 for t in tokenizer.definition.tokens[5:]) > 40
    )
    chinese = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=1000), [rare * 2])
    assert chinese.unknown not in chinese.encode(rare) and len(chinese.encode(rare)) == 500


def test_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text(MIXED, encoding="utf-8", newline="")
    whole = train_tokenizer(TokenizerConfig(vocab_size=700), [MIXED])
    monkeypatch.setattr("plume.text.tokenizer_training.BLOCK_CHARACTERS", 2000)
    assert len(list(read_blocks(file))) > 5 and "".join(read_blocks(file)) == MIXED
    saved = train_command([file], tmp_path / "out", TokenizerConfig(vocab_size=700))
    assert saved.hash == whole.hash == load_tokenizer(tmp_path / "out").hash


def test_a_large_text_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plume.text.tokenizer_training.BLOCK_CHARACTERS", 400_000)
    file, lines = tmp_path / "a.txt", [f"word{100 + n // 2000}" for n in range(600_000)]
    file.write_text("\n".join(lines))  # nearly 5 MB in parts of 0.1 MB, with words of their own
    whole, some, others = (
        train_command([file], tmp_path / "out", TokenizerConfig(kind="wordpiece", sample_mb=mb, seed=seed))
        for mb, seed in ((100, 0), (1, 0), (1, 1))
    )
    words, *kept = (set(t.definition.tokens) & set(lines) for t in (whole, some, others))
    assert len(words) == 300 and all(40 < len(few) < 150 for few in kept) and kept[0] != kept[1]
    assert len(list(sampled(["a"] * 1000, 0.25, 3))) == 250 and list(sampled(["a", "b"], 7.5, 0)) == ["a", "b"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert list(read_blocks(tmp_path / "a.txt")) == ["hello"]


@pytest.mark.parametrize(
    ("options", "texts", "message"),
    [
        ({}, [], "there is no text to train"),
        ({"kind": "wordpiece"}, ["", " \n"], "there is no text to train"),
        ({"kind": "characters"}, [""], "there is no text to train"),
        ({"vocab_size": 256}, ["a"], "vocab_size=256 is too small for byte-bpe, .* at least 257"),
        ({"kind": "wordpiece", "vocab_size": 5}, ["a"], "vocab_size=5 is too small for wordpiece"),
        ({}, ["fine", "a\ud800b"], "lone surrogate"),
    ],
)
def test_bad_input_is_told(options: dict[str, object], texts: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_tokenizer(TokenizerConfig(**options), texts)  # type: ignore[arg-type]


def test_bad_files_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    (tmp_path / "empty").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    (tmp_path / "packed.txt.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("missing", "there is no file .*missing"),
        ("binary", "binary is not UTF-8.*plume prepare.*other encodings"),
        ("rows.jsonl", "rows.jsonl is not a plain text file; `plume prepare` reads tables"),
        ("packed.txt.gz", "packed.txt.gz is not a plain text file"),
        ("folder", "folder is not a plain text file; `plume prepare` reads .*folders"),
        ("empty", "no text"),
    ):
        with pytest.raises(UserError, match=message):
            train_command([tmp_path / name], tmp_path / "out", TokenizerConfig())
    with pytest.raises(UserError, match=r"tokenizer\.folder names an existing tokenizer"):
        train_command([tmp_path / "empty"], tmp_path / "out", TokenizerConfig(folder=tmp_path))
    assert not (tmp_path / "out").exists()


def test_few_words_give_a_small_vocabulary() -> None:
    assert train_tokenizer(TokenizerConfig(vocab_size=4096), ["ab ab"]).vocab_size < 262


def test_inspect_shows_white_space(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=300), [SOURCE])
    console = Console(file=io.StringIO(), width=100)
    console.print(inspect_table(tokenizer, "a b\n[red]"))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "│ · │ 220 │ 20 │ 1-2 │" in shown or "│ ·b │" in shown
    assert "⏎ │ 198 │ 0a" in shown and "[" in shown and "the ids give the text back" in shown


@pytest.mark.parametrize("kind", ["wordpiece", "gpt1-bpe"])
def test_a_text_whose_characters_are_all_different(kind: Any) -> None:
    config = TokenizerConfig(kind=kind, vocab_size=300)
    with pytest.raises(UserError, match="no character occurs min_frequency=2 times"):
        train_tokenizer(config, ["abcd"])
    assert train_tokenizer(replace(config, min_frequency=1), ["abcd"]).encode("abcd")


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(SOURCE)

    def plume(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "plume", "tokenizer", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    done = plume("train", "a.txt", "--out", "tok", "--kind", "wordpiece", "--vocab-size", "300")
    assert done.returncode == 0 and "300 tokens" in done.stdout, done.stderr
    shown = plume("inspect", "tok", "def main")
    assert shown.returncode == 0 and str(load_tokenizer(tmp_path / "tok").encode("def")[0]) in shown.stdout
    for words in (["inspect", "nowhere", "x"], ["train", "nowhere.txt", "--out", "o"], ["train", "a.txt"]):
        failed = plume(*words)
        assert failed.returncode == 2 and len(failed.stderr.splitlines()) == 1 and failed.stderr.startswith("plume: ")
