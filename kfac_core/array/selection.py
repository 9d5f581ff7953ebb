"""The default backend, used only when no array argument determines it.

The library of array arguments is always the one used; nothing here changes that.  Where
no array is passed (`asarray` of NumPy values, tests, the command line), the first of
these that is set decides:

1. the explicit argument ``backend=``;
2. ``with use_backend("torch:cuda:0")`` (local to the thread or task, and to threads
   that copy its context);
3. the environment variable ``KFAC_CORE_BACKEND=name[:device]``, read at each use;
4. ``numpy``.

An unknown or unusable name is an error that lists the known ones; there is no silent
fallback.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

from kfac_core import constraints, errors
from kfac_core.array.backend import (
    Backend,
    backend_names,
    backend_of,
    get_backend,
)
from kfac_core.array.types import Array

ENVIRONMENT_VARIABLE = "KFAC_CORE_BACKEND"

_context: ContextVar[str | None] = ContextVar("kfac_core_backend", default=None)


@dataclass(frozen=True)
class Selection:
    """A backend and a device, and why they were chosen.

    Attributes
    ----------
    backend : Backend
        The backend.
    device : object
        The library's device; None is the library's default.
    spec : str
        The specification as it was given, ``name[:device]``.
    reason : str
        Where the choice was made.
    """

    backend: Backend
    device: object
    spec: str
    reason: str

    @property
    def name(self) -> str:
        """The name of the backend."""
        return self.backend.name


def selected_backend(backend: str | None = None, /) -> Selection:
    """Return the default backend, and why it was chosen.

    Parameters
    ----------
    backend : str, optional
        An explicit ``name[:device]``, which takes precedence over everything else.

    Returns
    -------
    Selection
        The backend, usable here, and its device.

    Raises
    ------
    ArgumentError
        For anything but a string.
    UnknownBackendError
        If no backend has that name.
    BackendUnavailableError
        If the library or the device cannot be used here.
    """
    spec, reason = _choose(backend)
    constraints.require_kind("backend", spec, str, "a string such as 'torch:cuda:0'")
    name, _, device = spec.partition(":")
    adapter = get_backend(name)
    problem = adapter.problem()
    if problem is not None:
        raise errors.BackendUnavailableError(
            f"Backend {name!r} ({reason}) cannot be used here: {problem}. "
            f"Usable here: {', '.join(_usable()) or 'none'}."
        )
    try:
        return Selection(adapter, adapter.device(device or None), spec, reason)
    # Libraries raise what they like for an unknown device.
    except (Exception, SystemExit) as error:
        raise errors.BackendUnavailableError(
            f"Backend {spec!r} ({reason}): no such device here: {error}"
        ) from error


@contextlib.contextmanager
def use_backend(spec: str, /) -> Iterator[Selection]:
    """Choose the default backend for a block of code.

    Parameters
    ----------
    spec : str
        ``name[:device]``, such as ``"torch:cuda:0"``.

    Yields
    ------
    Selection
        The backend and its device.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        As `selected_backend`, before the block is entered.

    Notes
    -----
    The choice is local to the current thread or asynchronous task: threads started
    inside the block do not see it.  ``KFAC_CORE_BACKEND`` is for the process.

    Examples
    --------
    >>> import kfac_core as kc
    >>> with kc.use_backend("numpy"):
    ...     type(kc.asarray([1.0, 2.0])).__name__
    'ndarray'
    """
    selection = selected_backend(spec)
    token = _context.set(spec)
    try:
        yield selection
    finally:
        _context.reset(token)


def asarray(values: np.ndarray[Any, Any], /, *, backend: str | None = None) -> Array:
    """Copy a NumPy array to the selected backend and device, keeping its dtype.

    Parameters
    ----------
    values : numpy.ndarray
        The values; never modified and never aliased.
    backend : str, optional
        ``name[:device]`` instead of the selected one.

    Returns
    -------
    array
        Array of the selected library.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        See `selected_backend`.
    DtypeError
        If the library would silently narrow the dtype (JAX without 64 bits).

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> with kc.use_backend("numpy"):
    ...     x = kc.asarray([1.0, 2.0])
    >>> x
    array([1., 2.])
    """
    selection = selected_backend(backend)
    return selection.backend.asarray(np.asarray(values), device=selection.device)


def to_numpy(x: Array, /) -> np.ndarray[Any, Any]:
    """Copy an array of any library to the host; synchronizes with the device.

    Raises
    ------
    DtypeError
        For anything but an array.

    Examples
    --------
    >>> import kfac_core as kc
    >>> kc.to_numpy(kc.asarray([1.0, 2.0]))
    array([1., 2.])
    """
    try:
        xp = array_api_compat.array_namespace(x)
    except TypeError:
        whole = ", whose matrix is `x.full()`" if hasattr(x, "full") else ""
        raise errors.DtypeError(
            f"Expected `x` to be an array, got {type(x).__name__}{whole}."
        ) from None
    return backend_of(xp).to_numpy(x)


def enable_float64(*, backend: str | None = None) -> None:
    """Let the selected library make 64-bit floats.

    For programs, not for libraries: it changes a process-wide setting of the array
    library where that has one (JAX), and does nothing elsewhere.

    Parameters
    ----------
    backend : str, optional
        ``name[:device]`` instead of the selected one.

    Examples
    --------
    >>> import kfac_core as kc
    >>> with kc.use_backend("numpy"):
    ...     kc.enable_float64()
    ...     print(kc.asarray([1.0]).dtype)
    float64
    """
    selected_backend(backend).backend.enable_float64()


def _choose(explicit: str | None) -> tuple[str, str]:
    if explicit is not None:
        return explicit, "given as an argument"
    local = _context.get()
    if local is not None:
        return local, "chosen by use_backend"
    variable = os.environ.get(ENVIRONMENT_VARIABLE)
    if variable:
        return variable, f"from {ENVIRONMENT_VARIABLE}={variable}"
    return "numpy", "the default"


def _usable() -> list[str]:
    return [name for name in backend_names() if get_backend(name).problem() is None]
