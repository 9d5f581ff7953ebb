"""The Cholesky factor of a matrix that is diagonal in ``P (x) Q``, without forming it.

Conventions.  Vectors are matrices V of shape ``(n, m)``, flattened row-major, P is n x n
and is on the left, Q is m x m.  The matrix ``(P (x) Q) diag(d) (P (x) Q)^T``, d of shape
``(n, m)``, is in the basis Q of the columns m matrices of size n, ``M_k = P diag(d_k)
P^T`` of column k of d; for ``S A (x) G + lam I`` with ``G = Q diag(g) Q^T`` they are
``S g_k A + lam I``.  So with

    C_k = chol(M_k)                                  (m factors of size n)

the matrix ``B = (I (x) Q) [C_k]_k (I (x) Q^T)``, in which entry (i, j) of all the C_k
makes one diagonal block, is block lower triangular, and ``B B^T`` is the matrix.  Its
diagonal blocks ``Q diag(c_i) Q^T``, ``c_i = ((C_k)_ii)_k``, are symmetric and not
triangular; an orthogonal factor for each makes them so:

    L = B blockdiag_i( Q diag(1 / c_i) Q^T T_i ),    T_i = chol(Q diag(c_i^2) Q^T),

(n factors of size m).  That is the lower Cholesky factor, since it is unique: in
``7/3 (m n^3 + n m^3)`` flops, most of which make the M_k and the blocks, and
``m n^2 + n m^2`` numbers, where the dense one takes ``(n m)^3 / 3`` and ``(n m)^2``.
"""

from __future__ import annotations

from typing import NoReturn

import array_api_compat

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, probe, relative_norm
from kfac_core.linalg.cholesky import damped_cholesky, is_positive_factor
from kfac_core.linalg.fallback import first_flag, guarded, with_fallbacks
from kfac_core.linalg.groups import side_by_side
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.linalg.triangular import solve_triangular


