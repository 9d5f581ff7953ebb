"""``F = A (x) G / tr A`` with second moments of the gradient matrix: TNT.

Conventions.  With ``D = sum_s x g^T`` an example's gradient, N examples and M sources,
one update's statistics are

    A = 1/N sum_mn D D^T,        G = 1/N sum_mn D^T D,

whose traces both equal the trace of the exact block.  ``1 / tr A`` therefore takes the
place of the number S of shared positions of `Kronecker`, also in the damping rules.  With
``positions="independent"`` each position is an example of its own, ``D = x g^T``, N is
the number of rows, and the block is S times that.

For a bare array of k axes only the gradient V of a whole batch is available.  The k factors
are ``F_i = 1/N sum_m V_(i) V_(i)^T`` of its unfoldings, and the block is
``F_1 (x) ... (x) F_k / (tr F_1)^(k-1)``.

References
----------
Ren and Goldfarb (2021), "Tensor Normal Training for Deep Learning Models",
arXiv:2106.02925, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kfac_core import constraints
from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.axes import axes_operator, initial_axes, updated_axes
from kfac_core.approximations.kronecker import Kronecker, kronecker_shapes
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import Array, Namespace, Place
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.factors.full import FullFactor
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Rows
from kfac_core.operators.operator import CurvatureOperator

Positions = Literal["summed", "independent"]

_KRONECKER = Kronecker()


@dataclass(frozen=True, kw_only=True)
class TNT(Approximation[Rows | ExampleGradients]):
    r"""The tensor-normal approximation of a block.

    With the gradients :math:`D = \sum_s x g^T` of N examples and M backpropagated vectors,

    .. math:: F = \frac{A \otimes G}{\operatorname{tr} A}, \qquad
        A = \frac{1}{N} \sum_{m,n} D D^T, \qquad
        G = \frac{1}{N} \sum_{m,n} D^T D.

    For a bare array of k axes there are k factors, of the unfoldings of the gradient, and
    :math:`F = F_1 \otimes \dots \otimes F_k / (\operatorname{tr} F_1)^{k-1}`.

    Parameters
    ----------
    positions : {"summed", "independent"}
        Whether an example's gradient is summed over shared positions first, or each
        position counts as an example.

    Raises
    ------
    ConventionError
        For another value.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.TNT())
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> options = kc.RefreshOptions(damping=0.1, rule="exact")
    >>> F = kc.operator_of(block, statistics, options)
    >>> x = np.hstack([batch.inputs, np.ones((16, 1))])
    >>> D = x[:, :, None] * batch.output_grads[:, None, :]
    >>> bool(np.isclose(F.trace(damped=False), np.mean(np.sum(D**2, axis=(1, 2)))))
    True
    """

    positions: Positions = "summed"

    name = "tnt"
    reduction = "sum"

    def __post_init__(self) -> None:
        constraints.require_options(self, positions=constraints.literal(Positions))

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics."""
        if layer.kind == "parameters":
            return initial_axes(layer, place)
        return _KRONECKER.initial(layer, place)

    def updated(
        self,
        statistics: Statistics,
        rows: Rows | ExampleGradients,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Notes
        -----
        ``R (n^2 + M m^2)`` flops for R examples of one row each, whose gradients are not
        formed; elsewhere they are: ``M N n m`` numbers, in ``2 M R n m`` flops, and
        ``M N n m (n + m)`` for their products.
        """
        xp, decay = options.xp, options.decay
        alone = self.positions == "independent" and layer.kind != "parameters"
        shares = options.shares(
            rows, statistics.dtype, per="row" if alone else "example"
        )
        if isinstance(rows, ExampleGradients):
            return updated_axes(statistics, rows, layer, shares, decay=decay, xp=xp)
        used = rows.per_position() if alone else rows
        columns, across = _gram_rows(used, statistics.dtype, xp)
        old, full = statistics.averages, FullFactor()
        step = decay, shares.scale * shares.outer_product_scale, shares.weight
        weight = shares.example_weight
        # A <- decay A + weight c / N sum D D^T, and G with D^T D
        averages = {
            "input": full.updated(old["input"], columns, *step, xp=xp),
            "output": full.updated(old["output"], across, *step, xp=xp),
            "repeats": old["repeats"].plus(shares.repeats, decay, weight, weight),
        }
        return Statistics(averages, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> CurvatureOperator:
        """Return the current ``S A (x) G / tr A``, damped as the rule says."""
        if layer.kind == "parameters":
            return axes_operator(statistics, options)
        xp = options.xp
        A = statistics.averages["input"]
        trace = A.factor(debias=options.debias) * A.sum.trace()
        S = statistics.averages["repeats"].value(debias=True)
        # With S / tr A in place of S, the block and its damping rules are Kronecker's.
        S = S / xp.where(trace > 0, trace, xp.ones_like(trace))
        scale = Average(S, xp.ones_like(S))
        averages = {**statistics.averages, "repeats": scale}
        return _KRONECKER.operator(
            Statistics(averages, statistics.status), layer, options
        )

    def factor_shapes(self, layer: Layer, /) -> Mapping[str, tuple[int, int]]:
        """Return the sizes of both factors; empty for a bare array."""
        return {} if layer.kind == "parameters" else kronecker_shapes(layer)

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        if layer.kind in ("dense", "conv"):
            return None
        if layer.kind == "parameters" and len(layer.parameter_shapes) == 1:
            return None
        return (
            "needs a gradient with axes, so a dense or conv layer, or `Parameters` of one "
            "array"
        )


def _gram_rows(rows: Rows, dtype: object, xp: Namespace) -> tuple[Array, Array]:
    """Return rows whose Gram matrices are ``sum D D^T`` and ``sum D^T D``.

    With one position, ``D = x g^T`` is not formed: the rows are ``|g| x`` and ``|x| g``.
    """
    if rows.positions == 1:
        x = rows.full_inputs(dtype, xp=xp)[..., 0, :]
        g = ns.cast(xp, rows.output_grads, dtype)[..., 0, :]
        g_norms = xp.sqrt(xp.sum(g * g, axis=(-3, -1)))
        x_norms = xp.sqrt(xp.sum(x * x, axis=-1))
        across = g * x_norms[..., None, :, None]
        flat = (*g.shape[:-3], -1, g.shape[-1])
        return x * g_norms[..., None], xp.reshape(across, flat)
    D = rows.per_example(dtype, xp=xp)
    lead, (n, m) = D.shape[:-4], D.shape[-2:]
    columns = xp.reshape(xp.matrix_transpose(D), (*lead, -1, n))
    return columns, xp.reshape(D, (*lead, -1, m))
