"""Numbers recorded from the authors' PyTorch release, and the comparison of ours with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.errors import InputError
from l2d_jax.files import open_file, read_json
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM

LOGITS = 1e-4  # absolute, float32
ROUNDINGS = 10  # looser bound: this multiple of the difference between theirs in float32 and in float64


class Check(NamedTuple):
    """A comparison of an array."""

    name: str
    ours: Any
    theirs: Any
    tolerance: float = LOGITS
    relative: bool = False  # whether the tolerance is a fraction of the largest entry of `theirs`
    judged: bool = True  # False: only reported, because the recorded run met a near tie
    noise: Any = 0.0  # change of each entry that float error alone can cause; it does not count

    def difference(self) -> float:
        """The largest absolute difference beyond `noise`, as a fraction of the largest entry if `relative`."""
        ours, theirs = np.asarray(self.ours, np.float64), np.asarray(self.theirs, np.float64)
        if ours.shape != theirs.shape:
            return float("inf")
        largest = float(np.max(np.maximum(np.abs(ours - theirs) - self.noise, 0.0), initial=0.0))
        return largest / max(float(np.max(np.abs(theirs), initial=0.0)), 1e-6) if self.relative else largest

    def passed(self) -> bool:
        """Whether the difference is within the tolerance (NaN is not)."""
        return self.difference() <= self.tolerance


class Recording(dict[str, np.ndarray]):
    """The arrays of a `reference.npz`, and the descriptions of their runs in `meta.json` next to it."""

    def __init__(self, file: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.file, self.meta = file, meta

    @classmethod
    def open(cls, file: Path) -> "Recording":
        """Read all arrays; raises `InputError` for anything other than an .npz of plain arrays."""
        try:
            with open_file(file) as opened, np.load(opened, allow_pickle=False) as arrays:  # a lone array has no `with`
                contents = dict(arrays)
        except Exception as error:  # zip, NumPy's header and the file system raise many kinds
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"cannot read {file} ({reason}): give an .npz of plain arrays") from error
        beside = file.with_name("meta.json")
        return cls(file, contents, read_json(beside) if beside.exists() else {})

    def __missing__(self, name: str) -> np.ndarray:
        raise InputError(f"{self.file} has no array {name!r}: record it again")

    def require_fit(self, model: Model) -> None:
        """Raise `InputError` unless tokens and noise fit this model."""
        vocabulary, ids = model.llm.architecture.vocab_size, self["input_ids"]
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= vocabulary:
            raise InputError(f"{self.file}: input_ids must be rows of tokens below {vocabulary}: take the model's own")
        shape = [] if model.path is None else [*ids.shape, model.path.config.width]
        if shape and list(self["noise"].shape) != shape:
            rule = f"noise must have the shape {shape} of input_ids and this model's path"
            raise InputError(f"{self.file}: {rule}, got {list(self['noise'].shape)}: take the model's own recording")


def read(llm: LLM, tokens: np.ndarray, mask: np.ndarray | None = None, *, last: bool = False) -> Context:
    """Run the frozen pass over recorded tokens; `mask` excludes padding.

    With `last`, every position is replaced by the last one, so that all runs have one shape and share programs.
    """
    mask = np.ones_like(tokens) if mask is None else mask
    positions = np.where(mask == 1, np.cumsum(mask, axis=1) - 1, -1)
    queries = np.full(tokens.shape[1], -1) if last else np.arange(tokens.shape[1])
    return _read(llm, *(jnp.asarray(array, jnp.int32) for array in (tokens, positions, queries)))


@jax.jit
def _read(llm: LLM, tokens: jax.Array, positions: jax.Array, queries: jax.Array) -> Context:
    hidden, cache = llm(tokens, positions)
    return Context(hidden=hidden[:, queries], cache=cache, positions=positions[:, queries])


def logits_at(model: Model, context: Context, x: Any, t: Any, labels: Any = None) -> jax.Array:
    """Logits of one evaluation of the path. t and labels are per position or shared; labels None: the null class."""
    assert model.path is not None
    shape = context.hidden.shape[:2]
    labels = model.path.config.classes if labels is None else labels
    t, labels = jnp.broadcast_to(jnp.float32(t), shape), jnp.broadcast_to(jnp.int32(labels), shape)
    return _logits(model, context._replace(labels=labels), jnp.asarray(x, jnp.float32), t)


@jax.jit
def _logits(model: Model, context: Context, x: jax.Array, t: jax.Array) -> jax.Array:
    assert model.path is not None
    return model.llm.logits(context.hidden + model.path(model.llm, x, t, context))
