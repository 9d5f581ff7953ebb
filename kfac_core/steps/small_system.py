"""Minimizers of quadratic functions of a few variables, for any symmetric matrix.

A step before that is zero, or parallel to the new direction, makes the system of
K-FAC's momentum singular, and a Hessian in the place of F makes it indefinite.  The
system is therefore factorized as ``L diag(pivots) L^T``, and rows without a positive pivot
are left out.  Nothing branches on a value.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns

PIVOT_TOLERANCE = 64.0
"""In units of roundoff, the least pivot relative to its diagonal entry.

Inner products of the same numbers in another order differ by a few units; a pivot of
this size is therefore known to about one part in ten.
"""


def guarded_minimizer(
    matrix: Array, slope: dict[int, Array], /, *, xp: Namespace
) -> tuple[dict[int, Array], Array]:
    """Return where ``slope . c + 1/2 c . matrix c`` is least, over some of the c_i.

    Parameters
    ----------
    matrix : array, shape (k, k)
        Symmetric and finite; indefinite and singular matrices are allowed.
    slope : dict of int to 0-d array
        The slopes of the c_i that are free, finite, the more important ones first; the
        others are not touched.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    minimizer : dict of int to 0-d array
        The c_i, zero by default.
    left_out : array of bool, 0-d
        Whether a c_i was left out along which the function is not flat.
    """
    indices = list(slope)
    limits = xp.finfo(matrix.dtype)
    tolerance, largest = PIVOT_TOLERANCE * float(limits.eps), float(limits.max) / 4.0
    zero = xp.zeros_like(matrix[0, 0])
    one = xp.ones_like(zero)
    left_out = xp.zeros((), dtype=xp.bool, device=ns.device_of(matrix))
    L: dict[tuple[int, int], Array] = {}
    pivots: dict[int, Array] = {}
    independent: dict[int, Array] = {}
    halfway: dict[int, Array] = {}
    # LDL^T by hand: the system has two or three unknowns, and a library would raise for
    # a singular one instead of leaving a direction out.
    for n, i in enumerate(indices):
        pivot, residual = matrix[i, i], slope[i]
        for m, j in enumerate(indices[:n]):
            entry = matrix[i, j]
            for h in indices[:m]:
                entry = entry - L[i, h] * L[j, h] * pivots[h]
            L[i, j] = xp.where(independent[j], entry / pivots[j], zero)
            pivot = pivot - L[i, j] * L[i, j] * pivots[j]
            residual = residual - L[i, j] * halfway[j]
        # A small pivot is roundoff: the direction depends on those before it.
        positive = pivot > tolerance * matrix[i, i]
        # The largest residual for which `residual / pivot` does not overflow.
        room = largest * xp.where(positive & (pivot < 1.0), pivot, one)
        independent[i] = positive & (xp.abs(residual) <= room)
        pivots[i] = xp.where(independent[i], pivot, one)
        halfway[i] = xp.where(independent[i], residual, zero)
        # A zero direction, such as the first step's previous one, is no failure.
        flat = (matrix[i, i] == 0) & (slope[i] == 0)
        left_out = left_out | ~(independent[i] | flat)
    solution: dict[int, Array] = {}
    for n, i in reversed(list(enumerate(indices))):
        value = -halfway[i] / pivots[i]
        for j in indices[n + 1 :]:
            value = value - L[j, i] * solution[j]
        solution[i] = xp.where(independent[i], value, zero)
    return solution, left_out
