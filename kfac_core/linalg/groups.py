"""Matrices with independent groups of columns.

Conventions.  A vector is a matrix of shape ``(n, Q m)``, group q having the
columns ``q m`` to ``(q + 1) m``; a stack of vectors has shape ``(Q, n, m)``.  With no
groups (an empty ``lead``) both are the same, and arrays are returned unchanged.  Axes in
front count many vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns


def split_groups(V: Array, lead: tuple[int, ...], /, *, xp: Namespace) -> Array:
    """Return vectors of shape (..., n, Q m) as stacks of shape (..., Q, n, m)."""
    if not lead:
        return V
    *many, n, columns = V.shape
    parts = xp.reshape(V, (*many, n, lead[0], columns // lead[0]))
    return ns.moved_axis(parts, -2, -3, xp=xp)


def join_groups(V: Array, /, *, xp: Namespace) -> Array:
    """Return stacks of shape (..., Q, n, m) as vectors of shape (..., n, Q m)."""
    if V.ndim == 2:
        return V
    *many, groups, n, m = V.shape
    return xp.reshape(ns.moved_axis(V, -3, -2, xp=xp), (*many, n, groups * m))


def side_by_side(
    function: Callable[[Array], Array], v: Array, ndim: int, /, *, xp: Namespace
) -> Array:
    """Apply a function of columns to many matrices at once.

    Parameters
    ----------
    function : callable
        Takes and returns an array of `ndim` axes; acts on each column independently.
    v : array, shape (..., n, k)
        Of `ndim` axes, or of more in front, over many matrices.
    ndim : int
        At least 2.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, k)
        Result for one array with the columns of all.

    Notes
    -----
    One product of two matrices is faster than many, and kernels for triangles or solves
    take no further axes.
    """
    if v.ndim == ndim:
        return function(v)
    many, shape = tuple(v.shape[:-ndim]), tuple(v.shape[-ndim:])
    K, k = math.prod(many), shape[-1]
    if K == 0:
        return v
    # K vectors of k columns become one matrix of k K columns: one BLAS call instead of
    # K.
    moved = ns.moved_axis(xp.reshape(v, (K, *shape)), 0, -1, xp=xp)
    done = function(xp.reshape(moved, (*shape[:-1], k * K)))
    # Undo: columns of all vectors back to one matrix for each.
    parts = xp.reshape(done, (*done.shape[:-1], k, K))
    parts = ns.moved_axis(parts, -1, 0, xp=xp)
    return xp.reshape(parts, (*many, *parts.shape[1:]))


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
    same = xp.eye(groups, dtype=blocks.dtype, device=ns.device_of(blocks))
    # Axes: input row, group row, output row, input column, group column, output column.
    parts = xp.permute_dims(xp.reshape(blocks, (groups, n, m, n, m)), (1, 0, 2, 3, 4))
    spread = parts[:, :, :, :, None, :] * same[None, :, None, None, :, None]
    size = n * groups * m
    return xp.reshape(spread, (size, size))
