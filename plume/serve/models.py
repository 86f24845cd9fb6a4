"""The models a server has: opened at the start, or, for checkpoints of a run, when somebody first asks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plume.config import EngineConfig, ServeConfig, UserError, did_you_mean
from plume.generate.lm import LM
from plume.generate.runner import Runner
from plume.serve.errors import ApiError
from plume.serve.scheduler import DEADLINE, Busy, ScheduledRunner, Scheduler
from plume.text import load_tokenizer
from plume.weights import resolve

if TYPE_CHECKING:
    from plume.explain import Explanation

T = TypeVar("T")
MASKED_HEADS = ("masked-token", "pretraining")
CHECKPOINTS_OPEN = 3  # checkpoints kept in memory at once
TOKENS_REMEMBERED = 2048  # of explained texts, over all of them
THINKERS = 2  # threads for everything that is not writing


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: a folder or hub name, or one checkpoint of a run."""

    place: str
    run: str | None = None
    step: int | None = None


class Served:
    """One open model: its LM, the scheduler of its engine, and a few threads that explain and measure."""

    def __init__(self, name: str, origin: Origin, lm: LM, config: ServeConfig) -> None:
        self.name, self.origin, self.lm, self.config = name, origin, lm, config
        self.writes = lm.head == "next-token" and not lm.config.decoder_layers
        self.masks = lm.head in MASKED_HEADS and lm.tokenizer.mask is not None
        self.scheduler: Scheduler | None = None
        if self.writes:
            self.engine = lm.engine
            self.scheduler = Scheduler(Runner(lm.engine), queue=config.queue, name=name)
            lm.runner = ScheduledRunner(self.scheduler)  # type: ignore[assignment]
        self._pool = ThreadPoolExecutor(THINKERS, thread_name_prefix=f"plume-{name}")
        self._thinking = 0
        self._lock = threading.Lock()
        self._explained: OrderedDict[tuple[int, ...], Explanation] = OrderedDict()

    @property
    def engine_name(self) -> str:
        return self.engine.name if self.writes else "torch"

    @cached_property
    def parameters(self) -> int:
        import torch

        from plume.heads import Model

        with torch.device("meta"):
            return sum(p.numel() for p in Model(self.lm.config, self.lm.head, self.lm.labels).parameters())

    @property
    def idle(self) -> bool:
        return not self._thinking and (self.scheduler is None or not self.scheduler.active + self.scheduler.waiting)

    def writing(self) -> Scheduler:
        if self.scheduler is None:
            what = f"a {self.lm.head} head" if self.lm.head != "next-token" else "two stacks"
            raise ApiError(400, f"{self.name} does not write text: it has {what}", param="model", code="wrong_model")
        return self.scheduler

    async def think(self, work: Callable[[], T]) -> T:
        """Run something that takes a while beside the event loop; refused when too much waits already."""
        if self._thinking >= self.config.queue:
            raise Busy(2)
        self._thinking += 1
        deadline = time.monotonic() + self.config.timeout

        def bounded() -> T:
            DEADLINE.set(deadline)
            return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, bounded)
        finally:
            self._thinking -= 1

    # -- texts

    def spell(self, token: int) -> str:
        from plume.explain import spelled

        return spelled(self.lm.tokenizer, token)

    def tokens_of(self, text: str | None, tokens: Sequence[int] | None, *, start: bool = False) -> list[int]:
        """The ids of a request's text. An empty one may stand for the start token."""
        ids = list(tokens) if tokens is not None else self.lm.tokenizer.encode(text or "")
        limit = min(self.lm.config.vocab_size, self.lm.tokenizer.vocab_size)
        if wrong := [t for t in ids if t >= limit]:
            raise ApiError(400, f"token {wrong[0]} is not in the vocabulary (0 to {limit - 1})", param="tokens")
        if not ids and start:
            ids = self.lm.encode(None)
        if not ids:
            raise ApiError(400, "the text is empty", param="text")
        return ids

    def check_length(self, ids: Sequence[int]) -> None:
        if len(ids) > self.lm.config.context:
            raise ApiError(
                400,
                f"the text has {len(ids)} tokens, but {self.name} reads at most {self.lm.config.context}",
                code="context_length_exceeded",
            )

    def explanation(self, ids: Sequence[int]) -> Explanation:
        """One text inside the model; the last few are kept, since a page asks many things about one text."""
        from plume.explain import explain_text

        key = tuple(ids)
        with self._lock:
            if (found := self._explained.get(key)) is None:
                self.check_length(list(ids) if self.lm.config.causal else self.lm.tokenizer.wrap(ids)[0])
                found = explain_text(self.lm.model, self.lm.tokenizer, ids)
                self._explained[key] = found
                while len(self._explained) > 1 and sum(map(len, self._explained)) > TOKENS_REMEMBERED:
                    self._explained.popitem(last=False)
            self._explained.move_to_end(key)
            return found

    def about(self) -> dict[str, Any]:
        return describe(self.lm, self.origin) | {"engine": self.engine_name, "parameters": self.parameters}

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.lm.close()


