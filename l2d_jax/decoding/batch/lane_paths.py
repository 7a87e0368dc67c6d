"""Lanes that several paths share: each lane has a row with the small weights of the path of its present answer.

All paths read the same context, which the language model has written, and use its matrices. So a pass over the weights
serves every lane, whichever paths their answers ask for. A row is written when its lane gets an answer: no program
depends on the number of paths, and a path may be dropped while its answers are running.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.buckets import Programs
from l2d_jax.decoding.parallel.pace import can_be_parallel
from l2d_jax.decoding.refinement.condition_table import ConditionTable, build_table
from l2d_jax.decoding.refinement.solver import find_solver
from l2d_jax.decoding.refinement.stages import room_for
from l2d_jax.model.axes import ADAPTED
from l2d_jax.model.diffusion_path import DiffusionPath, PathLayers
from l2d_jax.model.l2d import Model
from l2d_jax.model.layers import Linear, Lora, RowLinear, RowLora, RowMlp
from l2d_jax.model.llm import LLM


@nnx.dataclass
class PathRows(nnx.Module):
    """The path of each row, as far as evaluations need it, and its conditions at the times of its answer."""

    path: DiffusionPath = nnx.data()
    table: ConditionTable = nnx.data()


def can_share(path: PathConfig, settings: DecodeConfig) -> bool:
    """Whether answers with these settings can be decoded next to those of other paths with an equal config.

    The path must update the language model's matrices and read its context, and the times of evaluations must be known
    in advance. An expectation as the velocity would need the table of all vocabulary vectors.
    """
    is_update = path.layers == "lora" and path.reader == "lm"
    return is_update and (settings.budget == 1 or can_be_parallel(settings))


class LanePaths:
    """The paths of the answers in lanes. All have the same config."""

    def __init__(self, model: Model, lanes: int) -> None:
        """Make rows without answers. The path of `model` says which weights a row has."""
        assert model.path is not None
        self._llm = model.llm
        self._rows = _blank(_row(model.llm, model.path, jnp.zeros(1)), lanes=lanes)

    @property
    def model(self) -> Model:
        """The model whose path has a row for each lane."""
        return Model(llm=self._llm, path=self._rows.path, table=None)

    @property
    def table(self) -> ConditionTable:
        """The conditions of each lane."""
        return self._rows.table

    def put(self, lane: int, path: DiffusionPath, settings: DecodeConfig) -> None:
        """Give a lane the path of its new answer, which has these settings and a budget above 1."""
        solver = find_solver(settings.solver)
        times = np.unique(solver.times(solver.steps(settings.budget), end=settings.end))
        size = max(room_for(len(times)), self.table.times.shape[1])
        padded = np.pad(times, (0, size - len(times)), constant_values=np.inf).astype(np.float32)
        if size > self.table.times.shape[1]:
            self._rows = _widen(self._rows, size=size)
        self._rows = _put(self._rows, _row(self._llm, path, jnp.asarray(padded)), jnp.int32(lane))


@Programs
def _row(llm: LLM, path: DiffusionPath, times: Float[Array, " n"]) -> PathRows:
    """A single row: a path, and its conditions at these times; infinite entries are unused."""
    first, last = path.translation.first, path.translation.last

    def linear(one: Linear | RowLinear) -> RowLinear:
        return RowLinear(weight=one.weight[None], bias=one.bias[None])

    def update(lora: Lora) -> RowLora:
        a, b = (array[:, None].astype(llm.product_dtype) for array in (lora.a, lora.b))
        return RowLora(row_a=a, row_b=b)

    updates = {name: update(getattr(path.layers, name)) for name in ADAPTED}
    table = build_table(llm, path, times)
    modulation, merge = table.conditions.modulation, table.conditions.merge
    assert modulation is not None
    conditions = table.conditions._replace(modulation=modulation[:, None], merge=merge[None])
    return PathRows(
        path=DiffusionPath(
            vocabulary=linear(path.vocabulary),
            translation=RowMlp(first=linear(first), last=linear(last)),
            time=None,
            layers=PathLayers(modulation=None, **updates),
            merge=None,
            classes=None,
            config=path.config,
        ),
        table=ConditionTable(times=table.times[None], conditions=conditions),
    )


def _axis(place: Any) -> int:
    """The axis of the rows of a weight at this place in `PathRows`: those of layers are stacked before it."""
    name = jax.tree_util.keystr(place, simple=True, separator=".")
    return 1 if "layers" in name or "modulation" in name else 0


def _map(change: Callable[..., Array], *rows: PathRows) -> PathRows:
    """Apply `change(axis of the rows, *arrays)` to all weights."""
    mapped: PathRows = jax.tree_util.tree_map_with_path(lambda place, *arrays: change(_axis(place), *arrays), *rows)
    return mapped


@partial(Programs, static=["lanes"])
def _blank(row: PathRows, *, lanes: int) -> PathRows:
    return _map(lambda axis, array: jnp.repeat(jnp.zeros_like(array), lanes, axis=axis), row)


@partial(Programs, static=["size"])
def _widen(rows: PathRows, *, size: int) -> PathRows:
    """The rows with tables of `size` times, more than they have."""
    more = size - rows.table.times.shape[1]
    modulation, merge, _ = rows.table.conditions
    assert modulation is not None
    modulation = jnp.pad(modulation, ((0, 0), (0, 0), (0, more), *[(0, 0)] * (modulation.ndim - 3)))
    merge = jnp.pad(merge, ((0, 0), (0, more), *[(0, 0)] * (merge.ndim - 2)))
    times = jnp.pad(rows.table.times, ((0, 0), (0, more)), constant_values=jnp.inf)
    conditions = rows.table.conditions._replace(modulation=modulation, merge=merge)
    return PathRows(path=rows.path, table=ConditionTable(times=times, conditions=conditions))


@partial(Programs, donate_argnames="rows")
def _put(rows: PathRows, new: PathRows, lane: Int[Array, ""]) -> PathRows:
    """Write the single row `new` into the row `lane`."""
    return _map(
        lambda axis, array, one: jax.lax.dynamic_update_slice_in_dim(array, one.astype(array.dtype), lane, axis),
        rows,
        new,
    )
