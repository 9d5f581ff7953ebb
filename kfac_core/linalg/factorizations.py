"""Results of a fallback chain: factors, inverses and eigendecompositions.

Conventions.  Leading axes are a stack.  A ``residual`` is relative, measured as
`kfac_core.linalg.certificate` says; a ``status`` holds `Status` flags; a ``fallback`` is
the step of `kfac_core.linalg.fallback` that succeeded.  All are arrays and not static, so
that a compiled program serves all matrices.
"""

from __future__ import annotations

from typing import Literal

from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import root_condition
from kfac_core.linalg.symmetric import SymmetricMatrix

Solving = Literal["inverse", "triangular"]
"""Whether solves use an explicit inverse or triangular factors."""

Factorization = Literal["inverse", "cholesky", "eigenbasis"]
"""Factorizations for solves, for triangular products, and for other powers."""


@structure()
class CholeskyFactor:
    """The Cholesky factor of a damped matrix.

    Attributes
    ----------
    lower : array, shape (..., n, n)
        ``L L^T = M``.
    status : array of int32, shape (...)
        `Status` flags.
    residual : array, shape (...)
        ``|L L^T z - M z| / |M z|`` for a fixed vector z, or the error of solving as
        `kfac_core.linalg.certificate.pivot_error` estimates it, where that is larger.
    clipped : array, shape (...)
        The sum of the negative eigenvalues that were set to zero, in magnitude.
    fallback : array of int32, shape (...)
        `kfac_core.linalg.fallback.Fallback` that was used.
    """

    lower: Array
    status: Array
    residual: Array
    clipped: Array
    fallback: Array

    def rounding_error(self) -> Array:
        """Estimate the error of solving with L from the roundoff of its dtype alone."""
        xp = ns.own_namespace(self.lower)
        condition = root_condition(self.lower, xp=xp)
        return ns.roundoff_of(self.lower.dtype, xp=xp) * condition


@structure()
class Inverse:
    """The inverse of a damped matrix.

    Attributes
    ----------
    matrix : SymmetricMatrix
        Inverse ``M^-1``.
    residual : array, shape (...)
        ``|M^-1 M z - z| / |z|`` for a fixed vector z.
    status, clipped, fallback
        See `CholeskyFactor`.
    """

    matrix: SymmetricMatrix
    status: Array
    residual: Array
    clipped: Array
    fallback: Array


@structure()
class Eigendecomposition:
    """The eigendecomposition of a symmetric positive-semidefinite matrix.

    Attributes
    ----------
    eigenvalues : array, shape (..., n)
        Ascending; those below roundoff as
        `kfac_core.linalg.certificate.settled_eigenvalues` leaves them.
    eigenvectors : array, shape (..., n, n)
        Eigenvectors in the columns.
    error : array, shape (..., n)
        How far each eigenvalue may be off by roundoff; 0 where it is known to be zero.
    residual : array, shape (...)
        See `kfac_core.linalg.certificate.eigen_residual`.
    status, clipped, fallback
        See `CholeskyFactor`.
    """

    eigenvalues: Array
    eigenvectors: Array
    error: Array
    status: Array
    residual: Array
    clipped: Array
    fallback: Array
