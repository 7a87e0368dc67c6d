"""Checkpoints of path and optimizer state with orbax; the frozen model is never in them.

The position in the data is the step itself, since the order of the examples is a function of the step.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from l2d_jax.errors import InputError


class Checkpoints:
    """The folder `checkpoints/` of a workdir."""

    def __init__(self, folder: Path, *, keep: int = 1) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        handlers = {name: ocp.StandardCheckpointHandler() for name in ("path", "optimizer")}
        self._folder = folder.absolute()
        if jax.process_index() == 0:
            _remove_leftovers(self._folder)
        multihost_utils.sync_global_devices("leftovers")  # gone before any process lists the steps
        self._manager = ocp.CheckpointManager(self._folder, options=options, item_handlers=handlers)

    def save(self, step: int, items: Mapping[str, Any]) -> None:
        """Begin to write named trees as they are after `step` optimizer steps; returns before the write is done."""
        if step in self._manager.all_steps():
            return
        saves = {name: ocp.args.StandardSave(_named(tree)) for name, tree in items.items()}
        if not self._manager.save(step, args=ocp.args.Composite(**saves)):
            raise RuntimeError(f"orbax did not save step {step}: {self._folder} has {self._manager.all_steps()}")

    def latest(self) -> int | None:
        """The newest step that was saved, or None."""
        return self._manager.latest_step()

    def restore(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """The named trees saved at `step`, in the shapes, types and placements of `like`.

        Raises `InputError` if an array is missing, extra or of another shape or type, naming it, and for files that
        cannot be read. A flipped bit in the data is not noticed.
        """
        wanted = {name: _named(tree) for name, tree in like.items()}
        try:
            found = self._manager.item_metadata(step)
            faults = [fault for name, tree in wanted.items() for fault in _compare(tree, found.get(name))]
            args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()})
            restored = {} if faults else self._manager.restore(step, args=args)
        except Exception as error:  # of JSON, of tensorstore and of the file system, of many kinds
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"checkpoint {step} in {self._folder} cannot be read ({reason}): remove it to go on from an older one"
            ) from error
        if faults:
            raise InputError(f"checkpoint {step} does not fit this config: {'; '.join(faults[:5])}: use its own config")
        return {
            name: jax.tree.unflatten(jax.tree.structure(tree), [restored[name][path] for path in wanted[name]])
            for name, tree in like.items()
        }

    def close(self) -> None:
        """Wait for the saves under way."""
        self._manager.wait_until_finished()
        self._manager.close()


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path: a plain dictionary survives changes of the classes that hold them."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def _remove_leftovers(folder: Path) -> None:
    """Remove what a deletion that was cut off has left of a step; orbax takes any folder with a number for one."""
    for step in folder.glob("*"):
        if step.name.isdigit() and not (step / "_CHECKPOINT_METADATA").exists():
            shutil.rmtree(step)


def _compare(wanted: Mapping[str, Any], metadata: Any) -> list[str]:
    """What orbax would let pass or cast without a word; `metadata` None: there is no such item."""
    found = {} if metadata is None else metadata.tree
    faults = [f"{name} is not part of it" for name in found if name not in wanted]
    for name, leaf in wanted.items():
        saved = found.get(name)
        if saved is None:
            faults.append(f"{name} is missing")
        elif tuple(saved.shape) != tuple(leaf.shape) or saved.dtype != leaf.dtype:
            faults.append(f"{name} is {saved.dtype}{list(saved.shape)}, expected {leaf.dtype}{list(leaf.shape)}")
    return faults
