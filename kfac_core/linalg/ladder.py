"""Factorizing a damped symmetric matrix, by a ladder that is written down.

Conventions.  ``M = A + shift I`` with A positive semidefinite up to rounding and
``shift >= 0``.  The rungs, each accepted only with a residual certificate below
`RESIDUAL_LIMIT`:

1. ``working``: in the dtype that was asked for;
2. ``float64``: the same in 64 bits, where the device has them, and cast back;
3. ``eigendecomposition``: in the widest dtype, negative eigenvalues of A set to zero
   before the shift is added, and the sum of their magnitudes reported as the clipped
   mass.

With ``check="raise"`` the ladder is climbed until a rung holds, and a matrix for which
none does raises `FactorizationError`.  With ``check="status"`` only the first rung is
tried, no value is looked at, and the flags come back as an array; a matrix that is not
finite is replaced by the identity before it reaches any factorization, since some
libraries hang on NaN, and the result is then NaN throughout.
"""

from __future__ import annotations

from typing import TypeVar

import array_api_compat

from kfac_core.arrays import cast, device_of, status_unless
from kfac_core.backend import Array, Namespace
from kfac_core.errors import DampingError, FactorizationError, NotFiniteError
from kfac_core.linalg.certificate import (
    RESIDUAL_LIMIT,
    basis_residual,
    cholesky_residual,
    inverse_residual,
)
from kfac_core.linalg.cholesky import (
    damped_cholesky,
    inverse_from_cholesky,
    is_positive_factor,
)
from kfac_core.linalg.eigen import eigh
from kfac_core.linalg.factorizations import Basis, Inverse, Positive, Rung
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.status import Check, Status
from kfac_core.structure import map_structure

__all__ = [
    "cholesky_factor",
    "damped_inverse",
    "symmetric_basis",
]

T = TypeVar("T")


def cholesky_factor(
    matrix: SymmetricMatrix,
    shift: Array,
    /,
    *,
    check: Check,
    name: str,
    xp: Namespace,
) -> Positive:
    """Factorize ``A + shift I`` by Cholesky, with a certificate.

    Parameters
    ----------
    matrix : SymmetricMatrix
        A.
    shift : array, shape (...)
        Of the dtype of A.
    check : {"raise", "status"}
        Whether to climb the ladder and raise, or to report.
    name : str
        What a message should call the matrix.
    xp : namespace
        Of the arrays.

    Returns
    -------
    Positive
        In the dtype of A, on whichever rung it was made.

    Raises
    ------
    NotFiniteError, DampingError
        Where A or the shift is unfit (``check="raise"``).
    FactorizationError
        Where no rung holds (``check="raise"``).

    Notes
    -----
    ``n^3 / 3`` flops.  ``check="raise"`` waits for the device a few times;
    ``check="status"`` never does.
    """
    unfit = _unfit(matrix, shift, xp)
    if check == "status":
        return _attempt_factor(matrix, shift, unfit, xp=xp)
    _require_fit(unfit, name)
    made = _attempt_factor(matrix, shift, None, xp=xp)
    if _holds(made, xp):
        return made
    wide = _widened(matrix, xp)
    if wide is not None:
        wide_shift = cast(xp, shift, xp.float64)
        made = _attempt_factor(wide, wide_shift, None, rung="float64", xp=xp)
        if _holds(made, xp):
            return _narrowed(made, matrix, xp)
    factor, _ = _by_eigendecomposition(matrix, shift, name=name, xp=xp)
    return factor


