"""Where there is isolation, and what is said where there is none, or no control group."""

import contextlib
import os
import subprocess
import sys

import pytest

from l2d_jax.errors import InputError
from l2d_jax.evaluation.sandbox import grade as grading
from l2d_jax.evaluation.sandbox.grade import grade, unavailable, unbounded
from tests.support.submissions import REASON, answer, isolated


@isolated
def test_where_no_control_group_can_be_made_a_line_says_so(monkeypatch):
    monkeypatch.setattr("l2d_jax.evaluation.sandbox.places.bounded_group", lambda *_: contextlib.nullcontext())
    grading._try.cache_clear()
    try:
        line = unbounded()
    finally:
        grading._try.cache_clear()
    assert line.startswith("no control group can be made here: generated code is held to its limits")
    assert "\n" not in line


def test_where_bubblewrap_works_there_is_isolation():
    try:
        subprocess.run(
            ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "true"], check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))
    assert REASON is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere another reason comes first")
def test_without_bubblewrap_the_reason_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unavailable() == (
        "generated code is isolated by bubblewrap, and bwrap is not on the PATH: apt-get install bubblewrap"
    )
    with pytest.raises(InputError, match="bwrap is not on the PATH"):
        grade([answer("42")])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere another reason comes first")
def test_where_isolation_is_refused_the_reason_says_so(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    reason = unavailable()
    assert "(bwrap: No permissions to create new namespace): allow user namespaces" in reason
    assert "\n" not in reason


@pytest.mark.parametrize(("name", "value"), [("sys.platform", "darwin"), ("platform.machine", lambda: "riscv64")])
def test_other_machines_have_none(monkeypatch, name, value):
    monkeypatch.setattr(f"l2d_jax.evaluation.sandbox.grade.{name}", value)
    assert unavailable().split(": ")[-1].startswith("run it on")
