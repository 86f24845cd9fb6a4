"""Every kind of file gives the same documents, cut anywhere; what cannot be read is counted with reason and place."""

import csv
import gzip
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from plume.config import DataConfig, TokenizerConfig, UserError
from plume.data import Tally, read_documents, read_rows, sources
from plume.data.documents import read_part, read_piece
from plume.data.sources import FilePart, WorkUnit, cut_file, find_files, part_edges, plan_pieces
from plume.data.tables import wrong_encoding
from plume.text import train_tokenizer

TEXTS = ["first text,\nwith two lines", 'second "quoted" text', "dritter Text: äöü €", "第四"]


def config(*paths, **options):
    return DataConfig(paths=tuple(map(str, paths)), folder=Path("unused"), **options)


def texts_of(*paths, **options):
    return [d.text for d in read_documents(config(*paths, **options))]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"data{kind}"
    lines = "".join(json.dumps({"text": t, "score": 2}) + "\n" for t in TEXTS).encode()
    if kind == ".jsonl":
        path.write_bytes(lines)
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == ".jsonl.zst":
        path.write_bytes(zstandard.compress(lines))
    elif kind == ".json":
        path.write_text(json.dumps(TEXTS, indent=1))
    elif kind == ".csv":
        with path.open("w", newline="") as stream:
            csv.writer(stream).writerows([["text", "score"], *([t, 2] for t in TEXTS)])
    elif kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    elif kind == "":
        path.mkdir()
        for n, t in enumerate(TEXTS):
            (path / f"{n}.txt").write_text(t)
        (path / ".hidden.txt").write_text("not this")
        (path / "picture.png").write_bytes(b"\x89PNG")
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".csv", ".parquet", ""])
def test_every_kind_gives_the_same_documents(tmp_path, kind):
    assert texts_of(write(tmp_path, kind)) == TEXTS


