"""How weights and working memory lie for the CPU engine, and a model packed that way: one block that is also a file."""

# N weight rows (outputs), K weight columns (inputs); see tiles.py for panels and groups

from __future__ import annotations

import hashlib
import hmac
import json
import math
import mmap
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from plume.config import ModelConfig
from plume.hf.weights import weight_files
from plume.inference.cpu import panels as forms
from plume.inference.cpu.panels import PANEL, Array, Precision, PrecisionOrAuto, padded
from plume.util.hub import is_bundled
from plume.util.places import user_cache

if TYPE_CHECKING:
    from plume.model.heads import Model

FORMAT = 7  # raise when the order changes: older files are then written anew
PAGE = 4096
HASHED_TOGETHER = 1 << 24  # bytes of one part of a hash
TABLE = "body.embed.tokens.weight"
ADDED = ("body.embed.positions", "body.embed.segments")  # rows that are added as they are, never multiplied

GELU_TANH, GELU, RELU = 0, 1, 2
# entries of the table of addresses: those of each layer, then those of the whole model
ATTN_NORM, QKV, QKV_BIAS, OUT, OUT_BIAS, MLP_NORM, UP, UP_BIAS, DOWN, DOWN_BIAS, PER_LAYER = range(11)
POSITIONS, FINAL_NORM, HEAD, TOKENS = range(4)  # the last two are one where they are tied
# a job; the counters that threads share have cache lines of their own
JOB_NUMBER, JOB_ROWS, JOB_WANTED, JOB_KIND, JOB_BARRIER, JOB_TAKEN, JOB_SIZE = 0, 1, 2, 3, 16, 24, 32
FORWARD, SAMPLING = 0, 1  # kinds of jobs


class Shape(NamedTuple):
    """What the compiled code must know of a model and of the memory it works in."""

    layers: int
    width: int
    heads: int
    head_width: int
    hidden: int
    vocab: int
    band: int
    causal: int
    cached: int  # whether keys and values outlast a step and logits come out; else hidden states do
    post_norm: int
    activation: int
    kind: int  # of the weights, see panels.py
    table_kind: int  # of the token rows, and of output weights of their own
    int8: int  # whether activations are bytes, too
    capacity: int  # tokens a slot can hold, a multiple of LANES
    threads: int
    x: int  # addresses of the working memory
    act: int
    codes: int
    qkv: int
    mixed: int
    middle: int
    logits: int
    private: int
    private_bytes: int
    panels: int  # each thread's unpacked one
    panel_bytes: int
    keys: int
    values: int
    cache_item: int  # bytes of a number of a key or value
    key_bytes: int  # of one head of one slot; scales of the positions, where there are any, are at the end
    value_bytes: int
    width_stride: int  # row lengths of the working memory
    qkv_stride: int
    middle_stride: int
    codes_stride: int
    middle_codes: int
    middle_codes_stride: int
    logits_stride: int
    scores_stride: int


@dataclass(frozen=True)
class Packed:
    config: ModelConfig
    precision: Precision
    block: Array  # bytes, starting at a cache line
    offsets: Array  # where each entry of the kernels' table of addresses starts; -1 means there is none
    generates: bool = True  # whether logits come out, and not hidden states

    @property
    def size(self) -> int:
        return int(self.block.nbytes)


def generates(config: ModelConfig, head: str) -> bool:
    """Whether a model continues text; of any other the engine gives hidden states."""
    return config.causal and head == "next-token"


def unsupported(config: ModelConfig) -> str | None:
    """Why the CPU engine cannot run this model; None when it can."""
    if config.decoder_layers:
        return "it is an encoder-decoder"
    if config.recurrent:
        return "it is recurrent"
    if config.embed_norm and config.norm == "pre":
        return "it normalises the embeddings of a pre-norm stack"
    return None


