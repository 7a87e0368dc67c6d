"""The tableaux are consistent."""

import numpy as np
import pytest

from l2d_jax.decoding.refinement.solver import ADAPTIVE, FIXED, SOLVERS


@pytest.mark.parametrize("solver", ["heun3", "rk4", *ADAPTIVE])
def test_tableaus_are_consistent(solver: str) -> None:
    """Rows sum to their nodes, the solution's weights to one, and those of the error to zero."""
    tableau = SOLVERS[solver].method.tableau
    for node, row in zip(tableau.c, tableau.a_lower, strict=True):
        np.testing.assert_allclose(np.sum(row), node)
    np.testing.assert_allclose(np.sum(tableau.b_sol), 1)
    np.testing.assert_allclose(np.sum(tableau.b_error), 0, atol=1e-15)
    assert len(tableau.c) == SOLVERS[solver].stages - (solver in FIXED)
