"""What stands before every endpoint: keys, limits, headers, the access log and the figures of /metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import sys
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import IO, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plume.config import ServeConfig
from plume.serve.errors import ApiError, as_api_error, busy

OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz")  # and /static/: what needs no key
CLIENTS_KEPT = 10_000  # clients whose rate is remembered
BODY_SECONDS = 30.0  # that a client may take to send a body
HOSTS = ("127.0.0.1", "localhost", "[::1]", "testserver")  # names of this machine; others need a key
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


class Figures:
    """Counters of requests; those of schedulers are read when /metrics is asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        known = ("path", "method", "status")
        self.requests = Counter("plume_requests", "Requests answered", known, registry=self.registry)
        self.seconds = Histogram(
            "plume_request_seconds",
            "Time from request to its last byte",
            ["path"],
            registry=self.registry,
            buckets=SECONDS,
        )
        self.first_token = Histogram(
            "plume_first_token_seconds", "Time to the first token", ["model"], registry=self.registry, buckets=SECONDS
        )
        self.tokens = Counter("plume_tokens", "Tokens", ["model", "kind"], registry=self.registry)


class Limiter:
    """A bucket of requests for each client, filled at a steady rate."""

    def __init__(self, per_minute: float) -> None:
        self.rate, self.size = per_minute / 60, max(1.0, per_minute / 6)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float) -> float:
        """0 when the client may go on; otherwise the seconds until it may."""
        if self.rate == 0:
            return 0.0
        left, since = self._buckets.pop(client, (self.size, now))
        left = min(self.size, left + (now - since) * self.rate)
        wait = 0.0 if left >= 1 else (1 - left) / self.rate
        self._buckets[client] = (left - 1 if wait == 0 else left, now)
        while len(self._buckets) > CLIENTS_KEPT:
            self._buckets.popitem(last=False)
        return wait


class Guard:
    """ASGI around the application."""

    def __init__(self, app: ASGIApp, *, config: ServeConfig, figures: Figures, log: IO[str] | None = None) -> None:
        self.app, self.config, self.figures = app, config, figures
        self.limiter = Limiter(config.rate)
        self.log = sys.stderr if log is None else log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, told = time.monotonic(), {"status": 500}
        scope.setdefault("state", {})["id"] = name = uuid.uuid4().hex

        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                told["status"] = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = name
                for key, value in HEADERS.items():
                    headers.setdefault(key, value)
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, Body(receive, self.config.max_body).receive, dressed)
        except ApiError as error:
            await error.response()(scope, receive, dressed)
        except asyncio.CancelledError:
            told["status"] = 499
            raise
        except Exception as error:
            print(f"{name} {traceback.format_exc()}", file=sys.stderr, flush=True)
            if told["status"] == 500:
                await as_api_error(error).response()(scope, receive, dressed)
        finally:
            self._note(scope, told["status"], time.monotonic() - began, name)

    # -- who may

    def _admit(self, scope: Scope) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        address = scope["client"][0] if scope.get("client") else "?"
        scope["state"]["client"] = address
        if self.config.keys:
            if path not in OPEN and not path.startswith("/static/"):
                scope["state"]["client"] = self._key(headers)
        elif headers.get("host", "").rsplit(":", 1)[0] not in HOSTS:  # a page of another name that points here
            raise ApiError(403, "this server answers to this machine's own names only; with keys, to any")
        if scope["method"] == "POST" and headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise ApiError(415, "send JSON, with the header Content-Type: application/json")
        if path.startswith("/v1/"):
            wait = self.limiter.take(scope["state"]["client"], time.monotonic())
            if wait > 0:
                raise busy(f"more than {self.config.rate:g} requests per minute", wait)

    def _key(self, headers: Headers) -> str:
        """A short name for the key that was sent. Every hash is compared in full, whichever fits."""
        sent = headers.get("authorization", "").removeprefix("Bearer ").strip()
        digest = hashlib.sha256(sent.encode("utf-8", "surrogateescape")).hexdigest()
        fits = [hmac.compare_digest(digest, known) for known in self.config.keys]
        if not any(fits):
            message = "this key is not known" if sent else "a key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return digest[:8]

    # -- what was

    def _note(self, scope: Scope, status: int, seconds: float, name: str) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")  # the pattern, so that no request can make new series
        self.figures.requests.labels(path, scope["method"] if path != "other" else "any", status).inc()
        self.figures.seconds.labels(path).observe(seconds)
        row: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z",
            "id": name,
            "client": scope["state"].get("client"),
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": round(1000 * seconds, 1),
        }
        completion = scope["state"].get("completion")
        if completion is not None:
            row |= self._written(completion)
        print(json.dumps(row), file=self.log, flush=True)

    def _written(self, completion: Any) -> dict[str, Any]:
        usage, model = completion.usage(), completion.served.name
        self.figures.tokens.labels(model, "prompt").inc(usage["prompt_tokens"])
        self.figures.tokens.labels(model, "written").inc(usage["completion_tokens"])
        waits = [t.first_token - t.arrived for t in completion.tickets if t.first_token is not None]
        for wait in waits:
            self.figures.first_token.labels(model).observe(wait)
        first = {"first_token_ms": round(1000 * min(waits), 1)} if waits else {}
        return {"model": model, **usage, **first}


class Body:
    """The body of a request, refused when it is too large or comes too slowly."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive: Callable[[], Any] = receive
        self.limit, self.size, self.done = limit, 0, False
        self.deadline = time.monotonic() + BODY_SECONDS

    async def receive(self) -> Message:
        if self.done:
            return await self._receive()
        try:
            message: Message = await asyncio.wait_for(self._receive(), max(0.01, self.deadline - time.monotonic()))
        except TimeoutError:
            raise ApiError(408, "the body came too slowly", code="timeout") from None
        if message["type"] == "http.request":
            self.size += len(message.get("body", b""))
            self.done = not message.get("more_body", False)
            if self.size > self.limit:
                raise ApiError(413, f"the body is larger than {self.limit} bytes", code="request_too_large")
        return message
