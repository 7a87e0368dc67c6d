"""The folder of a run: its config, its lock, and the validations in its log."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from l2d_jax.config.schema import Config
from l2d_jax.errors import InputError
from l2d_jax.files import check, read_json, write_whole
from l2d_jax.training.metrics import read_metrics
from l2d_jax.weights import model_folder


def claim(workdir: Path, config: Config) -> None:
    """Make the workdir, and write the resolved config and the place of a local base.

    Raises `InputError` if that fails, and if the workdir has checkpoints of another config. The sections `mesh` and
    `profile` may differ.
    """
    file = workdir / "config.json"
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not (workdir / "checkpoints").exists():  # nothing is trained yet, so the config may still change
            write_whole(file, text)
            model_folder.record_base(workdir, config.model)
    except OSError as error:
        raise InputError(f"cannot write to workdir {workdir}: {error.strerror}: choose another --workdir") from error
    free = ("config.mesh.", "config.profile.")  # a run may resume on other devices, and trace other steps
    sections = check(read_json(file), dict[str, dict[str, Any]], file, remedy="restore it or choose another --workdir")
    changed = [line for line in differences(sections, config) if not line.startswith(free)]
    if changed:
        raise InputError(
            f"workdir {workdir} belongs to another config: {'; '.join(changed[:5])}: choose another --workdir"
        )


def plain_values(config: Config) -> dict[str, Any]:
    """A config as it is read back from JSON, with lists in place of tuples."""
    return json.loads(json.dumps(config.to_dict()))


def differences(old: Mapping[str, Any], config: Config) -> list[str]:
    """A line for each option that differs from `old`, which holds `plain_values` of a config."""
    return [
        f"config.{section}.{name} was {old.get(section, {}).get(name)!r}, is {value!r}"
        for section, values in plain_values(config).items()
        for name, value in values.items()
        if old.get(section, {}).get(name) != value
    ]


def is_measured(workdir: Path, step: int) -> bool:
    """Whether the log has a validation of this step."""
    return any(record["step"] == step and "validation/loss" in record for record in read_metrics(workdir))


@contextmanager
def hold(workdir: Path) -> Iterator[None]:
    """Make a workdir and lock it for this process; raises `InputError`, naming the process that holds it already.

    The kernel holds the lock on the file `.lock`: it ends with the process, however that is killed, and the file stays.
    Readers take no lock. It does not protect from a run on another machine if the file system does not share such locks
    (buckets, some network mounts), nor from the removal of `.lock`; and a child process that was forked from the holder
    and outlives it keeps the lock.
    """
    path = workdir / ".lock"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise InputError(f"cannot write to workdir {workdir}: {error.strerror}: choose another --workdir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            in_use = f"is in use by {_holder(path)}: wait for that run, stop it"
            reason = in_use if isinstance(error, BlockingIOError) else f"cannot be locked ({error.strerror}): unlock it"
            raise InputError(f"workdir {workdir} {reason}, or choose another --workdir") from error
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        yield


def _holder(path: Path) -> str:
    try:
        held = json.loads(path.read_text())
        return f"process {held['pid']} on {held['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # the other process has locked it and not yet signed
        return "another process"
