"""A damped inverse from that of a moment ago: guarded Newton-Schulz steps.

Conventions.  ``M = A + lam I`` is symmetric positive definite, ``X_0`` the inverse of
an earlier M, and ``R = I - M X``.  One step is ``X <- X + X R = X (2 I - M X)``, by which
``R <- R^2``: from ``|R_0| < 1`` in any consistent matrix norm the steps converge, from
``|R_0| > 1`` they need not.  The norm here is the least of the Frobenius norm and the
largest sums of rows and of columns.  Leading axes are a stack.

A step is two products, ``4 n^3`` flops, of which a Cholesky inverse is worth one quarter:
these pay where products are much cheaper than factorizations, and where the inverse is
nearly right already.

References
----------
Schulz (1933), "Iterative Berechnung der reziproken Matrix"; Pan and Schreiber (1991),
"An improved Newton iteration for the generalized inverse of a matrix", section 2.
"""

from __future__ import annotations

from typing import Any, Literal

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    Scalar,
    cast,
    device_of,
    namespace_of,
    status_unless,
)
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import structure
from kfac_core.errors import ConventionError, ShapeError
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, inverse_residual
from kfac_core.linalg.cholesky import add_to_diagonal
from kfac_core.linalg.factorizations import Inverse
from kfac_core.linalg.fitness import (
    damping_array,
    fit_problem,
    require_fit,
    symmetric_argument,
    unfit_flags,
)
from kfac_core.linalg.ladder import damped_inverse
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = ["WarmInverse", "refreshed_inverse"]


@structure(static=("method",))
class WarmInverse:
    """An inverse, and how it was come by.

    Attributes
    ----------
    inverse : Inverse
        ``(A + lam I)^-1``, with its residual and its flags.
    start : array, shape (...)
        ``|I - M X_0|``: below 1 where the steps converge.
    steps : array of int32, shape (...)
        How many steps were taken.
    method : {"newton-schulz", "cholesky"}
        What gave the inverse.
    """

    inverse: Inverse
    start: Array
    steps: Array
    method: Literal["newton-schulz", "cholesky"]


def refreshed_inverse(
    previous: SymmetricMatrix | Array,
    matrix: SymmetricMatrix | Array,
    /,
    *,
    damping: Scalar,
    max_steps: int,
    check: Check = "raise",
    name: str = "matrix",
) -> WarmInverse:
    """Return ``(A + lam I)^-1``, starting from an inverse that was right a moment ago.

    Parameters
    ----------
    previous : SymmetricMatrix, or array of shape (..., n, n)
        ``X_0``; never modified.
    matrix : SymmetricMatrix, or array of shape (..., n, n)
        A, of the same shape; never modified.
    damping : float, or array of shape () or (...)
        lam, finite and >= 0.
    max_steps : int
        At least 1.  With ``check="raise"`` the steps stop at roundoff; with
        ``check="status"`` all of them are computed and those beyond are masked.  From
        ``|R_0| = 0.5``, 5 reach roundoff in float32 and 6 in float64.
    check : {"raise", "status"}
        With ``"raise"``, where the guard ``|I - M X_0| < 1`` fails or the certificate
        does, the whole stack is inverted by Cholesky, on the ladder of
        `kfac_core.linalg.ladder`.  With ``"status"`` no value is looked at: such an
        inverse is X_0 as it was, flagged ``INACCURATE``.
    name : str
        What a message should call the matrix.

    Returns
    -------
    WarmInverse
        In the dtype of A, or float32 where that is narrower.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, ConventionError
        For arguments that do not fit.
    NotFiniteError, DampingError
        For values of A or lam that do not fit (``check="raise"``).
    FactorizationError
        Where the ladder holds on no rung either (``check="raise"``).

    Notes
    -----
    ``2 n^3 + 4 n^3`` flops a step, where a Cholesky inverse takes ``n^3``.
    """
    A, xp = symmetric_argument(matrix, name)
    X, _ = symmetric_argument(previous, "previous")
    namespace_of(previous=X.array, matrix=A.array)
    if X.array.shape != A.array.shape:
        raise ShapeError(
            f"Expected `previous` to have shape {tuple(A.array.shape)}, got "
            f"{tuple(X.array.shape)}."
        )
    if max_steps < 1:
        raise ConventionError(
            f"Expected `max_steps` to be at least 1, got {max_steps}."
        )
    shift = damping_array(damping, A, xp=xp) + xp.zeros_like(A.array[..., 0, 0])
    unfit = unfit_flags(A, shift, xp=xp)
    X = SymmetricMatrix(cast(xp, X.array, A.array.dtype), X.whole)
    if check == "status":
        return _iterated(X, A, shift, unfit, max_steps, stops=False, xp=xp)
    require_fit(unfit, name, xp=xp)
    made = _iterated(X, A, shift, unfit, max_steps, stops=True, xp=xp)
    if not bool(xp.any(made.inverse.status != 0)):
        return made
    options: dict[str, Any] = {"check": check, "name": name, "xp": xp}
    inverse = damped_inverse(A, shift, None, **options)
    return WarmInverse(inverse, made.start, xp.zeros_like(made.steps), "cholesky")


