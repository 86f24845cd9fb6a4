"""The doctor on one machine; what it says of many is made up here and met for real in test_train_ranks.py."""

import json
import re

import psutil
import pytest

from plume.cli.main import main
from plume.train import doctor
from plume.train.distribute import CPU, Ranks
from plume.train.doctor import NUMBERS, Health, diagnose, show_diagnosis, time_all_reduce
from plume.util import devices


@pytest.fixture
def quick(monkeypatch):
    """Speeds of a machine that gains nothing from fewer digits."""
    for module in (doctor, devices):
        monkeypatch.setattr(module, "matmul_speed", lambda device, dtype: 2e9)


def health(rank: int, speed: float) -> Health:
    return Health(
        rank=rank,
        host="here",
        device="cpu",
        memory_gb=24.0,
        float32=speed,
        bfloat16=speed,
        precision="float32",
        threads=1,
    )


def test_one_machine_is_examined(quick, capsys):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    (rank,) = said["ranks"]
    assert (rank["device"], rank["float32"], said["dead"], said["slow"], said["well"]) == ("cpu", 2e9, [], [], True)
    assert rank["memory_gb"] == pytest.approx(psutil.virtual_memory().total / 2**30, rel=0.01)
    assert main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    rows = dict(re.findall(r"│ (.+?) +│ (.+?) +│", shown))
    assert "all is well" in shown and rows["precision"] == "float32"
    assert rows["float32 GFLOP/s"] == rows["bfloat16 GFLOP/s"] == "2"


def test_who_lags_and_who_is_silent_is_named(capsys):
    """Seconds to bytes by a ring: each rank sends 2 (n - 1) / n of the numbers."""
    found = diagnose([health(0, 9e9), health(1, 4e9), health(2, 9e9)], [], seconds=0.5)
    assert found.slow == [1] and not found.well
    assert found.bytes_per_second == pytest.approx(2 * 2 / 3 * 4 * NUMBERS / 0.5)
    show_diagnosis(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert "rank 1 is more than 2 times slower" in shown and "sum over 3 ranks of 16 MiB: 500.0 ms" in shown
    show_diagnosis(diagnose([health(0, 9e9)], [2], seconds=None))
    shown = capsys.readouterr().out
    assert "rank 2 did not answer" in shown and "all is well" not in shown


def test_a_sum_that_is_wrong_is_no_measurement():
    assert time_all_reduce(Ranks(device=CPU), tries=1) > 0

    class Deaf(Ranks):
        def sum(self, numbers):
            return numbers * 3

    with pytest.raises(AssertionError, match="a sum of ones over 1 ranks gave 3"):
        time_all_reduce(Deaf(device=CPU), tries=1)
