"""The server as a program: its start, its end by a signal while someone waits, and what it refuses."""

import os
import signal
import socket
import subprocess
import sys

import httpx2 as httpx
import pytest

from l2d_jax import serve
from tests.support.programs import ROOT, call, remove_tokenizer, write_base, write_model


@pytest.mark.slow
def test_a_signal_lets_requests_end(tmp_path, mesh):
    """SIGTERM comes while an answer streams: the answer is whole, and the program ends with status 0.

    Connections without a whole request do not keep it from that.
    """
    folder = write_model(tmp_path / "model", write_base(tmp_path / "base"), mesh)
    command = [sys.executable, "-m", "l2d_jax.serve", "--model", folder, "--port", "0", "--dtype", "float32"]
    command += ["--warm_up", "none"]
    environment = {**os.environ, "L2D_JAX_API_KEY": "secret"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            line = server.stdout.readline()
            assert line.startswith(f"serving {folder} at http://127.0.0.1:")
            url = line.split()[-1]
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "budget": 3, "stream": True}
            assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            assert httpx.get(f"{url}/metrics").status_code == 401
            [model] = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
            assert model["efforts"] == {"none": 1, "low": 3, "medium": 7, "high": 15}
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            half = [socket.create_connection(address) for _ in range(3)]
            for number, opened in enumerate(half):
                opened.sendall([b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"][number])
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120) as reply:
                lines = reply.iter_lines()
                next(lines)
                server.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert '"finish_reason": "' in rest[-2]
            assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.slow
def test_a_signal_before_the_server_is_ready(tmp_path):
    """It is alive and not ready while it compiles; and SIGTERM ends it soon, whatever it compiles."""
    folder = write_base(tmp_path / "base")
    command = [sys.executable, "-m", "l2d_jax.serve", "--model", folder, "--port", "0"]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "empty")}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            url = server.stdout.readline().split()[-1]
            assert httpx.get(f"{url}/health/live").status_code == 200
            reply = httpx.get(f"{url}/health")
            assert (reply.status_code, reply.json()["doing"]) == (503, "compiling")
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()


@pytest.mark.slow
def test_what_cannot_be_served(tmp_path, mesh, monkeypatch):
    base = write_base(tmp_path / "base")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "choose another --host or --port" in call(serve.main, "--model", base, "--port", port).error
    assert "--context" in call(serve.main, "--model", base, "--lanes", 10**6).error
    limits = [("--efforts", "low"), ("--efforts", "low=many"), ("--allow_origin", "chat.example"), ("--drain", "0")]
    for option, value in limits:
        assert option in call(serve.main, "--model", base, option, value).error
    assert (
        "low=3: a budget of 3 needs a diffusion path" in call(serve.main, "--model", base, "--efforts", "low=3").error
    )
    assert "lower --max_connections" in call(serve.main, "--model", base, "--max_connections", 10**9).error
    for key, problem in (("", "is empty"), ("a b", "visible ASCII"), ("é", "visible ASCII")):
        monkeypatch.setenv("L2D_JAX_API_KEY", key)
        assert problem in call(serve.main, "--model", base).error
    monkeypatch.delenv("L2D_JAX_API_KEY")
    remove_tokenizer(base)
    assert "has no tokenizer" in call(serve.main, "--model", base).error
