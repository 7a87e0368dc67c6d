"""Who may use the server: hosts, origins, content types and keys; none needs a model."""

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Route

from l2d_jax.serving.access import Access, AccessGate
from l2d_jax.serving.failures import respond
from tests.support.served import listening

JSON = {"content-type": "application/json"}


def status(access: Access, headers: dict[str, str], *, method: str = "POST", address: str = "127.0.0.1") -> int:
    try:
        access.check(Headers({"host": "localhost:8000", **JSON, **headers}), method=method, address=address)
    except HTTPException as error:
        return error.status_code if len(error.detail) < 300 else 500
    return 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.8.8", "[::1]:8000"])
def test_the_servers_own_addresses_are_hosts(host):
    assert status(Access(), {"host": host}) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "", "[::", "a@localhost", "x" * 9000],
)
def test_other_hosts_are_refused(host):
    assert status(Access(), {"host": host}) == 403


def test_a_server_for_other_machines_has_any_number_but_no_name():
    """A name may come to mean any machine, a number may not."""
    for host in ("10.0.0.1:8000", "[fd00::1]", "localhost"):
        assert status(Access("0.0.0.0"), {"host": host}) == 200
    assert status(Access("0.0.0.0"), {"host": "llm.example"}) == 403
    assert status(Access("0.0.0.0", hosts=["LLM.example"]), {"host": "llm.example:8000"}) == 200
    assert status(Access("llm.example"), {"host": "llm.example"}) == 200
    assert status(Access("0.0.0.0", hosts=["*"]), {"host": "evil.example"}) == 200
    assert status(Access(), {"host": "192.168.1.2"}, address="192.168.1.2") == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "", "http://localhost:3000", "file://localhost:8000", "é" * 9000]
)
def test_pages_of_other_origins_are_refused(origin):
    assert status(Access(), {"origin": origin}) == 403


def test_pages_of_the_server_and_those_allowed_may_ask():
    assert status(Access(), {"origin": "http://localhost:8000"}) == 200
    proxied = {"host": "llm.example", "origin": "https://llm.example"}
    assert status(Access("0.0.0.0", hosts=["llm.example"]), proxied) == 200
    assert status(Access(origins=["https://Chat.example/"]), {"origin": "https://chat.example"}) == 200
    assert status(Access(origins=["https://chat.example"]), {"origin": "https://chat.example.evil.example"}) == 403
    assert status(Access(origins=["*"]), {"origin": "null"}) == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_bodies_of_other_types_are_refused(kind):
    assert status(Access(), {"content-type": kind}) == 415
    assert status(Access(), {"content-type": kind}, method="GET") == 200


def test_json_may_have_parameters():
    assert status(Access(), {"content-type": "Application/JSON; charset=utf-8"}) == 200


@pytest.mark.parametrize("given", ["Bearer secret", "bearer secret", "BEARER    secret  ", "bearer\tsecret"])
def test_the_scheme_of_a_key_has_no_case_and_any_space(given):
    Access(key="secret").check_key(Headers({"authorization": given}))


@pytest.mark.parametrize(
    "given", [None, "", "secret", "Bearer", "Bearer secrets", "Basic secret", "Bearer é", "Bearer secret x"]
)
def test_other_keys_are_refused(given):
    headers = Headers({} if given is None else {"authorization": given})
    with pytest.raises(HTTPException) as refused:
        Access(key="secret").check_key(headers)
    assert (refused.value.status_code, refused.value.headers) == (401, {"WWW-Authenticate": "Bearer"})
    Access().check_key(headers)


@pytest.fixture(scope="module")
def gated() -> Iterator[str]:
    async def answer(_: Any) -> JSONResponse:
        return JSONResponse({})

    app = Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])
    with listening(AccessGate(app, access=Access())) as url:
        yield url


def test_the_gate_answers_in_the_shape_of_errors(gated):
    reply = httpx.post(gated, content=b"{}", headers={"Host": "evil.example", **JSON})
    assert reply.status_code == 403
    assert reply.json()["error"]["type"] == "permission_error"
    assert httpx.post(gated, content=b"{}", headers=JSON).status_code == 200


def test_errors_are_short():
    told = respond(HTTPException(404, "x" * 30_000 + "\n" + "y" * 30_000))
    assert len(told.body) < 400
    assert b"\\n" not in told.body
