"""Addresses on which a server listens."""

import socket

import pytest

from l2d_jax.serving.process import listen_at, url


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "start"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://127.0.0.1:"),
        pytest.param("::1", "http://[::1]:", marks=pytest.mark.skipif(not has_ipv6(), reason="IPv6 is off")),
    ],
)
def test_an_address_is_of_either_kind(host, start):
    with listen_at(host, 0) as listener:
        assert url(listener).startswith(start)
        socket.create_connection(listener.getsockname()[:2], timeout=5).close()


@pytest.mark.skipif(not has_ipv6() or not socket.has_dualstack_ipv6(), reason="IPv6 is off")
def test_all_addresses_are_those_of_both_kinds():
    with listen_at("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()


def test_an_address_that_is_taken_cannot_be_listened_on():
    with listen_at("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", listener.getsockname()[1])
