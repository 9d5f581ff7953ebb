"""Solving with a sum or difference of two Kronecker products.

Conventions.  ``M = A (x) B + sign C (x) D``, acting on V of shape ``(n, m)`` as
``A V B + sign C V D``; A and B positive definite, C and D symmetric.  With
``A = L_A L_A^T`` and eigendecompositions

    L_A^-1 C L_A^-T = E_1 diag(s_1) E_1^T,    L_B^-1 D L_B^-T = E_2 diag(s_2) E_2^T,

``K_1 = L_A^-T E_1`` and ``K_2 = L_B^-T E_2`` diagonalize both products at once, so that

    M^-1 v = K_1 [ (K_1^T V K_2) / (1 + sign s_1 s_2^T) ] K_2^T.

References
----------
Martens and Grosse (2015), arXiv:1503.05671, appendix B.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    device_of,
    namespace_of,
    require_floating,
    require_matrix,
    status_unless,
)
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import structure
from kfac_core.errors import FactorizationError, ShapeError
from kfac_core.linalg.cholesky import damped_cholesky, is_positive_factor
from kfac_core.linalg.eigen import eigh
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.linalg.triangular import solve_triangular

__all__ = ["KroneckerSum", "kronecker_sum"]


@structure()
class KroneckerSum:
    """The inverse of ``A (x) B + sign C (x) D`` in the form of the module's text.

    Attributes
    ----------
    left, right : array, shapes (n, n) and (m, m)
        K_1 and K_2.
    spectrum : array, shape (n, m)
        ``1 + sign s_1 s_2^T``, positive.
    status : array of int32, 0-d
        Of `Status` flags.
    """

    left: Array
    right: Array
    spectrum: Array
    status: Array

    def solve(self, v: Array, /) -> Array:
        """Return ``M^-1 v``, shape (n, m); ``4 n m (n + m)`` flops."""
        xp = array_api_compat.array_namespace(self.spectrum)
        require_matrix(v, tuple(self.spectrum.shape), "v")
        inner = xp.matmul(xp.matmul(xp.matrix_transpose(self.left), v), self.right)
        outer = xp.matmul(self.left, inner / self.spectrum)
        return xp.matmul(outer, xp.matrix_transpose(self.right))


def kronecker_sum(
    A: Array, B: Array, C: Array, D: Array, /, *, sign: int, check: Check = "raise"
) -> KroneckerSum:
    """Factorize ``A (x) B + sign C (x) D``.

    Parameters
    ----------
    A, C : array, shape (n, n)
        A positive definite, C symmetric.
    B, D : array, shape (m, m)
        B positive definite, D symmetric.
    sign : {1, -1}
        Whether the second product is added or subtracted.
    check : {"raise", "status"}
        Whether a sum that is not positive definite raises, or is reported.

    Returns
    -------
    KroneckerSum
        Its inverse.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For matrices that do not fit.
    FactorizationError
        Where A, B or the sum is not positive definite (``check="raise"``).

    Notes
    -----
    About ``10 (n^3 + m^3)`` flops.
    """
    if sign not in (1, -1):
        raise ShapeError(f"Expected `sign` to be 1 or -1, got {sign}.")
    xp = namespace_of(A=A, B=B, C=C, D=D)
    for name, x, like in (("A", A, A), ("B", B, B), ("C", C, A), ("D", D, B)):
        require_floating(xp, x, name)
        require_matrix(x, (like.shape[0],) * 2, name)
    left, s1, good_left = _common_basis(A, C, xp)
    right, s2, good_right = _common_basis(B, D, xp)
    spectrum = 1.0 + sign * s1[:, None] * s2[None, :]
    good = good_left & good_right & xp.all(spectrum > 0)
    if check == "raise" and not bool(good):
        raise FactorizationError(
            "a sum of two Kronecker products is not positive definite. Damp A and B more, "
            "or take all four from one weighted sample set."
        )
    return KroneckerSum(
        left, right, spectrum, status_unless(xp, good, Status.NOT_POSITIVE)
    )


def _common_basis(A: Array, C: Array, xp: Namespace) -> tuple[Array, Array, Array]:
    """Return K with ``K^T A K = I`` and ``K^T C K = diag(s)``, s, and whether A is PD."""
    L = damped_cholesky(SymmetricMatrix(A, whole=True), 0.0, xp=xp)
    good = is_positive_factor(L, xp=xp)
    eye = xp.eye(A.shape[0], dtype=A.dtype, device=device_of(A))
    L = xp.where(good, L, eye)
    half = solve_triangular(L, C, transpose=False, xp=xp)
    whitened = solve_triangular(L, xp.matrix_transpose(half), transpose=False, xp=xp)
    whitened = 0.5 * (whitened + xp.matrix_transpose(whitened))
    s, E = eigh(SymmetricMatrix(whitened, whole=True), xp=xp)
    return solve_triangular(L, E, transpose=True, xp=xp), s, good
