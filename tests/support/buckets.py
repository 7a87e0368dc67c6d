"""A bucket on this machine: an emulator of Google Cloud Storage that can be made to fail.

The emulator from PyPI ignores conditions on generations and does not say which generation it sends; both are added
here, as the service documents them.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus, server
from typing import Any

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.storage import Storage

NAME = "bucket"
logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)  # it complains of each object that is not there


class Emulator:
    """A server on a free port, with one bucket."""

    def __init__(self) -> None:
        self.storage = Storage(use_memory_fs=True)
        self.storage.faults = []  # of `failing`
        buckets.create_bucket(NAME, self.storage)
        self.storage.lock = threading.Lock()  # requests change it one at a time
        self.http = _Server(("127.0.0.1", 0), partial(emulator.RequestHandler, self.storage))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """The variables by which all clients find the server."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # or gcsfs asks a service that no emulator has
        }

    @contextmanager
    def failing(self, status: float, *, where: str = "", times: int = 2**31) -> Iterator[None]:
        """Let the next so many requests fail that are about an object, or a listing, with `where` in its name.

        `status` is that of HTTP, or as a float the seconds that such a request hangs.
        """
        fault = {"status": status, "where": where, "times": times}
        self.storage.faults.append(fault)
        try:
            yield
        finally:
            self.storage.faults.remove(fault)

    def files(self) -> dict[str, bytes]:
        """All objects of the bucket."""
        with self.storage.lock:
            names = [entry["name"] for entry in self.storage.get_file_list(NAME)[0]]
            return {name: bytes(self.storage.get_file(NAME, name)) for name in names}


class _Server(server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        """Say nothing: a client that was killed does not read its answer."""


def _as_documented(handler: Any) -> Any:
    """A handler of the emulator that keeps conditions, says what it sends, and fails where it is to fail."""

    def handle(request: Any, response: Any, storage: Storage) -> None:
        data = request.data if isinstance(request.data, dict) else {}
        name = request.params.get("object_id") or data.get("meta", data).get("name") or ""
        name = request.query.get("name", request.query.get("prefix", [name]))[0]
        for fault in storage.faults:
            if fault["times"] and fault["where"] in name:
                fault["times"] -= 1
                if isinstance(fault["status"], float):
                    time.sleep(fault["status"])
                else:
                    response.status = HTTPStatus(fault["status"])
                    return
        with storage.lock:
            wanted = request.query.get("ifGenerationMatch")
            if wanted is not None and _generation(storage, name) != wanted[0]:
                response.status = HTTPStatus.PRECONDITION_FAILED
                return
            handler(request, response, storage)
            if request.method == "GET" and name and response.status < 300:
                response["x-goog-generation"] = _generation(storage, name)

    return handle


def _generation(storage: Storage, name: str) -> str:
    try:
        return str(storage.get_file_obj(NAME, name)["generation"])
    except Exception:  # the emulator's own, where there is no such object
        return "0"


Storage._write_config_to_file = lambda self: None  # after each request the whole index, which nothing reads here
emulator.HANDLERS = tuple(
    (pattern, {method: _as_documented(handler) for method, handler in by_method.items()})
    for pattern, by_method in emulator.HANDLERS
)


def main() -> None:
    """Serve an empty bucket until Ctrl-C: `python -m tests.support.buckets` prints what to set for it."""
    served = Emulator()
    for name, value in served.environment().items():
        print(f"export {name}={value}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
