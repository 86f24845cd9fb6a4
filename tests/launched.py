"""Processes that start others, such as torchrun."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PATIENT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}  # seconds that ranks have to end after one has died


def launched(command: Sequence[str], folder: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; if the test is ended meanwhile, so are the ranks, which a kill would leave behind."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env={**os.environ, **QUIET, **PATIENT}, **pipes, text=True) as process:
        try:
            out, err = process.communicate()
        except BaseException:
            process.terminate()
            raise
    assert not check or process.returncode == 0, err[-3000:]
    return subprocess.CompletedProcess(command, process.returncode, out, err)
