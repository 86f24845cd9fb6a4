"""Shards of large corpora: opened lazily, checked by their hashes, planned and finished in linear time."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plume.config import CleanConfig, DataConfig, TokenizerConfig, UserError
from plume.data import PackedWindows, finalize, open_shards, prepare, verify_shards
from plume.data.clean import find_duplicates, sorted_keys
from plume.data.prepare import keyed_folder, reuse, sample_pieces
from plume.data.shards import CHUNK, read_manifest
from plume.data.sources import FilePart, WorkUnit, plan_pieces
from plume.text import load_tokenizer, train_command, train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks are not part of the package
from benchmarks import sizes

BYTES = TokenizerConfig(kind="bytes")


def settings(path: Path, **options) -> DataConfig:
    given = {"folder": path.parent / "out", "tokenizer": BYTES, "validation_fraction": 0.0} | options
    return DataConfig(paths=(str(path),), **given)


@pytest.fixture
def rows(tmp_path) -> Path:
    rng, path = random.Random(0), tmp_path / "rows.jsonl"
    lines = [" ".join(f"w{rng.randrange(3000)}" for _ in range(60)) for _ in range(3000)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def test_a_changed_byte_is_found_where_it_is_read(rows):
    config = settings(rows)
    prepare(config)
    assert verify_shards(config.folder) > rows.stat().st_size
    shard = config.folder / "train-00000.tokens"
    data = bytearray(shard.read_bytes())
    place = 5 * CHUNK + 100
    data[place] ^= 1
    shard.write_bytes(data)
    (stream,) = open_shards(config.folder).streams
    stream.read(0, 1000)  # another chunk
    with pytest.raises(UserError, match=rf"train-00000\.tokens is corrupt at byte {5 * CHUNK}"):
        stream.read(place // 2, place // 2 + 10)
    with pytest.raises(UserError, match="is corrupt"):
        verify_shards(config.folder)
    done = subprocess.run(
        [sys.executable, "-m", "plume", "data", "verify", str(config.folder)], capture_output=True, text=True
    )
    assert done.returncode == 2 and "is corrupt at byte" in done.stderr


@pytest.mark.parametrize("file", ["train-00000.starts", "train-00000.sums"])
def test_changed_starts_and_hashes_are_found(rows, file):
    config = settings(rows)
    prepare(config)
    data = bytearray((config.folder / file).read_bytes())
    data[-1] ^= 1
    (config.folder / file).write_bytes(data)
    with pytest.raises(UserError, match="is corrupt"):
        PackedWindows(open_shards(config.folder), 64, document_mask=True).batch(0, 4)
    if file.endswith("starts"):
        assert PackedWindows(open_shards(config.folder), 64).batch(0, 4) is not None  # does not read them


@pytest.mark.parametrize("content", ["[1]", "null", "{", '{"format": 2}', '{"format": 99}', "\xff"])
@pytest.mark.parametrize("file", ["data.json", "report.json", "plan.json"])
def test_damaged_metadata_is_one_message(tmp_path, content, file, capsys):
    (tmp_path / "a.txt").write_text("some text " * 100)
    config = settings(tmp_path / "a.txt")
    prepare(config)
    if file == "plan.json":
        work = config.folder / f".work-{read_manifest(config.folder).fingerprint[:16]}"
        work.mkdir()
        (work / file).write_bytes(content.encode("latin-1"))
        (config.folder / "data.json").unlink()
        prepare(config)  # begins again
        return
    (config.folder / file).write_bytes(content.encode("latin-1"))
    if file == "report.json" and content.startswith('{"'):
        return
    with pytest.raises(UserError, match=file.replace(".", r"\.")):
        prepare(config)
    prepare(replace(config, overwrite=True))
    assert open_shards(config.folder).tokens > 0


def test_a_terabyte_opens_at_once_with_few_files_open(tmp_path):
    """In a process that may open 256 files: 2048 shards of half a gigabyte. `python -m benchmarks prepare` times it."""
    sizes.write_shards(tmp_path / "big", 2048, 1 << 29)
    script = f"""
