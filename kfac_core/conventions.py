"""The conventions that a framework and this library must agree on.

The most common defect in K-FAC code is a silent factor of N.  So nothing here has a
default that hides one: how output gradients are scaled is said when an estimator is
made, it is written into its state, and it is checked when the state is loaded.

Let ``g`` be the vector that a framework back-propagated to a layer's output for one
example (and one shared position).  The output factor is an average of outer products of
gradients of the *summed* loss, so ``g`` is multiplied by

========================  ========================================================
``reduction="sum"``            1: the loss was a sum over the batch
``reduction="mean"``           N: the loss was a mean over the N examples of the batch
``reduction="mean_rows"``      the number of rows kept by the mask: the loss was a mean over
                          all examples and shared positions (tokens, time steps)
========================  ========================================================

and the M sources (several vectors back-propagated for one batch) are combined by

========================  ========================================================
``sources="sum"``         summing outer products: one vector an output coordinate,
                          as for the exact Fisher or Gauss-Newton matrix
``sources="mean"``        averaging them: M independent samples of labels
========================  ========================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kfac_core.array.namespaces import Scalar
from kfac_core.errors import ConventionError

__all__ = ["Conventions", "LossReduction", "SourceReduction", "require_one_of"]

LossReduction = Literal["sum", "mean", "mean_rows"]
SourceReduction = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """How the output gradients that a framework gives are scaled.

    Parameters
    ----------
    reduction : {"sum", "mean", "mean_rows"}
        Over what the loss that was differentiated is summed or averaged.
    sources : {"sum", "mean"}
        Whether the outer products of several sources are summed or averaged.

    Raises
    ------
    ConventionError
        For any other value.
    """

    reduction: LossReduction
    sources: SourceReduction

    def __post_init__(self) -> None:
        require_one_of("reduction", self.reduction, get_args(LossReduction))
        require_one_of("sources", self.sources, get_args(SourceReduction))

    def outer_product_scale(
        self, *, examples: int, rows: Scalar, sources: int
    ) -> Scalar:
        """Return what each outer product ``g g^T`` is multiplied by.

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
            The square of the factor in the module's table, over M for averaged sources.
        """
        factor = self.gradient_scale(examples=examples, rows=rows)
        return factor * factor / (sources if self.sources == "mean" else 1)

    def gradient_scale(self, *, examples: int, rows: Scalar) -> Scalar:
        """Return what each g is multiplied by; the factor in the module's table."""
        return {"sum": 1.0, "mean": float(examples), "mean_rows": rows}[self.reduction]


def require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise `ConventionError` unless a value is among the known ones."""
    if value not in known:
        choices = ", ".join(repr(k) for k in known)
        raise ConventionError(
            f"Expected `{name}` to be one of {choices}; got {value!r}."
        )
