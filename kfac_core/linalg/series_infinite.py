"""The sum over all lags of an infinite chain of Kronecker products, and its inverse.

Conventions as in `kfac_core.linalg.series_chain`, but P is not symmetrized, all lags count
as if they fit into each sequence, and S is the mean number of steps:

    F    = S R [ (I - Psi)^-1 + (I - Psi^T)^-1 - I ] R^T,
    F^-1 = (1/S) R^-T (I - Psi) (I - Psi^T Psi)^-1 (I - Psi^T) R^-1.

The inverse needs the eigenvectors E of ``P^T P`` only; F itself is two equations of
Stein, ``X - P_A X P_G^T = V``.

References
----------
Martens, Ba and Johnson (2018), "Kronecker-factored Curvature Approximations for
Recurrent Neural Networks", ICLR: option 2.  Smith (1968), "Matrix equation XA + BX = C",
SIAM Journal on Applied Mathematics 16, for the doubling.
"""

from __future__ import annotations

import math

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Status, finite
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import smallest_known
from kfac_core.linalg.kronecker import kronecker_dense
from kfac_core.linalg.series_chain import (
    Root,
    excess_correlation,
    flagged_eigenbasis,
    kron_multiply,
    kron_multiply_t,
    positive_flags,
)

_DOUBLINGS = 24
"""Without looking at values: enough for a spectral radius of Psi up to 1 - 2e-6."""

_MOST_DOUBLINGS = 40
"""With looking: a spectral radius that needs more is 1 to working precision."""


@structure()
class InfiniteChain:
    """``F^-1 = (1/S) R^-T (I - Psi) (I - Psi^T Psi)^-1 (I - Psi^T) R^-1``.

    Attributes
    ----------
    input_root, output_root : array, shapes (n, n) and (m, m)
        Roots R.
    input_correlation, output_correlation : array, of the same shapes
        Correlations P.
    input_dual, output_dual : array, of the same shapes
        ``R^-T E``, with E the eigenvectors of ``P^T P``.
    input_next, output_next : array, of the same shapes
        ``R^-T P E``.
    gaps : array, shape (n, m)
        The eigenvalues of ``I - Psi^T Psi``.
    scale : array, 0-d
        Scale ``S``.
    clipped, flags
        As in `WeightedRoots`, of the singular values of P, which is divided by the
        largest of them where that is above 1.
    doublings : array of int32, 0-d
        How often a product doubles the number of terms.
    """

    input_root: Array
    input_correlation: Array
    input_dual: Array
    input_next: Array
    output_root: Array
    output_correlation: Array
    output_dual: Array
    output_next: Array
    gaps: Array
    scale: Array
    clipped: Array
    flags: Array
    doublings: Array

    def multiply(self, v: Array, /, *, xp: Namespace) -> Array:
        """Return ``F v`` by doubling; see `stein_solve`."""
        P, Q = self.input_correlation, self.output_correlation
        y = kron_multiply_t(self.input_root, v, self.output_root, xp=xp)
        # A compiled program takes the most doublings; those beyond `doublings` add zeros.
        known = finite.is_readable(self.doublings, xp=xp)
        doublings = int(self.doublings) if known else _MOST_DOUBLINGS
        X, Y = stein_solve(P, Q, y, doublings=doublings, xp=xp)
        return self.scale * kron_multiply(
            self.input_root, X + Y - y, self.output_root, xp=xp
        )

    def solve(self, v: Array, /, *, xp: Namespace) -> Array:
        """Return ``F^-1 v``; ``8 n m (n + m)`` flops, and no doubling."""
        first = kron_multiply_t(self.input_dual, v, self.output_dual, xp=xp)
        second = kron_multiply_t(self.input_next, v, self.output_next, xp=xp)
        return self._spread((first - second) / self.gaps, xp) / self.scale

    def solve_root(self, z: Array, /, *, xp: Namespace) -> Array:
        """Return ``X z`` with ``X X^T = F^-1``, X square."""
        return self._spread(z / xp.sqrt(self.gaps * self.scale), xp)

    def dense(self, *, xp: Namespace) -> Array:
        """Return F, row-major, by a dense inverse of ``I - Psi``: ``2 (n m)^3`` flops."""
        psi = kronecker_dense((self.input_correlation, self.output_correlation))
        R = kronecker_dense((self.input_root, self.output_root))
        eye = xp.eye(psi.shape[0], dtype=psi.dtype, device=ns.device_of(psi))
        sum_of_powers = xp.linalg.inv(eye - psi)
        both = sum_of_powers + xp.matrix_transpose(sum_of_powers) - eye
        return self.scale * xp.matmul(R, xp.matmul(both, xp.matrix_transpose(R)))

    def _spread(self, x: Array, xp: Namespace) -> Array:
        """Return ``R^-T (I - Psi) E x``."""
        first = kron_multiply(self.input_dual, x, self.output_dual, xp=xp)
        return first - kron_multiply(self.input_next, x, self.output_next, xp=xp)


