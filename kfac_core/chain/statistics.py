"""The running moments of a chain of layers, those between neighbors included.

Conventions.  Layers are 1, ..., l from the inputs to the outputs.  With the rows x_i (a 1
appended where there is a bias) and g_i of layer i, of one and the same examples,

    A_ij = 1/N sum_n x_i x_j^T,        G_ij = 1/N sum_mn g_i g_j^T,

for i = j as `kfac_core.approximations.kronecker` has them, and for j = i + 1, which is kept
by the name of layer i.  All are updated in one operation, with one decay and one weight:
moments of neighbors that are of other data than the layers' own make no covariance.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.structure import map_structure, structure
from kfac_core.factors.average import Average
from kfac_core.factors.statistics import Statistics

__all__ = ["ChainStatistics"]


@structure()
class ChainStatistics:
    """What is kept of the rows of a chain of layers.

    Attributes
    ----------
    layers : dict of str to Statistics
        Of each layer, as `kfac_core.Kronecker` keeps them.
    crossed_inputs, crossed_output_grads : dict of str to Average
        The sums of ``x_i x_(i+1)^T`` and ``g_i g_(i+1)^T``, by the name of layer i.
    status : array of int32, 0-d
        The flags of the last update; nonzero where it was left out.
    """

    layers: dict[str, Statistics]
    crossed_inputs: dict[str, Average]
    crossed_output_grads: dict[str, Average]
    status: Array

    @property
    def any_weight(self) -> Array:
        """One of the weights: a 0-d array of the statistics' library and device."""
        return next(iter(self.layers.values())).any_weight

    @property
    def namespace(self) -> Namespace:
        """The namespace of the arrays."""
        return array_api_compat.array_namespace(self.any_weight)

    def merged(self, other: ChainStatistics, /) -> ChainStatistics:
        """Return the statistics of both data sets together.

        Of two halves of a batch they are those of the whole where each half was given
        its number of rows that count as its weight.
        """

        def both(
            first: dict[str, Average], second: dict[str, Average]
        ) -> dict[str, Average]:
            return {name: one.merged(second[name]) for name, one in first.items()}

        layers = {
            name: one.merged(other.layers[name]) for name, one in self.layers.items()
        }
        return ChainStatistics(
            layers,
            both(self.crossed_inputs, other.crossed_inputs),
            both(self.crossed_output_grads, other.crossed_output_grads),
            self.status | other.status,
        )

    def unless(self, status: Array, old: ChainStatistics, /) -> ChainStatistics:
        """Return these statistics where a status is zero, else the old ones with it."""
        xp = self.namespace
        kept = map_structure(lambda a, b: xp.where(status == 0, a, b), self, old)
        return ChainStatistics(
            kept.layers, kept.crossed_inputs, kept.crossed_output_grads, status
        )
