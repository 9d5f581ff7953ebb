"""Gram matrices of rows, and their running sums.

Conventions.  Rows are examples: ``rows`` has shape ``(n, d)`` and the Gram matrix is
``rows^T rows``, a sum and not a mean.  A homogeneous coordinate is a last column, which
`HomogeneousRows` and the ``tail`` of `gram_update` keep apart, so that appending it does
not copy the rows.  Weights multiply outer products:
``sum_i w_i x_i x_i^T``.
"""

from __future__ import annotations

from typing import NamedTuple

from kfac_core import errors
from kfac_core.array import Array, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched
from kfac_core.linalg.symmetric import SymmetricMatrix


class HomogeneousRows(NamedTuple):
    """Rows ``(x, 1)`` with the last coordinate apart, so that no x is copied.

    Attributes
    ----------
    x : array, shape (..., R, d)
        Rows without the coordinate.
    coordinate : array, shape (..., R)
        Their last column: 1, or the factor of a weighted row; 0 where masked.
    """

    x: Array
    coordinate: Array


def gram(
    rows: Array,
    /,
    *,
    weights: Array | None = None,
    mask: Array | None = None,
    homogeneous: bool = False,
) -> Array:
    r"""Return the weighted Gram matrix of rows, ``sum_i w_i x_i x_i^T``.

    .. math:: \sum_i w_i x_i x_i^T

    Equal to ``x.T @ (w[:, None] * x)`` with ``x`` the kept rows, a 1 appended to each
    where `homogeneous` is true.

    Parameters
    ----------
    rows : array, shape (n, d)
        The rows x_i.
    weights : array, shape (n,), optional
        Nonnegative weights w_i; 1 by default.
    mask : array of bool, shape (n,), optional
        False for rows that count as absent, whatever they hold.
    homogeneous : bool
        Whether a 1 is appended to each row.

    Returns
    -------
    array, shape (d(+1), d(+1))
        Symmetric; both triangles; float32 where the rows are narrower.

    Raises
    ------
    ShapeError
        If `rows` is not a matrix, or `weights` or `mask` do not have one entry per row.
    DtypeError
        For integer arrays.
    MixedArraysError
        For arrays of several libraries or devices.

    Notes
    -----
    ``n d^2`` flops where the backend has a symmetric rank-k update, else twice that.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> kc.gram(np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([[10., 14.],
           [14., 20.]])
    """
    xp = ns.namespace_of(rows=rows, optional={"weights": weights, "mask": mask})
    if rows.ndim != 2:
        raise errors.ShapeError(
            f"Expected `rows` to have shape (n, d), got {tuple(rows.shape)}."
        )
    ns.require_floating(xp, rows, "rows")
    rows = ns.cast(xp, rows, ns.wide_dtype(xp, rows.dtype))
    for name, x in (("weights", weights), ("mask", mask)):
        if x is not None:
            ns.require_matrix(x, (rows.shape[0],), name)
    if homogeneous:
        rows = xp.concat([rows, xp.ones_like(rows[:, :1])], axis=1)
    if weights is not None:
        ns.require_floating(xp, weights, "weights")
        rows = rows * xp.sqrt(ns.cast(xp, weights, rows.dtype))[:, None]
    if mask is not None:
        rows = xp.where(mask[:, None], rows, xp.zeros_like(rows))
    return updated_gram(None, rows, 0.0, 1.0, xp=xp).full()


def updated_gram(
    total: SymmetricMatrix | None,
    rows: Array | HomogeneousRows,
    decay: Scalar,
    scale: Scalar,
    /,
    *,
    overwrite: bool = False,
    xp: Namespace,
) -> SymmetricMatrix:
    """Return ``decay * total + scale * rows^T rows``; see `gram_update`.

    Whatever the library keeps of it, a running sum has the form that it began with.
    """
    # The homogeneous 1 is a border of the Gram matrix and no column of x, which would
    # be copied to append it.
    x, tail = rows if isinstance(rows, HomogeneousRows) else (rows, None)
    array, full_storage = gram_update(
        total, x, tail=tail, decay=decay, scale=scale, overwrite=overwrite, xp=xp
    )
    if total is not None:
        # Both triangles hold the sum only if they held both terms.
        full_storage = full_storage and total.full_storage
    return SymmetricMatrix(array, full_storage)


@dispatched
def gram_update(
    total: SymmetricMatrix | None,
    rows: Array,
    /,
    *,
    tail: Array | None,
    decay: Scalar,
    scale: Scalar,
    overwrite: bool = False,
    xp: Namespace,
) -> tuple[Array, bool]:
    """Return ``decay * total + scale * [rows, tail]^T [rows, tail]``.

    Parameters
    ----------
    total : SymmetricMatrix or None
        The running sum; None stands for zero.
    rows : array, shape (..., n, d)
        Rows in the dtype of `total`; leading axes are a stack of independent problems.
    tail : array, shape (..., n), or None
        A last column of the rows.
    decay, scale : float or 0-d array
        The two coefficients.
    overwrite : bool
        Whether the memory of `total` may become the result's.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array : array, shape (..., d(+1), d(+1))
        A new array, or that of `total` with `overwrite`.
    full_storage : bool
        Whether both triangles of it hold the matrix.
    """
    product = xp.matmul(xp.matrix_transpose(rows), rows)
    # A general product rows^T rows is symmetric only up to rounding, and libraries differ
    # in the triangle that a factorization reads.
    product = 0.5 * (product + xp.matrix_transpose(product))
    if tail is not None:
        border = xp.matmul(xp.matrix_transpose(rows), tail[..., None])
        corner = xp.sum(tail * tail, axis=-1)[..., None, None]
        below = xp.concat([xp.matrix_transpose(border), corner], axis=-1)
        product = xp.concat([xp.concat([product, border], axis=-1), below], axis=-2)
    updated = product * scale
    if total is not None:
        updated = updated + total.full() * decay
    return updated, True
