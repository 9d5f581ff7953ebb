"""A symmetric matrix as one object, of which a backend may keep one triangle.

SYRK, POTRF, POTRI, SYEVD and SYMM read and write one triangle only, and mirroring the
other costs most of what an inverse costs.  Whether the array holds both triangles is
known here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.dispatch import dispatched
from kfac_core.array.namespaces import Scalar, device_of, own_namespace
from kfac_core.array.structure import structure

__all__ = [
    "SymmetricMatrix",
    "multiply_symmetric",
    "scale_symmetric",
]


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

    Notes
    -----
    A debiased average is a `multiple` of a running sum: a refresh would pass over every
    sum once more for it, and keep a copy of each, which most programs never multiply with.
    """

    array: Array
    whole: bool

    @staticmethod
    def multiple(base: SymmetricMatrix, factor: float, /) -> SymmetricMatrix:
        """Return a matrix times a number, multiplied out when its array is first read.

        What only passes over the numbers once more, as a damped copy does, takes them
        from `parts` instead.
        """
        if factor == 1.0:
            return base
        made = object.__new__(SymmetricMatrix)
        made.__dict__["_parts"] = base, factor
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Multiply out what `multiple` made: its fields are not there before."""
            parts = self.__dict__.get("_parts")
            if parts is None or name not in ("array", "whole"):
                raise AttributeError(f"SymmetricMatrix has no attribute {name!r}")
            base, factor = parts
            array, whole = scale_symmetric(base, factor, xp=own_namespace(base.array))
            # In another thread the same may be made; either is the matrix.
            self.__dict__.update(array=array, whole=whole)
            return self.__dict__[name]

    def parts(self) -> tuple[SymmetricMatrix, float]:
        """Return a matrix and a number whose product this is, both at hand.

        The same before and after it is multiplied out, so that nothing that is computed
        from them depends on who has read the array.
        """
        found: tuple[SymmetricMatrix, float] = self.__dict__.get("_parts", (self, 1.0))
        return found

    @property
    def like(self) -> Array:
        """An array of the shape, dtype and device of `array`, whatever it holds."""
        return self.parts()[0].array

    @property
    def size(self) -> int:
        """The number n of rows."""
        return int(self.like.shape[-1])

    def full(self) -> Array:
        """Return both triangles, shape (..., n, n); a copy only where one was missing."""
        if self.whole:
            return self.array
        xp = own_namespace(self.array)
        i = xp.arange(self.size, device=device_of(self.array))
        mirrored = xp.matrix_transpose(self.array)
        return xp.where(i[:, None] >= i, self.array, mirrored)

    def diagonal(self) -> Array:
        """Return the diagonal, shape (..., n)."""
        xp = own_namespace(self.array)
        return xp.linalg.diagonal(self.array)

    def trace(self) -> Array:
        """Return the trace, shape (...)."""
        xp = own_namespace(self.array)
        return xp.linalg.trace(self.array)

    def scaled(self, factor: Scalar, /) -> SymmetricMatrix:
        """Return the matrix times a number."""
        array, whole = scale_symmetric(self, factor, xp=own_namespace(self.array))
        return SymmetricMatrix(array, whole)


@dispatched
def scale_symmetric(
    matrix: SymmetricMatrix, factor: Scalar, /, *, xp: Namespace
) -> tuple[Array, bool]:
    """Multiply a symmetric matrix by a number.

    Parameters
    ----------
    matrix : SymmetricMatrix
        Never modified.
    factor : float or 0-d array
        The number.
    xp : namespace
        Of the matrix.

    Returns
    -------
    array : array, shape (..., n, n)
        A new array.
    whole : bool
        Whether both triangles of it hold the matrix.
    """
    return matrix.array * factor, matrix.whole


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
