"""The first steps of an isolated process, before it sees a line of strangers' code: limits, account, output."""

import os
import resource
from collections.abc import Mapping


def restrain(limits: Mapping[str, int], account: int | None) -> None:
    """Give up what a process of this kind does not need, for good.

    Args:
        limits: `memory`, `cpu_seconds`, `threads` and `file_bytes`, as in `isolation.Limits`.
        account: the user to become, where the process was started by root: the kernel counts root's threads, but
            sets them no limit. None: stay who you are.
    """
    if account is not None:
        os.setgroups([])
        os.setresgid(account, account, account)
        os.setresuid(account, account, account)  # which also drops all capabilities
    # What is printed goes into a file without a name, where the limits of files hold, and is never read.
    for descriptors in ((0,), (1, 2)):
        file = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
        for descriptor in descriptors:
            os.dup2(file, descriptor)
        os.close(file)
    for kind, bound in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, limits["threads"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (bound, bound))
    seconds = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # a signal that has a name, then one that kills
