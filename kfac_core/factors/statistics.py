"""Running statistics of one block: named averages, and the status of the last update."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from kfac_core import errors
from kfac_core.array import Array, Namespace, Scalar, finite, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure, without_scalars
from kfac_core.array.types import DType
from kfac_core.factors.average import Average
from kfac_core.linalg.factorizations import Eigendecomposition

_ALL_ALIKE: Mapping[str, Scalar] = MappingProxyType({})


@structure(deferrable=True)
class Statistics:
    """Running averages of a block, with status and bases.

    Attributes
    ----------
    averages : dict of str to Average
        Averages by the names that the approximation gives them, such as ``"input"``.
    status : array of int32, 0-d
        The flags of the last update; nonzero where it was left out.
    bases : dict of str to Eigendecomposition
        The bases in which an average is kept, for an approximation that has any; their
        eigenvalues descend.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.Kronecker())
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> sorted(statistics.averages)
    ['input', 'output', 'repeats']
    """

    averages: dict[str, Average]
    status: Array
    bases: dict[str, Eigendecomposition] = dataclasses.field(default_factory=dict)

    @property
    def dtype(self) -> DType:
        """The dtype in which the sums are kept."""
        return next(iter(self.averages.values())).weight.dtype

    @property
    def like(self) -> Array:
        """One of the weights: a 0-d array of the statistics' library and device."""
        return next(iter(self.averages.values())).weight

    @property
    def namespace(self) -> Namespace:
        """The namespace of the arrays."""
        return ns.own_namespace(self.like)

    @property
    def lacks_bases(self) -> bool:
        """Whether the bases are kept by another process alone."""
        return any(basis.eigenvalues.shape[-1] == 0 for basis in self.bases.values())

    def emptied(self) -> Statistics:
        """Return zero statistics in the same bases."""
        # Arithmetic keeps the library, device and dtype of every array.
        zeros: Statistics = map_structure(lambda x: x * 0, self)
        return replaced(zeros, bases=self.bases)

    def merged(self, other: Statistics, /) -> Statistics:
        """Return the statistics of two data sets together, both in the same bases.

        Raises
        ------
        ConventionError
            For second moments in other bases, as far as the host can read them.
        """
        _require_same_bases(self, other)
        averages = {
            name: average.merged(other.averages[name])
            for name, average in self.averages.items()
        }
        merged = Statistics(averages, self.status | other.status, self.bases)
        return without_scalars(merged)

    def absorbed(
        self,
        other: Statistics,
        /,
        *,
        decay: Scalar,
        weight: Scalar | None,
        decays: Mapping[str, Scalar] = _ALL_ALIKE,
    ) -> Statistics:
        """Return the statistics after one update with the averages of others.

        If the status of `other` is not zero, the statistics are unchanged.  Without a
        weight its averages keep their own.
        `decays` holds the decays of averages that do not follow `decay`.

        Raises
        ------
        ConventionError
            For second moments in other bases, as far as the host can read them.
        """
        _require_same_bases(self, other)
        averages = {
            name: average.absorbed(
                other.averages[name], decay=decays.get(name, decay), weight=weight
            )
            for name, average in self.averages.items()
        }
        # A batch whose flags are set is rejected below, and only its flags remain.
        new = Statistics(averages, other.status, self.bases)
        xp, good = self.namespace, other.status == 0
        # Select by `where`, since the status may be traced.
        chosen = map_structure(lambda a, b: xp.where(good, a, b), new, self)
        return without_scalars(replaced(chosen, status=other.status))


def _require_same_bases(first: Statistics, second: Statistics) -> None:
    for side, basis in first.bases.items():
        one, other = basis.eigenvectors, second.bases[side].eigenvectors
        # The usual case, without a comparison of numbers.
        if one is other:
            continue
        xp = ns.own_namespace(one)
        if finite.truth_of(xp.all(one == other), xp=xp) is False:
            raise errors.ConventionError(
                f"The second moments were taken in other bases of {side!r} than those "
                "that they are added to. Take them by `batch_moments(..., statistics=...)`,"
                " with the block's statistics after its last rebase."
            )
