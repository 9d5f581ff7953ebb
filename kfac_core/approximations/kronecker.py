"""``F = S A (x) G``: K-FAC, with weight sharing expanded or reduced.

Conventions.  With the rows x (a 1 appended where there is a bias) and g of
`kfac_core.layers.rows`, N examples, S shared positions and M sources, one update's
statistics are

==========  =====================================  ===================================
sharing     input factor A                         output factor G
==========  =====================================  ===================================
``expand``  ``1/(NS) sum_ns x x^T``                ``1/(NS) sum_mns g g^T``
``reduce``  ``1/N sum_n x_n x_n^T``, x_n the mean  ``1/N sum_mn g_n g_n^T``, g_n the
            of x over s                            sum of g over s
==========  =====================================  ===================================

and the block is ``S A (x) G`` (expand) or ``A (x) G`` (reduce).  With a mask, NS becomes
the number of unmasked rows and S their mean number in an example, averaged over updates
like the factors; ``reduce`` averages an example's unmasked rows.  A fully masked batch
adds nothing.

References
----------
Martens and Grosse (2015), arXiv:1503.05671, section 3; Eschenhagen et al. (2023),
arXiv:2311.00636, sections 3.2 and 3.3, for expand and reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kfac_core import constraints
from kfac_core.approximations.approximation import Approximation, Reduction
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import Place, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.factors.factor import FactorKind, factor_of
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.conv import Conv
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import PixelRows, Rows, WeightSharing
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import Factorization
from kfac_core.operators.kronecker import FactoredKronecker, exactly_damped
from kfac_core.operators.spectral import SpectralOperator

_SUMMED: dict[WeightSharing, Literal["row", "example"]] = {
    "expand": "row",
    "reduce": "example",
}
"""Whether the sums of a factor run over rows or over examples."""


@dataclass(frozen=True, kw_only=True)
class Kronecker(Approximation[Rows | IdRows | PixelRows]):
    r"""K-FAC: the block of a layer is one Kronecker product of two factors.

    With inputs x (a 1 appended if the layer has a bias) and gradients g of the summed
    loss with respect to the layer's outputs, for N examples, S shared positions (time
    steps, pixels) and M backpropagated vectors,

    .. math:: F = S \, A \otimes G, \qquad
        A = \frac{1}{NS} \sum_{n,s} x x^T, \qquad
        G = \frac{1}{NS} \sum_{m,n,s} g g^T

    with ``sharing="expand"``, and

    .. math:: F = A \otimes G, \qquad
        A = \frac{1}{N} \sum_n \bar x_n \bar x_n^T, \qquad
        G = \frac{1}{N} \sum_{m,n} \hat g_n \hat g_n^T

    with ``sharing="reduce"``, where :math:`\bar x_n` is the mean of x over the positions
    of an example and :math:`\hat g_n` is the sum of g.  With a mask, only unmasked rows
    count.

    Parameters
    ----------
    input : {"full", "diagonal", "uncorrelated"}
        Structure of the input factor A; ``"uncorrelated"`` is for conv layers without
        groups, ``"diagonal"`` is required for embeddings.
    output : {"full", "diagonal"}
        Structure of the output factor G.
    sharing : {"expand", "reduce"}
        How shared positions are treated; see the two formulas.

    Raises
    ------
    ConventionError
        For any other value.

    Notes
    -----
    Shapes: with a weight matrix of ``(in, out)``, A has ``n = in`` rows (``in + 1`` with a
    bias) and G has ``m = out`` rows.  A grouped convolution has one pair for each group.

    Dtype: that of the first batch, or float32 if that is narrower; see
    `kfac_core.Precision`.  Rows are cast to it before they are multiplied.

    Units: F is the curvature of the loss of one example.  ``reduction`` of
    `kfac_core.Estimator` rescales output gradients of an averaged loss.

    Cost: ``R (n^2 + M m^2)`` flops for an update with R rows, ``n^3 + m^3`` for a refresh
    with inverses, ``2 n m (n + m)`` for preconditioning.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 3.  Eschenhagen et al. (2023),
    arXiv:2311.00636, sections 3.2 and 3.3, for ``"expand"`` and ``"reduce"``.

    Examples
    --------
    Two examples, and the damped block as one matrix:

    >>> import numpy as np
    >>> import kfac_core as kc
    >>> x, g = np.eye(2), np.array([[1.0], [3.0]])
    >>> layer = kc.Dense(in_features=2, out_features=1, bias=False, weight_layout="io")
    >>> estimator = kc.Estimator(
    ...     {"fc": kc.Block(layer, kc.Kronecker())},
    ...     reduction="sum",
    ...     damping=0.1,
    ...     damping_rule="exact",
    ... )
    >>> estimator.update({"fc": kc.Batch(x, g)})
    >>> estimator.refresh()
    >>> A, G = x.T @ x / 2, g.T @ g / 2
    >>> damped = estimator.operator("fc").to_dense()
    >>> bool(np.allclose(damped, np.kron(A, G) + 0.1 * np.eye(2)))
    True
    """

    input: FactorKind = "full"
    output: FactorKind = "full"
    sharing: WeightSharing = "expand"

    name = "kronecker"
    sums_of_squares = (("input", "inputs"), ("output", "output_grads"))

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            input=constraints.literal(FactorKind),
            output=constraints.literal(FactorKind),
            sharing=constraints.literal(WeightSharing),
        )

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics.

        Parameters
        ----------
        layer : Layer
            Layer whose sizes fix the factors.
        place : Place
            Library, device and dtype of the statistics.

        Returns
        -------
        Statistics
            Statistics that are zero throughout.
        """
        n, m = layer.matrix_shape
        groups = (layer.groups,) if layer.groups > 1 else ()
        # Groups of a convolution are independent: a stack of pairs of smaller factors.
        n_shape, m_shape = (*groups, n), (*groups, m // layer.groups)
        averages = {
            "input": factor_of(self.input, layer).initial(n_shape, place),
            "output": factor_of(self.output, layer).initial(m_shape, place),
            "repeats": Average(place.zeros(), place.zeros()),
        }
        return Statistics(averages, place.flags())

    def updated(
        self,
        statistics: Statistics,
        rows: Rows | IdRows | PixelRows,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return the statistics after one update.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the block; not modified.
        rows : Rows, IdRows or PixelRows
            Finite; cast to the statistics' dtype before anything is multiplied.
        layer : Layer
            Layer that the rows come from.
        options : UpdateOptions
            Conventions, decay and weight, and factors to skip.

        Returns
        -------
        Statistics
            New statistics.

        Notes
        -----
        ``R (n^2 + M m^2)`` flops for R rows (twice that without a symmetric update).
        """
        old = statistics.averages
        dtype = old["repeats"].weight.dtype
        decay, skip = options.decay, options.skip
        xp, how = options.xp, {"overwrite": options.overwrite, "xp": options.xp}
        A, G = factor_of(self.input, layer), factor_of(self.output, layer)
        per = _SUMMED[self.sharing]
        # scale is weight / R; c undoes the reduction of the loss and averages its sources.
        scale, weight, c, S, example_weight = options.shares(rows, dtype, per=per)

        x, g = rows.shared_rows(self.sharing, dtype, xp=xp)  # a 1 appended to x
        new = dict(old)
        if "input" not in skip:  # A <- decay A + weight / R sum x x^T
            new["input"] = A.updated(old["input"], x, decay, scale, weight, **how)
        if "output" not in skip:  # G <- decay G + weight c / R sum g g^T
            new["output"] = G.updated(old["output"], g, decay, scale * c, weight, **how)
        # S is a mean over examples, so its weight differs from the weight of the factors.
        new["repeats"] = old["repeats"].plus(S, decay, example_weight, example_weight)
        return replaced(statistics, averages=new)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> FactoredKronecker | SpectralOperator:
        """Return the curvature operator of the current statistics.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the block; not modified.
        layer : Layer
            Layer of the block.
        options : OperatorOptions
            Damping and its rule, and how to compute.

        Returns
        -------
        FactoredKronecker or SpectralOperator
            An immutable snapshot.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            For statistics that are not finite, a damping that is negative or not finite,
            and a factor that no fallback can factorize, with ``check="raise"``.

        Notes
        -----
        ``n^3 + m^3`` flops for inverses, about ``9 (n^3 + m^3)`` for eigenbases.
        """
        xp, averages, exact = options.xp, statistics.averages, options.rule == "exact"
        # Always debiased: S counts rows, and a biased mean would scale F.  It is 1 before
        # the first row, so that an empty block can be refreshed.
        S = ns.cast(xp, averages["repeats"].value(debias=True), options.compute)
        S = finite.positive_or_one(S)
        kinds = {
            "input": factor_of(self.input, layer),
            "output": factor_of(self.output, layer),
        }
        factors, means = {}, []
        for side, kind in kinds.items():
            factors[side] = kind.value(
                averages[side], debias=options.debias, dtype=options.compute, xp=xp
            )
            means.append(kind.mean_eigenvalue(factors[side]))

        damped, prepared = [], []
        wanted: tuple[Factorization, ...] = (
            ("eigenbasis",) if exact else options.factorizations
        )
        for (side, kind), shift in zip(
            kinds.items(), options.shifts(means, S), strict=True
        ):
            # A + pi sqrt(lam / S) I and G + sqrt(lam / S) / pi I; shifts of 0 if exact.
            M = kind.damped(factors[side], shift, apply_dtype=options.apply)
            damped.append(M)
            if side in statistics.bases:
                # A shared factor comes with the basis that its owner computed.
                M = replaced(M, basis=statistics.bases[side])
            if options.factorizations:
                name = f"{options.name}/{side}"
                M = M.prepared(*wanted, check=options.check, name=name)
            if not (exact or options.keep_matrices) and isinstance(M, DampedMatrix):
                M = M.factorized()
            prepared.append(M)
        scale = ns.as_array(ns.cast(xp, S, options.apply))
        operator = FactoredKronecker(prepared[0], prepared[1], scale)
        if not exact:
            return operator
        return exactly_damped(
            operator,
            FactoredKronecker(damped[0], damped[1], scale),
            ns.cast(xp, ns.full_of(xp, options.damping, S), options.apply),
            **options.preparing,
        )

    @property
    def reduction(self) -> Reduction:
        """Sums of rows are added up over processes; centered moments cannot be."""
        return "none" if self.input == "uncorrelated" else "sum"

    @property
    def reduction_problem(self) -> str:
        """Why uncorrelated inputs are not reduced."""
        return (
            "the covariance of uncorrelated inputs is centered at each process's own mean, "
            "so that it is not a sum over processes; take input='full'"
        )

    @property
    def factor_kinds(self) -> Mapping[str, str]:
        """The kinds of both factors; reduced rows have other moments than expanded ones."""
        reduced = ", reduced" if self.sharing == "reduce" else ""
        return {"input": self.input + reduced, "output": self.output + reduced}

    @property
    def stacks(self) -> bool:
        """Whether both factors are full matrices, whose formulas keep leading axes."""
        return self.input == "full" and self.output == "full"

    @property
    def reads_patches(self) -> bool:
        """Whether the input factor is of patches; ``"uncorrelated"`` reads pixels."""
        return self.input != "uncorrelated"

    def factor_shapes(self, layer: Layer, /) -> Mapping[str, tuple[int, int]]:
        """Return the sizes of both factors, where these are full matrices."""
        return kronecker_shapes(layer) if self.stacks else {}

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        if self.input == "uncorrelated" and (layer.kind != "conv" or layer.groups > 1):
            return "only a conv layer without groups has positions to be uncorrelated"
        if layer.kind in ("dense", "conv"):
            return None
        if layer.kind != "embedding":
            return "needs pairs of inputs and output gradients; take Full or Diagonal"
        if self.input != "diagonal" or self.sharing != "expand":
            return (
                "an embedding's inputs are one-hot vectors, whose second moment is "
                "diagonal; write Kronecker(input='diagonal')"
            )
        return None

    def rows(self, layer: Layer, batch: Any, /) -> Rows | IdRows | PixelRows:
        """Return a batch as rows; with pixels as x where those are kept."""
        if self.input == "uncorrelated" and isinstance(layer, Conv):
            return layer.pixel_rows(batch)
        return layer.rows(batch)  # type: ignore[return-value]


def kronecker_shapes(layer: Layer, /) -> dict[str, tuple[int, int]]:
    """Return the sizes of the factors of a Kronecker product.

    Parameters
    ----------
    layer : Layer
        Layer of the block.

    Returns
    -------
    dict of str to tuple of int
        Sizes as in `Approximation.factor_shapes`.
    """
    n, columns = layer.matrix_shape
    m = columns // layer.groups
    return {"input": (n, m), "output": (m, n)}
