"""The homogeneous coordinate: the bias as an additional row of the weight.

Conventions.  A layer ``y = W^T x + b`` is ``y = V^T (x, 1)`` with the block's matrix
``V = (W; b)`` of shape ``(in + 1, out)``, the bias its last row.  The 1 that is appended
to a row x is its homogeneous coordinate.  A masked row counts as absent, so that its
coordinate is 0, as all of its x is.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns


def homogeneous_coordinate(
    x: Array, mask: Array | None, dtype: object, /, *, xp: Namespace
) -> Array:
    """Return the homogeneous coordinates of rows: 1, and 0 where masked.

    Parameters
    ----------
    x : array, shape (..., N, S, n) or (..., N S, n)
        The rows, of which shape and device are read.
    mask : array of bool, shape (N, S) or (N S,), or None
        The rows that count; all without a mask.  An array of floats is returned unchanged:
        a row that is multiplied by a number has that number in place of the 1.
    dtype : dtype
        Dtype of the result.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., N, S) or (..., N S)
        The last column of the rows, as `HomogeneousRows` keeps it.
    """
    if mask is None:
        return ns.ones(x.shape[:-1], dtype, like=x, xp=xp)
    # A masked row has no bias input either, or it would count in the last row of A.
    return xp.broadcast_to(ns.cast(xp, mask, dtype), x.shape[:-1])


def append_coordinate(x: Array, coordinate: Array, /, *, xp: Namespace) -> Array:
    """Return rows with their homogeneous coordinate, shape (..., n + 1): a copy."""
    return xp.concat([x, coordinate[..., None]], axis=-1)


def join_bias(
    weight: Array, bias: Array | None, /, *, transposed: bool, xp: Namespace
) -> Array:
    """Return a layer's matrix ``(W; b)`` from its weight and bias.

    Parameters
    ----------
    weight : array, shape (..., in, out), or (..., out, in) where `transposed`
        Weight as stored.  It is not transposed, since that copy takes twenty times as long.
    bias : array, shape (..., out), or None
        None where the layer has none.
    transposed : bool
        Whether the axis of outputs comes first.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., in(+1), out)
        A view of the weight where there is no bias.
    """
    if bias is not None:
        row = bias[..., :, None] if transposed else bias[..., None, :]
        weight = xp.concat([weight, row], axis=-1 if transposed else -2)
    return ns.transposed(weight, xp=xp) if transposed else weight


def split_bias(matrix: Array, features: int, /) -> tuple[Array, Array | None]:
    """Return the weight ``(in, out)`` and the bias ``(out,)`` of a matrix, as views.

    Parameters
    ----------
    matrix : array, shape (..., in(+1), out)
        Matrix from `join_bias`.
    features : int
        The number ``in`` of rows that are the weight's.

    Returns
    -------
    weight, bias : array, and array or None
        None if the matrix has no row after those of the weight.
    """
    if matrix.shape[-2] == features:
        return matrix, None
    return matrix[..., :features, :], matrix[..., features, :]
