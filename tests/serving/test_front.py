"""Probes and requests before a server is ready."""

import httpx2 as httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from l2d_jax.serving.access import Access, AccessGate
from l2d_jax.serving.front import Front, Readiness
from tests.support.served import listening

FOREIGN = {"Host": "evil.example"}  # probes come under any name


def test_a_server_is_alive_before_it_is_ready():
    front = Front(readiness := Readiness())
    with listening(front) as url:

        def probe(path: str) -> tuple[int, dict[str, object]]:
            reply = httpx.get(f"{url}{path}", headers=FOREIGN)
            return reply.status_code, reply.json()

        assert probe("/health/live") == (200, {"status": "ok"})
        assert probe("/health") == (503, {"status": "starting", "doing": "loading the model"})
        refused = httpx.post(f"{url}/v1/chat/completions", json={})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["message"] == "this server is starting: ask again in 5 s"
        front.app = AccessGate(Starlette(routes=[Route("/", lambda _: PlainTextResponse("here"))]), access=Access())
        readiness.begin(2)
        readiness.advance()
        assert probe("/health") == (503, {"status": "starting", "doing": "compiling", "done": 1, "of": 2})
        assert httpx.get(url).text == "here"
        assert httpx.get(url, headers=FOREIGN).status_code == 403
        readiness.finish()
        assert probe("/health") == (200, {"status": "ok"})
        assert probe("/health/live") == (200, {"status": "ok"})


@pytest.mark.parametrize(("path", "status"), [("/health/", 404), ("/health/ready", 404)])
def test_other_paths_are_no_probes(path, status):
    front = Front(Readiness())
    front.app = Starlette()
    with listening(front) as url:
        assert httpx.get(f"{url}{path}").status_code == status
