"""Running answers go on while others wait for their programs."""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.prefix_cache import PrefixCache
from l2d_jax.decoding.batch.prompt_reader import Service
from l2d_jax.decoding.buckets import Programs
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.serving.api.protocol import Protocol
from l2d_jax.serving.engine import Engine
from l2d_jax.serving.front import Readiness
from l2d_jax.serving.warm_up import WarmUp, usual_requests
from l2d_jax.serving.work import PieceWork, Work
from tests.serving.test_engine import WAIT, Client, running
from tests.support.served import catalogue, talking_model

ONE_BY_ONE = DecodeConfig(budget=3, max_new_tokens=24, parallel="off")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return dataclasses.replace(talking_model(classes=2), stop_ids=())


class Compiler:
    """Stands between JAX and its compiler, and can hold up what is compiled."""

    def __init__(self, compile: Callable[..., Any]) -> None:
        self._compile = compile
        self.is_open, self.waiting = threading.Event(), 0
        self.is_open.set()

    def __call__(self, lowered: Any, *arguments: Any, **options: Any) -> Any:
        self.waiting += 1
        assert self.is_open.wait(WAIT)
        self.waiting -= 1
        return self._compile(lowered, *arguments, **options)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler(jax.stages.Lowered.compile)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *values, **options: compiler(*values, **options))
    yield compiler
    compiler.is_open.set()


def digits(loaded: LoadedModel) -> Any:
    pytest.importorskip("llguidance")
    kinds = {"type": "regex", "regex": "[0-9]{24,40}"}
    return dataclasses.replace(loaded, stop_ids=(258,)).compile_grammar(kinds)


def scored(client: Client) -> Client:
    client.work.answer.is_scored = True
    return client


FIRSTS: dict[str, Callable[[LoadedModel], Client]] = {
    "log-probabilities": lambda loaded: scored(Client(loaded, ONE_BY_ONE)),
    "guidance": lambda loaded: Client(loaded, dataclasses.replace(ONE_BY_ONE, guidance=2.0), label=1),
    "RK4": lambda loaded: Client(loaded, dataclasses.replace(ONE_BY_ONE, solver="rk4", budget=5)),
    "prompt": lambda loaded: Client(loaded, ONE_BY_ONE, ids=b"word " * 30),
    "length": lambda loaded: Client(loaded, dataclasses.replace(ONE_BY_ONE, max_new_tokens=260)),
}


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRSTS)
def test_running_answers_do_not_wait_for_the_programs_of_others(
    loaded: LoadedModel, compiler: Compiler, name: str
) -> None:
    """The first answer that needs a program is decoded aside. The next one like it joins the others."""
    usual = Client(loaded, ONE_BY_ONE)
    with running(loaded) as engine:
        engine.submit([usual.work])
        wanted = usual.tokens
        compiler.is_open.clear()
        beside, first, later = (Client(loaded, ONE_BY_ONE), FIRSTS[name](loaded), Client(loaded, ONE_BY_ONE))
        engine.submit([beside.work, first.work])
        wait_for(lambda: compiler.waiting)
        engine.submit([later.work])
        assert (beside.tokens, later.tokens) == (wanted, wanted)
        assert (first.told, compiler.waiting) == ([], 1)
        compiler.is_open.set()
        assert first.tokens == generate_tokens(loaded.decoder, first.request)[0]
        if name == "length":
            return  # lanes of another size are copied by a small program
        compiler.is_open.clear()  # from here on, nothing is compiled
        beside, second = Client(loaded, ONE_BY_ONE), FIRSTS[name](loaded)
        engine.submit([beside.work, second.work])
        assert (beside.tokens, second.tokens) == (wanted, first.tokens)
        assert compiler.waiting == 0


@pytest.mark.slow
def test_a_grammar_needs_no_further_program(loaded: LoadedModel, compiler: Compiler) -> None:
    usual, bound = Client(loaded, ONE_BY_ONE), Client(loaded, ONE_BY_ONE, grammar=digits(loaded))
    with running(loaded) as engine:
        engine.submit([usual.work])
        assert usual.tokens
        compiler.is_open.clear()
        engine.submit([bound.work])
        found = bound.tokens
        assert compiler.waiting == 0
        compiler.is_open.set()
    assert found == generate_tokens(loaded.decoder, bound.request)[0]


