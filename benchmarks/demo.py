"""`plume demo` from end to end: python -m benchmarks.demo [--minutes 2] [--older RUN, a demo of another commit]."""

from __future__ import annotations

import argparse
import ast
import tempfile
import time
from pathlib import Path

import plume
from benchmarks.results import Row, report
from plume.config import DemoConfig
from plume.demo import PYTHON_PROMPTS, demo
from plume.train.held_out import held_out_bits

SAMPLES, NEW_TOKENS = 20, 120


def parses(line: str) -> bool:
    """Whether a line is Python on its own, dedented, with `pass` for a block that it opens."""
    for text in (line.strip(), f"{line.strip()}\n    pass"):
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        return True
    return False


def parsing_share(run: Path) -> tuple[float, int]:
    """Of the lines of samples that are neither empty, a comment nor cut off at the end; and how many these are."""
    lm, lines = plume.load(run / "model"), list[str]()
    for seed in range(SAMPLES):
        prompt = PYTHON_PROMPTS[seed % len(PYTHON_PROMPTS)]
        text = lm.generate(prompt, max_new_tokens=NEW_TOKENS, temperature=0.8, top_k=40, seed=seed).text
        lines += [line for line in (prompt + text).split("\n")[:-1] if line.strip() and line.strip()[0] != "#"]
    lm.close()
    return sum(map(parses, lines)) / max(1, len(lines)), len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--older", type=Path, help="a run of the demo of another commit, to compare samples with")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "demo"
        result = demo(DemoConfig(folder=run, minutes=args.minutes))
        seconds = time.perf_counter() - began
        bits, (share, lines) = held_out_bits(run / "model", run / "data"), parsing_share(run)
    validation = result.outcome.validation
    assert validation is not None
    older = None if args.older is None else parsing_share(args.older)[0]
    report(
        Row(
            key="seconds",
            what="`plume demo`, from Python's source to samples",
            figure=seconds,
            unit="s",
            digits=0,
            at_most=300,
        ),
        Row(
            key="loss",
            what="its loss on text it has not seen, against that of token frequencies alone",
            figure=validation / result.unigram,
            at_most=0.7,
            detail=f"{validation:.3f} against {result.unigram:.3f} nats per token",
        ),
        Row(
            key="bits",
            what="bits per byte of the held-out text",
            figure=bits["this model"],
            unit="",
            at_most=1.5 if args.minutes >= 2 else None,
            detail=f"{result.outcome.tokens:,} tokens in {result.outcome.seconds:.0f} s; "
            f"bigram {bits['bigram']:.2f}, xz {bits['xz']:.2f}",
        ),
        Row(
            key="lines",
            what="lines of 20 samples that parse on their own",
            figure=share,
            unit="",
            at_least=None if older is None else 1.5 * older,
            detail=f"of {lines}" + ("" if older is None else f"; {older:.2f} by the older demo"),
        ),
    )


if __name__ == "__main__":
    main()
