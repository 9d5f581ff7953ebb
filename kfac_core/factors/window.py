"""A running second moment of gradients by the K that weigh most, as their rows.

Conventions.  As `kfac_core.factors.average`, for the sum ``sum_k w_k D_k D_k^T`` of the
gradients ``D_k = sum_s x_ks g_ks^T``.  Of all gradients that were ever added, the K of the
largest ``w_k |D_k|^2`` are kept, which is their part of the trace; the rest's is added to
`WindowSum.truncated_trace`.  What was left out is positive semidefinite, so that this is
the error in the trace norm.  Empty places hold zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar
from kfac_core.array.place import Place
from kfac_core.array.structure import replaced, structure
from kfac_core.factors.average import Average
from kfac_core.linalg.example_gram import squared_norms

__all__ = ["GradientWindow", "WindowSum"]


@structure()
class WindowSum:
    """The rows of K gradients, with their weights.

    Attributes
    ----------
    inputs : array, shape (K, S, n)
        The x, with the homogeneous coordinate.
    output_grads : array, shape (K, S, m)
        The g.
    weights : array, shape (K,)
        The w.
    truncated_trace : array, 0-d
        The trace of what was left out.
    """

    inputs: Array
    output_grads: Array
    weights: Array
    truncated_trace: Array

    def scaled(self, factor: Scalar, /) -> WindowSum:
        """Return the sum times a number that is not negative."""
        return replaced(
            self,
            weights=self.weights * factor,
            truncated_trace=self.truncated_trace * factor,
        )

    def joined(self, other: WindowSum, /) -> WindowSum:
        """Return both sums together, cut down to this one's number of places."""
        xp = array_api_compat.array_namespace(self.weights)
        x = xp.concat([self.inputs, other.inputs], axis=0)
        g = xp.concat([self.output_grads, other.output_grads], axis=0)
        w = xp.concat([self.weights, other.weights])
        traces = w * squared_norms(x, g, xp=xp)
        order = xp.argsort(traces, descending=True, stable=True)
        K = self.weights.shape[0]
        kept, cut = order[:K], order[K:]
        return WindowSum(
            xp.take(x, kept, axis=0),
            xp.take(g, kept, axis=0),
            xp.take(w, kept, axis=0),
            self.truncated_trace
            + other.truncated_trace
            + xp.sum(xp.take(traces, cut, axis=0)),
        )


@dataclass(frozen=True)
class GradientWindow:
    """A running second moment by K gradients of S rows.

    Parameters
    ----------
    gradients : int
        The number K that is kept.
    positions : int
        The number S of shared positions in each.
    """

    gradients: int
    positions: int

    def initial(self, shape: tuple[int, int], place: Place, /) -> Average:
        """Return a zero average, of gradients of shape (n, m)."""
        n, m = shape
        empty = WindowSum(
            place.zeros(self.gradients, self.positions, n),
            place.zeros(self.gradients, self.positions, m),
            place.zeros(self.gradients),
            place.zeros(),
        )
        return Average(empty, place.zeros())

    def updated(
        self,
        average: Average,
        x: Array,
        g: Array,
        /,
        *,
        decay: Scalar,
        scale: Scalar,
        weight: Array,
        xp: Namespace,
    ) -> Average:
        """Return the average after ``sum <- decay sum + scale sum_k D_k D_k^T``.

        Parameters
        ----------
        average : Average
            Never modified.
        x, g : array, shapes (k, S, n) and (k, S, m)
            The rows of the new gradients, of the dtype of the sum.
        decay, scale : float or 0-d array
            The two coefficients, not negative.
        weight : array, 0-d
            Weight of the update.
        xp : namespace
            Array API namespace of the arrays.

        Returns
        -------
        Average
            New average.
        """
        held: WindowSum = average.sum
        weights = xp.ones_like(x[:, 0, 0]) * scale
        new = WindowSum(x, g, weights, xp.zeros_like(held.truncated_trace))
        total = held.scaled(decay).joined(new)
        return Average(total, average.decayed(decay, weight))
