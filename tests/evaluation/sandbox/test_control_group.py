import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from l2d_jax.evaluation.sandbox import control_group
from l2d_jax.evaluation.sandbox.control_group import bounded_group, inside
from l2d_jax.evaluation.sandbox.grade import grade, unbounded
from l2d_jax.evaluation.sandbox.isolation import Limits
from tests.support.attacks import answering
from tests.support.kernel_attacks import KERNEL
from tests.support.submissions import ask, isolated

NAME = f"l2d_jax-test-{os.getpid()}"
with bounded_group(NAME, 2**26) as _group:
    bounded = pytest.mark.skipif(_group is None, reason="no control group can be made here")


@bounded
def test_a_process_in_the_group_is_held_to_its_memory():
    def run(source, group):
        return subprocess.run(inside(group, [sys.executable, "-c", source]), capture_output=True, text=True)

    with bounded_group(NAME, 2**26) as group:
        assert f"/{NAME}\n" in run("print(open('/proc/self/cgroup').read())", group).stdout
        assert run("print(len(bytearray(2**24)))", group).returncode == 0
        assert run("print(len(bytearray(2**27)))", group).returncode == -signal.SIGKILL
        assert run("print(len(bytearray(2**27)))", None).returncode == 0
    assert not group.exists()


@bounded
def test_a_group_that_was_left_behind_is_replaced():
    with bounded_group(NAME, 2**26) as group:
        pass
    group.mkdir()
    with bounded_group(NAME, 2**25) as again:
        assert again == group
        assert again.exists()
    assert not group.exists()


PAGE_TABLES = answering(
    """
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, *[ctypes.c_long] * 5)
    for number in range(10**5):  # each in a page table, and a directory of them, of its own
        place = libc.mmap((1024 + number) << 30, 4096, 3, 0x22, -1, 0)
        if place == ctypes.c_void_p(-1).value: return number
        ctypes.memset(place, 1, 1)
    """,
    before=KERNEL,
)


@bounded
@isolated
def test_page_tables_count():
    assert unbounded() is None
    [verdict] = grade([ask(PAGE_TABLES, "assert answer(1) > 30_000")], limits=Limits(memory=2**28, seconds=60.0))
    assert "killed" in verdict.reason


# Fields of /proc/self/mountinfo and /proc/self/cgroup, by example.
FIRST = """40 32 0:36 {root} {mount}/memory rw - cgroup cgroup rw,memory
41 32 0:37 / {mount}/cpu rw - cgroup cgroup rw,cpu
"""
SECOND = "42 32 0:38 {root} {mount} rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "root", "groups", "expected"),
    [
        (FIRST, "/", "4:memory:/a/b\n3:cpu:/c\n", [("memory/a/b", False)]),
        (FIRST, "/docker/x", "4:memory:/docker/x/a\n", [("memory/a", False)]),  # a container's view of itself
        (SECOND, "/", "0::/user/session/shell\n", [("user", True), ("", True)]),
        (SECOND, "/", "0::/\n", [("", True)]),
        (FIRST, "/", "0::/\n", []),
    ],
)
def test_the_nearest_groups_that_may_hold_one_are_found(monkeypatch, tmp_path, mounts, root, groups, expected):
    for name, controllers in {
        "": "cpu memory",
        "user": "memory pids",
        "user/session": "",
        "user/session/shell": "",
    }.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cgroup.subtree_control").write_text(controllers + "\n")
    (tmp_path / "mounts").write_text(mounts.format(root=root, mount=tmp_path))
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(control_group, "_MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(control_group, "_GROUPS", tmp_path / "groups")
    assert list(control_group._parents()) == [(tmp_path / name, is_second) for name, is_second in expected]


def test_where_no_group_can_be_made_there_is_none(monkeypatch):
    monkeypatch.setattr(control_group, "_parents", lambda: iter([(Path("/proc"), True)]))
    with bounded_group(NAME, 2**26) as group:
        assert group is None
    assert inside(None, ["true"]) == ["true"]
