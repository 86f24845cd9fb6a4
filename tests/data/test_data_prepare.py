"""Prepare: the same shards whatever the workers, kills and resumes; clear words for full disks and torn files."""

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console

from plume.config import CleanConfig, DataConfig, TokenizerConfig, UserError
from plume.data import finalize, open_shards, pool, prepare, show_report
from plume.data.shards import CHUNK
from plume.data.stages import ShardMaker
from plume.text import load_tokenizer, train_tokenizer

TEXT = "the owl hunts at night and rests by day while people sleep in their houses near a quiet river"
WORDS = TEXT.split()


def write_rows(path: Path, megabytes: float, seed: int = 0) -> list[str]:
    rng, texts, size = random.Random(seed), list[str](), 0
    with path.open("w") as stream:
        while size < megabytes * 1e6:
            texts.append(f"{len(texts)} " + " ".join(rng.choices(WORDS, k=rng.randrange(20, 200))) + ".")
            size += stream.write(json.dumps({"text": texts[-1]}) + "\n")
    return texts


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    """Several shards from a few megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finalize, "SHARD_BYTES", 1 << 18)
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TokenizerConfig(vocab_size=300), [" ".join(WORDS) * 3]).save(folder)
    return TokenizerConfig(folder=folder)


def contents(folder: Path) -> dict[str, bytes]:
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".tokens", ".starts", ".sums")}
    return files | {"data.json": (folder / "data.json").read_bytes()}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> tuple[Path, list[str]]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return path, write_rows(path, 4.5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rows, tokenizer) -> DataConfig:
    """The uninterrupted run in this process alone."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    config = DataConfig(paths=(str(rows[0]),), folder=folder, tokenizer=tokenizer, shard_mb=1, workers=1)
    prepare(config)
    return config


def test_shards_hold_the_tokens_of_every_document_once(whole, rows):
    tokenizer = load_tokenizer(whole.tokenizer.folder)
    expected = sorted((*tokenizer.encode(text), tokenizer.end) for text in rows[1])
    found = []
    for split in ("train", "validation"):
        (stream,) = open_shards(whole.folder, split, tokenizer_hash=tokenizer.hash).streams
        found += [tuple(stream.document(n).tolist()) for n in range(stream.documents)]
    assert sorted(found) == expected


def test_the_split_is_by_document_and_of_the_wanted_size(whole, rows):
    validation = open_shards(whole.folder, "validation")
    assert validation.documents / len(rows[1]) == pytest.approx(0.01, abs=0.005)
    assert validation.manifest.dtype == "uint16"


