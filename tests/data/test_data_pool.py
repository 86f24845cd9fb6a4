"""The worker processes of prepare: forks of one that has no threads; the death of one ends all."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from plume.config import UserError
from plume.data.pool import run_in_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
STAGES = """
import os, signal, sys, time
from pathlib import Path

class Stage:
    def __init__(self, place):
        self.place = Path(place)

    def meet(self, task):  # so that each worker has one task
        (self.place / f"begun-{task['number']}").touch()
        while len(list(self.place.glob("begun-*"))) < 2:
            time.sleep(0.01)

class Lineage(Stage):
    def __call__(self, task):
        self.meet(task)
        threads = len(os.listdir("/proc/self/task"))
        return {"pids": (os.getpid(), os.getppid()), "argv": sys.orig_argv[-1], "threads": threads}

class OneDies(Stage):
    def __call__(self, task):
        try:
            self.meet(task)
            if task["number"] == 1:
                os.kill(os.getpid(), task["signal"])
            time.sleep(120)
        finally:
            (self.place / f"tidied-{task['number']}").touch()
"""
THREAD = """
import sys, threading, time
if any("import main; main" in word for word in sys.orig_argv):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""


@pytest.fixture
def stages(tmp_path, monkeypatch):
    """A module of stages that workers can import."""
    (tmp_path / "pool_stages.py").write_text(STAGES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    import pool_stages

    yield pool_stages
    del sys.modules["pool_stages"]


def tasks(**more: int) -> list[dict[str, int]]:
    return [{"number": number, **more} for number in range(2)]


@pytest.mark.parametrize("threads", [False, True])
def test_workers_are_forks_of_one_process_unless_it_has_threads(stages, tmp_path: Path, threads: bool) -> None:
    if threads:
        (tmp_path / "sitecustomize.py").write_text(THREAD)
    found = list(run_in_processes(stages.Lineage, (tmp_path,), tasks(), 2))
    (pid, parent), (other, same_parent) = (result["pids"] for result in found)
    assert pid != other and parent == same_parent != os.getpid()
    assert all(result["threads"] == 1 for result in found)
    assert all(("run_worker" in result["argv"]) == threads for result in found)
    assert not psutil.pid_exists(parent) and not psutil.pid_exists(pid) and not psutil.pid_exists(other)


@pytest.mark.parametrize(("number", "said"), [(9, "-9, probably out of memory"), (15, "143")])
def test_the_death_of_a_worker_ends_all(stages, tmp_path: Path, number: int, said: str) -> None:
    """The other one tidies up first."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(UserError, match=rf"worker process died \(exit code {said}\)"):
        list(run_in_processes(stages.OneDies, (tmp_path,), tasks(signal=number), 2))
    assert (tmp_path / "tidied-0").exists()
    assert set(psutil.Process().children(recursive=True)) <= before
