"""From an operation's definition to the native one, where the backend has it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from kfac_core.array.backend import native_operation, natives
from kfac_core.array.types import Namespace

P = ParamSpec("P")
R = TypeVar("R")


def dispatched(definition: Callable[P, R], /) -> Callable[P, R]:
    """Let a backend replace an operation by the native one of the same name.

    Parameters
    ----------
    definition : callable
        Function in the pure standard, with the namespace as the keyword ``xp``.  Its name
        is one of `kfac_core.array.backend.OPERATIONS`.  It stays reachable as
        ``__wrapped__``.

    Returns
    -------
    callable
        With the same signature.
    """
    function: Any = definition
    name: str = function.__name__
    by_namespace = natives[name]

    # Without `xp` among the parameters, the options are passed on as they came.
    def operation(*arguments: Any, **options: Any) -> Any:
        xp = options["xp"]
        try:
            native = by_namespace[xp.__name__]
        except KeyError:
            native = native_operation(name, xp)
        if native is not None:
            result = native(*arguments, **options)
            if result is not NotImplemented:
                return result
        return definition(*arguments, **options)

    # Packing arguments takes longer than the rest, and most operations have one or two.
    def of_arrays(x: Any, y: Any = None, /, *, xp: Namespace) -> Any:
        try:
            native = by_namespace[xp.__name__]
        except KeyError:
            native = native_operation(name, xp)
        if native is not None:
            result = native(x, xp=xp) if y is None else native(x, y, xp=xp)
            if result is not NotImplemented:
                return result
        return function(x, xp=xp) if y is None else function(x, y, xp=xp)

    code = function.__code__
    takes_few = code.co_argcount <= 2 and code.co_kwonlyargcount == 1
    wrapper = of_arrays if takes_few else operation
    return cast("Callable[P, R]", functools.wraps(definition)(wrapper))


def is_factorization_failure(error: Exception, /) -> bool:
    """Whether an exception means that a matrix cannot be factorized.

    The standard names no exception, and the libraries' have no common base: NumPy's
    derives from ValueError, PyTorch's from RuntimeError.  Their names agree.
    """
    names = (cls.__name__.lstrip("_") for cls in type(error).__mro__)
    return "LinAlgError" in names
