"""How to integrate: the settings of all sequences of a program, or of each."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from l2d_jax.config.conflicts import check_decoding
from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.refinement.condition_table import CAPACITY, ConditionTable, build_table
from l2d_jax.decoding.refinement.solver import FIXED, Solver, find_solver
from l2d_jax.decoding.refinement.stages import Stages
from l2d_jax.errors import require
from l2d_jax.model import diffusion
from l2d_jax.model.l2d import Model


@nnx.dataclass
class Refinement(nnx.Module):
    """How to integrate all sequences, or each. The arrays are arguments of a program, which the other fields choose."""

    steps: Int[Array, "*b"] = nnx.data()  # grid intervals, or an adaptive solver's most steps; 0 leaves the LM as it is
    velocity_temperature: Float[Array, "*b"] = nnx.data()
    anneal: Float[Array, "*b"] = nnx.data()  # 1: the temperature falls linearly to 0 as t goes to 1; 0: constant
    guidance: Float[Array, "#B"] = nnx.data()  # strength w_g; unused without labels
    tolerance: Float[Array, "*b"] = nnx.data()  # of an adaptive solver's steps, relative and absolute
    allowed: Bool[Array, "B V"] | None = nnx.data(default=None)  # tokens that estimates are made of; None: all
    table: ConditionTable | None = nnx.data(default=None)  # for the model's weights and these grids
    stages: Stages | None = nnx.data(default=None)  # evaluations go side by side; None: one after the other
    solver: Solver = nnx.static(default=FIXED["midpoint"])
    velocity: Literal["sample", "expectation"] = nnx.static(default="sample")
    window: int = nnx.static(default=16)  # evaluations that go side by side, at most

    @classmethod
    def from_config(cls, config: DecodeConfig, *, budget: int | None = None) -> "Refinement":
        """The settings for any model, and no table; raises `InputError` for a budget that the solver cannot spend."""
        solver = find_solver(config.solver)
        return cls(
            steps=jnp.int32(solver.steps(budget or config.budget)),
            velocity_temperature=jnp.float32(config.velocity_temperature),
            anneal=jnp.float32(config.anneal),
            guidance=jnp.float32([config.guidance]),
            tolerance=jnp.float32(config.tolerance),
            solver=solver,
            velocity=config.velocity,
        )

    @classmethod
    def prepare(cls, model: Model, config: DecodeConfig) -> "Refinement":
        """The settings for one model, with a table where there can be one; raises `InputError` as `check_settings`."""
        check_settings(config, None if model.path is None else model.path.config)
        table = cls.tabulate(model, config.solver, [config.budget])
        return dataclasses.replace(cls.from_config(config), table=table)

    @staticmethod
    def tabulate(model: Model, solver: str, budgets: Collection[int]) -> ConditionTable | None:
        """The table of conditions for the grids of these budgets; None where there can be none."""
        found = find_solver(solver)
        if model.path is None or found.is_adaptive or max(budgets) > CAPACITY:
            return None
        times = np.unique(np.concatenate([found.times(found.steps(budget)) for budget in budgets]))
        if len(times) > CAPACITY:
            return None
        padded = np.pad(times, (0, CAPACITY - len(times)), constant_values=np.inf)
        return build_table(model.llm, model.path, jnp.asarray(padded))

    def side_by_side(self, budgets: Sequence[int], *, window: int = 16) -> "Refinement":
        """The same with evaluations side by side, for the budget of each sequence or the one of all, if that can be."""
        stages = Stages.of(self.solver, budgets) if self.velocity == "sample" and max(budgets) > 1 else None
        return dataclasses.replace(self, stages=stages, window=window)

    def row_temperatures(self, t: Float[Array, "B M"]) -> Float[Array, "B M"]:
        """The velocity's temperature at times of each sequence's own grid, which ends at t = 1."""
        step = (1 / jnp.maximum(self.steps, 1).astype(jnp.float32)).reshape(-1, 1)
        return jnp.broadcast_to(self.temperature(t, step), t.shape)

    def temperature(self, t: Float[Array, "#B M"], step: Float[Array, "#B 1"]) -> Float[Array, "#B M"]:
        """The velocity's temperature at t; annealing reads it ahead, so that the last estimate is the arg max."""
        level, anneal = (option.reshape(-1, 1) for option in (self.velocity_temperature, self.anneal))
        return jnp.where(anneal > 0, diffusion.anneal(level, t + self.solver.lookahead * step), level)


def check_settings(config: DecodeConfig, path: PathConfig | None) -> None:
    """Raise `InputError` for settings that a model with this path, or without one, cannot follow.

    Those are a budget that the solver cannot spend, one above 1 without a path, and what `check_decoding` refuses.
    """
    problem = f"a budget of {config.budget} needs a diffusion path, and this model has none"
    require(path is not None or config.budget == 1, f"{problem}: use a budget of 1")
    find_solver(config.solver).steps(config.budget)
    check_decoding(config, path)
