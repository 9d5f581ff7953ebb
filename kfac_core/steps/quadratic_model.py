"""The quadratic model of the objective, on the span of a few directions.

For a change ``delta = sum_i c_i d_i`` of the parameters the model is

    M(delta) - M(0) = grad . delta + 1/2 delta . (F + lam I) delta
                    = slope . c    + 1/2 c . (curvature + lam gram) c,

    slope_i = grad . d_i,    curvature_ij = d_i . F d_j,    gram_ij = d_i . d_j.

F is the exact curvature of the batch, as `kfac_core.steps.curvature_of_products` or
`curvature_of_outputs` takes it from the caller; lam is the damping.  In K-FAC the
directions are ``D = -P grad``, with P the inverse of the approximate damped curvature,
and, after the first step, the step before, ``delta_0``.  The coefficients are the
paper's: alpha, the learning rate, and mu, the momentum.

An l2 term of the objective belongs to the gradient and to F; see
`kfac_core.steps.add_l2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import array_api_compat

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Scalar, Status
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.layers.feeding import detached_array
from kfac_core.steps.small_system import guarded_minimizer
from kfac_core.steps.vectors import Vector, dots, entered, scalar_of, widest


@structure()
class Minimum:
    """The minimum of a quadratic model.

    Attributes
    ----------
    coefficients : array, shape (k,)
        The c_i: alpha and mu, in the order of the directions.
    status : array, 0-d int32
        ``Status.NOT_POSITIVE`` where a direction was left out that the model slopes
        along, ``Status.MATRIX_NOT_FINITE`` where the model holds NaN or infinity (the
        coefficients are zero then); else 0.
    """

    coefficients: Array
    status: Array


@structure()
class QuadraticModel:
    """``M(delta) - M(0) = slope . c + 1/2 c . (curvature + lam gram) c``.

    The quadratic model of the objective for ``delta = sum_i c_i d_i``.

    Attributes
    ----------
    slope : array, shape (k,)
        ``grad . d_i``.
    curvature : array, shape (k, k)
        ``d_i . F d_j``, undamped.
    gram : array, shape (k, k)
        ``d_i . d_j``.
    damping : array, 0-d
        Damping ``lam``.
    """

    slope: Array
    curvature: Array
    gram: Array
    damping: Array

    def damped_curvature(self) -> Array:
        """Return ``curvature + lam gram``, shape (k, k)."""
        return self.curvature + self.damping * self.gram

    def change(
        self, coefficients: Sequence[Scalar] | Array, /, *, damped: bool
    ) -> Array:
        """Return ``M(delta) - M(0)``, the predicted change of the objective.

        Parameters
        ----------
        coefficients : array of shape (k,), or sequence of float or 0-d array
            Coefficients c_i.
        damped : bool
            Whether ``lam/2 |delta|^2`` belongs to the model.  The paper's reduction
            ratio has it (section 6.5); TensorFlow's K-FAC and kfac-jax leave it out
            by default.

        Returns
        -------
        array, 0-d
            At the `minimize` of a positive definite model, with the damping, it is half
            the slope, ``1/2 grad . delta``.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For coefficients that do not fit.
        """
        xp = array_api_compat.array_namespace(self.slope)
        c = xp.stack(self._numbers(coefficients, "coefficients"))
        matrix = self.damped_curvature() if damped else self.curvature
        # A sum and not a matrix product, whose inputs accelerators round to TF32 or
        # bfloat16.
        return xp.sum(c * self.slope) + 0.5 * xp.sum(c[:, None] * matrix * c)

    def minimize(
        self, *, fixed: Sequence[Scalar | None] | None = None, check: Check = "raise"
    ) -> Minimum:
        """Return the coefficients that minimize the damped model.

        The paper's ``[alpha, mu] = -(curvature + lam gram)^-1 slope``, guarded: in their
        order, each direction takes part while something positive is left of its
        curvature beside those before it, 64 units of roundoff of it at least; otherwise
        its coefficient is zero.  So a step before that is zero, or parallel to D, or
        along which the model has no minimum, leaves ``alpha = -slope_0 / curvature_00``
        and no momentum.

        Parameters
        ----------
        fixed : sequence of float, 0-d array or None, optional
            For each direction its coefficient, or None where that is free; all are free
            where left out.  ``(None, 0.9)`` is the best learning rate for that momentum.
        check : {"raise", "status"}
            Whether a model that is not finite raises, which synchronizes with the device,
            or is left in the result's status.

        Returns
        -------
        Minimum
            Coefficients that are always finite.

        Raises
        ------
        NotFiniteError
            If the model holds NaN or infinity (``check="raise"``).
        ConventionError, ShapeError
            For an unknown `check`, or another number of `fixed`.

        References
        ----------
        Martens and Grosse (2015), arXiv:1503.05671, sections 6.4 and 7.
        """
        constraints.require_one_of("check", check, get_args(Check))
        xp = array_api_compat.array_namespace(self.slope)
        k = self.slope.shape[0]
        matrix = self.damped_curvature()
        fixed_numbers = self._numbers((None,) * k if fixed is None else fixed, "fixed")
        finite = xp.all(xp.isfinite(self.slope)) & xp.all(xp.isfinite(matrix))
        for value in fixed_numbers:
            finite = finite if value is None else finite & xp.isfinite(value)
        if check == "raise" and not bool(finite):
            raise errors.NotFiniteError(
                f"The quadratic model is not finite: slope {self.slope}, damped curvature "
                f"{matrix}. Look for NaN or infinity in the gradient, the directions and "
                "their products; a preconditioner with a larger damping may be needed."
            )
        # Replace NaN first, since NumPy warns about it.
        matrix = xp.where(finite, matrix, xp.zeros_like(matrix))
        zero = xp.zeros_like(matrix[0, 0])
        fixed_numbers = [
            x if x is None else xp.where(finite, x, zero) for x in fixed_numbers
        ]
        free = [i for i in range(k) if fixed_numbers[i] is None]
        slope = {i: xp.where(finite, self.slope[i], zero) for i in free}
        for i in free:
            for j in set(range(k)) - set(free):
                # A fixed coefficient moves the slope along the free directions.
                slope[i] = slope[i] + matrix[i, j] * fixed_numbers[j]

        coefficients, left_out = guarded_minimizer(matrix, slope, xp=xp)
        coefficients = xp.stack(
            [
                coefficients[i] if i in coefficients else fixed_numbers[i]
                for i in range(k)
            ]
        )
        usable = finite & xp.all(xp.isfinite(coefficients))
        return Minimum(
            xp.where(usable, coefficients, xp.zeros_like(coefficients)),
            ns.status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
            | ns.status_unless(xp, ~finite | (usable & ~left_out), Status.NOT_POSITIVE),
        )

    def _numbers(
        self, values: Sequence[Scalar | None] | Array, name: str
    ) -> list[Array | None]:
        """Return k scalars as 0-d arrays in the model's dtype, None where they are."""
        xp = array_api_compat.array_namespace(self.slope)
        k = self.slope.shape[0]
        if isinstance(values, Sequence):
            shape: tuple[int, ...] = (len(values),)
        else:
            shape = tuple(getattr(values, "shape", ()))
        counts = {"directions": (k,), name: shape[:1]}
        constraints.require_same("number of directions", counts)
        return [
            None
            if values[i] is None and name == "fixed"
            else ns.full_of(
                xp,
                scalar_of(xp, values[i], self.slope.dtype, f"{name}[{i}]"),
                self.slope,
            )
            for i in range(k)
        ]