def damped_inverse(
    matrix: SymmetricMatrix,
    shift: Array,
    factor: Positive,
    /,
    *,
    check: Check,
    name: str,
    xp: Namespace,
) -> Inverse:
    """Invert ``A + shift I``, with a certificate.

    Parameters
    ----------
    matrix, shift, check, name, xp
        As for `cholesky_factor`.
    factor : Positive
        What `cholesky_factor` made of the same; where it holds on the first rung, so
        does the inverse, unless its own certificate says otherwise.

    Returns
    -------
    Inverse
        In the dtype of A, on whichever rung it was made.

    Raises
    ------
    FactorizationError
        Where no rung holds (``check="raise"``).

    Notes
    -----
    ``2 n^3 / 3`` flops beyond the factor's.
    """
    if check == "status":
        return _attempt_inverse(matrix, shift, factor, xp=xp)
    if factor.rung == "working":
        made = _attempt_inverse(matrix, shift, factor, xp=xp)
        if _holds(made, xp):
            return made
    wide = _widened(matrix, xp)
    if wide is not None:
        wide_shift = cast(xp, shift, xp.float64)
        lower = _attempt_factor(wide, wide_shift, None, rung="float64", xp=xp)
        if _holds(lower, xp):
            made = _attempt_inverse(wide, wide_shift, lower, xp=xp)
            if _holds(made, xp):
                return _narrowed(made, matrix, xp)
    _, inverse = _by_eigendecomposition(matrix, shift, name=name, xp=xp)
    return inverse


def symmetric_basis(
    matrix: SymmetricMatrix, /, *, check: Check, name: str, xp: Namespace
) -> Basis:
    """Return the eigendecomposition of a positive-semidefinite matrix, certified.

    Parameters
    ----------
    matrix : SymmetricMatrix
        A.
    check : {"raise", "status"}
        As for `cholesky_factor`; the ladder here is working precision, then float64.
    name : str
        What a message should call the matrix.
    xp : namespace
        Of the arrays.

    Returns
    -------
    Basis
        In the dtype of A.

    Raises
    ------
    NotFiniteError, FactorizationError
        As `cholesky_factor`.

    Notes
    -----
    About ``9 n^3`` flops.  In float32 the small eigenvalues carry an absolute error of
    about ``1e-7 |A|``, so that a damped inverse from them is 10 to 60 times less
    accurate than one by Cholesky.
    """
    unfit = _unfit(matrix, None, xp)
    if check == "status":
        return _attempt_basis(matrix, unfit, xp=xp)
    _require_fit(unfit, name)
    made = _attempt_basis(matrix, None, xp=xp)
    if _holds(made, xp):
        return made
    wide = _widened(matrix, xp)
    if wide is not None:
        made = _attempt_basis(wide, None, rung="float64", xp=xp)
        if _holds(made, xp):
            return _narrowed(made, matrix, xp)
    raise FactorizationError(
        f"the eigendecomposition of a {matrix.size} x {matrix.size} matrix has residual "
        f"{float(xp.max(made.residual)):.1e}, above {RESIDUAL_LIMIT}, in every precision "
        "there is here. Look at the statistics for entries of wildly different size.",
        factor=name,
    )


def _attempt_factor(
    matrix: SymmetricMatrix,
    shift: Array,
    unfit: Array | None,
    /,
    *,
    xp: Namespace,
    rung: Rung = "working",
) -> Positive:
    """Factorize on one rung; where `unfit` is nonzero the result is NaN."""
    fit, fit_shift = _fit(matrix, shift, unfit, xp)
    lower = damped_cholesky(fit, fit_shift, xp=xp)
    positive = is_positive_factor(lower, xp=xp)
    residual = cholesky_residual(fit, fit_shift, _usable(lower, positive, xp), xp=xp)
    status = _judged(positive, residual, xp)
    if unfit is not None:
        status = status | unfit
    good = (status & ~int(Status.INACCURATE)) == 0
    lower = xp.where(good[..., None, None], lower, xp.full_like(lower, xp.nan))
    return Positive(lower, status, residual, xp.zeros_like(residual), rung)


