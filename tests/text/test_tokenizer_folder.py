"""Tokenizer folders: `tokenizers` and `transformers` open ours, we open theirs, and bad files are named."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer, OpenAIGPTTokenizer, RobertaTokenizer

from plume.config import TokenizerConfig, UserError
from plume.text import Tokenizer, load_tokenizer, train_tokenizer

SAMPLE = (
    "The quick brown fox can't jump over 12 lazy dogs; it's   naïve.\n\n\tdef main(self): return 0x1F\n"
    "人工智能是计算机科学的一个分支。 🙂👍🏽 the end — “quoted” Straße ÅNGSTRÖM\r\n"
)
OTHERS = ["", " ", "\n\n  x", "unseen ∑ letters ж", "don't [MASK] <s> <|endoftext|>", "a" * 120, "の中 mixed中文text"]
MODELS = [None, "gpt2", "bert", "roberta", "openai-gpt", "distilbert", "marian"]
KINDS = {
    "byte-bpe": {"kind": "byte-bpe"},
    "roberta": {"kind": "byte-bpe", "special_tokens": "roberta"},
    "gpt1-bpe": {"kind": "gpt1-bpe", "pretokenizer": "basic"},
    "gpt1-bpe with an end": {"kind": "gpt1-bpe", "pretokenizer": "basic", "special_tokens": "gpt2"},
    "wordpiece": {"kind": "wordpiece"},
    "cased wordpiece": {"kind": "wordpiece", "lowercase": False},
    "characters": {"kind": "characters"},
    "characters with masks": {"kind": "characters", "special_tokens": "roberta"},
    "bytes": {"kind": "bytes"},
    "bytes with masks": {"kind": "bytes", "special_tokens": "bert"},
}


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    return {
        name: train_tokenizer(TokenizerConfig(vocab_size=350, **options), [SAMPLE] * 3)  # type: ignore[arg-type]
        for name, options in KINDS.items()
    }


@pytest.mark.parametrize("name", KINDS)
def test_tokenizers_and_transformers_open_it(trained: dict[str, Tokenizer], name: str, tmp_path: Path) -> None:
    tokenizer = trained[name]
    tokenizer.save(tmp_path)
    library = Backend.from_file(str(tmp_path / "tokenizer.json"))
    for model in MODELS:
        if model is not None:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert len(theirs) == tokenizer.vocab_size
        for text in [SAMPLE, *OTHERS]:
            ids = tokenizer.encode(text, allow_special=True)
            assert theirs(text, add_special_tokens=False)["input_ids"] == ids, model
            assert library.encode(text, add_special_tokens=False).ids == ids
        one, two = tokenizer.encode(SAMPLE), tokenizer.encode("the dogs")
        wrapped, segments = tokenizer.add_special_tokens(one, two)
        both = theirs(SAMPLE, "the dogs")
        assert both["input_ids"] == wrapped and both.get("token_type_ids", segments) == segments
        assert theirs(SAMPLE)["input_ids"] == tokenizer.add_special_tokens(one)[0]
        assert theirs.decode(one) == tokenizer.decode(one)
        named = {"start": theirs.bos_token_id, "end": theirs.eos_token_id, "pad": theirs.pad_token_id}
        named |= {"mask": theirs.mask_token_id, "separator": theirs.sep_token_id, "classify": theirs.cls_token_id}
        assert {role: i for role, i in named.items() if i is not None} == {
            role: i for role, i in tokenizer.specials.items() if role != "unknown"
        }


@pytest.mark.parametrize("name", KINDS)
def test_saved_and_loaded_is_the_same(trained: dict[str, Tokenizer], name: str, tmp_path: Path) -> None:
    tokenizer = trained[name].with_specials(["_more_"])
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.definition == tokenizer.definition and again.hash == tokenizer.hash
    assert not list(tmp_path.glob(".*")), "a half-written file was left behind"
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("x_more_x", add_special_tokens=False)["input_ids"] == again.encode("x_more_x", allow_special=True)


@pytest.mark.parametrize("name", ["byte-bpe", "roberta", "gpt1-bpe", "wordpiece", "cased wordpiece"])
def test_older_files_without_tokenizer_json(trained: dict[str, Tokenizer], name: str, tmp_path: Path) -> None:
    trained[name].save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(tmp_path).hash == trained[name].hash
    if name != "gpt1-bpe":  # whose config says how its words are cut
        (tmp_path / "tokenizer_config.json").unlink()
        (tmp_path / "special_tokens_map.json").unlink()
        assert load_tokenizer(tmp_path).hash == trained[name].hash


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("byte-bpe", GPT2Tokenizer),
        ("roberta", RobertaTokenizer),
        ("gpt1-bpe", OpenAIGPTTokenizer),
        ("wordpiece", BertTokenizer),
    ],
)
def test_folders_that_transformers_writes(
    trained: dict[str, Tokenizer], name: str, theirs: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plume.text.tokenizer_folder.spacy_installed", lambda: False)  # they never cut words by spaCy
    trained[name].save(tmp_path / "ours")
    opened = theirs.from_pretrained(tmp_path / "ours")  # type: ignore[attr-defined]
    opened.save_pretrained(tmp_path / "theirs")
    loaded = load_tokenizer(tmp_path / "theirs")
    assert loaded.kind == trained[name].kind
    assert loaded.specials == trained[name].specials
    for text in [SAMPLE, *OTHERS]:
        assert loaded.encode(text, allow_special=True) == opened(text, add_special_tokens=False)["input_ids"]
        assert loaded.add_special_tokens(loaded.encode(text, allow_special=True))[0] == opened(text)["input_ids"]


def test_real_vocabularies_as_transformers_reads_them(shared: Path) -> None:
    for folder, theirs in (("gpt2", GPT2Tokenizer), ("bert-base-uncased", BertTokenizer)):
        ours, opened = (
            load_tokenizer(shared / "tokenizers" / folder),
            theirs.from_pretrained(shared / "tokenizers" / folder),
        )
        for text in [SAMPLE, *OTHERS]:
            assert ours.add_special_tokens(ours.encode(text, allow_special=True))[0] == opened(text)["input_ids"]
            assert ours.decode(ours.encode(text)) == opened.decode(ours.encode(text))


def test_an_unknown_cut_runs_in_the_library(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    trained["byte-bpe"].save(tmp_path)
    foreign = Backend.from_file(str(tmp_path / "tokenizer.json"))
    foreign.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+"), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    foreign.enable_truncation(2)
    foreign.save(str(tmp_path / "tokenizer.json"))
    foreign.no_truncation()
    loaded = load_tokenizer(tmp_path)
    assert loaded.kind == "library" and loaded.end == trained["byte-bpe"].end
    for text in [SAMPLE, *OTHERS]:
        assert loaded.encode(text, allow_special=True) == foreign.encode(text).ids
        assert loaded.encode_batch([text])[0].tolist() == loaded.encode(text)
        assert loaded.decode(loaded.encode(text)) == text == loaded.decode_bytes(loaded.encode(text)).decode()
        streamer = loaded.streamer()
        assert "".join([streamer.push(i) for i in loaded.encode(text)] + [streamer.flush()]) == text
    more = loaded.with_specials(["_start_"])
    more.save(tmp_path / "more")
    again = load_tokenizer(tmp_path / "more")
    assert again.hash == more.hash and again.encode("_start_", allow_special=True) == [loaded.vocab_size]


@pytest.mark.parametrize("form", ["added_tokens.json", "added_tokens_decoder"])
@pytest.mark.parametrize(("name", "theirs"), [("byte-bpe", GPT2Tokenizer), ("wordpiece", BertTokenizer)])
def test_tokens_beside_an_older_vocabulary(
    trained: dict[str, Tokenizer], name: str, theirs: type, form: str, tmp_path: Path
) -> None:
    """Their rows were not reachable, and their texts became other tokens."""
    trained[name].save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    size, flags = trained[name].vocab_size, {"lstrip": False, "rstrip": False, "single_word": False}
    if form == "added_tokens.json":
        (tmp_path / form).write_text(json.dumps({"<extra>": size, "covid": size + 1, "<speaker>": size + 2}))
    else:
        special = {"content": "<extra>", **flags, "normalized": False, "special": True}
        plain = {"content": "covid", **flags, "normalized": True, "special": False}
        listed = {str(size): special, str(size + 1): plain, str(size + 2): special | {"content": "<speaker>"}}
        change(tmp_path / "tokenizer_config.json", **{form: listed})
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        change(tmp_path / file, pad_token="<extra>", additional_special_tokens=["<speaker>"])
    opened, loaded = theirs.from_pretrained(tmp_path), load_tokenizer(tmp_path)  # type: ignore[attr-defined]
    assert len(loaded) == len(opened) == size + 3 and loaded.pad == opened.pad_token_id == size
    assert loaded.special_ids["<speaker>"] == size + 2 and "covid" not in loaded.special_ids
    for text in (SAMPLE, "the covid fox <extra> <speaker>jumps", "covidcovid"):
        ids = opened(text, add_special_tokens=False)["input_ids"]
        assert loaded.encode(text, allow_special=True) == ids and loaded.decode(ids) == opened.decode(ids)
        assert loaded.add_special_tokens(ids)[0] == opened(text)["input_ids"]


@pytest.mark.parametrize("name", ["byte-bpe", "wordpiece"])
def test_an_added_word_is_no_special_token(trained: dict[str, Tokenizer], name: str, tmp_path: Path) -> None:
    """It was left out wherever special tokens are."""
    trained[name].save(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    opened.add_tokens(["covid", "café"])
    opened.save_pretrained(tmp_path / "more")
    loaded = load_tokenizer(tmp_path / "more")
    ids = opened("the covid fox")["input_ids"]
    assert loaded.decode(ids, skip_special=True) == opened.decode(ids, skip_special_tokens=True) == "the covid fox"
    assert sorted(loaded.special_ids) == sorted(opened.all_special_tokens)
    assert loaded.piece_bytes(opened.convert_tokens_to_ids("café")).decode().strip() == "café"


def change(path: Path, **sections: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | sections))


def test_small_differences_are_not_overlooked(trained: dict[str, Tokenizer], tmp_path: Path) -> None:
    """Each of these changes ids, so none may be taken for the kind that Plume knows."""
    prefix = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    for sections in ({"pre_tokenizer": prefix}, {"normalizer": {"type": "NFC"}}):
        trained["byte-bpe"].save(tmp_path)
        change(tmp_path / "tokenizer.json", **sections)
        loaded = load_tokenizer(tmp_path)
        assert loaded.kind == "library"
        assert loaded.encode("e\u0301 x") == Backend.from_file(str(tmp_path / "tokenizer.json")).encode("e\u0301 x").ids


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", '{"version": "1.0", "added', "tokenizer.json is not whole JSON: .* at line 1"),
        ("tokenizer.json", "[]", "should hold a JSON object, not list"),
        ("tokenizer.json", "{}", "is not a tokenizer.json: .*'model'"),
        ("tokenizer.json", "[" * 100_000, "tokenizer.json is nested too deeply"),
        ("tokenizer.json", '{"model": {"vocab": [["a", 0, 1]]}, "added_tokens": []}', "is not a tokenizer.json"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"a": 99999999999}}, "added_tokens": []}',
            "99999999999 as a token's id",
        ),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0, "b": -1}}, "added_tokens": []}', "-1 as a token's id"),
        ("vocab.json", '{"a": 0, "b": "1"}', "vocab.json: '1' is not a token's id"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not whole JSON"),
        ("vocab.json", '{"a": 0, "b": 2}', "vocab.json: the ids are not 0 to 1"),
        ("vocab.json", '{"a": 0}', "neither a byte-level vocabulary .* nor GPT-1's"),
        ("merges.txt", "#version: 0.2\nq zzz\n", "merges.txt, line 2: 'q zzz' is not a merge"),
        ("merges.txt", None, "merges.txt is missing"),
        ("added_tokens.json", '{"b": "1"}', "while reading the added tokens"),
        ("vocab.txt", "a\nb\n", "has no token for the unknown"),
        ("vocab.txt", "[UNK]\na\n##b\na\n", "vocab.txt has a token twice: 'a'"),
    ],
)
def test_bad_files_are_named(
    trained: dict[str, Tokenizer], tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    trained["wordpiece" if file == "vocab.txt" else "byte-bpe"].save(tmp_path)
    if not file.startswith("tokenizer"):
        (tmp_path / "tokenizer.json").unlink()
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
        (tmp_path / "merges.txt").write_text("" if file == "vocab.json" else content if file == "merges.txt" else "")
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_model_that_the_library_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "New", "vocab": {"a": 0}}, "added_tokens": []}')
    with pytest.raises(UserError, match=r"this tokenizer.json cannot be read by the tokenizers library"):
        load_tokenizer(tmp_path).encode("a")


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no tokenizer folder .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no tokenizer: it needs tokenizer.json, or"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"[UNK]\n\xff\n")
    with pytest.raises(UserError, match=r"vocab.txt is not UTF-8"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_is_found_in_a_folder_of_data_or_of_a_run(trained, tmp_path):
    for place in ("tokenizer", "model"):
        trained["bytes"].save(tmp_path / place / place)
        assert load_tokenizer(tmp_path / place).hash == trained["bytes"].hash


def test_marians_folder_is_not_said_to_lack_merges(tmp_path):
    """Its tokenizer is two SentencePiece models beside vocab.json."""
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "<unk>": 1, "\u2581the": 2, "<pad>": 3}')
    with pytest.raises(UserError, match=r"such as Marian's SentencePiece, need a tokenizer\.json") as found:
        load_tokenizer(tmp_path)
    assert "merges" not in str(found.value)
