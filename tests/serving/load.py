"""Starts a server, loads it with mixed requests, and prints a table: `python -m tests.serving.load --model DIR`.

The same requests are sent one by one, then many at a time. Some clients leave. All other answers must be the same both
times. In the end the server gets SIGTERM while it answers. Options that this program does not have go to `l2d serve`.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx

from l2d_jax.data.word_problems import conversations

BUDGETS = (1, 3, 7, 15)
WAIT = 3600.0  # seconds
LEAVE = 10  # every tenth client leaves after the first words
LAST = 8  # answers that run when the server gets SIGTERM
POINT = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False}
FORMATS: list[dict[str, Any]] = [
    {"type": "regex", "regex": "[0-9]{1,20}"},
    {"type": "choice", "choices": ["yes", "no"], "probabilities": False},
    {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}},
]
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": POINT}
TOOLS: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice} for choice in ("auto", "required")
]
PADDING = "It is a long story. "  # about five tokens


class Said(NamedTuple):
    """What a client got."""

    answer: Any  # None: the client left
    tokens: int
    evaluations: int
    seconds: float


def requests(count: int, models: Mapping[str, Sequence[int]], *, has_tools: bool, padding: int) -> list[dict[str, Any]]:
    """Bodies of chat completions: budgets, lengths, formats, tools and models are mixed.

    `models` has the budgets that each model can spend.
    """
    rng, rows = random.Random(0), conversations(count, split="test")
    kinds = [{}, {}, {}, {"logprobs": True, "top_logprobs": 2}, *({"response_format": one} for one in FORMATS)]
    kinds += TOOLS if has_tools else []
    bodies = []
    for number, row in enumerate(rows):
        message = dict(row["messages"][0])
        message["content"] = PADDING * rng.choice([0, 0, 0, padding // 6, padding]) + message["content"]
        model = rng.choice([*models])
        body = {"model": model, "messages": [message], "seed": number, **rng.choice(kinds)}
        body |= {
            "budget": rng.choice([one for one in BUDGETS if one in models[model]]),
            "max_tokens": rng.choice([8, 16, 32, 64, 300]),
        }
        body |= {"temperature": rng.choice([0.0, 0.7]), "stream": "tools" not in body and rng.random() < 0.5}
        bodies.append(body)
    return bodies


def ask(url: str, body: dict[str, Any], *, leaves: bool) -> Said:
    """Send a request and read the reply; a client that leaves closes the connection after the first words or call."""
    began, address = time.monotonic(), f"{url}/v1/chat/completions"
    if not body["stream"] and not leaves:
        reply = httpx.post(address, json=body, timeout=WAIT).json()
        assert "error" not in reply, reply
        choice, usage = reply["choices"][0], reply["usage"]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        answer = [choice["message"]["content"] or "", calls, choice["finish_reason"]]
        return Said(answer, usage["completion_tokens"], usage["evaluations"], time.monotonic() - began)
    text, has_begun, ending, usage = "", False, None, {"completion_tokens": 0, "evaluations": 0}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", address, json=body, timeout=WAIT) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    has_begun |= bool(text or choice["delta"].get("tool_calls"))
                    ending = choice["finish_reason"] or ending
                if has_begun and leaves:
                    return Said(None, 0, 0, time.monotonic() - began)
        assert line == "data: [DONE]" or not line
    return Said([text, [], ending], usage["completion_tokens"], usage["evaluations"], time.monotonic() - began)


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server; gives its address and its process."""
    command = [sys.executable, "-m", "l2d_jax.serve", "--port", "0", "--queue", "1024", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "L2D_JAX_API_KEY"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            line = next((line for line in server.stdout if line.startswith("serving ")), "")
            assert line, "the server did not start"
            yield line.split()[-1], server
        finally:
            server.kill()


def row(name: str, value: str) -> None:
    print(f"| {name} | {value} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--at_a_time", type=int, default=32)
    parser.add_argument("--tools", action="store_true", help="some requests have tools")
    parser.add_argument("--padding", type=int, default=120, help="sentences before the longest questions")
    options, arguments = parser.parse_known_args()
    began = time.monotonic()
    with started(arguments) as (url, server):

        def memory() -> str:
            pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
            return f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB"

        while httpx.get(f"{url}/health", timeout=60).status_code != 200:
            assert server.poll() is None
            time.sleep(0.5)
        print("| | |\n|---|---|")
        row("ready after", f"{time.monotonic() - began:.0f} s, {memory()}")
        listed = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        models = {model["id"]: model["budgets"] for model in listed}
        bodies = requests(options.requests, models, has_tools=options.tools, padding=options.padding)
        began = time.monotonic()
        alone = [ask(url, body, leaves=False) for body in bodies]
        seconds = time.monotonic() - began
        speed = sum(said.tokens for said in alone) / seconds
        row(f"{len(bodies)} requests, one by one", f"{seconds:.0f} s, {speed:.1f} tokens/s, {memory()}")

        def ask_numbered(number: int) -> Said:
            return ask(url, bodies[number], leaves=number % LEAVE == LEAVE - 1)

        half, began = len(bodies) // 2, time.monotonic()
        with ThreadPoolExecutor(options.at_a_time) as pool:
            together = list(pool.map(ask_numbered, range(half)))
            after_half = memory()
            together += pool.map(ask_numbered, range(half, len(bodies)))
        seconds, whole = time.monotonic() - began, [said for said in together if said.answer is not None]
        tokens, evaluations = (sum(getattr(said, name) for said in whole) for name in ("tokens", "evaluations"))
        waits = sorted(said.seconds for said in whole)
        row(f"the same, {options.at_a_time} at a time", f"{seconds:.0f} s, {tokens / seconds:.1f} tokens/s")
        row("evaluations", f"{evaluations / seconds:.0f} per second")
        row(
            "time to answer",
            f"median {waits[len(waits) // 2]:.1f} s, 95 % within {waits[int(0.95 * len(waits))]:.1f} s",
        )
        row("clients that left", str(len(together) - len(whole)))
        equal = sum(said.answer == other.answer for said, other in zip(together, alone, strict=True))
        row("answers equal to those one by one", f"{equal} of {len(whole)}")
        for body, said, other in zip(bodies, together, alone, strict=True):
            if said.answer not in (None, other.answer):
                print(f"{json.dumps(body)}\none by one: {other.answer}\ntogether: {said.answer}", file=sys.stderr)
        row("memory", f"{after_half} after half of them, {memory()} after all")
        end(url, server, bodies)
    sys.exit(equal < len(whole))


def end(url: str, server: subprocess.Popen[str], bodies: Sequence[dict[str, Any]]) -> None:
    """Send SIGTERM while answers stream, all of which must be whole."""
    last = [{**body, "stream": True, "max_tokens": 64} for body in bodies if "tools" not in body][:LAST]
    with ThreadPoolExecutor(LAST) as pool:
        replies = [pool.submit(ask, url, body, leaves=False) for body in last]
        time.sleep(1)
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        whole = sum(reply.result().answer[2] is not None for reply in replies)
    status = server.wait(WAIT)
    row("SIGTERM", f"{whole} of {len(last)} answers whole, status {status} after {time.monotonic() - began:.1f} s")
    assert (whole, status) == (len(last), 0)


if __name__ == "__main__":
    main()
