"""``K = J J^T`` of a whole network, a sum over layers of products of Gram matrices.

Conventions.  As `kfac_core.samples.jacobian`.  For a layer with S shared positions

    K_rt = sum_ss' (x_rs . x_ts') (g_rs . g_ts') = <D_r, D_t>,

by the first form from the Gram matrices of x and g (``R^2 S^2 m + N^2 S^2 n`` flops), by
the second from the D themselves (``R^2 n m``): whichever is less, a layer at a time.
Where S is 1 the first always is.

References
----------
Müller and Zeinhofer (2025), arXiv:2505.12149; Chen and Heyl (2023), arXiv:2302.01941.
"""

from __future__ import annotations

from typing import Any

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.rows import Rows
from kfac_core.linalg.gram import updated_gram
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.samples.jacobian import Jacobian

__all__ = ["sample_gram", "widest_dtype"]

_LEAST_ELEMENTS = 2**21
"""Products of fewer numbers than this are made at once: smaller ones leave BLAS idle."""


def sample_gram(
    J: Jacobian, /, *, dtype: object = None, max_elements: int | None = None
) -> SymmetricMatrix:
    """Return ``K = J J^T``, all layers with each other.

    Parameters
    ----------
    J : Jacobian
        Rows of the network's layers.
    dtype : dtype, optional
        Dtype of the products and of K; by default float64 where the device has it, since
        the condition number of K is the square of J's.
    max_elements : int, optional
        Bound on the numbers held beside K and the rows; by default a fifth of the rows, and
        at least two million.

    Returns
    -------
    SymmetricMatrix
        K, shape (R, R), an example's outputs side by side.

    Notes
    -----
    For each layer the lesser of ``R^2 S^2 m + N^2 S^2 n`` and ``R^2 n m`` flops.
    """
    xp = ns.own_namespace(J.like)
    dtype = widest_dtype(J.like, xp=xp) if dtype is None else dtype
    K: SymmetricMatrix | None = None
    for jacobian in J.layers.values():
        rows = jacobian.rows
        if isinstance(rows, ExampleGradients):
            K = _add_products(K, _by_example(rows, xp), dtype, xp)
            continue
        for one_group in _groups(rows):
            K = _add_group(K, one_group, dtype, max_elements, xp)
    assert K is not None
    return K


def widest_dtype(like: Array, /, *, xp: Namespace) -> Any:
    """Return float64 where the array's device has it, else the array's dtype."""
    known = xp.__array_namespace_info__().dtypes(
        device=ns.device_of(like), kind="real floating"
    )
    return known.get("float64", like.dtype)


def _by_example(rows: ExampleGradients, xp: Namespace) -> Array:
    """Return the gradients with the outputs of an example side by side, shape (R, p)."""
    p = rows.gradients.shape[-1]
    D = xp.reshape(rows.gradients, (rows.sources, rows.examples, p))
    return xp.reshape(xp.permute_dims(D, (1, 0, 2)), (-1, p))


def _groups(rows: Rows | IdRows) -> list[Rows | IdRows]:
    """Return the rows of each group of a layer; nearly always one."""
    if isinstance(rows, IdRows) or rows.inputs.ndim == 3:
        return [rows]
    return [
        Rows(
            rows.inputs[q, ...], rows.output_grads[q, ...], rows.mask, rows.homogeneous
        )
        for q in range(rows.inputs.shape[0])
    ]


