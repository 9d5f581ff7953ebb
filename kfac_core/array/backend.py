"""The `Backend` protocol, and the registry of backends.

Conventions.  A backend has the name of its library's root package (``"torch"``), and
arrays in decide which backend computes: an array whose namespace belongs to
``torch`` is computed by ``torch``, and nothing is converted.  An *adapter* is a
module or an object that the entry-point group ``kfac_core.backends`` (or
`register_backend`) registers under a name.  All its members but ``name`` are optional:
`kfac_core.array.generic_backend` supplies the others, in the pure Array API standard.

`OPERATIONS` names the operations that an adapter may bring natively, as functions of
those names with the signatures of their generic definitions in `kfac_core.linalg`.
A native operation may return ``NotImplemented`` for arguments that it does not
cover; then the definition is used.  With no adapter at all everything computes the
same, only slower.

An adapter is imported when its arrays (or its name) are first met, and published
only when it is complete, so that threads never see half of one.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from kfac_core import errors
from kfac_core.array.generic_backend import BrokenBackend, GenericBackend
from kfac_core.array.optional import entry_points_of
from kfac_core.array.structure import Registrar, register_structures_with
from kfac_core.array.types import Array, Device, Namespace, Tree

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "kfac_core.backends"

OPERATIONS = (
    "gram_update",
    "damped_cholesky",
    "cholesky_in_place",
    "certified_cholesky",
    "restored_matrix",
    "cholesky_inverse",
    "solve_triangular",
    "solve_cholesky",
    "multiply_triangular",
    "eigh",
    "eigh_in_place",
    "multiply_symmetric",
    "multiply_shifted",
    "multiply_matrices",
    "scale_symmetric",
    "matrix_diagonal",
    "matrix_trace",
    "all_finite",
    "known_all",
    "known_finite",
    "is_plain",
    "truth_of",
    "choose",
    "constant",
    "relative_norm",
    "sum_of_products",
    "sums_of_products",
    "count_indices",
    "sum_rows_at",
    "set_block",
    "host_computes",
    "host_view",
    "from_host",
)
"""The operations that a backend may replace by native ones, by these names."""


class Backend(Protocol):
    """The interface of backends, besides the operations.

    An adapter that leaves a member out gets the generic one; see `GenericBackend`,
    whose docstrings say what each must do.
    """

    name: str

    def problem(self) -> str | None:
        """Return why the backend cannot be used here, and what to install; else None."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries behind the backend."""

    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices, as in ``name:device``."""

    def namespace(self) -> Namespace:
        """Return the Array API namespace."""

    def device(self, spec: str | None, /) -> Device:
        """Return the library's device of that name (None: the library's default)."""

    def asarray(self, values: np.ndarray[Any, Any], /, *, device: object) -> Array:
        """Copy a NumPy array to a device, keeping its dtype."""

    def to_numpy(self, x: Array, /) -> np.ndarray[Any, Any]:
        """Copy an array to the host."""

    def detach(self, x: Array, /) -> Array:
        """Return the array detached from its gradient graph, if any."""

    def array_problem(self, x: Array, /) -> str | None:
        """Return why an array cannot be computed with (sparse, deleted), or None."""

    def placeholder(self, function: Callable[[], Tree], /, *, device: object) -> Tree:
        """Return a function's result, or a placeholder of the same form."""

    def enable_float64(self) -> None:
        """Enable 64-bit floats in the library, if it needs that."""

    def threads(self) -> int:
        """Return how many threads one call of the library computes on."""

    def hold_threads(self, number: int, /) -> Callable[[], None]:
        """Limit calls to a number of threads; return a function that lifts the limit."""

    def in_background(self, function: Callable[[], Tree], /) -> Callable[[], Tree]:
        """Return a function for another thread, to compute beside this one's calls."""


_loaded: dict[str, Backend] = {}
_operations: dict[str, Mapping[str, Callable[..., Any]]] = {}
_problems: dict[str, str] = {}
natives: dict[str, dict[str, Callable[..., Any] | None]] = {op: {} for op in OPERATIONS}
"""The native form of each operation, or None, by the usual names of a namespace."""
_lock = threading.RLock()


def register_backend(adapter: Any, /) -> None:
    """Register an adapter in this process, as an entry point would.

    Parameters
    ----------
    adapter : module or object
        With a ``name``, and any members of `Backend` and `OPERATIONS`.  It takes the
        place of an adapter of the same name.
    """
    name: str = adapter.name
    with _lock:
        operations = {
            op: getattr(adapter, op) for op in OPERATIONS if hasattr(adapter, op)
        }
        registrar: Registrar | None = getattr(adapter, "register_structure", None)
        if registrar is not None:
            register_structures_with(registrar)
        _problems.pop(name, None)
        _publish(name, operations)
        _loaded[name] = cast("Backend", _Completed(adapter, GenericBackend(name)))


def get_backend(name: str, /) -> Backend:
    """Return the backend of a name, importing its adapter if necessary.

    Parameters
    ----------
    name : str
        As in ``KFAC_CORE_BACKEND``, without a device.

    Returns
    -------
    Backend
        Complete; whether it is usable here its ``problem()`` says.

    Raises
    ------
    UnknownBackendError
        If nothing of that name is registered, and no package of that name that follows
        the Array API standard can be imported.
    """
    if name not in _loaded:
        _load(name)
    backend = _loaded[name]
    # A package without an adapter is a backend, too, if it follows the standard.
    known = name in _entry_points()
    if isinstance(backend, GenericBackend) and not (known or backend.is_known()):
        raise errors.UnknownBackendError(
            f"Unknown backend {name!r}: registered are {', '.join(backend_names())}, and "
            f"no package {name!r} that follows the Array API standard was found. "
            "Check the spelling of `KFAC_CORE_BACKEND` or of the argument, or install "
            "the package."
        )
    return backend