def infinite_chain(
    input_root: Root,
    output_root: Root,
    scale: Array,
    /,
    *,
    check: Check,
    stored: float = 0.0,
    xp: Namespace,
) -> InfiniteChain:
    """Make the sum over all lags of a chain of infinite length, option 2.

    Parameters
    ----------
    input_root, output_root : Root
        Roots of the two sides.
    scale : array, 0-d
        S, the mean number of steps.
    check : {"raise", "status"}
        Whether values may be read, for the number of doublings.
    stored : float
        See `kfac_core.linalg.certificate.smallest_known`.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    InfiniteChain
        Trouble is in its flags.

    Raises
    ------
    FactorizationError
        If the sum over lags does not converge (``check="raise"``).

    Notes
    -----
    About ``21 (n^3 + m^3)`` flops, and ``2 (n^3 + m^3)`` for each doubling.
    """
    (P, D_A, N_A, m_A, clipped_A, flags_A), (Q, D_G, N_G, m_G, clipped_G, flags_G) = (
        _infinite_side(side, xp) for side in (input_root, output_root)
    )
    gaps = 1.0 - m_A[:, None] * m_G[None, :]
    doublings, converged = _doublings(P, Q, check, xp)
    lowers = input_root.root, output_root.root
    known = smallest_known(lowers, stored, xp=xp)
    flags = flags_A | flags_G
    flags = flags | positive_flags(gaps, xp.ones_like(m_A[0]), xp, known=known)
    flags = flags | ns.status_unless(xp, converged, Status.INACCURATE)
    clipped = xp.where(clipped_A > clipped_G, clipped_A, clipped_G)
    R, L = input_root.root, output_root.root
    return InfiniteChain(
        *(R, P, D_A, N_A, L, Q, D_G, N_G, gaps, scale, clipped, flags),
        xp.full_like(flags, doublings),
    )


def stein_solve(
    left: Array, right: Array, v: Array, /, *, doublings: int, xp: Namespace
) -> tuple[Array, Array]:
    """Solve ``X - P X Q^T = V`` and ``Y - P^T Y Q = V`` by doubling.

    They are the sums ``X = sum_k P^k V (Q^T)^k`` and ``Y = sum_k (P^T)^k V Q^k``, of
    which each pass doubles the number of terms: ``2^doublings`` in all.

    Parameters
    ----------
    left : array, shape (n, n)
        Matrix P.
    right : array, shape (m, m)
        Q; the spectral radii of P and Q have a product below 1.
    v : array, shape (n, m)
        Matrix V.
    doublings : int
        The number of passes.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    X, Y : array, shape (n, m)
        The solutions.

    Notes
    -----
    ``2 (n^3 + m^3) + 4 n m (n + m)`` flops a pass.  The standard has no Schur
    decomposition.  Powers of a contraction are contractions, so that squaring P and Q
    amplifies no rounding error.
    """
    X = Y = v
    P, Q = left, right
    for i in range(doublings):
        P_T, Q_T = xp.matrix_transpose(P), xp.matrix_transpose(Q)
        # Smith's doubling: 2^i terms of sum_k P^k v (Q^T)^k after i steps.
        X = X + xp.matmul(P, xp.matmul(X, Q_T))
        Y = Y + xp.matmul(P_T, xp.matmul(Y, Q))
        if i < doublings - 1:
            P, Q = xp.matmul(P, P), xp.matmul(Q, Q)
    return X, Y


def _infinite_side(side: Root, xp: Namespace) -> tuple[Array, ...]:
    """Return P, ``R^-T E``, ``R^-T P E``, squared singular values, clipped, flags."""
    P = side.correlation(xp)
    squares, E, flags = flagged_eigenbasis(
        xp.matmul(xp.matrix_transpose(P), P), side, xp
    )
    # Squares of singular values; roundoff makes small ones negative.
    squares = xp.clip(squares, 0.0, None)
    largest = xp.sqrt(xp.max(squares))
    clipped, too_large = excess_correlation(largest, xp)
    # Scale both, so that the powers and the gaps belong to the same contraction.
    unit = xp.where(largest > 1.0, largest, xp.ones_like(largest))
    P, squares = P / unit, squares / (unit * unit)
    D = xp.matmul(side.dual, E)
    following = xp.matmul(side.dual, xp.matmul(P, E))
    return P, D, following, squares, clipped, flags | too_large


def _doublings(
    left: Array, right: Array, check: Check, xp: Namespace
) -> tuple[int, Array]:
    """Return how many doublings a sum of powers needs, and whether they are enough."""
    eps = ns.roundoff_of(left.dtype, xp=xp)

    def size(P: Array, Q: Array) -> Array:
        return xp.linalg.vector_norm(P) * xp.linalg.vector_norm(Q)

    P, Q = left, right
    if check == "status":
        for _ in range(_DOUBLINGS):
            P, Q = xp.matmul(P, P), xp.matmul(Q, Q)
        return _DOUBLINGS, size(P, Q) <= eps
    # Powers of a contraction stay below this limit; roundoff at radius 1 exceeds it.
    limit = 10.0 * math.sqrt(P.shape[0] * Q.shape[0])
    for doublings in range(_MOST_DOUBLINGS):
        now = float(size(P, Q))
        # The powers have vanished, or NaN will never vanish.
        if now <= eps or math.isnan(now):
            return doublings, size(P, Q) <= eps
        if now > limit:
            break
        P, Q = xp.matmul(P, P), xp.matmul(Q, Q)
    raise errors.FactorizationError(
        "the sum over the lags of an infinite chain does not converge: consecutive steps "
        "are correlated by 1 in working precision. Increase `damping`, or use the "
        "symmetric variant, which is finite."
    )
