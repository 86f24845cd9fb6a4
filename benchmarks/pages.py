"""The pages made of the rows: docs/benchmarks.md, and the table of README.md and README.zh.md between two marks.
The Chinese twins of docs/benchmarks.md and docs/results.md too."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.chinese import chinese_page
from benchmarks.machine import has_avx512
from benchmarks.results import Row

HEAD = """# Benchmarks

Made by `make bench`, or in part by `python -m benchmarks NAME`. A figure against a peer is a ratio from one run in
which both took turns on the same machine; a figure without a bar is only reported. float24 is a
[three-byte form](generate.md) of the weights, so its rows compare three bytes with a peer's four. What was tried on the
way, failures too, is in
[experiments](experiments.md).
"""


@dataclass(frozen=True)
class Line:
    """A line of the README's table: which row it shows, and how that is called."""

    row: str  # job/key
    peer: str
    english: str
    chinese: str
    inverse: bool = False  # the row says how much of the peer's time, the table how many times as fast

    def ratio(self, row: dict[str, Any]) -> float:
        return float(1 / row["figure"] if self.inverse else row["figure"])


README = (
    Line(
        "train.characters/time",
        "a plain loop",
        "training on Shakespeare's characters to a loss of 1.88, nanoGPT's recipe for a CPU",
        "莎士比亚字符模型训练到损失 1.88（对方为 nanoGPT 的 CPU 配方写成的朴素循环）",
        inverse=True,
    ),
    Line(
        "decode/batch 1, float24, transformers float32",
        "transformers",
        "generation with the 124M GPT-2, float24 against float32, one sequence",
        "124M GPT-2 生成，float24 对 float32，单条序列",
    ),
    Line(
        "decode/batch 8, float24, transformers float32",
        "transformers",
        "the same, eight sequences",
        "同上，八条序列",
    ),
    Line(
        "finetune/speed",
        "transformers",
        "fine-tuning a small BERT, against its Trainer",
        "微调小型 BERT，对比其 Trainer",
    ),
    Line(
        "decode/batch 1, float24, llama.cpp f32",
        "llama.cpp",
        "generation, float24 against f32, one sequence, against its bare loop",
        "生成，float24 对 f32，单条序列，对比其裸循环",
    ),
    Line(
        "decode/batch 1, int8, llama.cpp q8_0",
        "llama.cpp",
        "generation, int8 against q8_0, one sequence",
        "生成，int8 对 q8_0，单条序列",
    ),
    Line(
        "decode/batch 8, int8, llama.cpp q8_0",
        "llama.cpp",
        "the same, eight sequences",
        "同上，八条序列",
    ),
    Line(
        "decode/batch 1, float32, llama.cpp f32",
        "llama.cpp",
        "generation, float32 against f32, one sequence",
        "生成，float32 对 f32，单条序列",
    ),
    Line(
        "decode/batch 1, int4, llama.cpp iq4_nl",
        "llama.cpp",
        "generation, int4 against iq4_nl, one sequence",
        "生成，int4 对 iq4_nl，单条序列",
    ),
    Line(
        "decode/batch 1, int8, llama.cpp q4_0",
        "llama.cpp",
        "generation, int8 against q4_0 (about half the bytes), one sequence",
        "生成，int8 对 q4_0（字节数约为一半），单条序列",
    ),
    Line(
        "serve.slots/slots, 16",
        "llama.cpp's server",
        "16 streaming clients, as many slots, int8 against q8_0",
        "16 个流式客户端，同样多的槽位，int8 对 q8_0",
    ),
    Line(
        "serve.slots/slots, 64",
        "llama.cpp's server",
        "the same, 64 clients",
        "同上，64 个客户端",
    ),
    Line(
        "encoders/12x768, 16 x 128 tokens, int8, ctranslate2 int8",
        "CTranslate2",
        "BERT base, 16 texts of 128 tokens, int8",
        "BERT base，16 条 128 词元的文本，int8",
    ),
    Line(
        "encoders/12x768, 16 x 128 tokens, float32, onnxruntime float32",
        "onnxruntime",
        "the same, float32",
        "同上，float32",
    ),
    Line(
        "evaluate/lambada, batch 8",
        "lm-evaluation-harness",
        "LAMBADA, its batch 8",
        "LAMBADA，对方批大小 8",
    ),
    Line(
        "evaluate/choices, batch 8",
        "lm-evaluation-harness",
        "multiple choice, four candidates, its batch 8",
        "四选一，对方批大小 8",
    ),
    Line(
        "evaluate/wikitext-2, batch 1",
        "lm-evaluation-harness",
        "rolling perplexity",
        "滚动困惑度",
    ),
)
TABLES = {  # page -> head of its table, the sentence below it, a cell, its end without AVX-512, what was missed
    "README.md": (
        "## Compared with other tools\n\n| compared with | task | Plume is |",
        "Measured {dates} on {cores} cores, both sides interleaved in one run: [every figure with target and command]"
        "(docs/benchmarks.md). Rows with two figures are of a machine with AVX-512 and of one without. "
        "float24 stores a weight in [three bytes](docs/generate.md).",
        "{ratio:.1f} times as fast",
        " (AVX2 alone: {ratio:.1f})",
        " Of {targets} targets {missed} are missed; [they are listed first](docs/benchmarks.md#missed).",
    ),
    "README.zh.md": (
        "## 与其他工具相比\n\n| 对比 | 任务 | Plume 的速度 |",
        "{dates} 在 {cores} 核机器上测得，双方在同一次运行中轮流进行：[全部数字、目标与命令](docs/benchmarks.zh.md)。"
        "有两个数字的行分别来自有 AVX-512 和没有 AVX-512 的机器。"
        "float24 把每个权重存为[三个字节](docs/generate.zh.md)。",
        "{ratio:.1f} 倍",
        "（只有 AVX2 时 {ratio:.1f}）",
        "{targets} 个目标中有 {missed} 个未达到，[见列表](docs/benchmarks.zh.md#未达到)。",
    ),
}
MARKS = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)


