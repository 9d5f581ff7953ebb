"""Kronecker products acting on arrays in their own shape.

Conventions.  A product of k matrices ``F_1 (x) ... (x) F_k`` acts on an array V of
shape ``(n_1, ..., n_k)``, along axis i by F_i.  For k = 2 that is ``F_1 V F_2^T``.
Flattened row-major it is ``kron(F_1, ..., F_k) @ V.ravel()``, the first factor
outermost, as in ``numpy.kron``.  Only `kronecker_dense` flattens.
"""

from __future__ import annotations

from collections.abc import Sequence

from kfac_core import constraints
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns


def kronecker_multiply(factors: Sequence[Array], v: Array, /) -> Array:
    """Multiply a Kronecker product of matrices with a vector in its array shape.

    Parameters
    ----------
    factors : sequence of array, shapes (m_i, n_i)
        The k factors, k >= 1.
    v : array, shape (n_1, ..., n_k)
        The vector.

    Returns
    -------
    array, shape (m_1, ..., m_k)
        The product.

    Raises
    ------
    ShapeError
        If the shapes do not match.
    MixedArraysError
        For arrays of several libraries or devices.

    Notes
    -----
    For square factors ``2 prod(n) sum(n)`` flops; the product matrix is never formed.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.linalg import kronecker_multiply
    >>> A, G, V = np.diag([2.0, 3.0]), np.eye(3), np.ones((2, 3))
    >>> kronecker_multiply([A, G], V).tolist()
    [[2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]
    """
    xp = _namespace_of_factors(factors, v=v)
    expected = tuple(factor.shape[1] for factor in factors)
    ns.require_matrix(v, expected, "v")
    for axis, factor in enumerate(factors):
        v = ns.moved_axis(xp.tensordot(factor, v, axes=((1,), (axis,))), 0, axis, xp=xp)
    return v


def kronecker_dense(factors: Sequence[Array], /) -> Array:
    """Return the Kronecker product as one matrix, for tests.

    Equal to ``functools.reduce(np.kron, factors)``.

    Parameters
    ----------
    factors : sequence of array, shapes (m_i, n_i)
        The factors, the outermost first.

    Returns
    -------
    array, shape (prod m_i, prod n_i)
        The product; memory grows with the product of all sizes.

    Raises
    ------
    ShapeError
        For no factors, or one that is not a matrix.
    MixedArraysError
        For arrays of several libraries or devices.
    """
    xp = _namespace_of_factors(factors)
    dense = factors[0]
    for factor in factors[1:]:
        rows = dense.shape[0] * factor.shape[0]
        columns = dense.shape[1] * factor.shape[1]
        product = dense[:, None, :, None] * factor[None, :, None, :]
        dense = xp.reshape(product, (rows, columns))
    return dense


def _namespace_of_factors(factors: Sequence[Array], **others: Array) -> Namespace:
    constraints.require_any("factors", factors)
    named = {f"factors[{i}]": factor for i, factor in enumerate(factors)}
    xp = ns.namespace_of(**others, **named)
    for name, factor in named.items():
        constraints.require_shape(name, factor, ("n", "m"))
    return xp
