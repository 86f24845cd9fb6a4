"""Every benchmark, one after another: `python -m benchmarks [NAME...] [-- OPTIONS]` writes docs/benchmarks.md.

Named ones (`decode`, `serve`, `train.gpt2`) are run alone and only their rows change; OPTIONS go to their scripts.
--list shows the names, --small tries them all at sizes that say nothing, --readme only writes the pages again, those in
Chinese too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.pages import write_pages
from benchmarks.results import ROOT, ROWS_FILE

RESULTS = ROOT / "docs" / "benchmarks.json"
SIZED = ("english-20", "english-night", "bert-20", "bert-night", "chinese-20")  # recipes for a time
JOBS = {  # name -> (words behind `python -m benchmarks.`, options at which it only shows that it runs)
    "start": ("start", "--preset gpt2-laptop --rounds 1"),
    "demo": ("demo", "--minutes 0.05"),
    "encode": ("encode", "--characters 200000 --rounds 1"),
    "prepare": ("prepare", "--megabytes 1 --large 2 --rounds 1"),
    "sizes": ("sizes", "--shards 4 --files 500 --gigabytes 0.01 --documents 100000 --rounds 1"),
    "train.characters": ("train characters", "--plain-steps 20 --steps 6"),
    "nanogpt": ("nanogpt", "--rounds 1 --steps 5"),
    "train.gpt2": ("train gpt2", "--preset gpt2-laptop --turns 1 --steps 2"),
    "recipe": ("recipe", "--seconds 1 --points 1 --seeds 1"),
    **{f"budgets.{name}": (f"budgets {name}", "--minutes 0.05 --limit 67") for name in SIZED},
    "sweep": ("size_law sweep", "--minutes 0.05 --around 0"),
    "budgets.compress": ("budgets compress", "--minutes 0.05 --megabytes 0.1"),
    "checkpoint": ("checkpoint", "--megabytes 4 --rounds 1"),
    "finetune": ("finetune", "--preset bert-tiny --steps 4 --rounds 1 --rows 200"),
    "transfer": ("transfer", "--steps 2 --rows 20 --seeds 1 --tasks restoring --out runs/transfer-small"),
    "scores.trainer": ("scores trainer", "--rows 40 --seeds 1 --epochs 1 --pretrain-steps 2 --tasks sst2 squad"),
    "scores.search": ("scores search", "--rows 64 --epochs 1 --widths 32 --grid 3"),
    "scores.pairs": ("scores pairs", "--limit 70 --timed 140"),
    "distill": ("distill", "--steps 4 --student-steps 4"),
    "exact": ("exact", "--minutes 0.05 --windows 2"),
    "decode": ("decode", "--preset gpt2-laptop --new-tokens 4 --prefill-tokens 16 --rounds 1"),
    "samplers": ("samplers", "--preset gpt2-laptop --new-tokens 4 --rounds 1"),
    "encoders": ("encoders", "--sizes 2x128 --texts 2 --tokens 16 --rounds 1"),
    "engine.cache": ("engine cache", "--preset gpt2-laptop --rounds 1"),
    "engine.guesses": ("engine guesses", "--preset gpt2-laptop --rounds 1"),
    "engine.together": ("engine together", "--preset gpt2-laptop --rounds 1 --span 0.2"),
    "engine.corrupt": ("engine corrupt", "--count 40"),
    "evaluate": ("evaluate", "--preset gpt2-laptop --rounds 1 --items 6"),
    "serve.clients": ("serve clients", "--preset gpt2-laptop --rounds 1 --tokens 4"),
    "serve.slots": ("serve slots", "--preset gpt2-laptop --rounds 1 --tokens 4"),
    "serve.storm": ("storm requests", "--requests 60"),
    "serve.idle": ("storm idle", "--sockets 100 --header-timeout 2"),
    "serve.scores": ("storm scores", "--tokens 60"),
    "serve.page": ("serve page", "--preset gpt2-laptop"),
}
HOURS = ("budgets.english-night", "budgets.bert-night")

BY_INSTRUCTIONS = {"exact", "decode", "samplers", "encoders", "engine.together", "serve.slots"}


def chosen(names: list[str]) -> list[str]:
    """Jobs by their name or the part before the point; when none is named, all but those that take hours."""
    found = [job for job in JOBS if (not names and job not in HOURS) or job in names or job.split(".")[0] in names]
    unknown = [name for name in names if not any(name in (job, job.split(".")[0]) for job in JOBS)]
    if unknown:
        raise SystemExit(f"there is no benchmark {', '.join(unknown)}; all: {', '.join(JOBS)}")
    return found


def run(job: str, options: list[str]) -> list[dict[str, Any]]:
    """One script in a process of its own; its rows with the date, the command, the machine and its load."""
    words = [*JOBS[job][0].split(), *options]
    command = shlex.join(["python", "-m", f"benchmarks.{words[0]}", *words[1:]])
    print(f"\n$ {command}", flush=True)
    about = {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "machine": machine.hardware(),
        "software": machine.software(),
        "load": round(os.getloadavg()[0], 1),  # of the minute before: what else the machine was doing
    }
    with tempfile.TemporaryDirectory(prefix="plume-bench-") as place:
        file = Path(place) / "rows.jsonl"
        subprocess.run(
            [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]],
            cwd=ROOT,
            env={**os.environ, ROWS_FILE: str(file)},
            check=True,
        )
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [{"job": job, **json.loads(line), **about} for line in lines]


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in the place of those of the same name; the others stay as they were measured. What depends on the
    processor's instructions is kept for machines with AVX-512 and for others, AVX-512 first."""

    def level(row: dict[str, Any]) -> bool:
        return row["job"] in BY_INSTRUCTIONS and not machine.has_avx512(row["machine"])

    rows = {(row["job"], row["key"], level(row)): row for row in [*old, *new]}
    return sorted(rows.values(), key=lambda row: (list(JOBS).index(row["job"]), level(row)))


def read(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [row for row in rows if row["job"] in JOBS]


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--readme", action="store_true")
    parser.add_argument("--results", type=Path, help="another file to keep the rows in; then no page is written")
    given = parser.parse_args(words[:cut])
    options = words[cut + 1 :]
    if given.list:
        print("\n".join(JOBS))
        return 0
    failed = []
    results = given.results if given.results is not None else None if given.small else RESULTS
    for job in [] if given.readme else chosen(given.names):
        try:
            rows = run(job, [*(JOBS[job][1].split() if given.small else []), *options])
        except subprocess.CalledProcessError:
            failed.append(job)
            continue
        if results is not None:  # after every job, so that a later one cannot lose it
            text = json.dumps(merged(read(results), rows), indent=1, ensure_ascii=False)
            results.write_text(text + "\n", encoding="utf-8")
    if results == RESULTS:
        write_pages(read(RESULTS), ROOT)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
