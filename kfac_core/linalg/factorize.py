"""Factorizing ``M = c B + shift I``, with B symmetric positive semidefinite up to rounding.

Conventions.  B is a running sum and ``c B`` its average, which is never formed:
factorizations multiply by c in the pass that adds the shift, products
afterwards.  Each factorization is one formula that reads no value, and is tried by
`kfac_core.linalg.fallback.with_fallbacks`; one residual, of what is applied afterwards,
decides whether it is accepted.  ``M z`` for the residual's vector z is finite only where
all of M is, and is the one guard before LAPACK.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Scalar, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.finite import is_plain, known_finite, known_true, quiet
from kfac_core.array.structure import without_scalars
from kfac_core.linalg import certificate, symmetric
from kfac_core.linalg.cholesky import (
    certified_cholesky,
    cholesky_in_place,
    cholesky_inverse,
    damped_cholesky,
    restored_matrix,
)
from kfac_core.linalg.eigen import eigh, eigh_in_place
from kfac_core.linalg.factorizations import CholeskyFactor, Eigendecomposition, Inverse
from kfac_core.linalg.fallback import (
    Fallback,
    fallback_of,
    first_flag,
    guarded,
    no_fallback,
    with_fallbacks,
)

_ROWS_AT_ONCE = 512

Conditions = tuple[tuple[Any, Status], ...]
"""Conditions, each with the flag to set if it fails."""


def cholesky_factor(
    problem: symmetric.ScaledMatrix,
    /,
    *,
    check: Check,
    name: str,
    in_place: bool = False,
) -> CholeskyFactor:
    """Factorize M by Cholesky.

    Parameters
    ----------
    problem : ScaledMatrix
        Matrix M.
    check : {"raise", "status"}
        Whether to use the fallback chain and raise, or to report.
    name : str
        Name of the matrix in error messages.
    in_place : bool
        Whether the factor may stand in the memory of B, of factor 1, which is then to be
        brought back by `kfac_core.linalg.cholesky.restored_matrix`.

    Returns
    -------
    CholeskyFactor
        Result in the dtype of M; NaN throughout where it failed, or with `in_place` on the
        diagonal.

    Raises
    ------
    NotFiniteError, DampingError
        If M holds NaN or infinity, or the shift is invalid (``check="raise"``).
    FactorizationError
        If every step of the chain fails (``check="raise"``).

    Notes
    -----
    ``n^3 / 3`` flops.  ``check="raise"`` synchronizes with the device once.
    """
    xp = ns.own_namespace(problem.matrix.array)
    if in_place and not problem.roundoff:
        z, limit = (
            certificate.probe_of(problem.matrix.array, xp),
            certificate.RESIDUAL_LIMIT,
        )
        known = certified_cholesky(problem.matrix, z, problem.shift, limit=limit, xp=xp)
        if known is not None:
            clipped, fallback = no_fallback(known[1], True, xp)
            return CholeskyFactor(known[0], fallback, known[1], clipped, fallback)
    # What raises goes on to the fallbacks, which need B.
    attempt = partial(
        _attempt_cholesky, in_place=in_place, restores=in_place and check == "raise"
    )
    return with_fallbacks(
        attempt, problem, _clipped_cholesky, check=check, name=name, xp=xp
    )


def damped_inverse(
    problem: symmetric.ScaledMatrix,
    factor: CholeskyFactor | None = None,
    /,
    *,
    check: Check,
    name: str,
) -> Inverse:
    """Invert M by its Cholesky factor.

    Parameters
    ----------
    problem, check, name
        As for `cholesky_factor`, as the errors are.
    factor : CholeskyFactor, optional
        Result of `cholesky_factor` for M with the same `check`, which is not overwritten.
        Without it a factor is computed, whose memory becomes the inverse's.

    Returns
    -------
    Inverse
        Result in the dtype of M; NaN throughout where M is not positive definite.

    Notes
    -----
    ``n^3`` flops.
    """
    xp, lower = ns.own_namespace(problem.matrix.array), None
    # A factor from a fallback belongs to a clipped or rounded M, so start over.
    if factor is not None and (check == "status" or not fallback_of(factor)):
        lower = factor.lower
    first = _attempt_inverse(problem, xp, lower)
    return with_fallbacks(
        _attempt_inverse,
        problem,
        _clipped_inverse,
        check=check,
        name=name,
        first=first,
        xp=xp,
    )


def eigendecomposition(
    problem: symmetric.ScaledMatrix,
    /,
    *,
    check: Check,
    name: str,
    wide: bool = False,
    in_place: bool = False,
) -> Eigendecomposition:
    """Return the eigendecomposition of ``c B``; the shift is not read.

    Parameters, errors and conventions are those of `cholesky_factor`, with a fallback to
    float64 alone.  `kfac_core.linalg.certificate.settled_eigenvalues` treats eigenvalues
    below roundoff.

    Parameters
    ----------
    wide : bool
        Whether to begin with float64, with ``check="raise"``.
    in_place : bool
        Whether to work in the memory of B, which is restored; eigenvalues then descend.

    Returns
    -------
    Eigendecomposition
        Result in the dtype of B; NaN throughout where B is not finite.

    Notes
    -----
    About ``9 n^3`` flops.  In float32 the small eigenvalues carry an absolute error of
    about ``1e-7 |A|``, so that a damped inverse from them is 10 to 60 times less
    accurate than one by Cholesky.
    """
    xp = ns.own_namespace(problem.matrix.array)
    options = {"check": check, "name": name, "wide": wide, "xp": xp}
    attempt = partial(_attempt_eigen, decompose=eigh_in_place if in_place else eigh)
    basis: Eigendecomposition = with_fallbacks(
        attempt, problem, _no_eigendecomposition, **options
    )
    # Blocks that share a factor keep this object, so it must not hold NumPy scalars.
    return without_scalars(basis)


def problem_flags(shift: Scalar, finite: Any, /) -> Conditions:
    """Return the conditions of a valid M, for `kfac_core.linalg.fallback.first_flag`.

    Parameters
    ----------
    shift : float, or array, shape (...)
        Shift of M.
    finite : bool, or array of bool, shape (...)
        Whether ``M z`` is finite.

    Returns
    -------
    tuple
        Conditions, each with the flag where it does not hold.
    """
    return (
        ((shift >= 0) & (shift < math.inf), Status.BAD_DAMPING),
        (finite, Status.MATRIX_NOT_FINITE),
    )


def from_eigenbasis(
    Q: Array, eigenvalues: Array, xp: Namespace, /
) -> symmetric.SymmetricMatrix:
    """Return ``Q diag(w) Q^T``."""
    product = xp.matmul(Q * eigenvalues[..., None, :], xp.matrix_transpose(Q))
    return symmetric.SymmetricMatrix(
        0.5 * (product + xp.matrix_transpose(product)), full_storage=True
    )


class _Probed(NamedTuple):
    """What is known of M before it is factorized.

    Attributes
    ----------
    z, image : array, shape (n, 1) and (..., n, 1)
        The probe vector, and ``M z``.
    invalid : tuple
        Conditions of a valid M, and their flags; empty where the host knows that they hold.
    valid : True, or array of bool, shape (...)
        Whether they hold.
    shift : float, or array, shape (...)
        The shift, read by `number`.
    resolution : array, shape (...), or None
        The least eigenvalue of M that storing B determines; None where the shift is known
        to be as large.
    number : callable
        Reads a number of each matrix.  Of a single matrix in the host's memory it is a
        float, with which arithmetic takes a tenth of the time of 0-d arrays.
    plain : bool
        Whether the host can read the arrays.
    """

    z: Array
    image: Array
    invalid: Conditions
    valid: Any
    shift: Scalar
    resolution: Array | None
    number: Callable[[Array], Any]
    plain: bool


def _probed(problem: symmetric.ScaledMatrix, xp: Namespace) -> _Probed:
    z = certificate.probe_of(problem.matrix.array, xp)
    c, shift = problem.factor, problem.shift
    image = symmetric.multiply_shifted(problem.matrix, z, factor=c, shift=shift, xp=xp)
    known = known_finite(image, xp=xp)
    plain = known or is_plain(image, xp=xp)
    number = float if plain and image.ndim == 2 else ns.as_number
    d = number(shift)
    invalid: Conditions = ()
    valid: Any = True
    # An infinite shift makes the image infinite, so only its sign is left to check.
    if not (known and known_true(d >= 0, xp=xp)):
        finite = xp.all(xp.isfinite(image), axis=(-2, -1))
        invalid = problem_flags(shift, finite)
        valid = finite & (shift >= 0)
    resolution = _resolution(problem, d, number, xp)
    return _Probed(z, image, invalid, valid, d, resolution, number, plain)


def _judged(
    probed: _Probed, positive: Any, residual: Array, smallest: Scalar, xp: Namespace
) -> tuple[Array, Array, Array, Array]:
    """Return the status, the residual, the clipped mass and the fallback of an attempt.

    With the shift d, the residual r, the smallest eigenvalue w of M and the roundoff u of
    storing B, a factorization is accepted where

        0 <= d < inf,    M z is finite,    L has positive pivots,
        r <= RESIDUAL_LIMIT,    u c |B|_F <= ERROR_LIMIT max(d, w):

    M is valid, factorized accurately, and stored accurately enough to be inverted.
    """
    accurate = probed.number(residual) <= certificate.RESIDUAL_LIMIT
    if probed.resolution is not None:
        resolved = (probed.resolution <= probed.shift) | (probed.resolution <= smallest)
        accurate = accurate & resolved
    clipped, fallback = no_fallback(residual, probed.plain, xp)
    status = first_flag(
        *probed.invalid,
        (positive, Status.NOT_POSITIVE),
        (accurate, Status.INACCURATE),
        none=fallback,
        xp=xp,
    )
    return status, residual, clipped, fallback


def _attempt_cholesky(
    problem: symmetric.ScaledMatrix,
    xp: Namespace,
    *,
    in_place: bool = False,
    restores: bool = False,
) -> CholeskyFactor:
    probed, smallest = _probed(problem, xp), None
    diagonal = problem.factor[..., None] * problem.matrix.diagonal()
    lower = _lower(problem, probed, xp, in_place=in_place)
    residual = certificate.cholesky_residual(lower, probed.z, probed.image, xp=xp)
    # L L^T is always close to M, but solving with L is inaccurate for ill-conditioned M.
    solving = certificate.pivot_error(lower, diagonal + problem.shift[..., None], xp=xp)
    residual = xp.maximum(residual, solving)
    if probed.resolution is not None:
        # Every pivot of L L^T is at least the smallest eigenvalue.
        pivots = xp.linalg.diagonal(lower)
        smallest = xp.min(pivots * pivots, axis=-1)
    positive = probed.number(lower[..., -1, -1]) > 0
    if not in_place and not known_true(positive, xp=xp):
        # Fill the whole matrix with NaN, so that a failed factor cannot be used.
        lower = _nan_unless(positive, lower, xp)
    factor = CholeskyFactor(lower, *_judged(probed, positive, residual, smallest, xp))
    if restores and lower is problem.matrix.array and int(factor.status):
        restored_matrix(problem.matrix, diagonal, xp=xp)
    return factor


def _attempt_inverse(
    problem: symmetric.ScaledMatrix, xp: Namespace, lower: Array | None = None
) -> Inverse:
    """Return the inverse and its flags; a factor that is passed is not written to."""
    probed, smallest = _probed(problem, xp), None
    overwrite = lower is None
    if lower is None:
        lower = _lower(problem, probed, xp)
    # A failed factor has NaN in this entry; read it before the factor is overwritten.
    positive = probed.number(lower[..., -1, -1]) > 0
    array, full_storage = cholesky_inverse(lower, overwrite=overwrite, xp=xp)
    if not known_true(positive, xp=xp):
        # Not every BLAS propagates NaN.
        array = _nan_unless(positive, array, xp)
    X = symmetric.SymmetricMatrix(array, full_storage)
    residual = certificate.inverse_residual(X, probed.z, probed.image, xp=xp)
    if probed.resolution is not None:
        smallest = _smallest_eigenvalue(X, probed.z, probed.resolution, xp)
    return Inverse(X, *_judged(probed, positive, residual, smallest, xp))


def _attempt_eigen(
    problem: symmetric.ScaledMatrix,
    xp: Namespace,
    decompose: Callable[..., tuple[Array, Array]] = eigh,
) -> Eigendecomposition:
    matrix = problem.matrix
    z = certificate.probe_of(matrix.array, xp)
    image = problem.multiply(z, shifted=False, xp=xp)
    finite = xp.all(xp.isfinite(image), axis=(-2, -1))
    safe = symmetric.SymmetricMatrix(
        guarded(finite, matrix.array, 1.0, xp=xp), matrix.full_storage
    )
    w, Q = decompose(safe, xp=xp)
    w = problem.factor[..., None] * w
    residual = certificate.eigen_residual(w, Q, z, image, xp=xp)
    zeros = xp.zeros_like(w)
    clipped = xp.sum(xp.where(w < 0, -w, zeros), axis=-1)
    computed = ns.roundoff_of(w.dtype, xp=xp)
    error = certificate.eigenvalue_errors(
        w, Q, stored=problem.roundoff, computed=computed, xp=xp
    )
    w, error = certificate.settled_eigenvalues(
        w, error, _known_rank(problem, xp), xp=xp
    )
    _, fallback = no_fallback(residual, is_plain(residual, xp=xp), xp)
    status = first_flag(
        (finite, Status.MATRIX_NOT_FINITE),
        (residual <= certificate.RESIDUAL_LIMIT, Status.INACCURATE),
        none=fallback,
        xp=xp,
    )
    if not known_true(finite, xp=xp):
        w = xp.where(finite[..., None], w, xp.full_like(w, xp.nan))
        Q = xp.where(finite[..., None, None], Q, xp.full_like(Q, xp.nan))
    return Eigendecomposition(w, Q, error, status, residual, clipped, fallback)


def _known_rank(problem: symmetric.ScaledMatrix, xp: Namespace) -> Array:
    """Return a bound of B's rank, by its rows and by the zeros on its diagonal."""
    diagonal = problem.matrix.diagonal()
    nonzero = xp.sum(xp.astype(diagonal != 0, diagonal.dtype), axis=-1)
    if problem.rank is None:
        return nonzero
    return xp.where(problem.rank < nonzero, problem.rank, nonzero)


