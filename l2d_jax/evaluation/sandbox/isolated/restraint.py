"""The first steps of an isolated process, before it reads any candidate's code: limits, account, output."""

import os
import resource
from collections.abc import Mapping


def restrain(limits: Mapping[str, int], account: int | None) -> None:
    """Give up for good what an isolated process does not need.

    Args:
        limits: `memory`, `cpu_seconds`, `threads` and `file_bytes`, as in `isolation.Limits`.
        account: the user to become, for a process of root, since the kernel does not limit root's threads; None: keep
            the user.
    """
    if account is not None:
        os.setgroups([])
        os.setresgid(account, account, account)
        os.setresuid(account, account, account)  # which also drops all capabilities
    # Output goes into a file without a name, where the limits of files hold; nobody reads it.
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
