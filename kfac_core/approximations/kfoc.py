"""``F = A (x) G``, the Kronecker product nearest to the exact block: KFOC.

Conventions.  With ``D = sum_s x g^T`` an example's gradient (a 1 appended to x where there
is a bias), N examples and M sources, one batch's matrix is

    F_batch = 1/N sum_mn vec(D) vec(D)^T,

the exact block, and A (x) G is the product nearest to it in the Frobenius norm, found by a
power iteration that starts at K-FAC's input factor; see `kfac_core.linalg.kronecker_fit`.
Both factors are positive semidefinite.

Over several batches a sum is kept, and after each update that sum is replaced by its best
product:

    A (x) G  <-  best product of  decay A (x) G + weight F_batch.

This is exact for one batch, for batches with equal F, and if the running sum is itself a
Kronecker product.  Otherwise the remainder of the running sum is dropped, and the result
is close to the best product of the average, which is known only from F itself.
``statistics.averages["block"].change`` measures the convergence of the iteration.

For one batch and any number of iterations the error is at most that of
`kfac_core.approximations.kronecker` with ``sharing="expand"``.

References
----------
Koroko et al. (2022), "Efficient Approximations of the Fisher Matrix in Neural Networks
using Kronecker Product Singular Value Decomposition", arXiv:2201.10285.  Schnaus, Lee and
Triebel (2021), "Kronecker-Factored Optimal Curvature".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_core import constraints
from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import Array, Namespace, Place, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.factors.product import RunningProduct
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Rows
from kfac_core.linalg import kronecker_fit
from kfac_core.linalg.gram import updated_gram
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.operators.operator import CurvatureOperator

_KRONECKER = Kronecker()


@dataclass(frozen=True, kw_only=True)
class KFOC(Approximation[Rows]):
    r"""The best approximation of a block by one Kronecker product.

    With the gradients :math:`D = \sum_s x g^T` of N examples and M backpropagated vectors,
    A and G are the product nearest to the exact block in the Frobenius norm:

    .. math:: F = A \otimes G \approx
        \frac{1}{N} \sum_{m,n} \operatorname{vec}(D) \operatorname{vec}(D)^T.

    After each update the running sum is replaced by its own best product, so that the
    result is exact for one batch, and close to the best product of the average otherwise.

    Parameters
    ----------
    iterations : int
        Number of power iterations in each update, at least 1.  The error of a factor falls
        by ``(s_2 / s_1)^2`` an iteration, the ratio of the two largest singular values of
        the rearranged block; a handful is enough for a preconditioner.

    Raises
    ------
    ConventionError
        For fewer than one iteration.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.KFOC(iterations=20))
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> options = kc.RefreshOptions(damping=0.1, rule="exact")
    >>> F = kc.operator_of(block, statistics, options)
    >>> def dense(approximation):
    ...     block = kc.Block(layer, approximation)
    ...     statistics = kc.batch_moments(block, batch, conventions=conventions)
    ...     return kc.operator_of(block, statistics, options).to_dense(damped=False)
    >>> exact, kfac = dense(kc.Full()), dense(kc.Kronecker())
    >>> error = np.linalg.norm(F.to_dense(damped=False) - exact)
    >>> bool(error < np.linalg.norm(kfac - exact))
    True
    """

    iterations: int

    name = "kfoc"

    def __post_init__(self) -> None:
        constraints.require_options(self, iterations=constraints.COUNT)

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics: a `RunningProduct` named ``"block"``."""
        n, m = layer.matrix_shape
        m, lead = m // layer.groups, (layer.groups,) if layer.groups > 1 else ()
        averages: dict[str, Any] = {
            "block": RunningProduct(
                place.zeros(*lead, n, n),
                place.zeros(*lead, m, m),
                place.zeros(*lead),
                place.zeros(),
            )
        }
        return Statistics(averages, place.flags())

    def updated(
        self,
        statistics: Statistics,
        rows: Rows,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Notes
        -----
        About ``3 N (n^2 + M m^2)`` flops an iteration.  With shared positions the
        examples' gradients are formed, ``M N n m`` numbers, and it is
        ``4 M N n m (n + m)``.
        """
        shares = options.shares(rows, statistics.dtype, per="example")
        xp, decay = options.xp, options.decay
        average: Any = statistics.averages["block"]
        old: RunningProduct = average
        new = old.decayed(decay, shares.example_weight)
        unit = xp.where(new > 0, new, xp.ones_like(new))
        # The old product keeps this share of the new weight, and starts the iteration.
        past = old.weight * decay / unit
        A = kronecker_fit.unit_norm(_input_moment(rows, statistics.dtype, xp), xp=xp)
        # A (x) G <- best product of decay A (x) G + weight c / N sum_mn vec(D) vec(D)^T
        fit = kronecker_fit.kronecker_fit(
            [
                kronecker_fit.ProductTerm(old.input, old.output, decay),
                _term(rows, shares.scale * shares.outer_product_scale, statistics, xp),
            ],
            past * old.input + (1.0 - past) * A,
            iterations=self.iterations,
            xp=xp,
        )
        product: Any = RunningProduct(fit.input, fit.output, fit.change, new)
        return Statistics({"block": product}, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> CurvatureOperator:
        """Return the current ``A (x) G``, damped as the rule says.

        Both factors have the same Frobenius norm; a rule with pi balances them again.
        """
        xp = options.xp
        product = statistics.averages["block"]
        one = xp.ones_like(product.weight)
        averages = {"repeats": Average(one, one)}
        for side, value in product.value(debias=options.debias).items():
            factor = SymmetricMatrix(value, full_storage=True)
            averages[side] = Average(factor, one)
        # `product.value` has divided already; the averages above have weight 1.
        debiased = options._replace(debias=True)
        return _KRONECKER.operator(
            Statistics(averages, statistics.status), layer, debiased
        )

    @property
    def reduction_problem(self) -> str:
        """Why fitted products are not reduced."""
        return (
            "the best product for a sum does not follow from the best products for its "
            "parts; take Kronecker"
        )

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        if layer.kind in ("dense", "conv"):
            return None
        return "needs pairs of inputs and output gradients, so a dense or conv layer"


def _term(
    rows: Rows, scale: Scalar, statistics: Statistics, xp: Namespace
) -> kronecker_fit.FitTerm:
    """Return the batch's part of the sum; no gradient is formed where S is 1."""
    dtype = statistics.dtype
    if rows.positions > 1:
        D = rows.per_example(dtype, xp=xp)
        return kronecker_fit.GradientTerm(
            xp.reshape(D, (*D.shape[:-4], -1, *D.shape[-2:])), scale
        )
    g = ns.cast(xp, rows.output_grads, dtype)[..., 0, :]
    return kronecker_fit.RowTerm(rows.full_inputs(dtype, xp=xp)[..., 0, :], g, scale)


def _input_moment(rows: Rows, dtype: object, xp: Namespace) -> Array:
    """Return the sum of ``x x^T``."""
    x = rows.full_inputs(dtype, xp=xp)
    x = xp.reshape(x, (*x.shape[:-3], -1, x.shape[-1]))
    return updated_gram(None, x, 0.0, 1.0, xp=xp).full()
