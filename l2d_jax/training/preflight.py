"""Checks what a run needs, in seconds and on every process, before anything is downloaded or compiled."""

import contextlib
import importlib.metadata
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.distributed import processes
from l2d_jax.distributed.memory import tree_bytes
from l2d_jax.errors import InputError, require
from l2d_jax.files import check, digest, explained, read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.storage import mirror
from l2d_jax.storage.bucket import Bucket
from l2d_jax.storage.disk import Disk
from l2d_jax.training.memory import check_training_memory
from l2d_jax.training.methods import method_of
from l2d_jax.weights import base_model, hub, locate

PATIENCE = 10.0  # seconds after which a shared disk must show what another host has written


def check_run(config: Config, workdir: Path, mesh: Mesh) -> list[str]:
    """Run all checks; all processes must call this. Returns a line per check.

    If a check fails on any host, raises on every process an `InputError` that names the host.
    """
    token, versions = processes.decide(lambda: [uuid.uuid4().hex, _versions()])
    place = mirror.place(workdir)
    checks: dict[str, Callable[[], str]] = {
        "versions": lambda: _check_versions(versions),
        "writing to the workdir": lambda: _write_mark(place, token),
        "one workdir for all": lambda: _find_marks(place, token),
        "base model": lambda: _check_base(config.model.name),
        "memory": lambda: _check_memory(config, mesh),
        "disk": lambda: _check_disk(config, workdir),
    }
    where = f"preflight on {socket.gethostname()}: "
    try:
        found = {name: processes.everywhere(check, where=f"{where}{name}: ") for name, check in checks.items()}
        return [f"preflight: {name}: {what}" for name, what in found.items()]
    finally:
        with contextlib.suppress(OSError):
            place.remove(_mark(jax.process_index()))


def pinned_base(name: str, workdir: Path) -> str:
    """The name of a base from the hub with a revision: the workdir's, or else the newest; raises `InputError`."""
    file = workdir / "config.json"
    remedy = "restore it or choose another --workdir"
    sections = check(read_json(file) if file.exists() else {}, dict[str, dict[str, Any]], file, remedy=remedy)
    recorded = str(sections.get("model", {}).get("name", ""))
    if hub.split_revision(recorded)[0] == hub.split_revision(name)[0]:
        return recorded
    if not hub.is_on_hub(name) or hub.split_revision(name)[1]:
        return name
    return f"{name}@{hub.plan_download(name).revision}"


def _versions() -> dict[str, str]:
    """Versions of the code and of the compiler: processes whose programs differ would wait for each other forever."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "orbax-checkpoint")}
    files = sorted(path for path in Path(__file__).parents[1].rglob("*") if path.suffix in (".py", ".toml", ".json"))
    return {"l2d_jax": digest([path.read_text() for path in files])[:12], **versions}


def _check_versions(first: dict[str, str]) -> str:
    ours = _versions()
    others = [f"{name} {ours[name]} here, {there} on process 0" for name, there in first.items() if ours[name] != there]
    require(others == [], f"{'; '.join(others)}: install the same on all hosts")
    return ", ".join(f"{name} {version}" for name, version in ours.items())


def _mark(index: int) -> str:
    return f".preflight-{index}"


def _write_mark(place: Disk | Bucket, token: str) -> str:
    with explained(f"{place} cannot be written to", "choose another --workdir"):
        if isinstance(place, Disk):
            place.root.mkdir(parents=True, exist_ok=True)
        place.write(_mark(jax.process_index()), token.encode())
    return str(place)


def _find_marks(place: Disk | Bucket, token: str) -> str:
    """Check that this host sees what all processes have written; a shared disk may take a while to show it."""
    end = time.monotonic() + PATIENCE
    marks = {_mark(index) for index in range(jax.process_count())}
    with explained(f"{place} cannot be read", "choose another --workdir"):
        while missing := [mark for mark in marks if mark not in place.names() or place.read(mark) != token.encode()]:
            if time.monotonic() > end:
                problem = f"not the same folder on all hosts ({len(missing)} of {len(marks)} processes not seen)"
                raise InputError(f"{place} is {problem}: name a bucket (gs://BUCKET/FOLDER) or a shared disk")
            time.sleep(0.5)
    return f"{len(marks)} of {len(marks)} processes seen"


def _check_base(name: str) -> str:
    """Check that the base model is on this host, or that the hub lets this host download it."""
    if name == "random":
        return "random weights"
    if not hub.is_on_hub(name):
        return str(locate.find_base_and_adapters(name).folder)
    return f"{name}, revision {hub.plan_download(name).revision}"


def _check_memory(config: Config, mesh: Mesh) -> str:
    if config.model.architecture is None:
        return "counted once the base is here"
    check_training_memory(config, Architecture.from_hf(config.model.architecture), mesh)
    return "enough for weights, moments and gradients"


def _check_disk(config: Config, workdir: Path) -> str:
    """Check that the disk has space for the download, for the checkpoints that are kept and for one being written."""
    needed: dict[Path, int] = {}
    if hub.is_on_hub(config.model.name):
        plan = hub.plan_download(config.model.name)
        needed[plan.cache] = plan.missing
    if isinstance(mirror.place(workdir), Disk) and processes.is_first() and config.model.architecture is not None:
        trained = tree_bytes(method_of(config).declare(base_model.read_architecture(config.model)))
        needed[workdir] = 3 * trained * (config.train.keep + 1)  # the factor 3: Adam's two moments
    for folder, size in needed.items():
        there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free
        require(free >= size, f"{folder} has {free / 2**30:.1f} GiB free and needs {size / 2**30:.1f}: make room there")
    return "; ".join(f"{size / 2**30:.2f} GiB for {folder}" for folder, size in needed.items()) or "nothing to keep"
