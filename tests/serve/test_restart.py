"""A server is replaced while clients stream: two processes share one listening socket, and no stream is lost."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from plume.lm import load

CLIENTS, ROUNDS, TOKENS = 64, 2, 30


def start(listener: socket.socket, folder, place, name: str) -> subprocess.Popen:
    """A server that is given its socket as systemd gives one: descriptor 3, LISTEN_FDS=1."""
    command = [sys.executable, "-m", "plume", "serve", f"gpt={folder}", "--engine.engine", "torch"]
    number = listener.fileno()
    with (place / name).open("w") as log:
        process = subprocess.Popen(
            [*command, "--access-log", str(place / f"{name}.access")],
            stderr=log,
            stdout=log,
            env=os.environ | {"LISTEN_FDS": "1"},
            pass_fds=(3, number),
            preexec_fn=lambda: os.dup2(number, 3),
        )
    until = time.monotonic() + 180
    while " at http" not in (place / name).read_text():
        assert process.poll() is None and time.monotonic() < until, (place / name).read_text()
        time.sleep(0.05)
    return process


async def stream(client: httpx.AsyncClient, url: str, seed: int) -> str:
    body = {"model": "gpt", "prompt": "The robot", "max_tokens": TOKENS, "seed": seed, "stream": True}
    text, last = "", ""
    async with client.stream("POST", url, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            last = line if line else last
    assert last == "data: [DONE]"
    return text


@pytest.mark.slow
def test_a_rolling_restart_loses_no_token(models, tmp_path):
    lm = load(models["gpt"], engine="torch")
    expected = [lm.generate("The robot", max_new_tokens=TOKENS, seed=seed, top_k=None).text for seed in range(CLIENTS)]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        old = start(listener, models["gpt"], tmp_path, "old")
        new: list[subprocess.Popen] = []

        async def client(http: httpx.AsyncClient, seed: int) -> None:
            for _ in range(ROUNDS):
                assert await stream(http, url, seed) == expected[seed]

        async def replace() -> None:
            new.append(await asyncio.to_thread(start, listener, models["gpt"], tmp_path, "new"))
            old.send_signal(signal.SIGTERM)

        async def run() -> None:
            replacing = asyncio.create_task(replace())
            rounds = 0
            each_its_own = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # a connection per stream
            async with httpx.AsyncClient(timeout=120, limits=each_its_own) as http:
                while not replacing.done() or rounds < 2:  # before, during and after
                    await asyncio.gather(*(client(http, seed) for seed in range(CLIENTS)))
                    rounds += replacing.done()

        try:
            asyncio.run(run())
            assert old.wait(60) == 0
        finally:
            for process in (old, *new):
                process.terminate()
                process.wait(60)
    statuses = {
        name: [json.loads(line)["status"] for line in (tmp_path / f"{name}.access").read_text().splitlines()]
        for name in ("old", "new")
    }
    assert set(statuses["old"]) == set(statuses["new"]) == {200}
