"""Decoding speed beside every installed peer: python -m benchmarks.decode (takes the fields of DecodeBenchConfig)."""

import sys

from plume.config import DecodeBenchConfig, build, parse_overrides, with_overrides
from plume.generate.bench import bench_decode, table

if __name__ == "__main__":
    from rich.console import Console

    config = build(DecodeBenchConfig, with_overrides({}, parse_overrides(sys.argv[1:])))
    Console(width=160).print(table(bench_decode(config), config))