def test_a_position_knows_its_document(whole):
    shards = open_shards(whole.folder)
    (stream,) = shards.streams
    assert len(shards.manifest.train) > 3
    starts = np.array([stream.start_of(n) for n in range(stream.documents + 1)])
    assert (np.diff(starts) > 0).all()
    rng = np.random.default_rng(0)
    for start in rng.integers(0, len(stream) - 5000, 50).tolist():
        oracle = np.searchsorted(starts, np.arange(start, start + 5000), side="right") - 1
        np.testing.assert_array_equal(stream.documents_between(start, start + 5000), oracle)
    ends = np.flatnonzero(stream.read(0, len(stream)) == shards.manifest.separator)
    np.testing.assert_array_equal(ends + 1, starts[1:])


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_shards(tmp_path, whole, workers):
    prepare(replace(whole, folder=tmp_path / "out", workers=workers))
    assert contents(tmp_path / "out") == contents(whole.folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_of_a_shard_are_the_bytes_of_the_whole(tmp_path, whole, workers, monkeypatch):
    """Written by several tasks, a chunk each; the hashes are those of the file."""
    monkeypatch.setattr(pool, "SMALL", 0)
    monkeypatch.setattr(finalize, "PART_BYTES", CHUNK)
    prepare(replace(whole, folder=tmp_path / "out", workers=workers))
    assert contents(tmp_path / "out") == contents(whole.folder)
    data = (tmp_path / "out" / "train-00000.tokens").read_bytes()
    assert len(data) > 3 * CHUNK
    sums = [zlib.crc32(data[low : low + CHUNK]) for low in range(0, len(data), CHUNK)]
    assert np.fromfile(tmp_path / "out" / "train-00000.sums", "<u4")[: len(sums)].tolist() == sums


def test_parts_of_pairs_and_of_a_border_inside_a_document(tmp_path, monkeypatch):
    """Against the tokens of the text: few documents are split by place, pairs never inside one."""
    monkeypatch.setattr(finalize, "PART_BYTES", CHUNK)
    lines = (
        [("source {} " * 900).strip().replace("{}", str(n)) for n in range(40)],
        [f"target{n}" * 800 for n in range(40)],
    )
    for name, texts in zip(("a.txt", "b.txt"), lines, strict=True):
        (tmp_path / name).write_text("".join(text + "\n" for text in texts))
    usual = {"documents": "line", "tokenizer": TokenizerConfig(kind="bytes"), "validation_fraction": 0.3}
    config = DataConfig(paths=(str(tmp_path / "a.txt"),), folder=tmp_path / "plain", **usual)
    prepare(config)
    prepare(replace(config, targets=(str(tmp_path / "b.txt"),), folder=tmp_path / "pairs"))
    for folder, texts in (("plain", lines[0]), ("pairs", [t for pair in zip(*lines, strict=True) for t in pair])):
        tokenizer = load_tokenizer(tmp_path / folder / "tokenizer")
        ids = [i for text in texts for i in (*tokenizer.encode(text), tokenizer.end)]
        splits = [open_shards(tmp_path / folder, split).streams[0] for split in ("train", "validation")]
        found = np.concatenate([stream.read(0, len(stream)) for stream in splits])
        assert found.tolist() == ids
        firsts = [stream.start_of(d) + base for stream, base in zip(splits, (0, len(splits[0])), strict=True)
                  for d in range(stream.documents)]  # fmt: skip
        expected = np.cumsum([0, *(len(tokenizer.encode(t)) + 1 for t in texts)])[:-1].tolist()
        assert sorted({*expected, len(splits[0])}) == sorted({*firsts, len(splits[0])})


@pytest.mark.slow
def test_workers_are_kept_from_stage_to_stage(tmp_path, whole, monkeypatch):
    started, original = [], pool.start_workers

    def start(count, *, preload=False):
        started.extend(original(count, preload=preload))
        return started[-count:]

    monkeypatch.setattr(pool, "start_workers", start)
    monkeypatch.setattr(pool, "SMALL", 0)
    monkeypatch.setattr(finalize, "PART_BYTES", CHUNK)
    clean = replace(whole.clean, duplicates="near")
    prepare(replace(whole, folder=tmp_path / "out", workers=2, clean=clean))  # documents, duplicates, parts of shards
    assert len(started) == 2
    assert all(worker.group.poll() is not None for worker in started)


PREPARE = """
import sys
from pathlib import Path
from plume.config import *
from plume.data import finalize, prepare
finalize.SHARD_BYTES = 1 << 18
source, folder, tokenizer, shard_mb = sys.argv[1:5]
config = DataConfig(paths=(source,), folder=Path(folder), shard_mb=int(shard_mb), workers=2,
    tokenizer=TokenizerConfig(folder=Path(tokenizer)))
"""
KILLED = """
from dataclasses import replace
import psutil
from plume.data import pool
from plume.data.stages import ShardMaker
results_of, write_keys = pool.results_of, ShardMaker.write_keys

def die_at(*place):
    if list(place) == sys.argv[5:]:
        for process in (*psutil.Process().children(recursive=True), psutil.Process()):
            process.kill()

def between_pieces(stage, *given):
    for number, result in enumerate(results_of(stage, *given)):
        die_at(stage.__name__, str(number))  # its workers do the next pieces meanwhile
        yield result

def within_a_piece(maker, name, *given):
    die_at("piece", name)
    write_keys(maker, name, *given)

pool.results_of, ShardMaker.write_keys = between_pieces, within_a_piece
config = replace(config, workers=1 if "piece" in sys.argv else 2)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path, whole):
    folder = tmp_path / "out"
    script, words = f"{PREPARE}{KILLED}prepare(config)", [*whole.paths, folder, whole.tokenizer.folder, "1"]
    for stage, number in (("piece", "00001"), ("ShardMaker", "0"), ("Splitter", "0"), ("Splitter", "2")):
        killed = subprocess.run([sys.executable, "-c", script, *map(str, words), stage, number], check=False)
        assert killed.returncode == -signal.SIGKILL
        with pytest.raises(UserError, match="holds unfinished data; run the same prepare again"):
            open_shards(folder)
    subprocess.run([sys.executable, "-c", script, *map(str, words)], check=True)
    assert contents(folder) == contents(whole.folder)
    assert not [*folder.glob(".work*")]
    assert not [p for p in folder.rglob(".*") if p.is_file() and p.name != ".lock"]


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The numbers of pieces that were begun; the fourth is interrupted."""
    begun, original = list[int](), ShardMaker.__call__

    def counted(self, plain):
        begun.append(plain["piece"]["number"])
        if len(begun) == 4:
            raise KeyboardInterrupt
        return original(self, plain)

    monkeypatch.setattr(ShardMaker, "__call__", counted)
    return begun


def test_unfinished_work_that_was_cut_otherwise_is_not_mixed_with_new_pieces(tmp_path, whole, made):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(replace(whole, folder=folder))
    (plan,) = folder.glob(".work-*/plan.json")
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"pieces": "another version's"}))
    prepare(replace(whole, folder=folder))
    assert made == [0, 1, 2, 3, *range(max(made) + 1)]
    assert contents(folder) == contents(whole.folder)


