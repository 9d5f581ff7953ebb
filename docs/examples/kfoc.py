"""``F ~ A (x) G``, the Kronecker product nearest to the exact block: KFOC.

Conventions.  With ``D = sum_s x g^T`` an example's gradient (a 1 appended to x where there
is a bias), N examples and M sources, one batch's matrix is the exact block,

    F_batch = 1/N sum_mn vec(D) vec(D)^T,

vec row-major.  Rearranged, so that A (x) G becomes vec(A) vec(G)^T, its top singular pair
is the product nearest to it in the Frobenius norm.  A power iteration finds the pair and
forms no matrix of that size:

    G <- sum D^T A D,    A <- sum D G D^T,

each scaled to norm 1.  It starts at K-FAC's A, so that both factors are positive
semidefinite and the error is at most K-FAC's.  After each update the running sum is
replaced by its best product,

    A (x) G  <-  best product of  decay A (x) G + weight F_batch,

which is exact for one batch, and drops the remainder of the sum otherwise.  Damping is
that of `kfac_core.Kronecker`, by any rule.

References
----------
Van Loan and Pitsianis (1993), "Approximation with Kronecker products".  Schnaus, Lee and
Triebel (2021), "Kronecker-Factored Optimal Curvature".  Koroko et al. (2022), "Efficient
Approximations of the Fisher Matrix in Neural Networks using Kronecker Product Singular
Value Decomposition", arXiv:2201.10285.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import kfac_core as kc
from kfac_core.approximations import OperatorOptions, UpdateOptions
from kfac_core.array import Array, Namespace, Place, cast, own_namespace
from kfac_core.factors import Average
from kfac_core.layers import Rows
from kfac_core.linalg import SymmetricMatrix

__all__ = ["KFOC", "FittedProduct"]

REASON = (
    "the best product for a sum does not follow from the best products for its parts"
)


@kc.structure()
class FittedProduct:
    """The running sum ``A (x) G``, in the place of an average.

    Attributes
    ----------
    input : array, shape (..., n, n)
        A, of Frobenius norm 1, or zero before the first row.
    output : array, shape (..., m, m)
        G, whose norm is that of the sum.
    weight : array, 0-d
        The sum of weights.
    """

    input: Array
    output: Array
    weight: Array

    def factors(self, *, debias: bool) -> dict[str, Array]:
        """Return A and G of equal norms; their product is the average, or the sum."""
        xp = own_namespace(self.weight)
        G, norm = _scaled(self.output, xp=xp)
        root = xp.sqrt(norm / _positive_or_one(self.weight, xp) if debias else norm)
        return {"input": self.input * root, "output": G * root}

    def merged(self, other: FittedProduct, /) -> NoReturn:
        """Raise `UnsupportedError`: a best product cannot be merged from parts."""
        raise kc.UnsupportedError(
            f"KFOC fits a product to a whole batch: {REASON}. Feed whole batches to "
            "`update`, without `max_patch_elements`, `moments` and `merge`."
        )

    def absorbed(self, other: FittedProduct, /, **options: Any) -> NoReturn:
        """Raise `UnsupportedError`; see `merged`."""
        self.merged(other)


@dataclass(frozen=True, kw_only=True)
class KFOC(kc.Approximation[Rows]):
    """The nearest Kronecker product of dense and conv layers.

    Parameters
    ----------
    iterations : int
        Number of power iterations in each update, at least 1.  The error of a factor falls
        by ``(s_2 / s_1)^2`` in each, the ratio of the two largest singular values.
    """

    iterations: int

    name = "kfoc"

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise kc.ConventionError(
                f"Expected at least one iteration, got {self.iterations}."
            )

    @property
    def reduction_problem(self) -> str:
        """Why several processes cannot add up their products."""
        return REASON

    def problem_with(self, layer: kc.Layer, /) -> str | None:
        """Return why a layer other than a dense or conv layer has no such block."""
        if layer.kind in ("dense", "conv"):
            return None
        return "needs pairs of inputs and output gradients, so a dense or conv layer"

    def initial(self, layer: kc.Layer, place: Place, /) -> kc.Statistics:
        """Return the statistics of nothing: a product of zeros."""
        n, m = layer.matrix_shape
        groups = (layer.groups,) if layer.groups > 1 else ()
        m //= layer.groups
        A, G = place.zeros(*groups, n, n), place.zeros(*groups, m, m)
        averages: dict[str, Any] = {"block": FittedProduct(A, G, place.zeros())}
        return kc.Statistics(averages, place.flags())

    def updated(
        self,
        statistics: kc.Statistics,
        rows: Rows,
        layer: kc.Layer,
        options: UpdateOptions,
        /,
    ) -> kc.Statistics:
        """Return the statistics after one update.

        An iteration takes about ``3 M N (n^2 + m^2)`` flops, and with shared positions,
        whose gradients are formed, ``4 M N n m (n + m)``.
        """
        xp, decay, dtype = options.xp, options.decay, statistics.dtype
        shares = options.shares(rows, dtype, per="example")
        scale = shares.scale * shares.outer_product_scale
        average: Any = statistics.averages["block"]
        old: FittedProduct = average
        x = rows.full_inputs(dtype, xp=xp)
        gradients: RowGradients | Gradients
        if rows.positions == 1:
            g = cast(xp, rows.output_grads, dtype)[..., 0, :]
            gradients = RowGradients(x[..., None, :, 0, :], g)
        else:
            gradients = Gradients(rows.per_example(dtype, xp=xp))
        swapped = gradients.swapped(xp=xp)

        def output_of(A: Array) -> Array:
            past = _inner(old.input, A, xp=xp) * decay * old.output
            return past + scale * gradients.across(A, xp=xp)

        def input_of(G: Array) -> Array:
            past = _inner(old.output, G, xp=xp) * decay * old.input
            return past + scale * swapped.across(G, xp=xp)

        weight = old.weight * decay + shares.example_weight
        share = old.weight * decay / _positive_or_one(weight, xp)
        kfac, _ = _scaled(_summed(x, x, xp=xp), xp=xp)
        A, _ = _scaled(share * old.input + (1.0 - share) * kfac, xp=xp)
        for _ in range(self.iterations):
            G, _ = _scaled(output_of(A), xp=xp)
            A, _ = _scaled(input_of(G), xp=xp)
        product: Any = FittedProduct(A, output_of(A), weight)
        return kc.Statistics({"block": product}, statistics.status)

    def operator(
        self, statistics: kc.Statistics, layer: kc.Layer, options: OperatorOptions, /
    ) -> kc.CurvatureOperator:
        """Return the operator of `kfac_core.Kronecker` with these factors and S = 1."""
        average: Any = statistics.averages["block"]
        product: FittedProduct = average
        one = options.xp.ones_like(product.weight)
        averages = {"repeats": Average(one, one)}
        for side, factor in product.factors(debias=options.debias).items():
            averages[side] = Average(SymmetricMatrix(factor, full_storage=True), one)
        factors = kc.Statistics(averages, statistics.status)
        return kc.Kronecker().operator(factors, layer, options)


class RowGradients(NamedTuple):
    """Gradients ``D = x g^T`` of one row each, which need not be formed.

    Attributes
    ----------
    left, right : array, shapes (..., M or 1, N, n) and (..., M or 1, N, m)
        The x and the g.
    """

    left: Array
    right: Array

    def swapped(self, *, xp: Namespace) -> RowGradients:
        """Return the transposed gradients."""
        return RowGradients(self.right, self.left)

    def across(self, A: Array, /, *, xp: Namespace) -> Array:
        """Return ``sum D^T A D = sum (x^T A x) g g^T``."""
        x, A = self.left, A[..., None, :, :]
        forms = xp.sum(xp.matmul(x, A) * x, axis=-1, keepdims=True)
        # Rounding can make the form of a semidefinite A negative.
        forms = xp.where(forms > 0, forms, xp.zeros_like(forms))
        return _summed(forms * self.right, self.right, xp=xp)


class Gradients(NamedTuple):
    """Gradients of examples with several rows.

    Attributes
    ----------
    gradients : array, shape (..., M, N, n, m)
        The D.
    """

    gradients: Array

    def swapped(self, *, xp: Namespace) -> Gradients:
        """Return the transposed gradients."""
        return Gradients(xp.matrix_transpose(self.gradients))

    def across(self, A: Array, /, *, xp: Namespace) -> Array:
        """Return ``sum D^T A D``."""
        D = self.gradients
        shape = (*D.shape[:-4], -1, *D.shape[-2:])
        D = xp.reshape(D, shape)
        return _summed(D, xp.matmul(A[..., None, :, :], D), xp=xp)


def _summed(left: Array, right: Array, /, *, xp: Namespace) -> Array:
    """Return the sum of ``left^T right`` over two axes, symmetric to the last bit."""
    right = xp.broadcast_to(right, left.shape)
    left, right = (
        xp.reshape(rows, (*rows.shape[:-3], -1, rows.shape[-1]))
        for rows in (left, right)
    )
    total = xp.matmul(xp.matrix_transpose(left), right)
    return 0.5 * (total + xp.matrix_transpose(total))


def _scaled(matrix: Array, /, *, xp: Namespace) -> tuple[Array, Array]:
    """Return a matrix over its Frobenius norm, or zeros, and the norm, (..., 1, 1)."""
    # Squares of a large or a small matrix leave the range of its dtype.
    largest = xp.max(xp.abs(matrix), axis=(-2, -1), keepdims=True)
    unit = matrix / _positive_or_one(largest, xp)
    norm = xp.linalg.vector_norm(unit, axis=(-2, -1), keepdims=True)
    return unit / _positive_or_one(norm, xp), norm * largest


def _inner(first: Array, second: Array, /, *, xp: Namespace) -> Array:
    """Return ``<A, B>`` of semidefinite matrices, shape (..., 1, 1)."""
    product = xp.sum(first * second, axis=(-2, -1), keepdims=True)
    return xp.where(product > 0, product, xp.zeros_like(product))


def _positive_or_one(x: Array, xp: Namespace) -> Array:
    return xp.where(x > 0, x, xp.ones_like(x))
