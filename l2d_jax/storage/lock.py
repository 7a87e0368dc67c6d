"""The lock of a workdir, so that only one run uses it: a kernel lock on a disk, an object that expires in a bucket."""

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
LEASE = "L2D_JAX_LEASE"  # seconds without renewal after which a lock in a bucket expires; default 60


@contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Make a workdir and lock it for this process; readers need no lock. Raises `InputError` with the holder's name."""
    place = mirror.place(workdir)
    with _leased(place) if isinstance(place, Bucket) else _locked(workdir):
        yield


def check_held() -> None:
    """Raise `RunError` if another run may have taken a lock from this process, which can happen in a bucket."""
    for lease in _leases:
        if lease.lost:
            raise RunError(f"the lock of {lease.folder} {lease.lost}: give the same command again once one run is left")


@contextmanager
def _locked(workdir: Path) -> Iterator[None]:
    """Hold a kernel lock on the file `.lock`. It ends with the process, however the process ends.

    It does not protect from runs on other machines if the file system does not share locks (network mounts), nor from
    the removal of `.lock`. A forked child that outlives its parent keeps the lock.
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
    """Hold a lock in a bucket: the object `.lock`, which its holder rewrites regularly, if the generation is its own.

    A second run watches the object. If it is rewritten, the lock is in use; if not for the time of a lease, the second
    run takes it over.
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
    """Write the lock object; returns its generation. Raises `InputError` if another run holds the lock."""
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
        self.lost = ""  # how the lock was lost; empty: it was not

    def renew(self) -> None:
        """In a thread: rewrite the lock object several times per lease, until `ended`."""
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
        """After a refused write: find out whether an earlier attempt succeeded although its response was lost."""
        with suppress(OSError):
            generation = self.folder.generation(NAME)
            if self.folder.read(NAME) == ours:
                self.generation = generation
                return
        self.lost = "was taken by another run"


_leases: list[_Lease] = []  # leases that this process holds


def _signature() -> str:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()})


def _parsed(text: bytes) -> dict[str, Any]:
    """The signature in a lock; empty if the holder has not signed yet."""
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
    """Whether a holder was a process of this host that has ended; restarted containers reuse process numbers."""
    if holder.get("host") != socket.gethostname():
        return False
    return holder["pid"] == os.getpid() or not os.path.exists(f"/proc/{holder['pid']}")