def test_finished_work_is_not_done_again(tmp_path, whole, made):
    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare(replace(whole, folder=folder))
    prepare(replace(whole, folder=folder))
    assert made == [0, 1, 2, 3, *range(3, max(made) + 1)]
    assert contents(folder) == contents(whole.folder)
    made.clear()
    plan = {"fingerprint": open_shards(folder).manifest.fingerprint}
    work = folder / f".work-{plan['fingerprint'][:16]}"
    work.mkdir()
    (work / "plan.json").write_text(json.dumps(plan))  # as a kill at the very end would leave it
    prepare(replace(whole, folder=folder))
    assert not made and not work.exists()


def test_other_settings_do_not_overwrite_unless_asked(tmp_path, whole):
    folder = tmp_path / "out"
    prepare(replace(whole, folder=folder))
    before = contents(folder)
    other = replace(whole, folder=folder, validation_fraction=0.2)
    with pytest.raises(UserError, match="prepared from other texts or settings"):
        prepare(other)
    assert contents(folder) == before
    prepare(replace(other, overwrite=True))
    assert open_shards(folder, "validation").documents > 5 * open_shards(whole.folder, "validation").documents


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path, whole, workers, monkeypatch):
    """/dev/full gives the real error: every write to it finds no space."""
    folder = tmp_path / "out"
    config = replace(whole, folder=folder, workers=workers)
    if workers == 1:
        original = Path.open

        def full(self, mode="r", *args, **options):
            blocked = mode == "wb" and self.name.startswith(".00003.tokens")
            return original(Path("/dev/full") if blocked else self, mode, *args, **options)

        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(UserError, match=r"the disk is full: 00003\.tokens"):
            prepare(config)
        monkeypatch.undo()
    else:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        (tmp_path / "sitecustomize.py").write_text(
            "from pathlib import Path\noriginal = Path.open\n"
            "def full(self, mode='r', *a, **k):\n"
            "    blocked = mode == 'wb' and self.name.startswith('.00003.tokens')\n"
            "    return original(Path('/dev/full') if blocked else self, mode, *a, **k)\n"
            "Path.open = full\n"
        )
        with pytest.raises(UserError, match=r"the disk is full: 00003\.tokens"):
            prepare(config)
        monkeypatch.delenv("PYTHONPATH")
    (work,) = folder.glob(".work*")
    assert not list(folder.glob("*.tokens")) and not list(work.glob(".0*"))
    assert list(work.glob("0000[0-2].json"))  # of two workers one may still be at its first piece
    prepare(config)
    assert contents(folder) == contents(whole.folder)


