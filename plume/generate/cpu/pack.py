"""A model's weights in the order in which the CPU engine reads them, as one block of memory that is also a file."""

# N weight rows (outputs), K weight columns (inputs); see layout.py and tiles.py for panels and groups

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from plume.config import ModelConfig
from plume.generate.cpu.layout import FIXED, GROUP, HEADER, PANEL, padded
from plume.weights.folder import weight_files

if TYPE_CHECKING:
    from plume.heads import Model

Array = np.ndarray[Any, Any]
Precision = Literal["float32", "int8"]
FORMAT = 2  # raise when the order changes: older files are then written anew
PAGE = 4096
BITS = 23  # of a float weight, beside its sign


@dataclass(frozen=True)
class Packed:
    config: ModelConfig
    precision: Precision
    block: Array  # bytes, starting at a cache line
    offsets: Array  # where each entry of the kernels' table of addresses starts; -1 means there is none

    @property
    def size(self) -> int:
        return int(self.block.nbytes)


def unsupported(config: ModelConfig, head: str) -> str | None:
    """Why the CPU engine cannot run this model; None when it can."""
    if config.decoder_layers:
        return "it is an encoder-decoder"
    if not config.causal or head != "next-token":
        return "it does not predict the next token"
    if config.embed_norm and config.norm == "pre":
        return "it normalises the embeddings of a pre-norm stack"
    return None


