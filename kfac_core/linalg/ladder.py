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

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import known_finite, plain_number
from kfac_core.array.namespaces import cast, device_of, status_unless
from kfac_core.array.status import Check, Status
from kfac_core.errors import FactorizationError
from kfac_core.linalg.certificate import (
    RESIDUAL_LIMIT,
    Probed,
    basis_residual,
    cholesky_residual,
    inverse_residual,
    probed,
)
from kfac_core.linalg.cholesky import (
    damped_cholesky,
    inverse_from_cholesky,
    is_positive_factor,
)
from kfac_core.linalg.eigen import eigh
from kfac_core.linalg.factorizations import Basis, Fallback, Inverse, Positive
from kfac_core.linalg.fitness import (
    fit_problem,
    narrowed,
    require_fit,
    unfit_flags,
    widened,
)
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = [
    "cholesky_factor",
    "damped_inverse",
    "symmetric_basis",
]


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
    if check == "status":
        return _reported_factor(matrix, shift, xp=xp)
    known = _fit_probed(matrix, shift, name, xp=xp)
    made = _tried_factor(matrix, shift, Fallback.WORKING, known=known, xp=xp)
    if made is not None:
        return made
    wide = widened(matrix, xp=xp)
    if wide is not None:
        made = _tried_factor(wide, cast(xp, shift, xp.float64), Fallback.FLOAT64, xp=xp)
        if made is not None:
            return narrowed(made, matrix, xp=xp)
    factor, _ = _by_eigendecomposition(matrix, shift, name=name, xp=xp)
    return factor


