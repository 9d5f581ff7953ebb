"""``F = S a a^T (x) b b^T``: Eva, of the means of inputs and output gradients.

Conventions.  With the rows x (a 1 appended where there is a bias) and g of
`kfac_core.layers.rows`, one update's statistics are the means over the rows that count,

    a = 1/(NS) sum_ns x,        b = 1/(NS) sum_ns g,

of gradients of the summed loss, and S as for `Kronecker`.  Damping is always exact:

    F_damped^-1 V = (V - S (a^T V b) / (lam + S |a|^2 |b|^2) a b^T) / lam.

Since ``a a^T <= E[x x^T]`` and ``b b^T <= E[g g^T]``, the block is at most that of
`Kronecker`.  The mean of output gradients for labels that are drawn from the model is
zero but for noise: use gradients for the labels of the data.

References
----------
Zhang, Shi and Li (2023), "Eva: A General Vectorized Approximation Framework for
Second-order Optimization", arXiv:2308.02123.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import cast, full_of
from kfac_core.array.place import Place
from kfac_core.errors import UnsupportedError
from kfac_core.factors.average import Average
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.homogeneous import append_coordinate
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Rows
from kfac_core.linalg.low_rank_basis import rank_one_basis
from kfac_core.operators.low_rank import (
    NO_CHOLESKY,
    LowRankOperator,
    low_rank_operator,
)

__all__ = ["Eva"]


@dataclass(frozen=True, kw_only=True)
class Eva(Approximation):
    r"""The block of the two mean vectors: ``in(+1) + out`` numbers.

    With S shared positions, N examples and the means of inputs and output gradients over
    all rows,

    .. math:: F = S \, a a^T \otimes b b^T, \qquad
        a = \frac{1}{NS} \sum_{n,s} x, \qquad
        b = \frac{1}{NS} \sum_{n,s} g.

    It keeps ``in(+1) + out`` numbers.  Damping is exact, and its inverse a rank-one
    correction:

    .. math:: (F + \lambda I)^{-1} V = \frac{1}{\lambda}
        \Bigl( V - \frac{S \, a^T V b}{\lambda + S |a|^2 |b|^2} \, a b^T \Bigr).

    The mean of output gradients for labels drawn from the model is zero up to noise: use
    gradients for the labels of the data.

    References
    ----------
    Zhang, Shi and Li (2023), arXiv:2308.02123.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.Eva())
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = block.moments(batch, conventions=conventions)
    >>> F = block.operator(statistics, damping=0.1, rule="exact")
    >>> a = np.append(batch.inputs.mean(axis=0), 1.0)
    >>> b = batch.output_grads.mean(axis=0)
    >>> ab = np.kron(a, b)
    >>> np.allclose(F.to_dense(damped=False), np.outer(ab, ab))
    True
    """

    name = "eva"
    reduction = "sum"
    unsupported_products = NO_CHOLESKY

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        if layer.kind not in ("dense", "conv"):
            return "needs pairs of inputs and output gradients; take Diagonal"
        if layer.groups > 1:
            return "a layer of groups is no single product; take Kronecker"
        return None

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics; see `Kronecker.initial`."""
        n, m = layer.matrix_shape
        zero = place.zeros()
        averages = {
            "input": Average(place.zeros(n), zero),
            "output": Average(place.zeros(m), zero),
            "repeats": Average(zero, zero),
        }
        return Statistics(averages, place.flags())

    def updated(
        self, statistics: Statistics, rows: Any, layer: Layer, options: UpdateOptions, /
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Raises
        ------
        UnsupportedError
            For several sources: their mean means nothing.

        Notes
        -----
        ``R (n + m)`` flops for R rows.
        """
        if rows.sources > 1:
            raise UnsupportedError(
                f"Eva keeps the mean output gradient, but got {rows.sources} sources. "
                "Feed one: the gradient for the labels of the data."
            )
        shares = options.shares(statistics, rows)
        xp, decay = options.xp, options.decay
        dtype, old = statistics.dtype, statistics.averages
        sums = {
            "input": _input_sum(rows, dtype, xp) * shares.rows,
            # One factor of N for each g, where the outer product has two.
            "output": xp.sum(cast(xp, rows.output_grads, dtype), axis=(0, 1, 2))
            * (shares.rows * shares.outer_products**0.5),
            "repeats": shares.repeats * shares.example_weight,
        }
        weights = {"repeats": shares.example_weight}
        averages = {
            name: old[name]
            if name in options.skip
            else Average(
                old[name].sum * decay + new,
                old[name].decayed(decay, weights.get(name, shares.row_weight)),
            )
            for name, new in sums.items()
        }
        return Statistics(averages, statistics.status)

    def squares(self, statistics: Statistics, /, *, xp: Namespace) -> Sequence[Array]:
        """Return ``|a|^2``, ``|b|^2`` and their product, the eigenvalue of the block."""
        a, b = (
            statistics.averages[side].value(debias=True) for side in ("input", "output")
        )
        S = statistics.averages["repeats"].value(debias=True)
        of_input, of_output = xp.sum(a * a), xp.sum(b * b)
        return of_input, of_output, S * of_input * of_output

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> LowRankOperator:
        """Return ``S a a^T (x) b b^T + lam I`` as it is now; ``O(n + m)`` flops."""
        xp, compute, apply = options.xp, options.compute, options.apply
        S = cast(xp, statistics.averages["repeats"].value(debias=True), compute)
        S = xp.where(S > 0, S, xp.ones_like(S))
        lam = full_of(xp, options.damping, S)
        a, b = (
            cast(xp, statistics.averages[side].value(debias=options.debias), compute)
            for side in ("input", "output")
        )
        return low_rank_operator(
            rank_one_basis(a, xp=xp),
            rank_one_basis(b, xp=xp),
            scale=S,
            damping=lam,
            shifts=None,
            factorizations=options.factorizations,
            check=options.check,
            name=options.name,
            dtype=apply,
        )


def _input_sum(rows: Rows, dtype: Any, xp: Namespace) -> Array:
    """Return the sum of the x that count, with the homogeneous coordinate, shape (n,)."""
    x, tail = xp.sum(cast(xp, rows.inputs, dtype), axis=(0, 1)), rows.tail(dtype, xp=xp)
    return x if tail is None else append_coordinate(x, xp.sum(tail), xp=xp)
