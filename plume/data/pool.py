"""Runs the pieces of a prepare: in this process, in one process per core, or on a Ray cluster."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from plume.config import DataConfig, UserError
from plume.data.maker import ShardMaker
from plume.data.sources import Piece

SMALL = 4 << 20  # bytes of input below which starting processes takes longer than the work
EVERY = 10.0  # seconds between lines where there is no terminal
GO_ON = "What was finished is kept: run the same command again to go on"
Result = dict[str, Any]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def run_pieces(config: DataConfig, work: Path, pieces: list[Piece], total: int) -> None:
    """Make the missing shards, with a progress bar; `total` bytes count those that were there before."""
    if not pieces:
        return
    size = sum(p.size for p in pieces)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[about]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("prepare", total=max(total, 1), completed=total - size, about="")
        done, tokens, began = 0, 0, time.monotonic()
        said = began
        for result in results_of(config, work, pieces, size):
            done, tokens, now = done + result["size"], tokens + result["tokens"], time.monotonic()
            about = f"{tokens:,} tokens, {done / 1e6 / max(now - began, 1e-3):.1f} MB/s"
            progress.update(task, advance=result["size"], about=about)
            if progress.disable and now - said >= EVERY:
                said = now
                print(f"prepare: {done / 1e6:.0f} of {size / 1e6:.0f} MB, {about}", file=sys.stderr, flush=True)


def results_of(config: DataConfig, work: Path, pieces: list[Piece], size: int) -> Iterator[Result]:
    workers = min(cores() if config.workers is None else config.workers, len(pieces))
    if config.on == "ray":
        return on_ray(config, work, pieces)
    if workers == 1 or size < SMALL:
        return in_this_process(config, work, pieces)
    return in_processes(config, work, pieces, workers)


def in_this_process(config: DataConfig, work: Path, pieces: Iterable[Piece]) -> Iterator[Result]:
    make = ShardMaker(config, work)
    for piece in pieces:
        yield make(piece.plain())


def in_processes(config: DataConfig, work: Path, pieces: Iterable[Piece], workers: int) -> Iterator[Result]:
    """Workers that each take the next piece when they are done with one; the first trouble stops them all."""
    todo: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    done: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    for piece in pieces:
        todo.put(piece)
    command = [sys.executable, "-m", "plume.data.worker"]
    # a worker's tokenizer has no cores to itself, and a signal from the keyboard is for this process to handle
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [
        subprocess.Popen(command, **pipes, env=environment, start_new_session=True)  # type: ignore[call-overload]
        for _ in range(workers)
    ]
    threads = [threading.Thread(target=attend, args=(c, config, work, todo, done), daemon=True) for c in children]
    try:
        for thread in threads:
            thread.start()
        working = workers
        while working:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                working -= 1
            else:
                yield result
    finally:
        for child in children:
            child.terminate()
        for child, thread in zip(children, threads, strict=True):
            thread.join()
            with suppress(BrokenPipeError), child:  # closes its pipes; a dead one may leave words unread
                pass


def attend(
    child: subprocess.Popen[bytes],
    config: DataConfig,
    work: Path,
    todo: queue.SimpleQueue[Piece],
    done: queue.SimpleQueue[Result | BaseException | None],
) -> None:
    """Feed one worker until there is no work; None says that it is done."""
    assert child.stdin is not None and child.stdout is not None
    try:
        tell(child.stdin, (config, work))
        while True:
            piece = todo.get_nowait()
            tell(child.stdin, piece.plain())
            done.put(pickle.load(child.stdout))  # a result, or the error it met
    except queue.Empty:
        done.put(None)
    except (EOFError, OSError):
        code = child.wait()
        guess = ", killed: too little memory?" if code == -9 else ""
        done.put(UserError(f"a worker ended by itself (code {code}{guess}). {GO_ON}, perhaps with workers=1"))


def tell(stream: IO[bytes], message: Any) -> None:
    pickle.dump(message, stream)
    stream.flush()


def on_ray(config: DataConfig, work: Path, pieces: list[Piece]) -> Iterator[Result]:
    """The same work as a Ray Data pipeline; texts and folder must be on storage that every node sees."""
    try:
        import ray
    except ImportError:
        raise UserError("on=ray needs the package ray: pip install 'plume-lm[cluster]'") from None
    plain = [{"piece": pickle.dumps(everywhere(p).plain())} for p in pieces]
    rows = ray.data.from_items(plain, override_num_blocks=len(plain))
    maker: Any = OnRay  # Ray's types know functions alone
    for row in rows.map(maker, fn_constructor_args=(config, work.resolve()), concurrency=(1, len(plain))).iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, UserError):
            raise result
        yield result


def everywhere(piece: Piece) -> Piece:
    """The piece with paths that do not depend on the folder a worker starts in."""
    parts = [p if p.path.startswith("hub:") else replace(p, path=os.path.abspath(p.path)) for p in piece.parts]
    aligned = [p if p.target is None else replace(p, target=os.path.abspath(p.target)) for p in parts]
    return replace(piece, parts=tuple(aligned))


class OnRay:
    """A ShardMaker for rows of Ray Data."""

    def __init__(self, config: DataConfig, work: Path) -> None:
        self.make = ShardMaker(config, work)

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        try:
            result: Result | UserError = self.make(pickle.loads(row["piece"]))
        except UserError as error:  # as it is: Ray would wrap it into its own traceback
            result = error
        return {"result": pickle.dumps(result)}
