"""Starts an isolated process: bubblewrap's namespaces, a filter of system calls, resource limits.

The process sees Python's standard library and the system's shared libraries, all read-only and without installed
packages, and the pipes that its caller passes. It has no network, no /proc and no environment, and sees no other
process. If started by root, the process becomes another user, whose threads the kernel limits. Otherwise it keeps its
user, in a user namespace.
"""

import contextlib
import functools
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from l2d_jax.evaluation.sandbox import seccomp
from l2d_jax.evaluation.sandbox.control_group import inside
from l2d_jax.evaluation.sandbox.isolated.plain_data import dump_message

_SOURCES = Path(__file__).parent / "isolated"
_PACKAGE = f"{__package__}.isolated"  # the name under which its files import each other
_CODE = "/code"  # folder of the package inside the sandbox
_NULL = Path("/dev/null")
HOSTNAME = "sandbox"  # the host name inside the sandbox
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_ROOT = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
_ROOT_MAY = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")  # needed until it has become another user
_ANYONE = ("--unshare-all", "--unshare-user", "--disable-userns")


class Limits(NamedTuple):
    """The limits of a candidate; its grader has the same limits."""

    seconds: float = 10.0  # wall-clock time after both processes have started
    cpu_seconds: int = 10
    memory: int = 2**30  # bytes of address space
    threads: int = 16
    printed_bytes: int = 2**24  # bytes that it may print
    output_bytes: int = 2**24  # bytes of one reply


def start_isolated(
    module: ModuleType, pipes: Sequence[int], task: Mapping[str, Any], *, bwrap: str, group: Path | None
) -> subprocess.Popen[bytes]:
    """Start `main` of a module of the package `isolated` in isolation, with the bubblewrap at `bwrap`.

    Killing the returned process kills everything inside. The calling thread must outlive the process. The process keeps
    the descriptors `pipes` and gets their numbers on its command line. From standard input it reads the task as JSON,
    with its `limits` and its `account` (the user that it becomes if root starts it; None: it keeps its user).
    """
    account = task["account"]
    alive = f"import os, sys; os.write(2, b'.'); sys.path.insert(0, {_CODE!r})"
    entry = f"{alive}; from {module.__name__} import main; main()"
    threads = account is not None or os.geteuid() != 0  # the kernel does not limit root's: root's process gets none
    with open(os.memfd_create("filter"), "w+b") as filtered:
        filtered.write(seccomp.program(at_start=True, threads=threads))
        filtered.seek(0)
        command = [
            *(bwrap, *(_ANYONE if account is None else _ROOT), "--cap-drop", "ALL"),
            *(() if account is None else _ROOT_MAY),
            *("--hostname", HOSTNAME, "--die-with-parent", "--new-session", "--clearenv"),
            *("--seccomp", str(filtered.fileno())),
            *_mounts(),
            *(_interpreter(), "-I", "-S", "-c", entry, *map(str, pipes)),
        ]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        kept = (filtered.fileno(), *pipes)
        process = subprocess.Popen(inside(group, command), pass_fds=kept, env={}, cwd="/", **streams)
    assert process.stdin is not None
    assert isinstance(process.stderr, io.BufferedReader)
    process.stderr.peek(1)  # its first byte: from now on it dies with this process
    narrower = seccomp.program(at_start=False, threads=threads).hex()
    with contextlib.suppress(BrokenPipeError), process.stdin as file:  # it did not start: its stderr says why
        file.write(dump_message({**task, "filter": narrower}))
    return process


def _interpreter() -> str:
    # In a virtual environment it is a link, or a copy that would look for the environment.
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _mounts() -> list[str]:
    prefixes = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    libraries = [Path(prefix, name) for prefix in sorted(prefixes) for name in ("lib", "lib64")]
    folders = dict.fromkeys(folder for folder in [*map(Path, _LIBRARIES), *libraries] if folder.is_dir())
    files = [Path(_interpreter()), *(path for path in [Path("/etc/ld.so.cache")] if path.exists())]
    inside = Path(_CODE, *_PACKAGE.split("."))
    mounts: list[str] = []
    parents = {parent for path in [*folders, *files, inside, _NULL] for parent in path.parents}
    for parent in sorted(parents - {Path("/"), *folders}):
        mounts += ("--perms", "0755", "--dir", str(parent))
    for folder in folders:
        if folder.is_symlink():
            mounts += ("--symlink", os.readlink(folder), str(folder))
            continue
        mounts += ("--ro-bind", str(folder), str(folder))
        for packages in folder.glob("python3*/*-packages"):  # some packages contain the answers
            mounts += ("--size", "4096", "--perms", "0555", "--tmpfs", str(packages), "--remount-ro", str(packages))
    for outer, inner in [*((file, file) for file in files), (_SOURCES, inside)]:
        mounts += ("--ro-bind", str(outer), str(inner))
    mounts += ("--dev-bind", str(_NULL), str(_NULL))
    return [*mounts, "--dir", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
