"""Which engine runs a model, and how it is opened: packed weights from the folder's cache, or torch."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from plume.config import EngineConfig, ModelConfig, UserError
from plume.generate.cpu.pack import Packed, Precision, pack, place_for, read, unsupported, write
from plume.generate.engine import Engine
from plume.weights import load_model, read_config, resolve

if TYPE_CHECKING:
    from plume.heads import Model


def gpu_here() -> bool:
    """Whether torch would find a GPU, answered without the second that importing torch takes."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() or "CUDA_PATH" in os.environ


def why_not_cpu(config: ModelConfig, head: str) -> str | None:
    """Why the CPU engine cannot serve; None when it can."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64", "arm64", "aarch64"):
        return f"it has no kernels for {machine}"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return f"numba cannot be imported ({error})"
    return unsupported(config, head)


def wants_cpu(config: ModelConfig, head: str, wanted: EngineConfig) -> bool:
    """Whether to use the CPU engine; a note or an error when it was asked for and cannot be had."""
    if wanted.engine == "torch" or wanted.precision in ("bfloat16", "float16"):
        return False
    elsewhere = gpu_here() if wanted.device == "auto" else wanted.device != "cpu"
    if wanted.engine == "auto" and wanted.precision != "int8" and elsewhere:
        return False
    reason = why_not_cpu(config, head)
    if reason is None:
        return True
    if wanted.engine == "cpu" or wanted.precision == "int8":
        raise UserError(f"the CPU engine cannot run this model: {reason}; engine=torch precision=float32 can")
    if "kernels" in reason or "numba" in reason:
        print(f"the CPU engine is not used: {reason}; torch is", file=sys.stderr)
    return False


def open_engine(folder: str | Path, wanted: EngineConfig | None = None) -> Engine:
    """The engine for a model folder."""
    wanted = EngineConfig() if wanted is None else wanted
    place = resolve(folder)
    said = read_config(place)
    if not wants_cpu(said.model, said.head, wanted):
        return torch_engine(load_model(place), wanted)
    return cpu_engine(packed_weights(place, _precision(wanted)), wanted)


def engine_for(model: Model, wanted: EngineConfig | None = None) -> Engine:
    """The engine for a model in memory."""
    wanted = EngineConfig() if wanted is None else wanted
    if wants_cpu(model.config, model.kind, wanted):
        return cpu_engine(pack(model, _precision(wanted)), wanted)
    return torch_engine(model, wanted)


def _precision(wanted: EngineConfig) -> Precision:
    return "int8" if wanted.precision == "int8" else "float32"


def cpu_engine(packed: Packed, wanted: EngineConfig) -> Engine:
    from plume.generate.cpu.engine import CpuEngine

    return CpuEngine(packed, slots=wanted.slots, threads=wanted.threads)


def torch_engine(model: Model, wanted: EngineConfig) -> Engine:
    import torch

    from plume.generate.torch_engine import TorchEngine
    from plume.train.ranks import pick_device

    model = model.to(device=pick_device(wanted.device), dtype=getattr(torch, wanted.precision))
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    return TorchEngine(model, slots=wanted.slots, compiled=wanted.compile)


def packed_weights(folder: Path, precision: Precision) -> Packed:
    """The folder's packed weights, memory-mapped; packed now, and kept for the next time, if they are not there."""
    places = place_for(folder, precision)
    for path in places:
        if (found := read(path)) is not None:
            return found
    packed = pack(load_model(folder), precision)
    for path in places:
        try:
            write(packed, path)
            _forget_older(path, precision)
            break
        except OSError:
            continue  # a read-only folder or a full disk: try the next place, or do without
    return packed


def _forget_older(path: Path, precision: Precision) -> None:
    """Packed weights of what the folder held before. The user's cache is shared by many folders and left alone."""
    if path.parent.name == ".plume":
        for other in path.parent.glob(f"cpu-{precision}-*.bin"):
            if other != path:
                other.unlink(missing_ok=True)
