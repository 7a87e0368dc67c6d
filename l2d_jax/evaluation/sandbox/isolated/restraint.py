"""The first steps of an isolated process, before it reads any candidate's code: limits, account, output, filter."""

import ctypes
import os
import resource
import struct
from collections.abc import Mapping
from typing import Any

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2  # of linux/prctl.h and linux/seccomp.h
_PR_SET_THP_DISABLE = 41


def restrain(task: Mapping[str, Any]) -> None:
    """Give up for good what an isolated process does not need; raises `OSError` if the kernel refuses a step.

    The task has `limits`, those of `isolation.Limits`; `account`, the user to become, or None to keep the user; and
    `filter`, the system calls that are left, as hexadecimal digits of `seccomp.program`.
    """
    limits, account = task["limits"], task["account"]
    if account is not None:
        os.setgroups([])
        os.setresgid(account, account, account)
        os.setresuid(account, account, account)  # which also drops all capabilities
    # Output goes into memory, up to the limit of a file's size; nobody reads it.
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
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # a signal that has a name, then one that kills
    # A page left of a huge one would keep all of it, of which the limit on memory counts that page alone.
    _control(_PR_SET_THP_DISABLE, 1, None)
    program = bytes.fromhex(task["filter"])
    steps = ctypes.create_string_buffer(program, len(program))
    _control(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, struct.pack("HP", len(program) // 8, ctypes.addressof(steps)))


def _control(operation: int, value: int, pointed: bytes | None) -> None:
    words = operation, ctypes.c_ulong(value), pointed, ctypes.c_ulong(0), ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(*words) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {operation}: {os.strerror(ctypes.get_errno())}")
