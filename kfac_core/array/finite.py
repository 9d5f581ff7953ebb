"""Whether an array holds NaN or infinity, and whether the host can read it.

Conventions.  A Gram matrix shows on its diagonal whether its rows are finite: the squares
cannot cancel.  Where the sums are available, the rows need not be read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from array_api_compat import is_numpy_namespace

from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched
from kfac_core.array.status import Check
from kfac_core.array.types import Array, Namespace

_TRUTHS = (bool, np.bool_)


@dispatched
def all_finite(x: Array, /, *, xp: Namespace) -> Array:
    """Return whether every number of an array is finite.

    Parameters
    ----------
    x : array
        Array of any shape and real floating dtype; true where it is empty.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array of bool, 0-d
        Result on the device; converting it to ``bool`` synchronizes with the device.
    """
    return xp.all(xp.isfinite(x))


def known_true(condition: Array | bool, /, *, xp: Namespace) -> bool:
    """Whether the host knows at once that all of a condition holds.

    Parameters
    ----------
    condition : array of bool, or bool
        Array of any shape.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    bool
        False where some of it does not hold, and where only synchronizing with a device,
        or a value that is being traced, would say so.
    """
    # A condition on a Python number, or on a NumPy scalar.
    if isinstance(condition, _TRUTHS):
        return bool(condition)
    return known_all(condition, xp=xp)


@dispatched
def known_all(condition: Array, /, *, xp: Namespace) -> bool:
    """Return `known_true` of an array, as a backend knows it."""
    return False


@dispatched
def is_plain(x: Array, /, *, xp: Namespace) -> bool:
    """Whether an array is untracked numbers in the host's memory.

    Parameters
    ----------
    x : array
        Array.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    bool
        False for an array that is traced, differentiated or on a device, and for an unknown
        backend.  Constants can be cached and reused between plain arrays.
    """
    return False


@dispatched
def truth_of(condition: Array, /, *, xp: Namespace) -> bool | None:
    """Return a condition as a Python bool, or None where no value can be read.

    Parameters
    ----------
    condition : array of bool, 0-d
        Condition.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    bool or None
        None inside a function compiler or a vectorizing transform, where there are no
        values yet.  Reading one from a device synchronizes with it.
    """
    try:
        return bool(condition)
    except Exception:
        # Tracers refuse, each library with its own exception.
        return None


def is_readable(x: Array, /, *, xp: Namespace) -> bool:
    """Whether the host can read the values of an array; see `truth_of`.

    Parameters
    ----------
    x : array
        A small one, since all of it is compared.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    bool
        False for an array that is being traced.
    """
    return is_plain(x, xp=xp) or truth_of(xp.all(x == x), xp=xp) is not None


@dispatched
def known_finite(x: Array, /, *, xp: Namespace) -> bool:
    """Whether the host knows at once that every number of an array is finite.

    Parameters
    ----------
    x : array
        Array of any shape and real floating dtype.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    bool
        False where some number is not finite, and where only synchronizing with a device,
        or a value that is being traced, would say so.
    """
    return is_plain(x, xp=xp) and bool(all_finite(x, xp=xp))


def positive_or_one(x: Array, /) -> Array:
    """Return numbers to divide by: 1 where one is not positive, or NaN.

    For a 0-d array of NumPy that is a scalar of NumPy; see `namespaces.as_number`.
    """
    x = ns.as_number(x)
    positive = x > 0
    if positive is np.True_:
        return x
    xp = ns.own_namespace(x)
    return x if known_true(positive, xp=xp) else xp.where(positive, x, 1.0)


def plain_number(x: Array, /, *, xp: Namespace) -> float | None:
    """Return an array of one number as a Python number, if that needs no synchronization.

    A calculation with numbers takes a tenth of the time of one with 0-d arrays.

    Parameters
    ----------
    x : array
        Array of any shape.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    float or None
        None for an array that is not 0-d, or not `is_plain`.
    """
    return float(x) if x.ndim == 0 and is_plain(x, xp=xp) else None


def quiet(check: Check, /, *, xp: Namespace) -> AbstractContextManager[Any]:
    """Return a context without NumPy's warnings of infinities, which a status reports.

    Parameters
    ----------
    check : {"raise", "status"}
        With ``"status"`` a function compiler may be tracing, which supports no such
        context: then it is for NumPy's own arrays alone.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    context manager
        Context.  Warnings would also depend on the processor, whose kernels may compute
        ``inf * 0`` in unused lanes.
    """
    if check == "raise" or is_numpy_namespace(xp):
        return np.errstate(over="ignore", invalid="ignore")
    return nullcontext()
