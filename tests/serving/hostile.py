"""Attacks a server on this machine: `python -m tests.serving.hostile SECONDS` starts one with a tiny model.

Hostile clients of every kind act at once, beside honest ones whose answers are known. It prints what became of the
honest ones, and the server's memory over time.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed.sharding import make_mesh
from tests.support.programs import ROOT, write_base, write_model

HONEST = 4  # clients at a time
LIMITS = ("--lanes", "4", "--queue", "64", "--client_timeout", "5", "--drain", "20", "--dtype", "float32")
LIMITS += ("--warm_up", "none")
CHAT, RAW = "v1/chat/completions", "v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@dataclass
class Report:
    """What an attack did."""

    honest: int = 0  # requests of honest clients
    different: list[str] = field(default_factory=list)  # their answers that are not those given alone
    waits: list[float] = field(default_factory=list)  # seconds of honest requests
    statuses: Counter[str] = field(default_factory=Counter)  # of hostile requests
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds since the start, and MiB
    seconds_to_end: float = 0.0  # from SIGTERM while half-open connections are there
    exit_status: int = -1


def question(number: int) -> tuple[str, dict[str, Any]]:
    """An honest request."""
    options: dict[str, Any] = {"seed": number, "max_tokens": 4 + number % 9, "budget": (1, 3, 7)[number % 3]}
    options |= {"temperature": (0.0, 1.0)[number % 2]}
    if number % 4 == 3:
        return RAW, {"prompt": f"{number} +", "logprobs": 1, "n": 1 + number % 2, **options}
    return CHAT, {"messages": [{"role": "user", "content": f"{number} + {number}?"}], **options}


def ask(url: str, number: int) -> tuple[Any, float]:
    """The choices of the answer to an honest request, and the seconds it took; it asks again when told to."""
    path, body = question(number)
    began = time.monotonic()
    while True:
        reply = httpx.post(f"{url}/{path}", json=body, timeout=300)
        if reply.status_code != 429:
            return reply.raise_for_status().json()["choices"], time.monotonic() - began
        time.sleep(int(reply.headers["Retry-After"]))


def is_same(choices: Any, others: Any) -> bool:
    """Whether two answers have the same tokens, with the same log-probabilities up to rounding."""
    for one, other in zip(choices, others, strict=True):
        scores, wanted = (
            (choice.pop("logprobs", None) or {"token_logprobs": []}) for choice in (dict(one), dict(other))
        )
        pairs = zip(scores["token_logprobs"], wanted["token_logprobs"], strict=True)
        if one | {"logprobs": None} != other | {"logprobs": None} or any(abs(a - b) > 1e-3 for a, b in pairs):
            return False
    return True


# Hostile clients: each does one thing; the result is a word for the report.

Client = Callable[[str, random.Random], str]


def connect(url: str, data: bytes = b"") -> socket.socket:
    """A connection on which something has been sent."""
    opened = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30)
    opened.sendall(data)
    return opened


def half_open(url: str, rng: random.Random) -> str:
    """Some dozens of connections with half a head, half a body or nothing, held until the server closes them."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    parts = [
        b"",
        b"GET / HTTP",
        head,
        head + b"Content-Length: 100\r\n\r\n{",
        head + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    ]
    opened = [connect(url, rng.choice(parts)) for _ in range(64)]
    for one in opened:
        with one, contextlib.suppress(OSError):
            while one.recv(2**12):
                pass
    return "closed"


def drip(url: str, rng: random.Random) -> str:
    """A byte every tenth of a second."""
    with connect(url, b"GET /health HTTP/1.1\r\nX: ") as opened, contextlib.suppress(OSError):
        for _ in range(300):
            opened.sendall(b"x")
            time.sleep(0.1)
        return "accepted"
    return "closed"


def deaf(url: str, rng: random.Random) -> str:
    """A stream of which nothing is read."""
    body = b'{"prompt": "a", "max_tokens": 400, "stream": true, "logprobs": 20, "budget": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with connect(url) as opened, contextlib.suppress(OSError):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        opened.sendall(head.replace("Host: a", "Host: localhost").encode() + b"\r\n\r\n" + body)
        time.sleep(8)
    return "left"


