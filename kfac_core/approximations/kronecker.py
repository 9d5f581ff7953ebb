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
the number of rows kept and S the mean number kept an example, averaged over updates
like the factors; ``reduce`` averages an example's kept rows.  A batch of which the mask
keeps nothing adds nothing.

References
----------
Martens and Grosse (2015), arXiv:1503.05671, section 3; Eschenhagen et al. (2023),
arXiv:2311.00636, sections 3.2 and 3.3, for expand and reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kfac_core import constraints, errors
from kfac_core.approximations.approximation import Approximation, Reduction
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import Array, Namespace, Place, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.damping import factored_shifts
from kfac_core.factors.average import Average
from kfac_core.factors.factor import FactorKind, factor_of
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import WeightSharing
from kfac_core.linalg.diagonal import damped_diagonal
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix
from kfac_core.operators.kronecker import FactoredKronecker, exactly_damped
from kfac_core.operators.separate_bias import SeparateBias
from kfac_core.operators.spectral import SpectralOperator

__all__ = [
    "Bias",
    "Kronecker",
    "kronecker_shapes",
    "without_bias_products",
]

Bias = Literal["joint", "separate"]
"""Whether a bias is a row of its weight's block, or a block of its own."""


@dataclass(frozen=True, kw_only=True)
class Kronecker(Approximation):
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
    bias : {"joint", "separate"}
        Whether the bias is a row of the weight's block, or a block of its own: the
        curvature between the two is then left out, and the bias's own ``S G``, one factor,
        is damped exactly.  Not for ``input="uncorrelated"``.

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
    bias: Bias = "joint"

    name = "kronecker"
    sums_of_squares = (("input", "inputs"), ("output", "output_grads"))

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            input=constraints.one_of(*get_args(FactorKind)),
            output=constraints.one_of(*get_args(FactorKind)),
            sharing=constraints.one_of(*get_args(WeightSharing)),
            bias=constraints.one_of(*get_args(Bias)),
        )
        if self.bias == "separate" and self.input == "uncorrelated":
            raise errors.ConventionError(
                "Uncorrelated inputs have one factor with the bias in it. Take "
                "bias='joint', or input='full'."
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
            "so that it is no sum over processes; take input='full'"
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

    def rows(self, layer: Layer, batch: Any, /) -> Any:
        """Return a batch as rows; with pixels as x where those are kept."""
        if self.input == "uncorrelated":
            geometry: Any = layer
            return geometry.pixel_rows(batch)
        return layer.rows(batch)

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
        n_shape, m_shape = (*groups, n), (*groups, m // layer.groups)
        averages = {
            "input": factor_of(self.input, layer).initial(n_shape, place),
            "output": factor_of(self.output, layer).initial(m_shape, place),
            "repeats": Average(place.zeros(), place.zeros()),
        }
        return Statistics(averages, place.flags())

    def updated(
        self, statistics: Statistics, rows: Any, layer: Layer, options: UpdateOptions, /
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
            Conventions, decay and weight, and what is skipped.

        Returns
        -------
        Statistics
            New statistics.

        Notes
        -----
        ``R (n^2 + M m^2)`` flops for R rows (twice that without a symmetric update).
        """
        xp, old, new = options.xp, statistics.averages, dict(statistics.averages)
        x, tail, g = rows.factor_rows(self.sharing, statistics.dtype, xp=xp)
        share = options.shares(
            statistics, rows, per="row" if self.sharing == "expand" else "example"
        )
        step: dict[str, Any] = {
            "decay": options.decay,
            "weight": share.weight,
            "xp": xp,
        }
        if "input" not in options.skip:
            # A <- decay A + weight / R sum x x^T, the last entry of x its 1
            new["input"] = factor_of(self.input, layer).updated(
                old["input"], x, tail=tail, scale=share.scale, **step
            )
        if "output" not in options.skip:
            # G <- decay G + weight c / R sum g g^T, c of the conventions
            new["output"] = factor_of(self.output, layer).updated(
                old["output"],
                g,
                tail=None,
                scale=share.scale * share.outer_products,
                **step,
            )
        new["repeats"] = old["repeats"].plus(
            share.repeats, decay=options.decay, weight=share.example_weight
        )
        return replaced(statistics, averages=new)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> FactoredKronecker | SpectralOperator | SeparateBias:
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
        FactoredKronecker, SpectralOperator or SeparateBias
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
        xp, averages, apply = options.xp, statistics.averages, options.apply
        # Always debiased: S counts rows, and a biased mean would scale F.
        S = ns.cast(xp, averages["repeats"].value(debias=True), options.compute)
        S = finite.positive_or_one(ns.as_number(S), xp=xp)
        separate = self.bias == "separate" and "bias" in layer.parameter_shapes
        kinds = {
            "input": factor_of(self.input, layer),
            "output": factor_of(self.output, layer),
        }
        values, means = [], []
        for side, kind in kinds.items():
            value = kind.value(
                averages[side], debias=options.debias, dtype=options.compute, xp=xp
            )
            if separate and side == "input":
                value = without_bias_products(value, xp=xp)
            values.append(value)
            means.append(kind.mean_eigenvalue(value))
        exact = options.rule == "exact"
        if separate and not exact:
            return _separately_damped(values, kinds, S, options)
        if exact:
            shifts = [xp.zeros_like(mean) for mean in means]
        else:
            unit_pi = options.rule == "factored_unit_pi"
            shifts = factored_shifts(
                means,
                options.damping,
                scale=S,
                unit_pi=unit_pi,
                least=options.least_shift,
                xp=xp,
            )
        damped, made = [], []
        for side, value, shift in zip(kinds, values, shifts, strict=True):
            reporting: Any = {"check": options.check, "name": f"{options.name}/{side}"}
            part: Any = kinds[side].damped(value, shift, **reporting, apply_dtype=apply)
            damped.append(part)
            if side in statistics.bases:
                # A factor that another block gave, with its basis.
                part = replaced(part, basis=statistics.bases[side])
            if not exact:
                part = part.prepared(*options.factorizations, **reporting)
            elif options.factorizations:
                part = part.prepared("eigenbasis", **reporting)
            if not (exact or options.keep_matrices):
                part = options.kept(part)
            made.append(part)
        scale = ns.as_array(ns.cast(xp, S, apply))
        operator = FactoredKronecker(made[0], made[1], scale)
        if not exact:
            return operator
        undamped = FactoredKronecker(damped[0], damped[1], scale)
        lam = ns.cast(xp, ns.full_of(xp, options.damping, S), apply)
        return exactly_damped(
            operator,
            undamped,
            lam,
            factorizations=options.factorizations,
            check=options.check,
            name=options.name,
        )


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


def without_bias_products(value: Any, /, *, xp: Namespace) -> Any:
    """Return an input factor without its products of inputs with the 1 of the bias.

    Parameters
    ----------
    value : ScaledMatrix or array
        A with the bias's row last; a diagonal has no such products.
    xp : namespace
        Array API namespace of the factor.

    Returns
    -------
    ScaledMatrix or array
        ``blockdiag(A_ww, A_bb)``.
    """
    if not isinstance(value, ScaledMatrix):
        return value
    A = value.matrix.array
    i = xp.arange(A.shape[-1], device=ns.device_of(A))
    last = i == A.shape[-1] - 1
    kept = last[:, None] == last
    zeros = xp.zeros_like(A)
    matrix = SymmetricMatrix(xp.where(kept, A, zeros), value.matrix.full_storage)
    # The bias's block has rank 1 of its own.
    rank = None if value.rank is None else value.rank + 1.0
    return replaced(value, matrix=matrix, rank=rank)


def _separately_damped(
    values: list[Any], kinds: dict[str, Any], S: Array, options: OperatorOptions
) -> SeparateBias:
    """Return the weight's and the bias's blocks, each with factored damping of its own."""
    xp, apply = options.xp, options.apply
    A, G = values
    if isinstance(A, ScaledMatrix):
        # A copy, as other processes have it: factorizations round by the strides.
        inner = xp.asarray(A.matrix.array[..., :-1, :-1], copy=True)
        own = A.factor * A.matrix.array[..., -1, -1]
        A = replaced(A, matrix=SymmetricMatrix(inner, A.matrix.full_storage))
    else:
        A, own = A[..., :-1], A[..., -1]
    # Of the bias, which all positions have, a 1; of a use without one, nothing.
    if isinstance(G, ScaledMatrix):
        G_bias: Any = replaced(G, factor=G.factor * own)
    else:
        G_bias = G * own[..., None]
    shifts = factored_shifts(
        [kinds["input"].mean_eigenvalue(A), kinds["output"].mean_eigenvalue(G)],
        options.damping,
        scale=S,
        unit_pi=options.rule == "factored_unit_pi",
        least=options.least_shift,
        xp=xp,
    )
    lam = ns.full_of(xp, options.damping, S) / S + xp.zeros_like(shifts[1])
    scale, name = ns.as_array(ns.cast(xp, S, apply)), options.name

    def part(kind: Any, value: Any, shift: Array, what: str) -> Any:
        reporting: Any = {"check": options.check, "name": f"{name}/{what}"}
        damped = kind.damped(value, shift, **reporting, apply_dtype=apply)
        return options.kept(damped.prepared(*options.factorizations, **reporting))

    one = ns.cast(xp, xp.ones_like(own)[..., None], apply)
    weight = FactoredKronecker(
        part(kinds["input"], A, shifts[0], "input"),
        part(kinds["output"], G, shifts[1], "output"),
        scale,
    )
    bias = FactoredKronecker(
        damped_diagonal(one, xp.zeros_like(one[..., 0]), check=options.check),
        part(kinds["output"], G_bias, lam, "bias/output"),
        scale,
    )
    return SeparateBias(weight, bias).prepared(
        *options.factorizations, check=options.check, name=name
    )