def test_a_full_disk_in_a_part_of_a_shard(tmp_path, whole, monkeypatch):
    original, config = Path.open, replace(whole, folder=tmp_path / "out")

    def full(self, mode="r", *args, **options):
        return original(Path("/dev/full") if mode == "r+b" else self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(UserError, match=r"the disk is full: train-00000\.tokens"):
        prepare(config)
    monkeypatch.undo()
    prepare(config)
    assert contents(config.folder) == contents(whole.folder)


def test_a_full_disk_at_the_last_moment(tmp_path, whole, monkeypatch):
    folder = tmp_path / "out"
    put = Path.replace

    def full(self, target):
        if Path(target).name == "data.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return put(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"the disk is full: data\.json"):
        prepare(replace(whole, folder=folder))
    monkeypatch.undo()
    with pytest.raises(UserError, match="unfinished"):
        open_shards(folder)
    prepare(replace(whole, folder=folder))
    assert contents(folder) == contents(whole.folder)


def test_a_dead_worker_is_reported(tmp_path, whole, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif any('plume.data.pool' in part for part in sys.orig_argv): os.kill(os.getpid(), 9)\n"
    )
    with pytest.raises(UserError, match=r"worker process died \(exit code -9, probably out of memory\)"):
        prepare(replace(whole, folder=tmp_path / "out", workers=2))


def test_a_long_text_is_one_document_in_a_table_that_fits(tmp_path, tokenizer):
    """It is cut into pieces of a shard's size, which are no documents of their own."""
    file = tmp_path / "my_first_book.txt"
    file.write_text("a line of a long book\n" * 120_000)
    config = DataConfig(paths=(str(file),), folder=tmp_path / "out", tokenizer=tokenizer, shard_mb=1, workers=1)
    report = prepare(config).report
    (source,) = report["sources"]
    assert (source["read"], source["kept"]) == (1, 1)
    screen = Console(width=80, file=io.StringIO())
    screen.print(show_report({**report, "sources": [{**source, "name": file.name, "tokens": 26_678_042}]}))
    assert file.name in screen.file.getvalue()


def test_two_at_once_wait_for_each_other(tmp_path, whole):
    folder = tmp_path / "out"
    script = f"""
from pathlib import Path
from plume.config import *
from plume.data import finalize, prepare
finalize.SHARD_BYTES = 1 << 18
prepare(DataConfig(paths={whole.paths!r}, folder=Path({str(folder)!r}), shard_mb=1, workers=1,
    tokenizer=TokenizerConfig(folder=Path({str(whole.tokenizer.folder)!r}))))
"""
    runs = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    last_line = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], last_line
    assert sum("another process prepares" in words for words in last_line) <= 1
    assert contents(folder) == contents(whole.folder)


def test_a_source_with_a_weight_must_have_documents(tmp_path):
    for name, text in (("a", "words"), ("b", " ")):
        (tmp_path / f"{name}.txt").write_text(text)
    config = DataConfig(
        paths=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")),
        weights=(0.5, 0.5),
        folder=tmp_path / "out",
        tokenizer=TokenizerConfig(kind="bytes"),
        validation_fraction=0.0,
    )
    with pytest.raises(UserError, match=r"b\.txt has weight 0\.5 but no document is left of it"):
        prepare(config)


def test_a_changed_file_or_tokenizer_is_noticed(tmp_path):
    for name in ("a.txt", "evaluation.txt"):
        (tmp_path / name).write_text(f"some words that stand in {name}")
    train_tokenizer(TokenizerConfig(kind="bytes"), ["x"]).save(tmp_path / "tokenizer")
    config = DataConfig(
        paths=(str(tmp_path / "a.txt"),),
        folder=tmp_path / "out",
        tokenizer=TokenizerConfig(folder=tmp_path / "tokenizer"),
        clean=CleanConfig(decontaminate=(str(tmp_path / "evaluation.txt"),)),
        validation_fraction=0.0,
    )
    prints = [prepare(config).manifest.fingerprint]
    for change in ("a.txt", "evaluation.txt", "tokenizer"):
        if change == "tokenizer":
            train_tokenizer(TokenizerConfig(kind="characters"), ["abc"]).save(tmp_path / "tokenizer")
        else:
            (tmp_path / change).write_text(f"other words of another length in {change}")
        with pytest.raises(UserError, match="other texts or settings"):
            prepare(config)
        prints.append(prepare(replace(config, overwrite=True)).manifest.fingerprint)
    assert len(set(prints)) == 4