def _resolution(
    problem: symmetric.ScaledMatrix,
    shift: Scalar,
    number: Callable[[Array], Scalar],
    xp: Namespace,
) -> Array | None:
    """Return the least eigenvalue of M that storing B determines, ``u c |B|_F / limit``.

    None where the host knows that the shift is as large, and for an exact matrix.
    """
    if not problem.roundoff:
        return None
    factor, most = number(problem.factor), certificate.ERROR_LIMIT / problem.roundoff
    trace = factor * number(symmetric.matrix_trace(problem.matrix.array, xp=xp))
    # The trace bounds the norm, and takes one pass over the diagonal.
    if known_true(trace <= most * shift, xp=xp):
        return None
    # An entry is off by its own roundoff, so that the norm of all errors is at most
    # u |B|_F, far below the trace if many eigenvalues share it.
    resolution = factor * _frobenius_norm(problem.matrix, xp) / most
    return None if known_true(resolution <= shift, xp=xp) else ns.as_array(resolution)


def _frobenius_norm(matrix: symmetric.SymmetricMatrix, xp: Namespace) -> Array:
    """Return ``|B|_F`` of the finite entries, shape (...), from the lower triangle."""
    # The trace is at least the largest entry of a semidefinite matrix.
    trace = matrix.trace()
    usable = (trace > 0) & xp.isfinite(trace)
    unit = xp.where(usable, trace, xp.ones_like(trace))
    total = xp.zeros_like(unit)
    # A part of the rows at a time, beside which a large matrix is not copied.
    for start in range(0, matrix.size, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, matrix.size)
        part = matrix.array[..., start:stop, :stop]
        part = xp.where(xp.isfinite(part), part, xp.zeros_like(part))
        part = part / unit[..., None, None]
        # Entries below the diagonal stand for two.
        lower, below = xp.tril(part, k=start), xp.tril(part, k=start - 1)
        total = total + xp.sum(lower * (lower + below), axis=(-2, -1))
    return unit * xp.sqrt(total)


