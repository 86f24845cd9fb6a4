"""GPT-1's words and ids, against the way of the original written out letter by letter."""

import itertools
import json
from pathlib import Path

import ftfy
import pytest
import spacy

from plume.config import TokenizerConfig, UserError
from plume.text import encoders, load_tokenizer, tokenizer_training, train_tokenizer

ENGLISH = [
    "Hello, my dog is cute",
    "I can't believe it's not butter... they'll say \"no!!\" -- won't they?",
    "First line.\n\n   Second line:\tit cost $5.00 (or more);\nU.S.A. e.g. Mr. Smith's co-worker's e-mail",
    "— “Quoted” – and ´acute´ … and ―so on― a_b_c [x] {y} a/b\\c a|b 3+4=7 ~5 *stars*",
    "schÃ¶n naïve café &amp; ﬁne",
]


def spaced(text: str) -> str:
    """The clean-up of the original, one character at a time."""
    text = ftfy.fix_text(text)
    for odd, plain in (("—", "-"), ("–", "-"), ("―", "-"), ("…", "..."), ("´", "'")):
        text = text.replace(odd, plain)
    out = ""
    for n, c in enumerate(text):
        if c in '-~!";?+,)(/*[]}{|_':
            out += (" " if text[:n][-1:] != c else "") + c + (" " if text[n + 1 : n + 2] != c else "")
        else:
            out += c
    return " \n ".join(" ".join(line.split()) for line in out.strip().split("\n") if line.strip())


def original_ids(folder: Path, text: str) -> list[int]:
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    merges = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1:-1]
    ranks = {tuple(merge.split()): n for n, merge in enumerate(merges)}
    found = []
    for word in spacy.blank("en")(spaced(text)):
        symbols = list("\n" if word.text == "\n " else word.text.lower())  # the original mends this one word
        symbols[-1] += "</w>"
        while True:
            pairs = [(ranks[pair], n) for n in range(len(symbols) - 1) if (pair := tuple(symbols[n : n + 2])) in ranks]
            if not pairs:
                break
            _, n = min(pairs)
            symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]
        found += [ids.get(symbol, 0) for symbol in symbols]
    return found


@pytest.mark.parametrize("text", ENGLISH)
def test_ids_of_the_original(shared: Path, text: str) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "openai-gpt")
    assert tokenizer.words == "spacy"
    assert tokenizer.encode(text) == original_ids(shared / "tokenizers" / "openai-gpt", text)
    assert tokenizer.encode_batch([text, text])[1].tolist() == tokenizer.encode(text)


def test_contractions_and_line_breaks(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "openai-gpt")
    assert [tokenizer.token(i) for i in tokenizer.encode("I don't.\n\nYou do.")] == [
        *("i</w>", "do</w>", "n't</w>", ".</w>", "\n</w>", "you</w>", "do</w>", ".</w>"),
    ]
    assert tokenizer.decode(tokenizer.encode("A dog's life.")) == "a dog 's life ."


def test_plain_words_as_transformers_cuts_them(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import OpenAIGPTTokenizer

    monkeypatch.setattr("plume.text.tokenizer_folder.spacy_installed", lambda: False)
    folder = shared / "tokenizers" / "openai-gpt"
    tokenizer, theirs = load_tokenizer(folder), OpenAIGPTTokenizer.from_pretrained(folder)
    assert tokenizer.words == "basic"
    for text in [*ENGLISH, "Ünïcode 你好 🙂 \x00 end"]:
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs(text)["input_ids"])


def test_what_cut_the_words_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ("spacy", "basic"):
        config = TokenizerConfig(kind="gpt1-bpe", vocab_size=200, pretokenizer=words)  # type: ignore[arg-type]
        tokenizer = train_tokenizer(config, ENGLISH * 3)
        tokenizer.save(tmp_path / words)
        loaded = load_tokenizer(tmp_path / words)
        assert loaded.words == words and loaded.hash == tokenizer.hash
        assert loaded.encode("they can't") == tokenizer.encode("they can't")
    for module in (encoders, tokenizer_training):
        monkeypatch.setattr(module, "spacy_installed", lambda: False)
    encoders._spacy_tokenizer.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'plume-lm\[gpt1\]'"):
        load_tokenizer(tmp_path / "spacy").encode("they can't")
    assert load_tokenizer(tmp_path / "basic").encode("fine")
    assert train_tokenizer(TokenizerConfig(kind="gpt1-bpe", vocab_size=200), ENGLISH * 3).words == "basic"


def test_pieces_say_which_characters_they_cover() -> None:
    """Also behind the clean-up, which changes letters: each piece stands where it was cut from, one after the other."""
    tokenizer = train_tokenizer(TokenizerConfig(kind="gpt1-bpe", vocab_size=200, pretokenizer="spacy"), ENGLISH * 3)
    for text in ("Hello, my dog is cute", "I can't -- won't they?", "two  blanks\nand a line"):
        pieces = tokenizer.pieces(text)
        assert [piece.id for piece in pieces] == tokenizer.encode(text)
        covered = [text[piece.start : piece.end].lower() for piece in pieces]
        assert covered == [tokenizer.piece_bytes(piece.id).decode().strip(" ") for piece in pieces]
        assert all(one.end <= other.start for one, other in itertools.pairwise(pieces))


def test_start_delimiter_and_classify_follow_the_vocabulary(shared: Path) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / "openai-gpt").with_specials(
        ["_start_", "_delimiter_", "_classify_"]
    )
    assert [tokenizer.special_ids[n] for n in ("_start_", "_delimiter_", "_classify_")] == [40478, 40479, 40480]
    assert tokenizer.vocab_size == 40481
