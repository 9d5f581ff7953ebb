"""Recurrent layers as a chain of time steps: ``Series``, in three variants.

Conventions.  The shared positions of a row group are consecutive time steps, in order:
``(N, T, features)``, and never time first.  With the rows x (a 1 appended where there is
a bias) and g, one update's statistics are those of `kfac_core.approximations.kronecker`
for lag 0, and for lag 1, with the same normalizer,

    A_1 = 1/(NS) sum_ns x_(s+1) x_s^T,    G_1 = 1/(NS) sum_mns g_(s+1) g_s^T.

Both lags are updated together, with one decay and one weight.  The block is

===============  ====================================================================
``independent``  ``S A_0 (x) G_0``: steps are uncorrelated; lag 1 is not kept
``symmetric``    option 1: the covariance of T steps with symmetrized lag 1
``infinite``     option 2: that of infinitely many, times S over their number
===============  ====================================================================

as `kfac_core.operators.series` defines it.  With one step, or with lag 1 zero, each of them
is ``S A_0 (x) G_0``.  With a mask NS becomes the number of rows kept, S the mean number
kept a sequence, and pairs count where both rows do; the symmetric variant keeps the shares
of the lengths, over which it averages.  Only A_0 and G_0 are damped, by a factored rule.

References
----------
Martens, Ba and Johnson (2018), "Kronecker-factored Curvature Approximations for
Recurrent Neural Networks", ICLR.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kfac_core import constraints, errors
from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.approximations.series_operator import series_operator
from kfac_core.array import Place, replaced
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.factors.lagged import LaggedFactor, length_shares
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Batch, Rows
from kfac_core.operators.operator import CurvatureOperator

SeriesVariant = Literal["independent", "symmetric", "infinite"]

_LAG_0 = Kronecker()
_LAG_1 = LaggedFactor()


@dataclass(frozen=True, kw_only=True)
class Series(Approximation[Rows]):
    r"""The approximation of a recurrent layer's block by a chain of time steps.

    Shared positions are time steps.  Beside the factors :math:`A_0, G_0` of
    `kfac_core.Kronecker`, statistics hold the moments of neighboring steps,

    .. math:: A_1 = \frac{1}{NS} \sum_{n,s} x_{s+1} x_s^T, \qquad
        G_1 = \frac{1}{NS} \sum_{m,n,s} g_{s+1} g_s^T.

    With :math:`\Psi = \Psi_A \otimes \Psi_G` the correlations of neighboring steps and R a
    root of the block of lag 0, the block of the infinite chain is

    .. math:: F = S R \, [ (I - \Psi)^{-1} + (I - \Psi^T)^{-1} - I ] \, R^T.

    Parameters
    ----------
    variant : {"independent", "symmetric", "infinite"}
        ``"independent"``: ``S A_0 (x) G_0``, with uncorrelated time steps.
        ``"symmetric"`` (option 1 of the paper): the covariance of T steps, with the
        moments of lag 1 symmetrized.  ``"infinite"`` (option 2): the covariance of
        infinitely many steps, times S over their number.
    steps : int or None
        The number of time steps of the longest sequence that there will be.  The
        symmetric variant needs it; the others take None only.

    Raises
    ------
    ConventionError
        For an unknown variant, or a `steps` that the variant does not take.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 5, 3)), rng.normal(size=(16, 5, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.Series(variant="symmetric", steps=5))
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> options = kc.RefreshOptions(damping=0.1, rule="factored")
    >>> F = kc.operator_of(block, statistics, options)
    >>> F.multiply_inverse(np.ones((4, 2))).shape
    (4, 2)
    """

    variant: SeriesVariant
    steps: int | None = None

    name = "series"
    reduction = "sum"

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            variant=constraints.literal(SeriesVariant),
            steps=constraints.optional(constraints.COUNT),
        )
        if self.variant == "symmetric" and self.steps is None:
            raise errors.ConventionError(
                "The symmetric variant sums over the lags of sequences of known lengths: "
                "expected `steps`, the length of the longest."
            )
        if self.variant != "symmetric" and self.steps is not None:
            raise errors.ConventionError(
                f"The variant {self.variant!r} knows no `steps`; leave it out."
            )

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics; see `Kronecker.initial`.

        Returns
        -------
        Statistics
            ``input``, ``output`` and ``repeats`` as there; ``lagged_input`` and
            ``lagged_output`` (symmetric and infinite); ``lengths`` (symmetric).
        """
        base = _LAG_0.initial(layer, place)
        averages = dict(base.averages)
        if self.variant != "independent":
            n, m = layer.matrix_shape
            averages["lagged_input"] = _LAG_1.initial((n,), place)
            averages["lagged_output"] = _LAG_1.initial((m,), place)
        if self.steps is not None:
            averages["lengths"] = Average(place.zeros(self.steps), place.zeros())
        return Statistics(averages, base.status)

    def updated(
        self,
        statistics: Statistics,
        rows: Rows,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        `options.skip` is ignored, since the moments of lags 0 and 1 belong together.

        Raises
        ------
        ShapeError
            For more positions than `steps`.

        Notes
        -----
        ``3 R (n^2 + M m^2)`` flops for R rows, or ``R (n^2 + M m^2)`` (independent).
        """
        unskipped = replaced(options, skip=frozenset())
        new = _LAG_0.updated(statistics, rows, layer, unskipped)
        if self.variant == "independent":
            return new
        shares = options.shares(rows, statistics.dtype)
        xp, decay = options.xp, options.decay
        old, averages = statistics.averages, dict(new.averages)
        x = rows.full_inputs(statistics.dtype, xp=xp)
        g = ns.cast(xp, rows.output_grads, statistics.dtype)
        scales = {
            "input": shares.scale,
            "output": shares.scale * shares.outer_product_scale,
        }
        for side, v in (("input", x), ("output", g)):
            lagged, weight = old[f"lagged_{side}"], averages[side].weight
            averages[f"lagged_{side}"] = _LAG_1.updated(
                lagged, v, decay, scales[side], weight, xp=xp
            )
        if self.steps is not None:
            lengths = length_shares(rows, steps=self.steps, dtype=x.dtype, xp=xp)
            # Lengths count examples, like the repeats, whose weight they share.
            total = old["lengths"].sum * decay + lengths * shares.example_weight
            averages["lengths"] = Average(total, averages["repeats"].weight)
        return Statistics(averages, new.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> CurvatureOperator:
        """Return the curvature operator of the statistics; see `Kronecker.operator`.

        Raises
        ------
        UnsupportedError
            For exact damping of the symmetric and infinite variants.
        NotFiniteError, DampingError, FactorizationError
            For statistics that are not finite, a damping that is negative or not finite,
            a factor that no fallback can factorize, and moments of lag 1 that do not belong
            to those of lag 0, with ``check="raise"``.

        Notes
        -----
        About ``20 (n^3 + m^3)`` flops; with ``check="raise"`` in float32 once more in
        float64 where a residual is above its limit.
        """
        if self.variant == "independent":
            return _LAG_0.operator(statistics, layer, options)
        options.require_factored(f"The {self.variant} series")
        return series_operator(statistics, options)

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is."""
        if layer.kind == "dense":
            return None
        return "needs time steps in order, so a dense layer with one shared axis"

    def rows(self, layer: Layer, batch: Batch, /) -> Rows:
        """Return a batch as rows, in the order of time.

        Raises
        ------
        ShapeError
            For several shared axes: the time axis is ambiguous (but for the
            independent variant, where none is).
        """
        rows = super().rows(layer, batch)
        if self.variant != "independent" and batch.inputs.ndim > 3:
            hint = "The time steps are one shared axis: move others into that of sequences."
            constraints.require_shape("inputs", batch.inputs, ("N", "T", "n"), hint)
        return rows
