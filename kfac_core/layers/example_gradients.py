"""Gradients themselves as rows, for layers that have no pairs of x and g.

Conventions.  K vectors v of p numbers, whose outer products are summed; N is the number
of examples that they belong to.  For a layer that knows each example's gradient K is
``M N``; where only the gradient of the whole batch is available, K is M.
"""

from __future__ import annotations

from collections.abc import Mapping

from kfac_core import errors
from kfac_core.array import Array, Namespace, Scalar, Status, finite
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.conventions import LossReduction


@structure(static=("batch_size", "sources"))
class GradientBatch:
    """The gradients of some parameters for one batch, and its size.

    Parameters
    ----------
    gradients : dict of str to array
        The gradients of the loss, added up (or averaged, as `Conventions.reduction`
        says) over the batch; with a leading axis of length M where there are sources.
    batch_size : int
        Number of examples ``N``.
    sources : int, optional
        M; None where the gradients have no such axis.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Parameters(shapes={"scale": (3,)})
    >>> block = kc.Block(layer, kc.Full())
    >>> per_example = {"scale": np.ones((5, 3))}
    >>> batch = kc.GradientBatch(per_example, batch_size=5)
    """

    gradients: Mapping[str, Array]
    batch_size: int
    sources: int | None = None

    @property
    def like(self) -> Array:
        """An array whose library, device and dtype the statistics take."""
        return next(iter(self.gradients.values()))

    @property
    def inputs(self) -> Array:
        """Raise `UnsupportedError`: this batch has no inputs."""
        raise errors.UnsupportedError(
            "Expected a `Batch` of inputs and output gradients, got a `GradientBatch`, "
            "which is for bare parameters (kfac_core.Parameters)."
        )


@structure(static=("examples", "sources"))
class ExampleGradients:
    """Vectors whose second moment is the block.

    Attributes
    ----------
    gradients : array, shape (K, p)
        The v.
    examples : int
        Number of examples ``N``.
    sources : int
        Number of backpropagated vectors ``M``.
    """

    gradients: Array
    examples: int
    sources: int

    positions = 1

    @property
    def like(self) -> Array:
        """An array of the rows' library and device."""
        return self.gradients

    def counts(self, dtype: object, /, *, xp: Namespace) -> tuple[Scalar, int, int]:
        """Return N, N and M: each example counts as one row."""
        return self.examples, self.examples, self.sources

    def gradient_sum(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum v``, shape (p, 1)."""
        return xp.sum(ns.cast(xp, self.gradients, dtype), axis=0)[:, None]

    def squares(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum v * v``, shape (p, 1)."""
        v = ns.cast(xp, self.gradients, dtype)
        return xp.sum(v * v, axis=0)[:, None]

    def vectors(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return the v, shape (K, p)."""
        return ns.cast(xp, self.gradients, dtype)

    def status(
        self, *, xp: Namespace, known: frozenset[str] = frozenset(), stacked: int = 0
    ) -> Array | int:
        """Return whether the gradients are not finite; see `Rows.status`."""
        if "gradients" in known:
            return 0
        good = finite.all_finite(self.gradients, xp=xp)
        return ns.status_unless(xp, good, Status.OUTPUT_GRADS_NOT_FINITE)


def require_known_rows(rows: object, reduction: LossReduction, /) -> None:
    """Raise for a mean over rows whose number is not known.

    Parameters
    ----------
    rows : Rows, IdRows or ExampleGradients
        Rows of a layer.  Gradients of examples are summed over the rows of each.
    reduction : {"sum", "mean", "mean_rows"}
        Reduction of the loss.

    Raises
    ------
    ConventionError
        For gradients of examples and ``reduction="mean_rows"``.
    """
    if reduction == "mean_rows" and isinstance(rows, ExampleGradients):
        raise errors.ConventionError(
            "reduction='mean_rows' counts rows, which the gradients of a scale, a shift or "
            "bare parameters do not have. Multiply all output gradients by the number of "
            "rows of the loss, and say reduction='sum'."
        )
