"""``A = B B^T`` of bounded rank: a sum of outer products in a few columns.

Conventions.  The root B has shape ``(..., d, r)``, leading axes a stack; the columns to
its right in `LowRankSum.plus` are what is added.  What a compression to r columns cuts
off is positive semidefinite, so that with C the sum that nothing was cut off from

    C = B B^T + E,    E >= 0,    tr E = truncated_trace:

`LowRankSum.truncated_trace` is the error in the trace norm, and a bound of it in every
other one.  While C has a rank of at most r, E is zero up to rounding.

References
----------
Puiu (2022), arXiv:2206.15397 and arXiv:2210.08494, for low-rank Kronecker factors; the
compression is one step of an incremental singular value decomposition (Brand 2006).
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import Scalar, device_of
from kfac_core.array.structure import structure
from kfac_core.linalg.eigen import eigh
from kfac_core.linalg.gram import updated_gram
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = ["LowRankSum"]


@structure()
class LowRankSum:
    """A positive-semidefinite matrix ``C = B B^T + E``, of which the root B is kept.

    Attributes
    ----------
    root : array, shape (..., d, r)
        Root B.
    truncated_trace : array, shape (...)
        Trace of the truncated part E: the error in the trace norm.
    """

    root: Array
    truncated_trace: Array

    @property
    def size(self) -> int:
        """The number d of rows."""
        return int(self.root.shape[-2])

    @property
    def rank(self) -> int:
        """The number r of columns that are kept."""
        return int(self.root.shape[-1])

    def trace(self) -> Array:
        """Return the trace of C, with what was cut off, shape (...)."""
        xp = array_api_compat.array_namespace(self.root)
        return xp.sum(self.root * self.root, axis=(-2, -1)) + self.truncated_trace

    def scaled(self, factor: Scalar, /) -> LowRankSum:
        """Return the matrix times a number that is not negative."""
        return LowRankSum(self.root * factor**0.5, self.truncated_trace * factor)

    def joined(self, other: LowRankSum, /) -> LowRankSum:
        """Return the sum of both, compressed to this one's number of columns."""
        made = self.plus(other.root)
        return LowRankSum(made.root, made.truncated_trace + other.truncated_trace)

    def plus(self, columns: Array, /) -> LowRankSum:
        """Return ``B B^T + X X^T``, compressed to r columns again.

        Parameters
        ----------
        columns : array, shape (..., d, k)
            Columns X.

        Returns
        -------
        LowRankSum
            The nearest matrix of rank r, in every unitarily invariant norm.  NaN where
            the columns, or their squares, are not finite.

        Notes
        -----
        With ``p = r + k``, ``d p (p + 2 r) + 9 p^3`` flops and ``d p + p^2`` numbers of
        memory; where p is above d, ``p d^2 + 9 d^3`` and ``d p + d^2``.
        """
        xp = array_api_compat.array_namespace(self.root)
        r, C = self.rank, xp.concat([self.root, columns], axis=-1)
        # Of the two Gram matrices, which have the same nonzero spectrum, the smaller.
        tall = C.shape[-2] > C.shape[-1]
        inner = updated_gram(
            None,
            C if tall else xp.matrix_transpose(C),
            tail=None,
            decay=0.0,
            scale=1.0,
            xp=xp,
        ).full()
        finite = xp.all(xp.isfinite(inner), axis=(-2, -1))[..., None, None]
        k = inner.shape[-1]
        eye = xp.eye(k, dtype=inner.dtype, device=device_of(inner))
        safe = SymmetricMatrix(xp.where(finite, inner, eye), full_storage=True)
        w, Q = eigh(safe, xp=xp)
        w = xp.where(w < 0, xp.zeros_like(w), w)
        largest = Q[..., :, k - r :]
        roots = xp.sqrt(w[..., None, k - r :])
        root = xp.matmul(C, largest) if tall else largest * roots
        root = xp.where(finite, root, xp.full_like(root, xp.nan))
        cut = xp.sum(w[..., : k - r], axis=-1)
        # A copy: a view with negative strides is another memory order than a loaded one's.
        root = xp.asarray(xp.flip(root, axis=-1), copy=True)
        return LowRankSum(root, self.truncated_trace + cut)