import resource, sys, zlib
sys.path.append({str(Path(__file__).parents[1])!r})
from memory import begin_peak, kilobytes
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from plume.data import PackedWindows, open_shards, shards as module

hashed = []
crc32 = zlib.crc32
module.zlib.crc32 = lambda data, *rest: hashed.append(len(data)) or crc32(data, *rest)
shards = open_shards({str(tmp_path / "big")!r})
windows = PackedWindows(shards, 1024, seed=1, document_mask=True)
opened = sum(hashed)
assert len(shards.streams[0]) == 2048 * (1 << 28)
windows.batch(0, 8)
hashed.clear()
windows.batch(10**9, 8)
batch = sum(hashed)
before = begin_peak()
for step in range(200):
    windows.batch(step * 10**6, 8)
grown = kilobytes() - before
print(opened, batch, grown)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    opened, batch, grown = map(int, done.stdout.split())
    assert opened == 0  # nothing is read before it is wanted
    assert 0 < batch <= 8 * (2 * CHUNK + 8 * 1000)  # tokens of a row in at most two chunks, and starts
    assert grown < 200_000  # kB: pages of the mapped files, which the system takes back


def test_many_files_are_planned_in_linear_time(tmp_path):
    for folder in range(20):
        (tmp_path / str(folder)).mkdir()
        for number in range(1000):
            os.close(os.open(tmp_path / str(folder) / f"{number}.txt", os.O_CREAT))
    times = {}
    for folders in ("[01]", "*"):  # 2,000 files and 20,000
        config = DataConfig(paths=(str(tmp_path / folders / "*.txt"),), folder=Path("unused"))
        began = time.process_time()
        pieces = plan_pieces(config)
        times[sum(len(piece.parts) for piece in pieces)] = time.process_time() - began
    assert times.keys() == {2_000, 20_000}
    assert times[20_000] < 40 * times[2_000]  # a quadratic plan would take 100 times as long


