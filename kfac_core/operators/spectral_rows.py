"""Weighted norms of examples' gradients in a block's eigenbasis, from their rows.

Conventions.  N examples and M sources with gradients ``D = sum_s x g^T``; w are weights
of the shape of the spectrum, such as ``1 / (s + lam)``, and R the coordinates of D.
Where an example is a single row of a Kronecker basis, R is ``(Q_A^T x) (Q_G^T g)^T``, of
rank one, and

    sum_ij w_ij R_ij^2  =  sum_j [ (Q_A^T x)^2 w ]_j (Q_G^T g)_j^2

needs no R: that is the identity ``(x (x) g)^T (A (x) G)^-1 (x (x) g) = (x^T A^-1 x)
(g^T G^-1 g)`` with damping.  Elsewhere R is formed.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.layers.layer import AnyRows
from kfac_core.layers.rows import Rows
from kfac_core.operators.spectral import SpectralOperator


def row_coordinates(block: SpectralOperator, rows: AnyRows, /) -> Array:
    """Return each example's gradient in the eigenbasis.

    Parameters
    ----------
    block : SpectralOperator
        Operator of the rows' layer.
    rows : Rows, IdRows or ExampleGradients
        N examples and M sources.

    Returns
    -------
    array, shape (M, N, (Q,) n, m) or (M, N, n m, 1)
        R, in the block's dtype.

    Raises
    ------
    MixedArraysError
        For rows of another library or device.
    UnsupportedError
        If positions of the examples are missing.
    """
    xp = ns.namespace_of(rows=rows.like, block=block.damping)
    rotated = _in_basis(block, rows, xp)
    if rotated is None:
        vectors = rows.vectors(block.dtype, xp=xp)
        lead = rows.sources, rows.examples
        return block.to_basis(xp.reshape(vectors, (*lead, *block.vector_shape)))
    R = rotated.per_example(block.dtype, xp=xp)
    return ns.moved_axis(R, 0, 2, xp=xp) if block.lead else R


def row_squares(block: SpectralOperator, weights: Array, rows: AnyRows, /) -> Array:
    """Return ``sum_ij w_ij R_ij^2`` of each gradient.

    Parameters
    ----------
    block : SpectralOperator
        Operator of the rows' layer.
    weights : array, of the shape of the spectrum
        Weights w.
    rows : Rows, IdRows or ExampleGradients
        N examples and M sources.

    Returns
    -------
    array, shape (M, N)
        In the block's dtype.

    Raises
    ------
    MixedArraysError, UnsupportedError
        See `row_coordinates`.

    Notes
    -----
    ``2 N (n^2 + n m + M m^2)`` flops for single rows, and no matrix of any example.
    """
    xp = ns.namespace_of(rows=rows.like, block=block.damping)
    pair = _rank_one(block, rows, xp)
    if pair is None:
        R = row_coordinates(block, rows)
        axes = tuple(range(2, R.ndim))
        return xp.sum(R * R * weights, axis=axes)
    # R_ij = x_i g_j, so that the squares of x and of g are enough.
    x, g = pair
    half = xp.matmul(x * x, weights)
    total = xp.sum(half[..., None, :, :] * g * g, axis=-1)
    return xp.sum(total, axis=0) if block.lead else total


def row_products(block: SpectralOperator, weights: Array, rows: AnyRows, /) -> Array:
    """Return ``sum_ij w_ij R_ij R'_ij`` of each example's pairs of sources.

    Parameters
    ----------
    block, weights, rows
        See `row_squares`.

    Returns
    -------
    array, shape (N, M, M)
        In the block's dtype.

    Raises
    ------
    MixedArraysError, UnsupportedError
        See `row_coordinates`.

    Notes
    -----
    ``2 N (n^2 + n m + M m^2 + M^2 m)`` flops for single rows.
    """
    xp = ns.namespace_of(rows=rows.like, block=block.damping)
    pair = _rank_one(block, rows, xp)
    if pair is None:
        R = ns.moved_axis(row_coordinates(block, rows), 0, 1, xp=xp)
        left = xp.reshape(R * weights, (*R.shape[:2], -1))
        right = xp.reshape(R, left.shape)
        return xp.matmul(left, xp.matrix_transpose(right))
    x, g = pair
    # All sources of an example share x, and with it this half of the sum.
    half = xp.matmul(x * x, weights)
    g = ns.moved_axis(g, -3, -2, xp=xp)
    total = xp.matmul(half[..., None, :] * g, xp.matrix_transpose(g))
    return xp.sum(total, axis=0) if block.lead else total


def _in_basis(block: SpectralOperator, rows: AnyRows, xp: Namespace) -> Rows | None:
    """Return the rows ``Q_A^T x`` and ``Q_G^T g``; None if the bases mix x and g."""
    if not (block.is_kronecker and isinstance(rows, Rows)):
        return None
    # Groups of a convolution are a first axis of rows, and of the bases.
    if (rows.inputs.ndim == 4) != bool(block.lead):
        return None
    Q_A, Q_G = (
        None if basis is None else basis.eigenvectors
        for basis in (block.input, block.output)
    )
    return rows.in_basis(Q_A, Q_G, block.dtype, xp=xp)


def _rank_one(
    block: SpectralOperator, rows: AnyRows, xp: Namespace
) -> tuple[Array, Array] | None:
    """Return ``Q_A^T x`` and ``Q_G^T g`` of single rows, ((Q,) N, n) and ((Q,) M, N, m)."""
    rotated = _in_basis(block, rows, xp) if rows.positions == 1 else None
    if rotated is None:
        return None
    x = rotated.full_inputs(block.dtype, xp=xp)
    return x[..., 0, :], rotated.output_grads[..., 0, :]