def test_evaluation_texts_of_the_hub(tmp_path, monkeypatch):
    known = "thirteen words of a question that nobody should have read before the examination day"
    monkeypatch.setattr("plume.data.sources.load_hub", lambda spec: [{"text": known}])
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in ("a text", f"once {known} again"))
    )
    clean, tokenizer = CleanConfig(decontaminate=("hub:some/set",)), TokenizerConfig(kind="bytes")
    config = DataConfig(paths=(str(tmp_path / "a.jsonl"),), folder=tmp_path / "out", clean=clean, tokenizer=tokenizer)
    report = prepare(replace(config, validation_fraction=0.0)).report
    assert (report["documents"], list(report["sources"][0]["dropped"])) == (
        1,
        ["shares 13 words with an evaluation text"],
    )


def test_another_tokenizer_is_refused_by_its_hash(whole):
    other = train_tokenizer(TokenizerConfig(kind="bytes"), ["x"])
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        open_shards(whole.folder, tokenizer_hash=other.hash)


def test_torn_and_missing_files_are_named(tmp_path, whole):
    folder = tmp_path / "out"
    prepare(replace(whole, folder=folder))
    shard = folder / "train-00001.tokens"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(
        UserError, match=rf"train-00001\.tokens holds {len(data) - 2} bytes, but data\.json says {len(data)}"
    ):
        open_shards(folder)
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00001\.tokens is missing"):
        open_shards(folder)
    (folder / "data.json").write_text("{")
    with pytest.raises(UserError, match=r"data\.json is corrupt: .*; prepare the data again"):
        open_shards(folder)
    with pytest.raises(UserError, match=r"holds no prepared data \(data\.json is missing\); did you mean 'out'"):
        open_shards(tmp_path / "outt")


def prepare_text(tmp_path, text, **options):
    path = tmp_path / "a.txt"
    path.write_text(text)
    given = {"tokenizer": TokenizerConfig(kind="characters")} | options
    return prepare(DataConfig(paths=(str(path),), folder=tmp_path / "out", **given))


def test_one_text_is_split_at_its_end(tmp_path):
    text = "".join(random.Random(0).choices("abc \n", k=9999))
    prepare_text(tmp_path, text, validation_fraction=0.1)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    train, validation = (open_shards(tmp_path / "out", split).streams[0] for split in ("train", "validation"))
    assert tokenizer.decode(train.read(0, len(train))) == text[: int(len(text) * 0.9)]
    assert tokenizer.decode(validation.read(0, len(validation)), skip_special=True) == text[int(len(text) * 0.9) :]


def test_tinyshakespeare_has_the_usual_split(tmp_path, shared):
    text = (shared / "data" / "tinyshakespeare" / "input.txt").read_text()
    prepare_text(tmp_path, text, validation_fraction=0.1)
    assert open_shards(tmp_path / "out").tokens == 1_003_854


