"""Is this machine fit to train, and are all ranks? Devices, precision, memory, and a sum that names who lags."""

from __future__ import annotations

import platform
import re
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from plume.train.distribute import Ranks, join
from plume.util.console import terminal
from plume.util.devices import choose_precision, matmul_speed, memory_bytes

SLOW = 2.0  # times the median: a rank beyond this is named
NUMBERS = 1 << 22  # summed over ranks in the test: 16 MiB


@dataclass(frozen=True)
class Health:
    """What one process found."""

    rank: int
    host: str
    device: str
    memory_gb: float
    float32: float  # operations per second in matrix products
    bfloat16: float
    precision: str  # what auto would choose
    threads: int


@dataclass(frozen=True)
class Diagnosis:
    """All ranks together."""

    ranks: list[Health]
    dead: list[int]  # did not answer in time
    slow: list[int]  # need more than SLOW times as long as the median for the same product
    all_reduce_seconds: float | None  # for NUMBERS floats
    bytes_per_second: float | None
    python: str
    torch: str

    @property
    def well(self) -> bool:
        return not self.dead and not self.slow

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "well": self.well}


def doctor(device: str = "auto", timeout: float = 30.0) -> Diagnosis | None:
    """Examine this machine, or every rank under torchrun; only the main rank gets the answer, the others None."""
    with join(device) as ranks:
        mine = examine(ranks)
        everyone: list[Health] = [mine]
        dead: list[int] = []
        seconds: float | None = None
        if ranks.many:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            dead = missing_ranks(group, ranks, timeout)
            if dead:
                return diagnose([mine], dead, None) if ranks.main else None
            gathered: list[Any] = [None] * ranks.size
            dist.all_gather_object(gathered, mine, group=group)
            everyone = gathered
            seconds = time_all_reduce(ranks)
        return diagnose(everyone, dead, seconds) if ranks.main else None


def examine(ranks: Ranks) -> Health:
    float32, bfloat16 = (matmul_speed(ranks.device, dtype) for dtype in (torch.float32, torch.bfloat16))
    return Health(
        rank=ranks.rank,
        host=platform.node(),
        device=str(ranks.device),
        memory_gb=round(memory_bytes(ranks.device) / 2**30, 1),
        float32=float32,
        bfloat16=bfloat16,
        precision=choose_precision(ranks.device, "auto").name,
        threads=torch.get_num_threads(),
    )


def missing_ranks(group: Any, ranks: Ranks, timeout: float) -> list[int]:
    """Ranks that do not reach a barrier in time; the others then know it too."""
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=timeout), wait_all_ranks=True)
    except RuntimeError as error:
        named = re.search(r"Ranks? ([\d, ]+) failed", str(error))
        found = [int(number) for number in re.findall(r"\d+", named[1])] if named else []
        return found if found else [r for r in range(ranks.size) if r != ranks.rank]
    return []


def time_all_reduce(ranks: Ranks, tries: int = 3) -> float:
    numbers, best = torch.ones(NUMBERS, device=ranks.device), float("inf")
    for _ in range(tries):
        numbers.fill_(1.0)
        began = time.perf_counter()
        total = float(ranks.sum(numbers)[-1])  # reading one number waits for the device
        best = min(best, time.perf_counter() - began)
        assert total == ranks.size, f"a sum of ones over {ranks.size} ranks gave {total}"
    return best


def diagnose(everyone: list[Health], dead: list[int], seconds: float | None) -> Diagnosis:
    usual = median(health.float32 for health in everyone)
    slow = [health.rank for health in everyone if health.float32 * SLOW < usual]
    size = len(everyone)
    rate = None if not seconds else 2 * (size - 1) / size * NUMBERS * 4 / seconds  # what a ring moves per rank
    return Diagnosis(everyone, dead, slow, seconds, rate, platform.python_version(), torch.__version__)


def show_diagnosis(found: Diagnosis) -> None:
    from rich.table import Column, Table

    console = terminal()
    console.print(f"Python {found.python}, torch {found.torch}")
    speed = " GFLOP/s"
    titles = ("rank", "host", "device", "memory", "threads", f"float32{speed}", f"bfloat16{speed}", "precision")
    rows = []
    for health in found.ranks:
        rates = [rate / 1e9 for rate in (health.float32, health.bfloat16)]
        speeds = [f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}" for rate in rates]
        memory = f"{health.memory_gb} GiB"
        row = [str(health.rank), health.host, health.device, memory, str(health.threads), *speeds, health.precision]
        rows.append(row)
    alone = len(rows) == 1  # then a line each, which fits into a narrow terminal
    table = Table(*(Column(title, overflow="fold") for title in titles[: 2 if alone else None]), show_header=not alone)
    for cells in zip(titles[1:], rows[0][1:], strict=True) if alone else rows:
        table.add_row(*cells)
    console.print(table)
    if found.bytes_per_second is not None and found.all_reduce_seconds is not None:
        console.print(
            f"sum over {len(found.ranks)} ranks of {NUMBERS * 4 >> 20} MiB: {found.all_reduce_seconds * 1e3:.1f} ms, "
            f"{found.bytes_per_second / 1e9:.2f} GB/s per rank",
        )
    for rank in found.dead:
        console.print(f"rank {rank} did not answer: check its log and its machine", style="red")
    for rank in found.slow:
        console.print(f"rank {rank} is more than {SLOW:g} times slower than the median rank", style="yellow")
    if found.well:
        console.print("all is well", style="green")
