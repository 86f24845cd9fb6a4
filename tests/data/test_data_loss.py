"""No text is lost silently: every character of every encoding and line structure is kept, and bytes add up."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import begin_peak, kilobytes

from plume.config import DataConfig, TokenizerConfig
from plume.data import Tally, open_shards, plaintext, prepare, read_documents, read_rows
from plume.data.documents import read_piece
from plume.data.sources import WorkUnit, cut_file, plan_pieces
from plume.text import load_tokenizer

ENCODINGS = [
    "utf-8",
    "utf-8-sig",
    "gb18030",
    "utf-16",
    "utf-16-be",
    "utf-32",
    "big5",
    "shift_jis",
    "latin-1",
    "iso2022_jp",
]
CHARACTERS = {"latin-1": "aé .", "big5": "a中文。 ", "shift_jis": "aかな。 ", "iso2022_jp": "aかな。 "}
BREAKS = ["", "\n", "\r\n", "\r", "\n\n", "\r\n\r\n", "\n \n", "\n\n\n", "\n\u3000\u3000"]
STRUCTURES = ["blank lines", "one line", "crlf", "cr", "mixed"]
ONE_BYTE = {"tokenizer": TokenizerConfig(kind="bytes"), "validation_fraction": 0.0}


def config(path, **options):
    return DataConfig(paths=(str(path),), folder=Path("unused"), **options)


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    file = Path(__file__).resolve().parents[3] / "shared" / "data" / "chinese" / "classical-modern.jsonl.zst"
    if not file.is_file():
        pytest.skip("needs the real data folder ../shared, which is not part of the project")
    with zstandard.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["modern"] for line in lines]


def arranged(sentences: list[str], structure: str) -> str:
    if structure == "mixed":
        quarter = len(sentences) // 4
        parts = [sentences[i * quarter : (i + 1) * quarter] for i in range(4)]
        return "\n".join(arranged(part, kind) for part, kind in zip(parts, STRUCTURES[:4], strict=True))
    return {"blank lines": "\n\n", "one line": "", "crlf": "\r\n", "cr": "\r"}[structure].join(sentences)


def kept(path: Path, encoding: str, shard_mb: int) -> tuple[str, Tally]:
    tally = Tally()
    read = config(path, encoding=encoding, shard_mb=shard_mb)
    return "".join(document.text for document in read_documents(read, tally)), tally


@pytest.mark.parametrize("encoding", ["utf-8", "gb18030", "utf-16"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_character_of_chinese_text_is_kept(tmp_path, sentences, structure, encoding):
    """4 MB in 1 MB parts: far fewer cuts than 60 MB have, at the same places."""
    check_chinese(tmp_path, arranged(sentences[:24_000], structure), encoding, [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "gb18030", "utf-16"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_character_of_all_the_chinese_text_is_kept(tmp_path, sentences, structure, encoding):
    check_chinese(tmp_path, arranged(sentences, structure), encoding, [1, 16])


def check_chinese(folder: Path, text: str, encoding: str, sizes: list[int]) -> None:
    path = folder / "chinese.txt"
    path.write_bytes(text.encode(encoding))
    for shard_mb in sizes:
        read, tally = kept(path, encoding, shard_mb)
        assert read == text.replace("\r\n", "\n")
        assert not tally.counts and tally.read == tally.text == len(text.encode())


def test_a_long_line_is_cut_into_parts_that_workers_share(tmp_path, sentences):
    path = tmp_path / "chinese.txt"
    path.write_text(arranged(sentences[:24_000], "one line"))
    pieces = plan_pieces(config(path, shard_mb=1))
    assert len(pieces) > 2
    lengths = [sum(d.size for d in read_piece(p, config(path, shard_mb=1), Tally())) for p in pieces]
    assert min(lengths[:-1]) > 500_000


def test_the_first_text_behind_a_byte_order_mark_continues_nothing(tmp_path, monkeypatch):
    """A first part that ends within the mark has no text, so the second one begins the document."""
    monkeypatch.setattr(plaintext, "SEARCH", 4)
    monkeypatch.setattr(plaintext, "BLOCK", 8)
    path = tmp_path / "a.txt"
    path.write_bytes(" a".encode("utf-8-sig"))
    read = config(path, encoding="utf-8-sig")
    parts = cut_file(path, read, 1, strips=8)
    documents = [d for part in parts for d in read_piece(WorkUnit(0, 0, (part,)), read, Tally())]
    assert [(d.text, d.continues) for d in documents] == [(" a", False)]


@settings(max_examples=150)
@given(st.data())
def test_documents_put_together_are_the_text(tmp_path_factory, monkeypatch, data):
    """Whatever the encoding, the line structure, the size of parts and how far a good place is searched for."""
    encoding = data.draw(st.sampled_from(ENCODINGS))
    letters = st.text(st.sampled_from(CHARACTERS.get(encoding, "a é中文。𝄞")), max_size=30)
    breaks = [b for b in BREAKS if "\u3000" not in b or encoding != "latin-1"]
    parts = data.draw(st.lists(st.tuples(letters, st.sampled_from(breaks)), min_size=1, max_size=40))
    text = "".join(a + b for a, b in parts)
    monkeypatch.setattr(plaintext, "SEARCH", data.draw(st.sampled_from([4, 16, 64, 1 << 20])))
    monkeypatch.setattr(plaintext, "BLOCK", data.draw(st.sampled_from([8, 1 << 20])))
    compression, pack = data.draw(
        st.sampled_from([("", bytes), (".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)])
    )
    path = tmp_path_factory.mktemp("cut") / f"a.txt{compression}"
    path.write_bytes(pack(text.encode(encoding)))
    read, tally = config(path, encoding=encoding), Tally()
    sizes = list(cut_file(path, read, data.draw(st.integers(1, 300)), strips=8))
    documents = [d for part in sizes for d in read_piece(WorkUnit(0, 0, (part,)), read, tally)]
    found, expected = "".join(d.text for d in documents), text.replace("\r\n", "\n")
    if tally.counts:  # a first part of white space alone is no document
        assert expected.endswith(found) and not expected.removesuffix(found).strip()
    else:
        assert found == expected
    assert [d.continues for d in documents] == [n > 0 for n in range(len(documents))]
    assert tally.read == tally.text + tally.bytes.total() and not tally.markup


@settings(max_examples=100)
@given(st.data())
def test_lines_and_paragraphs_are_the_same_however_they_are_cut(tmp_path_factory, monkeypatch, data):
    unit = data.draw(st.sampled_from(["line", "paragraph"]))
    encoding = data.draw(st.sampled_from(["utf-8", "gb18030", "utf-16", "iso2022_jp"]))
    lines = data.draw(st.lists(st.text(st.sampled_from("aか。b "), max_size=40), min_size=1, max_size=30))
    text = data.draw(st.sampled_from(["\n", "\r\n", "\n\n"])).join(lines)
    monkeypatch.setattr(plaintext, "SEARCH", data.draw(st.sampled_from([4, 32, 1 << 20])))
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode(encoding))
    read, tally = config(path, encoding=encoding, documents=unit), Tally()
    documents = list[str]()
    for part in cut_file(path, read, data.draw(st.integers(1, 300)), strips=1):
        for document in read_piece(WorkUnit(0, 0, (part,)), read, tally):
            if document.continues:
                documents[-1] += document.text
            else:
                documents.append(document.text)
    plain = text.replace("\r\n", "\n")
    oracle = plain.split("\n") if unit == "line" else plain.split("\n\n")
    assert "".join("".join(documents).split()) == "".join(plain.split())
    if unit == "line":
        assert [d.strip() for d in documents if d.strip()] == [d.strip() for d in oracle if d.strip()]
    assert tally.read == tally.text + tally.bytes.total()


def prepared(path: Path, **options):
    return prepare(replace(config(path, **ONE_BYTE, **options), folder=path.parent / "out")).report["sources"][0]


def adds_up(source) -> bool:
    sizes = source["bytes"]
    dropped = sum(found["bytes"] for found in source["dropped"].values())
    return sizes["dropped"] == dropped and sizes["read"] == sizes["kept"] + dropped + sizes["markup"]


def test_the_report_says_what_was_read_kept_and_dropped(tmp_path, capsys):
    """Against plain sums over the file."""
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"text {n} with 中文"} for n in range(50)]
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    lines += [b'{"text": "\xff"}\n', b"not json\n", b'{"text": "  "}\n', lines[0]]
    path.write_bytes(b"".join(lines))
    source = prepared(path, clean=replace(config(path).clean, duplicates="exact", min_characters=15))
    short = [row for row in rows if len(row["text"]) < 15]
    assert source["bytes"]["read"] == path.stat().st_size
    assert source["bytes"]["kept"] == sum(len(r["text"].encode()) for r in rows if len(r["text"]) >= 15)
    assert {reason: found["bytes"] for reason, found in source["dropped"].items()} == {
        "not UTF-8": len(lines[50]),
        "not JSON": len(lines[51]),
        "empty": 2,
        "shorter than 15 characters": sum(len(r["text"].encode()) for r in [*short, rows[0]]),
    }
    assert adds_up(source)
    assert "of the text of" in capsys.readouterr().err


def test_rows_without_the_field_are_bytes_lost_and_named(tmp_path, capsys):
    """A table without a header beside good texts: all of it is lost, and the console says so and where."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("some text\n" * 50)
    (tmp_path / "in" / "table.csv").write_text("".join(f"{n},words that nobody reads\n" for n in range(20)))
    source = prepared(tmp_path / "in")
    assert source["dropped"]["no text in the field 'text'"]["bytes"] == 19 * len("words that nobody reads") + 9 + 20
    assert adds_up(source)
    printed = " ".join(capsys.readouterr().err.split())
    assert "no text in the field 'text'" in printed and "table.csv row 1" in printed


