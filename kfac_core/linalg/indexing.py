"""Counting indices, and summing rows by index, which the standard does not have.

Conventions.  Indices are integers in ``[0, size)``, which the caller has to check, since
reading them synchronizes with the device.  No full one-hot matrix is formed: memory is
proportional to the result, or to a block of it.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched

_BLOCK_ELEMENTS = 2**22
"""How many comparisons the definition of `sum_rows_at` holds at a time."""


@dispatched
def count_indices(
    indices: Array, weights: Array, /, *, size: int, xp: Namespace
) -> Array:
    """Sum the weights of equal indices.

    Equal to ``np.bincount(indices, weights, minlength=size)``.

    Parameters
    ----------
    indices : array of int, shape (k,)
        The indices.
    weights : array, shape (k,)
        What each counts.
    size : int
        The number of different indices.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (size,)
        Of the dtype of the weights.

    Notes
    -----
    The definition sorts, adds up, and takes differences: ``k log k + size log k``, with a
    rounding error relative to the whole sum.
    """
    order = xp.argsort(indices)
    ids = xp.take(indices, order)
    sums = xp.cumulative_sum(xp.take(weights, order), include_initial=True)
    every = xp.arange(size + 1, dtype=ids.dtype, device=ns.device_of(ids))
    # The sum of an id is the difference of cumulative sums at its two edges.
    edges = xp.take(sums, xp.searchsorted(ids, every))
    return edges[1:] - edges[:-1]


@dispatched
def sum_rows_at(rows: Array, indices: Array, /, *, size: int, xp: Namespace) -> Array:
    """Sum the rows of equal indices.

    Equal to ``np.add.at(np.zeros((size, d)), indices, rows)``.

    Parameters
    ----------
    rows : array, shape (k, d)
        The rows.
    indices : array of int, shape (k,)
        Target position of each row.
    size : int
        The number of different indices.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (size, d)
        Of the dtype of the rows.

    Notes
    -----
    The definition multiplies with blocks of the one-hot matrix: ``2 k d size`` flops.
    """
    k = max(1, rows.shape[0])
    # The standard has no scatter-add.  A one-hot product has, in blocks that bound its
    # memory.
    step = max(1, _BLOCK_ELEMENTS // k)
    blocks = []
    for start in range(0, size, step):
        stop = min(size, start + step)
        block = xp.arange(
            start, stop, dtype=indices.dtype, device=ns.device_of(indices)
        )
        hot = ns.cast(xp, block[:, None] == indices[None, :], rows.dtype)
        blocks.append(xp.matmul(hot, rows))
    return blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=0)


@dispatched
def set_block(
    array: Array, block: Array, /, *, row: int, column: int, xp: Namespace
) -> Array:
    """Return a matrix with a block of it replaced, in its memory where that can be.

    Parameters
    ----------
    array : array, shape (n, m)
        The matrix; not to be used again.
    block : array, shape (k, l)
        The new entries.
    row, column : int
        Where its first entry goes.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (n, m)
        The matrix.
    """
    k, columns = block.shape
    array[row : row + k, column : column + columns] = block
    return array