def _smallest_eigenvalue(
    inverse: symmetric.SymmetricMatrix, z: Array, unit: Array, xp: Namespace
) -> Array:
    """Estimate the smallest eigenvalue of M by the power method for its inverse.

    The unit, of the order of the eigenvalue, keeps the steps within the range of numbers.
    """
    before = z
    with quiet("status", xp=xp):
        # Four steps give the order of magnitude, which is all that the limit needs.
        for _ in range(4):
            scaled = z * unit[..., None, None]
            before, z = z, symmetric.multiply_symmetric(inverse, scaled, xp=xp)
        top, bottom = (xp.max(xp.abs(x), axis=(-2, -1)) for x in (before, z))
        return unit * top / xp.where(bottom > 0, bottom, xp.ones_like(bottom))


def _lower(
    problem: symmetric.ScaledMatrix,
    probed: _Probed,
    xp: Namespace,
    *,
    in_place: bool = False,
) -> Array:
    """Return the Cholesky factor; NaN where M is invalid or not positive definite."""
    matrix, shift = problem.matrix, problem.shift
    if probed.valid is not True:
        # Minus the identity fails like an invalid matrix; NaN would hang some libraries.
        safe = guarded(probed.valid, matrix.array, -1.0, xp=xp)
        matrix = symmetric.SymmetricMatrix(safe, matrix.full_storage)
        shift = xp.where(probed.valid, shift, xp.zeros_like(shift))
    if in_place:
        return cholesky_in_place(matrix, shift, xp=xp)
    return damped_cholesky(matrix, shift, factor=problem.factor, xp=xp)