def test_files_of_other_kinds_in_a_folder_are_named(tmp_path, capsys):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "good.txt").write_text("some text\n" * 50)
    for name in ("paper.pdf", "deep/notes", ".hidden"):
        (tmp_path / "in" / name).write_bytes(b"more text\n" * 5)
    source = prepared(tmp_path / "in")
    (unread,) = source["dropped"].values()
    assert unread["count"] == 2 and unread["first"].endswith("notes") and adds_up(source)
    assert "2 files of other kinds" in " ".join(capsys.readouterr().err.split())


def test_little_loss_is_not_worth_a_warning(tmp_path, capsys):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a line of text\n" * 1000 + b"\xff\n")
    source = prepared(path)
    assert source["bytes"] == {"read": 15_002, "kept": 15_000, "dropped": 2, "markup": 0} and adds_up(source)
    assert "warning" not in capsys.readouterr().err


def test_nul_characters_are_removed_and_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some text\n" * 100_000 + b"\0" + b"more text\n" * 5)
    source = prepared(path)
    assert source["dropped"]["NUL characters"]["bytes"] == 1 and adds_up(source)
    stream = open_shards(tmp_path / "out").streams[0]
    text = load_tokenizer(tmp_path / "out" / "tokenizer").decode(stream.document(0)[:-1])
    assert text == "some text\n" * 100_000 + "more text\n" * 5
    path = tmp_path / "b.csv"
    path.write_bytes(b"text\nthe first\0 and the second\n")
    assert [d.text for d in read_documents(config(path))] == ["the first and the second"]


