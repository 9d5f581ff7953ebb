"""The reduction ratio: actual over predicted change of the objective.

Conventions.  ``rho = (h(theta + delta) - h(theta)) / (M(delta) - M(0))``, both
differences of the same objective h on the same batch, its l2 term included where it has
one.  One is a perfect model, and `kfac_core.levenberg_marquardt` adapts the damping to
it.
"""

from __future__ import annotations

import math

from kfac_core.array import Array, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.steps.vectors import scalar_of


def reduction_ratio(
    loss_before: Scalar, loss_after: Scalar, /, *, predicted: Scalar
) -> Scalar:
    r"""Return rho; minus infinity if no change was predicted.

    .. math:: \rho = \frac{h(\theta + \delta) - h(\theta)}{M(\delta) - M(0)}

    Parameters
    ----------
    loss_before, loss_after : float or 0-d array
        ``h(theta)`` and ``h(theta + delta)``.
    predicted : float or 0-d array
        ``M(delta) - M(0)``, from `QuadraticModel.change`.

    Returns
    -------
    float or 0-d array
        A float where all three are numbers.  Minus infinity where a number is not
        finite, or where no decrease was predicted: such a quotient has the wrong sign,
        and would call a step good that made the objective worse as promised.  Never
        NaN.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For anything else.

    Notes
    -----
    Close to a minimum the difference of two losses is mostly roundoff.  Take them in
    float64 where the device has it.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 6.5.

    Examples
    --------
    >>> from kfac_core.steps import reduction_ratio
    >>> reduction_ratio(2.0, 1.5, predicted=-1.0)
    0.5
    """
    named = {
        "loss_before": loss_before,
        "loss_after": loss_after,
        "predicted": predicted,
    }
    # A NumPy scalar has a dtype, but counts as a number.
    arrays = {name: x for name, x in named.items() if not isinstance(x, ns.NUMBER)}
    arrays = {name: x for name, x in arrays.items() if hasattr(x, "dtype")}
    if not arrays:
        for name, x in named.items():
            scalar_of(None, x, None, name)
        finite = all(map(ns.is_finite_number, named.values()))
        change = float(loss_after) - float(loss_before) if finite else math.nan
        # The difference of two finite losses can overflow.
        # A predicted increase makes the ratio meaningless: count it as a failure.
        if not (math.isfinite(change) and predicted < 0):
            return -math.inf
        return float(change / predicted)
    xp = ns.namespace_of(**arrays)
    for name, x in arrays.items():
        ns.require_floating(xp, x, name)
    before, after, expected = _in_one_dtype(xp, named, arrays)
    change = after - before
    comparable = xp.isfinite(change) & xp.isfinite(expected) & (expected < 0)
    quotient = change / xp.where(comparable, expected, -xp.ones_like(expected))
    return xp.where(comparable, quotient, xp.full_like(quotient, -math.inf))


def _in_one_dtype(
    xp: Namespace, named: dict[str, Scalar], arrays: dict[str, Array]
) -> list[Array]:
    """Return scalars as 0-d arrays in the widest dtype of those that are arrays."""
    like = next(iter(arrays.values()))
    dtype = ns.wide_dtype(xp, xp.result_type(*arrays.values()))
    zero = xp.zeros((), dtype=dtype, device=ns.device_of(like))
    return [zero + scalar_of(xp, x, dtype, name) for name, x in named.items()]
