"""Whether statistics have moved since an operator was made from them.

Conventions.  The probe image of a statistic C is its product with one fixed probe z (of a
diagonal one, C itself), kept from the refresh: a vector for a matrix.  C has moved by

    |C z - C_old z| / |C_old z|,

which for a random z estimates the relative change in the Frobenius norm; a fixed one sees
what rounding errors and gradients have no reason to avoid.  The movement of a block is
that of the statistic that moved most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar, device_of
from kfac_core.array.structure import leaves
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.certificate import probe
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric
from kfac_core.network import Network, NetworkState

__all__ = ["Movement", "ProbeImages", "movement", "probe_images"]

ProbeImages = Mapping[str, Array]
"""By the path of a statistic."""


class Movement:
    """Which blocks have moved since their operators were made.

    Parameters
    ----------
    network : Network
        Whose blocks are looked at.
    threshold : float
        A block of which no statistic has moved by more than this, and whose damping is
        the same number, has not moved.
    """

    def __init__(self, network: Network, threshold: float) -> None:
        self._network, self.threshold = network, threshold
        self._images: dict[str, tuple[object, ProbeImages]] = {}

    def of(
        self,
        state: NetworkState,
        names: Iterable[str],
        /,
        *,
        damping: Scalar | Mapping[str, Scalar],
    ) -> dict[str, ProbeImages]:
        """Return the blocks that moved, or of which it is unknown, with their images.

        Parameters
        ----------
        state : NetworkState
            Current state.
        names : iterable of str
            The blocks to look at.
        damping : float, 0-d array or mapping of str to these
            Damping of the next operators.

        Returns
        -------
        dict of str to mapping
            Blocks to refresh, and what `keep` is to be given once they were.

        Notes
        -----
        ``2 n^2`` flops for a matrix of n rows; synchronizes with the device.
        """
        moved: dict[str, ProbeImages] = {}
        for name in names:
            held = state.blocks[name]
            if held.statistics is None:
                continue
            everything = {n: other.statistics for n, other in state.blocks.items()}
            shared = self._network.shared_factors
            statistics = shared.completed(name, held.statistics, everything)
            debias = self._network.averaging.debias
            images = probe_images(statistics, debias=debias)
            chosen = damping[name] if isinstance(damping, Mapping) else damping
            operator, before = self._images.get(name, (None, {}))
            if (
                operator is not None
                and operator == held.refreshes
                and _is_same(held.damping, chosen)
                and float(movement(images, before, xp=statistics.namespace))
                <= self.threshold
            ):
                continue
            moved[name] = images
        return moved

    def keep(self, state: NetworkState, moved: Mapping[str, ProbeImages], /) -> None:
        """Keep what the operators of a state were made from.

        Parameters
        ----------
        state : NetworkState
            State after the refresh.
        moved : mapping of str to mapping
            What `of` returned.
        """
        for name, images in moved.items():
            self._images[name] = state.blocks[name].refreshes, images


def _is_same(made_with: Scalar | None, damping: Scalar) -> bool:
    """Whether a damping is the number that an operator was made with; no array is."""
    return isinstance(made_with, float | int) and made_with == damping


def probe_images(statistics: Statistics, /, *, debias: bool) -> ProbeImages:
    """Return the image of a probe vector under each average.

    Parameters
    ----------
    statistics : Statistics
        Statistics of the block; not modified.
    debias : bool
        Whether sums are divided by their weights.

    Returns
    -------
    mapping of str to array
        One for each array of the averages' values.

    Notes
    -----
    ``2 n^2`` flops for a matrix of n rows; never synchronizes with the device.
    """
    xp = statistics.namespace
    images: dict[str, Array] = {}
    for name, average in statistics.averages.items():
        value: Any = average.value(debias=debias)
        if isinstance(value, SymmetricMatrix):
            images[name] = multiply_symmetric(value, _probe(value.array, xp), xp=xp)
            continue
        for path, x in leaves(value, prefix=name):
            square = x.ndim > 1 and x.shape[-1] == x.shape[-2]
            images[path] = xp.matmul(x, _probe(x, xp)) if square else x
    return images


def movement(now: ProbeImages, before: ProbeImages, /, *, xp: Namespace) -> Array:
    """Return the largest relative change of a probe image, 0-d; infinite from zero."""
    changes = []
    for name, mark in now.items():
        old = before[name]
        change, size = xp.sum((mark - old) ** 2), xp.sum(old * old)
        positive = size > 0
        ratio = xp.sqrt(change / xp.where(positive, size, xp.ones_like(size)))
        unmoved = xp.where(change > 0, xp.full_like(ratio, xp.inf), change)
        changes.append(xp.where(positive, ratio, unmoved))
    return xp.max(xp.stack(changes))


def _probe(x: Array, xp: Namespace) -> Array:
    return probe(x.shape[-1], dtype=x.dtype, device=device_of(x), xp=xp)
