"""Safetensors files written tensor by tensor, so that what is written need never be in memory together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
Layout = Mapping[str, tuple["torch.dtype", Sequence[int]]]  # dtype and shape by name


def write_tensor_file(
    path: Path, layout: Layout, read: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write the tensors that `read` gives by name; the size and hash of the file. Wide dtypes come first, aligned."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    place = 0
    names = sorted(layout, key=lambda name: -layout[name][0].itemsize)
    for name in names:
        dtype, shape = layout[name]
        end = place + math.prod(shape) * dtype.itemsize
        kind = DTYPES[str(dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as stream:
        for part in (len(text).to_bytes(8, "little"), text):
            stream.write(part)
            digest.update(part)
        for name in names:
            tensor = read(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (layout[name][0], tuple(layout[name][1])), name
            write_bytes(stream, digest, tensor)
    return {"bytes": 8 + len(text) + place, "sha256": digest.hexdigest()}


def write_bytes(stream: Any, digest: Any, tensor: Tensor) -> None:
    import torch

    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    data = memoryview(array)
    digest.update(data)
    while len(data):  # a large write may be done in part
        data = data[stream.write(data) :]
