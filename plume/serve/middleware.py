"""Around every endpoint: keys, limits, one deadline, cancellation, headers, the access log and the metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import sys
import time
import traceback
import uuid
from collections import OrderedDict
from contextlib import suppress
from typing import IO, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plume.config import ExploreConfig, ServeConfig, UserError
from plume.serve.api_errors import ApiError, as_api_error, busy

HEALTH = ("/healthz", "/readyz")
PUBLIC = ("/", "/docs", "/openapi.json", *HEALTH)  # and /static/: no key needed
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH")  # labels of metrics; all others are one
CLIENTS_KEPT = 10_000  # clients whose rate is remembered
GRACE = 2.0  # seconds after the deadline in which an answer may still be sent
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
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


NOTEBOOKS = "http://localhost:* http://127.0.0.1:* vscode-webview:"  # pages that may show the Explorer in a frame


def headers_for(config: ServeConfig) -> dict[str, str]:
    """The headers of every answer."""
    if not (isinstance(config, ExploreConfig) and config.frame):
        return HEADERS
    policy = POLICY.replace("frame-ancestors 'none'", f"frame-ancestors {NOTEBOOKS}")
    return {key: value for key, value in HEADERS.items() if key != "X-Frame-Options"} | {
        "Content-Security-Policy": policy
    }


class Metrics:
    """Counters of requests; every label comes from a fixed set."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("path", "method", "status")
        self.requests = Counter("plume_requests", "Requests answered", labels, registry=self.registry)
        self.seconds = Histogram(
            "plume_request_seconds", "Time from request to its last byte", ["path"],
            registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self.first_token = Histogram(
            "plume_first_token_seconds", "Time to the first token", ["model"], registry=self.registry, buckets=SECONDS
        )
        self.tokens = Counter("plume_tokens", "Tokens", ["model", "kind"], registry=self.registry)


class Tracer:
    """One OpenTelemetry span per request, sent by OTLP in the background; never a text of a request."""

    def __init__(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            needed = f"the package {error.name}: pip install 'plume-lm[telemetry]'"
            raise UserError(f"telemetry=true needs {needed}") from None
        self.provider = TracerProvider()
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self.provider.get_tracer("plume")

    def close(self) -> None:
        """Send what is left."""
        self.provider.shutdown()

    def span(self, headers: Headers, row: dict[str, Any], seconds: float) -> None:
        """After the request has ended; a `traceparent` header makes it part of the caller's trace."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        span = self.tracer.start_span(
            f"{row['method']} {row['path']}",
            context=TraceContextTextMapPropagator().extract(dict(headers.items())),
            kind=trace.SpanKind.SERVER,
            start_time=end - int(seconds * 1e9),
        )
        names = {
            "method": "http.request.method",
            "path": "http.route",
            "status": "http.response.status_code",
            "id": "plume.request_id",
            "model": "gen_ai.request.model",
            "prompt_tokens": "gen_ai.usage.input_tokens",
            "completion_tokens": "gen_ai.usage.output_tokens",
            "first_token_ms": "plume.first_token_ms",
        }
        span.set_attributes({names[name]: value for name, value in row.items() if name in names})
        if row["status"] >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.end(end)


class RateLimiter:
    """A token bucket of requests for each client."""

    def __init__(self, per_minute: float) -> None:
        self.rate, self.size = per_minute / 60, max(1.0, per_minute / 6)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float) -> float:
        """0 when the request is allowed; otherwise the seconds until the next one is."""
        if self.rate == 0:
            return 0.0
        left, since = self._buckets.pop(client, (self.size, now))
        left = min(self.size, left + (now - since) * self.rate)
        wait = 0.0 if left >= 1 else (1 - left) / self.rate
        self._buckets[client] = (left - 1 if wait == 0 else left, now)
        while len(self._buckets) > CLIENTS_KEPT:
            self._buckets.popitem(last=False)
        return wait


class RequestBody:
    """Reads a request's body ahead of the endpoint, within its limits, and notices when the client disconnects."""

    def __init__(self, receive: Receive, *, limit: int, timeout: float) -> None:
        self._receive, self.limit, self.timeout = receive, limit, timeout
        self._messages: asyncio.Queue[Message | ApiError] = asyncio.Queue()
        self.disconnected = asyncio.Event()

    async def read(self) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                await self._read_body()
        except TimeoutError:
            error = ApiError(408, f"the body was not sent within {self.timeout:g} s", code="timeout")
            self._messages.put_nowait(error)
        except ApiError as error:
            self._messages.put_nowait(error)
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()

    async def _read_body(self) -> None:
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
            if size > self.limit:
                raise ApiError(413, f"the body is larger than {self.limit} bytes", code="request_too_large")
            self._messages.put_nowait(message)

    async def receive(self) -> Message:
        """What the endpoint calls."""
        if not self._messages.empty() or not self.disconnected.is_set():
            message = await self._next()
            if isinstance(message, ApiError):
                raise message
            return message
        return {"type": "http.disconnect"}

    async def _next(self) -> Message | ApiError:
        got, gone = asyncio.ensure_future(self._messages.get()), asyncio.ensure_future(self.disconnected.wait())
        try:
            await asyncio.wait({got, gone}, return_when=asyncio.FIRST_COMPLETED)
            return got.result() if got.done() else {"type": "http.disconnect"}
        finally:
            got.cancel()
            gone.cancel()


class Guard:
    """ASGI middleware. It decides who is answered, until when, and writes down what was."""

    def __init__(
        self, app: ASGIApp, *, config: ServeConfig, metrics: Metrics, log: IO[str] | None, tracer: Tracer | None
    ) -> None:
        self.app, self.config, self.metrics, self.tracer = app, config, metrics, tracer
        self.limiter, self.headers = RateLimiter(config.rate_limit), headers_for(config)
        self.log = sys.stderr if log is None else log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, state = time.monotonic(), scope.setdefault("state", {})
        sent = Headers(scope=scope).get("x-request-id", "")
        state["id"] = sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        state["deadline"] = began + self.config.timeout
        status = [0]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = state["id"]
                if ignored := state.get("ignored"):
                    headers["X-Plume-Ignored-Fields"] = ", ".join(ignored)
                for key, value in self.headers.items():
                    headers.setdefault(key, value)
            await send(message)

        try:
            await self._answer(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            status[0] = 499
            raise
        except Exception as error:
            refused = as_api_error(error)
            if refused.status == 500:
                self._write({**self._row(scope, 500), "error": traceback.format_exc()})
            if not status[0]:
                await refused.response()(scope, receive, send_with_headers)
        finally:
            self._note(scope, status[0], time.monotonic() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the endpoint until it ends, its client disconnects or its deadline passes."""
        self._admit(scope)
        body = RequestBody(receive, limit=self.config.max_body_bytes, timeout=self.config.body_timeout)
        reading = asyncio.create_task(body.read())
        gone = asyncio.create_task(body.disconnected.wait())
        work = asyncio.ensure_future(self.app(scope, body.receive, send))
        left = scope["state"]["deadline"] + GRACE - time.monotonic()
        try:
            await asyncio.wait({work, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not gone.done():
                raise ApiError(408, "the request took longer than the server's timeout", code="timeout")
        finally:
            for task in (work, reading, gone):
                task.cancel()
            await asyncio.gather(work, reading, gone, return_exceptions=True)

    # -- who is answered

    def _admit(self, scope: Scope) -> None:
        headers, path, state = Headers(scope=scope), scope["path"], scope["state"]
        state["client"] = scope["client"][0] if scope.get("client") else "local"
        if state.get("only_health") and path not in HEALTH:
            raise ApiError(503, "too many connections; retry", code="overloaded", headers={"Retry-After": "2"})
        if self.config.keys:
            if path not in PUBLIC and not path.startswith("/static/"):
                state["client"] = self._key(headers)
        elif not is_this_machine(headers.get("host", "")):  # a web page whose name was made to point here
            raise ApiError(403, "without keys the host must be localhost, a 127.x.x.x address or [::1]")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            raise ApiError(415, "send JSON, with the header Content-Type: application/json")
        if path.startswith("/v1/"):
            wait = self.limiter.take(state["client"], time.monotonic())
            if wait > 0:
                raise busy(f"more than {self.config.rate_limit:g} requests per minute", wait)

    def _key(self, headers: Headers) -> str:
        """A short name for the key that was sent. Every hash is compared in full, whichever fits."""
        sent = headers.getlist("authorization")
        scheme, _, key = sent[0].strip().partition(" ") if len(sent) == 1 else ("", "", "")
        key = key.strip()
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        fits = [hmac.compare_digest(digest, known) for known in self.config.keys]
        if scheme.lower() != "bearer" or not key:
            message = "a key is needed: send one header Authorization: Bearer KEY"
        elif not any(fits):
            message = "this key is not known"
        else:
            return digest[:8]
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    # -- what is written down

    def _row(self, scope: Scope, status: int) -> dict[str, Any]:
        method = scope["method"]
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z",
            "id": scope["state"]["id"],
            "client": scope["state"].get("client"),
            "method": method if method in METHODS else "other",
            "path": getattr(scope.get("route"), "path", "other"),  # the pattern: no request can add a series
            "status": status,
        }

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        row = self._row(scope, status if status else 499)
        self.metrics.requests.labels(row["path"], row["method"], row["status"]).inc()
        self.metrics.seconds.labels(row["path"]).observe(seconds)
        row["ms"] = round(1000 * seconds, 1)
        generation = scope["state"].get("generation")
        if generation is not None:
            generation.cancel()  # whatever is left of it, also where its stream was never begun
            row |= self._tokens(generation)
        self._write(row)
        if self.tracer is not None:
            self.tracer.span(Headers(scope=scope), row, seconds)

    def _tokens(self, generation: Any) -> dict[str, Any]:
        usage, model = generation.usage(), generation.served.label
        self.metrics.tokens.labels(model, "prompt").inc(usage["prompt_tokens"])
        self.metrics.tokens.labels(model, "completion").inc(usage["completion_tokens"])
        waits = [r.first_token - r.arrived for r in generation.scheduled if r.first_token is not None]
        for wait in waits:
            self.metrics.first_token.labels(model).observe(wait)
        first = {"first_token_ms": round(1000 * min(waits), 1)} if waits else {}
        return {"model": generation.served.name, **usage, **first}

    def _write(self, row: dict[str, Any]) -> None:
        with suppress(OSError, ValueError):  # a full disk, or a closed file, costs the line and not the answer
            print(json.dumps(row), file=self.log, flush=True)


def is_this_machine(host: str) -> bool:
    """Whether a Host header names this machine: localhost, or a loopback address of either family."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9.-]{1,255}))(?::\d{1,5})?", host)
    if match is None:
        return False
    v6, name = match.groups()
    if name is not None and name.lower() == "localhost":
        return True
    try:
        return ipaddress.IPv6Address(v6).is_loopback if v6 else ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False
