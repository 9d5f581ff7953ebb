"""``A = U diag(w) U^T`` with few columns: the form in which a low-rank factor is applied.

Conventions.  U has shape ``(d, r)`` and orthonormal columns, w descends and is not
negative; A is zero on the complement of U.  Adding a multiple of the identity changes w
and what happens on the complement, never U.
"""

from __future__ import annotations

import functools

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.dispatch import is_factorization_failure
from kfac_core.array.namespaces import device_of, roundoff_of
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import structure
from kfac_core.errors import FactorizationError
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, probe, settled_eigenvalues
from kfac_core.linalg.fallback import first_flag, with_fallbacks
from kfac_core.linalg.low_rank import LowRankSum

__all__ = ["LowRankBasis", "low_rank_basis", "rank_one_basis"]


@structure()
class LowRankBasis:
    """An eigendecomposition of a matrix of low rank.

    Attributes
    ----------
    eigenvalues : array, shape (r,)
        w, descending.
    eigenvectors : array, shape (d, r)
        Eigenvectors U.
    truncated_trace : array, 0-d
        The trace of what the matrix was cut off from; see `LowRankSum`.
    residual : array, 0-d
        The larger of ``|U w U^T z - A z| / (w_1 |z|)`` and ``|U^T U y - y| / |y|``, of
        fixed z and y.
    status : array of int32, 0-d
        `Status` flags.
    fallback : array of int32, 0-d
        `kfac_core.linalg.fallback.Fallback` that was used.
    """

    eigenvalues: Array
    eigenvectors: Array
    truncated_trace: Array
    residual: Array
    status: Array
    fallback: Array

    @property
    def size(self) -> int:
        """The number d of rows."""
        return int(self.eigenvectors.shape[0])

    @property
    def rank(self) -> int:
        """The number r of columns."""
        return int(self.eigenvectors.shape[1])

    @property
    def complete(self) -> bool:
        """Whether nothing is orthogonal to all of U."""
        return self.rank == self.size

    def to_basis(self, v: Array, /) -> Array:
        """Return ``U^T v``, for v of shape (d, k)."""
        xp = array_api_compat.array_namespace(self.eigenvectors)
        return xp.matmul(xp.matrix_transpose(self.eigenvectors), v)

    def from_basis(self, v: Array, /) -> Array:
        """Return ``U v``, for v of shape (r, k)."""
        xp = array_api_compat.array_namespace(self.eigenvectors)
        return xp.matmul(self.eigenvectors, v)

    def dense(self) -> Array:
        """Return A, shape (d, d)."""
        xp = array_api_compat.array_namespace(self.eigenvectors)
        scaled = self.eigenvectors * self.eigenvalues
        dense = xp.matmul(scaled, xp.matrix_transpose(self.eigenvectors))
        return 0.5 * (dense + xp.matrix_transpose(dense))


def low_rank_basis(
    matrix: LowRankSum,
    /,
    *,
    roundoff: float = 0.0,
    check: Check,
    name: str,
    xp: Namespace,
) -> LowRankBasis:
    """Return the eigendecomposition of ``B B^T``, certified.

    Parameters
    ----------
    matrix : LowRankSum
        Sum of a single matrix, not of a stack.
    roundoff : float
        Relative roundoff of the dtype in which the root was stored, if that was narrower.
    check : {"raise", "status"}
        Whether to look, try float64 where float32 is not accurate and raise; or to
        report in the flags.
    name : str
        Name used in error messages.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    LowRankBasis
        Result in the dtype of B.

    Raises
    ------
    NotFiniteError
        For a root that is not finite (``check="raise"``).
    FactorizationError
        If no precision gives an accurate one (``check="raise"``).

    Notes
    -----
    A thin singular value decomposition, ``O(d r^2)`` flops.
    """
    attempt = functools.partial(_attempt, roundoff=roundoff)
    return with_fallbacks(attempt, matrix, _inaccurate, check=check, name=name, xp=xp)


