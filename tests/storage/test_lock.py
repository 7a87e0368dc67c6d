import os
import socket
import subprocess
import sys

import pytest

from l2d_jax.errors import InputError
from l2d_jax.storage.lock import hold
from tests.support.programs import ROOT

HOLD = """
import sys, time
from pathlib import Path
from l2d_jax.storage.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_told_who_the_first_is(tmp_path):
    workdir = tmp_path / "new" / "workdir"
    with hold(workdir):
        with pytest.raises(InputError) as caught, hold(workdir):
            pass
        who = f"process {os.getpid()} on {socket.gethostname()}"
        assert str(caught.value).startswith(f"workdir {workdir} is in use by {who}: wait for that run, stop it, or ")
    with hold(workdir):
        pass


def test_an_error_ends_it(tmp_path):
    with pytest.raises(KeyError), hold(tmp_path):
        raise KeyError
    with hold(tmp_path):
        pass


@pytest.mark.slow
def test_a_killed_process_holds_nothing(tmp_path):
    first = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"held\n"
    with pytest.raises(InputError, match=f"in use by process {first.pid} on"), hold(tmp_path):
        pass
    first.kill()
    first.communicate()
    with hold(tmp_path):
        pass


def test_a_holder_that_has_not_signed_is_one_all_the_same(tmp_path):
    with hold(tmp_path):
        (tmp_path / ".lock").write_text("{")
        with pytest.raises(InputError, match="in use by another process"), hold(tmp_path):
            pass


@pytest.mark.parametrize("workdir", ["file", "file/below", "/proc/none", "/proc/self"])
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path, workdir):
    (tmp_path / "file").write_text("here first")
    with pytest.raises(InputError, match="cannot write to workdir"), hold(tmp_path / workdir):
        pass
