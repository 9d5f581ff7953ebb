"""Residual checks of factorizations, in O(n^2) operations.

Conventions.  A residual is relative and is measured on one fixed, spread-out probe vector
z: ``|X M z - z| / |z|`` for an inverse X of M.  For a random z it estimates ``|X M - I|_F
/ sqrt(n)``; rounding errors are unlikely to avoid a fixed one.  A residual that is not
finite counts as infinitely bad.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kfac_core import errors
from kfac_core.array import Array, Namespace, Status, finite
from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched
from kfac_core.linalg.symmetric import (
    SymmetricMatrix,
    matrix_diagonal,
    multiply_symmetric,
)
from kfac_core.linalg.triangular import multiply_triangular

RESIDUAL_LIMIT = 1e-2
"""A factorization whose residual is above this is not accepted."""


ERROR_LIMIT = 0.05
"""How far roundoff may move a damped eigenvalue, as a part of it (`docs/precision.md`)."""

NEGATIVE_TOLERANCE = 32.0
"""How many times the size of roundoff an eigenvalue may be below zero and be roundoff."""

EQUAL_TOLERANCE = 4.0
"""How many times their roundoff equal eigenvalues may differ by, next to each other.

For repeated eigenvalues of Gram matrices of 8 to 512 columns 0.7 was measured.
"""


def probe(n: int, /, *, dtype: object, device: object, xp: Namespace) -> Array:
    """Return the probe vector: fixed, and without visible pattern.

    Parameters
    ----------
    n : int
        Length.
    dtype, device : dtype, device
        Dtype and device of the result.
    xp : namespace
        Array API namespace of the library.

    Returns
    -------
    array, shape (n, 1)
        The vector.
    """
    i = xp.arange(1, n + 1, dtype=dtype, device=device)
    # Multiples of 1 / p and 1 / p^2, with the plastic number p = 1.3247, fill the unit
    # square evenly: no plain structure of a matrix is orthogonal to z.
    u = xp.remainder(i * 0.7548776662466927, 1.0)
    v = xp.remainder(i * 0.5698402909980532, 1.0)
    return xp.reshape(xp.cos(41.0 * u * (1.0 + v)) + 0.25, (n, 1))


def probe_of(array: Array, xp: Namespace, /) -> Array:
    """Return the probe vector for a matrix, cached where that is safe.

    Two columns for a matrix whose values the host cannot read.
    """
    make = _kept_probe if finite.is_plain(array, xp=xp) else _two_probes
    return make(array.shape[-1], array.dtype, ns.device_of(array), xp)


def inverse_residual(
    inverse: SymmetricMatrix, z: Array, image: Array, /, *, xp: Namespace
) -> Array:
    """Return ``|X M z - z| / |z|``, shape (...).

    Parameters
    ----------
    inverse : SymmetricMatrix
        Inverse X.
    z : array, shape (n, 1)
        The probe vector.
    image : array, shape (..., n, 1)
        Product ``M z``.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (...)
        The residual, of one product with X.
    """
    return relative_norm(multiply_symmetric(inverse, image, xp=xp) - z, z, xp=xp)


def backward_residual(
    inverse: SymmetricMatrix,
    z: Array,
    image: Array,
    eigenvalues: Array,
    /,
    *,
    xp: Namespace,
) -> Array:
    """Return ``|X M z - z| / (|M| |X| |z|)``, shape (...).

    It is of the size of roundoff for an accurate inverse of any condition number, and 1
    or more for one that is wrong.

    Parameters
    ----------
    inverse, z, image
        As for `inverse_residual`.
    eigenvalues : array, shape (..., n)
        Eigenvalues of M.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (...)
        The residual over the condition number.
    """
    residual = inverse_residual(inverse, z, image, xp=xp)
    smallest, largest = xp.min(eigenvalues, axis=-1), xp.max(eigenvalues, axis=-1)
    unit = xp.where(largest > 0, largest, xp.ones_like(largest))
    return residual * (smallest / unit)


def pivot_error(lower: Array, diagonal: Array, /, *, xp: Namespace) -> Array:
    """Estimate the relative error of solving with ``L L^T = M``, shape (...).

    Roundoff times the largest diagonal entry of M over the square of the smallest of L,
    which is at most the condition number of M.

    Parameters
    ----------
    lower : array, shape (..., n, n)
        Factor L.
    diagonal : array, shape (..., n)
        Diagonal of M.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (...)
        The estimate.
    """
    # max diag(M) / min pivot^2 bounds the condition number from below, at no cost
    # beside the factorization.
    pivots = matrix_diagonal(lower, xp=xp)
    if pivots.ndim == 1 and hasattr(pivots, "min"):
        smallest, largest = pivots.min(), diagonal.max()
    else:
        smallest, largest = xp.min(pivots, axis=-1), xp.max(diagonal, axis=-1)
    smallest = finite.positive_or_one(smallest)
    largest = finite.positive_or_one(largest)
    # Multiply by the roundoff first, since the squares of huge ratios overflow.
    ratio = xp.sqrt(largest) / smallest
    return ns.roundoff_of(lower.dtype, xp=xp) * ratio * ratio


def root_condition(lower: Array, /, *, xp: Namespace) -> Array:
    """Estimate the condition number of L, shape (...): infinite where a pivot is not > 0.

    The root of the largest diagonal entry of ``L L^T`` over the smallest of L.  With L
    rounded to a dtype, or computed by a QR decomposition in it, the error of solving with
    L is roundoff times this.
    """
    smallest = xp.min(xp.linalg.diagonal(lower), axis=-1)
    positive = smallest > 0
    unit = xp.where(positive, smallest, xp.ones_like(smallest))
    rows = xp.linalg.vector_norm(xp.tril(lower), axis=-1)
    ratio = xp.max(rows, axis=-1) / unit
    return xp.where(positive, ratio, xp.full_like(ratio, xp.inf))


def smallest_known(
    lowers: Sequence[Array], stored: float, /, *, xp: Namespace
) -> Array:
    """Return the smallest gap to a correlation of 1 that is known, 0-d.

    Correlations of moments are ``L^-1 M L^-T``, so that an error of storing M is amplified
    by the condition number of the moments whose root L is.

    Parameters
    ----------
    lowers : sequence of array, shape (n, n)
        Roots L of damped moments.
    stored : float
        Roundoff of the dtype in which the moments were stored.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, 0-d
        That roundoff times the largest condition number, over the limit of residuals;
        zero if the roots have the dtype of storage, which other checks cover.
    """
    worst = xp.zeros_like(lowers[0][0, 0])
    if stored <= ns.roundoff_of(worst.dtype, xp=xp):
        return worst
    for lower in lowers:
        condition = root_condition(lower, xp=xp)
        # Squared, since the condition number of M is that of its root squared.
        error = stored * condition * condition / RESIDUAL_LIMIT
        worst = xp.where(error > worst, error, worst)
    return worst


def cholesky_residual(
    lower: Array, z: Array, image: Array, /, *, xp: Namespace
) -> Array:
    """Return ``|L L^T z - M z| / |M z|``, shape (...); as `inverse_residual`."""
    half = multiply_triangular(lower, z, transpose=True, xp=xp)
    got = multiply_triangular(lower, half, transpose=False, xp=xp)
    return relative_norm(got - image, image, xp=xp)


def eigen_residual(
    eigenvalues: Array, eigenvectors: Array, z: Array, image: Array, /, *, xp: Namespace
) -> Array:
    """Return the larger of two residuals of an eigendecomposition, shape (...).

    ``|Q diag(w) Q^T z - A z| / (max|w| |z|)`` and ``|Q Q^T z - z| / |z|``, with the image
    ``A z``.
    """
    in_basis = xp.matmul(xp.matrix_transpose(eigenvectors), z)
    error = xp.matmul(eigenvectors, eigenvalues[..., None] * in_basis) - image
    largest = xp.max(xp.abs(eigenvalues), axis=-1)[..., None, None]
    # Backward error, relative to |M|: small eigenvalues are never accurate relative to
    # themselves.
    backward = relative_norm(error, largest * z, xp=xp)
    # Q w Q^T can be close to M for a Q that is not orthogonal, whose powers are then
    # wrong.
    orthogonality = relative_norm(xp.matmul(eigenvectors, in_basis) - z, z, xp=xp)
    return xp.where(orthogonality > backward, orthogonality, backward)


def roundoff_units(size: int, /) -> float:
    """Bound a computed zero eigenvalue, in units of roundoff of the largest one.

    For Gram matrices of 20, 200 and 1000 columns at most 0.9, 2.7 and 3.1 was measured,
    against 2.6, 3.8 and 6.0 returned here.
    """
    return 2.0 + 0.125 * math.sqrt(size)


def eigenvalue_errors(
    eigenvalues: Array,
    eigenvectors: Array,
    /,
    *,
    stored: float,
    computed: float,
    xp: Namespace,
) -> Array:
    """Return how far each computed eigenvalue of a second moment may be off.

    Storing an entry rounds it relative to the diagonal entries of its row and its column.
    That moves an eigenvalue by one or two unit roundoffs times the largest eigenvalue, and
    by less where its eigenvector lies in coordinates of small diagonal entries.  The error
    of a decomposition is the same for all of them.

    Parameters
    ----------
    eigenvalues : array, shape (..., n)
        Computed eigenvalues w.
    eigenvectors : array, shape (..., n, n)
        Their eigenvectors, in the columns.
    stored, computed : float
        Distance from 1 to the next number, of the dtypes of storage and decomposition; 0
        for a matrix that is exact.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n)
        Absolute errors; zeros for a matrix of zeros.
    """
    largest = xp.max(xp.abs(eigenvalues), axis=-1, keepdims=True)
    zeros = xp.zeros_like(eigenvalues)
    # A second moment has no negative eigenvalues: small ones show the actual roundoff.
    units = NEGATIVE_TOLERANCE * roundoff_units(eigenvalues.shape[-1])
    most = units * max(stored, computed) * largest
    below = xp.where((eigenvalues < 0) & (eigenvalues >= -most), -eigenvalues, zeros)
    below = xp.max(below, axis=-1, keepdims=True)
    noise = stored * largest
    noise = xp.where(below > noise, below, noise)
    if stored > computed:
        # Entries of a stored moment are off by a share of their own size.  So an
        # eigenvector that lives on small diagonal entries has a small error; `local` is
        # the diagonal that it sees.
        squares = eigenvectors * eigenvectors
        positive = xp.where(eigenvalues > 0, eigenvalues, zeros)[..., None]
        diagonal = xp.matmul(squares, positive)
        local = xp.matmul(xp.matrix_transpose(squares), diagonal)[..., 0]
        mean = xp.mean(diagonal, axis=-2)
        share = local / xp.where(mean > 0, mean, xp.ones_like(mean))
        noise = noise * xp.where(share < 1, share, xp.ones_like(share))
    least = computed * largest + zeros
    return xp.where(noise > least, noise + zeros, least)


def settled_eigenvalues(
    eigenvalues: Array, error: Array, rank: Array, /, *, xp: Namespace
) -> tuple[Array, Array]:
    """Return the eigenvalues of a semidefinite matrix without those that are roundoff.

    Eigenvalues beyond the rank of the matrix are zero.  Any other below one unit roundoff,
    half of its error, is uncertain and is raised to it, so that a product with the inverse
    can be too short but not too long.  Negative eigenvalues larger than roundoff are left
    unchanged; see `positive_eigenvalues`.

    Parameters
    ----------
    eigenvalues, error : array, shape (..., n)
        Computed eigenvalues, in any order, and their errors.
    rank : array, shape () or (...)
        Bound of the number of nonzero eigenvalues.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    eigenvalues : array, shape (..., n)
        Eigenvalues; negative only where the matrix is not semidefinite.
    error : array, shape (..., n)
        Their errors: none of those that are known to be zero.
    """
    n = eigenvalues.shape[-1]
    gap, unit = NEGATIVE_TOLERANCE * roundoff_units(n) * error, 0.5 * error
    settled = xp.where((eigenvalues >= -gap) & (eigenvalues < unit), unit, eigenvalues)
    scale = xp.where(error > 0, error, xp.ones_like(error))
    # The second argsort turns an order into ranks.  R rows span R directions, so that
    # the n - rank smallest eigenvalues are zero exactly, not noise to be damped away.
    order = xp.argsort(xp.argsort(xp.abs(eigenvalues) / scale, axis=-1), axis=-1)
    null = xp.astype(order, error.dtype) < n - rank[..., None]
    null = null & (xp.abs(eigenvalues) <= gap)
    zeros = xp.zeros_like(error)
    return xp.where(null, zeros, settled), xp.where(null, zeros, error)


def eigenvalues_apart(spectrum: Spectrum, /, *, xp: Namespace) -> Array:
    """Return which eigenvalues are above the next one by more than roundoff.

    A decomposition may return any basis for eigenvalues that roundoff cannot tell apart.

    Parameters
    ----------
    spectrum : Spectrum
        Eigenvalues that descend, but for roundoff, and their errors.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array of bool, shape (..., n - 1)
        Whether an eigenspace ends there.
    """
    w, error = spectrum
    units = EQUAL_TOLERANCE * roundoff_units(w.shape[-1])
    return w[..., :-1] - w[..., 1:] > units * error[..., :-1]


def positive_eigenvalues(
    eigenvalues: Array, shift: Array, /, *, axes: tuple[int, ...] = (-1,), xp: Namespace
) -> Array:
    """Return the eigenvalues of ``A + shift I``, for powers of it.

    Negative eigenvalues of A stay as long as ``A + shift I`` is positive definite, which
    agrees with its Cholesky factor.  Otherwise all of them are set to zero, as in the last
    step of the fallback chain.

    Parameters
    ----------
    eigenvalues : array
        Eigenvalues of A.
    shift : array
        Shift, broadcastable to their shape.
    axes : tuple of int
        The axes of one matrix; the others are a stack.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array
        Eigenvalues of the shifted matrix; not below the shift where A was clipped.
    """
    shifted = eigenvalues + shift
    if finite.known_true(shifted > 0, xp=xp):
        return shifted
    definite = xp.all(shifted > 0, axis=axes, keepdims=True)
    # Clip all negative eigenvalues or none, so that every power is of the same matrix.
    clipped = xp.where(eigenvalues < 0, xp.zeros_like(shifted), eigenvalues) + shift
    return xp.where(definite, shifted, clipped)


class Spectrum(NamedTuple):
    """The eigenvalues of a factor, and how far each may be off.

    Attributes
    ----------
    eigenvalues, error : array, shape (..., n)
        Eigenvalues in any order; those that are known to be zero have no error.
    """

    eigenvalues: Array
    error: Array


class DampedSpectrum(NamedTuple):
    """Eigenvalues of ``S F_1 (x) ... (x) F_k + lam I``, and how well they are determined.

    Attributes
    ----------
    factors : sequence of Spectrum
        The eigenvalues of each factor, with their errors.
    scale, damping : array, shape (...)
        S and lam.
    """

    factors: Sequence[Spectrum]
    scale: Array
    damping: Array

    def error(self) -> Array:
        """Bound the relative error of an eigenvalue from the errors of the factors'.

        With ``p_i`` the largest product of the other factors' eigenvalues and ``d_i`` the
        error of ``w_i``, the bound is

            sum_i  max over w_i of  S p_i d_i / (S p_i max(w_i - d_i, 0) + lam).

        Returns
        -------
        array, 0-d
            Bound of the whole stack; infinite for NaN.
        """
        xp = ns.own_namespace(self.damping)
        total = xp.zeros_like(self.damping)
        damping = self.damping[..., None]
        for i, (w, error) in enumerate(self.factors):
            product = self.scale
            for j, other in enumerate(self.factors):
                if j != i:
                    product = product * xp.max(other.eigenvalues, axis=-1)
            product = product[..., None]
            # The worst case: the eigenvalue is smaller by its error, and not negative.
            least = xp.where(w > error, w - error, xp.zeros_like(w))
            # `positive_eigenvalues` does not clip these.
            stays = (w < 0) & (product * w + damping > 0)
            bottom = product * xp.where(stays, w, least) + damping
            positive = bottom > 0
            ratio = product * error / xp.where(positive, bottom, xp.ones_like(bottom))
            singular = xp.where(error > 0, xp.full_like(error, xp.inf), error)
            total = total + xp.max(xp.where(positive, ratio, singular), axis=-1)
        # Where a bound overflows or is NaN, nothing is known of the eigenvalues.
        worst = xp.max(total)
        return xp.where(xp.isfinite(worst), worst, xp.full_like(worst, xp.inf))

    def flag(self) -> Array:
        """Return the `Status` flag of an error above `ERROR_LIMIT`, 0-d int32."""
        xp = ns.own_namespace(self.damping)
        return ns.status_unless(xp, self.error() <= ERROR_LIMIT, Status.INACCURATE)

    def require_determined(self, name: str, /) -> None:
        """Raise `FactorizationError` for a flag; synchronizes with the device."""
        if not int(self.flag()):
            return
        xp = ns.own_namespace(self.damping)
        raise errors.FactorizationError(
            f"with damping {float(xp.max(self.damping)):.1e} eigenvalues are not "
            "determined: roundoff in the stored statistics changes a damped eigenvalue by "
            f"{float(self.error()):.0e} of it (limit {ERROR_LIMIT}). Increase `damping`, "
            'or keep statistics in float64 (Precision(storage="float64")).',
            factor=name,
        )


@dispatched
def constant(
    make: Callable[..., Array],
    n: int,
    /,
    *,
    dtype: object,
    device: object,
    xp: Namespace,
) -> Array:
    """Return an array that depends on a size and a dtype alone.

    Parameters
    ----------
    make : callable
        Takes the same arguments, for any namespace.
    n : int
        The size.
    dtype, device : dtype, device
        Dtype and device of the result.
    xp : namespace
        Array API namespace of the library.

    Returns
    -------
    array
        Result of `make`; a compiled program may fold it into a constant.
    """
    return make(n, dtype=dtype, device=device, xp=xp)


def _two_probes(n: int, dtype: object, device: object, xp: Namespace) -> Array:
    """Return two columns, since XLA compiles a product with a single one to a slow loop."""
    values = constant(probe, 2 * n, dtype=dtype, device=device, xp=xp)
    return xp.reshape(values, (n, 2))


@functools.lru_cache(maxsize=64)
def _kept_probe(n: int, dtype: object, device: object, xp: Namespace) -> Array:
    return probe(n, dtype=dtype, device=device, xp=xp)


@dispatched
def relative_norm(error: Array, scale: Array, /, *, xp: Namespace) -> Array:
    """Return ``|error| / |scale|``: 0 for 0/0, infinity for NaN.

    Parameters
    ----------
    error : array, shape (..., n, 1)
        Error columns.
    scale : array, shape (..., n, 1) or (n, 1)
        What they are measured by.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (...)
        The ratios of Euclidean norms.
    """
    # Dividing by the largest entry first keeps the squares of huge and tiny matrices
    # inside the range of float32.
    largest = xp.max(xp.abs(scale), axis=(-2, -1), keepdims=True)
    positive = (largest > 0) & (largest < xp.inf)
    unit = xp.where(positive, largest, xp.ones_like(largest))
    top = xp.linalg.vector_norm(error / unit, axis=(-2, -1))
    bottom = xp.linalg.vector_norm(scale / unit, axis=(-2, -1))
    # NumPy warns of infinity / infinity.
    positive = (bottom > 0) & (bottom < xp.inf)
    ratio = top / xp.where(positive, bottom, xp.ones_like(bottom))
    known = xp.isfinite(ratio) & xp.isfinite(bottom)
    return xp.where(known, ratio, xp.full_like(ratio, xp.inf))
