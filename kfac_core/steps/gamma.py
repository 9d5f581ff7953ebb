"""gamma: a separate strength of the factored damping, found by trying three values.

Conventions.  The factored preconditioner is
``(A + pi gamma I) (x) (G + gamma/pi I)``, so that ``gamma^2`` is what the estimator
calls damping with ``damping_rule="factored"``.  The quadratic model keeps the damping
lam, which the objective's curvature decides; gamma only shapes the direction.  The
paper begins with ``gamma = sqrt(lam + eta)`` and tries again every ``T = 20`` steps,
with the factor ``sqrt(19/20)**T``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import array_api_compat

from kfac_core import constraints, errors
from kfac_core.array import Array, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.layers.feeding import detached_array
from kfac_core.steps.rejection import select

_GAMMA = constraints.POSITIVE_SCALAR._replace(error=errors.DampingError)

Step = TypeVar("Step")


class Trial(NamedTuple, Generic[Step]):
    """One gamma with its step and predicted change.

    Attributes
    ----------
    gamma : float or 0-d array
        The strength of the factored damping.
    change : float or 0-d array
        ``M(delta) - M(0)`` of its step.
    step : object
        That step, and whatever else the caller keeps with it.
    """

    gamma: Scalar
    change: Scalar
    step: Step


def gamma_candidates(
    gamma: Scalar, /, *, factor: float, minimum: float = 0.0, maximum: float = math.inf
) -> tuple[Scalar, Scalar, Scalar]:
    """Return ``(gamma, factor gamma, gamma / factor)``, each within the bounds.

    Parameters
    ----------
    gamma : float or 0-d array
        Current value, > 0.
    factor : float
        The paper's omega_2, in (0, 1): ``sqrt(19/20)**T`` for a search every T steps.
    minimum, maximum : float
        The bounds of gamma.

    Returns
    -------
    tuple of float or 0-d array
        The present one first.

    Raises
    ------
    DampingError
        For a number that is negative or not finite, a factor outside (0, 1), or
        bounds in the wrong order.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 6.6.
    """
    constraints.require_range("gamma", gamma, _GAMMA)
    constraints.require_range("factor", factor, constraints.FRACTION)
    constraints.require_range("minimum", minimum, constraints.DAMPING)
    constraints.require_ordered(minimum=minimum, maximum=maximum)
    present = detached_array(gamma)
    # The present value first, so that it wins a tie.
    tried = (present, factor * present, present / factor)
    present, smaller, larger = (_bounded(g, minimum, maximum) for g in tried)
    return present, smaller, larger


def search_gamma(
    attempt: Callable[[Scalar], tuple[Scalar, Step]],
    gamma: Scalar,
    /,
    *,
    factor: float,
    minimum: float = 0.0,
    maximum: float = math.inf,
) -> Trial[Step]:
    """Make a step with each of three gammas, and return the best by the model.

    Parameters
    ----------
    attempt : callable
        Takes a gamma and returns the model's change and the step, a tree of arrays (or
        anything, where changes are numbers).  Called three times; usually it refreshes
        a preconditioner with damping ``gamma**2`` each time.
    gamma : float or 0-d array
        Current value, > 0.
    factor, minimum, maximum : float
        See `gamma_candidates`.

    Returns
    -------
    Trial
        The first of the best trials; the trial of the present gamma if no change is finite.

    Raises
    ------
    DampingError
        See `gamma_candidates`.
    ShapeError, DtypeError
        For steps of different forms, where changes are arrays.

    Notes
    -----
    Three refreshes of the preconditioner, and three products with F more than a step
    has.  A caller with state has to leave it as the chosen gamma makes it.
    """
    candidates = gamma_candidates(
        gamma, factor=factor, minimum=minimum, maximum=maximum
    )
    return _best([Trial(g, *attempt(g)) for g in candidates])


def _bounded(gamma: Scalar, minimum: float, maximum: float) -> Scalar:
    if not hasattr(gamma, "dtype"):
        return min(max(gamma, minimum), maximum)
    xp = array_api_compat.array_namespace(gamma)
    low = xp.where(gamma < minimum, xp.full_like(gamma, minimum), gamma)
    return xp.where(low > maximum, xp.full_like(gamma, maximum), low)


def _best(trials: Sequence[Trial[Any]]) -> Trial[Any]:
    """Return the best trial; ties go to the earlier one."""
    best = _unified(trials[0])
    for trial in map(_unified, trials[1:]):
        # `select` and not `if`, since changes may be traced.
        best = Trial(*select(_is_less(trial.change, best.change), trial, best))
    return best


def _unified(trial: Trial[Any]) -> Trial[Any]:
    """Make gamma an array where the change is one."""
    change: Array | Scalar = detached_array(trial.change)
    if not hasattr(change, "dtype"):
        return trial
    xp = array_api_compat.array_namespace(change)
    return Trial(ns.full_of(xp, trial.gamma, change), change, trial.step)


def _is_less(new: Scalar, old: Scalar) -> bool | Array:
    if not hasattr(new, "dtype"):
        return ns.is_finite_number(new) and not (
            ns.is_finite_number(old) and new >= old
        )
    xp = array_api_compat.array_namespace(new, old)
    return xp.isfinite(new) & ~(xp.isfinite(old) & (new >= old))