def _attempt_inverse(
    matrix: SymmetricMatrix, shift: Array, factor: Positive, /, *, xp: Namespace
) -> Inverse:
    """Invert from a factor of the same rung; where that failed the result is NaN."""
    good = (factor.status & ~int(Status.INACCURATE)) == 0
    fit, fit_shift = _fit(matrix, shift, status_unless(xp, good, 1), xp)
    # A factor that failed is replaced before it is divided by, and marked after.
    X = inverse_from_cholesky(_usable(factor.lower, good, xp), xp=xp)
    residual = inverse_residual(fit, fit_shift, X, xp=xp)
    accurate = (residual <= RESIDUAL_LIMIT) | xp.logical_not(good)
    status = factor.status | status_unless(xp, accurate, Status.INACCURATE)
    marked = xp.where(good[..., None, None], X.array, xp.full_like(X.array, xp.nan))
    inverse = SymmetricMatrix(marked, X.whole)
    return Inverse(inverse, status, residual, xp.zeros_like(residual), factor.rung)


def _fit(
    matrix: SymmetricMatrix, shift: Array, unfit: Array | None, xp: Namespace
) -> tuple[SymmetricMatrix, Array]:
    """Return the problem, with ``2 I`` in the place of what may not be factorized."""
    if unfit is None:
        return matrix, shift
    safe_shift = xp.where(unfit == 0, shift, xp.ones_like(shift))
    return _or_identity(matrix, unfit, xp), safe_shift


def _usable(lower: Array, good: Array, xp: Namespace) -> Array:
    return xp.where(good[..., None, None], lower, _identity_like(lower, xp))


def _judged(positive: Array, residual: Array, xp: Namespace) -> Array:
    """Return the flags of a factorization, from its two tests."""
    accurate = (residual <= RESIDUAL_LIMIT) | xp.logical_not(positive)
    status = status_unless(xp, positive, Status.NOT_POSITIVE)
    return status | status_unless(xp, accurate, Status.INACCURATE)


def _attempt_basis(
    matrix: SymmetricMatrix,
    unfit: Array | None,
    /,
    *,
    xp: Namespace,
    rung: Rung = "working",
) -> Basis:
    fit = matrix if unfit is None else _or_identity(matrix, unfit, xp)
    w, Q = eigh(fit, xp=xp)
    residual = basis_residual(fit, w, Q, xp=xp)
    status = status_unless(xp, residual <= RESIDUAL_LIMIT, Status.INACCURATE)
    zeros = xp.zeros_like(w)
    clipped = xp.sum(xp.where(w < 0, -w, zeros), axis=-1)
    w = xp.where(w < 0, zeros, w)
    if unfit is not None:
        status = status | unfit
        good = unfit == 0
        w = xp.where(good[..., None], w, xp.full_like(w, xp.nan))
        Q = xp.where(good[..., None, None], Q, xp.full_like(Q, xp.nan))
    return Basis(w, Q, status, residual, clipped, rung)


def _by_eigendecomposition(
    matrix: SymmetricMatrix, shift: Array, /, *, name: str, xp: Namespace
) -> tuple[Positive, Inverse]:
    """Factorize and invert on the last rung, in the widest dtype, or raise."""
    wide = _widened(matrix, xp) or matrix
    shift = cast(xp, shift, wide.array.dtype)
    basis = _attempt_basis(wide, None, rung="eigendecomposition", xp=xp)
    w, Q = basis.eigenvalues, basis.eigenvectors
    damped = w + shift[..., None]
    unit = xp.where(damped > 0, damped, xp.ones_like(damped))
    X = _from_basis(Q, 1.0 / unit, xp)
    residual = inverse_residual(_from_basis(Q, w, xp), shift, X, xp=xp)
    smallest, worst = float(xp.min(damped)), float(xp.max(residual))
    if not (smallest > 0 and worst <= RESIDUAL_LIMIT):
        raise FactorizationError(
            f"a {matrix.size} x {matrix.size} matrix is not positive definite even after "
            f"its negative eigenvalues (sum {float(xp.max(basis.clipped)):.1e}) were set "
            f"to zero: with damping {float(xp.max(shift)):.1e} its eigenvalues run from "
            f"{smallest:.1e} to {float(xp.max(damped)):.1e} and the inverse has residual "
            f"{worst:.1e} (limit {RESIDUAL_LIMIT}). Increase `damping`.",
            factor=name,
        )
    # (A + shift I) = B^T B with B = diag(sqrt) Q^T, and B = Q' R gives L = R^T.
    R = xp.linalg.qr(xp.sqrt(damped)[..., :, None] * xp.matrix_transpose(Q)).R
    ones = xp.ones_like(damped)
    signs = xp.where(xp.linalg.diagonal(R) < 0, -ones, ones)
    lower = xp.matrix_transpose(R * signs[..., :, None])
    certificate = (
        xp.zeros_like(basis.status),
        residual,
        basis.clipped,
        basis.rung,
    )
    factor, inverse = Positive(lower, *certificate), Inverse(X, *certificate)
    return _narrowed(factor, matrix, xp), _narrowed(inverse, matrix, xp)


