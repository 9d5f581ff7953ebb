"""Bounds of the size of a step, measured by the curvature.

The curvature measures distance between predictions: for a Fisher matrix F the
Kullback-Leibler divergence from theta to ``theta + delta`` is about
``1/2 delta . F delta``.  `kl_clip` scales a step whose length was chosen already down to
a bound of ``delta . F delta``, hence of twice the divergence, and takes ``D . F D`` from
the preconditioner, as ``grad . P grad`` (no product with F).

The bounds differ between papers by that factor of two: ACKTR's is of the divergence,
``sqrt(2 delta / D . F D)``, so that ``bound = 2 delta`` here.
"""

from __future__ import annotations

import math
from typing import get_args

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Scalar, Status
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.layers.feeding import detached_array
from kfac_core.steps.vectors import Vector, inner_product, scalar_of

_NOT_FINITE = (
    "The length of the step is not finite: {}. Look for NaN or infinity in the gradient "
    "and the direction; a preconditioner with a larger damping may be needed."
)


@structure()
class TrustRegion:
    """Factor on a step.

    Attributes
    ----------
    scale : array, 0-d
        nu; finite.
    size : array, 0-d
        Measured squared length ``lr^2 grad . P grad``.
    status : array, 0-d int32
        ``Status.NOT_POSITIVE`` for a size below zero, and for a bound that is not
        positive (the scale is zero then); ``Status.MATRIX_NOT_FINITE`` for a
        size that is not finite (likewise); else 0.
    """

    scale: Array
    size: Array
    status: Array


def kl_clip(
    gradient: Vector,
    preconditioned: Vector,
    /,
    *,
    learning_rate: Scalar,
    bound: Scalar,
    lengthen: bool = False,
    check: Check = "raise",
) -> TrustRegion:
    r"""Return ``nu = min(1, sqrt(kappa / (lr^2 grad . P grad)))``.

    .. math:: \nu = \min \Bigl(
        1, \sqrt{\frac{\kappa}{\eta^2 \, \nabla h \cdot P \nabla h}} \Bigr)

    with the learning rate :math:`\eta` and the preconditioner P.

    ``nu P grad`` replaces ``P grad``; then ``lr nu P grad`` is at most
    ``sqrt(kappa)`` long in the norm of ``P^-1``.

    Parameters
    ----------
    gradient : mapping of str to mapping of str to array
        grad, or whatever was preconditioned (a velocity).
    preconditioned : mapping of str to mapping of str to array
        Preconditioned gradient ``P grad``.
    learning_rate : float or 0-d array
        Learning rate.
    bound : float or 0-d array
        Bound ``kappa > 0``.
    lengthen : bool
        Whether directions of a squared length ``s = grad . P grad`` below kappa are
        lengthened, by ``(kappa / s)^(1/4)`` in the place of 1: to the geometric mean of s
        and kappa.  The rate is not in s, so that it still scales the step.
    check : {"raise", "status"}
        Whether a size that is not finite raises, which synchronizes with the device,
        or is left in the status.

    Returns
    -------
    TrustRegion
        With a scale in [0, 1], or above with `lengthen`.  It is one for a size that is
        negative: P is no inverse of a curvature then, and no length is known.

    Raises
    ------
    NotFiniteError
        For a size that is not finite (``check="raise"``).
    ConventionError, ShapeError, DtypeError, MixedArraysError, UnsupportedError
        For invalid arguments, such as a bound that is not positive.

    Notes
    -----
    Momentum that is added afterwards is not bounded.

    Damping is in units of the curvature.  Where the curvature vanishes as data are fitted,
    as of a cross-entropy, the damping remains, and steps become as small as gradients
    unless they are lengthened.

    References
    ----------
    Ba, Grosse and Martens (2017), "Distributed Second-Order Optimization using
    Kronecker-Factored Approximations"; ``norm_constraint`` of TensorFlow's K-FAC and of
    kfac-jax, ``kl_clip`` of kfac-pytorch, in this form.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.steps import kl_clip
    >>> gradient = {"fc": {"weight": np.array([[3.0, 4.0]])}}
    >>> region = kl_clip(gradient, gradient, learning_rate=0.1, bound=0.0625)
    >>> round(float(region.scale), 6)  # 0.25 / (0.1 * 5)
    0.5
    """
    constraints.require_range(
        "learning_rate", learning_rate, constraints.NOT_NEGATIVE_SCALAR
    )
    constraints.require_range("bound", bound, constraints.POSITIVE_SCALAR)
    constraints.require_one_of("check", check, get_args(Check))
    square = inner_product(gradient, preconditioned)
    xp = ns.own_namespace(square)
    rate = scalar_of(xp, learning_rate, square.dtype, "learning_rate")
    kappa = ns.full_of(xp, scalar_of(xp, bound, square.dtype, "bound"), square)
    largest = xp.ones_like(square)
    if lengthen:
        # A quotient of roots, since that of the squares could overflow.
        ratio = xp.sqrt(kappa) / xp.sqrt(xp.where(square > 0, square, kappa))
        largest = xp.sqrt(xp.maximum(ratio, largest))
    # Not rate**2 * square: the square of a small rate underflows in float32.
    size = rate * (rate * square)
    # A bound in an array is known only here.
    finite, usable = xp.isfinite(size), kappa > 0
    if check == "raise" and not bool(finite & usable):
        if bool(finite):
            raise errors.ConventionError(
                f"Expected a `bound` > 0, got {detached_array(kappa)}."
            )
        raise errors.NotFiniteError(_NOT_FINITE.format(detached_array(size)))
    length = xp.sqrt(xp.where(size > 0, size, 0.0))
    longest = xp.sqrt(xp.where(usable, kappa, 0.0))
    # Divide only if the step is clipped, since the quotient could overflow otherwise.
    beyond = largest * length > longest
    scale = xp.where(beyond, longest / xp.where(beyond, length, 1.0), largest)
    return TrustRegion(
        xp.where(finite & usable, scale, xp.zeros_like(scale)),
        size,
        ns.status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
        | ns.status_unless(xp, ((size >= 0) | ~finite) & usable, Status.NOT_POSITIVE),
    )


def clip_of_product(
    product: float, /, *, learning_rate: float, bound: float, lengthen: bool = False
) -> TrustRegion:
    """Return `kl_clip` from the number ``grad . P grad``.

    Numbers take a tenth of the time of 0-d arrays.

    Parameters
    ----------
    product : float
        Inner product of a gradient and the preconditioned gradient.
    learning_rate, bound, lengthen
        See `kl_clip`.

    Returns
    -------
    TrustRegion
        Of NumPy's 0-d arrays.

    Raises
    ------
    NotFiniteError
        For a product that is not finite.
    ConventionError
        For a bound or a rate out of its range.
    """
    size = learning_rate * (learning_rate * product)
    if not (math.isfinite(size) and learning_rate >= 0.0 and bound > 0.0):
        constraints.require_range(
            "learning_rate", learning_rate, constraints.NOT_NEGATIVE_SCALAR
        )
        constraints.require_range("bound", bound, constraints.POSITIVE_SCALAR)
        raise errors.NotFiniteError(_NOT_FINITE.format(product))
    longest, scale = math.sqrt(bound), 1.0
    if lengthen and product > 0.0:
        scale = max(1.0, math.sqrt(longest / math.sqrt(product)))
    if size > 0.0:
        scale = min(scale, longest / math.sqrt(size))
    status = Status.NOT_POSITIVE if size < 0.0 else Status(0)
    return TrustRegion(
        np.asarray(scale), np.asarray(size), np.asarray(int(status), np.int32)
    )
