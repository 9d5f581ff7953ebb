"""One triangle of a symmetric matrix as a rectangle, by slices.

Conventions.  The ``n (n + 1) / 2`` numbers on and below the diagonal of an n x n matrix
are kept.  With ``k = ceil(n / 2)`` and the blocks ``A = S[:k, :k]``, ``B = S[k:, :k]`` and
``C = S[k:, k:]``, the lower triangle of A and the transposed one of C fill one block, with
B below it:

    n even:  ``[C^T above A, one row apart; B]``, shape ``(n + 1, n / 2)``,
    n odd:   ``[C^T beside A, one column apart; B]``, shape ``(n, (n + 1) / 2)``.

Numbers are moved and not computed with, so that unpacking is exact.
This is the rectangular full packed form of LAPACK up to the order of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kfac_core import constraints
from kfac_core.array import Array, DType, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.symmetric import SymmetricMatrix, first_layout

_PIECE = 2**14
"""Numbers of a rectangle that are packed at a time where it is not kept."""


@structure(static=("size", "full_storage", "row_major"), meet=first_layout)
class PackedMatrix:
    """A symmetric matrix, or a stack of them, of which one triangle is kept.

    Attributes
    ----------
    array : array, shape (..., rows, columns)
        Lower triangle, from `pack_triangle`; with ``n (n + 1) / 2`` numbers.
    size : int
        Number n of rows of the matrix.
    full_storage, row_major : bool
        Triangles and memory order of the unpacked matrix.
    """

    array: Array
    size: int
    full_storage: bool
    row_major: bool

    @staticmethod
    def of(matrix: SymmetricMatrix, /) -> PackedMatrix:
        """Return a matrix packed."""
        x = matrix.array
        packed = pack_triangle(x, xp=ns.own_namespace(x))
        layout = bool(matrix.full_storage), ns.is_row_major(x)
        return PackedMatrix(packed, matrix.size, *layout)

    def unpacked(self) -> SymmetricMatrix:
        """Return the matrix in the order and with the triangles that it had."""
        xp = ns.own_namespace(self.array)
        full = unpack_triangle(self.array, self.size, xp=xp)
        if self.row_major:
            triangle = full if self.full_storage else xp.tril(full)
        else:
            triangle = full if self.full_storage else xp.triu(full)
            triangle = xp.matrix_transpose(triangle)
        return SymmetricMatrix(triangle, self.full_storage)


def packed_shape(n: int, /) -> tuple[int, int]:
    """Return the shape of the rectangle for n rows."""
    # LAPACK's rectangular full packed format: n (n + 1) / 2 numbers without indices,
    # made of three blocks that libraries copy as slices.
    return (n + 1, n // 2) if n % 2 == 0 else (n, (n + 1) // 2)


def packed_rows(shape: tuple[int, ...], /) -> int | None:
    """Return the number n of rows of a packed rectangle; None for any other shape."""
    n = max(shape[0] - 1, 2 * shape[1] - 1) if len(shape) == 2 else 0
    return n if n > 0 and packed_shape(n) == shape else None


def pack_triangle(matrix: Array, /, *, xp: Namespace) -> Array:
    """Return the lower triangle of a matrix as a rectangle.

    Parameters
    ----------
    matrix : array, shape (..., n, n)
        The entries above its diagonal are not read.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., rows, columns)
        As `packed_shape`.
    """
    rows, _ = packed_shape(matrix.shape[-1])
    return pack_rows(matrix, 0, rows, xp=xp)


def pack_rows(matrix: Array, start: int, stop: int, /, *, xp: Namespace) -> Array:
    """Return some rows of `pack_triangle`."""
    n = matrix.shape[-1]
    k = (n + 1) // 2
    if n % 2:
        rows = matrix[..., start:stop, :k]
    else:  # A row lower; of the first row all is above the diagonal.
        rows = matrix[..., max(start - 1, 0) : stop - 1, :k]
        if start == 0:
            rows = xp.concat([matrix[..., :1, :k], rows], axis=-2)
    last = min(stop, n - k)
    if start >= last:
        return rows
    other = xp.matrix_transpose(matrix[..., k:, k + start : k + last])
    if n % 2:  # A column apart.
        other = xp.concat([other[..., :1], other], axis=-1)
    device = ns.device_of(matrix)
    row = xp.arange(start, last, device=device)[:, None]
    column = xp.arange(k, device=device)[None, :]
    lower = row >= column if n % 2 else row > column
    top = xp.where(lower, rows[..., : last - start, :], other)
    return xp.concat([top, rows[..., last - start :, :]], axis=-2)


@dataclass(frozen=True)
class Triangle:
    """A lower triangle that is packed where it is asked for.

    Parameters
    ----------
    array : array, shape (..., n, n)
        The matrix, or a stack.
    """

    array: Array

    def __call__(self) -> Array:
        """Return the rectangle."""
        return pack_triangle(self.array, xp=ns.own_namespace(self.array))

    @property
    def dtype(self) -> DType:
        """The dtype of the numbers."""
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rectangle."""
        return (*self.array.shape[:-2], *packed_shape(self.array.shape[-1]))

    def pieces(self) -> Iterator[Array]:
        """Yield the rectangle some rows at a time, so that it is nowhere as a whole."""
        xp, n = ns.own_namespace(self.array), self.array.shape[-1]
        rows, step = packed_shape(n)[0], max(1, _PIECE // n)
        stack = xp.reshape(self.array, (-1, n, n))
        for k in range(stack.shape[0]):
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                yield pack_rows(stack[k, :, :], start, stop, xp=xp)


def unpack_triangle(packed: Array, n: int, /, *, xp: Namespace) -> Array:
    """Return the whole symmetric matrix of a rectangle.

    Parameters
    ----------
    packed : array, shape (..., rows, columns)
        Array made by `pack_triangle`.
    n : int
        The number of rows of the matrix.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, n)
        Both triangles.

    Raises
    ------
    ShapeError
        For a shape that does not fit n rows.
    """
    constraints.require_shape("packed", packed, (..., *packed_shape(n)))
    k = (n + 1) // 2
    split = k + 1 if n % 2 == 0 else k
    top, B = packed[..., :split, :], packed[..., split:, :]
    if n % 2 == 0:
        A, upper_C = top[..., 1:, :], top[..., :-1, :]
    else:
        A, upper_C = top, top[..., :-1, 1:]
    A = _mirrored(A)
    C = _mirrored(xp.matrix_transpose(upper_C))
    above = xp.concat([A, xp.matrix_transpose(B)], axis=-1)
    return xp.concat([above, xp.concat([B, C], axis=-1)], axis=-2)


def _mirrored(lower: Array) -> Array:
    """Return the symmetric matrix of a lower triangle."""
    return SymmetricMatrix(lower, full_storage=False).full()