def _nan_unless(good: Any, array: Array, xp: Namespace) -> Array:
    """Return matrices, those that are not good replaced by NaN."""
    nothing = xp.full_like(array, xp.nan)
    # `good` is a bool where the host has read a single matrix.
    return nothing if good is False else xp.where(good[..., None, None], array, nothing)


def _clipped_cholesky(
    problem: symmetric.ScaledMatrix, failed: CholeskyFactor, name: str, xp: Namespace
) -> CholeskyFactor:
    """Return the factor of M with A clipped, or raise."""
    basis, damped, _, residual, fallback = _clipped(problem, name, xp)
    # With C = diag(sqrt) Q^T, M = C^T C, and a QR decomposition of C gives L = upper^T.
    Q = basis.eigenvectors
    # QR of the root, whose condition number is only the root of M's.
    upper = xp.linalg.qr(xp.sqrt(damped)[..., :, None] * xp.matrix_transpose(Q)).R
    ones = xp.ones_like(damped)
    signs = xp.where(xp.linalg.diagonal(upper) < 0, -ones, ones)
    lower = xp.matrix_transpose(upper * signs[..., :, None])
    status = xp.zeros_like(fallback)
    factor = CholeskyFactor(lower, status, residual, basis.clipped, fallback)
    error = float(xp.max(factor.rounding_error()))
    if not error <= certificate.RESIDUAL_LIMIT:
        raise errors.FactorizationError(
            f"with damping {float(xp.max(problem.shift)):.1e} the Cholesky factor of a "
            f"{problem.size} x {problem.size} matrix is too ill-conditioned to solve with "
            f"(relative error {error:.0e}, limit {certificate.RESIDUAL_LIMIT}). Increase "
            "`damping`, or take products by the inverse or the eigenbasis.",
            factor=name,
        )
    return factor


