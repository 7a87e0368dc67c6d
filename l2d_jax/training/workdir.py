"""The workdir: the folder of a run, which belongs to one config."""

import json
from pathlib import Path
from typing import Any

from l2d_jax.config.schema import Config, defaults
from l2d_jax.errors import about, require
from l2d_jax.files import check, differences, explained, read_json, write_whole
from l2d_jax.storage import mirror
from l2d_jax.weights import base_model


def recorded_config(workdir: Path) -> Config:
    """The config with which a run began, without options of earlier versions that concern only training."""
    file = workdir / "config.json"
    options = read_json(file)
    if isinstance(train := options.get("train"), dict):
        for name in ("stratified_times", "logit_normal_mean", "logit_normal_deviation"):
            train.pop(name, None)
        if train.get("time_density") in ("logit_normal", "warped"):
            del train["time_density"]
    with about(file):
        return Config.from_dict(options)


def claim(workdir: Path, config: Config) -> None:
    """Make the workdir, and write the resolved config and the location of a local base.

    Raises `InputError` if that fails, or if the workdir has checkpoints of a config that differs in options other than
    `free`. "auto" stands for the value with which the run began (`plans`).
    """
    file = workdir / "config.json"
    with explained(f"cannot write to workdir {workdir}", "choose another --workdir"):
        workdir.mkdir(parents=True, exist_ok=True)
        if not (workdir / "checkpoints").exists():  # nothing is trained yet: the config may still change
            write_whole(file, json.dumps(config.to_dict(), indent=2) + "\n")
            base_model.record_base(workdir, config.model)
        mirror.publish(workdir)
    # A run may resume on other devices, trace other steps, or read the same examples from another place.
    free = ("config.mesh.", "config.profile.", "config.log.", "config.data.prepared", "config.train.checkpoint_minutes")
    sections = check(read_json(file), dict[str, dict[str, Any]], file, remedy="restore it or choose another --workdir")
    former = {  # earlier versions lack the newest options, and may have others
        section: {name: sections.get(section, {}).get(name, value) for name, value in values.items()}
        for section, values in json.loads(json.dumps(defaults().to_dict())).items()
    }
    lines = differences(former, plain_values(config), "config.")
    if sections.get("train", {}).get("stratified_times"):
        lines.append("config.train.stratified_times was True, an option that is no more")
    changed = [line for line in lines if not line.startswith(free) and not line.endswith(", is 'auto'")]
    problem = f"workdir {workdir} belongs to another config: {'; '.join(changed[:5])}"
    require(not changed, f"{problem}: choose another --workdir")


def plain_values(config: Config) -> dict[str, Any]:
    """A config as it would be read back from JSON, with lists instead of tuples."""
    return json.loads(json.dumps(config.to_dict()))
