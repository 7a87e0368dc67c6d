"""Workers take turns, and compile without one."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from l2d_jax.decoding.buckets import Programs
from l2d_jax.serving.piecework import PieceQueue
from l2d_jax.serving.turns import Worker
from l2d_jax.serving.work import EndingError, PieceWork

WAIT = 60  # seconds


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is compiled ahead of a call until it is set."""
    gate, compile = threading.Event(), jax.stages.Lowered.compile

    def wait(*values: Any, **options: Any) -> Any:
        assert gate.wait(WAIT)
        return compile(*values, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", wait)
    return gate


class Crew:
    """Workers, and what they have done."""

    def __init__(self) -> None:
        self.compiled, self.done = threading.Semaphore(0), list[Any]()
        self.first, self.second = (Worker(on_compiled=self.compiled.release) for _ in range(2))

    def double(self, programs: Programs, size: int) -> None:
        self.done.append(programs(jnp.arange(size)).tolist())


def test_a_worker_that_compiles_gives_its_turn_back(gate: threading.Event) -> None:
    crew, programs = Crew(), Programs(lambda numbers: 2 * numbers)
    crew.first.begin(lambda: crew.double(programs, 3))
    assert (crew.first.is_compiling, crew.first.is_idle, crew.done) == (True, False, [])
    crew.second.begin(lambda: crew.done.append("other"))
    assert crew.done == ["other"]
    gate.set()
    assert crew.compiled.acquire(timeout=WAIT)
    assert (crew.first.is_compiling, crew.done) == (False, ["other"])  # it waits for its turn
    crew.first.resume()
    assert (crew.first.is_idle, crew.done) == (True, ["other", [0, 2, 4]])
    gate.clear()
    crew.second.begin(lambda: crew.double(programs, 3))  # known
    assert crew.done[2:] == [[0, 2, 4]]


def test_two_workers_compile_a_program_once(gate: threading.Event) -> None:
    crew, traced = Crew(), list[int]()
    programs = Programs(lambda numbers: traced.append(1) or 2 * numbers)
    for worker in (crew.first, crew.second):
        worker.begin(lambda: crew.double(programs, 5))
        assert worker.is_compiling
    gate.set()
    for _ in range(2):
        assert crew.compiled.acquire(timeout=WAIT)
    for worker in (crew.first, crew.second):
        worker.resume()
    assert (len(crew.done), len(traced)) == (2, 1)


def test_programs_within_programs_are_compiled_with_them(gate: threading.Event) -> None:
    gate.set()
    crew, inner = Crew(), Programs(lambda numbers: 2 * numbers)
    outer = Programs(lambda numbers: inner(numbers) + 1)
    crew.first.begin(lambda: crew.double(outer, 2))
    assert crew.compiled.acquire(timeout=WAIT)
    crew.first.resume()
    assert crew.done == [[1, 3]]
    assert not crew.compiled.acquire(timeout=0)


def test_errors_come_to_who_gives_the_turn(gate: threading.Event) -> None:
    """Also those of a compiler, after which the program is compiled anew."""
    crew, errors = Crew(), [ValueError("of a program")]

    def compute(numbers: Any) -> Any:
        if errors:
            raise errors.pop()
        return 2 * numbers

    programs = Programs(compute)
    gate.set()
    crew.first.begin(lambda: crew.double(programs, 2))
    assert crew.compiled.acquire(timeout=WAIT)
    with pytest.raises(ValueError, match="of a program"):
        crew.first.resume()
    crew.second.begin(lambda: crew.double(programs, 2))
    assert crew.compiled.acquire(timeout=WAIT)
    crew.second.resume()
    assert crew.done == [[0, 2]]


def test_a_worker_that_ends_while_it_compiles_computes_nothing(gate: threading.Event) -> None:
    crew = Crew()
    crew.first.begin(lambda: crew.double(Programs(lambda numbers: 2 * numbers), 3))
    crew.first.end()
    gate.set()
    assert crew.compiled.acquire(timeout=WAIT)
    crew.second.begin(lambda: crew.done.append("other"))
    assert crew.done == ["other"]


def test_work_in_pieces_goes_on_beside_work_that_compiles(gate: threading.Event) -> None:
    crew, told, programs = Crew(), list[Any](), Programs(lambda numbers: 2 * numbers)
    queue = PieceQueue([crew.first, crew.second])

    def pieces(name: str, *, compiles: bool) -> Any:
        if compiles:
            crew.double(programs, 7)
        for _ in range(2):
            crew.done.append(name)
            yield 3

    for name in ("new", "known"):
        queue.add([PieceWork(pieces(name, compiles=name == "new"), told.append)])
    for _ in range(4):
        worker = queue.next_worker()
        assert worker is not None
        queue.advance(worker)
    assert (crew.done, told, queue.spent, len(queue)) == (["known", "known"], [None], 6, 1)
    assert queue.next_worker() is None
    queue.end()
    assert isinstance(told[1], EndingError)
    gate.set()
