"""Second moments in the factors' eigenbasis: EKFAC.

Conventions.  With ``A = Q_A diag(a) Q_A^T`` and ``G = Q_G diag(g) Q_G^T`` the factors of
`kfac_core.approximations.kronecker`, and ``D = sum_s x g^T`` an example's gradient,

    F = (Q_A (x) Q_G) diag(E) (Q_A (x) Q_G)^T,    E = 1/N sum_mn (Q_A^T D Q_G)^2,

the best diagonal in that basis, in the Frobenius norm.  Damping is exact.  The bases
are part of the statistics: the identity at first; `Eigen.rebased` takes those of the
factors as they are then and starts E anew, and updates in between add to both.

References
----------
George et al. (2018), "Fast Approximate Natural Gradient Descent in a Kronecker-factored
Eigenbasis", arXiv:1806.03884, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from kfac_core.approximations.kronecker import Kronecker, Sharing
from kfac_core.approximations.options import NOTHING, OperatorOptions
from kfac_core.arrays import Scalar, as_scalar, cast, full_of
from kfac_core.backend import Array, Namespace
from kfac_core.blocks.eigen import EigenOperator
from kfac_core.conventions import Conventions, require_one_of
from kfac_core.factors.average import Average, zero_weight
from kfac_core.factors.diagonal import DiagonalFactor
from kfac_core.factors.shares import update_shares
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.linalg.ladder import symmetric_basis
from kfac_core.status import Check

__all__ = ["Eigen"]


@dataclass(frozen=True, kw_only=True)
class Eigen:
    """The eigenvalue-corrected approximation of a block.

    Parameters
    ----------
    sharing : {"expand", "reduce"}
        How the factors, which give the basis, treat shared positions.

    Raises
    ------
    ConventionError
        For another value.
    """

    sharing: Sharing = "expand"

    name = "eigen"
    lacks = NOTHING

    def __post_init__(self) -> None:
        require_one_of("sharing", self.sharing, get_args(Sharing))

    def problem_with(self, layer: Layer, /) -> str | None:
        """Say why the layer has no such block; None where it has."""
        if layer.kind in ("dense", "conv") and layer.groups == 1:
            return None
        return "needs full factors, so a dense layer, or a conv layer without groups"

    def rows(self, layer: Layer, batch: Any, /) -> Any:
        """Return what the layer saw as rows."""
        return layer.rows(batch)

    def initial(
        self, layer: Layer, /, *, dtype: Any, device: Any, xp: Namespace
    ) -> Statistics:
        """Return the statistics of nothing, in the coordinate basis."""
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        factors = self._factors.initial(layer, **place, xp=xp)
        n, m = layer.matrix_shape
        weight = zero_weight(xp, **place)
        moments = Average(xp.zeros((n, m), **place), weight)
        bases = {"input": xp.eye(n, **place), "output": xp.eye(m, **place)}
        averages = {**factors.averages, "block": moments}
        return Statistics(averages, factors.status, bases)

    def updated(
        self,
        statistics: Statistics,
        rows: Any,
        layer: Layer,
        /,
        *,
        conventions: Conventions,
        decay: Scalar,
        weight: Scalar | None,
        xp: Namespace,
        skip: frozenset[str] = frozenset(),
    ) -> Statistics:
        """Return factors and moments after one update; see `Kronecker.updated`.

        Notes
        -----
        Beside the factors, ``2 N S n m + 2 N n m (n + m)`` flops: the examples'
        gradients are formed in the bases.
        """
        common: dict[str, Any] = {
            "conventions": conventions,
            "decay": decay,
            "weight": weight,
            "xp": xp,
        }
        factors = self._factors.updated(statistics, rows, layer, **common)
        moments = self._moments(statistics, rows, **common)
        averages = {**factors.averages, "block": moments}
        return Statistics(averages, statistics.status, statistics.bases)

    def rebased(self, statistics: Statistics, /, *, check: Check) -> Statistics:
        """Return statistics in the eigenbases of the factors, with no moments yet.

        Parameters
        ----------
        statistics : Statistics
            Of which the factors are kept.
        check : {"raise", "status"}
            As for `kfac_core.linalg.ladder.symmetric_basis`.

        Returns
        -------
        Statistics
            To be updated before an operator is made.

        Raises
        ------
        NotFiniteError, FactorizationError
            Where a factor has no certified basis (``check="raise"``).
        """
        xp = statistics.namespace
        bases: dict[str, Array] = {}
        for side in ("input", "output"):
            value = statistics.averages[side].value(debias=True)
            basis = symmetric_basis(value, check=check, name=side, xp=xp)
            bases[side] = basis.eigenvectors
        old = statistics.averages["block"]
        fresh = Average(xp.zeros_like(old.sum), xp.zeros_like(old.weight))
        averages = {**statistics.averages, "block": fresh}
        return Statistics(averages, statistics.status, bases)

    def corrected(
        self,
        statistics: Statistics,
        rows: Any,
        /,
        *,
        conventions: Conventions,
        decay: Scalar,
        weight: Scalar | None,
    ) -> Statistics:
        """Return statistics with the moments updated and the factors left alone."""
        moments = self._moments(
            statistics,
            rows,
            conventions=conventions,
            decay=decay,
            weight=weight,
            xp=statistics.namespace,
        )
        averages = {**statistics.averages, "block": moments}
        return Statistics(averages, statistics.status, statistics.bases)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> EigenOperator:
        """Return ``(Q_A (x) Q_G) diag(E + lam) (Q_A (x) Q_G)^T`` as it is now."""
        xp = options.namespace(statistics)
        _, apply = options.dtypes(statistics.dtype, xp=xp)
        E = cast(xp, statistics.averages["block"].value(debias=options.debias), apply)
        made = EigenOperator(
            cast(xp, statistics.bases["input"], apply),
            cast(xp, statistics.bases["output"], apply),
            E,
            full_of(xp, as_scalar(xp, options.damping, apply, "damping"), E),
            None,
            xp.zeros_like(statistics.status),
            options.name,
            options.check,
        )
        return made.prepared(*options.factorizations)

    @property
    def _factors(self) -> Kronecker:
        return Kronecker(sharing=self.sharing)

    def _moments(
        self,
        statistics: Statistics,
        rows: Any,
        *,
        conventions: Conventions,
        decay: Scalar,
        weight: Scalar | None,
        xp: Namespace,
    ) -> Average:
        """Return E's average after the update."""
        shares = update_shares(
            statistics, rows, conventions=conventions, weight=weight, xp=xp
        )
        D = rows.per_example(statistics.dtype, xp=xp)
        turned = xp.matmul(
            xp.matmul(xp.matrix_transpose(statistics.bases["input"]), D),
            statistics.bases["output"],
        )
        return DiagonalFactor().absorbed(
            statistics.averages["block"],
            xp.sum(turned * turned, axis=(0, 1)),
            decay=decay,
            scale=shares.examples * shares.outer_products,
            weight=shares.example_weight,
        )
