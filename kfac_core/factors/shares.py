"""Scales and weights of the sums in one update.

Conventions.  One update adds ``weight * C`` to a running sum and ``weight`` to its
weight, with C the mean of outer products: over the rows that count, or over examples.
With ``weight=None`` the weight is the number of rows (of examples), so that the sum is
added as it is, and averages of micro-batches merge exactly.  A batch of which the mask
keeps nothing adds nothing, to the sum and to the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar, cast, full_of
from kfac_core.conventions import Conventions
from kfac_core.factors.statistics import Statistics

__all__ = ["SharingShares", "UpdateShares", "update_shares"]


class UpdateShares(NamedTuple):
    """Scales and weights of the sums in one update.

    Attributes
    ----------
    rows, examples : float or 0-d array
        ``weight / rows`` and ``weight / N``.
    row_weight, example_weight : 0-d array
        The weights that go with the two.
    outer_products : float or 0-d array
        What each ``g g^T`` is multiplied by; see `Conventions`.
    repeats : float or 0-d array
        The mean number of rows that count in an example.
    """

    rows: Scalar
    examples: Scalar
    row_weight: Array
    example_weight: Array
    outer_products: Scalar
    repeats: Scalar

    def of(self, sharing: str, /) -> SharingShares:
        """Return the shares of one way to treat shared positions.

        Parameters
        ----------
        sharing : {"expand", "reduce"}
            Whether each position is a row, or each example.

        Returns
        -------
        SharingShares
            With one repeat where positions are reduced.
        """
        if sharing == "reduce":
            scale, weight, repeats = self.examples, self.example_weight, 1.0
        else:
            scale, weight, repeats = self.rows, self.row_weight, self.repeats
        return SharingShares(
            scale, weight, self.outer_products, repeats, self.example_weight
        )


class SharingShares(NamedTuple):
    """Scales and weights of the two sums of a Kronecker product.

    Attributes
    ----------
    scale : float or 0-d array
        ``weight / R``, R the number of rows.
    weight : 0-d array
        Weight of the sum.
    outer : float or 0-d array
        What each ``g g^T`` is multiplied by besides.
    repeats : float or 0-d array
        The mean number of rows in an example.
    example_weight : 0-d array
        The weight of an average over examples.
    """

    scale: Scalar
    weight: Array
    outer: Scalar
    repeats: Scalar
    example_weight: Array


def update_shares(
    statistics: Statistics,
    rows: Any,
    /,
    *,
    conventions: Conventions,
    weight: Scalar | None,
    xp: Namespace,
) -> UpdateShares:
    """Return the shares of one update.

    Parameters
    ----------
    statistics : Statistics
        For the dtype and the device.
    rows : Rows, IdRows or ExampleGradients
        Rows of the update.
    conventions : Conventions
        How the output gradients are scaled.
    weight : float, 0-d array or None
        Weight of the update.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    UpdateShares
        Scales and weights for rows and for examples.
    """
    like = statistics.any_weight
    kept, N = rows.kept(statistics.dtype, xp=xp), rows.examples
    # The conventions, and the number of repeats, are those of the whole batch that a
    # part (a chunk, or selected rows) is of.
    part_of = getattr(rows, "batch_examples", None)
    whole, all_rows = (N, kept) if part_of is None else (part_of, rows.batch_rows)
    if not isinstance(all_rows, int):
        all_rows = cast(xp, all_rows, statistics.dtype)
    scale = conventions.outer_product_scale(
        examples=whole, rows=all_rows, sources=rows.sources
    )
    repeats = all_rows / whole
    if isinstance(kept, int):
        some: Scalar = 1.0
        nonzero: Scalar = kept
    else:
        some = xp.astype(kept > 0, kept.dtype)
        nonzero = xp.where(kept > 0, kept, xp.ones_like(kept))
    if weight is None:
        # The examples of a part of which nothing counts are examples all the same.
        weights = full_of(xp, kept, like), full_of(xp, N, like)
        return UpdateShares(some, 1.0, *weights, scale, repeats)
    own = some * weight
    full = full_of(xp, own, like)
    return UpdateShares(own / nonzero, own / N, full, full, scale, repeats)
