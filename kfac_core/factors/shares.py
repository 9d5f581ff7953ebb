"""Scales and weights of the sums in one update.

Conventions.  One update adds ``weight * C`` to a running sum and ``weight`` to its
weight, with C the mean of outer products: over the rows that count, or over examples.
With ``weight=None`` the weight is the number of rows (of examples), so that the sum is
added unscaled, and averages of micro-batches merge exactly.  A fully masked batch adds
nothing to the sum and nothing to the weight.
"""

from __future__ import annotations

from typing import NamedTuple

from kfac_core.array import Scalar


class Shares(NamedTuple):
    """Scales and weights of the sums in one update.

    Attributes
    ----------
    scale : float or 0-d array
        ``weight / R`` for sums over the R rows that count, or ``weight / N`` for sums over
        examples.
    weight : float or 0-d array
        Weight of these sums.
    outer_product_scale : float or 0-d array
        Factor on each ``g g^T``; see `Conventions`.
    repeats : float or 0-d array
        The mean number of rows that count in an example; 1 for sums over examples.
    example_weight : float or 0-d array
        Weight of an average over examples.
    """

    scale: Scalar
    weight: Scalar
    outer_product_scale: Scalar
    repeats: Scalar
    example_weight: Scalar
