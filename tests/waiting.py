"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LONG = 300.0  # seconds: on any machine this is a hang, not a delay


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, f"this has not happened in {LONG:g} seconds"
        time.sleep(0.01)
