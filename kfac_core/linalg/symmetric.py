"""A symmetric matrix as one object, of which a backend may keep one triangle.

SYRK, POTRF, POTRI, SYEVD and SYMM read and write one triangle only, and a running sum is
never mirrored.  Only this module knows whether an array holds both triangles.
"""

from __future__ import annotations

from typing import Any

from kfac_core.array import Array, Namespace, Scalar, finite
from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched
from kfac_core.array.structure import structure


def first_layout(first: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """Return the static fields of a sum: only the lower triangle of all is sure."""
    full = all(fields["full_storage"] for fields in (first, *others))
    return {**first, "full_storage": full}


@structure(static=("full_storage",), meet=first_layout)
class SymmetricMatrix:
    """A symmetric matrix, or a stack of them.

    Attributes
    ----------
    array : array, shape (..., n, n)
        The matrix in its lower triangle.
    full_storage : bool
        Whether the upper triangle holds it too; otherwise its entries are finite and
        meaningless.
    """

    array: Array
    full_storage: bool

    @property
    def size(self) -> int:
        """The number n of rows."""
        return int(self.array.shape[-1])

    def full(self) -> Array:
        """Return both triangles, shape (..., n, n); a copy only where one was missing."""
        if self.full_storage:
            return self.array
        xp = ns.own_namespace(self.array)
        i = xp.arange(self.size, device=ns.device_of(self.array))
        # Of the lower triangle only; the upper one may hold old numbers.
        mirrored = xp.matrix_transpose(self.array)
        return xp.where(i[:, None] >= i, self.array, mirrored)

    def diagonal(self) -> Array:
        """Return the diagonal, shape (..., n)."""
        return matrix_diagonal(self.array, xp=ns.own_namespace(self.array))

    def trace(self) -> Array:
        """Return the trace, shape (...)."""
        return matrix_trace(self.array, xp=ns.own_namespace(self.array))

    def scaled(self, factor: Scalar, /) -> SymmetricMatrix:
        """Return the matrix times a number."""
        xp = ns.own_namespace(self.array)
        return SymmetricMatrix(*scale_symmetric(self, factor, xp=xp))


@structure(static=("roundoff",))
class ScaledMatrix:
    """``M = c B + shift I`` with B symmetric, which is not multiplied out; or a stack.

    Attributes
    ----------
    matrix : SymmetricMatrix
        Matrix B; not modified.
    factor : array, shape () or (...)
        Factor c, positive.
    shift : array, shape () or (...), or None
        Finite and >= 0; None for ``c B`` alone.
    roundoff : float
        Distance from 1 to the next number of the dtype that B was stored in, where that is
        known; 0 for a matrix that is exact.
    rank : array, shape () or (...), or None
        Bound of the number of nonzero eigenvalues of B; None where it is not known.

    Notes
    -----
    A debiased average is ``c B`` with a running sum B: a refresh would pass over every sum
    once more to multiply it out, and keep a copy of each.
    """

    matrix: SymmetricMatrix
    factor: Array
    shift: Array = None
    roundoff: float = 0.0
    rank: Array | None = None

    @property
    def size(self) -> int:
        """The number n of rows."""
        return self.matrix.size

    def trace(self) -> Array:
        """Return the trace of ``c B``, shape (...)."""
        xp = ns.own_namespace(self.factor)
        return ns.as_number(self.factor) * matrix_trace(self.matrix.array, xp=xp)

    def multiplied(self) -> SymmetricMatrix:
        """Return ``c B`` multiplied out."""
        return self.matrix.scaled(self.factor)

    def multiply(self, v: Array, /, *, shifted: bool = True, xp: Namespace) -> Array:
        """Return ``M v``, or ``c B v``."""
        shift = self.shift if shifted else 0.0
        return multiply_shifted(self.matrix, v, factor=self.factor, shift=shift, xp=xp)


def for_matrices(x: Scalar, /) -> Scalar:
    """Return a number, or one for each of a stack, in a shape to multiply matrices."""
    # NumPy multiplies by a 0-d array in half of the time of one with axes.
    return x[..., None, None] if getattr(x, "ndim", 0) else x


@dispatched
def matrix_diagonal(x: Array, /, *, xp: Namespace) -> Array:
    """Return the diagonals of square matrices.

    Parameters
    ----------
    x : array, shape (..., n, n)
        The matrices.
    xp : namespace
        Array API namespace of the array.

    Returns
    -------
    array, shape (..., n)
        The diagonals; not to be written to.
    """
    return xp.linalg.diagonal(x)


@dispatched
def matrix_trace(x: Array, /, *, xp: Namespace) -> Array:
    """Return the traces of square matrices.

    Parameters
    ----------
    x : array, shape (..., n, n)
        The matrices.
    xp : namespace
        Array API namespace of the array.

    Returns
    -------
    array, shape (...)
        The traces, in the dtype of the array.
    """
    return xp.linalg.trace(x)


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
        Array API namespace of the matrix.

    Returns
    -------
    array : array, shape (..., n, n)
        A new array.
    full_storage : bool
        Whether both triangles of it hold the matrix.
    """
    return matrix.array * factor, matrix.full_storage


@dispatched
def multiply_symmetric(matrix: SymmetricMatrix, v: Array, /, *, xp: Namespace) -> Array:
    """Multiply a symmetric matrix with a matrix from the left.

    Parameters
    ----------
    matrix : SymmetricMatrix
        Matrix of n rows.
    v : array, shape (..., n, k)
        Array of the same dtype.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, k)
        ``S v``, in ``2 n^2 k`` flops.
    """
    # Products of a flagged matrix are NaN, which NumPy would warn about.
    with finite.quiet("status", xp=xp):
        return xp.matmul(matrix.full(), v)


@dispatched
def multiply_shifted(
    matrix: SymmetricMatrix, v: Array, /, *, factor: Array, shift: Scalar, xp: Namespace
) -> Array:
    """Return ``(c B + shift I) v``, as `multiply_symmetric` of a matrix B.

    Parameters
    ----------
    matrix : SymmetricMatrix
        Matrix B of n rows.
    v : array, shape (..., n, k)
        Array of the same dtype.
    factor : array, shape () or (...)
        Factor c.
    shift : float or array, shape () or (...)
        Shift of the diagonal.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, k)
        The product.
    """
    product = multiply_symmetric(matrix, v, xp=xp)
    if getattr(factor, "ndim", 0) or getattr(shift, "ndim", 0):
        factor, shift = for_matrices(factor), for_matrices(shift)
    return factor * product + shift * v


def one_norm(matrix: SymmetricMatrix, /, *, xp: Namespace) -> Array:
    """Return the 1-norm of symmetric matrices, the largest column sum of magnitudes.

    Parameters
    ----------
    matrix : SymmetricMatrix
        The matrices.
    xp : namespace
        Array API namespace of the matrices.

    Returns
    -------
    array, shape (...)
        The norms, in the dtype of the matrices.
    """
    magnitudes = SymmetricMatrix(xp.abs(matrix.array), matrix.full_storage)
    ones = xp.ones_like(matrix.array[..., :, :1])
    sums = multiply_symmetric(magnitudes, ones, xp=xp)
    return xp.max(sums[..., 0], axis=-1)
