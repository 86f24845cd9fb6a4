"""`plume serve` and `plume explore`: listen until told to stop, then finish what was begun."""

from __future__ import annotations

import hashlib
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from plume.config import ServeConfig, UserError
from plume.serve.app import create_app
from plume.serve.models import name_and_place
from plume.train.runs import RECIPE


class Server(uvicorn.Server):
    """Stops taking requests at a signal, tells those that would never end to end, and waits for the others."""

    def __init__(
        self, config: uvicorn.Config, when_ready: Callable[[], None], when_stopping: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.when_ready, self.when_stopping = when_ready, when_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.when_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, and the process then ends well; a second Ctrl-C ends it at once."""
        self.when_stopping()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def bind(config: ServeConfig) -> socket.socket:
    """The port, taken before models are opened: a mistake shows at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        reason = error.strerror if error.strerror else str(error)
        raise UserError(f"{config.host}:{config.port} cannot be used: {reason}; --port 0 takes any free one") from None
    listener.set_inheritable(True)
    return listener


def with_runs(config: ServeConfig) -> ServeConfig:
    """Beside a model that lies in a run folder, the runs next to it are shown."""
    if config.runs is None:
        for given in config.models:
            folder = Path(name_and_place(given)[1]).expanduser()
            if (folder / RECIPE).is_file():
                return replace(config, runs=folder.resolve().parent)
    return config


def uvicorn_settings(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(config.drain)),
        timeout_keep_alive=75,
        server_header=False,
        limit_concurrency=4 * (config.queue + config.batch) + 64,
        h11_max_incomplete_event_size=65536,
    )


def serve(config: ServeConfig, *, when_ready: Callable[[str], None] | None = None) -> None:
    """Listen until SIGTERM or Ctrl-C; then finish the requests under way, but not longer than config.drain."""
    config, listener = with_runs(config), bind(config)
    port = listener.getsockname()[1]
    address = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}/"
    log = None if config.access_log is None else config.access_log.open("a", encoding="utf-8")
    app = create_app(config, log=log)

    def ready() -> None:
        print(f"plume serves {', '.join(config.models)} at {address}", file=sys.stderr, flush=True)
        if when_ready is not None:
            when_ready(address)

    def stopping() -> None:
        app.state.ready = False

    try:
        app.state.models.open_all()  # before anything listens, so that a mistake is only a message
        Server(uvicorn_settings(app, config), ready, stopping).run(sockets=[listener])
    finally:
        listener.close()
        if log is not None:
            log.close()


def explore(config: ServeConfig, *, browser: bool = True) -> None:
    """Serve, and open the page."""

    def show(address: str) -> None:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    serve(config, when_ready=show if browser else None)


def new_key() -> tuple[str, str]:
    """A fresh API key and the hash that the server is given."""
    key = f"plume-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()
