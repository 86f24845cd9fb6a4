"""The Chinese twins of the pages that are made, docs/benchmarks.md and docs/results.md: phrase by phrase."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

FOUND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PHRASES: dict[str, str] = FOUND["benchmarks"] | FOUND["results"]
NAMES = set(FOUND["names"].split())
OUTSIDE = r"(?![^(]*\))"  # what is in parentheses is not cut
MARKS = {
    r"\.$": "。",
    r"\?$": "？",
    r"\. (?=[A-Z])": "。",
    r"\? ": "？",
    f"; {OUTSIDE}": "；",
    f": {OUTSIDE}": "：",
    f", {OUTSIDE}": "，",
}


def rules(english: list[str]) -> list[tuple[re.Pattern[str], str]]:
    """Those with the most words first; {} stands for any text."""
    ordered = sorted(english, key=lambda phrase: -len(phrase.replace("{}", "")))
    some = r"((?:(?!\. [A-Z]).)+?)"  # of one sentence
    return [(re.compile(some.join(map(re.escape, phrase.split("{}")))), PHRASES[phrase]) for phrase in ordered]


def has_marks(text: str) -> bool:
    return " (" in text or any(re.search(mark, text) for mark in MARKS)


WHOLE = rules([phrase for phrase in PHRASES if has_marks(phrase)])
PARTS = rules([phrase for phrase in PHRASES if not has_marks(phrase)])


def chinese_page(page: str) -> str:
    """Tables, headings and lists line by line, paragraphs as a whole."""
    blocks = (
        "\n".join(map(chinese_line, block.split("\n")))
        if block.startswith(("#", "- ", "|", "`"))
        else chinese(" ".join(block.split()))
        for block in page.rstrip("\n").split("\n\n")
    )
    return "\n\n".join(blocks) + "\n"


def chinese_line(line: str) -> str:
    if line in PHRASES:
        return PHRASES[line]
    if line.startswith("|"):
        return re.sub(r"[^| ](?:[^|]*[^| ])?", lambda found: chinese(found[0]), line)
    return re.sub(r"(?<!\S)(?![#-]+ )\S.*?(?= *$)", lambda found: chinese(found[0]), line, count=1)


def chinese(text: str) -> str:
    """By a phrase that is all of it; else what stands between its marks; else as it is."""
    if re.fullmatch(r"`[^`]*`", text) or not text:
        return text
    if (said := by_rule(text, WHOLE)) is not None:
        return said
    for mark, sign in MARKS.items():
        if found := re.search(mark, text):
            return chinese(text[: found.start()]) + sign + chinese(text[found.end() :])
    if found := re.fullmatch(r"(.+?) \((.+)\)", text):
        return f"{chinese(found[1])}（{chinese(found[2])}）"
    return text if (said := by_rule(text, PARTS)) is None else said


def by_rule(text: str, ordered: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, said in ordered:
        if found := pattern.fullmatch(text):
            return said.format(*map(chinese, found.groups()))
    return None


def left_in_english(page: str) -> set[str]:
    """Words of a Chinese page that no phrase translates and that are no names."""
    known = r"`[^`\n]*`|\[[\w-]*\]\(.*?\)|\]\(.*?\)|《.*?》|--\w+|\w+=\w+|^## [\w.-]+"
    text = re.sub(known, " ", page, flags=re.MULTILINE)
    words = re.findall(r"(?<![\w.+-])[A-Za-z][\w.+-]*", text, re.ASCII)
    return {word for word in words if re.search("[a-z]{2}", word)} - NAMES
