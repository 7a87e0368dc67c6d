"""A bucket on this machine: an emulator of Google Cloud Storage that can be made to fail.

The emulator from PyPI ignores conditions on generations; they are added here, as the service documents them.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus, server
from typing import Any
from urllib.parse import unquote

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.storage import Storage

NAME = "bucket"
logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it complains of each object that is not there


class Emulator:
    """A server on a free port, with one bucket.

    `fault` is called with the method and the path of each request. It returns None, the status with which the request
    fails, or the seconds that it hangs, as a float.
    """

    def __init__(self) -> None:
        self.storage = Storage(use_memory_fs=True)
        buckets.create_bucket(NAME, self.storage)
        self.fault: Callable[[str, str], int | float | None] = lambda method, path: None
        self.http = _Server(("127.0.0.1", 0), lambda *arguments: _Handler(self, *arguments))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.lock = threading.Lock()
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """The variables by which all clients find the server."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        }

    @contextmanager
    def failing(self, status: float, *, where: str = "", times: int = 2**31) -> Iterator[None]:
        """Let the next so many requests fail whose path has `where` in it."""
        left = [times]

        def fault(method: str, path: str) -> float | None:
            if where not in unquote(path) or not left[0]:
                return None
            left[0] -= 1
            return status

        before, self.fault = self.fault, fault
        try:
            yield
        finally:
            self.fault = before

    def files(self) -> dict[str, bytes]:
        """All objects of the bucket."""
        names = [entry["name"] for entry in self.storage.get_file_list(NAME)[0]]
        return {name: bytes(self.storage.get_file(NAME, name)) for name in names}


class _Server(server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        """Say nothing: a client that was killed does not read its answer."""


class _Handler(emulator.RequestHandler):
    def __init__(self, of: Emulator, *arguments: Any) -> None:
        self._of = of
        super().__init__(of.storage, *arguments)

    def handle_one_request(self) -> None:
        """Read a request as http.server does, fail it or answer it."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        outcome = self._of.fault(self.command, self.path)
        if isinstance(outcome, float):
            time.sleep(outcome)
        elif outcome is not None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_error(outcome)
            return
        with self._of.lock:
            emulator.Router(self).handle(self.command)


def _conditional(handler: Any) -> Any:
    """A handler that keeps the condition on the generation of the object that is there."""

    def handle(request: Any, response: Any, storage: Storage) -> None:
        wanted = request.query.get("ifGenerationMatch")
        if wanted is not None:
            data = request.data if isinstance(request.data, dict) else {}
            name = request.query.get("name", [data.get("meta", data).get("name") or request.params.get("object_id")])[0]
            try:
                there = str(storage.get_file_obj(NAME, name)["generation"])
            except Exception:  # the emulator's own, where there is no such object
                there = "0"
            if there != wanted[0]:
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
        handler(request, response, storage)

    return handle


emulator.HANDLERS = tuple(
    (pattern, {method: _conditional(handler) for method, handler in by_method.items()})
    for pattern, by_method in emulator.HANDLERS
)
