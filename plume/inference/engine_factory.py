"""Which engine runs a model, how it is opened (packed weights from the cache, or torch) and when it is opened anew."""

from __future__ import annotations

import copy
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plume.config import EngineConfig, ModelConfig, UserError
from plume.hf import load_model, read_config, resolve
from plume.inference.batcher import Batcher
from plume.inference.cpu import pack as packing
from plume.inference.cpu.pack import Packed
from plume.inference.cpu.panels import Precision, PrecisionOrAuto
from plume.inference.engine import EncoderEngine, Engine, Logits
from plume.inference.speculation import check_draft

if TYPE_CHECKING:
    import torch

    from plume.inference.cpu.cpu_engine import CpuEngine
    from plume.model.heads import Model


CHOICES: tuple[Precision, ...] = ("float24", "float32")  # of precision=auto


def gpu_here() -> bool:
    """Whether torch would find a GPU, answered without the second that importing torch takes."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists() or "CUDA_PATH" in os.environ


def why_not_cpu(config: ModelConfig) -> str | None:
    """Why the CPU engine cannot serve; None when it can."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64", "arm64", "aarch64"):
        return f"it has no kernels for {machine}"
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return f"numba cannot be imported ({error})"
    return packing.unsupported(config)


def wants_cpu(config: ModelConfig, wanted: EngineConfig) -> bool:
    """Whether to use the CPU engine; a note, or an error where it was asked for, when it cannot run the model."""
    if wanted.engine == "torch" or wanted.precision in ("bfloat16", "float16"):
        return False
    elsewhere = gpu_here() if wanted.device == "auto" else wanted.device != "cpu"
    if wanted.engine == "auto" and not wanted.packed_only and (elsewhere or wanted.compile):
        return False
    reason = why_not_cpu(config)
    if reason is None:
        return True
    if wanted.engine == "cpu" or wanted.packed_only:
        raise UserError(f"the CPU engine cannot run this model: {reason}; engine=torch precision=float32 can")
    if "kernels" in reason or "numba" in reason:
        print(f"the CPU engine is not used: {reason}; torch is", file=sys.stderr)
    return False


def open_engine(folder: str | Path, wanted: EngineConfig | None = None) -> Engine:
    """The engine for a model folder."""
    wanted = EngineConfig() if wanted is None else wanted
    place = resolve(folder)
    found = read_config(place)
    if not wants_cpu(found.model, wanted):
        return torch_engine(load_model(place), wanted)
    return cpu_engine(packed_weights(place, _precision(wanted)), wanted)


def engine_for(model: Model, wanted: EngineConfig | None = None) -> Engine:
    """The engine for a model in memory."""
    wanted = EngineConfig() if wanted is None else wanted
    if wants_cpu(model.config, wanted):
        return cpu_engine(packing.pack(finite(model), _precision(wanted)), wanted)
    rounded = wanted.precision in ("bfloat16", "float16")  # a copy, since the model may be in training
    return torch_engine(copy.deepcopy(model) if rounded else model, wanted)


def _precision(wanted: EngineConfig) -> PrecisionOrAuto:
    assert wanted.precision != "bfloat16" and wanted.precision != "float16", "these are torch's"
    return wanted.precision


def cpu_engine(packed: Packed, wanted: EngineConfig) -> CpuEngine:
    from plume.inference.cpu.cpu_engine import CpuEngine

    return CpuEngine(packed, slots=wanted.slots, threads=wanted.threads, cache=wanted.cache_precision)


def torch_engine(model: Model, wanted: EngineConfig) -> Engine:
    import torch

    from plume.inference.torch_engine import TorchEngine
    from plume.util.devices import pick_device

    name = "float32" if wanted.precision == "auto" else wanted.precision
    model = finite(model).to(device=pick_device(wanted.device), dtype=getattr(torch, name))
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    return TorchEngine(model, slots=wanted.slots, compiled=wanted.compile)


def torch_device(wanted: EngineConfig) -> torch.device | str:
    """Where what the engine does not compute is computed: beside it."""
    from plume.util.devices import pick_device

    on_cpu = wanted.engine == "cpu" or wanted.packed_only
    if on_cpu or (wanted.device == "auto" and wanted.engine == "auto" and not gpu_here()):
        return "cpu"
    return pick_device(wanted.device)


def packed_weights(folder: Path, precision: PrecisionOrAuto) -> Packed:
    """The folder's packed weights; packed now, and kept for the next time, if they are not there."""
    source, key, about = packing.source_hash(folder), packing.user_key(), read_config(folder)
    if key is None:
        return packing.pack(finite(load_model(folder)), precision)
    logits, chosen = packing.generates(about.model, about.head), CHOICES if precision == "auto" else (precision,)
    for kind in chosen:
        for path in packing.cache_paths(folder, _label(precision, kind), source):
            if (found := packing.read(path, about.model, kind, source, key, logits=logits)) is not None:
                return found
    packed = packing.pack(finite(load_model(folder)), precision)
    label = _label(precision, packed.precision)
    for path in packing.cache_paths(folder, label, source):
        try:
            packing.write(packed, path, source, key)
            _forget_older(path, label)
            break
        except OSError:
            continue  # a read-only folder or a full disk: try the next place, or do without
    return packed


