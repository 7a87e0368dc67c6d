"""Keeps a second run out of a workdir."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from l2d_jax.errors import InputError


@contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Make a workdir and hold it for this process; raises `InputError` where another holds it, which it names.

    The lock is the kernel's, on the file `.lock`: it ends with the process that holds it, however that is killed, and
    the file stays. Readers take no lock. It does not protect from a run on another machine where the file system
    does not share such locks (buckets, some network mounts), nor from who removes `.lock` while it is held; a child
    process that was forked from the holder and outlives it keeps the lock.
    """
    path = workdir / ".lock"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise InputError(f"cannot write to workdir {workdir}: {error.strerror}: choose another --workdir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            taken = f"is in use by {_holder(path)}: wait for that run, stop it"
            reason = taken if isinstance(error, BlockingIOError) else f"cannot be locked ({error.strerror}): unlock it"
            raise InputError(f"workdir {workdir} {reason}, or choose another --workdir") from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        yield


def _holder(path: Path) -> str:
    try:
        held = json.loads(path.read_text())
        return f"process {held['pid']} on {held['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has been locked, and is not yet signed
        return "another process"
