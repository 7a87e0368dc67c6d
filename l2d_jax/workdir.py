"""A run's folder: whose config it has, and what has been measured in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from l2d_jax.config import Config
from l2d_jax.errors import InputError
from l2d_jax.files import read_json, write_whole
from l2d_jax.metrics import read_metrics


def claim(workdir: Path, config: Config) -> None:
    """Make the workdir and write the resolved config.

    Raises `InputError` where that fails, and if the workdir has checkpoints of another config, but for the mesh: a run
    may go on with other devices.
    """
    file = workdir / "config.json"
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not (workdir / "checkpoints").exists():  # nothing is trained yet: an attempt that failed may be mended
            write_whole(file, text)
    except OSError as error:
        raise InputError(f"cannot write to workdir {workdir}: {error.strerror}: choose another --workdir") from error
    free = ("config.mesh.", "config.profile.")  # a run may go on with other devices, and trace other steps
    changed = [line for line in differences(read_json(file), config) if not line.startswith(free)]
    if changed:
        raise InputError(
            f"workdir {workdir} belongs to another config: {'; '.join(changed[:5])}: choose another --workdir"
        )


def plain(config: Config) -> dict[str, Any]:
    """A config as JSON gives it back, with lists for tuples."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return values


def differences(old: Mapping[str, Any], config: Config) -> list[str]:
    """A line for each option that is not as it was in `old`, a `plain` config."""
    return [
        f"config.{section}.{name} was {old.get(section, {}).get(name)!r}, is {value!r}"
        for section, values in plain(config).items()
        for name, value in values.items()
        if old.get(section, {}).get(name) != value
    ]


def is_measured(workdir: Path, step: int) -> bool:
    """Whether the log has a validation of this step."""
    return any(record["step"] == step and "validation/loss" in record for record in read_metrics(workdir))
