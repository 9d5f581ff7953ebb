"""Products of one layer's rows with vectors: ``<D_r, V>`` and ``sum_r c_r D_r``.

Conventions.  As `kfac_core.samples.jacobian`; M is the number of outputs C, which are the
sources of the rows.  A layer of Q groups has matrices of shape ``(n, Q m)``.
"""

from __future__ import annotations

from functools import singledispatch

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.rows import Rows
from kfac_core.linalg.groups import join_groups, split_groups
from kfac_core.linalg.indexing import sum_rows_at


def as_pair(
    rows: object, dtype: object, /, *, xp: Namespace
) -> tuple[Array, Array] | None:
    """Return rows as matrices (N, n) and (N, m) of a dtype, where they are no more.

    None for other kinds of rows, for several positions, outputs or groups, for a mask, and
    for a homogeneous coordinate that is still to be appended.
    """
    if not isinstance(rows, Rows) or rows.homogeneous or rows.mask is not None:
        return None
    x, g = rows.inputs, rows.output_grads
    if g.ndim != 4 or g.shape[0] != 1 or g.shape[2] != 1:
        return None
    return ns.cast(xp, x[:, 0, :], dtype), ns.cast(xp, g[0, :, 0, :], dtype)


@singledispatch
def row_products(rows: object, V: Array, /, *, xp: Namespace) -> Array:
    """Return ``<D_nc, V>`` for each example and output, shape (N, C)."""
    raise TypeError(f"no products of rows of type {type(rows).__name__}")


@row_products.register
def _(rows: Rows, V: Array, /, *, xp: Namespace) -> Array:
    x = rows.full_inputs(V.dtype, xp=xp)
    g = ns.cast(xp, rows.output_grads, V.dtype)
    V = split_groups(V, tuple(x.shape[:-3]), xp=xp)
    # One product of all positions: as a stack of small ones it takes ten times as long.
    along = ns.reshaped(_flat(x, xp) @ V, (*x.shape[:-1], V.shape[-1]), xp=xp)
    by_position = xp.vecdot(along[..., None, :, :, :], g)
    # A sum of one number takes longer than the product.
    single = g.shape[-2] == 1
    by_group = by_position[..., 0] if single else xp.sum(by_position, axis=-1)
    summed = by_group if x.ndim == 3 else xp.sum(by_group, axis=0)
    return ns.transposed(summed, xp=xp)


@row_products.register
def _(rows: IdRows, V: Array, /, *, xp: Namespace) -> Array:
    flat = xp.reshape(rows.ids, (-1,))
    taken = xp.reshape(xp.take(V, flat, axis=0), (*rows.ids.shape, V.shape[-1]))
    taken = taken * rows.values(V.dtype, xp=xp)[..., None]
    if rows.bag:
        taken = xp.sum(taken, axis=1, keepdims=True)
    g = ns.cast(xp, rows.output_grads, V.dtype)
    return xp.matrix_transpose(xp.sum(taken * g, axis=(-2, -1)))


@row_products.register
def _(rows: ExampleGradients, V: Array, /, *, xp: Namespace) -> Array:
    D = ns.cast(xp, rows.gradients, V.dtype)
    products = xp.matmul(D, xp.reshape(V, (-1, 1)))
    return xp.matrix_transpose(xp.reshape(products, (rows.sources, rows.examples)))


@singledispatch
def combined_rows(
    rows: object, c: Array, matrix_shape: tuple[int, int], /, *, xp: Namespace
) -> Array:
    """Return ``sum_nc c_nc D_nc`` for coefficients of shape (N, C), as a matrix."""
    raise TypeError(f"no combination of rows of type {type(rows).__name__}")


@combined_rows.register
def _(
    rows: Rows, c: Array, matrix_shape: tuple[int, int], /, *, xp: Namespace
) -> Array:
    x = _flat(rows.full_inputs(c.dtype, xp=xp), xp)
    g = _flat(_weighted(rows.output_grads, c, xp), xp)
    # In the order of parameters that have the outputs first, as those of PyTorch.
    product = ns.transposed(g, xp=xp) @ x
    return join_groups(ns.transposed(product, xp=xp), xp=xp)


@combined_rows.register
def _(
    rows: IdRows, c: Array, matrix_shape: tuple[int, int], /, *, xp: Namespace
) -> Array:
    g = _weighted(rows.output_grads, c, xp) * rows.values(c.dtype, xp=xp)[..., None]
    flat = xp.reshape(rows.ids, (-1,))
    g = xp.reshape(g, (flat.shape[0], g.shape[-1]))
    return sum_rows_at(g, flat, size=rows.size, xp=xp)


@combined_rows.register
def _(
    rows: ExampleGradients, c: Array, matrix_shape: tuple[int, int], /, *, xp: Namespace
) -> Array:
    D = ns.cast(xp, rows.gradients, c.dtype)
    flat = xp.reshape(xp.matrix_transpose(c), (1, -1))
    return xp.reshape(xp.matmul(flat, D), matrix_shape)


def _flat(rows: Array, xp: Namespace) -> Array:
    """Return rows of shape (..., N, S, n) as (..., N S, n)."""
    if rows.shape[-2] == 1:
        return rows[..., 0, :]
    return xp.reshape(rows, (*rows.shape[:-3], -1, rows.shape[-1]))


def _weighted(output_grads: Array, c: Array, xp: Namespace) -> Array:
    """Return ``sum_c c_nc g``, shape ((Q,) N, S, m)."""
    g = ns.cast(xp, output_grads, c.dtype)
    if c.shape[1] == 1:
        return g[..., 0, :, :, :] * c[:, :, None]
    return xp.sum(g * xp.matrix_transpose(c)[..., None, None], axis=-4)
