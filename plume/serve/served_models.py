"""The models of a server: opened at the start or, for checkpoints of a run, at the first request."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import math
import re
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from anyio import CapacityLimiter, to_thread

from plume.config import ServeConfig, UserError
from plume.hf import load_tokenizer_of, resolve
from plume.inference.batcher import Batcher
from plume.inference.engine import Engine, Feed, Logits
from plume.inference.sequences import SequenceState
from plume.lm import LM
from plume.serve.api_errors import ApiError
from plume.serve.scheduler import CHUNK, CURRENT, Busy, Scheduler, chunks, pause
from plume.serve.schemas import TextOrTokens
from plume.util.console import plural
from plume.util.run_folder import is_run, split_reference

if TYPE_CHECKING:
    from plume.explain import Explanation
    from plume.tasks.explained_rows import ExplainedRow

T = TypeVar("T")
MASKED_HEADS = ("masked-token", "pretraining")
EXPLAINED_BYTES = 256 << 20  # of activations of texts before the last one, so that a page may return to them
LONG_TEXT = 50_000  # characters
BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
NAMES_LISTED = 20  # models in an error message
FIRST_USED = ("plume.inference.engine_stack", "safetensors.torch", "encodings.idna", "jinja2.ext", "jinja2.sandbox")
TRIM_SECONDS = 60.0  # between two times that free memory is given back
M_ARENA_MAX = -8  # of glibc's mallopt
ARENAS = 2  # heaps that all threads share; by default each thread may have its own, with free pages of its own


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: a folder or hub name, or one checkpoint of a run."""

    place: str
    run: str | None = None
    step: int | None = None


