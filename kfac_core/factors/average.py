"""Running sums with their weights, the form of every statistic.

Conventions.  One update with a new mean C is

    sum <- decay * sum + weight * C,        weight_sum <- decay * weight_sum + weight,

and the value is ``sum / weight_sum`` (debiased), or the bare sum.  So the first update
gives C itself, whatever the decay; with decay 1 it is a plain mean; and two averages of
disjoint data are merged by adding both parts, whatever the sizes.  Weighted by its
number of rows, an average of micro-batches is exactly that of the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kfac_core import constraints
from kfac_core.array import Array, Namespace, Scalar, Status, finite, map_structure
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import is_structure, structure
from kfac_core.array.types import Tree
from kfac_core.linalg.symmetric import SymmetricMatrix


@structure()
class Average:
    """A running sum of statistics, and the sum of their weights.

    Attributes
    ----------
    sum : array, SymmetricMatrix, or another structure of arrays
        The weighted sum.  One of centered moments has ``pooled``, since those of two data
        sets together are not a sum.
    weight : 0-d array
        The sum of weights, of the same dtype.
    rows : 0-d array or None
        For a sum of outer products, their number: a bound of its rank.  None for other
        sums.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.factors import Average
    >>> average = Average(np.asarray([2.0, 4.0]), np.asarray(2.0))
    >>> average.value(debias=True).tolist()
    [1.0, 2.0]
    """

    sum: Any
    weight: Array
    rows: Array | None = None

    def value(self, *, debias: bool) -> Tree:
        """Return the average, or the bare sum where `debias` is false.

        A zero average has the value zero, not 0/0.
        """
        if not debias:
            return self.sum
        total = self.sum
        if not is_structure(total):
            # Divide rather than multiply by 1/weight, so that equal numbers give exactly 1.
            return total / _beside(finite.positive_or_one(self.weight), total)
        factor = self.factor(debias=True)
        if isinstance(total, SymmetricMatrix):
            return total.scaled(_beside(factor, total.array))
        return map_structure(lambda x: x * _beside(factor, x), total)

    def factor(self, *, debias: bool) -> Array:
        """Return the factor from the sum to the average, 0-d; 1 without debiasing."""
        if not debias:
            return ns.own_namespace(self.weight).ones_like(self.weight)
        return ns.as_array(1.0 / finite.positive_or_one(self.weight))

    def merged(self, other: Average, /) -> Average:
        """Return the average of both data sets together."""
        if hasattr(self.sum, "pooled"):
            total = self.sum.pooled(other.sum, self.weight, other.weight)
            return Average(total, self.weight + other.weight)
        return map_structure(lambda a, b: a + b, self, other)

    def following(
        self, total: Tree, rows: Array | float | None, decay: Scalar, weight: Scalar, /
    ) -> Average:
        """Return the average with a new sum, after an update with a number of rows."""
        weights = _decayed(self.weight, decay, weight)
        # A rank is known only if both sums count their rows.
        if self.rows is None or rows is None:
            return Average(total, weights)
        # A decay of zero forgets all earlier rows.
        if isinstance(decay, ns.NUMBER):
            counts: Scalar = float(decay != 0)
        else:
            counts = ns.own_namespace(decay).astype(decay != 0, self.rows.dtype)
        return Average(total, weights, _decayed(self.rows, counts, rows))

    def plus(
        self,
        value: Scalar,
        decay: Scalar,
        scale: Scalar,
        weight: Scalar,
        /,
        *,
        overwrite: bool = False,
    ) -> Average:
        """Return the average after ``sum <- decay sum + scale value`` of an array.

        With `overwrite` both arrays are used up.
        """
        total = self.sum
        if overwrite:
            total *= decay
            value *= scale
            total += value
        else:
            total = _decayed(total, decay, value * scale)
        return Average(total, _decayed(self.weight, decay, weight))

    def absorbed(
        self,
        other: Average,
        /,
        *,
        decay: Scalar,
        weight: Scalar | None,
        total: float | None = None,
    ) -> Average:
        """Return the average after one update with the (debiased) value of another.

        Parameters
        ----------
        other : Average
            Average of one batch, or of this process's part of it.
        decay, weight : float or 0-d array
            Coefficients of the update; without a weight that of `other`.
        total : float, optional
            Weight of the whole batch that `other` is a part of.

        Returns
        -------
        Average
            Added up over the parts of a batch, the average after one update with all of it.
        """
        scale, share = share_of(other.weight, weight, total)
        new = map_structure(lambda s, c: s * decay + c * scale, self.sum, other.sum)
        return self.following(new, other.rows, decay, share)


def _decayed(total: Array, decay: Scalar, term: Scalar, /) -> Array:
    """Return ``decay * total + term``, as an array."""
    if type(total) is np.ndarray and total.ndim == 0:
        # NumPy's scalars take a tenth of the time of its 0-d arrays.
        return np.asarray(total[()] * decay + term)
    return total * decay + term


def _beside(weight: Array, x: Array, /) -> Array:
    """Return weights with trailing axes added, to broadcast with an array."""
    if weight.ndim in (0, x.ndim):
        return weight
    shape = (*weight.shape, *(1,) * (x.ndim - weight.ndim))
    return ns.own_namespace(weight).reshape(weight, shape)


def require_decay(decay: Scalar, /, *, name: str = "decay") -> None:
    """Raise `DecayError` for anything but a number in [0, 1] or a 0-d array."""
    if type(decay) is not float or not 0.0 <= decay <= 1.0:
        constraints.require_range(name, decay, constraints.DECAY_SCALAR)


def require_weight(weight: Scalar, /) -> None:
    """Raise `DecayError` for anything but a finite positive number or a 0-d array."""
    if type(weight) is not float or not 1e-20 <= weight <= 1e20:
        constraints.require_range("weight", weight, constraints.WEIGHT_SCALAR)


def coefficient_flags(
    decay: Scalar, weight: Scalar | None, /, *, xp: Namespace
) -> Array | int:
    """Return the flag of a decay or weight out of range, 0 for Python numbers.

    Numbers were checked before; the value of a traced array can only be flagged.
    """
    flags: Array | int = 0
    if not isinstance(decay, float):
        good = (decay >= 0) & (decay <= 1)
        flags = flags | ns.status_unless(xp, good, Status.BAD_DECAY)
    if weight is not None and not isinstance(weight, float):
        good = (weight > 0) & xp.isfinite(weight)
        flags = flags | ns.status_unless(xp, good, Status.BAD_DECAY)
    return flags


def share_of(
    part: Array, weight: Scalar | None, total: float | None, /
) -> tuple[Scalar, Array]:
    """Return the factor on a part's sum, and the part's share of the weight.

    Parameters
    ----------
    part : array, 0-d
        Weight of the part.
    weight : float, 0-d array or None
        Weight of the update; None is that of the part.
    total : float or None
        Weight of the whole batch; None where the part is all of it.

    Returns
    -------
    scale : float or 0-d array
        ``weight / total``, or 0 for a batch without weight.
    share : 0-d array
        ``weight * part / total``.
    """
    if weight is None:
        return 1.0, part
    xp = ns.own_namespace(part)
    if total is None:
        share = xp.astype(part > 0, part.dtype) * weight
        return share / xp.where(part > 0, part, xp.ones_like(part)), share
    # Parts of one batch add up to `weight`, whatever their sizes.
    scale = weight / total if total > 0 else 0.0
    return scale, part * scale