def entries(
    state: Mapping[str, Array], config: ModelConfig, precision: Precision, *, logits: bool
) -> list[Array | None]:
    """The blocks in the order of the kernels' table. Each norm stands with the product that it feeds."""
    panels, epsilon = partial(forms.panels, precision=precision), np.array([config.norm_eps], np.float32)

    def norm(name: str) -> Array:
        return np.concatenate([state[f"{name}.weight"], state[f"{name}.bias"], epsilon]).astype(np.float32)

    def vector(*names: str) -> Array:
        whole = np.concatenate([state.get(f"{n}.bias", np.zeros(len(state[f"{n}.weight"]), np.float32)) for n in names])
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
    names = [TABLE, "head.output.weight"] if own_output(config, logits) else [TABLE]
    kind = table_precision(config, precision, logits)
    tables = [forms.panels(state[name][: config.vocab_size], precision=kind) for name in names]
    last = before_attention if post else norm("body.norm")
    return [*table, _positions(state, config), last, tables[-1], tables[0] if len(tables) > 1 else None]


def _positions(state: Mapping[str, Array], config: ModelConfig) -> Array:
    """What multiplies the token rows, then for each segment the position rows with the segment's row added."""
    learned = state.get("body.embed.positions.weight")
    rows = _waves(config) if learned is None else learned
    rows = rows[config.first_position : config.first_position + config.context]
    segments = state.get("body.embed.segments.weight")
    rows = rows if segments is None else rows + segments[:, None]
    factor = math.sqrt(config.width) if config.embed_scale else 1.0
    return np.concatenate([np.array([factor]), rows.reshape(-1)]).astype(np.float32)


def _waves(config: ModelConfig) -> Array:
    rates = 10_000.0 ** (-np.arange(0, config.width, 2, dtype=np.float32) / config.width)
    angles = np.arange(config.context + config.first_position, dtype=np.float32)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def own_output(config: ModelConfig, logits: bool) -> bool:
    """Whether the weights that logits are made with are others than the token table."""
    return logits and not config.tie_embeddings


def table_precision(config: ModelConfig, precision: Precision, logits: bool) -> Precision:
    """Of the token table and of output weights of their own: rows that are looked up alone save no time in four bits,
    and an output's are most of what four bits lose.
    """
    return "int8" if precision == "int4" and not (logits and config.tie_embeddings) else precision


def pack(model: Model, precision: PrecisionOrAuto) -> Packed:
    """Pack in memory; auto is float24 if it holds for every matrix."""
    state = {name: tensor.detach().float().cpu().numpy() for name, tensor in model.state_dict().items()}
    if precision == "auto":
        matrices = [weight for name, weight in state.items() if weight.ndim == 2 and not name.startswith(ADDED)]
        precision = "float24" if all(forms.float24_holds(weight) for weight in matrices) else "float32"
    logits = generates(model.config, model.kind)
    blocks = entries(state, model.config, precision, logits=logits)
    offsets, size = layout([0 if part is None else part.nbytes for part in blocks])
    block = aligned(size)
    for offset, part in zip(offsets, blocks, strict=True):
        if part is not None:
            block[offset : offset + part.nbytes] = part.view(np.uint8)
    return Packed(model.config, precision, block, offsets, logits)


def entry_sizes(config: ModelConfig, precision: Precision, *, logits: bool = True) -> list[int]:
    """Bytes of each entry, without the weights; 0 where there is none."""

    def panels(n: int, k: int, kind: Precision = precision) -> int:
        return padded(n) // PANEL * forms.panel_bytes(forms.KINDS[kind], k)

    def matrix(n: int, k: int) -> list[int]:
        return [panels(n, k), 4 * padded(n)]

    width, ffn, norm = config.width, config.ffn_width, 4 * (2 * config.width + 1)
    block = [norm, *matrix(3 * width, width), *matrix(width, width), norm, *matrix(ffn, width), *matrix(width, ffn)]
    tokens = panels(config.vocab_size, width, table_precision(config, precision, logits))
    tables = [tokens, tokens if own_output(config, logits) else 0]
    places = 4 * (1 + max(1, config.segments) * config.context * width)
    sizes = [*block * config.layers, places, norm, *tables]
    if config.norm == "post" and not config.embed_norm:
        sizes[0] = 0
    return sizes


