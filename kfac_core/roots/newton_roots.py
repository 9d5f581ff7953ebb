"""Inverse p-th roots by the coupled Newton iteration, which has matrix products only.

Conventions: those of `kfac_core.roots.roots`.  On a CPU an eigendecomposition is
cheaper; on accelerators, which do products far better than anything else, the iteration
can be.

References
----------
Guo and Higham (2006), "A Schur-Newton method for the matrix p-th root and its inverse";
Iannazzo (2006), "On the Newton method for the matrix p-th root": the coupled form, in
which rounding errors are not amplified.
"""

from __future__ import annotations

from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar, cast, device_of
from kfac_core.array.status import Check
from kfac_core.errors import ConventionError
from kfac_core.linalg.cholesky import add_to_diagonal
from kfac_core.linalg.factorizations import Fallback
from kfac_core.linalg.fitness import fit_problem, narrowed, require_fit, widened
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.roots.certified_root import (
    InverseRoot,
    judged_root,
    root_holds,
    root_problem,
)
from kfac_core.roots.roots import clipped_root

__all__ = ["newton_inverse_root"]

_GROWTH = 1.2
"""By how much the error of the iteration may grow in one step; exactly it never does."""


def newton_inverse_root(
    matrix: SymmetricMatrix | Array,
    /,
    *,
    damping: Scalar,
    degree: int,
    max_iterations: int,
    check: Check = "raise",
    name: str = "matrix",
) -> InverseRoot:
    """Return ``(A + lam I)^(-1/p)`` by the coupled Newton iteration: products only.

    With ``z = (p + 1) / (2 |M|_F)``, ``X = z^(1/p) I`` and ``Y = z M``,

        T = (1 + 1/p) I - Y / p,     X <- X T,     Y <- T^p Y,

    until ``|Y - I|_F`` is at roundoff.  ``Y = M X^p`` in exact arithmetic, its
    eigenvalues start in ``(0, (p + 1) / 2]``, and ``|Y - I|_F`` never grows; a step by
    which it grows by a fifth is rounding, is not taken, and ends the iteration.

    Parameters
    ----------
    matrix, damping, degree, check, name
        As for `kfac_core.roots.roots.inverse_root`.
    max_iterations : int
        At least 1.  With ``check="raise"`` the iteration stops when it has converged;
        with ``check="status"`` all of them are computed and those beyond are masked.
        With a condition number k of M, ``log(k) + 7`` are needed for p = 4 and
        ``1.4 log(k) + 7`` for p = 1: 30 serve a condition of 1e7.

    Returns
    -------
    InverseRoot
        In the dtype of A, or float32 where that is narrower.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, ConventionError
        For arguments that do not fit.
    NotFiniteError, DampingError
        For values that do not fit (``check="raise"``).
    FactorizationError
        Where no rung holds (``check="raise"``).

    Notes
    -----
    ``2 (2 + log2 p) n^3`` flops a step for p a power of two.  In float32 the residual is
    about ``1e-7`` times the condition number of M.  A matrix product of reduced precision
    (TF32, with a unit of 5e-4) puts that in the place of ``1e-7``: switch it off.
    """
    A, shift, unfit, xp = root_problem(matrix, damping, degree, name)
    if isinstance(max_iterations, bool) or max_iterations < 1:
        raise ConventionError(
            f"Expected `max_iterations` to be at least 1, got {max_iterations!r}."
        )
    options: dict[str, Any] = {"max_iterations": max_iterations, "xp": xp}
    if check == "status":
        return _newton(A, shift, unfit, degree, stops=False, **options)
    require_fit(unfit, name, xp=xp)
    options["stops"] = True
    made = _newton(A, shift, unfit, degree, **options)
    if root_holds(made, xp):
        return made
    wide = widened(A, xp=xp)
    if wide is not None:
        wide_shift = cast(xp, shift, xp.float64)
        made = _newton(
            wide, wide_shift, unfit, degree, fallback=Fallback.FLOAT64, **options
        )
        if root_holds(made, xp):
            return narrowed(made, A, xp=xp)
    return clipped_root(A, shift, degree, name=name, xp=xp)


def _newton(
    matrix: SymmetricMatrix,
    shift: Array,
    unfit: Array,
    degree: int,
    /,
    *,
    max_iterations: int,
    stops: bool,
    fallback: Fallback = Fallback.WORKING,
    xp: Namespace,
) -> InverseRoot:
    """Return the root on one rung; look at a value only where it may stop."""
    fit, fit_shift = fit_problem(matrix, shift, unfit, xp=xp)
    X, Y = _start(add_to_diagonal(fit.full(), fit_shift, xp=xp), degree, xp)
    eye = xp.eye(fit.size, dtype=X.dtype, device=device_of(X))
    # The error is squared in each of the last steps: from here one more is enough.
    near = float(xp.finfo(X.dtype).eps) ** 0.5
    error = _error(Y, eye, xp)
    active = error > 0
    steps = xp.zeros_like(unfit)
    for _ in range(max_iterations):
        T = (1.0 + 1.0 / degree) * eye - Y / degree
        next_Y = xp.matmul(_matrix_power(T, degree, xp), Y)
        next_Y = 0.5 * (next_Y + xp.matrix_transpose(next_Y))
        next_error = _error(next_Y, eye, xp)
        # A comparison with NaN is false: a step that is not finite is not taken.
        active = active & (next_error <= _GROWTH * error)
        taken = active[..., None, None]
        X = xp.where(taken, xp.matmul(X, T), X)
        Y = xp.where(taken, next_Y, Y)
        steps = steps + xp.astype(active, xp.int32)
        done = error <= near
        error = xp.where(active, next_error, error)
        active = active & xp.logical_not(done)
        if stops and not bool(xp.any(active)):
            break
    return judged_root(
        fit, fit_shift, X, unfit, degree=degree, steps=steps, fallback=fallback, xp=xp
    )


def _start(M: Array, degree: int, xp: Namespace) -> tuple[Array, Array]:
    """Return ``z^(1/p) I`` and ``z M``."""
    # Divided by its largest entry first, the norm neither over- nor underflows.
    largest = xp.max(xp.abs(M), axis=(-2, -1))
    unit = xp.where(largest > 0, largest, xp.ones_like(largest))
    scaled = M / unit[..., None, None]
    norm = xp.linalg.vector_norm(scaled, axis=(-2, -1))
    z = (degree + 1) / (2.0 * xp.where(norm > 0, norm, xp.ones_like(norm)))
    eye = xp.eye(M.shape[-1], dtype=M.dtype, device=device_of(M))
    root = (z / unit) ** (1.0 / degree)
    return root[..., None, None] * eye, z[..., None, None] * scaled


def _error(Y: Array, eye: Array, xp: Namespace) -> Array:
    """Return ``|Y - I|_F / sqrt(n)``, shape (...)."""
    return xp.linalg.vector_norm(Y - eye, axis=(-2, -1)) / Y.shape[-1] ** 0.5


def _matrix_power(T: Array, exponent: int, xp: Namespace) -> Array:
    """Return ``T^exponent`` by squaring, for an exponent of at least 1."""
    if exponent == 1:
        return T
    half = _matrix_power(T, exponent // 2, xp)
    square = xp.matmul(half, half)
    return xp.matmul(square, T) if exponent % 2 else square