def test_a_long_text_in_many_pieces_is_one_document(tmp_path):
    text = "\n".join(f"line {n} of a long text" for n in range(60_000))
    prepare_text(tmp_path, text, shard_mb=1, validation_fraction=0.0)
    shards = open_shards(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert len(shards.manifest.train) > 1 and shards.documents == 1
    assert tokenizer.decode(shards.streams[0].document(0), skip_special=True) == text
    assert int((shards.streams[0].read(0, shards.tokens) == tokenizer.end).sum()) == 1


def test_nothing_left_says_why_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n{"content": "y"}\n{broken\n')
    for tokenizer in (TokenizerConfig(kind="bytes"), TokenizerConfig(vocab_size=300)):
        with pytest.raises(
            UserError, match=r"(?s)no document is left.*2 x no text in the field 'text'.*'content'.*--text-field"
        ) as error:
            prepare(DataConfig(paths=(str(path),), folder=tmp_path / "out", tokenizer=tokenizer))
        assert "1 x not JSON" in str(error.value)
        assert not (tmp_path / "out").exists()
    prepare(
        DataConfig(
            paths=(str(path),), folder=tmp_path / "out", text_field="content", tokenizer=TokenizerConfig(kind="bytes")
        )
    )


def test_the_report_is_kept_and_shown(tmp_path, whole):
    report = json.loads((whole.folder / "report.json").read_text())
    manifest = open_shards(whole.folder).manifest
    assert report["tokens"] == sum(s.tokens for s in manifest.train)
    assert report["sources"][0]["epochs"] == 1.0
    (tmp_path / "bad.jsonl").write_text('{"text": "one text"}\nbroken\n')
    bad = DataConfig(
        paths=(str(tmp_path / "bad.jsonl"),), folder=tmp_path / "out", tokenizer=whole.tokenizer, token_budget=10**6
    )
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(show_report(prepare(bad).report))
    shown = console.export_text()
    assert "not JSON" in shown and "bad.jsonl byte 21" in shown


def test_duplicates_over_many_pieces(tmp_path, rows, tokenizer):
    path = tmp_path / "twice.jsonl"
    text = rows[0].read_text()
    path.write_text(text + text)
    config = DataConfig(
        paths=(str(path),),
        folder=tmp_path / "out",
        tokenizer=tokenizer,
        shard_mb=4,
        clean=CleanConfig(duplicates="exact"),
    )
    (source,) = prepare(config).report["sources"]
    assert source["kept"] == len(rows[1]) and source["dropped"]["duplicate"]["count"] == len(rows[1])


def test_the_command_line(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 50)
    command = [sys.executable, "-m", "plume", "prepare", str(tmp_path / "a.txt"), "--folder", str(tmp_path / "out")]
    run = subprocess.run([*command, "--tokenizer.kind", "bytes"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "training tokens" in " ".join(run.stdout.split()) and open_shards(tmp_path / "out").documents == 1
    run = subprocess.run(
        [*command, "--clean.duplicate", "near", "--validation-fraction", "2"], capture_output=True, text=True
    )
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert "did you mean clean.duplicates?" in run.stderr and "validation_fraction=2.0 must be" in run.stderr


REPORT_PEAK = f"""
import os, sys, threading, time
from pathlib import Path
sys.path.append({str(Path(__file__).parents[1])!r})

def report():
    from memory import kilobytes
    while True:  # workers that wait are killed at the end, so there is no last word
        part = Path(os.environ["PEAKS"], f".{{os.getpid()}}")
        part.write_text(str(kilobytes()))
        part.replace(part.with_name(str(os.getpid())))
        time.sleep(0.02)

threading.Thread(target=report, daemon=True).start()
"""


@pytest.mark.slow
def test_memory_stays_flat(tmp_path, tokenizer, monkeypatch):
    """The most that any process of a run has held, which each says at its end."""
    (tmp_path / "sitecustomize.py").write_text(REPORT_PEAK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    peaks = []
    for megabytes in (10, 60):
        path, folder = tmp_path / f"{megabytes}.jsonl", tmp_path / f"peaks{megabytes}"
        write_rows(path, megabytes)
        folder.mkdir()
        monkeypatch.setenv("PEAKS", str(folder))
        words = map(str, (path, tmp_path / f"out{megabytes}", tokenizer.folder, 4))
        subprocess.run([sys.executable, "-c", f"{PREPARE}prepare(config)", *words], check=True)
        assert len([*folder.glob("[0-9]*")]) >= 3
        peaks.append(max(int(file.read_text()) for file in folder.glob("[0-9]*")))
    assert 1024 * (peaks[1] - peaks[0]) < 25e6, peaks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_gives_the_same_shards(tmp_path, whole):
    ray = pytest.importorskip("ray", reason="needs the extra `cluster`")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        prepare(replace(whole, folder=tmp_path / "out", backend="ray"))
    finally:
        ray.shutdown()
    assert contents(tmp_path / "out") == contents(whole.folder)


def test_a_part_before_one_that_is_dropped_ends_its_document(tmp_path):
    """Long documents come in parts; when one of them is a copy of another, what stands before it is closed."""
    columns = {
        "continues": [0, 1, 1, 0, 1],
        "tokens": [1, 2, 3, 4, 5],
        "hashes": [7, 7, 7, 8, 8],
        "starts": [0, 1, 2, 3, 4],
    }
    kinds = {"continues": "|b1", "tokens": "<u2", "hashes": "<u8", "starts": "<i8"}
    for kind, values in columns.items():
        (tmp_path / f"00000.{kind}").write_bytes(np.array(values, kinds[kind]).tobytes())
    dropped = np.array([False, True, False, False, False])
    e = finalize.read_entries(tmp_path, finalize.Place(piece=0), dropped, "<u2")
    assert [(n + 1, e.begins[n], e.ends[n]) for n in np.flatnonzero(e.keep)] == [
        (1, True, True), (3, True, True), (4, True, False), (5, False, True)
    ]  # fmt: skip


def test_no_worker_is_left_behind(tmp_path, monkeypatch):
    """Whether the stages take the workers that were started early, or an error comes first."""
    monkeypatch.setattr("plume.data.pool.SMALL", 0)
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"A text {n} about ships.\n" * 200)
    before = set(psutil.Process().children(recursive=True))
    config = DataConfig(paths=(str(tmp_path / "*.txt"),), folder=tmp_path / "out", workers=2)
    prepare(replace(config, tokenizer=TokenizerConfig(kind="bytes")))
    with pytest.raises(UserError, match="tokenizer"):
        prepare(replace(config, folder=tmp_path / "two", tokenizer=TokenizerConfig(folder=tmp_path / "none")))
    assert set(psutil.Process().children(recursive=True)) <= before


def prepared_in(folder: Path, tokenizer: TokenizerConfig, text: Path, **more):
    return prepare(DataConfig(paths=(str(text),), folder=folder, tokenizer=tokenizer, **more))


def test_files_of_others_in_the_folder_stay(tmp_path, tokenizer):
    text = tmp_path / "wiki.train.tokens"  # as WikiText names its texts
    text.write_text(TEXT * 40)
    (tmp_path / ".trash").mkdir()
    (tmp_path / ".trash" / "note.md").write_text("mine")
    prepared_in(tmp_path, tokenizer, text)
    text.write_text(TEXT * 50)
    prepared_in(tmp_path, tokenizer, text, overwrite=True)
    assert text.read_text() == TEXT * 50 and (tmp_path / ".trash" / "note.md").read_text() == "mine"
    assert open_shards(tmp_path).tokens > 0 and not [*tmp_path.glob(".trash.work*")]


def test_a_tokenizer_folder_of_others_is_not_replaced(tmp_path, tokenizer):
    text, other = tmp_path / "a.txt", tmp_path / "tokenizer"
    text.write_text(TEXT * 40)
    other.mkdir()
    (other / "code.py").write_text("mine")
    with pytest.raises(UserError, match=r"tokenizer was there before .* rename it and run the same command again"):
        prepared_in(tmp_path, tokenizer, text)
    assert [file.name for file in other.iterdir()] == ["code.py"]
    other.rename(tmp_path / "code")
    prepared_in(tmp_path, tokenizer, text)
    assert load_tokenizer(tmp_path).hash == load_tokenizer(tokenizer.folder).hash


def test_the_given_tokenizer_may_be_in_the_folder(tmp_path, tokenizer):
    load_tokenizer(tokenizer.folder).save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "notes.md").write_text("mine")
    (tmp_path / "a.txt").write_text(TEXT * 40)
    prepared_in(tmp_path, TokenizerConfig(folder=tmp_path / "tokenizer"), tmp_path / "a.txt")
    assert (tmp_path / "tokenizer" / "notes.md").read_text() == "mine" and open_shards(tmp_path).tokens > 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_not_utf8(tmp_path, tokenizer):
    texts = tmp_path / "texts"
    texts.mkdir()
    good, empty = (Path(os.fsdecode(os.fsencode(texts) + name)) for name in (b"/caf\xe9.txt", b"/leer\xe9.txt"))
    good.write_text(TEXT * 40)
    empty.write_text(" ")
    found = prepared_in(tmp_path / "out", tokenizer, texts)
    assert found.report["sources"][0]["dropped"]["empty"]["first"] == str(empty)
    alone = prepared_in(tmp_path / "alone", tokenizer, good)
    assert open_shards(tmp_path / "alone").manifest.sources == (str(good),) and alone.report["tokens"] > 0
