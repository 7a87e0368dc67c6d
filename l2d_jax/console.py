"""The standard streams and Ctrl-C of a program, from before its slow imports to its last line.

`python -m l2d_jax.PROGRAM` calls `begin` when it imports the package, and `l2d` as its first step. To import the
package as a library changes nothing. This file imports the standard library alone.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
CUT_OFF = 141  # 128 + SIGPIPE, where whoever read the output has gone


def begin() -> None:
    """Make the streams such that nothing fails to be printed or read, and let Ctrl-C end the process at once.

    A stream that is closed becomes the null device, or a file that is opened later would take its place.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one's
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 (until the process ends)
        getattr(sys, name).reconfigure(errors="surrogateescape" if mode == "r" else "backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise it is ignored, as under nohup
        signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
    """Let the first Ctrl-C raise `KeyboardInterrupt`, and fill the list; the second one ends the process."""
    pressed: list[bool] = []

    def interrupt(*_: Any) -> None:
        if pressed:
            _end()
        pressed.append(True)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before not in (signal.default_int_handler, _end):
        yield pressed
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """While a program imports large libraries, let Ctrl-C end the process at once: many do not survive an exception."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or getattr(before, "__module__", None) != __name__:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def complain(line: str) -> None:
    """Print a line on standard error, if anyone is there to read it."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def is_cut_off() -> bool:
    """Whether whoever read the output has gone; a `BrokenPipeError` may also be of another pipe."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor
            poll.register(stream.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def finish(status: int) -> int:
    """Write out what has been printed; the exit status, which is another where that fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with open(os.devnull, "w") as null:  # or the interpreter would try again, and complain
                os.dup2(null.fileno(), stream.fileno())
            if isinstance(error, BrokenPipeError):
                return CUT_OFF
            complain(f"error: the output cannot be written: {error.strerror}")
            return status or 1
    return status


def _end(*_: Any) -> NoReturn:
    os._exit(INTERRUPTED)
