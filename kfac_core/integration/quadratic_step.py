"""The step that minimizes the quadratic model, and the damping that follows from it.

A step is ``delta = sum_i c_i d_i`` along a few directions, usually the natural gradient and
the step before; its coefficients minimize the model of `kfac_core.steps.quadratic_model`.
The damping then follows how well the model predicted the loss: the rule of Levenberg and
Marquardt (Martens and Grosse 2015, sections 6.4, 6.5 and 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Scalar
from kfac_core.damping import levenberg_marquardt
from kfac_core.integration.schedules import interval_at
from kfac_core.steps.quadratic_model import QuadraticModel, quadratic_model
from kfac_core.steps.reduction import reduction_ratio
from kfac_core.steps.vectors import Vector, linear_combination


@dataclass(frozen=True)
class QuadraticStep:
    """A step along some directions, and what the quadratic model predicts of it.

    Attributes
    ----------
    model : QuadraticModel
        Model on the span of the directions.
    directions : sequence of mapping of str to mapping of str to array
        The d_i.
    coefficients : array, shape (k,)
        One for each direction: learning rate and momentum.
    damped : bool
        Whether the prediction includes ``damping / 2 |delta|^2``.
    """

    model: QuadraticModel
    directions: Sequence[Vector]
    coefficients: Array
    damped: bool

    @property
    def predicted(self) -> Array:
        """Change of the objective that the model predicts, 0-d."""
        return self.model.change(self.coefficients, damped=self.damped)

    def change(self) -> dict[str, dict[str, Array]]:
        """Return the change of the parameters, ``sum_i c_i d_i``."""
        return linear_combination(self.coefficients, self.directions)

    def shortened(self, rate: float, /) -> QuadraticStep:
        """Return the same step, with its coefficients multiplied by a number."""
        if rate == 1.0:
            return self
        # The prediction follows: it is of the step that is taken.
        return replace(self, coefficients=rate * self.coefficients)


def quadratic_step(
    gradient: Vector,
    directions: Sequence[Vector],
    /,
    *,
    curvature: Array,
    damping: Scalar,
    fixed: Sequence[Any] | None = None,
    damped: bool = True,
    check: Check = "raise",
) -> QuadraticStep:
    """Return the step to the minimum of the quadratic model.

    Parameters
    ----------
    gradient, directions, curvature, damping
        See `kfac_core.steps.quadratic_model`.
    fixed, check
        See `kfac_core.steps.QuadraticModel.minimize`.
    damped : bool
        Whether the prediction includes ``damping / 2 |delta|^2``.

    Returns
    -------
    QuadraticStep
        Step to the minimum; `QuadraticStep.shortened` for a part of it.

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
    minimum = model.minimize(fixed=fixed, check=check)
    return QuadraticStep(model, directions, minimum.coefficients, damped)


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

    def __post_init__(self) -> None:
        """Check the options, which the integrations call ``adapt_...``."""
        interval_at("adapt_every", self.every, 0)
        constraints.require_range("adapt_factor", self.factor, constraints.FRACTION)
        constraints.require_range("min_damping", self.minimum, constraints.NOT_NEGATIVE)
        constraints.require_range("max_damping", self.maximum, constraints.LIMIT_SCALAR)
        if not self.minimum <= self.maximum:
            raise errors.DampingError(
                "Expected `min_damping` <= `max_damping`, got "
                f"{self.minimum} and {self.maximum}."
            )

    def require_within(self, damping: float, /) -> None:
        """Raise `ConventionError` for a damping that is not between the bounds."""
        bounds = constraints.number(
            f"a number from {self.minimum:g} to {self.maximum:g}",
            lambda x: self.minimum <= x <= self.maximum,
        )
        constraints.require_range("damping", damping, bounds)

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
            # The factor is for one step, and the rule runs every few steps.
            decay=self.factor**self.every,
            minimum=self.minimum,
            maximum=self.maximum,
        )
        return next_damping, ratio

    def raised(self, damping: float, /) -> float:
        """Return the damping after a step that was rejected."""
        return min(self.rejected * damping, self.maximum)
