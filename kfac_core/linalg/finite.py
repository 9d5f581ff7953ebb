"""Whether an array holds NaN or infinity, and whether the host may look at it.

Conventions.  A Gram matrix shows on its diagonal whether its rows are finite: the squares
there cancel nothing.  So rows need not be read for it where their sums are at hand.
"""

from __future__ import annotations

from kfac_core.backend import Array, Namespace
from kfac_core.linalg.dispatch import dispatched

__all__ = ["all_finite", "is_plain", "known_finite"]


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


@dispatched
def known_finite(x: Array, /, *, xp: Namespace) -> bool:
    """Whether the host knows at once that every number of an array is finite.

    Parameters
    ----------
    x : array
        Of any shape and real floating dtype.
    xp : namespace
        Of the array.

    Returns
    -------
    bool
        False where some number is not, and where only waiting for a device, or for a
        value that is being traced, would say so: this one never waits.
    """
    return False


@dispatched
def is_plain(x: Array, /, *, xp: Namespace) -> bool:
    """Whether an array is nothing but numbers in the host's memory.

    Parameters
    ----------
    x : array
        Any.
    xp : namespace
        Of the array.

    Returns
    -------
    bool
        False for one that is traced, differentiated or on a device, and where a backend
        does not say.  Constants that were made for a plain array serve the next one.
    """
    return False
