"""Connections have limits of time and number; none needs a model."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from tests.support.served import listening

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
SHORT = 1.0  # seconds that a client may take
sent = {"chunks": 0, "ended": 0}


async def echo(request: Any) -> PlainTextResponse:
    return PlainTextResponse(await request.body())


async def flood(_: Any) -> StreamingResponse:
    async def chunks() -> Any:
        try:
            for _ in range(2000):
                sent["chunks"] += 1
                yield b"x" * 2**16
                await asyncio.sleep(0)
        finally:
            sent["ended"] += 1

    return StreamingResponse(chunks())


async def slow(_: Any) -> StreamingResponse:
    async def chunks() -> Any:
        for number in range(4):
            await asyncio.sleep(0.5)
            yield f"{number}"

    return StreamingResponse(chunks())


APP = Starlette(
    routes=[
        Route("/", lambda _: PlainTextResponse("hello")),
        Route("/echo", echo, methods=["POST"]),
        Route("/flood", flood),
        Route("/slow", slow),
    ]
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(APP, client_timeout=SHORT, max_connections=100) as url:
        yield url


def connect(url: str, data: bytes = b"") -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20)
    opened.sendall(data)
    return opened


def read(opened: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    parts = []
    with opened, contextlib.suppress(ConnectionResetError):
        while part := opened.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def send_slowly(opened: socket.socket, byte: bytes) -> None:
    """Send a byte every tenth of a second until the other end closes."""
    with contextlib.suppress(OSError):
        while True:
            opened.sendall(byte)
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("begun", "drip"),
    [(b"GET / HTTP/1.1\r\nHost: loc", b""), (HEAD + b"abc", b""), (b"GET / HTTP/1.1\r\nX: ", b"y")],
    ids=["half a head", "half a body", "a byte at a time"],
)
def test_a_request_has_to_come_in_time(url, begun, drip):
    began, opened = time.monotonic(), connect(url, begun)
    if drip:
        threading.Thread(target=send_slowly, args=(opened, drip)).start()
    told = read(opened)
    assert told.startswith(b"HTTP/1.1 408 ")
    assert SHORT - 0.1 < time.monotonic() - began < SHORT + 4


def test_a_connection_without_a_request_ends_without_a_word(url):
    assert read(connect(url)) == b""


def test_what_is_no_http_is_refused_in_the_shape_of_errors(url):
    told = read(connect(url, b"\x16\x03\x01\r\n\r\n"))
    assert told.startswith(b"HTTP/1.1 400 ")
    assert b'{"error": {"message": "' in told


def test_a_client_that_reads_nothing_is_left(url):
    """Long before it has been sent everything."""
    before, ended = sent["chunks"], sent["ended"]
    with connect(url, b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        end = time.monotonic() + 10
        while sent["ended"] == ended:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert sent["chunks"] - before < 500


def test_a_client_that_reads_slowly_gets_all(url):
    """As long as it reads some 64 KiB in its time; a short answer that takes longer than that time is no fault."""
    got = 0
    with connect(url, b"GET /flood HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as opened:
        began = time.monotonic()
        while time.monotonic() - began < 2.5 * SHORT:
            got += len(opened.recv(2**19))
            time.sleep(0.05)
        while part := opened.recv(2**20):
            got += len(part)
    assert got > 2000 * 2**16
    assert httpx.get(f"{url}/slow").text == "0123"


def test_honest_clients_get_in_beside_many_half_open_connections():
    """Those that have waited longest make room, long before their time is over."""
    with listening(APP, client_timeout=300.0, max_connections=100) as url:
        opened = [connect(url, b"GET / HTTP/1.1\r\nHo") for _ in range(400)]
        began = time.monotonic()
        for _ in range(20):
            assert b"hello" in read(connect(url, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
        assert time.monotonic() - began < 60
        assert opened[0].recv(100).startswith(b"HTTP/1.1 503 ")
        for one in opened:
            one.close()


def test_more_requests_under_way_than_connections_are_refused():
    with listening(APP, max_connections=2) as url:
        busy = [connect(url, b"GET /slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") for _ in range(2)]
        time.sleep(0.3)
        reply = httpx.get(url)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")
        assert all(b"200 OK" in read(one) for one in busy)


def test_the_end_does_not_wait_for_half_requests():
    """But for those under way, which are answered whole."""
    told: list[str] = []
    with listening(APP, drain=20.0) as url:
        half = [connect(url, data) for data in (b"", b"GET / HT", HEAD + b"ab")]
        asking = threading.Thread(target=lambda: told.append(httpx.get(f"{url}/slow").text))
        asking.start()
        time.sleep(0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 6
    asking.join()
    assert told == ["0123"]
    assert [read(one)[:12] for one in half] == [b"HTTP/1.1 503", b"HTTP/1.1 503", b"HTTP/1.1 503"]


def test_the_end_comes_within_the_drain_time():
    with listening(APP, drain=0.5) as url:
        opened = connect(url, b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 1.6
    opened.close()