def _label(asked: str, kind: str) -> str:
    """What a file of packed weights is called by: one that auto chose also says what auto chose."""
    return f"auto-{kind}" if asked == "auto" else kind


def finite(model: Model) -> Model:
    """The model, unless a weight is not a number: whatever it computed would be none either."""
    import torch

    broken = [name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise UserError(f"the weights hold NaN or infinity ({broken[0]}{more}); use an earlier checkpoint")
    return model


def _forget_older(path: Path, label: str) -> None:
    """Packed weights of what the folder held before. The user's cache is shared by many folders and left alone."""
    if path.parent.name == ".plume":
        for other in path.parent.glob(f"cpu-{label}-*.bin"):
            if other != path:
                with suppress(OSError):  # Windows keeps a file that another process has open
                    other.unlink()


class EngineHandle:
    """A model and the engine made from its weights. Both are opened when first needed, by one thread at a time.

    Weights that were changed in place since the engine was made (an optimizer's step, `load_state_dict`) are noticed
    by their version counters, and the engine is made anew from them.
    """

    def __init__(self, folder: Path | None, config: EngineConfig, model: Model | None = None) -> None:
        assert (folder is None) != (model is None)
        self.folder, self.config = folder, config
        self._model, self._batcher, self._draft, self._encoder = model, None, None, None
        self.pause: Callable[[], None] = lambda: None  # called before each part of an encoder's work
        self._loaded: Versions = ()  # what the folder's own weights have
        self._packed: Versions = ()  # what the engine's weights had
        self._lock = threading.RLock()

    _model: Model | None
    _batcher: Batcher | None
    _draft: Batcher | None
    _encoder: EncoderEngine | None

    @property
    def model(self) -> Model:
        """The torch model; the CPU engine does without it."""
        with self._lock:
            if self._model is None:
                assert self.folder is not None
                self._model = finite(load_model(self.folder)).to(torch_device(self.config))
                self._loaded = self._packed = versions(self._model)
            return self._model

    @property
    def batcher(self) -> Batcher:
        with self._lock:
            if self._batcher is not None and self._changed:
                self._batcher.engine.close()
                self._batcher = None
            if self._batcher is None:
                self._batcher = Batcher(self._open())
            return self._batcher

    @batcher.setter
    def batcher(self, batcher: Batcher) -> None:
        with self._lock:
            self._batcher = batcher

    @property
    def _changed(self) -> bool:
        """Whether the weights are others than those that the engine was made from."""
        return self._model is not None and versions(self._model) != self._packed

    @cached_property
    def encodes(self) -> bool:
        """Whether the CPU engine computes the hidden states of this model."""
        if self._model is None:
            assert self.folder is not None
            found = read_config(self.folder)
            config, head = found.model, found.head
        else:
            config, head = self._model.config, self._model.kind
        if packing.generates(config, head) or packing.unsupported(config) is not None:
            return False
        return wants_cpu(config, self.config)

    @property
    def inference_model(self) -> Model:
        """The torch model, with the stack computed by the CPU engine where that gives hidden states."""
        if not self.encodes:
            return self.model
        from plume.inference.engine_stack import with_engine

        return with_engine(self.model, self.encode)

    def encode(
        self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
    ) -> list[Logits]:
        """The last hidden states of each sequence, by the CPU engine."""
        with self._lock:
            if self._encoder is not None and self._changed:
                self._encoder.close()
                self._encoder = None
            if self._encoder is None:
                opened: Any = self._open()
                self._encoder = opened
            encoder = self._encoder
        return encoder.encode(sequences, segments, between=self.pause)

    def _open(self) -> Engine:
        changed = self._model is not None and versions(self._model) != self._loaded
        if self.folder is not None and not changed:
            return open_engine(self.folder, self.config)
        engine = engine_for(self.model, self.config)
        self._packed = versions(self.model)
        return engine

    @property
    def draft(self) -> Batcher:
        """The smaller model that writes ahead, with a slot for each sequence."""
        with self._lock:
            if self._draft is None:
                if self.config.draft is None:
                    raise UserError("speculate=draft needs a draft model; name its folder with draft=")
                engine = open_engine(self.config.draft, replace(self.config, draft=None))
                check_draft(self.batcher.engine, engine)
                self._draft = Batcher(engine)
            return self._draft

    def close(self) -> None:
        """Free the engines' threads and memory."""
        with self._lock:
            for batcher in (self._batcher, self._draft):
                if batcher is not None:
                    batcher.engine.close()
            if self._encoder is not None:
                self._encoder.close()
            self._batcher = self._draft = self._encoder = None


Versions = tuple[tuple[int, int], ...]


def versions(model: Model) -> Versions:
    """Where each parameter is in memory and how often it was changed in place."""
    return tuple((p.data_ptr(), p._version) for p in model.parameters())