def float_panels(weight: Array) -> Array:
    """(N, K) to bytes: panels of PANEL rows side by side, k by k, as whole numbers of 24 bits times a power of two.

    A row's largest weight keeps all but the last of its bits, and the others round at the same place: less than adding
    up K products in float32 loses anyway, for three quarters of the bytes.
    """
    n, k = padded(len(weight)), weight.shape[1]
    rows = np.zeros((n, k), np.float32)
    rows[: len(weight)] = weight
    exponents = np.frexp(np.maximum(np.abs(rows).max(axis=1), np.float32(1e-30)))[1] - BITS
    codes = np.clip(np.rint(np.ldexp(rows, -exponents[:, None])), -(2**BITS), 2**BITS - 1).astype(np.int32)
    columns = codes.reshape(n // PANEL, PANEL, k).swapaxes(1, 2)
    out = np.empty((n // PANEL, HEADER + k * FIXED), np.uint8)
    out[:, :HEADER] = np.ldexp(np.float32(1), exponents).reshape(-1, PANEL).view(np.uint8)
    body = out[:, HEADER:].reshape(n // PANEL, k, FIXED)
    body[..., : 2 * PANEL] = np.ascontiguousarray((columns >> 8).astype(np.int16)).view(np.uint8)
    body[..., 2 * PANEL :] = columns & 255
    return out.reshape(-1)


def int8_panels(weight: Array) -> Array:
    """(N, K) to bytes: per panel and group the scales as bfloat16, then unsigned codes with 128 for zero."""
    n, k = padded(len(weight)), padded(weight.shape[1])
    rows = np.zeros((n, k), np.float32)
    rows[: len(weight), : weight.shape[1]] = weight
    groups = rows.reshape(n // PANEL, PANEL, k // GROUP, GROUP)
    largest = np.maximum(np.abs(groups).max(axis=3), 1e-30) / np.float32(127)
    bits = (largest.astype(np.float32).view(np.uint32) + 0xFFFF) >> 16  # rounded up, so that no code passes 127
    scales = (bits << 16).astype(np.uint32).view(np.float32)
    codes = (np.rint(groups / scales[..., None]) + 128).astype(np.uint8)
    quads = codes.reshape(n // PANEL, PANEL, k // GROUP, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
    out = np.empty((n // PANEL, k // GROUP, 2 * PANEL + GROUP * PANEL), np.uint8)
    out[..., : 2 * PANEL] = np.ascontiguousarray(bits.astype(np.uint16).transpose(0, 2, 1)).view(np.uint8)
    out[..., 2 * PANEL :] = quads.reshape(n // PANEL, k // GROUP, GROUP * PANEL)
    return out.reshape(-1)


def entries(state: Mapping[str, Array], config: ModelConfig, precision: Precision) -> list[Array | None]:
    """The blocks in the order of the kernels' table. Each norm stands with the product that it feeds."""
    panels = float_panels if precision == "float32" else int8_panels
    epsilon = np.array([config.norm_eps], np.float32)

    def norm(name: str) -> Array:
        return np.concatenate([state[f"{name}.weight"], state[f"{name}.bias"], epsilon]).astype(np.float32)

    def vector(*names: str) -> Array:
        parts = [state.get(f"{name}.bias", np.zeros(len(state[f"{name}.weight"]), np.float32)) for name in names]
        whole = np.concatenate(parts)
        return np.pad(whole, (0, padded(len(whole)) - len(whole))).astype(np.float32)

    post, table = config.norm == "post", list[Array | None]()
    before_attention = norm("body.embed.norm") if config.embed_norm else None
    for i in range(config.layers):
        block = f"body.blocks.{i}"
        attn, mlp = f"{block}.attn.inner", f"{block}.mlp.inner"
        qkv = [f"{attn}.{name}" for name in ("q", "k", "v")]
        table += [
            before_attention if post else norm(f"{block}.attn.norm"),
            panels(np.concatenate([state[f"{name}.weight"] for name in qkv])),
            vector(*qkv),
            panels(state[f"{attn}.out.weight"]),
            vector(f"{attn}.out"),
            norm(f"{block}.attn.norm") if post else norm(f"{block}.mlp.norm"),
            panels(state[f"{mlp}.up.weight"]),
            vector(f"{mlp}.up"),
            panels(state[f"{mlp}.down.weight"]),
            vector(f"{mlp}.down"),
        ]
        before_attention = norm(f"{block}.mlp.norm")
    return [
        *table,
        _positions(state, config),
        before_attention if post else norm("body.norm"),
        _head(state, config, panels),
    ]


def _positions(state: Mapping[str, Array], config: ModelConfig) -> Array:
    """What multiplies the token rows, then the position rows with the first segment's row added."""
    learned = state.get("body.embed.positions.weight")
    rows = _waves(config) if learned is None else learned
    rows = rows[config.first_position : config.first_position + config.context]
    segment = state.get("body.embed.segments.weight")
    rows = rows if segment is None else rows + segment[0]
    factor = math.sqrt(config.width) if config.embed_scale else 1.0
    return np.concatenate([np.array([factor]), rows.reshape(-1)]).astype(np.float32)


def _waves(config: ModelConfig) -> Array:
    rates = 10_000.0 ** (-np.arange(0, config.width, 2, dtype=np.float32) / config.width)
    angles = np.arange(config.context + config.first_position, dtype=np.float32)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _head(state: Mapping[str, Array], config: ModelConfig, panels: Any) -> Array:
    packed: Array = panels(state["body.embed.tokens.weight"][: config.vocab_size])
    return packed


def pack(model: Model, precision: Precision) -> Packed:
    """Pack in memory."""
    state = {name: tensor.detach().float().cpu().numpy() for name, tensor in model.state_dict().items()}
    blocks = entries(state, model.config, precision)
    offsets, end = [], 0
    for part in blocks:
        offsets.append(-1 if part is None else end)
        end += 0 if part is None else _whole_pages(part.nbytes)
    block = aligned(end)
    for offset, part in zip(offsets, blocks, strict=True):
        if part is not None:
            block[offset : offset + part.nbytes] = part.view(np.uint8)
    return Packed(model.config, precision, block, np.array(offsets, np.int64))


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def aligned(size: int, kind: type = np.uint8) -> Array:
    """Fresh memory (zeros where first touched) that starts at a page."""
    whole = np.zeros(size * np.dtype(kind).itemsize + PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + size * np.dtype(kind).itemsize].view(kind)


def write(packed: Packed, path: Path) -> None:
    """One file: a page or more of JSON, then the block. Written aside and renamed."""
    head = {
        "format": FORMAT,
        "config": asdict(packed.config),
        "precision": packed.precision,
        "offsets": packed.offsets.tolist(),
        "size": packed.size,
    }
    text = json.dumps(head).encode()
    lead = _whole_pages(len(text) + 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(lead.to_bytes(8, "little") + text.ljust(lead - 8))
            packed.block.tofile(file)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read(path: Path) -> Packed | None:
    """A packed file, memory-mapped; None when it is not one, or of another format, or cut off."""
    try:
        with path.open("rb") as file:
            lead = int.from_bytes(file.read(8), "little")
            if not PAGE <= lead <= 1 << 24:
                return None
            head = json.loads(file.read(lead - 8))
        if head["format"] != FORMAT or path.stat().st_size != lead + head["size"]:
            return None
        block: Array = np.memmap(path, np.uint8, mode="r", offset=lead)
        offsets = np.array(head["offsets"], np.int64)
        return Packed(ModelConfig(**head["config"]), head["precision"], block, offsets)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def place_for(folder: Path, precision: Precision) -> list[Path]:
    """Where a folder's packed weights may stand: in it, or in the user's cache when it cannot be written to."""
    files = [folder / "config.json", *weight_files(folder)]
    marks = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    here = hashlib.sha256(json.dumps([FORMAT, marks]).encode()).hexdigest()[:16]
    away = hashlib.sha256(json.dumps([FORMAT, str(folder.resolve()), marks]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "plume"
    return [folder / ".plume" / f"cpu-{precision}-{here}.bin", cache / f"cpu-{precision}-{away}.bin"]