@structure()
class KroneckerCholesky:
    """The lower Cholesky factor of a matrix that is diagonal in ``P (x) Q``.

    ``L = B blockdiag_i(Q diag(1 / c_i) Q^T T_i)`` with ``B = (I (x) Q) [C_k]_k (I (x)
    Q^T)``, ``c_i`` the entries (i, i) of all C_k, and ``T_i = chol(Q diag(c_i^2) Q^T)``.

    Attributes
    ----------
    columns : array, shape (..., m, n, n)
        The C_k.
    corners : array, shape (..., n, m, m)
        The T_i.
    basis : array, shape (..., m, m)
        Basis Q.
    status : array of int32, 0-d
        `Status` flags.
    fallback : array of int32, 0-d
        `kfac_core.linalg.fallback.Fallback` that was used.
    """

    columns: Array
    corners: Array
    basis: Array
    status: Array
    fallback: Array

    def multiply(self, V: Array, /, *, transpose: bool) -> Array:
        """Return ``L v`` or ``L^T v``, shape (n, m); ``2 n m (n + 3 m)`` flops."""
        xp = array_api_compat.array_namespace(V)
        Q, roots = self.basis, self._roots(xp)
        if transpose:
            inner = self._by_column(V @ Q, xp, solve=False, transpose=True)
            return _by_row(
                xp.matrix_transpose(self.corners),
                (inner / roots) @ xp.matrix_transpose(Q),
            )
        inner = (_by_row(self.corners, V) @ Q) / roots
        inner = self._by_column(inner, xp, solve=False, transpose=False)
        return inner @ xp.matrix_transpose(Q)

    def solve(self, V: Array, /, *, transpose: bool) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``, shape (n, m); ``n m (n + 5 m)`` flops."""
        xp = array_api_compat.array_namespace(V)
        Q, roots = self.basis, self._roots(xp)
        if transpose:
            outer = _solve_each(self.corners, V, transpose=True, xp=xp)
            inner = (outer @ Q) * roots
            inner = self._by_column(inner, xp, solve=True, transpose=True)
            return inner @ xp.matrix_transpose(Q)
        inner = self._by_column(V @ Q, xp, solve=True, transpose=False)
        outer = (inner * roots) @ xp.matrix_transpose(Q)
        return _solve_each(self.corners, outer, transpose=False, xp=xp)

    def _roots(self, xp: Namespace) -> Array:
        """Return the c_i as rows, shape (n, m)."""
        return xp.matrix_transpose(xp.linalg.diagonal(self.columns))

    def _by_column(
        self, V: Array, xp: Namespace, *, solve: bool, transpose: bool
    ) -> Array:
        """Apply C_k (or its transpose, or an inverse) to column k of V."""
        columns = xp.matrix_transpose(V)
        if solve:
            done = _solve_each(self.columns, columns, transpose=transpose, xp=xp)
        else:
            C = xp.matrix_transpose(self.columns) if transpose else self.columns
            done = (C @ columns[..., None])[..., 0]
        return xp.matrix_transpose(done)


def spectral_cholesky(
    left: Array, spectrum: Array, right: Array, /, *, check: Check, name: str
) -> KroneckerCholesky:
    """Return the Cholesky factor of ``(P (x) Q) diag(d) (P (x) Q)^T``.

    Parameters
    ----------
    left : array, shape (..., n, n)
        P, orthogonal.
    spectrum : array, shape (..., n, m)
        d, positive.
    right : array, shape (..., m, m)
        Q, orthogonal.
    check : {"raise", "status"}
        Whether a matrix that is not positive definite, or a factor that is inaccurate,
        raises or is reported.
    name : str
        Name of the block in error messages.

    Returns
    -------
    KroneckerCholesky
        The factor, in the dtype of the arguments.

    Raises
    ------
    FactorizationError
        If the matrix is not positive definite, or solving with its factor, in the dtype of
        the arguments, is inaccurate in every precision (``check="raise"``).

    Notes
    -----
    The residual compares ``L^-T L^-1 z`` with ``(P (x) Q) diag(1/d) (P (x) Q)^T z`` for one
    fixed vector z: two solves, beside the factorization.
    """
    xp = array_api_compat.array_namespace(spectrum)
    problem = _Spectral(left, spectrum, right)
    factor: KroneckerCholesky = with_fallbacks(
        _attempt, problem, _not_positive, check=check, name=name, xp=xp
    )
    # A factor computed in float64 was cast, so check it in the dtype of its products.
    if check == "raise" and not bool(problem.residual(factor, xp) <= RESIDUAL_LIMIT):
        _not_positive(problem, factor, name, xp)
    return factor


@structure()
class _Spectral:
    """The arguments of `spectral_cholesky`."""

    left: Array
    spectrum: Array
    right: Array

    def residual(self, factor: KroneckerCholesky, xp: Namespace) -> Array:
        """Return the relative error of solving with a factor, 0-d."""
        P, Q, d = self.left, self.right, self.spectrum
        n, m = d.shape[-2:]
        z = probe(n * m, dtype=d.dtype, device=ns.device_of(d), xp=xp)
        z = xp.broadcast_to(xp.reshape(z, (n, m)), d.shape)
        expected = xp.matrix_transpose(P) @ z @ Q / d
        expected = P @ expected @ xp.matrix_transpose(Q)
        solved = factor.solve(factor.solve(z, transpose=False), transpose=True)
        column = (*d.shape[:-2], n * m, 1)
        error, scale = (xp.reshape(x, column) for x in (solved - expected, expected))
        return xp.max(relative_norm(error, scale, xp=xp))


def _attempt(problem: _Spectral, xp: Namespace) -> KroneckerCholesky:
    P, Q, d = problem.left, problem.right, problem.spectrum
    finite = xp.all(xp.isfinite(d)) & xp.all(xp.isfinite(P)) & xp.all(xp.isfinite(Q))
    P, Q = (guarded(finite, basis, 1.0, xp=xp) for basis in (P, Q))
    d = xp.where(finite, d, xp.ones_like(d))
    # In the basis (I (x) Q) the matrix is m matrices of size n.
    each = P[..., None, :, :]
    M = (each * xp.matrix_transpose(d)[..., None, :]) @ xp.matrix_transpose(each)
    M = 0.5 * (M + xp.matrix_transpose(M))
    columns = damped_cholesky(SymmetricMatrix(M, full_storage=True), 0.0, xp=xp)
    good = is_positive_factor(columns, xp=xp)
    safe = guarded(good, columns, 1.0, xp=xp)
    squares = xp.matrix_transpose(xp.linalg.diagonal(safe)) ** 2
    Q = Q[..., None, :, :]
    blocks = (Q * squares[..., :, None, :]) @ xp.matrix_transpose(Q)
    blocks = 0.5 * (blocks + xp.matrix_transpose(blocks))
    corners = damped_cholesky(SymmetricMatrix(blocks, full_storage=True), 0.0, xp=xp)
    # Both steps must succeed: the n x n factors of columns, then m x m blocks.
    positive = xp.all(good) & xp.all(is_positive_factor(corners, xp=xp))
    valid = finite & positive
    corners = guarded(valid, corners, 1.0, xp=xp)
    status = xp.zeros((), dtype=xp.int32, device=ns.device_of(d))
    factor = KroneckerCholesky(
        guarded(valid, safe, 1.0, xp=xp), corners, problem.right, status, status
    )
    # Only the first failure counts: an invalid matrix has no residual.
    status = first_flag(
        (valid, Status.NOT_POSITIVE),
        (problem.residual(factor, xp) <= RESIDUAL_LIMIT, Status.INACCURATE),
        xp=xp,
    )
    columns = xp.where(valid, columns, xp.full_like(columns, xp.nan))
    return replaced(factor, columns=columns, status=status)


def _not_positive(
    problem: _Spectral, failed: KroneckerCholesky, name: str, xp: Namespace
) -> NoReturn:
    raise errors.FactorizationError(
        "the Cholesky factor of the exactly damped block is not accurate in any precision "
        "that there is here: the block is too ill-conditioned. Increase `damping`, or take "
        "products by the inverse, powers or `sample`.",
        factor=name,
    )


def _by_row(matrices: Array, V: Array) -> Array:
    """Apply matrix i of a stack, shape (n, m, m), to row i of V, shape (n, m)."""
    return (matrices @ V[..., None])[..., 0]


def _solve_each(lower: Array, rows: Array, *, transpose: bool, xp: Namespace) -> Array:
    """Solve with matrix i of a stack, shape (n, m, m), for row i of V, or of many V."""

    def solved(b: Array) -> Array:
        return solve_triangular(lower, b, transpose=transpose, xp=xp)

    return side_by_side(solved, rows[..., None], lower.ndim, xp=xp)[..., 0]