def quadratic_model(
    gradient: Vector,
    directions: Sequence[Vector],
    /,
    *,
    curvature: Array,
    damping: Scalar,
) -> QuadraticModel:
    r"""Restrict the quadratic model to the span of some directions.

    For a change :math:`\delta = \sum_i c_i d_i` of the parameters,

    .. math:: M(\delta) - M(0) = \nabla h \cdot \delta
        + \tfrac12 \, \delta \cdot (F + \lambda I) \, \delta .

    Parameters
    ----------
    gradient : mapping of str to mapping of str to array
        Gradient of the objective that is averaged over the batch.
    directions : sequence of mapping of str to mapping of str to array
        The d_i, usually ``D = -P grad`` and the step before.
    curvature : array, shape (k, k)
        ``d_i . F d_j`` for the exact F of the batch, without damping.  Of a matrix
        that is not symmetric, the symmetric part counts.
    damping : float or 0-d array
        Damping ``lam``, the multiple of I that is added to F; the value of an array is not
        read.

    Returns
    -------
    QuadraticModel
        Result in the widest dtype among the arrays, float32 at least.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, UnsupportedError
        For arguments that do not go together, naming the array.
    DampingError
        For a number that is negative or not finite.

    Notes
    -----
    ``k (k + 3) p`` flops for p parameters, beside what the curvature took.  Nothing
    is read back from a device.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.steps import quadratic_model
    >>> gradient = {"fc": {"weight": np.array([[1.0]])}}
    >>> direction = {"fc": {"weight": np.array([[-1.0]])}}
    >>> model = quadratic_model(
    ...     gradient, [direction], curvature=np.array([[4.0]]), damping=0.0
    ... )
    >>> model.minimize().coefficients  # The minimum of -a + 2 a^2
    array([0.25])
    """
    constraints.require_range("damping", damping, constraints.DAMPING)
    constraints.require_any("directions", directions)
    named = {f"directions[{i}]": d for i, d in enumerate(directions)}
    xp, (grad, *others) = entered(gradient=gradient, **named)
    example = next(x for block in grad.values() for x in block.values())
    ns.namespace_of(gradient=example, curvature=curvature)
    ns.require_floating(xp, curvature, "curvature")
    k = len(others)
    ns.require_matrix(curvature, (k, k), "curvature")
    dtype = ns.wide_dtype(
        xp, xp.result_type(widest(grad, *others, xp=xp), curvature.dtype)
    )

    below = [(i, j) for i in range(k) for j in range(i + 1)]
    pairs = [(grad, d) for d in others] + [(others[i], others[j]) for i, j in below]
    sums = dots(pairs, dtype=dtype, xp=xp)
    slope, entries = sums[:k], {at: sums[k + n] for n, at in enumerate(below)}
    # Only one triangle of the symmetric matrix was computed.
    rows = [[entries[max(i, j), min(i, j)] for j in range(k)] for i in range(k)]
    C = ns.cast(xp, detached_array(curvature), dtype)
    return QuadraticModel(
        slope=slope,
        curvature=0.5 * (C + xp.matrix_transpose(C)),
        gram=xp.stack([xp.stack(row) for row in rows]),
        damping=ns.full_of(xp, scalar_of(xp, damping, dtype, "damping"), slope),
    )
