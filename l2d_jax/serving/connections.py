"""Connections with limits of time and number, which uvicorn leaves to a proxy.

A client has some seconds for a request, from its first byte to its last one, and as many to read 64 KiB of a reply.
Where there are too many connections, the one that has waited longest for its request makes room: clients that are slow
on purpose keep nobody out. At the server's end, connections without a whole request are closed at once.
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

TICK = 0.5  # seconds between two looks at a connection
PROGRESS = 2**16  # bytes of a reply that a client reads in its time, at least
ACCEPTED = 16  # connections that are taken at once
BACKLOG = 1024  # connections that wait in the kernel to be taken
LINGER = 1.0  # seconds in which a client that was refused may read why


class Connection(H11Protocol):
    """One connection of a client."""

    client_timeout = 15.0  # seconds
    max_connections = 256

    def connection_made(self, transport: Any) -> None:
        """Take a new connection, and make room for it where there are too many."""
        super().connection_made(transport)
        now = self.loop.time()
        self._since = now  # when the client began to send or, where it has not yet, might have
        self._began: float | None = now  # when the client began its request; None: it has sent it whole
        self._end: float | None = None  # of a connection that is refused
        self._progress, self._left = now, 0  # when the client last read enough, and the bytes that were left then
        self._timer = self.loop.call_later(TICK, self._tick)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in what the client sends."""
        if self._end is not None:
            return  # a client that was refused; its bytes are read so that it gets to read why
        if self._began is None:
            self._since = self._began = self.loop.time()
        super().data_received(data)
        if not self.is_waiting:
            self._began = None

    def resume_writing(self) -> None:
        """The client has read most of what there was to read."""
        self._progress = self.loop.time()
        super().resume_writing()

    @property
    def is_waiting(self) -> bool:
        """Whether a part of the client's request is still to come, or all of it."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def _is_open(self) -> bool:
        return self._end is None and not self.transport.is_closing()

    def _dismiss(self, status: int, message: str) -> None:
        """Close a connection, with an answer if its client has asked for something or is about to."""
        if self._began is None:
            self.transport.close()
        else:
            self.refuse(status, message)

    def refuse(self, status: int, message: str) -> None:
        """Answer for the application, unless it has begun to answer, and close."""
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
        """Refuse bytes that are no HTTP, in the shape of the other errors."""
        self.refuse(400, msg)

    def shutdown(self) -> None:
        """The server ends: a request that has not come whole is not waited for."""
        if self._is_open and self.is_waiting:
            self._dismiss(503, "this server is ending: ask another one")
            self._end = self.loop.time()
        elif self._is_open:
            super().shutdown()

    def _make_room(self) -> None:
        """Dismiss whoever has waited longest for its request, where there are too many; this one, if none waits."""
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        closing = [one for one in others if not one._is_open]
        if len(others) - len(closing) >= self.max_connections:
            waiting = [one for one in others if one._is_open and one.is_waiting]
            chosen = min(waiting, key=lambda one: one._since, default=self)
            chosen._dismiss(503, "this server has too many connections: ask again in a while")
        if len(closing) >= self.max_connections:  # clients that do not read why
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
    """A server that lets connections wait in the kernel while it takes a few at a time.

    Of as many as it takes at once none is read before the others are there: too many would push out each other.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)


def make_server(app: ASGIApp, *, client_timeout: float, max_connections: int, drain: float) -> Server:
    """A server for an application; it waits `drain` seconds for requests under way at its end."""
    limits = {"client_timeout": client_timeout, "max_connections": max_connections}
    protocol = type("LimitedConnection", (Connection,), limits)
    options: dict[str, Any] = {"loop": "asyncio", "http": protocol, "ws": "none", "lifespan": "off"}
    options |= {"proxy_headers": False, "server_header": False, "access_log": False, "log_level": "critical"}
    options |= {"backlog": ACCEPTED, "timeout_graceful_shutdown": drain}
    return Server(uvicorn.Config(app, **options))
