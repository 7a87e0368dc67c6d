"""What a budget buys of each solver."""

import typing

import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.refinement.solver import FIXED, SOLVERS, find_solver
from l2d_jax.errors import InputError


def test_the_config_knows_every_solver() -> None:
    assert typing.get_args(DecodeConfig.__annotations__["solver"]) == tuple(SOLVERS)


def test_intervals_of_a_budget() -> None:
    budgets = {
        ("euler", 1): 0,
        ("euler", 15): 14,
        ("midpoint", 1): 0,
        ("midpoint", 3): 1,
        ("midpoint", 7): 3,
        ("midpoint", 15): 7,
        ("midpoint", 31): 15,
        ("midpoint", 127): 63,
        ("heun", 15): 7,
        ("heun3", 16): 5,
        ("rk4", 17): 4,
        ("fehlberg2", 1): 0,
        ("fehlberg2", 4): 1,
        ("fehlberg2", 7): 2,
        ("adaptive_heun", 15): 13,
        ("bosh3", 14): 4,
    }
    for (solver, budget), wanted in budgets.items():
        assert find_solver(solver).steps(budget) == wanted


@pytest.mark.parametrize(
    ("solver", "budget", "message"),
    [
        ("midpoint", 16, "16 evaluations is unreachable for midpoint, which takes 1 [+] 2 n: try 15 or 17"),
        ("midpoint", 2, "try 1 or 3"),
        ("heun3", 15, "1 [+] 3 n: try 13 or 16"),
        ("rk4", 15, "1 [+] 4 n: try 13 or 17"),
        ("rk4", 4, "try 1 or 5"),
        ("euler", 0, "try 1 or 2"),
        ("midpoint", -3, "try 1 or 3"),
        (
            "fehlberg2",
            3,
            "3 evaluations is too small for fehlberg2, which takes 2 and 2 a step: try 1 .*at least 4",
        ),
        ("bosh3", 4, "at least 5"),
        ("newton", 3, "unknown solver 'newton': choose from euler, midpoint, heun, heun3, rk4, restart, fehlberg2"),
    ],
)
def test_budgets_that_cannot_be_spent(solver: str, budget: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_solver(solver).steps(budget)


def test_lookahead_reaches_the_end_at_the_last_draw() -> None:
    """The last stage that is not at t = 1 itself: one interval before the end, or half of one for midpoint."""
    for solver, last_stage in [("euler", -1.0), ("midpoint", -0.5), ("heun", -1.0)]:
        assert last_stage + FIXED[solver].lookahead == 0.0