def _from_basis(Q: Array, eigenvalues: Array, xp: Namespace) -> SymmetricMatrix:
    product = xp.matmul(Q * eigenvalues[..., None, :], xp.matrix_transpose(Q))
    return SymmetricMatrix(0.5 * (product + xp.matrix_transpose(product)), whole=True)


def _unfit(matrix: SymmetricMatrix, shift: Array | None, xp: Namespace) -> Array:
    """Return the flags of what may not reach a factorization, shape (...)."""
    finite = xp.all(xp.isfinite(matrix.array), axis=(-2, -1))
    flags = status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
    if shift is not None:
        good = xp.isfinite(shift) & (shift >= 0)
        flags = flags | status_unless(xp, good, Status.BAD_DAMPING)
    return flags


def _require_fit(unfit: Array, name: str) -> None:
    xp = array_api_compat.array_namespace(unfit)
    flags = Status.OK
    for flag in (Status.MATRIX_NOT_FINITE, Status.BAD_DAMPING):
        if bool(xp.any((unfit & int(flag)) != 0)):
            flags |= flag
    if Status.MATRIX_NOT_FINITE in flags:
        raise NotFiniteError(
            f"{name}: the matrix to be factorized holds NaN or infinity. Its statistics "
            "were not finite, or their sums overflowed; reset them, or keep them in "
            "float64."
        )
    if Status.BAD_DAMPING in flags:
        raise DampingError(
            f"{name}: the damping of this factor is negative or not finite. Expected a "
            "finite number >= 0."
        )


def _holds(made: Positive | Inverse | Basis, xp: Namespace) -> bool:
    return not bool(xp.any(made.status != 0))


def _or_identity(
    matrix: SymmetricMatrix, unfit: Array, xp: Namespace
) -> SymmetricMatrix:
    good = (unfit == 0)[..., None, None]
    eye = _identity_like(matrix.array, xp)
    return SymmetricMatrix(xp.where(good, matrix.array, eye), matrix.whole)


def _identity_like(array: Array, xp: Namespace) -> Array:
    return xp.eye(array.shape[-1], dtype=array.dtype, device=device_of(array))


def _widened(matrix: SymmetricMatrix, xp: Namespace) -> SymmetricMatrix | None:
    """Return the matrix in float64; None where it is, or where there is no such dtype."""
    device = device_of(matrix.array)
    dtypes = xp.__array_namespace_info__().dtypes(device=device, kind="real floating")
    if "float64" not in dtypes or matrix.array.dtype == xp.float64:
        return None
    return SymmetricMatrix(cast(xp, matrix.array, xp.float64), matrix.whole)


def _narrowed(made: T, matrix: SymmetricMatrix, xp: Namespace) -> T:
    """Cast the floating arrays of a factorization back to the matrix's dtype."""
    dtype = matrix.array.dtype
    return map_structure(
        lambda x: cast(xp, x, dtype) if xp.isdtype(x.dtype, "real floating") else x,
        made,
    )