def describe(lm: LM, origin: Origin) -> dict[str, Any]:
    """What the page must know of a model to offer the right views."""
    config, tokenizer = lm.config, lm.tokenizer
    return {
        "head": lm.head,
        "labels": list(lm.labels),
        "writes": lm.head == "next-token" and not config.decoder_layers,
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
    }


class Models:
    """Models by name. A request's word is only ever looked up here."""

    def __init__(self, config: ServeConfig, checkpoints: Callable[[], dict[str, Origin]] | None = None) -> None:
        self.config = config
        self.started = int(time.time())
        self._checkpoints = checkpoints
        self._open: dict[str, Served] = {}
        self._lazy: OrderedDict[str, Served] = OrderedDict()
        self._opening: dict[str, asyncio.Task[Served]] = {}

    def open_all(self) -> None:
        for name, place in named(self.config.models).items():
            lm = open_lm(place, self.config)
            run = Path(place).name if (Path(place) / "model" / "config.json").is_file() else None
            self._open[name] = Served(name, Origin(place, run=run), lm, self.config)

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
        known = self.checkpoints()
        if name not in known:
            hint = did_you_mean(name, [*self._open, *known])
            raise ApiError(404, f"there is no model {name!r}{hint}", param="model", code="model_not_found")
        if name not in self._opening:
            self._opening[name] = asyncio.create_task(self._open_checkpoint(name, known[name]))
        return await asyncio.shield(self._opening[name])

    async def _open_checkpoint(self, name: str, origin: Origin) -> Served:
        from plume.serve.runs import open_checkpoint

        try:
            served = await asyncio.to_thread(
                lambda: Served(name, origin, open_checkpoint(origin, self.config), self.config)
            )
            self._lazy[name] = served
            idle = [other for other, old in self._lazy.items() if old.idle and old is not served]
            for other in idle[: max(0, len(self._lazy) - CHECKPOINTS_OPEN)]:
                await asyncio.to_thread(self._lazy.pop(other).close)
            return served
        finally:
            del self._opening[name]

    def listing(self) -> list[dict[str, Any]]:
        rows = {name: served.about() for name, served in self._open.items()}
        by_run = {row["run"]: row for row in rows.values() if row["run"] is not None}
        for name, origin in self.checkpoints().items():
            if (like := by_run.get(origin.run)) is not None:  # a checkpoint is shaped like the model of its run
                rows[name] = like | {"step": origin.step}
        shape = {"object": "model", "created": self.started, "owned_by": "plume"}
        return [{"id": name, **shape, "plume": row} for name, row in rows.items()]

    def close(self) -> None:
        for served in self.opened:
            served.close()


def engine_settings(config: ServeConfig) -> EngineConfig:
    """One slot more than writers: questions about texts always find room."""
    return replace(config.engine, slots=config.batch + 1)


def open_lm(place: str, config: ServeConfig) -> LM:
    folder = resolve(place)
    return LM(folder, load_tokenizer(folder), engine_settings(config))


def name_and_place(given: str) -> tuple[str, str]:
    """NAME=PLACE taken apart. A path that is there is a place alone, whatever stands in it."""
    path = Path(given).expanduser()
    if path.exists():
        return path.resolve().name, given
    name, equals, place = given.partition("=")
    return name, place if equals else given


def named(models: Sequence[str]) -> dict[str, str]:
    """A name for each model: as given by NAME=PLACE, or the last part of its place."""
    found: dict[str, str] = {}
    for given in models:
        name, place = name_and_place(given)
        if name in found:
            raise UserError(f"two models would be called {name!r}; give one another name with NAME={place}")
        found[name] = place
    if not found:
        raise UserError("no model is named; give a model folder, for example runs/demo")
    return found
