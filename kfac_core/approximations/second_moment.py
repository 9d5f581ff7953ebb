"""``F = E[v v^T]`` of each example's gradient v: the matrix (`Full`), or its diagonal.

Conventions.  v is the row-major flattening of ``D = sum_s x g^T``, the gradient of the
block's matrix for one example; N examples, M sources.  One update's statistic is

    Full:      1/N sum_mn v v^T,        Diagonal:  1/N sum_mn D * D,

the exact block and its exact diagonal.  Damping is always exact, ``F + lam I``.

References
----------
For the elementwise form of the diagonal see the notes on `DenseDiagonal` in kfac-jax and
`FullyConnectedDiagonalFactor` in TensorFlow's K-FAC, which agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import Place
from kfac_core.array import namespaces as ns
from kfac_core.factors.diagonal import DiagonalFactor
from kfac_core.factors.full import FullFactor
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import AnyRows, Layer
from kfac_core.operators.dense import DenseOperator
from kfac_core.operators.spectral import SpectralOperator, spectral_operator


@dataclass(frozen=True, kw_only=True)
class Diagonal(Approximation[AnyRows]):
    r"""The diagonal of the block: ``in(+1) x out`` numbers.

    With the gradients :math:`D = \sum_s x g^T` of N examples and M backpropagated vectors,

    .. math:: F = \operatorname{diag} \Bigl( \frac{1}{N} \sum_{m,n} D \circ D \Bigr),

    the exact diagonal of the block.  Damping is exact, :math:`F + \lambda I`.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.Diagonal())
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> options = kc.RefreshOptions(damping=0.1, rule="exact")
    >>> F = kc.operator_of(block, statistics, options)
    >>> x = np.hstack([batch.inputs, np.ones((16, 1))])
    >>> squares = (x**2).T @ batch.output_grads**2 / 16
    >>> np.allclose(F.multiply_inverse(np.ones((4, 2))), 1 / (squares + 0.1))
    True
    """

    name = "diagonal"
    reduction = "sum"
    sums_of_squares = (("block", "gradients"),)

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics."""
        n, m = layer.matrix_shape
        average = DiagonalFactor().initial((n * m,), place)
        return Statistics({"block": average}, place.flags())

    def updated(
        self,
        statistics: Statistics,
        rows: AnyRows,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Notes
        -----
        ``2 N n m`` flops where nothing is shared, else the examples' gradients are
        formed.
        """
        # D is summed over an example's positions before it is squared.
        shares = options.shares(rows, statistics.dtype, per="example")
        xp, scale = options.xp, shares.scale * shares.outer_product_scale
        squares = xp.reshape(rows.squares(statistics.dtype, xp=xp), (-1,))
        average = statistics.averages["block"].plus(
            squares, options.decay, scale, shares.example_weight
        )
        return Statistics({"block": average}, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> SpectralOperator:
        """Return ``diag(D * D) + lam I`` in its current state."""
        xp, compute, apply = options.xp, options.compute, options.apply
        average = statistics.averages["block"]
        squares = ns.cast(xp, average.value(debias=options.debias), compute)
        return spectral_operator(
            xp.reshape(squares, layer.matrix_shape),
            damping=ns.full_of(xp, options.damping, squares),
            vector_shape=layer.matrix_shape,
            dtype=apply,
            **options.preparing,
        )


@dataclass(frozen=True, kw_only=True)
class Full(Approximation[AnyRows]):
    r"""The whole block: ``(in(+1) out)^2`` numbers, for small layers and for tests.

    With the gradients :math:`D = \sum_s x g^T` of N examples and M backpropagated vectors,

    .. math:: F = \frac{1}{N} \sum_{m,n} \operatorname{vec}(D) \operatorname{vec}(D)^T,

    the exact block, in row-major order.  Damping is exact, :math:`F + \lambda I`.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.Full())
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> options = kc.RefreshOptions(damping=0.1, rule="exact")
    >>> F = kc.operator_of(block, statistics, options)
    >>> x = np.hstack([batch.inputs, np.ones((16, 1))])
    >>> D = (x[:, :, None] * batch.output_grads[:, None, :]).reshape(16, 8)
    >>> np.allclose(F.to_dense(damped=False), D.T @ D / 16)
    True
    """

    name = "full"
    reduction = "sum"
    sums_of_squares = (("block", "gradients"),)

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics."""
        n, m = layer.matrix_shape
        average = FullFactor().initial((n * m,), place)
        return Statistics({"block": average}, place.flags())

    def updated(
        self,
        statistics: Statistics,
        rows: AnyRows,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Notes
        -----
        ``M N (n m)^2`` flops; the examples' gradients are formed.
        """
        shares = options.shares(rows, statistics.dtype, per="example")
        xp, scale = options.xp, shares.scale * shares.outer_product_scale
        # Examples' gradients, flattened: the only approximation that keeps all of F.
        v = rows.vectors(statistics.dtype, xp=xp)
        old, weight = statistics.averages["block"], shares.example_weight
        average = FullFactor().updated(old, v, options.decay, scale, weight, xp=xp)
        return Statistics({"block": average}, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> DenseOperator:
        """Return ``F + lam I`` in its current state."""
        xp, compute, apply = options.xp, options.compute, options.apply
        average, factor = statistics.averages["block"], FullFactor()
        value = factor.value(average, debias=options.debias, dtype=compute, xp=xp)
        block = factor.damped(value, options.damping, apply_dtype=apply)
        block = block.prepared(
            *options.factorizations, check=options.check, name=options.name
        )
        if not options.keep_matrices:
            block = block.factorized()
        return DenseOperator(block, layer.matrix_shape)
