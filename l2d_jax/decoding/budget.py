"""What a budget of evaluations buys of each solver, and at which times they fall."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.decoding.runge_kutta import ADAPTIVE, FIXED, SOLVERS
from l2d_jax.errors import InputError

AMPLE = 512  # evaluations a token, at most: for an adaptive solver that is given no budget


def steps_of(solver: str, budget: int) -> int:
    """Grid intervals that spend `budget` evaluations, the final one included; of an adaptive solver, the most steps.

    Raises `InputError` for a budget that a fixed solver cannot spend exactly, naming the nearest ones that it can, and
    for one that is too small for a step of an adaptive solver. A budget of 1 is the LM alone: no step.
    """
    if solver in ADAPTIVE:
        stages = ADAPTIVE[solver][1]
        if budget != 1 and budget < 2 + stages:  # the first slope and the final evaluation
            raise InputError(
                f"a budget of {budget} evaluations is too small for {solver}, which takes 2 and {stages} a step: try 1 "
                f"(the LM alone), or at least {2 + stages}"
            )
        return (budget - 2) // stages if budget > 1 else 0
    if solver not in FIXED:
        raise InputError(f"unknown solver {solver!r}: choose from {', '.join(SOLVERS)}")
    stages = FIXED[solver][1]
    if budget < 1 or (budget - 1) % stages:
        below = max(0, budget - 1) // stages * stages + 1
        raise InputError(
            f"a budget of {budget} evaluations is unreachable for {solver}, which takes 1 + {stages} n: "
            f"try {below} or {below + stages}"
        )
    return (budget - 1) // stages


def split_budget(solver: str, total: int, *, beams: int) -> int:
    """The largest budget that each beam of a search can spend where a token may cost `total` evaluations for all.

    Raises `InputError` for a total that is less than the LM alone takes, which is one evaluation per beam.
    """
    steps_of(solver, 1)  # the solver is known
    if beams < 1:
        raise InputError(f"a budget is split between at least 1 beam, got {beams}")
    if total < beams:
        raise InputError(
            f"a total of {total} evaluations per token is less than one for each of {beams} beams: "
            f"try a total of at least {beams}{f', or {total} beams' if total > 0 else ''}"
        )
    budget = total // beams
    if solver in ADAPTIVE:
        return budget if budget >= 2 + ADAPTIVE[solver][1] else 1
    stages = FIXED[solver][1]
    return (budget - 1) // stages * stages + 1


def evaluation_times(solver: str, steps: Int[Array, ""], *, room: int) -> Float[Array, " room"]:
    """t of every evaluation on a uniform grid of `steps` intervals, the final one included; infinite beyond it."""
    rule, stages = FIXED[solver]
    nodes = jnp.array([0.0, *getattr(getattr(rule, "tableau", None), "c", ())], jnp.float32)
    index, steps = jnp.arange(room), jnp.asarray(steps)
    inner = (index // stages + nodes[index % stages]) / jnp.maximum(steps, 1)
    end = jnp.where(steps > 0, 1.0, 0.0)
    return jnp.where(index < stages * steps, inner, jnp.where(index == stages * steps, end, jnp.inf))


def lookahead(solver: str) -> float:
    """How far beyond t an annealed temperature is read, in grid intervals (the release's choice)."""
    return 0.0 if solver in ADAPTIVE else 0.5 if solver == "midpoint" else 1.0