def _clipped_inverse(
    problem: symmetric.ScaledMatrix, failed: Inverse, name: str, xp: Namespace
) -> Inverse:
    """Return the inverse of M with A clipped, or raise."""
    basis, _, X, residual, fallback = _clipped(problem, name, xp)
    return Inverse(X, xp.zeros_like(fallback), residual, basis.clipped, fallback)


def _clipped(
    problem: symmetric.ScaledMatrix, name: str, xp: Namespace
) -> tuple[Eigendecomposition, Array, symmetric.SymmetricMatrix, Array, Array]:
    """Return A's eigendecomposition, M's eigenvalues and inverse, its residual, fallback.

    Or raise, where M is not positive definite even so.
    """
    basis = _attempt_eigen(problem, xp)
    zeros = xp.zeros_like(basis.eigenvalues)
    w = xp.where(basis.eigenvalues < 0, zeros, basis.eigenvalues)
    basis, damped = replaced(basis, eigenvalues=w), w + problem.shift[..., None]
    # Zeros are replaced before the division, and raise below.
    Q, unit = basis.eigenvectors, xp.where(damped > 0, damped, xp.ones_like(damped))
    X = from_eigenbasis(Q, 1.0 / unit, xp)
    z = certificate.probe_of(problem.matrix.array, xp)
    image = symmetric.multiply_symmetric(from_eigenbasis(Q, damped, xp), z, xp=xp)
    # If the condition number exceeds 1 / roundoff, M^-1 M z is not close to z for any
    # inverse.  With orthogonal eigenvectors the inverse is as accurate as they are.
    backward = certificate.backward_residual(X, z, image, damped, xp=xp)
    residual = xp.where(backward > basis.residual, backward, basis.residual)
    smallest, worst = float(xp.min(damped)), float(xp.max(residual))
    if not (smallest > 0 and worst <= certificate.RESIDUAL_LIMIT):
        raise errors.FactorizationError(
            f"a {problem.size} x {problem.size} matrix is not positive definite even after "
            f"its negative eigenvalues (sum {float(xp.max(basis.clipped)):.1e}) were set "
            f"to zero: with damping {float(xp.max(problem.shift)):.1e} its eigenvalues run "
            f"from {smallest:.1e} to {float(xp.max(damped)):.1e} and the inverse has "
            f"residual {worst:.1e} (limit {certificate.RESIDUAL_LIMIT}). "
            "Increase `damping`.",
            factor=name,
        )
    spectra = [certificate.Spectrum(w, basis.error)]
    one = xp.ones_like(problem.shift)
    certificate.DampedSpectrum(spectra, one, problem.shift).require_determined(name)
    fallback = xp.full_like(basis.fallback, int(Fallback.EIGENDECOMPOSITION))
    return basis, damped, X, residual, fallback


def _no_eigendecomposition(
    problem: symmetric.ScaledMatrix,
    failed: Eigendecomposition,
    name: str,
    xp: Namespace,
) -> Eigendecomposition:
    raise errors.FactorizationError(
        f"the eigendecomposition of a {problem.size} x {problem.size} matrix has residual "
        f"{float(xp.max(failed.residual)):.1e}, above {certificate.RESIDUAL_LIMIT}, in "
        "every precision there is here. Look at the statistics for entries of "
        "wildly different size.",
        factor=name,
    )