def layout(sizes: Sequence[int]) -> tuple[Array, int]:
    """Where entries of these sizes start, each at a page, with -1 for one that is empty; and the size of all."""
    ends = np.cumsum([_whole_pages(size) for size in sizes])
    starts = ends - [_whole_pages(size) for size in sizes]
    starts = np.where(np.array(sizes) == 0, -1, starts)
    starts[-1] = starts[-1] if sizes[-1] else starts[-2]  # tied: the token rows are the output's
    return starts, int(ends[-1])


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def aligned(size: int, kind: type = np.uint8) -> Array:
    """Fresh memory (zeros where first touched) that starts at a page."""
    whole = np.zeros(size * np.dtype(kind).itemsize + PAGE, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + size * np.dtype(kind).itemsize].view(kind)


def reserved(size: int) -> Array:
    """Memory that costs nothing before it is touched, and then a page at a time."""
    pages = mmap.mmap(-1, size)
    with suppress(AttributeError, OSError):  # numpy's own would be taken two megabytes at a time
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)


# ---- the cache: packed weights as a file -------------------------------------------------------------------------
# A file is used only if it carries the hash of the weights it was made from and a keyed hash of its own bytes. The key
# is the user's, so that a file which came with somebody's folder is not trusted, however well it is made.


def source_hash(folder: Path) -> str:
    """Of what a folder's packed weights are made from: the bytes of its config and weights, hashed on all cores."""
    parts = [[FORMAT], *([path.name, _digests(path).hex()] for path in (folder / "config.json", *weight_files(folder)))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _digests(path: Path) -> bytes:
    """The digests of a file's parts, one after another."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        view = memoryview(whole)
        try:
            return _digests_of(view)
        finally:
            view.release()


def _digests_of(data: Any) -> bytes:
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        starts = range(0, len(data), HASHED_TOGETHER)
        return b"".join(pool.map(lambda at: hashlib.sha256(data[at : at + HASHED_TOGETHER]).digest(), starts))


def _seal(key: bytes, source: str, precision: str, block: Array) -> str:
    """The keyed hash of packed weights and of what they were made from."""
    message = json.dumps([FORMAT, source, precision]).encode() + _digests_of(block)
    return hmac.new(key, message, "sha256").hexdigest()


def user_key() -> bytes | None:
    """A secret of this user, made when first needed; None where none can be kept."""
    path = user_cache() / "key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        key = path.read_bytes()
    except OSError:
        return None
    return key if len(key) == 32 and _private(path) else None


def _private(path: Path) -> bool:
    """Whether nobody else can change a file."""
    found = path.stat()
    return os.name == "nt" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def write(packed: Packed, path: Path, source: str, key: bytes) -> None:
    """One file: a page of JSON, then the block. Written aside and renamed."""
    head = {"format": FORMAT, "source": source, "seal": _seal(key, source, packed.precision, packed.block)}
    text = json.dumps(head).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(text.ljust(PAGE))
            packed.block.tofile(file)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read(
    path: Path, config: ModelConfig, precision: Precision, source: str, key: bytes, *, logits: bool = True
) -> Packed | None:
    """A packed file that was made from this source; None for anything else.

    Sizes and offsets follow from the config, never from the file. It is copied and not mapped: anonymous memory can be
    in pages of two megabytes, which are read faster, and nobody can change it behind the check.
    """
    offsets, size = layout(entry_sizes(config, precision, logits=logits))
    try:
        if path.stat().st_size != PAGE + size:
            return None
        block = aligned(PAGE + size)
        with path.open("rb") as file:
            if file.readinto(block) != PAGE + size:  # type: ignore[arg-type]
                return None
        head = json.loads(bytes(block[:PAGE]))
        block = block[PAGE:]
        fits = (head["format"], head["source"]) == (FORMAT, source)
        if not fits or not hmac.compare_digest(head["seal"], _seal(key, source, precision, block)):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Packed(config, precision, block, offsets, logits)


def cache_paths(folder: Path, label: str, source: str) -> list[Path]:
    """Where a folder's packed weights may be: in it, or in the user's cache when it is read-only or the package's."""
    name = f"cpu-{label}-{source[:16]}.bin"
    return [user_cache() / name] if is_bundled(folder) else [folder / ".plume" / name, user_cache() / name]
