"""How fast texts become ids, against `tokenizers` on the same text and cores: python -m benchmarks.encode."""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer as Backend

from plume.config import TokenizerConfig
from plume.text import Tokenizer, load_tokenizer, train_tokenizer
from plume.text.files import to_json

SHARED = Path(__file__).resolve().parents[2] / "shared"
CHARACTERS = 3_000_000  # of text
ROUNDS = 5


def real_text() -> list[str]:
    """WikiText-2 line by line, or else the standard library's source."""
    wiki = SHARED / "data" / "wikitext-2" / "wiki.train.raw"
    if wiki.exists():
        whole = wiki.read_text(encoding="utf-8")
    else:
        source = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        whole = "".join(file.read_text(encoding="utf-8", errors="replace") for file in source)
    return [line for line in whole[:CHARACTERS].split("\n") if line]


def vocabulary(name: str, kind: str, texts: list[str]) -> Tokenizer:
    """The published vocabulary, or else one of our own of the same kind."""
    folder = SHARED / "tokenizers" / name
    return (
        load_tokenizer(folder)
        if folder.exists()
        else train_tokenizer(TokenizerConfig(kind=kind, vocab_size=16_384), texts)
    )  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(label: str, tokenizer: Tokenizer, texts: list[str]) -> float:
    """Throughput of both in turn, and the ratio of the medians; the ids are checked first."""
    theirs = Backend.from_str(to_json(tokenizer.definition))
    expected = theirs.encode_batch(texts, add_special_tokens=False)
    if [e.ids for e in expected] != [ids.tolist() for ids in tokenizer.encode_batch(texts)]:
        raise AssertionError(f"{label}: the ids differ from those of tokenizers")
    del expected
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    ours_taken, theirs_taken = [], []
    for _ in range(ROUNDS):
        fresh = Tokenizer(tokenizer.definition)  # remembers nothing of the round before
        fresh.encode("")
        ours_taken.append(seconds(lambda fresh=fresh: fresh.encode_batch(texts)))  # type: ignore[misc]
        theirs_taken.append(seconds(lambda: theirs.encode_batch(texts, add_special_tokens=False)))
    ours, other = statistics.median(ours_taken), statistics.median(theirs_taken)
    print(
        f"{label:32} plume {megabytes / ours:6.1f} MB/s   tokenizers {megabytes / other:6.1f} MB/s   "
        f"ratio {other / ours:5.2f}   (rounds {min(t / o for o, t in zip(ours_taken, theirs_taken, strict=True)):.2f}"
        f" to {max(t / o for o, t in zip(ours_taken, theirs_taken, strict=True)):.2f})"
    )
    return other / ours


def main() -> None:
    lines = real_text()
    articles = ["\n".join(lines[n : n + 100]) for n in range(0, len(lines), 100)]
    for name, kind in (("gpt2", "byte-bpe"), ("bert-base-uncased", "wordpiece")):
        tokenizer = vocabulary(name, kind, lines)
        compare(f"{kind}, {len(lines)} short texts", tokenizer, lines)
        compare(f"{kind}, {len(articles)} long texts", tokenizer, articles)


if __name__ == "__main__":
    main()
