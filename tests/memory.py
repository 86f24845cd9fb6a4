"""Memory of this process. Not ru_maxrss alone: a process inherits the peak of the one that started it."""

import sys
from contextlib import suppress
from pathlib import Path

STATUS = Path("/proc/self/status")


def kilobytes() -> int:
    """The most memory so far."""
    if STATUS.exists():
        return int(STATUS.read_text().split("VmHWM:")[1].split()[0])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak


def begin_peak() -> int:
    """Forget the peak so far, where the kernel can; the memory held now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return kilobytes()
