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
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import IO, Any, NoReturn, Protocol
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
Pipes = tuple[int, int]  # a worker's ends: where tasks come from, where results go
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True)
class Worker:
    """A process that does tasks; those of one group were forked from one process, whose exit code is the group's."""

    group: subprocess.Popen[bytes]
    tasks: IO[bytes]
    results: IO[bytes]


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
        idle += start_workers(workers, preload=preload) if workers > 1 else []
        yield
    finally:
        IDLE.reset(token)
        stop_workers(idle)


def start_workers(count: int, *, preload: bool = False) -> list[Worker]:
    """Forks of one process that loads what all of them need; elsewhere than on Linux each loads it for itself."""
    load = "from plume.text.encode_cache import load_compiled; load_compiled(); " if preload else ""
    call = "from plume.data.pool import main; main"  # -m would import it twice
    # a worker's libraries have no cores to themselves, and a process with threads must not be forked
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", BLAS_THREADS: "1"}
    # sessions of their own: a signal from the keyboard is for this process to handle
    if sys.platform != "linux":
        command, pipe = [sys.executable, "-c", f"{load}{call}([(0, 1)])"], subprocess.PIPE
        each = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
            for _ in range(count)
        ]
        return [Worker(child, child.stdin, child.stdout) for child in each]  # type: ignore[arg-type]
    tasks, results = ([os.pipe() for _ in range(count)] for _ in range(2))
    theirs = [(source, sink) for (source, _), (_, sink) in zip(tasks, results, strict=True)]
    ends, command = list(chain(*theirs)), [sys.executable, "-c", f"{load}{call}({theirs})"]
    group = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=ends, env=environment, start_new_session=True)
    for end in ends:
        os.close(end)
    mine = [(sink, source) for (_, sink), (source, _) in zip(tasks, results, strict=True)]
    return [Worker(group, os.fdopen(sink, "wb"), os.fdopen(source, "rb")) for sink, source in mine]


def stop_workers(workers: list[Worker]) -> None:
    """End them, and all that were forked from the same process."""
    for worker in workers:
        worker.group.terminate()
    for worker in workers:
        for pipe in (worker.tasks, worker.results):
            with suppress(BrokenPipeError):  # a dead one may leave words unread
                pipe.close()
        worker.group.wait()


def run_in_processes(stage: type[Stage], setup: Setup, tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Workers that each take the next task when they are done with one; the first trouble stops them all."""
    todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
    done: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    for task in tasks:
        todo.put(task)
    idle = IDLE.get()
    children = [idle.pop() for _ in range(min(workers, len(idle)))] if idle else []
    children += start_workers(workers - len(children)) if len(children) < workers else []
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
            child.group.terminate()
        for thread in threads:
            thread.join()
        if idle is not None and kept:
            idle += children
        else:
            stop_workers(children)


def feed_worker(
    child: Worker,
    start: bytes,
    todo: queue.SimpleQueue[Task],
    done: queue.SimpleQueue[Result | BaseException | None],
) -> None:
    """Feed one worker until there is no work; None says that it is done."""
    try:
        send(child.tasks, start)
        while True:
            send(child.tasks, pickle.dumps(todo.get_nowait()))
            done.put(pickle.load(child.results))  # a result, or the error it met
    except queue.Empty:
        done.put(None)
    except (EOFError, OSError):
        code = child.group.wait()
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


def main(pipes: list[Pipes]) -> NoReturn:
    """One worker, or the process that several are forked from: it ends when all have, like the first that failed."""
    if len(pipes) == 1:
        run_worker(pipes, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    children = {start_fork(pipes, number) for number in range(len(pipes))}
    for end in chain(*pipes):
        os.close(end)

    def stop(*_: object) -> None:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    code = 0
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            stop()
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def start_fork(pipes: list[Pipes], number: int) -> int:
    if len(os.listdir("/proc/self/task")) > 1:  # a fork would have the threads' locks, and nobody to release them
        command = f"from plume.data.pool import run_worker; run_worker({pipes}, {number})"
        return os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", command])
    child = os.fork()
    if child == 0:
        run_worker(pipes, number)
    return child


def run_worker(pipes: list[Pipes], number: int) -> NoReturn:
    """A worker process, from its first task until there are no more."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that half-written files are taken away
        for end in chain(*pipes[:number], *pipes[number + 1 :]):
            os.close(end)
        if len(pipes) > 1:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.environ.pop(BLAS_THREADS, None)  # what is loaded from here on may have threads
        do_tasks(*pipes[number])
        code = 0
    except SystemExit:
        code = 128 + signal.SIGTERM
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # at once: there is nothing left to tidy up


def do_tasks(source: int, sink: int) -> None:
    """Stages, each with its tasks, from one pipe and results into the other, until the first one ends."""
    with os.fdopen(source, "rb") as messages, os.fdopen(os.dup(sink), "wb") as answers:
        os.dup2(2, 1)  # whatever a library prints must not come between the answers
        try:
            while True:
                message = pickle.load(messages)
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
