"""How long a person waits at the terminal: python -m benchmarks.start [--preset gpt2] [--rounds 5]."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import Row, report
from plume.bench import random_folder


def seconds_to_first_letter(words: list[str]) -> float:
    """From the command to the first thing it prints; then it may end in its own time."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "plume", *words], stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        taken = time.perf_counter() - began
        process.stdout.read()
    if process.returncode != 0 or not first:
        raise SystemExit(f"plume {' '.join(words)} failed")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = random_folder(args.preset, Path(place))
        words = ["generate", str(folder), "Once upon a time", "--precision", "int8", "--max-new-tokens", "8"]
        first = seconds_to_first_letter(words)  # packs the weights
        again = [seconds_to_first_letter(words) for _ in range(args.rounds)]
        helps = [seconds_to_first_letter(["--help"]) for _ in range(args.rounds)]
    report(
        Row(
            key="first-token",
            what="124M, int8: from `plume generate` to the first token, second start",
            figure=statistics.median(again),
            unit="s",
            at_most=3,
            detail=f"the first start, which packs the weights: {first:.1f} s",
        ),
        Row(key="help", what="`plume --help`", figure=statistics.median(helps), unit="s", at_most=0.3),
    )


if __name__ == "__main__":
    main()
