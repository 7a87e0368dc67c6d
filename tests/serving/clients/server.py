"""The server that clients are tested with: `python -m tests.serving.clients.server` serves a tiny model until a signal.

Only `started` needs the package: the tests of a client run where only that client is installed.
"""

import contextlib
import dataclasses
import json
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KEY = "secret"
EFFORTS = {"none": 1, "low": 3, "medium": 7, "high": 15}


@dataclass(frozen=True)
class Server:
    """A running server, asked without any client."""

    url: str

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    def ask(self, route: str, **body: Any) -> Any:
        """The reply to a request."""
        return json.loads(self._read(f"{self.api}/{route}", json.dumps({"model": "tiny", **body}).encode()))

    def text(self, messages: Any, **options: Any) -> str:
        """The answer to a chat; it is what a client has to show for the same options."""
        return str(self.ask("chat/completions", messages=messages, **options)["choices"][0]["message"]["content"])

    @property
    def evaluations(self) -> float:
        """The evaluations of the path so far."""
        lines = self._read(f"{self.url}/metrics").decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("l2d_evaluations_total"))

    def _read(self, address: str, body: bytes | None = None) -> bytes:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=300) as reply:
            return bytes(reply.read())


@contextlib.contextmanager
def started() -> Iterator[Server]:
    """Start the server."""
    from l2d_jax.data.tokenizer import stop_ids
    from l2d_jax.serving.access import Access
    from tests.support.served import serving, talking_model
    from tests.support.tool_templates import KINDS, tokenizer

    words = tokenizer(**KINDS["qwen"])
    loaded = dataclasses.replace(talking_model(), tokenizer=words, stop_ids=tuple(stop_ids(words)))
    with serving(loaded, access=Access(key=KEY), efforts=EFFORTS, context=4096) as url:
        yield Server(url)


if __name__ == "__main__":
    with started() as server:
        print(server.url, flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
