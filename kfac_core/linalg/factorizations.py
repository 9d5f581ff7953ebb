"""What the ladder makes: factors, inverses and bases, each with its certificate.

Conventions.  Leading axes are a stack.  A ``residual`` is relative, measured as
`kfac_core.linalg.certificate` says; a ``status`` holds `Status` flags; the ``rung`` is
that of `kfac_core.linalg.ladder` on which a thing was made.
"""

from __future__ import annotations

from typing import Literal

from kfac_core.array.backend import Array
from kfac_core.array.structure import structure
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = ["Basis", "Inverse", "Positive", "Rung"]

Rung = Literal["working", "float64", "eigendecomposition"]


@structure(static=("rung",))
class Positive:
    """The Cholesky factor of a damped matrix.

    Attributes
    ----------
    lower : array, shape (..., n, n)
        ``L L^T = A + shift I``.
    status : array of int32, shape (...)
        Of `Status` flags.
    residual : array, shape (...)
        The certificate.
    clipped : array, shape (...)
        The clipped mass of the last rung; zero on the others.
    rung : str
        The rung that held.
    """

    lower: Array
    status: Array
    residual: Array
    clipped: Array
    rung: Rung


@structure(static=("rung",))
class Inverse:
    """The inverse of a damped matrix.

    Attributes
    ----------
    matrix : SymmetricMatrix
        ``(A + shift I)^-1``.
    status, residual, clipped, rung
        As in `Positive`.
    """

    matrix: SymmetricMatrix
    status: Array
    residual: Array
    clipped: Array
    rung: Rung


@structure(static=("rung",))
class Basis:
    """An eigendecomposition of a symmetric positive-semidefinite matrix.

    Attributes
    ----------
    eigenvalues : array, shape (..., n)
        Ascending, negative ones set to zero.
    eigenvectors : array, shape (..., n, n)
        In the columns.
    status, residual, clipped, rung
        As in `Positive`.
    """

    eigenvalues: Array
    eigenvectors: Array
    status: Array
    residual: Array
    clipped: Array
    rung: Rung
