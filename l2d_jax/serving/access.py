"""Who may use the server: checks of host, origin and API key.

A browser lets any page send requests to any server that it can reach, and the owner of a page can make a domain name
point to this machine (DNS rebinding). So the `Host` of a request must be an address of this server. Its `Origin`, if
there is one, must be that same address or one that the operator allows. And a body must be `application/json`, which a
page of another origin cannot send without a preflight request. Programs other than browsers send no `Origin`.
"""

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from l2d_jax.errors import shown
from l2d_jax.serving.failures import respond

ANY = "*"


@dataclass(frozen=True)
class Access:
    """Who may use a server."""

    host: str = "127.0.0.1"  # the address on which it listens
    hosts: Sequence[str] = ()  # further names of the server; "*": any
    origins: Sequence[str] = ()  # web pages that may send requests, such as https://chat.example; "*": any
    key: str | None = None  # the key that requests must bring; None: none
    operator_key: str | None = None  # the key of requests that load and drop paths; None: none are accepted

    def check(self, headers: Headers, *, method: str, address: str) -> None:
        """Raise `HTTPException` for a request that must not be answered; `address` is where the client connected."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_own(host, address):  # only old clients send no Host; every browser does
            problem = f"this server is not known as {shown(host)}"
            raise HTTPException(403, f"{problem}: start it with --allow_host and that name, or ask by its address")
        if origin is not None and not self._is_allowed(origin, host):
            problem = f"pages of {shown(origin)} may not use this server"
            raise HTTPException(403, f"{problem}: start it with --allow_origin and that origin")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            problem = f"a body must be JSON, got the type {shown(kind)}"
            raise HTTPException(415, f"{problem}: send it with 'Content-Type: application/json'")

    def check_key(self, headers: Headers) -> None:
        """Raise `HTTPException` for a request without the server's key."""
        if self.key is not None and not _brings(headers, self.key):
            problem = "this server wants its API key: send it as 'Authorization: Bearer KEY'"
            raise HTTPException(401, problem, headers={"WWW-Authenticate": "Bearer"})

    def check_operator(self, headers: Headers) -> None:
        """Raise `HTTPException` for a request without the operator's key."""
        if self.operator_key is None:
            raise HTTPException(403, "paths cannot be changed: start the server with L2D_JAX_OPERATOR_KEY set")
        if not _brings(headers, self.operator_key):
            problem = "only the operator changes paths: send the operator's key as 'Authorization: Bearer KEY'"
            raise HTTPException(401, problem, headers={"WWW-Authenticate": "Bearer"})

    def _is_own(self, host: str, address: str) -> bool:
        """Whether a `Host` is an address of this server."""
        name = _host_name(host)
        names = {"localhost", self.host, address, *self.hosts}
        if ANY in self.hosts or (name is not None and name in {one.lower() for one in names}):
            return True
        number, own = _number(name), _number("127.0.0.1" if self.host == "localhost" else self.host)
        if number is None:
            return False  # a name: its owner can point it to any address
        return number.is_loopback or own is None or not own.is_loopback

    def _is_allowed(self, origin: str, host: str | None) -> bool:
        """Whether pages of an `Origin` may send requests: the server's pages, also behind a proxy, and allowed ones."""
        if ANY in self.origins or origin.lower() in {one.lower().rstrip("/") for one in self.origins}:
            return True
        scheme, _, rest = origin.partition("://")
        return scheme in ("http", "https") and host is not None and rest.lower() == host.lower()


class AccessGate:
    """An ASGI application that passes on only requests that `Access.check` accepts."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            try:
                address = (scope.get("server") or ("", 0))[0]
                self._access.check(Headers(scope=scope), method=scope["method"], address=address)
            except HTTPException as error:
                await respond(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _brings(headers: Headers, key: str) -> bool:
    """Whether a request brings a key."""
    scheme, given = [*headers.get("authorization", "").split(maxsplit=1), "", ""][:2]
    is_right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
    return scheme.lower() == "bearer" and is_right


def _host_name(host: str) -> str | None:
    """The name in a `Host` header, without the port."""
    try:
        return None if "@" in host else urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _number(name: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name spells out, or None."""
    try:
        return ipaddress.ip_address(name or "")
    except ValueError:
        return None
