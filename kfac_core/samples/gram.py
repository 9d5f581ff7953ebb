"""``K = J J^T`` of a whole network, a sum over layers of products of Gram matrices.

Conventions.  As `kfac_core.samples.jacobian`.  For a layer with S shared positions

    K_rt = sum_ss' (x_rs . x_ts') (g_rs . g_ts') = <D_r, D_t>,

by the first form from the Gram matrices of x and g (``2 S^2 (R^2 m + N^2 n)`` flops), by
the second from the D themselves (``R^2 n m``): whichever is less, a layer at a time.

References
----------
Müller and Zeinhofer (2025), arXiv:2505.12149; Chen and Heyl (2023), arXiv:2302.01941.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np

from kfac_core.array import Array, DType, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.rows import Rows
from kfac_core.linalg.gram import gram_update, updated_gram
from kfac_core.linalg.indexing import set_block
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.samples.jacobian import Jacobian

_LEAST_ELEMENTS = 2**18
"""Products of fewer numbers than this are made at once: smaller ones leave BLAS idle."""

_PASS = 60
"""Flops in the time of writing and reading a number of K once."""


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
        at least a quarter of a million.

    Returns
    -------
    SymmetricMatrix
        K, shape (R, R), an example's outputs side by side.

    Notes
    -----
    For each layer the lesser of ``2 R^2 S^2 m + 2 N^2 S^2 n`` and ``R^2 n m`` flops.
    """
    xp = ns.own_namespace(J.like)
    dtype = widest_dtype(J.like, xp=xp) if dtype is None else dtype
    bound = max(_LEAST_ELEMENTS, _numbers(J) // 5)
    bound = bound if max_elements is None else max_elements
    by_positions: list[_Positions] = []
    by_gradients: list[ExampleGradients | Rows] = []
    for rows in _by_group(J):
        if isinstance(rows, ExampleGradients) or _is_formed(rows):
            by_gradients.append(rows)
        else:
            by_positions.append(_Positions(rows, dtype, xp))
    K: SymmetricMatrix | None = None
    if by_positions:
        K = _sum_of_products(by_positions, J.samples, bound)
    formed: list[Array] = []
    for rows in by_gradients:
        # One half for parts that wait, the other for all of them side by side.
        for D in _derivatives(rows, dtype, bound // 2, xp):
            waiting = sum(math.prod(part.shape) for part in formed)
            if formed and waiting + math.prod(D.shape) > bound // 2:
                K, formed = _add_products(K, formed, xp), []
            formed.append(D)
    # One product for the derivatives of several layers writes K once.
    K = _add_products(K, formed, xp) if formed else K
    assert K is not None
    return K


def _by_group(J: Jacobian) -> Iterator[Any]:
    """Yield the rows of each group of each layer; nearly always one."""
    for jacobian in J.layers.values():
        rows = jacobian.rows
        if not isinstance(rows, Rows) or rows.inputs.ndim == 3:
            yield rows
            continue
        # K is a sum over groups as it is over layers.
        for q in range(rows.inputs.shape[0]):
            x, g = rows.inputs[q, ...], rows.output_grads[q, ...]
            yield Rows(x, g, rows.mask, rows.homogeneous)


def _numbers(J: Jacobian) -> int:
    """Return how many numbers the rows hold."""
    total = 0
    for jacobian in J.layers.values():
        rows = jacobian.rows
        if not isinstance(rows, ExampleGradients):
            total += math.prod(rows.output_grads.shape)
        if isinstance(rows, Rows):
            total += math.prod(rows.inputs.shape)
    return total


def _is_formed(rows: Rows | IdRows) -> TypeGuard[Rows]:
    """Whether it costs less to form the derivatives of a layer than to multiply Grams."""
    if isinstance(rows, IdRows):
        return False
    C, N, S, m = rows.output_grads.shape
    n = rows.inputs.shape[-1] + rows.homogeneous
    R, p = N * C, n * m
    # R^2 p flops by SYRK, which leaves out one triangle; 2 S to form a number of D.
    by_gradients = R * p * (R + 2 * S + _PASS)
    by_positions = S * S * (2 * N * N * n + R * R * (2 * m + _PASS))
    return bool(by_gradients < by_positions)


def widest_dtype(like: Array, /, *, xp: Namespace) -> DType:
    """Return float64 where the array's device has it, else the array's dtype."""
    if type(like) is np.ndarray:
        return np.dtype(np.float64)
    known = xp.__array_namespace_info__().dtypes(
        device=ns.device_of(like), kind="real floating"
    )
    return known.get("float64", like.dtype)


def _by_example(rows: ExampleGradients, xp: Namespace) -> Array:
    """Return the gradients with the outputs of an example side by side, shape (R, p)."""
    p = rows.gradients.shape[-1]
    D = xp.reshape(rows.gradients, (rows.sources, rows.examples, p))
    return xp.reshape(xp.permute_dims(D, (1, 0, 2)), (-1, p))


def _add_products(
    K: SymmetricMatrix | None, parts: list[Array], xp: Namespace
) -> SymmetricMatrix:
    """Return K with the products of derivatives added, all layers' side by side."""
    D = parts[0] if len(parts) == 1 else xp.concat(parts, axis=1)
    columns = ns.transposed(D, xp=xp)
    return updated_gram(K, columns, 1.0, 1.0, overwrite=True, xp=xp)


def _derivatives(
    rows: ExampleGradients | Rows, dtype: object, bound: int, xp: Namespace
) -> Iterator[Array]:
    """Yield the D of a layer where they are formed, (R, p), some rows at a time."""
    if isinstance(rows, ExampleGradients):
        yield ns.cast(xp, _by_example(rows, xp), dtype)
        return
    x, g = rows.full_inputs(rows.inputs.dtype, xp=xp), _by_residual(rows, dtype, xp)
    N, C, S, m = g.shape
    n = x.shape[-1]
    at_once = max(1, min(n, bound // max(1, N * C * m)))
    # A single position's axis serves as that of the outputs.
    across = x[..., None] if S == 1 else ns.transposed(x, xp=xp)[:, None, :, :]
    for start in range(0, n, at_once):
        part = ns.cast(xp, across[:, :, start : start + at_once, :], dtype)
        # Without a sum over positions D is an outer product, for which BLAS is slower.
        D = part * g if S == 1 else xp.matmul(part, g)
        yield ns.reshaped(D, (N * C, -1), xp=xp)


def _by_residual(rows: Rows | IdRows, dtype: object, xp: Namespace) -> Array:
    """Return the g with an example's outputs side by side, shape (N, C, S, m)."""
    g = ns.cast(xp, rows.output_grads, dtype)
    return g[0, :, None, :, :] if g.shape[0] == 1 else xp.permute_dims(g, (1, 0, 2, 3))


class _Positions:
    """A layer's rows, or the ids of an embedding, for products of Gram matrices.

    Parameters
    ----------
    rows : Rows or IdRows
        Rows of C outputs of N examples.
    dtype : dtype
        Dtype of products.
    xp : namespace
        Array API namespace of the rows.
    """

    def __init__(self, rows: Rows | IdRows, dtype: object, xp: Namespace) -> None:
        self.rows, self.dtype, self.xp = rows, dtype, xp
        self.outputs, N, S, _ = rows.output_grads.shape
        k = rows.ids.shape[1] if isinstance(rows, IdRows) else 1
        self.width = int(N * max(self.outputs * S * S, k * k))
        """Numbers held for each row of K."""

    def product(self, start: int, stop: int) -> Array:
        """Return rows of K from start to stop, and columns from start on."""
        xp, rows, (C, N, S, m) = self.xp, self.rows, self.rows.output_grads.shape
        if C == S == 1 and stop - start == N and isinstance(rows, Rows):
            x = rows.full_inputs(self.dtype, xp=xp)[:, 0, :]
            g = ns.cast(xp, rows.output_grads[0, :, 0, :], self.dtype)
            # SYRK: half the flops of the products below, whose rows and columns differ.
            options: dict[str, Any] = {
                "tail": None,
                "decay": 1.0,
                "scale": 1.0,
                "xp": xp,
            }
            X, _ = gram_update(None, ns.transposed(x, xp=xp), **options)
            G, _ = gram_update(None, ns.transposed(g, xp=xp), **options)
            X *= G  # In place: another R^2 numbers take as long as their product.
            return X
        first, last = start // C, stop // C
        g = _by_residual(rows, self.dtype, xp)[first:, ...]
        flat = ns.reshaped(g, (-1, m), xp=xp)
        G = xp.matmul(flat[: (last - first) * C * S, :], xp.matrix_transpose(flat))
        X = self._inputs(first, last)
        if C == S == 1:
            X *= G
            return X
        X = xp.reshape(X, (last - first, 1, S, N - first, 1, S))
        G = xp.reshape(G, (last - first, C, S, N - first, C, S))
        return xp.reshape(xp.sum(X * G, axis=(2, 5)), (stop - start, -1))

    def _inputs(self, first: int, last: int) -> Array:
        """Return the Gram matrix of inputs; ids that are equal meet."""
        xp, rows, count = self.xp, self.rows, last - first
        if isinstance(rows, Rows):
            x = rows.full_inputs(self.dtype, xp=xp)[first:, ...]
            S, n = x.shape[1:]
            x = xp.reshape(x, (-1, n))
            return xp.matmul(x[: count * S, :], xp.matrix_transpose(x))
        k = rows.ids.shape[1]
        ids = xp.reshape(rows.ids[first:, :], (-1,))
        values = xp.reshape(rows.values(self.dtype, xp=xp)[first:, :], (-1,))
        # The product of two one-hot rows is 1 where their ids are equal, and 0 elsewhere.
        equal = ids[: count * k][:, None] == ids
        X = ns.cast(xp, equal, values.dtype) * values[: count * k][:, None] * values
        if rows.bag:
            X = xp.sum(xp.reshape(X, (count, k, -1, k)), axis=(1, 3))
        return X


def _sum_of_products(
    layers: Sequence[_Positions], R: int, bound: int
) -> SymmetricMatrix:
    """Return the sum over layers, some columns of K at a time, from the diagonal down."""
    # A slice of K has whole examples of each layer, whose outputs may differ in number.
    step = math.lcm(*(layer.outputs for layer in layers))
    # The sum, and the two Gram matrices whose product is added to it.
    at_once = bound // (3 * max(layer.width for layer in layers))
    at_once = min(R, max(step, at_once // step * step))
    transposed: Any = None
    for start in range(0, R, at_once):
        stop = min(start + at_once, R)
        part = layers[0].product(start, stop)
        for layer in layers[1:]:
            part += layer.product(start, stop)
        if at_once == R:
            return SymmetricMatrix(part, full_storage=False)
        xp = layers[0].xp
        if transposed is None:
            device = ns.device_of(part)
            transposed = xp.zeros((R, R), dtype=part.dtype, device=device)
        transposed = set_block(transposed, part, row=start, column=start, xp=xp)
    # In the order in which LAPACK reads a lower triangle.
    return SymmetricMatrix(xp.matrix_transpose(transposed), full_storage=False)
