"""A symmetric matrix as one object, of which a backend may keep one triangle.

SYRK, POTRF, POTRI, SYEVD and SYMM read and write one triangle only, and mirroring the
other costs most of what an inverse costs.  Whether the array holds both triangles is
known here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import array_api_compat

from kfac_core.backend import Array, Namespace
from kfac_core.linalg.dispatch import dispatched
from kfac_core.structure import structure

__all__ = ["SymmetricMatrix", "multiply_symmetric", "symmetric_identity"]


def _whole_if_all_are(*fields: dict[str, Any]) -> dict[str, Any]:
    """Return the static fields of a sum: only the lower triangle of all is sure."""
    return {"whole": all(field["whole"] for field in fields)}


@structure(static=("whole",), meet=_whole_if_all_are)
class SymmetricMatrix:
    """A symmetric matrix, or a stack of them.

    Attributes
    ----------
    array : array, shape (..., n, n)
        The matrix in its lower triangle.
    whole : bool
        Whether the upper triangle holds it too; else what stands there is finite but
        means nothing.
    """

    array: Array
    whole: bool

    @property
    def size(self) -> int:
        """The number n of rows."""
        return int(self.array.shape[-1])

    def full(self) -> Array:
        """Return both triangles, shape (..., n, n); a copy only where one was missing."""
        if self.whole:
            return self.array
        xp = array_api_compat.array_namespace(self.array)
        below = xp.tril(self.array, k=-1)
        return xp.tril(self.array) + xp.matrix_transpose(below)

    def diagonal(self) -> Array:
        """Return the diagonal, shape (..., n)."""
        xp = array_api_compat.array_namespace(self.array)
        return xp.linalg.diagonal(self.array)

    def trace(self) -> Array:
        """Return the trace, shape (...)."""
        xp = array_api_compat.array_namespace(self.array)
        return xp.linalg.trace(self.array)

    def scaled(self, factor: Any, /) -> SymmetricMatrix:
        """Return the matrix times a number."""
        return SymmetricMatrix(self.array * factor, self.whole)


@dispatched
def multiply_symmetric(matrix: SymmetricMatrix, v: Array, /, *, xp: Namespace) -> Array:
    """Multiply a symmetric matrix with a matrix from the left.

    Parameters
    ----------
    matrix : SymmetricMatrix
        Of n rows.
    v : array, shape (..., n, k)
        Of the same dtype.
    xp : namespace
        Of both.

    Returns
    -------
    array, shape (..., n, k)
        ``S v``, in ``2 n^2 k`` flops.
    """
    return xp.matmul(matrix.full(), v)


def symmetric_identity(
    n: int, /, *, dtype: Any, device: Any, xp: Namespace
) -> SymmetricMatrix:
    """Return the identity matrix of n rows."""
    return SymmetricMatrix(xp.eye(n, dtype=dtype, device=device), whole=True)
