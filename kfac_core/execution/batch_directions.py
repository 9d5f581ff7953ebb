"""The preconditioned gradient of a batch, by whichever way is the cheaper.

Conventions.  The gradient is the mean over the batch's examples, ``V = 1/N X^T G``, of R
rows x of n and g of m numbers.  With an operator ``S (A + a I) (x) (G + b I)`` its inverse
may act on the rows before they are multiplied (identity A15 of
`kfac_core.CurvatureOperator.multiply_inverse_of_rows`):

    2 R (n^2 + m^2 + n m)  flops on rows,     2 n m (n + m + R)  on the matrix.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import cast, full_of, wide_dtype
from kfac_core.block import Block, Fed
from kfac_core.conventions import Conventions
from kfac_core.layers.rows import Rows
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["direction_of_batch", "rows_are_cheaper"]


def direction_of_batch(
    block: Block,
    operator: CurvatureOperator,
    batch: Fed,
    /,
    *,
    conventions: Conventions,
) -> Array:
    """Return ``F^-1 V`` with the mean gradient V of a batch.

    Parameters
    ----------
    block : Block
        Its description.
    operator : CurvatureOperator
        Its snapshot.
    batch : Batch, GradientBatch or sequence of Batch
        What the layer saw; never modified.
    conventions : Conventions
        How the output gradients are scaled.

    Returns
    -------
    array, shape (in(+1), out)
        ``operator.multiply_inverse(block.mean_gradient(batch))``, up to rounding.

    Raises
    ------
    KFACError
        As the two functions do, for arrays that do not fit.

    Notes
    -----
    The smaller of the two numbers of flops above, where the rows can be acted on at all:
    one source, no groups, a factored rule of damping.
    """
    rows = block.rows(batch)
    if not (
        isinstance(rows, Rows)
        and operator.acts_on_rows
        and rows.sources == 1
        and rows_are_cheaper(rows.examples * rows.positions, operator.shape)
    ):
        gradient = block.mean_gradient(batch, conventions=conventions)
        return operator.multiply_inverse(gradient)
    xp = array_api_compat.array_namespace(rows.like)
    dtype = operator.like.dtype
    x, g = rows.full_inputs(dtype, xp=xp), cast(xp, rows.output_grads, dtype)
    x, g = xp.reshape(x, (-1, x.shape[-1])), xp.reshape(g, (-1, g.shape[-1]))
    scale = conventions.gradient_scale(
        examples=rows.examples, rows=rows.kept(dtype, xp=xp)
    )
    share = full_of(xp, scale / rows.examples, operator.like)
    weights = xp.ones_like(x[:, 0]) * share
    direction = operator.multiply_inverse_of_rows(x, g, weights=weights)
    return cast(xp, direction, wide_dtype(xp, rows.like.dtype))


def rows_are_cheaper(rows: int, shape: tuple[int, int], /) -> bool:
    """Whether so many rows take fewer flops than the matrix that they make."""
    n, m = shape
    return rows * (n * n + m * m) < n * m * (n + m)
