"""Preconditioned gradients of queries, stored in as few bits as one likes.

Conventions.  ``P_q = (F + lam I)^-1 g_q`` of each block, a matrix ``(in(+1), out)``.
In half precision each is divided by its largest entry first, so that float16 neither
overflows nor underflows at once; it is brought back to the dtype of the sums before
anything is multiplied with it.  With u the unit roundoff of the storage, ``2^-11`` for
float16 and ``2^-8`` for bfloat16, a score is off by at most ``u |P_q| |g_n|`` (and, in
float16, by ``2^-25`` of the largest entry for each entry below ``2^-14`` of it).  Of a
product of two narrow matrices both are rounded, and its largest singular value divides.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from kfac_core import constraints
from kfac_core.array import Array, DType, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure

Storage = Literal["float16", "bfloat16", "float32", "float64"]


@structure()
class StoredQueries:
    """The preconditioned gradients of one block.

    Attributes
    ----------
    values : array, shape (queries, in(+1), out)
        Values in the dtype of storage, divided by the scale.
    scale : array, shape (queries,), or None
        The largest entries; None where values are kept as they are.
    """

    values: Array
    scale: Array | None

    @property
    def count(self) -> int:
        """The number of queries."""
        return int(self.values.shape[0])

    def widened(self, start: int, stop: int, dtype: object, /) -> Array:
        """Return some of them as they were, in the dtype of the sums."""
        xp = ns.own_namespace(self.values)
        P = ns.cast(xp, self.values[start:stop, ...], dtype)
        return _rescaled(P, self.scale, start, stop)


@structure()
class LowRankQueries:
    """The preconditioned gradients of one block, each a product of two narrow matrices.

    Attributes
    ----------
    left : array, shape (queries, in(+1), rank)
        Left factors, with the singular values, divided by the scale.
    right : array, shape (queries, rank, out)
        Right factors, with orthonormal rows.
    scale : array, shape (queries,), or None
        The largest singular values; None where values are kept as they are.
    """

    left: Array
    right: Array
    scale: Array | None = None

    @property
    def values(self) -> Array:
        """An array in the dtype of storage."""
        return self.left

    @property
    def count(self) -> int:
        """The number of queries."""
        return int(self.left.shape[0])

    def widened(self, start: int, stop: int, dtype: object, /) -> Array:
        """Return some of the matrices, in the dtype of the sums."""
        xp = ns.own_namespace(self.left)
        parts = (self.left[start:stop, ...], self.right[start:stop, ...])
        P = xp.matmul(*(ns.cast(xp, part, dtype) for part in parts))
        return _rescaled(P, self.scale, start, stop)


@structure()
class Queries:
    """The preconditioned gradients of all blocks; made by `Influence.precondition`.

    Attributes
    ----------
    blocks : dict of str to StoredQueries or LowRankQueries
        Queries by name of the block.
    """

    blocks: dict[str, Any]

    @property
    def count(self) -> int:
        """The number of queries."""
        return int(next(iter(self.blocks.values())).count)

    @property
    def dtypes(self) -> dict[str, Any]:
        """The dtype that each block is stored in."""
        return {name: block.values.dtype for name, block in self.blocks.items()}


def storage_dtype(storage: Storage, /, *, xp: Namespace) -> DType:
    """Return a library's dtype of a name, or float32 where it lacks that.

    Parameters
    ----------
    storage : {"float16", "bfloat16", "float32", "float64"}
        The name.
    xp : namespace
        The library.

    Returns
    -------
    dtype
        Dtype that `Queries.dtypes` shows afterwards.

    Raises
    ------
    ConventionError
        For another name.
    """
    constraints.require_one_of("storage", storage, get_args(Storage))
    return getattr(xp, storage, xp.float32)


def stored_queries(P: Array, dtype: object, /) -> StoredQueries:
    """Return matrices in a dtype of storage, scaled where that is narrow.

    Parameters
    ----------
    P : array, shape (queries, in(+1), out)
        Matrices in float32 or float64.
    dtype : dtype
        Dtype of storage.

    Returns
    -------
    StoredQueries
        The same, up to rounding.
    """
    xp = ns.own_namespace(P)
    if dtype in (xp.float32, xp.float64):
        return StoredQueries(ns.cast(xp, P, dtype), None)
    # In half precision, numbers of an inverse curvature would overflow or underflow.
    scale = _positive(xp.max(xp.abs(P), axis=(1, 2)), xp)
    return StoredQueries(xp.astype(P / scale[:, None, None], dtype), scale)


def low_rank_queries(P: Array, dtype: object, rank: int, /) -> LowRankQueries:
    """Return the best approximations of a rank, in a dtype of storage.

    Parameters
    ----------
    P : array, shape (queries, in(+1), out)
        Matrices in float32 or float64.
    dtype : dtype
        Dtype of storage.
    rank : int
        Rank of each, at least 1.

    Returns
    -------
    LowRankQueries
        By singular values; ``rank (in + out)`` numbers a query.
    """
    xp = ns.own_namespace(P)
    # The best approximation of each query's matrix, by Eckart and Young.
    U, values, V = xp.linalg.svd(P, full_matrices=False)
    scale = None
    if dtype not in (xp.float32, xp.float64):
        scale = _positive(values[:, 0], xp)
        values = values / scale[:, None]
    left = U[..., :rank] * values[..., None, :rank]
    right = V[..., :rank, :]
    return LowRankQueries(ns.cast(xp, left, dtype), ns.cast(xp, right, dtype), scale)


def _positive(sizes: Array, xp: Namespace) -> Array:
    """Return sizes to divide by, 1 for a query of zeros."""
    return xp.where(sizes > 0, sizes, xp.ones_like(sizes))


def _rescaled(P: Array, scale: Array | None, start: int, stop: int) -> Array:
    """Return matrices of some of the queries, multiplied by their scales."""
    if scale is None:
        return P
    return P * ns.cast(ns.own_namespace(P), scale[start:stop], P.dtype)[:, None, None]
