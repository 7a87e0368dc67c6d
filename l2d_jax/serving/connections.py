"""Connections with limits on their time and number, which uvicorn leaves to a proxy.

A client has `client_timeout` seconds to send a request, and as long to read 64 KiB of a reply. If there are too many
connections, the one that has waited longest for its request is closed, so clients that are slow on purpose cannot lock
others out. When the server ends, connections without a complete request are closed immediately.
"""

import contextlib
import json
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from l2d_jax.serving.failures import describe

TICK = 0.5  # seconds between two checks of a connection
PROGRESS = 2**16  # bytes of a reply that a client must read within its timeout
ACCEPTED = 16  # largest number of connections accepted at once
BACKLOG = 1024  # largest number of connections that wait in the kernel
LINGER = 1.0  # seconds in which a refused client can read the reason


class Connection(H11Protocol):
    """One connection of a client."""

    client_timeout = 15.0  # seconds
    max_connections = 256

    def connection_made(self, transport: Any) -> None:
        """Accept a new connection; if there are too many, close another one."""
        super().connection_made(transport)
        now = self.loop.time()
        self._since = now  # when the client began to send, or could have begun
        self._began: float | None = now  # when the client began its request; None: the request is complete
        self._end: float | None = None  # when a refused connection ends
        self._progress, self._left = now, 0  # when the client last read enough, and the bytes left at that time
        self._timer = self.loop.call_later(TICK, self._tick)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client."""
        if self._end is not None:
            return  # a refused client: its bytes are read and dropped, so that it can read the reason
        if self._began is None:
            self._since = self._began = self.loop.time()
        super().data_received(data)
        if not self.is_waiting:
            self._began = None

    def resume_writing(self) -> None:
        """Called when the client has read most of the buffered reply."""
        self._progress = self.loop.time()
        super().resume_writing()

    @property
    def is_waiting(self) -> bool:
        """Whether the client's request is not complete yet."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def _is_open(self) -> bool:
        return self._end is None and not self.transport.is_closing()

    def _dismiss(self, status: int, message: str) -> None:
        """Close a connection, with a response if its client has sent, or may be about to send, a request."""
        if self._began is None:
            self.transport.close()
        else:
            self.refuse(status, message)

    def refuse(self, status: int, message: str) -> None:
        """Send an error, unless the application has begun to respond, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._unset_keepalive_if_required()
        body = json.dumps(describe(status, message)).encode()
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=status, headers=[*fields.items()], reason=STATUS_PHRASES[status])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self._end = self.loop.time() + LINGER
        with contextlib.suppress(OSError):  # the client has left
            self.transport.write_eof()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, in the shape of the other errors."""
        self.refuse(400, msg)

    def shutdown(self) -> None:
        """Called when the server ends: an incomplete request is not waited for."""
        if self._is_open and self.is_waiting:
            self._dismiss(503, "this server is ending: ask another one")
            self._end = self.loop.time()
        elif self._is_open:
            super().shutdown()

    def _make_room(self) -> None:
        """If there are too many connections, close the one that waited longest for its request; if none waits, this."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        closing = [one for one in others if not one._is_open]
        if len(others) - len(closing) >= self.max_connections:
            waiting = [one for one in others if one._is_open and one.is_waiting]
            chosen = min(waiting, key=lambda one: one._since, default=self)
            chosen._dismiss(503, "this server has too many connections: ask again in a while")
        if len(closing) >= self.max_connections:  # clients that do not read the reason
            min(closing, key=lambda one: one._since).transport.abort()

    def _tick(self) -> None:
        """Close the connection of a client that takes too long to send or to read."""
        now, left = self.loop.time(), self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(TICK, self._tick)
        if left == 0 or left <= self._left - PROGRESS:
            self._progress, self._left = now, left
        self._left = max(self._left, left)
        if (self._end is not None and now > self._end) or (left > 0 and now > self._progress + self.client_timeout):
            self.transport.abort()
        elif self._end is None and self._began is not None and now > self._began + self.client_timeout:
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:  # a browser connects in advance
                self.transport.close()
            else:
                self.refuse(408, f"the request did not come within {self.client_timeout:g} s: send it faster")


class Server(uvicorn.Server):
    """A server that accepts a few connections at a time and lets others wait in the kernel.

    The connections accepted at once are all there before any is read. With too many, they would push out each other.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)


def make_server(app: ASGIApp, *, client_timeout: float, max_connections: int, drain: float) -> Server:
    """Make a server for an application; when it ends, it waits `drain` seconds for running requests."""
    limits = {"client_timeout": client_timeout, "max_connections": max_connections}
    protocol = type("LimitedConnection", (Connection,), limits)
    options: dict[str, Any] = {"loop": "asyncio", "http": protocol, "ws": "none", "lifespan": "off"}
    options |= {"proxy_headers": False, "server_header": False, "access_log": False, "log_level": "critical"}
    options |= {"log_config": None}  # its own would close the streams of other libraries' handlers
    options |= {"backlog": ACCEPTED, "timeout_graceful_shutdown": drain}
    return Server(uvicorn.Config(app, **options))
