"""How fast texts become ids, against `tokenizers` on the same text and cores: python -m benchmarks.encode."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from tokenizers import Tokenizer as Backend

from benchmarks.results import Row, made_text, real, report
from plume.config import TokenizerConfig
from plume.text import Tokenizer, load_tokenizer, train_tokenizer
from plume.text.tokenizer_json import to_json


def some_text(characters: int) -> list[str]:
    """WikiText-2 line by line, or else the standard library's source."""
    wiki = real("data", "wikitext-2", "wiki.train.raw")
    whole = made_text(characters) if wiki is None else wiki.read_text(encoding="utf-8")
    return [line for line in whole[:characters].split("\n") if line]


def vocabulary(name: str, kind: str, texts: list[str]) -> Tokenizer:
    """The published vocabulary, or else one of our own of the same kind."""
    folder = real("tokenizers", name)
    if folder is not None:
        return load_tokenizer(folder)
    return train_tokenizer(TokenizerConfig(kind=kind, vocab_size=16_384), texts)  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(label: str, tokenizer: Tokenizer, texts: list[str], rounds: int) -> Row:
    """Throughput of both in turn, and the ratio of the medians; the ids are checked first."""
    theirs = Backend.from_str(to_json(tokenizer.definition))
    expected = theirs.encode_batch(texts, add_special_tokens=False)
    if [e.ids for e in expected] != [ids.tolist() for ids in tokenizer.encode_batch(texts)]:
        raise AssertionError(f"{label}: the ids differ from those of tokenizers")
    del expected
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    ours_taken, theirs_taken = [], []
    for _ in range(rounds):
        fresh = Tokenizer(tokenizer.definition)  # remembers nothing of the round before
        fresh.encode("")
        ours_taken.append(seconds(lambda fresh=fresh: fresh.encode_batch(texts)))  # type: ignore[misc]
        theirs_taken.append(seconds(lambda: theirs.encode_batch(texts, add_special_tokens=False)))
    ours, other = statistics.median(ours_taken), statistics.median(theirs_taken)
    ratios = sorted(t / o for o, t in zip(ours_taken, theirs_taken, strict=True))
    return Row(
        key=label,
        what=f"{label}: MB/s of encoding against `tokenizers`",
        figure=other / ours,
        at_least=2.5,
        detail=f"{megabytes / ours:.1f} and {megabytes / other:.1f} MB/s; rounds {ratios[0]:.2f} to {ratios[-1]:.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--characters", type=int, default=10_500_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    lines = some_text(args.characters)
    articles = ["\n".join(lines[n : n + 100]) for n in range(0, len(lines), 100)]
    for name, kind in (("gpt2", "byte-bpe"), ("bert-base-uncased", "wordpiece")):
        tokenizer = vocabulary(name, kind, lines)
        for length, texts in (("short", lines), ("long", articles)):
            report(compare(f"{kind}, {length} texts", tokenizer, texts, args.rounds))


if __name__ == "__main__":
    main()
