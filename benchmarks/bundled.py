"""The bundled model plume-en: `python -m benchmarks.bundled` measures it, `... bundled train` makes it again.

Making it reads ../shared/data/english (100 novels in the public domain, and sentences of Tatoeba under CC BY 2.0 FR).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

import plume
from benchmarks.results import ROOT, Row, real, report, skip
from plume.config import PretrainConfig, build, read_recipe
from plume.util.hub import BUNDLED

NAME = "plume-en"
NOVELS_IN_TOKENIZER = 4_000_000  # characters: beside the sentences, which are nearer to everyday English
WORD_COUNT = 60  # times that each word below stands in the tokenizer's text, so that it becomes one token
WORDS = """robot robots computer phone telephone internet car cars bus plane airport television radio movie music video
game email website camera science scientist machine engine energy planet space laws law human beings conflict orders
obey model language token attention teacher student school university job office company market price tax First Law
Anna Tom Mary John Peter Alice Bob Jane Paul Lisa Emma James Sarah David Kate Mark Lucy Henry Susan George Laura Robert
Julia Daniel Maria Frank Helen Linda Karen Nancy cat dog horse bird fish tree river mountain city village London Paris
France England America China Germany Boston Japan Australia"""
WOMEN = ("Anna", "Mary", "Alice", "Jane", "Lisa", "Emma", "Sarah", "Kate", "Lucy", "Susan")
MEN = ("Tom", "John", "Peter", "Bob", "Paul", "James", "David", "Mark", "Henry", "George")
TATOEBA = {  # its two names, which stand in a quarter of its sentences, and those that take their place
    "Tom": (*MEN, "Robert", "Daniel", "Frank"),
    "Mary": (*WOMEN, "Laura", "Julia", "Maria", "Helen", "Linda", "Karen", "Nancy"),
}
PRONOUN = re.compile(r"\b(he|she|him|his|hers?|himself|herself)\b", re.IGNORECASE)
TO_SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
TO_HE = {"she": "he", "herself": "himself"}
WRAPPED = 75  # mean length of the lines of a novel below which its line ends are those of a page
NAME_COPIES = 16  # of a sentence with both names and a pronoun, each with other names
SENTENCES = (  # the pronoun at the end can only be the first name, or only the second
    ("Yesterday {she} gave {he} her book because she", "she"),
    ("Then {he} told {she} about his new house because he", "he"),
    ("At first {she} did not see {he} in the street because he", "he"),
    ("At last {he} wrote a letter to {she} because she", "she"),
    ("Last night {she} was waiting for {he} at the station when she", "she"),
)
SHARE = 0.4  # of a head's attention


def two_names() -> Iterator[tuple[str, str]]:
    """Fifty sentences that end with a pronoun, and the name that it stands for."""
    for number in range(50):
        names = {"she": WOMEN[number % 10], "he": MEN[(number * 3 + number // 10) % 10]}
        sentence, pronoun = SENTENCES[number // 10]
        yield sentence.format(**names), names[pronoun]


def sentences_solved(lm: plume.LM) -> tuple[int, tuple[int, int], int]:
    """How many the best single head solves, which head that is, and how many some head or other solves."""
    solved: dict[tuple[int, int], int] = {}
    any_head = 0
    for text, name in two_names():
        shown = lm.explain(text)
        pieces = [lm.tokenizer.decode([token]).strip() for token in lm.tokenizer.encode(text)]
        place = pieces.index(name)
        heads = [
            (layer, head)
            for layer in range(lm.config.layers)
            for head, weights in enumerate(shown.attention(layer))
            if weights[-1][place] > SHARE
        ]
        any_head += bool(heads)
        for head in heads:
            solved[head] = solved.get(head, 0) + 1
    best = max(solved, key=lambda head: solved[head], default=(0, 0))
    return solved.get(best, 0), best, any_head


# ---- making it -----------------------------------------------------------------------------------------------------


def read(file: Path) -> str:
    with file.open("rb") as stream:
        return zstandard.ZstdDecompressor().stream_reader(stream).read().decode()


def novels(english: Path) -> list[str]:
    return [joined_lines(json.loads(row)["text"]) for row in read(english / "novels.jsonl.zst").splitlines()]


def tokenizer_text(english: Path) -> str:
    """All sentences, a random part of the novels, and words of today that the novels lack."""
    paragraphs = [p for novel in novels(english) for p in novel.split("\n")]
    random.Random(0).shuffle(paragraphs)
    part, size = list[str](), 0
    while size <= NOVELS_IN_TOKENIZER:
        part.append(paragraphs.pop(0))
        size += len(part[-1])
    words = f"The {' '.join(WORDS.split())}"
    return "\n".join([read(english / "sentences.txt.zst").rstrip("\n"), *part, *[words] * WORD_COUNT]) + "\n"


def joined_lines(text: str) -> str:
    """A paragraph a line: many of the novels have line ends at a column of some sixty characters."""
    lines = [len(line) for line in text.split("\n") if line]
    if sum(lines) > WRAPPED * len(lines):
        return re.sub(r"\n{2,}", "\n", text)
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n".join(re.sub(r"\s*\n\s*", " ", re.sub(r"(\w-)\n\s*(?=\w)", r"\1", p)).strip() for p in paragraphs)


def swapped(sentence: str) -> str | None:
    """With the other gender throughout; None where "her" leaves open whether it is "his" or "him"."""
    swaps = TO_SHE if not re.search(r"\b(she|hers?|herself)\b", sentence, re.IGNORECASE) else TO_HE
    if swaps is TO_HE and re.search(r"\b(he|him|his|himself|hers?)\b", sentence, re.IGNORECASE):
        return None
    sentence = re.sub(
        rf"\b({'|'.join(swaps)})\b",
        lambda found: swaps[found[0].lower()].capitalize() if found[0][0].isupper() else swaps[found[0].lower()],
        sentence,
        flags=re.IGNORECASE,
    )
    return re.sub(r"\b(Tom|Mary)\b", lambda found: "Mary" if found[0] == "Tom" else "Tom", sentence)


def renamed(sentence: str, random: random.Random) -> str:
    """The sentence with other names than Tatoeba's two, of the same gender and not in it yet."""
    for name, others in TATOEBA.items():
        free = [other for other in others if not re.search(rf"\b{other}\b", sentence) or other == name]
        sentence = re.sub(rf"\b{name}\b", random.choice(free), sentence)
    return sentence


