"""Adds a solver of the ODE, and compares it with others: the error of x_t against the evaluations that it takes.

    python examples/own_solver.py --model runs/quickstart

The solver is Ralston's method of second order (Ralston 1962), which the package does not have. A solver is a Butcher
tableau and a number of stages. To use one in `l2d generate`, add it to `SOLVERS` in
`l2d_jax/decoding/refinement/solver.py` and its name to `FixedSolver` in `l2d_jax/config/ranges.py`.
"""

import argparse
from functools import partial
from typing import Any, ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np

import l2d_jax
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import trajectory
from l2d_jax.decoding.refinement.estimates import make_target
from l2d_jax.decoding.refinement.integrate import solve_fixed
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import SOLVERS, FixedStepRungeKutta, Solver

END = 0.9  # t at which the states are compared
REFERENCE = 128  # intervals of the fine grid that counts as exact


class Ralston(FixedStepRungeKutta):
    """The method of second order with the smallest bound of its local error."""

    tableau: ClassVar[Any] = diffrax.ButcherTableau(
        c=np.array([2 / 3]),
        b_sol=np.array([1 / 4, 3 / 4]),
        b_error=np.zeros(2),
        a_lower=(np.array([2 / 3]),),
    )


def main() -> None:
    """Integrate one token of an answer with each solver, on finer and finer grids."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart", help="a workdir or a model folder, with a path")
    parser.add_argument("--prompt", default="What is 3 times 7?")
    options = parser.parse_args()
    loaded = l2d_jax.load(options.model)
    # With the mean over tokens as the estimate of x_1, the velocity is smooth, and errors fall with the method's order.
    settings = Refinement.from_config(DecodeConfig(budget=3, velocity="expectation", velocity_temperature=1.0))
    ids = [token.token for token in loaded.trace(options.prompt, budget=1, max_new_tokens=4)]
    model = loaded.decoder.reading(refines=True)
    prompt = loaded.tokenizer(options.prompt)["input_ids"]
    known = trajectory.read_answer(model, prompt, ids, key=jax.random.key(0))
    context, noise, keys = trajectory.place_token(model, known, 0)
    target = make_target(model, context, settings=settings, keys=keys, end=END)

    @partial(jax.jit, static_argnames="solver")
    def solve(solver: Solver, steps: jax.Array) -> jax.Array:
        return solve_fixed(target, noise, solver=solver, steps=steps, end=END)

    exact = solve(SOLVERS["rk4"], jnp.int32(REFERENCE))
    for solver in (SOLVERS["euler"], SOLVERS["midpoint"], Solver("ralston", Ralston, stages=2)):
        for evaluations in (4, 8, 16):
            state = solve(solver, jnp.int32(evaluations // solver.stages))
            error = jnp.linalg.norm(state - exact) / jnp.linalg.norm(exact)
            print(f"{solver.name:9} {evaluations:3} evaluations, relative error of x_t at t = {END}: {error:.2e}")


if __name__ == "__main__":
    main()
