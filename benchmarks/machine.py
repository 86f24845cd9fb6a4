"""The machine that figures were measured on, in one line each: processor, memory, libraries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "sve")
LIBRARIES = (
    "torch",
    "numpy",
    "numba",
    "transformers",
    "tokenizers",
    "datasets",
    "lm_eval",
    "llama_cpp_python",
    "ctranslate2",
    "onnxruntime",
)


def instructions() -> list[str]:
    """The instruction sets that matter here."""
    described = Path("/proc/cpuinfo")
    text = described.read_text(encoding="utf-8") if described.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return [name for name in INSTRUCTIONS if name in flags]


def has_avx512(hardware: str) -> bool:
    """Whether a machine so described has AVX-512."""
    return "avx512f" in hardware


def peer_bar(bar: float | None) -> float | None:
    """How many times as fast as a peer: on AVX2 alone as fast is enough."""
    return bar if bar is None or "avx512f" in instructions() else min(bar, 1.0)


def hardware() -> str:
    """Cores this process may use, architecture, the instruction sets that matter here, memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    sets = ", ".join(instructions())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = platform.machine().replace("x86_64", "x86-64")
    return f"{cores} cores, {machine}{f' ({sets})' if sets else ''}, {memory:.0f} GiB of memory, {platform.system()}"


def software() -> str:
    versions = {"Python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name.replace("_", "-")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(f"{name} {version}" for name, version in versions.items())
