"""A control group, which limits the memory of processes together with the memory that the kernel uses for them.

Both versions of control groups are supported; see cgroup-v1/memory.rst and cgroup-v2.rst in the kernel's documentation.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_MOUNTS, _GROUPS = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")
_REMOVAL_SECONDS = 5.0  # wait this long for the last process of a group to end


@contextlib.contextmanager
def bounded_group(name: str, memory: int) -> Iterator[Path | None]:
    """Make a group whose processes take at most `memory` bytes, and remove it afterwards; None if impossible."""
    for parent, is_second in _parents():
        group = parent / name
        try:
            _remove(group)
            group.mkdir()
        except OSError:
            continue
        try:
            if _limit(group, memory, is_second=is_second):
                yield group
                return
        finally:
            _remove(group)
    yield None


def inside(group: Path | None, command: Sequence[str]) -> list[str]:
    """A command line that enters the group and then becomes `command`; with None, `command` itself."""
    if group is None:
        return list(command)
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def _parents() -> Iterator[tuple[Path, bool]]:
    """Groups in which a group that limits memory might be made, nearest first, and whether each is of version 2."""
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    for line in _GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for fields in mounts:
            root, mount, (kind, _, options) = fields[3], Path(fields[4]), fields[fields.index("-") + 1 :]
            if kind != ("cgroup" if controllers else "cgroup2") or (controllers and "memory" not in options.split(",")):
                continue
            own = Path(os.path.normpath(mount / os.path.relpath(path, root)))
            if controllers:
                yield own, False
                continue
            # A group of version 2 that contains processes cannot have subgroups that limit memory, but its parents may.
            for group in (group for group in (own, *own.parents) if group.is_relative_to(mount)):
                with contextlib.suppress(OSError):
                    if "memory" in (group / "cgroup.subtree_control").read_text().split():
                        yield group, True


def _limit(group: Path, memory: int, *, is_second: bool) -> bool:
    """Set the limits for memory and swap; returns whether that and entering the group are permitted."""
    names = "memory.max memory.swap.max" if is_second else "memory.limit_in_bytes memory.memsw.limit_in_bytes"
    limit, swap = names.split()
    try:
        (group / limit).write_text(str(memory))
        with contextlib.suppress(FileNotFoundError):  # the kernel does not count swap
            (group / swap).write_text("0" if is_second else str(memory))
    except OSError:
        return False
    return subprocess.run(inside(group, ["true"]), stderr=subprocess.DEVNULL).returncode == 0


def _remove(group: Path) -> None:
    """Remove a group when its processes have ended; a group whose processes stay is left behind."""
    end = time.monotonic() + _REMOVAL_SECONDS
    while group.exists() and time.monotonic() <= end:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)
