"""The server as a program: its start, its end by a signal while someone waits, and what it refuses."""

import os
import signal
import socket
import subprocess
import sys

import httpx2 as httpx
import pytest

from l2d_jax import serve
from l2d_jax.loading import load
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
    for option, value in (("--lanes", 10**6), ("--prefix_cache", 10**8)):
        error = call(serve.main, "--model", base, option, value).error
        assert "GiB of memory" in error
        assert "lower --lanes, --context, --prefix_cache or --max_draws" in error
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which the option changes
        patch.setattr("jax.device_count", lambda: 2)
        problem = (
            "--deterministic answers on one device, found 2, whose sums depend on the lane: start one server for each"
        )
        assert problem in call(serve.main, "--model", base, "--deterministic").error
        assert "--xla_gpu_deterministic_ops=true" in os.environ["XLA_FLAGS"]
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


@pytest.mark.slow
def test_paths_on_one_base(tmp_path, mesh):
    """Each answers as it does alone; the operator adds one, and a path of another base is refused."""
    base = write_base(tmp_path / "base")
    first, second = (write_model(tmp_path / name, base, mesh, seed=seed) for name, seed in (("one", 3), ("two", 4)))
    other = write_model(tmp_path / "other", write_base(tmp_path / "theirs", seed=7), mesh)
    options = ["--model", base, "--port", "0", "--dtype", "float32"]
    for paths, problem in (
        ([f"math={other}"], "is not the one that it was trained on (weights"),
        ([f"math={base}"], "has no diffusion path"),
        ([f"math={first}", f"math={second}"], "two models are called 'math'"),
        ([f"a b={first}"], "the name of a path has"),
        (["math"], "names no path"),
    ):
        arguments = [word for path in paths for word in ("--path", path)]
        assert problem in call(serve.main, *options, *arguments).error
    assert "it as --path" in call(serve.main, "--model", first, "--path", f"math={second}").error
    question = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "budget": 3, "seed": 1}
    wanted = [
        load(folder, dtype="float32").generate("Hi", max_new_tokens=12, budget=3, seed=1) for folder in (first, second)
    ]
    command = [sys.executable, "-m", "l2d_jax.serve", *options, "--path", f"math={first}"]
    environment = {**os.environ, "L2D_JAX_OPERATOR_KEY": "secret"}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            url = server.stdout.readline().split()[-1]
            headers = {"Authorization": "Bearer secret"}
            for path, status in ((other, 400), (second, 201)):
                body = {"name": "code", "path": str(path)}
                assert httpx.post(f"{url}/v1/paths", json=body, headers=headers, timeout=60).status_code == status
            for name, text in zip(("math", "code"), wanted, strict=True):
                reply = httpx.post(f"{url}/v1/chat/completions", json=question | {"model": name}, timeout=120).json()
                assert reply["choices"][0]["message"]["content"] == text
        finally:
            server.kill()
