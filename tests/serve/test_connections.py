"""Limits of connections: late heads, idle sockets, slow readers, many from one address; health always answers."""

import asyncio
import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from running import serving, slowdown

from plume.serve import server

ASK = {"model": "gpt", "prompt": "The robot", "max_tokens": 4}


@pytest.fixture(scope="module")
def small(serve_config, models):
    return replace(serve_config, models=(str(models["gpt"]),), runs=None)


def connect(site, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
    host, port = site.url.removeprefix("http://").split(":")
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(10)
    made.connect((host, int(port)))
    if data:
        made.sendall(data)
    return made


def begin(stack: ExitStack, site, body: dict):
    """A stream on a connection of its own, after its first line; the rest of its lines."""
    client = httpx.Client(base_url=site.url, timeout=30)
    stack.callback(client.close)
    lines = stack.enter_context(client.stream("POST", "/v1/completions", json=body | {"stream": True})).iter_lines()
    stack.callback(lambda: lines)  # an iterator that is dropped closes its connection
    next(lines)
    return lines


def closed_after(made: socket.socket) -> float:
    began = time.monotonic()
    try:
        while made.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - began


@pytest.mark.parametrize("data", [b"", b"G", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: "])
def test_a_head_that_does_not_come_closes_the_connection(small, data):
    with serving(small, header_timeout=0.4) as (site, client), connect(site, data) as late:
        assert 0.2 < closed_after(late) < 2
        assert client.get("/healthz").status_code == 200


def test_a_head_sent_byte_by_byte_is_late_too(small):
    with serving(small, header_timeout=0.4) as (site, _), connect(site, b"GET / HTTP/1.1\r\n") as slow:
        began, open_still = time.monotonic(), True
        while open_still and time.monotonic() - began < 5:
            time.sleep(0.05)
            try:
                slow.sendall(b"x")
            except ConnectionError:
                open_still = False
        assert not open_still and time.monotonic() - began < 3


def test_a_second_request_on_a_connection_has_its_own_time(small):
    with serving(small, header_timeout=1.0) as (site, _), connect(site) as kept:
        for _ in range(3):
            kept.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += kept.recv(65536)
            time.sleep(0.6)
        kept.sendall(b"GET /healthz HT")
        assert closed_after(kept) < 4


def test_a_head_has_a_size(small):
    with serving(small) as (site, client), connect(site) as long:
        with pytest.raises(ConnectionError):  # closed before all of it was taken
            long.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 50_000_000)
        assert client.get("/healthz", headers={"x": "a" * 30_000}).status_code == 200


def test_a_connection_is_closed_when_nothing_comes_after_an_answer(small, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE", 1)
    with serving(small) as (site, _), connect(site, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n") as kept:
        assert 0.5 < closed_after(kept) < 8


def test_idle_connections_make_way_and_health_always_answers(small):
    """Many more half-sent requests than connections are allowed: every client is answered meanwhile."""
    with serving(small, connections=60, connections_per_address=60) as (site, _), ExitStack() as stack:
        slowest = 0.0
        for i in range(300):
            stack.enter_context(
                connect(site, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" if i % 2 else b"")
            )
            if i % 50 == 49:
                began = time.monotonic()
                assert httpx.get(f"{site.url}/healthz").status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                assert httpx.post(f"{site.url}/v1/completions", json=ASK).status_code == 200
        assert slowest < 0.5 * slowdown()


def test_running_requests_are_not_closed_for_new_connections(small, endless):
    with serving(small, connections=20, connections_per_address=20) as (site, _), ExitStack() as stack:
        body = endless | {"max_tokens": 300}
        lines = begin(stack, site, body)
        for _ in range(60):
            stack.enter_context(connect(site))
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_beyond_all_connections_only_health_is_answered(small, endless):
    with serving(small, connections=3, connections_per_address=50, batch=8) as (site, _), ExitStack() as stack:
        streams = [begin(stack, site, endless) for _ in range(3)]
        refused = httpx.get(f"{site.url}/v1/models")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
        assert httpx.get(f"{site.url}/healthz").status_code == 200
        assert httpx.get(f"{site.url}/readyz").status_code == 200
        assert next(streams[0]) == "" and next(streams[0]).startswith("data: {")


def test_one_address_has_a_limit_of_its_own(small, endless):
    with serving(small, connections=50, connections_per_address=2, batch=8) as (site, _), ExitStack() as stack:
        for _ in range(2):
            begin(stack, site, endless)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{site.url}/healthz")


def test_a_reader_that_stops_reading_is_dropped(small, endless):
    body = json.dumps(endless | {"stream": True, "max_tokens": 4000, "logprobs": 20}).encode()
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
    with serving(small, write_timeout=0.5) as (site, _), connect(site, head.encode() + body, 4096) as stopped:
        scheduler = site.app.state.models._open["gpt"].scheduler
        until = time.monotonic() + 20
        while scheduler.counters.cancelled == 0 and time.monotonic() < until:
            time.sleep(0.05)
        assert scheduler.counters.cancelled == 1 and scheduler.running == 0
        stopped.close()


def wait_for(check) -> None:
    until = time.monotonic() + 60
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("last", [b"", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"])
def test_the_last_part_of_an_answer_is_not_left_unread(small, monkeypatch, last):
    """It is too small for the transport to pause, and a connection is not closed before all of it was taken."""
    kinds, bounded = [], server.bounded_protocol
    monkeypatch.setattr(server, "bounded_protocol", lambda config: kinds.append(bounded(config)) or kinds[-1])
    with serving(small, write_timeout=2.0) as (site, _), connect(site, b"", 2048) as stopped:
        limits, sent = kinds[0].limits, 0
        wait_for(lambda: limits.idle)
        (connection,) = limits.idle
        while connection.transport.get_write_buffer_size() == 0:
            stopped.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20)
            sent += 20
            wait_for(lambda sent=sent: site.log.getvalue().count("/healthz") >= sent)
        stopped.sendall(last)
        wait_for(lambda: limits.open.total() == 0)


def test_a_stream_that_waits_sends_comments(small, endless, monkeypatch):
    from plume.serve import generation

    monkeypatch.setattr(generation, "KEEP_ALIVE", 0.1)
    with serving(small, batch=1) as (site, client), ExitStack() as stack:
        first = begin(stack, site, endless)
        second = stack.enter_context(client.stream("POST", "/v1/completions", json=ASK | {"stream": True}))
        lines = second.iter_lines()
        assert next(lines) == ": keep-alive"
        first.close()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_many_connections_from_one_process_are_served(small):
    async def ask(url):
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=60)) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=ASK) for _ in range(60)))
        return [answer.status_code for answer in answers]

    with serving(small) as (site, _):
        assert asyncio.run(ask(site.url)) == [200] * 60
