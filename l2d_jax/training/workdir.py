"""The folder of a run, which belongs to its config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from l2d_jax.config.schema import Config, defaults
from l2d_jax.errors import InputError
from l2d_jax.files import check, explained, read_json, write_whole
from l2d_jax.storage import mirror
from l2d_jax.weights import model_folder


def recorded_config(workdir: Path) -> Config:
    """The config that a run began with, less options of former versions that concern training alone."""
    options = read_json(workdir / "config.json")
    if isinstance(train := options.get("train"), dict):
        for name in ("stratified_times", "logit_normal_mean", "logit_normal_deviation"):
            train.pop(name, None)
        if train.get("time_density") in ("logit_normal", "warped"):
            del train["time_density"]
    return Config.from_dict(options)


def claim(workdir: Path, config: Config) -> None:
    """Make the workdir, and write the resolved config and the place of a local base.

    Raises `InputError` if that fails, and if the workdir has checkpoints of a config that differs in more than `free`;
    "auto" is what the run began with (`plans`).
    """
    file = workdir / "config.json"
    with explained(f"cannot write to workdir {workdir}", "choose another --workdir"):
        workdir.mkdir(parents=True, exist_ok=True)
        if not (workdir / "checkpoints").exists():  # nothing is trained yet, so the config may still change
            write_whole(file, json.dumps(config.to_dict(), indent=2) + "\n")
            model_folder.record_base(workdir, config.model)
        mirror.publish(workdir)
    # A run may resume on other devices, trace other steps, and read the same examples from another place.
    free = ("config.mesh.", "config.profile.", "config.log.", "config.data.prepared", "config.train.checkpoint_minutes")
    sections = check(read_json(file), dict[str, dict[str, Any]], file, remedy="restore it or choose another --workdir")
    # A former version lacks the newest options.
    former = {name: values | sections.get(name, {}) for name, values in defaults().to_dict().items()}
    lines = differences(former, config)
    if sections.get("train", {}).get("stratified_times"):
        lines.append("config.train.stratified_times was True, an option that is no more")
    changed = [line for line in lines if not line.startswith(free) and not line.endswith(", is 'auto'")]
    if changed:
        differing = "; ".join(changed[:5])
        raise InputError(f"workdir {workdir} belongs to another config: {differing}: choose another --workdir")


def plain_values(config: Config) -> dict[str, Any]:
    """A config as it is read back from JSON, with lists in place of tuples."""
    return json.loads(json.dumps(config.to_dict()))


def differences(old: Mapping[str, Any], config: Config) -> list[str]:
    """A line for each option that differs from `old`, which holds `plain_values` of a config."""
    lines = []
    for section, values in plain_values(config).items():
        former = {name: old.get(section, {}).get(name) for name in values}
        changed = [name for name in values if json.loads(json.dumps(former[name])) != values[name]]
        lines += [f"config.{section}.{name} was {former[name]!r}, is {values[name]!r}" for name in changed]
    return lines
