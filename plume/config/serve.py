"""How models are served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plume.config.errors import below_one, refuse
from plume.config.generate import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A server: which models, for whom, and how much of it at once."""

    models: tuple[str, ...]  # model folders, run folders or hub names; NAME=PLACE gives one another name
    host: str = "127.0.0.1"  # any other than this machine needs keys
    port: int = 8000  # 0 means any free one
    keys: tuple[str, ...] = ()  # sha256 of each API key; `plume serve --new-key` makes a pair
    runs: Path | None = None  # runs to show, checkpoints as models; unset means those beside a run that is served
    engine: EngineConfig = EngineConfig()  # its slots follow from batch
    batch: int = 16  # sequences of one model that are written together
    queue: int = 256  # sequences that may wait; more are told to come again
    timeout: float = 120.0  # seconds that a completion or a score may take
    drain: float = 30.0  # seconds that running requests get to end when the server is stopped
    max_new_tokens: int = 4096  # of one request, over all its samples
    max_body: int = 2_000_000  # bytes of one request
    rate: float = 0.0  # requests per minute of one client; 0 means no limit
    access_log: Path | None = None  # JSON lines; unset means the standard error

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from below_one(self, "batch", "queue", "max_new_tokens", "max_body")
        for name, usual in (("timeout", 120), ("drain", 30)):
            if getattr(self, name) <= 0:
                yield f"{name}={getattr(self, name)} must be more than 0, for example {usual}"
        if not 0 <= self.port < 65536:
            yield f"port={self.port} must lie between 0 (any free one) and 65535, for example 8000"
        if self.rate < 0:
            yield f"rate={self.rate} cannot be negative; 0 means no limit"
        if wrong := [key for key in self.keys if not re.fullmatch(r"[0-9a-f]{64}", key)]:
            yield f"keys: {wrong[0][:12]!r} is not a sha256; `plume serve --new-key` makes one with its key"
        if not self.keys and self.host not in ("127.0.0.1", "localhost", "::1"):
            yield f"host={self.host} is open to others, so it needs keys; `plume serve --new-key` makes one"
