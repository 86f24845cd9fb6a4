"""ONNX files of every head: the graph with its inputs and outputs, and what onnxruntime computes with it."""

# B batch, T tokens, P tokens in the cache, L layers, H heads, K head width, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plume.config import UserError
from plume.hf import EmbeddingConfig
from plume.inference.outputs import pooling
from plume.model.heads import Model, Pretraining
from plume.model.transformer import Cache, EncoderDecoder, LayerCache, Transformer

CHECKED_TOKENS = 16
LARGEST = 400_000_000  # weights in one file; the format holds 2 GB
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Graph:
    """A module to be written: its arguments by name with their free dimensions, and the names of its outputs."""

    form: nn.Module
    model: Model
    inputs: Mapping[str, Tensor]  # of small sizes, to trace it with
    free: Mapping[str, Mapping[int, str]]  # dimensions of any size
    outputs: tuple[str, ...]

    @property
    def cache(self) -> bool:
        return "past" in self.inputs


def graph_of(model: Model, settings: EmbeddingConfig | None, *, cache: bool) -> Graph:
    """What is written for a model's head; `settings` say how a folder of sentence-transformers makes vectors."""
    c, rows = model.config, {0: "batch", 1: "tokens"}
    tokens, lengths = torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 2])
    if cache:
        past = torch.zeros(c.layers, 2, 2, c.heads, 5, c.head_width)
        free = {"tokens": rows, "past": {2: "batch", 4: "past"}}
        return Graph(WithCache(model), model, {"tokens": tokens, "past": past}, free, ("logits", "present"))
    if model.kind == "next-token" and not c.decoder_layers:
        return Graph(model, model, {"tokens": tokens}, {"tokens": rows}, ("logits",))
    inputs, free = {"tokens": tokens, "lengths": lengths}, {"tokens": rows, "lengths": {0: "batch"}}
    if c.decoder_layers:
        inputs["target"], free["target"] = torch.zeros(2, 4, dtype=torch.long), {0: "batch", 1: "target"}
        return Graph(WithTarget(model), model, inputs, free, ("logits",))
    if model.kind == "bare":
        return Graph(Embedder(model, settings), model, inputs, free, ("token_embeddings", "sentence_embedding"))
    if c.segments > 1:
        inputs["segments"], free["segments"] = torch.zeros_like(tokens), rows
    outputs = ("logits", "next_sentence") if model.kind == "pretraining" else ("logits",)
    return Graph(WithLengths(model), model, inputs, free, outputs)


# ---- modules -----------------------------------------------------------------------------------------------------


class GrowingLayer(LayerCache):
    """One layer's cache as a value: what was there, and what is there now."""

    def __init__(self, past: Tensor) -> None:
        self.now = past  # (2, B, H, P, K)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.now = torch.cat([self.now, torch.stack([k, v])], dim=3)
        return self.now[0], self.now[1]


class GrowingCache(Cache):
    """A cache that is an input and an output of the graph, (L, 2, B, H, P, K); P may be 0."""

    def __init__(self, past: Tensor, capacity: int) -> None:
        self.growing = [GrowingLayer(layer) for layer in past]
        self.layers = [*self.growing]
        self.memory = []
        self.lengths = torch.zeros(1, dtype=torch.long)
        self.longest, self.ragged, self.capacity = past.shape[4], False, capacity


class WithCache(nn.Module):
    """(B, T) tokens and (L, 2, B, H, P, K) past to (B, T, V) logits and the grown past."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        body = self.model.body
        assert isinstance(body, Transformer)
        cache = GrowingCache(past, self.model.config.context)
        hidden = body(tokens, cache=cache)
        return self.model.read(hidden), torch.stack([layer.now for layer in cache.growing])


class WithLengths(nn.Module):
    """(B, T) tokens, (B,) lengths and (B, T) segments, where the family has them, to what the head gives."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, lengths: Tensor, segments: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        hidden = self.model.body(tokens, segments=segments, lengths=lengths)  # (B, T, D)
        head = self.model.head
        if isinstance(head, Pretraining):
            return self.model.read(hidden), head.follows(hidden)
        return self.model.read(hidden, lengths)


