"""The step that minimizes the quadratic model, and the damping that follows from it.

A step is ``delta = sum_i c_i d_i`` along a few directions, usually the natural gradient and
the step before; its coefficients minimize the model of `kfac_core.steps.quadratic_model`.
The damping then follows how well the model predicted the loss: the rule of Levenberg and
Marquardt (Martens and Grosse 2015, sections 6.4, 6.5 and 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import Scalar
from kfac_core.array.status import Check
from kfac_core.damping import levenberg_marquardt
from kfac_core.steps.quadratic_model import quadratic_model
from kfac_core.steps.reduction import reduction_ratio
from kfac_core.steps.vectors import Vector, linear_combination

__all__ = ["DampingRule", "QuadraticStep", "quadratic_step"]


@dataclass(frozen=True)
class QuadraticStep:
    """A step of the quadratic model.

    Attributes
    ----------
    coefficients : array, shape (k,)
        One for each direction: learning rate and momentum.
    predicted : array, 0-d
        Change of the objective that the model predicts.
    directions : sequence of mapping of str to mapping of str to array
        What the coefficients belong to.
    """

    coefficients: Array
    predicted: Array
    directions: Sequence[Vector]

    def change(self) -> dict[str, dict[str, Array]]:
        """Return the change of the parameters, ``sum_i c_i d_i``."""
        return linear_combination(self.coefficients, self.directions)


def quadratic_step(
    gradient: Vector,
    directions: Sequence[Vector],
    /,
    *,
    curvature: Array,
    damping: Scalar,
    rate: float = 1.0,
    fixed: Sequence[Any] | None = None,
    damped: bool = True,
    check: Check = "raise",
) -> QuadraticStep:
    """Return the step to the minimum of the quadratic model.

    Parameters
    ----------
    gradient, directions, curvature, damping
        See `kfac_core.steps.quadratic_model`.
    rate : float
        Factor on the coefficients; 1 goes all the way to the minimum.
    fixed, check
        See `kfac_core.steps.QuadraticModel.minimize`.
    damped : bool
        Whether the prediction includes ``damping / 2 |delta|^2``.

    Returns
    -------
    QuadraticStep
        Coefficients and prediction.

    Raises
    ------
    KFACError
        For arguments that do not fit, and a model that is not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.integration import quadratic_step
    >>> gradient = {"fc": {"weight": np.array([[1.0]])}}
    >>> direction = {"fc": {"weight": np.array([[-1.0]])}}
    >>> step = quadratic_step(
    ...     gradient, [direction], curvature=np.array([[4.0]]), damping=0.0
    ... )
    >>> step.change()["fc"]["weight"].item(), float(step.predicted)
    (-0.25, -0.125)
    """
    model = quadratic_model(gradient, directions, curvature=curvature, damping=damping)
    coefficients = model.minimize(fixed=fixed, check=check).coefficients
    if rate != 1.0:
        coefficients = rate * coefficients
    return QuadraticStep(
        coefficients, model.change(coefficients, damped=damped), directions
    )


@dataclass(frozen=True)
class DampingRule:
    """Levenberg-Marquardt adaptation, every few steps, between bounds.

    Attributes
    ----------
    every : int
        Steps between adaptations.
    factor : float
        Factor in (0, 1] for one step; an adaptation multiplies or divides the damping by
        ``factor ** every``.
    minimum, maximum : float
        Bounds of the damping.
    rejected : float
        Factor on the damping after a step that made the loss worse.
    """

    every: int = 5
    factor: float = 0.95
    minimum: float = 1e-6
    maximum: float = 1e4
    rejected: float = 4.0

    def adapted(
        self, damping: Scalar, before: Scalar, after: Scalar, /, *, predicted: Scalar
    ) -> tuple[Scalar, Scalar]:
        """Return the next damping, and the reduction ratio that it follows.

        Parameters
        ----------
        damping : float or 0-d array
            Damping of the step.
        before, after : float or 0-d array
            Loss of the step's own batch, before and after it.
        predicted : float or 0-d array
            Change that the model predicted.

        Returns
        -------
        damping, ratio : float or 0-d array
            An array where one of the arguments is.
        """
        ratio = reduction_ratio(before, after, predicted=predicted)
        next_damping = levenberg_marquardt(
            damping,
            ratio,
            decay=self.factor**self.every,
            minimum=self.minimum,
            maximum=self.maximum,
        )
        return next_damping, ratio

    def raised(self, damping: float, /) -> float:
        """Return the damping after a step that was rejected."""
        return min(self.rejected * damping, self.maximum)
