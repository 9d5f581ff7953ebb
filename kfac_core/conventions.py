"""Conventions that a framework and this library must agree on.

The most common defect in K-FAC code is a silent factor of N.  Loss reduction is therefore
an explicit argument without a default; it is saved with the state of an estimator and
checked when a state is loaded.

Let ``g`` be the vector that a framework backpropagated to a layer's output for one
example (and one shared position).  The output factor is an average of outer products of
gradients of the *summed* loss, so ``g`` is multiplied by

=========================  =======================================================
``reduction="sum"``        1: the loss was a sum over the batch
``reduction="mean"``       N: the loss was a mean over the N examples of the batch
``reduction="mean_rows"``  the number of rows kept by the mask: the loss was a mean over
                           all examples and shared positions (tokens, time steps)
=========================  =======================================================

and the M sources (vectors backpropagated for one batch) are combined by

========================  ========================================================
``sources="sum"``         summing outer products: one vector an output coordinate,
                          as for the exact Fisher or Gauss-Newton matrix
``sources="mean"``        averaging them: M independent samples of labels
========================  ========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kfac_core import constraints
from kfac_core.array import Scalar

LossReduction = Literal["sum", "mean", "mean_rows"]
SourceReduction = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """Scaling of the output gradients that a framework computes.

    The output factor is an average of outer products of gradients of the *summed* loss, so
    that each backpropagated vector g is multiplied by 1, by N, or by the number of rows.

    Parameters
    ----------
    reduction : {"sum", "mean", "mean_rows"}
        Reduction of the loss that was differentiated: the sum over the batch, the mean
        over its N examples, or the mean over all unmasked rows (examples and shared
        positions).  A wrong value scales G by N^2, indistinguishable from different
        damping.
    sources : {"sum", "mean"}
        Whether the outer products of several sources are summed or averaged.

    Raises
    ------
    ConventionError
        For any other value.

    Examples
    --------
    PyTorch's cross-entropy is a mean, so that each row of output gradients is N times too
    small:

    >>> import kfac_core as kc
    >>> kc.Conventions(reduction="mean", sources="sum").reduction
    'mean'
    """

    reduction: LossReduction
    sources: SourceReduction

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            reduction=constraints.literal(LossReduction),
            sources=constraints.literal(SourceReduction),
        )

    def outer_product_scale(
        self, *, examples: int, rows: Scalar, sources: int
    ) -> Scalar:
        """Return the factor on each outer product ``g g^T``.

        Parameters
        ----------
        examples : int
            Number of examples ``N``.
        rows : int or 0-d array
            The number of rows kept by the mask.
        sources : int
            Number of backpropagated vectors ``M``.

        Returns
        -------
        float or 0-d array
            Square of `gradient_scale`, divided by M for ``sources="mean"``.
        """
        factor = self.gradient_scale(examples=examples, rows=rows)
        return factor * factor / (sources if self.sources == "mean" else 1)

    def gradient_scale(self, *, examples: int, rows: Scalar) -> Scalar:
        """Return the factor on each g: 1, N or the number of rows, by ``reduction``."""
        if self.reduction == "sum":
            return 1.0
        return float(examples) if self.reduction == "mean" else rows