def test_a_folder_that_dies_while_it_is_removed_is_never_taken_for_another_text(tmp_path, monkeypatch):
    """Killed while it removes its work folder; then another text is prepared into the same folder."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} text " * 50)
    first = settings(tmp_path / "first.txt", folder=tmp_path / "out")

    def dies(path, ignore_errors=False):
        for file in sorted(Path(path).rglob("plan.json")):
            file.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(
        shutil, "rmtree", lambda path, ignore_errors=False: dies(path) if ".trash" in str(path) else None
    )
    with pytest.raises(KeyboardInterrupt):
        prepare(first)
    monkeypatch.undo()
    prepare(settings(tmp_path / "second.txt", folder=tmp_path / "out", overwrite=True))
    (stream,) = open_shards(tmp_path / "out").streams
    text = load_tokenizer(tmp_path / "out" / "tokenizer").decode(stream.read(0, len(stream) - 1))
    assert text == "the second text " * 50
    assert not [*(tmp_path / "out").glob(".trash*")] and not [*(tmp_path / "out").glob(".work*")]


def test_work_without_its_plan_is_done_again(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    config = settings(tmp_path / "a.txt")
    fingerprint = prepare(config).manifest.fingerprint
    work = config.folder / f".work-{fingerprint[:16]}"
    work.mkdir()
    (work / "00000.json").write_text('{"entries": 1, "tokens": 5}')  # of some other text
    (config.folder / "data.json").unlink()
    prepare(config)
    assert open_shards(config.folder).tokens == 1001


def test_a_run_resumes_with_texts_that_were_touched_or_removed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 100)
    config = settings(path)
    before = prepare(config).manifest
    os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"--prepared .*out"):
        prepare(config)
    assert reuse(config).manifest == before
    path.unlink()
    assert reuse(config).manifest == before
    with pytest.raises(UserError, match="there is no file"):
        reuse(replace(config, documents="line"))


def test_another_text_with_the_same_recipe_gets_a_folder_of_its_own(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name} " * 100)
    first, second = (settings(tmp_path / f"{name}.txt") for name in ("a", "b"))
    assert keyed_folder(first) == first  # nothing is there yet
    prepare(first)
    assert keyed_folder(first) == first
    other = keyed_folder(second)
    assert other.folder != first.folder and other.folder.parent == first.folder.parent
    prepare(other)
    assert keyed_folder(second) == other


def test_the_tokenizer_learns_from_what_is_kept(tmp_path):
    """Against one that is trained on the kept documents alone."""
    rng = random.Random(0)
    good = [
        " ".join(rng.choices(["apple", "banana", "cherry", "damson", "elder"], k=30)) + f" n{n}" for n in range(200)
    ]
    held = "an evaluation text of exactly thirteen words and then some more you see here"
    leaked = [f"{held} zyzzyva zyzzyva zyzzyva" for _ in range(100)]
    rows = [{"text": text} for text in [*good, *good, *leaked, *["qqqq"] * 100]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.txt").write_text(held)
    clean = CleanConfig(duplicates="exact", min_characters=10, decontaminate=(str(tmp_path / "held.txt"),))
    tokenizer = TokenizerConfig(vocab_size=320)
    prepare(settings(tmp_path / "rows.jsonl", clean=clean, tokenizer=tokenizer))
    expected = train_tokenizer(tokenizer, good)
    assert load_tokenizer(tmp_path / "out" / "tokenizer").hash == expected.hash
    assert train_tokenizer(tokenizer, [row["text"] for row in rows]).hash != expected.hash


def test_words_are_counted_the_same_by_any_number_of_workers(tmp_path, rows):
    hashes = set()
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        config = settings(rows, folder=folder, shard_mb=1, tokenizer=TokenizerConfig(vocab_size=400), workers=workers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("plume.data.pool.SMALL", 0)
            prepare(config)
        hashes.add(load_tokenizer(folder / "tokenizer").hash)
    texts = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    assert hashes == {train_tokenizer(TokenizerConfig(vocab_size=400), texts).hash}


def test_a_sample_has_its_size_and_seed(tmp_path, rows):
    pieces = [WorkUnit(n, 0, (FilePart(str(n), size=16_000_000),)) for n in range(1000)]
    chosen, share = sample_pieces(pieces, 100_000_000, seed=1)
    assert sum(p.size for p in chosen) * share == pytest.approx(100_000_000)
    assert len(chosen) == 25 and chosen == sample_pieces(pieces, 100_000_000, seed=1)[0]
    assert chosen != sample_pieces(pieces, 100_000_000, seed=2)[0]
    assert sample_pieces(pieces[:3], 100_000_000, seed=1) == (pieces[:3], 1.0)
    hashes = []
    for seed in (0, 0, 1):
        tokenizer = TokenizerConfig(vocab_size=400, sample_mb=1, seed=seed)
        folder = tmp_path / f"{len(hashes)}"
        prepare(settings(rows, folder=folder, tokenizer=tokenizer))
        hashes.append(load_tokenizer(folder / "tokenizer").hash)
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("seed", range(4))
def test_one_long_document_is_sampled_too(tmp_path, seed):
    """Also of a script with three bytes for a character, whose one block is more than the sample."""
    book = tmp_path / "book.txt"
    book.write_text("".join(f"第{n}章。你好，世界。\n" for n in range(80_000)))
    config = TokenizerConfig(vocab_size=300, sample_mb=1, seed=seed)
    prepare(settings(book, folder=tmp_path / "out", tokenizer=config))
    for tokenizer in (load_tokenizer(tmp_path / "out" / "tokenizer"), train_command([book], tmp_path / "own", config)):
        assert tokenizer.vocab_size == 300


@pytest.mark.parametrize("workers", [1, 2])
def test_near_duplicates_are_found_by_any_number_of_workers(tmp_path, workers, monkeypatch):
    repeats = [sizes.write_signatures(tmp_path, piece, 2000) for piece in range(4)]
    monkeypatch.setattr("plume.data.clean.AT_ONCE", 1500)
    monkeypatch.setattr("plume.data.pool.SMALL", 0)
    config = DataConfig(paths=("x",), folder=tmp_path / "out", workers=workers, clean=CleanConfig(duplicates="near"))
    find_duplicates(config, tmp_path, [2000] * 4)
    dropped = np.fromfile(tmp_path / "dropped", np.bool_)
    assert set(np.flatnonzero(dropped).tolist()) == set.union(*repeats)


@pytest.mark.parametrize(("threshold", "kept"), [(0.69, [True, False]), (0.71, [True, True])])
def test_near_duplicates_are_as_similar_as_the_threshold(tmp_path, threshold, kept):
    """Two signatures agree in 90 of 128 functions, 0.70, whole bands among them."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, 1 << 32, (2, 128), dtype=np.uint32)
    table[1, :90] = table[0, :90]
    keys, order = sorted_keys([1, 2], list(table))
    for kind, values in (("signatures", table), ("keys", keys), ("order", order)):
        (tmp_path / f"00000.{kind}").write_bytes(values.tobytes())
    clean = CleanConfig(duplicates="near", near_threshold=threshold)
    find_duplicates(DataConfig(paths=("x",), folder=tmp_path / "out", workers=1, clean=clean), tmp_path, [2])
    assert (~np.fromfile(tmp_path / "dropped", np.bool_)).tolist() == kept


