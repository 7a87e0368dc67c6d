"""Places for pairs of isolated processes. Each place belongs to at most one grader of the machine at a time.

A place is a number, with a file that is locked while the place is taken. The kernel unlocks the file when the grader
ends, in whatever way. A place includes two users, if the grader runs as root, and a control group if one can be made.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from l2d_jax.errors import RunError
from l2d_jax.evaluation.sandbox.control_group import bounded_group

PLACES = 256
_FIRST_ACCOUNT = 64000  # first user id for isolated processes of root; two per place
_KERNEL_MEMORY = 2**26  # bytes that a pair of processes needs beyond the limits of both, including Python's start


class Place(NamedTuple):
    """The resources of one pair of isolated processes."""

    accounts: tuple[int, int] | tuple[None, None] = (None, None)  # users that the two become
    group: Path | None = None  # folder of the control group


@contextlib.contextmanager
def taken_places(count: int, *, with_accounts: bool, memory: int) -> Iterator[list[Place]]:
    """Take up to `count` free places for processes of `memory` bytes; raises `RunError` if none is free."""
    folder = _folder()
    with contextlib.ExitStack() as stack:
        places: list[Place] = []
        for number in range(PLACES):
            if len(places) == count:
                break
            file = stack.enter_context((folder / str(number)).open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            account = _FIRST_ACCOUNT + 2 * number
            group = stack.enter_context(bounded_group(f"l2d_jax-{number}", 2 * memory + _KERNEL_MEMORY))
            places.append(Place((account, account + 1) if with_accounts else (None, None), group))
        if not places:
            raise RunError(f"all {PLACES} places of {folder} are taken by other graders: wait until one ends")
        yield places


def _folder() -> Path:
    """The folder of the lock files, shared by all graders of this user."""
    user = os.geteuid()
    folder = Path("/run" if user == 0 else "/tmp", f"l2d_jax-{user}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise RunError(f"cannot make {folder}, whose files say which users are taken: {error.strerror}") from error
    if status.st_uid != user or not stat.S_ISDIR(status.st_mode):
        raise RunError(f"{folder} is not a folder of user {user}: remove it")
    return folder
