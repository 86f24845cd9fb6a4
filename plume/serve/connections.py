"""Limits of connections: time for a request head and for reading an answer, connections in all and per address."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from plume.config import ServeConfig

SEND_BUFFER = 65_536  # bytes that the kernel takes for a client that does not read
LAST_REQUEST = 5.0  # seconds that a new connection has for its request when the server stops
RESERVE = 32  # connections beyond the limit that may ask for /healthz and /readyz
LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class ConnectionLimits:
    """What the connections of one server share."""

    def __init__(self, config: ServeConfig) -> None:
        self.header_timeout, self.write_timeout = config.header_timeout, config.write_timeout
        self.most, self.most_per_address = config.connections, config.connections_per_address
        self.open: Counter[str] = Counter()  # by address
        self.idle: dict[BoundedConnection, None] = {}  # without a request under way, the longest idle first

    def admit(self, connection: BoundedConnection) -> bool:
        """Count a connection, closing an idle one where there are too many; False when none is idle."""
        address = connection.address
        admitted = True
        if self.open[address] >= self.most_per_address:
            admitted = self._close_idle(address)
        elif self.open.total() >= self.most and not self._close_idle(self._busiest()):
            connection.app_state = {**connection.app_state, "only_health": True}
            admitted = self.open.total() < self.most + RESERVE
        self.open[address] += 1
        self.idle[connection] = None
        return admitted

    def _busiest(self) -> str | None:
        """The address with the most idle connections."""
        idle = Counter(connection.address for connection in self.idle)
        return max(idle, key=lambda address: idle[address], default=None)

    def _close_idle(self, address: str | None) -> bool:
        for connection in self.idle:
            if connection.address == address:
                connection.drop()
                return True
        return False

    def remove(self, connection: BoundedConnection) -> None:
        self.idle.pop(connection, None)
        self.open[connection.address] -= 1
        if self.open[connection.address] <= 0:
            del self.open[connection.address]


class BoundedConnection(H11Protocol):
    """uvicorn's connection with a deadline for whatever the client has to do."""

    limits: ConnectionLimits
    address = ""
    counted = False
    asked = False  # a request has come on it
    last_request = False
    head_timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else "local"
        if (raw := transport.get_extra_info("socket")) is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        admitted = self.limits.admit(self)
        self.counted = True
        if admitted:
            self._wait_for_head()
        else:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timers()
        if self.counted:
            self.counted = False
            self.limits.remove(self)

    def drop(self) -> None:
        """Close now, whatever is still to be sent."""
        self.transport.abort()
        if self.counted:  # before the event loop reports it lost, so that its place is free at once
            self.counted = False
            self.limits.remove(self)

    # -- reading

    def data_received(self, data: bytes) -> None:
        if self.head_timer is None and self in self.limits.idle:
            self._wait_for_head()
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()
        if self.write_timer is None and self.transport.get_write_buffer_size() > 0:
            self.write_timer = self.loop.call_later(self.limits.write_timeout, self._drop_unread)

    def shutdown(self) -> None:
        """The server stops. A connection that has not asked anything yet may be about to: it gets a moment for it."""
        if self in self.limits.idle and not self.asked:
            self.last_request = True
            self._stop_timers()
            self.head_timer = self.loop.call_later(LAST_REQUEST, self.drop)
        else:
            super().shutdown()

    def _note_state(self) -> None:
        """Idle or not, after anything that may have changed it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.asked = True
            if self.last_request:
                self.cycle.keep_alive = False
            self.limits.idle.pop(self, None)
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None
        elif self.counted and self not in self.limits.idle:
            self.limits.idle[self] = None

    def _wait_for_head(self) -> None:
        self.head_timer = self.loop.call_later(self.limits.header_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(LATE)
            self.transport.close()
            self.write_timer = self.loop.call_later(1.0, self.drop)  # where it does not read that either

    # -- writing

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.limits.write_timeout, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def _drop_unread(self) -> None:
        """The last part of an answer, too small for the transport to pause, may be left unread as little as others."""
        self.write_timer = None
        if self.transport.get_write_buffer_size() > 0 and (self.cycle is None or self.cycle.response_complete):
            self.drop()

    def _stop_timers(self) -> None:
        for timer in (self.head_timer, self.write_timer):
            if timer is not None:
                timer.cancel()


def bounded_protocol(config: ServeConfig) -> type[asyncio.Protocol]:
    """The class of one server's connections."""
    body: dict[str, Any] = {"limits": ConnectionLimits(config)}
    return type("BoundedConnection", (BoundedConnection,), body)
