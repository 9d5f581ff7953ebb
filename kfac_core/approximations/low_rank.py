"""``F = S A (x) G`` with factors of bounded rank, kept in ``n r + m q`` numbers.

Conventions.  As `kfac_core.approximations.kronecker`, whose statistics these are, each
factor compressed to its largest r (or q) eigenpairs after every update.  What is cut off
is positive semidefinite: with A_K and G_K the factors that `Kronecker` would hold,
``A <= A_K`` and ``G <= G_K``, with ``tr(A_K - A)`` and ``tr(G_K - G)`` in
`LowRankOperator.truncated_traces`.  Exact, up to rounding, while A_K and G_K have ranks
of at most r and q.

References
----------
Puiu (2022), "Randomized K-FACs", arXiv:2206.15397, for factors applied by their largest
eigenpairs; "Brand New K-FACs", arXiv:2210.08494, for updating them without the factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.namespaces import cast, full_of, roundoff_of
from kfac_core.array.place import Place
from kfac_core.array.structure import in_dtype
from kfac_core.constraints import checked, require_options
from kfac_core.damping import factored_shifts
from kfac_core.factors.average import Average
from kfac_core.factors.low_rank import LowRankFactor
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import WeightSharing
from kfac_core.linalg.low_rank_basis import low_rank_basis
from kfac_core.operators.low_rank import (
    NO_CHOLESKY,
    LowRankOperator,
    low_rank_operator,
)

__all__ = ["LowRankKronecker"]


@checked
@dataclass(frozen=True, kw_only=True)
class LowRankKronecker(Approximation):
    r"""The approximation of a block by one Kronecker product of low-rank factors.

    .. math:: F = S \, A_r \otimes G_q

    with the factors of `kfac_core.Kronecker`, each compressed to its largest r (or q)
    eigenpairs after every update, and kept in ``n r + m q`` numbers.

    Parameters
    ----------
    input_rank, output_rank : int
        r and q, at least 1; a factor of fewer rows is kept whole.
    sharing : {"expand", "reduce"}
        How shared positions are treated, as for `Kronecker`.
    rows_at_once : int, optional
        How many rows are joined at a time.  None joins all rows of an update, which
        gives the best approximation of that rank; a number near the rank keeps memory
        and time linear in the width, and cuts off after every so many rows.

    Raises
    ------
    ShapeError
        For a number below 1.
    ConventionError
        For an unknown sharing.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.LowRankKronecker(input_rank=2, output_rank=2))
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = block.moments(batch, conventions=conventions)
    >>> F = block.operator(statistics, damping=0.1, rule="exact")
    >>> [bool(trace > 0) for trace in F.truncated_traces]
    [True, False]
    """

    input_rank: int
    output_rank: int
    sharing: WeightSharing = "expand"
    rows_at_once: int | None = None

    name = "low_rank_kronecker"
    unsupported_products = NO_CHOLESKY

    def __post_init__(self) -> None:
        require_options(self)

    @property
    def reduction_problem(self) -> str:
        """Why bounded ranks are not reduced."""
        return (
            "what each process cuts off is lost, so that the result depends on how rows "
            "are split; take Kronecker"
        )

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        if layer.kind not in ("dense", "conv"):
            return "needs pairs of inputs and output gradients; take Diagonal"
        if layer.groups > 1:
            return "the factors of a layer's groups are small; take Kronecker"
        return None

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics; see `Kronecker.initial`."""
        n, m = layer.matrix_shape
        zero, (A, G) = place.zeros(), self._factors
        averages = {
            "input": A.initial((n,), place),
            "output": G.initial((m,), place),
            "repeats": Average(zero, zero),
        }
        return Statistics(averages, place.flags())

    def updated(
        self, statistics: Statistics, rows: Any, layer: Layer, options: UpdateOptions, /
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Notes
        -----
        For R rows and c of them at once, ``3 R n (r + c)^2 / c`` flops for the input
        factor, of which c = r makes ``12 R n r``, and ``9 (r + c)^3`` for each
        eigendecomposition of ``R / c``; likewise for the output factor.
        """
        xp, new, (A, G) = options.xp, dict(statistics.averages), self._factors
        x, tail, g = rows.factor_rows(self.sharing, statistics.dtype, xp=xp)
        share = options.shares(statistics, rows).of(self.sharing)
        step: dict[str, Any] = {
            "decay": options.decay,
            "weight": share.weight,
            "xp": xp,
        }
        if "input" not in options.skip:
            new["input"] = A.updated(
                new["input"], x, tail=tail, scale=share.scale, **step
            )
        if "output" not in options.skip:
            scale = share.scale * share.outer
            new["output"] = G.updated(new["output"], g, tail=None, scale=scale, **step)
        new["repeats"] = new["repeats"].plus(
            share.repeats, decay=options.decay, weight=share.example_weight
        )
        return Statistics(new, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> LowRankOperator:
        """Return the curvature operator of the statistics; see `Kronecker.operator`.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            As `low_rank_basis`, and where the damped block is singular
            (``check="raise"``).

        Notes
        -----
        ``O(n r^2 + m q^2)`` flops.
        """
        xp, compute, apply = options.xp, options.compute, options.apply
        S = cast(xp, statistics.averages["repeats"].value(debias=True), compute)
        S = xp.where(S > 0, S, xp.ones_like(S))
        lam = full_of(xp, options.damping, S)
        bases, means = [], []
        stored = roundoff_of(statistics.dtype, xp=xp)
        for side in ("input", "output"):
            total = statistics.averages[side].value(debias=options.debias)
            total = in_dtype(total, compute, xp)
            means.append(total.trace() / total.size)
            bases.append(
                low_rank_basis(
                    total,
                    roundoff=stored,
                    check=options.check,
                    name=f"{options.name}/{side}",
                    xp=xp,
                )
            )
        shifts = None
        if options.rule != "exact":
            unit_pi = options.rule == "factored_unit_pi"
            shifts = factored_shifts(
                means,
                lam,
                scale=S,
                unit_pi=unit_pi,
                least=options.least_shift,
                xp=xp,
            )
        return low_rank_operator(
            bases[0],
            bases[1],
            scale=S,
            damping=lam,
            shifts=None if shifts is None else (shifts[0], shifts[1]),
            factorizations=options.factorizations,
            check=options.check,
            name=options.name,
            dtype=apply,
        )

    @property
    def _factors(self) -> tuple[LowRankFactor, LowRankFactor]:
        at_once = self.rows_at_once
        A, G = (LowRankFactor(r, at_once) for r in (self.input_rank, self.output_rank))
        return A, G