def damped_inverse(
    matrix: SymmetricMatrix,
    shift: Array,
    factor: Positive | None,
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
    factor : Positive or None
        What `cholesky_factor` made of the same, where it is kept; where it holds on the
        first rung, so does the inverse, unless its own certificate says otherwise.
        Without one a factor is made on the way, whose memory becomes the inverse's, and
        which the certificate of the inverse is one of too.

    Returns
    -------
    Inverse
        In the dtype of A, on whichever rung it was made.

    Raises
    ------
    NotFiniteError, DampingError
        Where A or the shift is unfit (``check="raise"``).
    FactorizationError
        Where no rung holds (``check="raise"``).

    Notes
    -----
    ``2 n^3 / 3`` flops beyond the factor's.
    """
    if check == "status":
        reported = factor or _reported_factor(matrix, shift, xp=xp)
        return _reported_inverse(matrix, shift, reported, xp=xp)
    if factor is None or not bool(xp.any(factor.fallback != 0)):
        known = _fit_probed(matrix, shift, name, xp=xp)
        lower = None if factor is None else factor.lower
        made = _tried_inverse(
            matrix, shift, lower, Fallback.WORKING, known=known, xp=xp
        )
        if made is not None:
            return made
    wide = widened(matrix, xp=xp)
    if wide is not None:
        wide_shift = cast(xp, shift, xp.float64)
        made = _tried_inverse(wide, wide_shift, None, Fallback.FLOAT64, xp=xp)
        if made is not None:
            return narrowed(made, matrix, xp=xp)
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
    if check == "status":
        return _reported_basis(matrix, xp=xp)
    known = _fit_probed(matrix, None, name, xp=xp)
    made = _made_basis(matrix, Fallback.WORKING, known=known, xp=xp)
    if bool(xp.all(made.status == 0)):
        return made
    wide = widened(matrix, xp=xp)
    if wide is not None:
        made = _made_basis(wide, Fallback.FLOAT64, xp=xp)
        if bool(xp.all(made.status == 0)):
            return narrowed(made, matrix, xp=xp)
    raise FactorizationError(
        f"the eigendecomposition of a {matrix.size} x {matrix.size} matrix has residual "
        f"{float(xp.max(made.residual)):.1e}, above {RESIDUAL_LIMIT}, in every precision "
        "there is here. Look at the statistics for entries of wildly different size.",
        factor=name,
    )


def _fit_probed(
    matrix: SymmetricMatrix, shift: Array | None, name: str, /, *, xp: Namespace
) -> Probed:
    """Return ``M z`` for the certificates; raise for a problem that is unfit.

    The one guard before any factorization.  The image is finite only where all of M
    is, so that a matrix is read once for both; only one that is not, or whose image
    overflows, is looked at number by number.
    """
    known = probed(matrix, shift, xp=xp)
    # What the host does not know yet it waits for once.
    good = known_finite(known.image, xp=xp) or xp.all(xp.isfinite(known.image))
    if shift is not None:
        number = plain_number(shift, xp=xp)
        good = (xp.all(shift >= 0) if number is None else number >= 0) & good
    if not bool(good):
        require_fit(unfit_flags(matrix, shift, xp=xp), name, xp=xp)
    return known


def _tried_factor(
    matrix: SymmetricMatrix,
    shift: Array,
    fallback: Fallback,
    /,
    *,
    known: Probed | None = None,
    xp: Namespace,
) -> Positive | None:
    """Factorize a fit problem on one rung; None where that does not hold."""
    lower = damped_cholesky(matrix, shift, xp=xp)
    residual = cholesky_residual(matrix, shift, lower, known=known, xp=xp)
    # What is not finite in L is not in the residual either.
    if not bool(_has_positive_diagonal(lower, xp) & _holds(residual, xp)):
        return None
    return Positive(
        lower,
        _flags(residual, 0, xp),
        residual,
        xp.zeros_like(residual),
        _flags(residual, fallback, xp),
    )


def _tried_inverse(
    matrix: SymmetricMatrix,
    shift: Array,
    lower: Array | None,
    fallback: Fallback,
    /,
    *,
    known: Probed | None = None,
    xp: Namespace,
) -> Inverse | None:
    """Invert a fit problem on one rung; None where that does not hold.

    Where a factor of it is given, that is not written to.
    """
    own = lower is None
    if lower is None:
        lower = damped_cholesky(matrix, shift, xp=xp)
        if not bool(_has_positive_diagonal(lower, xp)):
            return None
    X = inverse_from_cholesky(lower, overwrite=own, xp=xp)
    residual = inverse_residual(matrix, shift, X, known=known, xp=xp)
    if not bool(_holds(residual, xp)):
        return None
    return Inverse(
        X,
        _flags(residual, 0, xp),
        residual,
        xp.zeros_like(residual),
        _flags(residual, fallback, xp),
    )


def _has_positive_diagonal(lower: Array, xp: Namespace) -> Array:
    """Return whether all factors of a stack may be ones, 0-d."""
    return xp.all(xp.linalg.diagonal(lower) > 0)


def _holds(residual: Array, xp: Namespace) -> Array:
    """Return whether all residuals of a stack are small, 0-d."""
    return xp.all(residual <= RESIDUAL_LIMIT)


def _made_basis(
    matrix: SymmetricMatrix,
    fallback: Fallback,
    /,
    *,
    known: Probed | None = None,
    xp: Namespace,
) -> Basis:
    """Decompose a fit matrix on one rung; its status says whether that holds."""
    w, Q = eigh(matrix, xp=xp)
    residual = basis_residual(matrix, w, Q, known=known, xp=xp)
    status = status_unless(xp, residual <= RESIDUAL_LIMIT, Status.INACCURATE)
    zeros = xp.zeros_like(w)
    clipped = xp.sum(xp.where(w < 0, -w, zeros), axis=-1)
    w = xp.where(w < 0, zeros, w)
    return Basis(w, Q, status, residual, clipped, _flags(residual, fallback, xp))


def _reported_factor(
    matrix: SymmetricMatrix, shift: Array, /, *, xp: Namespace
) -> Positive:
    """Factorize on the first rung, looking at no value; NaN where that failed."""
    unfit = unfit_flags(matrix, shift, xp=xp)
    fit, fit_shift = fit_problem(matrix, shift, unfit, xp=xp)
    lower = damped_cholesky(fit, fit_shift, xp=xp)
    positive = is_positive_factor(lower, xp=xp)
    residual = cholesky_residual(fit, fit_shift, _usable(lower, positive, xp), xp=xp)
    accurate = (residual <= RESIDUAL_LIMIT) | xp.logical_not(positive)
    status = (
        unfit
        | status_unless(xp, positive, Status.NOT_POSITIVE)
        | status_unless(xp, accurate, Status.INACCURATE)
    )
    good = (status & ~int(Status.INACCURATE)) == 0
    lower = xp.where(good[..., None, None], lower, xp.full_like(lower, xp.nan))
    return Positive(
        lower, status, residual, xp.zeros_like(residual), _flags(residual, 0, xp)
    )


def _reported_inverse(
    matrix: SymmetricMatrix, shift: Array, factor: Positive, /, *, xp: Namespace
) -> Inverse:
    """Invert from a factor that was reported; where that failed the result is NaN."""
    good = (factor.status & ~int(Status.INACCURATE)) == 0
    fit, fit_shift = fit_problem(matrix, shift, status_unless(xp, good, 1), xp=xp)
    # A factor that failed is replaced before it is divided by, and marked after.
    X = inverse_from_cholesky(_usable(factor.lower, good, xp), xp=xp)
    residual = inverse_residual(fit, fit_shift, X, xp=xp)
    accurate = (residual <= RESIDUAL_LIMIT) | xp.logical_not(good)
    status = factor.status | status_unless(xp, accurate, Status.INACCURATE)
    marked = xp.where(good[..., None, None], X.array, xp.full_like(X.array, xp.nan))
    inverse = SymmetricMatrix(marked, X.whole)
    return Inverse(
        inverse, status, residual, xp.zeros_like(residual), _flags(residual, 0, xp)
    )


def _reported_basis(matrix: SymmetricMatrix, /, *, xp: Namespace) -> Basis:
    """Decompose on the first rung, looking at no value; NaN where it is unfit."""
    unfit = unfit_flags(matrix, None, xp=xp)
    zero = xp.zeros_like(matrix.array[..., 0, 0])
    fit, _ = fit_problem(matrix, zero, unfit, xp=xp)
    made = _made_basis(fit, Fallback.WORKING, xp=xp)
    good, w, Q = unfit == 0, made.eigenvalues, made.eigenvectors
    w = xp.where(good[..., None], w, xp.full_like(w, xp.nan))
    Q = xp.where(good[..., None, None], Q, xp.full_like(Q, xp.nan))
    status = made.status | unfit
    return Basis(w, Q, status, made.residual, made.clipped, made.fallback)


def _usable(lower: Array, good: Array, xp: Namespace) -> Array:
    """Return the factor, or the identity in the place of one that is none."""
    eye = xp.eye(lower.shape[-1], dtype=lower.dtype, device=device_of(lower))
    return xp.where(good[..., None, None], lower, eye)


def _flags(like: Array, value: int, xp: Namespace) -> Array:
    """Return a number for each matrix of a stack, int32."""
    return xp.full(like.shape, int(value), dtype=xp.int32, device=device_of(like))


def _by_eigendecomposition(
    matrix: SymmetricMatrix, shift: Array, /, *, name: str, xp: Namespace
) -> tuple[Positive, Inverse]:
    """Factorize and invert on the last rung, in the widest dtype, or raise."""
    wide = widened(matrix, xp=xp) or matrix
    shift = cast(xp, shift, wide.array.dtype)
    basis = _made_basis(wide, Fallback.EIGENDECOMPOSITION, xp=xp)
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
        basis.fallback,
    )
    factor, inverse = Positive(lower, *certificate), Inverse(X, *certificate)
    return narrowed(factor, matrix, xp=xp), narrowed(inverse, matrix, xp=xp)


def _from_basis(Q: Array, eigenvalues: Array, xp: Namespace) -> SymmetricMatrix:
    product = xp.matmul(Q * eigenvalues[..., None, :], xp.matrix_transpose(Q))
    return SymmetricMatrix(0.5 * (product + xp.matrix_transpose(product)), whole=True)