def test_a_line_that_is_not_utf8_costs_that_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good line\n" * 200_000 + b"bad \xff line\n" + b"good line\n" * 10)
    source = prepared(path)
    (found,) = source["dropped"].values()
    assert (found["count"], found["bytes"]) == (1, 11) and adds_up(source)


def test_an_unclosed_quote_costs_one_line(tmp_path):
    path = tmp_path / "a.csv"
    rows = [f'{n},"quoted, text {n}"\n' for n in range(5000)]
    rows[1000] = '1000,"never closed\n'
    path.write_text("id,text\n" + "".join(rows) + '5000,"open to the end\n5001,last\n')
    tally = Tally()
    texts = [d.text for d in read_documents(config(path), tally)]
    assert texts == [f"quoted, text {n}" for n in range(5000) if n != 1000] + ["last"]
    assert sum(tally.counts.values()) == 2
    assert tally.bytes.total() == len(rows[1000]) + len('5000,"open to the end\n')
    assert tally.read == path.stat().st_size == tally.text + tally.markup + tally.bytes.total()


def test_deep_nesting_is_dropped_with_a_reason(tmp_path):
    deep = '{"a":' * 200_000 + "1" + "}" * 200_000
    (tmp_path / "a.json").write_text('[{"text": "before"},' + deep + "]")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n' + deep + '\n{"text": "two"}\n')
    tally = Tally()
    assert [d.text for d in read_documents(config(tmp_path), tally)] == ["before", "one", "two"]
    assert tally.counts == {"nested too deeply from here on": 1, "nested too deeply": 1}
    assert tally.bytes["nested too deeply"] == len(deep) + 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_with_thousands_of_digits_costs_no_row(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one", "id": ' + "7" * 5000 + '}\n{"text": "two", "id": 3}\n')
    assert [d.text for d in read_documents(config(tmp_path / name))] == ["one", "two"]
    assert [row["id"] for _, row in read_rows(tmp_path / name)] == [float("inf"), 3]


def test_long_lines_and_pages_are_counted_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("plume.data.documents.LONGEST_LINE", 1000)
    monkeypatch.setattr("plume.data.documents.MAX_PAGE", 1000)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "' + b"x" * 5000 + b'"}\n{"text": "two"}\n')
    (tmp_path / "b.html.gz").write_bytes(gzip.compress(b"<html>" + b"x" * 100_000))
    tally = Tally()
    assert [d.text for d in read_documents(config(tmp_path), tally)] == ["one", "two"]
    assert tally.counts == {"longer than 64 MB": 1, "page longer than 0 MB": 1}
    assert tally.bytes["longer than 64 MB"] == 5013 and tally.bytes["page longer than 0 MB"] == 100_006


