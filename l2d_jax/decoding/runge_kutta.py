"""Runge-Kutta methods of the paper's experiments (section 3.3) that diffrax lacks: their tableaux, as diffrax solvers.

Notable: Heun's three-stage method and the 3/8 rule are torchdiffeq's `heun3` and `rk4`. The embedded pairs are
torchdiffeq's too, and so is their reuse of a slope: the last stage of a step is the first of the next. For Bogacki and
Shampine's pair both are the same slope. For the other two, the last stage belongs to the step's lower-order result, and
a step costs one evaluation fewer than diffrax's own solvers of these tableaux would take.
"""

from typing import Any, ClassVar

import diffrax
import numpy as np
from jaxtyping import Array


class _Ordered:
    """A method that knows its order."""

    accuracy: ClassVar[int]

    def order(self, terms: Any) -> int:
        """The order of the error at the end of the integration."""
        del terms
        return self.accuracy


class FixedStepRungeKutta(_Ordered, diffrax.AbstractERK):
    """An explicit method without an error estimate; `ConstantStepSize` never reads the zero `b_error`."""

    interpolation_cls: ClassVar[Any] = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k


class EmbeddedPair(_Ordered, diffrax.AbstractAdaptiveSolver[Array]):
    """A method with an error estimate; its state is the slope at the start of the next step."""

    tableau: ClassVar[diffrax.ButcherTableau]
    term_structure: ClassVar[Any] = diffrax.ODETerm
    interpolation_cls: ClassVar[Any] = diffrax.LocalLinearInterpolation

    def init(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any) -> Any:
        """The slope at the start of the integration."""
        del t1
        return terms.vf(t0, y0, args)

    def step(
        self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any, solver_state: Any, made_jump: Any
    ) -> tuple[Any, Any, dict[str, Any], Any, Any]:
        """Take one step from the slope that the previous step left."""
        del made_jump
        length, slopes = t1 - t0, [solver_state]
        for node, row in zip(self.tableau.c, self.tableau.a_lower, strict=True):
            t = t1 if node == 1 else t0 + node * length
            slopes.append(terms.vf(t, y0 + length * _combine(row, slopes), args))
        y1 = y0 + length * _combine(self.tableau.b_sol, slopes)
        error = length * _combine(self.tableau.b_error, slopes)
        return y1, error, {"y0": y0, "y1": y1}, slopes[-1], diffrax.RESULTS.successful

    def func(self, terms: Any, t0: Any, y0: Any, args: Any) -> Any:
        """The slope at a point."""
        return terms.vf(t0, y0, args)


def _combine(weights: Any, slopes: list[Any]) -> Any:
    return sum(float(weight) * slope for weight, slope in zip(weights, slopes, strict=True) if weight)


def _tableau(c: list[float], a: list[list[float]], b: list[float], error: list[float]) -> diffrax.ButcherTableau:
    return diffrax.ButcherTableau(np.array(c), np.array(b), np.array(error), tuple(map(np.array, a)))


class Heun3(FixedStepRungeKutta):
    """Heun's third-order method."""

    tableau: ClassVar[Any] = _tableau([1 / 3, 2 / 3], [[1 / 3], [0.0, 2 / 3]], [1 / 4, 0.0, 3 / 4], [0.0] * 3)
    accuracy: ClassVar[int] = 3


class ThreeEighths(FixedStepRungeKutta):
    """Kutta's 3/8 rule, a method of fourth order."""

    tableau: ClassVar[Any] = _tableau(
        [1 / 3, 2 / 3, 1.0], [[1 / 3], [-1 / 3, 1.0], [1.0, -1.0, 1.0]], [1 / 8, 3 / 8, 3 / 8, 1 / 8], [0.0] * 4
    )
    accuracy: ClassVar[int] = 4


class Fehlberg2(EmbeddedPair):
    """Fehlberg's pair of orders 1 and 2: the release's adaptive solver."""

    tableau: ClassVar[Any] = _tableau(
        [1 / 2, 1.0], [[1 / 2], [1 / 256, 255 / 256]], [1 / 512, 255 / 256, 1 / 512], [-1 / 512, 0.0, 1 / 512]
    )
    accuracy: ClassVar[int] = 2


class AdaptiveHeun(EmbeddedPair):
    """Heun's second-order method, with Euler's for the error."""

    tableau: ClassVar[Any] = _tableau([1.0], [[1.0]], [1 / 2, 1 / 2], [1 / 2, -1 / 2])
    accuracy: ClassVar[int] = 2


class BogackiShampine(EmbeddedPair):
    """Bogacki and Shampine's pair of orders 2 and 3."""

    tableau: ClassVar[Any] = _tableau(
        [1 / 2, 3 / 4, 1.0],
        [[1 / 2], [0.0, 3 / 4], [2 / 9, 1 / 3, 4 / 9]],
        [2 / 9, 1 / 3, 4 / 9, 0.0],
        [2 / 9 - 7 / 24, 1 / 3 - 1 / 4, 4 / 9 - 1 / 3, -1 / 8],
    )
    accuracy: ClassVar[int] = 3