def test_globs_and_fields(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": name, "link": "http://x.org", "karma": "3"}) + "\n")
    read = config(tmp_path / "*.jsonl", text_field="body", url_field="link", score_field="karma")
    assert [(d.text, d.url, d.score) for d in read_documents(read)] == [
        ("a", "http://x.org", 3.0),
        ("b", "http://x.org", 3.0),
    ]


@pytest.mark.parametrize(
    ("head", "reason"),
    [(b"%PDF-1.4\n", "a PDF; pdftotext makes a text of it"), (b"PK\x03\x04word/document.xml", "an archive (.docx")],
)
def test_documents_of_other_programs_are_no_text(head, reason, tmp_path):
    """Where most of their bytes are ASCII they were read as text; else the message blamed the encoding."""
    data = head + b"stream of words\n" * 20_000
    for name in ("a.pdf", "b.txt", "c.docx"):
        (tmp_path / name).write_bytes(data)
        tally = Tally()
        assert not list(read_documents(config(tmp_path / name, encoding="latin-1", shard_mb=1), tally))
        assert all(found.startswith(reason) for found in tally.counts)
        assert tally.read == tally.bytes.total() == len(data)
    (tmp_path / "d.txt").write_bytes(b"It begins with " + head)
    assert len(texts_of(tmp_path / "d.txt")) == 1


def test_logs_in_a_folder_are_read(tmp_path):
    for name in ("app.log", "old.log.gz", "readme.markdown", "notes.text"):
        (tmp_path / name).write_bytes(gzip.compress(b"a line") if name.endswith(".gz") else b"a line")
    assert texts_of(tmp_path) == ["a line"] * 4


def test_links_to_folders_are_followed_once(tmp_path):
    texts, outside = tmp_path / "above" / "texts", tmp_path / "outside"
    for place in (texts / "b", texts / ".store", outside / "deep"):
        place.mkdir(parents=True)
        (place / "page.txt").write_text(place.name)
    (tmp_path / "above" / "beside.txt").write_text("not below the folder")
    links = {"a": texts / "b", "up": tmp_path / "above", "self": texts, "data": texts / ".store", "far": outside}
    for name, target in links.items():
        (texts / name).symlink_to(target)
    (outside / "again").symlink_to(outside)
    (outside / "deeper").symlink_to(outside / "deep")
    assert [str(path.relative_to(texts)) for path in find_files(str(texts))] == [
        "b/page.txt", "data/page.txt", "far/deep/page.txt"
    ]  # fmt: skip
    assert texts_of(texts) == ["b", ".store", "deep"]


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(UserError, match=r"b\.txt cannot be read: No such file"):
        texts_of(tmp_path)


def test_broken_rows_are_counted_with_reason_and_place(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n{"text": \n\n{"text": "\xff\xfe"}\n[1]\n{"title": "x"}\n'
        b'{"text": "  "}\n"bare"\n{"text": "\\ud800"}\n'
    )
    tally = Tally()
    assert [d.text for d in read_documents(config(path), tally)] == ["good", "bare"]
    assert tally.counts == {
        "not JSON": 1,
        "not UTF-8": 1,
        "neither an object nor a string": 1,
        "no text in the field 'text'": 1,
        "empty": 1,
        "half characters (lone surrogates)": 1,
    }
    assert tally.first["not JSON"] == f"{path} byte 17"
    assert "'title'" in tally.first["no text in the field 'text'"]


def test_rows_of_a_labelled_task_are_strict_unless_counted(tmp_path):
    path = tmp_path / "task.csv"
    path.write_text("sentence,label\nfine,1\ntoo,many,cells\nlast,0\n")
    with pytest.raises(UserError, match=r"task\.csv line 3: not the 2 columns"):
        list(read_rows(path))
    tally = Tally()
    assert list(read_rows(path, tally=tally)) == [
        (2, {"sentence": "fine", "label": "1"}),
        (4, {"sentence": "last", "label": "0"}),
    ]
    assert sum(tally.counts.values()) == 1


def test_rows_of_a_tsv_without_header(tmp_path):
    path = tmp_path / "cola.tsv"
    path.write_text('gj04\t1\t\t"Quote" stays.\n')
    assert list(read_rows(path, columns=["source", "label", "star", "sentence"])) == [
        (1, {"source": "gj04", "label": "1", "star": "", "sentence": '"Quote" stays.'})
    ]


def test_encodings(tmp_path):
    (tmp_path / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    (tmp_path / "windows.txt").write_bytes("a\r\nb".encode("utf-16"))
    (tmp_path / "marked.txt").write_bytes("c\r\nd".encode("utf-8-sig"))
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2")
    tally = Tally()
    assert [d.text for d in read_documents(config(tmp_path), tally)] == ["c\nd", "a\nb"]
    assert tally.counts == {wrong_encoding("utf-8"): 1, "binary data (NUL characters)": 1}
    assert texts_of(tmp_path / "latin.txt", encoding="latin-1") == ["déjà vu"]


def test_a_table_in_broken_utf16_loses_its_broken_rows(tmp_path):
    rows = "text,n\nfirst,1\nhalf \ud800 one,2\nlast,3\n".encode("utf-16", "surrogatepass")
    for name, data in (("half.csv", rows), ("odd.csv", rows[:-2] + b"x")):
        (tmp_path / name).write_bytes(data)
        tally = Tally()
        found = [d.text for d in read_documents(config(tmp_path / name), tally)]
        assert found in (["first", "last"], ["first"]) and tally.counts[wrong_encoding("utf-8")] >= 1
    (tmp_path / "cut.csv").write_bytes("text,n\n第一,1\n第二,2\n".encode("gb18030")[:-4])
    assert texts_of(tmp_path / "cut.csv", encoding="gb18030") == ["第一"]


def test_headers_of_tables(tmp_path):
    (tmp_path / "blank.csv").write_text("\n \ntext;n\nfirst, one;1\nsecond;2\nthird\n")
    tally = Tally()
    assert [d.text for d in read_documents(config(tmp_path / "blank.csv"), tally)] == ["first, one", "second"]
    assert list(tally.first.values()) == [f"{tmp_path / 'blank.csv'} line 6"]
    (tmp_path / "twice.csv").write_text("text,text,,\nfirst,other,,\n")
    assert [row for _, row in read_rows(tmp_path / "twice.csv")] == [
        {"text": "first", "text.1": "other", "": "", ".1": ""}
    ]
    (tmp_path / "empty.csv").write_text("")
    assert not list(read_rows(tmp_path / "empty.csv"))


def test_a_damaged_archive_gives_what_is_readable_and_is_counted(tmp_path):
    whole = gzip.compress("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(5000)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.jsonl.zst").write_bytes(b"not zstandard at all")
    (tmp_path / "c.jsonl").write_text('{"text": "after"}\n')
    tally = Tally()
    texts = [d.text for d in read_documents(config(tmp_path), tally)]
    assert texts[0] == "text 0" and texts[-1] == "after" and 10 < len(texts) < 5000
    assert tally.counts["damaged compression"] >= 2


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_compressed_file_that_is_cut_short_is_never_taken_for_a_whole_one(tmp_path, suffix, pack):
    path, row = tmp_path / f"a.jsonl{suffix}", json.dumps({"text": "text " * 50}).encode() + b"\n"
    first, second = pack(row * 20), pack(row * 30)  # two frames, as appending makes them
    path.write_bytes(first + second)
    assert len(list(read_rows(path))) == 50
    path.write_bytes(first + second + bytes(600))  # a disk may fill up its last block
    assert len(list(read_rows(path))) == 50
    for end in (len(first) + 1, len(first) + len(second) - 1):
        path.write_bytes((first + second)[:end])
        tally = Tally()
        assert len(list(read_documents(config(path), tally))) >= 20
        assert tally.counts["damaged compression"] == 1
        with pytest.raises(UserError, match=rf"a\.jsonl{suffix} ends too early; copy or compress it again"):
            list(read_rows(path))
    path.write_bytes(row)  # as a browser saves what a server compressed on the way
    with pytest.raises(UserError, match=rf"a\.jsonl{suffix} has no {suffix[1:]} data where it should"):
        list(read_rows(path))
    large = tmp_path / f"large.txt{suffix}"
    large.write_bytes(b"text\n" * 60_000)
    (tmp_path / "other.txt").write_text("after")
    tally = Tally()
    assert [d.text for d in read_documents(config(large, tmp_path / "other.txt", shard_mb=1), tally)] == ["after"]
    assert tally.counts == {"damaged compression": 1}


def test_zstandard_with_a_long_window_is_read(tmp_path):
    long = zstandard.ZstdCompressionParameters.from_level(3, window_log=28, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=long).compressobj()
    path = tmp_path / "forum.jsonl.zst"
    path.write_bytes(stream.compress(b'{"text": "of a forum"}\n') + stream.flush())
    assert texts_of(path) == ["of a forum"]


def test_damaged_and_unreadable_files(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but nothing else" * 100_000)
    (tmp_path / "b.txt").write_text("after")
    tally = Tally()
    assert [d.text for d in read_documents(config(tmp_path, shard_mb=1), tally)] == ["after"]
    assert tally.counts == {"not a parquet file": 1}

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("plume.data.documents.open_bytes", refuse)
    with pytest.raises(UserError, match=r"b\.txt cannot be read: Permission denied"):
        list(read_documents(config(tmp_path / "b.txt")))


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scan = os.scandir

    def refused(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match="closed cannot be read: Permission denied"):
        find_files(str(tmp_path))


def test_a_missing_path_names_the_nearest(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(
        UserError, match=r"there is no file or folder '.*shakspeare\.txt'; did you mean 'shakespeare\.txt'"
    ):
        find_files(str(tmp_path / "shakspeare.txt"))
    with pytest.raises(UserError, match="no file matches"):
        find_files(str(tmp_path / "*.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no file that can be read"):
        find_files(str(tmp_path / "empty"))


def parts_of(path, read, size):
    parts = list(cut_file(path, read, size, strips=8))
    tally = Tally()
    documents = [d for part in parts for d in read_piece(WorkUnit(0, 0, (part,)), read, tally)]
    assert not tally.counts.keys() - {"empty", "half characters (lone surrogates)", "NUL characters"}
    return parts, documents


@settings(max_examples=60)
@given(
    st.lists(st.text(st.characters(exclude_characters="\0"), max_size=40), min_size=1, max_size=40),
    st.integers(1, 300),
    st.sampled_from(["", ".gz", ".zst"]),
)
def test_a_jsonl_file_cut_anywhere_gives_every_row_once(tmp_path_factory, texts, size, compression):
    path = tmp_path_factory.mktemp("cut") / f"a.jsonl{compression}"
    lines = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    path.write_bytes(pack(lines))
    _, documents = parts_of(path, config(path), size)
    broken = [t for t in texts if t.strip() and not any("\ud800" <= c <= "\udfff" for c in t)]
    assert [d.text for d in documents] == broken


@settings(max_examples=100)
@given(st.text(st.sampled_from("ab é€\n\r."), min_size=1, max_size=600), st.integers(1, 200))
def test_a_text_cut_anywhere_is_whole_again(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode())
    read = config(path)
    parts = list(cut_file(path, read, size, strips=1))
    tally = Tally()
    documents = [d for part in parts for d in read_part(part, read, tally)]
    joined = "".join(d.text for d in documents)
    assert joined == text.replace("\r\n", "\n")
    assert [d.continues for d in documents] == [n > 0 for n in range(len(documents))]


@settings(max_examples=60)
@given(
    st.lists(st.text(st.sampled_from("ab .é"), min_size=1).filter(str.strip), min_size=1, max_size=20),
    st.integers(1, 99),
)
def test_paragraphs_cut_anywhere_are_the_same(tmp_path_factory, paragraphs, size):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_text("\n\n".join(p.strip() for p in paragraphs))
    _, documents = parts_of(path, config(path, documents="paragraph"), size)
    assert [d.text.strip() for d in documents] == [p.strip() for p in paragraphs]


def test_cutting_a_text_never_changes_its_tokens(tmp_path):
    text = "\n".join(f"def f{n}(x):\n    return x + {n}  \n\n\n# done {n}" for n in range(400))
    path = tmp_path / "a.py"
    path.write_text(text)
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=400), [text])
    for size in (100, 999, 5000):
        parts, documents = parts_of(path, config(path), size)
        assert len(parts) > 2
        tokens = [int(i) for d in documents for i in tokenizer.encode(d.text)]
        assert tokens == tokenizer.encode(text)


def test_lines_as_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\nthree")
    _, documents = parts_of(path, config(path, documents="line"), 4)
    assert [d.text for d in documents] == ["one", "two", "three"]


@given(st.integers(0, 1 << 40), st.integers(1, 2000))
def test_parts_cover_a_file_and_the_last_are_short(more, count):
    total = 32 * count + more
    edges = part_edges(total, count)
    sizes = [stop - start for start, stop in pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == total and min(sizes) > 0
    assert max(sizes) <= -(-total // count)
    assert max(sizes[-8:]) <= total / count / 4 + 1 if count >= 8 else len(sizes) == count


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("count", [31, 32, 33, 47])
def test_workers_that_take_the_next_part_end_together(workers, count):
    ends = [0] * workers
    for start, stop in pairwise(part_edges(1 << 29, count)):
        ends[ends.index(min(ends))] += stop - start
    assert max(ends) - min(ends) <= (1 << 29) / count / 2 + 8


def test_small_files_share_a_piece_and_big_ones_are_cut(tmp_path):
    for n in range(10):
        (tmp_path / f"{n}.txt").write_text("x" * 1000)
    (tmp_path / "big.jsonl").write_text('{"text": "y"}\n' * 200_000)
    pieces = plan_pieces(config(tmp_path, shard_mb=1))
    assert [len(p.parts) for p in pieces] == [11, 1, 1]
    assert [p.number for p in pieces] == [0, 1, 2]
    assert all(p.size <= 1 << 20 for p in pieces)


def test_the_last_pieces_of_a_big_file_are_short(tmp_path):
    (tmp_path / "big.jsonl").write_text('{"text": "y"}\n' * 700_000)  # 9.8 MB
    sizes = [piece.size for piece in plan_pieces(config(tmp_path, shard_mb=1))]
    assert len(sizes) == 8 + 8 and sum(sizes) == pytest.approx(9_800_000, abs=len(sizes))
    assert max(sizes[-8:]) < 0.26 * min(sizes[:8])


def test_row_groups_of_a_big_parquet_file_are_pieces(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"{n} " * 300 for n in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=500, compression="none")
    pieces = plan_pieces(config(path, shard_mb=1))
    assert len(pieces) > 1
    assert texts_of(path, shard_mb=1) == texts


def test_the_standard_library_without_its_tests():
    names = {p.name for p in find_files("python:stdlib")}
    assert {"os.py", "argparse.py"} <= names
    assert not any("test" in p.parts for p in find_files("python:stdlib"))
    assert find_files("python:zstandard")[0].name == "__init__.py"
    for name in ("no_such_package_here", "no_such_package.inside", "sys", "_ssl", ""):
        with pytest.raises(UserError, match=f"python:{name}: no such package is installed"):
            find_files(f"python:{name}")


def test_aligned_files(tmp_path):
    (tmp_path / "en").write_text("one\ntwo\nthree\n")
    (tmp_path / "de").write_text("eins\nzwei\ndrei\n")
    read = config(tmp_path / "en", targets=(str(tmp_path / "de"),))
    assert [(d.text, d.target) for d in read_documents(read)] == [("one", "eins"), ("two", "zwei"), ("three", "drei")]
    (tmp_path / "de").write_text("eins\nzwei\n")
    with pytest.raises(UserError, match=r"en has 3 lines and .*de has 2"):
        list(read_documents(read))


PAGE = """<html><head><title>t</title></head><body><nav><a href="/">Home</a> <a href="/x">Menu</a></nav>
<article><h1>Owls</h1>
<p>Owls hunt at night and rest during the day, which makes them hard to see for most people who walk in the woods.</p>
<p>Their feathers are soft at the edges, so that the air passes over them without a sound while they fly.</p></article>
<footer>Copyright notice</footer></body></html>"""


def test_a_web_page_gives_its_article(tmp_path):
    pytest.importorskip("trafilatura", reason="HTML pages need the extra `web`")
    (tmp_path / "a.html").write_text(PAGE)
    (tmp_path / "b.html").write_text("<html></html>")
    tally = Tally()
    (document,) = read_documents(config(tmp_path), tally)
    assert "Owls hunt at night" in document.text and "Menu" not in document.text
    assert tally.counts == {"no article found in the page": 1}


def test_a_warc_file_gives_articles_with_their_addresses(tmp_path):
    pytest.importorskip("trafilatura", reason="HTML pages need the extra `web`")
    warcio = pytest.importorskip("warcio", reason="WARC files need the extra `web`")
    from io import BytesIO

    from warcio.statusandheaders import StatusAndHeaders

    with (tmp_path / "a.warc.gz").open("wb") as stream:
        writer = warcio.WARCWriter(stream, gzip=True)
        for url, kind, body in (("http://a.org/owl", "text/html", PAGE), ("http://a.org/p.png", "image/png", "x")):
            headers = StatusAndHeaders("200 OK", [("Content-Type", kind)], protocol="HTTP/1.0")
            record = writer.create_warc_record(url, "response", payload=BytesIO(body.encode()), http_headers=headers)
            writer.write_record(record)
            record.raw_stream.close()
    tally = Tally()
    (document,) = read_documents(config(tmp_path), tally)
    assert document.url == "http://a.org/owl" and "Owls hunt at night" in document.text
    assert tally.counts == {"not an HTML page": 1}


def test_what_is_not_installed_names_its_extra(monkeypatch):
    for name in ("datasets", "warcio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install 'plume-lm\[hub\]'"):
        sources.load_hub("hub:some/set")
    with pytest.raises(UserError, match=r"pip install 'plume-lm\[web\]'"):
        sources.optional("warcio", "WARC files")


def test_a_hub_dataset_offline(tmp_path):
    pytest.importorskip("datasets", reason="hub datasets need the extra `hub`")
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, ".jsonl")
    script = f"""
from pathlib import Path
from plume.config import DataConfig, UserError
from plume.data import read_documents
print([d.text for d in read_documents(DataConfig(paths=("hub:{folder}",), folder=Path("unused")))] == {TEXTS!r})
try:
    list(read_documents(DataConfig(paths=("hub:no/such:en:test",), folder=Path("unused"))))
except UserError as error:
    print(error)
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    first, second = done.stdout.strip().splitlines()
    assert first == "True"
    assert second.startswith("hub:no/such:en:test (offline): ")


def test_a_hub_error_without_words(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(*_, **__):
            raise TimeoutError

    monkeypatch.setattr(sources, "hub_is_offline", lambda: False)
    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    with pytest.raises(UserError, match=r"hub:some/set \(online\): TimeoutError$"):
        sources.load_hub("hub:some/set")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_pipes_are_not_read(tmp_path):
    """To open one waits for a writer, who may never come."""
    (tmp_path / "a.txt").write_text("Some text.")
    os.mkfifo(tmp_path / "b.txt")
    assert find_files(str(tmp_path)) == [tmp_path / "a.txt"]
    assert sources.unread_files(str(tmp_path)) == [tmp_path / "b.txt"]
    with pytest.raises(UserError, match=r"b\.txt' is a pipe, a socket or a device"):
        find_files(str(tmp_path / "b.txt"))


def test_parts_are_plain_data():
    piece = WorkUnit(3, 1, (FilePart("a", 0, 10), FilePart("b", target="c")))
    assert WorkUnit.from_dict(json.loads(json.dumps(piece.to_dict()))) == piece
