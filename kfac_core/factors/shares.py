"""Scales and weights of the sums in one update.

Conventions.  One update adds ``weight * C`` to a running sum and ``weight`` to its
weight, with C the mean of outer products: over the rows that count, or over examples.
With ``weight=None`` the weight is the number of rows (of examples), so that the sum is
added as it is, and averages of micro-batches merge exactly.  A batch of which the mask
keeps nothing adds nothing, to the sum and to the weight.
"""

from __future__ import annotations

from typing import NamedTuple

from kfac_core.array.namespaces import Scalar

__all__ = ["SharingShares", "UpdateShares"]


class UpdateShares(NamedTuple):
    """Scales and weights of the sums in one update.

    Attributes
    ----------
    rows, examples : float or 0-d array
        ``weight / rows`` and ``weight / N``.
    row_weight, example_weight : float or 0-d array
        The weights that go with the two.
    outer_products : float or 0-d array
        What each ``g g^T`` is multiplied by; see `Conventions`.
    repeats : float or 0-d array
        The mean number of rows that count in an example.
    """

    rows: Scalar
    examples: Scalar
    row_weight: Scalar
    example_weight: Scalar
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
    weight : float or 0-d array
        Weight of the sum.
    outer : float or 0-d array
        What each ``g g^T`` is multiplied by besides.
    repeats : float or 0-d array
        The mean number of rows in an example.
    example_weight : float or 0-d array
        The weight of an average over examples.
    """

    scale: Scalar
    weight: Scalar
    outer: Scalar
    repeats: Scalar
    example_weight: Scalar