class Embedder(nn.Module):
    """(B, T) tokens and (B,) lengths to (B, T, D) hidden states and the (B, D) vectors that `embed` gives."""

    def __init__(self, model: Model, settings: EmbeddingConfig | None) -> None:
        super().__init__()
        self.model, self.normalize = model, settings is not None and settings.normalize
        self.pool = pooling(model, "mean" if settings is None else settings.pool)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.body(tokens, lengths=lengths)
        vectors = self.pool(hidden, lengths)
        return hidden, F.normalize(vectors, dim=1) if self.normalize else vectors


class WithTarget(nn.Module):
    """(B, T) source tokens, (B,) their lengths and the target so far to the target's logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        assert isinstance(self.model.body, EncoderDecoder)
        return self.model(tokens, target, lengths=lengths)


# ---- the file ----------------------------------------------------------------------------------------------------


def write(graph: Graph, path: Path) -> None:
    import contextlib
    import io
    import logging
    import warnings

    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError("writing ONNX needs the onnx and onnxscript packages: pip install 'plume-lm[export]'") from None
    most = graph.model.config.context
    names = {name for free in graph.free.values() for name in free.values()}
    dims = {name: torch.export.Dim(name) if name == "batch" else torch.export.Dim(name, max=most) for name in names}
    shapes = {name: {place: dims[size] for place, size in free.items()} for name, free in graph.free.items()}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph.form.eval(),
            tuple(graph.inputs.values()),
            str(path),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=sum(p.numel() for p in graph.model.parameters()) > LARGEST,
            verbose=False,
        )


def difference(graph: Graph, path: Path) -> float | None:
    """How far onnxruntime's outputs are from ours at most, relative to their spread; None: it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        return None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = sample(graph)
    with torch.inference_mode():
        if graph.cache:
            found = {"logits": in_two_parts(session, graph, given["tokens"])}
            ours = {"logits": graph.model(given["tokens"]).numpy()}
        else:
            arrays = {name: tensor.numpy() for name, tensor in given.items()}
            found = dict(zip(graph.outputs, session.run(list(graph.outputs), arrays), strict=True))
            computed = graph.form(**given)
            several = computed if isinstance(computed, tuple) else (computed,)
            ours = dict(zip(graph.outputs, (one.numpy() for one in several), strict=True))
    return max(apart(found[name], ours[name], given) for name in ours)


def sample(graph: Graph) -> dict[str, Tensor]:
    """Random rows of another number and other lengths than the graph was traced with, the last one shorter."""
    c, draw = graph.model.config, torch.Generator().manual_seed(0)
    size = min(CHECKED_TOKENS, c.context)
    lengths = torch.tensor([size, size, max(1, size // 2)])
    rows = torch.randint(0, c.vocab_size, (len(lengths), size), generator=draw)
    made = {"tokens": rows, "lengths": lengths, "target": rows.flip(0)[:, 1:]}
    made["segments"] = (torch.arange(size) >= size // 3).long().expand_as(rows).contiguous()
    return {name: tensor for name, tensor in made.items() if name in graph.inputs}


def in_two_parts(session: Any, graph: Graph, tokens: Tensor) -> Floats:
    """The logits of tokens that are read in two parts through the cache."""
    c, half = graph.model.config, tokens.shape[1] // 2
    past = np.zeros((c.layers, 2, len(tokens), c.heads, 0, c.head_width), np.float32)
    first, past = session.run(["logits", "present"], {"tokens": tokens[:, :half].numpy(), "past": past})
    second, _ = session.run(["logits", "present"], {"tokens": tokens[:, half:].numpy(), "past": past})
    both: Floats = np.concatenate([first, second], axis=1)
    return both


def apart(theirs: Floats, ours: Floats, given: Mapping[str, Tensor]) -> float:
    """The largest difference; what stands at padding is no output."""
    if "lengths" in given and "target" not in given and ours.shape[:2] == given["tokens"].shape:
        real = (torch.arange(ours.shape[1]) < given["lengths"][:, None]).numpy()
        theirs, ours = theirs[real], ours[real]
    spread = max(float(ours.std()), float(np.abs(ours).mean()), 1e-12)
    return float(np.abs(theirs - ours).max()) / spread
