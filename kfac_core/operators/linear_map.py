"""Symmetric matrices that are known by their products: ``F @ V``, and as SciPy asks.

Conventions.  Here a vector is flat, as in `CurvatureOperator.to_dense`: the matrix V of
shape ``(in(+1), out)`` flattened row-major, ``p = (in + 1) out`` numbers; and k vectors are
the columns of a matrix of shape ``(p, k)``.
"""

from __future__ import annotations

import abc

from kfac_core import constraints
from kfac_core.array import Array, DType
from kfac_core.array import namespaces as ns


class LinearMap(abc.ABC):
    """A symmetric matrix of shape ``(p, p)`` that multiplies flat vectors.

    ``F @ V`` is the product with one flat vector, shape ``(p,)``, or with k at once,
    shape ``(p, k)``: for any operator, and for its powers, ``operator**-1 @ V``.

    Notes
    -----
    The names `shape`, `dtype`, `matvec`, `matmat`, `rmatvec` and `rmatmat` are those that
    ``scipy.sparse.linalg.aslinearoperator`` asks for.  SciPy gives NumPy arrays, so that
    this is for operators of NumPy arrays; others raise `MixedArraysError`.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.operators import kronecker_operator
    >>> A, G = np.diag([1.0, 2.0]), np.diag([3.0, 4.0])
    >>> operator = kronecker_operator(A, G, damping=0.5, rule="exact")
    >>> operator @ np.ones(4)
    array([3.5, 4.5, 6.5, 8.5])
    >>> V = operator**-1 @ np.eye(4)
    >>> bool(np.allclose(operator @ V, np.eye(4)))
    True
    """

    @property
    @abc.abstractmethod
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of a vector as a matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(p, p)`` of the matrix itself."""
        n, m = self.vector_shape
        return n * m, n * m

    @property
    @abc.abstractmethod
    def dtype(self) -> DType:
        """The dtype in which products are computed."""

    @abc.abstractmethod
    def _of_vectors(self, vectors: Array) -> Array:
        """Return the product with vectors of shape ``(..., in(+1), out)``."""

    def __matmul__(self, vectors: Array, /) -> Array:
        """Return the product with flat vectors, shape ``(p,)`` or ``(p, k)``."""
        p = self.shape[0]
        xp = ns.namespace_of(vectors=vectors)
        ns.require_floating(xp, vectors, "vectors")
        shape = (p,) if vectors.ndim == 1 else (p, "k")
        hint = f"One is ({p},); a matrix {self.vector_shape} goes to `multiply`."
        constraints.require_shape("vectors", vectors, shape, hint)
        rows = vectors if vectors.ndim == 1 else xp.matrix_transpose(vectors)
        many = rows.shape[:-1]
        product = self._of_vectors(xp.reshape(rows, (*many, *self.vector_shape)))
        flat = xp.reshape(product, (*many, p))
        return flat if vectors.ndim == 1 else xp.matrix_transpose(flat)

    # The interface of `scipy.sparse.linalg.LinearOperator`; the matrix is symmetric.
    matvec = matmat = rmatvec = rmatmat = __matmul__