@pytest.mark.slow
def test_a_bomb_is_read_in_bounded_memory(tmp_path):
    """200 MB of one character in 200 kB: the blocks never hold more than a part of it."""
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for _ in range(200):
            stream.write(b"x" * (1 << 20))
    before = begin_peak()
    tally = Tally()
    total = sum(len(d.text) for d in read_documents(config(path, shard_mb=1), tally))
    assert total == 200 << 20 and not tally.counts
    assert kilobytes() - before < 60_000  # kB


def test_parts_of_aligned_files_begin_where_they_are(tmp_path):
    """Linear in bytes: no part reads what is before it."""
    lines = [f"line {n} " + "中" * (n % 50) for n in range(40_000)]
    (tmp_path / "a.src").write_text("\n".join(lines) + "\n")
    (tmp_path / "a.tgt").write_text("\n".join(line.upper() for line in lines))
    read = config(tmp_path / "a.src", targets=(str(tmp_path / "a.tgt"),), shard_mb=1)
    parts = [piece.parts[0] for piece in plan_pieces(read)]
    assert len(parts) > 2
    assert [(d.text, d.target) for d in read_documents(read)] == [(line, line.upper()) for line in lines]
    for before, part in pairwise(parts):
        assert part.first_line == before.first_line + before.lines
        for path, place in ((part.path, part.start), (part.target, part.target_start)):
            assert Path(path).read_bytes()[:place].count(b"\n") == part.first_line


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "gb18030"])
def test_aligned_files_of_other_encodings(tmp_path, encoding):
    (tmp_path / "zh").write_bytes("一\r\n二\r\n三".encode(encoding))
    (tmp_path / "en").write_bytes("one\ntwo\nthree\n".encode(encoding))
    read = config(tmp_path / "zh", targets=(str(tmp_path / "en"),), encoding=encoding)
    assert [(d.text, d.target) for d in read_documents(read)] == [("一", "one"), ("二", "two"), ("三", "three")]


def test_nothing_continues_a_block_that_was_dropped(tmp_path):
    """The rest of a damaged text is a document of its own, not the end of the one before."""
    (tmp_path / "a.txt").write_text("first document")
    (tmp_path / "b.txt").write_bytes(b"\xff\n" * 800_000 + b"good text\n" * 200_000)
    prepare(DataConfig(paths=(str(tmp_path),), folder=tmp_path / "out", shard_mb=1, **ONE_BYTE))
    stream = open_shards(tmp_path / "out").streams[0]
    decode = load_tokenizer(tmp_path / "out" / "tokenizer").decode
    texts = [decode(stream.document(n)[:-1]) for n in range(stream.documents)]
    assert texts[0] == "first document" and texts[1].startswith("good text") and len(texts) == 2