def costly() -> list[dict[str, Any]]:
    """Options of requests whose tokens take long, of several kinds."""
    kinds = itertools.product(["midpoint", "fehlberg2"], [1, 3], [31, 63])
    return [{"solver": solver, "draws": draws, "budget": budget} for solver, draws, budget in kinds]


def compile_all(url: str) -> None:
    """Ask for what hostile clients ask for, one at a time, so that all programs are there before honest ones wait."""
    asked = [(CHAT, {"messages": MESSAGES, "max_tokens": 400, **body}) for body in costly()]
    asked += [(RAW, {"prompt": "a", "max_tokens": 400, "logprobs": 20, "budget": 1})]
    asked += [(RAW, scored(draws)) for draws in (4, 8)]
    for path, body in asked:
        with httpx.stream("POST", f"{url}/{path}", json=body | {"stream": True}, timeout=600) as reply:
            next(reply.raise_for_status().iter_lines())


def scored(draws: int) -> dict[str, Any]:
    """A long prompt to be scored."""
    return {"prompt": "a" * 400, "echo": True, "logprobs": 5, "max_tokens": 0, "budget": 31, "draws": draws}


def leaving(url: str, rng: random.Random) -> str:
    """Costly requests, of many kinds, whose client leaves."""
    body = rng.choice(costly()) | {"max_tokens": 400, "stream": rng.random() < 0.5}
    try:
        return str(httpx.post(f"{url}/{CHAT}", json={"messages": MESSAGES, **body}, timeout=0.3).status_code)
    except httpx.TimeoutException:
        return "left"


def scoring(url: str, rng: random.Random) -> str:
    """Long prompts to be scored, whose client leaves."""
    body = scored(rng.choice([4, 8]))
    try:
        return str(httpx.post(f"{url}/{RAW}", json=body, timeout=1).status_code)
    except httpx.TimeoutException:
        return "left"


