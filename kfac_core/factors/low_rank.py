"""A running second moment of bounded rank, in ``d r`` numbers.

Conventions.  As `kfac_core.factors.average`, for a sum that is a `LowRankSum`: sums are
joined and compressed where others are added.  The trace is that of the whole moment,
with what was cut off, so that the pi of factored damping is that of K-FAC.
"""

from __future__ import annotations

from dataclasses import dataclass

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar
from kfac_core.array.place import Place
from kfac_core.factors.average import Average
from kfac_core.linalg.low_rank import LowRankSum

__all__ = ["LowRankFactor"]


@dataclass(frozen=True)
class LowRankFactor:
    """A factor of n x r numbers; a `kfac_core.factors.factor.Factor` as far as it is kept.

    Parameters
    ----------
    rank : int
        The most columns r that are kept.
    rows_at_once : int, optional
        How many rows are joined at a time; all by default.
    """

    rank: int
    rows_at_once: int | None = None

    kind = "low_rank"

    def initial(self, shape: tuple[int, ...], place: Place, /) -> Average:
        """Return a zero average."""
        root = place.zeros(*shape, min(self.rank, shape[-1]))
        return Average(LowRankSum(root, place.zeros(*shape[:-1])), place.zeros())

    def updated(
        self,
        average: Average,
        rows: Array,
        /,
        *,
        tail: Array | None,
        decay: Scalar,
        scale: Scalar,
        weight: Array,
        xp: Namespace,
    ) -> Average:
        """Return the average after ``sum <- decay sum + scale rows^T rows``."""
        if tail is not None:
            rows = xp.concat([rows, tail[:, None]], axis=-1)
        total: LowRankSum = average.sum.scaled(decay)
        count = rows.shape[0]
        at_once = self.rows_at_once or max(1, count)
        root = scale**0.5
        for start in range(0, count, at_once):
            part = rows[start : min(start + at_once, count), :] * root
            total = total.plus(xp.matrix_transpose(part))
        return Average(total, average.decayed(decay, weight))
