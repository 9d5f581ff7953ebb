"""``F = c I``, for parameters of an unknown layer."""

from __future__ import annotations

from dataclasses import dataclass

from kfac_core import constraints
from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import Place
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import AnyRows, Layer
from kfac_core.operators.spectral import SpectralOperator, spectral_operator


@dataclass(frozen=True, kw_only=True)
class ScaledIdentity(Approximation[AnyRows]):
    """A multiple of the identity, whatever the rows hold.

    .. math:: F = c I

    Parameters
    ----------
    scale : float
        c, finite and >= 0.

    Raises
    ------
    ConventionError
        For another number.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.ScaledIdentity(scale=2.0))
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> options = kc.RefreshOptions(damping=0.1, rule="exact")
    >>> F = kc.operator_of(block, statistics, options)
    >>> float(F.trace(damped=False))
    16.0
    """

    scale: float

    name = "scaled_identity"
    reduction = "sum"

    def __post_init__(self) -> None:
        constraints.require_options(self, scale=constraints.NOT_NEGATIVE)

    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics: a count of examples."""
        zero = place.zeros()
        return Statistics({"count": Average(zero, zero)}, place.flags())

    def updated(
        self,
        statistics: Statistics,
        rows: AnyRows,
        layer: Layer,
        options: UpdateOptions,
        /,
    ) -> Statistics:
        """Return the statistics with the update counted; the rows are not read."""
        shares = options.shares(rows, statistics.dtype)
        old = statistics.averages["count"]
        weight = shares.example_weight
        # An average of ones, whose weight says that there has been an update.
        new = old.plus(1.0, options.decay, weight, weight)
        return Statistics({"count": new}, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> SpectralOperator:
        """Return ``(c + lam) I``."""
        xp, compute, apply = options.xp, options.compute, options.apply
        one = ns.full_of(xp, self.scale, statistics.like)
        # c I has every basis as its eigenbasis, so take the coordinates.
        spectrum = xp.astype(xp.broadcast_to(one, layer.matrix_shape), compute)
        return spectral_operator(
            spectrum,
            damping=ns.full_of(xp, options.damping, spectrum),
            vector_shape=layer.matrix_shape,
            dtype=apply,
            **options.preparing,
        )
