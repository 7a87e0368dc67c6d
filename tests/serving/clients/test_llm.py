"""Simon Willison's `llm` on a command line, with a model in its extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.clients.questions import QUESTION, SCHEMA, is_trip
from tests.serving.clients.server import KEY, Server

pytest.importorskip("llm")
pytestmark = pytest.mark.slow
TEXT = str(QUESTION[0]["content"])
OWN: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_tokens": 8}
OPTIONS = [part for name, value in OWN.items() for part in ("-o", name, str(value))]
MODELS = """\
- model_id: l2d
  model_name: tiny
  api_base: URL
  api_key_name: l2d
  supports_schema: true
  supports_tools: true
  reasoning: true
- model_id: l2d-responses
  model_name: tiny
  api_base: URL
  api_key_name: l2d
  supports_schema: true
  supports_tools: true
  reasoning: true
  responses: true
"""
FUNCTION = '''
def book(city: str) -> str:
    """Book a trip."""
    return "done"
'''


@pytest.fixture
def ask(server: Server, tmp_path: Path) -> Any:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.replace("URL", server.api))
    (tmp_path / "keys.json").write_text(json.dumps({"l2d": KEY}))

    def run(*arguments: str, status: int = 0) -> tuple[str, str]:
        command = [sys.executable, "-m", "llm", *arguments]
        environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
        told = subprocess.run(command, env=environment, input="", capture_output=True, text=True, check=False)
        assert told.returncode == status, told.stderr
        return told.stdout.removesuffix("\n"), told.stderr

    return run


def test_answers_have_a_budget(ask, server):
    wanted = server.text(QUESTION, **OWN)
    for stream in ([], ["--no-stream"]):
        told, usage = ask("-m", "l2d", TEXT, *OPTIONS, *stream, "-u")
        assert told == wanted
        assert "8 output" in usage
    before = server.evaluations
    ask("-m", "l2d", TEXT, *OPTIONS, "-o", "reasoning_effort", "medium")
    assert server.evaluations - before == 56
    told, _ = ask("-m", "l2d", "And 5?", *OPTIONS, "-c")
    said = server.text(QUESTION, reasoning_effort="medium", **OWN)
    turns = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "And 5?"}]
    assert told == server.text(turns, **OWN)


def test_schemas(ask):
    told, _ = ask("-m", "l2d", "Book.", "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "64")
    assert is_trip(json.loads(told))


def test_responses(ask, server):
    """Without a seed, which it does not send there: greedy answers need none at a budget of 1."""
    options = ["-o", "max_tokens", "8", "-o", "reasoning_effort", "none"]
    wanted = server.text(QUESTION, max_tokens=8, budget=1)
    for stream in ([], ["--no-stream"]):
        told, _ = ask("-m", "l2d-responses", TEXT, *options, *stream)
        assert told == wanted


def test_errors_are_shown(ask):
    _, error = ask("-m", "l2d", TEXT, "-o", "temperature", "1.5", "-o", "max_tokens", "5000", status=1)
    assert "exceed the 4096 tokens of this server" in error


def test_tools_may_be_called(ask):
    """`llm` cannot require a call, and random weights make none."""
    assert ask("-m", "l2d", "Book.", "--functions", FUNCTION, "-o", "max_tokens", "8")[0]
