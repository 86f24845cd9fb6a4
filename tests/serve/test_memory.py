"""Memory of a server that runs for long: what a burst took is given back, and nothing is kept of a request."""

import asyncio
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from running import serving

from plume.config import ServeConfig, UserError
from plume.serve import served_models
from plume.serve.middleware import CLIENTS_KEPT, RateLimiter
from plume.serve.scheduler import Scheduler, pause
from plume.serve.served_models import ARENAS, Origin, Served, open_lm
from plume.serve.server import allow_connections

ROOT = Path(__file__).resolve().parents[2]
HEAPS = """
import ctypes, sys, threading
from plume.serve.served_models import share_arenas
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_here = threading.Barrier(12)
def heaps():
    file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    return open(sys.argv[2]).read().count("<heap nr=")
def allocate():
    all_here.wait()
    libc.malloc(1000)
    all_here.wait()
if sys.argv[1] == "shared":
    share_arenas()
before = heaps()
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(before, heaps())
"""
LATE = """
import sys
from running import serving
from plume.config import EngineConfig, ServeConfig
text = "the robot must obey"
both = ("score", "tokenize", "embeddings", "explain")
kinds = [(path, {"model": model, "input": text}) for path in both for model in ("gpt", "bert")]
kinds += [("explain", {"model": "gpt", "input": text, "view": view}) for view in ("heads", "layers", "walk", "kinds")]
kinds += [("next-tokens", {"model": "gpt", "input": text}), ("fill-mask", {"model": "bert", "input": "the [MASK]"})]
kinds += [("completions", {"model": "gpt", "prompt": text, "max_tokens": 2, "logprobs": 1})]
kinds += [("completions", {"model": "gpt", "prompt": text, "max_tokens": 2, "stream": True})]
kinds += [("chat/completions", {"model": "gpt", "messages": [{"role": "user", "content": text}], "max_tokens": 2})]
kinds += [("responses", {"model": "gpt", "input": text, "max_output_tokens": 2})]
with serving(ServeConfig(models=tuple(sys.argv[1:]), engine=EngineConfig(engine="torch"))) as (_, client):
    before = set(sys.modules)
    for path, body in kinds:
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, (path, answer.text)
    print(*sorted(set(sys.modules) - before))
"""


def run(script: str, *words: str) -> str:
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, check=True, capture_output=True, text=True, timeout=600
    ).stdout


@pytest.fixture
def served(models, serve_config):
    config = replace(serve_config, queue=32)
    made = Served("gpt", Origin(str(models["gpt"])), open_lm(str(models["gpt"]), config), config)
    yield made
    made.close()


def test_threads_of_a_burst_end(served, monkeypatch):
    """Each has a stack and a heap; a pool that keeps those of its busiest moment never gives them back."""
    monkeypatch.setattr("anyio._backends._asyncio.WorkerThread.MAX_IDLE_TIME", 0.0)
    all_here = threading.Barrier(33)

    async def burst() -> tuple[int, int]:
        deadline = time.monotonic() + 600
        before = threading.active_count()
        readings = [served.read(lambda: all_here.wait(60), str(i), deadline) for i in range(32)]
        waiting = asyncio.gather(*readings, asyncio.to_thread(all_here.wait, 60))
        await waiting
        during = threading.active_count() - before
        for _ in range(3):  # the idle ones end when the next one comes
            await served.read(pause, "a", deadline)
        until = time.monotonic() + 60
        while threading.active_count() - before > 3 and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return during, threading.active_count() - before

    during, after = asyncio.run(burst())
    assert during >= 32
    assert after <= 3  # one for readings, one of asyncio.to_thread


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone has heaps of threads")
def test_threads_share_heaps(tmp_path):
    """Libraries may have made some when they were imported; requests make no more."""
    before, after = map(int, run(HEAPS, "shared", str(tmp_path / "heaps")).split())
    assert after <= max(before, ARENAS)
    before, after = map(int, run(HEAPS, "own", str(tmp_path / "heaps")).split())
    assert after > max(before, ARENAS)


def test_no_request_imports_a_library(models):
    """What a request needs is imported before the server is ready; torch's compiler and sympy are never needed."""
    late = run(LATE, f"gpt={models['gpt']}", f"bert={models['bert']}").split()
    assert not late


def test_nothing_is_kept_of_clients_that_are_gone():
    scheduler = Scheduler(None, queue=4)
    for i in range(300):
        reading = scheduler.start_reading(str(i), time.monotonic() + 60)
        if i % 2:
            reading.run(pause)
        reading.cancel()
    scheduler.close()
    tables = (scheduler._spent, scheduler._readings, scheduler._waiting, scheduler._running, scheduler.ready)
    assert not any(tables)


def test_rates_are_kept_of_so_many_clients():
    limiter = RateLimiter(60)
    for i in range(CLIENTS_KEPT + 100):
        limiter.take(str(i), float(i))
    assert len(limiter._buckets) == CLIENTS_KEPT


def test_explanations_are_kept_up_to_so_many_bytes(served, monkeypatch):
    """Short texts may be looked into as deeply as long ones; the memory is that of the tensors behind them."""
    monkeypatch.setattr(served_models, "EXPLAINED_BYTES", limit := 1 << 20)
    for i in range(40):
        seen = served.explanation([i] * 8)
        seen.record(list(seen.sites))
        logits, tensors = seen.logits, dict(seen._recorded)
        whole = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (logits, *tensors.values())}
        assert seen.bytes == sum(whole.values()) > 8 * 4 * seen.model.config.vocab_size
    served.explanation([50] * 8)
    kept = list(served._explained.values())
    assert 1 < len(kept) < 40 and sum(e.bytes for e in kept) <= limit
    served.explanation([51] * served.lm.config.context).record(list(seen.sites))
    assert served.explanation([51] * served.lm.config.context) is served.explanation([51] * served.lm.config.context)


def test_connections_need_open_files(monkeypatch):
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1300))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    allow_connections(ServeConfig(models=("a",), connections=1000))
    assert raised == [(1256, 1300)]
    with pytest.raises(UserError, match="connections=2000 needs 2256 open files"):
        allow_connections(ServeConfig(models=("a",), connections=2000))


def test_free_memory_is_given_back_regularly(monkeypatch, serve_config, models):
    trimmed = threading.Event()
    monkeypatch.setattr("plume.serve.served_models.TRIM_SECONDS", 0.01)
    monkeypatch.setattr("plume.serve.served_models.trim_heaps", trimmed.set)
    with serving(replace(serve_config, models=(str(models["gpt"]),), runs=None)):
        assert trimmed.wait(60)