class ScheduledBatcher:
    """The batcher of an LM that is served: whoever asks for logits waits for the turn."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def logits_for(self, tokens: Sequence[int], wanted: int = 1) -> Logits:
        reading = CURRENT.get()
        assert reading is not None, "asked for outside a reading"
        return reading.logits(tokens, wanted)

    def run(self, sequences: Sequence[SequenceState]) -> Iterator[SequenceState]:
        """For what a reading writes by itself; requests that generate are submitted to the scheduler."""
        return Batcher(TurnEngine(self)).run(sequences)

    @contextmanager
    def exclusive(self) -> Iterator[Engine]:
        yield TurnEngine(self)


class TurnEngine:
    """Slots of one reading, such as its beams: it knows their tokens and asks for each one's logits when it has the
    turn, so that a search never keeps others from the engine."""

    def __init__(self, batcher: ScheduledBatcher) -> None:
        engine = batcher.engine
        self.name, self.config, self.slots, self.capacity = engine.name, engine.config, engine.slots, engine.capacity
        self._batcher, self._read = batcher, [list[int]() for _ in range(self.slots)]

    def length(self, slot: int) -> int:
        return len(self._read[slot])

    def step(self, feeds: Sequence[Feed]) -> Logits:
        for feed in feeds:
            self._read[feed.slot] += feed.tokens
        return np.concatenate([self._batcher.logits_for(self._read[feed.slot], feed.wanted) for feed in feeds])

    def rewind(self, slot: int, length: int) -> None:
        del self._read[slot][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        self._read[target] = self._read[source][:length]

    def close(self) -> None:
        pass


class Served:
    """One open model: its LM and the scheduler that shares out its compute."""

    def __init__(self, name: str, origin: Origin, lm: LM, config: ServeConfig) -> None:
        self.name, self.origin, self.lm, self.config = name, origin, lm, config
        self.generates = lm.head == "next-token" and not lm.config.decoder_layers
        self.masks = lm.head in MASKED_HEADS and lm.tokenizer.mask is not None
        batcher = None
        if self.generates:
            self.engine = lm.engine
            batcher = lm.batcher
            lm.batcher = ScheduledBatcher(lm.engine)  # type: ignore[assignment]
        self.scheduler = Scheduler(batcher, queue=config.queue, name=name)
        self._lock, self._search, self._hooked = threading.Lock(), threading.Lock(), False
        self._explained: OrderedDict[tuple[int, ...], Explanation] = OrderedDict()

    @property
    def label(self) -> str:
        """Its name in metrics; all checkpoints share one, since there may be any number."""
        return self.name if self.origin.step is None else "checkpoint"

    @property
    def engine_name(self) -> str:
        return self.engine.name if self.generates else self.lm.encoder_name

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.lm)

    @property
    def vocabulary(self) -> int:
        return min(self.lm.config.vocab_size, self.lm.tokenizer.vocab_size)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def what(self) -> str:
        """What kind of model it is, in words that follow its name."""
        return "is an encoder-decoder" if self.lm.config.decoder_layers else f"has a {self.lm.head} head"

    def generating(self) -> Scheduler:
        if not self.generates:
            message = f"{self.name} does not generate text: it {self.what}"
            raise ApiError(400, message, param="model", code="wrong_model")
        return self.scheduler

    async def read(self, work: Callable[[], T], client: str, deadline: float) -> T:
        """Do the work in a thread, in slices between those of other requests; cancelled with the request.

        The queue bounds the threads. Those of anyio end when idle; a ThreadPoolExecutor keeps those of its busiest
        moment, each with a stack, a heap and threads of torch.
        """
        reading = self.scheduler.start_reading(client, deadline)
        try:
            limiter = CapacityLimiter(math.inf)
            return await to_thread.run_sync(reading.run, work, abandon_on_cancel=True, limiter=limiter)
        finally:
            reading.cancel()

    @property
    def sliced_lm(self) -> LM:
        """The LM, passing the turn on between the layers of its torch model and the parts of an encoder's work."""
        with self._lock:
            if not self._hooked:
                from torch import nn

                for module in self.lm.model.eval().modules():
                    if isinstance(module, nn.LayerNorm):
                        module.register_forward_pre_hook(pause)
                self.lm.pause_with(pause)
                self._hooked = True
        return self.lm

    @contextmanager
    def searching(self) -> Iterator[LM]:
        """The LM for a beam search, which uses all slots of the engine."""
        reading = CURRENT.get()
        assert reading is not None
        with reading.alone(self._search):
            yield self.sliced_lm

    # -- texts

    def spell(self, token: int) -> str:
        from plume.tasks.explained_rows import spelled

        return spelled(self.lm.tokenizer, token)

    def tokens_of(
        self, given: TextOrTokens | None, *, start: bool = False, special: bool = False, field: str = "input"
    ) -> list[int]:
        """The ids of a request's text in this field. An empty one may stand for the start token."""
        ids = self._encode(given, special) if isinstance(given, str) else list(given or ())
        if (wrong := max(ids, default=0)) >= self.vocabulary:
            raise ApiError(400, f"token {wrong} is not in the vocabulary (0 to {self.vocabulary - 1})", param=field)
        if not ids and start:
            ids = self.lm.encode(None)
        if not ids:
            raise ApiError(400, "the text is empty", param=field)
        return ids

    def _encode(self, text: str, special: bool) -> list[int]:
        """Long texts are tokenized part by part, in turn with other work, since a part cannot be interrupted."""
        if len(text) < LONG_TEXT or self.lm.tokenizer.kind == "library":
            return self.lm.tokenizer.encode(text, allow_special=special)
        ids = list[int]()
        for part in parts_of(text):
            pause()
            ids += self.lm.tokenizer.encode(part, allow_special=special)
        pause()
        return ids

    def check_length(self, ids: Sequence[int]) -> None:
        if len(ids) > self.lm.config.context:
            raise ApiError(
                400,
                f"the text has {len(ids)} tokens, but {self.name} reads at most {self.lm.config.context}",
                code="context_length_exceeded",
            )

    def rows_of(self, text: TextOrTokens, pair: str | None) -> list[ExplainedRow]:
        """The token rows that the model's task makes of a text or two."""
        from plume.tasks.explained_rows import explained_rows

        return explained_rows(self.sliced_lm.model, self.lm.tokenizer, self.lm.folder, text, pair)

    def explanation(self, text: TextOrTokens, pair: str | None = None, row: int = 0) -> Explanation:
        """The activations of one row; the last few are kept, since a page asks many things about one text."""
        from plume.explain import explain

        rows = self.rows_of(text, pair)
        if row >= len(rows):
            raise ApiError(400, f"row={row}: this text makes {plural(len(rows), 'row')}", param="row")
        chosen = rows[row]
        self.check_length(chosen.tokens)
        key = (*chosen.tokens, -1, *(chosen.segments or ()), -1, *(chosen.source or ()))
        with self._lock:
            found = self._explained.get(key)
        if found is None:
            given = {"segments": chosen.segments, "source": chosen.source}
            found = explain(self.sliced_lm.model, chosen.tokens, spell=self.spell, **given)
            found.mask = self.lm.tokenizer.mask if chosen.source is None else None
        with self._lock:
            self._explained[key] = found
            self._explained.move_to_end(key)
            while len(self._explained) > 1 and sum(e.bytes for e in self._explained.values()) > EXPLAINED_BYTES:
                self._explained.popitem(last=False)
        return found

    def about(self) -> dict[str, Any]:
        return describe(self.lm, self.origin) | {"engine": self.engine_name, "parameters": self.parameters}

    def close(self) -> None:
        self.scheduler.close()
        self._explained.clear()
        self.lm.close()


