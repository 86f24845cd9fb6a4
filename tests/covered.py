"""How much of the package the tests run, and where they run least: `make coverage`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEAST = 10


def main(report: Path) -> None:
    found = json.loads(report.read_text(encoding="utf-8"))
    rooms: dict[str, list[int]] = {}
    functions = []
    for file, about in found["files"].items():
        place = file.split("plume/", 1)[1]
        lines = rooms.setdefault(place.split("/")[0].removesuffix(".py"), [0, 0])
        lines[0] += about["summary"]["covered_lines"]
        lines[1] += about["summary"]["num_statements"]
        functions += [
            (len(function["missing_lines"]), f"{place}: {name}", function["missing_lines"])
            for name, function in about["functions"].items()
            if name
        ]
    for room, (covered, total) in sorted(rooms.items()):
        print(f"{room:12} {covered / max(1, total):7.1%} of {total:5} lines")
    totals = found["totals"]
    print(f"{'all':12} {totals['covered_lines'] / totals['num_statements']:7.1%} of {totals['num_statements']:5} lines")
    print(f"\nthe {LEAST} functions with the most lines that no test runs:")
    for missing, name, lines in sorted(functions, reverse=True)[:LEAST]:
        print(f"{missing:4}  {name}  {lines}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
