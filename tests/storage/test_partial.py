"""Folders that are complete or absent, and programs that are killed while they write one."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from l2d_jax.errors import InputError
from l2d_jax.storage.partial import output_folder, scratch_folder

WRITER = """
import hashlib, sys, time
from pathlib import Path
from l2d_jax.storage.partial import output_folder
with output_folder(Path(sys.argv[1])) as folder:
    (folder / "a").write_text("a")
    print(folder, flush=True)
    if len(sys.argv) > 2:  # in C, where no signal is handled
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    time.sleep(60)
"""


@contextmanager
def writer(out: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that writes an output folder for a minute, and the folder."""
    with subprocess.Popen([sys.executable, "-c", WRITER, out, *more], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_an_output_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with output_folder(target) as folder:
        (folder / "a").write_text("a")
        assert not target.exists()
        assert folder.parent == target.parent  # so that the rename is one step
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    def fail() -> None:
        with output_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("a")
            raise failure

    with pytest.raises(failure):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_and_others_are_refused(tmp_path: Path) -> None:
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "file"
    empty.mkdir()
    full.mkdir()
    (full / "precious").write_text("a")
    file.write_text("a")
    with output_folder(empty) as folder:
        (folder / "a").write_text("a")
    assert (empty / "a").exists()
    for path in (full, file):
        with pytest.raises(InputError, match=f"new or empty folder, and {re.escape(str(path))}"), output_folder(path):
            pytest.fail("the body must not run")
    assert (full / "precious").exists()


def test_a_parent_that_cannot_hold_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    with pytest.raises(InputError, match=r"cannot create a folder in .*file"), output_folder(tmp_path / "file" / "out"):
        pytest.fail("the body must not run")


def test_what_a_killed_program_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as (process, left):
        process.kill()
        process.wait()
        assert left.is_dir()
        (tmp_path / ".other.0123.partial").mkdir()  # not of this program
        with output_folder(tmp_path / "out"):
            assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.0123.partial", "out"]


def test_two_side_by_side_leave_each_other_alone(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as (_, other):
        with output_folder(tmp_path / "out") as folder:
            assert (other / "a").exists()
            (folder / "b").write_text("b")
        with output_folder(tmp_path / "else"):
            assert (other / "a").exists()


@pytest.mark.parametrize("more", [(), ("in C",)])
def test_sigterm_removes_the_folder_at_once(tmp_path: Path, more: tuple[str, ...]) -> None:
    with writer(tmp_path / "out", *more) as (process, _):
        time.sleep(0.5 * len(more))
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
    assert list(tmp_path.iterdir()) == []


def test_a_programs_own_handling_of_sigterm_stays(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with output_folder(tmp_path / "out"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    with output_folder(tmp_path / "second"):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before


def test_scratch_folders_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"l2d_jax_scratch_{'0' * 32}"
    left.mkdir()
    (tmp_path / "l2d_jax_kept_0").mkdir()
    with scratch_folder() as folder:
        (folder / "a").write_text("a")
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["l2d_jax_kept_0"]


def test_long_names_have_room(tmp_path: Path) -> None:
    name = "\N{SNOWMAN}" * 85  # 255 bytes
    with output_folder(tmp_path / name) as folder:
        (folder / "a").write_text("a")
    assert (tmp_path / name / "a").exists()
