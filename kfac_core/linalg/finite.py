"""Whether an array holds NaN or infinity."""

from __future__ import annotations

from kfac_core.backend import Array, Namespace
from kfac_core.linalg.dispatch import dispatched

__all__ = ["all_finite"]


@dispatched
def all_finite(x: Array, /, *, xp: Namespace) -> Array:
    """Return whether every number of an array is finite.

    Parameters
    ----------
    x : array
        Of any shape and real floating dtype; true where it is empty.
    xp : namespace
        Of the array.

    Returns
    -------
    array of bool, 0-d
        Still on the device: turning it into a ``bool`` is what waits.
    """
    return xp.all(xp.isfinite(x))
