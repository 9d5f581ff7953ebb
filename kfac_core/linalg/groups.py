"""Matrices made of independent groups of columns.

Conventions.  A vector is a matrix of shape ``(n, Q m)``, group q having the
columns ``q m`` to ``(q + 1) m``; a stack of vectors has shape ``(Q, n, m)``.  With no
groups (an empty ``lead``) both are the same and nothing is done.
"""

from __future__ import annotations

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import device_of

__all__ = ["dense_of_blocks", "dense_of_groups", "join_groups", "split_groups"]


def split_groups(V: Array, lead: tuple[int, ...], /, *, xp: Namespace) -> Array:
    """Return a vector of shape (n, Q m) as a stack of shape (Q, n, m)."""
    if not lead:
        return V
    n, columns = V.shape
    return xp.permute_dims(xp.reshape(V, (n, lead[0], columns // lead[0])), (1, 0, 2))


def join_groups(V: Array, /, *, xp: Namespace) -> Array:
    """Return a stack of shape (Q, n, m) as a vector of shape (n, Q m)."""
    if V.ndim == 2:
        return V
    groups, n, m = V.shape
    return xp.reshape(xp.permute_dims(V, (1, 0, 2)), (n, groups * m))


def dense_of_groups(A: Array, G: Array, /, *, xp: Namespace) -> Array:
    """Return the dense matrix of independent Kronecker products.

    Parameters
    ----------
    A, G : array, shapes ((Q,) n, n) and ((Q,) m, m)
        The factors.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (n Q m, n Q m)
        ``kron(A_q, G_q)`` in the rows and columns of group q, zero elsewhere, flattened
        row-major; ``kron(A, G)`` where there are no groups.
    """
    n, m = A.shape[-1], G.shape[-1]
    left = A[..., :, None, :, None]
    product = left * G[..., None, :, None, :]
    blocks = xp.reshape(product, (*A.shape[:-2], n * m, n * m))
    return dense_of_blocks(blocks, n=n, xp=xp)


def dense_of_blocks(blocks: Array, /, *, n: int, xp: Namespace) -> Array:
    """Return the dense matrix of independent groups from the matrix of each.

    Parameters
    ----------
    blocks : array, shape ((Q,) n m, n m)
        Each flattened row-major from its vectors of shape (n, m).
    n : int
        The number of rows of a vector.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (n Q m, n Q m)
        Zero between the groups, flattened row-major; `blocks` where there are no groups.
    """
    if blocks.ndim == 2:
        return blocks
    groups, m = blocks.shape[0], blocks.shape[-1] // n
    same = xp.eye(groups, dtype=blocks.dtype, device=device_of(blocks))
    # Axes: input row, group row, output row, input column, group column, output column.
    parts = xp.permute_dims(xp.reshape(blocks, (groups, n, m, n, m)), (1, 0, 2, 3, 4))
    spread = parts[:, :, :, :, None, :] * same[None, :, None, None, :, None]
    size = n * groups * m
    return xp.reshape(spread, (size, size))
