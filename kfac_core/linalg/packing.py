"""One triangle of a symmetric matrix as a rectangle, by slices.

Conventions.  Of an n x n matrix the ``n (n + 1) / 2`` numbers on and below the diagonal
are kept.  With ``k = ceil(n / 2)`` and the blocks ``A = S[:k, :k]``, ``B = S[k:, :k]`` and
``C = S[k:, k:]``, the lower triangle of A and the transposed one of C fill one block, and
B stands below it:

    n even:  ``[C^T above A, one row apart; B]``, shape ``(n + 1, n / 2)``,
    n odd:   ``[C^T beside A, one column apart; B]``, shape ``(n, (n + 1) / 2)``.

Numbers are moved and never added, so that what comes back is what was there, bit by bit.
This is the rectangular full packed form of LAPACK up to the order of its blocks.
"""

from __future__ import annotations

from kfac_core import constraints
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns

__all__ = ["pack_triangle", "packed_rows", "packed_shape", "unpack_triangle"]


def packed_shape(n: int, /) -> tuple[int, int]:
    """Return the shape of the rectangle for n rows."""
    return (n + 1, n // 2) if n % 2 == 0 else (n, (n + 1) // 2)


def packed_rows(shape: tuple[int, ...], /) -> int | None:
    """Return the number n of rows that a rectangle is of; None where it is of none."""
    n = max(shape[0] - 1, 2 * shape[1] - 1) if len(shape) == 2 else 0
    return n if n > 0 and packed_shape(n) == shape else None


def pack_triangle(matrix: Array, /, *, xp: Namespace) -> Array:
    """Return the lower triangle of a matrix as a rectangle.

    Parameters
    ----------
    matrix : array, shape (..., n, n)
        What stands above its diagonal is not read.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., rows, columns)
        As `packed_shape`.
    """
    n = matrix.shape[-1]
    k = (n + 1) // 2
    A, C = matrix[..., :k, :k], xp.matrix_transpose(matrix[..., k:, k:])
    if n % 2 == 0:
        row = A[..., :1, :]
        top = xp.concat([row, A], axis=-2)
        other = xp.concat([C, row], axis=-2)
        kept = _below(top, xp)
    else:
        column = A[..., :, :1]
        top = A
        other = xp.concat([column, xp.concat([C, A[..., :1, 1:]], axis=-2)], axis=-1)
        kept = _on_or_below(top, xp)
    return xp.concat([xp.where(kept, top, other), matrix[..., k:, :k]], axis=-2)


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
        For a shape that is not that of n rows.
    """
    constraints.require_shape("packed", packed, (..., *packed_shape(n)))
    k = (n + 1) // 2
    split = k + 1 if n % 2 == 0 else k
    top, B = packed[..., :split, :], packed[..., split:, :]
    if n % 2 == 0:
        A, upper_C = top[..., 1:, :], top[..., :-1, :]
    else:
        A, upper_C = top, top[..., :-1, 1:]
    A = _mirrored(A, xp)
    C = _mirrored(xp.matrix_transpose(upper_C), xp)
    above = xp.concat([A, xp.matrix_transpose(B)], axis=-1)
    return xp.concat([above, xp.concat([B, C], axis=-1)], axis=-2)


def _mirrored(lower: Array, xp: Namespace) -> Array:
    """Return the symmetric matrix of a lower triangle."""
    return xp.where(_on_or_below(lower, xp), lower, xp.matrix_transpose(lower))


def _on_or_below(x: Array, xp: Namespace) -> Array:
    rows, columns = _indices(x, xp)
    return rows >= columns


def _below(x: Array, xp: Namespace) -> Array:
    rows, columns = _indices(x, xp)
    return rows > columns


def _indices(x: Array, xp: Namespace) -> tuple[Array, Array]:
    device = ns.device_of(x)
    rows = xp.arange(x.shape[-2], device=device)[:, None]
    return rows, xp.arange(x.shape[-1], device=device)[None, :]
