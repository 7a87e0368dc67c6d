"""Several paths on one base: the model of a request chooses, and answers are those of a server with one path."""

import dataclasses
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from l2d_jax.config.schema import MeshConfig
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.distributed.sharding import make_mesh
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model
from l2d_jax.serving.access import Access
from l2d_jax.serving.models import Catalogue, ServedModel
from tests.support.served import served, serving, talking_base, talking_path

QUESTION = [{"role": "user", "content": "Hi"}]
OPERATOR = "operator"


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return talking_base()


@pytest.fixture(scope="module")
def paths(base: LoadedModel) -> dict[str, LoadedModel]:
    """Two that share lanes, and one that reads the context itself."""
    seeds = {"math": 11, "code": 12}
    sharing = {name: talking_path(base, seed) for name, seed in seeds.items()}
    return sharing | {"reading": talking_path(base, 13, reader="path")}


@pytest.fixture(scope="module")
def url(base: LoadedModel, paths: dict[str, LoadedModel]) -> Iterator[str]:
    models = Catalogue(served(base, name="base"))
    for name, loaded in paths.items():
        models.add(served(loaded, name=name))

    def load_path(name: str, place: str) -> ServedModel:
        if place not in paths:
            raise InputError(f"{place} has no diffusion path: give a folder that has one")
        return served(paths[place], name=name)

    with serving(models, access=Access(operator_key=OPERATOR), load_path=load_path) as address:
        yield address


def ask(url: str, route: str, *, method: str = "GET", key: str | None = None, body: Any = None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + route, data, headers, method=method)) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def answer(url: str, model: str, **fields: Any) -> str:
    body = {"model": model, "messages": QUESTION, "seed": 3} | fields
    status, reply = ask(url, "/v1/chat/completions", method="POST", body=body)
    assert status == 200, reply
    assert reply["model"] == (model or "base")
    return str(reply["choices"][0]["message"]["content"])


def alone(loaded: LoadedModel, **options: Any) -> str:
    whole = dataclasses.replace(loaded, model=Model.build(loaded.model.llm, loaded.model.path), is_copied=True)
    with jax.set_mesh(make_mesh(MeshConfig())):  # as the engine has: all chunks take one program
        text = whole.generate("Hi", seed=3, **options)
    assert isinstance(text, str)
    return text


OFF: dict[str, Any] = {"parallel": "off"}  # one order of evaluations, for few programs
FEW: list[tuple[str, dict[str, Any]]] = [("math", OFF), ("code", OFF), ("", {})]
MANY: list[tuple[str, dict[str, Any]]] = [
    *((name, {"budget": budget}) for name in ("math", "code", "reading") for budget in (3, 7)),
    ("base", {}),
    ("math", {"budget": 1}),
    ("math", {"budget": 1, "solver": "bosh3"}),
    ("code", {"budget": 1, "temperature": 0.7}),
    ("math", {"velocity": "expectation", "velocity_temperature": 1.0}),
]


@pytest.mark.parametrize("kinds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"])
def test_all_at_once_and_each_as_alone(
    url: str, base: LoadedModel, paths: dict[str, LoadedModel], kinds: list[tuple[str, dict[str, Any]]]
) -> None:
    found: dict[int, str] = {}

    def fetch(number: int) -> None:
        name, options = kinds[number]
        found[number] = answer(url, name, **options)

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(len(kinds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [alone(paths.get(name, base), **options) for name, options in kinds]
    assert [found[number] for number in range(len(kinds))] == wanted
    assert len({*wanted}) > len(kinds) // 2  # the paths differ


def test_models_are_listed_and_an_unknown_one_names_them(url: str) -> None:
    status, listed = ask(url, "/v1/models")
    assert status == 200
    assert [one["id"] for one in listed["data"]] == ["base", "math", "code", "reading"]
    assert ask(url, "/v1/models/code") == (200, listed["data"][2])
    names = "there is no model 'cod' here: there is 'base', 'math', 'code', 'reading'"
    assert ask(url, "/v1/models/cod") == (404, names)
    body = {"model": "cod", "messages": QUESTION}
    assert ask(url, "/v1/chat/completions", method="POST", body=body) == (400, names)


def test_the_operator_loads_and_drops_paths(url: str, paths: dict[str, LoadedModel]) -> None:
    new = {"name": "more", "path": "code"}
    status, problem = ask(url, "/v1/paths", method="POST", body=new)
    assert (status, "operator's key" in problem) == (401, True)
    status, told = ask(url, "/v1/paths", method="POST", key=OPERATOR, body=new)
    assert (status, told["id"]) == (201, "more")
    assert answer(url, "more", **OFF) == answer(url, "code", **OFF) == alone(paths["code"], **OFF)
    for body, problem in (
        (new, "there is a model 'more' already"),
        ({"name": "a b", "path": "code"}, "the name of a path has"),
        ({"name": "x", "path": "nowhere"}, "nowhere has no diffusion path"),
        ({"name": "x"}, "path is missing"),
        ({"name": "x", "place": "y"}, "place"),
    ):
        status, told = ask(url, "/v1/paths", method="POST", key=OPERATOR, body=body)
        assert status == 400
        assert problem in told
    assert ask(url, "/v1/paths/more", method="DELETE")[0] == 401
    assert ask(url, "/v1/paths/more", method="DELETE", key=OPERATOR)[0] == 200
    assert ask(url, "/v1/paths/more", method="DELETE", key=OPERATOR)[0] == 404
    status, told = ask(url, "/v1/paths/base", method="DELETE", key=OPERATOR)
    assert (status, "is the base of this server" in told) == (400, True)


def test_a_dropped_path_finishes_its_answers(base: LoadedModel, paths: dict[str, LoadedModel]) -> None:
    models = Catalogue(served(base, name="base"))
    first = models.add(served(paths["math"], name="a"))
    second = models.add(served(paths["code"], name="b"))
    assert first.shared is second.shared is not None
    models.remove("a")
    assert models.add(served(paths["math"], name="c")).shared is second.shared
    models.remove("b")
    models.remove("c")
    assert models.add(served(paths["math"], name="d")).shared is not second.shared  # nothing of the old ones is kept
