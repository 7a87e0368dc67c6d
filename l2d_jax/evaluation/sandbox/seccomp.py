"""The filter of system calls: a small program in classic BPF, which the kernel runs at each call.

It permits the calls in `system_calls.toml` and denies all others with EPERM, or with ENOSYS where the C library can do
without the call; see linux/seccomp.h and linux/filter.h. Bubblewrap's namespaces work without the filter. The filter
keeps an isolated process from forking, from what no namespace covers (locks on the host's files, memory that no limit
counts), and from most of the kernel. There are two filters, and both apply: bubblewrap installs the wider one before it
starts Python, and `isolated.restraint` installs the narrower one before any candidate's code is read.
"""

import errno
import functools
import platform
import struct
from collections.abc import Iterator
from typing import Any

from l2d_jax.files import package_table

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of linux/audit.h
# Calls from this number on are newer than the table, and have the same number on all architectures; the C library falls
# back on older calls. One of them is clone3, whose flags are in memory, where a filter cannot read them.
_FIRST_MISSING = 424
_X32 = 0x40000000  # on x86_64, numbers from here on are a second table of the same calls

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # operations of linux/bpf_common.h
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000  # SECCOMP_RET_*

_CALLS = "evaluation/sandbox/system_calls.toml"
_Step = tuple[int, int, int, int]  # operation, steps to skip if true and if false, operand


@functools.cache
def program(machine: str | None = None, *, at_start: bool, threads: bool = True) -> bytes:
    """The filter for a machine (None: this one). `at_start`: the wider filter, for a process that starts Python."""
    machine = machine or platform.machine()
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_AT_LEAST, 0, 1, _FIRST_MISSING),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    answers = [(call, [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]) for call in package_table(_CALLS)["missing"].values()]
    for name, call in allowed_calls(at_start=at_start).items():
        if name != "clone" or threads:
            checks = [step for condition in call.get("when", ()) for step in _check(**condition)]
            answers.append((call, [*checks, (_RETURN, 0, 0, _ALLOW)]))
    for call, answer in answers:
        if machine in call:
            steps += [(_EQUAL, 0, len(answer), call[machine]), *answer]
    steps.append((_RETURN, 0, 0, _ERROR | errno.EPERM))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def allowed_calls(*, at_start: bool) -> dict[str, dict[str, Any]]:
    """The calls that a process may make, by name, `at_start` or after `isolated.restraint`."""
    table = package_table(_CALLS)
    return table["always"] | (table["start"] if at_start else {})


def _check(word: int, values: list[int], mask: int = 0xFFFFFFFF) -> Iterator[_Step]:
    """Steps that deny the call unless the masked argument word has one of the values; then the program continues."""
    yield (_LOAD, 0, 0, _ARGUMENTS + 4 * word)  # both architectures are little-endian
    yield (_AND, 0, 0, mask)
    for left, value in zip(reversed(range(len(values))), values, strict=True):
        yield (_EQUAL, left + 1, 0, value)
    yield (_RETURN, 0, 0, _ERROR | errno.EPERM)
