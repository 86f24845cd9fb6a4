"""A real server on loopback."""

import io
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn

from plume.config import ServeConfig
from plume.serve import create_app
from plume.serve.run import uvicorn_settings


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
    until = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < until, "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(f"http://127.0.0.1:{port}", log, app)
    app.state.ready = False
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
