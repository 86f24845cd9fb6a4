"""Ranks as forks of one process that has loaded everything: real processes without starting an interpreter each."""

import os
import socket
import sys
import traceback
from collections.abc import Callable


def fork_ranks(size: int, work: Callable[[], None]) -> None:
    """Run `work` in so many ranks of one process group; ends with the worst exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            if size > 1:
                here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), **here)
            run_and_exit(work)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


def run_and_exit(work: Callable[[], None]) -> None:
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
