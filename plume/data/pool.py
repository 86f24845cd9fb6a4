"""Runs the tasks of a stage of prepare: in this process, in one process per core, or on a Ray cluster."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import IO, Any, Protocol
from uuid import uuid4

from plume.config import DataConfig, UserError
from plume.util.devices import cores
from plume.util.progress import Progress

SMALL = 4 << 20  # bytes of input below which starting processes takes longer than the work
RETRIES = 3  # of a piece whose worker or node is lost on a Ray cluster
RESUME_HINT = "Finished pieces are kept: run the same command again to continue"
Task = dict[str, Any]  # plain data; `size` is its share of the progress bar
Result = dict[str, Any]
Setup = tuple[Any, ...]  # what a stage is made from in every worker
Worker = subprocess.Popen[bytes]


class Stage(Protocol):
    """What a worker does with tasks."""

    def __call__(self, task: Task) -> Result: ...


def run_stage(
    stage: type[Stage], setup: Setup, tasks: Sequence[Task], config: DataConfig, *, title: str, before: int = 0
) -> list[Result]:
    """The results of all tasks in any order, with a progress bar; `before` bytes were done by an earlier run."""
    if not tasks:
        return []
    size = sum(task["size"] for task in tasks)
    done, tokens, began, results = 0, 0, time.monotonic(), list[Result]()
    with Progress(unit="bytes") as progress, progress.task(title, max(size + before, 1), completed=before) as advance:
        for result in results_of(stage, setup, tasks, config, size):
            done, tokens = done + result["size"], tokens + result.get("tokens", 0)
            speed = done / 1e6 / max(time.monotonic() - began, 1e-3)
            advance(result["size"], f"{tokens:,} tokens, {speed:.1f} MB/s" if tokens else f"{speed:.1f} MB/s")
            results.append(result)
    return results


def results_of(
    stage: type[Stage], setup: Setup, tasks: Sequence[Task], config: DataConfig, size: int
) -> Iterator[Result]:
    workers = worker_count(config, len(tasks), size)
    if config.backend == "ray":
        return run_on_ray(stage, setup, tasks)
    if workers == 1:
        return map(stage(*setup), tasks)
    return run_in_processes(stage, setup, tasks, workers)


def worker_count(config: DataConfig, tasks: int, size: int) -> int:
    workers = min(cores() if config.workers is None else config.workers, tasks)
    return 1 if size < SMALL or config.backend == "ray" else workers


IDLE: ContextVar[list[Worker] | None] = ContextVar("IDLE", default=None)  # workers that wait for a stage


@contextmanager
def kept_workers(config: DataConfig, tasks: int, size: int) -> Iterator[None]:
    """Start the workers of the first stage, which import while this process reads; later stages use them again."""
    workers = worker_count(config, tasks, size)
    # a tokenizer that is given or learned reads its cache with compiled code, which takes half a second to load
    preload = config.tokenizer.folder is not None or config.tokenizer.kind not in ("bytes", "characters")
    idle = list[Worker]()
    token = IDLE.set(idle)
    try:
        idle.extend(start_worker(preload=preload) for _ in range(workers if workers > 1 else 0))
        yield
    finally:
        IDLE.reset(token)
        for worker in idle:
            worker.kill()  # it holds nothing, and an orderly exit would take longer
        close_workers(idle)


def start_worker(*, preload: bool = False) -> Worker:
    load = "from plume.text.encode_cache import load_compiled; load_compiled(); " if preload else ""
    command = [sys.executable, "-c", f"{load}from plume.data.pool import main; main()"]  # -m would import it twice
    # a worker's tokenizer has no cores to itself, and a signal from the keyboard is for this process to handle
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    )


def run_in_processes(stage: type[Stage], setup: Setup, tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Workers that each take the next task when they are done with one; the first trouble stops them all."""
    todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
    done: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    for task in tasks:
        todo.put(task)
    idle = IDLE.get()
    children = [idle.pop() if idle else start_worker() for _ in range(workers)]
    start = pickle.dumps((stage, setup))
    threads = [threading.Thread(target=feed_worker, args=(c, start, todo, done), daemon=True) for c in children]
    working = workers
    try:
        for thread in threads:
            thread.start()
        while working:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                working -= 1
            else:
                yield result
    finally:
        kept = idle is not None and not working
        for child in children if not kept else ():
            child.terminate()
        for thread in threads:
            thread.join()
        if idle is not None and kept:
            idle += children
        else:
            close_workers(children)


