"""The engine: kinds take turns, an error is its answer's alone, and nobody waits for an engine that has ended."""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from l2d_jax.config.schema import DecodeConfig, MeshConfig
from l2d_jax.decoding.batch import lanes
from l2d_jax.decoding.batch.lanes import Lanes
from l2d_jax.decoding.batch.prompt_reader import PIECE
from l2d_jax.decoding.buckets import LONG
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.generation import generate_tokens, make_answers
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Answer, Piece, Prompt, Request, Restrictions, path_config
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.distributed.sharding import make_mesh
from l2d_jax.errors import RunError
from l2d_jax.serving import models as opened
from l2d_jax.serving.engine import Engine
from l2d_jax.serving.models import ServedModel
from l2d_jax.serving.work import EndingError, FullError, Work
from tests.decoding.test_programs import live_programs
from tests.support.served import run_in_mesh, served, talking_base, talking_model

PLAIN = DecodeConfig(budget=1, max_new_tokens=8)
LANES = 4  # in all tests, so that they share programs
WAIT = 300  # seconds, for programs to be compiled on a busy machine
_numbers = itertools.count()
_models: dict[int, ServedModel] = {}  # clients of the same model share lanes


class Client:
    """Asks for one answer, and keeps what it is told."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: DecodeConfig = PLAIN,
        *,
        ids: Any = b"hello",
        label: int | None = None,
        **options: Any,
    ):
        restrictions = Restrictions(**options)
        self.request = Request(
            [Prompt(0, list(ids), label)], settings, restrictions=restrictions, tokenizer=loaded.tokenizer, stop_ids=()
        )
        architecture, path = loaded.model.llm.architecture, path_config(loaded.model)
        [answer] = make_answers(self.request, architecture, path, first=next(_numbers))
        self.told: list[Any] = []
        self._ended = threading.Event()
        self.work = Work(answer, self.hear, _models.setdefault(id(loaded), served(loaded)))

    def hear(self, told: Any) -> None:
        self.told.append(told)
        if isinstance(told, Exception) or (isinstance(told, Piece) and told.is_last):
            self._ended.set()

    @property
    def tokens(self) -> list[int]:
        """The whole answer; raises what the client was told."""
        assert self._ended.wait(WAIT)
        if isinstance(self.told[-1], Exception):
            raise self.told[-1]
        return [token for piece in self.told for token in piece.tokens]


class Panic(BaseException):
    """As libraries in Rust raise it."""


def panic(*_: Any, **__: Any) -> Any:
    raise Panic("of a tokenizer")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return dataclasses.replace(talking_model(), stop_ids=())


@pytest.fixture(scope="module")
def plain() -> LoadedModel:
    """The language model alone, whose programs are small."""
    return dataclasses.replace(talking_base(), stop_ids=())


@contextlib.contextmanager
def running(loaded: LoadedModel, **options: Any) -> Iterator[Engine]:
    """An engine that answers in another thread."""
    engine = Engine(**{"lanes": LANES, "queue": 64, **options})
    thread = threading.Thread(target=run_in_mesh, args=[engine])
    thread.start()
    try:
        yield engine
    finally:
        engine.close()
        thread.join(WAIT)
        assert not thread.is_alive()


def test_an_error_of_one_answer_is_told_to_its_client_alone(plain: LoadedModel, monkeypatch: Any) -> None:
    """In its stop strings, its prompt or the client itself: the others of its kind get their answers."""
    with jax.set_mesh(make_mesh(MeshConfig())):
        wanted = generate_tokens(plain.decoder, Client(plain).request)[0]
    bad = Client(plain, stops=["x"])
    monkeypatch.setattr(bad.work.answer.stops, "add", panic)
    unread = Client(plain)
    monkeypatch.setattr(unread.work.answer, "seed", "none")
    deaf = Client(plain)
    monkeypatch.setattr(deaf.work, "tell", panic)
    good = [Client(plain) for _ in range(3)]
    with running(plain) as engine:
        for client in (good[0], bad, unread, deaf, *good[1:]):
            engine.submit([client.work])
        assert [client.tokens for client in good] == [wanted] * 3
        with pytest.raises(RunError, match="Panic: of a tokenizer"):
            assert bad.tokens == 0
        with pytest.raises((ValueError, TypeError)):
            assert unread.tokens == 0
        assert deaf.work.is_cancelled


def test_an_error_of_a_program_is_told_to_all_of_its_kind(plain: LoadedModel, monkeypatch: Any) -> None:
    """And the engine goes on with what is asked for next."""
    clients = [Client(plain) for _ in range(3)]
    with running(plain) as engine, monkeypatch.context() as patch:
        patch.setattr(lanes, "token_decoder", lambda: 1 // 0)
        engine.submit([client.work for client in clients])
        for client in clients:
            with pytest.raises(ZeroDivisionError):
                assert client.tokens == 0
        patch.undo()
        patch.setattr(opened, "Lanes", panic)
        failed = Client(plain)
        engine.submit([failed.work])
        with pytest.raises(RunError, match="Panic"):
            assert failed.tokens == 0
        patch.undo()
        later = Client(plain)
        engine.submit([later.work])
        assert len(later.tokens) == 8
        assert engine.load == (0, 0)


def test_nobody_waits_for_an_engine_that_has_ended(plain: LoadedModel, monkeypatch: Any) -> None:
    with running(plain) as engine:
        engine.close()
        with pytest.raises(EndingError, match="this server is ending: ask again in 5 s"):
            engine.submit([Client(plain).work])
    engine, left = Engine(lanes=1, queue=4), Client(plain)
    engine.submit([left.work])
    monkeypatch.setattr(engine, "_choose", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    with pytest.raises(FullError):
        assert left.tokens == 0


def test_an_answer_that_nobody_waits_for_is_not_read_on(plain: LoadedModel) -> None:
    """Its prompt has several pieces; the next one is that of another answer."""
    lanes = Lanes(plain.decoder.reading(refines=False), lanes=LANES, stop_ids=())
    settings = dataclasses.replace(PLAIN, max_new_tokens=1)
    long, short = (
        Answer(number, Prompt(0, [65 + number] * length), settings, StopSearch((), None))
        for number, length in enumerate((3 * PIECE, 4))
    )
    with jax.set_mesh(make_mesh(MeshConfig())):  # as the engine has
        lanes.admit([long])
        assert lanes.step() == []
        assert lanes.cost > 1
        lanes.admit([short])
        lanes.drop(long)
        pieces = lanes.step()
    assert [(piece.answer, piece.is_last) for piece in pieces] == [(1, True)]
    assert lanes.is_idle


@pytest.mark.slow
def test_kinds_take_turns_by_their_evaluations(loaded: LoadedModel) -> None:
    """An answer of few evaluations goes on beside those of many; which leave as soon as nobody waits for them."""
    long = DecodeConfig(budget=2 * LONG + 1, max_new_tokens=900)
    short = DecodeConfig(budget=3, max_new_tokens=64)
    others, honest, told = [Client(loaded, long) for _ in range(3)], Client(loaded, short), list[str]()
    wanted = generate_tokens(loaded.decoder, honest.request)[0]
    for client in (*others, honest):
        name = "short" if client is honest else "long"
        client.work.tell = lambda piece, name=name, client=client: (told.append(name), client.hear(piece))  # type: ignore
    with running(loaded, lanes=3) as engine:
        for settings in (short, dataclasses.replace(long, max_new_tokens=1)):  # compiles their programs
            engine.submit([(first := Client(loaded, settings)).work])
            assert first.tokens
        engine.submit([client.work for client in others])
        while "long" not in told:
            time.sleep(0.01)
        engine.submit([honest.work])
        assert honest.tokens == wanted
        begun, ended = told.index("short"), len(told) - told[::-1].index("short")
        turns = told[begun:ended].count("long") / len(others)
        assert turns < 1 + 64 * 3 / (2 * LONG + 1) * 2  # about as many evaluations as its own
        engine.cancel([client.work for client in others])
        before = len(told)
        while engine.load[0]:
            time.sleep(0.01)
        assert len(told) - before <= 2 * len(others)
        engine.submit([(last := Client(loaded, short)).work])
        assert last.tokens == wanted


@pytest.mark.slow
def test_any_number_of_draws_takes_few_programs_and_no_memory(loaded: LoadedModel) -> None:
    settings = DecodeConfig(budget=3, max_new_tokens=8, temperature=1.0, parallel="on")  # one order
    said = {}

    def ask(draws: int) -> list[int]:
        client = Client(loaded, dataclasses.replace(settings, draws=draws))
        engine.submit([client.work])
        return client.tokens

    def held() -> int:
        """Bytes of arrays, once the lanes have gone, which is when the last piece has been told."""
        while engine.load[0]:
            time.sleep(0.01)
        time.sleep(0.1)
        return sum(array.nbytes for array in jax.live_arrays())

    with running(loaded) as engine:
        ask(1)
        before = token_decoder().count
        for draws in (2, 3, 5, 9, 17):
            said[draws] = ask(draws)
        assert token_decoder().count - before <= 5
        programs, before_more = live_programs(), held()
        for draws in range(2, 22):
            said[draws] = ask(draws)
        assert token_decoder().count - before <= 5
        assert live_programs() - programs <= 2
        assert held() - before_more < 2**10
    for draws in (3, 17):
        request = Client(loaded, dataclasses.replace(settings, draws=draws)).request
        assert generate_tokens(loaded.decoder, request)[0] == said[draws]
    assert len({tuple(tokens) for tokens in said.values()}) > 1


@pytest.mark.slow
def test_a_long_kind_that_has_no_room_holds_up_no_short_one(loaded: LoadedModel) -> None:
    """There is room for one long kind and two short ones; within each, who came first is first.

    The programs of short ones are compiled first, since an answer does not wait for programs of other answers.
    """
    long = DecodeConfig(budget=2 * LONG + 1, max_new_tokens=40)
    first, second = Client(loaded, long), Client(loaded, dataclasses.replace(long, solver="euler"))
    known, short = (Client(loaded, dataclasses.replace(PLAIN, max_new_tokens=2)) for _ in range(2))
    ended: list[Client] = []
    for client in (first, second, short):
        client.work.tell = lambda piece, client=client: (client.hear(piece), piece.is_last and ended.append(client))  # type: ignore
    with running(loaded) as engine:
        engine.submit([known.work])
        assert len(known.tokens) == 2
        engine.submit([first.work, second.work, short.work])
        assert [len(client.tokens) for client in (first, second, short)] == [40, 40, 2]
    assert ended == [short, first, second]
