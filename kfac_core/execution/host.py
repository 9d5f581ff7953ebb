"""Whole stages by NumPy, on the memory of another library's arrays.

Conventions.  A library whose arrays lie in the host's memory may leave a stage to NumPy
where that takes less time for the same: a refresh of a small layer is a hundred calls, and
a call of NumPy takes a third of one of PyTorch.  The library's adapter says when.  What is
*seen* are views of the same memory, and what is *returned* are arrays of the library on the
memory of NumPy's results: nothing is copied either way, and nothing is written to.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from kfac_core.array.backend import Array, Namespace, native_operation
from kfac_core.array.dispatch import dispatched
from kfac_core.array.structure import map_structure

__all__ = ["from_host", "host_computes", "host_view", "returned", "seen"]

T = TypeVar("T")


@dispatched
def host_computes(*, xp: Namespace) -> bool:
    """Whether stages are to be computed by NumPy at this moment, in this thread.

    Parameters
    ----------
    xp : namespace
        Of the arrays that would be seen.

    Returns
    -------
    bool
        False unless an adapter says otherwise.
    """
    return False


@dispatched
def host_view(x: Array, /, *, xp: Namespace) -> np.ndarray[Any, Any] | None:
    """Return a NumPy array on the memory of an array.

    Parameters
    ----------
    x : array
        Any.
    xp : namespace
        Of the array.

    Returns
    -------
    numpy.ndarray or None
        None for one that is traced, differentiated or on a device, and for a dtype that
        NumPy lacks.
    """
    return None


@dispatched
def from_host(x: np.ndarray[Any, Any], /, *, xp: Namespace) -> Array:
    """Return an array of a library on the memory of NumPy's.

    Parameters
    ----------
    x : numpy.ndarray
        Not to be written to afterwards.
    xp : namespace
        Of the library.

    Returns
    -------
    array
        Of the same shape and dtype.
    """
    return xp.asarray(x)


class _ElsewhereError(Exception):
    """An array that NumPy cannot see."""


def seen(value: T, /, *, xp: Namespace) -> T | None:
    """Return a structure whose arrays are views by NumPy; None where one cannot be.

    Parameters
    ----------
    value : structure or dict of structures
        Of arrays of one library.
    xp : namespace
        Of the arrays.

    Returns
    -------
    structure or dict, or None
        None too where the library computes for itself.
    """
    if not host_computes(xp=xp):
        return None
    found = native_operation("host_view", xp) or host_view

    def view(x: Array) -> np.ndarray[Any, Any]:
        made: np.ndarray[Any, Any] | None = found(x, xp=xp)
        if made is None:
            raise _ElsewhereError
        return made

    try:
        return map_structure(view, value)
    except _ElsewhereError:
        return None


def returned(value: T, /, *, xp: Namespace) -> T:
    """Return a structure whose arrays are the library's, on the memory of NumPy's."""
    found = native_operation("from_host", xp) or from_host
    return map_structure(lambda x: found(x, xp=xp), value)
