"""Streams that are closed, cut off or of another encoding, and Ctrl-C at any moment: never a traceback."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from l2d_jax import console
from l2d_jax.errors import InputError
from tests.support.programs import ROOT, TINY, call, write_base

PROGRAM = [sys.executable, "-m", "l2d_jax.generate"]
DRY_RUN = f"{sys.executable} -m l2d_jax.train --dry_run --config {TINY}"
FULL = "No space left on device"
NOT_UTF_8 = "error: {} must be UTF-8, got '\\udcff': write it in that encoding\n"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base")


def start(*arguments, shell=None, **options):
    """Start the program; with a `shell` command, "$@" in it is the program."""
    command = [*PROGRAM, *map(str, arguments)]
    command = command if shell is None else ["bash", "-c", shell, "bash", *command]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **streams | {"cwd": ROOT, "env": ENVIRONMENT} | options)


def end(process, given=None):
    """Status, standard output and standard error."""
    out, err = process.communicate(given, timeout=120)
    return process.returncode, (out or b"").decode(), err.decode()


def test_an_error_of_ours_is_one_line_unless_a_developer_asks(monkeypatch):
    def main():
        raise RuntimeError("some\nthing\n" + "x" * 1000)

    outcome = call(main)
    assert outcome.status == 1
    assert outcome.err.startswith("error: RuntimeError: some thing xxx")
    assert outcome.err.endswith(" (internal; L2D_JAX_TRACEBACK=1 shows where)\n")
    assert outcome.err.count("\n") == 1
    assert len(outcome.err) <= 301
    monkeypatch.setenv("L2D_JAX_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in call(main).err


def test_what_the_file_system_refuses_is_bad_input(tmp_path):
    assert call(lambda: (tmp_path / "a").read_text()).error == f"No such file or directory: {tmp_path / 'a'}"


def test_a_disk_that_is_full_may_have_room_again():
    def main():
        raise OSError(errno.ENOSPC, FULL, "/disk/file")

    outcome = call(main)
    assert (outcome.status, outcome.err) == (1, f"error: {FULL}: /disk/file\n")


def test_a_long_message_keeps_its_ends():
    def main():
        raise InputError("begin " + "x" * 1000 + " end")

    error = call(main).error
    assert len(error) <= 293
    assert error.startswith("begin x")
    assert error.endswith("x end")


def test_ctrl_c_is_a_status_even_if_a_library_makes_an_error_of_it():
    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    def swallowed():
        try:
            interrupted()
        except KeyboardInterrupt:
            raise RuntimeError("callback failed") from None

    before = signal.getsignal(signal.SIGINT)
    for main in (interrupted, swallowed):
        outcome = call(main)
        assert (outcome.status, outcome.err) == (130, "")
    assert signal.getsignal(signal.SIGINT) is before


def test_output_that_nobody_reads_or_that_has_no_room(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as cut, open("/dev/full", "w") as full:
        for stream, status in ((cut, 141), (full, 1)):
            stream.write("text")
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", stream)
                assert console.finish(0) == status
    assert capfd.readouterr().err == f"error: the output cannot be written: {FULL}\n"


def test_a_library_keeps_its_signals_and_streams():
    code = "import signal, sys, l2d_jax; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    code += "; assert sys.stdout.errors == 'strict'; assert 'l2d_jax.console' not in sys.modules"
    environment = ENVIRONMENT | {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "status", "line"),
    [
        ('set -o pipefail; "$@" --help | head -c 1', 0, ""),  # argparse itself takes no notice
        ('"$@" --help >&-', 0, ""),
        ('"$@" --help <&- >&- 2>&-', 0, ""),
        ('"$@" --budget 0 2>&-', 2, ""),
        ("\"$@\" --model x --prompt $'\\xff'", 2, NOT_UTF_8.format("argument 4")),
        (f"set -o pipefail; PYTHONUNBUFFERED= {DRY_RUN} | true", 141, ""),
        (f"set -o pipefail; PYTHONUNBUFFERED=1 {DRY_RUN} 2>&1 | true", 141, ""),
        (
            f"PYTHONUNBUFFERED= {DRY_RUN} >/dev/full",
            1,
            f"error: the output cannot be written: {FULL}\n",
        ),
        (f"PYTHONUNBUFFERED=1 {DRY_RUN} >/dev/full", 1, f"error: {FULL}\n"),
        (f"{DRY_RUN} <&- >&- 2>&-", 0, ""),
    ],
)
def test_streams_that_are_closed_or_cut_off(shell, status, line):
    assert end(start(shell=shell))[::2] == (status, line)


@pytest.mark.slow
def test_a_chat_without_standard_input_ends(base):
    status, out, err = end(start("--model", base, shell='"$@" <&-'))
    assert (status, err) == (0, "")
    assert out.endswith("> \n")


@pytest.mark.slow
def test_answers_in_letters_that_the_terminal_lacks(base):
    arguments = ["--model", base, "--prompt", "😀", "--prompt", "é", "--max_new_tokens", 2]
    for variables in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}):
        status, out, err = end(start(*arguments, env=ENVIRONMENT | variables))
        assert (status, err) == (0, "")
        assert "\\U0001f600" in out or "😀" in out


@pytest.mark.slow
def test_a_message_that_is_no_text(base):
    status, _, err = end(start("--model", base, stdin=subprocess.PIPE), b"\xff\n")
    assert status == 2
    assert err == NOT_UTF_8.format("the text of a message")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["numpy", "jaxlib", "tokenizers"])
def test_ctrl_c_while_it_imports(library):
    process = start("--model", "x")
    maps = Path(f"/proc/{process.pid}/maps")
    while library not in maps.read_text():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, "", "")


@pytest.mark.slow
def test_ctrl_c_while_it_waits_and_while_it_works(base, tmp_path):
    process = start("--model", base, stdin=subprocess.PIPE)
    assert process.stdout.read(6) == b"budget"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    status, _, err = end(process)
    assert (status, err) == (130, "")
    command = [sys.executable, "-m", "l2d_jax.train", "--config", str(TINY), "--workdir", str(tmp_path / "run")]
    command += ["--config.train.steps=1000000000"]  # for which nothing may be computed beforehand
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    training = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **streams)
    while not training.stdout.readline().startswith(b"step 2/"):
        assert training.poll() is None
    training.send_signal(signal.SIGINT)
    assert end(training)[::2] == (130, "")
