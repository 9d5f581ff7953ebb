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
from types import MappingProxyType
from typing import Any, Literal, get_args

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import plain_number
from kfac_core.array.namespaces import (
    Scalar,
    as_scalar,
    cast,
    device_of,
    full_of,
    status_unless,
)
from kfac_core.array.status import Status
from kfac_core.array.structure import replaced
from kfac_core.conventions import require_one_of
from kfac_core.damping import factored_shifts
from kfac_core.factors.average import Average, zero_weight
from kfac_core.factors.diagonal import DiagonalFactor
from kfac_core.factors.factor import Factor, FactorKind, factor_of
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Rows
from kfac_core.linalg.shifted import ShiftedMatrix
from kfac_core.operators.exact_kronecker import ExactKronecker
from kfac_core.operators.kronecker import FactoredKronecker

__all__ = ["Kronecker", "Sharing", "kronecker_operator"]

Sharing = Literal["expand", "reduce"]


@dataclass(frozen=True, kw_only=True)
class Kronecker(Approximation):
    """The approximation of a block by one Kronecker product.

    Parameters
    ----------
    input : {"full", "diagonal", "uncorrelated"}
        Which kind the input factor is; the last is for conv layers.
    output : {"full", "diagonal"}
        Which kind the output factor is.
    sharing : {"expand", "reduce"}
        How shared positions are treated; see the module's conventions.

    Raises
    ------
    ConventionError
        For any other value.
    """

    input: FactorKind = "full"
    output: FactorKind = "full"
    sharing: Sharing = "expand"

    name = "kronecker"
    sums_of_squares = MappingProxyType({"input": "inputs", "output": "output_grads"})

    def __post_init__(self) -> None:
        require_one_of("input", self.input, get_args(FactorKind))
        require_one_of("output", self.output, ("full", "diagonal"))
        require_one_of("sharing", self.sharing, get_args(Sharing))

    @property
    def factor_kinds(self) -> Mapping[str, str]:
        """The kinds of both factors."""
        return {"input": self.input, "output": self.output}

    @property
    def has_full_factors(self) -> bool:
        """Whether both factors are full matrices."""
        return self.input == "full" and self.output == "full"

    @property
    def stacks(self) -> bool:
        """Whether both factors are full matrices, whose formulas keep leading axes."""
        return self.has_full_factors

    def problem_with(self, layer: Layer, /) -> str | None:
        """Say why it does not go together with a layer; None where it does."""
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
        """Return what the layer saw as rows; with pixels as x where those are kept."""
        if self.input == "uncorrelated":
            geometry: Any = layer
            return geometry.pixel_rows(batch)
        return layer.rows(batch)

    def initial(
        self, layer: Layer, /, *, dtype: Any, device: Any, xp: Namespace
    ) -> Statistics:
        """Return the statistics of nothing.

        Parameters
        ----------
        layer : Layer
            Of which the sizes are read.
        dtype, device : dtype, device
            Where and in which precision they are kept.
        xp : namespace
            Of what library.

        Returns
        -------
        Statistics
            All zero.
        """
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        repeats = Average(zero_weight(xp, **place), zero_weight(xp, **place))
        n, m = layer.matrix_shape
        groups = (layer.groups,) if layer.groups > 1 else ()
        n_shape, m_shape = (*groups, n), (*groups, m // layer.groups)
        averages = {
            "input": factor_of(self.input, layer).initial(n_shape, **place, xp=xp),
            "output": factor_of(self.output, layer).initial(m_shape, **place, xp=xp),
            "repeats": repeats,
        }
        return Statistics(averages, xp.zeros((), dtype=xp.int32, device=device))

    def updated(
        self, statistics: Statistics, rows: Any, layer: Layer, options: UpdateOptions, /
    ) -> Statistics:
        """Return the statistics after one update.

        Parameters
        ----------
        statistics : Statistics
            Never modified.
        rows : Rows, IdRows or PixelRows
            Finite; cast to the statistics' dtype before anything is multiplied.
        layer : Layer
            That they are of.
        options : UpdateOptions
            Conventions, decay and weight, and what is skipped.

        Returns
        -------
        Statistics
            New.

        Notes
        -----
        ``R (n^2 + M m^2)`` flops for R rows (twice that without a symmetric update).
        """
        shares = options.shares(statistics, rows)
        xp, decay = options.xp, options.decay
        reduced = self.sharing == "reduce"
        if reduced:
            rows.require_all_positions()
        share = shares.examples if reduced else shares.rows
        coefficients: dict[str, Any] = {
            "decay": decay,
            "weight": shares.example_weight if reduced else shares.row_weight,
        }
        old = statistics.averages
        A, G = old["input"], old["output"]
        if "input" not in options.skip:
            A = self._input(A, rows, layer, share, coefficients, xp)
        if "output" not in options.skip:
            G = factor_of(self.output, layer).updated(
                G,
                self._output_rows(rows, statistics.dtype, xp),
                tail=None,
                scale=share * shares.outer_products,
                **coefficients,
                xp=xp,
            )
        repeats = 1.0 if reduced else shares.repeats
        S = Average(
            old["repeats"].sum * decay + repeats * shares.example_weight,
            old["repeats"].decayed(decay, shares.example_weight),
        )
        return Statistics({"input": A, "output": G, "repeats": S}, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> FactoredKronecker | ExactKronecker:
        """Make the curvature operator from the statistics, at this moment.

        Parameters
        ----------
        statistics : Statistics
            Never modified.
        layer : Layer
            Of the block.
        options : OperatorOptions
            Damping and its rule, and how to compute.

        Returns
        -------
        FactoredKronecker or ExactKronecker
            An immutable snapshot.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            For statistics that are not finite, a damping that is negative or not finite,
            and a factor that no rung can factorize, with ``check="raise"``.

        Notes
        -----
        ``n^3 + m^3`` flops for inverses, about ``9 (n^3 + m^3)`` for eigenbases.
        """
        # Always debiased: it counts rows, and half a row is no row.
        S = statistics.averages["repeats"].value(debias=True)
        kinds = factor_of(self.input, layer), factor_of(self.output, layer)
        return kronecker_operator(statistics, kinds, S, options)

    def _input(
        self,
        average: Average,
        rows: Any,
        layer: Layer,
        scale: Scalar,
        coefficients: dict[str, Any],
        xp: Namespace,
    ) -> Average:
        """Return the input factor's average after the update."""
        dtype = average.weight.dtype
        if isinstance(rows, IdRows):
            squares = rows.input_squares(dtype, xp=xp)
            return DiagonalFactor().absorbed(
                average, squares, scale=scale, **coefficients
            )
        if self.input == "uncorrelated":
            pixels, tail = cast(xp, rows.pixels, dtype), None
            x = xp.reshape(pixels, (-1, pixels.shape[-1]))
        else:
            x, tail = self._input_rows(rows, dtype, xp)
        return factor_of(self.input, layer).updated(
            average, x, tail=tail, scale=scale, **coefficients, xp=xp
        )

    def _input_rows(
        self, rows: Rows, dtype: Any, xp: Namespace
    ) -> tuple[Array, Array | None]:
        """Return x and its homogeneous column as the sharing has them."""
        x = cast(xp, rows.inputs, dtype)
        if self.sharing == "expand" and not rows.homogeneous:
            return xp.reshape(x, (*x.shape[:-3], -1, x.shape[-1])), None
        ones = xp.ones_like(x[..., 0])
        if rows.mask is not None:
            ones = xp.broadcast_to(cast(xp, rows.mask, dtype), x.shape[:-1])
        if self.sharing == "reduce":
            number = xp.sum(ones, axis=-1)
            tail = cast(xp, number > 0, dtype)
            x = xp.sum(x, axis=-2) / xp.where(number > 0, number, tail + 1.0)[..., None]
        else:
            x = xp.reshape(x, (*x.shape[:-3], -1, x.shape[-1]))
            tail = xp.reshape(ones, x.shape[:-1])
        return x, tail if rows.homogeneous else None

    def _output_rows(self, rows: Any, dtype: Any, xp: Namespace) -> Array:
        """Return g as the sharing has it."""
        g = cast(xp, rows.output_grads, dtype)
        if self.sharing == "reduce":
            g = xp.sum(g, axis=-2, keepdims=True)
        return xp.reshape(g, (*g.shape[:-4], -1, g.shape[-1]))


def kronecker_operator(
    statistics: Statistics,
    kinds: tuple[Factor, Factor],
    scale: Array,
    options: OperatorOptions,
    /,
) -> FactoredKronecker | ExactKronecker:
    """Return ``S A (x) G`` damped as the rule says.

    Parameters
    ----------
    statistics : Statistics
        With the averages ``"input"`` and ``"output"``.
    kinds : tuple of Factor
        Of the two.
    scale : array, 0-d or one a group
        S; zero counts as 1.
    options : OperatorOptions
        Damping and its rule, and how to compute.

    Returns
    -------
    FactoredKronecker or ExactKronecker
        An immutable snapshot.
    """
    xp = options.namespace(statistics)
    compute, apply = options.dtypes(statistics.dtype, xp=xp)
    sides = ("input", "output")
    values = [
        kind.cast(
            statistics.averages[side].value(debias=options.debias), compute, xp=xp
        )
        for kind, side in zip(kinds, sides, strict=True)
    ]
    number = plain_number(scale, xp=xp)
    if number is not None:
        number = number if number > 0 else 1.0
        S = xp.full((), number, dtype=compute, device=device_of(scale))
    else:
        S = cast(xp, scale, compute)
        S = xp.where(S > 0, S, xp.ones_like(S))
    damping = as_scalar(xp, options.damping, compute, "damping")
    lam = full_of(xp, damping, S)
    means = [k.mean_eigenvalue(value) for k, value in zip(kinds, values, strict=True)]
    exact = options.rule == "exact"
    if exact:
        shifts = [xp.zeros_like(mean) for mean in means]
    else:
        unit_pi = options.rule == "factored_unit_pi"
        shifts = factored_shifts(means, lam, scale=S, unit_pi=unit_pi, xp=xp)
    parts = []
    for kind, value, shift, side in zip(kinds, values, shifts, sides, strict=True):
        key = ("basis", id(statistics.averages[side]))
        wanted = () if exact else options.factorizations
        known = options.memo.get(key)
        part: Any = kind.snapshot(
            value,
            shift,
            factorizations=tuple(f for f in wanted if not known or f != "eigenbasis"),
            check=options.check,
            name=f"{options.name}/{side}",
            apply_dtype=apply,
        )
        if isinstance(part, ShiftedMatrix):
            if known is not None:
                part = replaced(part, basis=known)
            elif exact and options.factorizations:
                part = part.prepared(
                    "eigenbasis", check=options.check, name=f"{options.name}/{side}"
                )
            if part.basis is not None:
                # Of the average itself, which no other block's refresh can change; the
                # average is kept alive by the statistics.
                options.memo[key] = part.basis
        parts.append(part)
    S, lam = cast(xp, S, apply), cast(xp, lam, apply)
    if not exact:
        return FactoredKronecker(parts[0], parts[1], S)
    good = xp.isfinite(lam) & (lam >= 0)
    flags = status_unless(xp, good, Status.BAD_DAMPING)
    lam = xp.where(good, lam, xp.full_like(lam, xp.nan))
    made = ExactKronecker(parts[0], parts[1], S, lam, None, flags)
    return made.prepared(
        *options.factorizations, check=options.check, name=options.name
    )
