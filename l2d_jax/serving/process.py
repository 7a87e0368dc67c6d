"""The process of a server: a thread for HTTP from the start, the model in the main thread, signals that end both."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from l2d_jax.errors import contained
from l2d_jax.serving.connections import Server
from l2d_jax.serving.engine import Engine

GRACE = 5.0  # seconds after the last connection in which running computations may finish


def listen_at(host: str, port: int) -> socket.socket:
    """Listen at an address, which is one of IPv6 if it has colons; "::" is all addresses of both kinds.

    Raises `OSError` if that cannot be done.
    """
    both = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=both)


def url(listener: socket.socket) -> str:
    """The address at which `listener` listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listening(server: Server, sockets: list[socket.socket], *, drain: float) -> Iterator[Callable[..., None]]:
    """Serve HTTP in another thread; call it in the main thread, which then loads a model.

    It yields a function that takes the engine and what has to happen before the server is ready. It decodes until a
    signal, and raises what went wrong there. A signal before that ends the process at once.
    """
    engines: list[Engine] = []

    def listen() -> None:
        try:
            server.run(sockets=sockets)
        finally:
            for engine in engines:
                engine.close()
                _leave_after(GRACE, 0)

    def end(*_: Any) -> None:
        if server.should_exit or not engines:
            os._exit(1 if engines else 0)
        with contextlib.suppress(OSError):
            print(f"ending within {drain:g} s: requests under way are answered first", flush=True)
        server.should_exit = True
        _leave_after(drain + 2 * GRACE, 1)

    def decode(engine: Engine, prepare: Callable[[], None]) -> None:
        errors = list[Exception]()

        def prepare_or_end() -> None:
            try:
                prepare()
            except BaseException as error:
                errors.append(contained(error))
                engine.close()
                server.should_exit = True

        engines.append(engine)
        threading.Thread(target=prepare_or_end, daemon=True).start()
        engine.run()
        if errors:
            raise errors[0]

    former = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield decode
    finally:
        server.should_exit = True
        thread.join()
        for number, handler in former.items():
            signal.signal(number, handler)


def _leave(status: int) -> NoReturn:
    with contextlib.suppress(OSError):
        print("ended while the devices were computing what nobody waits for", flush=True)
    os._exit(status)


def _leave_after(seconds: float, status: int) -> None:
    timer = threading.Timer(seconds, _leave, [status])
    timer.daemon = True
    timer.start()
