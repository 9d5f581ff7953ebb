"""What the ladder makes: factors, inverses and bases, each with its certificate.

Conventions.  Leading axes are a stack.  A ``residual`` is relative, measured as
`kfac_core.linalg.certificate` says; a ``status`` holds `Status` flags; a ``fallback``
says by which step of `kfac_core.linalg.ladder` a thing was made, as a number of
`Fallback`.  Both are arrays and no part of the form, which is the same for all matrices.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import own_namespace
from kfac_core.array.structure import structure
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = ["Basis", "Fallback", "Inverse", "Positive", "fallback_of"]


class Fallback(IntEnum):
    """By which step of the fallback chain a factorization was made."""

    WORKING = 0
    """In the dtype that was asked for: none was needed."""
    FLOAT64 = 1
    """In float64, cast back."""
    EIGENDECOMPOSITION = 2
    """In the widest dtype, with negative eigenvalues set to zero."""


def fallback_of(made: Any, /) -> Fallback:
    """Return the fallback of a factorization, for reports; synchronizes with the device.

    Parameters
    ----------
    made : Positive, Inverse, Basis or another structure with a ``fallback``
        Of a stack, the last that any matrix of it needed.

    Returns
    -------
    Fallback
        Whose name in small letters a report shows.
    """
    xp = own_namespace(made.fallback)
    return Fallback(int(xp.max(made.fallback)))


@structure()
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
        The clipped mass of an eigendecomposition; zero for the others.
    fallback : array of int32, shape (...)
        Of `Fallback`.
    """

    lower: Array
    status: Array
    residual: Array
    clipped: Array
    fallback: Array


@structure()
class Inverse:
    """The inverse of a damped matrix.

    Attributes
    ----------
    matrix : SymmetricMatrix
        ``(A + shift I)^-1``.
    status, residual, clipped, fallback
        As in `Positive`.
    """

    matrix: SymmetricMatrix
    status: Array
    residual: Array
    clipped: Array
    fallback: Array


@structure()
class Basis:
    """An eigendecomposition of a symmetric positive-semidefinite matrix.

    Attributes
    ----------
    eigenvalues : array, shape (..., n)
        Ascending, negative ones set to zero.
    eigenvectors : array, shape (..., n, n)
        In the columns.
    status, residual, clipped, fallback
        As in `Positive`.
    """

    eigenvalues: Array
    eigenvectors: Array
    status: Array
    residual: Array
    clipped: Array
    fallback: Array