def write_pages(rows: list[dict[str, Any]], root: Path) -> None:
    for name, text in docs_pages(rows, root / "docs").items():
        (root / "docs" / name).write_text(text, encoding="utf-8")
    for name in TABLES:
        page = root / name
        if page.exists():
            table = readme_table(rows, name)
            text = MARKS.sub(lambda found, table=table: found[1] + table + found[2], page.read_text(encoding="utf-8"))
            page.write_text(text, encoding="utf-8")


def docs_pages(rows: list[dict[str, Any]], docs: Path) -> dict[str, str]:
    """docs/results.md is what `plume reproduce` writes, under an introduction by hand."""
    benchmarks, results = benchmarks_page(rows), (docs / "results.md").read_text(encoding="utf-8")
    chinese = {"benchmarks.zh.md": chinese_page(benchmarks), "results.zh.md": chinese_page(results)}
    return {"benchmarks.md": benchmarks, **chinese}


def benchmarks_page(rows: list[dict[str, Any]]) -> str:
    machines = list(dict.fromkeys((row["machine"], row["software"]) for row in rows))
    parts = [HEAD]
    for number, (hardware, software) in enumerate(machines, start=1):
        parts.append(f"Machine {number}: {hardware}; {software}.\n")
    double = rows_of_two_machines(rows)
    missed = [f"- {named(row, double)}: {as_row(row).shown}, {as_row(row).bar}" for row in rows if not_met(row)]
    if missed:
        parts.append("## Missed\n\n" + "\n".join(missed) + "\n")
    for job, group in groupby(rows, key=lambda row: row["job"]):
        lines = ["| what | figure | bar | | details |", "|---|---|---|---|---|"]
        asked: dict[str, None] = {}
        for stored in group:
            row = as_row(stored)
            verdict = {None: "", True: "met", False: "**missed**"}[row.met]
            lines.append(f"| {named(stored, double)} | {row.shown} | {row.bar} | {verdict} | {row.detail} |")
            number = machines.index((stored["machine"], stored["software"])) + 1
            asked[f"`{stored['command']}` ({stored['date']}, machine {number}, load before it {stored['load']})"] = None
        parts.append(f"## {job}\n\n" + "  \n".join(asked) + "\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def rows_of_two_machines(rows: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """The job and key of rows that were measured both with AVX-512 and without."""
    counts = Counter((row["job"], row["key"]) for row in rows)
    return {name for name, count in counts.items() if count > 1}


def named(row: dict[str, Any], double: set[tuple[str, str]]) -> str:
    """What a row measures, and with which instructions where there are both."""
    if (row["job"], row["key"]) not in double:
        return str(row["what"])
    return f"{row['what']} ({'AVX-512' if has_avx512(row['machine']) else 'AVX2 only'})"


def not_met(row: dict[str, Any]) -> bool:
    return as_row(row).met is False


PEERS = {"a plain loop": "朴素循环", "llama.cpp's server": "llama.cpp 服务器"}  # those that are no names


def readme_table(rows: list[dict[str, Any]], page: str) -> str:
    """Only what was measured, and how many targets were missed."""
    head, sentence, cell, without, shortfall = TABLES[page]
    stored = {f"{row['job']}/{row['key']}": row for row in reversed(rows)}  # AVX-512 comes first
    other = {f"{row['job']}/{row['key']}": row for row in rows}  # and the rows without it last
    lines, used = [], []
    for line in README:
        if line.row in stored:
            row = stored[line.row]
            figure = cell.format(ratio=line.ratio(row))
            if other[line.row] is not row:
                figure += without.format(ratio=line.ratio(other[line.row]))
            english = page == "README.md"
            text, peer = (line.english, line.peer) if english else (line.chinese, PEERS.get(line.peer, line.peer))
            lines.append(f"| {peer} | {text} | {figure} |")
            used.append(row)
    if not lines:
        return ""
    dates = sorted({row["date"] for row in used})
    cores = "/".join(sorted({row["machine"].split()[0] for row in used}))
    ending = sentence.format(dates=" – ".join(dict.fromkeys((dates[0], dates[-1]))), cores=cores)
    met = [row.met for row in map(as_row, rows) if row.met is not None]
    missed = met.count(False)
    ending += shortfall.format(targets=len(met), missed=missed) if missed else ""
    return "\n".join([head, "|---|---|---|", *lines]) + f"\n\n{ending}\n"


def as_row(stored: dict[str, Any]) -> Row:
    return Row(**{field.name: stored[field.name] for field in fields(Row)})