def rank_one_basis(vector: Array, /, *, xp: Namespace) -> LowRankBasis:
    """Return the decomposition of ``a a^T``; for a zero vector, any unit vector.

    Parameters
    ----------
    vector : array, shape (d,)
        Vector a.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    LowRankBasis
        Basis of rank one; flagged where the vector is not finite.
    """
    finite = xp.all(xp.isfinite(vector))
    # Dividing by the largest entry first keeps the squares of huge and tiny vectors
    # inside the range.
    largest = xp.max(xp.abs(vector))
    nonzero = largest > 0
    first = xp.arange(vector.shape[0], device=device_of(vector)) == 0
    unit = xp.where(
        nonzero,
        vector / xp.where(nonzero, largest, xp.ones_like(largest)),
        xp.astype(first, vector.dtype),
    )
    length = xp.linalg.vector_norm(unit)
    norm = xp.where(nonzero, largest * length, xp.zeros_like(length))
    zero = xp.zeros_like(norm)
    status = first_flag((finite, Status.MATRIX_NOT_FINITE), xp=xp)
    fallback = xp.zeros_like(status)
    w = xp.reshape(norm * norm, (1,))
    return LowRankBasis(w, (unit / length)[:, None], zero, zero, status, fallback)


def _attempt(matrix: LowRankSum, xp: Namespace, *, roundoff: float) -> LowRankBasis:
    """Decompose in the dtype of the root; NaN where it cannot be."""
    B = matrix.root
    finite = xp.all(xp.isfinite(B)) & xp.isfinite(matrix.truncated_trace)
    safe = xp.where(finite, B, xp.zeros_like(B))
    try:
        U, s, _ = xp.linalg.svd(safe, full_matrices=False)
    except Exception as error:
        if not is_factorization_failure(error):
            raise
        U, s = xp.full_like(B, xp.nan), xp.full_like(B[0, :], xp.nan)
    w = s * s
    residual = _residual(safe, w, U, xp)
    # Columns were joined by the eigendecomposition of their Gram matrix.
    roundoff = max(roundoff, roundoff_of(w.dtype, xp=xp))
    w = settled_eigenvalues(w, xp.sum(safe * safe, axis=-1), roundoff, xp=xp)
    status = first_flag(
        (finite, Status.MATRIX_NOT_FINITE),
        (residual <= RESIDUAL_LIMIT, Status.INACCURATE),
        xp=xp,
    )
    w = xp.where(finite, w, xp.full_like(w, xp.nan))
    fallback = xp.zeros_like(status)
    return LowRankBasis(w, U, matrix.truncated_trace, residual, status, fallback)


def _inaccurate(
    matrix: LowRankSum, made: LowRankBasis, name: str, xp: Namespace
) -> LowRankBasis:
    raise FactorizationError(
        f"the singular value decomposition of a {matrix.size} x {matrix.rank} root has "
        f"residual {float(made.residual):.1e}, above {RESIDUAL_LIMIT}, in every precision "
        "there is here. Look at the statistics for entries of wildly different size.",
        factor=name,
    )


def _residual(B: Array, w: Array, U: Array, xp: Namespace) -> Array:
    d, r = B.shape
    place = {"dtype": B.dtype, "device": device_of(B), "xp": xp}
    z, y = probe(d, **place), probe(r, **place)
    got = xp.matmul(U, w[:, None] * xp.matmul(xp.matrix_transpose(U), z))
    expected = xp.matmul(B, xp.matmul(xp.matrix_transpose(B), z))
    backward = _ratio(got - expected, xp.max(w) * z, xp)
    in_basis = xp.matmul(xp.matrix_transpose(U), xp.matmul(U, y))
    orthogonality = _ratio(in_basis - y, y, xp)
    return xp.where(orthogonality > backward, orthogonality, backward)


def _ratio(error: Array, scale: Array, xp: Namespace) -> Array:
    """Return ``|error| / |scale|``: 0 for 0/0, infinity for NaN."""
    largest = xp.max(xp.abs(scale))
    unit = xp.where(largest > 0, largest, xp.ones_like(largest))
    bottom = xp.linalg.vector_norm(scale / unit)
    ratio = xp.linalg.vector_norm(error / unit) / xp.where(largest > 0, bottom, unit)
    return xp.where(xp.isfinite(ratio), ratio, xp.full_like(ratio, xp.inf))
