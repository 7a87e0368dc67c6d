"""The application in front of all others: it answers probes, and other requests as soon as there is a model."""

import threading
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from l2d_jax.serving.failures import respond
from l2d_jax.serving.work import StartingError

READY, LIVE = "/health", "/health/live"  # probes: any host may send them, without a key


class Readiness:
    """How far a server is: its model is loaded, then its usual programs are compiled. Any thread may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, Any] = {"status": "starting", "doing": "loading the model"}

    def begin(self, count: int) -> None:
        """The model is loaded, and `count` requests follow that compile the usual programs."""
        with self._lock:
            self._told = {"status": "starting", "doing": "compiling", "done": 0, "of": count}

    def advance(self) -> None:
        """One more of these requests has been answered."""
        with self._lock:
            self._told = {**self._told, "done": self._told["done"] + 1}

    def finish(self) -> None:
        """The server is ready."""
        with self._lock:
            self._told = {"status": "ok"}

    @property
    def is_ready(self) -> bool:
        """Whether the server is ready."""
        return self.describe()[0] == 200

    def describe(self) -> tuple[int, dict[str, Any]]:
        """The status and the body of the response to a probe."""
        with self._lock:
            return 200 if self._told["status"] == "ok" else 503, self._told


class Front:
    """The ASGI application of a server from the time at which it listens."""

    def __init__(self, readiness: Readiness) -> None:
        self.app: ASGIApp | None = None  # answers all requests except probes; None: they are refused
        self._readiness = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        response: ASGIApp
        if scope["path"] == LIVE:
            response = JSONResponse({"status": "ok"})
        elif scope["path"] == READY:
            status, body = self._readiness.describe()
            response = JSONResponse(body, status_code=status)
        elif self.app is None:
            response = respond(StartingError())
        else:
            response = self.app
        await response(scope, receive, send)
