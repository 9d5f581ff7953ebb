"""Damping: how it is split between Kronecker factors, and how it is adapted.

Conventions.  ``lam >= 0`` is the Tikhonov damping of the whole block: exact damping is
``F + lam I``.  Factored damping approximates it for ``F = S F_1 (x) ... (x) F_k`` by
adding ``shift_i I`` to each factor, with ``S prod(shift_i) = lam``; S counts the shared
positions (time steps, tokens), and its part of the damping is divided out first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import array_api_compat

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace, Scalar, finite
from kfac_core.array import namespaces as ns

__all__ = [
    "DampingRule",
    "factored_shifts",
    "levenberg_marquardt",
    "require_damping",
    "require_set_damping",
]

_RATIO = constraints.number(
    "a number", lambda x: True, errors.DampingError, arrays=True
)
_FACTOR_DOWN = constraints.number(
    "a number in (0, 1]", lambda x: 0.0 < x <= 1.0, errors.DampingError
)

DampingRule = Literal["factored", "factored_unit_pi", "exact"]


def factored_shifts(
    mean_eigenvalues: Sequence[Array],
    damping: Scalar,
    /,
    *,
    scale: Array,
    unit_pi: bool,
    least: float = 0.0,
    xp: Namespace,
) -> list[Array]:
    """Split a damping between the factors of a Kronecker product.

    With ``n_i = tr(F_i) / dim_i`` and c the geometric mean of the n_i,

        shift_i = (n_i / c) (lam / S)^(1/k),

    which for two factors is ``pi sqrt(lam/S)`` and ``sqrt(lam/S) / pi`` with
    ``pi = sqrt(n_1 / n_2)``.

    Parameters
    ----------
    mean_eigenvalues : sequence of 0-d array
        Mean eigenvalues n_i, nonnegative.
    damping : float or 0-d array
        Damping ``lam``.
    scale : 0-d array
        Scale ``S``.
    unit_pi : bool
        Whether all shifts are equal, independent of the n_i.
    least : float
        The least shift of a factor: smaller ones are raised to it.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    list of 0-d array
        Shifts of the factors; all are equal if any n_i is zero.

    Notes
    -----
    For k = 2 it minimizes the trace of the part of the damped product that exact
    damping does not have.  It is unchanged when one factor is multiplied by a number
    and another divided by it, but for the bound `least`.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 6.3; for k factors, the same
    rule as kfac-jax.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.damping import factored_shifts
    >>> mean_eigenvalues = [np.asarray(4.0), np.asarray(1.0)]
    >>> shifts = factored_shifts(
    ...     mean_eigenvalues, 0.01, scale=np.asarray(1.0), unit_pi=False, xp=np
    ... )
    >>> [round(float(shift), 3) for shift in shifts]
    [0.2, 0.05]
    """
    k = len(mean_eigenvalues)
    # A negative damping becomes NaN or stays negative; the factorization reports it.
    share = _root(damping, k, xp) / _root(scale, k, xp)
    if unit_pi:
        shifts = [share + xp.zeros_like(n) for n in mean_eigenvalues]
        return _raised(shifts, least, xp) if least else shifts
    positive = mean_eigenvalues[0] > 0
    for n in mean_eigenvalues[1:]:
        positive = positive & (n > 0)
    safe = mean_eigenvalues
    if not finite.known_true(positive, xp=xp):
        safe = [xp.where(positive, n, 1.0) for n in mean_eigenvalues]
    # A product of roots, since that of the n_i may overflow or underflow.
    center = _root(safe[0], k, xp)
    for n in safe[1:]:
        center = center * _root(n, k, xp)
    shifts = [share * (n / center) for n in safe]
    return _raised(shifts, least, xp) if least else shifts


def _raised(shifts: list[Array], least: float, xp: Namespace) -> list[Array]:
    """Return shifts of which none is below a bound; NaN stays NaN."""
    return [
        xp.where(shift < least, xp.full_like(shift, least), shift) for shift in shifts
    ]


def _root(x: Scalar, k: int, xp: Namespace) -> Scalar:
    """Return the k-th root; compilers make much of a power."""
    if k == 2 and hasattr(x, "dtype"):
        return xp.sqrt(x)
    return x ** (1.0 / k)


def levenberg_marquardt(
    damping: Scalar,
    reduction_ratio: Scalar,
    /,
    *,
    decay: float,
    minimum: float = 0.0,
    maximum: float = math.inf,
) -> Scalar:
    r"""Adapt the damping by the Levenberg-Marquardt rule.

    .. math:: \lambda \leftarrow \begin{cases}
        \omega \lambda & \rho > 3/4 \\
        \lambda / \omega & \rho < 1/4
        \end{cases}

    with the decay :math:`\omega`, and unchanged in between.

    Parameters
    ----------
    damping : float or 0-d array
        Current damping ``lam``.
    reduction_ratio : float or 0-d array
        rho, the change of the loss divided by the change that the quadratic model
        predicted; see `kfac_core.steps.reduction_ratio`.  NaN increases the damping.
    decay : float
        Factor in (0, 1] by which lam is multiplied (``rho > 3/4``) or divided
        (``rho < 1/4``); in the paper ``(19/20)**T`` for a rule applied every T steps.
    minimum, maximum : float
        Bounds of lam.

    Returns
    -------
    float or 0-d array
        New damping; an array if either argument is one.  Arrays may be traced, and
        their values are not read.

    Raises
    ------
    DampingError
        For a damping that is negative or not finite, a ratio that is no number, a decay
        outside (0, 1], or bounds in the wrong order.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 6.5.

    Examples
    --------
    The loss fell by 90% of the prediction, so that the damping may fall:

    >>> import kfac_core as kc
    >>> kc.levenberg_marquardt(1.0, 0.9, decay=0.5)
    0.5
    >>> kc.levenberg_marquardt(1.0, 0.1, decay=0.5)
    2.0
    """
    require_damping(damping)
    constraints.require_range("reduction_ratio", reduction_ratio, _RATIO)
    constraints.require_range("decay", decay, _FACTOR_DOWN)
    constraints.require_range("minimum", minimum, constraints.DAMPING)
    constraints.require_ordered(minimum=minimum, maximum=maximum)
    scalars = damping, reduction_ratio
    arrays = [x for x in scalars if not isinstance(x, ns.NUMBER)]
    if arrays:
        xp = array_api_compat.array_namespace(*arrays)
        lam, rho = (ns.full_of(xp, x, arrays[0]) for x in scalars)
        # Written as `rho >= 0.25` and not `rho < 0.25`, so that a ratio of NaN raises
        # the damping.
        raised = xp.where(rho >= 0.25, lam, lam / decay)
        adapted = xp.where(rho > 0.75, lam * decay, raised)
        least, most = (xp.full_like(lam, bound) for bound in (minimum, maximum))
        # Not `clip`, where libraries differ: a damping of NaN stays one, for the refresh
        # to flag.
        adapted = xp.where(adapted < least, least, adapted)
        return xp.where(adapted > most, most, adapted)
    if reduction_ratio > 0.75:
        damping = damping * decay
    # Not `<`: a ratio of NaN means that the step failed.
    elif not reduction_ratio >= 0.25:
        damping = damping / decay
    return min(max(damping, minimum), maximum)


def require_damping(damping: Scalar, /, *, name: str = "damping") -> None:
    """Raise `DampingError` for anything but a finite number >= 0 or a 0-d array.

    The value of a 0-d array is not read, since it may be traced or on a device.  It is
    checked when factors are damped with it.
    """
    if type(damping) is not float or not 0.0 <= damping < math.inf:
        constraints.require_range(name, damping, constraints.DAMPING)


def require_set_damping(damping: Scalar, /, *, name: str = "damping") -> None:
    """Raise `DampingError` as `require_damping`, also for the value of a 0-d array.

    Only arrays in the host's memory are read: those that are traced or on a device are
    checked when factors are damped with them.
    """
    require_damping(damping, name=name)
    if not isinstance(damping, ns.NUMBER):
        xp = array_api_compat.array_namespace(damping)
        if finite.is_plain(damping, xp=xp):
            require_damping(float(damping), name=name)