@pytest.mark.slow
def test_scoring_compiles_beside_answers_and_other_scoring(loaded: LoadedModel, compiler: Compiler) -> None:
    told, usual = list[str](), Client(loaded, ONE_BY_ONE)
    model = jax.numpy.arange(8)

    def pieces(size: int) -> Iterator[int]:
        for _ in range(2):
            double(model[:size])
            yield 1

    double = Programs(lambda numbers: 2 * numbers)

    def work(name: str, size: int) -> PieceWork:
        return PieceWork(pieces(size), lambda error: told.append(f"{name}: {error}"))

    with running(loaded) as engine:
        engine.submit([usual.work], [work("first", 2)])
        wanted = usual.tokens
        wait_for(lambda: told == ["first: None"])
        compiler.is_open.clear()
        engine.submit([], [work("new", 3)])
        wait_for(lambda: compiler.waiting)
        beside = Client(loaded, ONE_BY_ONE)
        engine.submit([beside.work], [work("second", 2)])
        assert beside.tokens == wanted
        wait_for(lambda: told == ["first: None", "second: None"])
        compiler.is_open.set()
        wait_for(lambda: told[-1] == "new: None")


@pytest.mark.slow
@pytest.mark.parametrize("has_prefixes", [False, True])
def test_nothing_is_compiled_for_usual_requests_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, has_prefixes: bool
) -> None:
    """Prompts of several lengths together, answers of a few kinds, and prompts that continue others."""
    pytest.importorskip("llguidance")
    compiled, compile = list[str](), jax.stages.Lowered.compile

    def note(lowered: Any) -> Any:
        compiled.append(lowered.as_text().partition("module @")[2].partition(" ")[0])
        return compile(lowered)

    models, readiness = catalogue(talking_model(), context=2048, answers=64, efforts={"high": 7}), Readiness()
    loaded = models.get("").loaded
    prefixes = PrefixCache(loaded.model.llm, size=2**22) if has_prefixes else None
    with running(loaded, service=Service(prefixes=prefixes)) as engine:
        protocol = Protocol(models)
        WarmUp(engine, protocol, readiness=readiness).run(usual_requests(models, has_prefixes=has_prefixes))
        assert readiness.is_ready
        monkeypatch.setattr(jax.stages.Lowered, "compile", note)
        lengths = [{"prompt": [[200] * length]} for length in (3, 70, 200, 300, 600)]
        longer = [{"prompt": [[201, *[200] * length]]} for length in (40, 80, 140, 260, 400, 700)]
        longer += [{"prompt": [[*body["prompt"][0], *[202] * 20]]} for body in longer]
        others: list[dict[str, Any]] = [{"temperature": 0.7, "top_p": 0.9}, {"budget": 1}, {"logprobs": 2}]
        others += [{"response_format": {"type": "json_object"}}, {"max_tokens": 300}, {"prompt": ["a", "bc"], "n": 2}]
        others += [{"budget": 7}]
        for wait in [ask(engine, protocol, body) for body in lengths]:
            wait()
        for body in lengths + longer + others:
            ask(engine, protocol, body)()
    assert {*compiled} <= {"jit_resize"}  # a small program, which copies lanes of another size


def ask(engine: Engine, protocol: Protocol, body: dict[str, Any]) -> Callable[[], None]:
    """Ask for completions; returns a function that waits for the end of the answers."""
    read = protocol.read(json.dumps({"prompt": ["Hi"], "max_tokens": 20, **body}).encode(), is_chat=False)
    ended = threading.Semaphore(0)

    def tell(told: Any) -> None:
        if isinstance(told, Exception) or told.is_last:
            ended.release()

    engine.submit([Work(answer, tell, read.model) for answer in read.answers])

    def wait() -> None:
        for _ in read.answers:
            assert ended.acquire(timeout=WAIT)

    return wait
