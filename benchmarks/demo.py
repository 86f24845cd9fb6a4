"""`plume demo` from end to end: python -m benchmarks.demo [--minutes 2]."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.results import Row, report
from plume.config import DemoConfig
from plume.demo import demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        result = demo(DemoConfig(folder=Path(place) / "demo", minutes=args.minutes))
    validation = result.outcome.validation
    assert validation is not None
    report(
        Row(
            key="seconds",
            what="`plume demo`, from Python's source to samples",
            figure=time.perf_counter() - began,
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
    )


if __name__ == "__main__":
    main()
