"""Checkpoints of the trained weights and their optimizer state, written by orbax. A frozen model is never in them.

A step is good if it has a manifest and all its files match it. Process 0 verifies, writes manifests and deletes for all
processes. Steps that are not good are skipped, with a line that says why, and never deleted: saving such a step again
first moves its files to `<step>.broken`. Readers lock nothing and change nothing. No folder is ever renamed, so this
works in buckets and on file systems that mount a bucket.
"""

import contextlib
import functools
import itertools
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping
from os import strerror
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from l2d_jax.distributed import processes
from l2d_jax.errors import LONGEST_LINE, InputError, RunError, require, shorten
from l2d_jax.files import Fingerprint, require_same
from l2d_jax.storage import mirror
from l2d_jax.storage.bucket import BucketError
from l2d_jax.training import manifest

UNDER_WAY = ocp.utils.TMP_DIR_SUFFIX  # suffix of an unfinished step's folder in earlier versions
SURPLUS = "surplus"  # this file marks a step's folder while it is being deleted


class Checkpoints:
    """The folder `checkpoints/`. It keeps the newest `keep` good steps; each records `inputs`, which must match."""

    def __init__(self, folder: Path, *, keep: int = 1, inputs: Fingerprint | None = None) -> None:
        self._orbax = _checkpointer()
        self._inputs = inputs or {}
        self._folder, self._keep = mirror.place(folder), keep
        self._faults: dict[int, str] = {}  # verified steps and what is wrong with them; "": the step is good
        self._failed: list[int] = []
        self._abandoned: set[int] = set()  # failed steps, whose folders may be written to even after the failure
        self._saving: threading.Thread | None = None
        _quieten()

    def save(self, step: int, items: Mapping[str, Any], *, first: Callable[[], None] | None = None) -> None:
        """Start writing named trees as the checkpoint of `step`; returns before the write is finished.

        A good step that exists already is kept. If a save fails, its files are removed, a line is written to standard
        error, and `failures` lists it. `first` is called on process 0 before; if it raises `OSError`, the save fails.
        """
        self._wait()
        if not processes.decide(lambda: self._prepare(step, first)):
            return
        trees = {name: _named(tree) for name, tree in items.items()}
        try:
            saves = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
            self._orbax.save(f"{self._folder}/{step}", args=ocp.args.Composite(**saves))
        except Exception as error:  # the file system, tensorstore and orbax raise errors of many types
            self._abandon(step, error)
            return
        self._saving = threading.Thread(target=self._complete, args=(step, manifest.array_specs(trees)))
        self._saving.start()

    def failures(self) -> list[int]:
        """Wait for the running save; return the steps whose saves have failed since the last call."""
        self._wait()
        failed, self._failed = self._failed, []
        return failed

    def latest(self) -> int | None:
        """The newest good step, or None. A line says what is wrong with each newer step. Raises `RunError`."""
        self._wait()
        try:
            return processes.decide(lambda: next(filter(self._is_good, self._steps()), None))
        except BucketError as error:  # not the same as a bucket without checkpoints
            problem = f"{self._folder} cannot be read ({error.strerror})"
            raise RunError(f"{problem}: give the same command again later") from error

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """The trees saved at `step`, placed like `like`; raises `InputError`. Files are verified only by `latest`."""
        self._wait()
        wanted = {name: _named(tree) for name, tree in like.items()}
        try:
            found, inputs = manifest.read_manifest(self._folder, step)
            what = f"checkpoint {step} in {self._folder} was trained from something else"
            require_same(inputs, self._inputs, what=what, remedy="put that back, or train in another workdir")
            expected = manifest.array_specs(wanted)
            faults = [fault for name, tree in expected.items() for fault in _compare(tree, found.get(name, {}))]
            args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()})
            restored = {} if faults else self._orbax.restore(f"{self._folder}/{step}", args=args)
        except InputError:
            raise
        except Exception as error:  # as for a save
            problem = f"checkpoint {step} in {self._folder} cannot be read ({_reason(error)})"
            raise InputError(f"{problem}: if it stays so, move it away to go on from an older one") from error
        require(not faults, f"checkpoint {step} does not fit this config: {'; '.join(faults[:5])}: use its own config")
        leaves = {name: [restored[name][path] for path in tree] for name, tree in wanted.items()}
        return {name: jax.tree.unflatten(jax.tree.structure(tree), leaves[name]) for name, tree in like.items()}

    def close(self) -> None:
        """Wait for the running save."""
        self._wait()
        self._orbax.close()

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.join()

    def _steps(self) -> list[int]:
        """All steps that have a folder, good or not, newest first."""
        names = {name.removesuffix(UNDER_WAY) for name in self._folder.names() if not self._is_surplus(name)}
        return sorted((int(name) for name in names if name.isascii() and name.isdigit()), reverse=True)

    def _is_surplus(self, name: str) -> bool:
        return SURPLUS in self._folder.files(name)

    def _is_good(self, step: int) -> bool:
        if step not in self._faults:
            self._faults[step] = ""
            try:
                if str(step) not in self._folder.names():
                    raise manifest.DamagedError("its save was cut off, or has not ended")
                manifest.verify(self._folder, step)
            except manifest.DamagedError as fault:
                self._faults[step] = str(fault)
                _warn(f"checkpoint {step} in {self._folder} is passed over, and left as it is: {fault}")
        return not self._faults[step]

    def _prepare(self, step: int, first: Callable[[], None] | None) -> bool:
        """On process 0: call `first` and move a bad folder of the step aside. Does nothing if the step is good."""
        try:
            there = self._folder.names()
            if str(step) in there and self._is_good(step):
                return False
            if first is not None:
                first()
            for name in {str(step), f"{step}{UNDER_WAY}"}.intersection(there):
                asides = (f"{step}.broken{number or ''}" for number in itertools.count())
                aside = next(aside for aside in asides if aside not in there)
                self._folder.move(name, aside)
                _warn(f"what there was of checkpoint {step} is now in {self._folder}/{aside}")
        except OSError as error:
            self._fail(step, error)
            return False
        return True

    def _complete(self, step: int, arrays: manifest.Arrays) -> None:
        """In a thread: wait until all processes have written, then write the manifest. This makes the step good."""
        try:
            self._orbax.wait_until_finished()
            if processes.is_first():
                manifest.write_manifest(self._folder, step, arrays, self._inputs)
        except Exception as error:  # as for a save
            self._abandon(step, error)
            return
        self._faults[step] = ""
        if processes.is_first():
            try:
                self._remove_surplus()
            except OSError as error:
                _warn(f"checkpoints beyond the newest {self._keep} cannot be removed ({_reason(error)})")

    def _remove_surplus(self) -> None:
        """Delete all good steps except the newest ones; the next call completes an interrupted deletion."""
        for step in self._abandoned:
            if self._faults.get(step) != "":
                self._folder.remove(str(step))
        for step in [step for step in self._steps() if self._is_good(step)][self._keep :]:
            self._folder.write(f"{step}/{SURPLUS}", b"")
            del self._faults[step]
        for folder in filter(self._is_surplus, self._folder.names()):
            for name in self._folder.files(folder).keys() - {SURPLUS}:
                self._folder.remove(f"{folder}/{name}")
            self._folder.remove(folder)

    def _abandon(self, step: int, error: Exception) -> None:
        """Give up a save and remove its files: an incomplete step would only take up space."""
        if processes.is_first():
            with contextlib.suppress(OSError):
                self._folder.remove(str(step))
        self._abandoned.add(step)
        self._orbax = _checkpointer()  # the old one might raise this error again in the next save
        self._fail(step, error)

    def _fail(self, step: int, error: Exception) -> None:
        self._failed.append(step)
        self._faults.pop(step, None)
        good = max((step for step, fault in self._faults.items() if not fault), default=None)
        newest = "there is no good one yet" if good is None else f"the newest good one is step {good}"
        if processes.is_first():
            _warn(f"checkpoint of step {step} was not saved ({_reason(error)}): training goes on; {newest}")


