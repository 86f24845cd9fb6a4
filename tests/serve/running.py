"""Tiny models, and a real server on loopback."""

import io
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from plume.config import PRESETS, ServeConfig, TokenizerConfig
from plume.hf import save_model
from plume.model.heads import Model
from plume.serve import create_app
from plume.serve.server import uvicorn_settings
from plume.text import train_tokenizer

TEXTS = [
    "The robot must obey the orders given it by human beings because it was made to serve.",
    "A robot may not injure a human being or, through inaction, allow a human being to come to harm.",
    "Once upon a time there was a little girl named Lily. She lived in a small house near the wood.",
    "你好，世界。机器人必须服从人类的命令。 </script> <b>bold</b> \U0001f916 \U0001f600",
] * 4
SMALL = {"layers": 2, "heads": 4, "width": 32, "context": 64, "dropout": 0.0}


def tiny(
    preset: str,
    head: str,
    folder: Path,
    tokenizer: TokenizerConfig,
    *,
    labels: tuple[str, ...] = (),
    texts: Sequence[str] = TEXTS,
    **more: int,
) -> Path:
    trained = train_tokenizer(tokenizer, texts)
    torch.manual_seed(0)
    shape = SMALL | ({"decoder_layers": 2} if PRESETS[preset].decoder_layers else {}) | more
    model = Model(replace(PRESETS[preset], vocab_size=trained.vocab_size, **shape), head, labels).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return save_model(model, folder, tokenizer=trained)


def slowdown() -> float:
    """How much longer things take on this machine now than when it does nothing else; bars of time are scaled by it."""
    return max(1.0, 1.5 * os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Running:
    url: str
    log: io.StringIO
    app: object


def run_server(config: ServeConfig) -> Iterator[Running]:
    log = io.StringIO()
    app = create_app(config, log=log)
    settings = uvicorn_settings(app, config)
    settings.port = 0
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 300  # the first start on a machine compiles
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(f"http://127.0.0.1:{port}", log, app)
    app.state.ready = False
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@contextmanager
def serving(config: ServeConfig, **fields: Any) -> Iterator[tuple[Running, httpx.Client]]:
    """A server with other settings, and a client of it."""
    running = run_server(replace(config, **fields))
    site = next(running)
    try:
        with httpx.Client(base_url=site.url, timeout=30) as client:
            yield site, client
    finally:
        with pytest.raises(StopIteration):
            next(running)
