"""Folders that are complete or absent, and the removal of what killed programs have left.

A folder is written under a temporary name and a kernel lock, which ends with the process. A folder with such a name and
without a lock belongs to nobody, and the next program that writes there removes it. SIGTERM removes it immediately. On
file systems without locks (some network mounts), the remains of killed programs stay.
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
PATIENCE = 1.0  # seconds after SIGTERM in which a program may end by itself
_folders: set[Path] = set()  # folders that this process is writing


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """A new folder next to `path`: it is moved there on success and removed on an error. Raises `InputError`."""
    path = path.resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"output goes into a new or empty folder, and {path} is neither: remove it or choose another")
    with explained(f"cannot create a folder in {path.parent}", "choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
    # Names have at most 255 bytes: 50 characters take at most 200.
    with _terminable(), locked_folder(path.parent, f".{path.name[:50]}.", ".partial") as partial:
        yield partial
        partial.rename(path)  # this can replace an empty folder and nothing else


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, which is removed at the end; raises `InputError`."""
    with _terminable(), locked_folder(Path(tempfile.gettempdir()), "l2d_jax_scratch_", "") as folder:
        yield folder


@contextlib.contextmanager
def locked_folder(parent: Path, before: str, after: str) -> Iterator[Path]:
    """A new folder in `parent`, named `before`, 32 digits and `after`, which is removed at the end.

    Folders of this form that killed programs have left are removed first. Raises `InputError`.
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
    """Make a folder and lock it; returns it and the lock's descriptor. Another process may remove it in between."""
    while True:
        folder = parent / f"{before}{uuid.uuid4().hex}{after}"
        folder.mkdir()
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing it
            os.close(lock)
            continue
        except OSError:  # the file system has no locks, so nobody will remove it
            return folder, lock
        if folder.exists():
            return folder, lock
        os.close(lock)


def _remove_left(parent: Path, names: re.Pattern[str]) -> None:
    """Remove folders whose names match and whose lock nobody holds."""
    for folder in [entry for entry in os.scandir(parent) if names.fullmatch(entry.name)]:
        with contextlib.suppress(OSError):  # it belongs to another user, or is locked
            lock = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder.path, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit` in this context, so that open files are closed, unless the program handles it.

    If the main thread does not return to Python in time, for example because a library writes gigabytes, another thread
    removes the folders and ends the process.
    """

    def end(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        raise SystemExit(ENDED)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # Python requires it
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
        os.close(writer)  # this ends the other thread
        watcher.join()
        os.close(reader)


def _watch(reader: int, left: threading.Event) -> None:
    """In a thread: wait for SIGTERM, which writes its number into the pipe, then give the main thread some time."""
    while signals := os.read(reader, 64):
        if signal.SIGTERM in signals and not left.wait(PATIENCE):
            for folder in list(_folders):
                shutil.rmtree(folder, ignore_errors=True)
            os._exit(ENDED)