def _add_group(
    K: SymmetricMatrix | None,
    rows: Rows | IdRows,
    dtype: object,
    max_elements: int | None,
    xp: Namespace,
) -> SymmetricMatrix:
    """Return K with the products of one layer's rows added, in the cheaper way."""
    # (N, C, S, m): an example's outputs side by side.
    g = xp.permute_dims(ns.cast(xp, rows.output_grads, dtype), (1, 0, 2, 3))
    N, C, S, m = g.shape
    bound = max(_LEAST_ELEMENTS, (N * S * (C * m)) // 5)
    bound = bound if max_elements is None else max_elements
    if isinstance(rows, IdRows):
        return _add_id_products(K, rows, g, dtype, bound, xp)
    x = rows.full_inputs(dtype, xp=xp)
    n = x.shape[-1]
    by_positions = S * S * (C * C * m + n)
    by_gradients = C * C * n * m
    if S > 1 and by_gradients < by_positions:
        return _add_formed(K, x, g, bound, xp)
    return _add_grams(K, x, g, bound, xp)


def _add_products(
    K: SymmetricMatrix | None, D: Array, dtype: object, xp: Namespace
) -> SymmetricMatrix:
    """Return ``K + D D^T``."""
    columns = xp.matrix_transpose(ns.cast(xp, D, dtype))
    return updated_gram(K, columns, tail=None, decay=1.0, scale=1.0, xp=xp)


def _add_formed(
    K: SymmetricMatrix | None, x: Array, g: Array, bound: int, xp: Namespace
) -> SymmetricMatrix:
    """Add the products of formed D, some of their rows at a time."""
    N, C, _, m = g.shape
    n = x.shape[-1]
    at_once = max(1, min(n, bound // max(1, N * C * m)))
    across = xp.matrix_transpose(x)[:, None, :, :]
    for start in range(0, n, at_once):
        D = xp.matmul(across[:, :, start : start + at_once, :], g)
        K = _add_products(K, xp.reshape(D, (N * C, -1)), g.dtype, xp)
    assert K is not None
    return K


def _add_grams(
    K: SymmetricMatrix | None, x: Array, g: Array, bound: int, xp: Namespace
) -> SymmetricMatrix:
    """Add the product of two Gram matrices, for some examples' rows of K at a time."""
    N, C, S, m = g.shape
    flat_x = xp.reshape(x, (N * S, -1))
    flat_g = xp.reshape(g, (N * C * S, m))
    parts: list[Array] = []
    at_once = max(1, bound // (C * S * N * C * S))
    for start in range(0, N, at_once):
        stop = min(start + at_once, N)
        X = xp.matmul(flat_x[start * S : stop * S, :], xp.matrix_transpose(flat_x))
        G = xp.matmul(
            flat_g[start * C * S : stop * C * S, :], xp.matrix_transpose(flat_g)
        )
        parts.append(_contracted(X, G, (stop - start, N, C, S), xp))
    return _plus(K, xp.concat(parts, axis=0))


def _add_id_products(
    K: SymmetricMatrix | None,
    rows: IdRows,
    g: Array,
    dtype: object,
    bound: int,
    xp: Namespace,
) -> SymmetricMatrix:
    """Add the products of an embedding's rows: ids that are equal meet."""
    N, C, S, m = g.shape
    k = rows.ids.shape[1]
    ids, values = rows.ids, rows.values(dtype, xp=xp)
    flat_ids, flat_values = xp.reshape(ids, (-1,)), xp.reshape(values, (-1,))
    flat_g = xp.reshape(g, (N * C * S, m))
    parts: list[Array] = []
    at_once = max(1, bound // (N * max(k * k, C * S * C * S)))
    for start in range(0, N, at_once):
        stop = min(start + at_once, N)
        places = slice(start * k, stop * k)
        equal = flat_ids[places][:, None] == flat_ids[None, :]
        X = ns.cast(xp, equal, dtype) * flat_values[places][:, None] * flat_values
        if rows.bag:
            X = xp.sum(xp.reshape(X, (stop - start, k, N, k)), axis=(1, 3))
        G = xp.matmul(
            flat_g[start * C * S : stop * C * S, :], xp.matrix_transpose(flat_g)
        )
        parts.append(_contracted(X, G, (stop - start, N, C, S), xp))
    return _plus(K, xp.concat(parts, axis=0))


def _contracted(
    X: Array, G: Array, sizes: tuple[int, int, int, int], xp: Namespace
) -> Array:
    """Return ``sum_ss' X_ns,ts' G_ncs,tds'``, shape (n C, N C)."""
    few, N, C, S = sizes
    if C == 1 and S == 1:
        return X * G
    X = xp.reshape(X, (few, 1, S, N, 1, S))
    G = xp.reshape(G, (few, C, S, N, C, S))
    return xp.reshape(xp.sum(X * G, axis=(2, 5)), (few * C, N * C))


def _plus(K: SymmetricMatrix | None, product: Array) -> SymmetricMatrix:
    """Return the sum; of a product of other factors one triangle is taken."""
    total = product if K is None else K.array + product
    return SymmetricMatrix(total, full_storage=False)