def sentence_files(english: Path, place: Path) -> None:
    """`sentences.txt` with varied names, and `names.txt`: who is meant by "she" where a man and a woman are named."""
    draw = random.Random(0)
    sentences, names = list[str](), list[str]()
    for sentence in read(english / "sentences.txt.zst").splitlines():
        if all(re.search(rf"\b{name}\b", sentence) for name in TATOEBA) and PRONOUN.search(sentence):
            other = swapped(sentence)
            pair = (sentence, sentence if other is None else other)  # so that the one who acts is as often a woman
            names += [renamed(pair[copy % 2], draw) for copy in range(NAME_COPIES)]
        else:
            sentences.append(renamed(sentence, draw))
    for file, lines in (("sentences.txt", sentences), ("names.txt", names)):
        (place / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def english_files(english: Path, place: Path) -> tuple[list[Path], list[float]]:
    """The texts of the recipe `plume-en` below a folder, made once, and their weights."""
    data = build(PretrainConfig, read_recipe(ROOT / "recipes" / "plume-en.toml")).data
    files = [place / path for path in data.paths]
    if not all(file.is_file() for file in files):
        files[0].parent.mkdir(parents=True, exist_ok=True)
        paragraphs = "".join(line + "\n" for novel in novels(english) for line in novel.split("\n") if line.strip())
        files[0].write_text(paragraphs, encoding="utf-8")  # a document each: some of every novel are held out
        sentence_files(english, files[0].parent)
    return files, list(data.weights)


def tokenizer_of(english: Path, place: Path) -> dict[str, Any]:
    """The tokenizer of the recipe `plume-en`, made once, as a section of a recipe."""
    wanted = build(PretrainConfig, read_recipe(ROOT / "recipes" / "plume-en.toml")).data.tokenizer
    assert wanted.folder is not None
    folder = place / wanted.folder
    if not (folder / "tokenizer.json").is_file():
        (place / "sample.txt").write_text(tokenizer_text(english), encoding="utf-8")
        words = f"tokenizer train sample.txt --out {wanted.folder} --tokenizer.vocab_size {wanted.vocab_size}"
        run(place, words)
    return {"kind": wanted.kind, "folder": str(folder), "vocab_size": wanted.vocab_size}


def make(english: Path, place: Path) -> None:
    """Tokenizer, pretraining by the recipe `plume-en`, and the folder in half precision."""
    place.mkdir(parents=True, exist_ok=True)
    english_files(english, place)
    tokenizer_of(english, place)
    run(place, "pretrain plume-en")
    run(place, "import runs/plume-en --out plume-en --precision float16")


def run(place: Path, command: str) -> None:
    subprocess.run([sys.executable, "-m", "plume", *command.split()], cwd=place, check=True)


# ---- measuring it --------------------------------------------------------------------------------------------------


def first_token_seconds() -> float:
    """From the start of the command to its first word, with weights that were packed before."""
    command = [sys.executable, "-m", "plume", "generate", NAME, "Once", "--max-new-tokens", "1", "--seed", "1"]
    times = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "train"), default="measure")
    parser.add_argument("--place", type=Path, default=ROOT / "runs" / NAME, help="folder to train in")
    given = parser.parse_args()
    if given.what == "train":
        english = real("data", "english")
        make(english, given.place) if english is not None else skip("needs ../shared/data/english")
        return
    lm = plume.load(NAME)
    solved, (layer, head), any_head = sentences_solved(lm)
    size = sum(file.stat().st_size for file in (BUNDLED / NAME).iterdir()) / 1e6
    report(
        Row(key="size", what="plume-en: its folder", figure=size, unit="MB", digits=1, at_most=24),
        Row(
            key="names",
            what="plume-en: of 50 sentences with two names, those where some head gives the right one over 40 %",
            figure=any_head,
            unit="",
            digits=0,
            at_least=35,
            detail=f"{solved} by one head alone (layer {layer}, head {head})",
        ),
        Row(
            key="start",
            what="plume-en: from `plume generate` to its first token",
            figure=first_token_seconds(),
            unit="s",
            at_most=2,
        ),
    )


if __name__ == "__main__":
    main()