def _iterated(
    previous: SymmetricMatrix,
    matrix: SymmetricMatrix,
    shift: Array,
    unfit: Array,
    max_steps: int,
    /,
    *,
    stops: bool,
    xp: Namespace,
) -> WarmInverse:
    """Return what the steps give; look at a value only where they may stop."""
    fit, fit_shift = fit_problem(matrix, shift, unfit, xp=xp)
    M = add_to_diagonal(fit.full(), fit_shift, xp=xp)
    eye = xp.eye(fit.size, dtype=M.dtype, device=device_of(M))
    start = previous.full()
    # Zero is no start either, and unlike infinity it can be multiplied with.
    finite = xp.all(xp.isfinite(start), axis=(-2, -1))
    X = safe = xp.where(finite[..., None, None], start, xp.zeros_like(start))
    R = eye - xp.matmul(M, X)
    first = size = _consistent_norm(R, xp)
    guarded = active = (size < 1) & (unfit == 0)
    # R is squared by a step: from here one more is enough.
    near = float(xp.finfo(M.dtype).eps) ** 0.5
    steps = xp.zeros_like(unfit)
    for _ in range(max_steps):
        if stops and not bool(xp.any(active)):
            break
        X = xp.where(active[..., None, None], X + xp.matmul(X, R), X)
        steps = steps + xp.astype(active, xp.int32)
        active = active & (size > near)
        R = eye - xp.matmul(M, X)
        size = _consistent_norm(R, xp)
    X = 0.5 * (X + xp.matrix_transpose(X))
    kept = guarded[..., None, None]
    certified = SymmetricMatrix(xp.where(kept, X, safe), whole=True)
    residual = inverse_residual(fit, fit_shift, certified, xp=xp)
    residual = xp.where(finite, residual, xp.full_like(residual, xp.inf))
    accurate = guarded & (residual <= RESIDUAL_LIMIT)
    status = unfit | status_unless(xp, accurate | (unfit != 0), Status.INACCURATE)
    clipped = xp.zeros_like(residual)
    inverse = SymmetricMatrix(xp.where(kept, X, start), whole=True)
    made = Inverse(inverse, status, residual, clipped, xp.zeros_like(status))
    return WarmInverse(made, first, steps, "newton-schulz")


def _consistent_norm(R: Array, xp: Namespace) -> Array:
    """Return an upper bound of the spectral norm, infinite where it is no number."""
    norm = xp.linalg.vector_norm(R, axis=(-2, -1))
    for axis in (-1, -2):
        sums = xp.max(xp.sum(xp.abs(R), axis=axis), axis=-1)
        norm = xp.where(sums < norm, sums, norm)
    return xp.where(xp.isfinite(norm), norm, xp.full_like(norm, xp.inf))
