"""SENG: ``F = E[D D^T]`` of per-example gradients, by their Gram matrix.

Conventions.  With ``D = sum_s x g^T`` the gradient of one example (and source), one
update's statistic is ``1/N sum_mn D D^T``, as for `Full`; of it the rows of the K
gradients that weigh most are kept.  Damping is always exact, ``F + lam I``.  With K the
number of gradients in a batch and ``decay=0`` this is the block of that batch; with a
decay below 1, older batches stay as long as they weigh more than what came after.

References
----------
Yang, Xu, Wen, Chen and Xu (2020), "Sketchy Empirical Natural Gradient Methods for Deep
Learning", arXiv:2006.05924, for the solve by a Gram matrix of per-example gradients; its
sketches are not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kfac_core.approximations.approximation import Approximation, Reduction
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import cast
from kfac_core.array.place import Place
from kfac_core.array.structure import in_dtype
from kfac_core.constraints import SIZE, require_options
from kfac_core.errors import ShapeError
from kfac_core.factors.statistics import Statistics
from kfac_core.factors.window import GradientWindow
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Rows
from kfac_core.linalg.example_gram import squared_norms
from kfac_core.operators.example_gram import (
    NO_TRIANGLE,
    ExampleGramOperator,
    example_gram_operator,
)

__all__ = ["ExampleGram"]


@dataclass(frozen=True, kw_only=True)
class ExampleGram(Approximation):
    r"""SENG: the block of the K per-example gradients with the largest weights.

    With the gradient :math:`D_k = \sum_s x g^T` of one example (and one backpropagated
    vector) as a vector,

    .. math:: F = \sum_{k=1}^K w_k \, D_k D_k^T

    is inverted through the K x K Gram matrix of the gradients.  With K the number of
    gradients in a batch and ``decay=0``, F is the empirical Fisher block of that batch.
    Damping is always exact: ``F + lam I``.

    Parameters
    ----------
    gradients : int
        Number of gradients K to keep.  Each backpropagated vector of an example counts as
        one.
    positions : int
        Number of shared positions S in each example; 1 for a layer without weight
        sharing.

    Raises
    ------
    ShapeError
        For a number below 1.

    Notes
    -----
    Memory: ``K S (n + m)`` numbers, with ``n = in`` (``in + 1`` with a bias) and
    ``m = out``.  The D are never formed.

    Dtype: that of the first batch, or float32 if that is narrower; see
    `kfac_core.Precision`.

    Units: F is the curvature of the loss of one example, as for `Kronecker`.

    Cost: about ``K^2 S^2 (n + m)`` flops and a factorization of K x K for a refresh,
    ``4 K S n m`` for preconditioning.

    The sketches of the paper are not implemented.

    References
    ----------
    Yang et al. (2020), arXiv:2006.05924.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.ExampleGram(gradients=16))
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = block.moments(batch, conventions=conventions)
    >>> F = block.operator(statistics, damping=0.1, rule="exact")
    >>> x = np.hstack([batch.inputs, np.ones((16, 1))])
    >>> D = (x[:, :, None] * batch.output_grads[:, None, :]).reshape(16, 8)
    >>> np.allclose(F.to_dense(damped=False), D.T @ D / 16)
    True
    """

    gradients: int
    positions: int = 1

    name = "example_gram"
    unsupported_products = NO_TRIANGLE

    def __post_init__(self) -> None:
        require_options(self, gradients=SIZE, positions=SIZE)

    @property
    def reduction(self) -> Reduction:
        """The gradients that weigh most of all are among those that do on a process."""
        return "merge"

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        if layer.kind not in ("dense", "conv"):
            return "needs pairs of inputs and output gradients; take Full or Diagonal"
        if layer.groups > 1:
            return (
                "an example's gradient of groups is no single product; take Kronecker"
            )
        return None

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics; see `Kronecker.initial`."""
        average = self._window.initial(layer.matrix_shape, place)
        return Statistics({"block": average}, place.flags())

    def updated(
        self, statistics: Statistics, rows: Any, layer: Layer, options: UpdateOptions, /
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Raises
        ------
        ShapeError
            For another number of positions than `positions`.

        Notes
        -----
        ``(2 K + M N) S^2 (n + m)`` flops, and a sort of ``K + M N`` numbers.
        """
        rows.require_all_positions()
        if rows.positions != self.positions:
            raise ShapeError(
                f"Expected {self.positions} shared positions an example, got "
                f"{rows.positions}. Write ExampleGram(positions={rows.positions})."
            )
        shares = options.shares(statistics, rows)
        xp = options.xp
        x, g = _gradient_rows(rows, statistics.dtype, xp)
        new = self._window.updated(
            statistics.averages["block"],
            x,
            g,
            decay=options.decay,
            scale=shares.examples * shares.outer_products,
            weight=shares.example_weight,
            xp=xp,
        )
        return Statistics({"block": new}, statistics.status)

    def squares(self, statistics: Statistics, /, *, xp: Namespace) -> Sequence[Array]:
        """Return the traces ``w_k |D_k|^2``, the diagonal of the Gram matrix."""
        window = statistics.averages["block"].value(debias=True)
        norms = squared_norms(window.inputs, window.output_grads, xp=xp)
        return (norms * window.weights,)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> ExampleGramOperator:
        """Return ``sum_k w_k D_k D_k^T + lam I`` as it is now.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            As `example_gram_operator` (``check="raise"``).
        """
        xp, compute, apply = options.xp, options.compute, options.apply
        value = statistics.averages["block"].value(debias=options.debias)
        window = in_dtype(value, compute, xp)
        return example_gram_operator(
            window.inputs,
            window.output_grads,
            weights=window.weights,
            damping=options.damping,
            truncated_trace=window.truncated_trace,
            factorizations=options.factorizations,
            check=options.check,
            name=options.name,
            apply_dtype=apply,
        )

    @property
    def _window(self) -> GradientWindow:
        return GradientWindow(self.gradients, self.positions)


def _gradient_rows(rows: Rows, dtype: Any, xp: Namespace) -> tuple[Array, Array]:
    """Return x and g of each gradient, shapes (M N, S, n) and (M N, S, m)."""
    x, g = rows.full_inputs(dtype, xp=xp), cast(xp, rows.output_grads, dtype)
    M = rows.sources
    x = xp.reshape(xp.broadcast_to(x, (M, *x.shape)), (-1, *x.shape[1:]))
    return x, xp.reshape(g, (-1, *g.shape[2:]))