def parts_of(text: str) -> Iterator[str]:
    """A long text cut before blanks between two words, where every kind of tokenizer cuts it anyway."""
    begin = 0
    while len(text) - begin > LONG_TEXT:
        found = BETWEEN_WORDS.search(text, begin + LONG_TEXT // 2)
        if found is None:
            break
        yield text[begin : found.start()]
        begin = found.start()
    yield text[begin:]


def describe(lm: LM, origin: Origin) -> dict[str, Any]:
    """What a client must know of a model to use it."""
    from plume.tasks.explained_rows import page_fields

    config, tokenizer = lm.config, lm.tokenizer
    return {
        "head": lm.head,
        "labels": list(lm.labels),
        "generates": lm.head == "next-token" and not config.decoder_layers,
        "predicts": (lm.head == "next-token" or lm.head in MASKED_HEADS) and not config.decoder_layers,
        "masks": lm.head in MASKED_HEADS and tokenizer.mask is not None,
        "mask_id": tokenizer.mask,
        "causal": config.causal,
        "layers": config.layers,
        "heads": config.heads,
        "width": config.width,
        "context": config.context,
        "vocabulary": min(config.vocab_size, tokenizer.vocab_size),
        "tokenizer": tokenizer.kind,
        "spaced": tokenizer.kind not in ("characters", "bytes"),
        "run": origin.run,
        "step": origin.step,
        **page_fields(lm.config, lm.head, lm.folder, tokenizer),
    }


def model_entry(name: str, about: dict[str, Any], created: int = 0) -> dict[str, Any]:
    """A model in a list of models, in OpenAI's shape."""
    shape = {"object": "model", "created": created, "owned_by": "plume"}
    return {"id": name, **shape, "max_model_len": about["context"], "plume": about}


class ServedModels:
    """Models by name. Names from requests are only ever looked up here."""

    def __init__(self, config: ServeConfig, checkpoints: Callable[[], dict[str, Origin]] | None = None) -> None:
        self.config = config
        self.started = int(time.time())
        self._checkpoints = checkpoints
        self._open: dict[str, Served] = {}
        self._lazy: OrderedDict[str, Served] = OrderedDict()
        self._opening: dict[str, asyncio.Task[Served]] = {}
        self._wanted = Counter[str]()  # requests that wait for a checkpoint, by its name
        self._one_at_a_time = asyncio.Lock()

    def open_all(self) -> None:
        for module in FIRST_USED:  # by some requests
            import_module(module)
        for name, place in named(self.config.models).items():
            lm = open_lm(place, self.config)
            if lm.head == "next-token" and not lm.config.decoder_layers:
                lm.generate([0], max_new_tokens=2, ignore_eos=True)  # compiles what no cache has, before clients wait
            folder, step = split_reference(place)
            run = folder.resolve().name if is_run(folder) else None
            served = self._open[name] = Served(name, Origin(place, run=run, step=step), lm, self.config)
            served.spell(lm.tokenizer.encode("a")[0])  # what a first request would import or build
            served.about()

    def checkpoints(self) -> dict[str, Origin]:
        return {} if self._checkpoints is None else self._checkpoints()

    @property
    def opened(self) -> list[Served]:
        return [*self._open.values(), *self._lazy.values()]

    async def get(self, name: str) -> Served:
        if (found := self._open.get(name)) is not None:
            return found
        if name in self._lazy:
            self._lazy.move_to_end(name)
            return self._lazy[name]
        known = await asyncio.to_thread(self.checkpoints)
        if name not in known:
            message = f"there is no model {name!r}; models: {', '.join([*self._open, *known][:NAMES_LISTED])}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if name not in self._opening:
            self._opening[name] = asyncio.create_task(self._open_checkpoint(name, known[name]))
        self._wanted[name] += 1
        try:
            return await asyncio.shield(self._opening[name])
        finally:
            self._wanted[name] -= 1
            self._wanted += Counter()  # forgets names with none

    async def _open_checkpoint(self, name: str, origin: Origin) -> Served:
        try:
            async with self._one_at_a_time:
                if not self._wanted[name]:  # all who asked have left
                    raise asyncio.CancelledError
                lm = await asyncio.to_thread(open_lm, origin.place, self.config)
                await self._make_room(memory_of(lm))
                self._lazy[name] = await asyncio.to_thread(Served, name, origin, lm, self.config)
                return self._lazy[name]
        except UserError as error:  # the message has paths of this machine
            print(f"{name} cannot be opened: {error}", file=sys.stderr, flush=True)
            message = f"{name} cannot be opened; the server's log has the reason"
            raise ApiError(409, message, param="model", code="model_not_openable") from None
        finally:
            del self._opening[name]

    async def _make_room(self, needed: int) -> None:
        """Close idle checkpoints, the longest unused first, until another one fits."""
        for name in [name for name, served in self._lazy.items() if served.idle]:
            if self._fits(needed):
                return
            await asyncio.to_thread(self._lazy.pop(name).close)
            await asyncio.to_thread(release_memory)
        if not self._fits(needed):
            raise Busy(5)

    def _fits(self, needed: int) -> bool:
        used = sum(memory_of(served.lm) for served in self._lazy.values())
        return not self._lazy or used + needed <= self.config.checkpoint_bytes

    def listing(self) -> list[dict[str, Any]]:
        rows = {name: served.about() for name, served in self._open.items()}
        by_run = {row["run"]: row for row in rows.values() if row["run"] is not None}
        for name, origin in self.checkpoints().items():
            if (like := by_run.get(origin.run)) is not None:  # a checkpoint is shaped like the model of its run
                rows[name] = like | {"step": origin.step}
        return [model_entry(name, row, self.started) for name, row in rows.items()]

    def close(self) -> None:
        for served in self.opened:
            served.close()


def memory_of(lm: LM) -> int:
    """An upper estimate of the bytes of an open model: torch weights, the engine's own, and the key-value cache."""
    parameters, config, slots = parameter_count(lm), lm.config, lm.engine_config.slots
    cache = 2 * slots * max(config.layers, config.decoder_layers) * config.context * config.width
    return 4 * (2 * parameters + cache)


def parameter_count(lm: LM) -> int:
    from plume.model.unfilled import unfilled

    return sum(p.numel() for p in unfilled(lm.config, lm.head, lm.labels).parameters())


def share_arenas() -> None:
    """Before threads are started: memory that one thread has freed serves the others."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def release_memory() -> None:
    """After a model was closed: it is part of reference cycles, and Python does not know how large tensors are."""
    gc.collect()
    trim_heaps()


def trim_heaps() -> None:
    """Give free pages of the heaps back to the system; glibc alone keeps those below the last one in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


async def trim_regularly() -> None:
    """What a burst of requests took is given back, also where no checkpoint is closed."""
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim_heaps)


