"""A generic backend for any library that follows the Array API standard.

Making arrays, finding devices and bringing results to the host, by introspection: so
that a library needs no adapter to be computed with, and an adapter only holds what is
particular about its library.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from kfac_core.array.types import Array, Device, Namespace, Tree


class GenericBackend:
    """A backend made from nothing but the name of a package.

    Parameters
    ----------
    name : str
        The root package of the library.
    """

    def __init__(self, name: str, /) -> None:
        self.name = name
        self._import_error: str | None = None

    def is_known(self) -> bool:
        """Whether there is a package of that name that follows the standard."""
        return self._module is not None or self._import_error is not None

    def problem(self) -> str | None:
        """Return why the backend cannot be used here, and what to install; else None."""
        if self._module is not None:
            return None
        if self._import_error is not None:
            return f"importing the package {self.name!r} raised {self._import_error}"
        return (
            f"the package {self.name!r} cannot be imported, or does not follow the "
            f"Array API standard; install it ('pip install {self.name}', or the extra of "
            "kfac-core that brings the build for your machine)"
        )

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries behind the backend, by package name."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            return {self.name: version(self.name)}
        except PackageNotFoundError:
            return {}

    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices, as in ``name:device``."""
        return tuple(_device_name(d) for d in self._all_devices())

    def namespace(self) -> Namespace:
        """Return the Array API namespace of the library.

        Raises
        ------
        ImportError
            If the package cannot be imported or does not follow the standard.
        """
        if self._module is None:
            raise ImportError(self.problem())
        return self._module

    def device(self, spec: str | None, /) -> Device:
        """Return the library's device of that name.

        Parameters
        ----------
        spec : str or None
            One of `devices`; None is the library's own default.

        Returns
        -------
        object
            What the library takes as ``device=``; None for its default.

        Raises
        ------
        ValueError
            If the library has no device of that name.
        """
        if spec is None:
            return None
        for device in self._all_devices():
            if _device_name(device) == spec:
                return device
        raise ValueError(
            f"{self.name} has no device {spec!r}; it has {', '.join(self.devices())}"
        )

    def asarray(self, values: np.ndarray[Any, Any], /, *, device: object) -> Array:
        """Copy a NumPy array to a device, keeping its dtype.

        Parameters
        ----------
        values : numpy.ndarray
            Any layout; negative strides are made contiguous first, since some
            libraries abort on them.
        device : object
            As returned by `device`.

        Returns
        -------
        array
            Array of this library, independent of `values`.
        """
        return self.namespace().asarray(
            np.ascontiguousarray(values).reshape(values.shape), device=device, copy=True
        )

    def to_numpy(self, x: Array, /) -> np.ndarray[Any, Any]:
        """Copy an array to the host, which synchronizes with the device.

        Parameters
        ----------
        x : array
            Array of this library.

        Returns
        -------
        numpy.ndarray
            Independent of `x`.
        """
        try:
            # Copied by NumPy: a view would change with the library's array, or outlive
            # it.
            return np.array(np.from_dlpack(x))
        # Libraries raise any of these where DLPack does not export, as from another
        # device.
        except (TypeError, AttributeError, BufferError, ValueError, RuntimeError):
            return np.array(x)

    def detach(self, x: Array, /) -> Array:
        """Return the array without its gradient graph; plain arrays have none."""
        return x

    def array_problem(self, x: Array, /) -> str | None:
        """Return why an array of this library cannot be computed with, or None.

        Asked of every array that comes in.  Such as: sparse, quantized, without memory.

        Parameters
        ----------
        x : array
            Array of this library, perhaps a traced one.

        Returns
        -------
        str or None
            What it is, as it stands in a message after "got".
        """
        return None

    def placeholder(self, function: Callable[[], Tree], /, *, device: object) -> Tree:
        """Return a function's result, or a placeholder of the same form.

        A library that can follow a function without computing may save the computing.

        Parameters
        ----------
        function : callable
            Returns a structure of arrays.
        device : device
            One of these devices.

        Returns
        -------
        structure
            With the same shapes and dtypes.
        """
        return function()

    def enable_float64(self) -> None:
        """Let the library make 64-bit floats; the standard's libraries do already."""

    def threads(self) -> int:
        """Return how many threads a call computes on, as far as is known: one.

        Returns
        -------
        int
            At least 1.
        """
        return 1

    def hold_threads(self, number: int, /) -> Callable[[], None]:
        """Let each call compute on so many threads, from this thread or from any.

        Called by the thread that starts others, and by each of these.

        Parameters
        ----------
        number : int
            At least 1.

        Returns
        -------
        callable
            What undoes it.
        """
        return lambda: None

    def in_background(self, function: Callable[[], Tree], /) -> Callable[[], Tree]:
        """Return a function that another thread calls while this one goes on.

        Where a device works through one queue of calls, it uses a queue of its own.

        Parameters
        ----------
        function : callable
            Returns a structure of arrays, of arrays that exist now.

        Returns
        -------
        callable
            Returns the same, when it is computed.
        """
        return function

    @functools.cached_property
    def _module(self) -> Namespace:
        """The namespace: the compatibility layer's, the package, or its ``numpy``."""
        if not self.name.isidentifier():
            return None
        for name in (f"array_api_compat.{self.name}", self.name, f"{self.name}.numpy"):
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            except (Exception, SystemExit) as error:
                # Importing a package may raise anything; report it.
                self._import_error = f"{type(error).__name__}: {error}"
                return None
            if hasattr(module, "__array_namespace_info__"):
                return module
        return None

    def _all_devices(self) -> list[Device]:
        info = self.namespace().__array_namespace_info__()
        return [d for d in info.devices() if d is not None]


class BrokenBackend(GenericBackend):
    """Placeholder for a registered adapter that could not be loaded.

    It cannot be chosen by its name.  Arrays of the library are computed with by the
    definitions all the same.

    Parameters
    ----------
    name : str
        The root package of the library.
    reason : str
        What `problem` says.
    """

    def __init__(self, name: str, reason: str, /) -> None:
        super().__init__(name)
        self._reason = reason

    def problem(self) -> str | None:
        """Return a message that names the broken adapter."""
        return self._reason


def _device_name(device: object) -> str:
    """Return the short name of a device: ``Device('device1')`` -> ``device1``."""
    text = str(device)
    return text.split("'")[1] if text.count("'") == 2 else text
