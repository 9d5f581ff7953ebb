"""The sum over all lags of a symmetric chain of Kronecker products, and its inverse.

Conventions.  ``A_0 (x) G_0`` (damped) and ``A_1 (x) G_1`` are the covariances of lags 0
and 1 of a stationary sequence of matrices V, on which ``A (x) G`` acts as ``A V G^T``.
With any root ``R R^T = A_0`` and its dual ``R^-T``, the correlation of one side is
``P = R^-1 A_1 R^-T``, and ``Psi = P_A (x) P_G``.  Another root rotates P and leaves every
sum unchanged, so that a Cholesky factor serves.  With P
symmetrized and ``R = R_A (x) R_G``, the sum over the pairs of T steps is

    F = R [ sum_{|d|<T} (T - |d|) Psi^|d| ] R^T.

References
----------
Martens, Ba and Johnson (2018), "Kronecker-factored Curvature Approximations for
Recurrent Neural Networks", ICLR: option 1.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace, Status
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import (
    RESIDUAL_LIMIT,
    eigen_residual,
    probe,
    probe_of,
    smallest_known,
)
from kfac_core.linalg.eigen import eigh
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.linalg.series import series_sum
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.linalg.triangular import solve_triangular


@structure()
class Root:
    """A root of one side's covariance, and the covariance with what follows.

    Attributes
    ----------
    root : array, shape (n, n)
        Root R.
    dual : array, shape (n, n)
        ``R^-T``, or its pseudo-inverse.
    cross : array, shape (n, n) or (n, n_next), optional
        The covariance with the next step of a sequence (lag 1, not symmetrized), or with
        the next layer of a chain.
    """

    root: Array
    dual: Array
    cross: Array | None = None

    def correlation(self, xp: Namespace) -> Array:
        """Return ``P = R^-1 A_1 R^-T``."""
        return kron_multiply_t(self.dual, self.cross, self.dual, xp=xp)

    def residual(self, xp: Namespace) -> Array:
        """Return ``|A_0 A_0^-1 z - z| / |z|`` of the fixed probe, 0-d."""
        n = self.root.shape[0]
        z = probe(n, dtype=self.root.dtype, device=ns.device_of(self.root), xp=xp)
        got = z
        for factor in (self.dual, self.root):
            got = xp.matmul(factor, xp.matmul(xp.matrix_transpose(factor), got))
        return xp.linalg.vector_norm(got - z) / xp.linalg.vector_norm(z)


@structure()
class WeightedRoots:
    """``F = (K_A (x) K_G) diag(W) (K_A (x) K_G)^T``, with square roots K.

    Attributes
    ----------
    input_root, output_root : array, shapes (n, n) and (m, m)
        Roots K.
    input_dual, output_dual : array, of the same shapes
        Dual roots ``K^-T``.
    weights : array, shape (n, m)
        W, positive.
    clipped : array, 0-d
        Excess of a correlation above 1.
    flags : array of int32, 0-d
        `Status` flags.
    """

    input_root: Array
    input_dual: Array
    output_root: Array
    output_dual: Array
    weights: Array
    clipped: Array
    flags: Array

    def multiply(self, v: Array, /, *, xp: Namespace) -> Array:
        """Return ``F v``; ``4 n m (n + m)`` flops."""
        K_A, K_G = self.input_root, self.output_root
        whitened = self.weights * kron_multiply_t(K_A, v, K_G, xp=xp)
        return kron_multiply(K_A, whitened, K_G, xp=xp)

    def solve(self, v: Array, /, *, xp: Namespace) -> Array:
        """Return ``F^-1 v``; ``4 n m (n + m)`` flops."""
        D_A, D_G = self.input_dual, self.output_dual
        whitened = kron_multiply_t(D_A, v, D_G, xp=xp) / self.weights
        return kron_multiply(D_A, whitened, D_G, xp=xp)

    def solve_root(self, z: Array, /, *, xp: Namespace) -> Array:
        """Return ``X z`` with ``X X^T = F^-1``, X square."""
        return kron_multiply(
            self.input_dual, z / xp.sqrt(self.weights), self.output_dual, xp=xp
        )

    def dense(self, *, xp: Namespace) -> Array:
        """Return F, row-major, symmetric to rounding."""
        K = kronecker_dense((self.input_root, self.output_root))
        W = xp.reshape(self.weights, (1, -1))
        return xp.matmul(K * W, xp.matrix_transpose(K))

    def trace(self, *, xp: Namespace) -> Array:
        """Return ``sum_ij W_ij |K_A e_i|^2 |K_G e_j|^2``."""
        a = xp.sum(self.input_root * self.input_root, axis=0)
        g = xp.sum(self.output_root * self.output_root, axis=0)
        return xp.sum(self.weights * a[:, None] * g[None, :])

    def logdet(self, *, xp: Namespace) -> Array:
        """Return ``log det F - log det (K_A K_A^T (x) K_G K_G^T)``."""
        return xp.sum(xp.log(self.weights))


def triangular_root(
    lower: Array, cross: Array | None = None, /, *, xp: Namespace
) -> Root:
    """Return a Cholesky factor L as a root, with ``L^-T``; NaN where L is.

    Parameters
    ----------
    lower : array, shape (n, n)
        Factor L.
    cross : array, optional
        See `Root`.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    Root
        Root of ``L L^T``.
    """
    eye = xp.eye(lower.shape[0], dtype=lower.dtype, device=ns.device_of(lower))
    finite = xp.all(xp.isfinite(lower))
    # Some libraries raise for a factor with NaN.
    dual = solve_triangular(xp.where(finite, lower, eye), eye, transpose=True, xp=xp)
    return Root(lower, xp.where(finite, dual, xp.full_like(dual, xp.nan)), cross)


def symmetric_chain(
    input_root: Root,
    output_root: Root,
    shares: Array,
    /,
    *,
    stored: float = 0.0,
    xp: Namespace,
) -> WeightedRoots:
    """Make the sum over all lags of a chain of random length, option 1.

    Parameters
    ----------
    input_root, output_root : Root
        Roots of the two sides.
    shares : array, shape (T,)
        See `series_sum`.
    stored : float
        See `kfac_core.linalg.certificate.smallest_known`.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    WeightedRoots
        With ``K = R U``, U the eigenvectors of P, and the weights ``W(psi_A psi_G)``, the
        sum over all lags.  Failures are in its flags.

    Notes
    -----
    About ``17 (n^3 + m^3)`` flops; no value is read.
    """
    (psi_A, K_A, D_A, clipped_A, flags_A), (psi_G, K_G, D_G, clipped_G, flags_G) = (
        _symmetric_side(side, xp) for side in (input_root, output_root)
    )
    k = xp.arange(
        1, shares.shape[0] + 1, dtype=shares.dtype, device=ns.device_of(shares)
    )
    W = series_sum(psi_A[:, None] * psi_G[None, :], shares, xp=xp)
    lowers = input_root.root, output_root.root
    known = smallest_known(lowers, stored, xp=xp)
    flags = flags_A | flags_G
    flags = flags | positive_flags(W, xp.sum(k * shares), xp, known=known)
    clipped = xp.where(clipped_A > clipped_G, clipped_A, clipped_G)
    return WeightedRoots(K_A, D_A, K_G, D_G, W, clipped, flags)


def _symmetric_side(side: Root, xp: Namespace) -> tuple[Array, ...]:
    """Return psi, K, ``K^-T``, how much was clipped, and the flags."""
    P = side.correlation(xp)
    # The symmetric variant replaces the correlation by its symmetric part, which is
    # what makes both directions of time share eigenvectors.
    P = 0.5 * (P + xp.matrix_transpose(P))
    psi, U, flags = flagged_eigenbasis(P, side, xp)
    clipped, too_large = excess_correlation(xp.max(xp.abs(psi)), xp)
    K, D = xp.matmul(side.root, U), xp.matmul(side.dual, U)
    # Clip roundoff; a larger excess is in the flags.
    return xp.clip(psi, -1.0, 1.0), K, D, clipped, flags | too_large


def flagged_eigenbasis(
    matrix: Array, side: Root, xp: Namespace
) -> tuple[Array, Array, Array]:
    """Return eigenvalues, eigenvectors and flags; NaN where the matrix is not finite."""
    finite = xp.all(xp.isfinite(matrix))
    eye = xp.eye(matrix.shape[0], dtype=matrix.dtype, device=ns.device_of(matrix))
    # Some libraries hang on NaN.
    safe = xp.where(finite, matrix, eye)
    w, Q = eigh(SymmetricMatrix(safe, True), xp=xp)
    z = probe_of(safe, xp)
    residual = eigen_residual(w, Q, z, xp.matmul(safe, z), xp=xp)
    accurate = (residual <= RESIDUAL_LIMIT) & (side.residual(xp) <= RESIDUAL_LIMIT)
    flags = ns.status_unless(xp, finite, Status.MATRIX_NOT_FINITE) | ns.status_unless(
        xp, accurate | xp.logical_not(finite), Status.INACCURATE
    )
    nan = xp.full_like(matrix, xp.nan)
    return xp.where(finite, w, nan[0, :]), xp.where(finite, Q, nan), flags


def excess_correlation(largest: Array, xp: Namespace) -> tuple[Array, Array]:
    """Return the excess of a correlation above 1, and its flags."""
    clipped = xp.where(largest > 1.0, largest - 1.0, xp.zeros_like(largest))
    return clipped, ns.status_unless(xp, clipped <= RESIDUAL_LIMIT, Status.INACCURATE)


def positive_flags(values: Array, unit: Array, xp: Namespace, *, known: Array) -> Array:
    """Return the flags of numbers to be divided by, known up to roundoff of a unit.

    Parameters
    ----------
    values, unit : array
        Numbers, and the unit of their error.
    xp : namespace
        Array API namespace of the arrays.
    known : array, 0-d
        The smallest number in that unit that is known in spite of how the moments were
        stored; see `kfac_core.linalg.certificate.smallest_known`.

    Returns
    -------
    array of int32, 0-d
        `Status` flags.
    """
    smallest = xp.min(values)
    # Weights are differences of numbers of size `unit`; those near its roundoff have no
    # digit that is right.
    digits = 10.0 * ns.roundoff_of(values.dtype, xp=xp) / RESIDUAL_LIMIT
    accurate = (smallest > digits * unit) & (smallest >= known * unit)
    accurate = accurate | xp.logical_not(smallest > 0)
    return ns.status_unless(xp, smallest > 0, Status.NOT_POSITIVE) | ns.status_unless(
        xp, accurate, Status.INACCURATE
    )


def kron_multiply_t(left: Array, v: Array, right: Array, /, *, xp: Namespace) -> Array:
    """Return ``(L (x) R)^T v = L^T V R``."""
    return xp.matmul(xp.matrix_transpose(left), xp.matmul(v, right))


def kron_multiply(left: Array, v: Array, right: Array, /, *, xp: Namespace) -> Array:
    """Return ``(L (x) R) v = L V R^T``."""
    return xp.matmul(left, xp.matmul(v, xp.matrix_transpose(right)))