def close_workers(children: list[Worker]) -> None:
    for child in children:
        with suppress(BrokenPipeError), child:  # closes its pipes; a dead one may leave words unread
            pass


def feed_worker(
    child: Worker,
    start: bytes,
    todo: queue.SimpleQueue[Task],
    done: queue.SimpleQueue[Result | BaseException | None],
) -> None:
    """Feed one worker until there is no work; None says that it is done."""
    assert child.stdin is not None and child.stdout is not None
    try:
        send(child.stdin, start)
        while True:
            send(child.stdin, pickle.dumps(todo.get_nowait()))
            done.put(pickle.load(child.stdout))  # a result, or the error it met
    except queue.Empty:
        done.put(None)
    except (EOFError, OSError):
        code = child.wait()
        guess = ", probably out of memory" if code == -9 else ""
        done.put(UserError(f"worker process died (exit code {code}{guess}). {RESUME_HINT}, perhaps with workers=1"))


def send(stream: IO[bytes], message: bytes) -> None:
    stream.write(message)
    stream.flush()


def run_on_ray(stage: type[Stage], setup: Setup, tasks: Sequence[Task], *, device: str = "cpu") -> Iterator[Result]:
    """The same work as tasks of a Ray cluster; texts and folder must be on storage that every node sees."""
    if not tasks:
        return
    try:
        import ray
    except ImportError:
        raise UserError("backend=ray needs the package ray: pip install 'plume-lm[cluster]'") from None
    given: dict[str, Any] = {"num_gpus": 1} if device.startswith("cuda") else {}
    piece: Any = ray.remote(max_retries=RETRIES, **given)(run_piece)  # Ray repeats what a lost worker or node had
    dumps: Any = ray.cloudpickle.dumps
    start, run = ray.put(dumps((stage, setup, os.getcwd()))), uuid4().hex
    waiting = [piece.remote(run, start, pickle.dumps(task)) for task in tasks]
    try:
        while waiting:
            (done,), waiting = ray.wait(waiting)
            result = pickle.loads(ray.get(done))
            if isinstance(result, UserError):
                raise result
            yield result
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError):
        times = f"{1 + RETRIES} times on the same piece"
        raise UserError(f"worker process died {times}, probably out of memory. {RESUME_HINT}") from None
    finally:
        for left in waiting:
            ray.cancel(left)


def run_piece(run: str, start: bytes, task: bytes) -> bytes:
    """On a worker of Ray, which stays for the next piece and the next run."""
    return ray_stage(run, start)(task)


@lru_cache(maxsize=1)
def ray_stage(run: str, start: bytes) -> RayStage:
    return RayStage(*pickle.loads(start))


class RayStage:
    """A stage that takes and gives bytes."""

    def __init__(self, stage: type[Stage], setup: Setup, place: str) -> None:
        with suppress(OSError):
            os.chdir(place)  # so that relative paths mean what they mean here
        self.stage = stage(*setup)

    def __call__(self, task: bytes) -> bytes:
        try:
            result: Result | UserError = self.stage(pickle.loads(task))
        except UserError as error:  # as it is: Ray would wrap it into its own traceback
            result = error
        return pickle.dumps(result)


def main() -> None:
    """A worker process: stages, each with its tasks, on its input, results on its output, until the input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that half-written files are taken away
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever a library prints must not come between the answers
        try:
            while True:
                message = pickle.load(sys.stdin.buffer)
                if isinstance(message, tuple):
                    stage, setup = message
                    work = stage(*setup)
                else:
                    pickle.dump(work(message), answers)
                    answers.flush()
        except EOFError:
            return
        except UserError as error:
            pickle.dump(error, answers)
