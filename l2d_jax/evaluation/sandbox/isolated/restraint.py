"""The first steps of an isolated process, before it reads a candidate's code: limits, account, output, filter."""

import ctypes
import os
import resource
import struct
from collections.abc import Mapping
from typing import Any

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2  # of linux/prctl.h and linux/seccomp.h
_PR_SET_THP_DISABLE = 41


def restrain(task: Mapping[str, Any]) -> None:
    """Permanently give up what an isolated process does not need; raises `OSError` if the kernel refuses a step.

    The task has `limits` (of `isolation.Limits`), `account` (the user to become; None keeps the user), and `filter`
    (the program of `seccomp.program` in hexadecimal, which permits the remaining system calls).
    """
    limits, account = task["limits"], task["account"]
    if account is not None:
        os.setgroups([])
        os.setresgid(account, account, account)
        os.setresuid(account, account, account)  # this also drops all capabilities
    # Output goes to memory, up to the limit on file sizes; nobody reads it.
    for descriptors, file in ((0,), os.open(os.devnull, os.O_RDONLY)), ((1, 2), os.memfd_create("output")):
        for descriptor in descriptors:
            os.dup2(file, descriptor)
        os.close(file)
    for kind, bound in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_NPROC, limits["threads"]),
        (resource.RLIMIT_FSIZE, limits["printed_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (bound, bound))
    seconds = limits["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # first SIGXCPU, then SIGKILL
    # One used page of a huge page would keep all of it, but the limit on memory would count only that page.
    _control(_PR_SET_THP_DISABLE, 1, None)
    program = bytes.fromhex(task["filter"])
    steps = ctypes.create_string_buffer(program, len(program))
    _control(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, struct.pack("HP", len(program) // 8, ctypes.addressof(steps)))


def _control(operation: int, value: int, pointed: bytes | None) -> None:
    words = operation, ctypes.c_ulong(value), pointed, ctypes.c_ulong(0), ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(*words) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {operation}: {os.strerror(ctypes.get_errno())}")
