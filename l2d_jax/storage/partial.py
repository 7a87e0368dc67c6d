"""Folders that are complete or absent, and what of them a program that was killed has left.

A folder is written under a name of its own, under a lock of the kernel, which ends with the process: a folder of such a
name without one is nobody's, and the next program that writes there removes it. SIGTERM removes it at once. File
systems without such locks (some network mounts) keep what a killed program left.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from l2d_jax.errors import InputError
from l2d_jax.files import explained

ENDED = 143  # the exit status: 128 + SIGTERM
PATIENCE = 1.0  # seconds that a program has to end by itself after SIGTERM
_folders: set[Path] = set()  # that this process is writing


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """A sibling of `path` that takes its place on success and is removed on an error; raises `InputError`."""
    path = path.resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"output goes into a new or empty folder, and {path} is neither: remove it or choose another")
    with explained(f"cannot create a folder in {path.parent}", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Names end at 255 bytes: 50 characters are at most 200.
    with _terminable(), locked_folder(path.parent, f".{path.name[:50]}.", ".partial") as partial:
        yield partial
        partial.rename(path)  # takes the place of an empty folder, and of nothing else


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, which is removed in the end; raises `InputError`."""
    with _terminable(), locked_folder(Path(tempfile.gettempdir()), "l2d_jax_scratch_", "") as folder:
        yield folder


@contextlib.contextmanager
def locked_folder(parent: Path, before: str, after: str) -> Iterator[Path]:
    """A new folder in an existing one, named `before`, 32 digits and `after`, which is removed in the end.

    Others of such names whose programs were killed are removed first. Raises `InputError`.
    """
    with contextlib.suppress(OSError):
        _remove_left(parent, re.compile(rf"{re.escape(before)}[0-9a-f]{{32}}{re.escape(after)}"))
    with explained(f"cannot create a folder in {parent}", "choose another place"):
        folder, lock = _make(parent, before, after)
    _folders.add(folder)
    try:
        yield folder
    finally:
        _folders.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(parent: Path, before: str, after: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock; another process may remove it in between."""
    while True:
        folder = parent / f"{before}{uuid.uuid4().hex}{after}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # it is being removed
            os.close(lock)
            continue
        except OSError:  # no locks here, so that nobody removes it
            return folder, lock
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_left(parent: Path, names: re.Pattern[str]) -> None:
    """Remove the folders of such names that no process holds the lock of."""
    for folder in [entry for entry in os.scandir(parent) if names.fullmatch(entry.name)]:
        with contextlib.suppress(OSError):  # of another user, or under a lock
            lock = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder.path, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM raises `SystemExit`, so that what is open is closed, unless the program handles it itself.

    Where the main thread is not back in Python in time, as when a library writes gigabytes, another thread removes the
    folders and ends the process.
    """

    def end(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        raise SystemExit(ENDED)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as Python demands it
    left = threading.Event()
    watcher = threading.Thread(target=_watch, args=(reader, left), daemon=True)
    watcher.start()
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(former)
        left.set()
        os.close(writer)  # which ends the other thread
        watcher.join()
        os.close(reader)


def _watch(reader: int, left: threading.Event) -> None:
    """In a thread: after a SIGTERM, whose number is written into the pipe at once, give the main thread some time."""
    while signals := os.read(reader, 64):
        if signal.SIGTERM in signals and not left.wait(PATIENCE):
            for folder in list(_folders):
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(ENDED)