def open_lm(place: str, config: ServeConfig) -> LM:
    """With one slot more than sequences: it is kept for readings."""
    folder = resolve(place)
    return LM(folder, load_tokenizer_of(folder), replace(config.engine, slots=config.batch + 1))


def name_and_place(given: str) -> tuple[str, str]:
    """NAME=PLACE taken apart. An existing path or RUN@STEP is a place alone."""
    folder, step = split_reference(given)
    if folder.exists():
        name = folder.resolve().name if folder.name in ("", "..") else folder.name  # a link has a name of its own
        return name + ("" if step is None else f"@{step}"), given
    name, equals, place = given.partition("=")
    return name, place if equals else given


def named(models: Sequence[str]) -> dict[str, str]:
    """A name for each model: as given by NAME=PLACE, or the last part of its place."""
    found: dict[str, str] = {}
    for given in models:
        name, place = name_and_place(given)
        if name in found:
            raise UserError(f"two models have the name {name!r}; give one another name with NAME={place}")
        found[name] = place
    if not found:
        raise UserError("no model given; give a model folder, for example runs/demo")
    return found


def dump_json(value: dict[str, Any]) -> bytes:
    """JSON of an answer, long lists in parts: one call would delay all other threads."""
    parts = []
    for name, item in value.items():
        if isinstance(item, list) and len(item) > CHUNK:
            text = "[" + ",".join(compact_json(chunk)[1:-1] for chunk in chunks(item)) + "]"
        else:
            text = compact_json(item)
        parts.append(f"{compact_json(name)}:{text}")
    return ("{" + ",".join(parts) + "}").encode()


def compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
