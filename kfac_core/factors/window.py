"""A running second moment of gradients by the K that weigh most, as their rows.

Conventions.  As `kfac_core.factors.average`, for the sum ``sum_k w_k D_k D_k^T`` of the
gradients ``D_k = sum_s x_ks g_ks^T``.  Of all gradients that were ever added, the K of the
largest ``w_k |D_k|^2`` are kept, which is their part of the trace; the rest's is added to
`WindowSum.truncated_trace`.  What was left out is positive semidefinite, so that this is
the error in the trace norm.  Empty places hold zeros.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar
from kfac_core.array.place import Place
from kfac_core.array.structure import replaced, structure
from kfac_core.factors.average import Average, share_of
from kfac_core.linalg.example_gram import squared_norms

__all__ = ["WindowAverage", "WindowSum", "window_average"]


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


@structure()
class WindowAverage(Average):
    """A running sum of gradients' outer products, in a window, and its weight.

    Attributes
    ----------
    sum : WindowSum
        The weighted sum.
    weight : 0-d array
        The sum of weights, of the same dtype.
    """

    def value(self, *, debias: bool) -> WindowSum:
        """Return the average, or the bare sum where `debias` is false."""
        total: WindowSum = self.sum
        if not debias:
            return total
        xp = array_api_compat.array_namespace(self.weight)
        one = xp.ones_like(self.weight)
        return total.scaled(1.0 / xp.where(self.weight > 0, self.weight, one))

    def merged(self, other: Average, /) -> WindowAverage:
        """Return the average of both data sets together."""
        return WindowAverage(self.sum.joined(other.sum), self.weight + other.weight)

    def absorbed(
        self,
        other: Average,
        /,
        *,
        decay: Scalar,
        weight: Scalar,
        total: float | None = None,
    ) -> WindowAverage:
        """Return the average after one update; see `Average.absorbed`."""
        scale, share = share_of(other.weight, weight, total)
        joined = self.sum.scaled(decay).joined(other.sum.scaled(scale))
        return WindowAverage(joined, self.decayed(decay, share))

    def updated(
        self,
        x: Array,
        g: Array,
        /,
        *,
        decay: Scalar,
        scale: Scalar,
        weight: Array,
        xp: Namespace,
    ) -> WindowAverage:
        """Return the average after ``sum <- decay sum + scale sum_k D_k D_k^T``.

        Parameters
        ----------
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
        WindowAverage
            New average.
        """
        weights = xp.ones_like(x[:, 0, 0]) * scale
        new = WindowSum(x, g, weights, xp.zeros_like(self.sum.truncated_trace))
        total = self.sum.scaled(decay).joined(new)
        return WindowAverage(total, self.decayed(decay, weight))


def window_average(
    places: int,
    positions: int,
    n: int,
    m: int,
    place: Place,
    /,
) -> WindowAverage:
    """Return a zero average, for K gradients of S rows and shape (n, m)."""
    empty = WindowSum(
        place.zeros(places, positions, n),
        place.zeros(places, positions, m),
        place.zeros(places),
        place.zeros(),
    )
    return WindowAverage(empty, place.zeros())
