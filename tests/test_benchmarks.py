"""Every benchmark runs, and the pages say what was measured and nothing else."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are not part of the package

from benchmarks.__main__ import HOURS, JOBS, RESULTS, SIZED, chosen, merged, read  # noqa: E402
from benchmarks.chinese import PHRASES, chinese, chinese_page, left_in_english  # noqa: E402
from benchmarks.pages import MARKS, README, TABLES, benchmarks_page, docs_pages, readme_table  # noqa: E402
from benchmarks.results import Row  # noqa: E402
from benchmarks.storm import memory_slope  # noqa: E402

ABOUT = {"date": "2026-01-02", "command": "c", "machine": "m", "software": "s", "load": 0.1}
ELSEWHERE = {
    "demo",
    "nanogpt",
    "transfer",
    "scores.trainer",
    "scores.search",
    "scores.pairs",
    "serve.slots",
    *(f"budgets.{name}" for name in SIZED),
}  # `plume demo` has tests of its own; the others need real data, or nanoGPT's checkout


def stored(job, key, figure, **more):
    return {"job": job, **dataclasses.asdict(Row(key=key, what=key, figure=figure, at_least=2)), **ABOUT, **more}


def test_a_bar_is_met_or_missed():
    assert Row(key="a", what="a", figure=2.0, at_least=2).met is True
    assert Row(key="a", what="a", figure=0.7, at_most=0.6).met is False
    assert Row(key="a", what="a", figure=1.0).met is None


def test_only_rows_that_were_measured_again_change():
    old = [stored("encode", "short", 3.0), stored("encode", "long", 4.0), stored("decode", "batch 1", 1.0)]
    rows = merged(old, [stored("encode", "long", 5.0, date="2026-03-04")])
    assert [(row["key"], row["figure"], row["date"]) for row in rows] == [
        ("short", 3.0, "2026-01-02"),
        ("long", 5.0, "2026-03-04"),
        ("batch 1", 1.0, "2026-01-02"),
    ]


def test_rows_with_avx512_and_without_stand_side_by_side_and_the_table_shows_both():
    job, key = "decode", "batch 1, int8, llama.cpp q8_0"
    with_it, without = {"machine": "2 cores (avx2, avx512f)"}, {"machine": "2 cores (avx2)"}
    old = [stored(job, key, 3.0, **without), stored("encode", "short", 5.0, **without)]
    rows = merged(old, [stored(job, key, 4.0, **with_it), stored("encode", "short", 6.0, **with_it)])
    assert [(row["key"], row["figure"]) for row in rows] == [("short", 6.0), (key, 4.0), (key, 3.0)]
    assert merged(rows, [stored(job, key, 3.5, **without)])[2]["figure"] == 3.5
    page = benchmarks_page(rows)
    assert f"| {key} (AVX-512) | 4.00 x" in page and f"| {key} (AVX2 only) | 3.00 x" in page and "short (" not in page
    table = readme_table(rows, "README.md")
    assert "4.0 times as fast" in table and "3.0 times as fast" not in table
    assert "| 4.0 times as fast (AVX2 alone: 3.0) |" in table
    assert "| 4.0 倍（只有 AVX2 时 3.0） |" in readme_table(rows, "README.zh.md")


def test_jobs_are_chosen_by_name_or_script():
    assert chosen(["train", "serve.page"]) == ["train.characters", "train.gpt2", "serve.page"]
    assert chosen([]) == [job for job in JOBS if job not in HOURS] and chosen([HOURS[0]]) == [HOURS[0]]
    with pytest.raises(SystemExit, match="no benchmark speed"):
        chosen(["speed"])


def test_a_missed_bar_is_shown_as_one():
    page = benchmarks_page([stored("encode", "short", 1.5), stored("encode", "long", 2.5)])
    assert "| short | 1.50 x | at least 2 | **missed** |" in page
    assert "| long | 2.50 x | at least 2 | met |" in page


def test_the_table_has_measured_lines_only():
    line = README[0]
    job, key = line.row.split("/")
    table = readme_table([stored(job, key, 0.25)], "README.md")
    assert f"| {line.peer} | {line.english} | 4.0 times as fast |" in table
    assert table.count("times as fast") == 1 and readme_table([], "README.md") == ""


def test_the_table_counts_the_targets_that_were_missed_and_the_page_lists_them_first():
    job, key = README[0].row.split("/")
    rows = [stored(job, key, 2.5), stored("encode", "short", 1.5)]
    assert "Of 2 targets 1 are missed" in readme_table(rows, "README.md")
    assert "2 个目标中有 1 个未达到" in readme_table(rows, "README.zh.md")
    first, *_ = benchmarks_page(rows).split("## Missed\n\n")[1].split("\n\n")
    assert first == "- short: 1.50 x, at least 2"


def test_the_pages_say_what_was_measured():
    rows = read(RESULTS)
    for name in TABLES:
        found = MARKS.search((ROOT / name).read_text(encoding="utf-8"))
        assert found is not None and found[0] == found[1] + readme_table(rows, name) + found[2], (
            f"{name} differs from the results: python -m benchmarks --readme"
        )
    for name, text in docs_pages(rows, ROOT / "docs").items() if rows else ():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"{name}: python -m benchmarks --readme"


@pytest.mark.parametrize("name", ["benchmarks.zh.md", "results.zh.md"])
def test_the_chinese_pages_have_the_figures_and_nothing_in_english(name):
    """A name or note of a new kind needs its phrase."""
    page, english = ((ROOT / "docs" / some).read_text(encoding="utf-8") for some in (name, name.replace(".zh", "")))
    assert left_in_english(page) == set(), "benchmarks/chinese.toml lacks phrases, or names, with these words"
    number = re.compile(r"\d+(?:[.,]\d+)*")
    assert sorted(number.findall(page)) == sorted(number.findall(english))


def test_a_row_is_translated_by_its_phrases_and_keeps_names_and_figures():
    page = chinese_page(benchmarks_page([stored("encode", "short texts: tokens/s against llama.cpp", 1.5)]))
    assert "| 短文本：词元/秒，对比 llama.cpp | 1.50 倍 | 至少 2 | **未达到** |" in page
    assert "`c`（2026-01-02，机器 1，运行前负载 0.1）" in page
    assert chinese("a thing without a phrase, 3.5 nats") == "a thing without a phrase，3.5 奈特"
    assert left_in_english("a thing without a phrase，3.5 奈特，`code`，float32") == {"thing", "without", "phrase"}


def test_every_benchmark_has_a_chinese_title():
    assert [job for job in JOBS if f"## {job}" not in PHRASES] == []


def test_commands_can_be_given_on_any_machine():
    absolute = [row["command"] for row in read(RESULTS) if re.search(r"(^|[\s=])[/~]|[A-Z]:\\\\", row["command"])]
    assert absolute == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("job", [job for job in JOBS if job not in ELSEWHERE])
def test_a_benchmark_runs(job, tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", job, "--small", "--results", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if re.search(r"^skipped: ", done.stdout, re.MULTILINE):
        pytest.skip("needs the real data folder")
    assert {row["job"] for row in json.loads(file.read_text(encoding="utf-8"))} == {job}


def correlated_readings(dice, growth=0.0):
    """An hour of memory that does not grow but wanders, each reading close to the one before."""
    seconds, megabytes = np.arange(400) * 9.0, np.zeros(600)
    for i, step in enumerate(dice.normal(size=599)):
        megabytes[i + 1] = 0.9 * megabytes[i] + step
    bytes_ = (400 + megabytes[200:] + growth * seconds / 3600) * 2**20
    return list(zip(seconds.tolist(), bytes_.tolist(), strict=True))


def test_the_error_of_a_slope_counts_correlated_readings():
    """In nine of ten flat series the slope lies within two errors; by plain least squares in one of three."""
    dice, near, near_by_least_squares = np.random.default_rng(0), 0, 0
    for _ in range(200):
        readings = correlated_readings(dice)
        slope, error = memory_slope(readings)
        near += abs(slope) < 2 * error
        x, y = np.array(readings[200:]).T
        fitted, covariance = np.polyfit(x, y, 1, cov=True)
        near_by_least_squares += abs(fitted[0]) < 2 * np.sqrt(covariance[0, 0])
    assert near >= 175 and near_by_least_squares < 120
    slope, error = memory_slope(correlated_readings(dice, growth=30.0))
    assert abs(slope - 30) < 3 * error and slope > 2 * error