def backend_of(xp: Namespace, /) -> Backend:
    """Return the backend of an Array API namespace."""
    name = _root(xp)
    if name not in _loaded:
        _load(name)
    return _loaded[name]


def native_operation(name: str, xp: Namespace, /) -> Callable[..., Any] | None:
    """Return the native operation for the arrays of a namespace, or None."""
    if xp.__name__ in natives[name]:
        return natives[name][xp.__name__]
    root = _root(xp)
    if root not in _operations:
        _load(root)
    return _operations[root].get(name)


def native_operations(name: str, /) -> frozenset[str]:
    """Return the names of the operations that the backend of a name brings natively."""
    get_backend(name)
    return frozenset(_operations[name])


def backend_names() -> tuple[str, ...]:
    """Return the names of all registered backends, whether usable here or not."""
    return tuple(sorted({*_entry_points(), *_operations_with_adapters()}))


def load_adapters() -> None:
    """Import the adapters of all libraries that this process has imported already.

    Called where a block is described, since a traced program cannot import.  NumPy is
    skipped: this package imports it in any case, and nothing traces it.
    """
    for name in _entry_points():
        if name != np.__name__ and name in sys.modules and name not in _loaded:
            _load(name)


def adapter_problem(name: str, /) -> str | None:
    """Return why the adapter of a name could not be imported, or None."""
    return _problems.get(name)


class _Completed:
    """An adapter, with the generic plumbing in place of the members it lacks."""

    def __init__(self, adapter: Any, generic: GenericBackend) -> None:
        self._adapter = adapter
        self._generic = generic
        self.name = generic.name

    def problem(self) -> str | None:
        """Return the adapter's message; an adapter that raises is broken."""
        ask = getattr(self._adapter, "problem", None) or self._generic.problem
        try:
            problem: str | None = ask()
        except (Exception, SystemExit) as error:
            # One broken adapter must not stop other backends, or the doctor.
            message = f"{type(error).__name__}: {error}"
            entry = _entry_points().get(self.name)
            return (
                _broken(entry, message, "asked for its problem") if entry else message
            )
        return problem

    def __getattr__(self, member: str) -> Any:
        value = getattr(self._adapter, member, None)
        # None, too: an adapter may say so that it leaves a member to the definition.
        value = value if value is not None else getattr(self._generic, member)
        # Cached on the instance, so that `__getattr__` is not called again.
        self.__dict__[member] = value
        return value


def _root(xp: Namespace) -> str:
    """Return the root package of a namespace: ``array_api_compat.torch`` -> ``torch``."""
    return _root_of(xp.__name__)


@functools.cache
def _root_of(name: str) -> str:
    return name.removeprefix("array_api_compat.").partition(".")[0]


def _publish(name: str, operations: dict[str, Callable[..., Any]]) -> None:
    _operations[name] = MappingProxyType(operations)
    for namespace in (name, f"array_api_compat.{name}", f"{name}.numpy"):
        for operation, by_namespace in natives.items():
            by_namespace[namespace] = operations.get(operation)


def _load(name: str) -> None:
    """Import the adapter of a name; without one, publish the generic backend."""
    with _lock:
        if name in _loaded:
            return
        entry = _entry_points().get(name)
        if entry is not None:
            try:
                register_backend(_adapter(entry))
            except ImportError as error:
                # Arrays of the library may exist without an adapter; the generic
                # definitions serve them.
                _problems[name] = str(error)
            except (Exception, SystemExit) as error:
                _problems[name] = f"{type(error).__name__}: {error}"
                _publish(name, {})
                reason = _broken(entry, _problems[name])
                _loaded[name] = BrokenBackend(name, reason)
                # Shown again in the error when this backend is requested.
                warnings.warn(f"Backend {name!r}: {reason}.", stacklevel=2)
                return
            else:
                return
        _publish(name, {})
        _loaded[name] = GenericBackend(name)


def _adapter(entry: EntryPoint) -> Any:
    """Import an adapter, which must bear the name that it is registered by."""
    adapter = entry.load()
    adapter_name = getattr(adapter, "name", None)
    if adapter_name != entry.name:
        raise ValueError(
            f"expected its `name` to be {entry.name!r}, got {adapter_name!r}"
        )
    return adapter


def _broken(entry: EntryPoint, error: str, use: str = "loaded") -> str:
    """Return a message that names a broken adapter, with advice."""
    package = "an unknown package"
    if entry.dist is not None:
        package = f"the package {entry.dist.name} {entry.dist.version}"
    return (
        f"its adapter {entry.value!r}, of {package}, cannot be {use} ({error}); "
        "update that package, or uninstall it"
    )


def _entry_points() -> Mapping[str, EntryPoint]:
    return entry_points_of(ENTRY_POINT_GROUP)


def _operations_with_adapters() -> list[str]:
    return [n for n, b in _loaded.items() if not isinstance(b, GenericBackend)]
