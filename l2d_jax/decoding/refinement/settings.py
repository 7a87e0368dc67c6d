"""How to integrate: settings that all sequences share, or one per sequence."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from l2d_jax.config.conflicts import check_decoding
from l2d_jax.config.ranges import MOST_PARALLEL
from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.refinement.condition_table import CAPACITY, ConditionTable, build_table
from l2d_jax.decoding.refinement.solver import FIXED, Grid, Solver, find_solver
from l2d_jax.decoding.refinement.stages import Stages
from l2d_jax.errors import require
from l2d_jax.model import diffusion
from l2d_jax.model.l2d import Model


@nnx.dataclass
class Refinement(nnx.Module):
    """How to integrate. Arrays are arguments of a compiled program, shared or per sequence; other fields are static."""

    steps: Int[Array, "*b"] = nnx.data()  # grid intervals, or largest number of adaptive steps; 0: the LM alone
    end: Float[Array, "*b"] = nnx.data()  # t of the final evaluation, up to which the ODE is integrated
    velocity_temperature: Float[Array, "*b"] = nnx.data()
    anneal: Float[Array, "*b"] = nnx.data()  # 1: the temperature falls linearly to 0 as t goes to 1; 0: constant
    guidance: Float[Array, "#B"] = nnx.data()  # strength w_g; unused without labels
    tolerance: Float[Array, "*b"] = nnx.data()  # relative and absolute tolerance of adaptive steps
    most_settled: Int[Array, "*b"] = nnx.data()  # largest number of evaluations that a parallel pass accepts
    allowed: Bool[Array, "B V"] | None = nnx.data(default=None)  # tokens that estimates may use; None: all
    table: ConditionTable | None = nnx.data(default=None)  # for the model's weights and these grids
    stages: Stages | None = nnx.data(default=None)  # for evaluations in parallel; None: one by one
    solver: Solver = nnx.static(default=FIXED["midpoint"])
    velocity: Literal["sample", "expectation"] = nnx.static(default="sample")
    window: int = nnx.static(default=16)  # largest number of evaluations in one pass

    @classmethod
    def from_config(cls, config: DecodeConfig, *, budget: int | None = None) -> "Refinement":
        """The settings, without a table; raises `InputError` for a budget that the solver cannot spend."""
        solver = find_solver(config.solver)
        return cls(
            steps=jnp.int32(solver.steps(budget or config.budget)),
            end=jnp.float32(config.end),
            velocity_temperature=jnp.float32(config.velocity_temperature),
            anneal=jnp.float32(config.anneal),
            guidance=jnp.float32([config.guidance]),
            tolerance=jnp.float32(config.tolerance),
            most_settled=jnp.int32(1 if config.parallel == "check" else MOST_PARALLEL),
            solver=solver,
            velocity=config.velocity,
        )

    @classmethod
    def prepare(cls, model: Model, config: DecodeConfig) -> "Refinement":
        """The settings for a model, with a table if possible; raises `InputError` as `check_settings` does."""
        check_settings(config, None if model.path is None else model.path.config)
        table = cls.tabulate(model, config.solver, [Grid(config.budget, config.end)])
        return dataclasses.replace(cls.from_config(config), table=table)

    @staticmethod
    def tabulate(model: Model, solver: str, grids: Collection[Grid]) -> ConditionTable | None:
        """The table of conditions for these grids; None if there can be none."""
        found = find_solver(solver)
        if model.path is None or found.is_adaptive or max(grid.budget for grid in grids) > CAPACITY:
            return None
        times = _times(found, grids)
        if len(times) > CAPACITY:
            return None
        padded = np.pad(times, (0, CAPACITY - len(times)), constant_values=np.inf)
        return build_table(model.llm, model.path, jnp.asarray(padded))

    def side_by_side(self, grids: Sequence[Grid], *, window: int = 16) -> "Refinement":
        """The settings with evaluations in parallel, if possible; `grids` has one for all sequences, or one each."""
        refines = any(grid.budget > 1 for grid in grids)
        stages = Stages.of(self.solver, grids) if self.velocity == "sample" and refines else None
        table = self.table
        if (
            stages is not None and table is not None and len(grids) == 1
        ):  # of many grids, one size of a table serves all
            table = table.first(len(_times(self.solver, grids)))
        return dataclasses.replace(self, stages=stages, window=window, table=table)

    def row_temperatures(self, t: Float[Array, "B M"]) -> Float[Array, "B M"]:
        """The velocity's temperature at times of each sequence's grid."""
        return jnp.broadcast_to(self.temperature(t), t.shape)

    def temperature(self, t: Float[Array, "#B M"], step: Float[Array, "#B 1"] | None = None) -> Float[Array, "#B M"]:
        """The velocity's temperature at t, in a step of length `step` (None: an interval of the grid).

        With annealing it is read ahead, so the last estimate before t = 1 is the arg max. It falls to 0 at t = 1
        wherever the integration ends: an earlier end leaves the temperature at each t as it is, and the last estimate
        is then sampled.
        """
        step = (self.end / jnp.maximum(self.steps, 1)).reshape(-1, 1) if step is None else step
        level, anneal = (option.reshape(-1, 1) for option in (self.velocity_temperature, self.anneal))
        return jnp.where(anneal > 0, diffusion.anneal(level, t + self.solver.lookahead * step), level)

    def adaptive_end(self, sigma: float) -> Float[Array, "*b"]:
        """t at which adaptive steps end: 1 - 1/sigma as in the release, or `end` if it is earlier."""
        return jnp.minimum(self.end, 1 - 1 / sigma)


def _times(solver: Solver, grids: Collection[Grid]) -> np.ndarray:
    """The different times of all evaluations on these grids, in order."""
    return np.unique(np.concatenate([solver.times(solver.steps(grid.budget), end=grid.end) for grid in grids]))


def check_settings(config: DecodeConfig, path: PathConfig | None) -> None:
    """Raise `InputError` for settings that are impossible for a model with this path (None: without a path).

    These are a budget that the solver cannot spend, a budget above 1 without a path, and what `check_decoding` refuses.
    """
    problem = f"a budget of {config.budget} needs a diffusion path, and this model has none"
    require(path is not None or config.budget == 1, f"{problem}: use a budget of 1")
    find_solver(config.solver).steps(config.budget)
    check_decoding(config, path)
