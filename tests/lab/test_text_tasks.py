"""Tasks made from text: the right answer gives the text again, the wrong one does not."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from plume.config import UserError
from plume.lab.text_tasks import MAKERS, sentences, write_patterns, write_tasks

WORDS = ["river", "stone", "light", "paper", "green", "house", "where", "small", "night", "seven"]


@pytest.fixture
def documents():
    rng = np.random.default_rng(0)
    return [" ".join(" ".join(rng.choice(WORDS, 7)) + "." for _ in range(12)) for _ in range(30)]


@pytest.mark.parametrize("name", ["missing-word", "swapped-words", "repeated-word"])
def test_the_right_choice_is_what_stood_there(name, documents):
    passages = [sentences(document) for document in documents]
    known = {s for passage in passages for s in passage} | {
        f"{a} {b}" for passage in passages for a, b in pairwise(passage)
    }
    rows = MAKERS[name](passages, 60, np.random.default_rng(1))
    assert len(rows) > 20
    for row in rows:
        whole = [f"{row['context']} {choice}" for choice in row["choices"]]
        assert whole[row["label"]] in known
        if name == "swapped-words":
            assert Counter(whole[0].split()) == Counter(whole[1].split()) and whole[0] != whole[1]
        if name == "repeated-word":
            assert all(choice.split()[0].strip(".") in row["context"] for choice in row["choices"])
    assert 0.2 < np.mean([row["label"] == 0 for row in rows]) < 0.8 or name == "missing-word"


def test_text_in_which_a_task_cannot_be_made_is_refused(tmp_path):
    other = [" ".join(f"{a}{b}a bc de fg hi." for b in "abcdefgh") for a in "klmnopqr"]
    with pytest.raises(UserError, match="no row of the task repeated-word"):
        write_tasks(other, ["repeated-word"], tmp_path, 20, 0)


def test_patterns_of_letters_and_numbers(tmp_path):
    """Against rules that are written out here."""
    write_patterns(tmp_path, 200, 15, 0)
    rules = {
        "copy": lambda w: w,
        "reverse": lambda w: "".join(reversed(w)),
        "capitals": lambda w: "".join(chr(ord(c) - 32) for c in w),
        "successor": lambda w: "".join("bcdefghijk"["abcdefghij".index(c)] for c in w),
        "sum": lambda w: str(int(w[0]) + int(w[2])),
        "difference": lambda w: str(abs(int(w[0]) - int(w[2]))),
        "larger": lambda w: max(w[0], w[2]),
        "smaller": lambda w: min(w[0], w[2]),
    }
    for name, rule in rules.items():
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == 15
        for row in rows:
            assert len(set(row["choices"])) == 4
            assert row["choices"][row["answer"]] == rule(row["context"].removesuffix(" >"))
    seen = Counter()
    for line in (tmp_path / "pretrain.jsonl").read_text().splitlines():
        examples = [item.split(" > ") for item in json.loads(line)["text"].split("\n\n")]
        some = list(rules)[4:] if " " in examples[0][0] else list(rules)[:4]
        fitting = [name for name in some if all(rules[name](a) == b for a, b in examples)]
        assert len(examples) == 6 and len(fitting) == 1, examples
        seen[fitting[0]] += 1
    assert set(seen) == set(rules)
