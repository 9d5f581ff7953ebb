"""A running second moment of bounded rank, in ``d r`` numbers.

Conventions.  As `kfac_core.factors.average`, for a sum that is a `LowRankSum`: sums are
joined and compressed where others are added.  The trace is that of the whole moment,
with what was cut off, so that the pi of factored damping is that of K-FAC.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar
from kfac_core.array.place import Place
from kfac_core.array.structure import structure
from kfac_core.factors.average import Average, share_of
from kfac_core.linalg.low_rank import LowRankSum, low_rank_zero

__all__ = ["LowRankAverage", "low_rank_average"]


@structure()
class LowRankAverage(Average):
    """A running sum of outer products, of bounded rank, and its weight.

    Attributes
    ----------
    sum : LowRankSum
        The weighted sum.
    weight : 0-d array
        The sum of weights, of the same dtype.
    """

    def value(self, *, debias: bool) -> LowRankSum:
        """Return the average, or the bare sum where `debias` is false."""
        total: LowRankSum = self.sum
        if not debias:
            return total
        xp = array_api_compat.array_namespace(self.weight)
        one = xp.ones_like(self.weight)
        return total.scaled(1.0 / xp.where(self.weight > 0, self.weight, one))

    def merged(self, other: Average, /) -> LowRankAverage:
        """Return the average of both data sets together, compressed."""
        joined = self.sum.joined(other.sum.root)
        total = LowRankSum(
            joined.root, joined.truncated_trace + other.sum.truncated_trace
        )
        return LowRankAverage(total, self.weight + other.weight)

    def absorbed(
        self,
        other: Average,
        /,
        *,
        decay: Scalar,
        weight: Scalar,
        total: float | None = None,
    ) -> LowRankAverage:
        """Return the average after one update; see `Average.absorbed`."""
        scale, share = share_of(other.weight, weight, total)
        scaled: LowRankSum = other.sum.scaled(scale)
        joined = self.sum.scaled(decay).joined(scaled.root)
        trace = joined.truncated_trace + scaled.truncated_trace
        return LowRankAverage(
            LowRankSum(joined.root, trace), self.decayed(decay, share)
        )

    def updated(
        self,
        rows: Array,
        /,
        *,
        tail: Array | None,
        decay: Scalar,
        scale: Scalar,
        weight: Array,
        rows_at_once: int | None,
        xp: Namespace,
    ) -> LowRankAverage:
        """Return the average after ``sum <- decay sum + scale rows^T rows``.

        Parameters
        ----------
        rows : array, shape (n, d)
            Rows in the dtype of the sum.
        tail : array, shape (n,), or None
            A last column of the rows.
        decay, scale : float or 0-d array
            The two coefficients, not negative.
        weight : array, 0-d
            Weight of the update.
        rows_at_once : int or None
            How many rows are joined at a time; None is all.
        xp : namespace
            Array API namespace of the arrays.

        Returns
        -------
        LowRankAverage
            New average.
        """
        if tail is not None:
            rows = xp.concat([rows, tail[:, None]], axis=-1)
        total: LowRankSum = self.sum.scaled(decay)
        at_once = rows.shape[0] if rows_at_once is None else rows_at_once
        root = scale**0.5
        for start in range(0, rows.shape[0], max(1, at_once)):
            stop = min(start + at_once, rows.shape[0])
            part = rows[start:stop, :] * root
            total = total.joined(xp.matrix_transpose(part))
        return LowRankAverage(total, self.decayed(decay, weight))


def low_rank_average(size: int, place: Place, /, *, rank: int) -> LowRankAverage:
    """Return a zero average, for rows of d numbers and at most r columns."""
    return LowRankAverage(low_rank_zero(size, place, rank=rank), place.zeros())