def large() -> Iterator[dict[str, Any]]:
    """Bodies that would cost much, each of which is refused."""
    keys = {f"k{number}": {"type": "string"} for number in range(10_000)}
    deep: Any = 1
    for _ in range(500):
        deep = {"a": deep}
    yield {"prompt": ["a"] * 60_000, "n": 128, "max_tokens": 1}
    yield {"prompt": "a" * 900_000}
    yield {"prompt": [list(range(200))] * 64, "n": 2}
    yield {"prompt": "a", "stop": "b" * 1900}
    yield {"prompt": "a", "stop": ["b" * 250] * 5}
    yield {"prompt": "a", "draws": 512}
    yield {"prompt": "a", "budget": 9999}
    yield {"prompt": "a", "solver": "fehlberg2"}
    yield {"prompt": "a", "max_tokens": 10**6}
    yield {"prompt": "a", "n": 64, "max_tokens": 1000, "logprobs": 20}
    yield {"prompt": "a", "response_format": {"type": "choice", "choices": [str(number) for number in range(60_000)]}}
    yield {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": keys}}}}
    yield {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": deep}}}
    yield {"prompt": "a", "response_format": {"type": "regex", "regex": "((((a{100}){100}){100}){100}){100}"}}
    yield {"prompt": "a", "logit_bias": {str(number): 1 for number in range(50_000)}}
    yield {"prompt": "\ud800"}
    yield {"prompt": "a", "stop": "\udfff"}
    yield {"prompt": "a", "x" * 500_000: 1}
    yield {"prompt": [True, False]}
    yield {"prompt": "a", "metadata": [[]] * 300_000, "seed": -1}


def refused(url: str, rng: random.Random) -> str:
    """One of the bodies that are refused."""
    body = rng.choice([*large()])
    content = json.dumps(body).encode()
    reply = httpx.post(f"{url}/{RAW}", content=content, headers={"Content-Type": "application/json"}, timeout=120)
    assert reply.status_code in (400, 413, 429), (reply.status_code, f"{body!r:.200}")
    assert len(reply.json()["error"]["message"]) <= 300
    return str(reply.status_code)


def foreign(url: str, rng: random.Random) -> str:
    """What a page of another origin can send, wrong paths and bytes that are no HTTP."""
    kind = {"Content-Type": "application/json"}
    headers = [
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Content-Type": "text/plain"},
    ]
    reply = httpx.post(f"{url}/{RAW}", content=b'{"prompt": "a"}', headers=kind | rng.choice(headers), timeout=60)
    assert reply.status_code in (403, 415)
    long = httpx.get(f"{url}/v1/models/{'x' * rng.randrange(1, 10_000)}", timeout=60)
    assert long.status_code == 404
    assert len(long.json()["error"]["message"]) <= 300
    with connect(url, rng.randbytes(200) + b"\r\n\r\n") as opened, contextlib.suppress(OSError):
        opened.recv(2**10)
    return str(reply.status_code)


CLIENTS: tuple[Client, ...] = (half_open, half_open, drip, deaf, leaving, leaving, scoring, refused, refused, foreign)


def memory(pid: int) -> float:
    """The memory of a process, in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


@contextlib.contextmanager
def program() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server with a tiny model, as its users start it."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name) / "model", write_base(Path(name) / "base"), make_mesh(MeshConfig()))
        command = [sys.executable, "-m", "l2d_jax.serve", "--model", str(folder), "--port", "0", *LIMITS]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ}) as server:
            try:
                assert server.stdout is not None
                yield server.stdout.readline().split()[-1], server
            finally:
                server.kill()


def attack(seconds: float, *, questions: int) -> Report:
    """Start a server, attack it for so many seconds, and end it while half-open connections are there."""
    report = Report()
    with program() as (url, server), ThreadPoolExecutor(HONEST) as honest:
        compile_all(url)
        alone = [ask(url, number)[0] for number in range(questions)]
        ended, began = threading.Event(), time.monotonic()

        def act(client: Client, number: int) -> None:
            rng = random.Random(number)
            while not ended.is_set():
                try:
                    report.statuses[f"{client.__name__} {client(url, rng)}"] += 1
                except (httpx.TransportError, OSError) as error:
                    report.statuses[f"{client.__name__} {type(error).__name__}"] += 1

        hostile = [threading.Thread(target=act, args=pair) for pair in zip(CLIENTS, itertools.count(), strict=False)]
        for thread in hostile:
            thread.start()

        def check(number: int) -> None:
            choices, wait = ask(url, number % questions)
            report.honest += 1
            report.waits.append(wait)
            if not is_same(choices, alone[number % questions]):
                report.different.append(f"{number % questions}: {choices!r:.200}")

        numbers = itertools.count()
        while time.monotonic() - began < seconds:
            list(honest.map(check, itertools.islice(numbers, 2 * HONEST)))
            report.memory.append((time.monotonic() - began, memory(server.pid)))
        ended.set()
        for thread in hostile:
            thread.join()
        half = [connect(url, data) for data in (b"", b"GET / HT", b"POST /v1/completions HTTP/1.1\r\n")]
        told = time.monotonic()
        server.send_signal(signal.SIGTERM)
        report.exit_status = server.wait(60)
        report.seconds_to_end = time.monotonic() - told
        for opened in half:
            opened.close()
    return report


def main(seconds: float) -> None:
    """Attack, and print the report."""
    report = attack(seconds, questions=24)
    waits = sorted(report.waits)
    print(f"honest: {report.honest} requests, {len(report.different)} answered otherwise than alone {report.different}")
    print(f"waits: median {waits[len(waits) // 2]:.1f} s, 95 % below {waits[int(0.95 * len(waits))]:.1f} s")
    print(
        "memory:",
        ", ".join(f"{mib:.0f} MiB at {at:.0f} s" for at, mib in report.memory[:: max(1, len(report.memory) // 20)]),
    )
    print("hostile:", ", ".join(f"{name} {count}" for name, count in sorted(report.statuses.items())))
    print(f"ended {report.seconds_to_end:.1f} s after SIGTERM with status {report.exit_status}")


if __name__ == "__main__":
    main(float(sys.argv[1]))