@pytest.mark.slow
def test_five_million_documents_in_bounded_memory(tmp_path):
    """Of one worker; `python -m benchmarks prepare` times it."""
    for piece in range(250):
        sizes.write_signatures(tmp_path, piece, sizes.PIECE)
    _, megabytes = sizes.in_fresh_process(sizes.search, tmp_path, 250)  # other tests' memory does not count
    assert megabytes < sizes.MAX_MEGABYTES


def test_shards_are_as_large_as_they_should_be(tmp_path, rows, monkeypatch):
    one = settings(rows, shard_mb=1)
    prepare(one)
    assert len(read_manifest(one.folder).train) == 1
    monkeypatch.setattr(finalize, "SHARD_BYTES", 1 << 19)
    many = settings(rows, shard_mb=1, folder=tmp_path / "many")
    prepare(many)
    assert len(read_manifest(many.folder).train) > 1
    batches = [PackedWindows(open_shards(c.folder), 128, seed=3, document_mask=True).batch(17, 9) for c in (one, many)]
    for name in ("tokens", "targets", "documents"):
        np.testing.assert_array_equal(getattr(batches[0], name), getattr(batches[1], name))


def test_evaluation_texts_that_are_not_there_are_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "held.jsonl").write_text('{"question": "what"}\n')
    config = settings(tmp_path / "a.txt", clean=CleanConfig(decontaminate=(str(tmp_path / "held.jsonl"),)))
    with pytest.raises(UserError, match=r"no evaluation text is found in .*held\.jsonl; 1 x no text in"):
        prepare(config)


def test_short_evaluation_texts_match_as_wholes(tmp_path):
    held = ["the cat sat on the mat", "yes"]
    rows = ["before it: The cat sat on the mat, and then", "the cat sat on a mat", "Yes!", "yes and no", "other words"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in held))
    config = settings(tmp_path / "rows.jsonl", clean=CleanConfig(decontaminate=(str(tmp_path / "held.jsonl"),)))
    source = prepare(config).report["sources"][0]
    assert source["kept"] == 3 and source["dropped"]["shares 13 words with an evaluation text"]["count"] == 2
