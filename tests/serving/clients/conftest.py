"""The server for all tests of clients: the one that `L2D_SERVER` names, or one in this process."""

import os
from collections.abc import Iterator

import pytest

from tests.serving.clients.server import Server, started


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    given = os.environ.get("L2D_SERVER")
    if given:
        yield Server(given)
    else:
        with started() as own:
            yield own
