"""The lock of a workdir, which one run holds: the kernel's on a disk, an object that expires in a bucket."""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from l2d_jax.errors import InputError, RunError, require
from l2d_jax.files import explained
from l2d_jax.storage import mirror
from l2d_jax.storage.bucket import Bucket, BucketError, ChangedError, RefusedError

NAME = ".lock"
LEASE = "L2D_JAX_LEASE"  # seconds without a sign of life after which the lock of a bucket has expired; 60


@contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Make a workdir and lock it for this process; readers take no lock. Raises `InputError`, naming the holder."""
    place = mirror.place(workdir)
    with _leased(place) if isinstance(place, Bucket) else _locked(workdir):
        yield


def check_held() -> None:
    """Raise `RunError` if another run may have taken a lock of this process, which can happen in a bucket."""
    for lease in _leases:
        if lease.lost:
            raise RunError(f"the lock of {lease.folder} {lease.lost}: give the same command again once one run is left")


@contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """The kernel holds the lock on the file `.lock`: it ends with the process, however that is killed.

    It does not protect from a run on another machine where the file system does not share such locks (network mounts),
    nor from the removal of `.lock`; a forked child that outlives its holder keeps it.
    """
    path = workdir / NAME
    with explained(f"cannot write to workdir {workdir}", "choose another --workdir"):
        workdir.mkdir(parents=True, exist_ok=True)
        require(path.is_file() or not path.exists(), f"{path} is no regular file: remove it")
        file = path.open("a+")
    with file:
        with explained(f"workdir {workdir} cannot be locked", "unlock it, or choose another --workdir"):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise _in_use(workdir, _parsed(path.read_bytes())) from error
        file.truncate(0)
        file.write(f"{_signature()}\n")
        file.flush()
        yield


@contextmanager
def _leased(folder: Bucket) -> Iterator[None]:
    """The lock is the object `.lock`, which its holder writes anew all the time, each time its own generation alone.

    A second run waits until it sees a sign of life, and takes the lock over when there is none for as long as a lease.
    """
    lease = float(os.environ.get(LEASE, "60"))
    try:
        held = _Lease(folder, _take(folder, lease), lease)
    except RefusedError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror}): choose another --workdir") from error
    except BucketError as error:
        raise RunError(f"{folder} cannot be reached ({error.strerror}): give the same command again later") from error
    thread = threading.Thread(target=held.renew, daemon=True)
    thread.start()
    _leases.append(held)
    try:
        yield
    finally:
        _leases.remove(held)
        held.ended.set()
        thread.join()
        if not held.lost:
            with suppress(OSError):  # it will expire
                folder.remove(NAME, replacing=held.generation)


def _take(folder: Bucket, lease: float) -> int:
    """Write the lock; returns its generation. Raises `InputError` if another run holds it."""
    generation = 0
    while True:
        with suppress(ChangedError):
            return folder.write(NAME, _signature().encode(), replacing=generation)
        try:
            generation, holder = folder.generation(NAME), _parsed(folder.read(NAME))
        except FileNotFoundError:  # it has just been released
            generation = 0
            continue
        if _is_gone(holder):
            continue
        print(f"{folder} is locked by {_name(holder)}: waiting for a sign of life, {lease:.0f} s at most", flush=True)
        end = time.monotonic() + lease
        while time.monotonic() < end:
            time.sleep(min(1.0, lease / 10))
            try:
                if folder.generation(NAME) != generation:
                    raise _in_use(folder, holder)
            except FileNotFoundError:
                break


class _Lease:
    def __init__(self, folder: Bucket, generation: int, lease: float) -> None:
        self.folder, self.generation, self._lease = folder, generation, lease
        self._renewed, self.ended = time.monotonic(), threading.Event()
        self.lost = ""  # how, once it is another's

    def renew(self) -> None:
        """Runs in a thread: write the lock anew, several times in each lease, until `ended`."""
        ours = _signature().encode()
        while not self.lost and not self.ended.wait(self._lease / 6):
            try:
                self.generation = self.folder.write(NAME, ours, replacing=self.generation)
                self._renewed = time.monotonic()
            except ChangedError:
                self._settle(ours)
            except OSError:  # the next attempt may succeed
                if time.monotonic() > self._renewed + self._lease:
                    self.lost = "could not be renewed"

    def _settle(self, ours: bytes) -> None:
        """After a refused write: an attempt before it may have succeeded without an answer."""
        with suppress(OSError):
            generation = self.folder.generation(NAME)
            if self.folder.read(NAME) == ours:
                self.generation = generation
                return
        self.lost = "was taken by another run"


_leases: list[_Lease] = []  # that this process holds


def _signature() -> str:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()})


def _parsed(text: bytes) -> dict[str, Any]:
    """Who has signed a lock; nobody, if the holder has not signed yet."""
    try:
        held = json.loads(text)
        return {"pid": int(held["pid"]), "host": str(held["host"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}


def _name(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}" if holder else "another process"


def _in_use(workdir: object, holder: dict[str, Any]) -> InputError:
    remedy = "wait for that run, stop it, or choose another --workdir"
    return InputError(f"workdir {workdir} is in use by {_name(holder)}: {remedy}")


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether a holder was a process of this host that has ended; a container starts with the same number again."""
    if holder.get("host") != socket.gethostname():
        return False
    return holder["pid"] == os.getpid() or not os.path.exists(f"/proc/{holder['pid']}")
