"""`plume serve` and `plume explore`: listen until a signal, then finish the requests under way."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import os
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

from plume.config import ExploreConfig, ServeConfig, UserError
from plume.serve.app import create_app, saved_page
from plume.serve.connections import bounded_protocol
from plume.serve.served_models import name_and_place, named, open_lm, share_arenas
from plume.util.files import write_text
from plume.util.run_folder import RECIPE, split_reference

KEEP_ALIVE = 75  # seconds that a connection may be idle between two requests
SPARE_DESCRIPTORS = 256  # for models, logs and connections in reserve
ACCEPTED_SECONDS = 0.2  # between the last accepted connection and the end of listening
FIRST_PASSED = 3  # by sd_listen_fds(3)
HEAD_BYTES = 65_536  # of a request's first line and headers


class Server(uvicorn.Server):
    """Stops accepting at a signal, ends the streams of runs, and waits for all other requests."""

    def __init__(
        self, config: uvicorn.Config, when_ready: Callable[[], None], when_stopping: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.when_ready, self.when_stopping = when_ready, when_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self.when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let what was accepted become connections, then close: none of them is lost."""
        loop = asyncio.get_running_loop()
        for server in self.servers:
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
        await asyncio.sleep(ACCEPTED_SECONDS)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets requests finish; a second Ctrl-C ends the process at once."""
        self.when_stopping()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def inherited_socket() -> socket.socket | None:
    """The listening socket that systemd, or the process before this one, has passed as descriptor 3."""
    if os.environ.get("LISTEN_FDS") != "1" or os.environ.get("LISTEN_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return socket.socket(fileno=FIRST_PASSED)


def bind(config: ServeConfig) -> socket.socket:
    """The port, bound before models are opened, so that a mistake shows at once."""
    if (passed := inherited_socket()) is not None:
        return passed
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        reason = error.strerror if error.strerror else str(error)
        raise UserError(f"cannot listen at {config.host}:{config.port}: {reason}; --port 0 takes a free one") from None
    listener.set_inheritable(True)
    return listener


def allow_connections(config: ServeConfig) -> None:
    """As many descriptors as the connections need, as far as this process may have them."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.connections + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UserError(f"connections={config.connections} needs {wanted} open files, but this process may have {hard}")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def with_runs(config: ServeConfig) -> ServeConfig:
    """Beside a model that lies in a run folder, the runs next to it are shown."""
    if config.runs is None:
        for given in config.models:
            folder, _ = split_reference(name_and_place(given)[1])
            if (folder / RECIPE).is_file():
                return replace(config, runs=folder.resolve().parent)
    return config


def uvicorn_settings(app: FastAPI, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout)),
        timeout_keep_alive=KEEP_ALIVE,
        server_header=False,
        proxy_headers=False,  # a client would choose the address that its limits go by
        http=bounded_protocol(config),
        ws="none",
        h11_max_incomplete_event_size=HEAD_BYTES,
    )


def serve(config: ServeConfig, *, when_ready: Callable[[str], None] | None = None) -> None:
    """Listen until SIGTERM or Ctrl-C; then finish the requests under way, for at most config.shutdown_timeout."""
    config, listener = with_runs(config), bind(config)
    allow_connections(config)
    share_arenas()
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
        gc.collect()
        gc.freeze()  # what is open now stays open: a full collection need not go through it
        Server(uvicorn_settings(app, config), ready, stopping).run(sockets=[listener])
    finally:
        listener.close()
        if log is not None:
            log.close()


def explore(config: ExploreConfig, *, browser: bool = True) -> None:
    """Serve, and open the page; or save it."""
    if config.save is not None:
        save(config, config.save)
        return

    def show(address: str) -> None:
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    serve(config, when_ready=show if browser else None)


def save(config: ExploreConfig, file: Path) -> None:
    """Write the page of one model as one file."""
    ((name, place), *others) = named(config.models).items()
    if others:
        raise UserError(f"a saved page has one model; leave {others[0][0]} out")
    write_text(file, saved_page(open_lm(place, config), name))
    print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB); open it in a browser, no server is needed")


class CellPage:
    """The Explorer in a notebook's cell, from a server in a thread of this process."""

    def __init__(self, folder: Path) -> None:
        config = with_runs(ExploreConfig(models=(str(folder),), port=0, frame=True))
        listener = bind(config)
        app = create_app(config, log=io.StringIO())
        app.state.models.open_all()
        self.url = f"http://{config.host}:{listener.getsockname()[1]}/"
        self.server = uvicorn.Server(uvicorn_settings(app, config))
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True, name="plume-explorer")
        self.thread.start()

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.url}" title="Explorer" style="width:100%;height:720px;border:0"></iframe>'

    def __repr__(self) -> str:
        return f"the Explorer at {self.url}; close() ends it"

    def close(self) -> None:
        """End the server."""
        self.server.should_exit = True
        self.thread.join(10)


def new_key() -> tuple[str, str]:
    """A fresh API key and the hash that the server is given."""
    key = f"plume-{secrets.token_urlsafe(32)}"
    return key, hashlib.sha256(key.encode()).hexdigest()