def _checkpointer() -> ocp.AsyncCheckpointer:
    # Create folders synchronously: then a folder that cannot be created fails the save, instead of blocking it forever.
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    in_place = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(atomicity_options=in_place))
    return ocp.AsyncCheckpointer(handler, async_options=options, atomicity_options=in_place)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves keyed by their path. A plain dictionary stays readable when the classes change."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def _compare(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The differences that orbax would silently ignore or cast away."""
    faults = [f"{name} is not part of it" for name in found if name not in wanted]
    for name, leaf in wanted.items():
        saved = found.get(name)
        if saved is None:
            faults.append(f"{name} is missing")
        elif saved != leaf:
            faults.append(f"{name} is {saved['dtype']}{saved['shape']}, expected {leaf['dtype']}{leaf['shape']}")
    return faults


def _reason(error: Exception) -> str:
    """The cause in a few words. tensorstore gives the system's error as a number at the end of a long line."""
    text = " ".join(str(error).split())
    if number := re.search(r"os_error_code='(\d+)'", text):
        return strerror(int(number[1]))
    return (error.strerror if isinstance(error, OSError) else None) or shorten(text, 200) or type(error).__name__


def _warn(text: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the disk that is full
        print(shorten(f"warning: {text}", LONGEST_LINE), file=sys.stderr, flush=True)


@functools.cache
def _quieten() -> None:
    """Suppress the hundreds of lines that orbax and asyncio print about a failed save, in addition to its error."""

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, report
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())
