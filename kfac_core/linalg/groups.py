"""Matrices made of independent groups of columns.

Conventions.  A vector is a matrix of shape ``(n, Q m)``, group q having the
columns ``q m`` to ``(q + 1) m``; a stack of vectors has shape ``(Q, n, m)``.  With no
groups (an empty ``lead``) both are the same and nothing is done.
"""

from __future__ import annotations

from kfac_core.arrays import device_of
from kfac_core.backend import Array, Namespace

__all__ = ["dense_of_groups", "join_groups", "split_groups"]


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
        Of both.

    Returns
    -------
    array, shape (n Q m, n Q m)
        ``kron(A_q, G_q)`` in the rows and columns of group q, zero elsewhere, flattened
        row-major; ``kron(A, G)`` where there are no groups.
    """
    if A.ndim == 2:
        A, G = A[None, ...], G[None, ...]
    groups, n, m = A.shape[0], A.shape[-1], G.shape[-1]
    same = xp.eye(groups, dtype=A.dtype, device=device_of(A))
    # Axes: input row, group row, output row, input column, group column, output column.
    left = xp.permute_dims(A, (1, 0, 2))[:, :, None, :, None, None]
    right = G[None, :, :, None, None, :]
    product = left * right * same[None, :, None, None, :, None]
    size = n * groups * m
    return xp.reshape(product, (size, size))
